"""The watchdog of the event loop: what it sees, what it says, and how often."""

from __future__ import annotations

import asyncio
import inspect
import selectors
import time
from collections.abc import Callable
from types import FrameType

import pytest
from prometheus_client import CollectorRegistry

from stanchion.services.watchdog import LOOK_AGAIN_S, LOOK_EVERY_S, STALL_S, LoopWatchdog


class Watched:
    """A watchdog with a clock and a loop that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.frame: FrameType | None = None
        self.probes: list[Callable[[], None]] = []
        self.registry = CollectorRegistry()
        self._watchdog = LoopWatchdog(
            self.registry, clock=lambda: self.now, cpu_clock=lambda: self.cpu
        )

    def look(self, after_s: float = LOOK_EVERY_S) -> None:
        self.now += after_s
        self._watchdog.look(self.probes.append, lambda: self.frame)

    def run_probe(self) -> None:
        self.probes.pop()()

    def stall(self, seconds: float, cpu_s: float = 0.0) -> None:
        """Block the loop in the caller's function, and let it go on."""
        self.frame = inspect.currentframe()
        self.look()
        before, self.cpu = self.now, self.cpu + cpu_s
        while self.now - before < seconds - LOOK_AGAIN_S:
            self.look(LOOK_AGAIN_S)
        self.now = before + seconds
        self.run_probe()
        self.look()
        self.frame = None

    def counted(self, le: str = "+Inf") -> float | None:
        name = "stanchion_loop_lag_seconds_bucket"
        return self.registry.get_sample_value(name, {"le": le})


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [each.__dict__["fields"] for each in caplog.records if each.message == "loop_stalled"]


def waiting_frame() -> FrameType | None:
    frames: list[FrameType | None] = []

    class Spy(selectors.SelectSelector):
        def _select(self, *_arguments: object) -> tuple[list[int], list[int], list[int]]:
            here = inspect.currentframe()
            frames.append(None if here is None else here.f_back)
            return [], [], []

    Spy().select(0)
    return frames[0]


def test_a_loop_that_waits_for_io_is_not_woken_up() -> None:
    watched = Watched()
    watched.frame = waiting_frame()
    for _ in range(100):
        watched.look()
    watched.frame = None  # its thread has ended
    watched.look()
    assert (watched.probes, watched.counted()) == ([], 0)


def test_a_busy_loop_that_answers_in_time_is_counted_and_not_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.look()
    watched.stall(STALL_S - LOOK_EVERY_S - 0.001)
    assert (watched.counted(), watched.counted("0.05")) == (1, 1)
    assert told(caplog) == []


def test_a_stall_is_told_with_its_length_its_work_and_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.look()
    watched.stall(0.4, cpu_s=0.3)
    (line,) = told(caplog)
    stack = str(line.pop("stack"))
    # It may have begun right after the look before.
    assert line == {"stalled_ms": 400 + LOOK_EVERY_S * 1_000, "cpu_ms": 300, "unreported": 0}
    assert stack.startswith("services/test_loop_watchdog.py:")
    assert "Watched.stall" in stack
    assert (watched.counted("0.25"), watched.counted("0.5")) == (0, 1)


def test_a_look_that_comes_late_is_a_stall_if_the_loop_is_busy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.frame = waiting_frame()
    watched.look()
    watched.look(after_s=2.0)  # a machine without a free core: the loop is idle
    assert watched.probes == []
    watched.frame, watched.cpu = inspect.currentframe(), 2.0
    watched.look(after_s=2.0 + LOOK_EVERY_S)
    watched.frame = None
    watched.run_probe()
    watched.look()
    (line,) = told(caplog)
    assert (line["stalled_ms"], line["cpu_ms"]) == (2_000 + LOOK_EVERY_S * 1_000, 2_000)
    assert "test_a_look_that_comes_late" in str(line["stack"])


def test_a_look_that_comes_late_while_the_loop_computed_is_a_stall_of_50_ms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for cpu_s in (0.0, STALL_S):  # the machine had no free core; the loop had the interpreter
        watched = Watched()
        watched.frame = waiting_frame()
        watched.look()
        watched.frame, watched.cpu = inspect.currentframe(), cpu_s
        watched.look(after_s=STALL_S + 0.001)
        watched.run_probe()
        watched.look()
        assert len(told(caplog)) == (cpu_s > 0)


def test_many_stalls_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(200):
        watched.stall(0.2)  # a minute or so of them
    watched.look(after_s=60)
    watched.stall(0.2)
    lines = told(caplog)
    assert 5 <= len(lines) <= 7
    assert watched.counted() == 201
    assert len(lines) + sum(int(str(each["unreported"])) for each in lines) == 201


def deeper(levels: int, then: Callable[[], None]) -> None:
    if levels:
        deeper(levels - 1, then)
    else:
        then()


def test_a_deep_stack_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    deeper(300, lambda: watched.stall(0.2))
    (line,) = told(caplog)
    assert len(str(line["stack"])) <= 600


PHASES = 12
TRIES = 5


async def test_a_stall_of_50_ms_is_told_of_whenever_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for phase in range(PHASES):
        # On a busy machine the watchdog's thread may get no core for the length of a stall; a phase
        # in which it does not look is missed every time.
        for _ in range(TRIES):
            caplog.clear()
            with LoopWatchdog(CollectorRegistry()).watching():
                await asyncio.sleep(2 * LOOK_EVERY_S + phase / PHASES * LOOK_EVERY_S)
                time.sleep(STALL_S + 0.001)  # noqa: ASYNC251 - it is the stall
                await asyncio.sleep(2 * LOOK_AGAIN_S)
            if told(caplog):
                break
        (line,) = told(caplog)
        assert "whenever_it_begins" in str(line["stack"])


def blocks_with_a_call() -> None:
    time.sleep(0.3)


def blocks_with_work() -> None:
    sum(range(12_000_000))  # in C, without giving the interpreter lock away


@pytest.mark.parametrize("block", [blocks_with_a_call, blocks_with_work])
async def test_a_real_loop_that_is_blocked_is_told_of(
    caplog: pytest.LogCaptureFixture, block: Callable[[], None]
) -> None:
    watchdog = LoopWatchdog(CollectorRegistry())
    with watchdog.watching():
        await asyncio.sleep(0.1)
        block()
        async with asyncio.timeout(5):
            while not told(caplog):  # noqa: ASYNC110 - it is told by a thread
                await asyncio.sleep(0.01)
    line = told(caplog)[-1]
    assert block.__name__ in str(line["stack"])
    assert int(str(line["stalled_ms"])) >= STALL_S * 1_000
