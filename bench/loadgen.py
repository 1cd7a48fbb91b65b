"""Load from a process of its own: ``python -m bench.loadgen SPEC`` prints what it saw, as JSON.

It writes requests as bytes and reads just enough of the answers, so that on two cores the server
gets nearly all of one. Closed loop: each connection sends when it has its answer. Open loop: a
request is sent when its time has come, whether or not others are answered, and its latency counts
from that time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

__all__ = ["Load", "Seen"]


KEPT_MAX = 2_000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and how."""

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


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What came back."""

    requests: int
    seconds: float
    statuses: dict[str, int]
    latencies_ms: list[float]
    """Sorted; of many, two thousand that stand for all of them."""

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, part: float) -> float:
        """The latency that this part of the requests did not exceed."""
        if not self.latencies_ms:
            return float("nan")
        return self.latencies_ms[
            min(len(self.latencies_ms) - 1, int(len(self.latencies_ms) * part))
        ]


class Connection(asyncio.Protocol):
    """One connection with one request under way at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answer: asyncio.Future[str] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's by inheritance, only by what they can do.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0 or self._answer is None:
            return
        head = self._buffer[:head_end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) >= head_end + 4 + length:
            status = self._buffer[9:12].decode()
            self._buffer = self._buffer[head_end + 4 + length :]
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(status)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result("lost")

    async def ask(self, request: bytes) -> str:
        """Send, and the status that comes back."""
        assert self._transport is not None
        if self._transport.is_closing():
            return "lost"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def run(load: Load) -> Seen:
    """Send it all."""
    parts = urlsplit(load.url)
    assert parts.hostname is not None
    body = load.body.encode()
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{load.method} {path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in load.headers.items()),
    ]
    request = "\r\n".join([*lines, "", ""]).encode() + body

    async def connect() -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, parts.hostname, parts.port))[1]

    send = _closed if load.rate_per_s is None else _open
    statuses: Counter[str] = Counter()
    latencies_ms: list[float] = []
    began_s = time.perf_counter()
    await send(
        load,
        connect,
        request,
        lambda status, since_s: _note(statuses, latencies_ms, status, since_s),
    )
    return Seen(
        requests=len(latencies_ms),
        seconds=time.perf_counter() - began_s,
        statuses=dict(statuses),
        latencies_ms=_thinned(sorted(latencies_ms)),
    )


def _note(statuses: Counter[str], latencies_ms: list[float], status: str, since_s: float) -> None:
    statuses[status] += 1
    latencies_ms.append((time.perf_counter() - since_s) * 1000)


def _thinned(latencies_ms: list[float]) -> list[float]:
    kept = min(len(latencies_ms), KEPT_MAX)
    return [latencies_ms[(number * len(latencies_ms)) // kept] for number in range(kept)]


async def _closed(
    load: Load,
    connect: Callable[[], Awaitable[Connection]],
    request: bytes,
    note: Callable[[str, float], None],
) -> None:
    left = load.requests_max
    ends_s = time.perf_counter() + load.seconds

    async def caller() -> None:
        nonlocal left
        connection = None
        while left > 0 and time.perf_counter() < ends_s:
            left -= 1
            since_s = time.perf_counter()
            try:
                if connection is None:
                    connection = await connect()
                status = await connection.ask(request)
            except OSError:
                status = "refused"
            note(status, since_s)
            if load.fresh or status in {"lost", "refused"}:
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()

    await asyncio.gather(*(caller() for _ in range(load.connections)))


async def _open(
    load: Load,
    connect: Callable[[], Awaitable[Connection]],
    request: bytes,
    note: Callable[[str, float], None],
) -> None:
    assert load.rate_per_s is not None
    idle = [await connect() for _ in range(load.connections)]
    began_s = time.perf_counter()
    under_way: set[asyncio.Task[None]] = set()

    async def one(due_s: float) -> None:
        connection = idle.pop() if idle else await connect()
        status = await connection.ask(request)
        note(status, due_s)
        if status == "lost":
            connection = await connect()
        idle.append(connection)

    for number in range(int(load.seconds * load.rate_per_s)):
        due_s = began_s + number / load.rate_per_s
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
