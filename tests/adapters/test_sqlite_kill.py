"""Killed in the middle of its work, the store has lost nothing that it had acknowledged.

A real process runs the store under load and says, line by line, what was acknowledged to it. It is
killed without warning; then the file must hold all that it said, and nothing half-done.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock
from stanchion.core.model import JobId, RunId, RunStatus, StepId, StepStatus, TenantId
from stanchion.ports.records import Accepted, Committed, JobState, RunFilter, Tenant
from tests.contract.builders import (
    TWO_JOBS,
    WITHIN_MS,
    accept,
    admission,
    advance,
    lease,
    loaded,
)

_ROOT: Final = Path(__file__).parents[2]
_TENANTS: Final = [TenantId(f"tenant-{number}") for number in range(3)]
_CALLERS: Final = 12
_ALL: Final = 100_000


@pytest.mark.parametrize("seed", range(3))
async def test_a_killed_store_has_all_that_it_acknowledged(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.db"
    said = await asyncio.to_thread(_run_and_kill, path, random.Random(seed).randrange(100, 1_200))
    store = await SqliteStore.open(path, clock=SystemClock(), timeout_s=20.0)
    try:
        for line in said:
            await _check(store, line)
        await _check_whole(store)
    finally:
        await store.close()


def _run_and_kill(path: Path, lines: int) -> list[list[str]]:
    """Start a store under load, wait for so many acknowledgements, kill it; all that it said."""
    command = [sys.executable, "-m", "tests.adapters.test_sqlite_kill", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    assert all(said), "it ended by itself"
    return [line.decode().split() for line in said if line.endswith(b"\n")]


async def _check(store: SqliteStore, line: list[str]) -> None:
    match line:
        case ["admitted", run_id]:
            assert await store.load(RunId(run_id)) is not None
        case ["accepted", run_id, job_id, fence]:
            await _check_accepted(store, run_id, job_id, fence)
        case ["committed", run_id, version]:
            assert (await loaded(store, RunId(run_id))).run.stamp.version >= int(version)
        case _:
            pytest.fail(f"it said {line}")


async def _check_accepted(store: SqliteStore, run_id: str, job_id: str, fence: str) -> None:
    view = await store.job(JobId(job_id))
    assert view is not None
    assert (view.state, view.fence) == (JobState.FINISHED, int(fence))
    found = await loaded(store, RunId(run_id))
    applied = found.run.step(StepId(view.job.step_id)).status is StepStatus.SUCCEEDED
    waits = f"result:{job_id}#{fence}" in [entry.id for entry in found.inbox]
    assert applied != waits, "the result is in the inbox, or in the run"


async def _check_whole(store: SqliteStore) -> None:
    """What was not acknowledged happened entirely or not at all."""
    assert (await store.audit_slots(limit=_ALL)).drifts == ()
    promised = {row.run_id for row in await store.take_outbox(limit=_ALL, hold_ms=1)}
    jobs = 0
    for tenant in _TENANTS:
        summaries = (await store.list_runs(tenant, limit=_ALL)).items
        for summary in summaries:
            found = await loaded(store, summary.id)
            assert bool(found.inbox) == (summary.id in promised)
            assert (await store.timeline(summary.id)).items
            jobs += found.run.status is not RunStatus.SUCCEEDED and not found.inbox
        running = await store.list_runs(
            tenant, only=RunFilter(statuses=(RunStatus.RUNNING,)), limit=_ALL
        )
        assert await store.active_runs(tenant) == len(running.items)
    # Every run that waits for nothing in its inbox has one job out, ready or leased.
    await store.expire_jobs(limit=_ALL, max_deliveries=100)
    ready = sum((await store.ready_topics()).values())
    leased = jobs - ready
    assert 0 <= leased <= _CALLERS


# ── The process that is killed ───────────────────────────────────────────────────────────────────


async def _work(path: str) -> None:
    store = await SqliteStore.open(path, clock=SystemClock(), timeout_s=20.0)
    for tenant in _TENANTS:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    await asyncio.gather(*(_keep_busy(store, caller) for caller in range(_CALLERS)))


async def _keep_busy(store: SqliteStore, caller: int) -> None:
    while True:
        wanted = admission(await store.now(), TWO_JOBS, tenant=_TENANTS[caller % len(_TENANTS)])
        await store.admit(wanted, within_ms=WITHIN_MS)
        _say("admitted", wanted.run.id)
        for _ in range(2):
            for leased in await lease(store):
                answer = await accept(store, leased)
                assert isinstance(answer, Accepted)
                _say("accepted", answer.run_id, answer.job_id, leased.fence)
                committed = await advance(store, TWO_JOBS, answer.run_id)
                assert isinstance(committed, Committed)
                _say("committed", answer.run_id, committed.stamp.version)


def _say(*words: object) -> None:
    # One write: what was said before the kill was said in full.
    os.write(sys.stdout.fileno(), f"{' '.join(map(str, words))}\n".encode())


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
