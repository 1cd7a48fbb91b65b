"""Locks in Redis: a name has one holder at a time, for a limited time.

Names are spread over 64 shards. The shard is the hash tag of its keys, so that a cluster keeps them
on one server. A shard has four keys, however many names there ever were:

    held     hash         who holds a name, under which fence, since when, with how many renewals
    ends     sorted set   the names that are held, by the end of their term
    fence    string       the highest fence that was ever given out
    notes    hash         notes of changes by hand that are not recorded yet

The next fence is above the highest of the whole shard. So fences rise for every name, across
release, expiry and any length of time, without a record of every name there ever was.

``RedisTurns`` adds queues: two sorted sets beside the keys of the lock, in the same slot, which are
gone with the last ticket. A release publishes to the first waiter in the same step (``bells``).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Final, Self

import msgspec

from stanchion.adapters.locks.redis.bells import LockBells
from stanchion.adapters.redis.address import checked_namespace, read_url
from stanchion.adapters.redis.client import RedisClient, RedisRequest, Script, ask_in_time
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.node import pack
from stanchion.adapters.redis.startup import claim_format, examine
from stanchion.adapters.redis.topology import slot_of
from stanchion.adapters.system import SystemEntropy
from stanchion.core.model import Instant
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendCorrupt
from stanchion.ports.locks import (
    AcquireAnswer,
    AcquireTooLate,
    Granted,
    Held,
    LockNote,
    LockReleased,
    LockView,
    NotOwned,
    Renewed,
    holder_of,
)
from stanchion.ports.turns import Place

_SHARDS: Final = 64
_FORMAT: Final = f"1 with {_SHARDS} shards"
_FORMAT_TAG: Final = "common"
_FENCE_MAX: Final = 2**53 - 2**40
"""Numbers in Lua are exact below 2**53. The clock reaches that in the year 2255."""
_NOT_REPEATABLE: Final = frozenset({"release", "release_by_hand"})
_log = logging.getLogger(__name__)


class RedisLocks:
    """See ``ports.locks.Locks``. Open it with ``RedisLocks.open``."""

    is_local = False

    def __init__(self, client: RedisClient, namespace: str, warnings: tuple[str, ...]) -> None:
        self._client = client
        self._namespace = namespace
        self.warnings = warnings
        """Warnings about the settings of the servers."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        namespace: str = "stanchion",
        timeout_s: float = 2.0,
        entropy: Entropy | None = None,
    ) -> Self:
        """Connect and check the servers. Raises ``BackendError``."""
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
        return _granted(await ask_in_time(self._client, slot, within_ms, make))

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        is_ours = await self._ask("renew", name, token, ttl_ms, within_ms=within_ms)
        return Renewed() if is_ours else NotOwned()

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        is_ours = await self._ask("release", name, token, within_ms=within_ms)
        return LockReleased() if is_ours else NotOwned()

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

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        def make(not_after: Instant) -> RedisRequest:
            words = (name, token, ttl_ms, not_after, 0, note.id, note.text)
            return self._step("hold", _shard(name), *words)

        slot = slots()[_shard(name)]
        return _granted(await ask_in_time(self._client, slot, within_ms, make))

    async def force_release(self, name: str) -> bool:
        return bool(await self._ask("release", name, ""))

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        return bool(await self._ask("release_by_hand", name, "", note.id, note.text))

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        replies = await self._client.ask_all(
            [
                RedisRequest(slots()[shard], pack("HGETALL", f"{self._root(shard)}notes"))
                for shard in range(_SHARDS)
            ],
            deadline=self._client.deadline(),
        )
        found = [
            _note(note_id, packed)
            for reply in replies
            for note_id, packed in zip(reply[::2], reply[1::2], strict=True)
        ]
        return found[:limit]

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        await self._client.ask_all(
            [
                RedisRequest(slots()[shard], pack("HDEL", f"{self._root(shard)}notes", note.id))
                for note in notes
                for shard in [_shard(note.name)]
            ],
            deadline=self._client.deadline(),
        )

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
        # A release that is repeated after a lost answer would return ``NotOwned``.
        return RedisRequest(
            slots()[shard], packed, script, is_repeatable=name not in _NOT_REPEATABLE
        )

    def _root(self, shard: int) -> str:
        """The prefix of all keys of a shard."""
        return f"{self._namespace}:locks:{{{shard:02x}}}:"


def _granted(reply: Reply) -> AcquireAnswer:
    match reply:
        case [b"granted", fence]:
            return Granted(int(fence))
        case [b"held", expires_in_ms]:
            return Held(expires_in_ms)
        case [b"too_late"]:
            return AcquireTooLate()
        case other:
            raise BackendCorrupt(f"acquire answered {other!r}")


def _note(note_id: bytes, packed: bytes) -> LockNote:
    try:
        name, text, fence = _notes_decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise BackendCorrupt(f"a note cannot be read ({error})") from error
    return LockNote(note_id.decode(), name, text, int(fence))


_notes_decoder: Final = msgspec.msgpack.Decoder(tuple[str, str, str])


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
    rows = [reply[at : at + 6] for at in range(0, len(reply), 6)]
    return [
        LockView(
            name.decode(),
            int(fence),
            expires_in_ms,
            holder_of(token.decode()),
            Instant(since) if isinstance(since, int) else None,
            renewals,
        )
        for name, token, fence, expires_in_ms, since, renewals in rows
    ]


_IN_TURN: Final = {"acquire": "acquire_in_turn", "release": "release_in_turn"}
_OF_THE_NAME: Final = frozenset({"queue", "tickets"})
"""Keys of a single name, which exist while there are waiters for it."""


class RedisTurns(RedisLocks):
    """See ``ports.turns.Turns``. Open it with ``RedisTurns.open``."""

    def __init__(self, client: RedisClient, namespace: str, warnings: tuple[str, ...]) -> None:
        super().__init__(client, namespace, warnings)
        self._channel = f"{namespace}:locks:bell:{SystemEntropy().token()}"
        self._bells = LockBells(client, slots()[0], self._channel)

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        answer = await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor)
        if isinstance(answer, Granted):
            self._bells.forget(token)
        return answer

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        # Wait for the subscription only for a part of the time: without a bell, waiters poll.
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
        return RedisRequest(
            slots()[shard], packed, script, is_repeatable=name not in _NOT_REPEATABLE
        )
