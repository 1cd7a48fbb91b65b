"""A caller without a socket: ASGI messages in, ASGI messages out, nothing in between.

Unlike a client library it does not mend anything: headers may repeat, bodies may come in pieces or
stop in the middle, and the caller may hang up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from stanchion.gateway import Gateway
from stanchion.gateway.app import MetricsApp

__all__ = ["Answer", "Feed", "Stuck", "ask", "opened"]

HOST = (b"host", b"127.0.0.1:8420")


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - any JSON
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str | None:
        """The problem's code, if it is one."""
        is_problem = self.headers.get("content-type") == "application/problem+json"
        return str(self.json["code"]) if is_problem else None


class Stuck:
    """In a body's place: nothing more comes, and nobody hangs up."""


async def ask(
    app: Gateway | MetricsApp,
    method: str,
    target: str,
    body: object = b"",
    headers: Iterable[tuple[str, str | bytes]] = (),
    *,
    parts: Sequence[bytes | type[Stuck]] | None = None,
) -> Answer:
    """Send one request and take the whole answer."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    exchange = _Exchange([raw] if parts is None else parts)
    await app(_scope(method, target, headers), exchange.receive, exchange.send)
    return exchange.answer()


class Feed:
    """An answer that goes on."""

    def __init__(self, exchange: _Exchange, task: asyncio.Task[None]) -> None:
        self._exchange = exchange
        self.task = task

    async def next(self) -> bytes:
        """The next part; empty at the end."""
        async with asyncio.timeout(5):
            return await self._exchange.parts.get()

    async def until(self, wanted: bytes) -> bytes:
        """Everything up to the part that holds these bytes."""
        seen = b""
        while wanted not in seen:
            part = await self.next()
            assert part, f"the stream ended; it said {seen!r}"
            seen += part
        return seen

    async def answer(self) -> Answer:
        """The whole answer, once it is complete."""
        async with asyncio.timeout(5):
            await self.task
        return self._exchange.answer()

    def hang_up(self) -> None:
        self._exchange.gone.set()


@asynccontextmanager
async def opened(
    app: Gateway,
    method: str,
    target: str,
    body: object = b"",
    headers: Iterable[tuple[str, str | bytes]] = (),
) -> AsyncIterator[Feed]:
    """Send a request, and look at the answer while it comes."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    exchange = _Exchange([raw])
    scope = _scope(method, target, headers)
    task = asyncio.create_task(app(scope, exchange.receive, exchange.send))
    feed = Feed(exchange, task)
    try:
        yield feed
    finally:
        feed.hang_up()
        async with asyncio.timeout(5):
            await task


class _Exchange:
    def __init__(self, parts: Sequence[bytes | type[Stuck]]) -> None:
        self._to_send = list(parts)
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        if not self._to_send:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        part = self._to_send.pop(0)
        if not isinstance(part, bytes):
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": part, "more_body": bool(self._to_send)}

    async def send(self, message: Any) -> None:  # noqa: ANN401 - as ASGI has it
        if message["type"] == "http.response.start":
            assert not self.status, "answered twice"
            self.status = message["status"]
            self.headers = {
                name.decode(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self.body += message["body"]
            self.parts.put_nowait(message["body"])
            if not message.get("more_body", False):
                self.parts.put_nowait(b"")
                self.gone.set()

    def answer(self) -> Answer:
        return Answer(self.status, self.headers, self.body)


def _scope(method: str, target: str, headers: Iterable[tuple[str, str | bytes]]) -> dict[str, Any]:
    path, _, query = target.partition("?")
    given = [
        (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in headers
    ]
    is_host_given = any(name == b"host" for name, _ in given)
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        # As uvicorn makes it.
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": given if is_host_given else [HOST, *given],
    }
