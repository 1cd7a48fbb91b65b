"""The strategy ``lock``: callers of a tenant one after the other, and never past a broken lock."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.core.model import TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.locks import AcquireAnswer, Granted
from stanchion.services.gate_answers import GateCode, GateFailed, GateFull, RunStarted, StartAnswer
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import Meanwhile
from tests.services.gatehouse import (
    ACME,
    GLOBEX,
    Gatehouse,
    House,
    job,
    never,
    tally,
    virtual,
    workflow,
)

LOCK = "admission/acme"


async def hold(gates: Gatehouse, name: str = LOCK, *, ttl_s: float = 60) -> None:
    """Be an operator who has the lock."""
    answer = await gates.locks.real.acquire(
        name, "operator", ttl_ms=round(ttl_s * 1000), within_ms=1000
    )
    assert isinstance(answer, Granted)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def code_of(answer: StartAnswer) -> GateCode:
    assert isinstance(answer, GateFailed), answer
    assert 1_000 <= answer.retry_after_ms <= 10_000
    return answer.code


# ── Taking turns ─────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_ten_callers_at_cap_two_take_turns(gates: Gatehouse) -> None:
    await gates.define(2)
    houses = [gates.add(strategy="lock"), gates.add(strategy="lock")]
    answers = await asyncio.gather(*(houses[n % 2].start() for n in range(10)))
    assert tally(answers) == {"admitted": 2, "full": 8}
    await asyncio.sleep(0.1)
    assert await gates.locked() == []


@pytest.mark.parametrize("callers", [50, 100])
@virtual
async def test_more_callers_than_the_budget_has_room_for_are_told_that_it_is_busy(
    gates: Gatehouse, callers: int
) -> None:
    await gates.define(2)
    houses = [gates.add(strategy="lock"), gates.add(strategy="lock")]
    for house in houses:
        house.store.each_way_s = 0.02  # a slow store makes turns long
    began_s = now_s()
    answers = await asyncio.gather(*(houses[n % 2].start() for n in range(callers)))
    counts = tally(answers)
    assert now_s() - began_s < 2.5
    assert counts["admitted"] == 2
    assert counts["gate_busy"] > 0
    assert set(counts) == {"admitted", "full", "gate_busy"}


@virtual
async def test_the_lock_lets_one_caller_at_a_time_to_the_store(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add(strategy="lock")
    house.are_short = False
    inside = most = 0

    async def visit() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1

    house.store.script("admit", *[visit] * 20)
    await asyncio.gather(*(house.start() for _ in range(20)))
    assert most == 1
    house.patch({"admission": {"strategy": "atomic"}})
    house.store.script("admit", *[visit] * 20)
    await asyncio.gather(*(house.start() for _ in range(20)))
    assert most == 20


@virtual
async def test_without_a_lock_store_a_caller_waits_as_long_as_the_budget_says(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add(strategy="lock", has_locks=False)
    house.patch({"admission": {"lock_wait_s": 0.5}})
    house.store.script("admit", lambda: asyncio.sleep(2))
    first = asyncio.create_task(house.start())
    await asyncio.sleep(0.1)
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.GATE_BUSY
    assert 0.4999 < now_s() - began_s < 0.51
    assert isinstance(await first, GateFailed)


@virtual
async def test_one_tenants_lock_does_not_hold_up_another(gates: Gatehouse) -> None:
    await gates.define()
    await gates.define(tenant=GLOBEX)
    house = gates.add(strategy="lock")
    await hold(gates)
    began_s = now_s()
    busy = asyncio.create_task(house.start())
    await house.started(tenant=GLOBEX)
    assert now_s() - began_s < 0.1
    assert code_of(await busy) is GateCode.GATE_BUSY


@virtual
async def test_a_lock_that_an_operator_holds_is_busy_and_nothing_to_the_atomic_strategy(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    await hold(gates)
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.GATE_BUSY
    assert 2.0 <= now_s() - began_s < 2.5
    house.patch({"admission": {"strategy": "atomic"}})
    await house.started()
    house.patch({"admission": {"strategy": "lock"}})
    await gates.locks.real.force_release(LOCK)
    await house.started()


@virtual
async def test_whoever_waits_gets_the_lock_when_its_holder_crashed(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    await hold(gates, ttl_s=1)
    await house.started()


@virtual
async def test_without_time_to_wait_the_lock_is_tried_once(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.patch({"admission": {"lock_wait_s": 0}})
    await house.started()
    await asyncio.sleep(0.1)
    await hold(gates)
    assert code_of(await house.start()) is GateCode.GATE_BUSY
    assert house.locks.calls["acquire"] == 2


@virtual
async def test_the_lock_is_taken_for_as_long_as_is_set(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.patch({"admission": {"lock_ttl_s": 7}})
    found: list[int] = []

    async def look() -> None:
        found.extend(view.expires_in_ms for view in await gates.locks.real.list())

    house.store.script("admit", look)
    await house.started()
    assert len(found) == 1
    assert 6_990 <= found[0] <= 7_000


@virtual
async def test_a_replay_waits_for_its_turn_and_is_answered_when_full(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add(strategy="lock")
    run_id = await house.started(key="once")
    again = await house.start(key="once")
    assert isinstance(again, RunStarted)
    assert (again.run_id, again.replayed) == (run_id, True)


@virtual
async def test_a_changed_workflow_is_read_again_under_the_same_lock(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    await house.started()
    await gates.store.put_workflow(ACME, workflow("plain", work=job("other")))
    before = house.locks.calls["acquire"]
    await asyncio.sleep(0.1)
    answer = await house.start()
    assert isinstance(answer, RunStarted)
    assert house.locks.calls["acquire"] == before + 1


# ── Rhythm, and who chooses ──────────────────────────────────────────────────────────────────────


class Overheard(MemoryLocks):
    """Remembers when it was asked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked_s: list[float] = []

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        self.asked_s.append(now_s())
        return await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor)


