"""What a hold does, for every way in which the lock store can answer, in every risk class."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import pytest

from stanchion.core.lease import (
    DEFAULT_POLICIES,
    JOB_POLICY,
    JOB_TERMS,
    FenceCause,
    LeaseLost,
    LeasePolicy,
    OnLockError,
    OnRenewalLost,
)
from stanchion.core.model import Risk
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.leasing import LeaseContended, LeaseRefused, Leasing, Outcome
from stanchion.services.renewal import Lease, LockHealth
from stanchion.sim import loop
from tests.services.faulty_locks import Fault, FaultyLocks
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time

OPEN = (Risk.LOW, Risk.STANDARD)
CLOSED = (Risk.HIGH, Risk.CRITICAL)
ALL = (*OPEN, *CLOSED)
NAME = "run/1"


class Bench:
    """One lock store and as many processes' worth of leasing as a test wants."""

    def __init__(self) -> None:
        self.clock = loop.LoopClock()
        self.locks = FaultyLocks(self.clock)
        self.told: list[LeaseEvent] = []
        self._seeds = count()
        self.leasing = self.another()

    def another(self) -> Leasing:
        return Leasing(
            self.locks,
            clock=self.clock,
            entropy=SeededEntropy(next(self._seeds)),
            tell=self.told.append,
        )

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.told]

    async def outcome(self, risk: Risk, *, escalated: bool = False) -> Outcome:
        """Hold for a moment, and say how it went."""
        policy = DEFAULT_POLICIES[risk]
        async with self.leasing.hold(
            NAME, risk=risk, policy=policy, escalated=escalated
        ) as outcome:
            return outcome


virtual = in_virtual_time(Bench)


def policy(on_lock_error: str, on_renewal_lost: str, failures: int = 3) -> LeasePolicy:
    return LeasePolicy(OnLockError(on_lock_error), OnRenewalLost(on_renewal_lost), failures)


# ── Acquiring ────────────────────────────────────────────────────────────────────────────────────

ACQUIRE_FAULTS = [Fault.ERROR, Fault.HANG, Fault.LOST_REPLY, Fault.LATE, Fault.BUG]


@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_a_free_name_is_held_and_given_back(bench: Bench, risk: Risk) -> None:
    async with bench.leasing.hold(NAME, risk=risk, policy=DEFAULT_POLICIES[risk]) as lease:
        assert isinstance(lease, Lease)
        seen = await bench.locks.inspect(NAME)
        assert seen is not None
        assert (lease.fence, lease.is_degraded, lease.lost) == (seen.fence, False, None)
        assert seen.expires_in_ms == 30_000
    assert await bench.locks.inspect(NAME) is None
    assert bench.names() == ["Acquired", "Released"]


@pytest.mark.parametrize("fault", ACQUIRE_FAULTS)
@pytest.mark.parametrize("risk", OPEN)
@virtual
async def test_a_lock_error_fails_open_in_the_mild_classes(
    bench: Bench, risk: Risk, fault: Fault
) -> None:
    bench.locks.script("acquire", fault)
    outcome = await bench.outcome(risk)
    assert isinstance(outcome, Lease)
    assert (outcome.is_degraded, outcome.fence, outcome.lost) == (True, None, None)
    [event] = bench.told
    assert isinstance(event, told.Fallback)
    assert (event.name, event.risk) == (NAME, risk)
    assert (event.error == "no answer in time") is (fault in {Fault.HANG, Fault.LOST_REPLY})


@pytest.mark.parametrize("fault", ACQUIRE_FAULTS)
@pytest.mark.parametrize("risk", CLOSED)
@virtual
async def test_a_lock_error_fails_closed_in_the_strict_classes(
    bench: Bench, risk: Risk, fault: Fault
) -> None:
    bench.locks.script("acquire", fault)
    assert isinstance(await bench.outcome(risk), LeaseRefused)
    [event] = bench.told
    assert isinstance(event, told.Refused)
    assert event.escalated is False


