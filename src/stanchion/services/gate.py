"""The gate: starts, reruns and single jobs, from the request to the answer.

    what should run?  →  decide how it begins  →  [the tenant's lock]  →  store.admit  →  answer

A start takes the newest versions of its workflow, a rerun (``services.reruns``) those of the run it
repeats, a single job a workflow generated for it; ``services.batch`` starts many runs at once. From
there on all use ``services.prepared`` and ``services.admit``. The gate raises no ``BackendError``:
an unavailable backend becomes the answer ``GateFailed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import replace

from stanchion.core import admission as judged
from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Run,
    RunStatus,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.plan import Plan
from stanchion.core.queue import ANY_PLACE, QueueRequest
from stanchion.core.schedule import TickMark
from stanchion.core.schema import InputSchema
from stanchion.core.settings import Settings
from stanchion.ports.records import AlikeStarts
from stanchion.services.admit import Admitter
from stanchion.services.batch import Batches
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import (
    GateFull,
    GateOverBudget,
    InvalidInput,
    KeyMismatch,
    Pacing,
    QueueOff,
    RunStarted,
    StartAnswer,
    SubmitAnswer,
)
from stanchion.services.limiter import Gathering
from stanchion.services.plans import Linked, Plans, UnknownWorkflow
from stanchion.services.prepared import (
    GateCall,
    PreparedStart,
    Preparer,
    StartParams,
    fingerprint_of,
)
from stanchion.services.reruns import Reruns
from stanchion.services.signals import AdmissionEndpoint, AdmissionSignals
from stanchion.services.work import Decider

_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


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
        self._preparer = Preparer(context, plans=plans, decider=decider)
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
        self.batches = Batches(
            context,
            plans=plans,
            admitter=self._admitter,
            preparer=self._preparer,
            work=self._work,
        )
        self.reruns = Reruns(
            context,
            plans=plans,
            admitter=self._admitter,
            preparer=self._preparer,
            work=self._work,
            start=self._start,
        )

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
                StartParams(
                    input, dict(labels), actor, tick=tick, starter=starter, queue=queue, key=key
                ),
                is_short=is_short,
            ),
        )

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
        pending = self._preparer.pending(tenant, linked, {"input": input}, holds_slot=False)
        fingerprint = fingerprint_of(call, call.workflow_id, {"input": input})
        ready = await self._preparer.ready(
            call, linked.plan, pending, fingerprint=fingerprint, actor=actor
        )
        answer = await self._admitter.in_time(call, self._admitter.admit(call, ready))
        # Only a run that takes a slot can meet a full tenant, and a single job reserves nothing.
        assert not isinstance(answer, GateFull | QueueOff | GateOverBudget)
        return answer

    async def close(self) -> None:
        """Wait for pending releases of locks."""
        await self._admitter.close()

    async def _start(
        self, call: GateCall, given: StartParams, *, is_short: bool = False
    ) -> StartAnswer:
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

    async def _start_alone(self, call: GateCall, linked: Linked, given: StartParams) -> StartAnswer:
        drafted = await self._preparer.start(call, linked, given)
        if not isinstance(drafted, PreparedStart):
            return drafted
        return await self._admitter.admit(call, drafted, lambda: self._again(call, given))

    async def _again(self, call: GateCall, given: StartParams) -> PreparedStart | StartAnswer:
        """The start once more, after the workflow has changed."""
        linked = await self._linked(call, given, refresh=True)
        if not isinstance(linked, Linked):
            return linked
        return await self._preparer.start(call, linked, given)

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
            rows = await self._preparer.rows_together(call, starting[0].linked, given)
            admissions = await self._preparer.admissions(rows)
        except Exception:  # noqa: BLE001 - that of one must not be that of the others
            return None
        return await self._admitter.admit_many(
            call, rows, admissions, lambda places: self._preparer.rows_again(call, given, places)
        )

    async def _linked(
        self,
        call: GateCall,
        given: StartParams,
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
                call, terms, lambda: self._preparer.fingerprint(call, given)
            )
            if answer is not None:
                return answer
        return linked

    async def _known(self, call: GateCall, given: StartParams) -> RunStarted | KeyMismatch | None:
        """The answer that the idempotency key got before; ``None`` if the key is new.

        A request that was admitted once is replayed, even if the newest workflow would refuse it.
        """
        if call.key is None:
            return None
        given = given._replace(key=call.key)
        fingerprint = await self._preparer.fingerprint(call, given)
        verdict = await self._admitter.ask(call, self._preparer.lookup(call, given, fingerprint))
        match verdict:
            case judged.Replayed(run_id):
                return await self._admitter.answers.replayed(call, run_id, RunStatus.RUNNING)
            case judged.Mismatch():
                return KeyMismatch()
            case _:
                return None


class _Starting(NamedTuple):
    """A start that may go to the store with others."""

    call: GateCall
    linked: Linked
    given: StartParams
