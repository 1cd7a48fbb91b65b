"""``stanchion sim``: runs simulated days with faults, and reports violations.

stanchion sim --seeds 0..200 --profile mixed      a summary; exit code 1 if a day went wrong
stanchion sim --seed 7                            one day, line by line
python -m stanchion sim --mutants                 in a checkout: deliberate defects are found
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final

from msgspec.structs import replace

from stanchion.sim.replica import NO_MUTANT, Mutant
from stanchion.sim.scenario import MIXED, PROFILES, Scenario, draw
from stanchion.sim.world import Verdict, play

PROGRESS_EVERY_S: Final = 5.0
FAILURES_SHOWN: Final = 3
MUTANT_SEEDS_MAX: Final = 300
MUTANTS: Final = "tests.sim.mutants"
_SEEDS: Final = range(50)
_NO_MUTANTS: Final = (
    "the deliberate defects come with the tests: in a checkout, run python -m stanchion sim"
)
Say = Callable[[str], None]


class Summary:
    """The totals of many days."""

    def __init__(self) -> None:
        self.days = 0
        self.runs = 0
        self.simulated_s = 0.0
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        self.broken: list[tuple[int, tuple[str, ...]]] = []
        self._began_s = time.monotonic()
        self._worked_s = _processor_s()

    def add(self, verdict: Verdict) -> None:
        """Add a day."""
        self.days += 1
        self.runs += verdict.runs
        self.simulated_s += verdict.simulated_s
        self.faults.update(verdict.faults)
        self.checks.update(verdict.checks)
        if verdict.broken:
            self.broken.append((verdict.scenario.seed, verdict.broken))

    @property
    def rate(self) -> str:
        """The virtual hours of all days, and how many of them pass in a second."""
        elapsed_s = max(1e-9, time.monotonic() - self._began_s)
        hours = self.simulated_s / 3600
        return f"{hours:.1f} h simulated, {hours / elapsed_s:.3f} h a second, {elapsed_s:.0f} s"

    def lines(self) -> Iterator[str]:
        """The summary as text."""
        yield f"{self.days} days, {self.runs} runs; {self.rate}"
        # Unlike the rate, this tells little of what else the machine does.
        worked_s = max(1e-9, _processor_s() - self._worked_s)
        hours = self.simulated_s / 3600
        yield f"{worked_s:.0f} s of processor time, {hours / worked_s:.3f} h in each"
        yield "faults:"
        for name, number in self.faults.most_common():
            yield f"  {number:9,d}  {name}"
        yield "checks:"
        for name, number in self.checks.most_common():
            yield f"  {number:9,d}  {name}"


def _processor_s() -> float:
    """The processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = arguments()
    given = parser.parse_args(words)
    if given.seed is not None and given.seeds is not None:
        parser.error("--seed plays one day, --seeds many: give one of them")
    if given.only is not None and not given.mutants and given.seed is None:
        parser.error("--only needs --seed (that day with the defect) or --mutants (look for it)")
    if given.only is not None and _mutant(given.only) is NO_MUTANT:
        known = ", ".join(each.name for each in _mutants())
        parser.error(f"--only: there is no defect {given.only!r}; {known or _NO_MUTANTS}")
    if given.mutants and not _mutants():
        parser.error(f"--mutants: {_NO_MUTANTS}")
    if given.mutants:
        return hunt(given.only, seeds_max=given.seeds_max, workers=given.workers, say=_say)
    if given.seed is not None:
        return replay(given.seed, given.profile, say=_say, mutant=_mutant(given.only))
    return run(given.seeds or _SEEDS, given.profile, workers=given.workers, say=_say)


def run(seeds: range, profile: str = MIXED, *, workers: int = 1, say: Say = print) -> int:
    """Run many days; returns 1 if one has a violation."""
    summary, told_s = Summary(), time.monotonic()
    for verdict in _played(seeds, profile, workers):
        summary.add(verdict)
        if time.monotonic() - told_s > PROGRESS_EVERY_S:
            told_s = time.monotonic()
            say(f"{summary.days} of {len(seeds)} days, {len(summary.broken)} wrong; {summary.rate}")
    for line in summary.lines():
        say(line)
    for seed, broken in summary.broken[:FAILURES_SHOWN]:
        say(f"\nseed {seed} ({profile}): {broken[0]}")
        small = shrunk(play(draw(seed, profile)), play)
        _tell(small, say)
        say(f"replay it: stanchion sim --seed {seed} --profile {profile}")
    say(f"\n{'ALL GOOD' if not summary.broken else f'{len(summary.broken)} DAYS WENT WRONG'}")
    if summary.broken:
        say("seeds: " + " ".join(str(seed) for seed, _ in summary.broken[:50]))
    return 1 if summary.broken else 0


def replay(seed: int, profile: str = MIXED, *, say: Say = print, mutant: Mutant = NO_MUTANT) -> int:
    """Run one day and print its whole history."""
    verdict = play(draw(seed, profile), mutant)
    for line in _plan(verdict.scenario):
        say(line)
    say("history:")
    for line in verdict.lines:
        say(line)
    say(f"digest {verdict.digest}; {verdict.simulated_s:.0f} s simulated, {verdict.runs} runs")
    for sentence in verdict.broken:
        say(f"BROKEN {sentence}")
    if not verdict.broken:
        say("ALL GOOD")
    return 1 if verdict.broken else 0


