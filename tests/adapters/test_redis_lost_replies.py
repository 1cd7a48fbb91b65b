"""Lost replies: the server has done it, and the connection breaks before it can say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.admission import Admitted
from stanchion.core.events import CancelRequested
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import Granted
from stanchion.ports.records import Accepted, Committed, PostAnswer, Tenant
from tests.contract.builders import (
    ACME,
    ONE_JOB,
    TOPIC,
    WITHIN_MS,
    admission,
    advance,
    lease_one,
    loaded,
    result_of,
    start,
)
from tests.servers import Server, running_server

_SOON_S = 5.0


class _Line:
    """A way to the server on which the next reply can be lost, and the connection with it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loses_next = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def lose_next_reply(self) -> None:
        self._loses_next = True

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        there: asyncio.Task[None] | None = None
        try:
            # It takes long on a busy machine, and the case may be over meanwhile.
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            ends.append(far_writer)
            there = asyncio.create_task(self._copy(reader, far_writer, is_reply=False))
            await self._copy(far_reader, writer, is_reply=True)
        except asyncio.CancelledError:
            pass  # The case is over.
        finally:
            if there is not None:
                there.cancel()
            for each in ends:
                each.transport.abort()
            self._tasks.discard(task)

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        while data := await source.read(1 << 16):
            if is_reply and self._loses_next:
                self._loses_next = False
                return
            sink.write(data)
            await sink.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            await asyncio.wait([task], timeout=_SOON_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
async def line(server: Server) -> AsyncIterator[_Line]:
    with server.client() as client:
        client.flushall()
    line = _Line(server)
    listener = await asyncio.start_server(line.carry, "127.0.0.1", 0)
    line.url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield line
    listener.close()
    await line.close()


@pytest.fixture
async def store(line: _Line, server: Server) -> AsyncIterator[RedisStore]:
    await _teach(server)
    store = await RedisStore.open(line.url, timeout_s=_SOON_S)
    yield store
    await store.close()


async def _teach(server: Server) -> None:
    """Make the scripts known, so that the reply that is lost is not the one that asks for them."""
    store = await RedisStore.open(server.url, namespace="taught", timeout_s=_SOON_S)
    run_id = await start(store)
    await store.accept([result_of(await lease_one(store))])
    await store.post(run_id, CancelRequested(), entry_id="cancel")
    await store.put_document("kind", "name", 1, read=None)
    await advance(store, ONE_JOB, run_id)
    await store.put_tenant(ACME, Tenant())
    await store.delete_tenant(ACME)
    await store.close()


async def test_an_admission_whose_reply_was_lost_is_admitted_once(
    line: _Line, store: RedisStore
) -> None:
    wanted = admission(await store.now(), key="once")
    await start(store)
    line.lose_next_reply()
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    assert await store.active_runs(ACME) == 2


async def test_a_commit_whose_reply_was_lost_is_committed_once(
    line: _Line, store: RedisStore
) -> None:
    run_id = await start(store)
    await store.accept([result_of(await lease_one(store))])
    line.lose_next_reply()
    await loaded(store, run_id)
    line.lose_next_reply()
    assert isinstance(await advance(store, ONE_JOB, run_id), Committed)
    found = await loaded(store, run_id)
    assert found.run.stamp.version == 2
    assert await store.active_runs(ACME) == 0


async def test_a_result_whose_reply_was_lost_is_accepted_once(
    line: _Line, store: RedisStore
) -> None:
    run_id = await start(store)
    leased = await lease_one(store)
    line.lose_next_reply()
    (answer,) = await store.accept([result_of(leased)])
    assert answer == Accepted(leased.job.id, run_id, repeated=True)
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_an_event_whose_reply_was_lost_lies_in_the_inbox_once(
    line: _Line, store: RedisStore
) -> None:
    run_id = await start(store)
    line.lose_next_reply()
    answer = await store.post(run_id, CancelRequested(), entry_id="cancel")
    assert answer is PostAnswer.REPEATED
    assert len((await loaded(store, run_id)).inbox) == 1


async def test_jobs_whose_lease_was_lost_are_not_leased_again_by_us(
    line: _Line, store: RedisStore
) -> None:
    for _ in range(3):
        await start(store)
    held = await lease_one(store)
    # What waits is known, so the next thing that is sent is the lease itself.
    line.lose_next_reply()
    with pytest.raises(BackendTimeout):
        await store.lease_jobs("worker", [TOPIC], max_jobs=1, ttl_ms=60_000)
    (last,) = await store.lease_jobs("worker", [TOPIC], max_jobs=5, ttl_ms=60_000)
    assert last.deliveries == 1
    assert last.job.id != held.job.id


async def test_a_document_whose_reply_was_lost_is_for_the_caller_to_look_at(
    line: _Line, store: RedisStore
) -> None:
    await store.put_document("kind", "name", 1, read=0)
    line.lose_next_reply()
    with pytest.raises(BackendTimeout):
        await store.put_document("kind", "name", 2, read=1)
    found = await store.document("kind", "name")
    assert found is not None
    assert found.value == 2


async def test_a_deletion_whose_reply_was_lost_is_for_the_caller_to_look_at(
    line: _Line, store: RedisStore
) -> None:
    """Repeated, it would answer that there was no such tenant."""
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=2))
    line.lose_next_reply()
    with pytest.raises(BackendTimeout):
        await store.delete_tenant(ACME)
    assert (await store.list_tenants()).items == ()


async def test_a_grant_whose_reply_was_lost_is_granted(line: _Line) -> None:
    locks = await RedisLocks.open(line.url, timeout_s=_SOON_S)
    await locks.acquire("taught", "me", ttl_ms=60_000, within_ms=WITHIN_MS)
    await locks.release("taught", "me", within_ms=WITHIN_MS)
    line.lose_next_reply()
    answer = await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=WITHIN_MS)
    view = await locks.inspect("run/1")
    assert isinstance(answer, Granted)
    assert view is not None
    assert view.fence == answer.fence
    line.lose_next_reply()
    with pytest.raises(BackendTimeout):
        await locks.release("run/1", "me", within_ms=WITHIN_MS)
    assert await locks.inspect("run/1") is None
    await locks.close()
