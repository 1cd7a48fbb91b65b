"""Shrinking: the shortest day that still goes wrong in the same way, as far as it can be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from stanchion.sim.scenario import Scenario
from stanchion.sim.world import Verdict

__all__ = ["shrunk"]


def shrunk(
    verdict: Verdict, play: Callable[[Scenario], Verdict], *, plays_max: int = 120
) -> Verdict:
    """Leave things out as long as the same statement breaks; the last verdict that was broken."""
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
    """Which statements broke, without the details."""
    return {sentence.partition(":")[0] for sentence in verdict.broken}


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Days with something left out, the most first."""
    faults, asks = scenario.faults, scenario.asks
    for part in (2, 4):
        for start in range(part):
            cut = slice(start * len(asks) // part, (start + 1) * len(asks) // part)
            if asks[cut]:
                yield replace(scenario, asks=asks[: cut.start] + asks[cut.stop :])
            cut = slice(start * len(faults) // part, (start + 1) * len(faults) // part)
            if faults[cut]:
                yield replace(scenario, faults=faults[: cut.start] + faults[cut.stop :])
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
