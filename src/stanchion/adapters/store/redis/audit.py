"""The audit log in Redis: entries, written by the script that makes the change.

An entry is in the shard of its change: in the log of the shard and, if it has a tenant, in that of
the tenant. Changes of documents are in a place of their own. A list merges these logs by time.

Receipts of refusals are in the shard of their tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis import decode, encode
from stanchion.adapters.store.redis.encode import sized
from stanchion.adapters.store.redis.shards import ALL_SHARDS, Sharded, Shards
from stanchion.core.audit import EVERY_ENTRY, LOOKED_AT_FACTOR, AuditEntry, AuditFilter
from stanchion.core.model import TenantId, shard_of_tenant
from stanchion.core.receipts import DAY_MS, KEPT_MAX, Receipt, ReceiptBatch
from stanchion.ports.records import Page

_LIST: Final = "audit"
_RECEIPTS: Final = "receipts"
_PLACE_CHARS: Final = 32
"""The place of a batch of receipts: time and number. Its id follows."""
_FIRST_READ: Final = 8
_READ: Final = 100
"""Entries of one log that are read at a time."""


class RedisAuditLog(Sharded):
    """See ``ports.store.AuditLog``."""

    async def add_audit(self, entry: AuditEntry, *, once: str | None = None) -> bool:
        keys = self._shards.keys
        step = self._shards.step_at(
            "add_audit",
            keys.common_slot,
            (*keys.common_audit(entry.tenant), keys.audit_once),
            encode.pack_audit(entry, self._shards.audit_ttl_ms),
            once or "",
            is_repeatable=False,
        )
        return bool(await self._shards.ask(step))

    async def list_audit(
        self, only: AuditFilter = EVERY_ENTRY, *, cursor: str | None = None, limit: int = 100
    ) -> Page[AuditEntry]:
        deadline = self._shards.client.deadline()
        now = await self._shards.client.read_clock(self._shards.keys.common_slot, deadline=deadline)
        since = max(only.since or 0, now - self._shards.audit_ttl_ms)
        before = (
            None if cursor is None else _Place(*read_cursor(_LIST, cursor, tuple[int, int, int]))
        )
        if only.until is not None:
            until = _Place(only.until, 0, 0)
            before = until if before is None else min(before, until)
        logs = [
            _Log(self._shards, *where, index, since, before)
            for index, where in enumerate(self._places(only.tenant))
        ]
        found: list[AuditEntry] = []
        last: _Place | None = None
        looked_at = 0
        async for place, entry in _merged(self._shards, logs, deadline):
            if len(found) == limit or looked_at == limit * LOOKED_AT_FACTOR:
                assert last is not None
                return Page(tuple(found), write_cursor(_LIST, *last))
            looked_at += 1
            last = place
            if only.fits(entry):
                found.append(entry)
        return Page(tuple(found))

    def _places(self, tenant: TenantId | None) -> list[tuple[int, str]]:
        """The slots and keys of the logs to read."""
        keys = self._shards.keys
        every, own = keys.common_audit(tenant)
        if tenant is not None:
            shard = shard_of_tenant(tenant)
            return [
                (keys.slots[shard], keys.of_tenant(tenant, "audit_log_of")),
                (keys.common_slot, own),
            ]
        of_shards = [(keys.slots[shard], keys.of_shard(shard, "audit_log")) for shard in ALL_SHARDS]
        return [*of_shards, (keys.common_slot, every)]


class RedisReceipts(Sharded):
    """See ``ports.store.Receipts``."""

    async def put_receipts(
        self, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
    ) -> None:
        words = (tenant, batch_id, len(receipts), encode.to_json(receipts), KEPT_MAX, DAY_MS)
        await self._shards.ask(self._shards.step("put_receipts", shard_of_tenant(tenant), *words))

    async def receipt_batches(
        self, tenant: TenantId | None, *, at_most: str | None = None, limit: int = 20
    ) -> tuple[ReceiptBatch, ...]:
        deadline = self._shards.client.deadline()
        last = None if at_most is None else read_cursor(_RECEIPTS, at_most, tuple[str, int])
        shards = ALL_SHARDS if tenant is None else [shard_of_tenant(tenant)]
        prefix = "" if tenant is None else sized(tenant)
        index = "refused" if tenant is None else "refused_of"
        replies = await self._shards.ask_each(
            lambda shard: self._shards.command(
                shard,
                "ZREVRANGEBYLEX",
                self._shards.keys.of_shard(shard, index),
                *_range(prefix, last, shard),
                *("LIMIT", 0, limit),
            ),
            deadline,
            shards=shards,
        )
        places = sorted(
            (
                (entry.decode().removeprefix(prefix), shard)
                for shard, reply in zip(shards, replies, strict=True)
                for entry in reply
            ),
            reverse=True,
        )[:limit]
        packed = await self._shards.ask_all(
            [
                self._shards.command(
                    shard,
                    *("HGET", self._shards.keys.of_shard(shard, "receipts"), place[_PLACE_CHARS:]),
                )
                for place, shard in places
            ],
            deadline,
        )
        # A batch may have been removed since its place was read.
        return tuple(
            ReceiptBatch(write_cursor(_RECEIPTS, place, shard), decode.read_receipts(each))
            for (place, shard), each in zip(places, packed, strict=True)
            if each is not None
        )


def _range(prefix: str, last: tuple[str, int] | None, shard: int) -> tuple[bytes, str]:
    """The range of places up to ``last``. Of the same place, lower shards come later."""
    if last is None:
        return b"(" + prefix.encode() + b"\xff", f"[{prefix}"
    bound = "[" if shard <= last[1] else "("
    return f"{bound}{prefix}{last[0]}".encode(), f"[{prefix}"


class _Place(NamedTuple):
    """The place of an entry in the merged list: its stream id, and the index of its log."""

    at: int
    number: int
    log: int


class _Log:
    """One log, read backwards."""

    def __init__(
        self, shards: Shards, slot: int, key: str, index: int, since: int, before: _Place | None
    ) -> None:
        self._shards = shards
        self._slot = slot
        self._key = key
        self._index = index
        self._oldest = f"{since}-0"
        self._newest = "+"
        if before is not None:
            # At the same id, logs with a lower index come later.
            bound = "" if index < before.log else "("
            self._newest = f"{bound}{before.at}-{before.number}"
        self._count = _FIRST_READ
        self.entries: list[tuple[_Place, AuditEntry]] = []
        """The entries that were read, the newest last."""
        self.is_done = False

    def request(self) -> RedisRequest:
        """The request for the next entries."""
        words = (self._newest, self._oldest, "COUNT", self._count)
        return RedisRequest(self._slot, pack("XREVRANGE", self._key, *words))

    def take(self, reply: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Take over the reply to the request."""
        self.is_done = len(reply) < self._count
        for stream_id, fields in reply:
            at, number = map(int, stream_id.split(b"-"))
            self._newest = f"({at}-{number}"
            self.entries.append((_Place(at, number, self._index), decode.read_audit(at, fields)))
        self.entries.reverse()
        self._count = _READ


async def _merged(
    shards: Shards, logs: Sequence[_Log], deadline: float
) -> AsyncIterator[tuple[_Place, AuditEntry]]:
    """The entries of all logs, newest first."""
    while True:
        empty = [log for log in logs if not log.entries and not log.is_done]
        replies = await shards.ask_all([log.request() for log in empty], deadline) if empty else []
        for log, reply in zip(empty, replies, strict=True):
            log.take(reply)
        some = [log for log in logs if log.entries]
        if not some:
            return
        yield max(some, key=lambda log: log.entries[-1][0]).entries.pop()
