"""What comes at the same moment is as if one had come after the other.

A store may serve its callers together. None of them may notice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from stanchion.core.admission import (
    Admitted,
    Full,
    Mismatch,
    Queued,
    QueueFull,
    RateExceeded,
    Replayed,
    StaleDefinition,
    TooLate,
    Verdict,
)
from stanchion.core.budget import BudgetLimit, BudgetWindow, OverBudget
from stanchion.core.events import CancelRequested, Timer, TimerKind
from stanchion.core.model import Instant, RunId, RunStatus, Stamp, StepId, TenantId, WorkflowId
from stanchion.core.queue import OnFull, QueueRequest
from stanchion.core.run import decide_all
from stanchion.core.schedule import TickMark
from stanchion.core.transition import DispatchJob, SetTimer, TimelineEntry
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.records import (
    Accepted,
    Admission,
    CommitConflict,
    Committed,
    Page,
    ResultRefused,
    RunFilter,
    Tenant,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    BOUNDED,
    TOPIC,
    TWO_JOBS,
    WITHIN_MS,
    accept,
    admission,
    commit_of,
    lease,
    lease_one,
    loaded,
    nonce,
    nothing,
    result_of,
    start,
)


async def _admit_all(store: Store, *wanted: Admission) -> list[Verdict]:
    return await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))


async def test_starts_that_come_together_take_no_more_slots_than_there_are(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=3))
    now = await store.now()
    verdicts = await _admit_all(store, *(admission(now) for _ in range(20)))
    assert Counter(map(type, verdicts)) == {Admitted: 3, Full: 17}
    assert await store.active_runs(ACME) == 3
    assert await store.ready_topics() == {TOPIC: 3}
    assert len((await store.list_runs(ACME)).items) == 3


async def test_one_that_was_admitted_before_is_told_so_among_those_that_are_refused(
    store: Store,
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    now = await store.now()
    before = admission(now)
    await store.admit(before, within_ms=WITHIN_MS)
    others = [admission(now) for _ in range(4)]
    verdicts = await _admit_all(store, *others[:2], before, *others[2:])
    assert [type(each) for each in verdicts] == [Full, Full, Admitted, Full, Full]


async def test_one_that_was_admitted_before_is_not_made_again_among_those_that_are_new(
    store: Store,
) -> None:
    now = await store.now()
    before = admission(now)
    await store.admit(before, within_ms=WITHIN_MS)
    wanted = [admission(now), admission(now), before, before, admission(now)]
    assert await _admit_all(store, *wanted) == [Admitted(each.run.id) for each in wanted]
    assert await store.active_runs(ACME) == 4
    assert len((await store.list_runs(ACME)).items) == 4
    assert await store.ready_topics() == {TOPIC: 4}


async def test_of_starts_with_one_key_one_begins_and_the_others_hear_of_it(store: Store) -> None:
    now = await store.now()
    wanted = [admission(now, key="k") for _ in range(5)]
    verdicts = await _admit_all(store, *wanted)
    (begun,) = {each.run_id for each in verdicts if isinstance(each, Admitted | Replayed)}
    assert Counter(map(type, verdicts)) == {Admitted: 1, Replayed: 4}
    assert [run.id for run in (await store.list_runs(ACME)).items] == [begun]


async def test_starts_of_many_tenants_come_out_in_each_ones_order(store: Store) -> None:
    now = await store.now()
    tenants = [TenantId(f"tenant-{number}") for number in range(5)]
    wanted = [admission(now, tenant=tenant) for _ in range(3) for tenant in tenants]
    await _admit_all(store, *wanted)
    leased = await lease(store, max_jobs=15)
    assert [each.job.tenant for each in leased[:5]] != [leased[0].job.tenant] * 5
    for tenant in tenants:
        mine = [each.run.id for each in wanted if each.run.tenant == tenant]
        assert [each.job.run_id for each in leased if each.job.tenant == tenant] == mine
        told = [entry.run_id for entry in await store.feed(tenant, after=None)]
        assert sorted(told) == sorted(mine)


async def test_of_two_commits_on_the_same_state_one_is_taken(store: Store) -> None:
    run_id = await start(store)
    found = await loaded(store, run_id)
    told = len((await store.timeline(run_id)).items)
    commits = [commit_of(found, nothing(found, say=str(number))) for number in range(3)]
    answers = await asyncio.gather(*map(store.commit, commits))
    assert Counter(map(type, answers)) == {Committed: 1, CommitConflict: 2}
    assert len((await store.timeline(run_id)).items) == told + 1


async def test_a_run_that_begins_with_the_change_of_another_keeps_its_timers(store: Store) -> None:
    changed = await loaded(store, await start(store))
    now = await store.now()
    timer = SetTimer(Timer(TimerKind.STEP_TIMEOUT, StepId("step")), now)
    begun = admission(now)
    effects = (*begun.transition.effects, timer)
    begun = replace(begun, transition=replace(begun.transition, effects=effects))
    await asyncio.gather(
        store.commit(commit_of(changed, replace(nothing(changed), effects=(timer,)))),
        store.admit(begun, within_ms=WITHIN_MS),
    )
    assert sorted(await store.fire_timers(limit=10)) == sorted([changed.run.id, begun.run.id])


async def test_a_result_that_comes_twice_at_once_lies_there_once(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    answers = await asyncio.gather(accept(store, leased), accept(store, leased))
    assert all(isinstance(each, Accepted) for each in answers)
    assert len((await loaded(store, run_id)).inbox) == 1
    assert await store.outbox_size() == 1


async def test_the_end_of_a_run_and_a_result_for_it_leave_nothing_behind(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    first = await lease_one(store)
    found = await loaded(store, run_id)
    ends = decide_all(TWO_JOBS, found.run, (CancelRequested(),), await store.now())
    committed, answer = await asyncio.gather(
        store.commit(commit_of(found, ends)), store.accept([result_of(first)])
    )
    assert isinstance(committed, Committed)
    assert isinstance(answer[0], Accepted | ResultRefused)
    after = await loaded(store, run_id)
    assert (after.run.status, after.inbox) == (RunStatus.CANCELLED, ())
    assert await store.outbox_size() == 0
    assert await store.active_runs(ACME) == 0


async def test_a_result_just_before_the_end_of_its_run_leaves_nothing_behind(store: Store) -> None:
    run_id = await start(store, TWO_JOBS)
    first = await lease_one(store)
    found, other = await loaded(store, run_id), await loaded(store, await start(store))
    ends = decide_all(TWO_JOBS, found.run, (CancelRequested(),), await store.now())
    # A store that writes commits together might write the second one with the first.
    _, (answer,), committed = await asyncio.gather(
        store.commit(commit_of(other, nothing(other))),
        store.accept([result_of(first)]),
        store.commit(commit_of(found, ends)),
    )
    assert isinstance(committed, Committed)
    assert isinstance(answer, Accepted | ResultRefused)
    after = await loaded(store, run_id)
    assert (after.run.status, after.inbox) == (RunStatus.CANCELLED, ())
    assert await store.outbox_size() == 0


async def test_jobs_that_become_ready_and_workers_that_ask_meet_once(store: Store) -> None:
    now = await store.now()
    wanted = [admission(now) for _ in range(6)]
    await store.admit(wanted[0], within_ms=WITHIN_MS)
    verdicts, *leased = await asyncio.gather(
        _admit_all(store, *wanted[1:]), lease(store, max_jobs=2), lease(store, max_jobs=2)
    )
    assert verdicts == [Admitted(each.run.id) for each in wanted[1:]]
    leased.append(await lease(store, max_jobs=10))
    taken = [each.job.id for some in leased for each in some]
    assert len(taken) == len(set(taken)) == 6
    assert await store.ready_topics() == {}


# ── Several runs in one call ─────────────────────────────────────────────────────────────────────


async def _admit_many(store: Store, *wanted: Admission) -> tuple[Verdict, ...]:
    return await store.admit_many(wanted, within_ms=WITHIN_MS)


async def _standing(store: Store, tenant: TenantId) -> tuple[object, ...]:
    """What admissions leave behind."""
    page = await store.list_runs(tenant)
    feed = await store.feed(tenant, after=None)
    return (
        await store.active_runs(tenant),
        await store.queued_runs(tenant),
        sorted((run.status, [*run.labels]) for run in page.items),
        [[line.what for line in entry.entries] for entry in feed],
        await store.budgets(tenant),
    )


def _told(verdicts: Iterable[Verdict], runs: Sequence[RunId]) -> list[object]:
    """The verdicts with the number of the run in place of its id, which differs by tenant."""

    def told(verdict: Verdict) -> object:
        match verdict:
            case Admitted(run_id) | Replayed(run_id):
                return type(verdict), runs.index(run_id)
            case Queued(run_id, position):
                return Queued, runs.index(run_id), position
            case _:
                return verdict

    return [told(each) for each in verdicts]


async def test_a_run_that_is_named_again_in_one_call_begins_once(store: Store) -> None:
    wanted = admission(await store.now())
    for _ in range(2):
        verdicts = await _admit_many(store, wanted, wanted, admission(await store.now()), wanted)
        assert verdicts[0] == verdicts[1] == verdicts[3] == Admitted(wanted.run.id)
    assert await store.active_runs(ACME) == 3


def _mixed(now: Instant, tenant: TenantId) -> list[Admission]:
    """One run of each kind that a verdict can be about, in an order that matters."""

    def one(key: str, *, say: str = "hello", **others: Any) -> Admission:  # noqa: ANN401 - of builders
        budget = others.pop("budget", {"tokens": 1})
        others.setdefault("queue", QueueRequest())
        made = admission(now, tenant=tenant, run_input={"say": say}, key=key, **others)
        return replace(made, budget=budget)

    tick = replace(one("t"), tick=TickMark("nightly", 1, Instant(7)))
    return [
        one("a", labels={"team": "red"}),
        one("b", definitions={WorkflowId("other"): 3}),
        one("a"),
        one("a", say="good-bye"),
        one("c", budget={"tokens": 1_000}),
        one("c"),
        one("d", queue=QueueRequest(on_full=OnFull.REJECT)),
        one("e", queue=QueueRequest(priority=2)),
        one("e", queue=QueueRequest(priority=2)),
        one("f", queue=QueueRequest(priority=8)),
        one("g"),
        one("h", holds_slot=False, is_rate_limited=True, queue=None),
        one("i", holds_slot=False, is_rate_limited=True, queue=None),
        one("a"),
        tick,
        replace(one("u"), tick=TickMark("nightly", 1, Instant(7))),
    ]


@pytest.mark.parametrize("on_full", OnFull)
async def test_runs_of_one_call_are_judged_as_if_one_had_come_after_the_other(
    store: Store, on_full: OnFull
) -> None:
    told, standing = [], []
    for tenant in (ACME, TenantId("globex")):
        budget = {"tokens": BudgetLimit(9, BudgetWindow.TOTAL)}
        config = Tenant(
            max_concurrent_runs=2,
            on_full=on_full,
            queue_max=2,
            budgets=budget,
            job_rate_per_s=0.001,
        )
        await store.put_tenant(tenant, config)
        wanted = _mixed(await store.now(), tenant)
        if tenant == ACME:
            verdicts = [await store.admit(each, within_ms=WITHIN_MS) for each in wanted]
        else:
            verdicts = [*await _admit_many(store, *wanted)]
        told.append(_told(verdicts, [each.run.id for each in wanted]))
        standing.append(await _standing(store, tenant))
    assert told[0] == told[1]
    assert standing[0] == standing[1]
    kinds = {each[0] if isinstance(each, tuple) else type(each) for each in told[0]}
    queue = {Queued, QueueFull} if on_full is OnFull.QUEUE else set()
    assert kinds == {
        *(Admitted, Replayed, Mismatch, StaleDefinition, OverBudget, Full, RateExceeded),
        *queue,
    }


async def test_a_call_that_is_repeated_admits_its_runs_once(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=3))
    now = await store.now()
    wanted = [admission(now, key=f"k{number}") for number in range(5)]
    first = await _admit_many(store, *wanted)
    assert [*map(type, first)] == [Admitted] * 3 + [Full] * 2
    assert await _admit_many(store, *wanted) == first
    later = await _admit_many(store, admission(now), *wanted)
    assert later == (Full(3, 3), *first)
    assert await store.ready_topics() == {TOPIC: 3}


async def test_a_call_that_comes_too_late_admits_none_of_its_runs(store: Store) -> None:
    now = await store.now()
    known = admission(now)
    await store.admit(known, within_ms=WITHIN_MS)
    late = [admission(now), known, admission(now)]
    with suppress(BackendTimeout):  # an adapter may say at once that there is no time left
        verdicts = await store.admit_many(late, within_ms=-1_000)
        assert verdicts == (TooLate(), Admitted(known.run.id), TooLate())
    assert await store.active_runs(ACME) == 1


async def test_a_call_may_have_no_runs_and_as_many_as_the_port_says(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=store.admissions_max - 1))
    now = await store.now()
    assert await _admit_many(store) == ()
    wanted = [admission(now, TWO_JOBS, key=f"k{number}") for number in range(store.admissions_max)]
    verdicts = await _admit_many(store, *wanted)
    cap = store.admissions_max - 1
    assert verdicts == (*(Admitted(each.run.id) for each in wanted[:-1]), Full(cap, cap))
    for each in wanted[:-1]:
        found = await loaded(store, each.run.id)
        assert (found.run, found.inbox) == (each.run, ())
    assert {run.id for run in (await store.list_runs(ACME, limit=1_000)).items} == {
        each.run.id for each in wanted[:-1]
    }


async def test_calls_that_come_together_share_keys_and_slots(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=7))
    now = await store.now()
    calls = [[admission(now, key=f"k{number}") for number in range(10)] for _ in range(4)]
    answers = await asyncio.gather(*(_admit_many(store, *each) for each in calls))
    verdicts = [verdict for answer in answers for verdict in answer]
    assert Counter(map(type, verdicts)) == {Admitted: 7, Replayed: 21, Full: 12}
    assert await store.active_runs(ACME) == 7


def _alike(
    now: Instant, tenant: TenantId, count: int, *, unkeyed: int | None = None
) -> list[Admission]:
    """Runs that differ in ids, keys and inputs only; the one at ``unkeyed`` has no key."""
    wanted = (
        admission(
            now,
            BOUNDED,
            tenant=tenant,
            run_input={"say": f"hello {number}", "more": [number, None, {"a": '\u00fc"\n'}]},
            key=None if number == unkeyed else f"k{number}",
            queue=QueueRequest(),
        )
        for number in range(count)
    )
    stamp = Stamp(1, nonce())
    return [
        replace(
            each,
            run=replace(each.run, stamp=stamp),
            before=each.before and replace(each.before, stamp=stamp),
            budget={"tokens": 3},
        )
        for each in wanted
    ]


async def _left_by(store: Store, wanted: Sequence[Admission]) -> list[object]:
    """What runs left behind, with the number of the run in place of its id."""
    tenant, runs = wanted[0].run.tenant, [each.run.id for each in wanted]
    left: list[object] = [await _standing(store, tenant)]
    for each in wanted:
        facts = await store.run_facts(each.run.id)
        assert facts is not None
        assert facts.run == each.run
        jobs = [(job.step_id, job.topic, job.state, job.ahead, job.fence) for job in facts.jobs]
        timers = [(timer.timer, timer.due - each.run.created_at) for timer in facts.timers]
        page = await store.timeline(each.run.id)
        lines = [(line.what, line.actor) for line in page.items]
        left.append((jobs, timers, lines))
    for only in (
        RunFilter(),
        RunFilter(statuses=(RunStatus.RUNNING,)),
        RunFilter(workflow_id=BOUNDED.workflow_id),
    ):
        page_of_runs = await store.list_runs(tenant, only=only, limit=1_000)
        left.append(sorted(runs.index(run.id) for run in page_of_runs.items))
    of_all = await store.list_runs(None, only=RunFilter(statuses=(RunStatus.RUNNING,)), limit=1_000)
    left.append(sorted(runs.index(run.id) for run in of_all.items if run.id in runs))
    left.append([runs.index(entry.run_id) for entry in await store.feed(tenant, after=None)])
    sent = {
        each.job.id: each.job
        for one in wanted
        for each in one.transition.effects
        if isinstance(each, DispatchJob)
    }
    for topic in ("left", "right"):
        leased = await lease(store, topic, max_jobs=1_000, tenant=tenant)
        assert all(each.job == sent[each.job.id] for each in leased)
        left.append([(runs.index(each.job.run_id), each.job.step_id) for each in leased])
    return left


@pytest.mark.parametrize(("cap", "unkeyed"), [(None, None), (7, None), (4, None), (None, 1)])
async def test_runs_that_begin_alike_leave_what_single_ones_leave(
    store: Store, cap: int | None, unkeyed: int | None
) -> None:
    count, left, told = 7, [], []
    for tenant in (ACME, TenantId("globex")):
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=cap))
        wanted = _alike(await store.now(), tenant, count, unkeyed=unkeyed)
        if tenant == ACME:
            verdicts = [await store.admit(each, within_ms=WITHIN_MS) for each in wanted]
        else:
            asked = store.prepare_admissions(wanted)
            assert [*asked] == wanted
            assert unkeyed is not None or bool(getattr(asked, "alike", True))
            verdicts = [*await store.admit_many(asked, within_ms=WITHIN_MS)]
            again = await store.admit_many(asked, within_ms=WITHIN_MS)
            assert [*again] == verdicts
        told.append(_told(verdicts, [each.run.id for each in wanted]))
        keys = [each.key for each in wanted if each.key is not None]
        known = (await store.check_starts(tenant, [], keys)).known
        runs = {each.key: each.run.id for each in wanted if isinstance(verdicts.pop(0), Admitted)}
        assert {key: record.run_id for key, record in known.items()} == {
            key: run_id for key, run_id in runs.items() if key is not None
        }
        left.append(await _left_by(store, [each for each in wanted if each.key in runs]))
    assert told[0] == told[1]
    assert left[0] == left[1]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
async def test_the_timeline_of_a_run_that_began_with_others_has_pages(
    store: Store, limit: int
) -> None:
    wanted = _alike(await store.now(), ACME, 2)
    assert {*map(type, await _admit_many(store, *wanted))} == {Admitted}
    run_id, cancel = wanted[0].run.id, CancelRequested(actor="operator", reason="enough")
    found = await loaded(store, run_id)
    transition = decide_all(BOUNDED, found.run, (cancel,), await store.now())
    assert isinstance(await store.commit(commit_of(found, transition)), Committed)
    expected = [*wanted[0].transition.timeline, *transition.timeline]
    assert len(wanted[0].transition.timeline) > 2
    entries, cursor, is_last = list[TimelineEntry](), None, False
    while not is_last:
        page = await store.timeline(run_id, cursor=cursor, limit=limit)
        assert 0 < len(page.items) <= limit
        entries += page.items
        cursor, is_last = page.cursor, page.cursor is None
    assert entries == expected
    beyond = await store.timeline(RunId("391m7t2rvxjhv41vjx87yrg"), limit=limit)
    assert beyond == Page(())


async def test_runs_that_begin_alike_are_judged_one_by_one_after_others(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=20))
    now = await store.now()
    known = admission(now, BOUNDED, run_input={"say": "hi"}, key="k2")
    await store.admit(known, within_ms=WITHIN_MS)
    wanted = _alike(now, ACME, 5)
    verdicts = await _admit_many(store, *wanted)
    assert [*map(type, verdicts)] == [Admitted, Admitted, Mismatch, Admitted, Admitted]
    assert await store.active_runs(ACME) == 5
    later = _alike(now, ACME, 3)
    config = Tenant(max_concurrent_runs=6, on_full=OnFull.QUEUE, queue_max=9)
    await store.put_tenant(ACME, config)
    fresh = [replace(each, key=f"new-{number}") for number, each in enumerate(later)]
    queued = await _admit_many(store, *fresh)
    assert queued[0] == Admitted(fresh[0].run.id)
    assert queued[1:] == tuple(
        Queued(each.run.id, position) for position, each in enumerate(fresh[1:], start=1)
    )
    stale = [replace(each, definitions={WorkflowId("bounded"): 9}) for each in _alike(now, ACME, 2)]
    renamed = [replace(each, key=f"stale-{number}") for number, each in enumerate(stale)]
    assert await _admit_many(store, *renamed) == (StaleDefinition(), StaleDefinition())


async def test_runs_that_begin_alike_never_overtake_those_before_them(store: Store) -> None:
    """Also if a store admits them in parts, and the first part is not admitted at once."""
    count, cap = store.admissions_max, store.admissions_max - 30
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=cap))
    now = await store.now()
    known = admission(now, BOUNDED, run_input={"say": "hi"}, key="k3")
    await store.admit(known, within_ms=WITHIN_MS)
    wanted = _alike(now, ACME, count)
    verdicts = await _admit_many(store, *wanted)
    begun = [type(each) for each in verdicts]
    assert begun == [Admitted] * 3 + [Mismatch] + [Admitted] * (cap - 4) + [Full] * (count - cap)
    assert await store.active_runs(ACME) == cap