@pytest.mark.parametrize("risk", OPEN)
@virtual
async def test_escalation_closes_what_policy_would_leave_open(bench: Bench, risk: Risk) -> None:
    bench.locks.script("acquire", Fault.ERROR)
    assert isinstance(await bench.outcome(risk, escalated=True), LeaseRefused)
    [event] = bench.told
    assert isinstance(event, told.Refused)
    assert event.escalated is True


@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_a_name_that_another_process_holds_is_skipped(bench: Bench, risk: Risk) -> None:
    await bench.locks.real.acquire(NAME, "another's", ttl_ms=5_000, within_ms=10)
    assert await bench.outcome(risk) == LeaseContended(5_000)
    assert bench.names() == ["Contended"]
    assert (await bench.locks.inspect(NAME)) is not None


@virtual
async def test_a_name_that_this_process_holds_is_skipped_without_asking_the_store(
    bench: Bench,
) -> None:
    async with bench.leasing.hold(NAME, risk=Risk.LOW, policy=DEFAULT_POLICIES[Risk.LOW]) as first:
        assert isinstance(first, Lease)
        assert await bench.outcome(Risk.LOW) == LeaseContended(None)
    assert bench.locks.calls["acquire"] == 1
    assert isinstance(await bench.outcome(Risk.LOW), Lease)


@virtual
async def test_two_processes_never_hold_the_same_name(bench: Bench) -> None:
    other = bench.another()
    strict = DEFAULT_POLICIES[Risk.HIGH]
    async with (
        bench.leasing.hold(NAME, risk=Risk.HIGH, policy=strict) as one,
        other.hold(NAME, risk=Risk.HIGH, policy=strict) as two,
    ):
        assert isinstance(one, Lease)
        assert isinstance(two, LeaseContended)
    async with other.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]) as three:
        assert isinstance(three, Lease)
        assert three.fence is not None
        assert one.fence is not None
        assert three.fence > one.fence


@virtual
async def test_without_a_lock_store_the_mutex_alone_works_and_is_no_fallback(bench: Bench) -> None:
    alone = Leasing(None, clock=bench.clock, entropy=SeededEntropy(1), tell=bench.told.append)
    async with (
        alone.hold(NAME, risk=Risk.CRITICAL, policy=policy("fail_closed", "fence")) as one,
        alone.hold(NAME, risk=Risk.LOW, policy=policy("fail_open", "fence")) as two,
    ):
        assert isinstance(one, Lease)
        assert (one.fence, one.is_degraded, one.lost) == (None, False, None)
        assert isinstance(two, LeaseContended)
    await alone.close()
    assert bench.names() == ["Contended"]


@virtual
async def test_a_fence_is_above_the_floor_that_the_caller_names(bench: Bench) -> None:
    floor = 2**60
    async with bench.leasing.hold(
        NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH], floor=floor
    ) as lease:
        assert isinstance(lease, Lease)
        assert lease.fence == floor + 1


# ── A lock store that is away ────────────────────────────────────────────────────────────────────


@virtual
async def test_a_store_that_hangs_costs_one_bounded_wait_and_then_nothing(bench: Bench) -> None:
    bench.locks.always(Fault.HANG, "acquire", "ping")
    before = bench.clock.moment()
    await bench.outcome(Risk.LOW)
    assert bench.clock.moment() - before == 2_000
    for _ in range(50):
        await bench.outcome(Risk.LOW)
    assert bench.clock.moment() - before == 2_000
    assert bench.locks.calls["acquire"] == 1
    assert bench.names() == ["Fallback"] * 51


@virtual
async def test_the_store_is_asked_again_once_a_probe_has_succeeded(bench: Bench) -> None:
    bench.locks.always(Fault.ERROR, "acquire", "ping")
    await bench.outcome(Risk.LOW)
    await asyncio.sleep(30)
    assert bench.locks.calls["ping"] == 29
    bench.locks.always(Fault.NONE, "acquire", "ping")
    await bench.outcome(Risk.LOW)
    assert bench.names() == ["Fallback"] * 2
    await asyncio.sleep(1.5)
    before = len(bench.told)
    lease = await bench.outcome(Risk.LOW)
    assert isinstance(lease, Lease)
    assert not lease.is_degraded
    assert "Fallback" not in bench.names()[before:]


