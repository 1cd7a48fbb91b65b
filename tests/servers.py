"""Real servers for tests: Valkey and NATS from wheels, Redis where there is one, a small cluster.

The processes are those of the drills (``stanchion.drills.processes``). Here they get a Redis client
and can be joined to a cluster.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import redis

from stanchion.drills.processes import (
    NatsServer,
    ValkeyServer,
    nats_binary,
    running_nats,
    start_valkey,
    valkey_binary,
)

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
_LOOK_EVERY_S: Final = 0.01
_SLOTS: Final = 16_384


def redis_binary() -> Path | None:
    """The distribution's own Redis, if there is one: a second vendor."""
    found = shutil.which("redis-server")
    return None if found is None else Path(found)


class Server(ValkeyServer):
    """One Valkey or Redis, and a client of it."""

    def client(self) -> redis.Redis:
        """A plain connection, for what is not the business of an adapter."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=5.0, decode_responses=True
        )


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
        server = start_valkey(Server, binary or valkey_binary(), directory, options, port)
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
