"""What the front page shows works: its targets, its commands, its three files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stanchion
from tests.docs.terminal import PATIENCE_S, ROOT, Block, Terminal, blocks_of, serving

PAGE = ROOT / "README.md"
KINDS = ["", "serve", "background", "", "yaml", "python", "python", "install"]


def blocks() -> list[Block]:
    return blocks_of(PAGE)


def ours(line: str) -> str:
    """A line as a test types it: the command is on the path, wherever that is."""
    return line.replace(".venv/bin/stanchion", "stanchion")


def test_every_block_is_of_a_kind_that_is_tried_here() -> None:
    assert [block.kind for block in blocks()] == KINDS


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_every_target_that_is_shown_is_one() -> None:
    lines = [line for block in blocks()[:2] for line in block.lines]
    assert lines == ["make demo", "make test", "make serve"]
    recipes = {line: recipe(line.split()[1]) for line in lines}
    # What the first does is run in test_examples.py; the second is what runs this test; the third
    # is the command that the fixture below starts, at a port and with a folder of its own.
    assert recipes["make demo"].endswith("python examples/demo.py\n")
    assert "make check" in recipes["make test"]
    assert "mypy" in recipe("check")
    assert recipes["make serve"].endswith("stanchion serve --data-dir .stanchion\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_table_of_targets_has_all_of_them_and_fits_80_columns() -> None:
    rules = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    table = make("help").splitlines()[2:]
    assert [line.split()[0] for line in table] == rules
    assert "sim-night" in rules
    assert max(map(len, table)) <= 80
    assert len({line.index(line.split()[1], 4) for line in table}) == 1, "one column"


def recipe(target: str) -> str:
    """What make would do."""
    return make("--dry-run", target)


def make(*arguments: str) -> str:
    """What make prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = subprocess.run(
        ["/usr/bin/env", "make", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_an_agent_runs_on_a_server_that_is_kept(tmp_path: Path) -> None:
    _, _, worker, commands, *_ = blocks()
    with serving(tmp_path) as url:
        shell = Terminal(ROOT, url)
        with shell.background(ours(worker.text.strip()), tmp_path / "worker.log"):
            *_, told = [shell.type(ours(line)) for line in commands.lines]
    assert "succeeded" in told


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Terminal]:
    """The three files in a folder, the workflow applied, the worker at work."""
    with serving(tmp_path) as url:
        for block in blocks():
            if block.file:
                text = block.text.replace("http://127.0.0.1:8420", url)
                (tmp_path / block.file).write_text(text, encoding="utf-8")
        shell = Terminal(tmp_path, url)
        shell.type("stanchion workflow apply report.yaml")
        with shell.background("stanchion worker reporter:app", tmp_path / "worker.log"):
            yield shell


def test_the_workflow_the_worker_and_the_caller_fit_together(written: Terminal) -> None:
    told = written.type("python caller.py")
    assert "'report': ['found for What holds a rope?', 'found for and why?']" in told


def test_a_review_that_is_asked_for_waits_for_a_person(written: Terminal) -> None:
    with stanchion.Client(written.url) as client:
        run = client.start("report", {"question": "What holds a rope?", "review": True})
        ends = time.monotonic() + PATIENCE_S
        while client.get(run.run_id).steps["review"].status != "waiting":
            assert time.monotonic() < ends, "nobody was asked"
            time.sleep(0.05)
        client.approve(run.run_id, "review")
        assert run.wait(timeout_s=PATIENCE_S).status == "succeeded"


def test_what_is_installed_is_what_the_wheel_is_tested_with() -> None:
    *_, install = blocks()
    # In tests/packaging: the same two, as a wheel in an empty environment.
    assert install.lines == ["pip install .", "pip install '.[leases]'", "pip install '.[server]'"]