@virtual
async def test_a_lease_whose_grant_was_lost_is_let_go_when_the_store_is_back(bench: Bench) -> None:
    bench.locks.script("acquire", Fault.LOST_REPLY)
    await bench.outcome(Risk.LOW)
    assert await bench.locks.inspect(NAME) is not None
    await asyncio.sleep(1.5)
    assert await bench.locks.inspect(NAME) is None


@virtual
async def test_of_many_lost_grants_of_one_name_the_one_that_was_made_is_let_go(
    bench: Bench,
) -> None:
    locks = FaultyLocks(bench.clock)
    health = LockHealth(locks, bench.clock)
    await locks.real.acquire(NAME, "granted", ttl_ms=30_000, within_ms=1_000)
    for token in ("granted", "refused", "refused too"):
        health.orphaned(NAME, token)
    await bench.clock.sleep(1)
    assert await locks.real.inspect(NAME) is None
    await health.close()


@virtual
async def test_a_caller_that_leaves_while_asking_leaves_no_lease_behind(bench: Bench) -> None:
    bench.locks.script("acquire", Fault.LOST_REPLY)
    caller = asyncio.create_task(bench.outcome(Risk.HIGH))
    await asyncio.sleep(0.1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0.1)
    assert await bench.locks.inspect(NAME) is None
    assert isinstance(await bench.outcome(Risk.HIGH), Lease)


# ── Renewing ─────────────────────────────────────────────────────────────────────────────────────


class Body:
    """Work that takes a while, and remembers how it ended."""

    def __init__(self, bench: Bench, lease_policy: LeasePolicy, risk: Risk = Risk.HIGH) -> None:
        self.bench = bench
        self.policy = lease_policy
        self.risk = risk
        self.lease: Lease | None = None
        self.cause_seen: FenceCause | None = None
        self.stopped_at: int | None = None

    async def work(self, seconds: float) -> None:
        async with self.bench.leasing.hold(NAME, risk=self.risk, policy=self.policy) as lease:
            assert isinstance(lease, Lease)
            self.lease = lease
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cause_seen = lease.lost
                raise
            finally:
                self.stopped_at = self.bench.clock.moment()


@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_renewal_keeps_a_lease_alive_past_its_first_term(bench: Bench, risk: Risk) -> None:
    body = Body(bench, DEFAULT_POLICIES[risk], risk)
    task = asyncio.create_task(body.work(100))
    await asyncio.sleep(95)
    assert await bench.locks.inspect(NAME) is not None
    assert bench.locks.calls["renew"] == 9
    await task
    assert bench.names() == ["Acquired", "Released"]


@virtual
async def test_renewal_stops_when_the_work_ends(bench: Bench) -> None:
    await Body(bench, DEFAULT_POLICIES[Risk.HIGH]).work(12)
    await asyncio.sleep(100)
    assert bench.locks.calls["renew"] == 1


@virtual
async def test_renewal_stops_when_the_work_is_cancelled_and_the_lease_is_given_back(
    bench: Bench,
) -> None:
    task = asyncio.create_task(Body(bench, DEFAULT_POLICIES[Risk.HIGH]).work(1_000))
    await asyncio.sleep(12)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(100)
    assert bench.locks.calls["renew"] == 1
    assert bench.names() == ["Acquired", "Released"]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.HANG, Fault.LOST_REPLY, Fault.BUG])
@virtual
async def test_repeated_renewal_failures_fence_the_work_before_the_lease_can_expire(
    bench: Bench, fault: Fault
) -> None:
    bench.locks.always(fault, "renew")
    body = Body(bench, policy("fail_closed", "fence"))
    with pytest.raises(LeaseLost) as lost:
        await body.work(1_000)
    assert lost.value.cause is FenceCause.RENEWAL_FAILURES
    assert body.cause_seen is FenceCause.RENEWAL_FAILURES
    assert body.stopped_at is not None
    assert body.stopped_at < 29_700
    assert bench.locks.calls == {"acquire": 1, "renew": 3, "ping": bench.locks.calls["ping"]}
    assert bench.names() == ["Acquired", "RenewFailed", "RenewFailed", "RenewFailed", "Abandoned"]


