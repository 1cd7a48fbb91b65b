"""Leases between real processes, some of which are killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stanchion
from stanchion.leases.waiting import TICKET_MS
from tests.leases.lines import until_waiting
from tests.leases.visitor import TTL_S

_ROOT = Path(__file__).parents[2]
_SOON_S = 60.0
_BUSY_S = 3.0
"""What a busy machine may add to any wait."""
NAME = "invoice:42"


@pytest.fixture
def visitors(url: str, namespace: str) -> Iterator[Visitors]:
    with contextlib.ExitStack() as stack:
        yield Visitors(url, namespace, stack)


class Visitors:
    """Starts processes, and sees to it that none is left."""

    def __init__(self, url: str, namespace: str, stack: contextlib.ExitStack) -> None:
        self.url = url
        self.namespace = namespace
        self._stack = stack

    def start(self, *words: str | int | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.leases.visitor", self.url, self.namespace]
        process = self._stack.enter_context(
            subprocess.Popen(
                [*command, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=_ROOT
            )
        )
        self._stack.callback(process.kill)
        return process

    async def until_waiting(self, count: int) -> None:
        await until_waiting(self.url, self.namespace, NAME, count)

    def leases(self) -> stanchion.Leases:
        return stanchion.Leases(self.url, namespace=self.namespace)


def _said(process: subprocess.Popen[str]) -> list[int]:
    said = process.communicate(timeout=_SOON_S)[0]
    assert process.returncode == 0
    return [int(line) for line in said.split()]


def _first_line(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_no_update_of_any_process_is_lost(visitors: Visitors, tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    processes = [visitors.start("add", NAME, number, 12) for _ in range(3)]
    fences = [fence for process in processes for fence in _said(process)]
    assert number.read_text() == "36"
    assert len(set(fences)) == 36


async def test_processes_enter_in_the_order_in_which_they_came(
    visitors: Visitors, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    processes = []
    async with visitors.leases() as here, here.hold(NAME):
        for count in (1, 2, 3):
            processes.append(visitors.start("enter", NAME, order))
            await visitors.until_waiting(count)
    fences = [fence for process in processes for fence in _said(process)]
    assert fences == sorted(fences)
    assert [int(line) for line in order.read_text().split()] == fences


async def test_a_killed_waiter_delays_the_others_by_one_ticket_at_most(
    visitors: Visitors, tmp_path: Path
) -> None:
    async with visitors.leases() as here, here.hold(NAME):
        crashing = visitors.start("stay", NAME)
        await visitors.until_waiting(1)
        waiting = visitors.start("enter", NAME, tmp_path / "order")
        await visitors.until_waiting(2)
        crashing.kill()
        crashing.wait()
    began = time.monotonic()
    assert _first_line(waiting)
    assert time.monotonic() - began < TICKET_MS / 1000 + _BUSY_S


async def test_the_lease_of_a_killed_holder_goes_to_the_next_when_its_term_ends(
    visitors: Visitors, tmp_path: Path
) -> None:
    crashing = visitors.start("stay", NAME)
    fence = _first_line(crashing)
    waiting = visitors.start("enter", NAME, tmp_path / "order")
    await visitors.until_waiting(1)
    crashing.kill()
    began = time.monotonic()
    assert _first_line(waiting) > fence
    assert time.monotonic() - began < TTL_S + _BUSY_S
