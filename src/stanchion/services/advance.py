"""Advance: the one path on which a run changes after it was admitted.

    hold the run's lease → load run and inbox → decide on all of it → commit → ring the bells

Results, timers, approvals, cancels and the reconciler all put an event into the inbox and then call
``advance``. A caller that finds the run being advanced in this process joins that task, which reads
the inbox once more before it releases the lease; so many events of one run cost one hold.

No event is lost. It stays in the inbox, and its outbox row in the store, until the commit that
applies it; so an answer other than ``Advanced`` means that the run is advanced later.

There are three kinds of failure. *RunBusy*: another replica holds the run's lease. *PutOff*: a
backend is unavailable, or policy says to wait for the lock store. *AdvanceFailed*: our own handling
failed; only this counts against the entry's poison budget. When the budget is spent, the entry
becomes a dead letter with its cause, and can be replayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, assert_never

import msgspec

from stanchion import telemetry
from stanchion.core.lease import LeaseLost, LeaseOverride
from stanchion.core.model import Risk, Run, RunId, RunStatus, TenantId
from stanchion.core.plan import Plan
from stanchion.core.run import evolve, items_to_read, revokes_jobs
from stanchion.core.transition import DispatchJob, Transition
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.records import (
    Commit,
    CommitConflict,
    Committed,
    Gone,
    InboxEntry,
    Loaded,
    StaleFence,
)
from stanchion.services.context import ReplicaContext, Rules
from stanchion.services.lease_events import StaleWrite
from stanchion.services.leasing import LeaseContended, LeaseRefused, Leasing
from stanchion.services.log import log_event
from stanchion.services.plans import Plans
from stanchion.services.renewal import Lease
from stanchion.services.work import Decider

__all__ = [
    "AdvanceFailed",
    "Advanced",
    "Advancer",
    "DeadLettered",
    "Outcome",
    "PutOff",
    "RunBusy",
    "RunMissing",
]

TRIES_MAX: Final = 20
"""Conflicts or stale fences in a row before the run is left to the replica that wins them."""
LOOKS_MAX: Final = 200
"""Reads of one inbox in one hold; then another replica may take the run."""
EVENTS_MAX: Final = 500
"""Events decided on in one commit."""
TURNS_MAX: Final = 2_000
"""Runs advanced at the same time. Others wait for their outbox rows to become due."""
CLASSES_KEPT: Final = 50_000


class Advanced(msgspec.Struct, frozen=True):
    """The inbox is empty, or the run has ended."""

    status: RunStatus


class RunBusy(msgspec.Struct, frozen=True):
    """Another replica holds the run's lease."""


class PutOff(msgspec.Struct, frozen=True):
    """A backend is unavailable, or policy says to wait for it."""

    error: str


class AdvanceFailed(msgspec.Struct, frozen=True):
    """Handling failed through a fault of our own."""

    error: str
    failures: int


class DeadLettered(msgspec.Struct, frozen=True):
    """An entry was tried as often as is allowed and is a dead letter now."""

    cause: str


class RunMissing(msgspec.Struct, frozen=True):
    """There is no such run."""


Outcome: TypeAlias = Advanced | RunBusy | PutOff | AdvanceFailed | DeadLettered | RunMissing


class _Moved(Exception):
    """The run has changed since it was read, so its items cannot be read for that version."""


class _Turn(msgspec.Struct):
    task: asyncio.Task[Outcome] | None = None
    again: bool = False
    """Whether ``advance`` was called after the inbox was last read."""
    waited_ns: tuple[int, int] | None = None
    """When the lease was asked for and granted, while traces are on and no span has it yet."""


class _Class(msgspec.Struct, frozen=True, gc=False):
    risk: Risk
    override: LeaseOverride | None
    tenant: TenantId
    trace_id: str | None


def _class(run: Run, override: LeaseOverride | None) -> _Class:
    trace_id = None if run.traceparent is None else run.traceparent[3:35]
    return _Class(run.risk, override, run.tenant, trace_id)


