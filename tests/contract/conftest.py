"""One suite, several adapters: every case runs over each of them.

``STANCHION_CONTRACT=memory,sqlite`` selects some of them for a quick run.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from stanchion.adapters.redis.address import ServerAddress, read_url
from stanchion.adapters.redis.topology import Topology
from stanchion.ports.locks import Locks
from stanchion.ports.store import Store
from tests.contract.harness import (
    DURABLE,
    Harness,
    MemoryHarness,
    ServerHarness,
    SqliteHarness,
    adapters_with,
)
from tests.servers import Cluster, Server, redis_binary, running_cluster, running_server

_MEMORY_FILES: Final = Path("/dev/shm")  # noqa: S108 - below it, a fresh directory for each case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" not in metafunc.fixturenames:
        return
    names = adapters_with("store")
    if {"locks", "durable_locks"} & set(metafunc.fixturenames):
        names = adapters_with("locks")
    if {"durable_store", "durable_locks"} & set(metafunc.fixturenames):
        names = [name for name in names if name in DURABLE]
    metafunc.parametrize("harness", names, indirect=True)


@pytest.fixture
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    # Files are in memory where that can be had: a disk that really writes makes the suite slow, and
    # what happens when the power fails is tested elsewhere.
    place = _MEMORY_FILES if _MEMORY_FILES.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        harness = _harness(request, Path(directory))
        yield harness
        await harness.close()


@pytest.fixture
async def store(harness: Harness) -> Store:
    return await harness.open_store()


@pytest.fixture
async def locks(harness: Harness) -> Locks:
    return await harness.open_locks()


@pytest.fixture
async def durable_store(harness: Harness) -> Store:
    """A store that keeps what it has when it is closed: every one but memory."""
    return await harness.open_store()


@pytest.fixture
async def durable_locks(harness: Harness) -> Locks:
    return await harness.open_locks()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster, _slot_map_read_once(cluster):
        yield cluster


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    with running_server(redis_binary()) as server:
        yield server


@contextlib.contextmanager
def _slot_map_read_once(cluster: Cluster) -> Iterator[None]:
    """Every client of this cluster but the first gets the slot map that the first one has read.

    To read it costs more than most cases, and the slots of this cluster never move. Lookups are
    tested in ``tests/adapters/test_redis_cluster.py``.
    """
    ask = Topology._ask_cluster  # noqa: SLF001 - see above
    addresses = read_url(cluster.url).addresses
    found: dict[int, ServerAddress] = {}

    async def ask_once(self: Topology, deadline: float) -> dict[int, ServerAddress]:
        if self.target.addresses != addresses:
            return await ask(self, deadline)
        if not found:
            found.update(await ask(self, deadline))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topology, "_ask_cluster", ask_once)
        yield


def _harness(request: pytest.FixtureRequest, directory: Path) -> Harness:
    namespace = f"case-{secrets.token_hex(6)}"
    match request.param:
        case "memory":
            return MemoryHarness()
        case "sqlite":
            return SqliteHarness(directory)
        case "cluster":
            cluster: Cluster = request.getfixturevalue("valkey_cluster")
            nodes = [server.url for server in cluster.servers]
            return ServerHarness("cluster", cluster.url, nodes, namespace)
        case name:
            server: Server = request.getfixturevalue(f"{name}_server")
            return ServerHarness(name, server.url, [server.url], namespace)
