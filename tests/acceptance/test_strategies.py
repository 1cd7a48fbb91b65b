"""A1, A3, A4 under the lock strategy, and what can be switched while everything goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx2
import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.stack import Kind
from tests.acceptance.waiting import until
from tests.acceptance.workflows import HOLD

CAP = 2
FULL = (429, "max_concurrent_runs_reached")
BUSY = (503, "gate_busy")
WAIT_S = 2.0
LATE_S = 0.5
"""A start is answered within its wait budget and this."""
IN_FORCE_S = 2.0
ON_REPLICAS = pytest.mark.parametrize("stack", [Kind.REPLICAS], indirect=True, ids=str)
ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)
ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)


async def test_a1_ten_callers_under_the_lock_strategy(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=CAP, admission={"strategy": "lock"})
    answers = await caller.starts("hold", 10)
    assert Counter(answer.verdict for answer in answers) == {(200, None): CAP, FULL: 8}


@ON_REPLICAS
@pytest.mark.parametrize("callers", [50, 100])
@pytest.mark.parametrize("kind", ["fixed", "jitter"])
async def test_a1_many_callers_under_the_lock_strategy(
    caller: Caller, callers: int, kind: str
) -> None:
    await caller.apply("hold", HOLD)
    retry = {"kind": kind, "delay_ms": 10} | ({"jitter_ms": 5} if kind == "jitter" else {})
    admission = {"strategy": "lock", "lock_retry": retry}
    await caller.configure(max_concurrent_runs=CAP, admission=admission)
    answers = await caller.starts("hold", callers)
    counted = Counter(answer.verdict for answer in answers)
    assert counted.pop((200, None)) == CAP
    assert set(counted) <= {FULL, BUSY}
    assert len(await caller.unfinished()) == CAP
    # What the gate promises, and what a hundred callers in one process add to it.
    assert max(answer.took_s for answer in answers) < WAIT_S + LATE_S + 1.0


@ON_TWO
async def test_a1_switching_the_strategy_in_a_burst_never_admits_a_third(
    caller: Caller, settings_kept: None
) -> None:
    del settings_kept
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=CAP)

    async def switch() -> None:
        for strategy in ("lock", "atomic") * 4:
            answer = await caller.patch_settings({"admission": {"strategy": strategy}})
            assert answer.status == 200, answer.text

    async def burst() -> list[tuple[int, str | None]]:
        answered = []
        for _ in range(5):
            answers = await caller.starts("hold", 20)
            answered += [answer.verdict for answer in answers]
        return answered

    answered, _ = await asyncio.gather(burst(), switch())
    counted = Counter(answered)
    assert counted.pop((200, None)) == CAP
    assert set(counted) <= {FULL, BUSY}
    assert len(await caller.unfinished()) == CAP


@ON_TWO
async def test_a3_an_admission_lock_held_by_an_operator(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    lock = f"admission/{caller.tenant}"
    await caller.configure(max_concurrent_runs=CAP, admission={"strategy": "lock"})
    await caller.hold(lock)
    leases = (await caller.get("/v1/admin/leases"))["leases"]
    assert lock in {lease["name"] for lease in leases}
    busy = await caller.start("hold")
    assert busy.verdict == BUSY
    assert WAIT_S - 0.1 < busy.took_s < WAIT_S + LATE_S
    await caller.configure(max_concurrent_runs=CAP, admission={"strategy": "atomic"})
    atomic = await caller.start("hold")
    assert (atomic.status, atomic.took_s < 1.0) == (200, True)
    await caller.configure(max_concurrent_runs=CAP, admission={"strategy": "lock"})
    await caller.let_go(lock)
    assert (await caller.start("hold")).status == 200


@ON_TWO
async def test_a3_an_admission_lock_ends_by_itself(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(admission={"strategy": "lock"})
    await caller.hold(f"admission/{caller.tenant}", ttl_s=0.8)
    answer = await caller.start("hold")
    assert answer.status == 200
    assert 0.3 < answer.took_s < WAIT_S


@ON_TWO
async def test_a3_a_caller_who_left_stops_waiting(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(admission={"strategy": "lock"})
    lock = f"admission/{caller.tenant}"
    await caller.hold(lock)
    with pytest.raises(httpx2.ReadTimeout):
        await caller.call("POST", "/v1/workflows/hold/runs", {"input": {}}, timeout_s=0.3)
    await caller.let_go(lock)
    # Whoever were still waiting would have had the lock before this one is through.
    await asyncio.sleep(0.2)
    assert (await caller.start("hold")).status == 200
    assert len(await caller.runs()) == 1


@ON_REPLICAS
async def test_a4_settings_are_in_force_on_every_replica(
    caller: Caller, settings_kept: None
) -> None:
    del settings_kept
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=None)
    await caller.hold(f"admission/{caller.tenant}")
    for strategy, expected in (("lock", 503), ("atomic", 200), ("lock", 503)):
        patch = {"admission": {"strategy": strategy, "lock_wait_s": 0.1}}
        answer = await caller.at(0).patch_settings(patch)
        since = time.monotonic()
        assert answer.status == 200, answer.text
        assert answer.body["admission"]["strategy"] == strategy
        assert answer.body["lock_busy"]["delay_ms"] == 500, "it is answered with the whole"
        assert (await caller.at(0).start("hold")).status == expected, "not in force here"

        async def follows(expected: int = expected) -> bool:
            return (await caller.at(1).start("hold")).status == expected

        await until(follows, within_s=IN_FORCE_S, since=since)
        assert (await caller.at(1).settings()) == answer.body


@ON_REPLICAS
async def test_a4_a_tenants_own_strategy_is_in_force_when_it_was_answered(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.hold(f"admission/{caller.tenant}")
    for strategy, expected in (("lock", BUSY), ("atomic", (200, None)), ("lock", BUSY)):
        await caller.at(0).configure(admission={"strategy": strategy})
        assert (await caller.at(1).start("hold")).verdict == expected, strategy


@ON_SQLITE
async def test_a4_the_settings_begin_as_documented(caller: Caller) -> None:
    settings = await caller.settings()
    assert settings["admission"] == {
        "strategy": "atomic",
        "lock_ttl_s": 10,
        "lock_wait_s": 2,
        "lock_retry": {"kind": "jitter", "delay_ms": 10, "jitter_ms": 5},
    }
    assert settings["lock_busy"] == {
        "kind": "jitter",
        "delay_ms": 500,
        "jitter_ms": 200,
        "backend_error_delay_ms": 1000,
    }
    policies = {
        risk: tuple(settings["policies"][risk][name] for name in _POLICY) for risk in _POLICIES
    }
    assert policies == _POLICIES
    escalation = settings["escalation"]
    assert (escalation["fallbacks_per_s"], escalation["window_s"]) == (0.1, 300)
    assert escalation["closes"] == ["high", "standard"]


_POLICY = ("on_lock_error", "on_renewal_lost", "renewal_failures_max")
_POLICIES = {
    "low": ("fail_open", "continue", 3),
    "standard": ("fail_open", "continue", 3),
    "high": ("fail_closed", "fence", 3),
    "critical": ("fail_closed", "fence", 1),
}


@ON_SQLITE
@pytest.mark.parametrize(
    "patch",
    [
        {"admission": {"strategy": "none"}},
        {"admission": {"lock_retry": {"kind": "jitter", "delay_ms": 10, "jitter_ms": 11}}},
        {"admission": {"lock_wait_s": -1}},
        {"admission": {"unknown": 1}},
        {"lock_busy": {"jitter_ms": 501}},
        {"lock_busy": {"delay_ms": "soon"}},
        {"policies": {"low": {"on_lock_error": "hope"}}},
        {"escalation": {"closes": ["everything"]}},
        {"unknown": {}},
        [],
        7,
    ],
    ids=str,
)
async def test_a4_settings_that_cannot_be_are_refused_whole(
    caller: Caller, settings_kept: None, patch: object
) -> None:
    del settings_kept
    before = await caller.settings()
    answer = await caller.patch_settings(patch)
    assert answer.status == 422, answer.text
    assert answer.body["errors"]
    assert await caller.settings() == before


@ON_SQLITE
async def test_a4_null_in_a_merge_patch_takes_a_setting_back(
    caller: Caller, settings_kept: None
) -> None:
    del settings_kept
    await caller.patch_settings({"admission": {"lock_wait_s": 1.5}})
    assert (await caller.settings())["admission"]["lock_wait_s"] == 1.5
    answer = await caller.patch_settings({"admission": {"lock_wait_s": None}})
    assert answer.status == 200, answer.text
    assert answer.body["admission"]["lock_wait_s"] == 2
