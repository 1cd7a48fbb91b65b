"""The gate: starts, reruns and single jobs, from the request to the answer.

    what should run?  →  decide how it begins  →  [the tenant's lock]  →  store.admit  →  answer

A start takes the newest versions of its workflow, a rerun those of the run it repeats, a single job
a workflow generated for it. From there on all three use ``services.admit``. The gate raises no
``BackendError``: an unavailable backend becomes the answer ``GateFailed``.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from stanchion.core import admission as judged
from stanchion.core.admission import fingerprint
from stanchion.core.audit import AuditEntry
from stanchion.core.draft import size_of
from stanchion.core.events import Started as StartRequested
from stanchion.core.faults import BATCH_FAULTS_MAX, Fault, WorkflowFaults
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Run,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    make_run_id,
    make_run_ids,
)
from stanchion.core.plan import Plan
from stanchion.core.queue import ANY_PLACE, QueueRequest
from stanchion.core.rerun import (
    RerunOptions,
    RerunRefused,
    RerunStep,
    RerunVersion,
    items_to_keep,
    preview,
    rerun,
    unfinished,
)
from stanchion.core.run import evolve
from stanchion.core.schedule import TickMark
from stanchion.core.schema import InputSchema
from stanchion.core.settings import Settings
from stanchion.core.steps.foreach import TOO_MANY_ITEMS
from stanchion.core.transition import Transition
from stanchion.ports.records import Admission, AlikeStart, AlikeStarts
from stanchion.services.admit import Admitter, GateCall, PreparedAlike, PreparedRow, PreparedStart
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import (
    GateFailed,
    GateFull,
    GateOverBudget,
    InvalidInput,
    KeyMismatch,
    NoRerun,
    NotStarted,
    Pacing,
    QueueOff,
    RerunAnswer,
    RunStarted,
    StartAnswer,
    SubmitAnswer,
    UnknownRun,
)
from stanchion.services.limiter import Gathering, TenantTurns
from stanchion.services.plans import Linked, Plans, UnknownWorkflow, is_single_job
from stanchion.services.signals import AdmissionEndpoint, AdmissionSignals
from stanchion.services.work import Decider

_NO_VERSION: Final = -1
"""No workflow has this version: an admission with it can only be replayed, never admitted."""
_NONCE_BYTES: Final = 16
_CHANCE_BYTES: Final = 8
_CHANCE_BITS: Final = 2**60 - 1
"""Of the random bits for an id, those that it has."""
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_ITEMS_AT_ONCE: Final = 1_000
STEP_VALUES_MAX: Final = 250
"""Values in the inputs of the rows that one step of a batch admits, if they may begin a for-each:
it begins an item for each value of a list, and other callers wait while all are written."""
_UNKNOWN_FIRST_STEPS: Final = 100
"""Of a plan that is not in the cache, until the first rows have been prepared."""
STEP_ROWS_BESIDE_OTHERS: Final = 50
"""Rows that one step of a batch admits while other tenants start runs: they wait for each step."""
_PAUSE: Final = 2.0
"""After each step beside other tenants they have the replica for so many times as long as it took:
every turn of the event loop on which a part of a step is prepared delays each of their requests."""
_PAUSE_S_MAX: Final = 0.02
_FIRST_STEP_PART: Final = 4
"""The first step of a batch with several has this part of the rows that a step may have, and the
second one twice as many."""
_STEPS_AHEAD: Final = 3
"""Steps of a batch that wait, prepared, for those before them."""
_UNKNOWN: Final = WorkflowId("")
"""A rerun's workflow, until its run was read."""


class StartRow(NamedTuple):
    """One start of a batch."""

    input: JsonObject
    labels: Mapping[str, str]
    key: str
    queue: QueueRequest = ANY_PLACE


class RerunPreview(msgspec.Struct, frozen=True):
    """What a rerun would do with each step."""

    old: Run
    new: Run
    """The run that it would start. It is not stored."""
    steps: dict[StepId, RerunStep]


