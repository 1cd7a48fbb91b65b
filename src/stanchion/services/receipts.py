"""Receipts of refusals: collected in memory, written together, found again for a day.

A refusal must not cost a write of its own: during a storm of callers there are thousands a second.
``note`` only appends to a list. Once a second the receipts of each tenant are written as one batch.
While the store is unavailable they wait here, the newest thousand of each tenant; they are lost
with the process. What did not fit is counted, and the next receipt says how many.

A batch that was sent without an answer is sent again as it was, under the same id: the store writes
it once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from stanchion.core.model import TenantId
from stanchion.core.receipts import DAY_MS, KEPT_MAX, Receipt, ReceiptFilter
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.records import BadCursor, Page
from stanchion.ports.store import Receipts
from stanchion.services.log import OutageLogger

EVERY_S: Final = 1.0
RETRY_S: Final = 0.5
WRITE_MAX_S: Final = 1.0
"""A write is given up in time to be repeated within two seconds of the store's return."""
CLOSE_MAX_S: Final = 0.5
WAITING_MAX: Final = 50_000
"""Receipts of all tenants that wait in memory."""
_COMPARED_MAX: Final = 1_000
"""Tenants among which the one with the most receipts is found, if one has to be left out."""
_AT_ONCE: Final = 8
"""Batches that are written at the same time."""
_BATCHES_READ: Final = 20
_LOOKED_AT_MIN: Final = 2 * KEPT_MAX
_LOOKED_AT_FACTOR: Final = 10


@dataclass(slots=True)
class _Waiting:
    """One tenant's receipts that are not written yet."""

    receipts: deque[Receipt] = field(default_factory=deque)
    left_out: int = 0
    sent: tuple[str, tuple[Receipt, ...]] | None = None
    """A batch that was sent without an answer, and its id."""


