"""Apply a bulk action to one run, by the service and the rules of a request about one run."""

from __future__ import annotations

import logging
from typing import Final, assert_never

import msgspec

from stanchion.core.audit import AuditEntry, redacted
from stanchion.core.bulk import Bulk, BulkAction, BulkDone, BulkFailed, BulkLater, BulkOutcome
from stanchion.core.faults import WorkflowFaults
from stanchion.core.json_value import JsonObject
from stanchion.core.model import OnDecision, Run, RunId, RunStatus, StepId, TenantId
from stanchion.core.rerun import RerunOptions, RerunRefused
from stanchion.ports.errors import BackendError
from stanchion.ports.records import DeadLetter
from stanchion.services.context import Backends
from stanchion.services.gate_answers import (
    GateFailed,
    GateFull,
    GateOverBudget,
    InvalidInput,
    JobThrottled,
    KeyMismatch,
    QueueOff,
    RunStarted,
    UnknownRun,
)
from stanchion.services.inbox import (
    Conflicting,
    DecisionForbidden,
    Inbox,
    InvalidData,
    RunChange,
    UnknownTarget,
)
from stanchion.services.limiter import SingleFlight
from stanchion.services.log import log_event
from stanchion.services.plans import DefinitionMissing, UnknownWorkflow
from stanchion.services.reruns import Reruns
from stanchion.services.work import TenantOverloaded

_RETRY_MS: Final = 500
"""When to retry after the store failed."""
_LETTERS_FRESH_MS: Final = 1_000
_PAGE: Final = 1_000


class RunActions:
    """Cancels, reruns, decides on, replays or discards the runs of a bulk action, one at a time."""

    def __init__(self, backends: Backends, *, reruns: Reruns, inbox: Inbox) -> None:
        self._store = backends.store
        self._clock = backends.clock
        self._reruns = reruns
        self._inbox = inbox
        self._reads = SingleFlight()
        self._letters: dict[TenantId, tuple[int, dict[RunId, list[DeadLetter]]]] = {}

    async def act(self, bulk: Bulk, run_id: RunId, *, is_repeat: bool) -> BulkOutcome:
        """Act on one run. ``is_repeat``: it may have been acted on before a crash."""
        try:
            loaded = await self._store.load(run_id)
            if loaded is None:
                return BulkFailed(run_id, "not_found", "the run is gone")
            match bulk.action:
                case BulkAction.CANCEL:
                    return await self._cancel(bulk, loaded.run, is_repeat=is_repeat)
                case BulkAction.RERUN:
                    return await self._rerun(bulk, loaded.run)
                case BulkAction.APPROVE | BulkAction.REJECT:
                    return await self._decide(bulk, loaded.run)
                case BulkAction.REPLAY | BulkAction.DISCARD:
                    return await self._take_letters(bulk, loaded.run, is_repeat=is_repeat)
                case _:
                    assert_never(bulk.action)
        except TenantOverloaded as over:
            return BulkLater(over.retry_after_ms)
        except BackendError:
            return BulkLater(_RETRY_MS)
        except DefinitionMissing:
            return BulkFailed(run_id, "not_found", "the workflow of the run is gone")
        except Exception as error:  # noqa: BLE001 - one run must not stop the others
            log_event(logging.ERROR, "bulk_action_failed", bulk=bulk.id, error=repr(error))
            return BulkFailed(run_id, "internal", "internal error; the log has the details")

    async def _cancel(self, bulk: Bulk, run: Run, *, is_repeat: bool) -> BulkOutcome:
        if run.status.is_finished and not is_repeat:
            return BulkDone(is_skipped=True)
        reason = f"bulk action {bulk.id}"
        entry = _entry(
            bulk,
            "run.cancel",
            f"run/{run.id}",
            run,
            {"status": RunStatus.CANCELLED, "reason": reason},
            before={"status": run.status},
        )
        changed = await self._inbox.cancel(run.id, reason=reason, actor=bulk.actor, audit=entry)
        if isinstance(changed, Conflicting):  # it has ended meanwhile
            return BulkDone(is_skipped=True)
        return _outcome(run.id, changed)

    async def _rerun(self, bulk: Bulk, run: Run) -> BulkOutcome:
        options = RerunOptions()
        answer = await self._reruns.rerun(
            run.tenant,
            run.id,
            options,
            # No caller can use such a key: theirs have no spaces.
            key=f"bulk {bulk.id} {run.id}",
            actor=bulk.actor,
            audit=_entry(
                bulk,
                "run.rerun",
                f"run/{run.id}",
                run,
                redacted(msgspec.to_builtins(options), "input"),
            ),
        )
        match answer:
            case RunStarted():
                return BulkDone()
            case GateOverBudget(over=over) if over.is_final:
                limit = f"budget '{over.budget}' of {over.limit}"
                return BulkFailed(run.id, "budget_exhausted", f"{limit}: no wait makes room for it")
            case GateFull() | GateOverBudget() | JobThrottled() | GateFailed():
                return BulkLater(answer.retry_after_ms)
            case RerunRefused():
                return BulkFailed(run.id, "conflict", answer.message)
            case UnknownRun() | UnknownWorkflow():
                return BulkFailed(run.id, "not_found", "the run or its workflow is gone")
            case InvalidInput() | WorkflowFaults():
                return BulkFailed(run.id, "invalid_input", str(answer.faults[0]))
            case QueueOff():
                raise AssertionError("a rerun does not ask to be queued")
            case KeyMismatch():
                return BulkFailed(run.id, "idempotency_mismatch", "it was rerun in another way")
            case _:
                assert_never(answer)

    async def _decide(self, bulk: Bulk, run: Run) -> BulkOutcome:
        approve = bulk.action is BulkAction.APPROVE
        waiting = [each for each, step in run.steps.items() if isinstance(step.wait, OnDecision)]
        if not waiting:
            if _was_decided(run, bulk.actor, approve=approve):
                return BulkDone()
            return BulkFailed(run.id, "conflict", "no step waits for a decision")
        for step_id in waiting:
            changed = await self._inbox.decide(
                run.id,
                step_id,
                approve=approve,
                comment=None,
                actor=bulk.actor,
                audit=_decision_entry(bulk, run, step_id),
            )
            if isinstance(changed, DecisionForbidden):
                return BulkFailed(run.id, "forbidden", changed.rule)
            if isinstance(changed, InvalidData):
                return BulkFailed(run.id, "invalid_input", str(changed.faults[0]))
            if not isinstance(changed, RunChange):
                return _outcome(run.id, changed)
        return BulkDone()

    async def _take_letters(self, bulk: Bulk, run: Run, *, is_repeat: bool) -> BulkOutcome:
        letters = (await self._letters_of(run.tenant)).get(run.id, [])
        is_replay = bulk.action is BulkAction.REPLAY
        taken = 0
        if letters and is_replay and run.status.is_finished:
            return BulkFailed(run.id, "conflict", f"the run has ended: {run.status}")
        for letter in letters:
            action = "dead_letter.replay" if is_replay else "dead_letter.discard"
            entry = _entry(bulk, action, f"dead_letter/{letter.id}", run, {})
            take = self._inbox.replay if is_replay else self._inbox.discard
            taken += await take(letter.id, actor=bulk.actor, audit=entry) is not None
        if taken or is_repeat:
            return BulkDone()
        return BulkFailed(run.id, "not_found", "the run has no dead letter")

    async def _letters_of(self, tenant: TenantId) -> dict[RunId, list[DeadLetter]]:
        """The dead letters of a tenant by run, as they were a second ago or later."""
        read_at, known = self._letters.get(tenant, (-_LETTERS_FRESH_MS, {}))
        if self._clock.moment() - read_at < _LETTERS_FRESH_MS:
            return known
        # Many runs of a tenant are acted on at a time.
        return await self._reads.read(tenant, lambda: self._read_letters(tenant))

    async def _read_letters(self, tenant: TenantId) -> dict[RunId, list[DeadLetter]]:
        read_at = self._clock.moment()
        known: dict[RunId, list[DeadLetter]] = {}
        cursor: str | None = None
        while True:
            page = await self._store.list_dead_letters(tenant, cursor=cursor, limit=_PAGE)
            for letter in page.items:
                known.setdefault(letter.run_id, []).append(letter)
            cursor = page.cursor
            if cursor is None:
                break
        self._letters = {tenant: (read_at, known)}
        return known