class Gate:
    """Creates runs, or returns why not."""

    def __init__(  # noqa: PLR0913 - what a gate is connected to, by keyword
        self,
        context: ReplicaContext,
        *,
        plans: Plans,
        settings: Callable[[], Settings],
        pacing: Pacing,
        signals: AdmissionSignals,
        decider: Decider,
        on_admitted: Callable[[Run, Plan], None] = lambda _run, _plan: None,
        on_alike_admitted: Callable[[AlikeStarts, Plan], None] | None = None,
    ) -> None:
        """``on_alike_admitted``: ``on_admitted`` for runs that begin alike, at once."""
        self._context = context
        self._plans = plans
        self._work = decider.budget
        self._decider = decider
        self._admitter = Admitter(
            context,
            settings=settings,
            pacing=pacing,
            signals=signals,
            on_admitted=on_admitted,
            on_alike_admitted=on_alike_admitted,
        )
        self._together: Gathering[_Starting, StartAnswer] = Gathering(self._start_together)
        self.tenants = self._admitter.tenants
        self.batches = TenantTurns()
        """Lets each tenant decode and start one batch at a time."""

    async def start(  # noqa: PLR0913 - what a start may carry, by keyword
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        input: JsonObject,  # noqa: A002 - the word of the API
        *,
        key: str | None,
        actor: str,
        labels: Mapping[str, str] = _NO_LABELS,
        traceparent: str | None = None,
        tick: TickMark | None = None,
        starter: str | None = None,
        queue: QueueRequest = ANY_PLACE,
        is_short: bool = False,
    ) -> StartAnswer:
        """Start a run of the newest version of a workflow. Raises ``TenantOverloaded``.

        One with a short input (``is_short``) may go to the store together with others.
        With ``tick``, the answer is ``KeyMismatch`` if the schedule has had a run for it, and
        ``starter`` is the author of the schedule.
        """
        self._work.check(tenant)
        call = GateCall(
            tenant=tenant,
            workflow_id=workflow_id,
            endpoint=AdmissionEndpoint.START,
            key=key,
            traceparent=traceparent,
        )
        return await self._admitter.in_time(
            call,
            self._start(
                call,
                _Given(
                    input, dict(labels), actor, tick=tick, starter=starter, queue=queue, key=key
                ),
                is_short=is_short,
            ),
        )

    async def start_many(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        rows: Sequence[StartRow],
        *,
        actor: str,
        traceparent: str | None = None,
    ) -> list[StartAnswer]:
        """Start runs of a workflow, each judged by itself, in their order.

        If the gate fails for one, the rows behind it get the same answer: a caller repeats them
        with the same keys. Raises ``TenantOverloaded``.
        """
        self._work.check(tenant)
        begun: list[asyncio.Task[list[StartAnswer]]] = []
        turn: _Turn | None = None
        last: GateCall | None = None

        def of_rows(some: Sequence[StartRow]) -> tuple[GateCall, list[_Given]]:
            nonlocal last
            last = call = GateCall(
                tenant=tenant,
                workflow_id=workflow_id,
                endpoint=AdmissionEndpoint.START,
                key=None,
                traceparent=traceparent,
                faults_left=BATCH_FAULTS_MAX if last is None else last.faults_left,
                rows=len(some),
            )
            return call, [
                _Given(row.input, dict(row.labels), actor, queue=row.queue, key=row.key)
                for row in some
            ]

        refused: list[StartAnswer] = []
        if rows and self._admitter.is_full(tenant):
            call, given = of_rows(rows)
            refused = await self._refuse_rows(call, given)
        ahead: deque[_Turn] = deque()
        # To count values takes time, and only a for-each begins an item for each.
        values_max = STEP_VALUES_MAX if self._plans.may_begin_items(tenant, workflow_id) else None
        rows_max, clock = self._context.store.admissions_max, self._context.clock
        first_max = rows_max // _FIRST_STEP_PART
        if self._admitter.has_others(tenant):
            rows_max = first_max = min(rows_max, STEP_ROWS_BESIDE_OTHERS)
        # A thread of the store that writes rows needs the interpreter some ten times a step.
        with self._work.short_turns():
            async with asyncio.TaskGroup() as group:
                first_steps = partial(self._plans.first_steps, tenant, workflow_id)
                left = rows[len(refused) :]
                for some in _in_steps(left, rows_max, first_max, values_max, first_steps):
                    began = clock.moment()
                    call, given = of_rows(some)
                    turn = _Turn(turn)
                    begun.append(group.create_task(self._start_rows(call, given, turn)))
                    # The next rows are prepared while the store handles these and others wait.
                    await turn.is_prepared.wait()
                    ahead.append(turn)
                    if self._admitter.has_others(tenant):
                        await turn.is_sent.wait()
                        ahead.clear()  # all of them are sent
                        took_s = (clock.moment() - began) / 1_000
                        await clock.sleep(min(_PAUSE_S_MAX, _PAUSE * took_s))
                    elif len(ahead) > (_STEPS_AHEAD if values_max is None else 0):
                        await ahead.popleft().is_sent.wait()
        return refused + [answer for each in begun for answer in each.result()]

    async def rerun(  # noqa: PLR0913 - what a rerun may carry, by keyword
        self,
        tenant: TenantId,
        run_id: RunId,
        options: RerunOptions,
        *,
        key: str | None,
        actor: str,
        audit: AuditEntry | None = None,
        traceparent: str | None = None,
        learn: Callable[[WorkflowId], object] | None = None,
    ) -> RerunAnswer:
        """Do a finished run again, all of it or a part. Raises ``TenantOverloaded``.

        ``options`` have no ``fault``. The new run's id is added to the audit entry. ``learn`` is
        told the workflow once it is known, also of a rerun that is then refused.
        """
        self._work.check(tenant)
        call = GateCall(
            tenant=tenant,
            workflow_id=_UNKNOWN,
            endpoint=AdmissionEndpoint.RERUN,
            key=key,
            audit=audit,
            traceparent=traceparent,
        )
        answer = await self._admitter.in_time(call, self._rerun(call, run_id, options, actor))
        if learn is not None and call.exists:
            learn(call.workflow_id)
        return answer

    async def preview_rerun(
        self, tenant: TenantId, run_id: RunId, options: RerunOptions
    ) -> RerunPreview | NoRerun:
        """What the rerun would keep and repeat, or why there can be none. Changes nothing.

        It is not an admission: it is not counted as one, and raises ``BackendError`` and
        ``TenantOverloaded``.
        """
        self._work.check(tenant)
        old = await self._old_run(tenant, run_id)
        if old is None:
            return UnknownRun(run_id)
        if options.version is RerunVersion.SAME or is_single_job(old):
            repeated = await self._repeated(old, options)
            if not isinstance(repeated, tuple):
                return repeated
            plan, pending = repeated
        else:
            if not old.status.is_finished:
                return unfinished(old)
            linked = await self._plans.newest(tenant, old.workflow_id, refresh=True)
            if not isinstance(linked, Linked):
                return linked
            given = old.input if options.input is None else options.input
            faults = await self._faults(tenant, linked.plan, given)
            if faults:
                return InvalidInput(faults)
            plan, pending = linked.plan, self._pending(tenant, linked, given)
        return RerunPreview(old, pending, preview(plan, old, pending))

    async def submit(
        self,
        tenant: TenantId,
        topic: Topic,
        input: JsonValue,  # noqa: A002 - the word of the API
        *,
        key: str | None,
        actor: str,
        traceparent: str | None = None,
    ) -> SubmitAnswer:
        """Submit a job on its own: a run of one step, limited by rate and not by slots."""
        linked = self._plans.of_job(topic)
        call = GateCall(
            tenant=tenant,
            workflow_id=linked.plan.workflow_id,
            endpoint=AdmissionEndpoint.SUBMIT,
            key=key,
            exists=True,
            traceparent=traceparent,
        )
        self._admitter.begin_span(call)
        pending = self._pending(tenant, linked, {"input": input}, holds_slot=False)
        asked = _asked(call, call.workflow_id, {"input": input})
        ready = await self._ready(call, linked.plan, pending, asked=asked, actor=actor)
        answer = await self._admitter.in_time(call, self._admitter.admit(call, ready))
        # Only a run that takes a slot can meet a full tenant, and a single job reserves nothing.
        assert not isinstance(answer, GateFull | QueueOff | GateOverBudget)
        return answer

    async def close(self) -> None:
        """Wait for pending releases of locks."""
        await self._admitter.close()

    # ── Starts ──────────────────────────────────────────────────────────────────────────────────

    async def _start(self, call: GateCall, given: _Given, *, is_short: bool = False) -> StartAnswer:
        linked = await self._linked(call, given, refresh=False)
        if not isinstance(linked, Linked):
            return linked
        if (
            is_short
            and call.has_turn
            and call.traceparent is None
            and call.span is None
            and not given.labels
            and given.queue is ANY_PLACE
            and given.tick is None
            and self._decider.begin_alike(linked.plan)
        ):
            # The same plan of the same tenant: the object is kept by those that wait.
            kind = (call.tenant, id(linked), given.actor, given.key is None)
            return await self._together.ask(
                kind,
                _Starting(call, linked, given),
                call.ends_at,
                lambda: self._start_alone(call, linked, given),
            )
        return await self._start_alone(call, linked, given)

    async def _start_alone(self, call: GateCall, linked: Linked, given: _Given) -> StartAnswer:
        drafted = await self._drafted(call, linked, given)
        if not isinstance(drafted, PreparedStart):
            return drafted
        return await self._admitter.admit(call, drafted, lambda: self._again(call, given))

    async def _again(self, call: GateCall, given: _Given) -> PreparedStart | StartAnswer:
        """The start once more, after the workflow has changed."""
        linked = await self._linked(call, given, refresh=True)
        return await self._drafted(call, linked, given) if isinstance(linked, Linked) else linked

    async def _start_together(self, starting: Sequence[_Starting]) -> Sequence[StartAnswer] | None:
        """Start runs of one plan, each judged by itself, in one step of the store.

        ``None`` if they cannot be prepared together. Raises ``BackendError``.
        """
        first = starting[0].call
        call = GateCall(
            tenant=first.tenant,
            workflow_id=first.workflow_id,
            endpoint=first.endpoint,
            key=None,
            exists=True,
            ends_at=min(each.call.ends_at for each in starting),
            has_turn=True,  # each of them has
        )
        given = [each.given for each in starting]
        try:
            rows = await self._rows_together(call, starting[0].linked, given)
            asked = self._asked_of(rows)
        except Exception:  # noqa: BLE001 - that of one must not be that of the others
            return None
        return await self._admitter.admit_many(
            call, rows, asked, lambda places: self._rows_again(call, given, places)
        )

    async def _rows_together(
        self, call: GateCall, linked: Linked, given: Sequence[_Given]
    ) -> Sequence[PreparedRow[NotStarted]]:
        """What the store is asked for starts whose inputs the plan accepts."""
        looked = [(await self._fingerprint(call, each), ()) for each in given]
        alike = await self._alike_rows(call, linked, given, looked)
        return alike or await self._rows_apart(call, linked, given, looked)

    def _asked_of(self, rows: Sequence[PreparedRow[NotStarted]]) -> Sequence[Admission]:
        """The admissions of rows, prepared for the store."""
        if isinstance(rows, PreparedAlike):
            return self._context.store.prepare_admissions(rows.starts)
        return self._context.store.prepare_admissions([row.admission for row in rows])

    async def _rows_again(
        self, call: GateCall, given: Sequence[_Given], places: Sequence[int]
    ) -> Sequence[PreparedRow[NotStarted]]:
        linked = await self._plans.newest(call.tenant, call.workflow_id, refresh=True)
        some = [given[place] for place in places]
        return await self._prepared_rows(call, linked, some, is_fresh=True)

    async def _start_rows(
        self, call: GateCall, given: Sequence[_Given], turn: _Turn
    ) -> list[StartAnswer]:
        """Start some rows of a batch, after the store has judged those before them."""
        is_first = turn.is_first

        async def prepared() -> tuple[Sequence[PreparedRow[NotStarted]], Sequence[Admission]]:
            linked = await self._plans.newest(call.tenant, call.workflow_id)
            rows = await self._prepared_rows(call, linked, given)
            await asyncio.sleep(0)  # the rows before these may be sent
            return rows, self._asked_of(rows)

        def are_behind_the_last_slot() -> bool:
            return not is_first and self._admitter.is_full(call.tenant)

        async def in_turn() -> list[StartAnswer]:
            ready = None if are_behind_the_last_slot() else await prepared()
            turn.is_prepared.set()
            failed = await turn.comes()
            if failed is not None:
                return [failed] * len(given)
            if are_behind_the_last_slot():
                refused = await self._refused_at_once(call, given)
                if len(refused) == len(given):
                    return refused
            rows, asked = ready or await prepared()
            return await self._admitter.admit_many(
                call, rows, asked, lambda places: self._rows_again(call, given, places), turn.judged
            )

        answers: list[StartAnswer] = []
        try:
            found = await self._admitter.in_time(call, in_turn())
            answers = [found] * len(given) if isinstance(found, GateFailed) else found
        finally:
            turn.ends(answers)
        return answers

    async def _refuse_rows(self, call: GateCall, given: Sequence[_Given]) -> list[StartAnswer]:
        """The answers to the first rows of a batch of a full tenant: see ``_refused_at_once``."""
        found = await self._admitter.in_time(call, self._refused_at_once(call, given))
        return [found] * len(given) if isinstance(found, GateFailed) else found

    async def _refused_at_once(self, call: GateCall, given: Sequence[_Given]) -> list[StartAnswer]:
        """The answers to the first rows of a batch for which a full tenant has no slot.

        One step of the store finds the runs of their keys, and why the others are refused. The rows
        from the first one on that may be admitted, or whose input is faulty, have no answer.
        """
        linked = await self._plans.newest(call.tenant, call.workflow_id)
        if not isinstance(linked, Linked):
            return []
        call.exists, schema = True, linked.plan.body.schema
        if schema is not None:
            are_faulty = await self._work.done_each(
                call.tenant, lambda row: bool(schema.faults(row.input, first_only=True)), given
            )
            given = given[: are_faulty.index(True)] if True in are_faulty else given
        rows = [(row.key, row.queue.on_full) for row in given]

        async def asked(place: int) -> str:
            return await self._fingerprint(call, given[place])

        return [*await self._admitter.refused_rows(call, linked.terms, rows, asked)]

    async def _prepared_rows(
        self,
        call: GateCall,
        linked: Linked | UnknownWorkflow | WorkflowFaults,
        given: Sequence[_Given],
        *,
        is_fresh: bool = False,
    ) -> Sequence[PreparedRow[NotStarted]]:
        """What the store is asked for each row of a batch."""
        tenant, schema = call.tenant, None
        call.exists = not isinstance(linked, UnknownWorkflow)
        if isinstance(linked, Linked):
            schema = linked.plan.body.schema

        def looked_at(row: _Given) -> tuple[str, tuple[Fault, ...]]:
            asked = fingerprint(call.workflow_id, row.body)
            if schema is None:
                return asked, ()
            # A hundred faults take two hundred times as long as the first.
            faults = schema.faults(row.input, first_only=call.faults_left <= 0 or not is_fresh)
            if is_fresh:
                call.faults_left -= len(faults)
            return asked, faults

        looked = await self._work.done_each(tenant, looked_at, given)
        if not is_fresh and any(faults for _, faults in looked):
            # The cached plan may be old: only the newest version may refuse an input.
            linked = await self._plans.newest(tenant, call.workflow_id, refresh=True)
            return await self._prepared_rows(call, linked, given, is_fresh=True)
        if not isinstance(linked, Linked):
            pairs = zip(given, looked, strict=True)
            return [self._refused(call, row, asked, linked) for row, (asked, _) in pairs]
        if not any(row.labels or row.queue != given[0].queue for row in given):
            alike = await self._alike_rows(call, linked, given, looked)
            if alike is not None:
                return alike
        return await self._rows_apart(call, linked, given, looked)

    async def _rows_apart(
        self,
        call: GateCall,
        linked: Linked,
        given: Sequence[_Given],
        looked: Sequence[tuple[str, tuple[Fault, ...]]],
    ) -> Sequence[PreparedRow[NotStarted]]:
        """What the store is asked for rows of which each is decided by itself."""
        rows: dict[int, PreparedRow[NotStarted]] = {}
        for place, (asked, faults) in enumerate(looked):
            if faults:
                rows[place] = self._refused(call, given[place], asked, InvalidInput(faults))
        others = [place for place in range(len(given)) if place not in rows]
        runs = self._pending_rows(call, linked, [given[place] for place in others])
        began = StartRequested(actor=given[0].actor)
        transitions = await self._decider.decide_each(linked.plan, runs, (began,))
        for place, run, transition in zip(others, runs, transitions, strict=True):
            asked, _ = looked[place]
            rows[place] = self._row(call, linked, given[place], asked, run, transition)
        return [rows[place] for place in range(len(given))]

    async def _alike_rows(
        self,
        call: GateCall,
        linked: Linked,
        given: Sequence[_Given],
        looked: Sequence[tuple[str, tuple[Fault, ...]]],
    ) -> PreparedAlike[NotStarted] | None:
        """What the store is asked for rows that begin alike; ``None`` if some do not."""
        if any(faults for _, faults in looked):
            return None
        first, (asked, _) = given[0], looked[0]
        (pending,) = self._pending_rows(call, linked, given[:1])
        began = StartRequested(actor=first.actor)
        others = [row.input for row in given[1:]]
        decided = await self._decider.start_alike(linked.plan, pending, (began,), others)
        if decided is None:
            return None
        made, works = decided
        model = self._row(call, linked, first, asked, pending, made).admission
        run_ids, _ = self._new_names(call.tenant, pending.created_at, len(others))
        rows = [AlikeStart.of(model)]
        for run_id, row, (asked, _), work in zip(
            run_ids, given[1:], looked[1:], works, strict=True
        ):
            rows.append(AlikeStart(run_id, row.key, asked, row.input, work))
        return PreparedAlike(AlikeStarts(model, rows), linked.plan)

    def _pending_rows(self, call: GateCall, linked: Linked, given: Sequence[_Given]) -> list[Run]:
        """The runs of a batch before their first decision. They differ in little."""
        if not given:
            return []
        traced = _traceparent(call)
        model = self._pending(call.tenant, linked, {}, starter=given[0].actor, traceparent=traced)
        run_ids, stamp = self._new_names(call.tenant, model.created_at, len(given))
        return [
            replace(model, id=run_id, input=row.input, labels=row.labels, stamp=stamp)
            for row, run_id in zip(given, run_ids, strict=True)
        ]

    def _refused(
        self, call: GateCall, given: _Given, asked: str, why: NotStarted
    ) -> PreparedRow[NotStarted]:
        return PreparedRow(self._nothing(call, given, asked), None, why)

    def _row(
        self,
        call: GateCall,
        linked: Linked,
        given: _Given,
        asked: str,
        pending: Run,
        transition: Transition,
    ) -> PreparedRow[NotStarted]:
        if too_many := _too_many_items(transition):
            return self._refused(call, given, asked, InvalidInput(too_many))
        admission = Admission(
            run=evolve(pending, transition),
            before=pending,
            transition=transition,
            key=given.key,
            fingerprint=asked,
            definitions=linked.definitions,
            budget=linked.terms.budget,
            queue=given.queue,
        )
        return PreparedRow(admission, linked.plan)

    async def _linked(
        self,
        call: GateCall,
        given: _Given,
        *,
        refresh: bool,
        refused_by: tuple[InputSchema, tuple[Fault, ...]] | None = None,
    ) -> Linked | StartAnswer:
        """The plan that accepts the input; or the answer, if no run is to be prepared."""
        linked = await self._plans.newest(call.tenant, call.workflow_id, refresh=refresh)
        if isinstance(linked, UnknownWorkflow):
            return linked
        call.exists = True
        if isinstance(linked, WorkflowFaults):
            return await self._known(call, given) or linked
        schema = linked.plan.body.schema
        faults: tuple[Fault, ...] = ()
        if refused_by is not None and refused_by[0] is schema:
            faults = refused_by[1]
        elif schema is not None:
            faults = await self._work.done(call.tenant, lambda: schema.faults(given.input))
        if schema is not None and faults and not refresh:
            # The cached plan may be old: only the newest version may refuse an input.
            refused_by = (schema, faults)
            return await self._linked(call, given, refresh=True, refused_by=refused_by)
        if faults:
            return await self._known(call, given) or InvalidInput(faults)
        if not refresh and given.tick is None:
            terms = linked.terms
            if given.queue.on_full is not None:
                terms = replace(terms, on_full=given.queue.on_full)
            answer = await self._admitter.answered_already(
                call, terms, lambda: self._fingerprint(call, given)
            )
            if answer is not None:
                return answer
        return linked

    async def _drafted(
        self, call: GateCall, linked: Linked, given: _Given
    ) -> PreparedStart | StartAnswer:
        asked = "" if call.key is None else await self._fingerprint(call, given)
        pending = self._pending(
            call.tenant,
            linked,
            given.input,
            labels=given.labels,
            rerun_of=given.rerun_of,
            starter=given.starter or given.actor,
            traceparent=_traceparent(call),
        )
        ready = await self._ready(
            call,
            linked.plan,
            pending,
            asked=asked,
            actor=given.actor,
            definitions=linked.definitions,
            tick=given.tick,
            queue=given.queue,
        )
        if too_many := _too_many_items(ready.admission.transition):
            return InvalidInput(too_many)
        return ready

    async def _fingerprint(self, call: GateCall, given: _Given) -> str:
        """What tells requests with the same key apart; empty without a key."""
        if call.key is None and given.key is None:
            return ""
        return await self._work.done(
            call.tenant, lambda: fingerprint(given.subject or call.workflow_id, given.body)
        )

    async def _known(self, call: GateCall, given: _Given) -> RunStarted | KeyMismatch | None:
        """The answer that the idempotency key got before; ``None`` if the key is new.

        A request that was admitted once is replayed, even if the newest workflow would refuse it.
        """
        if call.key is None:
            return None
        given = given._replace(key=call.key)
        nothing = self._nothing(call, given, await self._fingerprint(call, given))
        verdict = await self._admitter.ask(call, nothing)
        match verdict:
            case judged.Replayed(run_id):
                return await self._admitter.replayed(call, run_id, RunStatus.RUNNING)
            case judged.Mismatch():
                return KeyMismatch()
            case _:
                return None

    def _nothing(self, call: GateCall, given: _Given, asked: str) -> Admission:
        """An admission that finds the run of its key, and creates none."""
        now = self._context.clock.now()
        return Admission(
            run=Run(
                id=self._new_id(call.tenant, now),
                tenant=call.tenant,
                workflow_id=call.workflow_id,
                workflow_version=_NO_VERSION,
                input=given.input,
                created_at=now,
            ),
            transition=Transition(status=RunStatus.PENDING),
            key=given.key,
            fingerprint=asked,
            definitions={call.workflow_id: _NO_VERSION},
        )

    # ── Reruns ──────────────────────────────────────────────────────────────────────────────────

    async def _rerun(
        self, call: GateCall, run_id: RunId, options: RerunOptions, actor: str
    ) -> RerunAnswer:
        old = await self._old_run(call.tenant, run_id)
        if old is None:
            return UnknownRun(run_id)
        call.workflow_id, call.exists = old.workflow_id, True
        subject = WorkflowId(f"rerun/{run_id}")
        if options.version is RerunVersion.NEWEST and not is_single_job(old):
            if not old.status.is_finished:
                return unfinished(old)
            given = old.input if options.input is None else options.input
            labels = {**old.labels}
            return await self._start(call, _Given(given, labels, actor, old.id, options))
        repeated = await self._repeated(old, options)
        if not isinstance(repeated, tuple):
            return repeated
        plan, pending = repeated
        asked = await self._work.done(
            call.tenant, lambda: _asked(call, subject, options.fingerprinted())
        )
        ready = await self._ready(call, plan, pending, asked=asked, actor=actor)
        if too_many := _too_many_items(ready.admission.transition):
            return InvalidInput(too_many)
        return await self._admitter.admit(call, ready)

    async def _repeated(
        self, old: Run, options: RerunOptions
    ) -> tuple[Plan, Run] | RerunRefused | InvalidInput:
        """The new run of the same versions, with what it keeps of the old one."""
        plan = await self._plans.of_run(old)
        if options.input is not None and is_single_job(old):
            options = replace(options, input={"input": options.input})
        faults = await self._faults(old.tenant, plan, options.input)
        if faults:
            return InvalidInput(faults)
        wanted = items_to_keep(plan, old, options)
        if isinstance(wanted, RerunRefused):
            return wanted
        items = await self._items(old.id, wanted)
        now = self._context.clock.now()
        pending = rerun(
            plan,
            old,
            options,
            run_id=self._new_id(old.tenant, now),
            now=now,
            items=items,
        )
        return pending if isinstance(pending, RerunRefused) else (plan, pending)

    async def _items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        """Items of a finished run, which do not change. They are read in portions."""
        items: dict[ItemKey, Item] = {}
        for step_id, indexes in wanted.items():
            for first in range(0, len(indexes), _ITEMS_AT_ONCE):
                some = {step_id: indexes[first : first + _ITEMS_AT_ONCE]}
                items |= await self._context.store.load_items(run_id, some)
        return items

    async def _old_run(self, tenant: TenantId, run_id: RunId) -> Run | None:
        found = await self._context.store.load(run_id)
        return None if found is None or found.run.tenant != tenant else found.run

    async def _faults(
        self, tenant: TenantId, plan: Plan, given: JsonObject | None
    ) -> tuple[Fault, ...]:
        schema = plan.body.schema
        if schema is None or given is None:
            return ()
        return await self._work.done(tenant, lambda: schema.faults(given))

    # ── Runs that are ready to begin ────────────────────────────────────────────────────────────

    def _pending(  # noqa: PLR0913 - what a run has, by keyword
        self,
        tenant: TenantId,
        linked: Linked,
        given: JsonObject,
        *,
        holds_slot: bool = True,
        labels: dict[str, str] | None = None,
        rerun_of: RunId | None = None,
        starter: str | None = None,
        traceparent: str | None = None,
    ) -> Run:
        now = self._context.clock.now()
        return Run(
            id=self._new_id(tenant, now),
            tenant=tenant,
            workflow_id=linked.plan.workflow_id,
            workflow_version=linked.version,
            workflow_source=linked.source,
            uses=linked.uses,
            input=given,
            created_at=now,
            risk=linked.plan.risk,
            holds_slot=holds_slot,
            labels=labels or {},
            rerun_of=rerun_of,
            starter=starter,
            traceparent=traceparent,
        )

    async def _ready(  # noqa: PLR0913 - what an admission has, by keyword
        self,
        call: GateCall,
        plan: Plan,
        pending: Run,
        *,
        asked: str,
        actor: str,
        definitions: dict[WorkflowId, int] | None = None,
        tick: TickMark | None = None,
        queue: QueueRequest = ANY_PLACE,
    ) -> PreparedStart:
        traced = _traceparent(call)
        if pending.starter is None or pending.traceparent != traced:
            pending = replace(pending, starter=pending.starter or actor, traceparent=traced)
        began = StartRequested(actor=actor)
        transition = await self._decider.decide_start(plan, pending, began)
        stamp = Stamp(1, self._context.entropy.token())
        admission = Admission(
            run=evolve(pending, transition, stamp=stamp),
            before=pending if pending.holds_slot else None,
            transition=transition,
            key=call.key,
            fingerprint=asked,
            definitions=definitions or {},
            tick=tick,
            queue=queue,
            # A run without a slot is limited by rate, also when it is a rerun.
            is_rate_limited=not pending.holds_slot,
            budget=dict(plan.budget),
            audit=call.audit and _with_run(call.audit, pending.id),
        )
        return PreparedStart(admission, plan)

    def _new_id(self, tenant: TenantId, now: Instant) -> RunId:
        # A token has no specified format; every bit of its digest is random.
        token = self._context.entropy.token().encode()
        chance = int.from_bytes(hashlib.blake2b(token, digest_size=8).digest(), "big")
        return make_run_id(tenant, now, chance)

    def _new_names(self, tenant: TenantId, now: Instant, count: int) -> tuple[list[RunId], Stamp]:
        """Ids of new runs, and their first stamp, all from one token: see ``_new_id``.

        The nonce tells histories of one run apart, so runs may share it.
        """
        token = self._context.entropy.token().encode()
        bits = hashlib.shake_256(token).digest(_NONCE_BYTES + _CHANCE_BYTES * count)
        # In order, the ids are written to the ends of a store's indexes.
        chances = sorted(
            chance & _CHANCE_BITS for chance in struct.unpack_from(f">{count}Q", bits, _NONCE_BYTES)
        )
        return make_run_ids(tenant, now, chances), Stamp(1, bits[:_NONCE_BYTES].hex())


