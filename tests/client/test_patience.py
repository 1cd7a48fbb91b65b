"""How patient a client is: the exact bounds of every wait, for scripted answers."""

from __future__ import annotations

import pytest

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace
from stanchion.client.errors import (
    CallFailed,
    CallRefused,
    GaveUpBecause,
    ServerUnavailable,
    TenantFull,
    UnexpectedAnswer,
)
from stanchion.client.signals import Answered, CallSignal, GaveUp, Retrying
from stanchion.core.retry import RetryClass
from stanchion.sim.loop import run
from stanchion.transport.messages import HttpReply, NoReply, Silence
from tests.client.scripted import (
    ALMOST_ONE,
    DEAD,
    LOST,
    TIMED_OUT,
    URL,
    Script,
    away,
    client,
    full,
    problem,
    started,
)

# The ceilings by RETRIES: 200 ms doubled up to 10 s, and 1 s doubled up to 15 s.
UNAVAILABLE_MS = [200, 400, 800, 1600, 3200, 6400, 10_000]
QUOTA_MS = [1000, 2000, 4000]


def test_samples_of_a_client_are_spread_over_the_unit_interval() -> None:
    samples = [Pace().sample() for _ in range(200)]
    assert all(0 <= each < 1 for each in samples)
    assert min(samples) < 0.5 < max(samples)


def failing(script: Script, sample: float) -> CallFailed:
    async def main() -> CallFailed:
        with pytest.raises(CallFailed) as caught:
            await client(script, sample=sample).start("w")
        return caught.value

    return run(main())


@pytest.mark.parametrize(
    "answer",
    [problem(500), problem(502), problem(503), problem(504), DEAD, LOST, TIMED_OUT],
    ids=lambda answer: str(answer.status if isinstance(answer, HttpReply) else answer.silence),
)
def test_an_unavailable_server_is_asked_eight_times_with_growing_jittered_waits(
    answer: HttpReply | NoReply,
) -> None:
    shortest, longest = Script([answer]), Script([answer])
    error = failing(shortest, 0.0)
    assert isinstance(error, ServerUnavailable)
    assert (error.facts.attempts, error.gave_up) == (8, GaveUpBecause.ATTEMPTS_SPENT)
    failing(longest, ALMOST_ONE)
    assert shortest.waits_ms == [0] * 7
    assert longest.waits_ms == UNAVAILABLE_MS


def test_a_full_tenant_ends_by_the_stricter_cap() -> None:
    shortest, longest = Script([full()]), Script([full()])
    error = failing(shortest, 0.0)
    assert isinstance(error, TenantFull)
    assert (error.limit, error.active) == (2, 2)
    assert (error.facts.attempts, error.gave_up) == (4, GaveUpBecause.ATTEMPTS_SPENT)
    failing(longest, ALMOST_ONE)
    assert shortest.waits_ms == [0] * 3
    assert longest.waits_ms == QUOTA_MS


@pytest.mark.parametrize(("answer", "waits"), [(full(8000), 3), (away(8000), 7)])
def test_the_servers_word_is_never_undercut_and_spread_by_at_most_a_quarter(
    answer: HttpReply, waits: int
) -> None:
    shortest, longest = Script([answer]), Script([answer])
    failing(shortest, 0.0)
    failing(longest, ALMOST_ONE)
    assert shortest.waits_ms == [8000] * waits
    # The own backoff's ceiling, where it is above the word, is as late as it gets.
    own_ms = QUOTA_MS if waits == 3 else UNAVAILABLE_MS
    assert longest.waits_ms == [max(10_000, ceiling_ms) for ceiling_ms in own_ms]


def test_callers_told_the_same_time_come_back_at_different_ones() -> None:
    async def come_back_ms(seed: int) -> int:
        script = Script([full(10_000), started()])
        await client(script, seed=seed).start("w")
        return script.waits_ms[0]

    waits_ms = [run(come_back_ms(seed)) for seed in range(200)]
    assert min(waits_ms) >= 10_000
    assert max(waits_ms) <= 12_500
    assert len(set(waits_ms)) > 150


@pytest.mark.parametrize("answer", [full(30_001), away(30_001)])
def test_asked_for_more_patience_than_it_has_a_client_gives_up_at_once(answer: HttpReply) -> None:
    script = Script([answer])
    error = failing(script, 0.5)
    assert error.gave_up is GaveUpBecause.RETRY_AFTER_TOO_LONG
    assert error.retry_after_s == 30.001
    assert len(script.requests) == 1


def test_the_whole_of_a_call_is_bounded_and_no_wait_begins_that_would_end_too_late() -> None:
    script = Script([full(20_000)])
    error = failing(script, ALMOST_ONE)
    assert error.gave_up is GaveUpBecause.TIME_SPENT
    assert script.times_ms == [0, 25_000, 50_000]  # A third wait would end after 60 s.


