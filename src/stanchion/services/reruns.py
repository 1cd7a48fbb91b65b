"""Reruns: do a finished run again, all of it or a part, or show what that would do.

A rerun of the newest versions is a start with the old run's input and labels. One of the same
versions keeps the old run's plan, and may keep what its steps have done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.model import Item, ItemKey, Run, RunId, StepId, TenantId, WorkflowId
from stanchion.core.plan import Plan
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
from stanchion.services.admit import Admitter
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import (
    InvalidInput,
    NoRerun,
    RerunAnswer,
    StartAnswer,
    UnknownRun,
)
from stanchion.services.plans import Linked, Plans, is_single_job
from stanchion.services.prepared import (
    GateCall,
    Preparer,
    StartParams,
    fingerprint_of,
    too_many_items,
)
from stanchion.services.signals import AdmissionEndpoint
from stanchion.services.work import TenantWorkBudget

_ITEMS_AT_ONCE: Final = 1_000
_UNKNOWN: Final = WorkflowId("")
"""A rerun's workflow, until its run was read."""


class RerunPreview(msgspec.Struct, frozen=True):
    """What a rerun would do with each step."""

    old: Run
    new: Run
    """The run that it would start. It is not stored."""
    steps: dict[StepId, RerunStep]


class Reruns:
    """Creates runs that repeat finished ones."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        plans: Plans,
        admitter: Admitter,
        preparer: Preparer,
        work: TenantWorkBudget,
        start: Callable[[GateCall, StartParams], Awaitable[StartAnswer]],
    ) -> None:
        """``start`` starts a run of the newest version of a workflow."""
        self._context = context
        self._plans = plans
        self._admitter = admitter
        self._preparer = preparer
        self._work = work
        self._start = start

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
            faults = await self._preparer.faults(tenant, linked.plan, given)
            if faults:
                return InvalidInput(faults)
            plan, pending = linked.plan, self._preparer.pending(tenant, linked, given)
        return RerunPreview(old, pending, preview(plan, old, pending))

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
            return await self._start(call, StartParams(given, labels, actor, old.id, options))
        repeated = await self._repeated(old, options)
        if not isinstance(repeated, tuple):
            return repeated
        plan, pending = repeated
        fingerprint = await self._work.done(
            call.tenant, lambda: fingerprint_of(call, subject, options.fingerprinted())
        )
        ready = await self._preparer.ready(
            call, plan, pending, fingerprint=fingerprint, actor=actor
        )
        if too_many := too_many_items(ready.admission.transition):
            return InvalidInput(too_many)
        return await self._admitter.admit(call, ready)

    async def _repeated(
        self, old: Run, options: RerunOptions
    ) -> tuple[Plan, Run] | RerunRefused | InvalidInput:
        """The new run of the same versions, with what it keeps of the old one."""
        plan = await self._plans.of_run(old)
        if options.input is not None and is_single_job(old):
            options = replace(options, input={"input": options.input})
        faults = await self._preparer.faults(old.tenant, plan, options.input)
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
            run_id=self._preparer.new_id(old.tenant, now),
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
