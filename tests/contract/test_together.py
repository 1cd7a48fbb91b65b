"""What comes at the same moment is as if one had come after the other.

A store may serve its callers together. None of them may notice.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from stanchion.core.admission import Admitted, Full, Replayed, Verdict
from stanchion.core.events import CancelRequested
from stanchion.core.model import RunStatus, TenantId
from stanchion.core.run import decide_all
from stanchion.ports.records import (
    Accepted,
    Admission,
    CommitConflict,
    Committed,
    ResultRefused,
    Tenant,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    TOPIC,
    TWO_JOBS,
    WITHIN_MS,
    accept,
    admission,
    commit_of,
    lease,
    lease_one,
    loaded,
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