@virtual
async def test_a_fenced_holder_never_releases(bench: Bench) -> None:
    bench.locks.always(Fault.ERROR, "renew")
    with pytest.raises(LeaseLost):
        await Body(bench, policy("fail_closed", "fence")).work(1_000)
    assert await bench.locks.inspect(NAME) is not None
    await asyncio.sleep(60)  # The lock store answers probes: an orphaned lease would be released.
    assert bench.locks.calls["release"] == 0


@pytest.mark.parametrize("seconds", [24, 29])
@pytest.mark.parametrize("risk", OPEN)
@virtual
async def test_a_holder_that_lost_its_trust_never_releases_also_when_the_store_is_back(
    bench: Bench, risk: Risk, seconds: float
) -> None:
    bench.locks.always(Fault.ERROR, "renew", "ping")
    task = asyncio.create_task(Body(bench, DEFAULT_POLICIES[risk], risk).work(seconds + 6))
    await asyncio.sleep(seconds)
    bench.locks.always(Fault.NONE, "ping")  # a probe finds the store; the renewals still fail
    await task
    await asyncio.sleep(10)
    assert "TrustLost" in bench.names()
    assert bench.locks.calls["release"] == 0
    assert not {"Released", "ReleaseFailed"} & set(bench.names())


@virtual
async def test_critical_work_is_fenced_by_the_first_failure(bench: Bench) -> None:
    bench.locks.script("renew", Fault.ERROR)
    with pytest.raises(LeaseLost):
        await Body(bench, DEFAULT_POLICIES[Risk.CRITICAL], Risk.CRITICAL).work(1_000)
    assert bench.locks.calls["renew"] == 1


@virtual
async def test_a_job_lease_makes_exactly_three_attempts_and_releases_nothing(bench: Bench) -> None:
    bench.leasing = Leasing(
        bench.locks,
        clock=bench.clock,
        entropy=SeededEntropy(7),
        terms=JOB_TERMS,
        tell=bench.told.append,
    )
    bench.locks.always(Fault.ERROR, "renew")
    body = Body(bench, JOB_POLICY)
    with pytest.raises(LeaseLost):
        await body.work(1_000)
    assert (bench.locks.calls["renew"], bench.locks.calls["release"]) == (3, 0)
    assert body.stopped_at is not None
    assert body.stopped_at < 60_000


@virtual
async def test_a_success_in_between_resets_the_count(bench: Bench) -> None:
    bad, good = Fault.ERROR, Fault.NONE
    bench.locks.script("renew", bad, bad, good, bad, bad, good)
    await Body(bench, policy("fail_closed", "fence")).work(60)
    assert "Abandoned" not in bench.names()
    assert [event.failures for event in bench.told if isinstance(event, told.RenewFailed)] == [
        1,
        2,
        1,
        2,
    ]


@pytest.mark.parametrize("risk", OPEN)
@virtual
async def test_in_the_mild_classes_work_goes_on_untrusted_and_the_commit_decides(
    bench: Bench, risk: Risk
) -> None:
    bench.locks.always(Fault.ERROR, "renew")
    body = Body(bench, DEFAULT_POLICIES[risk], risk)
    await body.work(100)
    assert body.lease is not None
    assert body.lease.lost is FenceCause.RENEWAL_FAILURES
    assert bench.names().count("TrustLost") == 1
    assert "Abandoned" not in bench.names()
    assert bench.locks.calls["release"] == 0


@virtual
async def test_trust_returns_when_the_store_answers_in_time(bench: Bench) -> None:
    bench.locks.script("renew", *[Fault.ERROR] * 3)
    body = Body(bench, DEFAULT_POLICIES[Risk.LOW], Risk.LOW)
    await body.work(60)
    assert body.lease is not None
    assert body.lease.lost is None
    assert bench.names()[-1] == "Released"


@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_not_owned_fences_at_once_in_every_class(bench: Bench, risk: Risk) -> None:
    bench.locks.script("renew", Fault.NOT_OWNED)
    body = Body(bench, DEFAULT_POLICIES[risk], risk)
    with pytest.raises(LeaseLost) as lost:
        await body.work(1_000)
    assert lost.value.cause is FenceCause.TAKEN
    assert (body.stopped_at, bench.locks.calls["renew"]) == (10_000, 1)
    assert bench.names() == ["Acquired", "Abandoned"]


