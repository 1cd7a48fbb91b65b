"""Real stores: a file, a server, a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Cluster, Server, running_cluster, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes can share."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'leases.db'}"
    server: Server = request.getfixturevalue("server")
    return server.url


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A namespace of the case's own: the server is shared."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)