@virtual
async def test_the_rhythm_is_fixed_or_spread_and_switched_at_run_time(gates: Gatehouse) -> None:
    gates.locks.real = locks = Overheard(gates.clock)
    await gates.define()
    house = gates.add(strategy="lock")
    await hold(gates, ttl_s=600)

    async def pauses_ms() -> list[int]:
        locks.asked_s.clear()
        assert code_of(await house.start()) is GateCode.GATE_BUSY
        # The last pause is cut short by the end of the budget.
        asked_s = locks.asked_s[:-1]
        return [round((later - earlier) * 1000) for earlier, later in pairwise(asked_s)]

    spread = await pauses_ms()
    assert min(spread) >= 5
    assert max(spread) <= 15
    assert len(set(spread)) > 5
    house.patch({"admission": {"lock_retry": {"kind": "fixed"}}})
    assert set(await pauses_ms()) == {10}
    house.patch({"admission": {"lock_retry": {"delay_ms": 0, "jitter_ms": 0}}})
    assert set(await pauses_ms()) == {1}
    house.patch({"admission": {"lock_retry": None}})
    await gates.configure(override={"lock_retry": {"kind": "fixed", "delay_ms": 40}})
    assert set(await pauses_ms()) == {40}


@virtual
async def test_a_tenant_chooses_its_own_strategy_and_it_is_in_force_at_once(
    gates: Gatehouse,
) -> None:
    await gates.define()
    await gates.define(tenant=GLOBEX)
    house = gates.add(strategy="atomic")
    await hold(gates)
    await hold(gates, "admission/globex")
    await house.started()
    await gates.configure(override={"strategy": "lock"})
    assert code_of(await house.start()) is GateCode.GATE_BUSY
    await house.started(tenant=GLOBEX)
    house.patch({"admission": {"strategy": "lock"}})
    await gates.configure(override={"strategy": "atomic"})
    await house.started()
    assert code_of(await house.start(tenant=GLOBEX)) is GateCode.GATE_BUSY


