"""A TCP proxy that can cut, hold, lose or delay what passes through it.

Each direction passes, is lost (read and discarded) or is held (not read, so that the sender's
buffers fill up). ``cut`` resets every connection and refuses new ones until ``mend``. A direction
can be delayed. ``hang_up_gaps`` resets connections that lost bytes, since TCP has no gaps; without
it they stay open. A *trap* matches one request that contains given bytes: the request reaches the
server, the reply is dropped, and so is everything after it on that connection, so the client must
have no other request under way there.

    async with proxied(server.port) as proxy:
        locks = await RedisLocks.open(proxy.url)
        trap = proxy.trap(b"invoice:42", Loss.CUT)
        await locks.acquire("invoice:42", …)     # executed, then the connection is reset
        assert trap.is_sprung

It listens on 127.0.0.1 at a free port, buffers at most one chunk for each direction and connection,
and closes everything it opened when the block ends.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum, auto
from typing import Final

_CHUNK_BYTES: Final = 64 * 1024
_NEEDLE_BYTES_MAX: Final = 256
_CONNECTIONS_MAX: Final = 1_000
_CONNECT_S_MAX: Final = 5.0


class Flow(StrEnum):
    """What becomes of what is sent in one direction."""

    PASSES = auto()
    IS_LOST = auto()
    """Read and discarded: the sender cannot tell."""
    IS_HELD = auto()
    """Kept where it is until the flow is another one: it arrives late."""


class Loss(StrEnum):
    """How an answer fails to arrive."""

    SILENCE = auto()
    """The connection stays open, and no byte arrives."""
    CUT = auto()
    """The connection breaks when the answer is due."""


class Trap:
    """Waits for one request, and lets its answer be lost."""

    def __init__(self, needle: bytes, loss: Loss) -> None:
        self.needle = needle
        self.loss = loss
        self.sprung = asyncio.Event()
        """Set when the server has answered and the answer is gone: the request was executed."""

    @property
    def is_sprung(self) -> bool:
        return self.sprung.is_set()


class Proxy:
    """See above. Made by ``proxied``."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        """Where the server is. May be changed: new connections go to the new one."""
        self.requests = Flow.PASSES
        self.replies = Flow.PASSES
        self.requests_delay_s = 0.0
        self.replies_delay_s = 0.0
        self.port = 0
        self.accepted = 0
        """How many connections there have been."""
        self.tap: Callable[[bytes], None] | None = None
        """Called with every chunk that clients send."""
        self._is_cut = False
        self._traps: list[Trap] = []
        self._links: set[_Link] = set()
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def trap(self, needle: bytes, loss: Loss) -> Trap:
        """Lose the answer to the next request that contains these bytes."""
        assert 0 < len(needle) <= _NEEDLE_BYTES_MAX
        trap = Trap(needle, loss)
        self._traps.append(trap)
        return trap

    def set_flow(self, *, requests: Flow = Flow.PASSES, replies: Flow = Flow.PASSES) -> None:
        """From now on. What was held goes on its way when its flow passes again."""
        self.requests, self.replies = requests, replies
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def cut(self) -> None:
        """Break every connection, and let no new one in."""
        self._is_cut = True
        for link in list(self._links):
            link.reset()

    def hang_up_gaps(self) -> None:
        """Break the connections on which something was lost: TCP has no gaps."""
        for link in list(self._links):
            if link.has_gap:
                link.reset()

    def mend(self) -> None:
        """Let everything pass again, and remove the traps."""
        self._is_cut = False
        self._traps.clear()
        self.requests_delay_s = self.replies_delay_s = 0.0
        self.set_flow()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Look after one client until either end hangs up."""
        self.accepted += 1
        if self._is_cut or len(self._links) >= _CONNECTIONS_MAX:
            _reset(writer)
            return
        try:
            async with asyncio.timeout(_CONNECT_S_MAX):
                up_reader, up_writer = await asyncio.open_connection(
                    "127.0.0.1", self.upstream_port
                )
        except (OSError, TimeoutError):
            _reset(writer)
            return
        link = _Link(self, writer, up_writer)
        self._links.add(link)
        try:
            await link.run(reader, up_reader)
        finally:
            self._links.discard(link)

    async def wait_until_held_no_more(self, direction: str) -> None:
        """Return when this direction is not held."""
        while getattr(self, direction) is Flow.IS_HELD:
            await self._changed.wait()

    def spring(self, request: bytes) -> Trap | None:
        """The trap that matches this request. Each matches one request."""
        for trap in self._traps:
            if trap.needle in request:
                self._traps.remove(trap)
                return trap
        return None


class _Link:
    """One client's connection, and the one to the server behind it."""

    def __init__(
        self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._trap: Trap | None = None
        self.has_gap = False
        """Whether something that was sent was thrown away."""
        self._tail = b""
        """The end of what was sent so far: a needle may lie across two chunks."""

    async def run(self, requests: asyncio.StreamReader, replies: asyncio.StreamReader) -> None:
        ways = [
            asyncio.create_task(self._carry_requests(requests)),
            asyncio.create_task(self._carry_replies(replies)),
        ]
        try:
            # When one end closes its connection, that to the other end is closed too.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._server.close()
            self._client.close()

    def reset(self) -> None:
        """Break both connections at once, without closing them in order."""
        _reset(self._client)
        _reset(self._server)

    async def _carry_requests(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if self._proxy.tap is not None:
                    self._proxy.tap(chunk)
                await asyncio.sleep(self._proxy.requests_delay_s)
                await self._proxy.wait_until_held_no_more("requests")
                if self._proxy.requests is Flow.IS_LOST:
                    self.has_gap = True
                    continue
                # Before it is sent: the answer may be quicker than we are.
                self._trap = self._trap or self._proxy.spring(self._tail + chunk)
                self._tail = chunk[-_NEEDLE_BYTES_MAX:]
                self._server.write(chunk)
                await self._server.drain()

    async def _carry_replies(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if self._trap is not None:
                    self._trap.sprung.set()
                    if self._trap.loss is Loss.CUT:
                        self.reset()
                        return
                    continue
                await asyncio.sleep(self._proxy.replies_delay_s)
                await self._proxy.wait_until_held_no_more("replies")
                if self._proxy.replies is Flow.IS_LOST:
                    self.has_gap = True
                    continue
                self._client.write(chunk)
                await self._client.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Hang up with a reset, as a broken connection does, instead of with an orderly end."""
    with suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def proxied(upstream_port: int) -> AsyncIterator[Proxy]:
    """A proxy in front of a server on this machine, for as long as the block lasts."""
    proxy = Proxy(upstream_port)
    tasks: set[asyncio.Task[None]] = set()

    def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(on_client, "127.0.0.1", 0, limit=_CHUNK_BYTES)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
