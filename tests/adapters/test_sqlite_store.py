"""The store under pressure: slow disks, impatient callers, many of them, and a sudden end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import apsw
import msgspec
import pytest

from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.store.sqlite.codec import decode_steps
from stanchion.adapters.store.sqlite.store import ROOM_MIN
from stanchion.adapters.system import ManualClock
from stanchion.core.admission import Admitted, TooLate
from stanchion.core.model import Instant, Step, StepId, TenantId
from stanchion.core.workflow import ForEachSpec
from stanchion.ports.errors import BackendCorrupt, BackendTimeout, BackendUnavailable
from stanchion.ports.records import Document, Tenant
from tests.contract.builders import (
    ACME,
    GLOBEX,
    SIDE_BY_SIDE,
    TOPIC,
    WITHIN_MS,
    admission,
    cancel,
    lease,
    planned,
    start,
    workflow,
)

_BOTH = ("left", "right")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: ManualClock) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.db", clock=clock, timeout_s=10.0)
    yield store
    await store.close()


# ── Deadlines ────────────────────────────────────────────────────────────────────────────────────


async def test_an_admission_that_waited_too_long_never_happens(store: SqliteStore) -> None:
    late = admission(await store.now())
    with _stuck(store), pytest.raises(BackendTimeout):
        await store.admit(late, within_ms=30)
    await store.put_document("after", "it", 1, read=0)
    assert await store.load(late.run.id) is None
    assert await store.active_runs(ACME) == 0


async def test_an_admission_that_is_executed_after_its_time_does_nothing(
    store: SqliteStore, clock: ManualClock
) -> None:
    late = admission(await store.now())
    with _stuck(store):
        answer = asyncio.ensure_future(store.admit(late, within_ms=WITHIN_MS))
        await asyncio.sleep(0)
        clock.advance(WITHIN_MS + 1)
    assert await answer == TooLate()
    assert await store.load(late.run.id) is None


async def test_reading_goes_on_while_writing_is_held_up(store: SqliteStore) -> None:
    run_id = await start(store)
    with _stuck(store):
        assert await store.load(run_id) is not None
        assert await store.active_runs(ACME) == 1


async def test_every_call_ends_within_its_bound(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "other.db", clock=ManualClock(), timeout_s=0.05)
    with _stuck(store), pytest.raises(BackendTimeout, match=r"no answer within 0\.05 s"):
        await store.put_tenant(ACME, Tenant())
    await store.close()


async def test_a_queue_that_is_too_long_turns_callers_away(tmp_path: Path) -> None:
    store = await SqliteStore.open(
        tmp_path / "other.db", clock=ManualClock(), timeout_s=10.0, queue_max=3
    )
    with _stuck(store):
        calls = [
            asyncio.ensure_future(store.put_document("d", str(number), number, read=0))
            for number in range(50)
        ]
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    served = [each for each in answers if isinstance(each, Document)]
    refused = [each for each in answers if isinstance(each, BackendUnavailable)]
    # Some may have gone through to the thread before the queue filled up.
    assert 3 <= len(served) < 50
    assert len(served) + len(refused) == 50
    assert len((await store.list_documents("d")).items) == len(served)
    await store.close()


async def test_callers_who_are_cancelled_leave_the_others_alone(store: SqliteStore) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    wanted = [admission(await store.now()) for _ in range(40)]
    with _stuck(store):
        calls = [asyncio.ensure_future(store.admit(each, within_ms=WITHIN_MS)) for each in wanted]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        await asyncio.wait(calls[::2])
    assert await asyncio.gather(*calls[1::2]) == [Admitted(each.run.id) for each in wanted[1::2]]
    for each in wanted[1::2]:
        assert await store.load(each.run.id) is not None
    assert await store.active_runs(ACME) == len((await store.list_runs(ACME)).items)


async def test_a_full_disk_is_told_and_gone_when_there_is_room(store: SqliteStore) -> None:
    await store.put_document("small", "one", 1, read=0)
    await _limit_pages(store, 10)
    with pytest.raises(BackendUnavailable, match="the disk is full"):
        await store.put_document("large", "one", "x" * 1_000_000, read=0)
    assert await store.document("large", "one") is None
    assert await store.document("small", "one") == Document(1, 1)
    await _limit_pages(store, 100_000)
    assert await store.put_document("large", "one", "x" * 1_000_000, read=0) is not None


async def test_a_store_without_room_on_its_disk_is_not_ready(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.ping()
    free = ROOM_MIN - 1
    monkeypatch.setattr(
        "stanchion.adapters.store.sqlite.store.disk_usage", lambda _path: SimpleNamespace(free=free)
    )
    with pytest.raises(BackendUnavailable, match=r"the disk is full.*4,194,303 bytes are left"):
        await store.ping()
    free = ROOM_MIN
    await store.ping()


async def test_a_store_whose_directory_is_gone_is_not_ready(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "path", "/nowhere/stanchion.db")
    with pytest.raises(BackendUnavailable, match="No such file or directory"):
        await store.ping()


# ── Closing ──────────────────────────────────────────────────────────────────────────────────────


async def test_what_was_asked_before_closing_is_done(tmp_path: Path) -> None:
    path, clock = tmp_path / "other.db", ManualClock()
    store = await SqliteStore.open(path, clock=clock)
    calls = [
        asyncio.ensure_future(store.put_document("d", f"{number:03}", number, read=0))
        for number in range(200)
    ]
    await asyncio.sleep(0)
    await store.close()
    assert all(await asyncio.gather(*calls))
    with pytest.raises(BackendUnavailable, match="closed"):
        await store.put_document("d", "late", 0, read=0)
    with pytest.raises(BackendUnavailable, match="closed"):
        await store.document("d", "000")
    again = await SqliteStore.open(path, clock=clock)
    assert len((await again.list_documents("d", limit=1_000)).items) == 200
    await again.close()


def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "other.db"

    async def write_and_leave() -> SqliteStore:
        store = await SqliteStore.open(path, clock=ManualClock())
        await store.put_document("a", "b", 1, read=0)
        waiting = asyncio.ensure_future(store.put_document("a", "c", 1, read=0))
        await asyncio.sleep(0)
        assert not waiting.done()
        return store

    async def close(store: SqliteStore) -> None:
        assert await store.document("a", "b") == Document(1, 1)
        await store.close()

    asyncio.run(close(asyncio.run(write_and_leave())))


# ── Turns ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenant_with_several_topics_gets_no_more_turns_than_another(
    store: SqliteStore,
) -> None:
    for _ in range(3):
        await start(store, SIDE_BY_SIDE, tenant=ACME)
    for _ in range(3):
        await start(store, SIDE_BY_SIDE, tenant=GLOBEX)
    await lease(store, "right", max_jobs=3, tenant=GLOBEX)
    turns = [(each.job.tenant, each.job.topic) for each in await lease(store, *_BOTH, max_jobs=9)]
    assert turns == [
        (ACME, "left"),
        (GLOBEX, "left"),
        (ACME, "right"),
        (GLOBEX, "left"),
        (ACME, "left"),
        (GLOBEX, "left"),
        (ACME, "right"),
        (ACME, "left"),
        (ACME, "right"),
    ]


async def test_the_rings_go_on_after_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "other.db", ManualClock()
    tenants = [TenantId(f"tenant-{number}") for number in range(4)]
    store = await SqliteStore.open(path, clock=clock)
    for tenant in tenants:
        for _ in range(2):
            await start(store, tenant=tenant)
    served = [each.job.tenant for each in await lease(store, max_jobs=2)]
    await store.close()
    store = await SqliteStore.open(path, clock=clock)
    served += [each.job.tenant for each in await lease(store, max_jobs=6)]
    assert served == tenants * 2
    assert await store.ready_topics() == {}
    await start(store, tenant=tenants[0])
    assert await store.ready_topics() == {TOPIC: 1}
    await store.close()


@contextmanager
def _stuck(store: SqliteStore) -> Iterator[None]:
    """The file, locked for writing by another program."""
    with closing(apsw.Connection(store.path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def _limit_pages(store: SqliteStore, more: int) -> None:
    """Give the file room for so many pages more: to SQLite, the rest of the disk is full."""

    def limit(connection: apsw.Connection) -> None:
        pages = connection.execute("PRAGMA page_count").get
        connection.execute(f"PRAGMA max_page_count = {pages + more}").fetchall()

    writer = store.writer  # the limit belongs to the connection that writes
    await writer.call(lambda db: limit(db.connection), wait_s=10.0)


def test_many_large_steps_are_decoded_like_few_small_ones() -> None:
    for size in (10, 100_000):
        steps = {StepId(name): Step(output=[0] * size, attempt=2) for name in ("a", "b", "c")}
        assert decode_steps(msgspec.json.encode(steps)) == steps


async def test_a_quiet_store_returns_its_page_cache_to_the_system(tmp_path: Path) -> None:
    clock = ManualClock()
    store = await SqliteStore.open(tmp_path / "store.db", clock=clock)
    try:
        for number in range(60):
            await store.put_document("large", str(number), "x" * 200_000, read=None)
        filled = await store.writer.call(_cache_bytes, wait_s=10.0)
        clock.advance(10_000)
        await store.put_document("small", "after the end of the period", 1, read=None)
        clock.advance(10_000)
        await store.put_document("small", "after a quiet period", 1, read=None)
        left = await store.writer.call(_cache_bytes, wait_s=10.0)
    finally:
        await store.close()
    assert filled > 8 * 1024 * 1024
    assert left < 4 * 1024 * 1024


def _cache_bytes(db: Database) -> int:
    used, _ = db.connection.status(apsw.SQLITE_DBSTATUS_CACHE_USED)
    return used


# ── Items of a for-each ──────────────────────────────────────────────────────────────────────────


async def test_many_items_are_written_in_few_rows_and_purged_with_their_run(
    store: SqliteStore, clock: ManualClock
) -> None:
    """Ten thousand rows in one transaction would hold up the writes of all tenants."""
    run_id = await start(store, _ONE_AT_A_TIME, run_input={"items": list(range(10_000))})
    assert await _rows_of_items(store) == (0, 40)
    await cancel(store, run_id, _ONE_AT_A_TIME)
    clock.advance(1_000)
    assert await store.purge(finished_before=clock.now(), limit=10) == 1
    assert await _rows_of_items(store) == (0, 0)


async def test_a_purge_of_runs_with_many_jobs_is_written_in_parts(store: SqliteStore) -> None:
    """In one part it would keep all other writes waiting, and time out each time."""
    for _ in range(3):
        await cancel(store, await start(store))
    changes: list[int] = []

    def add_jobs(db: Database) -> None:
        db.run(_MANY_JOBS, number=5_000)
        db.run("INSERT INTO job_inputs (job, input) SELECT job, x'30' FROM jobs WHERE item > 0")

    def watch(db: Database) -> None:
        before = db.connection.total_changes()

        def note() -> bool:
            nonlocal before
            before, last = db.connection.total_changes(), before
            changes.append(before - last)
            return False

        db.connection.set_commit_hook(note)

    def count(db: Database) -> Row:
        found = db.first(_NUMBERS)
        assert found is not None
        return found

    await store.writer.call(add_jobs, wait_s=10.0)
    assert await store.writer.call(count, wait_s=10.0) == (3, 15_003, 15_003, 6)
    await store.writer.call(watch, wait_s=10.0)
    later = Instant(await store.now() + 1)
    assert await store.purge(finished_before=later, limit=2) == 2
    assert await store.purge(finished_before=later, limit=2) == 1
    assert max(changes) < 6_000
    assert await store.writer.call(count, wait_s=10.0) == (0, 0, 0, 0)


_NUMBERS = """
    SELECT
        (SELECT count(*) FROM runs), (SELECT count(*) FROM jobs),
        (SELECT count(*) FROM job_inputs), (SELECT count(*) FROM history)