@pytest.mark.parametrize("seed", range(5))
@virtual
async def test_switching_in_the_middle_of_a_burst_never_admits_a_third(
    gates: Gatehouse, seed: int
) -> None:
    await gates.define(2)
    houses = [gates.add(), gates.add(strategy="lock"), gates.add()]
    houses[seed % 3].store.each_way_s = 0.007

    async def switch() -> None:
        async with asyncio.TaskGroup() as answers:
            for n in range(300):
                strategy = "lock" if (n + seed) % 2 else "atomic"
                if n % 3 == 0:
                    change = gates.configure(2, override={"strategy": strategy})
                    answers.create_task(change)
                else:
                    houses[n % 3].patch({"admission": {"strategy": strategy}})
                await asyncio.sleep(0.003)

    switching = asyncio.create_task(switch())

    async def start(n: int) -> StartAnswer:
        # The changes go on for most of a second: what one replica knows of them, another does not.
        await asyncio.sleep(n % 17 / 20)
        return await houses[n % 3].start()

    counts = tally(await asyncio.gather(*(start(n) for n in range(100))))
    assert counts["admitted"] == 2
    assert set(counts) <= {"admitted", "full", "gate_busy"}
    assert sum(house.locks.calls["acquire"] for house in houses) > 0
    await switching
    assert await gates.store.active_runs(ACME) == 2


