"""``stanchion worker module:app``: run a worker that somebody wrote, once or after every change."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Final

import msgspec

from stanchion.worker.errors import BadTarget, WorkerRefused
from stanchion.worker.log import log_event, show_lines
from stanchion.worker.reloading import reload_on_change
from stanchion.worker.target import load_worker
from stanchion.worker.worker import DEFAULT_URL

__all__ = ["REFUSED", "USAGE", "run_worker"]

USAGE: Final = 2
"""Exit code: what was asked for makes no sense."""
REFUSED: Final = 1
"""Exit code: the server does not want this worker."""
_RELOAD_DRAIN_S_MAX: Final = 5.0
"""Whoever waits for a reload does not want to wait for a job."""


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. It travels to a child on its standard input: keys do not belong in arguments."""

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
    """Run the worker that ``target`` names until it is told to stop; the exit code.

    What is wrong is said in a sentence on standard error. With ``reload`` the worker runs in a
    process of its own that is started anew whenever a ``.py`` file below this directory changes.
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
    except (BadTarget, ValueError) as error:
        return _say(str(error), USAGE)
    log_event(logging.INFO, "worker_stopped")
    return 0


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code


def _child() -> int:
    """Run what the parent writes to standard input; leave when the parent is gone."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)

    def follow_the_parent() -> None:
        # Ends when the other side is closed, however the parent ended. Not through ``sys.stdin``:
        # Python aborts at its end if a thread is inside of it.
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow_the_parent, daemon=True).start()
    return _run(order)


if __name__ == "__main__":
    sys.exit(_child())