@virtual
async def test_the_deadline_fences_even_if_the_count_allows_more(bench: Bench) -> None:
    bench.locks.always(Fault.ERROR, "renew")
    body = Body(bench, policy("fail_closed", "fence", failures=100))
    with pytest.raises(LeaseLost) as lost:
        await body.work(1_000)
    assert lost.value.cause is FenceCause.DEADLINE
    assert body.stopped_at == 30_000 * 99 // 100 - 500


@virtual
async def test_a_slow_store_is_no_reason_to_stop(bench: Bench) -> None:
    bench.locks.always(Fault.SLOW, "renew")
    await Body(bench, DEFAULT_POLICIES[Risk.CRITICAL], Risk.CRITICAL).work(100)
    assert bench.names() == ["Acquired", "Released"]


@virtual
async def test_expiry_lets_another_in(bench: Bench) -> None:
    bench.locks.always(Fault.ERROR, "renew")
    body = Body(bench, policy("fail_closed", "fence"))
    with pytest.raises(LeaseLost):
        await body.work(1_000)
    await asyncio.sleep(30 - bench.clock.moment() / 1000)
    async with bench.another().hold(
        NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]
    ) as lease:
        assert isinstance(lease, Lease)
        assert body.lease is not None
        assert lease.fence is not None
        assert body.lease.fence is not None
        assert lease.fence > body.lease.fence


# ── The body's own errors and other people's cancellations ──────────────────────────────────────


@virtual
async def test_an_error_of_the_body_passes_through_untouched(bench: Bench) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            raise error
    assert caught.value is error
    assert bench.names() == ["Acquired", "Released"]


@virtual
async def test_an_error_while_unwinding_from_a_fence_is_the_bodys_own(bench: Bench) -> None:
    async def body() -> None:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            try:
                await asyncio.sleep(1_000)
            except asyncio.CancelledError:
                raise ValueError("while cleaning up") from None

    bench.locks.script("renew", Fault.NOT_OWNED)
    with pytest.raises(ValueError, match="while cleaning up"):
        await body()
    # The cancellation was taken with it: nothing later is hit by it.
    await asyncio.sleep(1)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]  # we run in one


@virtual
async def test_a_body_that_swallows_the_cancellation_still_ends_in_lease_lost(bench: Bench) -> None:
    async def body() -> None:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1_000)

    bench.locks.script("renew", Fault.NOT_OWNED)
    with pytest.raises(LeaseLost):
        await body()
    await asyncio.sleep(1)


@virtual
async def test_a_cancellation_by_somebody_else_stays_one(bench: Bench) -> None:
    bench.locks.script("renew", Fault.NOT_OWNED)
    task = asyncio.create_task(Body(bench, DEFAULT_POLICIES[Risk.HIGH]).work(1_000))
    await asyncio.sleep(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual
async def test_a_cancellation_that_a_body_has_not_met_yet_is_raised_by_the_hold(
    bench: Bench,
) -> None:
    async def body() -> None:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1_000)
            # As a callback of the body may do: it is raised at the next await, which is not here.
            asyncio.current_task().cancel()  # type: ignore[union-attr]  # we run in one

    bench.locks.script("renew", Fault.NOT_OWNED)
    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual
async def test_a_time_limit_around_a_hold_is_still_a_time_limit(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(15):
            await Body(bench, DEFAULT_POLICIES[Risk.HIGH]).work(1_000)
    assert bench.names()[-1] == "Released"


# ── Releasing ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_a_failed_release_is_tried_once_more(bench: Bench, risk: Risk) -> None:
    bench.locks.script("release", Fault.ERROR)
    await bench.outcome(risk)
    assert bench.locks.calls["release"] == 2
    assert bench.names() == ["Acquired", "Released"]
    assert await bench.locks.inspect(NAME) is None


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.HANG, Fault.BUG])
@pytest.mark.parametrize("risk", ALL)
@virtual
async def test_after_two_failures_the_lease_is_left_to_expire_and_the_work_stays_done(
    bench: Bench, risk: Risk, fault: Fault
) -> None:
    bench.locks.script("release", fault, fault)
    assert isinstance(await bench.outcome(risk), Lease)
    assert bench.locks.calls["release"] == 2
    assert bench.names() == ["Acquired", "ReleaseFailed"]
    assert bench.clock.moment() <= 2_000
    await asyncio.sleep(30)
    assert await bench.locks.inspect(NAME) is None


