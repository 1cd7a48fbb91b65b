"""What callers heard and workers wrote down, held against the statements that must hold.

Statements that the simulator has too are its own functions (``stanchion.sim.invariants``).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from stanchion.sim.invariants import fence_rises, one_run_per_key, retry_after_in_bounds
from tests.chaos.fault import Seen
from tests.chaos.load import TENANTS, Heard, Start
from tests.chaos.tally import Losses, Tally
from tests.chaos.worker import Handed, Line, Told

__all__ = ["check_answers", "check_faults", "check_keys", "check_workers"]

_ANSWERS: Final = frozenset({0, 200, 429, 503})
_CAPPED: Final = "small"
"""Its two slots can be with a worker that stands still: then nobody of it gets in, rightly."""


def check_answers(tally: Tally, heard: Iterable[Heard]) -> None:
    """Every refusal says when to come again; nobody sees anything but 200, 429 and 503."""
    for each in heard:
        wrong = [] if each.status in _ANSWERS else [f"{each.status} {each.code}"]
        tally.look("a start is answered with 200, 429 or 503, never 500", wrong)
        if each.status in {429, 503}:
            missing = [] if each.has_header else [f"{each.status} without Retry-After"]
            bounds = retry_after_in_bounds(each.status, each.retry_after_ms)
            tally.look("every refusal has a Retry-After within its bounds", missing, bounds)


def check_keys(
    tally: Tally, started: Sequence[Start], again: Sequence[Start], losses: Losses
) -> None:
    """Each key, sent once more at the end, is answered with the run that it made."""
    runs: dict[str, str] = {}
    for first, second in zip(started, again, strict=True):
        key = (first.tenant, first.key)
        is_same = second.run_id == first.run_id and second.is_replay
        if not is_same and losses.excuse("admissions", first.at):
            continue
        tally.look("one run per key", one_run_per_key(key, {first.run_id, second.run_id}))
        other = runs.setdefault(first.run_id, first.key)
        wrong = [] if other == first.key else [f"{other} and {first.key} made {first.run_id}"]
        tally.look("one key per run", wrong)


def check_faults(tally: Tally, seen: Iterable[Seen]) -> None:
    """Every replica works again in time; meanwhile the others serve, every tenant."""
    for each in seen:
        late = _late(each.fault, each.recovered_s, each.recovered_s_max)
        tally.look("after a fault every replica does a fresh run in time", late)
        if each.survived_s is None:
            continue
        late = _late(each.fault, each.survived_s, each.survived_s_max)
        tally.look("during a fault the others do a fresh run in time", late)
        stuck = [
            f"{each.fault}: no start of {tenant} was answered"
            for tenant in TENANTS
            if tenant != _CAPPED and not each.answered[tenant]
        ]
        tally.look("during a fault other tenants are served", stuck)


def check_workers(tally: Tally, lines: Iterable[Line], losses: Losses) -> None:
    """Fences of a job rise; it is finished once, by its last holder; so is each step and item."""
    handed: dict[str, list[Handed]] = defaultdict(list)
    accepted: dict[str, dict[int, Told]] = defaultdict(dict)
    for line in lines:
        if isinstance(line, Handed):
            handed[line.job_id].append(line)
        elif line.verdict == "accepted":
            # The same result may be sent again, and is accepted again: that is one effect.
            accepted[line.job_id].setdefault(line.fence, line)
    for job_id, deliveries in handed.items():
        tally.look("a job's fences rise", _rising(job_id, deliveries, losses))
        tally.look(
            "a job is finished once, by its last holder",
            _finished_once(job_id, deliveries, accepted[job_id], losses),
        )
    effects: dict[tuple[str, str, int | None], set[str]] = defaultdict(set)
    for job_id, results in accepted.items():
        if any(each.status == "succeeded" for each in results.values()) and handed[job_id]:
            first = handed[job_id][0]
            effects[first.run_id, first.step_id, first.item].add(job_id)
    for place, jobs in effects.items():
        wrong = [f"{place}: {sorted(jobs)}"] if len(jobs) > 1 else []
        tally.look("each step's and item's effect is accepted at most once", wrong)


def _rising(job_id: str, deliveries: list[Handed], losses: Losses) -> Iterator[str]:
    ordered = sorted(deliveries, key=lambda each: (each.delivery, each.fence))
    for before, now in itertools.pairwise(ordered):
        yield from fence_rises(job_id, before=before.fence, now=now.fence, strictly=True)
        if before.delivery == now.delivery and not losses.excuse("job leases", before.at):
            yield f"{job_id}: delivery {now.delivery} was handed out twice"


def _finished_once(
    job_id: str, deliveries: list[Handed], results: dict[int, Told], losses: Losses
) -> Iterator[str]:
    if not results:
        return
    *earlier, last = sorted(results)
    for fence in earlier:
        if not losses.excuse("results", results[fence].at):
            yield f"{job_id}: accepted under {fence} and again under {last}"
    highest = max(each.fence for each in deliveries)
    if highest > last and not losses.excuse("results", results[last].at):
        yield f"{job_id}: accepted under {last} and handed out again under {highest}"


def _late(fault: str, took_s: float, most_s: float) -> Iterator[str]:
    if took_s > most_s:
        yield f"{fault}: {took_s:.1f} s, of {most_s:.1f}"