class _Turn:
    """When some rows of a batch are sent: after the store has judged those before them."""

    def __init__(self, before: _Turn | None) -> None:
        self._before = before
        self._failed: GateFailed | None = None
        self._is_judged = asyncio.Event()
        self.is_prepared = asyncio.Event()
        self.is_sent = asyncio.Event()

    @property
    def is_first(self) -> bool:
        """Whether no rows come before these."""
        return self._before is None

    async def comes(self) -> GateFailed | None:
        """Wait until the rows may be sent; the answer to a row before them if the gate failed."""
        if self._before is not None:
            await self._before._is_judged.wait()  # noqa: SLF001 - of the same class
            self._failed, self._before = self._before._failed, None  # noqa: SLF001
        self.is_sent.set()
        return self._failed

    def judged(self) -> None:
        """The store has answered. The rows behind these may be sent."""
        self._is_judged.set()

    def ends(self, answers: Sequence[StartAnswer]) -> None:
        """The rows are answered, or will never be."""
        if not self._is_judged.is_set():
            failed = (each for each in answers if isinstance(each, GateFailed))
            self._failed = next(failed, self._failed)
            self._is_judged.set()
        self.is_prepared.set()
        self.is_sent.set()


class _Starting(NamedTuple):
    """A start that may go to the store with others."""

    call: GateCall
    linked: Linked
    given: _Given


