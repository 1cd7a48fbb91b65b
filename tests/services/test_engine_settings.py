"""Settings changed at run time are obeyed by every replica within two seconds."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.json_value import JsonObject
from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import Risk
from stanchion.core.settings import Settings
from stanchion.ports.bus import Retry
from tests.services.stage import Replica, World, job, under_lease, virtual, workflow

ONE = workflow("one", step=job("work"))
IN_FORCE_S = 2.0


async def _patched(replica: Replica, change: JsonObject) -> None:
    """Change settings, and give them the time they may take."""
    assert isinstance(await replica.services.settings.patch(change, actor="operator"), Settings)
    await asyncio.sleep(IN_FORCE_S)


@pytest.mark.parametrize("is_mute", [False, True])
@virtual
async def test_a_class_that_is_closed_by_an_operator_waits_on_both_replicas(
    world: World, is_mute: bool
) -> None:
    one, two = world.add(shares_calls=False), world.add(shares_calls=False)
    one.bus.is_mute = two.bus.is_mute = is_mute
    await world.define(ONE)
    runs = [await world.start(one, "one") for _ in range(4)]
    jobs = await world.lease(one, "work", max_jobs=4)
    one.locks_away()
    two.locks_away()

    await world.report(one, jobs[0])
    await world.report(two, jobs[1])
    for run_id in runs[:2]:
        assert await world.ended(run_id, within_s=1) == "succeeded"

    await _patched(one, {"policies": {"standard": {"on_lock_error": "fail_closed"}}})
    await world.report(one, jobs[2])
    await world.report(two, jobs[3])
    for run_id in runs[2:]:
        assert await world.ended(run_id, within_s=5) == "running"
    assert one.metric("run_lock_refused_total", risk="standard") > 0
    assert two.metric("run_lock_refused_total", risk="standard") > 0

    await _patched(two, {"policies": {"standard": {"on_lock_error": "fail_open"}}})
    for run_id in runs[2:]:
        assert await world.ended(run_id, within_s=3) == "succeeded"


@virtual
async def test_one_switch_makes_retries_of_a_busy_run_fixed_and_back(world: World) -> None:
    one, two = world.add(), world.add()
    await world.define(under_lease(ONE))
    run_id = await world.start(one, "one")
    await world.locks.acquire(f"run/{run_id}", "another's", ttl_ms=90_000, within_ms=10)
    await world.report(one, *await world.lease(one, "work"))

    def delays() -> list[int]:
        answers = sorted(one.bus.answers + two.bus.answers)
        one.bus.answers.clear()
        two.bus.answers.clear()
        return [
            each.disposition.delay_ms for each in answers if isinstance(each.disposition, Retry)
        ]

    await asyncio.sleep(20)
    before = delays()
    await _patched(one, {"lock_busy": {"kind": "fixed"}})
    delays()
    await asyncio.sleep(20)
    fixed = delays()
    await _patched(two, {"lock_busy": {"kind": "jitter"}})
    delays()
    await asyncio.sleep(20)
    after = delays()
    for jittered in (before, after):
        assert len(set(jittered)) > 10
        assert all(300 <= delay <= 700 for delay in jittered)
    assert len(fixed) >= 38
    assert set(fixed) == {500}


@virtual
async def test_the_delay_after_an_outage_is_a_setting_too(world: World) -> None:
    one = world.add()
    await world.define(replace(ONE, risk=Risk.CRITICAL))
    await _patched(one, {"lock_busy": {"kind": "fixed", "backend_error_delay_ms": 3_000}})
    run_id = await world.start(one, "one")
    leased = await world.lease(one, "work")
    one.locks_away()
    await world.report(one, *leased)
    await asyncio.sleep(30)
    assert {each.disposition for each in one.bus.answers} == {Retry(3_000)}
    assert 9 <= len(one.bus.answers) <= 10
    one.locks_away(is_away=False)
    assert await world.ended(run_id, within_s=5) == "succeeded"


@virtual
async def test_a_workflows_own_policy_goes_before_its_class(world: World) -> None:
    one, two = world.add(shares_calls=False), world.add(shares_calls=False)
    strict = replace(ONE, lock_policy=LeaseOverride(on_lock_error=OnLockError.FAIL_CLOSED))
    await world.define(strict)
    runs = [await world.start(one, "one") for _ in range(2)]
    jobs = await world.lease(one, "work", max_jobs=2)
    one.locks_away()
    two.locks_away()
    # The second replica never saw these runs before.
    await world.report(one, jobs[0])
    await world.report(two, jobs[1])
    for run_id in runs:
        assert await world.ended(run_id, within_s=5) == "running"
    one.locks_away(is_away=False)
    two.locks_away(is_away=False)
    for run_id in runs:
        assert await world.ended(run_id, within_s=5) == "succeeded"
