"""Lists of runs and timelines: in order, in pages, undisturbed by what happens meanwhile."""

from __future__ import annotations

import asyncio
import base64
import random
import re
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from stanchion.core.admission import Admitted
from stanchion.core.model import Instant, Risk, RunId, RunStatus, TenantId, WorkflowId
from stanchion.core.transition import TimelineEntry
from stanchion.ports.records import BadCursor, Page, RunFilter, RunSummary, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    ONE_JOB,
    TWO_JOBS,
    WITHIN_MS,
    admission,
    cancel,
    commit_of,
    finish,
    loaded,
    nothing,
    start,
)

_LINES = 25
_EVERY_RUN = RunFilter()
_ONE_JOB = WorkflowId("one-job")


async def test_a_tenant_without_runs_lists_none(store: Store) -> None:
    assert await store.list_runs(ACME) == Page(())


async def test_a_run_is_listed_as_it_is(store: Store) -> None:
    run_id = await start(store)
    run = (await loaded(store, run_id)).run
    listed = RunSummary(
        id=run_id,
        tenant=ACME,
        workflow_id=WorkflowId("one-job"),
        workflow_version=1,
        status=RunStatus.RUNNING,
        created_at=run.created_at,
    )
    assert (await store.list_runs(ACME)).items == (listed,)
    await cancel(store, run_id)
    run = (await loaded(store, run_id)).run
    ended = replace(
        listed, status=RunStatus.CANCELLED, finished_at=run.finished_at, error=run.error
    )
    assert run.error is not None
    assert (await store.list_runs(ACME)).items == (ended,)


async def test_the_newest_run_comes_first(store: Store) -> None:
    now = await store.now()
    runs = {age: await _started(store, now - age) for age in (3_000, 1_000, 5_000, 2_000)}
    listed = [each.id for each in (await store.list_runs(ACME)).items]
    assert listed == [runs[age] for age in (1_000, 2_000, 3_000, 5_000)]


async def test_of_runs_of_the_same_instant_the_highest_id_comes_first(store: Store) -> None:
    now = await store.now()
    runs = [await _started(store, now) for _ in range(9)]
    listed = [each.id for each in (await store.list_runs(ACME)).items]
    assert listed == sorted(runs, reverse=True)


async def test_runs_are_listed_for_their_own_tenant_only(store: Store) -> None:
    await start(store)
    other = await start(store, tenant=GLOBEX)
    assert [each.id for each in (await store.list_runs(GLOBEX)).items] == [other]