class ReceiptService:
    """The receipts of this replica's refusals, and the list of those of all replicas."""

    def __init__(
        self, store: Receipts, *, clock: Clock, entropy: Entropy, registry: CollectorRegistry
    ) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._waiting: dict[TenantId, _Waiting] = {}
        self._count = 0
        """Receipts in ``_waiting``, without those that were sent."""
        self._writing = asyncio.Lock()
        self._outage = OutageLogger("receipts_write_failed", "receipts_write_recovered")
        self._left_out = Counter(
            "stanchion_receipts_left_out",
            "Refusals without a receipt, because there were too many at a time.",
            registry=registry,
        )

    @property
    def waiting(self) -> int:
        """How many receipts wait to be written."""
        return self._count

    def note(self, receipt: Receipt) -> None:
        """Collect a receipt. Of too many, the oldest is left out."""
        tenant = receipt.tenant
        waiting = self._waiting.get(tenant)
        if waiting is None:
            waiting = self._waiting[tenant] = _Waiting()
        waiting.receipts.append(receipt)
        self._count += 1
        if len(waiting.receipts) > KEPT_MAX:
            self._leave_out(tenant)
        elif self._count > WAITING_MAX:
            # This one has a receipt at least. Others may only have a batch that was sent.
            some = (tenant, *islice(self._waiting, _COMPARED_MAX))
            self._leave_out(max(some, key=lambda each: len(self._waiting[each].receipts)))

    async def run(self) -> None:
        """Write the collected receipts every second, until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S if await self.write() else RETRY_S)

    async def write(self) -> bool:
        """Write one batch for each tenant; ``False`` if the store did not take all of them.

        A tenant whose batch fails, for example because its shard is down, holds up no others.
        """
        async with self._writing:
            return await self._write_all()

    async def _write_all(self) -> bool:
        # Those that failed before come last, the one that failed last after all others.
        tenants = sorted(self._waiting, key=lambda each: self._waiting[each].sent is not None)
        failed: BaseException | None = None
        for first in range(0, len(tenants), _AT_ONCE):
            some = tenants[first : first + _AT_ONCE]
            writes = (self._write(tenant) for tenant in some)
            answers = await asyncio.gather(*writes, return_exceptions=True)
            errors = [each for each in answers if isinstance(each, BaseException)]
            for tenant, answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    self._waiting[tenant] = self._waiting.pop(tenant)
            failed = failed or next(iter(errors), None)
            if len(errors) == len(some):
                break  # the store may be down: the others would wait for nothing
        if failed is not None:
            self._outage.failed(failed)
            return False
        self._outage.worked()
        return True

    async def close(self) -> None:
        """Write what is left, within a bounded time."""
        try:
            async with asyncio.timeout(CLOSE_MAX_S):
                await self.write()
        except TimeoutError:
            return

    async def list(
        self, tenant: TenantId | None, only: ReceiptFilter, *, cursor: str | None, limit: int
    ) -> Page[Receipt]:
        """Receipts that fit, of one tenant or all, newest batch first.

        A page looks at ten times ``limit`` receipts, and at 2,000 at least: those of one tenant are
        found with the first page. A cursor names a batch, how many receipts of it are done, and how
        many of the tenant were looked at before it.
        """
        place, done, before = _read_cursor(cursor)
        looked_at_max = max(_LOOKED_AT_MIN, limit * _LOOKED_AT_FACTOR)
        oldest_at = self._clock.now() - DAY_MS
        found: list[Receipt] = []
        looked_at = 0
        while True:
            batches = await self._store.receipt_batches(
                tenant, at_most=place, limit=_BATCHES_READ + 1
            )
            for batch in batches[:_BATCHES_READ]:
                done = done if batch.place == place else 0
                newest_first = batch.receipts[::-1]
                for number in range(done, len(newest_first)):
                    if tenant is not None and before + looked_at >= KEPT_MAX:
                        return Page(tuple(found))
                    if len(found) == limit or looked_at == looked_at_max:
                        onward = f"{batch.place}~{number}~{before + looked_at}"
                        return Page(tuple(found), onward)
                    looked_at += 1
                    receipt = newest_first[number]
                    if receipt.at >= oldest_at and only.fits(receipt):
                        found.append(receipt)
            if len(batches) <= _BATCHES_READ:
                return Page(tuple(found))
            place, done = batches[_BATCHES_READ].place, 0

    async def _write(self, tenant: TenantId) -> None:
        waiting = self._waiting.get(tenant)
        if waiting is None:
            return  # its only receipt was left out meanwhile
        if waiting.sent is None:
            batch = tuple(waiting.receipts)
            if waiting.left_out:
                batch = (replace(batch[0], left_out=waiting.left_out), *batch[1:])
            self._count -= len(batch)
            waiting.receipts, waiting.left_out = deque(), 0
            waiting.sent = self._entropy.token(), batch
        batch_id, batch = waiting.sent
        try:
            async with asyncio.timeout(WRITE_MAX_S):
                await self._store.put_receipts(tenant, batch, batch_id=batch_id)
        except TimeoutError:
            raise BackendTimeout(f"no answer within {WRITE_MAX_S} s") from None
        waiting.sent = None
        if not waiting.receipts:
            del self._waiting[tenant]

    def _leave_out(self, tenant: TenantId) -> None:
        """Leave out the oldest receipt of a tenant, and the tenant if it had no other."""
        waiting = self._waiting[tenant]
        waiting.receipts.popleft()
        waiting.left_out += 1
        self._count -= 1
        self._left_out.inc()
        if not waiting.receipts and waiting.sent is None:
            del self._waiting[tenant]


def _read_cursor(cursor: str | None) -> tuple[str | None, int, int]:
    if cursor is None:
        return None, 0, 0
    place, *numbers = cursor.split("~")
    match numbers:
        case [done, before] if done.isdecimal() and before.isdecimal():
            return place, int(done), int(before)
        case _:
            raise BadCursor(cursor)
