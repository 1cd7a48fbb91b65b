"""The worker loop: lease jobs while there is capacity, run handlers, report results, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, assert_never

import msgspec
from msgspec import Meta

from stanchion import telemetry
from stanchion.core.lease import FenceCause, Moment
from stanchion.core.retry import Exponential, backoff_ms, honour_retry_after
from stanchion.wire.identifiers import WaitS
from stanchion.wire.worker import JobError, JobResult, LeaseAnswer, LeasedJob
from stanchion.worker import events, results
from stanchion.worker.errors import WorkerRefused, stop_error
from stanchion.worker.events import Hook, log_event
from stanchion.worker.job import job_of
from stanchion.worker.renewal import HeldJob, LeaseRenewer, WorkerClock
from stanchion.worker.results import Reporter
from stanchion.worker.revocation import RevocationWatch
from stanchion.worker.server import ServerAnswered, ServerRefused, ServerUnreachable, WorkerApi
from stanchion.worker.tasks import AsyncTask, ProcessTask, Task, ThreadExecutor, ThreadTask

if TYPE_CHECKING:
    from stanchion.worker.processes import ProcessExecutor


async def first(
    *awaitables: asyncio.Task[None] | Coroutine[Any, Any, object], timeout_s: float | None = None
) -> None:
    """Wait until one of them has ended or the time is over, then cancel the tasks made here."""
    given = {each for each in awaitables if isinstance(each, asyncio.Task)}
    own = {asyncio.create_task(each) for each in awaitables if not isinstance(each, asyncio.Task)}
    try:
        await asyncio.wait(given | own, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in own:
            await end(each)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait for its end; ignore its exception."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


LEASE_JOBS_MAX: Final = 100
"""Jobs in one answer, so that decoding it does not block the event loop for long."""
BACKOFF: Final = Exponential(base_ms=200, cap_ms=5_000)
_PAUSE_MS_MIN: Final = 50
_IDLE: Final = Exponential(base_ms=50, cap_ms=2_000)
"""The pause if a server answers without jobs sooner than it was asked to wait."""
_SPREAD: Final = 0.5
_LAST_ANSWER_S: Final = 0.25
"""How long a lease request that is under way may still take when the worker stops."""
_UNWIND_S: Final = 1.0
"""How long a cancelled handler may take to clean up when the worker stops."""
_FLUSH_S: Final = 5.0
"""How long unsent results may take to be sent when the worker stops."""


class LoopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Concurrency and time-outs of the loop."""

    concurrency: Annotated[int, Meta(ge=1, le=10_000)]
    wait_s: WaitS
    drain_s: float