class _Given(NamedTuple):
    """What the caller of a start gave."""

    input: JsonObject
    labels: dict[str, str]
    actor: str
    rerun_of: RunId | None = None
    options: RerunOptions = RerunOptions()
    """Of a rerun."""
    tick: TickMark | None = None
    """Of a schedule."""
    starter: str | None = None
    """Who the run is started for, if not the actor."""
    queue: QueueRequest = ANY_PLACE
    key: str | None = None
    """Of a row of a batch."""

    @property
    def subject(self) -> WorkflowId | None:
        """What the request is about in its fingerprint; ``None``: the workflow."""
        return None if self.rerun_of is None else WorkflowId(f"rerun/{self.rerun_of}")

    @property
    def body(self) -> JsonObject:
        """What the fingerprint covers.

        Without labels and a wish for the queue it is what older versions covered.
        """
        if self.rerun_of is not None:
            return self.options.fingerprinted()
        body: JsonObject = {"input": self.input}
        if self.labels:
            body["labels"] = {**self.labels}
        if self.queue is not ANY_PLACE and self.queue != ANY_PLACE:
            body |= msgspec.to_builtins(self.queue)  # without the members that have their default
        return body


def _traceparent(call: GateCall) -> str | None:
    """The context that is stored with the run of a call."""
    # A caller's decision not to sample is passed on; one of our own needs no record.
    if call.span is not None and (call.span.is_sampled or call.traceparent is not None):
        return call.span.traceparent
    return call.traceparent


