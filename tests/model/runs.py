"""Operations on runs: the gate, the commit, the inbox."""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.admission import fingerprint
from stanchion.core.events import Approved, CancelRequested, Event, Rejected, Started
from stanchion.core.model import (
    Run,
    RunId,
    RunStatus,
    Stamp,
    WorkflowId,
    WorkflowSource,
    shared_name,
)
from stanchion.core.run import decide_all, evolve, items_to_read
from stanchion.core.transition import Transition
from stanchion.ports.records import Admission, Commit, RunFilter
from tests.model.call import LONG_MS, Call, Domain
from tests.model.plans import PLANS, REVIEW
from tests.model.side import Side
from tests.model.world import World

__all__ = ["Active", "Admit", "Advance", "ListRuns", "Look", "Post"]


class Admit(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Begin a run. ``knows``: the version of its workflow, as far as the caller knows."""

    tenant: int
    workflow: str
    key: int | None = None
    say: int = 0
    knows: Literal["newest", "other"] | None = None
    takes_slot: bool = True
    is_rate_limited: bool = False
    past: bool = False

    async def bind(self, world: World) -> Call:
        tenant, workflow_id = world.tenants[self.tenant], WorkflowId(self.workflow)
        now = world.instant(past=self.past)
        pending = Run(
            id=world.new_run_id(tenant),
            tenant=tenant,
            workflow_id=workflow_id,
            workflow_version=1,
            input={"say": self.say, "items": ["a", "b"]},
            # Sometimes of the same instant: then the id decides the order in lists.
            created_at=world.began_at if self.say else now,
            holds_slot=self.takes_slot,
        )
        transition = decide_all(PLANS[workflow_id], pending, (Started(),), now)
        stored = await world.model.workflow(tenant, workflow_id)
        newest = 1 if stored is None else stored.version
        version = newest if self.knows == "newest" else newest - 1 or 99
        definitions = {} if self.knows is None else {workflow_id: version}
        if definitions and stored is not None and stored.source is WorkflowSource.SHARED:
            definitions = {workflow_id: 0, shared_name(workflow_id): version}
            pending = replace(pending, workflow_source=WorkflowSource.SHARED)
        admission = Admission(
            run=replace(evolve(pending, transition), stamp=Stamp(1, f"nonce-{world.number()}")),
            transition=transition,
            key=None if self.key is None else f"key-{self.key}",
            fingerprint=fingerprint(workflow_id, pending.input),
            definitions=definitions,
            is_rate_limited=self.is_rate_limited,
        )
        return Call(
            f"{self} [{pending.id}]",
            lambda side: side.store.admit(admission, within_ms=LONG_MS),
            sees=Domain.KEYS if world.keys_are_short and self.key is not None else None,
        )


class Advance(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Decide on a run's inbox, and on one event more, and commit. A late writer read it earlier."""

    run: int
    also: Literal["cancel", "approve", "reject"] | None = None
    fence: int | None = None
    is_late: bool = False
    past: bool = False

    async def bind(self, world: World) -> Call:
        run_id = world.run_id(self.run)
        commit = world.commits.get(run_id) if self.is_late else None
        if commit is None:
            commit = await self._decide(world, run_id)
        commit = replace(commit, nonce=f"nonce-{world.number()}", fence=self.fence)
        world.commits[run_id] = commit
        return Call(
            f"{self} [{run_id} {commit.read} -> {commit.nonce}]",
            lambda side: side.store.commit(_for(side, commit)),
            sets=Domain.KEYS if world.keys_are_short else None,
        )

    async def _decide(self, world: World, run_id: RunId) -> Commit:
        found = await world.load(run_id)
        if found is None:
            return Commit(
                run_id=run_id,
                transition=Transition(status=RunStatus.RUNNING),
                read=Stamp(1, "nonce"),
                nonce="",
                fence=None,
            )
        run, inbox = found.run, found.inbox
        events = [*(entry.event for entry in inbox), *_event(self.also)]
        items = await world.model.load_items(
            run_id, items_to_read(PLANS[run.workflow_id], run, events)
        )
        now = world.instant(past=self.past)
        transition = decide_all(PLANS[run.workflow_id], replace(run, items=items), events, now)
        return Commit(
            run_id=run_id,
            transition=transition,
            read=run.stamp,
            nonce="",
            fence=None,
            applied=tuple(entry.id for entry in inbox),
        )


class Post(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Put an event into a run's inbox."""

    run: int
    event: Literal["cancel", "approve", "reject"]
    entry: int

    async def bind(self, world: World) -> Call:
        run_id, (event,) = world.run_id(self.run), _event(self.event)
        return Call(
            f"{self} [{run_id}]",
            lambda side: side.store.post(run_id, event, entry_id=f"entry-{self.entry}"),
        )


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Load a run."""

    run: int

    async def bind(self, world: World) -> Call:
        run_id = world.run_id(self.run)
        return Call(f"{self} [{run_id}]", lambda side: side.store.load(run_id), Side.loaded)


class ListRuns(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """List a tenant's runs."""

    tenant: int
    workflow: str | None = None

    async def bind(self, world: World) -> Call:
        tenant = world.tenants[self.tenant]
        only = RunFilter(workflow_id=None if self.workflow is None else WorkflowId(self.workflow))
        return Call(
            str(self),
            lambda side: side.store.list_runs(tenant, only=only),
            is_alone=not world.has_steps,
        )


class Active(msgspec.Struct, frozen=True, kw_only=True):
    """Ask how many slots a tenant uses."""

    tenant: int

    async def bind(self, world: World) -> Call:
        tenant = world.tenants[self.tenant]
        return Call(str(self), lambda side: side.store.active_runs(tenant))


def _event(name: Literal["cancel", "approve", "reject"] | None) -> tuple[Event, ...]:
    match name:
        case None:
            return ()
        case "cancel":
            return (CancelRequested(actor="somebody"),)
        case "approve":
            return (Approved(step_id=REVIEW),)
        case "reject":
            return (Rejected(step_id=REVIEW),)
        case _:
            assert_never(name)


def _for(side: Side, commit: Commit) -> Commit:
    return replace(commit, applied=tuple(map(side.entry_id, commit.applied)))