"""
_MANY_JOBS = """
    WITH RECURSIVE items (item) AS (
        SELECT 1 UNION ALL SELECT item + 1 FROM items WHERE item < :number
    )
    INSERT INTO jobs (id, run, tenant, topic, step_id, item, attempt, dispatch, state)
    SELECT runs.id || ':step@' || (item + 1), run, tenant, 'topic', 'step', item, 1, 1, 'finished'
    FROM runs, items
"""


async def test_inputs_are_not_decoded_while_other_writes_wait(store: SqliteStore) -> None:
    """An input that cannot be read is leased like the others, and does not keep them back."""
    for _ in range(2):
        await start(store)

    def spoil(db: Database) -> None:
        db.run("UPDATE job_inputs SET input = x'3f' WHERE job = 1")

    await store.writer.call(spoil, wait_s=10.0)
    with pytest.raises(BackendCorrupt):
        await lease(store, max_jobs=1)
    [second] = await lease(store, max_jobs=5)
    assert second.job.input == {"said": "hello"}


async def test_dead_letters_of_large_jobs_are_written_in_parts(
    store: SqliteStore, clock: ManualClock
) -> None:
    """Their inputs are not decoded: that would keep all other writes waiting for seconds."""
    for _ in range(5):
        await start(store)
    leased = await lease(store, max_jobs=5, ttl_ms=1)
    commits = 0

    def note() -> bool:
        nonlocal commits
        commits += 1
        return False

    def enlarge(db: Database) -> None:
        # A number that only a decoder would read.
        db.run(
            "UPDATE job_inputs SET input = CAST(:input AS BLOB)",
            input=f'{{"text":"{"x" * 3_000_000}","n":{"1" * 5_000}}}',
        )
        db.connection.set_commit_hook(note)

    await store.writer.call(enlarge, wait_s=10.0)
    commits = 0
    clock.advance(2)
    expired = await store.expire_jobs(limit=10, max_deliveries=1)
    assert [each.job_id for each in expired] == [each.job.id for each in leased]
    assert all(each.is_dead for each in expired)
    assert commits == 3


async def test_large_items_are_rows_of_their_own(store: SqliteStore) -> None:
    """To read one item must not read megabytes of others."""
    values = [f"{index}" * 3_000 for index in range(100)]
    run_id = await start(store, _ONE_AT_A_TIME, run_input={"items": [*range(256), *values]})
    assert await _rows_of_items(store) == (100, 1)
    found = await store.load_items(run_id, {StepId("each"): [255, 256, 355]})
    assert [item.input for item in found.values()] == [255, values[0], values[-1]]


_ONE_AT_A_TIME = planned(
    workflow(
        "one-at-a-time",
        each=ForEachSpec(for_each="${input.items}", topic=TOPIC, input="${item}", parallel=1),
    )
)


async def _rows_of_items(store: SqliteStore) -> tuple[int, int]:
    """How many items are rows of their own, and how many blocks of items there are."""

    def count(db: Database) -> tuple[int, int]:
        found = db.first("SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM item_blocks)")
        assert found is not None
        items, blocks = found
        return items, blocks

    return await store.writer.call(count, wait_s=10.0)