def _decision_entry(bulk: Bulk, run: Run, step_id: StepId) -> AuditEntry:
    approved = bulk.action is BulkAction.APPROVE
    decision = redacted({"approved": approved, "comment": None, "data": None}, "data")
    subject = f"run/{run.id}/step/{step_id}"
    return _entry(bulk, f"step.{bulk.action}", subject, run, decision)


def _entry(
    bulk: Bulk,
    action: str,
    subject: str,
    run: Run,
    after: JsonObject,
    *,
    before: JsonObject | None = None,
) -> AuditEntry:
    """The entry that the request about one run writes, and the bulk action's id."""
    return AuditEntry(
        action=action,
        actor=bulk.actor,
        subject=subject,
        tenant=run.tenant,
        before=before,
        after={**after, "bulk": bulk.id},
        request_id=bulk.request_id,
    )


def _outcome(
    run_id: RunId, changed: RunChange | UnknownTarget | Conflicting
) -> BulkDone | BulkFailed:
    match changed:
        case RunChange():
            return BulkDone()
        case UnknownTarget():
            return BulkFailed(run_id, "not_found", f"there is no {changed.what}")
        case Conflicting():
            return BulkFailed(run_id, "conflict", changed.message)
        case _:
            assert_never(changed)


def _was_decided(run: Run, actor: str, *, approve: bool) -> bool:
    """Whether this actor has made this decision on a step already, for example before a crash."""
    return any(
        isinstance(step.output, dict)
        and step.output.get("approved") is approve
        and step.output.get("by") == actor
        for step in run.steps.values()
    )
