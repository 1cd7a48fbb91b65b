"""Bad days, and that each is the same every time. `make sim` plays ten thousand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from itertools import count

import pytest
from msgspec.structs import replace

from stanchion.sim.command import main, replay, run
from stanchion.sim.scenario import PROFILES, FaultKind, PlannedFault, draw
from stanchion.sim.world import Verdict, play

DAYS = 20
DRAWN = 120
A_PART = 5
OTHER_HASHES = {"1": (1,), "2": (1, 6)}
"""The seeds of hashes, and the days that are played with each."""


@cache
def _day(seed: int) -> Verdict:
    """How a day ends in this process: it is played once, and tests compare others with it."""
    return play(draw(seed))


@pytest.mark.parametrize("first", range(0, DAYS, A_PART))
def test_every_day_ends_well(first: int) -> None:
    broken = {
        seed: verdict.broken[0]
        for seed in range(first, first + A_PART)
        if (verdict := _day(seed)).broken
    }
    assert broken == {}


def test_a_day_with_the_usual_terms_ends_well() -> None:
    verdict = play(draw(0, "long"))
    assert verdict.broken == ()
    assert verdict.simulated_s > 1_200


def test_on_a_calm_day_everybody_gets_a_run_and_nothing_goes_wrong() -> None:
    verdict = play(draw(3, "calm"))
    assert verdict.broken == ()
    assert verdict.runs >= len({ask.key for ask in verdict.scenario.asks}) / 2
    # A worker drops its held renewal when the jobs that it is about have ended.
    assert set(verdict.faults) <= {"bell lost", "delivered twice", "caller left"}


def test_a_day_is_the_same_every_time() -> None:
    first, second = _day(5), play(draw(5))
    assert first.lines == second.lines
    assert first.digest == second.digest


def test_a_day_is_the_same_in_another_process_with_other_hashes() -> None:
    code = (
        "import sys\n"
        "from stanchion.sim.scenario import draw\n"
        "from stanchion.sim.world import play\n"
        "print(*(play(draw(int(seed))).digest for seed in sys.argv[1:]))"
    )
    for hash_seed, days in OTHER_HASHES.items():
        told = subprocess.run(
            [sys.executable, "-c", code, *map(str, days)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert told.split() == [_day(seed).digest for seed in days]


def test_a_day_is_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = _day(6).digest
    slow = count(step=0.1)
    for clock in ("perf_counter", "monotonic", "thread_time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(slow)))
    assert play(draw(6)).digest == usual


def test_other_seeds_are_other_days() -> None:
    assert len({_day(seed).digest for seed in range(4)}) == 4


def test_between_them_the_days_meet_every_kind_of_fault() -> None:
    kinds = {fault.kind for seed in range(DRAWN) for fault in draw(seed).faults}
    assert kinds == {fault.kind for seed in range(DRAWN, 2 * DRAWN) for fault in draw(seed).faults}
    assert len(kinds) == 28


def test_a_summary_says_how_it_went() -> None:
    said: list[str] = []
    assert run(range(2), say=said.append) == 0
    text = "\n".join(said)
    assert "2 days" in text
    assert "h a second" in text
    assert "s of processor time" in text
    assert "commits form one chain" in text
    assert text.endswith("ALL GOOD")


def test_a_replay_tells_the_day_line_by_line() -> None:
    said: list[str] = []
    assert replay(1, say=said.append) == 0
    assert said[0].startswith("day 1:")
    assert any("granted with fence" in line for line in said)
    assert any(line.startswith("digest ") for line in said)


def test_a_subscriber_that_gave_up_before_its_first_event_misses_nothing() -> None:
    # mixed 463: its stream was open, the only replica was away until the SDK gave up, and no event
    # had told it where to resume. Runs began before it subscribed again.
    day = draw(1, "calm")
    away = PlannedFault(0.47, FaultKind.DRAIN_REPLICA, 0, 23.0, 0.5)
    asks = tuple(
        replace(day.asks[0], at_s=22.8 + number / 4, tenant=tenant, key=f"key-{number}", copies=1)
        for number, tenant in enumerate(("acme", "globex") * 4)
    )
    profile = replace(PROFILES["embedded"], is_stormy=False)
    verdict = play(replace(day, profile=profile, replicas=1, asks=asks, faults=(away,)))
    assert any("subscriber-acme: events: connection refused" in line for line in verdict.lines)
    assert verdict.broken == ()


def test_a_range_of_seeds_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "one..two"])
    assert "is not A..B" in capsys.readouterr().err
