"""What a hold of the public API does while it waits, in virtual time and with every fault."""

from __future__ import annotations

import asyncio
import logging
from itertools import count, pairwise
from typing import Literal

import pytest

from stanchion.core.lease import DEFAULT_POLICIES, FenceCause, LeaseLost, Moment, terms_for
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff, BoundedJitter, Exponential, Fixed
from stanchion.leases.holder import HoldRequest, LeaseBusy, LeaseHolder, LeaseUnavailable
from stanchion.leases.waiting import (
    CALL_MS_MAX,
    DEFAULT_RETRY,
    LOOK_EVERY_MS,
    TICKET_MS,
    QueueWait,
)
from stanchion.ports.locks import AcquireAnswer
from stanchion.ports.turns import Place
from stanchion.services import lease_events as told
from stanchion.services.lease_events import LeaseEvent
from stanchion.services.renewal import Lease
from stanchion.sim import loop
from tests.leases.faulty_turns import FaultyTurns
from tests.services.faulty_locks import Fault
from tests.services.seeded import SeededEntropy
from tests.services.virtual import in_virtual_time

NAME = "invoice:42"
TTL_MS = 30_000


class SuspendedClock(loop.LoopClock):
    """A clock that counts while the machine sleeps, when nothing else does."""

    slept_ms = 0

    def moment(self) -> Moment:
        return Moment(super().moment() + self.slept_ms)


class Bench:
    """One store and as many processes' worth of holders as a test wants."""

    def __init__(self) -> None:
        self.clock = SuspendedClock()
        self.turns = FaultyTurns(self.clock)
        self.told: list[LeaseEvent] = []
        self.entered: list[tuple[str, int]] = []
        """Who got the name, and when."""
        self._seeds = count()
        self.holder = self.another()

    def another(self, retry: Backoff = DEFAULT_RETRY) -> LeaseHolder:
        return LeaseHolder(
            self.turns,
            clock=self.clock,
            entropy=SeededEntropy(next(self._seeds)),
            terms=terms_for(TTL_MS),
            retry=retry,
            tell=self.told.append,
            prepare=at_once,
        )

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.told]

    async def visit(
        self, who: str, holder: LeaseHolder, *, wait_s: float, stay_s: float = 1.0
    ) -> Lease:
        async with holder.hold(wish(wait_s=wait_s)) as lease:
            self.entered.append((who, self.clock.moment()))
            await asyncio.sleep(stay_s)
            return lease


def wish(
    *,
    risk: Risk = Risk.HIGH,
    wait_s: float = 0.0,
    order: Literal["fifo", "jitter"] = "fifo",
    floor: int = 0,
) -> HoldRequest:
    return HoldRequest(
        name=NAME,
        risk=risk,
        policy=DEFAULT_POLICIES[risk],
        wait_s=wait_s,
        order=order,
        floor=floor,
    )


async def at_once(_: str) -> None:
    """There is nothing to prepare."""


virtual = in_virtual_time(Bench)


async def settle() -> None:
    """Let everybody run who can, while hardly any time passes."""
    await asyncio.sleep(0.001)


# ── Without waiting ──────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_free_name_is_held_and_given_back(bench: Bench) -> None:
    async with bench.holder.hold(wish()) as lease:
        seen = await bench.turns.inspect(NAME)
        assert seen is not None
        assert (lease.name, lease.fence, lease.lost) == (NAME, seen.fence, None)
    assert await bench.turns.inspect(NAME) is None
    assert bench.names() == ["Acquired", "Released"]


@virtual
async def test_a_name_that_another_process_has_is_busy_at_once(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=5_000, within_ms=10)
    with pytest.raises(LeaseBusy) as busy:
        async with bench.holder.hold(wish()):
            raise AssertionError("not ours")
    assert (busy.value.name, busy.value.expires_in_ms, busy.value.waited_s) == (NAME, 5_000, 0)
    assert bench.names() == ["Contended"]
    assert bench.turns.calls["join"] == 0
    await bench.turns.calm.release(NAME, "another's", within_ms=10)
    await bench.visit("a", bench.holder, wait_s=0)


