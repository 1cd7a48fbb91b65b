"""Waiting for a run: in slices, to the end or to the time, and never in a tight loop."""

from __future__ import annotations

import asyncio
import math
import pickle

import msgspec
import pytest

from stanchion.client.errors import GaveUpBecause, NotFound, ServerUnavailable, WaitTimeout
from stanchion.sim.loop import run
from stanchion.transport.messages import HttpReply, NoReply, Request
from tests.client.scripted import DEAD, Script, client, now, problem, run_view


class Holding:
    """Holds its answer as it is asked to, until the run is finished."""

    def __init__(self, *, finished_at_ms: int, away_until_ms: int = 0) -> None:
        self.asked: list[tuple[int, float]] = []
        self.timeouts_s: list[float] = []
        self._finished_at_ms = finished_at_ms
        self._away_until_ms = away_until_ms

    async def send(self, request: Request) -> HttpReply | NoReply:
        held_s = float(request.path.partition("?wait=")[2])
        self.asked.append((now(), held_s))
        self.timeouts_s.append(request.timeout_s)
        if now() < self._away_until_ms:
            return DEAD
        left_s = max(0.0, (self._finished_at_ms - now()) / 1000)
        await asyncio.sleep(min(held_s, left_s))
        return run_view("succeeded" if now() >= self._finished_at_ms else "running")


def test_a_long_run_is_waited_for_in_slices_of_at_most_25_seconds() -> None:
    server = Holding(finished_at_ms=60_000)

    async def main() -> None:
        finished = await client(server).wait("r1", timeout_s=3600)
        assert (finished.status, finished.output) == ("succeeded", {"answer": 42})
        assert now() == 60_000

    run(main())
    assert server.asked == [(0, 25.0), (25_000, 25.0), (50_000, 25.0)]
    # Every request has a time of its own, a little above what it asks for.
    assert server.timeouts_s == [30.0] * 3


@pytest.mark.parametrize("timeout_s", [None, math.inf])
def test_without_a_time_a_wait_takes_as_long_as_the_run(timeout_s: float | None) -> None:
    server = Holding(finished_at_ms=86_400_000)

    async def main() -> None:
        assert (await client(server).wait("r1", timeout_s=timeout_s)).status == "succeeded"
        assert now() == 86_400_000

    run(main())


def test_a_wait_ends_when_its_time_is_over_and_shows_the_run_as_it_was() -> None:
    server = Holding(finished_at_ms=60_000)

    async def main() -> WaitTimeout:
        with pytest.raises(WaitTimeout) as caught:
            await client(server).wait("r1", timeout_s=30.5)
        assert now() == 30_500
        return caught.value

    error = run(main())
    assert error.run.status == "running"
    assert isinstance(error, TimeoutError)
    assert server.asked == [(0, 25.0), (25_000, 5.5)]
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own, as between processes
    assert (str(copy), copy.run, copy.facts) == (str(error), error.run, error.facts)


def test_no_time_at_all_is_one_look() -> None:
    server = Holding(finished_at_ms=1000)

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            await client(server).wait("r1", timeout_s=0)
        assert now() == 0

    run(main())
    assert server.asked == [(0, 0.0)]


def test_a_server_that_does_not_hold_its_answer_is_not_asked_in_a_tight_loop() -> None:
    script = Script([run_view("running")])

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            await client(script).wait("r1", timeout_s=60)

    run(main())
    assert len(script.requests) <= 60 / 0.25 + 2
    assert all(250 <= wait_ms <= 750 for wait_ms in script.waits_ms[:-2])


def test_a_restart_of_the_server_is_waited_through() -> None:
    server = Holding(finished_at_ms=40_000, away_until_ms=3_000)

    async def main() -> None:
        assert (await client(server, seed=3).wait("r1", timeout_s=60)).status == "succeeded"

    run(main())


def test_retries_of_a_wait_do_not_outlast_its_time() -> None:
    script = Script([DEAD])

    async def main() -> ServerUnavailable:
        with pytest.raises(ServerUnavailable) as caught:
            await client(script, sample=0.999).wait("r1", timeout_s=2)
        assert now() <= 2000
        return caught.value

    assert run(main()).gave_up is GaveUpBecause.TIME_SPENT


def test_a_run_that_is_not_there_is_said_at_once() -> None:
    async def main() -> None:
        with pytest.raises(NotFound, match="no such run"):
            await client(Script([problem(404, "not_found", detail="no such run")])).wait("r1")

    run(main())


def test_a_start_that_waits_returns_when_the_run_has_left_the_queue() -> None:
    document = {"run_id": "r1", "status": "queued", "position": 3, "estimate_s": 1.5}
    queued = HttpReply(202, {}, msgspec.json.encode(document))
    script = Script([queued, run_view("queued"), run_view("running"), queued])

    async def main() -> None:
        begun = await client(script, sample=0.5).start("w", wait=True, priority=7)
        assert (begun.run_id, begun.status, begun.position) == ("r1", "running", None)
        assert now() == 1_000  # two looks, half a second apart; nothing was retried
        begun = await client(script).start("w", on_full="queue")
        assert (begun.status, begun.position, begun.estimate_s) == ("queued", 3, 1.5)

    run(main())


def test_a_start_whose_wait_fails_says_that_it_was_begun_and_under_which_key() -> None:
    document = {"run_id": "r1", "status": "queued", "position": 3}
    queued = HttpReply(202, {}, msgspec.json.encode(document))
    script = Script([queued, DEAD])

    async def main() -> None:
        with pytest.raises(ServerUnavailable, match="r1") as caught:
            await client(script, sample=0.5).start("w", wait=True)
        sent = dict(script.requests[0].headers)["Idempotency-Key"]
        assert (caught.value.idempotency_key, caught.value.may_have_run) == (sent, True)
        assert pickle.loads(pickle.dumps(caught.value)).idempotency_key == sent  # noqa: S301

    run(main())


def test_a_run_of_a_batch_without_an_estimate_has_none() -> None:
    rows = [
        {"status": 200, "run_id": "r1"},
        {"status": 202, "run_id": "r2", "position": 1, "estimate_s": None},
        {"status": 202, "run_id": "r3", "position": 2, "estimate_s": 1.5},
    ]
    script = Script([HttpReply(200, {}, msgspec.json.encode({"results": rows}))])

    async def main() -> None:
        results = await client(script).start_many("w", [{}, {}, {}])
        assert [(each.position, each.estimate_s) for each in results] == [
            (None, None),
            (1, None),
            (2, 1.5),
        ]

    run(main())
