"""Outages: a server that is stopped, killed or started again, and what is true afterwards."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted
from stanchion.core.events import CancelRequested
from stanchion.core.model import Instant, JobId, Topic
from stanchion.ports.errors import BackendTimeout, BackendUnavailable
from stanchion.ports.locks import Granted, Renewed
from stanchion.ports.records import JobLease, Tenant
from tests.contract.builders import ACME, TOPIC, admission, start
from tests.servers import Server, running_server

_SOON_S = 10.0
_SOON_MS = 10_000
_TIMEOUT_S = 0.3

_T = TypeVar("_T")


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(server.url, timeout_s=_TIMEOUT_S)
    yield store
    await store.close()


@pytest.fixture
async def locks(server: Server) -> AsyncIterator[RedisLocks]:
    locks = await RedisLocks.open(server.url, timeout_s=_TIMEOUT_S)
    yield locks
    await locks.close()


def _scripts_run(server: Server) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


def _stop(server: Server) -> None:
    """Stop the server, and come back when it has stopped: a signal takes its time."""
    server.pause()
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)


async def _wake(server: Server, executed: int) -> None:
    """Continue a stopped server, and wait until it has executed what lay in its sockets."""
    server.resume()
    until = time.monotonic() + _SOON_S
    while _scripts_run(server) < executed:
        assert time.monotonic() < until, "the server never executed what it was sent"
        await asyncio.sleep(0.001)


async def _once_up(call: Callable[[], Awaitable[_T]]) -> _T:
    """The answer, once the connection is up again: bad news is allowed until then."""
    async with asyncio.timeout(_SOON_S):
        while True:
            try:
                return await call()
            except BackendUnavailable:
                await asyncio.sleep(0.005)


# ── Stopped and continued: time-outs lie ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("within_ms", [100, 60_000])
async def test_an_admission_that_timed_out_does_not_happen_later(
    server: Server, store: RedisStore, within_ms: int
) -> None:
    await start(store)  # The scripts are known, so what is sent now can be executed.
    wanted = admission(await store.now())
    executed = _scripts_run(server)
    _stop(server)
    with pytest.raises(BackendTimeout):
        await store.admit(wanted, within_ms=within_ms)
    await _wake(server, executed + 1)
    assert await _once_up(lambda: store.load(wanted.run.id)) is None
    assert await store.active_runs(ACME) == 1
    assert await store.admit(wanted, within_ms=_SOON_MS) == Admitted(wanted.run.id)
    assert await store.active_runs(ACME) == 2


@pytest.mark.parametrize("within_ms", [100, 60_000])
async def test_an_acquire_that_timed_out_takes_nothing_later(
    server: Server, locks: RedisLocks, within_ms: int
) -> None:
    await locks.acquire("warm", "me", ttl_ms=60_000, within_ms=_SOON_MS)
    executed = _scripts_run(server)
    _stop(server)
    with pytest.raises(BackendTimeout):
        await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=within_ms)
    await _wake(server, executed + 1)
    assert await _once_up(lambda: locks.inspect("run/1")) is None
    answer = await locks.acquire("run/1", "you", ttl_ms=60_000, within_ms=_SOON_MS)
    assert isinstance(answer, Granted)


async def test_a_stopped_server_costs_everybody_one_time_out_and_no_more(
    server: Server, store: RedisStore
) -> None:
    await start(store)
    wanted = [admission(await store.now()) for _ in range(50)]
    _stop(server)
    began = time.monotonic()
    outcomes = await asyncio.gather(
        *(store.admit(each, within_ms=_SOON_MS) for each in wanted),
        *(store.load(each.run.id) for each in wanted),
        return_exceptions=True,
    )
    took_s = time.monotonic() - began
    server.resume()
    assert {type(outcome) for outcome in outcomes} == {BackendTimeout}
    assert took_s < _TIMEOUT_S + 0.5
    assert await _once_up(lambda: store.active_runs(ACME)) == 1


async def test_calls_that_waited_in_the_queue_of_a_stopped_server_are_never_executed(
    server: Server, store: RedisStore
) -> None:
    run_id = await start(store)
    executed = _scripts_run(server)
    _stop(server)
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            await store.post(run_id, CancelRequested(), entry_id="x")
    server.resume()
    await _once_up(store.ping)
    # One was on the way when the server stopped. Those behind it found no connection.
    assert _scripts_run(server) <= executed + 1


# ── Killed and started again ─────────────────────────────────────────────────────────────────────


async def test_a_killed_server_is_bad_news_at_once(server: Server) -> None:
    store = await RedisStore.open(server.url, timeout_s=60.0)
    locks = await RedisLocks.open(server.url, timeout_s=60.0)
    await start(store)
    server.kill()
    async with asyncio.timeout(_SOON_S):
        for _ in range(5):
            with pytest.raises(BackendUnavailable):
                await store.admit(admission(Instant(0)), within_ms=60_000)
            with pytest.raises(BackendUnavailable):
                await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=60_000)
            with pytest.raises(BackendUnavailable):
                await store.lease_jobs("worker", [TOPIC], max_jobs=1, ttl_ms=60_000)
            with pytest.raises(BackendUnavailable):  # not even a lease of nonsense is lost
                await store.renew_jobs([JobLease(JobId("nonsense"), 1)], ttl_ms=60_000)
    await store.close()
    await locks.close()


async def test_a_store_finds_its_server_again(tmp_path: Path) -> None:
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with running_server(None, *durable, directory=tmp_path) as first:
        store = await RedisStore.open(first.url, timeout_s=_TIMEOUT_S)
        await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
        run_id = await start(store)
        first.kill()
        with pytest.raises(BackendUnavailable):
            await start(store)
    with running_server(None, *durable, directory=tmp_path, port=first.port):
        found = await _once_up(lambda: store.load(run_id))
        assert found is not None
        assert found.run.id == run_id
        await _once_up(lambda: start(store))
        assert await store.active_runs(ACME) == 2
        await store.close()


async def test_locks_find_their_server_again(tmp_path: Path) -> None:
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with running_server(None, *durable, directory=tmp_path) as first:
        locks = await RedisLocks.open(first.url, timeout_s=_TIMEOUT_S)
        before = await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=_SOON_MS)
        await locks.acquire("run/2", "me", ttl_ms=60_000, within_ms=_SOON_MS)
        await locks.release("run/2", "me", within_ms=_SOON_MS)
        first.kill()
    with running_server(None, *durable, directory=tmp_path, port=first.port):
        renewed = await _once_up(
            lambda: locks.renew("run/1", "me", ttl_ms=60_000, within_ms=_SOON_MS)
        )
        assert renewed == Renewed()
        again = await locks.acquire("run/2", "you", ttl_ms=60_000, within_ms=_SOON_MS)
        assert isinstance(before, Granted)
        assert isinstance(again, Granted)
        assert again.fence > before.fence
        await locks.close()


async def test_a_restart_in_the_midst_of_many_callers_mixes_up_nobodys_answers(
    tmp_path: Path,
) -> None:
    topics = [Topic(f"topic-{number}") for number in range(40)]
    with running_server(directory=tmp_path) as first:
        store = await RedisStore.open(first.url, timeout_s=_TIMEOUT_S)
        for topic in topics:
            await store.put_document("kind", topic, topic, read=None)
        reading = [asyncio.create_task(_read_until_error(store, topic)) for topic in topics]
        await asyncio.sleep(0.05)
        first.kill()
        async with asyncio.timeout(_SOON_S):
            counts = await asyncio.gather(*reading)
        assert min(counts) > 0
        await store.close()


async def _read_until_error(store: RedisStore, topic: Topic) -> int:
    count = 0
    while True:
        try:
            document = await store.document("kind", topic)
        except BackendUnavailable:
            return count
        assert document is not None
        assert document.value == topic
        count += 1


# ── A server that answers and takes nothing ──────────────────────────────────────────────────────


async def test_a_server_that_became_a_replica_is_not_well(
    server: Server, store: RedisStore, locks: RedisLocks
) -> None:
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")
        for backend in (store, locks):
            with pytest.raises(BackendUnavailable, match="is a replica"):
                await backend.ping()
        client.replicaof("NO", "ONE")
    await store.ping()
    await locks.ping()


async def test_a_server_without_memory_is_not_well(
    server: Server, store: RedisStore, locks: RedisLocks
) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1")
        for backend in (store, locks):
            with pytest.raises(BackendUnavailable, match="no memory left"):
                await backend.ping()
        client.config_set("maxmemory", "0")
    await store.ping()
    await locks.ping()