@virtual
async def test_a_name_that_this_process_has_is_busy_without_asking_the_store(bench: Bench) -> None:
    async with bench.holder.hold(wish()):
        with pytest.raises(LeaseBusy) as busy:
            async with bench.holder.hold(wish()):
                raise AssertionError("not twice")
        assert busy.value.expires_in_ms is None
        assert bench.turns.calls["acquire"] == 1
    async with bench.holder.hold(wish()):
        """Free again."""


@virtual
async def test_a_lock_error_is_unavailable_at_once_however_patient_the_caller(
    bench: Bench,
) -> None:
    bench.turns.script("acquire", Fault.ERROR)
    with pytest.raises(LeaseUnavailable, match="connection refused") as unavailable:
        async with bench.holder.hold(wish(wait_s=60)):
            raise AssertionError("nothing was granted")
    assert unavailable.value.reason == "connection refused"
    assert bench.clock.moment() == 0
    assert bench.names() == ["Refused"]
    await asyncio.sleep(2)
    await bench.visit("a", bench.holder, wait_s=0)


@pytest.mark.parametrize("risk", [Risk.LOW, Risk.STANDARD])
@virtual
async def test_a_mild_class_goes_on_without_the_store_and_says_so(bench: Bench, risk: Risk) -> None:
    bench.turns.script("acquire", Fault.ERROR)
    async with bench.holder.hold(wish(risk=risk)) as lease:
        assert (lease.is_degraded, lease.fence, lease.lost) == (True, None, None)
        lease.check()
    assert bench.names() == ["Fallback"]


@virtual
async def test_the_fence_is_above_the_floor(bench: Bench) -> None:
    async with bench.holder.hold(wish(floor=2**60)) as lease:
        assert lease.fence == 2**60 + 1


@virtual
async def test_a_lost_lease_stops_the_body_and_says_why(bench: Bench) -> None:
    seen: list[FenceCause | None] = []

    async def body(lease: Lease) -> None:
        try:
            await asyncio.sleep(1_000)
        finally:
            seen.append(lease.lost)
            with pytest.raises(LeaseLost, match=NAME):
                lease.check()

    bench.turns.script("renew", Fault.NOT_OWNED)
    with pytest.raises(LeaseLost) as lost:
        async with bench.holder.hold(wish()) as lease:
            await body(lease)
    assert seen == [lost.value.cause] == [FenceCause.TAKEN]
    assert bench.turns.calls["release"] == 0
    assert bench.names() == ["Acquired", "Abandoned"]


@virtual
async def test_a_lease_that_was_granted_too_late_stops_the_body_at_once(bench: Bench) -> None:
    class Sleepy(FaultyTurns):
        async def acquire(
            self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
        ) -> AcquireAnswer:
            answer = await super().acquire(
                name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor
            )
            bench.clock.slept_ms += TTL_MS  # The machine was suspended when the answer came in.
            return answer

    bench.turns = Sleepy(bench.clock)
    with pytest.raises(LeaseLost) as lost:
        await bench.visit("a", bench.another(), wait_s=0, stay_s=1)
    assert lost.value.cause is FenceCause.DEADLINE
    assert asyncio.get_running_loop().time() < 0.01


@virtual
async def test_what_the_body_raises_passes_through_untouched(bench: Bench) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with bench.holder.hold(wish(wait_s=1)):
            raise error
    assert caught.value is error
    assert caught.value.__context__ is None
    assert await bench.turns.inspect(NAME) is None


# ── In line ──────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_those_of_one_process_go_in_order_and_ask_the_store_once_each(bench: Bench) -> None:
    visits = []
    for who in "abcde":
        visits.append(asyncio.create_task(bench.visit(who, bench.holder, wait_s=60)))
        await settle()
    await asyncio.gather(*visits)
    assert [who for who, _ in bench.entered] == list("abcde")
    assert bench.turns.calls["acquire"] == 5
    assert bench.turns.calls["join"] == 0


@virtual
async def test_those_of_several_processes_go_in_order_and_without_a_pause(bench: Bench) -> None:
    visits = []
    for who in "abcde":
        visits.append(asyncio.create_task(bench.visit(who, bench.another(), wait_s=60)))
        await settle()
    leases = await asyncio.gather(*visits)
    assert [who for who, _ in bench.entered] == list("abcde")
    moments = [moment for _, moment in bench.entered]
    assert all(990 <= later - earlier <= 1_010 for earlier, later in pairwise(moments))
    fences = [lease.fence or 0 for lease in leases]
    assert fences == sorted(set(fences))
    assert await bench.turns.waiting(NAME) == 0
    assert bench.turns.calls["leave"] == 0