def _with_run(entry: AuditEntry, run_id: RunId) -> AuditEntry:
    """The audit entry of a rerun, with the id of the new run."""
    options = entry.after if isinstance(entry.after, dict) else {}
    return replace(entry, after={"run_id": run_id, **options})


def _too_many_items(transition: Transition) -> tuple[Fault, ...]:
    """The for-each steps that fail in the first decision because they have too many items.

    Of those that begin later it is known only then.
    """
    errors = [step.error for step in transition.steps.values() if step.error is not None]
    if not errors:
        return ()
    return tuple(
        Fault("input", f"step '{error.step}': {error.message}")
        for error in errors
        if error.code == TOO_MANY_ITEMS and error.step is not None
    )


def _asked(call: GateCall, subject: WorkflowId, body: JsonObject) -> str:
    """The fingerprint that tells requests with the same key apart; empty without a key."""
    return "" if call.key is None else fingerprint(subject, body)


def _in_steps(
    rows: Sequence[StartRow],
    rows_max: int,
    first_max: int,
    values_max: int | None,
    first_steps: Callable[[], int | None],
) -> Iterator[list[StartRow]]:
    """The rows of a batch in parts of which each is small enough for one step of the store.

    A row with labels takes a store as long as two without, and one with several first steps as long
    as several; each of these may have a copy of its input. Of many rows the first part is short,
    and each has at most twice as many as the one before: the store is to have work while the next
    one is prepared.
    """
    step: list[StartRow] = []
    size = values = copied_bytes = 0
    most = rows_max if len(rows) <= rows_max else first_max
    jobs = first_steps() or _UNKNOWN_FIRST_STEPS
    for row in rows:
        count = 0 if values_max is None else _values_in(row.input, values_max)
        is_full = values_max is not None and values + count > values_max
        row_bytes = 0 if jobs == 1 else size_of(row.input)
        is_full = is_full or copied_bytes + row_bytes * jobs > BEGUN_BYTES_MAX
        labelled = 2 if row.labels else 1
        if step and (is_full or size + labelled * jobs > most):
            yield step
            step, size, values, copied_bytes = [], 0, 0, 0
            most = min(rows_max, 2 * most)
            jobs = first_steps() or _UNKNOWN_FIRST_STEPS
        step.append(row)
        size += labelled * jobs
        values += count
        copied_bytes += row_bytes * jobs
    if step:
        yield step


def _values_in(value: JsonValue, at_most: int) -> int:
    """How many values a JSON value has; those beyond ``at_most`` are not counted."""
    count = 1
    rest = [value] if type(value) in _HOLDERS else []
    while rest and count < at_most:
        holder = rest.pop()
        assert isinstance(holder, dict | list)
        inside = holder.values() if isinstance(holder, dict) else holder[:at_most]
        count += len(inside)
        rest += [each for each in inside if type(each) in _HOLDERS]
    return min(count, at_most)


_HOLDERS: Final = frozenset({dict, list})