def test_slow_answers_count_against_the_time_of_the_call() -> None:
    script = Script([TIMED_OUT], latency_s=30)
    error = failing(script, ALMOST_ONE)
    assert error.gave_up is GaveUpBecause.TIME_SPENT
    assert script.times_ms == [0, 30_200, 60_600, 91_400]


def test_each_class_has_its_own_attempts() -> None:
    answers = [full(), full(), full(), *[away()] * 7, started()]
    script = Script(answers)

    async def main() -> None:
        await client(script, sample=0.0).start("w")

    run(main())
    assert len(script.requests) == 11


@pytest.mark.parametrize("status", [s for s in range(400, 500) if s != 429])
def test_no_other_refusal_is_tried_again(status: int) -> None:
    script = Script([problem(status)])
    error = failing(script, 0.5)
    assert error.gave_up is GaveUpBecause.NOT_RETRYABLE
    assert error.facts.status == status
    assert len(script.requests) == 1
    assert isinstance(error, CallRefused) == (status not in {401, 403})


@pytest.mark.parametrize("status", [301, 304, 501, 505])
def test_nor_is_an_answer_that_no_server_of_ours_gives(status: int) -> None:
    script = Script([problem(status)])
    error = failing(script, 0.5)
    assert isinstance(error, UnexpectedAnswer if status < 500 else ServerUnavailable)
    assert len(script.requests) == 1


def test_nor_is_a_certificate_that_is_not_valid() -> None:
    script = Script([NoReply(Silence.UNTRUSTED, "not valid")])
    assert failing(script, 0.5).gave_up is GaveUpBecause.NOT_RETRYABLE
    assert len(script.requests) == 1


def test_an_answer_of_another_shape_is_told_and_not_tried_again() -> None:
    script = Script([HttpReply(200, {}, b'{"run_id": 7}')])
    error = failing(script, 0.5)
    assert isinstance(error, UnexpectedAnswer)
    assert len(script.requests) == 1
    assert error.idempotency_key == dict(script.requests[0].headers)["Idempotency-Key"]


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        *((each, 1) for each in (LOST, TIMED_OUT, problem(500), problem(502), problem(504))),
        (DEAD, 8),
        (away(), 8),
        (full(), 4),
    ],
)
def test_what_cannot_be_repeated_is_tried_again_only_if_it_was_not_begun(
    answer: HttpReply | NoReply, tries: int
) -> None:
    script = Script([answer])

    async def main() -> CallFailed:
        with pytest.raises(CallFailed) as caught:
            await client(script, sample=0.0).request("POST", "/v1/admin/keys", {"role": "worker"})
        return caught.value

    error = run(main())
    assert len(script.requests) == tries
    assert (error.gave_up is GaveUpBecause.NOT_REPEATABLE) == (tries == 1)
    assert error.facts.may_have_run == (tries == 1)


def test_with_a_key_anything_can_be_repeated() -> None:
    script = Script([LOST, HttpReply(200, {}, b"{}")])

    async def main() -> None:
        caller = client(script, sample=0.0)
        await caller.request("POST", "/v1/admin/keys", {}, idempotency_key="k")

    run(main())
    assert len(script.requests) == 2


def test_the_hook_is_told_everything_in_order() -> None:
    script, signals = Script([full(2000), DEAD, started()], latency_s=0.01), list[CallSignal]()

    async def main() -> None:
        await client(script, sample=0.0, signals=signals).start("w")

    run(main())
    assert signals == [
        Answered(call="start", attempt=1, status=429, silence=None, elapsed_ms=10),
        Retrying(
            call="start",
            attempt=1,
            retry_class=RetryClass.QUOTA,
            delay_ms=2000,
            retry_after_ms=2000,
        ),
        Answered(call="start", attempt=2, status=None, silence=Silence.UNREACHED, elapsed_ms=10),
        Retrying(
            call="start",
            attempt=2,
            retry_class=RetryClass.UNAVAILABLE,
            delay_ms=0,
            retry_after_ms=0,
        ),
        Answered(call="start", attempt=3, status=200, silence=None, elapsed_ms=10),
    ]


def test_the_hook_hears_why_a_call_failed_and_cannot_break_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    signals = list[CallSignal]()

    async def main() -> None:
        with pytest.raises(CallRefused):
            await client(Script([problem(404)]), signals=signals).get("r1")

    run(main())
    assert signals[-1] == GaveUp(
        call="get", attempt=1, retry_class=None, reason=GaveUpBecause.NOT_RETRYABLE
    )

    def broken(_signal: CallSignal) -> None:
        raise RuntimeError("the hook's own")

    async def with_a_broken_hook() -> None:
        caller = AsyncClient(URL, transport=Script([started()]), on_event=broken)
        assert (await caller.start("w")).run_id == "r1"

    run(with_a_broken_hook())
    assert "on_event failed" in caplog.text
