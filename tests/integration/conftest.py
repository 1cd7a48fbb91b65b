"""Servers for integration tests. Each test has a namespace of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.servers import Server, running_server


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """A server that the tests of a module share: whoever stops it lets it go on again."""
    with running_server() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"case-{secrets.token_hex(6)}"
