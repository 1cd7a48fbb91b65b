"""Inbox: results, cancels and decisions for runs that exist.

Each is made durable first, in the run's inbox, and then applied: at once by this replica if the
run's lease is free, otherwise by the replica that holds the lease or the next one that takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, assert_never

import msgspec

from stanchion.core.audit import AuditEntry
from stanchion.core.events import Approved, CancelRequested, Event, Rejected
from stanchion.core.faults import Fault
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    OnDecision,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    TenantId,
)
from stanchion.core.retry import backoff_ms
from stanchion.core.steps import approval
from stanchion.core.workflow import ApprovalSpec
from stanchion.ports.errors import BackendError
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    DeadLetter,
    InboxEntry,
    Loaded,
    PostAnswer,
    RejectedCode,
    Result,
)
from stanchion.services.advance import Advanced, Advancer
from stanchion.services.context import ReplicaContext, Rules
from stanchion.services.plans import Plans
from stanchion.services.work import TenantWorkBudget

_COMPLETED: Final = frozenset({RejectedCode.ALREADY_FINISHED})
_CANCEL: Final = "cancel"
"""The id of a cancel in the inbox."""


class RunChange(msgspec.Struct, frozen=True):
    """The change is applied; or it is recorded and applied later, because the run was busy."""

    run_id: RunId
    status: RunStatus
    applied: bool


class UnknownTarget(msgspec.Struct, frozen=True):
    """There is no such run or step."""

    what: str


class Conflicting(msgspec.Struct, frozen=True):
    """An earlier decision conflicts with this one, or the run cannot take it now."""

    message: str


class DecisionForbidden(msgspec.Struct, frozen=True):
    """A rule of the step keeps this actor from deciding it."""

    rule: str


class InvalidData(msgspec.Struct, frozen=True):
    """The data of a decision does not match the step's schema."""

    faults: tuple[Fault, ...]


