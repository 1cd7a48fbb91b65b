"""Load that goes on through everything: callers of several tenants, who come at their own pace.

They do not wait for each other's answers (an open loop), up to a bound. Each start has a key and is
sent again with it, to one replica and the other, until it is answered with a run. Every answer is
written down.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping
from typing import Final

import httpx2
import msgspec

from tests.acceptance.caller import Answer, Caller
from tests.chaos.workflows import CANARY, KINDS

__all__ = ["CANARY_TENANT", "TENANTS", "Heard", "Load", "Start", "Tenant"]

_OK: Final = 200
_LATER: Final = frozenset({429, 503})
_ANSWER_S_MAX: Final = 5.0
_PAUSE_S: Final = (0.1, 0.6)
CANARY_TENANT: Final = "canary"


class Tenant(msgspec.Struct, frozen=True):
    """Who calls how often."""

    cap: int
    starts_per_s: float
    open_max: int
    """So many starts may be under way; what comes beyond that is left out."""


TENANTS: Final[Mapping[str, Tenant]] = {
    "small": Tenant(cap=2, starts_per_s=4.0, open_max=10),
    "first": Tenant(cap=20, starts_per_s=4.0, open_max=40),
    "second": Tenant(cap=20, starts_per_s=4.0, open_max=40),
}


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a start, or that there was none (status 0)."""

    at: float
    tenant: str
    status: int
    code: str | None = None
    retry_after_ms: int | None = None
    has_header: bool = False


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A start that was answered with a run."""

    tenant: str
    workflow_id: str
    key: str
    run_id: str
    at: float
    is_replay: bool


class Load:
    """All callers. What they heard is in ``heard`` and ``started``."""

    def __init__(self, caller: Caller, chance: random.Random) -> None:
        self.heard: list[Heard] = []
        self.started: list[Start] = []
        self.left_out = 0
        self._callers = {tenant: caller.other(tenant) for tenant in TENANTS}
        self._canary = caller.other(CANARY_TENANT)
        self._chance = chance
        self._open: dict[str, set[asyncio.Task[None]]] = {tenant: set() for tenant in TENANTS}
        self._pacing: list[asyncio.Task[None]] = []
        self._failed: list[BaseException] = []

    def caller(self, tenant: str) -> Caller:
        return self._canary if tenant == CANARY_TENANT else self._callers[tenant]

    async def begin(self) -> None:
        """Set it going."""
        for tenant, each in TENANTS.items():
            await self._callers[tenant].configure(max_concurrent_runs=each.cap)
            for workflow_id, kind in KINDS.items():
                await self._callers[tenant].apply(workflow_id, kind.definition)
        await self._canary.configure(max_concurrent_runs=None)
        await self._canary.apply("canary", CANARY.definition)
        self._pacing = [asyncio.create_task(self._pace(tenant)) for tenant in TENANTS]

    async def end(self, *, within_s: float) -> int:
        """Start no more, and wait until every start is answered. Says how many are not."""
        await self._stop(self._pacing)
        tasks = set().union(*self._open.values())
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        self.check()
        return sum(map(len, self._open.values()))

    async def stop(self) -> None:
        """Leave everything as it is."""
        await self._stop(self._pacing)
        await self._stop([task for tasks in self._open.values() for task in tasks])

    def check(self) -> None:
        """Raise what a caller raised: a server's answer that may never be."""
        if self._failed:
            raise self._failed[0]

    async def again(self, start: Start) -> Start:
        """Send a start once more, when all is well. Its run has no name if it is refused."""
        answer = await self._callers[start.tenant].start(start.workflow_id, {}, key=start.key)
        if answer.status != _OK:
            return msgspec.structs.replace(start, run_id="", is_replay=False)
        return _started(start.tenant, start.workflow_id, start.key, answer)

    async def _pace(self, tenant: str) -> None:
        rate, bound = TENANTS[tenant].starts_per_s, TENANTS[tenant].open_max
        due = time.monotonic()
        for number in itertools.count():
            due += self._chance.uniform(0.5, 1.5) / rate
            workflow_id = self._chance.choice(sorted(KINDS))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._open[tenant]) >= bound:
                self.left_out += 1
                continue
            task = asyncio.create_task(self._start(tenant, workflow_id, f"{tenant}-{number}"))
            self._open[tenant].add(task)
            task.add_done_callback(self._done)
            task.add_done_callback(self._open[tenant].discard)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(error)

    async def _start(self, tenant: str, workflow_id: str, key: str) -> None:
        while True:
            try:
                answer = await self._callers[tenant].call(
                    "POST",
                    f"/v1/workflows/{workflow_id}/runs",
                    {"input": {}},
                    headers={"Idempotency-Key": key},
                    timeout_s=_ANSWER_S_MAX,
                )
            except httpx2.TransportError:
                self.heard.append(Heard(at=time.time(), tenant=tenant, status=0))
            else:
                self.heard.append(_heard(tenant, answer))
                if answer.status not in _LATER:
                    self.started.append(_started(tenant, workflow_id, key, answer))
                    return
            await asyncio.sleep(self._chance.uniform(*_PAUSE_S))

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _heard(tenant: str, answer: Answer) -> Heard:
    if answer.status == _OK:
        return Heard(at=time.time(), tenant=tenant, status=_OK)
    return Heard(
        at=time.time(),
        tenant=tenant,
        status=answer.status,
        code=answer.code,
        retry_after_ms=answer.body.get("retry_after_ms"),
        has_header="retry-after" in answer.headers,
    )


def _started(tenant: str, workflow_id: str, key: str, answer: Answer) -> Start:
    return Start(
        tenant=tenant,
        workflow_id=workflow_id,
        key=key,
        run_id=answer.run_id,
        at=time.time(),
        is_replay=answer.is_replayed,
    )
