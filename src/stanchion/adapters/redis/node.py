"""One Redis server: its queue of calls, its connections, and an estimate of its clock.

Calls are queued, and the queue is emptied once per turn of the event loop, so concurrent callers
share a system call and a round trip without waiting for each other. While every connection is busy
the queue grows and the next pipeline is longer: batches grow with the load.

When a server cannot be reached, all queued calls fail at once, and no new attempt to connect is
made for a short, jittered, growing pause. A call that ran out of time in the queue is never sent.

The clock of the server is estimated from ``TIME`` replies, each of which bounds the difference
between the server's clock and ours: the reply was made between sending and receiving. Bounds that
overlap are intersected and widened with time; if they do not overlap, a clock was set, and only the
newest sample counts.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from contextlib import suppress
from typing import Final

import hiredis
import msgspec

from stanchion.adapters.redis.address import ServerAddress
from stanchion.adapters.redis.connection import (
    Connection,
    ConnectionLost,
    PendingCall,
    Reply,
    Sent,
    translate,
)
from stanchion.core.model import Instant
from stanchion.core.retry import Exponential, backoff_ms
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendTimeout, BackendUnavailable

_BATCH_MAX: Final = 256
_BATCH_BYTES_MAX: Final = 1024 * 1024
_CONNECTIONS_MAX: Final = 4
_QUEUE_MAX: Final = 50_000
"""More callers than that would time out before their turn."""
_CLOCK_AGE_S_MAX: Final = 1.0
_RECONNECT: Final = Exponential(base_ms=10, cap_ms=1_000)


def pack(*words: str | bytes | int) -> bytes:
    """A command in the wire format."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub says 1-tuple
    return packed


class Login(msgspec.Struct, frozen=True):
    """The first commands on every connection."""

    username: str | None = None
    password: str | None = None
    database: int = 0

    def __repr__(self) -> str:
        return "Login(***)"

    def commands(self) -> list[bytes]:
        commands: list[bytes] = []
        if self.password is not None:
            who = [] if self.username is None else [self.username]
            commands.append(pack("AUTH", *who, self.password))
        if self.database:
            commands.append(pack("SELECT", self.database))
        return commands