@virtual
async def test_a_process_that_has_many_who_wait_does_not_keep_others_out(bench: Bench) -> None:
    crowd = [asyncio.create_task(bench.visit("crowd", bench.holder, wait_s=60)) for _ in range(5)]
    await settle()
    await bench.visit("single", bench.another(), wait_s=60)
    assert [who for who, _ in bench.entered][:2] == ["crowd", "single"]
    await asyncio.gather(*crowd)


@virtual
async def test_whoever_waited_long_enough_is_told_and_leaves_no_ticket(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    with pytest.raises(LeaseBusy) as busy:
        await bench.visit("a", bench.holder, wait_s=3)
    assert busy.value.waited_s == 3
    assert bench.clock.moment() == 3_000
    assert bench.names() == ["Contended"]
    assert await bench.turns.waiting(NAME) == 0


@virtual
async def test_whoever_waits_at_the_door_is_told_in_time_too(bench: Bench) -> None:
    async with bench.holder.hold(wish()):
        with pytest.raises(LeaseBusy):
            await bench.visit("a", bench.holder, wait_s=3)
        assert bench.clock.moment() == 3_000
        assert bench.turns.calls["acquire"] == 1


@pytest.mark.parametrize("moment_s", [0.0005, 0.3, 0.7, 1.5])
@virtual
async def test_whoever_is_cancelled_while_waiting_leaves_no_ticket(
    bench: Bench, moment_s: float
) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await asyncio.sleep(moment_s)
    assert await bench.turns.waiting(NAME) == 1
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await bench.turns.waiting(NAME) == 0
    await bench.turns.calm.release(NAME, "another's", within_ms=10)
    await bench.visit("b", bench.holder, wait_s=0)


@virtual
async def test_whoever_is_cancelled_while_joining_leaves_no_ticket(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.script("join", Fault.SLOW)
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await asyncio.sleep(0.1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.sleep(1)
    assert await bench.turns.waiting(NAME) == 0


@virtual
async def test_a_ticket_that_is_under_way_is_given_back_after_it_arrived(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.deliver_joins_late()
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await asyncio.sleep(0.1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.sleep(1)
    assert await bench.turns.waiting(NAME) == 0


@virtual
async def test_whoever_is_cancelled_twice_leaves_no_ticket(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.script("leave", Fault.SLOW)
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await asyncio.sleep(0.1)
    waiter.cancel()
    await asyncio.sleep(0.1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.sleep(1)
    assert await bench.turns.waiting(NAME) == 0


@pytest.mark.parametrize("verb", ["acquire", "release"])
@virtual
async def test_leases_of_cancelled_holders_are_given_back_before_the_store_is_closed(
    bench: Bench, verb: str
) -> None:
    if verb == "acquire":
        bench.turns.script("acquire", Fault.LOST_REPLY)
    else:
        bench.turns.script("release", Fault.HANG)
    bench.turns.script("release", Fault.SLOW)
    holder = asyncio.create_task(bench.visit("a", bench.holder, wait_s=0))
    await asyncio.sleep(0.1)
    holder.cancel()
    if verb == "release":
        await asyncio.sleep(0.1)
        holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    await bench.holder.close()
    assert await bench.turns.calm.inspect(NAME) is None


@virtual
async def test_a_store_that_is_away_does_not_hold_up_the_close(bench: Bench) -> None:
    bench.turns.script("acquire", Fault.LOST_REPLY)
    bench.turns.always(Fault.HANG, "release")
    holder = asyncio.create_task(bench.visit("a", bench.holder, wait_s=0))
    await asyncio.sleep(0.1)
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    await bench.holder.close()
    assert bench.clock.moment() in range(1_000, 1_200)


@virtual
async def test_a_program_that_ends_while_it_joins_leaves_the_queue(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.deliver_joins_late()
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await asyncio.sleep(0.1)
    assert bench.turns.calls["join"] == 1
    # As ``asyncio.run`` does when the main task has ended: every task is cancelled.
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert bench.turns.calls["leave"] == 1


@virtual
async def test_a_call_to_join_takes_no_longer_than_the_wait_has_left(bench: Bench) -> None:
    asked: list[int] = []

    class Noting(FaultyTurns):
        async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
            asked.append(within_ms)
            return await super().join(name, token, ticket_ms=ticket_ms, within_ms=within_ms)

    for left_ms in (1, 2_000):
        turns = Noting(bench.clock)
        await turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
        waits = QueueWait(turns, NAME, "mine", clock=bench.clock, entropy=SeededEntropy(0))
        asked.clear()
        await waits.pause(left_ms)
        assert asked[0] == min(left_ms, CALL_MS_MAX)


@virtual
async def test_whoever_is_cancelled_at_the_door_lets_the_next_one_in(bench: Bench) -> None:
    first = asyncio.create_task(bench.visit("a", bench.holder, wait_s=0))
    await settle()
    second = asyncio.create_task(bench.visit("b", bench.holder, wait_s=60))
    await settle()
    third = asyncio.create_task(bench.visit("c", bench.holder, wait_s=60))
    await settle()
    second.cancel()
    await asyncio.gather(first, third)
    assert [who for who, _ in bench.entered] == ["a", "c"]


@virtual
async def test_whoever_crashed_while_waiting_delays_the_others_by_one_ticket(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    await bench.turns.calm.join(NAME, "crashed", ticket_ms=TICKET_MS, within_ms=10)
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await settle()
    await bench.turns.calm.release(NAME, "another's", within_ms=10)
    await waiter
    [(_, moment)] = bench.entered
    assert TICKET_MS <= moment <= TICKET_MS + 10


@virtual
async def test_whoever_waits_for_one_that_died_gets_the_name_when_its_term_ends(
    bench: Bench,
) -> None:
    await bench.turns.calm.acquire(NAME, "dead", ttl_ms=5_000, within_ms=10)
    await bench.visit("a", bench.holder, wait_s=60)
    [(_, moment)] = bench.entered
    assert 5_000 <= moment <= 5_010


@virtual
async def test_a_bell_that_got_lost_costs_one_look(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    waiter = asyncio.create_task(bench.visit("a", bench.holder, wait_s=60))
    await settle()
    await bench.turns.release_silently(NAME, "another's")
    await waiter
    [(_, moment)] = bench.entered
    assert moment <= LOOK_EVERY_MS + 10


@virtual
async def test_waiting_asks_the_store_now_and_then_and_no_more(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=60_000, within_ms=10)
    with pytest.raises(LeaseBusy):
        await bench.visit("a", bench.holder, wait_s=20)
    assert bench.turns.calls["acquire"] == 2
    assert 25 <= bench.turns.calls["join"] <= 32


@virtual
async def test_a_store_that_fails_while_waiting_is_what_policy_says(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    waiters = [asyncio.create_task(self_or_error(bench, risk)) for risk in (Risk.HIGH, Risk.LOW)]
    await asyncio.sleep(1)
    bench.turns.always(Fault.ERROR, "acquire", "join", "leave", "ping")
    strict, mild = await asyncio.gather(*waiters)
    assert isinstance(strict, LeaseUnavailable)
    assert isinstance(mild, Lease)
    assert mild.is_degraded
    assert bench.clock.moment() < 3_000


async def self_or_error(bench: Bench, risk: Risk) -> Lease | LeaseUnavailable:
    try:
        async with bench.another().hold(wish(risk=risk, wait_s=60)) as lease:
            return lease
    except LeaseUnavailable as error:
        return error


@virtual
async def test_a_moment_without_the_line_is_no_reason_to_give_up(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=5_000, within_ms=10)
    bench.turns.script("join", Fault.ERROR, Fault.HANG, Fault.ERROR)
    await bench.visit("a", bench.holder, wait_s=60)
    [(_, moment)] = bench.entered
    assert 5_000 <= moment <= 5_010
    assert bench.turns.calls["acquire"] == 5


@virtual
async def test_without_a_line_waiting_is_no_busy_loop(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.always(Fault.ERROR, "join")
    with pytest.raises(LeaseBusy) as busy:
        await bench.visit("a", bench.holder, wait_s=3)
    assert busy.value.waited_s == 3
    assert 3_000 / 150 <= bench.turns.calls["acquire"] <= 3_000 / 50 + 2


@virtual
async def test_whoever_goes_on_without_the_store_is_out_of_the_line_in_a_moment(
    bench: Bench,
) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)
    bench.turns.script("acquire", Fault.NONE, Fault.ERROR)
    waiter = asyncio.create_task(self_or_error(bench, Risk.LOW))
    await settle()
    await bench.turns.calm.release(NAME, "another's", within_ms=10)
    lease = await waiter
    assert isinstance(lease, Lease)
    assert lease.is_degraded
    await asyncio.sleep(TICKET_MS / 1000)
    assert await bench.turns.waiting(NAME) == 0


# ── By chance ────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_pauses_stay_in_their_bounds(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=60_000, within_ms=10)
    with pytest.raises(LeaseBusy) as busy:
        async with bench.another(BoundedJitter(500, 200)).hold(wish(wait_s=20, order="jitter")):
            raise AssertionError("not ours")
    assert busy.value.waited_s == 20
    assert 20_000 / 700 <= bench.turns.calls["acquire"] <= 20_000 / 300 + 2
    assert bench.turns.calls["join"] == 0


@virtual
async def test_pauses_may_grow(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=60_000, within_ms=10)
    growing = Exponential(base_ms=100, cap_ms=60_000, jitter="none")
    with pytest.raises(LeaseBusy):
        async with bench.another(growing).hold(wish(wait_s=6, order="jitter")):
            raise AssertionError("not ours")
    # After 0, 100, 300, 700, 1,500, 3,100 and, at last, 6,000 ms.
    assert bench.turns.calls["acquire"] == 7


@virtual
async def test_a_rhythm_without_pauses_is_no_busy_loop(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=60_000, within_ms=10)
    with pytest.raises(LeaseBusy):
        async with bench.another(Fixed(0)).hold(wish(wait_s=0.1, order="jitter")):
            raise AssertionError("not ours")
    assert bench.turns.calls["acquire"] <= 102


@virtual
async def test_whoever_asks_now_and_then_gets_the_name_when_it_is_free(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=5_000, within_ms=10)
    async with bench.holder.hold(wish(wait_s=60, order="jitter")):
        assert 5_000 <= bench.clock.moment() <= 5_075


@virtual
async def test_those_in_line_go_before_those_who_ask_now_and_then(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=TTL_MS, within_ms=10)

    async def by_chance() -> None:
        async with bench.another().hold(wish(wait_s=60, order="jitter")):
            bench.entered.append(("by chance", bench.clock.moment()))

    chance = asyncio.create_task(by_chance())
    await asyncio.sleep(1)
    line = [asyncio.create_task(bench.visit(who, bench.another(), wait_s=60)) for who in "ab"]
    await asyncio.sleep(1)
    await bench.turns.calm.release(NAME, "another's", within_ms=10)
    await asyncio.gather(chance, *line)
    assert [who for who, _ in bench.entered] == ["a", "b", "by chance"]


# ── The hook ─────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_the_hook_is_told_of_the_whole_wait_and_once(bench: Bench) -> None:
    await bench.turns.calm.acquire(NAME, "another's", ttl_ms=5_000, within_ms=10)
    await bench.visit("a", bench.holder, wait_s=60)
    acquired, released = bench.told
    assert isinstance(acquired, told.Acquired)
    assert isinstance(released, told.Released)
    assert 5_000 <= acquired.waited_ms <= 5_010
    assert released.held_ms == 1_000


@virtual
async def test_a_hook_that_fails_loses_no_lease(bench: Bench) -> None:
    def fail(event: LeaseEvent) -> None:
        bench.told.append(event)
        raise ZeroDivisionError

    holder = LeaseHolder(
        bench.turns,
        clock=bench.clock,
        entropy=SeededEntropy(1),
        terms=terms_for(TTL_MS),
        retry=BoundedJitter(50, 25),
        tell=fail,
        prepare=at_once,
    )
    bench.turns.script("renew", Fault.ERROR)
    logging.disable()
    try:
        async with holder.hold(wish()) as lease:
            await asyncio.sleep(100)
            assert lease.lost is None
    finally:
        logging.disable(logging.NOTSET)
    assert bench.names() == ["Acquired", "RenewFailed", "Released"]
