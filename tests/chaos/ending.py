"""The end: when all faults are over, everything finishes, and the store holds nothing else.

Read from the store itself: a run and its inbox, its history, slots, rows, jobs and dead letters.
What a run must look like is the core's own statement (``stanchion.core.invariants``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.adapters.store.redis import RedisStore
from stanchion.core import invariants
from stanchion.core.model import RunId, TenantId, WorkflowId
from stanchion.core.plan import Plan, link
from stanchion.core.transition import TimelineEntry
from stanchion.ports.records import Loaded
from stanchion.sim.invariants import cap_holds, slots_are_unfinished_runs
from tests.chaos.load import CANARY_TENANT, TENANTS, Start
from tests.chaos.tally import Losses, Tally
from tests.chaos.workflows import CANARY, KINDS, Kind

__all__ = ["Ended", "check_overlap", "check_runs", "check_store", "read_all", "until_all_ended"]

_LOOK_EVERY_S: Final = 0.2
_AT_ONCE: Final = 50
_MS: Final = 1_000


class Ended(msgspec.Struct, frozen=True):
    """A run as the store has it."""

    loaded: Loaded
    lines: tuple[TimelineEntry, ...]


async def until_all_ended(store: RedisStore, *, within_s: float) -> float:
    """Come back when no run is active, or when it takes too long. Says how many seconds it was."""
    began = time.monotonic()
    while any([await store.active_runs(TenantId(tenant)) for tenant in _tenants()]):
        if time.monotonic() - began > within_s:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return time.monotonic() - began


async def read_all(store: RedisStore) -> dict[str, Ended]:
    """Every run of every tenant."""
    found: dict[str, Ended] = {}
    for tenant in _tenants():
        cursor: str | None = None
        while True:
            page = await store.list_runs(TenantId(tenant), cursor=cursor, limit=_AT_ONCE)
            for ended in await asyncio.gather(*(_read(store, each.id) for each in page.items)):
                found[ended.loaded.run.id] = ended
            cursor = page.cursor
            if cursor is None:
                break
    return found


async def check_store(tally: Tally, store: RedisStore, ended: Mapping[str, Ended]) -> None:
    """Nothing is left anywhere."""
    for tenant in _tenants():
        runs = [each.loaded.run for each in ended.values() if each.loaded.run.tenant == tenant]
        counted = await store.active_runs(TenantId(tenant))
        unfinished = sum(not run.status.is_finished for run in runs)
        tally.look(
            "slots are unfinished runs, and come back to zero",
            slots_are_unfinished_runs(tenant, counted, unfinished),
            [f"{tenant} has {counted} slots in use"] if counted else [],
        )
    drifts = [f"{each}" for each in (await store.audit_slots(limit=1_000)).drifts]
    tally.look("the audit of slots finds nothing", drifts)
    rows = await store.outbox_size()
    tally.look("the outbox is empty", [f"{rows} rows are left"] if rows else [])
    ready = {topic: count for topic, count in (await store.ready_topics()).items() if count}
    tally.look("no job is left", [f"{ready}"] if ready else [])
    letters = (await store.list_dead_letters(None)).items
    tally.look("there are no dead letters", [f"{letter}" for letter in letters])


async def check_runs(
    tally: Tally,
    store: RedisStore,
    ended: Mapping[str, Ended],
    started: Sequence[Start],
    losses: Losses,
) -> None:
    """Every answered start has succeeded, once, by a history that is one chain."""
    for start in started:
        is_there = start.run_id in ended
        if is_there or not losses.excuse("admissions", start.at):
            wrong = [] if is_there else [f"{start.run_id} of key {start.key} is gone"]
            tally.look("every answered start exists", wrong)
    plans = await _plans(store)
    for run_id, each in ended.items():
        run = each.loaded.run
        tally.look(
            "every run has succeeded, with an empty inbox",
            [] if run.status == "succeeded" else [f"{run_id} is {run.status}: {run.error}"],
            [f"{run_id} has {len(each.loaded.inbox)} events"] if each.loaded.inbox else [],
        )
        items = await store.load_items(
            run.id,
            {id_: range(step.items.total) for id_, step in run.steps.items() if step.items},
        )
        tally.look(
            "every run is one that the rules lead to",
            invariants.of_run(plans[run.tenant, run.workflow_id], replace(run, items=items)),
        )
        kind = CANARY if run.workflow_id == "canary" else KINDS[run.workflow_id]
        tally.look("a timeline is one chain, and ends with the run", _chain(each, kind))


def check_overlap(tally: Tally, ended: Mapping[str, Ended], started: Iterable[Start]) -> None:
    """From when a start was answered until its run decided to end, its slot was surely held."""
    for tenant, each in TENANTS.items():
        moments: list[tuple[float, int]] = []
        for start in started:
            run = ended[start.run_id].loaded.run if start.run_id in ended else None
            if run is None or start.tenant != tenant or run.finished_at is None:
                continue
            finished_at = run.finished_at / _MS
            if start.at < finished_at:
                moments += [(start.at, 1), (finished_at, -1)]
        active = highest = 0
        for _, change in sorted(moments):
            active += change
            highest = max(highest, active)
            if change > 0:
                tally.look(
                    "never more active runs than the cap, by answers and timelines",
                    cap_holds(tenant, active, each.cap),
                )


def _chain(ended: Ended, kind: Kind) -> Iterator[str]:
    run_id, lines = ended.loaded.run.id, ended.lines
    whats = [line.what for line in lines]
    if whats.count("run_started") != 1 or whats[0] != "run_started":
        yield f"{run_id} does not begin once: {whats}"
    if whats.count("run_succeeded") != 1 or whats[-1] != "run_succeeded":
        yield f"{run_id} does not end once: {whats}"
    steps = Counter(line.step for line in lines if line.what == "step_succeeded")
    if steps != kind.ends:
        yield f"{run_id}: steps ended {dict(steps)}"
    items = Counter((line.step, line.item) for line in lines if line.what == "item_succeeded")
    wanted = {(step, item): 1 for step, count in kind.items.items() for item in range(count)}
    if items != wanted:
        yield f"{run_id}: items ended {dict(items)}"
    if whats.count("job_failed") != kind.failures:
        yield f"{run_id}: {whats.count('job_failed')} attempts failed, of {kind.failures}"
    jobs = Counter(
        (line.step, line.item, line.attempt) for line in lines if line.what == "job_dispatched"
    )
    if jobs and max(jobs.values()) > 1:
        yield f"{run_id}: an attempt began twice: {dict(jobs)}"


async def _read(store: RedisStore, run_id: RunId) -> Ended:
    loaded = await store.load(run_id)
    assert loaded is not None, f"{run_id} is in the list and not there"
    lines = (await store.timeline(run_id, limit=1_000)).items
    return Ended(loaded, lines)


async def _plans(store: RedisStore) -> dict[tuple[str, str], Plan]:
    plans: dict[tuple[str, str], Plan] = {}
    for tenant in _tenants():
        for workflow_id in ["canary"] if tenant == CANARY_TENANT else KINDS:
            stored = await store.workflow(TenantId(tenant), WorkflowId(workflow_id))
            assert stored is not None, f"{tenant} has no workflow {workflow_id}"
            plan = link(stored.workflow, {})
            assert isinstance(plan, Plan), plan
            plans[tenant, workflow_id] = plan
    return plans


def _tenants() -> list[str]:
    return [*TENANTS, CANARY_TENANT]
