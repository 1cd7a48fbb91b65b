"""A newcomer's shell, a page's blocks, and a server of one's own to try them on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

__all__ = ["PATIENCE_S", "ROOT", "Block", "Terminal", "blocks_of", "ready_url", "serving"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
_BLOCK = re.compile(r"^```(\S*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(msgspec.Struct, frozen=True):
    """What stands between two fences. ``file``: where a reader is told to save it."""

    kind: str
    file: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its commands, without remarks."""
        lines = (line.partition("  #")[0].rstrip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    """Every block of a page, in order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(match[1], match[2] or "", match[3]) for match in found]


class Terminal:
    """A shell in a folder, with our command on its path, and nothing of ours in its environment."""

    def __init__(self, folder: Path, url: str = "", **environ: str) -> None:
        self.folder = folder
        self.url = url
        theirs = {
            name: value for name, value in os.environ.items() if not name.startswith("STANCHION_")
        }
        self.environ = theirs | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **({"STANCHION_URL": url} if url else {}),
            **environ,
        }

    def type(self, command: str, *, code: int = 0) -> str:
        """Run a line, as it stands in the text."""
        done = subprocess.run(
            ["/usr/bin/env", "bash", "-c", command],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def background(self, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A line that stays, in a terminal of its own."""
        # Words before the command that set variables stay such: `env` takes them.
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["/usr/bin/env", "bash", "-c", f"exec env {command}"],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
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


@contextmanager
def serving(
    folder: Path,
    command: str = "stanchion serve --port 0 --data-dir data",
    environ: Mapping[str, str] | None = None,
    log: str = "server.log",
) -> Iterator[str]:
    """A server in a folder, for as long as the block lasts: its URL."""
    shell, lines = Terminal(folder, **environ or {}), folder / log
    with shell.background(command, lines) as process:
        yield ready_url(process, lines)


def ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server is, once it says so."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and process.poll() is None:
        for line in log.read_text(encoding="utf-8").splitlines():
            if '"server_ready"' in line:
                return str(json.loads(line)["url"])
        time.sleep(0.05)
    raise AssertionError(log.read_text(encoding="utf-8"))