@contextmanager
def _advance_span(
    tracing: telemetry.Tracing, loaded: Loaded, turn: _Turn, parent: str
) -> Iterator[telemetry.Span]:
    """The span of one commit, with the wait for the lease before it."""
    run, waited_ns, turn.waited_ns = loaded.run, turn.waited_ns, None
    attributes: dict[str, str | int | None] = {
        telemetry.TENANT: run.tenant,
        telemetry.RUN: run.id,
        telemetry.RISK: str(run.risk),
        "stanchion.events": len(loaded.inbox),
    }
    since_ns = None if waited_ns is None else waited_ns[0]
    with tracing.span("advance", attributes, parent=parent, since_ns=since_ns) as span:
        if waited_ns is not None:
            tracing.record("lock wait", {}, since_ns=waited_ns[0], until_ns=waited_ns[1])
        yield span


class Advancer:
    """Advances runs on this replica."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        plans: Plans,
        leasing: Leasing,
        rules: Rules,
        decider: Decider,
        on_ended: Callable[[Run], None] = lambda _run: None,
        poison_failures_max: int = 5,
    ) -> None:
        self._decider = decider
        self._store = context.store
        self._bus = context.bus
        self._clock = context.clock
        self._entropy = context.entropy
        self._signals = context.signals
        self._plans = plans
        self._leasing = leasing
        self._rules = rules
        self._on_ended = on_ended
        self._poison_failures_max = poison_failures_max
        self._turns: dict[RunId, _Turn] = {}
        self._classes: OrderedDict[RunId, _Class] = OrderedDict()

    async def advance(self, run_id: RunId) -> Outcome:
        """Apply the events in the run's inbox, or return why not now."""
        return await asyncio.shield(self._join(run_id))

    def nudge(self, run_id: RunId) -> None:
        """Begin to advance the run, without waiting for it."""
        if run_id in self._turns or len(self._turns) < TURNS_MAX:
            _ = self._join(run_id)

    def remember(self, run: Run, plan: Plan) -> None:
        """Note a run's class, so that its first hold need not look it up."""
        self._classes[run.id] = _class(run, plan.lock_policy)
        if len(self._classes) > CLASSES_KEPT:
            self._classes.popitem(last=False)

    async def settle(self) -> None:
        """Wait until no run is being advanced."""
        while self._turns:
            tasks = [turn.task for turn in self._turns.values() if turn.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel what is still being advanced. Nothing is lost: outbox rows become due again."""
        for turn in self._turns.values():
            if turn.task is not None:
                turn.task.cancel()
        await self.settle()

    def _join(self, run_id: RunId) -> asyncio.Task[Outcome]:
        turn = self._turns.get(run_id)
        if turn is not None:
            assert turn.task is not None
            turn.again = True
            return turn.task
        turn = self._turns[run_id] = _Turn()
        turn.task = asyncio.create_task(self._take_turn(run_id, turn), name=f"advance {run_id}")
        return turn.task

    async def _take_turn(self, run_id: RunId, turn: _Turn) -> Outcome:
        try:
            while True:
                turn.again = False
                outcome = await self._guarded(run_id, turn)
                # There is no await between this check and the turn's end, so no call is missed.
                if not (turn.again and isinstance(outcome, Advanced)):
                    return outcome
        finally:
            del self._turns[run_id]

    async def _guarded(self, run_id: RunId, turn: _Turn) -> Outcome:
        """Advance under the lease; turn exceptions into outcomes."""
        floor = 0
        try:
            for _ in range(TRIES_MAX):
                outcome = await self._under_lease(run_id, turn, floor)
                if not isinstance(outcome, StaleFence):
                    return outcome
                floor = outcome.highest
        except LeaseLost as error:
            return PutOff(sentence(error))
        except BackendError as error:
            return PutOff(sentence(error))
        except Exception as error:  # noqa: BLE001 - the turn must end in an outcome, also after a bug
            log_event(logging.ERROR, "advance_failed", run=run_id, error=repr(error))
            return AdvanceFailed(repr(error), 1)
        return RunBusy()

    async def _under_lease(self, run_id: RunId, turn: _Turn, floor: int) -> Outcome | StaleFence:
        known, seen = self._classes.get(run_id), None
        if known is None:
            seen = await self._store.load(run_id)
            if seen is None:
                return RunMissing()
            known = await self._class_of(seen)
        telemetry.LOG_IDS.set(telemetry.LogIds(None, known.tenant, run_id, None, known.trace_id))
        asked_ns = 0 if telemetry.tracing is None else telemetry.now_ns()
        async with self._leasing.hold(
            f"run/{run_id}",
            risk=known.risk,
            policy=self._rules.lease_policy(known.risk, known.override),
            escalated=self._rules.closes(known.risk),
            floor=floor,
        ) as held:
            if asked_ns:
                turn.waited_ns = (asked_ns, telemetry.now_ns())
            match held:
                case Lease():
                    outcome = await self._empty_inbox(run_id, turn, held, seen)
                    if isinstance(outcome, StaleFence):
                        told = StaleWrite(
                            name=held.name,
                            risk=known.risk,
                            fence=held.fence or 0,
                            highest=outcome.highest,
                        )
                        self._leasing.tell(told)
                    return outcome
                case LeaseContended():
                    return RunBusy()
                case LeaseRefused(error):
                    return PutOff(error)
                case _:
                    assert_never(held)

    async def _class_of(self, loaded: Loaded) -> _Class:
        plan = await self._plan_of(loaded)
        if plan is None:
            return _class(loaded.run, None)
        self.remember(loaded.run, plan)
        return self._classes[loaded.run.id]

    async def _empty_inbox(
        self, run_id: RunId, turn: _Turn, lease: Lease, seen: Loaded | None
    ) -> Outcome | StaleFence:
        """Apply all entries. ``seen`` was read before the hold; a commit detects if it is stale."""
        conflicts = 0
        for _ in range(LOOKS_MAX):
            is_fresh = seen is None
            turn.again &= not is_fresh
            loaded, seen = seen or await self._store.load(run_id), None
            if loaded is None:
                return RunMissing()
            if not loaded.inbox:
                return Advanced(loaded.run.status)
            answer = await (
                self._apply(loaded, lease)
                if loaded.run.traceparent is None
                else self._traced(loaded, lease, turn, loaded.run.traceparent)
            )
            match answer:
                case Committed():
                    conflicts = 0
                case CommitConflict() if is_fresh:
                    self._signals.conflict()
                    conflicts += 1
                    if conflicts == TRIES_MAX:
                        return RunBusy()
                case CommitConflict():
                    pass
                case Gone():
                    return RunMissing()
                case StaleFence() | AdvanceFailed() | DeadLettered():
                    return answer
                case Advanced():
                    if not turn.again:
                        return answer
                case _:
                    assert_never(answer)
        return RunBusy()

    async def _traced(
        self, loaded: Loaded, lease: Lease, turn: _Turn, traceparent: str
    ) -> Committed | CommitConflict | StaleFence | Gone | AdvanceFailed | DeadLettered | Advanced:
        if telemetry.tracing is None or not telemetry.is_sampled(traceparent):
            return await self._apply(loaded, lease)
        parent = telemetry.context_of_run(loaded.run.id, traceparent)
        with _advance_span(telemetry.tracing, loaded, turn, parent) as span:
            answer = await self._apply(loaded, lease)
            span.note({telemetry.OUTCOME: type(answer).__name__})
            return answer

    async def _apply(
        self, loaded: Loaded, lease: Lease, *, at_most: int = EVENTS_MAX
    ) -> Committed | CommitConflict | StaleFence | Gone | AdvanceFailed | DeadLettered | Advanced:
        """Decide on the inbox's entries and commit. ``Advanced``: the inbox is empty."""
        entries = loaded.inbox[:at_most]
        try:
            plan = await self._plans.of_run(loaded.run)
            run = await self._with_items(plan, loaded.run, entries)
            transition = await self._decider.decide(
                plan, run, [entry.event for entry in entries], self._clock.now()
            )
        except BackendError:
            raise
        except _Moved:
            return CommitConflict()
        except Exception as error:  # noqa: BLE001 - one bad entry must not stop a run for ever
            return await self._sift(loaded, lease, error)
        try:
            return await self._commit(loaded, transition, entries, lease)
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            # To find the entry that the store cannot take, commit them one by one.
            if len(entries) > 1:
                return await self._apply(loaded, lease, at_most=1)
            return await self._count_against(loaded.run.id, entries[0], error)

    async def _commit(
        self,
        loaded: Loaded,
        transition: Transition,
        entries: Sequence[InboxEntry],
        lease: Lease,
    ) -> Committed | CommitConflict | StaleFence | Gone | Advanced:
        entries = entries[: len(transition.ignored)]  # very large ones are decided on in portions
        commit = Commit(
            run_id=loaded.run.id,
            transition=transition,
            read=loaded.run.stamp,
            nonce=self._entropy.token(),
            fence=lease.fence,
            applied=tuple(entry.id for entry in entries),
        )
        tracing = None if loaded.run.traceparent is None else telemetry.tracing
        with telemetry.UNTRACED if tracing is None else tracing.span("store commit", kind="client"):
            answer = await self._store.commit(commit)
        if not isinstance(answer, Committed):
            return answer
        if transition.status.is_finished:
            ended = evolve(loaded.run, transition)
            self._on_ended(ended)
            if tracing is not None and ended.traceparent is not None:
                tracing.run_ended(ended, ended.traceparent)
        self._tell(loaded.run, transition)
        for run_id in answer.promoted:
            self.nudge(run_id)
        if transition.status.is_finished:
            self._classes.pop(loaded.run.id, None)
            return Advanced(transition.status)
        # If more entries have arrived through this process since, ``turn.again`` is set.
        return Advanced(transition.status) if len(entries) == len(loaded.inbox) else answer

    async def _sift(
        self, loaded: Loaded, lease: Lease, error: Exception
    ) -> Committed | CommitConflict | StaleFence | Gone | AdvanceFailed | DeadLettered | Advanced:
        """Find the entry that cannot be applied, apply those before it, and count against it."""
        good: list[InboxEntry] = []
        transition: Transition | None = None
        bad = loaded.inbox[0]
        try:
            plan = await self._plans.of_run(loaded.run)
            for bad in loaded.inbox[:EVENTS_MAX]:
                run = await self._with_items(plan, loaded.run, (*good, bad))
                events = [entry.event for entry in (*good, bad)]
                transition = await self._decider.decide(plan, run, events, self._clock.now())
                good.append(bad)
        except BackendError:
            raise
        except _Moved:
            return CommitConflict()
        except Exception as found:  # noqa: BLE001 - this is the entry to find
            error = found
        if transition is not None:
            return await self._commit(loaded, transition, good, lease)
        return await self._count_against(loaded.run.id, bad, error)

    async def _count_against(
        self, run_id: RunId, entry: InboxEntry, error: Exception
    ) -> AdvanceFailed | DeadLettered:
        cause = f"{type(error).__name__}: {error}"[:1000]
        failures = await self._store.count_failure(run_id, entry.id)
        log_event(
            logging.ERROR,
            "inbox_entry_failed",
            run=run_id,
            entry=entry.id,
            failures=failures,
            error=cause,
        )
        if failures < self._poison_failures_max:
            return AdvanceFailed(cause, failures)
        await self._store.write_dead_letter(run_id, entry.id, cause=cause)
        self._signals.buried()
        return DeadLettered(cause)

    async def _with_items(self, plan: Plan, run: Run, entries: Sequence[InboxEntry]) -> Run:
        wanted = items_to_read(plan, run, [entry.event for entry in entries])
        if not wanted:
            return run
        items = await self._store.items_at(run.id, run.stamp, wanted)
        if items is None:
            raise _Moved
        return msgspec.structs.replace(run, items=items)

    async def _plan_of(self, loaded: Loaded) -> Plan | None:
        """The run's plan; ``None`` if it cannot be built, which fails when an entry is applied."""
        try:
            return await self._plans.of_run(loaded.run)
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - counted where an entry is applied
            log_event(logging.ERROR, "plan_failed", run=loaded.run.id, error=repr(error))
            return None

    def _tell(self, run: Run, transition: Transition) -> None:
        topics = {
            effect.job.topic for effect in transition.effects if isinstance(effect, DispatchJob)
        }
        for topic in sorted(topics):
            self._bus.ring(Bell.READY, topic)
        if revokes_jobs(transition):
            self._bus.ring(Bell.REVOKED, run.id)
        if transition.timeline:
            self._bus.ring(Bell.CHANGED, run.tenant)
        if run.status is RunStatus.PENDING:
            self._signals.left_queue(run)
        if transition.status.is_finished:
            self._bus.ring(Bell.FINISHED, run.id)
            self._signals.finished(run, transition.status)
