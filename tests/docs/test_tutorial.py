"""The tutorial, as a newcomer follows it: every file and every command, against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.terminal import PATIENCE_S, ROOT, Terminal, blocks_of, serving

TUTORIAL = ROOT / "docs" / "tutorial.md"
HERE = re.compile(r"^(make serve|export PATH=.*)$")
"""What the test has done before it begins."""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with serving(tmp_path) as url:
        yield Terminal(tmp_path, url)


def test_every_file_and_every_command_of_the_tutorial_works(terminal: Terminal) -> None:
    blocks = blocks_of(TUTORIAL)
    for block in blocks:
        if block.file:
            text = block.text.replace("http://127.0.0.1:8420", terminal.url)
            (terminal.folder / block.file).write_text(text, encoding="utf-8")
    [stays] = [block for block in blocks if block.kind == "background"]
    typed = 0
    with terminal.background(stays.text.strip(), terminal.folder / "worker.log"):
        for block in blocks:
            if block.file or block is stays:
                continue
            run_id = waiting_run(terminal) if block.kind == "after-review" else ""
            for line in block.lines:
                if not HERE.match(line):
                    code = 4 if block.kind == "exit-4" else 0
                    terminal.type(line.replace("RUN_ID", run_id), code=code)
                    typed += 1
    assert typed > 12


@pytest.mark.parametrize("page", [TUTORIAL, ROOT / "README.md"], ids=lambda page: page.name)
def test_the_programs_of_a_page_pass_a_strict_type_checker(page: Path, tmp_path: Path) -> None:
    programs = [block for block in blocks_of(page) if (block.file or "").endswith(".py")]
    for program in programs:
        (tmp_path / str(program.file)).write_text(program.text, encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "strict"  # Not that of `make check`: the options differ.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *(str(block.file) for block in programs)],
        cwd=tmp_path,
        env=os.environ | {"MYPY_CACHE_DIR": str(cache), "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert checked.stdout.startswith("Success: no issues found in 2 source files"), checked.stdout


def waiting_run(terminal: Terminal) -> str:
    """The id of the newest run, once a person is asked about it."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        run = json.loads(terminal.type("stanchion run list -o json"))["runs"][0]
        shown = json.loads(terminal.type(f"stanchion run show {run['run_id']} -o json"))
        if shown["steps"].get("review", {}).get("status") == "waiting":
            return str(run["run_id"])
    raise AssertionError("nobody was asked")
