"""The server: listens, handles signals, and shuts down in order.

The first signal drains: ``/readyz`` answers 503, nothing new is admitted, waits and streams end,
requests under way are finished, and then the sockets close. The second signal stops the server at
once. Either way it has stopped soon after ``drain_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import uvicorn

from stanchion.gateway.app import Gateway, MetricsApp
from stanchion.gateway.protocol import PROBE_SLOTS, GuardedProtocol, guarded
from stanchion.services.log import log_event

_FILES_KEPT: Final = 128
"""Open files reserved for the store, the bus and logs."""
KEEP_ALIVE_S: Final = 75
_NOTICE_S: Final = 0.5
"""How long new connections are still answered with ``draining`` before the listener closes."""
_RECEIVE_BYTES: Final = 64 * 1024
"""What a client may send before it is read; the kernel adds as much for itself. What waits in a
hundred sockets is read in one iteration of the event loop, and the kernel would let it grow to
megabytes for each."""
_PATIENCE_S: Final = 2.0
"""How long slow clients may still read after the sockets were told to close."""
_BACKLOG_MAX: Final = 2_048
_METRICS_CONNECTIONS_MAX: Final = 64
_METRICS_BACKLOG: Final = 32
_METRICS_DRAIN_S: Final = 1.0


async def serve(
    app: Gateway,
    *,
    host: str,
    port: int,
    drain_s: float = 8.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal. Raises ``OSError`` if the address cannot be bound."""
    listener = _listener(host, port)
    connections_max, backlog = _connections(app.options.connections_max)
    config = _config(app, connections_max, backlog, drain_s)
    await app.prepare()
    server = _Server(config, lambda: on_ready and on_ready(_url(listener)))
    ending = _Ending(app, server, min(_NOTICE_S, drain_s / 4))
    with app.watchdog.watching(), _signals(ending):
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        finally:
            if not serving.done():  # this task was cancelled: stop without draining
                app.drain()
                server.stop_now()
                await serving
            app.close()
            listener.close()


@contextlib.asynccontextmanager
async def serving_metrics(app: MetricsApp, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve metrics on a separate listener during the body; yields its URL. Raises ``OSError``.

    The listener has connections of its own, so that scrapes and callers do not compete for them.
    """
    listener = _listener(host, port, flags=("--metrics-host", "--metrics-port"))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = _Server(
        _config(app, _METRICS_CONNECTIONS_MAX, _METRICS_BACKLOG, _METRICS_DRAIN_S),
        lambda: ready.set_result(_url(listener)),
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield await ready
    finally:
        server.stop_now()
        await serving
        listener.close()


def _config(
    app: Gateway | MetricsApp, connections_max: int, backlog: int, drain_s: float
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=guarded(app.options, connections_max),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which ``serve`` does."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def stop_now(self) -> None:
        """Stop without waiting for requests under way."""
        self.should_exit = self.force_exit = True
        # A listener counts as closed only when its connections are closed.
        for connection in self._guarded():
            connection.transport.abort()

    def drop_stalled(self) -> None:
        """Disconnect clients that do not read their answers."""
        for connection in self._guarded():
            connection.drop_if_stalled()

    def _guarded(self) -> list[GuardedProtocol]:
        everyone = self.server_state.connections
        return [each for each in everyone if isinstance(each, GuardedProtocol)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """The signal handler: drains at the first signal, stops at the second."""

    def __init__(self, app: Gateway, server: _Server, notice_s: float) -> None:
        self._app = app
        self._server = server
        self._notice_s = notice_s

    def __call__(self) -> None:
        if self._app.is_draining:
            self._server.stop_now()
            return
        log_event(logging.INFO, "server_draining", note="a second signal ends it at once")
        self._app.drain()
        asyncio.get_running_loop().call_later(self._notice_s, self._close)

    def _close(self) -> None:
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(_PATIENCE_S, self._server.drop_stalled)


@contextlib.contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    taken: list[signal.Signals] = []
    # SIGHUP too: when a terminal is closed, the server drains.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Outside the main thread, where tests serve, signals cannot be handled.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(each, end)
            taken.append(each)
    try:
        yield
    finally:
        for each in taken:
            loop.remove_signal_handler(each)


def _listener(host: str, port: int, flags: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _listen_error(host, port, error, flags) from error
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # For the connections that it accepts.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, error, flags) from error
    listener.settimeout(0)
    return listener


def _listen_error(host: str, port: int, error: OSError, flags: tuple[str, str]) -> OSError:
    """The same error with its address and a fix."""
    is_taken = error.errno == errno.EADDRINUSE
    other_port, other = f"another {flags[1]}", f"another {flags[0]} or {flags[1]}"
    fix = f"stop the program that uses it, or give {other_port}" if is_taken else f"give {other}"
    return OSError(f"cannot listen on {host}:{port}: {error.strerror or error}; {fix}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _connections(wanted: int) -> tuple[int, int]:
    """The limits of connections and of the backlog, by the limit of open files.

    The event loop accepts the whole backlog before any of it is counted. So there must be free
    files for a whole backlog, or the next connection, perhaps a probe, is dropped.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted, _BACKLOG_MAX
    backlog = min(_BACKLOG_MAX, max(16, files // 4))
    return max(16, min(wanted, files - _FILES_KEPT - PROBE_SLOTS - backlog)), backlog
