"""Results: what a handler returned or raised, sent until the server has taken or rejected it.

An output that cannot be sent would be refused together with all results in the same request. So it
is checked here, and becomes a failure that names the fault. The failure is final: the next attempt
would return the same.

Results are sent in batches and again after failures. To send one twice is safe, also after its
lease has expired: the server compares the fence. Two lease terms later it is dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final, assert_never, cast

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, JSON_DEPTH_MAX, RESULT_BYTES_MAX
from stanchion.core.retry import Exponential, backoff_ms, honour_retry_after
from stanchion.wire.worker import JobError, JobResult, ResultsAnswer
from stanchion.worker import events
from stanchion.worker.errors import JobFailed, WorkerRefused
from stanchion.worker.events import Hook
from stanchion.worker.renewal import HeldJob, LeaseRenewer, WorkerClock
from stanchion.worker.server import ServerAnswered, ServerRefused, ServerUnreachable, WorkerApi

_ENCODER: Final = msgspec.json.Encoder()


def succeeded(job_id: str, fence: int, output: object) -> JobResult:
    """The result of a handler that returned ``output``; a failure, if that cannot be sent."""
    try:
        encoded = _ENCODER.encode(output)
    except Exception as error:  # noqa: BLE001 - a value's own code may raise anything
        return refused(job_id, fence, "output_not_json", f"the output is not JSON: {error}")
    if len(encoded) > RESULT_BYTES_MAX:
        return refused(
            job_id,
            fence,
            "output_too_large",
            f"the output has {len(encoded)} bytes; at most {RESULT_BYTES_MAX} are taken."
            " Store it elsewhere and return where it is.",
        )
    # Most outputs are small and shallow: a look at the bytes spares the walk.
    if encoded.count(b"[") + encoded.count(b"{") > JSON_DEPTH_MAX:
        depth = _depth(msgspec.json.decode(encoded))
        if depth > JSON_DEPTH_MAX:
            why = f"the output is nested {depth} deep; at most {JSON_DEPTH_MAX} are taken"
            return refused(job_id, fence, "output_too_deep", why)
    why_not = why_not_json(output)
    if why_not is not None:
        return refused(job_id, fence, "output_not_json", f"the output is not JSON: {why_not}")
    # Encoded once: the request takes these bytes as they are.
    ready = cast("JsonValue", msgspec.Raw(encoded))
    return JobResult(job_id=job_id, fence=fence, status="succeeded", output=ready)


def failed(job_id: str, fence: int, error: BaseException) -> JobResult:
    """The result of a handler that raised."""
    kind, text = type(error).__name__, _text_of(error)
    told = JobError(message=_bounded(f"{kind}: {text}" if text else kind))
    if isinstance(error, JobFailed):
        # A subclass may set these as it likes, or not at all if it does not call our ``__init__``.
        said, code = getattr(error, "message", None), getattr(error, "code", None)
        told = msgspec.structs.replace(
            told,
            message=told.message if said is None else _bounded(_text_of(said)),
            code=code if isinstance(code, str) else told.code,
            retryable=bool(error.retryable),
        )
    return JobResult(job_id=job_id, fence=fence, status="failed", error=told)


def refused(job_id: str, fence: int, code: str, why: str) -> JobResult:
    """The result of a handler whose output cannot be sent."""
    told = JobError(message=_bounded(why), code=code, retryable=False)
    return JobResult(job_id=job_id, fence=fence, status="failed", error=told)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - the value's own code raised
        return ""


def _bounded(text: str) -> str:
    """A text that the server accepts: not too long, no control characters, valid UTF-8."""
    text = text[: 2 * ERROR_MESSAGE_CHARS_MAX].encode("utf-8", "replace").decode()
    text = "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)
    if len(text) > ERROR_MESSAGE_CHARS_MAX:
        text = text[: ERROR_MESSAGE_CHARS_MAX - 1] + "…"
    return text.strip() or "no message"


def _depth(value: JsonValue) -> int:
    deepest, level = 0, [value]
    while level:
        below: list[JsonValue] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
            else:
                continue
        deepest += any(isinstance(each, dict | list) for each in level)
        level = below
    return deepest


def why_not_json(value: object) -> str | None:
    """What has no form in JSON in a value that was encoded before; ``None`` if all of it has.

    The encoder writes bytes as Base64, sets as lists, and NaN and infinities as null: what arrives
    would not be what was meant.
    """
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, bytes | bytearray | memoryview | set | frozenset):
            return f"it holds {type(each).__name__}"
        if isinstance(each, float) and not math.isfinite(each):
            return "it holds NaN or an infinity"
        todo.extend(inner for inner in _members(each) if type(inner) not in _SCALARS)
    return None


_SCALARS: Final = frozenset({str, int, bool, type(None)})


def _members(value: object) -> Iterable[object]:
    """What a value consists of, as the encoder sees it."""
    match value:
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple():
            return value
        case msgspec.Struct():
            return [getattr(value, name) for name in value.__struct_fields__]
        case _ if hasattr(value, "__dataclass_fields__") or hasattr(value, "__attrs_attrs__"):
            return vars(value).values() if hasattr(value, "__dict__") else _slots(value)
        case _:
            return ()


def _slots(value: object) -> list[object]:
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [getattr(value, name, None) for name in names]


GATHER_S: Final = 0.001
"""Results that end within this time are sent together."""
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
"""These responses are about this worker, not about these results."""


class _Report(msgspec.Struct):
    held: HeldJob
    result: JobResult
    size: int
    is_replaced: bool = False
    """Whether the server refused the result itself, and this says so in its place."""
    alone: bool = False
    """Whether it is sent alone, since a batch that it was in was refused."""


class Reporter:
    """Sends results."""

    def __init__(
        self,
        server: WorkerApi,
        renewer: LeaseRenewer,
        clock: WorkerClock,
        chance: Callable[[], float],
        tell: Hook,
        on_refused: Callable[[WorkerRefused], None],
        on_settled: Callable[[], None],
    ) -> None:
        self._server = server
        self._renewer = renewer
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._on_refused = on_refused
        self._on_settled = on_settled
        self._waiting: dict[str, _Report] = {}
        self._flights: dict[asyncio.Task[None], list[_Report]] = {}
        self._flying = 0
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._all_settled = asyncio.Event()
        self._all_settled.set()

    @property
    def unsettled(self) -> int:
        """Results that the server has not taken yet."""
        return len(self._waiting) + self._flying

    def report(self, held: HeldJob, result: JobResult) -> None:
        """Send it, soon and until it is settled."""
        self._all_settled.clear()
        self._put(_Report(held, result, _size_of(result)))
        self._flush_in(GATHER_S)

    async def finish(self) -> None:
        """Wait until everything is settled."""
        await self._all_settled.wait()

    async def close(self) -> None:
        """Give up what is not settled."""
        if self._timer is not None:
            self._timer.cancel()
        flights = dict(self._flights)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        unanswered = [batch for flight, batch in flights.items() if flight.cancelled()]
        for report in (*chain.from_iterable(unanswered), *self._waiting.values()):
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
            self._flights[flight] = batch
            flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.pop(flight, None)
        if not flight.cancelled():
            flight.result()  # Raise bugs instead of hiding them.
        if self._waiting:
            self._flush_in(GATHER_S)
        elif not self._flying:
            self._all_settled.set()
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
        except Exception as error:  # noqa: BLE001 - the results are sent again
            answer = ServerUnreachable(repr(error))
        finally:
            self._flying -= len(batch)
        match answer:
            case ServerAnswered(value):
                self._failures = 0
                self._settle(batch, value)
            case ServerUnreachable():
                self._again(batch, answer)
            case ServerRefused():
                self._refused(batch, answer)
            case _:
                assert_never(answer)

    def _settle(self, batch: list[_Report], answer: ResultsAnswer) -> None:
        accepted = frozenset(answer.accepted)
        rejected = {each.job_id: each.code for each in answer.rejected}
        for report in batch:
            job_id = report.result.job_id
            if job_id in accepted:
                self._renewer.let_go(report.held)
            elif job_id in rejected:
                self._renewer.let_go(report.held)
                self._tell(events.ResultRejected(job_id=job_id, code=rejected[job_id]))
            else:
                self._keep_trying(report, "the server's answer does not mention it")

    def _again(self, batch: list[_Report], away: ServerUnreachable) -> None:
        self._failures += 1
        sample = self._chance()
        own_ms = max(_PAUSE_MS_MIN, backoff_ms(BACKOFF, self._failures, sample))
        pause_ms = honour_retry_after(
            min(away.retry_after_ms, BACKOFF.cap_ms), own_ms, sample, _SPREAD
        )
        for report in batch:
            self._keep_trying(report, away.error)
        # No request is sent before then: results that end meanwhile join this batch.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush_in(pause_ms / 1000)

    def _keep_trying(self, report: _Report, reason: str) -> None:
        if self._clock.moment() >= report.held.give_up_at:
            self._drop(report, reason)
        else:
            self._put(report)

    def _refused(self, batch: list[_Report], refusal: ServerRefused) -> None:
        if refusal.status in _NOT_A_WORKER:
            for report in batch:
                self._drop(report, refusal.detail)
            self._on_refused(WorkerRefused(refusal.status, refusal.code, refusal.detail))
        elif len(batch) > 1:
            # One of them is at fault: send each alone.
            for report in batch:
                report.alone = True
                self._put(report)
        elif batch[0].is_replaced:
            self._drop(batch[0], refusal.detail)
        else:
            self._put(_instead_of(batch[0], refusal))

    def _drop(self, report: _Report, reason: str) -> None:
        self._renewer.let_go(report.held)
        self._tell(events.ResultDropped(job_id=report.result.job_id, reason=reason))


def _instead_of(report: _Report, refusal: ServerRefused) -> _Report:
    why = f"the server refused the result: {refusal.detail} ({refusal.code})"
    result = refused(report.result.job_id, report.result.fence, "result_refused", why)
    return _Report(report.held, result, _size_of(result), is_replaced=True, alone=True)


def _size_of(result: JobResult) -> int:
    """How many bytes it takes on the wire, at most."""
    if result.status == "failed":
        return _FAILURE_BYTES_MAX
    output: object = result.output
    # A handler in a process sends its output decoded: a few of them, encoded once more here.
    body = output if isinstance(output, msgspec.Raw) else msgspec.json.encode(output)
    return len(memoryview(body)) + _ENVELOPE_BYTES
