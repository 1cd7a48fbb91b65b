"""Operations on all else: timers, outbox, dead letters, definitions, documents, retention."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, RunId, WorkflowId
from stanchion.ports.records import DeadLetter, Drift, OutboxRow, Page, Tenant
from stanchion.ports.store import Store
from tests.model.call import LONG_MS, SHORT_MS, Call, Domain
from tests.model.plans import WORKFLOWS
from tests.model.side import Side
from tests.model.world import World

__all__ = [
    "Again",
    "Audit",
    "Bury",
    "Confirm",
    "CountFailure",
    "Defer",
    "DeleteDocument",
    "FireTimers",
    "ListLetters",
    "Purge",
    "PutDocument",
    "PutTenant",
    "PutWorkflow",
    "Replay",
    "Take",
]


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """Send a call once more: one of long ago, or one of the same batch."""

    call: int

    async def bind(self, world: World) -> Call:
        if not world.calls:
            return await Audit().bind(world)
        call = world.calls[max(0, len(world.calls) - 1 - self.call)]
        return dataclasses.replace(call, text=f"again {call}")


# ── Timers and outbox ────────────────────────────────────────────────────────────────────────────


class FireTimers(msgspec.Struct, frozen=True):
    """Turn due timers into inbox entries."""

    async def bind(self, world: World) -> Call:
        one = Call(f"{self} once", lambda side: side.store.fire_timers(limit=1))
        return Call(
            str(self),
            lambda side: side.store.fire_timers(limit=1_000),
            part=None if world.has_steps else one,
            is_alone=world.is_spread,
        )


class Take(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Take the outbox rows that are due."""

    is_short: bool = False

    async def bind(self, world: World) -> Call:
        hold_ms = SHORT_MS if self.is_short else LONG_MS
        return Call(
            str(self),
            lambda side: side.store.take_outbox(limit=1_000, hold_ms=hold_ms),
            Side.taken,
            sets=Domain.OUTBOX if self.is_short else None,
            sees=Domain.OUTBOX,
            is_alone=not world.has_steps,
        )


class Confirm(msgspec.Struct, frozen=True, kw_only=True):
    """Confirm rows that were taken."""

    rows: tuple[int, ...]

    async def bind(self, world: World) -> Call:
        rows = [world.row(pick) for pick in world.together(self.rows)]
        parts = [_confirm(f"{self}[{number}]", [row]) for number, row in enumerate(rows)]
        return dataclasses.replace(_confirm(f"{self} {rows}", rows), parts=parts)


class Defer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Make a row due later."""

    row: int
    is_short: bool = False

    async def bind(self, world: World) -> Call:
        row = world.row(self.row)
        delay_ms = SHORT_MS if self.is_short else LONG_MS
        return Call(
            f"{self} {row}",
            lambda side: side.store.defer_outbox(row, delay_ms=delay_ms),
            sets=Domain.OUTBOX if self.is_short else None,
        )


# ── Dead letters ─────────────────────────────────────────────────────────────────────────────────


class Bury(msgspec.Struct, frozen=True, kw_only=True):
    """Move an inbox entry to the dead letters."""

    run: int
    entry: int

    async def bind(self, world: World) -> Call:
        run_id, name = await _entry(world, self.run, self.entry)
        return Call(
            f"{self} [{run_id} {name}]",
            lambda side: side.store.write_dead_letter(run_id, side.entry_id(name), cause="test"),
            Side.letter,
        )


class CountFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Count a failure of ours to apply an entry."""

    run: int
    entry: int

    async def bind(self, world: World) -> Call:
        run_id, name = await _entry(world, self.run, self.entry)
        return Call(
            f"{self} [{run_id} {name}]",
            lambda side: side.store.count_failure(run_id, side.entry_id(name)),
        )


