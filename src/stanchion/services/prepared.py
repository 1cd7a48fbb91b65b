"""Prepared starts: a caller's request as a run with its first transition decided.

A single start, a rerun and a single job are one ``PreparedStart``. The starts of a batch are rows,
decided together where they begin alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar, overload

import msgspec
from msgspec.structs import replace

from stanchion import telemetry
from stanchion.core import admission as judged
from stanchion.core.audit import AuditEntry
from stanchion.core.draft import size_of
from stanchion.core.events import Started as StartRequested
from stanchion.core.faults import BATCH_FAULTS_MAX, Fault, WorkflowFaults
from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import (
    Instant,
    Run,
    RunId,
    RunStatus,
    Stamp,
    TenantId,
    WorkflowId,
    make_run_id,
    make_run_ids,
)
from stanchion.core.plan import Plan
from stanchion.core.queue import ANY_PLACE, QueueRequest
from stanchion.core.rerun import RerunOptions
from stanchion.core.run import evolve
from stanchion.core.schedule import TickMark
from stanchion.core.steps.foreach import TOO_MANY_ITEMS
from stanchion.core.transition import Transition
from stanchion.ports.records import Admission, AlikeStart, AlikeStarts
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import InvalidInput, NotStarted, StartAnswer
from stanchion.services.plans import Linked, Plans, UnknownWorkflow
from stanchion.services.signals import AdmissionEndpoint
from stanchion.services.work import Decider, input_bytes

_NO_VERSION: Final = -1
"""No workflow has this version: an admission with it can only be replayed, never admitted."""
_NONCE_BYTES: Final = 16
_CHANCE_BYTES: Final = 8
_CHANCE_BITS: Final = 2**60 - 1
"""The part of the random bits that an id uses."""

_Refusal_co = TypeVar("_Refusal_co", covariant=True)


class GateCall(msgspec.Struct, kw_only=True):
    """The state of one call of the gate."""

    tenant: TenantId
    workflow_id: WorkflowId
    endpoint: AdmissionEndpoint
    key: str | None
    audit: AuditEntry | None = None
    """Written with the run, if this is a rerun."""
    exists: bool = False
    """Whether the workflow is known to exist: only then it may have a metric label of its own."""
    is_locked: bool = False
    """Whether this call holds the tenant's lock."""
    lock_until: Moment = Moment(0)
    ends_at: Moment = Moment(0)
    has_turn: bool = False
    """Whether this call holds a place of the tenant's limiter."""
    traceparent: str | None = None
    """The caller's, if traces are on."""
    span: telemetry.Span | None = None
    """``None`` while traces are off, and if this call is not sampled."""
    is_sampling_decided: bool = False
    faults_left: int = BATCH_FAULTS_MAX
    """How many more faults of inputs are collected. Of each further row only the first."""
    rows: int | None = None
    """How many starts of a batch it is about; ``None`` for a single one."""


class PreparedStart(msgspec.Struct, frozen=True):
    """A run with its first transition decided, to be admitted by the store."""

    admission: Admission
    plan: Plan


class PreparedRow(msgspec.Struct, Generic[_Refusal_co], frozen=True):
    """A start of a batch."""

    admission: Admission
    plan: Plan | None
    refused: _Refusal_co | None = None
    """Why it cannot be started, unless its key has a run: its admission has no version in force."""


class PreparedAlike(Sequence[PreparedRow[_Refusal_co]]):
    """Starts of a batch that begin alike, none of them refused. Each is made when it is read."""

    def __init__(self, starts: AlikeStarts, plan: Plan) -> None:
        self.starts = starts
        self.plan = plan

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> PreparedRow[_Refusal_co]: ...
    @overload
    def __getitem__(self, place: slice) -> PreparedAlike[_Refusal_co]: ...
    def __getitem__(
        self, place: int | slice
    ) -> PreparedRow[_Refusal_co] | PreparedAlike[_Refusal_co]:
        if isinstance(place, slice):
            return PreparedAlike(self.starts[place], self.plan)
        return PreparedRow(self.starts[place], self.plan)


class StartParams(NamedTuple):
    """The parameters of a start, from its caller."""

    input: JsonObject
    labels: dict[str, str]
    actor: str
    rerun_of: RunId | None = None
    options: RerunOptions = RerunOptions()
    """Of a rerun."""
    tick: TickMark | None = None
    """Of a schedule."""
    starter: str | None = None
    """The user for whom the run is started, if not the actor."""
    queue: QueueRequest = ANY_PLACE
    key: str | None = None
    """Of a row of a batch."""

    @property
    def subject(self) -> WorkflowId | None:
        """The subject of the request's fingerprint; ``None``: the workflow."""
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


