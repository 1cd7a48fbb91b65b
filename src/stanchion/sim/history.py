"""History: the log of a simulated day, and the violations found in it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final


class History:
    """Lines in the order of events. The same seed gives the same digest."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lines: list[str] = []
        self.broken: list[str] = []
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        """How often each invariant was checked, to find invariants that never are."""
        self._is_wrong = asyncio.Event()
        self._digest = hashlib.blake2b(digest_size=16)

    def tell(self, text: str) -> None:
        """Add a line."""
        line = f"{self._loop.time():9.3f}  {text}"
        self.lines.append(line)
        self._digest.update(line.encode() + b"\n")

    def check(self, name: str, sentences: Iterable[str]) -> None:
        """Record every violation that an invariant yields."""
        self.checks[name] += 1
        for sentence in sentences:
            self.broken.append(f"{name}: {sentence}")
            self.tell(f"BROKEN  {name}: {sentence}")
            self._is_wrong.set()

    async def go_on(self, seconds: float) -> None:
        """Let time pass, unless a violation was found."""
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
        "settle_failed",
        "plan_failed",
        "bus_handler_failed",
        "bell_unheard",
        "lease_hook_failed",
        "slot_drift",
        "settings_invalid",
        "job_topic_unknown",
    }
)
"""Log events that only a bug can cause."""


class _Bugs(logging.Handler):
    """Adds log lines to the history; those that only a bug can cause are violations."""

    def __init__(self, history: History, logged: Callable[[str], None]) -> None:
        super().__init__()
        self._history, self._logged = history, logged

    def emit(self, record: logging.LogRecord) -> None:
        name = record.getMessage()
        self._logged(name)
        fields = getattr(record, "fields", {})
        if name in _BUGS:
            self._history.check("no error of our own", [f"{name}: {fields}"])


@contextmanager
def bugs_told(history: History, logged: Callable[[str], None]) -> Iterator[None]:
    """Add log lines to the history while the context is active, and call ``logged`` with each."""
    logger, handler = logging.getLogger("stanchion"), _Bugs(history, logged)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable logging while the context is active."""
    logger, nowhere = logging.getLogger("stanchion"), logging.NullHandler()
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)  # the ends of outages are compared with their beginnings
    logger.propagate = False
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.setLevel(before[0])
        logger.propagate = before[1]
