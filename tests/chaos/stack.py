"""Stacks for chaos: two replicas, two workers, and the servers behind them, all processes.

``failover``: Valkey with replicas and Sentinels, and three NATS servers. ``proxied``: one Valkey
and one NATS, and each replica reaches each of them through a proxy of its own. Both have short
leases, so that recovery can be seen.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from stanchion.drills.processes import ServerProcess
from stanchion.drills.proxy import Proxy, proxied
from tests.chaos.nats_cluster import NatsCluster, running_nats_cluster
from tests.chaos.ports import free_ports
from tests.chaos.sentinels import Service, running_service
from tests.chaos.worker import Handed, Line, Told, read_lines
from tests.servers import NatsServer, Server, running_nats, running_server

__all__ = [
    "JOB_TTL_S",
    "RUN_TTL_S",
    "FailoverStack",
    "ProxiedStack",
    "Stack",
    "WorkerProcess",
    "failover_stack",
    "proxied_stack",
]

RUN_TTL_S: Final = 3.0
JOB_TTL_S: Final = 5.0
_REPLICAS: Final = 2
_WORKERS: Final = ("careful", "stubborn")
_STOP_S_MAX: Final = 5.0
_ROOT: Final = Path(__file__).parents[2]


class WorkerProcess:
    """One worker. Each of its lives has a file of its own."""

    def __init__(self, kind: str, directory: Path, urls: Sequence[str]) -> None:
        self.kind = kind
        self.name = f"{kind}-worker"
        self._directory = directory
        self._urls = tuple(urls)
        self._lives: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        file = self._directory / f"{self.name}-{len(self._lives)}.jsonl"
        file.touch()
        self._lives.append(file)
        with (self._directory / f"{self.name}.log").open("ab") as sink:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.chaos.worker"),
                    *(self.kind, self.name, str(file)),
                    *self._urls,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
            )

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a chance to say anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S_MAX)

    def jobs_in_hand(self) -> int:
        """How many jobs it has at the moment, as far as it has written down."""
        lines = read_lines(self._lives[-1])
        told = {(line.job_id, line.fence) for line in lines if isinstance(line, Told)}
        handed = {(line.job_id, line.fence) for line in lines if isinstance(line, Handed)}
        return len(handed - told)

    def lines(self) -> Iterator[Line]:
        """What it wrote in all its lives."""
        for file in self._lives:
            yield from read_lines(file)

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it was never started"
        self._process.send_signal(number)


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """What both have."""

    name: str
    namespace: str
    store_url: str
    """The store without detours, for whoever checks."""
    replicas: tuple[ServerProcess, ...]
    workers: tuple[WorkerProcess, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(replica.url for replica in self.replicas)

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"── {replica.url}\n{replica.last_words()}" for replica in self.replicas)


class FailoverStack(Stack, frozen=True, kw_only=True):
    """Servers that take over from each other."""

    valkeys: Service
    nats: NatsCluster

    @property
    def stream(self) -> str:
        """The stream of calls."""
        return f"{self.namespace}_advance".upper()


class ProxiedStack(Stack, frozen=True, kw_only=True):
    """Single servers, and proxies in front of them: one for each replica."""

    valkey: Server
    nats: NatsServer
    store_ways: tuple[Proxy, ...]
    bus_ways: tuple[Proxy, ...]


@asynccontextmanager
async def failover_stack() -> AsyncIterator[FailoverStack]:
    """See above, for as long as the block lasts."""
    async with AsyncExitStack() as cleaning:
        valkeys = await cleaning.enter_async_context(running_service())
        nats = await cleaning.enter_async_context(running_nats_cluster())
        namespace = _namespace()
        ways = [(valkeys.url, nats.url)] * _REPLICAS
        replicas, workers = await _processes(cleaning, namespace, ways)
        yield FailoverStack(
            name="failover",
            namespace=namespace,
            store_url=valkeys.url,
            replicas=replicas,
            workers=workers,
            valkeys=valkeys,
            nats=nats,
        )


@asynccontextmanager
async def proxied_stack() -> AsyncIterator[ProxiedStack]:
    """See above, for as long as the block lasts."""
    async with AsyncExitStack() as cleaning:
        valkey = cleaning.enter_context(running_server())
        nats = cleaning.enter_context(running_nats())
        stores, buses = [], []
        for _ in range(_REPLICAS):
            stores.append(await cleaning.enter_async_context(proxied(valkey.port)))
            buses.append(await cleaning.enter_async_context(proxied(nats.port)))
        ways = [
            (store.url, f"nats://127.0.0.1:{bus.port}")
            for store, bus in zip(stores, buses, strict=True)
        ]
        namespace = _namespace()
        replicas, workers = await _processes(cleaning, namespace, ways)
        yield ProxiedStack(
            name="proxied",
            namespace=namespace,
            store_url=valkey.url,
            replicas=replicas,
            workers=workers,
            valkey=valkey,
            nats=nats,
            store_ways=tuple(stores),
            bus_ways=tuple(buses),
        )


async def _processes(
    cleaning: AsyncExitStack, namespace: str, ways: Sequence[tuple[str, str]]
) -> tuple[tuple[ServerProcess, ...], tuple[WorkerProcess, ...]]:
    """Replicas, each with its ways to store and bus, and workers that know all replicas."""
    made = tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
    directory = Path(cleaning.enter_context(made))
    settings = {
        "STANCHION_NAMESPACE": namespace,
        "STANCHION_RUN_LEASE_TTL_S": str(RUN_TTL_S),
        "STANCHION_JOB_LEASE_TTL_S": str(JOB_TTL_S),
    }
    replicas = []
    for number, (port, (store, bus)) in enumerate(zip(free_ports(len(ways)), ways, strict=True)):
        flags = ["--store", store, "--bus", bus, "--data-dir", str(directory / f"data-{number}")]
        log = directory / f"replica-{number}.log"
        replicas.append(ServerProcess(port=port, flags=flags, settings=settings, log=log))
    for replica in replicas:
        # Not on this loop: the proxies are on it.
        cleaning.push_async_callback(asyncio.to_thread, replica.stop)
        await asyncio.to_thread(replica.start)
    urls = [replica.url for replica in replicas]
    workers = []
    for number, kind in enumerate(_WORKERS):
        # Each begins with another replica.
        known = urls[number % len(urls) :] + urls[: number % len(urls)]
        worker = WorkerProcess(kind, directory, known)
        cleaning.callback(worker.kill)
        worker.start()
        workers.append(worker)
    return tuple(replicas), tuple(workers)


def _namespace() -> str:
    return f"chaos-{secrets.token_hex(4)}"
