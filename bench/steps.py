"""Store and lock steps of a three-step run: counted at the ports of an engine, in virtual time.

Every step is a hand-over to the writer's thread on SQLite, or a round trip on Redis. Counts do not
depend on the machine. Not counted: leases of jobs, which many runs share, and background loops.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, cast

from bench.row import Row, at_most
from bench.workflows import THREE_STEPS, TOPICS
from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import SystemEntropy
from stanchion.core.model import TenantId, Topic, WorkflowId
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow
from stanchion.ports.locks import OperatorLocks
from stanchion.ports.records import Result
from stanchion.ports.store import Store
from stanchion.services.context import Backends
from stanchion.services.engine import Engine
from stanchion.services.gate_answers import RunStarted
from stanchion.sim import loop

__all__ = ["rows"]

TENANT: Final = TenantId("acme")
RUNS: Final = 10
_COUNTED: Final = frozenset(
    {"admit", "accept", "settle", "load", "items_at", "commit", "acquire", "release"}
)
_STEP_S: Final = 0.001


class _Line:
    """A backend whose calls take a moment and are counted."""

    is_local = False

    def __init__(self, real: object, calls: Counter[str]) -> None:
        self._real = real
        self._calls = calls

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[object]]:
        really: Callable[..., Awaitable[object]] = getattr(self._real, verb)

        async def call(*arguments: object, **named: object) -> object:
            if verb in _COUNTED:
                self._calls[verb] += 1
            await asyncio.sleep(_STEP_S)
            return await really(*arguments, **named)

        return call


def rows() -> list[Row]:
    """Count the steps of some runs, one after the other."""
    local = loop.run(_count(locks_are_local=True))
    remote = loop.run(_count(locks_are_local=False))
    return [
        _row("store steps of a three-step run, embedded", local, 4),
        _row("store and lock steps of a three-step run", remote, 8),
    ]


def _row(name: str, calls: Counter[str], ceiling: int) -> Row:
    note = ", ".join(f"{verb} {number / RUNS:g}" for verb, number in sorted(calls.items()))
    return at_most(name, sum(calls.values()) / RUNS, "steps", ceiling, note)


async def _count(*, locks_are_local: bool) -> Counter[str]:
    calls: Counter[str] = Counter()
    clock = loop.LoopClock()
    store = cast("Store", _Line(MemoryStore(clock), calls))
    locks: OperatorLocks = MemoryLocks(clock)
    if not locks_are_local:
        locks = cast("OperatorLocks", _Line(locks, calls))
    backends = Backends(
        store=store,
        locks=locks,
        bus=LocalBus(store, clock),
        clock=clock,
        entropy=SystemEntropy(),
    )
    engine = Engine("bench", backends)
    running = asyncio.create_task(engine.run())
    workflow = parse_workflow(json.dumps(THREE_STEPS), format="json", workflow_id="three")
    assert isinstance(workflow, Workflow), workflow
    await store.put_workflow(TENANT, workflow)
    for _ in range(RUNS):
        await _run_through(engine)
    running.cancel()
    return calls


async def _run_through(engine: Engine) -> None:
    services = engine.services
    started = await services.gate.start(
        TENANT, WorkflowId("three"), {"n": 1}, key=None, actor="bench"
    )
    assert isinstance(started, RunStarted), started
    for _ in range(3):
        handed = await services.scheduler.lease(
            "bench", [Topic(topic) for topic in TOPICS], max_jobs=1, wait_s=10
        )
        (leased,) = handed.jobs
        result = Result(
            job_id=leased.job.id, fence=leased.fence, worker_id="bench", output={"n": 1}
        )
        await services.inbox.results([result])
        await asyncio.sleep(10 * _STEP_S)
