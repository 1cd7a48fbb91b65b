"""A load generator process: ``python -m bench.loadgen SPEC`` prints its results as JSON.

``send`` runs one such process, ``sending`` runs it in the background. Closed loop: each connection
sends its next request after its response. Open loop: a request is sent at its scheduled time,
whether or not others have been answered, and its latency counts from that time.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import uvloop

from bench.apart import apart, percentile, thinned
from bench.connection import Answer, Connection, as_bytes, connect, tenants_in_turn

__all__ = ["Load", "Seen", "send", "sending"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to send, and how."""

    url: str
    method: str = "POST"
    body: str = "{}"
    headers: dict[str, str] = {}
    connections: int = 64
    seconds: float = 5.0
    requests_max: int = 10_000_000
    rate_per_s: float | None = None
    """Given: an open loop at this rate."""
    fresh: bool = False
    """A new connection for every request."""
    tenants: int = 0
    """Given: requests are those of so many tenants in turn, ``tenant-0`` and so on."""
    keys: bool = False
    """Whether every request has an idempotency key of its own, as those of our clients."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The responses."""

    requests: int
    seconds: float
    statuses: dict[str, int]
    """How often each came; of a refusal with its code, as in ``503 overloaded``."""
    latencies_ms: list[float]
    """Sorted; of many, two thousand that stand for all of them."""

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, part: float) -> float:
        """Return the latency at this quantile."""
        return percentile(self.latencies_ms, part)

    def only(self, *statuses: str) -> Seen:
        """Return self if all responses have one of these statuses; fail otherwise."""
        assert set(self.statuses) <= set(statuses), self.statuses
        return self


def send(load: Load) -> Seen:
    """Send the load from a separate process."""
    with sending(load) as seen:
        return seen()


@contextmanager
def sending(load: Load) -> Iterator[Callable[[], Seen]]:
    """Send the load in the background; the returned call waits for the results."""
    with apart("bench.loadgen", load, Seen, load.seconds) as seen:
        yield seen


# ── In that process ──────────────────────────────────────────────────────────────────────────────


class _Noted:
    """Results so far."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.statuses: Counter[str] = Counter()
        self.latencies_ms: list[float] = []

    def __call__(self, status: str, since_s: float) -> None:
        self.statuses[status] += 1
        self.latencies_ms.append((time.perf_counter() - since_s) * 1000)


async def run(load: Load) -> Seen:
    """Send the load."""
    noted = _Noted()
    if load.rate_per_s is None:
        await _closed(load, _requests(load), noted)
    else:
        await _open(load, load.rate_per_s, _requests(load), noted)
    return Seen(
        requests=len(noted.latencies_ms),
        seconds=time.perf_counter() - noted.began_s,
        statuses=dict(noted.statuses),
        latencies_ms=thinned(noted.latencies_ms),
    )


def _requests(load: Load) -> Iterator[bytes]:
    if load.keys:
        mark, salt = "<key>", secrets.token_hex(6)
        headers = {**load.headers, "idempotency-key": mark}
        whole = as_bytes(load.method, load.url, load.body, headers)
        head, _, tail = whole.partition(mark.encode())
        return (head + f"{salt}-{each}".encode() + tail for each in itertools.count())
    if not load.tenants:
        return itertools.repeat(as_bytes(load.method, load.url, load.body, load.headers))
    named = [{**load.headers, **each} for each in tenants_in_turn(load.tenants)]
    return itertools.cycle([as_bytes(load.method, load.url, load.body, each) for each in named])


def _named(answer: Answer) -> str:
    """The status, with the code of a problem document."""
    _, found, rest = answer.body.partition(b'"code":"')
    if answer.status < "400" or not found:
        return answer.status
    code, _, _ = rest.partition(b'"')
    return f"{answer.status} {code.decode()}"


async def _closed(load: Load, requests: Iterator[bytes], noted: _Noted) -> None:
    left = load.requests_max
    # Kept connections are opened before the first request; new ones are part of each request.
    kept = [None if load.fresh else await connect(load.url) for _ in range(load.connections)]
    noted.began_s = time.perf_counter()
    ends_s = noted.began_s + load.seconds

    async def caller(connection: Connection | None) -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < ends_s:
            left -= 1
            since_s = time.perf_counter()
            try:
                if connection is None:
                    connection = await connect(load.url)
                status = _named(await connection.ask(next(requests)))
            except OSError:
                status = "refused"
            noted(status, since_s)
            if load.fresh or status in {"lost", "refused"}:
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()

    await asyncio.gather(*map(caller, kept))


async def _open(load: Load, rate_per_s: float, requests: Iterator[bytes], noted: _Noted) -> None:
    idle = [await connect(load.url) for _ in range(load.connections)]
    noted.began_s = began_s = time.perf_counter()
    under_way: set[asyncio.Task[None]] = set()

    async def one(due_s: float) -> None:
        connection = idle.pop() if idle else await connect(load.url)
        status = _named(await connection.ask(next(requests)))
        noted(status, due_s)
        if status == "lost":
            connection = await connect(load.url)
        idle.append(connection)

    for number in range(int(load.seconds * rate_per_s)):
        due_s = began_s + number / rate_per_s
        pause_s = due_s - time.perf_counter()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        task = asyncio.create_task(one(due_s))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    for connection in idle:
        connection.close()


if __name__ == "__main__":
    print(
        msgspec.json.encode(uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Load)))).decode()
    )
