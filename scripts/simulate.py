"""Long and measured runs of the simulator.

python scripts/simulate.py night          # until stopped; goes on where it was stopped
python scripts/simulate.py coverage       # which lines of core and services no day executes
python scripts/simulate.py valkey         # days whose store is the Redis store on a Valkey server
python scripts/simulate.py table          # the deliberate defects in docs/explanation
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import coverage

from stanchion.sim.command import shrunk
from stanchion.sim.replica import Mutant
from stanchion.sim.scenario import MIXED, PROFILES, draw
from stanchion.sim.world import Verdict, play

_ROOT: Final = Path(__file__).resolve().parent.parent
_REPORTS: Final = _ROOT / "reports"
_PAGE: Final = _ROOT / "docs" / "explanation" / "simulation.md"
_BEGIN: Final = "<!-- mutants: written by scripts/simulate.py table -->"
_END: Final = "<!-- end of mutants -->"
_TOLD_EVERY: Final = 50


# ── A night ──────────────────────────────────────────────────────────────────────────────────────


def night(place: Path, *, days: int | None, workers: int) -> int:
    """Play days of all profiles until stopped; keep the place, and shrink what goes wrong.

    1 if any day went wrong, also one of an earlier night.
    """
    known: dict[str, Any] = {"next": 0, "hours": 0.0, "broken": []}
    if place.exists():
        known |= json.loads(place.read_text())
    profiles = [MIXED, *(name for name in PROFILES if name != "long"), MIXED, "long"]
    seeds = itertools.count(known["next"])
    last = None if days is None else known["next"] + days
    place.parent.mkdir(exist_ok=True)
    with suppress(KeyboardInterrupt), ProcessPoolExecutor(workers) as pool:
        while last is None or known["next"] < last:
            some = list(itertools.islice(seeds, 4 * workers))[: None if last is None else days]
            named = [(seed, profiles[seed % len(profiles)]) for seed in some]
            for (seed, profile), verdict in zip(named, pool.map(_day, named), strict=True):
                known["next"] = seed + 1
                known["hours"] += verdict.simulated_s / 3600
                if verdict.broken:
                    print(f"seed {seed}, profile {profile}: {verdict.broken[0]}", flush=True)
                    found = _ROOT / "reports" / f"sim-{profile}-{seed}.txt"
                    small = shrunk(play(draw(seed, profile)), play)
                    found.write_text("\n".join((*map(str, small.scenario.faults), *small.lines)))
                    known["broken"].append([seed, profile, verdict.broken[0]])
                place.write_text(json.dumps(known, indent=1))
            if known["next"] % _TOLD_EVERY < len(some):
                told = f"{known['next']} days, {known['hours']:.1f} h, {len(known['broken'])} wrong"
                print(told, flush=True)
    return 1 if known["broken"] else 0


def _day(named: tuple[int, str]) -> Verdict:
    return play(draw(*named))


# ── Coverage ─────────────────────────────────────────────────────────────────────────────────────


def covered(days: int) -> int:
    """Print, for each module of core and services, what the first days do not execute."""
    source = _ROOT / "src" / "stanchion"
    measured = coverage.Coverage(
        include=[f"{source}/core/*", f"{source}/services/*"], data_file=None, config_file=False
    )
    # Imported again, so that definitions count as executed.
    for name in [name for name in sys.modules if name.partition(".")[0] == "stanchion"]:
        del sys.modules[name]
    measured.start()
    draw_day = importlib.import_module("stanchion.sim.scenario").draw
    play_day = importlib.import_module("stanchion.sim.world").play
    for seed in range(days):
        play_day(
            draw_day(seed, "operators" if seed % 3 == 1 else "outage" if seed % 9 == 0 else MIXED)
        )
    measured.stop()
    rows: list[tuple[float, str, int, int, str]] = []
    for file in sorted(measured.get_data().measured_files()):
        _, lines, _, missing, ranges = measured.analysis2(file)
        share = 1 - len(missing) / max(1, len(lines))
        name = str(Path(file).relative_to(source))
        rows.append((share, name, len(lines), len(missing), ranges if missing else ""))
    rows.sort()
    lines_all, missing_all = sum(row[2] for row in rows), sum(row[3] for row in rows)
    print(f"{days} days execute {100 * (1 - missing_all / lines_all):.1f} % of core and services")
    for share, name, count, left, _ in rows:
        print(f"{100 * share:5.1f} %  {name:40} {left:4d} of {count} lines left")
    _REPORTS.mkdir(exist_ok=True)
    report = _REPORTS / "sim-coverage.txt"
    report.write_text("".join(f"{name}: {ranges}\n" for _, name, _, _, ranges in rows))
    print(f"the lines are in {report.relative_to(_ROOT)}")
    return 0


# ── Days on Valkey ───────────────────────────────────────────────────────────────────────────────


def on_valkey(days: int) -> int:
    """Play days of each profile whose store does not lose writes; compare with the memory store."""
    sys.path.insert(0, str(_ROOT))
    from tests.sim.valkey import playing_on_valkey  # noqa: PLC0415 - part of the tests

    wrong = commands = 0
    lasting = [each.name for each in PROFILES.values() if not each.store_loses]
    lasting = [name for name in lasting if name not in {"long", "sqlite"}]
    with playing_on_valkey() as world:
        for number in range(days):
            seed, profile = number // len(lasting), lasting[number % len(lasting)]
            verdict = play(draw(seed, profile), world)
            commands += verdict.checks["both stores answer the same"]
            wrong += bool(verdict.broken)
            for sentence in verdict.broken[:1]:
                print(f"seed {seed}, profile {profile}: {sentence}", flush=True)
    print(f"{days} days on Valkey, {commands:,} commands compared, {wrong} days wrong")
    return 1 if wrong or not commands else 0


# ── The table of deliberate defects ──────────────────────────────────────────────────────────────


def tabulate(*, days: int, workers: int) -> int:
    """Write the table of deliberate defects into the page about the simulator."""
    sys.path.insert(0, str(_ROOT))
    from tests.sim.mutants import ALL  # noqa: PLC0415 - part of the tests

    with ProcessPoolExecutor(workers) as pool:
        found = list(pool.map(partial(_hunt, days=days), [each.name for each in ALL]))
    text = _PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n{_table(ALL, found)}\n{_END}{after}")
    return 1 if any(day is None for day, _ in found) else 0


def _hunt(name: str, days: int) -> tuple[int | None, str]:
    sys.path.insert(0, str(_ROOT))
    from tests.sim.mutants import ALL  # noqa: PLC0415 - likewise

    (mutant,) = (each for each in ALL if each.name == name)
    for number in range(days):
        verdict = play(draw(number, mutant.profile), mutant)
        if verdict.broken:
            return number + 1, verdict.broken[0].partition(":")[0]
    return None, f"not within {days} days"


def _table(mutants: Sequence[Mutant], found: Sequence[tuple[int | None, str]]) -> str:
    days = [day for day, _ in found if day is not None]
    middle, worst = statistics.median(days), max(days)
    lines = [
        f"{len(days)} of {len(mutants)} are found; median day {middle:g}, worst {worst}.",
        "",
        "| defect | what it does | profile | day | found by |",
        "|---|---|---|---|---|",
    ]
    for mutant, (day, by) in zip(mutants, found, strict=True):
        shown = "" if day is None else day
        lines.append(f"| `{mutant.name}` | {mutant.says} | {mutant.profile} | {shown} | {by} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Long and measured runs of the simulator.")
    parser.add_argument("what", choices=["night", "coverage", "valkey", "table"])
    parser.add_argument("--days", type=int, help="how many; a night has no end, others have 30")
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument(
        "--place",
        type=Path,
        default=_REPORTS / "sim-night.json",
        help="where a night keeps its place",
    )
    given = parser.parse_args()
    if given.what == "night":
        return night(given.place, days=given.days, workers=given.workers)
    if given.what == "coverage":
        return covered(given.days or 30)
    if given.what == "valkey":
        return on_valkey(given.days or 30)
    return tabulate(days=given.days or 120, workers=given.workers)


if __name__ == "__main__":
    sys.exit(main())
