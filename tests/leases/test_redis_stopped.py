"""The lock server is stopped in its tracks for longer than the term, while twenty holders work.

A grant's fence is the server's clock in microseconds, and all clocks here are this machine's: so
the moment of a grant is known to the microsecond, at the server and not at whoever hears of it.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import pytest

from tests.leases.lines import until_waiting
from tests.leases.rivals import TTL_S
from tests.servers import Server, running_server

_ROOT = Path(__file__).parents[2]
_HOLDERS = 20
_SOON_S = 60.0
_NAMESPACE = "rivals"


class Outcome(msgspec.Struct, frozen=True):
    """What became of one name."""

    held_fence: int
    stopped_us: int
    cause: str
    granted_fence: int

    @property
    def overlap_us(self) -> int:
        """How long two were at work; negative, if they never were."""
        return self.stopped_us - self.granted_fence


@pytest.mark.parametrize(("rivals", "late_s"), [("polite", 0.4), ("eager", 0.4), ("eager", 0.05)])
async def test_fenced_holders_stop_before_anybody_else_is_granted_the_name(
    rivals: str, late_s: float
) -> None:
    _check(await _play("docile", rivals, pause_s=TTL_S + late_s))


@pytest.mark.chaos
@pytest.mark.parametrize("number", range(20))
async def test_fenced_holders_stop_before_anybody_else_however_long_the_stop(number: int) -> None:
    pause_s = TTL_S + random.Random(number).uniform(0.01, 3.0)
    _check(await _play("docile", ("polite", "eager")[number % 2], pause_s=pause_s))


async def test_the_same_search_finds_those_who_will_not_stop() -> None:
    outcomes = await _play("stubborn", "eager", pause_s=TTL_S + 0.4)
    assert sum(outcome.overlap_us > 0 for outcome in outcomes) >= _HOLDERS / 2


def _check(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == _HOLDERS
    for outcome in outcomes:
        assert outcome.overlap_us < 0
        assert outcome.granted_fence > outcome.held_fence
        assert outcome.cause in {"renewal_failures", "deadline"}


async def _play(manner: str, manner_of_rivals: str, *, pause_s: float) -> list[Outcome]:
    names = [f"name-{number}" for number in range(_HOLDERS)]
    with running_server() as server, _process(server, manner) as holders:
        held = await _lines(holders)
        with _process(server, manner_of_rivals) as rivals:
            if manner_of_rivals == "polite":
                for name in names:
                    await until_waiting(server.url, _NAMESPACE, name, 1)
            server.pause()
            await asyncio.sleep(pause_s)
            server.resume()
            stopped, granted = await asyncio.gather(_lines(holders), _lines(rivals))
    return [
        Outcome(
            held_fence=int(held[name][1]),
            stopped_us=int(stopped[name][1]),
            cause=stopped[name][2],
            granted_fence=int(granted[name][1]),
        )
        for name in names
    ]


async def _lines(output: IO[str]) -> dict[str, list[str]]:
    """The next line about every name."""
    async with asyncio.timeout(_SOON_S):
        lines = [(await asyncio.to_thread(output.readline)).split() for _ in range(_HOLDERS)]
    return {name: rest for name, *rest in lines}


@contextmanager
def _process(server: Server, manner: str) -> Iterator[IO[str]]:
    words = [server.url, _NAMESPACE, str(_HOLDERS), manner]
    command = [sys.executable, "-m", "tests.leases.rivals", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process.stdout
        finally:
            process.kill()
