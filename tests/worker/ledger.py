"""A server in a few lines: jobs, leases, fences and results, with a script of what goes wrong.

It speaks the worker protocol over the transport port (in virtual time) and over HTTP on a loopback
port (``serving``). What it accepted is counted, so that "nothing lost, nothing twice" can be asked.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Literal, TypeAlias, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from stanchion.core.json_value import JsonValue
from stanchion.transport.messages import HttpReply
from stanchion.wire.problems import Problem
from stanchion.wire.worker import (
    JobResult,
    LeaseAnswer,
    LeasedJob,
    LeaseRequest,
    RejectedResult,
    RenewAnswer,
    RenewRequest,
    ResultsAnswer,
    ResultsRequest,
)
from stanchion.worker.server import TransportFailed

_Reason: TypeAlias = Literal["cancelled", "timed_out", "stale_fence", "expired", "unknown_job"]


class Fault(StrEnum):
    """What can happen to a request."""

    NONE = "none"
    AWAY = "away"
    """503, and nothing is done."""
    CUT = "cut"
    """No answer, and nothing is done."""
    LOST_REPLY = "lost reply"
    """Done, and no answer."""
    HANG = "hang"
    """Never answered, never done."""
    REFUSED = "refused"
    """403"""
    INVALID = "invalid"
    """422"""


class Ledger:
    """The server's side. ``now_ms`` is its clock."""

    def __init__(self, now_ms: Callable[[], int], ttl_ms: int = 60_000) -> None:
        self.ttl_ms = ttl_ms
        self.asked: dict[str, list[int]] = defaultdict(list)
        """When each kind of request came in."""
        self.batches: list[tuple[JobResult, ...]] = []
        self.accepted: Counter[str] = Counter()
        """How often each job's result was taken for the first time: never above one."""
        self.results: dict[str, JobResult] = {}
        self.rejected: list[tuple[str, str]] = []
        self.progress: list[JsonValue] = []
        self.usage: list[dict[str, int]] = []
        self.keys: set[str] = set()
        """The keys that came over HTTP."""
        self.renewed: list[tuple[int, tuple[str, ...]]] = []
        """When each renewal was done, and for whom."""
        self.held_now = 0
        self.held_most = 0
        """How many held renewals wait, and how many did at once."""
        self.is_draining = False
        self.largest_lease = 0
        self.leases: Counter[str] = Counter()
        self.is_invalid: Callable[[JobResult], bool] = lambda _: False
        self._now_ms = now_ms
        self._scripts: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._ready: deque[str] = deque()
        self._jobs: dict[str, LeasedJob] = {}
        self._held_until: dict[str, int] = {}
        self._revoked: dict[str, _Reason] = {}
        self._changed = asyncio.Event()
        self._fence = 0

    # ── What a test says and asks ────────────────────────────────────────────────────────────────

    def put(
        self,
        job_id: str,
        topic: str = "t",
        input: JsonValue = None,  # noqa: A002 - as in the protocol
        *,
        traceparent: str | UnsetType = UNSET,
    ) -> None:
        self._jobs[job_id] = LeasedJob(
            job_id=job_id,
            tenant="acme",
            run_id="run",
            step_id="step",
            topic=topic,
            attempt=1,
            input=input,
            fence=0,
            lease_ttl_ms=self.ttl_ms,
            delivery=0,
            traceparent=traceparent,
        )
        self._ready.append(job_id)
        self._wake()

    def script(self, verb: str, *faults: Fault) -> None:
        self._scripts[verb].extend(faults)

    def always(self, verb: str, fault: Fault) -> None:
        self._always[verb] = fault

    def take_away(self, job_id: str) -> None:
        """Somebody else has the job now."""
        self._fence += 1
        self._jobs[job_id] = msgspec.structs.replace(self._jobs[job_id], fence=self._fence)
        self._wake()

    def revoke(self, job_id: str, reason: _Reason = "cancelled") -> None:
        """The job's run was cancelled, or took too long."""
        self._revoked[job_id] = reason
        self._held_until.pop(job_id, None)
        self._wake()

    async def until(self, condition: Callable[[], bool], *, within_s: float = 20) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                changed = self._changed
                await changed.wait()

    async def all_done(self, *, within_s: float = 20) -> None:
        await self.until(lambda: len(self.results) == len(self._jobs), within_s=within_s)

    # ── The protocol ─────────────────────────────────────────────────────────────────────────────

    async def answer(self, path: str, body: bytes) -> HttpReply | None:
        """What the server answers; nothing, if it hangs up."""
        verb = path.rsplit("/", 1)[1]
        if verb == "renew" and msgspec.json.decode(body, type=RenewRequest).wait_s:
            verb = "held"
        self.asked[verb].append(self._now_ms())
        self._wake()
        script = self._scripts[verb]
        other = self._always.get("renew", Fault.NONE) if verb == "held" else Fault.NONE
        fault = script.popleft() if script else self._always.get(verb, other)
        answer: HttpReply | None
        match fault:
            case Fault.AWAY:
                answer = _problem(503, "store_unavailable")
            case Fault.REFUSED:
                answer = _problem(403, "forbidden")
            case Fault.INVALID:
                answer = _problem(422, "invalid_request")
            case Fault.CUT:
                answer = None
            case Fault.HANG:
                await asyncio.Event().wait()
                raise AssertionError
            case Fault.LOST_REPLY:
                await self._do(verb, body)
                answer = None
            case Fault.NONE:
                answer = await self._do(verb, body)
            case _:
                assert_never(fault)
        self._wake()
        return answer

    async def _do(self, verb: str, body: bytes) -> HttpReply:
        match verb:
            case "lease":
                return await self._lease(msgspec.json.decode(body, type=LeaseRequest))
            case "renew":
                request = msgspec.json.decode(body, type=RenewRequest)
                self.renewed.append((self._now_ms(), tuple(ref.job_id for ref in request.leases)))
                return _ok(self._renew(request))
            case "held":
                return _ok(await self._hold(msgspec.json.decode(body, type=RenewRequest)))
            case _:
                return self._take(msgspec.json.decode(body, type=ResultsRequest))

    async def _lease(self, request: LeaseRequest) -> HttpReply:
        began = self._now_ms()
        until = began + request.wait_s * 1000
        while True:
            self._expire()
            jobs: list[LeasedJob] = []
            while self._ready and len(jobs) < request.max_jobs:
                jobs.append(self._grant(self._ready.popleft()))
            left_ms = until - self._now_ms()
            if jobs or left_ms <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_ms, self.ttl_ms / 4) / 1000):
                    await self._changed.wait()
        self.largest_lease = max(self.largest_lease, len(jobs))
        return _ok(LeaseAnswer(tuple(jobs), waited_ms=self._now_ms() - began))

    def _grant(self, job_id: str) -> LeasedJob:
        self._fence += 1
        before = self._jobs[job_id]
        job = msgspec.structs.replace(before, fence=self._fence, delivery=before.delivery + 1)
        self._jobs[job_id] = job
        self._held_until[job_id] = self._now_ms() + self.ttl_ms
        self.leases[job_id] += 1
        return job

    def _expire(self) -> None:
        now = self._now_ms()
        for job_id in [each for each, until in self._held_until.items() if now >= until]:
            del self._held_until[job_id]
            self._ready.append(job_id)

    async def _hold(self, request: RenewRequest) -> RenewAnswer:
        """Renew once; answer when one is lost, or after a third of the term."""
        self.held_now += 1
        self.held_most = max(self.held_most, self.held_now)
        until = self._now_ms() + min(request.wait_s * 1000, self.ttl_ms / 3)
        answer = self._renew(request)
        try:
            while (
                not answer.lost and not self.is_draining and (left_ms := until - self._now_ms()) > 0
            ):
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_ms / 1000):
                        await self._changed.wait()
                lost = self._lost(request)
                renewed = tuple(job_id for job_id in answer.renewed if job_id not in lost)
                answer = RenewAnswer(renewed, tuple(lost), lost)
            return answer
        finally:
            self.held_now -= 1

    def _lost(self, request: RenewRequest) -> dict[str, _Reason]:
        lost: dict[str, _Reason] = {}
        for ref in request.leases:
            job = self._jobs.get(ref.job_id)
            if ref.job_id in self.results:
                continue
            if job is None:
                lost[ref.job_id] = "unknown_job"
            elif ref.job_id in self._revoked:
                lost[ref.job_id] = self._revoked[ref.job_id]
            elif job.fence != ref.fence:
                lost[ref.job_id] = "stale_fence"
            elif self._now_ms() >= self._held_until.get(ref.job_id, 0):
                lost[ref.job_id] = "expired"
        return lost

    def _renew(self, request: RenewRequest) -> RenewAnswer:
        renewed, lost = [], []
        for ref in request.leases:
            if ref.usage:
                self.usage.append(ref.usage)
            if ref.progress is not None:
                self.progress.append(ref.progress)
            job = self._jobs.get(ref.job_id)
            until = self._held_until.get(ref.job_id, 0)
            is_held = ref.job_id not in self._revoked and self._now_ms() < until
            if job is None or job.fence != ref.fence or not is_held:
                lost.append(ref.job_id)
            else:
                self._held_until[ref.job_id] = self._now_ms() + self.ttl_ms
                renewed.append(ref.job_id)
        return RenewAnswer(tuple(renewed), tuple(lost), self._lost(request))

    def _take(self, request: ResultsRequest) -> HttpReply:
        if any(map(self.is_invalid, request.results)):
            return _problem(422, "invalid_request")
        self.batches.append(request.results)
        accepted, rejected = [], []
        for result in request.results:
            job = self._jobs.get(result.job_id)
            known = self.results.get(result.job_id)
            if job is None:
                rejected.append(RejectedResult(result.job_id, "unknown_job"))
            elif known is not None and known.fence == result.fence:
                accepted.append(result.job_id)  # Sent again: no effect.
            elif known is not None:
                rejected.append(RejectedResult(result.job_id, "already_finished"))
            elif job.fence != result.fence:
                rejected.append(RejectedResult(result.job_id, "stale_fence"))
            else:
                accepted.append(result.job_id)
                self.accepted[result.job_id] += 1
                self.results[result.job_id] = result
                self._held_until.pop(result.job_id, None)
        self.rejected += [(each.job_id, each.code) for each in rejected]
        return _ok(ResultsAnswer(tuple(accepted), tuple(rejected)))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Wire:
    """The transport port, straight into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.is_closed = False

    async def post(self, path: str, body: bytes) -> HttpReply:
        answer = await self._ledger.answer(path, body)
        if answer is None:
            raise TransportFailed("cut")
        return answer

    async def close(self) -> None:
        self.is_closed = True


def _ok(value: msgspec.Struct) -> HttpReply:
    return HttpReply(200, {}, msgspec.json.encode(value))


def _problem(status: int, code: str) -> HttpReply:
    problem = Problem(status=status, code=code, title=code, detail=f"said the script: {code}")
    return HttpReply(status, {}, msgspec.json.encode(problem))


async def _unless_gone(
    reader: asyncio.StreamReader, answering: Coroutine[None, None, HttpReply | None]
) -> HttpReply | None:
    """What the server answers, unless the worker hung up: then nobody must be given a job."""
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        for each in (answer, gone):
            each.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


@asynccontextmanager
async def serving(ledger: Ledger) -> AsyncIterator[str]:
    """The ledger behind HTTP, on a free port of the loopback interface."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ", 2)[1]
                ledger.keys |= set(re.findall("(?im)^authorization: (.*?)\r$", head))
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(length)
                answer = await _unless_gone(reader, ledger.answer(path, body))
                if answer is None:
                    break
                head = f"HTTP/1.1 {answer.status} X\r\ncontent-length: {len(answer.body)}\r\n\r\n"
                writer.write(head.encode() + answer.body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.close()
