"""The log of a day: nobody reads it, but some of its lines must not be there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stanchion.sim.history import History

__all__ = ["bugs_told", "quiet"]

_BUGS: Final = frozenset(
    {
        "loop_failed",
        "advance_failed",
        "inbox_entry_failed",
        "plan_failed",
        "bus_handler_failed",
        "bell_unheard",
        "lease_hook_failed",
        "slot_drift",
        "settings_invalid",
        "job_topic_unknown",
    }
)
"""Log lines that no outage explains."""


class _Bugs(logging.Handler):
    """Takes log lines into the history; those that only a bug explains are broken statements."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        name = record.getMessage()
        fields = getattr(record, "fields", {})
        if name in _BUGS:
            self._history.check("no error of our own", [f"{name}: {fields}"])


@contextmanager
def bugs_told(history: History) -> Iterator[None]:
    """Tell the history of every line that only a bug explains."""
    logger, handler = logging.getLogger("stanchion"), _Bugs(history)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Nobody reads the log of a day that is played a thousand times."""
    logger, nobody = logging.getLogger("stanchion"), logging.NullHandler()
    before = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(nobody)
    try:
        yield
    finally:
        logger.removeHandler(nobody)
        logger.setLevel(before[0])
        logger.propagate = before[1]
