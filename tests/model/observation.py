"""Observation: everything a store shows, in common words, and what must hold of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from msgspec.structs import replace

from stanchion.core import invariants
from stanchion.core.model import Item, ItemKey, JobId, Run, RunId, StepId, TenantId, WorkflowId
from stanchion.ports.records import Page, WorkflowUse
from stanchion.ports.store import Store
from tests.model.keeping import letters
from tests.model.plans import PLANS
from tests.model.side import Side

__all__ = ["broken_promises", "observe"]

_Each = TypeVar("_Each")
_ITEMS: Final = {StepId("each"): range(2)}


async def observe(
    side: Side, tenants: Sequence[TenantId], runs: Sequence[RunId], jobs: Sequence[JobId]
) -> dict[str, object]:
    """All there is to see of these tenants, runs and jobs. Lists are read page by page."""
    store = side.store
    whole: dict[str, object] = {
        "ready": {topic: count for topic, count in (await store.ready_topics()).items() if count},
        "outbox": await store.outbox_size(),
        "tenants": await _all(lambda at: store.list_tenants(cursor=at, limit=1)),
        "documents": await _all(lambda at: store.list_documents("kind", cursor=at, limit=1)),
        "approvals": await _all(lambda at: store.list_approvals(None, cursor=at, limit=1)),
        "shared": [
            side.workflow(each)
            for each in await _all(lambda at: store.list_shared_workflows(cursor=at, limit=1))
        ],
        "uses": {name: await _all(partial(_uses, store, name)) for name in PLANS},
        "letters": letters(side, await store.list_dead_letters(None)),
    }
    parts = await asyncio.gather(
        *(_tenant(side, tenant) for tenant in tenants),
        *(_run(side, run_id) for run_id in runs),
        *(_job(side, job_id) for job_id in jobs),
    )
    return {name: each for part in (whole, *parts) for name, each in part.items()}


async def broken_promises(
    side: Side, tenants: Sequence[TenantId], runs: Sequence[RunId]
) -> list[str]:
    """What does not hold of the runs and the slots."""
    found = [each.run for each in await asyncio.gather(*map(side.store.load, runs)) if each]
    items = await asyncio.gather(*(_items(side, run.id) for run in found))
    broken = [
        f"{run.id}: {fault}"
        for run, its in zip(found, items, strict=True)
        for fault in invariants.of_run(PLANS[run.workflow_id], replace(run, items=its))
    ]
    for tenant in tenants:
        theirs: list[Run] = [run for run in found if run.tenant == tenant]
        counted = await side.store.active_runs(tenant)
        broken += [
            f"{tenant}: {fault}" for fault in invariants.of_slots(counted=counted, runs=theirs)
        ]
    return broken


async def _uses(store: Store, name: WorkflowId, cursor: str | None) -> Page[WorkflowUse]:
    return await store.list_workflow_uses(name, cursor=cursor, limit=1)


async def _tenant(side: Side, tenant: TenantId) -> dict[str, object]:
    store = side.store
    workflows = await _all(lambda at: store.list_workflows(tenant, cursor=at, limit=2))
    feed = await store.feed(tenant, after=None, limit=1_000)
    kept = {run.id for run in await _all(lambda at: store.list_runs(tenant, cursor=at))}
    rest = await store.feed(tenant, after=feed[0].position, limit=1_000) if feed else feed[1:]
    return {
        f"{tenant}: slots": await store.active_runs(tenant),
        f"{tenant}: configuration": await store.tenant(tenant),
        f"{tenant}: runs": await _all(lambda at: store.list_runs(tenant, cursor=at, limit=3)),
        f"{tenant}: approvals": await _all(
            lambda at: store.list_approvals(tenant, cursor=at, limit=2)
        ),
        f"{tenant}: workflows": list(map(side.workflow, workflows)),
        # Whether lines of runs that were purged are still in it is left open.
        f"{tenant}: feed": [(each.run_id, each.entries) for each in feed if each.run_id in kept],
        f"{tenant}: feed goes on": rest == feed[1:],
        f"{tenant}: feed's end": await store.feed(tenant, after=await store.feed_position(tenant)),
    }


async def _run(side: Side, run_id: RunId) -> dict[str, object]:
    store = side.store
    return {
        f"{run_id}": side.loaded(await store.load(run_id)),
        f"{run_id}: items": await _items(side, run_id),
        f"{run_id}: timeline": await _all(lambda at: store.timeline(run_id, cursor=at, limit=5)),
    }


async def _job(side: Side, job_id: JobId) -> dict[str, object]:
    return {job_id: side.job(await side.store.job(job_id))}


async def _items(side: Side, run_id: RunId) -> dict[ItemKey, Item]:
    return await side.store.load_items(run_id, _ITEMS)


async def _all(page: Callable[[str | None], Awaitable[Page[_Each]]]) -> list[_Each]:
    """Everything in a list, by its cursors."""
    found: list[_Each] = []
    cursor: str | None = None
    for _ in range(1_000):
        got = await page(cursor)
        found += got.items
        cursor = got.cursor
        if cursor is None:
            return found
    raise AssertionError("a list without an end")
