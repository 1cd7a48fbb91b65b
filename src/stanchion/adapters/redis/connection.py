"""One connection to a Redis server: one pipeline at a time, replies matched by their order.

A connection sends a batch of calls and is busy until the last reply is in. Replies are told apart
by their order only, so a connection that did not answer in time is closed and never used again. A
caller that stops waiting does not disturb the others: the reply to its call is read and dropped.

Error replies are translated here. A server that refuses a command has not executed it: the scripts
check before they write, and Redis refuses a script for lack of memory or replicas at its first
write. So every error reply becomes ``BackendUnavailable`` (retry later), ``BackendRefused`` (an
operator must change a setting) or ``BackendCorrupt`` (the stored data is not what we stored).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias, cast

import hiredis

from stanchion.adapters.redis.address import ServerAddress
from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
)

Reply: TypeAlias = Any
"""A reply of a server: bytes, int, None, a list of these, or a ``hiredis.ReplyError``."""

_MORE: Final = object()
"""What the parser returns for a reply that is not complete."""


class Sent(Protocol):
    """A sent command, or several, with a known number of replies."""

    packed: bytes
    replies: int

    def settle(self, reply: Reply) -> None:
        """The last of its replies was received."""

    def fail(self, error: BackendError) -> None:
        """There will be no reply."""


class PendingCall:
    """The request of a caller. Its future gets the reply or a ``BackendError``."""

    __slots__ = ("future", "packed", "replies", "timer")

    def __init__(self, packed: bytes, replies: int, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self.packed = packed
        self.replies = replies
        """More than one if other commands precede it: only the last reply counts."""
        self.future: asyncio.Future[Reply] = loop.create_future()
        self.timer = loop.call_at(deadline, self._time_out)

    def settle(self, reply: Reply) -> None:
        self.timer.cancel()
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: BackendError) -> None:
        self.timer.cancel()
        if not self.future.done():
            # A separate error object for each caller: each collects its own traceback.
            self.future.set_exception(type(error)(*error.args))

    def _time_out(self) -> None:
        self.fail(BackendTimeout("no answer in time"))


class Connection(asyncio.Protocol):
    """One connection. Idle until ``send``, and idle again when ``on_idle`` is called."""

    def __init__(self, name: str, on_lost: Callable[[Connection], None]) -> None:
        self._name = name
        self._on_lost = on_lost
        self.on_idle: Callable[[Connection], None] = _ignore
        """Set by the owner when the connection is ready for use."""
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._waiting: deque[Sent] = deque()
        self._replies_due = 0
        """Replies that the first waiting call still expects."""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        address: ServerAddress,
        tls: ssl.SSLContext | None,
        on_lost: Callable[[Connection], None],
    ) -> Connection:
        """Connect. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(str(address), on_lost), address.host, address.port, ssl=tls
        )
        return connection

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._transport is not None

    def send(self, batch: Sequence[Sent], *, within_s: float) -> None:
        """Send a batch. Closes the connection if its last reply is missing after ``within_s``."""
        assert self.is_idle, "one pipeline at a time"
        assert self._transport is not None
        self._waiting.extend(batch)
        self._replies_due = batch[0].replies
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(within_s, self._give_up, within_s)
        self._transport.write(b"".join([each.packed for each in batch]))

    def cut(self, error: BackendError) -> None:
        """Close the connection now; all waiting calls get the error."""
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    # ── What the event loop calls ────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: asyncio.Transport is not a base class of uvloop's transports.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self.cut(ConnectionLost(f"{self._name} does not speak Redis: {error}"))
            return
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.on_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = exc or "the server closed it"
        self._end(ConnectionLost(f"the connection to {self._name} broke: {reason}"))

    def _take(self, reply: Reply) -> None:
        if not self._waiting:
            raise hiredis.ProtocolError("a reply without a request")
        self._replies_due -= 1
        if self._replies_due == 0:
            self._waiting.popleft().settle(reply)
            if self._waiting:
                self._replies_due = self._waiting[0].replies

    def _give_up(self, within_s: float) -> None:
        self.cut(BackendTimeout(f"{self._name} did not answer within {within_s:g} s"))

    def _end(self, error: BackendError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.fail(error)
        if self._transport is not None:
            self._transport = None
            self._on_lost(self)


def _ignore(_: Connection) -> None:
    """The default callback."""


class ConnectionLost(BackendTimeout):
    """The connection broke after the command was sent: it may or may not have been executed."""


class ErrorCode(StrEnum):
    """The first word of an error reply, as far as it is handled."""

    NO_SCRIPT = "NOSCRIPT"
    MOVED = "MOVED"
    ASK = "ASK"
    TRY_AGAIN = "TRYAGAIN"
    READ_ONLY = "READONLY"
    NO_REPLICAS = "NOREPLICAS"
    CLUSTER_DOWN = "CLUSTERDOWN"


_UNAVAILABLE: Final = {
    "BUSY": "is busy with a script",
    "CLUSTERDOWN": "says that its cluster is down",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "has lost its primary",
    "MISCONF": "cannot write its data to disk and refuses writes",
    "MOVED": "has moved the keys, and so have the servers that it redirected to",
    "ASK": "is moving the keys to another server",
    "NOREPLICAS": "has fewer replicas than min-replicas-to-write asks for",
    "OOM": "has no memory left",
    "READONLY": "is a replica",
    "TRYAGAIN": "is moving the keys",
    "UNBLOCKED": "has become a replica",
}
_REFUSED: Final = {
    "NOAUTH": "requires a password",
    "NOPERM": "forbids this user the command",
    "WRONGPASS": "does not accept the password",
}


_IN_A_SCRIPT: Final = re.compile(r"ERR Error running script .*? -([A-Z]+) ")
"""How Redis before version 7 words the error of a command in a script."""


def code_of(error: Exception) -> str:
    """The code of an error reply, which is its first word, or that of the command in a script."""
    text = str(error)
    found = _IN_A_SCRIPT.match(text)
    return text.partition(" ")[0] if found is None else found[1]


def translate(error: Exception, who: str) -> BackendError:
    """The error of the ports for an error reply."""
    code = code_of(error)
    if code in _UNAVAILABLE:
        return BackendUnavailable(f"{who} {_UNAVAILABLE[code]} ({error})")
    if code in _REFUSED:
        return BackendRefused(f"{who} {_REFUSED[code]} ({error})")
    if code == "WRONGTYPE":
        return BackendCorrupt(f"{who} has a value of another type under one of our keys ({error})")
    return BackendError(f"{who} answered: {error}")


def forget(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a dropped future, so that the event loop does not report it."""
    if not future.cancel() and not future.cancelled():
        future.exception()
