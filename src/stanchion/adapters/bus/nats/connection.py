"""One connection to NATS at a time, replaced whenever it breaks.

nats-py can reconnect by itself. That is switched off: it gives up for good on some errors (a login
that is refused once), buffers what is published meanwhile until it is stale, and does not check
whether the stream still exists. Here a broken connection is closed and discarded, and its successor
starts like the first: connect, then *greet* (check the stream, subscribe), and only then is it
used. Callers wait for a connection, or get an error at once if there is none.

Errors of nats-py are translated here into the errors of the ports (``translated``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamManager

from stanchion.core.retry import Exponential, backoff_ms
from stanchion.core.url import shown_url
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import (
    BackendError,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    sentence,
)

_log: Final = logging.getLogger("stanchion")

_T = TypeVar("_T")
Greet: TypeAlias = Callable[[Client], Awaitable[None]]

_MS_PER_S: Final = 1_000
_REST: Final = Exponential(base_ms=200, cap_ms=2_000)
"""Between two attempts to connect, with full jitter, so that replicas that lost a server together
do not reconnect at the same time."""
_PING_EVERY_S: Final = 1
_PINGS_OPEN_MAX: Final = 2
"""Detects a server that hangs within three seconds."""
_LOOK_EVERY_S: Final = 1.0
_HANG_UP_S_MAX: Final = 1.0


class _Client(Client):
    """The client of nats-py, which uses TLS if the server offers it, whatever the URL says.

    This one refuses to send credentials in plain text to a ``tls://`` address.
    """

    def _connect_command(self) -> bytes:
        # The command contains the user and password, or the token.
        server = self._current_server
        is_wanted = server is not None and server.uri.scheme == "tls"
        if is_wanted and not self._server_info.get("tls_required", False):
            raise nats.errors.Error("the address says tls://, and the server does not speak TLS")
        return super()._connect_command()


class NatsConnection:
    """A connection that is replaced when it breaks. Call ``open`` first."""

    def __init__(
        self, url: str, greet: Greet, *, clock: Clock, entropy: Entropy, timeout_s: float
    ) -> None:
        self._servers = [_checked(part.strip()) for part in url.split(",")]
        self._greet = greet
        self._clock = clock
        self._entropy = entropy
        self._timeout_s = timeout_s
        self.client: Client | None = None
        self._up = asyncio.Event()
        self._broken = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._asking: dict[asyncio.Timeout, None] = {}
        """The timeouts of all open requests."""
        self._watchers: dict[Callable[[], None], None] = {}
        self._trouble: Exception | None = None
        """The last error that nats-py reported through its callback."""
        self.who = f"NATS at {', '.join(_host(server) for server in self._servers)}"

    async def open(self) -> None:
        """Connect. Raises ``BackendError`` within the timeout."""
        self._take(await self._connect())
        self._keeping = asyncio.create_task(self._keep(), name="nats-link")

    def now(self) -> Client:
        """The current connection. Raises ``BackendUnavailable`` if there is none."""
        if self.client is None or not self.client.is_connected:
            raise BackendUnavailable(f"{self.who} is not connected")
        return self.client

    async def wait(self) -> Client:
        """Wait for a connection."""
        while True:
            await self._up.wait()
            with suppress(BackendUnavailable):
                return self.now()
            # It broke, and the reconnect task has not noticed yet.
            self._up.clear()
            self._broken.set()

    def is_with(self, client: Client) -> bool:
        """Whether this is still the current connection."""
        return self.client is client and client.is_connected

    async def request(self, subject: str, payload: bytes) -> Msg:
        """Send a request and wait for the answer. Raises ``BackendError``."""
        client = self.now()
        with translated(self.who):
            async with self._patience():
                try:
                    return await client.request(subject, payload, timeout=self._timeout_s)
                except nats.errors.NoRespondersError:
                    # The stream is gone. A new connection begins by checking it.
                    self.cut(client, f"no server accepts {subject}")
                    raise

    async def manage(self, use: Callable[[JetStreamManager], Awaitable[_T]]) -> _T:
        """Use the JetStream API on this connection. Raises ``BackendError``."""
        client = self.now()
        with translated(self.who):
            async with self._patience():
                try:
                    return await use(client.jsm(timeout=self._timeout_s))
                except nats.errors.NoRespondersError:
                    self.cut(client, "JetStream does not answer")
                    raise

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Limit the wait for an answer to the timeout, and to the life of the connection."""
        async with asyncio.timeout(self._timeout_s) as patience:
            self._asking[patience] = None
            try:
                yield
            finally:
                del self._asking[patience]

    def cut(self, client: Client, why: str) -> None:
        """Close this connection (its stream is gone, for example) and open another one."""
        if self.client is client:
            self._trouble = BackendUnavailable(why)
            self._up.clear()
            self._broken.set()

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` on every connect and disconnect. Returns a function that stops it."""
        self._watchers[changed] = None

        def unwatch() -> None:
            self._watchers.pop(changed, None)

        return unwatch

    async def close(self) -> None:
        """Close the connection. Safe to call twice."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping}, timeout=_HANG_UP_S_MAX)
        client, self.client = self.client, None
        self._up.clear()
        if client is not None:
            await self._hang_up(client)

    async def _keep(self) -> None:
        while True:
            await self._until_broken()
            lost, self.client = self.client, None
            self._up.clear()
            assert lost is not None
            _say(logging.WARNING, "bus_lost", server=self.who, error=_text(self._trouble))
            self._tell()
            self._give_up_asking()
            await self._hang_up(lost)
            began = self._clock.moment()
            self._take(await self._connect_for_ever())
            _say(
                logging.INFO, "bus_regained", server=self.who, after_ms=self._clock.moment() - began
            )

    async def _until_broken(self) -> None:
        # nats-py does not report every way in which a connection ends, so poll as well.
        while self.client is not None and not self.client.is_closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._broken.wait()
                return

    async def _connect_for_ever(self) -> Client:
        attempt, said = 0, ""
        while True:
            attempt += 1
            rest_ms = backoff_ms(_REST, attempt, self._entropy.unit())
            await self._clock.sleep(rest_ms / _MS_PER_S)
            try:
                return await self._connect()
            except BackendUnavailable:
                """No server answers yet."""
            except Exception as error:  # noqa: BLE001 - the loop continues after any error
                if said != (said := sentence(error)):
                    _say(logging.ERROR, "bus_refused", server=self.who, error=said)

    async def _connect(self) -> Client:
        client, self._trouble = _Client(), None
        try:
            with translated(self.who):
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._dial(client)
                        await self._greet(client)
                except TimeoutError as error:
                    # A forbidden request gets no answer: its error comes through the callback.
                    raise self._complaint(error) from None
        except BaseException:
            await self._hang_up(client)
            raise
        return client

    async def _dial(self, client: Client) -> None:
        async def complained(error: Exception) -> None:
            self._trouble = error
            is_loss = isinstance(error, (OSError, nats.errors.UnexpectedEOF))
            if client.is_connected and not is_loss:
                _say(logging.WARNING, "bus_trouble", server=self.who, error=_text(error))

        async def closed() -> None:
            if self.client is client:
                self._broken.set()

        try:
            await client.connect(
                self._servers,
                name="stanchion",
                error_cb=complained,
                closed_cb=closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=math.ceil(self._timeout_s),
                ping_interval=_PING_EVERY_S,
                max_outstanding_pings=_PINGS_OPEN_MAX,
                flush_timeout=self._timeout_s,
                # Bells of this process are delivered locally.
                no_echo=True,
            )
        except nats.errors.NoServersError as error:
            # All servers were tried: the last server's error says more than "no servers available".
            raise self._complaint(error) from None

    def _complaint(self, otherwise: Exception) -> Exception:
        return self._trouble or otherwise

    def _take(self, client: Client) -> None:
        self.client = client
        self._broken.clear()
        self._up.set()
        self._tell()

    def _tell(self) -> None:
        for changed in list(self._watchers):
            changed()

    def _give_up_asking(self) -> None:
        """End the wait of all open requests: a closed connection delivers no answers."""
        now = asyncio.get_running_loop().time()
        for patience in self._asking:
            if not patience.expired():
                patience.reschedule(now)

    async def _hang_up(self, client: Client) -> None:
        # If the server is down or hangs, closing may fail or never return.
        with suppress(Exception):
            async with asyncio.timeout(_HANG_UP_S_MAX):
                await client.close()


def _checked(server: str) -> str:
    """A server's address with its scheme. Raises ``BackendRefused``, which never quotes it."""
    url = server if "://" in server else f"nats://{server}"
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
        is_whole = is_whole and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        is_whole = False
    if not is_whole:
        raise BackendRefused(
            "a NATS URL whose host and port cannot be read: write nats://HOST:PORT, and "
            "percent-encode '/', '?', '#' and ',' in user names and passwords"
        )
    return url


def _host(server: str) -> str:
    """The host and port of a server, without secrets."""
    return shown_url(server).rpartition("://")[2].removeprefix("***@")


def _text(error: Exception | None) -> str:
    return "" if error is None else sentence(error)


def _say(level: int, name: str, **fields: str | int) -> None:
    _log.log(level, name, extra={"fields": fields})


_NOT_LET_IN: Final = ("authorization", "authentication")
_FORBIDDEN: Final = "permissions violation"


@contextmanager
def translated(who: str) -> Iterator[None]:
    """Translate errors of nats-py into the errors of the ports."""
    try:
        yield
    except BackendError:
        raise
    except nats.errors.NoRespondersError as error:
        raise BackendUnavailable(
            f"{who} has no JetStream, or not yet: start nats-server with JetStream (-js), "
            "or wait until it has read its streams"
        ) from error
    except TimeoutError as error:
        raise BackendTimeout(f"{who} did not answer in time") from error
    except nats.errors.Error as error:
        raise _translate(who, error) from error
    except OSError as error:
        raise BackendUnavailable(f"{who} cannot be reached ({sentence(error)})") from error


def _translate(who: str, error: nats.errors.Error) -> BackendError:
    said = sentence(error)
    if any(word in said.lower() for word in _NOT_LET_IN):
        return BackendRefused(
            f"{who} does not let us in ({said}): give a user and a password, or a token, "
            "in the address, as in nats://user:password@host:4222"
        )
    if _FORBIDDEN in said.lower():
        return BackendRefused(
            f"{who} forbids what is needed ({said}): "
            "docs/how-to/nats.md lists what the account must be allowed to do"
        )
    return BackendUnavailable(f"{who} cannot be used now ({said})")