# ── Broken locks ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUG, Fault.LATE])
@virtual
async def test_a_lock_error_is_answered_at_once_and_never_lets_anybody_through(
    gates: Gatehouse, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.script("acquire", fault)
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.GATE_UNAVAILABLE
    assert now_s() - began_s < 0.05
    assert house.locks.calls["acquire"] == 1
    assert house.store.calls["admit"] == 0
    (line,) = (each for each in caplog.records if each.getMessage() == "admission_lock_failed")
    assert line.levelname == "ERROR"
    assert vars(line)["fields"]["lease"] == LOCK
    assert (
        house.metric(
            "admission_decisions_total",
            tenant="acme",
            workflow="plain",
            outcome="gate_unavailable",
        )
        == 1
    )


@virtual
async def test_a_silent_lock_store_costs_one_caller_its_budget_and_the_others_nothing(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.always(Fault.HANG, "acquire", "ping", "release")
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.GATE_UNAVAILABLE
    assert now_s() - began_s < 2.5
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.GATE_UNAVAILABLE
    assert now_s() - began_s < 0.05
    house.locks.always(Fault.NONE, "acquire", "ping", "release")
    await asyncio.sleep(2.1)
    await house.started()


@pytest.mark.parametrize("wait_s", [0, 0.1, 2, 60])
@virtual
async def test_a_lock_store_that_falls_silent_while_others_wait_keeps_no_one_past_the_budget(
    gates: Gatehouse, wait_s: float
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.patch({"admission": {"lock_wait_s": wait_s}})
    await hold(gates, ttl_s=600)
    house.locks.script("acquire", *[Fault.NONE] * max(0, round(wait_s * 95)))
    house.locks.always(Fault.HANG, "acquire")
    began_s = now_s()
    assert code_of(await house.start()) in {GateCode.GATE_UNAVAILABLE, GateCode.GATE_BUSY}
    assert now_s() - began_s < wait_s + 0.5


@virtual
async def test_a_lock_whose_grant_was_lost_is_given_back_once_the_store_answers(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.script("acquire", Fault.LOST_REPLY)
    assert code_of(await house.start()) is GateCode.GATE_UNAVAILABLE
    assert await gates.locked() == [LOCK]
    await asyncio.sleep(1.1)
    assert await gates.locked() == []
    await house.started()


@pytest.mark.parametrize(
    "fault", [Fault.ERROR, Fault.HANG, never], ids=["error", "hang", "silence"]
)
@virtual
async def test_a_store_that_fails_behind_the_lock_is_another_answer(
    gates: Gatehouse, fault: Fault | Meanwhile
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.store.script("admit", fault)
    began_s = now_s()
    assert code_of(await house.start()) is GateCode.LIMIT_CHECK_FAILED
    assert now_s() - began_s < 2.5
    await asyncio.sleep(0.1)
    assert await gates.locked() == []
    await house.started()


@virtual
async def test_a_store_that_fails_before_the_lock_is_no_failed_limit_check(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.store.script("list_documents", Fault.ERROR)
    assert code_of(await house.start()) is GateCode.GATE_UNAVAILABLE


# ── Giving it back ───────────────────────────────────────────────────────────────────────────────


def release_errors(house: House) -> float:
    value = house.metric("lease_release_errors_total", kind="admission", risk="standard")
    assert value is not None
    return value


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUG, Fault.HANG, Fault.NOT_OWNED])
@virtual
async def test_a_lock_that_cannot_be_given_back_costs_the_answer_nothing_and_is_counted(
    gates: Gatehouse, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.always(fault, "release")
    began_s = now_s()
    await house.started()
    assert now_s() - began_s < 0.05
    await asyncio.sleep(1.1)
    assert release_errors(house) == 1
    lines = [each for each in caplog.records if each.getMessage() == "lock_release_failed"]
    assert [(line.levelname, vars(line)["fields"]["lease"]) for line in lines] == [
        ("WARNING", LOCK)
    ]


@virtual
async def test_one_failed_release_is_tried_again(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.script("release", Fault.ERROR)
    await house.started()
    await house.gate.close()
    assert await gates.locked() == []
    assert release_errors(house) == 0


@virtual
async def test_closing_waits_for_locks_that_are_being_given_back(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    house.locks.script("release", Fault.SLOW)
    await house.started()
    assert await gates.locked() == [LOCK]
    await house.gate.close()
    assert await gates.locked() == []


@virtual
async def test_a_cancelled_caller_stops_waiting(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    await hold(gates)
    waiting = asyncio.create_task(house.start())
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    asked = house.locks.calls["acquire"]
    await asyncio.sleep(5)
    assert house.locks.calls["acquire"] == asked


@pytest.mark.parametrize("where", ["before the grant", "after the grant", "at the store"])
@virtual
async def test_a_caller_who_leaves_takes_no_lock_along(gates: Gatehouse, where: str) -> None:
    await gates.define()
    house = gates.add(strategy="lock")
    if where == "at the store":
        house.store.script("admit", never)
    else:
        is_granted = where == "after the grant"
        house.locks.script("acquire", Fault.LOST_REPLY if is_granted else Fault.HANG)
    starting = asyncio.create_task(house.start())
    await asyncio.sleep(0.1)
    assert await gates.locked() == ([] if where == "before the grant" else [LOCK])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.sleep(0.01)
    assert await gates.locked() == []
    assert release_errors(house) == 0
    await house.started()


# ── Without a lock store ─────────────────────────────────────────────────────────────────────────


@virtual
async def test_without_a_lock_store_callers_of_this_process_take_turns(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add(strategy="lock", has_locks=False)
    inside = most = 0

    async def visit() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1

    house.store.script("admit", *[visit] * 100)
    counts = tally(await asyncio.gather(*(house.start() for _ in range(100))))
    assert most == 1
    assert (counts["admitted"], counts["full"], counts["gate_busy"]) == (2, 98, 0)


@virtual
async def test_without_a_lock_store_waiting_has_an_end_as_well(gates: Gatehouse) -> None:
    await gates.define(None)
    await gates.define(None, tenant=GLOBEX)
    house = gates.add(strategy="lock", has_locks=False)
    house.store.script("admit", never)
    stuck = asyncio.create_task(house.start())
    await asyncio.sleep(0.1)
    began_s = now_s()
    second = asyncio.create_task(house.start())
    await house.started(tenant=GLOBEX)
    assert now_s() - began_s < 0.05
    assert code_of(await second) is GateCode.GATE_BUSY
    assert code_of(await stuck) is GateCode.LIMIT_CHECK_FAILED
    await house.started()


@virtual
async def test_a_full_tenant_is_full_under_either_strategy(gates: Gatehouse) -> None:
    nobody = TenantId("nobody")
    await gates.define(0, tenant=nobody)
    for house in (gates.add(), gates.add(strategy="lock")):
        assert isinstance(await house.start(tenant=nobody), GateFull)
