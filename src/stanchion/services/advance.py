"""Advance: the one path on which a run changes after it was admitted.

    hold the run's lease → load run and inbox → decide on all of it → commit → ring the bells

Timers, approvals, cancels and the reconciler all put an event into the inbox and then call
``advance``. A caller that finds the run being advanced in this process joins that task, which reads
the inbox once more before it releases the lease; so many events of one run cost one hold.

Results are settled if possible: this process decides on the last committed value of the run, and
the results and their transition are one step of the store (``settle``), which refuses if the run
has changed or its inbox is not empty. In all other cases the results are accepted into the inbox
first, and the turn goes on as above. Results that arrive while the run is being settled wait for
the next step of the same turn.

Classes that continue without the lock store and after a lost lease settle without the lease, if it
was granted here in the last half minute or if the lock store answered a moment ago. Otherwise the
lease is requested, so that a quiet replica also detects that the lock store is down. This is safe:
``settle`` checks everything that the lease protects for these classes, and an advance by another
replica always has an entry in the inbox, so the two never compete. A run that is not in the cache,
or has changed elsewhere, is read first: two store operations instead of five (accept, lease, read,
commit, release). The other classes settle only if the lease needs no call to the lock store.

No event is lost. The event and its outbox row stay in the store until the commit that applies the
event, so an answer other than ``Advanced`` means that the run is advanced later.

Holding a run by hand writes the fence of that hold and a mark in the stamp to the run. Its results
then need the lease until a commit under a lease has replaced the stamp.

There are three kinds of failure. *RunBusy*: another replica holds the run's lease. *PutOff*: a
backend is unavailable, or policy says to wait for the lock store. *AdvanceFailed*: our own handling
failed; only this counts against the entry's poison budget. When the budget is spent, the entry
becomes a dead letter with its cause, and can be replayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from stanchion import telemetry
from stanchion.core.events import AttemptFailed, AttemptSucceeded
from stanchion.core.lease import LeaseLost, OnLockError, OnRenewalLost
from stanchion.core.model import (
    BY_HAND,
    JobId,
    Risk,
    Run,
    RunId,
    RunStatus,
    TenantId,
    place_of,
)
from stanchion.core.plan import Plan
from stanchion.core.run import evolve, items_to_read, revokes_jobs
from stanchion.core.transition import DispatchJob, Transition
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    AlikeStarts,
    Commit,
    CommitConflict,
    Committed,
    Gone,
    InboxEntry,
    Loaded,
    Result,
    SettleMiss,
    StaleFence,
    result_event,
)
from stanchion.services.context import ReplicaContext, Rules
from stanchion.services.lease_events import StaleWrite
from stanchion.services.leasing import LeaseContended, LeaseRefused, Leasing
from stanchion.services.limiter import TenantTurns
from stanchion.services.log import log_event
from stanchion.services.plans import Plans
from stanchion.services.renewal import Lease
from stanchion.services.run_cache import KnownRun, RunCache, RunClass, RunClasses
from stanchion.services.work import Decider, is_large_write

TRIES_MAX: Final = 20
"""Conflicts or stale fences in a row before the run is left to the replica that wins them."""
LOOKS_MAX: Final = 200
"""Reads of one inbox in one hold; then another replica may take the run."""
EVENTS_MAX: Final = 500
"""Events decided on in one commit."""
LEASED_MS: Final = 30_000
"""How long after its lease was granted here a run may be settled without it."""
NUDGED_MAX: Final = 2
"""Promoted runs that are advanced at once after a commit: each freed slot promotes one."""
TURNS_MAX: Final = 2_000
"""Runs advanced at the same time. Others wait for their outbox rows to become due."""


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

_Applied: TypeAlias = (
    Committed | CommitConflict | StaleFence | Gone | AdvanceFailed | DeadLettered | Advanced
)


class _Moved(Exception):
    """The run has changed since it was read, so its items cannot be read for that version."""


class _Delivery(msgspec.Struct, frozen=True):
    """Results of one request for one run, which wait to be settled."""

    results: Sequence[Result]
    tenant: TenantId | None
    row_due_in_ms: int
    answer: asyncio.Future[tuple[Acceptance, ...] | None]
    """``None``: they were not sent to the store."""


class _Turn(msgspec.Struct):
    task: asyncio.Task[Outcome] | None = None
    again: bool = False
    """Whether ``advance`` was called after the inbox was last read."""
    is_free: bool = False
    """Whether the first results of this turn may be settled without the lease."""
    may_read: bool = False
    """Whether the run may be read, so that its results can be settled without the lease."""
    has_moved: bool = False
    """Whether the last settle failed because the run was written to since it was read."""
    takes_results: bool = False
    """Whether the question of the lease is answered, so that results may wait for this turn."""
    posted: InboxEntry | None = None
    """An entry that was posted just before the turn began."""
    waiting: list[_Delivery] = []
    unanswered: set[tuple[JobId, int]] = set()
    """Results, by job and fence, of a settle without an answer: it may have been written."""
    waited_ns: tuple[int, int] | None = None
    """When the lease was asked for and granted, while traces are on and no span has it yet."""


_RUN_MOVED: Final = frozenset({SettleMiss.CHANGED, SettleMiss.STALE_FENCE})
"""The run was written to since it was read. Read again, it may be settled."""
_TAKEN: Final = "another replica or task has the lease"


def _trace_failed_wait(run_id: RunId, known: RunClass, asked_ns: int, error: str) -> None:
    """Make the span of a wait for a run's lease that ended without it."""
    tracing, parent = telemetry.tracing, known.traceparent
    if tracing is None or parent is None or not telemetry.is_sampled(parent):
        return
    attributes = {
        telemetry.TENANT: known.tenant,
        telemetry.RUN: run_id,
        telemetry.RISK: str(known.risk),
    }
    above = telemetry.context_of_run(run_id, parent)
    tracing.begin("lock wait", attributes, parent=above, since_ns=asked_ns).end(error=error)


