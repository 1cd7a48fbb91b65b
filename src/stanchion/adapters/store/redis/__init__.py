"""The store in Redis, Valkey or a cluster of either. See ``store``."""

from stanchion.adapters.store.redis.store import RedisStore

__all__ = ["RedisStore"]
