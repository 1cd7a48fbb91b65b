"""Any sequence of operations, several at once: every store answers as the memory store does.

The memory store is the model. A failing example prints every call with its answer, batch by batch,
and then the story; the last batch is the one that no order of indivisible steps explains.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from hypothesis import given, settings

from tests.conftest import SOAK
from tests.contract.harness import Harness, ServerHarness, SqliteHarness, adapters_with
from tests.model.strategies import Story, stories
from tests.model.telling import tell
from tests.servers import redis_binary, running_cluster, running_server

EXAMPLES: Final = 2_500 if SOAK else 100
# What is on the disk after a crash is proven elsewhere. Here a file in memory does, and is faster.
QUICK: Final = next((path for path in ("/dev/shm",) if Path(path).is_dir()), None)  # noqa: S108 - see above

Opener: TypeAlias = Callable[[], AbstractContextManager[Harness]]
"""Gives a harness with nothing in it."""


@pytest.fixture(
    scope="module",
    params=[
        name
        for name in adapters_with("store")
        if name in {"sqlite", "valkey"} or (SOAK and name != "memory")
    ],
)
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    with ExitStack() as stack:
        match request.param:
            case "sqlite":
                yield _new_file
            case "cluster":
                cluster = stack.enter_context(running_cluster())
                yield partial(_new_namespace, cluster.url, [each.url for each in cluster.servers])
            case name:
                binary = redis_binary() if name == "redis" else None
                server = stack.enter_context(running_server(binary))
                yield partial(_new_namespace, server.url, [server.url])


@settings(max_examples=EXAMPLES, report_multiple_bugs=False)
@given(stories())
def test_every_store_answers_as_memory_does(opener: Opener, story: Story) -> None:
    with opener() as harness:
        asyncio.run(_tell(harness, story))


@contextmanager
def _new_file() -> Iterator[Harness]:
    with tempfile.TemporaryDirectory(dir=QUICK) as directory:
        yield SqliteHarness(Path(directory))


@contextmanager
def _new_namespace(url: str, nodes: Sequence[str]) -> Iterator[Harness]:
    yield ServerHarness("server", url, nodes, f"story-{secrets.token_hex(6)}")


async def _tell(harness: Harness, story: Story) -> None:
    try:
        await tell(harness, story)
    finally:
        await harness.close()
