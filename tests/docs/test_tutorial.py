"""The tutorial, as a newcomer follows it: every file and every command, against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\S*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE = re.compile(r"^(make serve|export PATH=.*)$")
"""What the test has done before it begins."""
PATIENCE_S = 30.0


class Block(msgspec.Struct, frozen=True):
    kind: str
    file: str
    text: str


def blocks() -> list[Block]:
    found = BLOCK.finditer(TUTORIAL.read_text())
    return [Block(match[1], match[2] or "", match[3]) for match in found]


class Terminal:
    """A newcomer's shell, in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.environ = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STANCHION_URL": url,
        }

    def type(self, command: str, *, code: int = 0) -> str:
        """Run a line, as it stands in the text."""
        done = subprocess.run(
            ["/usr/bin/env", "bash", "-c", command],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def background(self, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A line that stays, in a terminal of its own."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["/usr/bin/env", "bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environ,
                stdout=out,
                stderr=out,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def waiting_run(self) -> str:
        """The id of the newest run, once a person is asked about it."""
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            run = json.loads(self.type("stanchion run list -o json"))["runs"][0]
            shown = json.loads(self.type(f"stanchion run show {run['run_id']} -o json"))
            if shown["steps"].get("review", {}).get("status") == "waiting":
                return str(run["run_id"])
        raise AssertionError("nobody was asked")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    shell = Terminal(tmp_path, "")
    log = tmp_path / "server.log"
    with shell.background("stanchion serve --port 0 --data-dir data", log) as server:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends and server.poll() is None:
            ready = [line for line in log.read_text().splitlines() if '"server_ready"' in line]
            if ready:
                yield Terminal(tmp_path, json.loads(ready[0])["url"])
                return
            time.sleep(0.05)
        raise AssertionError(log.read_text())


def test_every_file_and_every_command_of_the_tutorial_works(terminal: Terminal) -> None:
    with _followed(terminal) as typed:
        assert len(typed) > 12


@contextmanager
def _followed(terminal: Terminal) -> Iterator[list[str]]:
    typed: list[str] = []
    stays = next(block for block in blocks() if block.kind == "background")
    for block in blocks():
        if block.file:
            text = block.text.replace("http://127.0.0.1:8420", terminal.url)
            (terminal.folder / block.file).write_text(text)
    with terminal.background(stays.text.strip(), terminal.folder / "worker.log"):
        for block in blocks():
            if block.file or block.kind == "background":
                continue
            text = block.text
            if block.kind == "after-review":
                text = text.replace("RUN_ID", terminal.waiting_run())
            for line in text.strip().splitlines():
                if not HERE.match(line):
                    terminal.type(line, code=4 if block.kind == "exit-4" else 0)
                    typed.append(line)
        yield typed
