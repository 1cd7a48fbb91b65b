"""Memory: what a storm of requests leaves behind is returned to the system.

Two things keep memory after its last use. Closed connections and raised errors leave reference
cycles, each of which can hold a request's body, and the garbage collector runs rarely (its
thresholds are raised because it costs a busy server a quarter of its time). And the C library keeps
freed memory for later use unless it is told to return it. So a server that has grown collects
garbage and returns freed memory, at most once in ``CHECK_S``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stanchion.ports.clock import Clock

__all__ = ["CHECK_S", "GROWTH_BYTES", "MemoryTrimmer", "resident_bytes", "return_freed_memory"]

CHECK_S: Final = 2.0
GROWTH_BYTES: Final = 16 * 1024 * 1024
"""A server that has grown by less since it was trimmed is left alone."""
_STATM: Final = Path("/proc/self/statm")


class MemoryTrimmer:
    """Trims the process's memory after it has grown."""

    def __init__(
        self,
        clock: Clock,
        *,
        resident: Callable[[], int | None] | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        """``resident`` reads the memory in use; ``give_back`` may block and runs in a thread."""
        self._clock = clock
        self._resident = resident or resident_bytes
        self._give_back = give_back or return_freed_memory
        self._level_bytes: int | None = None

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        self._level_bytes = self._resident()
        while self._level_bytes is not None:
            await self._clock.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Trim if the process has grown since it was last trimmed."""
        now_bytes = self._resident()
        if now_bytes is None:
            return
        level_bytes = now_bytes if self._level_bytes is None else self._level_bytes
        self._level_bytes = min(level_bytes, now_bytes)
        if now_bytes - self._level_bytes < GROWTH_BYTES:
            return
        gc.collect()
        await asyncio.to_thread(self._give_back)
        # What is still in use is the level from which further growth counts.
        self._level_bytes = self._resident()


def resident_bytes() -> int | None:
    """The memory of this process that is in use; ``None`` where the system does not tell."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Have the C library return freed memory to the system, if it is one that can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
