"""Locks in Redis: names that one holder at a time has, for a while.

Names are spread over 64 shards, each the hash tag of its keys, so that a cluster keeps what belongs
together on one server. A shard has three keys, however many names there ever were:

    held     hash         who has a name, under which fence
    ends     sorted set   the names that are held, by the end of their term
    fence    string       the highest fence that was ever given out

The next fence is above the highest one of the whole shard. So fences rise for every name, across
release, expiry and any length of time, without a memory of every name there was.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Final, Self

from stanchion.adapters.redis.address import checked_namespace, read_url
from stanchion.adapters.redis.client import RedisClient, RedisRequest, Script, ask_in_time
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.startup import claim_format, examine
from stanchion.adapters.redis.topology import slot_of
from stanchion.adapters.system import SystemEntropy
from stanchion.core.model import Instant
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.locks import (
    AcquireAnswer,
    Granted,
    Held,
    LockView,
    NotOwned,
    Released,
    Renewed,
    TooLate,
)

__all__ = ["RedisLocks", "slots"]

_SHARDS: Final = 64
_FORMAT: Final = f"1 with {_SHARDS} shards"
_FORMAT_TAG: Final = "common"
_FENCE_MAX: Final = 2**53 - 2**40
"""Lua's numbers are exact below 2**53. The clock gets there in the year 2255."""
_log = logging.getLogger(__name__)


class RedisLocks:
    """See ``ports.locks.Locks``. Open it with ``RedisLocks.open``."""

    def __init__(self, client: RedisClient, namespace: str, warnings: tuple[str, ...]) -> None:
        self._client = client
        self._namespace = namespace
        self.warnings = warnings
        """What an operator should know about the servers' settings."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        namespace: str = "stanchion",
        timeout_s: float = 2.0,
        entropy: Entropy | None = None,
    ) -> Self:
        """Connect and look at the servers. Raises ``BackendError``."""
        client = RedisClient(read_url(url), timeout_s=timeout_s, entropy=entropy or SystemEntropy())
        format_key = f"{checked_namespace(namespace)}:locks:{{{_FORMAT_TAG}}}:format"
        try:
            warnings = await examine(client)
            await claim_format(client, format_key, _FORMAT_TAG, _FORMAT)
        except BaseException:
            await client.close()
            raise
        for warning in warnings:
            _log.warning("lock_settings", extra={"fields": {"warning": warning}})
        return cls(client, namespace, warnings)

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        if not 0 <= floor < _FENCE_MAX:
            raise ValueError(f"a floor is from 0 to {_FENCE_MAX}, not {floor}")

        def make(not_after: Instant) -> RedisRequest:
            return self._step("acquire", _shard(name), name, token, ttl_ms, not_after, floor)

        slot = slots()[_shard(name)]
        match await ask_in_time(self._client, slot, within_ms, make):
            case [b"granted", fence]:
                return Granted(int(fence))
            case [b"held", expires_in_ms]:
                return Held(expires_in_ms)
            case [b"too_late"]:
                return TooLate()
            case other:
                raise BackendCorrupt(f"acquire answered {other!r}")

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        is_ours = await self._ask("renew", name, token, ttl_ms, within_ms=within_ms)
        return Renewed() if is_ours else NotOwned()

    async def release(self, name: str, token: str, *, within_ms: int) -> Released | NotOwned:
        is_ours = await self._ask("release", name, token, within_ms=within_ms)
        return Released() if is_ours else NotOwned()

    async def inspect(self, name: str) -> LockView | None:
        views = _views(await self._ask("list", name, "name"))
        return views[0] if views else None

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        replies = await self._client.ask_all(
            [self._step("list", shard, prefix, "prefix") for shard in range(_SHARDS)],
            deadline=self._client.deadline(),
        )
        views = [view for reply in replies for view in _views(reply)]
        return sorted(views, key=lambda view: view.name)[:limit]

    async def force_release(self, name: str) -> bool:
        return bool(await self._ask("release", name, ""))

    async def ping(self) -> None:
        await self._client.ping(
            {slot: f"{self._root(shard)}mark" for shard, slot in enumerate(slots())}
        )

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self, script: str, name: str, *words: str | int, within_ms: int | None = None
    ) -> Reply:
        deadline = self._client.deadline(None if within_ms is None else within_ms / 1000)
        return await self._client.ask(
            self._step(script, _shard(name), name, *words), deadline=deadline
        )

    def _step(self, name: str, shard: int, *words: str | int) -> RedisRequest:
        script = _script(name)
        root = self._root(shard)
        packed = script.call([root + key for key in script.key_names], words)
        # A release that is asked again after a lost answer would say that the name is not ours.
        return RedisRequest(slots()[shard], packed, script, is_repeatable=name != "release")

    def _root(self, shard: int) -> str:
        """How all keys of a shard begin."""
        return f"{self._namespace}:locks:{{{shard:02x}}}:"


def _shard(name: str) -> int:
    return zlib.crc32(name.encode()) % _SHARDS


@cache
def slots() -> tuple[int, ...]:
    """The slot of every shard."""
    return tuple(slot_of(f"{shard:02x}") for shard in range(_SHARDS))


@cache
def _script(name: str) -> Script:
    return Script.read(__package__, name)


def _views(reply: Reply) -> list[LockView]:
    return [
        LockView(name.decode(), int(fence), expires_in_ms)
        for name, fence, expires_in_ms in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
    ]
