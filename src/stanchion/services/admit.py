"""Admit: ask the store to admit a prepared run, and answer the caller within a deadline.

``store.admit`` decides, in one atomic step. Under the strategy ``lock`` a caller holds the tenant's
lock while it asks; the store's check is the same, so a cap holds even if replicas disagree about
the strategy. The answer comes within the wait budget plus half a second, also if no backend
responds. When a caller is cancelled, its lock is released and a run that was admitted is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar, assert_never

from msgspec.structs import replace

from stanchion import telemetry
from stanchion.core import admission as judged
from stanchion.core.admission import Verdict
from stanchion.core.lease import Moment
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import Risk, Run, RunStatus, TenantId, Topic
from stanchion.core.plan import Plan
from stanchion.core.queue import OnFull
from stanchion.core.settings import AdmissionSettings, Settings, Strategy, effective_admission
from stanchion.core.transition import DispatchJob, Transition
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.records import Admission, AlikeStarts, StartsChecked, StartTerms
from stanchion.services import admission_lock
from stanchion.services.admission_lock import SharedLock, SoleLock
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import (
    Backend,
    GateFailed,
    GateFull,
    GateOverBudget,
    JobThrottled,
    KeyMismatch,
    Pacing,
    Passed,
    RunStarted,
)
from stanchion.services.limiter import SharedChecks, TenantLimiter, TenantTurns
from stanchion.services.log import OutageLogger
from stanchion.services.prepared import GateCall, PreparedAlike, PreparedRow, PreparedStart
from stanchion.services.settings import TenantConfigs
from stanchion.services.signals import AdmissionSignals
from stanchion.services.verdicts import CHANGED_EACH_TIME, VerdictAnswers
from stanchion.services.work import Deadlines, input_bytes, is_large_write

ANSWER_MS: Final = 250
"""Added to the wait budget. The rest of the half second is for sending the answer."""
SWEEP_S: Final = 0.05
"""How often deadlines are checked: an answer is late by at most this."""
STORE_MS_MAX: Final = 2_000
"""For one call to the store, however long the budget is."""
TRIES_MAX: Final = 5
"""Tries in a row in which the workflow changed between reading and admitting."""

OTHERS_MS: Final = 1_000
STEP_ITEMS_MAX: Final = 1_000
"""Items of for-each steps that one call to the store creates, if it has several runs."""
_TURNS_TO_SEND: Final = 2
"""Iterations of the event loop until the call of a caller that continues now is sent."""

_Answer = TypeVar("_Answer")
_Refusal = TypeVar("_Refusal")


Again: TypeAlias = Callable[[], Coroutine[Any, Any, "PreparedStart | _Refusal"]]
"""Reads the workflow again and prepares a new start, or returns why it cannot run any more."""
AgainRows: TypeAlias = Callable[
    [Sequence[int]], Coroutine[Any, Any, "Sequence[PreparedRow[_Refusal]]"]
]
"""Does so for the starts of a batch with these places."""

_FULL: Final = (judged.Full, judged.QueueFull)
_BEGUN: Final = (judged.Admitted, judged.Queued)
_ALL_ADMITTED: Final[set[type]] = {judged.Admitted}


class Admitter:
    """Asks the store to admit runs, and turns its verdicts into answers."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        settings: Callable[[], Settings],
        pacing: Pacing,
        signals: AdmissionSignals,
        on_admitted: Callable[[Run, Plan], None],
        on_alike_admitted: Callable[[AlikeStarts, Plan], None] | None = None,
    ) -> None:
        self._context = context
        self.tenants = TenantConfigs(context.store, clock=context.clock)
        """The tenants' configuration. Changes must go through it, so that its cache is current."""
        self._settings = settings
        self._pacing = pacing
        self._signals = signals
        self._on_admitted = on_admitted
        self._on_alike_admitted = on_alike_admitted
        self._deadlines = Deadlines(sweep_s=SWEEP_S)
        self._checks = SharedChecks(self._check)
        self._limiter = TenantLimiter()
        self._large = TenantTurns()
        """For admissions that write much: the store writes what has come in one transaction."""
        self._last_call = self._other_call = (TenantId(""), Moment(-OTHERS_MS))
        """Tenant and time of the last call, and of the last one of another tenant before it."""
        self._outage = OutageLogger("admission_failed", "admission_recovered", level=logging.ERROR)
        self.answers = VerdictAnswers(context, pacing=pacing, outage=self._outage)
        self._lock: admission_lock.AdmissionLock = (
            SoleLock(context.clock)
            if context.locks is None
            else SharedLock(
                context.locks,
                clock=context.clock,
                entropy=context.entropy,
                signals=signals,
                replica=context.replica,
            )
        )

    async def close(self) -> None:
        """Wait for pending releases of locks."""
        self._deadlines.close()
        await self._lock.close()

    async def in_time(
        self, call: GateCall, answering: Coroutine[Any, Any, _Answer]
    ) -> _Answer | GateFailed:
        """Await ``answering`` within the budget; count the outcome and observe its duration.

        A time-out or ``BackendError`` becomes ``GateFailed``.
        """
        if telemetry.tracing is not None:
            self.begin_span(call)
        now = self._context.clock.moment()
        if call.tenant != self._last_call[0]:
            self._other_call = self._last_call
        self._last_call = (call.tenant, now)
        wait_ms = self._settings().admission.lock_wait_ms
        call.lock_until = Moment(now + wait_ms)
        call.ends_at = Moment(now + wait_ms + ANSWER_MS)
        answer: _Answer | GateFailed
        deadline = self._deadlines.begin((wait_ms + ANSWER_MS) / 1000)
        try:
            answer = await answering
        except asyncio.CancelledError:
            if not deadline.is_why():
                raise
            answer = self.answers.store_failed(call, "no answer within the wait budget")
        except BackendError as error:
            answer = self.answers.store_failed(call, sentence(error))
        finally:
            deadline.end()
            if call.has_turn:
                self._limiter.leave(call.tenant)
        waited_s = self._deadlines.lasted_s(deadline)
        if call.rows is not None:
            self._count_rows(call, call.rows, answer, waited_s)
            return answer
        outcome = _outcome(answer)
        exemplar = None if call.span is None else _end_span(call, call.span, answer, outcome)
        self._signals.waited(call.tenant, call.endpoint, waited_s, exemplar)
        if outcome is not None:
            self._signals.decided(call.tenant, call.workflow_id, outcome, exists=call.exists)
            retry_after_ms: int | None = getattr(answer, "retry_after_ms", None)
            self._signals.figures.record(call.tenant, outcome, waited_s, retry_after_ms)
        return answer

    def _count_rows(self, call: GateCall, rows: int, answer: object, waited_s: float) -> None:
        """Count the answers to a batch, equal ones at once."""
        answers = answer if isinstance(answer, list) else [answer] * rows
        if not answers:  # nothing was decided
            if call.span is not None:
                call.span.end()
            return
        outcomes = [
            _ADMITTED
            if type(each) is RunStarted and not each.replayed and each.status is RunStatus.RUNNING
            else _outcome(each)
            for each in answers
        ]
        counts, told = Counter(outcomes), dict(zip(outcomes, answers, strict=True))
        exemplar = None
        if call.span is not None:
            (outcome, _), *_ = counts.most_common(1)
            exemplar = _end_span(call, call.span, told[outcome], outcome)
        self._signals.waited(call.tenant, call.endpoint, waited_s, exemplar)
        for outcome, count in counts.items():
            if outcome is not None:
                self._signals.decided(
                    call.tenant, call.workflow_id, outcome, exists=call.exists, count=count
                )
                retry_after_ms: int | None = getattr(told[outcome], "retry_after_ms", None)
                self._signals.figures.record(
                    call.tenant, outcome, waited_s, retry_after_ms, count=count
                )

    def begin_span(self, call: GateCall) -> None:
        """Begin the span of the call, if traces are on, it has none yet, and it is sampled."""
        tracing = telemetry.tracing
        if tracing is None or call.is_sampling_decided:
            return
        call.is_sampling_decided = True
        if tracing.may_sample(call.traceparent):
            call.span = tracing.begin(
                f"{call.endpoint} {call.workflow_id}",
                {telemetry.TENANT: call.tenant, telemetry.WORKFLOW: call.workflow_id},
                parent=call.traceparent,
                kind="server",
            )
            telemetry.CURRENT.set(call.span)
        elif telemetry.CURRENT.get() is not None:  # left by the previous request on this connection
            telemetry.CURRENT.set(None)

    async def answered_already(
        self, call: GateCall, terms: StartTerms, fingerprint: Callable[[], Awaitable[str]]
    ) -> Passed | None:
        """Take a place of the tenant's limiter, or return an answer found with those of others.

        While the tenant is full and others query the store, callers are checked together. One that
        is answered here neither decides nor queries the store. ``None``: ask the store to admit it.
        Raises ``BackendError``.
        """
        override = None
        if not self.tenants.has_none(call.tenant):
            override = await self.tenants.admission(call.tenant)
        if effective_admission(self._settings(), override).strategy is not Strategy.ATOMIC:
            # The tenant's lock serializes the callers; a caller that waits too long gets gate_busy.
            return None
        tenant, checks, limiter = call.tenant, self._checks, self._limiter
        while not call.has_turn:
            if checks.is_full(tenant) and (checks.is_under_way(tenant) or limiter.is_busy(tenant)):
                found = await checks.check(tenant, terms, call.key)
                if found is not None and found.known is not None:
                    verdict = judged.judge_key(found.known, await fingerprint())
                    return await self.answers.known_or_refused(call, verdict, RunStatus.RUNNING)
                refused = None if found is None else found.refused
                if refused is not None and not isinstance(refused, judged.StaleDefinition):
                    return await self.answers.known_or_refused(call, refused, RunStatus.RUNNING)
            call.has_turn = await limiter.enter(tenant, may_share=True)
        return None

    def has_others(self, tenant: TenantId) -> bool:
        """Whether another tenant has come in the last second."""
        other, came_at = self._last_call
        if other == tenant:
            _, came_at = self._other_call
        return self._context.clock.moment() - came_at < OTHERS_MS

    def is_full(self, tenant: TenantId) -> bool:
        """Whether the store has refused a start of the tenant, and admitted none since."""
        return self._checks.is_full(tenant)

    async def refused_rows(
        self,
        call: GateCall,
        terms: StartTerms,
        rows: Sequence[tuple[str | None, OnFull | None]],
        fingerprint: Callable[[int], Awaitable[str]],
    ) -> list[Passed]:
        """The answers to the first starts of a batch that create no run, in one step of the store.

        ``rows`` are their keys and their own ``on_full``; ``fingerprint`` returns that of the
        row at a place. Ends before the first row that may be admitted. Raises ``BackendError``.
        """
        override = await self.tenants.admission(call.tenant)
        if effective_admission(self._settings(), override).strategy is not Strategy.ATOMIC:
            return []
        wishes = [*dict.fromkeys(wish for _, wish in rows)]
        keys = dict.fromkeys(key for key, _ in rows if key is not None)
        wanted = [replace(terms, on_full=wish) for wish in wishes]
        checked = await self._check(call.tenant, wanted, keys)
        if checked is None:
            return []
        refused = dict(zip(wishes, checked.refused, strict=True))
        verdicts: list[judged.Replayed | judged.Refused] = []
        for place, (key, wish) in enumerate(rows):
            known = None if key is None else checked.known.get(key)
            verdict = refused[wish]
            if known is not None:
                verdicts.append(judged.judge_key(known, await fingerprint(place)))
            elif verdict is None or isinstance(verdict, judged.StaleDefinition):
                break
            else:
                verdicts.append(verdict)
        answers = (
            self.answers.known_or_refused(call, each, RunStatus.RUNNING) for each in verdicts
        )
        return [*await asyncio.gather(*answers)]

    async def _check(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked | None:
        """Check starts of a full tenant; ``None`` if the store fails."""
        try:
            async with asyncio.timeout(STORE_MS_MAX / 1000):
                checked = await self._context.store.check_starts(tenant, terms, keys)
        except (BackendError, TimeoutError):
            return None
        self._store_answered()
        return checked

    async def admit(
        self, call: GateCall, ready: PreparedStart, again: Again[_Refusal] | None = None
    ) -> Passed | _Refusal:
        """Ask the store to admit a run; under the tenant's lock, if that is the strategy.

        ``again`` prepares the start once more if a workflow has changed since it was read.
        """
        if call.has_turn and call.span is None:  # the strategy is known: it needs no lock
            return await self._decided(call, ready, again)
        gate = await self._traced_gate(call, ready.admission.run)
        if gate is None:
            return await self._decided(call, ready, again)
        async with gate as held:
            if isinstance(held, admission_lock.GateLockTaken):
                return await self._decided(call, ready, again)
            return self.answers.without_lock(held)

    async def admit_many(
        self,
        call: GateCall,
        rows: Sequence[PreparedRow[_Refusal]],
        admissions: Sequence[Sequence[Admission]],
        again: AgainRows[_Refusal],
        on_judged: Callable[[], None] | None = None,
    ) -> list[Passed | _Refusal]:
        """Ask the store to admit the starts of a batch; there is at least one.

        ``admissions`` are those of the rows, prepared for the store, for each of its steps.
        ``again`` prepares the rows at the given places once more. ``on_judged`` is called as soon
        as the store has judged all rows, unless one was too late or changed each time.

        The rows may also be single starts, each of which has a turn of its own.
        """
        known: Sequence[PreparedRow[_Refusal]] = rows
        verdicts = dict[int, Verdict]()
        stale: Sequence[int] = range(len(rows))
        gate = None
        if not call.has_turn:
            alike = rows.starts if isinstance(rows, PreparedAlike) else None
            first = alike.first if alike else rows[0].admission
            gate = await self._traced_gate(call, first.run)
        async with gate or nullcontext(admission_lock.GateLockTaken()) as held:
            if not isinstance(held, admission_lock.GateLockTaken):
                return [self.answers.without_lock(held)] * len(rows)
            for tried in range(TRIES_MAX):
                if tried:
                    fresh, newest = await again(stale), [*known]
                    for place, row in zip(stale, fresh, strict=True):
                        newest[place] = row
                    known = newest
                    admissions = [*_by_items([row.admission for row in fresh])]
                judgements: list[Verdict] = []
                for part in admissions:
                    judgements += await self._ask_many(call, part)
                verdicts |= zip(stale, judgements, strict=True)
                stale = [
                    place
                    for place, verdict in zip(stale, judgements, strict=True)
                    if isinstance(verdict, judged.StaleDefinition) and known[place].refused is None
                ]
                if not stale:
                    break
        kinds = {*map(type, verdicts.values())}
        if on_judged is not None and not stale and judged.TooLate not in kinds:
            on_judged()
            # The store gets the next rows of the batch before the callers of these are answered.
            for _ in range(_TURNS_TO_SEND):
                await asyncio.sleep(0)
        if isinstance(known, PreparedAlike) and kinds == _ALL_ADMITTED:
            self._announce_alike(known)
            status = known.starts.first.run.status
            return [RunStarted(row.run_id, status, replayed=False) for row in known.starts.rows]
        known = [*known]
        self._announce_rows(call.tenant, known, verdicts)
        return await self.answers.of_rows(call, known, verdicts)

    async def _ask_many(self, call: GateCall, admissions: Sequence[Admission]) -> Sequence[Verdict]:
        """Like ``ask``, for starts of a batch."""
        tracing = None if call.span is None else telemetry.tracing
        with telemetry.UNTRACED if tracing is None else tracing.span("store admit", kind="client"):
            verdicts = await self._context.store.admit_many(
                admissions, within_ms=self._store_ms(call)
            )
        self._store_answered()
        is_full = False if {*map(type, verdicts)} == _ALL_ADMITTED else None
        for place, verdict in enumerate(() if is_full is False else verdicts):
            if isinstance(verdict, _BEGUN):
                is_full = False
            elif isinstance(verdict, _FULL) and admissions[place].queue.on_full is None:
                is_full = True
        if is_full is not None:
            self._note_fullness(call.tenant, is_full=is_full)
        return verdicts

    async def _traced_gate(
        self, call: GateCall, run: Run
    ) -> AbstractAsyncContextManager[admission_lock.Outcome] | None:
        tracing = telemetry.tracing
        if tracing is None or call.span is None:
            return await self._gate(call, run)
        with tracing.span("gate wait"):
            return await self._gate(call, run)

    async def ask(self, call: GateCall, admission: Admission) -> Verdict:
        """Return the store's verdict. Raises ``BackendError``, also when the time is over."""
        within_ms, tracing = self._store_ms(call), telemetry.tracing
        if tracing is None or call.span is None:
            verdict = await self._context.store.admit(admission, within_ms=within_ms)
        else:
            with tracing.span("store admit", kind="client"):
                verdict = await self._context.store.admit(admission, within_ms=within_ms)
        self._store_answered()
        if isinstance(verdict, _FULL) and admission.queue.on_full is None:
            # A start with its own ``on_full`` says nothing about the others.
            self._note_fullness(call.tenant, is_full=True)
        elif isinstance(verdict, _BEGUN) and admission.run.holds_slot:
            self._note_fullness(call.tenant, is_full=False)
        return verdict

    def _store_ms(self, call: GateCall) -> int:
        """How long a call to the store may take, in milliseconds."""
        left_ms = call.ends_at - self._context.clock.moment()
        return max(1, min(STORE_MS_MAX, left_ms))

    def _note_fullness(self, tenant: TenantId, *, is_full: bool) -> None:
        self._checks.note_fullness(tenant, is_full=is_full)
        if is_full:
            self._limiter.send_away(tenant)

    def _store_answered(self) -> None:
        self._pacing.answered(Backend.STORE)
        if self._outage.error is not None:
            self._outage.worked()

    async def _gate(
        self, call: GateCall, run: Run
    ) -> AbstractAsyncContextManager[admission_lock.Outcome] | None:
        """Wait for the limiter, or return the tenant's lock, by the tenant's strategy.

        ``None``: no lock is needed.
        """
        if not run.holds_slot:
            # Without a slot there is no cap to check, so the lock is not needed.
            await self._take_turn(call)
            return None
        override = await self.tenants.admission(call.tenant)
        how = effective_admission(self._settings(), override)
        match how.strategy:
            case Strategy.ATOMIC:
                await self._take_turn(call)
                return None
            case Strategy.LOCK:
                return self._locked(call, how, run.risk)
            case _:
                assert_never(how.strategy)

    async def _take_turn(self, call: GateCall) -> None:
        """Wait for a place of the limiter, unless the call has one."""
        if not call.has_turn:
            call.has_turn = await self._limiter.enter(call.tenant, may_share=False)

    @asynccontextmanager
    async def _locked(
        self, call: GateCall, how: AdmissionSettings, risk: Risk
    ) -> AsyncIterator[admission_lock.Outcome]:
        async with self._lock.hold(call.tenant, how, risk=risk, until=call.lock_until) as held:
            if not isinstance(held, admission_lock.GateLockFailed):
                self._pacing.answered(Backend.LOCKS)
            call.is_locked = isinstance(held, admission_lock.GateLockTaken)
            yield held

    async def _decided(
        self, call: GateCall, ready: PreparedStart, again: Again[_Refusal] | None
    ) -> Passed | _Refusal:
        for _ in range(TRIES_MAX):
            if is_large_write(ready.admission.transition):
                async with self._large.turn(call.tenant):
                    verdict = await self.ask(call, ready.admission)
            else:
                verdict = await self.ask(call, ready.admission)
            if isinstance(verdict, judged.Admitted):
                self._announce(ready)
                run = ready.admission.run
                return RunStarted(run.id, run.status, replayed=False)
            if not isinstance(verdict, judged.StaleDefinition) or again is None:
                if isinstance(verdict, judged.Queued):
                    self._context.bus.ring(Bell.CHANGED, call.tenant)
                return await self.answers.not_admitted(call, ready.admission.run, verdict)
            fresh = await again()
            if not isinstance(fresh, PreparedStart):
                return fresh
            ready = fresh
        return self.answers.store_failed(call, CHANGED_EACH_TIME)

    def _announce(self, ready: PreparedStart) -> None:
        """Ring the bells for the jobs, the tenant's feed and the run's end."""
        run, transition, bus = ready.admission.run, ready.admission.transition, self._context.bus
        self._on_admitted(run, ready.plan)
        for topic in _topics(transition):
            bus.ring(Bell.READY, topic)
        bus.ring(Bell.CHANGED, run.tenant)
        if run.status.is_finished:
            self._announce_end(run)

    def _announce_rows(
        self, tenant: TenantId, rows: Sequence[PreparedRow[Any]], verdicts: Mapping[int, Verdict]
    ) -> None:
        """Like ``_announce``, for the starts of a batch that got a run: each bell once."""
        bus, topics, is_changed = self._context.bus, set[Topic](), False
        for place, row in enumerate(rows):
            verdict, run = verdicts[place], row.admission.run
            is_changed = is_changed or isinstance(verdict, _BEGUN)
            if isinstance(verdict, judged.Admitted) and row.plan is not None:
                self._on_admitted(run, row.plan)
                for effect in row.admission.transition.effects:
                    if isinstance(effect, DispatchJob):
                        topics.add(effect.job.topic)
                if run.status.is_finished:
                    self._announce_end(run)
        for topic in sorted(topics):
            bus.ring(Bell.READY, topic)
        if is_changed:
            bus.ring(Bell.CHANGED, tenant)

    def _announce_alike(self, rows: PreparedAlike[Any]) -> None:
        """The same for starts that begin alike, all of which got a run: none has ended."""
        starts, plan, bus = rows.starts, rows.plan, self._context.bus
        if self._on_alike_admitted is not None:
            self._on_alike_admitted(starts, plan)
        else:
            for admission in starts:
                self._on_admitted(admission.run, plan)
        for topic in _topics(starts.first.transition):
            bus.ring(Bell.READY, topic)
        bus.ring(Bell.CHANGED, starts.first.run.tenant)

    def _announce_end(self, run: Run) -> None:
        """Announce that a run ended with its first transition."""
        self._context.bus.ring(Bell.FINISHED, run.id)
        self._context.signals.finished(run, run.status)
        if telemetry.tracing is not None and run.traceparent is not None:
            telemetry.tracing.run_ended(run, run.traceparent)


def _by_items(admissions: Sequence[Admission]) -> Iterator[list[Admission]]:
    """Admissions in parts with few items and bytes: a new version may begin a for-each."""
    part: list[Admission] = []
    items = size = 0
    for each in admissions:
        items, size = items + len(each.run.items), size + input_bytes(each.transition)
        if part and (items > STEP_ITEMS_MAX or size > BEGUN_BYTES_MAX):
            yield part
            part, items, size = [], len(each.run.items), input_bytes(each.transition)
        part.append(each)
    if part:
        yield part


def _topics(transition: Transition) -> Sequence[Topic]:
    """The topics of the jobs that a transition dispatches, in a fixed order."""
    topics = [each.job.topic for each in transition.effects if isinstance(each, DispatchJob)]
    return topics if len(topics) == 1 else sorted({*topics})


def _end_span(
    call: GateCall, span: telemetry.Span, answer: object, outcome: str | None
) -> dict[str, str] | None:
    """End the span of a call; return the exemplar for its duration."""
    if not span.is_sampled:
        return None
    run_id = answer.run_id if isinstance(answer, RunStarted) else None
    attributes = {
        telemetry.WORKFLOW: call.workflow_id,
        telemetry.OUTCOME: outcome or type(answer).__name__,
        telemetry.RUN: run_id,
    }
    span.rename(f"{call.endpoint} {call.workflow_id}")  # a rerun's is known only now
    span.note(attributes)
    span.end(error=answer.error if isinstance(answer, GateFailed) else None)
    return span.exemplar


_ADMITTED: Final = "admitted"


def _outcome(answer: object) -> str | None:
    """The metric's label for an answer; ``None`` if the store was not asked to admit anything."""
    match answer:
        case RunStarted(replayed=True):
            return "replayed"
        case RunStarted(status=status):
            return "queued" if status is RunStatus.QUEUED else _ADMITTED
        case GateFull(queue_max=queue_max):
            return "full" if queue_max is None else "queue_full"
        case GateOverBudget():
            return "budget_exhausted"
        case KeyMismatch():
            return "mismatch"
        case JobThrottled():
            return "throttled"
        case GateFailed(code=code):
            return str(code)
        case _:
            return None
