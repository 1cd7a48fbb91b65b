"""Run the drills, and say which alerts their metrics fire; draw the dashboards from them.

Each drill runs on real processes that are scraped every five seconds, as Prometheus would do it.
`promtool test rules` then evaluates the alert rules and the panels on what was recorded. Written
are the table and the pictures of docs/how-to/dashboards-and-alerts.md, and
dashboards/drill_test.yml, which `make test` gives to promtool again. It takes about eight minutes
and is run by hand.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch
from urllib.request import urlopen

from scripts.generate_dashboards import DASHBOARDS, FOLDER, Dashboard, Panel
from stanchion.charts import LineChart, Series, Window, svg_of
from stanchion.drills import admission, fallback, lock_busy, processes, renewal, retry
from stanchion.drills.command import DRILLS
from stanchion.drills.observe import parse_metrics
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.proxy import Proxy

DOCS: Final = FOLDER.parent / "docs" / "how-to"
PAGE: Final = DOCS / "dashboards-and-alerts.md"
PICTURES: Final = DOCS / "dashboards"
DRILL_TEST: Final = FOLDER / "drill_test.yml"
STEP_S: Final = 5
_HELD_S: Final = 600
"""Idle time after a drill: a server that does nothing scrapes the same values."""
_MODULES: Final = (admission, fallback, lock_busy, renewal, retry)
_PANELS_DRAWN: Final = 4
_SERIES_DRAWN: Final = 6
_FIRING: Final = 'ALERTS{alertstate="firing"}'
_NAME: Final = re.compile(r"(?:stanchion|process)_[a-z_]+")


class Recording(NamedTuple):
    """What was scraped, every ``STEP_S``; ``None`` where a replica did not answer."""

    series: dict[str, list[float | None]]
    cuts: tuple[tuple[float, float], ...]
    """When the lock store was cut, in seconds from the first scrape."""

    @property
    def duration_s(self) -> int:
        return STEP_S * max(len(values) for values in self.series.values())

    def until(self, at_s: float) -> Recording:
        """The first part of it."""
        size = int(at_s / STEP_S)
        return Recording({name: found[:size] for name, found in self.series.items()}, self.cuts)

    def only(self, names: set[str]) -> Recording:
        """Some of the metrics."""
        kept = {key: found for key, found in self.series.items() if _NAME.findall(key)[0] in names}
        return Recording(kept, self.cuts)


class Case(NamedTuple):
    """A drill, or a part of it, and the pages that it must fire."""

    drill: str
    fault: str
    pages: frozenset[str]


CASES: Final = (
    Case(
        "admission",
        "bursts of 100 starts on a tenant with two slots; under the strategy `lock` some get 503",
        frozenset({"StanchionStartsUnavailable"}),
    ),
    Case(
        "retry",
        "fleets of callers on a full tenant; the gate is cut for 3 s",
        frozenset({"StanchionStartsUnavailable"}),
    ),
    Case("fallback", "the lock store is cut for 30 s", frozenset({"StanchionLockFallback"})),
    Case(
        "fallback, second cut",
        "the lock store is cut for 120 s, and results are sent twice",
        frozenset({"StanchionLockFallback", "StanchionEscalated"}),
    ),
    Case("renewal", "renewals fail while runs and jobs are worked on", frozenset()),
    Case("lock-busy", "two replicas contend for the same runs", frozenset()),
)


# ── Recording ────────────────────────────────────────────────────────────────────────────────────


async def record(name: str, options: DrillOptions) -> Recording:
    """Run a drill, and scrape its servers."""
    scraped: dict[str, dict[int, float]] = defaultdict(dict)
    cuts: list[tuple[float, float]] = []
    began = time.monotonic()

    def step() -> int:
        return int((time.monotonic() - began) / STEP_S)

    @asynccontextmanager
    async def started(**settings: Any) -> AsyncIterator[processes.Deployment]:  # noqa: ANN401 - passed on
        async with processes.started(**settings) as deployment:
            task = asyncio.create_task(_scrape(deployment.urls, scraped, step))
            try:
                yield deployment
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    cut, mend = Proxy.cut, Proxy.mend
    since: dict[Proxy, float] = {}

    def cut_noted(proxy: Proxy) -> None:
        since[proxy] = time.monotonic() - began
        cut(proxy)

    def mend_noted(proxy: Proxy) -> None:
        if proxy in since:
            cuts.append((since.pop(proxy), time.monotonic() - began))
        mend(proxy)

    with ExitStack() as patched:
        patched.enter_context(patch.object(Proxy, "cut", cut_noted))
        patched.enter_context(patch.object(Proxy, "mend", mend_noted))
        for module in _MODULES:
            patched.enter_context(patch.object(module, "started", started))
        await DRILLS[name](options, Progress(name))
    steps = range(step() + 1)
    series = {key: [values.get(each) for each in steps] for key, values in scraped.items()}
    windows = sorted({(round(begin), round(end)) for begin, end in cuts})
    return Recording(series, tuple(windows))


async def _scrape(urls: Sequence[str], into: dict[str, dict[int, float]], step: Any) -> None:  # noqa: ANN401 - a function
    while True:
        at = step()
        for number, url in enumerate(urls):
            with suppress(OSError):
                text = await asyncio.to_thread(_read, f"{url}/metrics")
                for sample in parse_metrics(text):
                    labels = {**sample.labels, "instance": f"replica-{number}"}
                    if _NAME.match(sample.name):
                        listed = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
                        into[f"{sample.name}{{{listed}}}"][at] = sample.value
        await asyncio.sleep(STEP_S)


def _read(url: str) -> str:
    with urlopen(url, timeout=4) as answer:  # noqa: S310 - our own server on 127.0.0.1
        text: bytes = answer.read()
        return text.decode()


# ── Evaluating, by promtool ──────────────────────────────────────────────────────────────────────


def evaluate(recording: Recording, asked: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Any]]:
    """The samples of each expression at each of its times, in seconds: labels to values.

    promtool has no query on a file, but says what it got where nothing was expected.
    """
    tests = [
        f"      - {{expr: {_quoted(expr)}, eval_time: {at}s, exp_samples: []}}"
        for expr, times in asked.items()
        for at in times
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.yml"
        path.write_text(_test_file(FOLDER / "alerts.yml", [("one", recording, tests)]), "utf-8")
        done = subprocess.run(  # noqa: S603 - our own file
            ["promtool", "test", "rules", str(path)],  # noqa: S607 - from the PATH
            capture_output=True,
            text=True,
            check=False,
        )
    found: dict[str, dict[int, Any]] = {expr: {} for expr in asked}
    pattern = re.compile(r'expr: "(.*)", time: (\S+),\s+exp: nil\s+got: (.*)')
    for escaped, at, got in pattern.findall(done.stdout + done.stderr):
        expr = escaped.replace('\\"', '"').replace("\\\\", "\\")
        samples = re.findall(r"(\{.*?\}|\S*\{.*?\}) ([-+.0-9A-Za-z]+)(?:, |$)", got)
        found[expr][_seconds(at)] = {labels: float(value) for labels, value in samples}
    return found


def firing(recording: Recording) -> dict[str, tuple[str, int]]:
    """The alerts that fire at any time: severity, and the first time in seconds."""
    times = range(0, recording.duration_s + _HELD_S, 15)
    seen: dict[str, tuple[str, int]] = {}
    for at, samples in evaluate(recording, {_FIRING: times})[_FIRING].items():
        for labels in samples:
            [name] = re.findall(r'alertname="(\w+)"', labels)
            [severity] = re.findall(r'severity="(\w+)"', labels)
            seen.setdefault(name, (severity, at))
    return seen


_GROUPS: Final = tuple(f"stanchion-{each}" for each in ("objectives", "locks", "server", "tenants"))


def _test_file(rules: Path, tests: Sequence[tuple[str, Recording, Sequence[str]]]) -> str:
    lines = [
        f"rule_files: [{rules}]",
        "evaluation_interval: 15s",
        f"group_eval_order: [{', '.join(_GROUPS)}]",
        "tests:",
    ]
    for name, recording, expected in tests:
        lines += [f'  - name: "{name}"', f"    interval: {STEP_S}s", "    input_series:"]
        lines += [
            f"      - {{series: {_quoted(key)}, values: '{_values(values)}'}}"
            for key, values in sorted(recording.series.items())
        ]
        lines += ["    promql_expr_test:", *expected]
    return "\n".join(lines) + "\n"


def _values(values: Sequence[float | None]) -> str:
    """The notation of promtool, with repeated values counted, and the last one held."""
    held = next((value for value in reversed(values) if value is not None), 0.0)
    whole = [*values, *([held] * (_HELD_S // STEP_S))]
    parts = []
    for value, group in groupby(whole):
        size = len(list(group))
        text = "_" if value is None else f"{value:.10g}"
        parts.append(text if size == 1 else f"{text}x{size - (value is not None)}")
    return " ".join(parts)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _seconds(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)([hms])", text))


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────


def draw(dashboard: Dashboard, recording: Recording) -> str | None:
    """The first panels of a dashboard that show something, as one SVG."""
    times = range(STEP_S, recording.duration_s, STEP_S)
    charts: list[LineChart] = []
    for panel in dashboard.panels:
        chart = _chart(panel, recording, times)
        if chart is not None and len(charts) < _PANELS_DRAWN:
            charts.append(chart)
    drawn = [svg_of(chart, has_style=number == 0) for number, chart in enumerate(charts)]
    if not drawn:
        return None
    heights = [int(re.findall(r'height="(\d+)"', each)[0]) for each in drawn]
    width, rows = 760, [max(heights[at : at + 2]) for at in range(0, len(heights), 2)]
    placed = [
        each.replace("<svg ", f'<svg x="{number % 2 * width}" y="{sum(rows[: number // 2])}" ', 1)
        for number, each in enumerate(drawn)
    ]
    size = (width * min(2, len(drawn)), sum(rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}"'
        f' role="img" aria-label="{dashboard.title}">\n' + "\n".join(placed) + "\n</svg>\n"
    )


def _chart(panel: Panel, recording: Recording, times: Sequence[int]) -> LineChart | None:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", "20s").replace("$tenant", ".*")
        for at, samples in evaluate(recording, {expr: times})[expr].items():
            for labels, value in samples.items():
                named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                label = query.legend
                for key in re.findall(r"\{\{(\w+)\}\}", label):
                    label = label.replace(f"{{{{{key}}}}}", named.get(key, ""))
                if value == value:  # noqa: PLR0124 - not NaN
                    lines[label].append((float(at), value))
    busiest = sorted(lines, key=lambda label: -max(value for _, value in lines[label]))
    if not busiest or not max(value for _, value in lines[busiest[0]]):
        return None
    windows = tuple(Window(begin, end, "locks cut") for begin, end in recording.cuts)
    units = {"ops": "per second", "s": "seconds", "percentunit": "part of 1", "short": ""}
    shown = tuple(Series(label, tuple(lines[label])) for label in busiest[:_SERIES_DRAWN])
    return LineChart(
        title=panel.title, unit=units.get(panel.unit, panel.unit), series=shown, windows=windows
    )


def main() -> int:
    """Run everything; 1 if a drill fires a page that it must not, or does not fire its own."""
    PICTURES.mkdir(exist_ok=True)
    recordings: dict[str, Recording] = {}
    for name in DRILLS:
        options = DrillOptions(quick=name != "fallback", seed=7)
        recordings[name] = asyncio.run(record(name, options))
    whole = recordings["fallback"]
    recordings["fallback"] = whole.until(whole.cuts[1][0])
    recordings["fallback, second cut"] = whole
    rows, wrong, expected = [], [], []
    asked = set(_NAME.findall((FOLDER / "alerts.yml").read_text(encoding="utf-8")))
    for case in CASES:
        recording = recordings[case.drill].only(asked)
        fired = firing(recording)
        pages = {name: at for name, (severity, at) in fired.items() if severity == "page"}
        tickets = {name for name, (severity, _) in fired.items() if severity == "ticket"}
        print(case.drill, fired)
        if set(pages) != case.pages:
            wrong.append(f"{case.drill}: pages {sorted(pages)}, expected {sorted(case.pages)}")
        shown = ", ".join(f"[{name}](#{name.lower()}) after {pages[name]} s" for name in pages)
        others = ", ".join(f"[{name}](#{name.lower()})" for name in sorted(tickets))
        rows.append(f"| {case.drill} | {case.fault} | {shown or '–'} | {others or '–'} |")
        if case.drill.startswith("fallback"):
            expected.append((case, recording))
    table = "| drill | fault | page | ticket |\n|---|---|---|---|\n" + "\n".join(rows)
    _write_table(table)
    DRILL_TEST.write_text(_recorded_tests(expected), encoding="utf-8")
    for dashboard in DASHBOARDS:
        picture = draw(dashboard, whole)
        if picture is not None:
            target = PICTURES / f"{dashboard.uid.removeprefix('stanchion-')}.svg"
            target.write_text(picture, encoding="utf-8")
    print("\n".join(wrong) or "every drill fires the pages that it must, and no other")
    return 1 if wrong else 0


def _recorded_tests(cases: Sequence[tuple[Case, Recording]]) -> str:
    head = "# Written by scripts/drill_rules.py: what was scraped in a fallback drill.\n"
    tests = []
    for case, recording in cases:
        pages = "".join(
            f"\n          - {{labels: '{{alertname=\"{name}\"}}', value: 1}}"
            for name in sorted(case.pages)
        )
        # At any time, so that none may fire when the fault is over either.
        firing = 'max_over_time(ALERTS{alertstate="firing",severity="page"}[1h])'
        at = recording.duration_s + _HELD_S
        test = f"      - expr: group by (alertname) ({firing})\n"
        test += f"        eval_time: {at}s\n        exp_samples:{pages}"
        tests.append((f"{case.drill}: {case.fault}", recording, [test]))
    return head + _test_file(Path("alerts.yml"), tests)


def _write_table(table: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition("<!-- drills -->")
    _, end, after = rest.partition("<!-- /drills -->")
    assert begin
    assert end
    PAGE.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
