"""Memory that a storm has left behind is returned; a server that has not grown is left alone."""

from __future__ import annotations

import asyncio
import gc
import weakref

from stanchion.adapters.system import ManualClock
from stanchion.services.watchdog import (
    CHECK_S,
    FREED_BYTES,
    GROWTH_BYTES,
    LOOKS_UNTIL_NEXT,
    TRIMS_AFTER,
    MemoryTrimmer,
    resident_bytes,
    return_freed_memory,
)

START = 60 * 1024 * 1024


class Node:
    """Something that can refer to itself."""

    other: Node


class Process:
    """A process whose size is set by the test."""

    def __init__(self) -> None:
        self.size: int | None = START
        self.least = START
        """What cannot be returned."""
        self.allocated = START // 2
        self.returned = 0
        self.clock = ManualClock()
        self.trimmer = MemoryTrimmer(
            self.clock,
            resident=lambda: self.size,
            allocated=lambda: self.allocated,
            give_back=self._give_back,
            release=self._release,
        )
        self.released = 0

    def _release(self) -> None:
        self.released += 1

    def _give_back(self) -> None:
        self.returned += 1
        self.size = self.least

    async def look(self, size: int) -> int:
        """How often memory was returned so far, after a look at this size."""
        self.size = size
        await self.trimmer.look()
        return self.returned


async def test_memory_is_returned_after_growth_and_only_then() -> None:
    process = Process()
    assert await process.look(START) == 0
    grown = START + 16 * 1024 * 1024
    assert await process.look(grown - 1) == 0
    assert await process.look(grown) == 1
    assert await process.look(grown - 1) == 1


async def test_what_was_not_used_for_long_is_released_at_every_look() -> None:
    process = Process()
    for looks in range(1, 5):
        await process.look(START)
        assert process.released == looks


async def test_memory_is_returned_a_few_more_times_after_growth() -> None:
    process = Process()
    await process.look(START)
    assert await process.look(START + GROWTH_BYTES) == 1
    times = [await process.look(START) for _ in range(LOOKS_UNTIL_NEXT * (TRIMS_AFTER + 2))]
    assert [times.index(2 + trim) + 1 for trim in range(TRIMS_AFTER)] == [
        LOOKS_UNTIL_NEXT * (trim + 1) for trim in range(TRIMS_AFTER)
    ]
    assert times[-1] == 1 + TRIMS_AFTER


async def test_memory_that_is_freed_long_after_growth_is_returned_too() -> None:
    process = Process()
    await process.look(START)
    process.least += GROWTH_BYTES  # it is in use until after the last of the trims
    process.allocated += GROWTH_BYTES
    for _ in range(1 + LOOKS_UNTIL_NEXT * TRIMS_AFTER):
        await process.look(START + GROWTH_BYTES)
    assert process.returned == 1 + TRIMS_AFTER
    for freed_bytes, returned in ((0, 0), (FREED_BYTES - 1, 0), (1, 1), (0, 0)):
        process.allocated -= freed_bytes
        before = process.returned
        for _ in range(LOOKS_UNTIL_NEXT):
            await process.look(START + GROWTH_BYTES)
        assert process.returned - before == returned


async def test_growth_counts_from_the_lowest_size() -> None:
    process = Process()
    assert await process.look(START) == 0
    assert await process.look(START // 2) == 0
    assert await process.look(START // 2 + GROWTH_BYTES) == 1


async def test_garbage_in_cycles_is_collected_after_growth() -> None:
    process = Process()
    await process.look(START)
    node = Node()
    node.other = node
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        await process.look(START + 1)
        assert gone() is not None
        await process.look(START + GROWTH_BYTES)
        assert gone() is None
    finally:
        gc.enable()


async def test_garbage_in_cycles_is_collected_however_slow_the_growth_is() -> None:
    process = Process()
    node = Node()
    node.other = node
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        for look in range(LOOKS_UNTIL_NEXT * 8):
            # Blocks of the interpreter: nothing of it can be returned, or is of the C heap.
            process.least = START + look * GROWTH_BYTES // (LOOKS_UNTIL_NEXT * 4)
            await process.look(process.least)
        assert process.returned > 1
        assert gone() is None
    finally:
        gc.enable()


async def test_it_looks_every_two_seconds_and_ends_where_sizes_are_unknown() -> None:
    process = Process()
    running = asyncio.create_task(process.trimmer.run())
    await asyncio.sleep(0)
    process.size = START + GROWTH_BYTES
    process.clock.advance(int(CHECK_S * 1000))
    async with asyncio.timeout(5):
        while process.returned == 0:  # noqa: ASYNC110 - a thread does it
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    process.size = None
    async with asyncio.timeout(5):
        await process.trimmer.run()


def test_this_process_has_a_size_and_can_return_memory() -> None:
    size = resident_bytes()
    assert size is None or size > 1024 * 1024
    return_freed_memory()
