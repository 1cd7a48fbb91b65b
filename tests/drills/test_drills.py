"""Each drill once, quick, from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stanchion.cli.commands.drill import NAMES
from stanchion.drills.command import AGAINST, DRILLS
from stanchion.drills.verdict import TIMED

pytestmark = pytest.mark.alone
QUICK_S_MAX = 60.0
TRIES_MAX = 4
MEMBERS = {
    "drill",
    "verdict",
    "seed",
    "started_at",
    "duration_s",
    "environment",
    "promises",
    "figures",
}


def drill(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stanchion", "drill", *arguments],
        env={**_plain(os.environ), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=QUICK_S_MAX + 10,
    )


def _plain(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("STANCHION_")}


@pytest.mark.parametrize("name", DRILLS)
def test_a_quick_drill_holds_and_writes_its_report(name: str, tmp_path: Path) -> None:
    arguments = (name, "--quick", "--seed", "7", "--out", str(tmp_path), "-o", "json")
    done = drill(*arguments)
    for _ in range(TRIES_MAX - 1):
        if done.returncode != 1:
            break
        broken = {each["id"] for each in json.loads(done.stdout)["promises"] if not each["holds"]}
        assert broken <= TIMED, done.stdout
        # On a busy machine a promise about time may be broken; a defect breaks it each time.
        done = drill(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / name / "report.json").read_bytes())
    assert report == json.loads(done.stdout)
    assert set(report) == MEMBERS
    assert (report["drill"], report["verdict"], report["seed"]) == (name, "pass", 7)
    assert report["duration_s"] < QUICK_S_MAX
    assert len(report["promises"]) >= 4
    for promise in report["promises"]:
        assert set(promise) == {"id", "says", "measured", "holds"}
        assert promise["holds"], promise
    page = (tmp_path / name / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert f"{name}/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_found_before_the_drill_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = drill("admission", "--quick", "--out", str(tmp_path / "file" / "reports"))
    assert done.returncode == 2
    assert "admission 1/3" not in done.stdout
    assert f"--out: {tmp_path}/file/reports cannot be written: " in done.stderr


def test_the_command_names_every_drill() -> None:
    assert tuple(DRILLS) == NAMES
    assert set(AGAINST) <= set(DRILLS)


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 3), (signal.SIGKILL, 1)],
)
def test_a_drill_that_is_stopped_leaves_no_process_and_no_file_behind(
    number: signal.Signals, times: int, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # Processes inherit the mark, so that they can be told from those of other tests.
    mark = f"DRILL_MARK={tmp_path.name}-{os.getpid()}"
    started = subprocess.Popen(
        [sys.executable, "-m", "stanchion", "drill", "admission", "--quick", "--out", tmp_path],
        env={
            **_plain(os.environ),
            "DRILL_MARK": mark.partition("=")[2],
            "TMPDIR": str(scratch),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + 20
    while len(marked(mark)) < 3:  # the drill, a server, and the process that watches the drill
        assert time.monotonic() < until
        time.sleep(0.05)
    for _ in range(times):
        started.send_signal(number)
        time.sleep(0.02)
    said, _ = started.communicate(timeout=30)
    assert started.returncode == (-number if number is signal.SIGKILL else 130), said
    assert "Traceback" not in said
    until = time.monotonic() + 10
    while marked(mark) and times + (number is signal.SIGKILL) > 1:
        assert time.monotonic() < until  # killed, and then reaped by init
        time.sleep(0.05)
    assert marked(mark) == set()
    assert list(scratch.iterdir()) == []


def marked(mark: str) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
