"""kill -9 at random moments under load: what was acknowledged is there, and everything goes on.

On SQLite the process that owns the file is killed, on Redis the server, which syncs its log before
it answers. The seed of a round, which is in the test's name, decides when.

A process that is killed loses what it had not handed to the kernel; what the kernel had not written
to the disk survives. So this says nothing about a power cut: that is what the settings are for.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from tests.integration.load import Ack, open_store
from tests.integration.program import Program, running_program
from tests.integration.recovery import check_kept, check_sound, finish_all
from tests.servers import running_server

ROUNDS = 3
ROUNDS_OF_CHAOS = 50
ACKS = range(50, 800)
"""After so many acknowledgements at the latest a round ends."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
NAMESPACE = "killed"

Round: TypeAlias = Callable[[Path, int], Awaitable[None]]


async def on_sqlite(directory: Path, seed: int) -> None:
    url = f"sqlite:{directory / 'store.db'}"
    async with running_program("tests.integration.load", url, NAMESPACE, str(seed)) as load:
        acks = await _listen(load, random.Random(seed), load.kill)
    await _check(url, acks)


async def on_redis(directory: Path, seed: int) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_server(None, *DURABLE, directory=directory))

        async def kill() -> None:
            server.kill()

        async with running_program(
            "tests.integration.load", server.url, NAMESPACE, str(seed)
        ) as load:
            acks = await _listen(load, random.Random(seed), kill)
        again = stack.enter_context(
            running_server(None, *DURABLE, directory=directory, port=server.port)
        )
        await _check(again.url, acks)


EVERYWHERE = pytest.mark.parametrize("on", [on_sqlite, on_redis], ids=["sqlite", "redis"])


@EVERYWHERE
@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_nothing_acknowledged_is_lost(on: Round, seed: int, tmp_path: Path) -> None:
    await on(tmp_path, seed)


@pytest.mark.chaos
@EVERYWHERE
@pytest.mark.parametrize("seed", range(ROUNDS, ROUNDS + ROUNDS_OF_CHAOS))
async def test_nothing_acknowledged_is_lost_in_many_rounds(
    on: Round, seed: int, tmp_path: Path
) -> None:
    await on(tmp_path, seed)


async def _listen(
    load: Program, chance: random.Random, kill: Callable[[], Awaitable[None]]
) -> list[Ack]:
    """Hear what is acknowledged, kill at a moment of chance, and hear what was said before that."""
    wanted, more_s = chance.choice(ACKS), chance.uniform(0.0, 0.02)
    acks: list[Ack] = []
    while (said := await load.line()) is not None:
        acks.append(msgspec.convert(said, Ack))
        if len(acks) == wanted:
            # Somewhere in the middle of what comes next.
            await asyncio.sleep(more_s)
            await kill()
    assert len(acks) >= wanted, "it ended by itself"
    return acks


async def _check(url: str, acks: list[Ack]) -> None:
    print(Counter(type(ack).__name__ for ack in acks))  # noqa: T201 - shown when it fails
    store = await open_store(url, NAMESPACE)
    try:
        await check_kept(store, acks)
        await check_sound(store)
        await finish_all(store)
        await check_sound(store)
    finally:
        await store.close()
