"""Sentinels for tests: each a process of its own, stopped by its process id."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import redis

from tests.servers import Server, valkey_binary

__all__ = ["SERVICE", "running_sentinel", "until"]

SERVICE: Final = "main"
_SOON_S: Final = 20.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_sentinel(
    primary: Server, directory: Path, *, replicas: int = 1, password: str = ""
) -> Iterator[Server]:
    """A Sentinel that watches a primary with so many replicas."""
    port = _free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 300\n"
        f"sentinel failover-timeout {SERVICE} 2000\n"
        + (f"requirepass {password}\n" if password else "")
    )
    process = subprocess.Popen(
        [valkey_binary(), config, "--sentinel"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(process, port)
    try:
        until(lambda: _replicas_known(server, password) == replicas)
        yield server
    finally:
        server.stop()


def _replicas_known(sentinel: Server, password: str) -> int | None:
    with redis.Redis(
        host="127.0.0.1", port=sentinel.port, password=password or None, socket_timeout=5.0
    ) as client:
        try:
            return len(client.sentinel_slaves(SERVICE))
        except redis.RedisError:
            return None


def until(holds: Callable[[], bool]) -> None:
    """Wait, within a bound, until something holds."""
    until = time.monotonic() + _SOON_S
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)
