"""A Valkey primary, two replicas and three Sentinels that name another primary when it dies.

It is set up as docs/how-to/redis-durability.md tells: an append-only file, and a primary that takes
no writes while it knows of no replica. There are two replicas because of the latter: with one, the
death of any server would stop all writes until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import redis

from tests.chaos.ports import free_ports
from tests.servers import Server, running_server, valkey_binary

__all__ = ["DOWN_AFTER_S", "FAILOVER_S_MAX", "Service", "running_service"]

DOWN_AFTER_S: Final = 2.0
"""So long a primary is silent before the Sentinels call it dead."""
FAILOVER_S_MAX: Final = 15.0
"""From its death until another one serves: two elections, should the first end in a draw."""
_NAME: Final = "main"
_SERVERS: Final = 3
_SENTINELS: Final = 3
_FORM_S_MAX: Final = 30.0
_LOOK_EVERY_S: Final = 0.05
_OPTIONS: Final = (
    *("--repl-diskless-sync-delay", "0"),
    *("--appendonly", "yes"),
    *("--appendfsync", "everysec"),
    *("--min-replicas-to-write", "1"),
    *("--min-replicas-max-lag", "10"),
)


class Service:
    """What the Sentinels look after. Made by ``running_service``."""

    def __init__(self, directory: Path, cleaning: contextlib.ExitStack) -> None:
        self._directory = directory
        self._cleaning = cleaning
        self._ports = free_ports(_SERVERS)
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []

    @property
    def url(self) -> str:
        addresses = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{_NAME}"

    def primary(self) -> int:
        """Which server is the primary, as the last of the Sentinels has it."""
        with self.sentinels[-1].client() as client:
            _, port = client.sentinel_get_master_addr_by_name(_NAME)
        return self._ports.index(int(port))

    def until_replaced(self, gone: int) -> None:
        """Come back when another one is the primary, and takes writes."""
        _until(lambda: self.primary() != gone, FAILOVER_S_MAX)
        _until(lambda: self._is_whole(self.primary(), replicas=1), FAILOVER_S_MAX)

    def start(self, number: int) -> None:
        """Again, with its data. Until the Sentinels notice, it takes itself for a primary."""
        self._launch(number)

    def until_whole(self) -> None:
        """Come back when all others are replicas of the primary."""
        _until(lambda: self._is_whole(self.primary(), replicas=_SERVERS - 1), _FORM_S_MAX)

    def form(self) -> None:
        """Start everything."""
        for number in range(_SERVERS):
            primary = ("--replicaof", "127.0.0.1", str(self._ports[0]))
            self._launch(number, *(primary if number else ()))
        _until(lambda: self._is_whole(0, replicas=_SERVERS - 1), _FORM_S_MAX)
        for number, port in enumerate(free_ports(_SENTINELS)):
            self.sentinels.append(self._launch_sentinel(number, port))
        _until(lambda: all(map(_knows_all, self.sentinels)), _FORM_S_MAX)

    def _launch(self, number: int, *options: str) -> None:
        directory = self._directory / f"server-{number}"
        directory.mkdir(exist_ok=True)
        server = self._cleaning.enter_context(
            running_server(None, *_OPTIONS, *options, directory=directory, port=self._ports[number])
        )
        self.servers[number : number + 1] = [server]

    def _launch_sentinel(self, number: int, port: int) -> Server:
        directory = self._directory / f"sentinel-{number}"
        directory.mkdir()
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {_NAME} 127.0.0.1 {self._ports[0]} {_SENTINELS // 2 + 1}\n"
            f"sentinel down-after-milliseconds {_NAME} {round(DOWN_AFTER_S * 1000)}\n"
            f"sentinel failover-timeout {_NAME} 3000\n"
        )
        process = subprocess.Popen(
            [valkey_binary(), config, "--sentinel"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        sentinel = Server(process, port)
        self._cleaning.callback(sentinel.stop)
        return sentinel

    def _is_whole(self, primary: int, *, replicas: int) -> bool:
        try:
            with self.servers[primary].client() as client:
                info = client.info("replication")
        except redis.RedisError:
            return False
        return bool(info["role"] == "master" and info["connected_slaves"] >= replicas)


def _knows_all(sentinel: Server) -> bool:
    try:
        with sentinel.client() as client:
            replicas = client.sentinel_slaves(_NAME)
            others = client.sentinel_sentinels(_NAME)
    except redis.RedisError:
        return False
    return len(replicas) == _SERVERS - 1 and len(others) == _SENTINELS - 1


def _until(holds: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, f"the servers have not come to that within {within_s} s"
        time.sleep(_LOOK_EVERY_S)


@asynccontextmanager
async def running_service() -> AsyncIterator[Service]:
    """The servers for as long as the block lasts, ready to be used."""
    with contextlib.ExitStack() as cleaning:
        made = tempfile.TemporaryDirectory(prefix="sentinels-", ignore_cleanup_errors=True)
        service = Service(Path(cleaning.enter_context(made)), cleaning)
        await asyncio.to_thread(service.form)
        yield service
