"""Watchdogs of the process: one reports stalls of the event loop, one trims freed memory.

``LoopWatchdog`` measures, from a thread of its own, how long a callback waits for its turn on the
event loop; it logs the stack of what blocked the loop for 50 ms or more. It looks every 10 ms, and
a stall may begin at any time between two looks: it counts from the earlier one, so that none of
50 ms is missed, and one that is reported may have been up to 10 ms shorter. ``MemoryTrimmer`` has
the C library return freed memory to the system after the process has grown, and when much that was
freed later is still resident.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import selectors
import sys
import threading
import time
from asyncio import runners
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Histogram

from stanchion.ports.clock import Clock
from stanchion.services.log import log_event

LOOK_EVERY_S: Final = 0.01
LOOK_AGAIN_S: Final = 0.02
"""The pause after a probe was sent. A stall of 50 ms is met in its course, with its stack."""
STALL_S: Final = 0.05
_HELD: Final = 0.8
"""If a check is late and the loop computed for this share of the gap, it had the interpreter."""
_REPORT_EVERY_S: Final = 10.0
_FRAMES_MAX: Final = 8
_STACK_CHARS_MAX: Final = 600
_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_IDLE_FILES: Final = frozenset({selectors.__file__, runners.__file__})
"""Where a loop's thread is while it waits for I/O: asyncio's selector, or what called uvloop."""
_OURS: Final = str(Path(__file__).parent.parent) + "/"

Schedule: TypeAlias = Callable[[Callable[[], None]], object]
TopFrame: TypeAlias = Callable[[], FrameType | None]


class LoopWatchdog:
    """Measures the lag of one event loop at a time, and logs stalls."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        """Count in this registry. The processor time is that of the loop's thread."""
        self._lag = Histogram(
            "stanchion_loop_lag_seconds",
            "Time for which a callback waited for its turn on the event loop. Sampled while the"
            " loop is busy, up to 33 times a second.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._looked_at: float | None = None
        self._sent_at: float | None = None
        self._since: float = 0.0
        """The earliest time at which what blocks the loop can have begun."""
        self._ran_at: float | None = None
        self._cpu_s = 0.0
        self._stack = ""
        self._reported_at = -_REPORT_EVERY_S
        self._unreported = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop while inside."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._cpu_clock = self._cpu_clock or _cpu_clock(thread_id)
        self._looked_at = self._sent_at = self._ran_at = None
        is_over = False

        def watch() -> None:
            while not is_over:
                time.sleep(LOOK_EVERY_S if self._sent_at is None else LOOK_AGAIN_S)
                self.look(loop.call_soon_threadsafe, lambda: sys._current_frames().get(thread_id))  # noqa: SLF001 - the documented way to another thread's stack

        thread = threading.Thread(target=watch, name="loop-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over = True
            thread.join()

    def look(self, schedule: Schedule, top_frame: TopFrame) -> None:
        """Check once: send a probe, wait for one that was sent, or report one that ran."""
        now, before = self._clock(), self._looked_at
        self._looked_at = now
        if self._sent_at is None:
            self._begin(now, before, schedule, top_frame)
        elif self._ran_at is not None:
            self._finish(now, self._ran_at - self._sent_at, self._ran_at - self._since)
        elif not self._stack:
            self._stack = _described(top_frame())

    def _begin(
        self, now: float, before: float | None, schedule: Schedule, top_frame: TopFrame
    ) -> None:
        cpu_before, self._cpu_s = self._cpu_s, self._cpu()
        frame = top_frame()
        if frame is None or frame.f_code.co_filename in _IDLE_FILES:
            return
        self._sent_at, self._since = now, now
        if before is not None:
            gap_s, cpu_s = now - before, self._cpu_s - cpu_before
            is_held = gap_s >= LOOK_EVERY_S + STALL_S or cpu_s >= _HELD * gap_s
            if is_held or gap_s <= 2 * LOOK_EVERY_S:
                self._since, self._cpu_s = before, cpu_before
            else:
                # Both threads waited for a core, so the gap says nothing about the loop.
                self._since = now - LOOK_EVERY_S
            if is_held and gap_s > 2 * LOOK_EVERY_S:
                # This thread could not run either, so the stall began before this check.
                self._sent_at = before + LOOK_EVERY_S
                self._stack = _described(frame)
        schedule(self._probe)

    def _probe(self) -> None:
        self._ran_at = self._clock()

    def _finish(self, now: float, lag_s: float, stalled_s: float) -> None:
        self._lag.observe(lag_s)
        if stalled_s >= STALL_S:
            self._report(now, stalled_s)
        self._sent_at = self._ran_at = None
        self._stack = ""
        self._cpu_s = self._cpu()

    def _report(self, now: float, stalled_s: float) -> None:
        if now - self._reported_at < _REPORT_EVERY_S:
            self._unreported += 1
            return
        log_event(
            logging.WARNING,
            "loop_stalled",
            stalled_ms=round(stalled_s * 1_000),
            cpu_ms=round((self._cpu() - self._cpu_s) * 1_000),
            stack=self._stack or "not seen",
            unreported=self._unreported,
        )
        self._reported_at, self._unreported = now, 0

    def _cpu(self) -> float:
        return 0.0 if self._cpu_clock is None else self._cpu_clock()


def _cpu_clock(thread_id: int) -> Callable[[], float] | None:
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    clock_id = time.pthread_getcpuclockid(thread_id)
    return lambda: time.clock_gettime(clock_id)


def _described(frame: FrameType | None) -> str:
    """The innermost function and the callers of it that are in this package."""
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES_MAX:
        code = frame.f_code
        if lines and code.co_filename in _IDLE_FILES:
            break  # the code that runs the loop is not the cause
        is_ours = code.co_filename.startswith(_OURS)
        if is_ours or not lines:
            file = code.co_filename.removeprefix(_OURS) if is_ours else _short(code.co_filename)
            lines.append(f"{file}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(lines)[:_STACK_CHARS_MAX]


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


CHECK_S: Final = 2.0
GROWTH_BYTES: Final = 16 * 1024 * 1024
"""A process that has grown by less since the last trim is not trimmed."""
FREED_BYTES: Final = 4 * 1024 * 1024
"""Freed memory that is still resident is returned above this size, also without growth."""
_STATM: Final = Path("/proc/self/statm")


LOOKS_UNTIL_NEXT: Final = 8
"""Looks between two trims after growth."""
TRIMS_AFTER: Final = 4
"""Further trims after the one that growth caused."""


class MemoryTrimmer:
    """Trims the process's memory after it has grown, and after it has freed much."""

    def __init__(
        self,
        clock: Clock,
        *,
        resident: Callable[[], int | None] | None = None,
        allocated: Callable[[], int] | None = None,
        give_back: Callable[[], None] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """``resident`` reads the resident memory, ``allocated`` what of the C heap is in use.

        ``give_back`` may block and runs in a thread. ``release`` is called at every look: it drops
        what was kept to save time and has not been used for long.
        """
        self._clock = clock
        self._resident = resident or resident_bytes
        self._allocated = allocated or allocated_bytes
        self._give_back = give_back or return_freed_memory
        self._release = release
        self._level_bytes: int | None = None
        self._unused_bytes: int | None = None
        """The least resident memory that was not allocated from the C heap, since the last trim."""
        self._looks = 0
        """When positive: how many looks with a trim at every eighth remain since growth."""
        self._quiet_looks = 0

    async def run(self) -> None:
        """Check every two seconds, until cancelled."""
        self._level_bytes = self._resident()
        while self._level_bytes is not None:
            await self._clock.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Trim if the process has grown since the last trim, and four times in the minute after.

        When growth is noticed, its cause is mostly still at work. The later trims find what was
        freed since: the memory of the last requests, and caches that stores have given up. What is
        freed still later is found by comparing resident with allocated memory, at every eighth
        look.
        """
        self._release()
        now_bytes = self._resident()
        if now_bytes is None:
            return
        level_bytes = now_bytes if self._level_bytes is None else self._level_bytes
        self._level_bytes = min(level_bytes, now_bytes)
        if now_bytes - self._level_bytes >= GROWTH_BYTES:
            self._looks = LOOKS_UNTIL_NEXT * TRIMS_AFTER
        elif self._looks == 0:
            await self._return_freed(now_bytes)
            return
        else:
            self._looks -= 1
            if self._looks % LOOKS_UNTIL_NEXT:
                return
        # Once: it holds the event loop. The next trim collects what finalizers have released.
        gc.collect()
        # What is still in use is the level from which further growth counts.
        self._level_bytes = await self._trim()

    async def _return_freed(self, now_bytes: int) -> None:
        """Trim, at every eighth look, if more memory is free than after the last trim.

        The level of growth stays: the interpreter's own blocks are not of the C heap, and count as
        free although only a collection frees them.
        """
        self._quiet_looks += 1
        if self._quiet_looks % LOOKS_UNTIL_NEXT:
            return
        unused_bytes = now_bytes - await asyncio.to_thread(self._allocated)
        if self._unused_bytes is None or unused_bytes < self._unused_bytes:
            self._unused_bytes = unused_bytes
        elif unused_bytes - self._unused_bytes >= FREED_BYTES:
            await self._trim()

    async def _trim(self) -> int | None:
        """Return freed memory; returns what is resident afterwards."""
        await asyncio.to_thread(self._give_back)
        now_bytes = self._resident()
        # In a thread: in a fragmented heap it takes milliseconds.
        allocated_bytes = await asyncio.to_thread(self._allocated)
        self._unused_bytes = None if now_bytes is None else now_bytes - allocated_bytes
        return now_bytes


def resident_bytes() -> int | None:
    """The resident memory of this process; ``None`` where ``/proc`` does not have it."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def allocated_bytes() -> int:
    """How much of the C library's heap is in use; 0 if it does not say."""
    if _HEAP_FIGURES is None:
        return 0
    figures = _HEAP_FIGURES().values
    return int(figures[_IN_HEAP] + figures[_MAPPED])


_IN_HEAP, _MAPPED = 7, 4
"""Of the figures of ``mallinfo2``: ``uordblks`` and ``hblkhd``, all bytes that are in use."""


class _HeapFigures(ctypes.Structure):
    """The answer of glibc's ``mallinfo2``."""

    _fields_ = (("values", ctypes.c_size_t * 10),)  # type: ignore[mutable-override] # never assigned again


_C_LIBRARY: Final = ctypes.CDLL(None)
_HEAP_FIGURES: Final = getattr(_C_LIBRARY, "mallinfo2", None)
if _HEAP_FIGURES is not None:
    _HEAP_FIGURES.restype = _HeapFigures


def share_one_heap() -> None:
    """Have all threads allocate from one heap of the C library, if it can.

    By default each thread gets a heap of its own, and a peak of memory in each of them leaves it
    fragmented. To be called before threads begin.
    """
    set_option = getattr(_C_LIBRARY, "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


_M_ARENA_MAX: Final = -8
"""glibc's number of the option; other C libraries ignore it or have no options."""


def return_freed_memory() -> None:
    """Have the C library return freed memory to the system, if it has ``malloc_trim``."""
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
