"""A server that exists only as a script, in virtual time, and a client that talks to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.signals import CallSignal
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant
from stanchion.core.retry import RETRIES, Budget, RetryClass
from stanchion.transport.messages import AsyncTransport, HttpReply, NoReply, Request, Silence

ALMOST_ONE = 1 - 2**-53
URL = "http://server.test"
DEAD = NoReply(Silence.UNREACHED, "no connection: refused")
LOST = NoReply(Silence.BROKEN, "the connection broke")
TIMED_OUT = NoReply(Silence.TIMED_OUT, "no answer")

Answering: TypeAlias = Callable[[Request], HttpReply | NoReply]

PLENTY = {each: Budget(tokens_max=1_000_000, refill_per_s=0) for each in RetryClass}
"""Budgets that are never spent, where patience alone is looked at."""


class Script:
    """Answers requests, and remembers when they came."""

    def __init__(
        self, answers: Iterable[HttpReply | NoReply] | Answering, *, latency_s: float = 0
    ) -> None:
        if callable(answers):
            self._answer = answers
        else:
            left = list(answers)
            # The last answer is given for ever.
            self._answer = lambda _request: left.pop(0) if len(left) > 1 else left[0]
        self._latency_s = latency_s
        self.requests: list[Request] = []
        self.times_ms: list[int] = []

    async def send(self, request: Request) -> HttpReply | NoReply:
        self.requests.append(request)
        self.times_ms.append(now())
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        return self._answer(request)

    @property
    def waits_ms(self) -> list[int]:
        """Between one request and the next."""
        pairs = zip(self.times_ms, self.times_ms[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


def now() -> Instant:
    """The loop's time."""
    return Instant(round(asyncio.get_running_loop().time() * 1000))


def client(
    script: AsyncTransport,
    *,
    sample: float | None = None,
    seed: int = 0,
    budgets: RetryBudgets | None = None,
    signals: list[CallSignal] | None = None,
) -> AsyncClient:
    """A client in virtual time: of one and the same sample, or of a seed."""
    chance = random.Random(seed)
    pace = Pace(
        policies=RETRIES,
        budgets=RetryBudgets(PLENTY) if budgets is None else budgets,
        now=now,
        wall=now,
        sample=chance.random if sample is None else lambda: sample,
    )
    on_event = None if signals is None else signals.append
    return AsyncClient(URL, pace=pace, transport=script, on_event=on_event)


def problem(status: int, code: str = "some_code", **members: object) -> HttpReply:
    """An answer that says no."""
    document = {"status": status, "code": code, "title": "no", "detail": "no", **members}
    return HttpReply(status, {}, msgspec.json.encode(document))


def full(retry_after_ms: int | None = None) -> HttpReply:
    """The tenant is full."""
    code = "max_concurrent_runs_reached"
    return problem(429, code, limit=2, active=2, retry_after_ms=retry_after_ms)


def away(retry_after_ms: int | None = None) -> HttpReply:
    """The gate is away."""
    return problem(503, "gate_unavailable", retry_after_ms=retry_after_ms)


def started(run_id: str = "r1") -> HttpReply:
    """A run was started."""
    return HttpReply(200, {}, msgspec.json.encode({"run_id": run_id, "status": "running"}))


def run_view(status: str = "succeeded") -> HttpReply:
    """A run, as it is."""
    view: JsonObject = {
        "run_id": "r1",
        "workflow_id": "w",
        "workflow_version": 1,
        "tenant": "acme",
        "status": status,
        "risk": "standard",
        "input": {},
        "output": {"answer": 42},
        "error": None,
        "steps": {},
        "created_at": "2026-01-01T00:00:00Z",
        "finished_at": None,
    }
    return HttpReply(200, {}, msgspec.json.encode(view))
