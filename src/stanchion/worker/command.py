"""``stanchion worker module:app``: load the worker, run it, and restart it when a file changes.

Reloading is for development: a child process is restarted when a Python file changes. Files are
polled twice a second, which needs no dependency and works on every file system.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

import msgspec

from stanchion.worker.errors import BadTarget, WorkerRefused
from stanchion.worker.events import log_event, show_lines
from stanchion.worker.worker import DEFAULT_URL, Worker

USAGE: Final = 2
"""Exit code: wrong usage."""
REFUSED: Final = 1
"""Exit code: the server refuses this worker."""
_RELOAD_DRAIN_S_MAX: Final = 5.0
"""A reload waits no longer than this for running jobs."""


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. A child reads it from its standard input, because arguments would show keys."""

    target: str
    url: str
    concurrency: int
    api_key: str | None
    worker_id: str | None
    drain_s: float
    log_level: str


def run_worker(  # noqa: PLR0913 - one argument a flag
    target: str,
    url: str = DEFAULT_URL,
    concurrency: int = 10,
    *,
    api_key: str | None = None,
    worker_id: str | None = None,
    drain_s: float = 30.0,
    reload: bool = False,
    log_level: str = "info",
) -> int:
    """Run the worker that ``target`` names until it is stopped; return the exit code.

    Errors are printed as a sentence on standard error. With ``reload`` the worker runs in a child
    process that is restarted whenever a ``.py`` file below this directory changes.
    """
    order = _Order(
        target=target,
        url=url,
        concurrency=concurrency,
        api_key=api_key,
        worker_id=worker_id,
        drain_s=min(drain_s, _RELOAD_DRAIN_S_MAX) if reload else drain_s,
        log_level=log_level,
    )
    if reload:
        command = [sys.executable, "-m", "stanchion.worker.command"]
        return reload_on_change(command, msgspec.json.encode(order), stop_s=order.drain_s + 10)
    return _run(order)


def _run(order: _Order) -> int:
    show_lines(order.log_level.upper())
    try:
        app = load_worker(order.target)
    except BadTarget as error:
        return _say(str(error), USAGE)
    except Exception as error:  # noqa: BLE001 - whatever the module raises
        sys.stderr.write("".join(traceback.format_exception(_of_module(error))))
        return _say(f"the module of {order.target!r} cannot be imported, see above", REFUSED)
    try:
        log_event(logging.INFO, "worker_started", url=order.url, topics=", ".join(app.topics))
        app.serve(
            order.url,
            concurrency=order.concurrency,
            api_key=order.api_key,
            worker_id=order.worker_id,
            drain_s=order.drain_s,
        )
    except WorkerRefused as refused:
        return _say(str(refused), REFUSED)
    except ValueError as error:
        return _say(str(error), USAGE)
    log_event(logging.INFO, "worker_stopped")
    return 0


def _of_module(error: Exception) -> Exception:
    """The error of an import, without the frames above the module: they are not the user's."""
    place = error.__traceback__
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if name != __file__ and "importlib" not in name:
            break
        place = place.tb_next
    return error.with_traceback(place)


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code


def _child() -> int:
    """Run the order that the parent writes to standard input; exit when the parent has ended."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)

    def follow_the_parent() -> None:
        # Ends when the other side is closed, however the parent ended. Not through ``sys.stdin``:
        # Python aborts at its end if a thread is inside of it.
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow_the_parent, daemon=True).start()
    return _run(order)


_DEFAULT_NAME: Final = "app"


def load_worker(target: str) -> Worker:
    """The worker that ``target`` names. Raises ``BadTarget`` with what to write instead.

    An exception raised by the module itself propagates.
    """
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") or "/" in module_name or module_name[:1] in {"", "."}:
        stem = module_name.removesuffix(".py").replace("/", ".").strip(".") or "worker"
        raise BadTarget(f"{target!r} names no module; write it as {stem}:{name or _DEFAULT_NAME}")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise BadTarget(
            f"there is no module {error.name!r} here; run the command where {error.name!r} can be"
            " imported, or install it"
        ) from None
    found = getattr(module, name or _DEFAULT_NAME, None)
    if isinstance(found, Worker):
        return found
    workers = sorted(key for key, value in vars(module).items() if isinstance(value, Worker))
    hint = (
        f"; write {module_name}:{workers[0]}" if workers else "; make one with stanchion.Worker()"
    )
    raise BadTarget(f"{name or _DEFAULT_NAME!r} in module {module_name!r} is no worker{hint}")


LOOK_EVERY_S: Final = 0.5
FILES_MAX: Final = 5_000
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages"})

Snapshot: TypeAlias = dict[str, tuple[int, int]]


def reload_on_change(command: Sequence[str], order: bytes, *, stop_s: float) -> int:
    """Run ``command`` with ``order`` on its standard input, again after every change; exit code.

    A child that ends with an error is started again at the next change, not before.
    """
    root = Path.cwd()
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
                _print(f"{_changed(seen, now)} changed, restarting")
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
            continue  # removed meanwhile
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
    """The child process that runs the worker."""

    def __init__(self, command: Sequence[str], order: bytes, stop_s: float) -> None:
        self._command = command
        self._order = order
        self._stop_s = stop_s
        self._process: subprocess.Popen[bytes] | None = None
        self._has_been_told = False

    def start(self) -> None:
        self._has_been_told = False
        # In a session of its own: Ctrl-C reaches only the parent, which forwards it once.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command, stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._order + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            _print("the worker ended before it began")

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def tell_to_stop(self) -> None:
        """Forward a signal: the first drains, the second ends the worker at once."""
        if self._process is not None and self._process.poll() is None:
            self._has_been_told = True
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Kill the process if it is still there."""
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
            with suppress(BrokenPipeError):  # what it did not read is flushed once more
                process.stdin.close()
        self._process = None
        return process.returncode


def _changed(before: Snapshot, after: Snapshot) -> str:
    paths = {path for path, _ in before.items() ^ after.items()}
    return os.path.relpath(min(paths))


def _print(sentence: str) -> None:
    sys.stderr.write(f"stanchion worker: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(_child())
