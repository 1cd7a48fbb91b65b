"""What nobody looks after is found: old runs, wrong counts, and what is pending."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.budget import BudgetLimit, BudgetWindow
from stanchion.core.events import CancelRequested
from stanchion.core.model import Risk, TenantId, Topic
from stanchion.core.queue_terms import OnFull
from stanchion.core.retry import Fixed
from stanchion.core.workflow import JobSpec, RetrySpec
from stanchion.ports.locks import LockNote
from stanchion.ports.records import ExpiredJob, JobLease, LostReason, Tenant
from stanchion.services import reconciler, signals
from stanchion.services.engine import Terms
from tests.contract.tampering import tamper_memory
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))
KEPT_MS = 60_000


@virtual
async def test_finished_runs_are_removed_after_their_time_and_not_before(world: World) -> None:
    one = world.add(terms=Terms(retention_ms=KEPT_MS))
    await world.define(ONE)
    world.work(one, "work")
    ended = [await world.start(one, "one") for _ in range(5)]
    for run_id in ended:
        assert await world.ended(run_id) == "succeeded"
    await asyncio.sleep(KEPT_MS / 1000 - 5)
    assert one.metric("runs_purged_total") == 0
    for run_id in ended:
        await world.run(run_id)
    # Ten rounds of at most a second each, then it is gone.
    await asyncio.sleep(5 + 11)
    assert one.metric("runs_purged_total") == 5
    for run_id in ended:
        assert await world.store.load(run_id) is None


@virtual
@pytest.mark.parametrize("verb", ["expire_jobs", "audit_slots", "outbox_size", "list_standings"])
@pytest.mark.parametrize("defect", [False, True])
async def test_a_part_of_a_round_that_fails_each_time_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    verb: str, defect: bool,
) -> None:  # fmt: skip
    one = world.add(terms=Terms(retention_ms=KEPT_MS))
    if defect:

        async def broken(*_given: object, **_named: object) -> None:
            raise RuntimeError("one bad row")

        monkeypatch.setattr(world.store, verb, broken)
    else:
        one.store.always(Fault.ERROR, verb)
    await world.define(ONE)
    world.work(one, "work")
    run_id = await world.start(one, "one")
    assert await world.ended(run_id) == "succeeded"
    note = LockNote(
        "n", "admission/acme", '{"action": "lease.hold", "actor": "kim", "subject": ""}'
    )
    await world.locks.hold("admission/acme", "kim", ttl_ms=1, within_ms=10, note=note)
    if verb != "audit_slots":
        tamper_memory(world.store, ACME, 3)
    await asyncio.sleep(KEPT_MS / 1000 + 25)
    assert one.metric("runs_purged_total") == 1
    assert not await world.locks.notes()
    if verb != "audit_slots":
        assert await world.store.active_runs(ACME) == 0
    lines = [line.getMessage() for line in caplog.records]
    assert "reconcile_failed" in lines
    assert "loop_failed" not in lines


@virtual
async def test_an_unfinished_run_is_never_too_old(world: World) -> None:
    one = world.add(terms=Terms(retention_ms=KEPT_MS))
    await world.define(ONE)
    run_id = await world.start(one, "one")
    await asyncio.sleep(10 * KEPT_MS / 1000)
    assert (await world.run(run_id)).status == "running"
    assert one.metric("runs_purged_total") == 0


@virtual
async def test_a_wrong_count_of_slots_is_corrected_and_counted(world: World) -> None:
    one = world.add()
    await world.define(ONE)
    await world.start(one, "one")
    await asyncio.sleep(20)
    assert one.metric("slot_drift_total") == 0
    tamper_memory(world.store, ACME, 3)
    assert await world.store.active_runs(ACME) == 4
    await asyncio.sleep(6)
    assert await world.store.active_runs(ACME) == 1
    assert one.metric("slot_drift_total") == 1
    await asyncio.sleep(60)
    assert one.metric("slot_drift_total") == 1


@virtual
async def test_what_waits_is_shown(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=20_000, within_ms=10)
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(5)
    assert one.metric("bus_pending_messages") == 1
    assert one.metric("outbox_rows") == 1
    await asyncio.sleep(20)
    assert await world.ended(run_id) == "succeeded"
    assert one.metric("bus_pending_messages") == 0
    assert one.metric("outbox_rows") == 0


@virtual
async def test_a_bus_that_is_away_keeps_nobody_from_reconciling(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one = world.add(terms=Terms(job_lease_ttl_ms=2_000))
    await world.define(ONE)
    await world.start(one, "one")
    assert await world.lease(one, "work")
    one.bus.is_away = True
    assert await world.lease(one, "work", wait_s=5)
    assert "reconcile_failed" not in caplog.messages


@virtual
async def test_what_the_store_counts_is_shown_also_while_the_bus_is_away(world: World) -> None:
    one = world.add()
    await world.define(under_lease(ONE))
    await asyncio.sleep(20)
    one.bus.is_away = True
    run_id = await world.start(one, "one")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=60_000, within_ms=10)
    await world.report(one, *await world.lease(one, "work"))
    await asyncio.sleep(10)
    assert one.metric("outbox_rows") == 1
    assert one.metric("runs_active", tenant=ACME) == 1
    assert one.metric("bus_pending_messages") == 0  # as last seen
    await asyncio.sleep(60)
    assert await world.ended(run_id) == "succeeded"
    await asyncio.sleep(10)
    assert one.metric("outbox_rows") == 0
    assert one.metric("runs_active", tenant=ACME) == 0


@virtual
async def test_one_step_ends_a_bounded_number_of_leases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    expire_jobs = world.store.expire_jobs

    async def expire(*, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        limits.append(limit)
        return await expire_jobs(limit=limit, max_deliveries=max_deliveries)

    monkeypatch.setattr(world.store, "expire_jobs", expire)
    world.add()
    await asyncio.sleep(2)
    assert set(limits) == {500}


@virtual
async def test_a_bug_in_one_round_does_not_stop_the_next(world: World) -> None:
    one = world.add(terms=Terms(job_lease_ttl_ms=2_000))
    await world.define(ONE)
    await world.start(one, "one")
    assert await world.lease(one, "work")
    one.store.script("expire_jobs", Fault.BUG, Fault.BUG)
    assert await world.lease(one, "work", wait_s=10)


@virtual
async def test_an_attempt_that_hangs_is_revoked_its_worker_told_and_the_next_one_sent_out(
    world: World,
) -> None:
    one = world.add()
    spec = JobSpec(
        topic=Topic("work"),
        attempt_timeout_s=5.0,
        retry=RetrySpec(max_attempts=2, backoff=Fixed(delay_ms=100)),
    )
    await world.define(workflow("hangs", step=spec))
    run_id = await world.start(one, "hangs")
    [hung] = await world.lease(one, "work")
    held = JobLease(hung.job.id, hung.fence)
    began = asyncio.get_running_loop().time()
    lost = await one.services.scheduler.revoked("work-worker", [held], within_s=30)
    assert lost == {hung.job.id: LostReason.TIMED_OUT}
    # Five seconds, and at most one more until it is noticed.
    assert 5 <= asyncio.get_running_loop().time() - began < 6.5
    [again] = await world.lease(one, "work", wait_s=5)
    assert again.job.attempt == 2
    await world.report(one, again)
    assert await world.ended(run_id) == "succeeded"
    told = [line.detail for line in (await world.store.timeline(run_id)).items]
    assert "not finished within 5 s of its first lease" in told
    assert one.metric("scheduler_job_lock_abandoned_total") == 0


@virtual
async def test_locks_are_probed_while_classes_are_closed_and_only_then(world: World) -> None:
    one = world.add()

    async def pings() -> int:
        before = one.locks.calls["ping"]
        await asyncio.sleep(30)
        return one.locks.calls["ping"] - before

    idle = await pings()  # the replica's summary says whether the lock store answers
    await one.services.settings.patch(
        {"escalation": {"window_s": 60, "dwell_s": 60}}, actor="operator"
    )
    escalating = one.services.escalating
    for _ in range(120):
        escalating.count(fallbacks=1, duplicates=1)
        await asyncio.sleep(1)
    assert escalating.closes(Risk.STANDARD)
    assert await pings() >= idle + 10
    # The lock store works and nothing collides any more: that is what the probes are for.
    await asyncio.sleep(300)
    assert not escalating.closes(Risk.STANDARD)
    assert await pings() == idle


async def _fill(world: World, replica: Replica, tenant: TenantId, runs: int) -> None:
    """One run has the slot and a budget, the others wait for it."""
    await world.store.put_workflow(tenant, ONE)
    budgets = {"tokens": BudgetLimit(9, BudgetWindow.TOTAL)}
    config = Tenant(max_concurrent_runs=1, on_full=OnFull.QUEUE, budgets=budgets)
    await world.store.put_tenant(tenant, config)
    for _ in range(runs):
        await world.start(replica, "one", tenant=tenant)


@virtual
async def test_a_replica_that_has_begun_again_measures_who_has_runs_or_budgets(
    world: World,
) -> None:
    one = world.add()
    await _fill(world, one, ACME, 3)
    await _fill(world, one, GLOBEX, 1)
    one.kill()
    again = world.add()
    await asyncio.sleep(1)
    shown = {
        tenant: (
            again.metric("runs_active", tenant=tenant),
            again.metric("queue_length", tenant=tenant),
            again.metric("budget_limit", tenant=tenant, budget="tokens"),
        )
        for tenant in (ACME, GLOBEX)
    }
    assert shown == {ACME: (1, 2, 9), GLOBEX: (1, 0, 9)}
    assert again.store.calls["list_standings"] == 1

    # What another replica serves later is learned too, and costs no more.
    initech = TenantId("initech")
    await _fill(world, world.add(), initech, 2)
    await asyncio.sleep(80)
    assert again.metric("queue_length", tenant=initech) == 1
    assert again.store.calls["list_standings"] == 2
    assert again.store.calls["active_runs"] == again.store.calls["queued_runs"] == 0


@virtual
async def test_a_thousand_tenants_are_learned_at_a_time_and_those_with_queues_named_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "LEARNED_MAX", 2)
    monkeypatch.setattr(signals, "TENANTS_MEASURED_MAX", 1)
    one = world.add()
    for tenant, runs in (("a", 1), ("b", 2), ("c", 1)):
        await _fill(world, one, TenantId(tenant), runs)
    one.kill()
    again = world.add()
    await asyncio.sleep(10)
    assert again.store.calls["list_standings"] == 2
    shown = [
        again.services.registry.get_sample_value("stanchion_queue_length", {"tenant": tenant})
        for tenant in "abc"
    ]
    assert shown == [None, 1, 0]


@virtual
async def test_the_counts_of_promoted_runs_begin_at_zero_when_a_tenant_queues(
    world: World,
) -> None:
    # A rate does not see the step from no series to 1, and an alert would take it for no promotion.
    one = world.add()
    await _fill(world, one, ACME, 3)
    await asyncio.sleep(5)
    assert one.metric("queue_length", tenant=ACME) == 2
    assert one.metric("queue_wait_seconds_count", tenant=ACME) == 0


@virtual
@pytest.mark.parametrize("defect", [False, True])
async def test_timers_that_cannot_be_fired_hold_up_no_events(
    world: World, monkeypatch: pytest.MonkeyPatch, defect: bool
) -> None:
    one = world.add()
    if defect:

        async def broken(*, limit: int) -> None:
            raise RuntimeError(f"one of {limit} rows is bad")

        monkeypatch.setattr(world.store, "fire_timers", broken)
    else:
        one.store.always(Fault.ERROR, "fire_timers")
    await world.define(ONE)
    run_id = await world.start(one, "one")
    # As by another replica that died before it applied the event.
    await world.store.post(run_id, CancelRequested(actor="kim", reason=None), entry_id="cancel")
    await asyncio.sleep(5)
    assert (await world.run(run_id)).status == "cancelled"
