"""History: what happened in the world, line by line, and what was wrong about it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["History", "bugs_told", "quiet"]


class History:
    """Lines in the order in which things happened. The same seed gives the same digest."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken: list[str] = []
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        """How often each invariant was looked at: one that never was proves nothing."""
        self._is_wrong = asyncio.Event()
        self._digest = hashlib.blake2b(digest_size=16)

    def tell(self, text: str) -> None:
        """Write a line."""
        line = f"{asyncio.get_running_loop().time():9.3f}  {text}"
        self.lines.append(line)
        self._digest.update(line.encode() + b"\n")

    def check(self, name: str, sentences: Iterable[str]) -> None:
        """Write down every sentence that says what is wrong."""
        self.checks[name] += 1
        for sentence in sentences:
            self.broken.append(f"{name}: {sentence}")
            self.tell(f"BROKEN  {name}: {sentence}")
            self._is_wrong.set()

    async def go_on(self, seconds: float) -> None:
        """Let time pass, unless something is wrong."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_wrong.wait()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


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