async def test_pages_hold_every_run_once(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    now = await store.now()
    runs = [await _started(store, now - number // 4) for number in range(11)]
    pages = await _pages(store, limit=3)
    assert [len(page) for page in pages] == [3, 3, 3, 2]
    listed = [each.id for page in pages for each in page]
    assert sorted(listed) == sorted(runs)
    assert listed == [each.id for each in (await store.list_runs(ACME)).items]


async def test_a_page_that_holds_all_is_the_last(store: Store) -> None:
    for _ in range(3):
        await start(store)
    assert (await store.list_runs(ACME, limit=3)).cursor is None
    assert (await store.list_runs(ACME, limit=2)).cursor is not None


async def test_a_run_that_begins_meanwhile_does_not_disturb_the_pages(store: Store) -> None:
    now = await store.now()
    runs = [await _started(store, now - 100 - number) for number in range(4)]
    first = await store.list_runs(ACME, limit=2)
    await _started(store, now)
    second = await store.list_runs(ACME, limit=2, cursor=first.cursor)
    assert [each.id for each in (*first.items, *second.items)] == runs


async def test_a_run_that_is_removed_meanwhile_does_not_disturb_the_pages(store: Store) -> None:
    now = await store.now()
    runs = [await _started(store, now - 100 - number) for number in range(4)]
    first = await store.list_runs(ACME, limit=2)
    await cancel(store, runs[1])
    assert await store.purge(finished_before=Instant(now + 100_000), limit=10) == 1
    second = await store.list_runs(ACME, limit=2, cursor=first.cursor)
    assert [each.id for each in second.items] == runs[2:]


async def test_runs_are_listed_by_status(store: Store) -> None:
    going, over = await start(store), await start(store)
    await cancel(store, over)
    assert await _all(store, RunFilter(statuses=(RunStatus.CANCELLED,))) == [over]
    assert await _all(store, RunFilter(statuses=(RunStatus.RUNNING,))) == [going]
    assert await _all(store, RunFilter(statuses=(RunStatus.FAILED,))) == []


async def test_runs_are_listed_by_workflow(store: Store) -> None:
    first = await start(store)
    second = await start(store, TWO_JOBS)
    assert await _all(store, RunFilter(workflow_id=WorkflowId("one-job"))) == [first]
    assert await _all(store, RunFilter(workflow_id=WorkflowId("two-jobs"))) == [second]
    assert await _all(store, RunFilter(workflow_id=WorkflowId("one"))) == []


async def test_runs_are_listed_by_status_and_workflow(store: Store) -> None:
    await start(store)
    await cancel(store, await start(store, TWO_JOBS), TWO_JOBS)
    wanted = await start(store)
    await cancel(store, wanted)
    only = RunFilter(statuses=(RunStatus.CANCELLED,), workflow_id=WorkflowId("one-job"))
    assert await _all(store, only) == [wanted]


async def test_a_filter_finds_every_run_through_small_pages(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    now = await store.now()
    runs = [await _started(store, now - number) for number in range(12)]
    for run_id in runs[::4]:
        await cancel(store, run_id)
    only = RunFilter(statuses=(RunStatus.CANCELLED,))
    assert await _all(store, only, limit=2) == runs[::4]


async def test_what_a_filter_lists_is_what_a_scan_of_all_finds(store: Store) -> None:
    now = await store.now()
    chance = random.Random(11)
    tenants = [ACME, GLOBEX, *(TenantId(f"tenant-{number}") for number in range(4))]
    for tenant in tenants:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    first = await start(store)
    plans = {"one-job": ONE_JOB, "two-jobs": TWO_JOBS}
    for number in range(60):
        plan = chance.choice([*plans.values()])
        labels = chance.choice([{}, {"team": "red"}, {"team": "red", "url": "a:b"}, {"url:a": "b"}])
        wanted = admission(
            now,
            plan,
            tenant=chance.choice(tenants),
            created_at=Instant(now - 1_000 + 10 * (number // 3)),
            labels=labels,
            rerun_of=chance.choice([None, None, first]),
            risk=chance.choice([Risk.STANDARD, Risk.CRITICAL]),
        )
        assert isinstance(await store.admit(wanted, within_ms=WITHIN_MS), Admitted)
        if number % 3:
            await cancel(store, wanted.run.id, plan)
    await _all_filters_are_right(store, first, now)
    assert await store.purge(finished_before=Instant(now + 100_000), limit=25) == 25
    await _all_filters_are_right(store, first, now)


async def _all_filters_are_right(store: Store, first: RunId, now: Instant) -> None:
    every = [each for page in await _pages(store, tenant=None, limit=1_000) for each in page]
    assert every == sorted(every, key=lambda run: (run.created_at, run.id), reverse=True)
    for run in every:
        whole = (await loaded(store, run.id)).run
        assert (run.tenant, run.labels, run.risk, run.rerun_of) == (
            *(whole.tenant, whole.labels, whole.risk, whole.rerun_of),
        )
    ended, going = (RunStatus.CANCELLED,), (RunStatus.RUNNING, RunStatus.PENDING)
    filters = [
        RunFilter(),
        RunFilter(statuses=ended),
        RunFilter(statuses=(*ended, *going, RunStatus.SUCCEEDED)),
        RunFilter(workflow_id=WorkflowId("one-job")),
        RunFilter(workflow_id=WorkflowId("two-jobs"), statuses=going, since=Instant(now - 900)),
        RunFilter(labels=("team:red",)),
        RunFilter(labels=("url:a:b", "team:red"), statuses=ended),
        RunFilter(labels=("url:a:b",), until=Instant(now - 850)),
        RunFilter(labels=("team:blue",)),
        RunFilter(rerun_of=first),
        RunFilter(rerun_of=first, labels=("team:red",), workflow_id=WorkflowId("one-job")),
        RunFilter(since=Instant(now - 950), until=Instant(now - 900)),
        RunFilter(until=Instant(0)),
    ]
    for tenant in (None, ACME, GLOBEX, TenantId("stranger")):
        own = [run for run in every if tenant in {None, run.tenant}]
        for only in filters:
            fitting = [run for run in own if only.fits(run)]
            for limit in (2, 100):
                pages = await _pages(store, tenant=tenant, only=only, limit=limit)
                assert [run for page in pages for run in page] == fitting, (tenant, only, limit)


async def test_a_page_looks_at_ten_runs_for_each_that_it_may_hold(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    now = await store.now()
    runs = [await _started(store, now - number) for number in range(25)]
    await cancel(store, runs[-1])
    only = RunFilter(statuses=(RunStatus.CANCELLED, RunStatus.SUCCEEDED), workflow_id=_ONE_JOB)
    assert [len(page) for page in await _pages(store, only=only, limit=1)] == [0, 0, 1]


async def test_a_bad_cursor_is_said_to_be_bad(store: Store) -> None:
    run_id = await start(store)
    for bad in ("", "nonsense", "{}", "é", "W10"):
        with pytest.raises(BadCursor):
            await store.list_runs(ACME, cursor=bad)
        with pytest.raises(BadCursor):
            await store.timeline(run_id, cursor=bad)


_MEMBERS = (
    *("0", "1", "-1", "-0", "1.5", "1e3", "1e400", "NaN", "Infinity", "true", "null", "[]", "{}"),
    *(str(2**53), str(2**63 - 1), str(2**63), str(2**64), "9" * 400, "-" + "9" * 400),
    *('""', '"x"', '"\\u0000"', '"\\uffff"', '"0-0"', '"99999999999999999999-0"', '"-"', '"+"'),
    '"' + "x" * 700 + '"',
)


async def test_no_forged_cursor_gets_more_than_a_page_or_a_refusal(store: Store) -> None:
    run_id = await start(store)
    lists: dict[str, Callable[[str], Awaitable[object]]] = {
        "runs": lambda cursor: store.list_runs(ACME, cursor=cursor),
        "timeline": lambda cursor: store.timeline(run_id, cursor=cursor),
        "feed": lambda cursor: store.feed(ACME, after=cursor),
        "workflows": lambda cursor: store.list_workflows(ACME, cursor=cursor),
        "tenants": lambda cursor: store.list_tenants(cursor=cursor),
        "documents": lambda cursor: store.list_documents("key", cursor=cursor),
        "dead-letters": lambda cursor: store.list_dead_letters(None, cursor=cursor),
    }

    async def asked(kind: str, members: str) -> object:
        text = f'["{kind}",{members}]'.encode()
        try:
            return await lists[kind](base64.urlsafe_b64encode(text).decode().rstrip("="))
        except BadCursor as bad:
            return bad

    pairs = [f"{one},{other}" for one, other in zip(_MEMBERS, _MEMBERS[::-1], strict=True)]
    answers = await asyncio.gather(
        *(asked(kind, members) for kind in lists for members in (*_MEMBERS, *pairs))
    )
    assert all(isinstance(each, Page | tuple | BadCursor) for each in answers)
    assert sum(isinstance(each, BadCursor) for each in answers) > len(answers) / 2


async def test_a_cursor_of_another_list_is_bad(store: Store) -> None:
    for name in ("a", "b"):
        await store.put_tenant(TenantId(name), Tenant())
    cursor = (await store.list_tenants(limit=1)).cursor
    with pytest.raises(BadCursor):
        await store.list_runs(ACME, cursor=cursor)


async def test_a_cursor_is_safe_in_an_address(store: Store) -> None:
    for _ in range(2):
        await start(store)
    cursor = (await store.list_runs(ACME, limit=1)).cursor
    assert cursor is not None
    assert re.fullmatch(r"[A-Za-z0-9_.~-]+", cursor)


# ── Timelines ────────────────────────────────────────────────────────────────────────────────────


async def test_a_timeline_tells_a_runs_history_oldest_first(store: Store) -> None:
    run_id = await start(store)
    await finish(store, ONE_JOB, run_id)
    page = await store.timeline(run_id)
    told = [line.what for line in page.items]
    assert told[0] == "run_started"
    assert told[-1] == "run_succeeded"
    assert told.index("job_dispatched") < told.index("step_succeeded")
    assert page.cursor is None


async def test_a_line_comes_back_as_it_was(store: Store) -> None:
    run_id = await start(store)
    before = await loaded(store, run_id)
    line = TimelineEntry(
        at=Instant(1_700_000_000_123),
        what="said",
        actor="Jörg",
        step=next(iter(before.run.steps)),
        item=3,
        attempt=2,
        detail='"quoted"\n',
    )
    await store.commit(commit_of(before, replace(nothing(before), timeline=(line,))))
    assert (await store.timeline(run_id)).items[-1] == line


async def test_a_timeline_is_read_in_pages(store: Store) -> None:
    run_id = await start(store)
    for number in range(_LINES):
        found = await loaded(store, run_id)
        await store.commit(commit_of(found, nothing(found, say=f"line {number}")))
    told: list[str] = []
    cursor = None
    while True:
        page = await store.timeline(run_id, limit=10, cursor=cursor)
        assert len(page.items) <= 10
        told += [line.what for line in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert [line for line in told if line.startswith("line")] == [
        f"line {number}" for number in range(_LINES)
    ]


async def test_a_page_that_holds_all_of_a_timeline_is_the_last(store: Store) -> None:
    run_id = await start(store)
    told = len((await store.timeline(run_id)).items)
    assert (await store.timeline(run_id, limit=told)).cursor is None
    assert (await store.timeline(run_id, limit=told - 1)).cursor is not None


async def test_a_timeline_can_be_followed_past_what_is_written_meanwhile(store: Store) -> None:
    run_id = await start(store)
    first = await store.timeline(run_id, limit=1)
    assert first.cursor is not None
    found = await loaded(store, run_id)
    await store.commit(commit_of(found, nothing(found, say="later")))
    rest = await store.timeline(run_id, cursor=first.cursor)
    assert rest.items[-1].what == "later"


async def test_an_unknown_run_has_no_timeline(store: Store) -> None:
    assert await store.timeline(RunId("nonsense")) == Page(())


async def _started(store: Store, created_at: int) -> RunId:
    return await start(store, created_at=Instant(created_at))


async def _pages(
    store: Store,
    *,
    limit: int,
    only: RunFilter = _EVERY_RUN,
    tenant: TenantId | None = ACME,
) -> list[tuple[RunSummary, ...]]:
    pages: list[tuple[RunSummary, ...]] = []
    cursor = None
    while True:
        page = await store.list_runs(tenant, only=only, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        pages.append(page.items)
        cursor = page.cursor
        if cursor is None:
            return pages


async def _all(store: Store, only: RunFilter, limit: int = 100) -> list[RunId]:
    return [each.id for page in await _pages(store, limit=limit, only=only) for each in page]
