"""Reporting: results go to the server together, and again until it has said what became of them.

A result that the server did not take is not lost yet: the server compares its fence, so to send it
once more is safe, also after the lease ran out. It is given up two terms later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX
from stanchion.core.retry import Exponential, backoff_ms, honour_retry_after
from stanchion.wire.worker import JobResult, ResultsAnswer
from stanchion.worker import events as told
from stanchion.worker import outcome
from stanchion.worker.clock import Clock
from stanchion.worker.errors import WorkerRefused
from stanchion.worker.events import Hook
from stanchion.worker.keeping import Held, Keeper
from stanchion.worker.server import Answered, Away, Refused, Server

__all__ = ["Reporter"]

GATHER_S: Final = 0.001
"""Results that end within this time travel together."""
FLIGHTS_MAX: Final = 4
RESULTS_MAX: Final = 500
BATCH_BYTES_MAX: Final = 512 * 1024
"""The server takes 1 MiB; the largest single result is half of this."""
RESULTS_TIMEOUT_S: Final = 10.0
_ENVELOPE_BYTES: Final = 512
_FAILURE_BYTES_MAX: Final = 4 * ERROR_MESSAGE_CHARS_MAX + _ENVELOPE_BYTES
BACKOFF: Final = Exponential(base_ms=100, cap_ms=2_000)
_PAUSE_MS_MIN: Final = 20
_SPREAD: Final = 0.5
_NOT_A_WORKER: Final = frozenset({401, 403, 404, 405})
"""Said of this worker, not of these results."""


class _Report(msgspec.Struct):
    held: Held
    result: JobResult
    size: int
    is_replaced: bool = False
    """Whether the server refused the result itself, and this says so in its place."""
    alone: bool = False
    """Whether it travels by itself, since something it travelled with was refused."""


class Reporter:
    """Sends results."""

    def __init__(
        self,
        server: Server,
        keeper: Keeper,
        clock: Clock,
        chance: Callable[[], float],
        tell: Hook,
        on_refused: Callable[[WorkerRefused], None],
        on_settled: Callable[[], None],
    ) -> None:
        self._server = server
        self._keeper = keeper
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._on_refused = on_refused
        self._on_settled = on_settled
        self._waiting: dict[str, _Report] = {}
        self._flights: set[asyncio.Task[None]] = set()
        self._flying = 0
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._all_told = asyncio.Event()
        self._all_told.set()

    @property
    def unsettled(self) -> int:
        """Results that the server has not taken yet."""
        return len(self._waiting) + self._flying

    def report(self, held: Held, result: JobResult) -> None:
        """Send it, soon and until it is settled."""
        self._all_told.clear()
        self._put(_Report(held, result, _size_of(result)))
        self._flush_in(GATHER_S)

    async def finish(self) -> None:
        """Wait until everything is settled."""
        await self._all_told.wait()

    async def close(self) -> None:
        """Give up what is not settled."""
        if self._timer is not None:
            self._timer.cancel()
        for flight in self._flights:
            flight.cancel()
        await asyncio.gather(*self._flights, return_exceptions=True)
        for report in tuple(self._waiting.values()):
            self._drop(report, "the worker was stopped")
        self._waiting.clear()

    def _put(self, report: _Report) -> None:
        job_id = report.result.job_id
        other = self._waiting.get(job_id)
        if other is not None and other.result.fence > report.result.fence:
            self._drop(report, "a newer lease of the same job has its own result")
            return
        if other is not None:
            self._drop(other, "a newer lease of the same job has its own result")
        self._waiting[job_id] = report

    def _flush_in(self, seconds: float) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        while self._waiting and len(self._flights) < FLIGHTS_MAX:
            batch = self._take()
            self._flying += len(batch)
            loop = asyncio.get_running_loop()
            flight = loop.create_task(self._fly(batch), name="results")
            self._flights.add(flight)
            flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        if not flight.cancelled():
            flight.result()  # A bug is to be seen, not to be swallowed.
        if self._waiting:
            self._flush_in(GATHER_S)
        elif not self._flying:
            self._all_told.set()
        self._on_settled()

    def _take(self) -> list[_Report]:
        batch: list[_Report] = []
        size = 0
        for job_id, report in tuple(self._waiting.items()):
            size += report.size
            if batch and (size > BATCH_BYTES_MAX or report.alone):
                break
            batch.append(report)
            del self._waiting[job_id]
            if len(batch) == RESULTS_MAX or report.alone:
                break
        return batch

    async def _fly(self, batch: list[_Report]) -> None:
        try:
            answer = await self._server.results(
                tuple(report.result for report in batch), timeout_s=RESULTS_TIMEOUT_S
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, the results are still to be told
            answer = Away(repr(error))
        finally:
            self._flying -= len(batch)
        match answer:
            case Answered(value):
                self._failures = 0
                self._settle(batch, value)
            case Away():
                self._again(batch, answer)
            case Refused():
                self._refused(batch, answer)
            case _:
                assert_never(answer)

    def _settle(self, batch: list[_Report], answer: ResultsAnswer) -> None:
        accepted = frozenset(answer.accepted)
        rejected = {each.job_id: each.code for each in answer.rejected}
        for report in batch:
            job_id = report.result.job_id
            if job_id in accepted:
                self._keeper.let_go(report.held)
            elif job_id in rejected:
                self._keeper.let_go(report.held)
                self._tell(told.ResultRejected(job_id=job_id, code=rejected[job_id]))
            else:
                self._keep_trying(report, "the server did not say what became of it")

    def _again(self, batch: list[_Report], away: Away) -> None:
        self._failures += 1
        sample = self._chance()
        own_ms = max(_PAUSE_MS_MIN, backoff_ms(BACKOFF, self._failures, sample))
        pause_ms = honour_retry_after(
            min(away.retry_after_ms, BACKOFF.cap_ms), own_ms, sample, _SPREAD
        )
        for report in batch:
            self._keep_trying(report, away.error)
        # Nothing flies before: what comes in meanwhile waits, and then goes along.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush_in(pause_ms / 1000)

    def _keep_trying(self, report: _Report, reason: str) -> None:
        if self._clock.moment() >= report.held.give_up_at:
            self._drop(report, reason)
        else:
            self._put(report)

    def _refused(self, batch: list[_Report], refusal: Refused) -> None:
        if refusal.status in _NOT_A_WORKER:
            for report in batch:
                self._drop(report, refusal.detail)
            self._on_refused(WorkerRefused(refusal.status, refusal.code, refusal.detail))
        elif len(batch) > 1:
            # One of them is to blame. The others must not suffer for it.
            for report in batch:
                report.alone = True
                self._put(report)
        elif batch[0].is_replaced:
            self._drop(batch[0], refusal.detail)
        else:
            self._put(_instead_of(batch[0], refusal))

    def _drop(self, report: _Report, reason: str) -> None:
        self._keeper.let_go(report.held)
        self._tell(told.ResultDropped(job_id=report.result.job_id, reason=reason))


def _instead_of(report: _Report, refusal: Refused) -> _Report:
    why = f"the server refused the result: {refusal.detail} ({refusal.code})"
    result = outcome.refused(report.result.job_id, report.result.fence, "result_refused", why)
    return _Report(report.held, result, _size_of(result), is_replaced=True, alone=True)


def _size_of(result: JobResult) -> int:
    """How many bytes it takes on the wire, at most."""
    if result.status == "failed":
        return _FAILURE_BYTES_MAX
    output: object = result.output
    # A handler in a process sends its output decoded: a few of them, encoded once more here.
    body = output if isinstance(output, msgspec.Raw) else msgspec.json.encode(output)
    return len(memoryview(body)) + _ENVELOPE_BYTES
