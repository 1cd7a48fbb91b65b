"""A server that is killed in the middle of its work has lost nothing that it had acknowledged.

It writes an append-only file and syncs it before it answers (``appendfsync always``). It is killed
without warning under load and started again; then it must have all that it said, and nothing
half-done.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import pytest

from stanchion.adapters.store.redis import RedisStore
from stanchion.core.model import RunId, RunStatus, StepStatus, TenantId
from stanchion.ports.errors import BackendUnavailable
from stanchion.ports.records import (
    Accepted,
    Committed,
    JobState,
    LeasedJob,
    RunFilter,
    Tenant,
)
from tests.contract.builders import (
    TWO_JOBS,
    WITHIN_MS,
    accept,
    admission,
    advance,
    lease,
    loaded,
)
from tests.servers import Server, running_server

_TENANTS: Final = [TenantId(f"tenant-{number}") for number in range(3)]
_CALLERS: Final = 12
_ALL: Final = 1_000
_DURABLE: Final = ("--appendonly", "yes", "--appendfsync", "always")


class _Said:
    """What was acknowledged, until enough was."""

    def __init__(self, enough: int) -> None:
        self.admitted: list[RunId] = []
        self.accepted: list[LeasedJob] = []
        self.committed: list[tuple[RunId, int]] = []
        self._left = enough
        self.enough = asyncio.Event()

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.enough.set()


@pytest.mark.parametrize("seed", range(3))
async def test_a_killed_server_has_all_that_it_acknowledged(tmp_path: Path, seed: int) -> None:
    said = _Said(random.Random(seed).randrange(50, 400))
    with running_server(None, *_DURABLE, directory=tmp_path) as first:
        await _load(first, said)
    with running_server(None, *_DURABLE, directory=tmp_path, port=first.port) as second:
        store = await RedisStore.open(second.url, timeout_s=20.0)
        await _check_said(store, said)
        await _check_whole(store)
        await store.close()


async def _load(server: Server, said: _Said) -> None:
    """Keep the server busy, and kill it when it has said enough."""
    store = await RedisStore.open(server.url, timeout_s=20.0)
    for tenant in _TENANTS:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    callers = [asyncio.create_task(_keep_busy(store, said, number)) for number in range(_CALLERS)]
    async with asyncio.timeout(30.0):
        await said.enough.wait()
        server.kill()
        await asyncio.gather(*callers)
    await store.close()


async def _keep_busy(store: RedisStore, said: _Said, caller: int) -> None:
    try:
        while True:
            await _run_one(store, said, _TENANTS[caller % len(_TENANTS)])
    except BackendUnavailable:
        pass  # It has been killed.


async def _run_one(store: RedisStore, said: _Said, tenant: TenantId) -> None:
    wanted = admission(await store.now(), TWO_JOBS, tenant=tenant)
    await store.admit(wanted, within_ms=WITHIN_MS)
    said.admitted.append(wanted.run.id)
    said.count()
    for _ in range(2):
        for leased in await lease(store):
            answer = await accept(store, leased)
            assert isinstance(answer, Accepted)
            said.accepted.append(leased)
            said.count()
            committed = await advance(store, TWO_JOBS, answer.run_id)
            assert isinstance(committed, Committed)
            said.committed.append((answer.run_id, committed.stamp.version))
            said.count()


async def _check_said(store: RedisStore, said: _Said) -> None:
    for run_id in said.admitted:
        assert await store.load(run_id) is not None
    for run_id, version in said.committed:
        assert (await loaded(store, run_id)).run.stamp.version >= version
    for leased in said.accepted:
        view = await store.job(leased.job.id)
        assert view is not None
        assert (view.state, view.fence) == (JobState.FINISHED, leased.fence)
        found = await loaded(store, leased.job.run_id)
        applied = found.run.step(leased.job.step_id).status is StepStatus.SUCCEEDED
        entry_id = f"result:{leased.job.id}#{leased.fence}"
        waits = entry_id in [entry.id for entry in found.inbox]
        assert applied != waits, "the result is in the inbox, or in the run"


async def _check_whole(store: RedisStore) -> None:
    """What was not acknowledged happened entirely or not at all."""
    assert await store.audit_slots(limit=_ALL) == ()
    promised = {row.run_id for row in await store.take_outbox(limit=_ALL, hold_ms=1)}
    waiting_for_a_job = 0
    for tenant in _TENANTS:
        for summary in (await store.list_runs(tenant, limit=_ALL)).items:
            found = await loaded(store, summary.id)
            assert bool(found.inbox) == (summary.id in promised)
            assert (await store.timeline(summary.id)).items
            waiting_for_a_job += not found.run.status.is_finished and not found.inbox
        running = await store.list_runs(tenant, only=RunFilter(RunStatus.RUNNING), limit=_ALL)
        assert await store.active_runs(tenant) == len(running.items)
    # Every run that has nothing in its inbox has one job out, ready or leased.
    ready = sum((await store.ready_topics()).values())
    assert 0 <= waiting_for_a_job - ready <= _CALLERS
