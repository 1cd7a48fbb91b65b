"""A start makes one run, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest

from stanchion.client.errors import IdempotencyMismatch, ServerUnavailable
from stanchion.sim.loop import run
from stanchion.transport.messages import HttpReply, NoReply, Request
from tests.client.scripted import DEAD, LOST, Script, away, client, problem, started


class Keeping:
    """Starts runs, remembers keys, and loses as many answers as it is told to."""

    def __init__(self, *, lose: int = 0, chance: random.Random | None = None) -> None:
        self.runs: dict[str, bytes] = {}
        self._lose = lose
        self._chance = chance
        self._numbers = itertools.count()

    async def send(self, request: Request) -> HttpReply | NoReply:
        await asyncio.sleep(0.001)
        if self._chance is not None and self._chance.random() < 0.1:
            return DEAD if self._chance.random() < 0.5 else away()
        key = dict(request.headers).get("Idempotency-Key") or f"none-{next(self._numbers)}"
        is_known = key in self.runs
        if is_known and self.runs[key] != request.body:
            return problem(422, "idempotency_mismatch")
        self.runs[key] = request.body
        if self._chance is not None and self._chance.random() < 0.2:
            return LOST if self._chance.random() < 0.5 else problem(502)
        if self._lose > 0:
            self._lose -= 1
            return LOST
        headers = {"idempotency-replayed": "true"} if is_known else {}
        return HttpReply(200, headers, started(key).body)


@pytest.mark.parametrize("lost", range(8))
def test_a_lost_answer_never_makes_a_second_run(lost: int) -> None:
    server = Keeping(lose=lost)

    async def main() -> None:
        handle = await client(server, seed=lost).start("w", {"n": 1})
        assert handle.run_id in server.runs
        assert handle.is_replay == (lost > 0)

    run(main())
    assert len(server.runs) == 1


def test_two_hundred_starts_over_a_bad_line_are_two_hundred_runs() -> None:
    server = Keeping(chance=random.Random(7))

    async def main() -> list[str]:
        caller = client(server, seed=7)
        handles = await asyncio.gather(*(caller.start("w", {"n": n}) for n in range(200)))
        return [each.run_id for each in handles]

    run_ids = run(main())
    assert len(set(run_ids)) == 200
    assert set(run_ids) == set(server.runs)


def test_rerun_and_single_jobs_carry_a_key_of_their_own_too() -> None:
    submitted = {"job_id": "j", "run_id": "r", "status": "pending"}
    script = Script([LOST, started(), LOST, HttpReply(200, {}, msgspec.json.encode(submitted))])

    async def main() -> None:
        caller = client(script, sample=0.0)
        await caller.rerun("r0", from_step="plan")
        await caller.submit_job("agent.plan", [1])

    run(main())
    keys = [dict(each.headers)["Idempotency-Key"] for each in script.requests]
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_every_start_has_another_key_and_a_given_one_is_sent_as_it_is() -> None:
    script = Script([started()])

    async def main() -> None:
        caller = client(script)
        for _ in range(50):
            await caller.start("w")
        await caller.start("w", idempotency_key="order-42")

    run(main())
    keys = [dict(each.headers)["Idempotency-Key"] for each in script.requests]
    assert len(set(keys)) == 51
    assert keys[-1] == "order-42"


def test_a_start_that_failed_says_with_which_key_to_go_on() -> None:
    server = Keeping(lose=8)

    async def main() -> None:
        caller = client(server, sample=0.0)
        with pytest.raises(ServerUnavailable) as caught:
            await caller.start("w", {"n": 1})
        assert caught.value.may_have_run
        again = await caller.start("w", {"n": 1}, idempotency_key=caught.value.idempotency_key)
        assert again.is_replay
        with pytest.raises(IdempotencyMismatch):
            await caller.start("w", {"n": 2}, idempotency_key=caught.value.idempotency_key)

    run(main())
    assert len(server.runs) == 1


@pytest.mark.parametrize("key", ["", " ", "a b", "a\r\nX: y", "ä", "k" * 256])
def test_a_key_that_cannot_be_sent_is_refused_before_anything_is(key: str) -> None:
    script = Script([started()])

    async def main() -> None:
        with pytest.raises(ValueError, match="idempotency_key"):
            await client(script).start("w", idempotency_key=key)

    run(main())
    assert script.requests == []