class Inbox:
    """Records events for runs and has them applied."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        plans: Plans,
        advancer: Advancer,
        rules: Rules,
        work: TenantWorkBudget,
    ) -> None:
        self._store = context.store
        self._entropy = context.entropy
        self._signals = context.signals
        self._plans = plans
        self._advancer = advancer
        self._rules = rules
        self._work = work

    async def results(
        self, results: Sequence[Result], *, tenant: TenantId | None = None
    ) -> tuple[Acceptance, ...]:
        """Accept workers' results. They are durable when this returns.

        Those that can be settled are applied, too; for the others, runs advance afterwards. With
        ``tenant``, results of other tenants' jobs are rejected.
        """
        # If the run is busy now, its outbox row is due when a busy run is retried.
        row_due_in_ms = backoff_ms(self._rules.lock_busy(), 1, self._entropy.unit())
        answers: dict[int, Acceptance] = {}
        settling = self._settling(results, tenant, row_due_in_ms)
        error: BackendError | None = None
        for places, answer in settling:
            try:
                taken = await answer
            except BackendError as failure:
                error = failure  # the worker sends all of them again
                continue
            if taken is not None:
                answers.update(zip(places, taken, strict=True))
        if error is not None:
            raise error
        left = [place for place in range(len(results)) if place not in answers]
        if left:
            some = results if len(left) == len(results) else [results[place] for place in left]
            accepted = await self._store.accept(some, row_due_in_ms=row_due_in_ms, tenant=tenant)
            for taken_now in accepted:
                if isinstance(taken_now, Accepted) and not taken_now.repeated:
                    self._advancer.nudge(taken_now.run_id)
            answers.update(zip(left, accepted, strict=True))
        for each in answers.values():
            self._count(each)
        return tuple(answers[place] for place in range(len(results)))

    def _settling(
        self, results: Sequence[Result], tenant: TenantId | None, row_due_in_ms: int
    ) -> list[tuple[list[int], asyncio.Future[tuple[Acceptance, ...] | None]]]:
        """Begin to settle results, by run: their places, and their answers to come."""
        by_run: dict[str, list[int]] = {}
        for place, result in enumerate(results):
            by_run.setdefault(result.job_id.partition(":")[0], []).append(place)
        settling: list[tuple[list[int], asyncio.Future[tuple[Acceptance, ...] | None]]] = []
        for run_id, places in by_run.items():
            some = [results[place] for place in places]
            answer = self._advancer.settle(
                RunId(run_id), some, tenant=tenant, row_due_in_ms=row_due_in_ms
            )
            if answer is not None:
                settling.append((places, answer))
        return settling

    def _count(self, answer: Acceptance) -> None:
        if isinstance(answer, Accepted):
            if answer.repeated:
                self._signals.duplicate_completion()
            return
        self._signals.rejected(answer.code)
        if answer.code in _COMPLETED:
            self._signals.duplicate_completion()

    def remembered(self, run_id: RunId) -> Run | None:
        """An unfinished run as this replica has changed it last. It may be out of date."""
        known = self._advancer.cache.get(run_id)
        return None if known is None else known.run

    async def cancel(
        self, run_id: RunId, *, reason: str | None, actor: str, audit: AuditEntry | None = None
    ) -> RunChange | UnknownTarget | Conflicting:
        """End a run now. A run that was cancelled stays so; one that ended otherwise conflicts."""
        event = CancelRequested(actor=actor, reason=reason)
        posted = await self._store.post(run_id, event, entry_id=_CANCEL, audit=audit)
        match posted:
            case PostAnswer.UNKNOWN:
                return UnknownTarget(f"run '{run_id}'")
            case PostAnswer.FINISHED:
                changed = await self._as_it_is(run_id)
            case PostAnswer.POSTED:
                changed = await self._apply(run_id, InboxEntry(_CANCEL, event))
            case PostAnswer.REPEATED:
                changed = await self._apply(run_id)
            case _:
                assert_never(posted)
        if isinstance(changed, RunChange) and changed.status.is_finished:
            # An earlier entry of the inbox may have ended the run.
            return _ended(run_id, changed.status)
        return changed

    async def decide(
        self,
        run_id: RunId,
        step_id: StepId,
        *,
        approve: bool,
        comment: str | None,
        actor: str,
        data: JsonValue = None,
        audit: AuditEntry | None = None,
    ) -> RunChange | UnknownTarget | Conflicting | DecisionForbidden | InvalidData:
        """Approve or reject a step. The first decision counts; the same again is no conflict.

        With other data it is not the same.
        """
        loaded = await self._store.load(run_id)
        if loaded is None:
            return UnknownTarget(f"run '{run_id}'")
        plan = await self._plans.of_run(loaded.run)
        planned = plan.steps.get(step_id)
        if planned is None:
            return UnknownTarget(f"step '{step_id}' of run '{run_id}'")
        if not isinstance(planned.spec, ApprovalSpec):
            return Conflicting(f"step '{step_id}' is not an approval")
        state = loaded.run.step(step_id)
        if state.status.is_finished:
            return _decided(loaded, step_id, state, approve=approve, data=data)
        if not isinstance(state.wait, OnDecision):
            return Conflicting(f"step '{step_id}' does not wait for a decision yet")
        rule = approval.rule_against(planned, loaded.run, actor)
        if rule is not None:
            return DecisionForbidden(rule)
        faults = await self._work.done(
            loaded.run.tenant, lambda: approval.data_faults(planned, data, approve=approve)
        )
        if faults:
            return InvalidData(faults)
        decision: Approved | Rejected = (
            Approved(step_id=step_id, comment=comment, data=data, actor=actor)
            if approve
            else Rejected(step_id=step_id, comment=comment, data=data, actor=actor)
        )
        return await self._post_decision(loaded, decision, audit)

    async def _post_decision(
        self, loaded: Loaded, event: Approved | Rejected, audit: AuditEntry | None
    ) -> RunChange | UnknownTarget | Conflicting:
        run_id, step_id = loaded.run.id, event.step_id
        entry_id = f"decision:{step_id}"
        approve = isinstance(event, Approved)
        posted = await self._store.post(run_id, event, entry_id=entry_id, audit=audit)
        if posted is PostAnswer.REPEATED:
            # An earlier decision is in the inbox, not applied yet. If the step has ended meanwhile,
            # that decision was too late as well and does not count.
            found = await self._store.load(run_id)
            if found is None:
                return UnknownTarget(f"run '{run_id}'")
            state = found.run.step(step_id)
            if state.status.is_finished:
                return _decided(found, step_id, state, approve=approve, data=event.data)
            lies = _entry(found, entry_id)
            if lies is not None and isinstance(lies, Approved) is not approve:
                return Conflicting(_otherwise(step_id, approved=not approve))
            if isinstance(lies, Approved | Rejected) and lies.data != event.data:
                return Conflicting(_other_data(step_id, approved=approve))
        elif posted is PostAnswer.UNKNOWN:
            return UnknownTarget(f"run '{run_id}'")
        is_new = posted is PostAnswer.POSTED
        changed = await self._apply(run_id, InboxEntry(entry_id, event) if is_new else None)
        if not isinstance(changed, RunChange) or not changed.applied:
            return changed
        # Two callers may have found the step waiting: the second gets a conflict.
        after = await self._store.load(run_id)
        if after is None:
            return UnknownTarget(f"run '{run_id}'")
        state = after.run.step(step_id)
        return _decided(after, step_id, state, approve=approve, data=event.data)

    async def replay(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        """Replay a dead letter, once; ``None`` if there is no such letter."""
        letter = await self._store.replay_dead_letter(letter_id, actor=actor, audit=audit)
        if letter is not None:
            await self._advancer.advance(letter.run_id)
        return letter

    async def discard(
        self, letter_id: str, *, actor: str, audit: AuditEntry | None = None
    ) -> DeadLetter | None:
        """Give a dead letter up, once: the step of its job fails, its event is dropped."""
        letter = await self._store.discard_dead_letter(letter_id, actor=actor, audit=audit)
        if letter is not None:
            await self._advancer.advance(letter.run_id)
        return letter

    async def _apply(
        self, run_id: RunId, posted: InboxEntry | None = None
    ) -> RunChange | UnknownTarget:
        outcome = await self._advancer.advance(run_id, posted)
        if isinstance(outcome, Advanced):
            return RunChange(run_id, outcome.status, applied=True)
        return await self._as_it_is(run_id)

    async def _as_it_is(self, run_id: RunId) -> RunChange | UnknownTarget:
        loaded = await self._store.load(run_id)
        if loaded is None:
            return UnknownTarget(f"run '{run_id}'")
        return RunChange(run_id, loaded.run.status, applied=not loaded.inbox)


def _ended(run_id: RunId, status: RunStatus) -> RunChange | Conflicting:
    """The answer to a cancel of a run that has ended."""
    if status is RunStatus.CANCELLED:
        return RunChange(run_id, status, applied=True)
    return Conflicting(f"run '{run_id}' has ended: {status}")


def _decided(
    loaded: Loaded, step_id: StepId, state: Step, *, approve: bool, data: JsonValue
) -> RunChange | Conflicting:
    """The answer to a decision about a step that may have ended already."""
    run = loaded.run
    if not state.status.is_finished:
        return RunChange(run.id, run.status, applied=False)
    was_approved = state.status is StepStatus.SUCCEEDED
    was_rejected = state.error is not None and state.error.code == "rejected"
    if was_approved if approve else was_rejected:
        output = state.output
        if data != (output.get("data") if isinstance(output, dict) else None):
            return Conflicting(_other_data(step_id, approved=approve))
        return RunChange(run.id, run.status, applied=True)
    if was_approved or was_rejected:
        return Conflicting(_otherwise(step_id, approved=was_approved))
    return Conflicting(f"step '{step_id}' has ended without a decision: {state.status}")


def _otherwise(step_id: StepId, *, approved: bool) -> str:
    return f"step '{step_id}' was {'approved' if approved else 'rejected'} before"


def _other_data(step_id: StepId, *, approved: bool) -> str:
    return f"{_otherwise(step_id, approved=approved)}, with other data"


def _entry(loaded: Loaded, entry_id: str) -> Event | None:
    return next((entry.event for entry in loaded.inbox if entry.id == entry_id), None)