def hunt(
    only: str | None = None,
    *,
    seeds_max: int = MUTANT_SEEDS_MAX,
    workers: int = 1,
    say: Say = print,
) -> int:
    """Run days with each defect until it is detected; returns 1 if one is not."""
    names = [each.name for each in _mutants() if only in {None, each.name}]
    days: list[int] = []
    say(f"{'days':>5}  {'defect':<28} found by")
    for name, (number, sentence) in zip(names, _hunted(names, seeds_max, workers), strict=True):
        if number is not None:
            days.append(number)
        say(f"{'never' if number is None else number:>5}  {name:<28} {sentence}")
    if days:
        say(f"days to find out: median {statistics.median(days):g}, worst {max(days)}")
    return 1 if len(days) < len(names) else 0


def _hunted(names: Sequence[str], seeds_max: int, workers: int) -> Iterator[tuple[int | None, str]]:
    one = partial(_hunt_one, seeds_max=seeds_max)
    if workers == 1:
        yield from map(one, names)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(one, names)


def _hunt_one(name: str, seeds_max: int) -> tuple[int | None, str]:
    """After how many days a defect was detected, and by which invariant."""
    mutant = _mutant(name)
    for number, seed in enumerate(range(seeds_max), start=1):
        verdict = play(draw(seed, mutant.profile), mutant)
        if verdict.broken:
            return number, verdict.broken[0]
    return None, f"not within {seeds_max} days"


def _played(seeds: range, profile: str, workers: int) -> Iterator[Verdict]:
    if workers == 1:
        yield from (play(draw(seed, profile)) for seed in seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        # Day by day: with days in tens, one process waits for the last ten of another.
        yield from pool.map(partial(_play_briefly, profile=profile), seeds)


def _play_briefly(seed: int, profile: str) -> Verdict:
    """Run one day, without its lines: they need not be sent between processes."""
    from msgspec.structs import replace  # noqa: PLC0415 - for the children alone

    return replace(play(draw(seed, profile)), lines=())


def _tell(verdict: Verdict, say: Say) -> None:
    say("the shortest day that goes wrong in the same way:")
    for line in _plan(verdict.scenario):
        say(line)
    for line in verdict.lines:
        say(line)


def _plan(scenario: Scenario) -> Iterable[str]:
    weather = "stormy" if scenario.is_stormy else "clear"
    yield (
        f"day {scenario.seed}: {scenario.profile.name}, {scenario.replicas} replicas,"
        f" {scenario.workers} workers, {weather}"
    )
    yield from (f"  {ask}" for ask in scenario.asks)
    yield from (f"  {fault}" for fault in scenario.faults)
    yield from (f"  {each}" for each in (*scenario.schedules, *scenario.bulks))


def _mutant(name: str | None) -> Mutant:
    return next((each for each in _mutants() if each.name == name), NO_MUTANT)


def _mutants() -> Sequence[Mutant]:
    """The deliberate defects. They are part of the tests; outside a checkout there are none."""
    try:
        found: Sequence[Mutant] = importlib.import_module(MUTANTS).ALL
    except ModuleNotFoundError:
        return ()
    return found


def arguments() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(
        prog="stanchion sim", description="Run the services under seeded faults, in virtual time."
    )
    parser.add_argument(
        "--seeds", type=_seeds, metavar="A..B", help="days to run, B not included; default 0..50"
    )
    parser.add_argument("--seed", type=int, help="run one day and print its history")
    parser.add_argument("--profile", default=MIXED, choices=[MIXED, *PROFILES])
    parser.add_argument("--workers", type=_count, default=1, help="processes; default 1")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="find the deliberate defects of tests/sim/mutants.py",
    )
    parser.add_argument(
        "--only",
        metavar="DEFECT",
        help="only this defect, by name",
    )
    parser.add_argument(
        "--seeds-max",
        type=_count,
        default=MUTANT_SEEDS_MAX,
        help=f"days to run for a defect; default {MUTANT_SEEDS_MAX}",
    )
    return parser


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last)) if dots else range(int(first), int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A..B") from None
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} has no days: B is not included")
    return seeds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


def shrunk(
    verdict: Verdict, play: Callable[[Scenario], Verdict], *, plays_max: int = 120
) -> Verdict:
    """Reduce the scenario while the same invariant breaks; returns the last broken verdict."""
    plays = 0
    wanted = _what(verdict)
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(verdict.scenario):
            if plays == plays_max:
                return verdict
            plays += 1
            found = play(smaller)
            if _what(found) & wanted:
                verdict, is_smaller = found, True
                break
    return verdict


def _what(verdict: Verdict) -> set[str]:
    """The names of the broken invariants."""
    return {sentence.partition(":")[0] for sentence in verdict.broken}


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Reduced scenarios, the smallest first."""
    faults, asks = scenario.faults, scenario.asks
    for part in (2, 4):
        for start in range(part):
            cut = slice(start * len(asks) // part, (start + 1) * len(asks) // part)
            if asks[cut]:
                yield replace(scenario, asks=asks[: cut.start] + asks[cut.stop :])
            cut = slice(start * len(faults) // part, (start + 1) * len(faults) // part)
            if faults[cut]:
                yield replace(scenario, faults=faults[: cut.start] + faults[cut.stop :])
    for number in range(len(scenario.bulks)):
        left = scenario.bulks[:number] + scenario.bulks[number + 1 :]
        yield replace(scenario, bulks=left)
    for number in range(len(scenario.schedules)):
        rest = scenario.schedules[:number] + scenario.schedules[number + 1 :]
        yield replace(scenario, schedules=rest)
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for number in range(len(asks)):
        yield replace(scenario, asks=asks[:number] + asks[number + 1 :])
    if scenario.is_stormy:
        yield replace(scenario, is_stormy=False)
    if scenario.workers > 1:
        yield replace(scenario, workers=scenario.workers - 1)
    if scenario.replicas > 1:
        yield replace(scenario, replicas=scenario.replicas - 1)
