"""What is made of figures: rows, the record, the picture, the command."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from bench import __main__ as command
from bench import flow, record
from bench.callers import Ran
from bench.pace import QUICK, Pace
from bench.peers.running import Peer
from bench.picture import picture
from bench.row import Row, at_least, at_most, below, skipped, spread, table

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (at_least("x", 2.0, "×", 2.0), True),
        (at_least("x", 1.9, "×", 2.0), False),
        (at_most("x", 2.0, "×", 2.0), True),
        (at_most("x", 2.1, "×", 2.0), False),
        (below("x", 1.9, "ms", 2.0), True),
        (below("x", 2.0, "ms", 2.0), False),
        (at_least("x", float("nan"), "×", 2.0), False),
        (at_most("x", float("nan"), "×", 2.0), False),
    ],
)
def test_a_promise_holds_up_to_its_edge_and_never_for_nothing_measured(
    row: Row, holds: bool
) -> None:
    assert row.holds is holds
    assert table([row]).startswith("ok" if holds else "NOT")


def test_what_was_not_measured_is_shown_and_is_no_success() -> None:
    line = table([skipped("three steps, of a peer", "×", "≥ 3", "not installed")])

    assert line.startswith("--")
    assert "not installed" in line
    assert "ok" not in line


def test_a_row_stands_beside_its_record() -> None:
    rows = [at_least("fast", 30.0, "/s", 10), at_least("new", 1.0, "/s", 1)]

    first, second = table(rows, {"fast": 20.0}).splitlines()

    assert "was 20.00 (+50%)" in first
    assert "was" not in second


def test_the_spread_is_the_middle_half() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == "2.00 to 4.00"
    assert spread([1.0]) == "one round"


def test_a_record_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    record.write([at_least("a", 1.0, "/s", 1), at_least("b", 2.0, "/s", 1)], file)

    record.write([at_least("b", 3.0, "/s", 1), skipped("a", "/s", "≥ 1", "not installed")], file)

    found = record.read(file)
    assert found is not None
    assert found.rows == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize(
    ("row", "is_worse"),
    [
        (at_least("rate", 79.0, "/s", 1), True),
        (at_least("rate", 81.0, "/s", 1), False),
        (at_least("rate", 500.0, "/s", 1), False),
        (below("rate", 121.0, "ms", 900), True),
        (below("rate", 119.0, "ms", 900), False),
        (below("rate", 5.0, "ms", 900), False),
        (at_least("another", 1.0, "/s", 1), False),
        (skipped("rate", "/s", "≥ 1", "not installed"), False),
    ],
)
def test_falling_behind_the_record_is_noticed_beyond_noise(row: Row, is_worse: bool) -> None:
    before = record.Record(recorded_on="", python="", cores=2, rows={"rate": 100.0})

    assert record.worse([row], before) == (["rate"] if is_worse else [])


def test_the_picture_has_a_bar_for_each_row() -> None:
    rows = [
        at_least("growth on A, <many>: starts", 1.0, "×", 0.9, pair=(2_000.0, 2_000.0)),
        at_least("growth on A, <many>: runs", 0.5, "×", 0.9, pair=(500.0, 1_000.0)),
    ]

    drawn = ET.fromstring(picture(rows, title="Growth & more", floor=0.9))  # noqa: S314 - our own

    bars = {bar.get("class"): float(bar.get("width", "")) for bar in drawn.iter(f"{SVG}rect")}
    assert bars["ok"] == pytest.approx(2 * bars["not"], rel=0.01)
    words = [each.text or "" for each in drawn.iter(f"{SVG}text")]
    assert rows[0].name in words
    assert any("500/s of 1,000/s" in each for each in words)


def test_the_command_measures_only_what_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = (
        command.Group("good", lambda _: [at_least("good", 1.0, "/s", 1)]),
        command.Group("bad", lambda _: [at_least("bad", 0.5, "/s", 1)]),
        command.Group("slow", lambda _: [at_least("slow", 0.5, "/s", 1)], is_long=True),
    )
    monkeypatch.setattr(command, "GROUPS", groups)
    monkeypatch.setattr(record, "RECORD", tmp_path / "results.json")
    monkeypatch.chdir(tmp_path)

    assert command.main(["good"]) == 0
    assert _names(tmp_path) == ["good"]
    assert command.main(["--quick"]) == 1
    assert _names(tmp_path) == ["good", "bad"]
    assert command.main([]) == 1
    assert _names(tmp_path) == ["good", "bad", "slow"]
    assert "2 promises broken" in capsys.readouterr().out


def test_a_group_that_fails_is_a_broken_promise_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_pace: Pace) -> list[Row]:
        raise RuntimeError("the server does not become ready")

    good = command.Group("good", lambda _: [at_least("good", 1.0, "/s", 1)])
    monkeypatch.setattr(command, "GROUPS", (command.Group("bad", fail), good))
    monkeypatch.setattr(record, "RECORD", tmp_path / "results.json")
    monkeypatch.chdir(tmp_path)

    assert command.main([]) == 1

    assert _names(tmp_path) == ["bad", "good"]
    assert "NOT  bad" in (said := capsys.readouterr().out)
    assert "RuntimeError: the server does not become ready" in said


def test_peers_that_are_not_installed_are_shown_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = Ran(runs=100, seconds=1.0, latencies_ms=[1.0])
    absent = [
        Peer(name, (Path("/nonexistent/peer"),), lambda _: pytest.fail("it ran"))
        for name in flow.PROMISES
    ]
    monkeypatch.setattr(flow, "PEERS", absent)
    monkeypatch.setattr(flow, "measure", lambda _site, _seconds: flow.Measured(ran, 500.0))

    rows = flow.rows(QUICK)

    assert [bool(row.skipped) for row in rows] == [True, True, True, True, False]
    assert all("100/s" in row.skipped for row in rows[:-1])


@pytest.mark.parametrize("arguments", [["nothing-of-that-name"], ["--quick", "--record"]])
def test_the_command_refuses_what_makes_no_sense(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = command.Group("never", lambda _: pytest.fail("it ran"))
    monkeypatch.setattr(command, "GROUPS", (never,))

    assert command.main(arguments) == 2
    assert "--help" in capsys.readouterr().err


def _names(directory: Path) -> list[str]:
    written = (directory / "reports" / "bench.json").read_bytes()
    return [row.name for row in msgspec.json.decode(written, type=list[Row])]
