"""A server that is stopped past its clients' time-outs, and goes on: nothing happens afterwards.

What was sent meanwhile lies in its sockets, and it executes all of it when it wakes up, also for
clients that have hung up. So admissions and acquires say until when they are wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import Granted
from tests.contract.builders import ACME, admission, lease, start
from tests.servers import Server

PATIENCE_MS = 300
CALLERS = 20
LONG_MS = 60_000


@pytest.fixture
async def store(valkey: Server, namespace: str) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(valkey.url, namespace=namespace)
    # Everything is warm then: the scripts are known, and so is the server's clock.
    await start(store)
    await lease(store)
    yield store
    await store.close()


@pytest.fixture
async def locks(valkey: Server, namespace: str) -> AsyncIterator[RedisLocks]:
    locks = await RedisLocks.open(valkey.url, namespace=namespace)
    await locks.acquire("warm", "me", ttl_ms=1, within_ms=LONG_MS)
    yield locks
    await locks.close()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


async def test_an_admission_that_timed_out_makes_no_run_when_the_server_wakes_up(
    valkey: Server, store: RedisStore
) -> None:
    wanted = [admission(await store.now()) for _ in range(CALLERS)]
    with stopped(valkey):
        answers = await asyncio.gather(
            *(store.admit(each, within_ms=PATIENCE_MS) for each in wanted), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [BackendTimeout] * CALLERS
    await _everything_sent_is_executed(valkey)
    assert [await store.load(each.run.id) for each in wanted] == [None] * CALLERS
    assert await store.active_runs(ACME) == 1
    assert await lease(store, max_jobs=CALLERS) == ()
    # And whoever asks again, in time, gets its run.
    assert await store.admit(wanted[0], within_ms=LONG_MS) == Admitted(wanted[0].run.id)


async def test_an_acquire_that_timed_out_leaves_no_lock_when_the_server_wakes_up(
    valkey: Server, locks: RedisLocks
) -> None:
    names = [f"name-{number}" for number in range(CALLERS)]
    with stopped(valkey):
        answers = await asyncio.gather(
            *(locks.acquire(name, "me", ttl_ms=LONG_MS, within_ms=PATIENCE_MS) for name in names),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [BackendTimeout] * CALLERS
    await _everything_sent_is_executed(valkey)
    assert await locks.list("name-") == []
    other = await locks.acquire(names[0], "other", ttl_ms=LONG_MS, within_ms=LONG_MS)
    assert isinstance(other, Granted)


async def test_it_makes_no_difference_if_the_client_has_hung_up(
    valkey: Server, namespace: str, store: RedisStore, locks: RedisLocks
) -> None:
    wanted = admission(await store.now())
    with stopped(valkey):
        with pytest.raises(BackendTimeout):
            await store.admit(wanted, within_ms=PATIENCE_MS)
        with pytest.raises(BackendTimeout):
            await locks.acquire("name", "me", ttl_ms=LONG_MS, within_ms=PATIENCE_MS)
        await store.close()
        await locks.close()
    await _everything_sent_is_executed(valkey)
    later = await RedisStore.open(valkey.url, namespace=namespace)
    assert await later.load(wanted.run.id) is None
    await later.close()
    later_locks = await RedisLocks.open(valkey.url, namespace=namespace)
    assert await later_locks.inspect("name") is None
    await later_locks.close()


async def test_a_short_stop_within_the_callers_patience_is_only_a_delay(
    valkey: Server, store: RedisStore, locks: RedisLocks
) -> None:
    wanted = admission(await store.now())
    with stopped(valkey):
        admitting = asyncio.create_task(store.admit(wanted, within_ms=LONG_MS))
        acquiring = asyncio.create_task(
            locks.acquire("name", "me", ttl_ms=LONG_MS, within_ms=LONG_MS)
        )
        done, _ = await asyncio.wait([admitting, acquiring], timeout=0.2)
        assert not done
    assert await admitting == Admitted(wanted.run.id)
    assert isinstance(await acquiring, Granted)


def test_the_trap_is_real(valkey: Server, namespace: str) -> None:
    """A plain command that timed out is executed when the server wakes up, its client gone."""
    client = redis.Redis(port=valkey.port, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
    client.ping()  # Connected, so that nothing but the command is left to send.
    with stopped(valkey):
        with pytest.raises(redis.TimeoutError):
            client.set(namespace, "executed")
        client.close()
    with valkey.client() as later:
        assert later.get(namespace) == "executed"


async def _everything_sent_is_executed(server: Server) -> None:
    """Connections are served in turn: two answers to us, and everybody has had theirs."""

    def ask_twice() -> None:
        with server.client() as client:
            client.ping()
            client.ping()

    await asyncio.to_thread(ask_twice)
