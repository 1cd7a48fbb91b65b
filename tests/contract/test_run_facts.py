"""Facts about a run: one consistent look at all that it waits for."""

from __future__ import annotations

from msgspec.structs import replace

from stanchion.core.events import Approved, CancelRequested, Rejected, TimerKind
from stanchion.core.model import RunId, StepId
from stanchion.core.why import OpenJob, OpenJobState, RunFacts
from stanchion.core.workflow import ForEachSpec
from stanchion.ports.store import Store
from tests.contract.builders import (
    DELAY,
    FOR_EACH,
    GLOBEX,
    TOPIC,
    WORKER,
    accept,
    advance,
    cancel,
    lease,
    lease_one,
    loaded,
    planned,
    start,
    workflow,
)
from tests.contract.harness import Harness

EACH = ForEachSpec(for_each="${input.items}", topic=TOPIC, input="${item}")
WIDE = planned(workflow("wide", **{f"each-{number}": EACH for number in range(5)}))


async def _facts(store: Store, run_id: RunId) -> RunFacts:
    found = await store.run_facts(run_id)
    assert found is not None
    return found


async def test_there_are_no_facts_about_a_run_that_is_not_there(store: Store) -> None:
    run_id = await start(store)
    assert await store.run_facts(RunId("nonsense")) is None
    assert await store.run_facts(RunId(run_id[:-1] + ("0" if run_id[-1] != "0" else "1"))) is None


async def test_the_run_is_the_same_as_when_it_is_loaded(store: Store) -> None:
    before = await store.now()
    run_id = await start(store)
    facts = await _facts(store, run_id)
    assert facts.run == (await loaded(store, run_id)).run
    assert before <= facts.at <= await store.now()
    assert (facts.inbox, facts.failures, facts.next_try_at) == (0, 0, None)
    assert [each.timer.kind for each in facts.timers] == [TimerKind.RUN_TIMEOUT]
    assert facts.letters == ()


async def test_a_ready_job_has_as_many_ahead_as_are_leased_before_it(store: Store) -> None:
    first, _other, second = (
        await start(store),
        await start(store, tenant=GLOBEX),
        await start(store),
    )
    ready = OpenJob(
        id=(await _facts(store, second)).jobs[0].id,
        step_id=StepId("step"),
        topic=TOPIC,
        state=OpenJobState.READY,
        ahead=1,
    )
    assert (await _facts(store, second)).jobs == (ready,)
    assert [job.ahead for job in (await _facts(store, first)).jobs] == [0]
    await lease(store, max_jobs=2)
    assert (await _facts(store, second)).jobs == (replace(ready, ahead=0),)


async def test_a_leased_job_names_its_worker_fence_and_term(store: Store) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    (job,) = (await _facts(store, run_id)).jobs
    assert job == OpenJob(
        id=leased.job.id,
        step_id=StepId("step"),
        topic=TOPIC,
        state=OpenJobState.LEASED,
        deliveries=1,
        fence=leased.fence,
        worker_id=WORKER,
        expires_at=leased.expires_at,
    )


async def test_items_are_named_and_the_first_ready_one_is_counted(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": [7, 8, 9]})
    leased = await lease_one(store)
    jobs = (await _facts(store, run_id)).jobs
    assert [(job.item, job.state, job.ahead) for job in jobs] == [
        (0, OpenJobState.LEASED, None),
        (1, OpenJobState.READY, 0),
        (2, OpenJobState.READY, None),
    ]
    assert jobs[0].id == leased.job.id


async def test_a_result_that_is_not_applied_is_counted_and_its_job_is_not_open(
    store: Store,
) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    await accept(store, leased)
    facts = await _facts(store, run_id)
    assert (facts.inbox, facts.jobs) == (1, ())
    assert facts.next_try_at is not None
    assert facts.next_try_at <= facts.at
    await store.post(run_id, CancelRequested(), entry_id="cancel")
    assert await store.count_failure(run_id, "cancel") == 1
    assert await store.count_failure(run_id, "cancel") == 2
    facts = await _facts(store, run_id)
    assert (facts.inbox, facts.failures) == (2, 2)


async def test_decisions_that_are_not_applied_are_known_by_their_steps(store: Store) -> None:
    run_id = await start(store)
    step, other = StepId("step"), StepId("other")
    await store.post(run_id, CancelRequested(), entry_id="cancel")
    assert (await _facts(store, run_id)).decided == frozenset()
    await store.post(run_id, Approved(step_id=step), entry_id="approved")
    assert (await _facts(store, run_id)).decided == {step}
    await store.post(run_id, Rejected(step_id=other), entry_id="rejected")
    facts = await _facts(store, run_id)
    assert facts.inbox == 3
    assert facts.decided == {step, other}


async def test_a_timer_is_known_until_it_fires(store: Store, harness: Harness) -> None:
    run_id = await start(store, DELAY)
    facts = await _facts(store, run_id)
    timer, _whole_run = facts.timers
    assert (timer.timer.kind, timer.step_id) == (TimerKind.DELAY, "pause")
    assert facts.at <= timer.due <= facts.at + 1_000
    await harness.pass_time(110)
    await store.fire_timers(limit=10)
    facts = await _facts(store, run_id)
    assert ([each.timer.kind for each in facts.timers], facts.inbox) == (["run_timeout"], 1)


async def test_dead_letters_of_jobs_and_events_are_known(store: Store, harness: Harness) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": [1]})
    await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await store.expire_jobs(limit=10, max_deliveries=1)
    await harness.pass_time(2)  # letters of the same millisecond have no order
    await store.post(run_id, CancelRequested(), entry_id="cancel")
    await store.write_dead_letter(run_id, "cancel", cause="it broke")
    facts = await _facts(store, run_id)
    assert facts.jobs == ()
    of_job, of_event = facts.letters
    assert (of_job.step_id, of_job.item) == ("each", 0)
    assert of_job.cause.startswith("delivered once")
    assert (of_event.step_id, of_event.item, of_event.cause) == (None, None, "it broke")
    assert of_job.at <= of_event.at


async def test_a_finished_run_waits_for_nothing(store: Store) -> None:
    run_id = await start(store)
    await cancel(store, run_id)
    facts = await _facts(store, run_id)
    assert facts.run.status.is_finished
    assert (facts.jobs, facts.timers, facts.inbox, facts.next_try_at) == ((), (), 0, None)


async def test_thousands_of_jobs_are_looked_at_up_to_a_bound(store: Store) -> None:
    # One for-each begins with 250 jobs.
    run_id = await start(store, WIDE, run_input={"items": [0] * 1_100})
    facts = await _facts(store, run_id)
    assert len(facts.jobs) == 1_000
    counted = [job.ahead for job in facts.jobs if job.ahead is not None]
    assert len(counted) == len({job.step_id for job in facts.jobs}), "the first of each step"
    await advance(store, WIDE, run_id, CancelRequested())