class ListLetters(msgspec.Struct, frozen=True, kw_only=True):
    """List a tenant's dead letters."""

    tenant: int

    async def bind(self, world: World) -> Call:
        tenant = world.tenants[self.tenant]
        return Call(
            str(self),
            lambda side: side.store.list_dead_letters(tenant),
            letters,
            is_alone=not world.has_steps,
        )


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Put a dead letter back to work, or give it up."""

    letter: int
    is_discard: bool = False

    async def bind(self, world: World) -> Call:
        model = world.pair.model
        known = (await world.model.list_dead_letters(None)).items
        named = [(each.run_id, named.id) for each in known if (named := model.letter(each))]
        run_id, name = named[self.letter % len(named)] if named else (RunId("r"), "job:nobody#1")
        return Call(
            f"{self} [{name}]",
            lambda side: self._settle(side.store, side.letter_id(run_id, name)),
            Side.letter,
        )

    def _settle(self, store: Store, letter_id: str) -> Awaitable[DeadLetter | None]:
        verb = store.discard_dead_letter if self.is_discard else store.replay_dead_letter
        return verb(letter_id, actor="op")


# ── Definitions, tenants, documents ──────────────────────────────────────────────────────────────


class PutWorkflow(msgspec.Struct, frozen=True, kw_only=True):
    """Store a workflow, of a tenant or for all: one of two texts."""

    tenant: int | None
    workflow: str
    text: int

    async def bind(self, world: World) -> Call:
        workflow = WORKFLOWS[WorkflowId(self.workflow)]
        if self.text:
            workflow = replace(workflow, output={"text": self.text})
        if self.tenant is None:
            return Call(str(self), lambda side: side.store.put_shared_workflow(workflow))
        tenant = world.tenants[self.tenant]
        return Call(str(self), lambda side: side.store.put_workflow(tenant, workflow))


class PutTenant(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Configure a tenant. A slow one may begin one job in this hour; one may pin a workflow."""

    tenant: int
    cap: int | None
    is_slow: bool = False
    pin: str | None = None

    async def bind(self, world: World) -> Call:
        tenant = world.tenants[self.tenant]
        config = Tenant(
            self.cap,
            job_rate_per_s=1 / 3_600 if self.is_slow else None,
            workflows={} if self.pin is None else {WorkflowId(self.pin): 1},
        )
        return Call(str(self), lambda side: side.store.put_tenant(tenant, config))


class PutDocument(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Write a document if it is what was read."""

    name: str
    value: int
    read: Literal["whatever", "nothing", "present", "older"]

    async def bind(self, world: World) -> Call:
        known = await world.model.document("kind", self.name)
        revision = 0 if known is None else known.revision
        read = {"whatever": None, "nothing": 0, "present": revision, "older": revision - 1}
        value: JsonObject = {"value": self.value}
        return Call(
            f"{self} [{read[self.read]}]",
            lambda side: side.store.put_document("kind", self.name, value, read=read[self.read]),
        )


class DeleteDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Remove a document."""

    name: str

    async def bind(self, world: World) -> Call:  # noqa: ARG002 - the shape of an operation
        return Call(str(self), lambda side: side.store.delete_document("kind", self.name))


# ── Audit and retention ──────────────────────────────────────────────────────────────────────────


class Audit(msgspec.Struct, frozen=True):
    """Compare slots with runs."""

    async def bind(self, world: World) -> Call:
        async def drifts(side: Side) -> tuple[Drift, ...]:
            return (await side.store.audit_slots(limit=100)).drifts

        return Call(str(self), drifts, is_alone=world.is_spread)


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Remove runs that have finished: all that did, or all but the latest one."""

    is_full: bool

    async def bind(self, world: World) -> Call:
        found = [await world.load(run_id) for run_id in world.runs]
        ends = [each.run.finished_at for each in found if each and each.run.finished_at is not None]
        latest = max(ends, default=world.began_at)
        before = Instant(latest + 1) if self.is_full else latest
        return dataclasses.replace(
            _purge(f"{self} [{before}]", before, 1_000),
            part=None if world.has_steps else _purge(f"{self} once", before, 1),
            is_alone=world.is_spread,
        )


async def _entry(world: World, run: int, entry: int) -> tuple[RunId, str]:
    run_id = world.run_id(run)
    found = await world.load(run_id)
    if found is None or not found.inbox:
        return run_id, "no such entry"
    return run_id, found.inbox[entry % len(found.inbox)].id


def _purge(text: str, before: Instant, limit: int) -> Call:
    return Call(
        text,
        lambda side: side.store.purge(finished_before=before, limit=limit),
        lambda _, count: ("purged",) * count,
    )


def _confirm(text: str, rows: Sequence[OutboxRow]) -> Call:
    return Call(
        text, lambda side: side.store.confirm_outbox(rows), lambda _, __: (None,) * len(rows)
    )


def letters(side: Side, page: Page[DeadLetter]) -> object:
    """The letters, by id: those of one instant may come in any order."""
    named = [letter for each in page.items if (letter := side.letter(each)) is not None]
    return sorted(named, key=lambda letter: letter.id)
