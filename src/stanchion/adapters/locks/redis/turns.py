"""Locks in Redis that can be waited for in line.

A line is two sorted sets beside the lock's keys, in the same slot, and goes by itself with the last
ticket. Whoever lets go of a name publishes to the first in line, in the same step (``bells``).
"""

from __future__ import annotations

from functools import cache
from typing import Final

from stanchion.adapters.locks.redis.bells import Bells
from stanchion.adapters.locks.redis.locks import RedisLocks, slots
from stanchion.adapters.redis.client import RedisClient, RedisRequest, Script
from stanchion.adapters.system import SystemEntropy
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.locks import AcquireAnswer, Granted
from stanchion.ports.turns import Place

__all__ = ["RedisTurns"]

_IN_TURN: Final = {"acquire": "acquire_in_turn", "release": "release_in_turn"}
_OF_THE_NAME: Final = frozenset({"queue", "tickets"})
"""Keys that every name has for itself, while somebody waits for it."""


class RedisTurns(RedisLocks):
    """See ``ports.turns.Turns``. Open it with ``RedisTurns.open``."""

    def __init__(self, client: RedisClient, namespace: str, warnings: tuple[str, ...]) -> None:
        super().__init__(client, namespace, warnings)
        self._channel = f"{namespace}:locks:bell:{SystemEntropy().token()}"
        self._bells = Bells(client, slots()[0], self._channel)

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        answer = await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor)
        if isinstance(answer, Granted):
            self._bells.forget(token)
        return answer

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        # A bell is worth a part of the wait, and no more: without one, whoever waits looks.
        await self._bells.expect(token, at_most_s=within_ms / 4000)
        reply = await self._ask("join", name, token, self._channel, ticket_ms, within_ms=within_ms)
        match reply:
            case [int(ahead), int(look_again_in_ms)]:
                return Place(ahead, look_again_in_ms)
            case other:
                raise BackendCorrupt(f"join answered {other!r}")

    async def bell(
        self,
        name: str,  # noqa: ARG002 - the token says enough
        token: str,
        *,
        at_most_ms: int,
    ) -> bool:
        return await self._bells.wait(token, at_most_s=at_most_ms / 1000)

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        self._bells.forget(token)
        await self._ask("leave", name, token, self._channel, within_ms=within_ms)

    async def close(self) -> None:
        await self._bells.close()
        await super().close()

    def _step(self, name: str, shard: int, *words: str | int) -> RedisRequest:
        script = _script(_IN_TURN.get(name, name))
        root = self._root(shard)
        keys = [
            f"{root}{key}:{words[0]}" if key in _OF_THE_NAME else root + key
            for key in script.key_names
        ]
        packed = script.call(keys, (*words, self._channel) if name == "acquire" else words)
        return RedisRequest(slots()[shard], packed, script, is_repeatable=name != "release")


@cache
def _script(name: str) -> Script:
    return Script.read(__package__, name)