@virtual
async def test_a_lease_that_ran_out_meanwhile_is_not_counted_as_released(bench: Bench) -> None:
    bench.locks.script("release", Fault.NOT_OWNED)
    await bench.outcome(Risk.LOW)
    assert bench.names() == ["Acquired", "ReleaseFailed"]
    assert bench.locks.calls["release"] == 1


@virtual
async def test_a_caller_that_leaves_does_not_cut_the_release_short(bench: Bench) -> None:
    bench.locks.script("release", Fault.SLOW)
    task = asyncio.create_task(bench.outcome(Risk.HIGH))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(1)
    assert await bench.locks.inspect(NAME) is None
    assert bench.names() == ["Acquired", "Released"]


@virtual
async def test_while_the_store_is_away_a_release_waits_for_nobody(bench: Bench) -> None:
    bench.locks.script("renew", Fault.ERROR)
    bench.locks.always(Fault.ERROR, "ping")
    await Body(bench, policy("fail_open", "continue")).work(10.5)
    assert bench.locks.calls["release"] == 0
    assert bench.names()[-1] == "ReleaseFailed"
    bench.locks.always(Fault.NONE, "ping")
    await asyncio.sleep(2)
    assert await bench.locks.inspect(NAME) is None


# ── What must not decide who holds what ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", ["ping", "release"])
@virtual
async def test_a_bug_in_an_adapter_does_not_refuse_for_ever(bench: Bench, verb: str) -> None:
    bench.locks.script("acquire", Fault.LOST_REPLY)
    bench.locks.script(verb, Fault.BUG)
    await bench.outcome(Risk.HIGH)
    await asyncio.sleep(35)
    assert isinstance(await bench.outcome(Risk.HIGH), Lease)


@virtual
async def test_a_lease_that_cannot_be_tidied_up_keeps_nobody_out(bench: Bench) -> None:
    bench.locks.script("acquire", Fault.LOST_REPLY)
    bench.locks.always(Fault.ERROR, "release")
    await bench.outcome(Risk.HIGH)
    await asyncio.sleep(2)
    async with bench.leasing.hold(
        "run/another", risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]
    ) as lease:
        assert isinstance(lease, Lease)


@virtual
async def test_a_hook_that_fails_changes_nothing(bench: Bench) -> None:
    def broken(event: LeaseEvent) -> None:
        bench.told.append(event)
        raise ValueError("no metrics today")

    leasing = Leasing(bench.locks, clock=bench.clock, entropy=SeededEntropy(9), tell=broken)
    bench.leasing = leasing
    bench.locks.always(Fault.ERROR, "renew")
    body = Body(bench, policy("fail_closed", "fence"))
    with pytest.raises(LeaseLost):
        await body.work(1_000)
    assert body.stopped_at is not None
    assert body.stopped_at < 29_700
    assert bench.names()[-1] == "Abandoned"


@virtual
async def test_a_body_that_never_lets_the_keeper_run_learns_of_it_in_the_end(bench: Bench) -> None:
    async def body() -> None:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            bench.clock.jump_ms += 60_000  # a minute of work without a single await

    with pytest.raises(LeaseLost) as lost:
        await body()
    assert lost.value.cause is FenceCause.DEADLINE
    assert bench.names() == ["Acquired", "Abandoned"]
    assert bench.locks.calls["release"] == 0


@virtual
async def test_an_error_of_such_a_body_is_still_its_own(bench: Bench) -> None:
    async def body() -> None:
        async with bench.leasing.hold(NAME, risk=Risk.HIGH, policy=DEFAULT_POLICIES[Risk.HIGH]):
            bench.clock.jump_ms += 60_000
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await body()
    assert bench.names() == ["Acquired", "Abandoned"]
