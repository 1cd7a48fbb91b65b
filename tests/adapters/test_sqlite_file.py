"""The file: whoever cannot have it, or should not, is told why and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import apsw
import msgspec
import pytest

from stanchion.adapters.locks.sqlite import SqliteLocks
from stanchion.adapters.sqlite.database import CHECKPOINT_PAGES, Database
from stanchion.adapters.sqlite.opening import Schema, bring_up_to_date, check_ours, read_schema
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.store.sqlite.file import WriterDatabase
from stanchion.adapters.system import ManualClock
from stanchion.core.model import Risk, WorkflowId
from stanchion.core.topic_limits import TokenPool
from stanchion.core.upgrade import LEVEL
from stanchion.ports.errors import BackendCorrupt, BackendRefused
from stanchion.ports.records import Document, RunFilter, Tenant
from tests.contract.builders import ACME, WITHIN_MS, admission, start, workflow

_ROOT = Path(__file__).parents[2]


async def test_a_second_opener_is_refused_and_told_who_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    with pytest.raises(BackendRefused, match=rf"{path}: in use by process {os.getpid()}\. "):
        await _open(path)
    await store.ping()
    await store.close()


async def test_the_same_file_under_another_name_is_the_same_file(tmp_path: Path) -> None:
    store = await _open(tmp_path / "store.db")
    (tmp_path / "link.db").symlink_to(tmp_path / "store.db")
    with pytest.raises(BackendRefused, match="in use by process"):
        await _open(tmp_path / "link.db")
    await store.close()


async def test_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    answer = _try_in_another_process(path)
    await store.close()
    assert f"BackendRefused: {path}: in use by process {os.getpid()}." in answer
    assert _try_in_another_process(path) == ""


@pytest.mark.parametrize("fate", ["removed", "replaced"])
async def test_what_would_be_lost_with_the_process_is_not_acknowledged(
    tmp_path: Path, fate: str
) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    await store.put_document("a", "b", 1, read=0)
    path.rename(tmp_path / "kept.db")
    if fate == "replaced":
        path.write_bytes(b"")
    for write in (store.ping(), store.put_document("a", "b", 2, read=1), start(store)):
        with pytest.raises(BackendCorrupt, match="removed or replaced while in use"):
            await write
    path.unlink(missing_ok=True)
    (tmp_path / "kept.db").rename(path)
    await store.ping()
    assert await store.document("a", "b") == Document(1, 1)
    await store.close()


async def test_the_claim_holds_without_the_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    (tmp_path / "store.db.lock").unlink()
    assert "BackendRefused" in _try_in_another_process(path)
    await store.ping()
    await store.close()


async def test_a_hard_link_is_the_same_file(tmp_path: Path) -> None:
    store = await _open(tmp_path / "store.db")
    (tmp_path / "link.db").hardlink_to(tmp_path / "store.db")
    assert "under this name or another one" in _try_in_another_process(tmp_path / "link.db")
    await store.ping()
    await store.close()


async def test_what_a_killed_process_left_behind_is_no_claim(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    lock = tmp_path / "store.db.lock"
    lock.write_text("1\n")
    store = await _open(path)
    await store.close()
    assert not lock.exists()


async def test_a_closed_store_leaves_one_file_and_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = await _open(tmp_path / "store.db")
    await store.put_document("a", "b", 1, read=0)
    await store.close()
    assert _names(tmp_path) == ["store.db"]
    assert not set(threading.enumerate()) - before


async def test_the_log_is_copied_into_the_file_beside_the_writes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    with closing(apsw.Connection(str(path))) as other:
        other.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        await _write(store, bytes_=CHECKPOINT_PAGES * _PAGE_BYTES)
        await store.writer.call(_settle_checkpoint, wait_s=5)
        in_log, copied = other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        # The writer copies what is left, while all other writes wait.
        assert in_log > CHECKPOINT_PAGES
        assert in_log - copied < CHECKPOINT_PAGES // 10
    await store.close()
    assert _names(tmp_path) == ["store.db"]
    assert not [each.name for each in threading.enumerate() if str(path) in each.name]


async def test_a_file_that_was_replaced_is_not_given_the_log_of_another(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    await _write(store, bytes_=_PAGE_BYTES)
    other = tmp_path / "other.db"
    await (await _open(other)).close()
    other.replace(path)
    before = path.read_bytes()

    def checkpoint(db: Database) -> None:
        assert db.checkpoint is not None
        db.checkpoint()
        _settle_checkpoint(db)

    with pytest.raises(BackendCorrupt, match="removed or replaced"):
        await store.writer.call(checkpoint, wait_s=5)
    assert path.read_bytes() == before
    await store.close()


async def test_a_file_written_by_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await _open(path)).close()
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("PRAGMA user_version = 999").fetchall()
    with pytest.raises(BackendRefused, match=r"newer Stanchion \(schema 999, .* Upgrade Stanchion"):
        await _open(path)
    assert _names(tmp_path) == ["store.db"]


async def test_another_programs_database_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    with pytest.raises(BackendRefused, match=r"for another purpose\. Give another path"):
        await _open(path)
    assert path.read_bytes() == before
    assert _names(tmp_path) == ["theirs.db"]


async def test_a_store_is_no_place_for_locks_and_the_other_way_round(tmp_path: Path) -> None:
    await (await _open(tmp_path / "store.db")).close()
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=ManualClock())
    await locks.close()
    with pytest.raises(BackendRefused, match="for another purpose"):
        await SqliteLocks.open(tmp_path / "store.db", clock=ManualClock())
    with pytest.raises(BackendRefused, match="for another purpose"):
        await _open(tmp_path / "locks.db")


@pytest.mark.parametrize("content", [b"x", b"not a database\n" * 400])
async def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(BackendRefused, match="not a SQLite database"):
        await _open(path)
    assert path.read_bytes() == content


async def test_a_library_that_could_damage_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.40.1")
    with pytest.raises(BackendRefused, match=r"SQLite 3\.40\.1 can damage .* Install apsw"):
        await _open(tmp_path / "store.db")
    assert _names(tmp_path) == []


async def test_a_name_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.db"
    loop.symlink_to(loop)
    with pytest.raises(BackendRefused):
        await _open(loop)


async def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    store = await _open(path)
    await start(store)
    await store.close()


async def test_a_directory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(BackendRefused, match=r"a directory\. Give the path of a file"):
        await _open(place)
    assert _names(tmp_path) == ["place"]


async def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BackendRefused, match="not a regular file"):
        await _open(tmp_path / "pipe")


async def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendRefused, match="cannot be opened"):
        await _open(tmp_path / "file" / "store.db")
    with pytest.raises(BackendRefused, match=r"cannot be written .*Give a path in a directory"):
        await _open(tmp_path / "missing" / "store.db")


async def test_damage_is_told_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    run_id = await start(store)
    await store.close()
    page_bytes = 4096
    damaged = bytearray(path.read_bytes())
    damaged[page_bytes:] = b"\x55" * (len(damaged) - page_bytes)
    path.write_bytes(damaged)
    with pytest.raises((BackendCorrupt, BackendRefused), match="damaged"):
        await _load_and_close(path, run_id)


@pytest.mark.parametrize("value", [b"{", b'{"status":"\xff"}'])
async def test_a_stored_value_that_cannot_be_read_is_damage(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    run_id = await start(store)
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("UPDATE steps SET state = ?", (value,))
    with pytest.raises(BackendCorrupt, match="a stored value cannot be read"):
        await store.load(run_id)
    assert await store.active_runs(ACME) == 1
    await store.close()


async def test_migrations_run_all_or_not_at_all() -> None:
    mark = 0x41414141
    with closing(apsw.Connection(":memory:")) as connection:
        bring_up_to_date(connection, "f", Schema(mark, ("CREATE TABLE one (a)",)))
        broken = Schema(mark, ("CREATE TABLE one (a)", "CREATE TABLE two (a)", "CREATE nonsense"))
        with pytest.raises(apsw.SQLError):
            bring_up_to_date(connection, "f", broken)
        assert _tables(connection) == ["one"]
        assert connection.execute("PRAGMA user_version").get == 1
        mended = Schema(mark, ("CREATE TABLE one (a)", "CREATE TABLE two (a)"))
        bring_up_to_date(connection, "f", mended)
        bring_up_to_date(connection, "f", mended)
        assert _tables(connection) == ["one", "two"]
        check_ours(connection, "f", mended)
        with pytest.raises(BackendRefused, match=r"schema 2, this one knows 1"):
            check_ours(connection, "f", Schema(mark, ("CREATE TABLE one (a)",)))


async def test_runs_of_a_file_without_filtered_lists_are_found(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await _open(path)
    first = await start(store)
    for risk, rerun_of in ((Risk.HIGH, None), (Risk.STANDARD, first), (Risk.LOW, first)):
        wanted = admission(await store.now(), risk=risk, rerun_of=rerun_of)
        await store.admit(wanted, within_ms=WITHIN_MS)
    before = (await store.list_runs(None)).items
    assert len(before) == 4
    await store.close()
    with closing(apsw.Connection(str(path))) as connection:
        # As the version before wrote it.
        connection.execute(
            "DROP TABLE marks; DROP TABLE labels; DROP INDEX runs_of_all;"
            "DROP INDEX runs_by_workflow; ALTER TABLE accounts DROP COLUMN seen_at;"
            "CREATE INDEX runs_by_age ON runs (tenant, created_at, id)"
        ).fetchall()
        # Later migrations have run already, so this one runs by itself.
        (script,) = (
            each.read_text("utf-8")
            for each in files("stanchion.adapters.store.sqlite").joinpath("migrations").iterdir()
            if each.name.endswith("_run_lists.sql")
        )
        connection.execute(script).fetchall()
    store = await _open(path)
    assert (await store.list_runs(None)).items == before
    for only in (RunFilter(rerun_of=first), RunFilter(workflow_id=WorkflowId("one-job"))):
        wanted_now = tuple(run for run in before if only.fits(run))
        assert (await store.list_runs(ACME, only=only)).items == wanted_now
    await store.close()


async def test_a_file_of_the_first_version_takes_shared_workflows(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    whole = read_schema(b"STCN", "stanchion.adapters.store.sqlite", "migrations")
    text = msgspec.json.encode(workflow("flow"))
    with closing(apsw.Connection(str(path))) as connection:
        bring_up_to_date(connection, "f", Schema(whole.application_id, whole.migrations[:5]))
        connection.execute(
            "INSERT INTO tenants VALUES ('acme', ?)", (b'{"max_concurrent_runs":5}',)
        )
        connection.execute("INSERT INTO workflows VALUES ('acme', 'flow', 1, 7, ?)", (text,))
        connection.execute("INSERT INTO newest_workflows VALUES ('acme', 'flow', 1)")
    store = await _open(path)
    for name in ("flow", "other"):
        assert await store.put_shared_workflow(workflow(name)) == 1
    found = [(each.workflow.id, each.source) for each in (await store.list_workflows(ACME)).items]
    assert found == [("flow", "own"), ("other", "shared")]
    assert await store.tenant(ACME) == Tenant(max_concurrent_runs=5)
    assert [use.tenant for use in (await store.list_workflow_uses(WorkflowId("flow"))).items] == [
        ACME
    ]
    assert await store.level() == LEVEL
    await store.close()


async def test_a_file_without_topic_limits_takes_them(tmp_path: Path) -> None:
    path, pool = tmp_path / "store.db", TokenPool("llm", None, 1, 5.0)
    whole = read_schema(b"STCN", "stanchion.adapters.store.sqlite", "migrations")
    with closing(apsw.Connection(str(path))) as connection:
        bring_up_to_date(connection, "f", Schema(whole.application_id, whole.migrations[:11]))
    store = await _open(path)
    assert (await store.take_tokens(pool, ["a", "b"], ttl_ms=60_000)).tokens == ("a",)
    await store.close()


async def test_a_store_in_memory_needs_no_file() -> None:
    first, second = await _open(":memory:"), await _open(":memory:")
    await first.put_document("a", "b", 1, read=0)
    assert await first.document("a", "b") == Document(1, 1)
    assert await second.document("a", "b") is None
    await first.close()
    await second.close()


async def _open(path: Path | str) -> SqliteStore:
    return await SqliteStore.open(path, clock=ManualClock(), timeout_s=10.0)


async def _load_and_close(path: Path, run_id: str) -> None:
    store = await _open(path)
    try:
        await store.load(run_id)  # type: ignore[arg-type]  # an id is a string
    finally:
        await store.close()


_PAGE_BYTES = 4_096


async def _write(store: SqliteStore, *, bytes_: int) -> None:
    def write(db: Database) -> None:
        db.connection.execute("CREATE TABLE IF NOT EXISTS large (content)")
        db.connection.execute("INSERT INTO large VALUES (zeroblob(?))", (bytes_,))

    await store.writer.call(write, wait_s=5)


def _settle_checkpoint(db: Database) -> None:
    """Wait for the checkpoint that was begun."""
    assert isinstance(db, WriterDatabase)
    assert db.checkpointer is not None
    db.checkpointer.join()


def _try_in_another_process(path: Path) -> str:
    """Open and close the store over there; the last line of what it complains about."""
    script = (
        "import asyncio, sys\n"
        "from stanchion.adapters.system import SystemClock\n"
        "from stanchion.adapters.store.sqlite import SqliteStore\n"
        "async def main():\n"
        "    await (await SqliteStore.open(sys.argv[1], clock=SystemClock())).close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=_ROOT,
    )
    return done.stderr.strip().rpartition("\n")[2]


def _names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def _tables(connection: apsw.Connection) -> list[str]:
    found = connection.execute("SELECT name FROM sqlite_schema ORDER BY name").fetchall()
    return [str(name) for (name,) in found]
