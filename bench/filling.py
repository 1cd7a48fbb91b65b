"""Fill stores as a server would over a long time.

All data is written through the store adapter, in this process, as a server would write it. A full
SQLite file takes minutes to write, so it is kept under ``reports/growth`` and copied for each use.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

import stanchion.adapters.store.sqlite as sqlite_adapter
from bench.serving import ROOT
from bench.workflows import NOTHING, THREE_STEPS
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock
from stanchion.core.admission import Admitted
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.core.run import decide_all
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow
from stanchion.ports.records import Committed, LeasedJob, Tenant
from stanchion.ports.store import Store
from tests.contract import builders

__all__ = ["Stock", "fill", "filled_file", "filled_namespace"]

SHELF: Final = ROOT / "reports" / "growth"
BATCH: Final = 1_000
LABELS: Final = {"team": "red"}
"""Of every hundredth run."""
LEASES_MAX: Final = 100
WITHIN_MS: Final = 60_000
PATIENCE_S: Final = 60.0


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a store."""

    finished: int = 1_000
    tenants: int = 1
    active: int = 10


def filled_file(stock: Stock, path: Path) -> None:
    """Provide a SQLite file with this content at this path."""
    kept = SHELF / f"{stock.finished}-{stock.tenants}-{stock.active}-labels-{_schema()}.db"
    if not kept.exists():
        SHELF.mkdir(parents=True, exist_ok=True)
        making = kept.with_suffix(".making")
        for leftover in SHELF.glob(f"{making.name}*"):
            leftover.unlink()
        asyncio.run(_fill_file(stock, making))
        making.rename(kept)
    shutil.copyfile(kept, path)


def _schema() -> str:
    """A digest of the schema; files with another schema cannot be used."""
    migrations = sorted((Path(sqlite_adapter.__file__).parent / "migrations").glob("*.sql"))
    text = b"".join(migration.read_bytes() for migration in migrations)
    return hashlib.sha256(text).hexdigest()[:8]


async def _fill_file(stock: Stock, path: Path) -> None:
    store = await SqliteStore.open(path, clock=SystemClock(), timeout_s=PATIENCE_S)
    try:
        await fill(store, stock)
    finally:
        await store.close()


def filled_namespace(stock: Stock, url: str, namespace: str) -> None:
    """Provide a namespace of a Redis with this content."""
    asyncio.run(_fill_namespace(stock, url, namespace))


async def _fill_namespace(stock: Stock, url: str, namespace: str) -> None:
    store = await RedisStore.open(url, namespace=namespace, timeout_s=PATIENCE_S)
    try:
        await fill(store, stock)
    finally:
        await store.close()


async def fill(store: Store, stock: Stock) -> None:
    """Write the content in batches."""
    tenants = [TenantId(f"tenant-{number}") for number in range(stock.tenants)]
    workflows = [_workflow("nothing", NOTHING), _workflow("three-steps", THREE_STEPS)]
    for some in _batches(tenants):
        await asyncio.gather(*(_configure(store, tenant, workflows) for tenant in some))
    for first in range(0, stock.finished, BATCH):
        count = min(BATCH, stock.finished - first)
        await _start(store, tenants, first, count)
        await _finish(store, count)
    # Last, because leases that finish other runs would otherwise get these jobs.
    for first in range(0, stock.active, BATCH):
        await _start(store, tenants, first, min(BATCH, stock.active - first))


def _batches(tenants: Sequence[TenantId]) -> list[Sequence[TenantId]]:
    return [tenants[first : first + BATCH] for first in range(0, len(tenants), BATCH)]


def _workflow(name: str, definition: dict[str, object]) -> Workflow:
    text = msgspec.json.encode(definition)
    workflow = parse_workflow(text, format="json", workflow_id=name)
    assert isinstance(workflow, Workflow), workflow
    return workflow


async def _configure(store: Store, tenant: TenantId, workflows: Sequence[Workflow]) -> None:
    await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    for workflow in workflows:
        await store.put_workflow(tenant, workflow)


async def _start(store: Store, tenants: Sequence[TenantId], first: int, count: int) -> None:
    now = await store.now()
    wanted = [
        builders.admission(
            now, tenant=tenants[number % len(tenants)], labels=LABELS if number % 100 == 0 else None
        )
        for number in range(first, first + count)
    ]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert verdicts == [Admitted(each.run.id) for each in wanted]


async def _finish(store: Store, count: int) -> None:
    leased: list[LeasedJob] = []
    while len(leased) < count:
        leased += await builders.lease(store, max_jobs=LEASES_MAX)
    await store.accept([builders.result_of(job) for job in leased])
    rows = await store.take_outbox(limit=count, hold_ms=WITHIN_MS)
    assert len(rows) == count
    now = await store.now()
    await asyncio.gather(*(_advance(store, row.run_id, now) for row in rows))


async def _advance(store: Store, run_id: RunId, now: Instant) -> None:
    """Do what ``services.advance`` does, with one clock reading for many runs."""
    found = await builders.loaded(store, run_id)
    events = [entry.event for entry in found.inbox]
    transition = decide_all(builders.ONE_JOB, found.run, events, now)
    applied = [entry.id for entry in found.inbox]
    answer = await store.commit(builders.commit_of(found, transition, applied=applied))
    assert isinstance(answer, Committed)