def _trace_queue_wait(run: Run) -> None:
    """Make the span of a run's wait in its tenant's queue, from the start to its slot."""
    tracing, parent = telemetry.tracing, run.traceparent
    if tracing is None or parent is None or not telemetry.is_sampled(parent):
        return
    attributes = {telemetry.TENANT: run.tenant, telemetry.RUN: run.id}
    above = telemetry.context_of_run(run.id, parent)
    tracing.record("queue wait", attributes, parent=above, since_ns=run.created_at * 1_000_000)


@contextmanager
def _advance_span(
    tracing: telemetry.Tracing, run: Run, events: int, turn: _Turn, parent: str
) -> Iterator[telemetry.Span]:
    """The span of one commit, with the wait for the lease before it."""
    waited_ns, turn.waited_ns = turn.waited_ns, None
    attributes: dict[str, str | int | None] = {
        telemetry.TENANT: run.tenant,
        telemetry.RUN: run.id,
        telemetry.RISK: str(run.risk),
        "stanchion.events": events,
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
        self._large = TenantTurns()
        """For commits that write much: the store writes what has come in one transaction."""
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
        self._classes = RunClasses()
        self.cache = self._runs = RunCache(context.clock)

    async def advance(self, run_id: RunId, posted: InboxEntry | None = None) -> Outcome:
        """Apply the events in the run's inbox, or return why not now.

        ``posted`` was posted by the caller just now. If nothing else is in the inbox, and the run
        is known here, it is applied without reading the run.
        """
        return await asyncio.shield(self._join(run_id, posted))

    def nudge(self, run_id: RunId) -> None:
        """Begin to advance the run, without waiting for it."""
        if run_id in self._turns or len(self._turns) < TURNS_MAX:
            _ = self._join(run_id)

    def remember(self, run: Run, plan: Plan) -> None:
        """Note a run that was committed, so that its next change need not read it."""
        self._classes.put(run, plan.lock_policy)
        self._runs.put(run, plan)

    def remember_alike(self, starts: AlikeStarts, plan: Plan) -> None:
        """``remember`` for new runs that begin alike."""
        self._classes.put_alike(starts, plan.lock_policy)
        self._runs.put_alike(starts, plan)

    def settle(
        self,
        run_id: RunId,
        results: Sequence[Result],
        *,
        tenant: TenantId | None,
        row_due_in_ms: int,
    ) -> asyncio.Future[tuple[Acceptance, ...] | None] | None:
        """Settle results of one run; ``None`` if they must be accepted first.

        They must if the run must wait for its lease: a result waits for the store only. The answer
        is that of ``accept``, and they are applied; ``None`` if they were not sent to the store.
        """
        known = self._runs.get(run_id)
        if known is not None and tenant is not None and tenant != known.run.tenant:
            return None
        turn = self._turns.get(run_id)
        if turn is None:
            is_free = self._needs_no_lease(run_id, known)
            is_known = known is not None and self._classes.get(run_id) is not None
            may_hold = is_known and self._leasing.answers_at_once
            if len(self._turns) >= TURNS_MAX or not (is_free or may_hold):
                return None
            turn = self._begin_turn(run_id)
            turn.is_free = is_free
            turn.takes_results = True
        if not turn.takes_results:
            return None
        answer = asyncio.get_running_loop().create_future()
        turn.waiting.append(_Delivery(results, tenant, row_due_in_ms, answer))
        return answer

    def forget_idle(self) -> None:
        """Forget the runs that have not changed for a minute: after a peak these are most."""
        idle = self._runs.forget_idle()
        self._classes.forget([run_id for run_id in idle if run_id not in self._turns])

    async def idle(self) -> None:
        """Wait until no run is being advanced."""
        while self._turns:
            tasks = [turn.task for turn in self._turns.values() if turn.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel what is still being advanced. Nothing is lost: outbox rows become due again."""
        for turn in self._turns.values():
            if turn.task is not None:
                turn.task.cancel()
        await self.idle()

    def _needs_no_lease(self, run_id: RunId, known: KnownRun | None) -> bool:
        """Whether results of the run may be settled without its lease, if it need not be read.

        The lease is asked for unless it was granted here lately, or the lock store has answered a
        moment ago: if that store is down, policy decides, and fallbacks are counted.
        """
        of, remote = self._classes.get(run_id), self._leasing.remote
        if remote is not None and remote.health.error is not None:
            return False
        if not (self._leasing.is_proven or self._was_leased(known)):
            return False
        if known is not None and known.run.stamp.is_held_by_hand:
            return False
        if of is None:
            return True
        policy = self._rules.lease_policy(of.risk, of.override)
        return (
            policy.on_lock_error is OnLockError.FAIL_OPEN
            and policy.on_renewal_lost is OnRenewalLost.CONTINUE
            and not self._rules.closes(of.risk)
        )

    def _was_leased(self, known: KnownRun | None) -> bool:
        if known is None or known.leased_at is None:
            return False
        return self._clock.moment() - known.leased_at < LEASED_MS

    def _join(self, run_id: RunId, posted: InboxEntry | None = None) -> asyncio.Task[Outcome]:
        turn = self._turns.get(run_id)
        if turn is None:
            turn = self._begin_turn(run_id)
            turn.posted = posted
        else:
            turn.again = True
        assert turn.task is not None
        return turn.task

    def _begin_turn(self, run_id: RunId) -> _Turn:
        turn = self._turns[run_id] = _Turn()
        turn.task = asyncio.create_task(self._take_turn(run_id, turn), name=f"advance {run_id}")
        return turn

    async def _take_turn(self, run_id: RunId, turn: _Turn) -> Outcome:
        try:
            while True:
                outcome = await self._guarded(run_id, turn)
                # There is no await between this check and the turn's end, so no call is missed.
                if not (turn.again and isinstance(outcome, Advanced)):
                    return outcome
                turn.again = False
        finally:
            _send_away(turn)
            del self._turns[run_id]

    async def _guarded(self, run_id: RunId, turn: _Turn) -> Outcome:
        """Advance under the lease; turn exceptions into outcomes."""
        floor = 0
        try:
            if turn.is_free:
                settled = await self._settle_freely(run_id, turn)
                if settled is not None:
                    return settled
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
                if not isinstance(held, Lease):
                    why = held.error if isinstance(held, LeaseRefused) else _TAKEN
                    _trace_failed_wait(run_id, known, asked_ns, why)
            outcome = await self._with_lease(run_id, turn, held, known.risk, seen)
        if isinstance(outcome, Advanced) and isinstance(held, Lease) and not held.is_degraded:
            advanced = self._runs.get(run_id)
            if advanced is not None:
                advanced.leased_at = self._clock.moment()
        return outcome

    async def _with_lease(
        self,
        run_id: RunId,
        turn: _Turn,
        held: Lease | LeaseContended | LeaseRefused,
        risk: Risk,
        seen: Loaded | None,
    ) -> Outcome | StaleFence:
        match held:
            case Lease():
                turn.takes_results = True
                try:
                    settled = await self._settle_posted(run_id, turn, held)
                    outcome = settled or await self._empty_inbox(run_id, turn, held, seen)
                finally:
                    _send_away(turn)
                if isinstance(outcome, StaleFence):
                    told = StaleWrite(
                        name=held.name,
                        risk=risk,
                        fence=held.fence or 0,
                        highest=outcome.highest,
                    )
                    self._leasing.tell(told)
                return outcome
            case LeaseContended():
                await self._accept_waiting(turn)
                return RunBusy()
            case LeaseRefused(error):
                await self._accept_waiting(turn)
                return PutOff(error)
            case _:
                assert_never(held)

    async def _settle_freely(self, run_id: RunId, turn: _Turn) -> Outcome | None:
        """Settle the results that wait without the lease; ``None``: go on with it."""
        turn.is_free, turn.may_read = False, True
        try:
            for _ in range(LOOKS_MAX):
                known, of = self._runs.get(run_id), self._classes.get(run_id)
                if known is None or of is None:
                    if not turn.may_read or not await self._read_to_settle(run_id, turn):
                        break
                    continue
                telemetry.LOG_IDS.set(telemetry.LogIds(None, of.tenant, run_id, None, of.trace_id))
                lease = Lease(f"run/{run_id}", self._clock, fence=known.run.fence)
                settled = await self._settle_waiting(run_id, turn, lease)
                if turn.again or (settled is None and not turn.has_moved):
                    break
                if settled is not None and not turn.waiting:
                    return settled
            # If none is new, nothing was added to the inbox here.
            is_new = await self._accept_waiting(turn)
            return None if is_new or turn.again else RunBusy()
        finally:
            turn.may_read = False
            _send_away(turn)

    async def _read_to_settle(self, run_id: RunId, turn: _Turn) -> bool:
        """Read the run and remember it; whether the results that wait may be settled on it.

        Once in a turn: if it changes again, replicas compete for this run.
        """
        turn.may_read = False
        try:
            loaded = await self._store.load(run_id)
            if loaded is None or loaded.inbox or loaded.run.status.is_finished:
                return False
            await self._class_of(loaded)
        except BackendError:
            return False
        known = self._runs.get(run_id)
        return known is not None and self._needs_no_lease(run_id, known)

    async def _class_of(self, loaded: Loaded) -> RunClass:
        plan = await self._plan_unless_broken(loaded.run)
        if plan is None:
            return RunClass.of(loaded.run, None)
        self.remember(loaded.run, plan)
        return RunClass.of(loaded.run, plan.lock_policy)

    async def _empty_inbox(
        self, run_id: RunId, turn: _Turn, lease: Lease, seen: Loaded | None
    ) -> Outcome | StaleFence:
        """Apply all entries. ``seen`` was read before the hold; a commit detects if it is stale."""
        conflicts, has_entries = 0, False
        for _ in range(LOOKS_MAX):
            if turn.waiting:
                settled = await self._take_waiting(run_id, turn, lease, has_entries=has_entries)
                if settled is not None:
                    return settled
            is_fresh = seen is None
            answer, seen = await self._look(run_id, turn, lease, seen), None
            has_entries = turn.again or not isinstance(answer, Advanced)
            match answer:
                case Committed():
                    conflicts = 0
                case CommitConflict():
                    conflicts += is_fresh
                    if is_fresh:
                        self._signals.conflict()
                    if conflicts == TRIES_MAX:
                        return RunBusy()
                case Gone():
                    return RunMissing()
                case StaleFence() | AdvanceFailed() | DeadLettered() | RunMissing():
                    return answer
                case Advanced():
                    if not turn.again and not turn.waiting:
                        return answer
                case _:
                    assert_never(answer)
        return RunBusy()

    async def _look(
        self, run_id: RunId, turn: _Turn, lease: Lease, seen: Loaded | None
    ) -> _Applied | RunMissing:
        """Read the inbox, unless it was read just now, and apply its entries."""
        turn.again &= seen is not None
        loaded = seen or await self._store.load(run_id)
        if loaded is None:
            return RunMissing()
        if not loaded.inbox:
            return Advanced(loaded.run.status)
        if loaded.run.traceparent is None:
            return await self._apply(loaded, lease)
        return await self._traced(loaded, lease, turn, loaded.run.traceparent)

    async def _take_waiting(
        self, run_id: RunId, turn: _Turn, lease: Lease, *, has_entries: bool
    ) -> Advanced | None:
        """Settle the results that wait for this turn, or accept them.

        ``None``: read the inbox, since there may be entries.
        """
        for _ in range(0 if has_entries else LOOKS_MAX):
            settled = await self._settle_waiting(run_id, turn, lease)
            if settled is None or turn.again:
                break
            if not turn.waiting:
                return settled
        await self._accept_waiting(turn)
        return None

    async def _settle_waiting(self, run_id: RunId, turn: _Turn, lease: Lease) -> Advanced | None:
        """Settle the results that wait for this turn; ``None`` if they must be accepted.

        Those that arrive meanwhile wait for the next time.
        """
        known, deliveries, turn.has_moved = self._runs.get(run_id), tuple(turn.waiting), False
        results = [result for delivery in deliveries for result in delivery.results]
        if known is None or len(results) > EVENTS_MAX:
            return None
        # Some may have come while the run, and so its tenant, was not known here.
        if not {delivery.tenant for delivery in deliveries} <= {None, known.run.tenant}:
            return None
        tracing, traceparent = telemetry.tracing, known.run.traceparent
        if tracing is None or traceparent is None or not telemetry.is_sampled(traceparent):
            settled = await self._settle(known, results, turn, lease)
        else:
            parent = telemetry.context_of_run(run_id, traceparent)
            with (
                _advance_span(tracing, known.run, len(results), turn, parent) as span,
                tracing.span("store settle", kind="client"),
            ):
                settled = await self._settle(known, results, turn, lease)
                span.note({telemetry.OUTCOME: "missed" if settled is None else "settled"})
        if settled is not None:
            del turn.waiting[: len(deliveries)]
            for delivery in deliveries:
                taken = tuple(Accepted(each.job_id, run_id) for each in delivery.results)
                _answer(delivery, taken)
        return settled

    async def _settle_posted(self, run_id: RunId, turn: _Turn, lease: Lease) -> Advanced | None:
        """Apply an entry that was posted just now, if there is one; ``None``: read the inbox."""
        posted, turn.posted = turn.posted, None
        known = self._runs.get(run_id)
        if posted is None or known is None:
            return None
        traceparent = known.run.traceparent
        if telemetry.tracing is not None and traceparent and telemetry.is_sampled(traceparent):
            return None  # the usual way has spans
        settled = await self._settle(known, (), turn, lease, (posted,))
        return None if turn.again or turn.waiting else settled

    async def _settle(
        self,
        known: KnownRun,
        results: Sequence[Result],
        turn: _Turn,
        lease: Lease,
        posted: Sequence[InboxEntry] = (),
    ) -> Advanced | None:
        """Decide on the run as it is remembered, and settle; ``None`` if that is not possible."""
        run, plan, turn.has_moved = known.run, known.plan(), False
        if plan is None:
            return None
        try:
            events = [*(entry.event for entry in posted), *map(_event, results)]
            wanted = items_to_read(plan, run, events)
            if wanted:
                items = await self._store.items_at(run.id, run.stamp, wanted)
                if items is None:
                    self._missed(turn, run.id, SettleMiss.CHANGED)
                    return None
                run = replace(run, items=items)
            transition = self._decider.decide_at_once(plan, run, events, self._clock.now())
        except BackendError:
            return None
        except Exception as error:  # noqa: BLE001 - counted when the accepted entry is applied
            log_event(logging.WARNING, "settle_failed", run=run.id, error=repr(error))
            return None
        if transition is None or len(transition.ignored) < len(events):
            return None
        if is_large_write(transition):
            return None  # its commit waits for its turn
        if turn.may_read and any(transition.ignored):
            # The job is from a later change of the run, most likely by another replica.
            turn.has_moved = True
            self._runs.forget(run.id)
            return None
        commit = Commit(
            run_id=run.id,
            transition=transition,
            read=run.stamp,
            nonce=self._nonce(run, lease),
            fence=lease.fence,
            applied=tuple(entry.id for entry in posted),
        )
        try:
            answer = await self._store.settle(results, commit)
        except Exception as error:  # noqa: BLE001 - after any error it may have been written
            # If it was, accepting the results finds them accepted: they are no duplicates.
            turn.unanswered.update((result.job_id, result.fence) for result in results)
            self._runs.forget(run.id)
            if not isinstance(error, BackendError):
                log_event(logging.WARNING, "settle_failed", run=run.id, error=repr(error))
            return None
        if not isinstance(answer, Committed):
            self._missed(turn, run.id, answer.cause)
            return None
        self._signals.settled(len(results))
        self._note_commit(known.run, plan, transition, answer, lease)
        return Advanced(transition.status)

    def _nonce(self, run: Run, lease: Lease) -> str:
        """The nonce of a commit. Without the lock store it is not known whether a hold is over."""
        is_still_held = lease.is_degraded and run.stamp.is_held_by_hand
        return (BY_HAND if is_still_held else "") + self._entropy.token()

    def _missed(self, turn: _Turn, run_id: RunId, cause: SettleMiss) -> None:
        turn.has_moved = cause in _RUN_MOVED
        self._signals.settle_missed(cause)
        self._runs.forget(run_id)

    async def _accept_waiting(self, turn: _Turn) -> bool:
        """Accept the results that wait for this turn into the inbox; whether one of them is new."""
        is_new = False
        while turn.waiting:
            first = turn.waiting[0]
            together = [each for each in turn.waiting if each.tenant == first.tenant]
            turn.waiting = [each for each in turn.waiting if each.tenant != first.tenant]
            try:
                answers = iter(
                    await self._store.accept(
                        [result for each in together for result in each.results],
                        row_due_in_ms=first.row_due_in_ms,
                        tenant=first.tenant,
                    )
                )
            except Exception as error:  # noqa: BLE001 - it is the answer to the senders of the results
                for each in together:
                    if not each.answer.done():
                        each.answer.set_exception(error)
                continue
            for each in together:
                taken = tuple(_own(turn, result, next(answers)) for result in each.results)
                is_new |= any(isinstance(one, Accepted) and not one.repeated for one in taken)
                _answer(each, taken)
        return is_new

    async def _traced(
        self, loaded: Loaded, lease: Lease, turn: _Turn, traceparent: str
    ) -> _Applied:
        if telemetry.tracing is None or not telemetry.is_sampled(traceparent):
            return await self._apply(loaded, lease)
        parent = telemetry.context_of_run(loaded.run.id, traceparent)
        events = len(loaded.inbox)
        with _advance_span(telemetry.tracing, loaded.run, events, turn, parent) as span:
            answer = await self._apply(loaded, lease)
            span.note({telemetry.OUTCOME: type(answer).__name__})
            return answer

    async def _apply(self, loaded: Loaded, lease: Lease, *, at_most: int = EVENTS_MAX) -> _Applied:
        """Decide on the inbox's entries and commit. ``Advanced``: the inbox is empty."""
        entries = loaded.inbox[:at_most]
        try:
            plan = await self._plan_of(loaded.run)
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
            return await self._commit(loaded, plan, transition, entries, lease)
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
        plan: Plan,
        transition: Transition,
        entries: Sequence[InboxEntry],
        lease: Lease,
    ) -> Committed | CommitConflict | StaleFence | Gone | Advanced:
        entries = entries[: len(transition.ignored)]  # very large ones are decided on in portions
        commit = Commit(
            run_id=loaded.run.id,
            transition=transition,
            read=loaded.run.stamp,
            nonce=self._nonce(loaded.run, lease),
            fence=lease.fence,
            applied=tuple(entry.id for entry in entries),
        )
        parent = loaded.run.traceparent
        is_traced = parent is not None and telemetry.is_sampled(parent)
        tracing = telemetry.tracing if is_traced else None
        with telemetry.UNTRACED if tracing is None else tracing.span("store commit", kind="client"):
            if is_large_write(transition):
                async with self._large.turn(loaded.run.tenant):
                    answer = await self._store.commit(commit)
            else:
                answer = await self._store.commit(commit)
        if not isinstance(answer, Committed):
            self._runs.forget(loaded.run.id)
            return answer
        self._note_commit(loaded.run, plan, transition, answer, lease)
        if transition.status.is_finished:
            return Advanced(transition.status)
        # If more entries have arrived through this process since, ``turn.again`` is set.
        return Advanced(transition.status) if len(entries) == len(loaded.inbox) else answer

    def _note_commit(
        self, run: Run, plan: Plan, transition: Transition, done: Committed, lease: Lease
    ) -> None:
        """Remember the run as it was committed, and tell all that wait for it."""
        after = evolve(run, transition, stamp=done.stamp, fence=lease.fence)
        if transition.status.is_finished:
            self._on_ended(after)
            tracing = telemetry.tracing
            if tracing is not None and after.traceparent is not None:
                tracing.run_ended(after, after.traceparent)
        self._announce(run, transition)
        # The others have outbox rows that are due: a raised cap promotes hundreds, and each of them
        # promotes more.
        for run_id in done.promoted[:NUDGED_MAX]:
            self.nudge(run_id)
        self._runs.put(after, plan)
        if transition.status.is_finished:
            self._classes.forget([run.id])

    async def _sift(self, loaded: Loaded, lease: Lease, error: Exception) -> _Applied:
        """Find the entry that cannot be applied, apply those before it, and count against it."""
        good: list[InboxEntry] = []
        transition: Transition | None = None
        plan: Plan | None = None
        bad = loaded.inbox[0]
        try:
            plan = await self._plan_of(loaded.run)
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
        if transition is not None and plan is not None:
            return await self._commit(loaded, plan, transition, good, lease)
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
        self._signals.dead_letter_written()
        return DeadLettered(cause)

    async def _with_items(self, plan: Plan, run: Run, entries: Sequence[InboxEntry]) -> Run:
        wanted = items_to_read(plan, run, [entry.event for entry in entries])
        if not wanted:
            return run
        items = await self._store.items_at(run.id, run.stamp, wanted)
        if items is None:
            raise _Moved
        return msgspec.structs.replace(run, items=items)

    async def _plan_of(self, run: Run) -> Plan:
        """The plan that the run began with, which never changes."""
        known = self._runs.get(run.id)
        plan = None if known is None else known.plan()
        return plan or await self._plans.of_run(run)

    async def _plan_unless_broken(self, run: Run) -> Plan | None:
        """The run's plan; ``None`` if it cannot be built, which fails when an entry is applied."""
        try:
            return await self._plan_of(run)
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - counted where an entry is applied
            log_event(logging.ERROR, "plan_failed", run=run.id, error=repr(error))
            return None

    def _announce(self, run: Run, transition: Transition) -> None:
        effects = transition.effects
        topics = {effect.job.topic for effect in effects if type(effect) is DispatchJob}
        for topic in sorted(topics):
            self._bus.ring(Bell.READY, topic)
        if effects and revokes_jobs(transition):
            self._bus.ring(Bell.REVOKED, run.id)
        if transition.timeline:
            self._bus.ring(Bell.CHANGED, run.tenant)
        if run.status is RunStatus.PENDING:
            self._signals.left_queue(run)
            _trace_queue_wait(run)
        if transition.status.is_finished:
            self._bus.ring(Bell.FINISHED, run.id)
            self._signals.finished(run, transition.status)


def _event(result: Result) -> AttemptSucceeded | AttemptFailed:
    place = place_of(result.job_id)
    return result_event(result, place.step_id, place.item)


def _own(turn: _Turn, result: Result, answer: Acceptance) -> Acceptance:
    """The answer to a result. One that this turn has settled before is no repetition."""
    if (
        isinstance(answer, Accepted)
        and answer.repeated
        and (result.job_id, result.fence) in turn.unanswered
    ):
        return replace(answer, repeated=False)
    return answer


def _answer(delivery: _Delivery, answers: tuple[Acceptance, ...] | None) -> None:
    if not delivery.answer.done():  # else its caller was cancelled
        delivery.answer.set_result(answers)


def _send_away(turn: _Turn) -> None:
    """The turn takes no more results: those that still wait must be accepted."""
    turn.takes_results = False
    waiting, turn.waiting = turn.waiting, []
    for delivery in waiting:
        _answer(delivery, None)