class Preparer:
    """Prepares runs to be admitted: decides how they begin, and gives them ids and fingerprints."""

    def __init__(self, context: ReplicaContext, *, plans: Plans, decider: Decider) -> None:
        self._context = context
        self._plans = plans
        self._decider = decider
        self._work = decider.budget

    async def start(
        self, call: GateCall, linked: Linked, given: StartParams
    ) -> PreparedStart | StartAnswer:
        fingerprint = "" if call.key is None else await self.fingerprint(call, given)
        pending = self.pending(
            call.tenant,
            linked,
            given.input,
            labels=given.labels,
            rerun_of=given.rerun_of,
            starter=given.starter or given.actor,
            traceparent=_traceparent(call),
        )
        ready = await self.ready(
            call,
            linked.plan,
            pending,
            fingerprint=fingerprint,
            actor=given.actor,
            definitions=linked.definitions,
            tick=given.tick,
            queue=given.queue,
        )
        if too_many := too_many_items(ready.admission.transition):
            return InvalidInput(too_many)
        return ready

    async def ready(  # noqa: PLR0913 - what an admission has, by keyword
        self,
        call: GateCall,
        plan: Plan,
        pending: Run,
        *,
        fingerprint: str,
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
            fingerprint=fingerprint,
            definitions=definitions or {},
            tick=tick,
            queue=queue,
            # A run without a slot is limited by rate, also when it is a rerun.
            is_rate_limited=not pending.holds_slot,
            budget=dict(plan.budget),
            audit=call.audit and _with_run(call.audit, pending.id),
        )
        return PreparedStart(admission, plan)

    def pending(  # noqa: PLR0913 - what a run has, by keyword
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
            id=self.new_id(tenant, now),
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

    async def rows_together(
        self, call: GateCall, linked: Linked, given: Sequence[StartParams]
    ) -> Sequence[PreparedRow[NotStarted]]:
        """Prepare starts whose inputs the plan accepts."""
        checks = [(await self.fingerprint(call, each), ()) for each in given]
        alike = await self._alike_rows(call, linked, given, checks)
        return alike or await self._rows_apart(call, linked, given, checks)

    async def rows_again(
        self, call: GateCall, given: Sequence[StartParams], places: Sequence[int]
    ) -> Sequence[PreparedRow[NotStarted]]:
        linked = await self._plans.newest(call.tenant, call.workflow_id, refresh=True)
        some = [given[place] for place in places]
        return await self.rows(call, linked, some, is_fresh=True)

    async def rows(
        self,
        call: GateCall,
        linked: Linked | UnknownWorkflow | WorkflowFaults,
        given: Sequence[StartParams],
        *,
        is_fresh: bool = False,
    ) -> Sequence[PreparedRow[NotStarted]]:
        """Prepare the rows of a batch."""
        tenant, schema = call.tenant, None
        call.exists = not isinstance(linked, UnknownWorkflow)
        if isinstance(linked, Linked):
            schema = linked.plan.body.schema

        def checked(row: StartParams) -> tuple[str, tuple[Fault, ...]]:
            fingerprint = judged.fingerprint(call.workflow_id, row.body)
            if schema is None:
                return fingerprint, ()
            # A hundred faults take two hundred times as long as the first.
            faults = schema.faults(row.input, first_only=call.faults_left <= 0 or not is_fresh)
            if is_fresh:
                call.faults_left -= len(faults)
            return fingerprint, faults

        checks = await self._work.done_each(tenant, checked, given)
        if not is_fresh and any(faults for _, faults in checks):
            # The cached plan may be old: only the newest version may refuse an input.
            linked = await self._plans.newest(tenant, call.workflow_id, refresh=True)
            return await self.rows(call, linked, given, is_fresh=True)
        if not isinstance(linked, Linked):
            pairs = zip(given, checks, strict=True)
            return [
                self._refused(call, row, fingerprint, linked) for row, (fingerprint, _) in pairs
            ]
        if not any(row.labels or row.queue != given[0].queue for row in given):
            alike = await self._alike_rows(call, linked, given, checks)
            if alike is not None:
                return alike
        return await self._rows_apart(call, linked, given, checks)

    async def _rows_apart(
        self,
        call: GateCall,
        linked: Linked,
        given: Sequence[StartParams],
        checks: Sequence[tuple[str, tuple[Fault, ...]]],
    ) -> Sequence[PreparedRow[NotStarted]]:
        """Prepare rows one by one."""
        rows: dict[int, PreparedRow[NotStarted]] = {}
        for place, (fingerprint, faults) in enumerate(checks):
            if faults:
                rows[place] = self._refused(call, given[place], fingerprint, InvalidInput(faults))
        others = [place for place in range(len(given)) if place not in rows]
        runs = self._pending_rows(call, linked, [given[place] for place in others])
        began = StartRequested(actor=given[0].actor)
        transitions = await self._decider.decide_each(linked.plan, runs, (began,))
        for place, run, transition in zip(others, runs, transitions, strict=True):
            fingerprint, _ = checks[place]
            rows[place] = self._row(call, linked, given[place], fingerprint, run, transition)
        return [rows[place] for place in range(len(given))]

    async def _alike_rows(
        self,
        call: GateCall,
        linked: Linked,
        given: Sequence[StartParams],
        checks: Sequence[tuple[str, tuple[Fault, ...]]],
    ) -> PreparedAlike[NotStarted] | None:
        """Prepare rows that begin alike; ``None`` if some do not."""
        if any(faults for _, faults in checks):
            return None
        first, (fingerprint, _) = given[0], checks[0]
        (pending,) = self._pending_rows(call, linked, given[:1])
        began = StartRequested(actor=first.actor)
        others = [row.input for row in given[1:]]
        decided = await self._decider.start_alike(linked.plan, pending, (began,), others)
        if decided is None:
            return None
        made, works = decided
        model = self._row(call, linked, first, fingerprint, pending, made).admission
        run_ids, _ = self._new_names(call.tenant, pending.created_at, len(others))
        rows = [AlikeStart.of(model)]
        for run_id, row, (fingerprint, _), work in zip(
            run_ids, given[1:], checks[1:], works, strict=True
        ):
            rows.append(AlikeStart(run_id, row.key, fingerprint, row.input, work))
        return PreparedAlike(AlikeStarts(model, rows), linked.plan)

    def _pending_rows(
        self, call: GateCall, linked: Linked, given: Sequence[StartParams]
    ) -> list[Run]:
        """The runs of a batch before their first decision. They differ in little."""
        if not given:
            return []
        traced = _traceparent(call)
        model = self.pending(call.tenant, linked, {}, starter=given[0].actor, traceparent=traced)
        run_ids, stamp = self._new_names(call.tenant, model.created_at, len(given))
        return [
            replace(model, id=run_id, input=row.input, labels=row.labels, stamp=stamp)
            for row, run_id in zip(given, run_ids, strict=True)
        ]

    def _refused(
        self, call: GateCall, given: StartParams, fingerprint: str, why: NotStarted
    ) -> PreparedRow[NotStarted]:
        return PreparedRow(self.lookup(call, given, fingerprint), None, why)

    def _row(
        self,
        call: GateCall,
        linked: Linked,
        given: StartParams,
        fingerprint: str,
        pending: Run,
        transition: Transition,
    ) -> PreparedRow[NotStarted]:
        if too_many := too_many_items(transition):
            return self._refused(call, given, fingerprint, InvalidInput(too_many))
        admission = Admission(
            run=evolve(pending, transition),
            before=pending,
            transition=transition,
            key=given.key,
            fingerprint=fingerprint,
            definitions=linked.definitions,
            budget=linked.terms.budget,
            queue=given.queue,
        )
        return PreparedRow(admission, linked.plan)

    async def admissions(
        self, rows: Sequence[PreparedRow[NotStarted]]
    ) -> Sequence[Sequence[Admission]]:
        """The admissions of rows, prepared for the store, in parts with few bytes of inputs.

        Others are served after each part.
        """
        wanted: Sequence[Admission]
        if isinstance(rows, PreparedAlike):
            wanted, sizes = rows.starts, (size_of([*row.works]) for row in rows.starts.rows)
        else:
            wanted = [row.admission for row in rows]
            sizes = (input_bytes(each.transition) for each in wanted)
        parts: list[Sequence[Admission]] = []
        begin = part_bytes = 0
        for place, size in enumerate(sizes):
            if place > begin and part_bytes + size > BEGUN_BYTES_MAX:
                parts.append(self._context.store.prepare_admissions(wanted[begin:place]))
                await asyncio.sleep(0)
                begin, part_bytes = place, 0
            part_bytes += size
        rest = wanted[begin:] if parts else wanted
        return [*parts, self._context.store.prepare_admissions(rest)]

    def lookup(self, call: GateCall, given: StartParams, fingerprint: str) -> Admission:
        """An admission that finds the run of its key, and creates none."""
        now = self._context.clock.now()
        return Admission(
            run=Run(
                id=self.new_id(call.tenant, now),
                tenant=call.tenant,
                workflow_id=call.workflow_id,
                workflow_version=_NO_VERSION,
                input=given.input,
                created_at=now,
            ),
            transition=Transition(status=RunStatus.PENDING),
            key=given.key,
            fingerprint=fingerprint,
            definitions={call.workflow_id: _NO_VERSION},
        )

    async def fingerprint(self, call: GateCall, given: StartParams) -> str:
        """The fingerprint that tells requests with the same key apart; empty without a key."""
        if call.key is None and given.key is None:
            return ""
        return await self._work.done(
            call.tenant, lambda: judged.fingerprint(given.subject or call.workflow_id, given.body)
        )

    async def faults(
        self, tenant: TenantId, plan: Plan, given: JsonObject | None
    ) -> tuple[Fault, ...]:
        schema = plan.body.schema
        if schema is None or given is None:
            return ()
        return await self._work.done(tenant, lambda: schema.faults(given))

    def new_id(self, tenant: TenantId, now: Instant) -> RunId:
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


def too_many_items(transition: Transition) -> tuple[Fault, ...]:
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


def fingerprint_of(call: GateCall, subject: WorkflowId, body: JsonObject) -> str:
    """The fingerprint that tells requests with the same key apart; empty without a key."""
    return "" if call.key is None else judged.fingerprint(subject, body)
