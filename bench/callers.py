"""Callers that start runs and wait for their ends, in a separate process.

    python -m bench.callers SPEC

Each has its own connection, starts a run, waits for it with ``?wait=``, and repeats. Several
servers are assigned to callers in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping
from contextlib import closing

import msgspec
import uvloop

from bench.apart import apart, percentile, thinned
from bench.connection import Connection, as_bytes, connect, tenants_in_turn

__all__ = ["Errand", "Ran", "run_through"]

WAIT_S = 30


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """The load to generate."""

    urls: tuple[str, ...]
    workflow: str = "three-steps"
    body: str = '{"input":{"n":7}}'
    at_once: int = 64
    seconds: float = 5.0
    runs_max: int = 10_000_000
    tenants: int = 0
    """If given, runs belong to this many tenants in turn, ``tenant-0`` and so on."""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The results."""

    runs: int
    seconds: float
    latencies_ms: list[float]
    """From the request to the response with its end. Sorted and thinned."""

    @property
    def per_s(self) -> float:
        return self.runs / self.seconds

    def percentile_ms(self, part: float) -> float:
        return percentile(self.latencies_ms, part)


class _Started(msgspec.Struct):
    run_id: str


class _Ended(msgspec.Struct):
    status: str


_STARTED = msgspec.json.Decoder(_Started)
_ENDED = msgspec.json.Decoder(_Ended)


def run_through(errand: Errand) -> Ran:
    """Generate the load in a separate process."""
    with apart("bench.callers", errand, Ran, errand.seconds) as ran:
        return ran()


# ── In that process ──────────────────────────────────────────────────────────────────────────────


async def run(errand: Errand) -> Ran:
    """Generate the load. Every run must succeed."""
    latencies_ms: list[float] = []
    left = errand.runs_max
    began_s = time.perf_counter()
    ends_s = began_s + errand.seconds
    tenants = itertools.cycle(tenants_in_turn(errand.tenants) if errand.tenants else [{}])

    async def caller(url: str) -> None:
        nonlocal left
        with closing(await connect(url)) as connection:
            while left > 0 and time.perf_counter() < ends_s:
                left -= 1
                since_s = time.perf_counter()
                await _one(connection, url, errand, next(tenants))
                latencies_ms.append((time.perf_counter() - since_s) * 1000)

    turn = itertools.cycle(errand.urls)
    await asyncio.gather(*(caller(next(turn)) for _ in range(errand.at_once)))
    return Ran(
        runs=len(latencies_ms),
        seconds=time.perf_counter() - began_s,
        latencies_ms=thinned(latencies_ms),
    )


async def _one(
    connection: Connection, url: str, errand: Errand, headers: Mapping[str, str]
) -> None:
    path = f"{url}/v1/workflows/{errand.workflow}/runs"
    started = await connection.ask(as_bytes("POST", path, errand.body, headers))
    assert started.status == "200", started
    run_id = _STARTED.decode(started.body).run_id
    wait = as_bytes("GET", f"{url}/v1/runs/{run_id}?wait={WAIT_S}", "", headers)
    ended = await connection.ask(wait)
    assert ended.status == "200", ended
    assert _ENDED.decode(ended.body).status == "succeeded", ended


if __name__ == "__main__":
    print(
        msgspec.json.encode(uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Errand)))).decode()
    )