class Node:
    """One server: its queue, its connections, and an estimate of its clock."""

    def __init__(
        self,
        address: ServerAddress,
        *,
        login: Login,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        entropy: Entropy,
    ) -> None:
        self.address = address
        self.clock = ServerClock()
        self._greeting = login
        self._tls = tls
        self._timeout_s = timeout_s
        self._entropy = entropy
        self._queue: deque[PendingCall] = deque()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._is_flush_due = False
        self._is_closed = False
        self._failures = 0
        self._retry_at = 0.0
        self._last_error: BackendError | None = None

    def ask(self, packed: bytes, *, deadline: float, replies: int = 1) -> asyncio.Future[Reply]:
        """Send a command with the next batch. The future is done by the deadline at the latest."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise BackendUnavailable(f"{self.address}: closed")
        if not self._all and self._is_resting():
            raise self._error_again()
        if len(self._queue) >= _QUEUE_MAX:
            raise BackendUnavailable(f"{self.address}: {_QUEUE_MAX} calls wait already")
        call = PendingCall(packed, replies, deadline)
        self._queue.append(call)
        if not self._is_flush_due:
            self._is_flush_due = True
            loop.call_soon(self._flush)
        return call.future

    async def read_clock(self, *, deadline: float) -> Instant:
        """Read the clock of the server, and update the estimate."""
        sent = asyncio.get_running_loop().time()
        reply = await self.ask(_ClockSample.packed, deadline=deadline)
        if isinstance(reply, hiredis.ReplyError):
            raise translate(reply, str(self.address))
        server_us = _microseconds(reply)
        self.clock.observe(server_us, sent, asyncio.get_running_loop().time())
        return Instant(server_us // 1000)

    async def close(self) -> None:
        """Close all connections; all waiting calls get an error. Safe to call twice."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._connecting
        self._fail_queue(BackendUnavailable(f"{self.address}: closed"))
        for connection in list(self._all):
            connection.cut(ConnectionLost(f"{self.address}: closed"))
        # An aborted transport is closed in the next iteration of the loop.
        await asyncio.sleep(0)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._queue and self._idle:
            batch = self._next_batch()
            if batch:
                self._idle.pop().send(batch, within_s=self._timeout_s)
        if not self._queue or self._connecting is not None or len(self._all) >= _CONNECTIONS_MAX:
            return
        if not self._is_resting():
            self._connecting = asyncio.create_task(self._connect())
        elif not self._all:
            self._fail_queue(self._error_again())

    def _next_batch(self) -> list[Sent]:
        batch: list[Sent] = []
        size = 0
        while self._queue and len(batch) < _BATCH_MAX and size < _BATCH_BYTES_MAX:
            call = self._queue.popleft()
            if not call.future.done():
                batch.append(call)
                size += len(call.packed)
        now = asyncio.get_running_loop().time()
        if batch and self.clock.age_s(now) > _CLOCK_AGE_S_MAX:
            batch.insert(0, _ClockSample(self.clock))
        return batch

    # ── Connections come and go ──────────────────────────────────────────────────────────────────

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._open()
        except TimeoutError:
            self._failed(BackendTimeout(f"{self.address} did not answer"))
        except (OSError, UnicodeError, ConnectionLost) as error:
            # The queued calls were not sent, so they were not executed.
            self._failed(BackendUnavailable(f"{self.address} cannot be reached: {error}"))
        except BackendError as error:
            self._failed(error)
        else:
            self._failures, self._last_error = 0, None
            connection.on_idle = self._on_idle
            self._idle.append(connection)
        finally:
            self._connecting = None
        if not self._is_closed:
            self._flush()

    async def _open(self) -> Connection:
        connection = await Connection.open(self.address, self._tls, self._on_lost)
        self._all.add(connection)
        try:
            await self._greet(connection)
        except BaseException:
            connection.cut(ConnectionLost(f"{self.address}: not greeted"))
            raise
        return connection

    async def _greet(self, connection: Connection) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        commands = [*self._greeting.commands(), pack("PING")]
        calls = [PendingCall(packed, 1, deadline) for packed in commands]
        connection.send([_ClockSample(self.clock), *calls], within_s=self._timeout_s)
        for reply in await asyncio.gather(*(call.future for call in calls)):
            if isinstance(reply, hiredis.ReplyError):
                raise translate(reply, str(self.address))

    def _failed(self, error: BackendError) -> None:
        self._failures += 1
        pause_ms = backoff_ms(_RECONNECT, self._failures, self._entropy.unit())
        self._retry_at = asyncio.get_running_loop().time() + pause_ms / 1000
        self._last_error = error
        # The queued calls can still use a connection that is left.
        if not self._all:
            self._fail_queue(error)

    def _is_resting(self) -> bool:
        """Whether the pause after the last failed attempt to connect is not over."""
        is_soon = asyncio.get_running_loop().time() < self._retry_at
        return self._last_error is not None and is_soon

    def _error_again(self) -> BackendError:
        assert self._last_error is not None
        return type(self._last_error)(*self._last_error.args)

    def _fail_queue(self, error: BackendError) -> None:
        queue, self._queue = self._queue, deque()
        for call in queue:
            call.fail(error)

    def _on_idle(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._queue:
            self._flush()

    def _on_lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._queue and not self._is_closed and not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)


class _ClockSample:
    """A ``TIME`` command that is sent with a batch."""

    packed = pack("TIME")
    replies = 1

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._sent = asyncio.get_running_loop().time()

    def settle(self, reply: Reply) -> None:
        if isinstance(reply, list):
            self._clock.observe(_microseconds(reply), self._sent, asyncio.get_running_loop().time())

    def fail(self, error: BackendError) -> None:
        """Do nothing: the next batch has a sample too."""


def _microseconds(reply: list[bytes]) -> int:
    return int(reply[0]) * 1_000_000 + int(reply[1])


_DRIFT: Final = 0.000_5
"""The largest difference in speed between two clocks: far more than any real one."""


class ServerClock:
    """An estimate of the server's clock. Local times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._low_s = -math.inf
        self._high_s = math.inf
        self._sampled_at = -math.inf

    def observe(self, server_us: int, sent: float, received: float) -> None:
        """Update the estimate with one sample."""
        low, high = server_us / 1e6 - received, server_us / 1e6 - sent
        widened = (received - self._sampled_at) * _DRIFT if self.is_known else 0.0
        known_low, known_high = self._low_s - widened, self._high_s + widened
        if low <= known_high and known_low <= high:
            low, high = max(low, known_low), min(high, known_high)
        self._low_s, self._high_s, self._sampled_at = low, high, received

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return math.isfinite(self._low_s)

    def age_s(self, at: float) -> float:
        """The age of the last sample."""
        return at - self._sampled_at

    def instant(self, at: float) -> Instant:
        """The time of the server at a local time, or slightly less."""
        widened = self.age_s(at) * _DRIFT
        return Instant(math.floor((at + self._low_s - widened) * 1000))
