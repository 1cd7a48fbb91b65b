"""Results: taken once, from the holder of the job's present lease, and then durable."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from msgspec.structs import replace

from stanchion.core.events import AttemptFailed, AttemptSucceeded
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Failure, JobId, TenantId
from stanchion.ports.records import (
    Accepted,
    InboxEntry,
    JobState,
    JobView,
    RejectedCode,
    Result,
    ResultRefused,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    STRANGE_VALUES,
    WORKER,
    accept,
    advance,
    assert_same,
    cancel,
    lease,
    lease_one,
    loaded,
    result_of,
    start,
)
from tests.contract.harness import LONG_MS, Harness


async def test_an_accepted_result_lies_in_the_runs_inbox(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    assert await accept(store, leased, {"n": [1, None, 2.5, "ü"]}) == Accepted(
        leased.job.id, run_id
    )
    succeeded = AttemptSucceeded(
        job_id=leased.job.id,
        step_id=leased.job.step_id,
        output={"n": [1, None, 2.5, "ü"]},
        actor=WORKER,
    )
    (entry,) = (await loaded(store, run_id)).inbox
    assert entry == InboxEntry(f"result:{leased.job.id}#{leased.fence}", succeeded)


@pytest.mark.parametrize("value", STRANGE_VALUES, ids=lambda value: repr(value)[:30])
async def test_a_value_comes_back_as_it_was_on_all_its_ways(store: Store, value: JsonValue) -> None:
    run_id = await start(store, run_input={"say": value})
    leased = await lease_one(store)
    assert_same(leased.job.input, {"said": value})
    await accept(store, leased, value)
    (entry,) = (await loaded(store, run_id)).inbox
    assert isinstance(entry.event, AttemptSucceeded)
    assert_same(entry.event.output, value)
    await advance(store, ONE_JOB, run_id)
    run = (await loaded(store, run_id)).run
    assert_same(run.input, {"say": value})
    assert_same(run.output, {"step": value})


async def test_an_error_is_a_result_too(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    failure = Failure("boom", "it did not work")
    await store.accept([replace(result_of(leased), output=None, error=failure, final=True)])
    (entry,) = (await loaded(store, run_id)).inbox
    assert entry.event == AttemptFailed(
        job_id=leased.job.id,
        step_id=leased.job.step_id,
        error=failure,
        final=True,
        actor=WORKER,
    )


async def test_an_error_is_not_final_unless_it_says_so(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await store.accept([replace(result_of(leased), error=Failure("boom", "again, please"))])
    (entry,) = (await loaded(store, run_id)).inbox
    assert isinstance(entry.event, AttemptFailed)
    assert entry.event.final is False


async def test_a_result_of_an_item_names_the_item(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    leased = await lease(store, max_jobs=2)
    await accept(store, leased[1])
    (entry,) = (await loaded(store, run_id)).inbox
    assert isinstance(entry.event, AttemptSucceeded)
    assert entry.event.item == 1


async def test_an_accepted_result_ends_the_jobs_lease(store: Store) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=0)
    await accept(store, leased)
    view = await store.job(leased.job.id)
    assert view == JobView(leased.job, JobState.FINISHED, leased.fence, 1, WORKER)
    assert await store.expire_jobs(limit=10, max_deliveries=5) == ()
    assert await lease(store) == ()


async def test_a_finished_job_and_its_event_name_the_worker_who_handed_the_result_in(
    store: Store,
) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await store.accept([replace(result_of(leased), worker_id="worker-1b")])
    view = await store.job(leased.job.id)
    assert view is not None
    assert view.worker_id == "worker-1b"
    (entry,) = (await loaded(store, run_id)).inbox
    assert entry.event.actor == "worker-1b"


async def test_an_accepted_result_has_an_outbox_row(store: Store) -> None:
    run_id = await start(store)
    await accept(store, await lease_one(store))
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.run_id == run_id


async def test_the_row_of_a_result_may_be_due_later(store: Store, harness: Harness) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await store.accept([result_of(leased)], row_due_in_ms=harness.short_ms)
    assert await store.outbox_size() == 1
    assert await store.take_outbox(limit=10, hold_ms=1_000) == ()
    await harness.pass_time(harness.short_ms)
    assert [row.run_id for row in await store.take_outbox(limit=10, hold_ms=1_000)] == [run_id]


async def test_a_later_row_does_not_put_off_an_earlier_one(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    leased = await lease(store, max_jobs=2)
    await store.accept([result_of(leased[0])], row_due_in_ms=0)
    await store.accept([result_of(leased[1])], row_due_in_ms=LONG_MS)
    assert [row.run_id for row in await store.take_outbox(limit=10, hold_ms=1_000)] == [run_id]


async def test_an_earlier_row_hastens_a_later_one(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    leased = await lease(store, max_jobs=2)
    await store.accept([result_of(leased[0])], row_due_in_ms=LONG_MS)
    await store.accept([result_of(leased[1])], row_due_in_ms=0)
    assert [row.run_id for row in await store.take_outbox(limit=10, hold_ms=1_000)] == [run_id]


async def test_the_same_result_sent_again_is_accepted_without_effect(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await accept(store, leased)
    assert await accept(store, leased) == Accepted(leased.job.id, run_id, repeated=True)
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_a_repeated_result_puts_nothing_back_after_it_was_applied(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await accept(store, leased)
    await advance(store, ONE_JOB, run_id)
    assert await accept(store, leased) == Accepted(leased.job.id, run_id, repeated=True)
    assert (await loaded(store, run_id)).inbox == ()
    assert await store.outbox_size() == 0


async def test_the_same_result_many_times_at_once_is_taken_once(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    answers = await asyncio.gather(*(accept(store, leased) for _ in range(30)))
    assert Counter(answers) == {
        Accepted(leased.job.id, run_id): 1,
        Accepted(leased.job.id, run_id, repeated=True): 29,
    }
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_a_result_for_an_unknown_job_is_rejected(store: Store) -> None:
    run_id = await start(store)
    for odd in ("", "nonsense", f"{run_id}:step@2", run_id):
        result = Result(job_id=JobId(odd), fence=1, worker_id=WORKER)
        (answer,) = await store.accept([result])
        assert answer == ResultRefused(JobId(odd), RejectedCode.UNKNOWN_JOB)


async def test_a_result_under_a_stale_fence_is_rejected(store: Store, harness: Harness) -> None:
    run_id = await start(store)
    first = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    second = await lease_one(store)
    assert await accept(store, first) == ResultRefused(first.job.id, RejectedCode.STALE_FENCE)
    assert (await loaded(store, run_id)).inbox == ()
    assert await accept(store, second) == Accepted(second.job.id, run_id)


async def test_a_result_under_a_fence_that_was_never_given_is_rejected(store: Store) -> None:
    await start(store)
    leased = await lease_one(store)
    for fence in (leased.fence + 1, leased.fence - 1, 0):
        (answer,) = await store.accept([replace(result_of(leased), fence=fence)])
        assert answer == ResultRefused(leased.job.id, RejectedCode.STALE_FENCE)


async def test_a_result_for_a_job_that_nobody_leased_is_rejected(store: Store) -> None:
    run_id = await start(store)
    job_id = JobId(f"{run_id}:step@1")
    (answer,) = await store.accept([Result(job_id=job_id, fence=0, worker_id=WORKER)])
    assert answer == ResultRefused(job_id, RejectedCode.STALE_FENCE)


async def test_a_result_is_taken_after_the_deadline_until_the_expiry_is_noticed(
    store: Store, harness: Harness
) -> None:
    run_id = await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await accept(store, leased) == Accepted(leased.job.id, run_id)


async def test_a_result_after_the_expiry_was_noticed_is_rejected(
    store: Store, harness: Harness
) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=5)
    assert await accept(store, leased) == ResultRefused(leased.job.id, RejectedCode.STALE_FENCE)


async def test_a_result_for_a_finished_job_under_another_fence_is_rejected(store: Store) -> None:
    await start(store)
    first = await lease_one(store, ttl_ms=0)
    await store.expire_jobs(limit=10, max_deliveries=5)
    await accept(store, await lease_one(store))
    assert await accept(store, first) == ResultRefused(first.job.id, RejectedCode.ALREADY_FINISHED)


async def test_a_result_for_a_revoked_job_is_rejected(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await cancel(store, run_id)
    assert await accept(store, leased) == ResultRefused(leased.job.id, RejectedCode.STALE_FENCE)
    assert (await loaded(store, run_id)).inbox == ()


async def test_a_result_for_a_dead_job_is_rejected(store: Store) -> None:
    await start(store)
    leased = await lease_one(store, ttl_ms=0)
    await store.expire_jobs(limit=10, max_deliveries=1)
    assert await accept(store, leased) == ResultRefused(leased.job.id, RejectedCode.STALE_FENCE)


async def test_results_are_answered_each_on_its_own_and_in_order(store: Store) -> None:
    first = await start(store, FOR_EACH, run_input={"items": ["a", "b"]})
    second = await start(store, tenant=GLOBEX)
    leased = {each.job.id: each for each in await lease(store, max_jobs=3)}
    a, b, other = (
        leased[JobId(name)]
        for name in (f"{first}:each[0]@1", f"{first}:each[1]@1", f"{second}:step@1")
    )
    unknown = Result(job_id=JobId("nonsense"), fence=1, worker_id=WORKER)
    stale = replace(result_of(other), fence=0)
    sent = [result_of(b), unknown, result_of(other), stale, result_of(a), result_of(b)]
    assert await store.accept(sent) == (
        Accepted(b.job.id, first),
        ResultRefused(JobId("nonsense"), RejectedCode.UNKNOWN_JOB),
        Accepted(other.job.id, second),
        ResultRefused(other.job.id, RejectedCode.ALREADY_FINISHED),
        Accepted(a.job.id, first),
        Accepted(b.job.id, first, repeated=True),
    )


async def test_several_results_for_one_run_lie_in_its_inbox_in_the_order_of_arrival(
    store: Store,
) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(12))})
    leased = await lease(store, max_jobs=12)
    sent = [*leased[6:], *reversed(leased[:6])]
    await store.accept([result_of(each) for each in sent])
    entries = (await loaded(store, run_id)).inbox
    assert [entry.id for entry in entries] == [
        f"result:{each.job.id}#{each.fence}" for each in sent
    ]
    (row,) = await store.take_outbox(limit=10, hold_ms=1_000)
    assert row.number == 12


async def test_many_results_of_many_tenants_are_answered_in_order(store: Store) -> None:
    for number in range(10):
        tenant = TenantId(f"tenant-{number}")
        await start(store, FOR_EACH, run_input={"items": list(range(10))}, tenant=tenant)
    leased = await lease(store, max_jobs=100)
    assert len(leased) == 100
    sent = [leased[(7 * place) % 100] for place in range(100)]
    answers = await store.accept([result_of(each) for each in sent])
    assert answers == tuple(Accepted(each.job.id, each.job.run_id) for each in sent)
    assert await store.outbox_size() == 10


async def test_no_results_have_no_answers(store: Store) -> None:
    assert await store.accept([]) == ()


async def test_a_result_for_another_tenants_job_is_for_an_unknown_job(store: Store) -> None:
    for tenant in (ACME, GLOBEX, GLOBEX):
        await start(store, tenant=tenant)
    (mine,) = await lease(store, tenant=ACME)
    foreign, finished = await lease(store, max_jobs=2, tenant=GLOBEX)
    await accept(store, finished)
    ghost = replace(result_of(mine), job_id=JobId(f"{mine.job.run_id}:ghost@1"))
    odd = replace(ghost, job_id=JobId("nonsense"))
    sent = [odd, result_of(foreign), ghost, result_of(mine), result_of(finished)]
    answers = await store.accept(sent, tenant=ACME)
    unknown = [ResultRefused(each.job_id, RejectedCode.UNKNOWN_JOB) for each in sent]
    assert answers == (*unknown[:3], Accepted(mine.job.id, mine.job.run_id), unknown[4])
    assert (await loaded(store, foreign.job.run_id)).inbox == ()
    assert await store.accept([result_of(foreign)], tenant=GLOBEX) == (
        Accepted(foreign.job.id, foreign.job.run_id),
    )


async def test_numbers_that_a_decoder_reads_slowly_do_not_hold_up_the_process(store: Store) -> None:
    run_id = await start(store)
    numbers: JsonValue = [1e300] * 40_000
    await accept(store, await lease_one(store), numbers)
    began_s = time.process_time()
    found = await loaded(store, run_id)
    assert time.process_time() - began_s < EXTREME_S_MAX
    (entry,) = found.inbox
    assert isinstance(entry.event, AttemptSucceeded)
    assert entry.event.output == numbers


EXTREME_S_MAX = 0.2
"""It took 0.6 s."""
