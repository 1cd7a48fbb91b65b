"""A server on a real socket that answers as a test tells it to, byte by byte."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec


class Heard(msgspec.Struct, frozen=True):
    """A request as it arrived."""

    connection: int
    """The first one is 1."""
    number: int
    """Of the request, over all connections."""
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Say(msgspec.Struct, frozen=True):
    """Send these pieces, each once the one before is on its way."""

    pieces: tuple[bytes, ...]
    then_hang_up: bool = False


class HangUp(msgspec.Struct, frozen=True):
    """Close without an answer."""


class KeepSilent(msgspec.Struct, frozen=True):
    """Never answer, and do not hang up."""

    after: bytes = b""


class Trickle(msgspec.Struct, frozen=True):
    """Send the first, then the second again and again, for ever."""

    first: bytes
    again: bytes
    every_s: float = 0.01


Reaction: TypeAlias = Say | HangUp | KeepSilent | Trickle
Script: TypeAlias = Callable[[Heard], Reaction]


class TinyServer:
    """What was heard, and where it listens."""

    def __init__(self, script: Script) -> None:
        self.heard: list[Heard] = []
        self.url = ""
        self.connections = 0
        self._quiet = threading.Event()
        self._script = script
        self._loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self._stop = asyncio.Event()

    def hang_up_on_all(self) -> None:
        """Close every connection that is open, as a server that shuts down does."""
        self._on_each(lambda writer: writer.close())
        self.wait_until_quiet()

    def say_to_all(self, data: bytes) -> None:
        """Send what nobody asked for."""
        self._on_each(lambda writer: writer.write(data))

    def _on_each(self, act: Callable[[asyncio.StreamWriter], None]) -> None:
        done = threading.Event()

        def now() -> None:
            for writer in list(self._writers):
                act(writer)
            done.set()

        self._loop.call_soon_threadsafe(now)
        assert done.wait(5)

    def wait_until_quiet(self) -> None:
        """Until nobody is connected any more."""
        assert self._quiet.wait(5)

    def serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        self._writers.add(writer)
        self._quiet.clear()
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._one(connection, reader, writer):
                    pass
        finally:
            writer.close()
            with suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            self._writers.discard(writer)
            if not self._writers:
                self._quiet.set()

    async def _one(
        self, connection: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        heard = Heard(connection, len(self.heard) + 1, method, path, headers, body)
        self.heard.append(heard)
        match self._script(heard):
            case Say(pieces=pieces, then_hang_up=then_hang_up):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                return not then_hang_up
            case KeepSilent(after=after):
                writer.write(after)
                await reader.read()
                return False
            case Trickle(first=beginning, again=again, every_s=every_s):
                writer.write(beginning)
                while not reader.at_eof():
                    writer.write(again)
                    await writer.drain()
                    await asyncio.sleep(every_s)
                return False
            case HangUp():
                return False


@contextmanager
def tiny_server(script: Script) -> Iterator[TinyServer]:
    """Serve while the body runs."""
    server = TinyServer(script)
    thread = threading.Thread(target=server.serve)
    thread.start()
    assert server.ready.wait(5)
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive()


def answer(body: bytes, status: int = 200, *headers: str) -> Say:
    """A whole answer with a length."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return Say(("\r\n".join(lines).encode() + body,))


def event_stream(*pieces: bytes, then_hang_up: bool = True) -> Say:
    """A stream of events in chunks, cut off without a last one."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunks = (b"%x\r\n%b\r\n" % (len(each), each) for each in pieces)
    return Say((head, *chunks), then_hang_up)
