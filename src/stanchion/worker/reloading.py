"""Reloading, for development: a child process that is started anew when a file changes.

It looks at the files' times twice a second. That needs no dependency and works on every file
system, and a project is small enough for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

__all__ = ["reload_on_change"]

LOOK_EVERY_S: Final = 0.5
FILES_MAX: Final = 5_000
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})

Snapshot: TypeAlias = dict[str, tuple[int, int]]


def reload_on_change(
    command: Sequence[str], order: bytes, *, stop_s: float, root: Path | None = None
) -> int:
    """Run ``command`` with ``order`` on its standard input, again after every change; exit code.

    A child that ends by itself with an error is started again at the next change, not before.
    """
    root = root or Path.cwd()
    stopping = threading.Event()
    child = _Child(command, order, stop_s)

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()
        child.tell_to_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        seen = snapshot(root)
        child.start()
        while not stopping.wait(LOOK_EVERY_S):
            if child.exit_code() == 0:
                return 0
            now = snapshot(root)
            if now != seen:
                _say(f"{_changed(seen, now)} changed, starting anew")
                seen = now
                child.end()
                if not stopping.is_set():
                    child.start()
        return child.end()
    finally:
        child.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def snapshot(root: Path) -> Snapshot:
    """The time and size of every Python file below ``root``, the first 5,000 of them."""
    found: Snapshot = {}
    for path in _python_files(root):
        try:
            status = os.stat(path)  # noqa: PTH116 - strings are cheaper than five thousand Paths
        except OSError:
            continue  # Removed while we looked.
        found[path] = (status.st_mtime_ns, status.st_size)
        if len(found) == FILES_MAX:
            break
    return found


def _python_files(root: Path) -> Iterator[str]:
    for place, folders, files in os.walk(root):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not name.startswith(".")
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield os.path.join(place, name)  # noqa: PTH118 - see snapshot


class _Child:
    """The process that is started anew."""

    def __init__(self, command: Sequence[str], order: bytes, stop_s: float) -> None:
        self._command = command
        self._order = order
        self._stop_s = stop_s
        self._process: subprocess.Popen[bytes] | None = None
        self._has_been_told = False

    def start(self) -> None:
        self._has_been_told = False
        # In a session of its own: Ctrl-C reaches us alone, and we pass it on once, not twice.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command, stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._order + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            _say("the worker ended before it began")

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def tell_to_stop(self) -> None:
        """Once: drain. Twice: leave at once."""
        if self._process is not None and self._process.poll() is None:
            self._has_been_told = True
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Make sure that it is gone."""
        process = self._process
        if process is None:
            return 0
        if not self._has_been_told:
            self.tell_to_stop()
        try:
            process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None
        return process.returncode


def _changed(before: Snapshot, after: Snapshot) -> str:
    paths = {path for path, _ in before.items() ^ after.items()}
    return os.path.relpath(min(paths))


def _say(sentence: str) -> None:
    sys.stderr.write(f"stanchion worker: {sentence}\n")
    sys.stderr.flush()
