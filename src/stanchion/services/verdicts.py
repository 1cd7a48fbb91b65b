"""Verdicts: what the store decided about a start, as the answer of the gate.

A start that was admitted needs nothing more. Of one that was not, the answer may need the state of
an earlier run, its place in the tenant's queue, or the time after which to retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar, assert_never

from stanchion.core import admission as judged
from stanchion.core.admission import Verdict
from stanchion.core.budget import OverBudget
from stanchion.core.model import Run, RunId, RunStatus
from stanchion.ports.errors import BackendError, sentence
from stanchion.services import admission_lock
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import (
    Backend,
    GateCode,
    GateFailed,
    GateFull,
    JobThrottled,
    KeyMismatch,
    Pacing,
    Passed,
    QueueOff,
    RunStarted,
)
from stanchion.services.log import OutageLogger
from stanchion.services.prepared import GateCall, PreparedRow
from stanchion.services.queue import QueueFigures

CHANGED_EACH_TIME: Final = "the workflow changed each time it was read"
STATUS_MS_MAX: Final = 500
"""For reading the state of a run or its place in the queue, which an answer can do without."""

_Refusal = TypeVar("_Refusal")


class VerdictAnswers:
    """Makes the answers to calls of the gate that the store or the tenant's lock decided."""

    def __init__(self, context: ReplicaContext, *, pacing: Pacing, outage: OutageLogger) -> None:
        self._context = context
        self._pacing = pacing
        self._queue = QueueFigures(context)
        self._outage = outage

    async def not_admitted(
        self, call: GateCall, run: Run, verdict: judged.Queued | judged.Replayed | judged.Refused
    ) -> Passed:
        """The answer to a start whose run has no slot."""
        if isinstance(verdict, judged.Queued):
            return await self._queued(call, verdict.run_id, verdict.position, replayed=False)
        return await self.known_or_refused(call, verdict, run.status)

    async def known_or_refused(
        self, call: GateCall, verdict: judged.Replayed | judged.Refused, status_before: RunStatus
    ) -> Passed:
        """The answer to a start that creates no run."""
        match verdict:
            case judged.Replayed(run_id):
                return await self.replayed(call, run_id, status_before)
            case judged.QueueFull(limit, active, queue_max):
                retry_after_ms = self._pacing.full(call.tenant)
                return GateFull(limit, active, retry_after_ms, queue_max)
            case judged.NoQueue():
                return QueueOff()
            case judged.Full(limit, active):
                return GateFull(limit, active, self._pacing.full(call.tenant))
            case OverBudget():
                return self._pacing.over_budget(call.tenant, verdict)
            case judged.Mismatch():
                return KeyMismatch()
            case judged.TickTaken(generation, tick):
                # A tick is the key of its run: this one, or a later one, has another run.
                return KeyMismatch((generation, tick))
            case judged.RateExceeded():
                return JobThrottled()
            case judged.TooLate() | judged.StaleDefinition():
                return self.store_failed(call, "the store handled the call too late")
            case _:
                assert_never(verdict)

    async def replayed(self, call: GateCall, run_id: RunId, status_before: RunStatus) -> RunStarted:
        """The run that the same key created before, with its present status.

        If the run cannot be read, the answer has the status ``status_before``: the caller needs the
        run's id above all.
        """
        try:
            async with asyncio.timeout(self._part_of_time(call) / 1000):
                loaded = await self._context.store.load(run_id)
        except (BackendError, TimeoutError):
            loaded = None
        status = status_before if loaded is None else loaded.run.status
        if status is RunStatus.QUEUED:
            position = await self._queue.position(run_id, within_ms=self._part_of_time(call))
            if position is not None:
                return await self._queued(call, run_id, position, replayed=True)
            status = RunStatus.PENDING  # promoted since it was read
        return RunStarted(run_id, status, replayed=True)

    async def _queued(
        self, call: GateCall, run_id: RunId, position: int, *, replayed: bool
    ) -> RunStarted:
        within_ms = self._part_of_time(call)
        return RunStarted(
            run_id,
            RunStatus.QUEUED,
            replayed=replayed,
            position=position,
            estimate_s=await self._queue.estimate_s(call.tenant, position, within_ms=within_ms),
        )

    def _part_of_time(self, call: GateCall) -> int:
        """How long optional parts of the answer may take, in milliseconds."""
        left_ms = call.ends_at - self._context.clock.moment()
        return max(0, min(STATUS_MS_MAX, left_ms // 2))

    async def of_rows(
        self,
        call: GateCall,
        rows: Sequence[PreparedRow[_Refusal]],
        verdicts: Mapping[int, Verdict],
    ) -> list[Passed | _Refusal]:
        """The answers to starts of a batch. Those that must read more are read together."""
        answers: list[Passed | _Refusal] = []
        slow: dict[int, Coroutine[Any, Any, Passed | _Refusal]] = {}
        for place, row in enumerate(rows):
            run, verdict = row.admission.run, verdicts[place]
            answers.append(RunStarted(run.id, run.status, replayed=False))
            if not isinstance(verdict, judged.Admitted):
                slow[place] = self._of_row(call, row, verdict)
        for place, answer in zip(slow, await asyncio.gather(*slow.values()), strict=True):
            answers[place] = answer
        return answers

    async def _of_row(
        self, call: GateCall, row: PreparedRow[_Refusal], verdict: Verdict
    ) -> Passed | _Refusal:
        try:
            match verdict:
                case judged.Replayed() | judged.Mismatch():
                    status = (
                        RunStatus.RUNNING if row.refused is not None else row.admission.run.status
                    )
                    return await self.known_or_refused(call, verdict, status)
                case _ if row.refused is not None:
                    return row.refused
                case judged.Queued(run_id, position):
                    return await self._queued(call, run_id, position, replayed=False)
                case judged.StaleDefinition():
                    return self.store_failed(call, CHANGED_EACH_TIME)
                case judged.Admitted():
                    raise AssertionError("it is answered already")
                case _:
                    return await self.known_or_refused(call, verdict, row.admission.run.status)
        except BackendError as error:
            return self.store_failed(call, sentence(error))

    def without_lock(
        self, why: admission_lock.GateLockBusy | admission_lock.GateLockFailed
    ) -> GateFailed:
        """The answer to a start that did not get the tenant's lock."""
        match why:
            case admission_lock.GateLockBusy():
                error = "others had the tenant's lock for all of the wait budget"
                return GateFailed(GateCode.GATE_BUSY, error, self._pacing.busy())
            case admission_lock.GateLockFailed(error):
                retry_after_ms = self._pacing.away(Backend.LOCKS)
                return GateFailed(GateCode.GATE_UNAVAILABLE, error, retry_after_ms)
            case _:
                assert_never(why)

    def store_failed(self, call: GateCall, error: str) -> GateFailed:
        """The answer to a start that the store did not answer in time; logs the outage once."""
        self._outage.failed(error)
        code = GateCode.LIMIT_CHECK_FAILED if call.is_locked else GateCode.GATE_UNAVAILABLE
        return GateFailed(code, error, self._pacing.away(Backend.STORE))