class WorkerLoop:
    """One run of a worker, from its first lease request to its last result. On one event loop."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        server: WorkerApi,
        clock: WorkerClock,
        chance: Callable[[], float],
        tell: Hook,
        options: LoopOptions,
    ) -> None:
        self._tasks = tasks
        self._topics = tuple(tasks)
        self._server = server
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._options = options
        self._renewer = LeaseRenewer(server, clock, chance, tell)
        self._watch = RevocationWatch(server, clock, chance, self._renewer)
        self._reporter = Reporter(
            server, self._renewer, clock, chance, tell, self._refuse, self._make_room
        )
        self._threads = ThreadExecutor(options.concurrency)
        self._processes: ProcessExecutor | None = None
        self._handling: dict[asyncio.Task[None], HeldJob] = {}
        self._room = asyncio.Event()
        self._draining = asyncio.Event()
        self._forced = asyncio.Event()
        self._refusal: WorkerRefused | None = None
        self._is_asking = False
        self._is_leaving = False

    async def run(self) -> None:
        """Work until stopped. Raises ``WorkerRefused`` if the server refuses this worker."""
        polling = asyncio.create_task(self._poll(), name="lease")
        try:
            await first(polling, self._draining.wait())
            if polling.done():
                polling.result()
            await self._drain(polling)
        finally:
            await end(polling)
            await self._leave()
        if self._refusal is not None:
            raise self._refusal

    def stop(self) -> None:
        """Lease no more jobs, finish the running ones, and end. Called again: end now."""
        if self._draining.is_set():
            self._forced.set()
        self._draining.set()

    # ── Leasing jobs ─────────────────────────────────────────────────────────────────────────────

    async def _poll(self) -> None:
        failures = empties = 0
        while not self._draining.is_set():
            room = self._free()
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            asked_at = self._clock.moment()
            self._is_asking = True
            answer = await self._server.lease(
                self._topics, max_jobs=min(room, LEASE_JOBS_MAX), wait_s=self._options.wait_s
            )
            self._is_asking = False
            match answer:
                case ServerAnswered(value):
                    if failures:
                        self._tell(events.ServerBack())
                    failures = 0
                    self._begin_all(value, asked_at)
                    was_quick = not value.jobs and self._is_quick(asked_at)
                    empties = empties + 1 if was_quick else 0
                    if was_quick:
                        await self._pause(_IDLE, empties, 0)
                case ServerUnreachable(error, retry_after_ms):
                    failures += 1
                    if failures == 1:
                        self._tell(events.ServerAway(error=error))
                    await self._pause(BACKOFF, failures, retry_after_ms)
                case ServerRefused(status, code, detail):
                    self._refuse(WorkerRefused(status, code, detail))
                case _:
                    assert_never(answer)

    def _free(self) -> int:
        """How many more jobs may be leased. Results that are not accepted yet count too."""
        handling, unsettled = len(self._handling), self._reporter.unsettled
        at_once = self._options.concurrency
        return min(at_once - handling, 2 * at_once - handling - unsettled)

    def _is_quick(self, asked_at: Moment) -> bool:
        # With wait_s of 0, every answer is quick.
        return (self._clock.moment() - asked_at) <= self._options.wait_s * 1000 / 2

    async def _pause(self, backoff: Exponential, count: int, retry_after_ms: int) -> None:
        sample = self._chance()
        own_ms = max(_PAUSE_MS_MIN, backoff_ms(backoff, count, sample))
        wait_ms = honour_retry_after(retry_after_ms, own_ms, sample, _SPREAD)
        await self._clock.sleep(wait_ms / 1000)

    def _refuse(self, refusal: WorkerRefused) -> None:
        self._refusal = self._refusal or refusal
        self._draining.set()

    def _make_room(self) -> None:
        self._room.set()

    # ── Handling jobs ────────────────────────────────────────────────────────────────────────────

    def _begin_all(self, answer: LeaseAnswer, asked_at: Moment) -> None:
        # The server leased these jobs this long after the request was sent.
        granted_from = Moment(asked_at + max(0, answer.waited_ms))
        loop = asyncio.get_running_loop()
        for leased in answer.jobs:
            task = self._tasks.get(leased.topic)
            if task is None:
                log_event(
                    logging.ERROR, "job_topic_unknown", job_id=leased.job_id, topic=leased.topic
                )
                continue
            held = self._renewer.hold(leased, granted_from)
            self._watch.lease_added()
            handling = loop.create_task(self._handle(task, held), name=leased.job_id)
            self._handling[handling] = held
            if isinstance(task, AsyncTask):
                held.on_lost = _canceller(handling, leased.job_id)
            handling.add_done_callback(self._handled)

    async def _handle(self, task: Task, held: HeldJob) -> None:
        """Handle one job. There is no await after the handler, so no cancellation either."""
        leased = held.leased
        trace_id = leased.traceparent[3:35] if leased.traceparent else None
        telemetry.LOG_IDS.set(
            telemetry.LogIds(None, leased.tenant, leased.run_id, leased.job_id, trace_id)
        )
        began = self._clock.moment()
        result: JobResult | None = None
        if held.look() is None:
            if telemetry.tracing is None or not leased.traceparent:
                result = await self._outcome(task, held)
            else:
                result = await self._traced(telemetry.tracing, leased.traceparent, task, held)
        held.on_lost = None
        # The lease was lost meanwhile, or the loop was blocked and the loss was not noticed.
        cause = held.look()
        if result is None or cause is not None:
            self._renewer.let_go(held)
            # Since the request: the loop may have been blocked before it read the answer.
            since = held.asked_at
            stalled_ms = self._renewer.stalled_ms(since) if cause is FenceCause.DEADLINE else 0
            self._tell(_stopped(leased, cause, stalled_ms))
            return
        if held.usage:
            result = msgspec.structs.replace(result, usage=held.usage)
        self._reporter.report(held, result)
        took_ms = self._clock.moment() - began
        self._tell(
            events.JobEnded(
                job_id=leased.job_id, topic=leased.topic, status=result.status, took_ms=took_ms
            )
        )

    async def _traced(
        self, tracing: telemetry.Tracing, parent: str, task: Task, held: HeldJob
    ) -> JobResult | None:
        """The same as ``_outcome``, in a span that is current for the handler's own spans."""
        leased = held.leased
        attributes: dict[str, str | int | None] = {
            telemetry.TENANT: leased.tenant,
            telemetry.RUN: leased.run_id,
            telemetry.STEP: leased.step_id,
            telemetry.ITEM: leased.item,
            telemetry.JOB: leased.job_id,
            telemetry.TOPIC: leased.topic,
            telemetry.ATTEMPT: leased.attempt,
            telemetry.DELIVERY: leased.delivery,
            telemetry.FENCE: leased.fence,
        }
        with tracing.handling(parent, attributes) as span:
            result = await self._outcome(task, held)
        if result is None:
            span.end(error="the worker stopped")
            return None
        error = result.error.message if isinstance(result.error, JobError) else None
        cause = held.look()
        span.note({telemetry.OUTCOME: result.status if cause is None else str(cause)})
        span.end(error=error if cause is None else f"the lease was lost: {cause}")
        return msgspec.structs.replace(result, traceparent=span.traceparent)

    async def _outcome(self, task: Task, held: HeldJob) -> JobResult | None:
        """The job's result; ``None`` if the worker stops without one."""
        leased = held.leased
        try:
            return await self._call(task, held)
        except asyncio.CancelledError as cancelled:
            if self._is_leaving:
                return None
            # Raised by the handler itself, unless the lease is lost: then the result is ignored.
            return results.failed(leased.job_id, leased.fence, cancelled)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            if held.look() is None:
                log_event(logging.WARNING, "job_failed", raised=error, job_id=leased.job_id)
            return results.failed(leased.job_id, leased.fence, error)

    async def _call(self, task: Task, held: HeldJob) -> JobResult:
        leased = held.leased
        match task:
            case AsyncTask(handler):
                output = await handler(job_of(leased, held))
            case ThreadTask(handler):
                output = await self._threads.call(handler, job_of(leased, held))
            case ProcessTask(handler):
                return await self._threads.call(self._children().call, handler, held)
            case _:
                assert_never(task)
        return results.succeeded(leased.job_id, leased.fence, output)

    def _children(self) -> ProcessExecutor:
        if self._processes is None:
            from stanchion.worker.processes import ProcessExecutor  # noqa: PLC0415 - few pay for it

            self._processes = ProcessExecutor()
        return self._processes

    def _handled(self, handling: asyncio.Task[None]) -> None:
        del self._handling[handling]
        self._make_room()
        if not handling.cancelled():
            handling.result()  # Raise bugs instead of hiding them.

    # ── Shutting down ────────────────────────────────────────────────────────────────────────────

    async def _drain(self, polling: asyncio.Task[None]) -> None:
        """Wait, within limits, for the last lease request, for handlers, and for results."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._options.drain_s
        if self._is_asking:
            # The answer may contain jobs. If the connection were closed now, these jobs would wait
            # until their leases expire.
            await first(polling, self._forced.wait(), timeout_s=_LAST_ANSWER_S)
        await end(polling)
        if self._handling:
            handlers = asyncio.wait(tuple(self._handling))
            left_s = max(0, ends_at - loop.time())
            await first(handlers, self._forced.wait(), timeout_s=left_s)
        await self._stop_handlers()
        if not self._forced.is_set():
            await first(self._reporter.finish(), self._forced.wait(), timeout_s=_FLUSH_S)

    async def _stop_handlers(self) -> None:
        """Cancel what has not ended. Its jobs are left to expire, and another worker gets them."""
        self._is_leaving = True
        for handling, held in tuple(self._handling.items()):
            self._renewer.let_go(held)
            handling.cancel("the worker is shutting down")
        if self._processes is not None:
            self._processes.close()
        if self._handling:
            await asyncio.wait(tuple(self._handling), timeout=_UNWIND_S)

    async def _leave(self) -> None:
        await self._stop_handlers()
        await self._reporter.close()
        await self._watch.close()
        await self._renewer.close()
        self._threads.close()


def _stopped(
    leased: LeasedJob, cause: FenceCause | None, stalled_ms: int
) -> events.JobAbandoned | events.JobCancelled:
    if cause is FenceCause.CANCELLED:
        return events.JobCancelled(job_id=leased.job_id, topic=leased.topic)
    return events.JobAbandoned(
        job_id=leased.job_id, topic=leased.topic, cause=cause or "shutdown", stalled_ms=stalled_ms
    )


def _canceller(handling: asyncio.Task[None], job_id: str) -> Callable[[FenceCause], None]:
    def cancel(cause: FenceCause) -> None:
        # Handlers see it as the argument of their CancelledError.
        handling.cancel(stop_error(job_id, cause))

    return cancel
