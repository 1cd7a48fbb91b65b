"""Locks in Redis, Valkey or a cluster of either. See ``locks``."""

from stanchion.adapters.locks.redis.locks import RedisLocks

__all__ = ["RedisLocks"]
