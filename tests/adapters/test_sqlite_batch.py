"""Batches: one transaction for many callers, and each of them only answers for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import apsw
import pytest

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.thread import ThreadCall, read_together, write_together
from stanchion.adapters.system import ManualClock
from stanchion.ports.errors import (
    BackendCorrupt,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
)

_PUT = "INSERT INTO lines (line) VALUES (:line)"


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    connection = apsw.Connection(str(tmp_path / "lines.db"))
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.execute("CREATE TABLE lines (line INTEGER UNIQUE) STRICT")
    yield Database(connection, "lines.db", ManualClock())
    connection.close()


async def test_all_that_went_well_is_true_after_one_commit(db: Database) -> None:
    commits = _count_commits(db)
    answers = await _write(db, _put(1), _put(2), _put(3))
    assert answers == [1, 2, 3]
    assert _lines(db) == [1, 2, 3]
    assert commits == [1]


async def test_an_operation_that_fails_takes_back_only_what_it_did(db: Database) -> None:
    def half(db: Database) -> None:
        db.run(_PUT, line=10)
        db.run(_PUT, line=1)  # there already

    first, failed, last = await _write(db, _put(1), half, _put(3))
    assert (first, last) == (1, 3)
    assert isinstance(failed, BackendError)
    assert "UNIQUE" in str(failed)
    assert _lines(db) == [1, 3]


async def test_what_is_left_for_later_is_written_with_the_batch(db: Database) -> None:
    statements = _count_statements(db)
    await _write(db, *(_leave(line) for line in range(202)))
    assert _lines(db) == list(range(202))
    inserts = [each for each in statements if each.startswith("INSERT")]
    assert [each.count("(?)") for each in inserts] == [100, 100, 2]
    statements.clear()
    await _write(db, *(_leave(line) for line in range(300, 399)))
    inserts = [each for each in statements if each.startswith("INSERT")]
    assert [each.count("(?)") for each in inserts] == [64, 32, 2, 1]


async def test_whoever_reads_sees_what_was_left_for_later_before(db: Database) -> None:
    def read(db: Database) -> list[tuple[int]]:
        return db.every("SELECT line FROM lines")

    def peek(db: Database) -> list[tuple[int]]:
        return db.peek_every("SELECT line FROM lines")

    def settle(db: Database) -> list[tuple[int]]:
        db.settle("another")
        before = peek(db)
        db.settle("touched")
        return before + peek(db)

    assert await _write(db, _leave(1), peek) == [None, []]
    assert await _write(db, _leave(2), read) == [None, [(1,), (2,)]]
    assert await _write(db, _leave(3), settle) == [None, [(1,), (2,), (1,), (2,), (3,)]]


async def test_what_is_left_for_later_and_fails_takes_back_only_its_own(db: Database) -> None:
    def half(db: Database) -> None:
        db.later(_PUT, line=10)
        db.later(_PUT, line=1)  # there already

    first, failed, last = await _write(db, _leave(1), half, _leave(3))
    assert (first, last) == (None, None)
    assert isinstance(failed, BackendError)
    assert "UNIQUE" in str(failed)
    assert _lines(db) == [1, 3]


async def test_nothing_is_left_over_for_the_next_batch(db: Database) -> None:
    def fault(db: Database) -> float:
        db.later(_PUT, line=10)
        db.pending.touch("touched")
        db.pending.known["known"] = 1
        return 1 / 0

    left, failed = await _write(db, _leave(1), fault)
    assert left is None
    assert isinstance(failed, Exception)
    assert not db.pending.touched("touched")
    assert not db.pending.known
    await _write(db, _leave(3))
    assert _lines(db) == [1, 3]


async def test_an_operation_with_a_fault_of_its_own_fails_alone(db: Database) -> None:
    def divide(db: Database) -> float:
        db.run(_PUT, line=10)
        return 1 / 0

    failed, last = await _write(db, divide, _put(3))
    assert isinstance(failed, ZeroDivisionError)
    assert last == 3
    assert _lines(db) == [3]


async def test_an_operation_whose_caller_left_does_nothing(db: Database) -> None:
    gone = ThreadCall(_put(1), asyncio.get_running_loop())
    gone.is_wanted = False
    staying = ThreadCall(_put(2), asyncio.get_running_loop())
    write_together(db, [gone, staying])
    assert _lines(db) == [2]


async def test_a_full_disk_fails_the_whole_batch_and_changes_nothing(db: Database) -> None:
    def fill(db: Database) -> None:
        db.run("CREATE TABLE pile (stuff BLOB)")
        db.run("INSERT INTO pile VALUES (zeroblob(1000000))")

    pages = db.connection.execute("PRAGMA page_count").get
    db.connection.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall()
    answers = await _write(db, _put(1), fill)
    assert isinstance(answers[1], BackendUnavailable)
    assert "the disk is full" in str(answers[1])
    # SQLite may take back the operation alone or the whole batch; an answer says which.
    assert _lines(db) == ([1] if answers[0] == 1 else [])
    db.connection.execute(f"PRAGMA max_page_count = {pages + 1000}").fetchall()
    assert await _write(db, _put(2)) == [2]


async def test_a_commit_that_fails_fails_everybody_and_changes_nothing(db: Database) -> None:
    db.connection.set_commit_hook(lambda: True)
    answers = await _write(db, _put(1), _put(2))
    assert all(isinstance(answer, BackendError) for answer in answers)
    db.connection.set_commit_hook(None)
    assert _lines(db) == []
    assert await _write(db, _put(3)) == [3]
    assert _lines(db) == [3]


async def test_a_transaction_that_sqlite_took_back_takes_all_answers_back(db: Database) -> None:
    """As it does when the disk fails half-way: what went well before did not happen either."""

    def lose(db: Database) -> None:
        db.connection.execute("ROLLBACK")
        raise apsw.IOError("disk I/O error")

    answers = await _write(db, _put(1), lose, _put(3))
    assert [type(answer) for answer in answers] == [BackendUnavailable] * 3
    assert _lines(db) == []


async def test_readers_of_a_batch_fail_each_for_itself(db: Database) -> None:
    await _write(db, _put(1))

    def damaged(_: Database) -> None:
        raise apsw.CorruptError("database disk image is malformed")

    loop = asyncio.get_running_loop()
    calls: list[ThreadCall[Database]] = [ThreadCall(damaged, loop), ThreadCall(_lines, loop)]
    read_together(db, calls)
    failed, lines = await _answers(calls)
    assert isinstance(failed, BackendCorrupt)
    assert lines == [1]
    assert not db.connection.in_transaction


async def test_what_a_caller_asked_for_that_left_meanwhile_does_not_become_true(
    db: Database,
) -> None:
    def leave(db: Database) -> int:
        if early.is_wanted:
            early.time_out("writer")
        db.run(_PUT, line=2)
        return 2

    loop = asyncio.get_running_loop()
    early: ThreadCall[Database] = ThreadCall(_put(1), loop)
    twice: ThreadCall[Database] = ThreadCall(_put(1), loop)
    calls = [early, ThreadCall(leave, loop), twice]
    write_together(db, calls)
    answers = await _answers(calls)
    assert isinstance(answers[0], BackendTimeout)
    # The third failed beside the first and, done again without it, went well.
    assert answers[1:] == [2, 1]
    assert _lines(db) == [1, 2]


async def _write(db: Database, *acts: Callable[[Database], object]) -> list[object]:
    calls = [ThreadCall(act, asyncio.get_running_loop()) for act in acts]
    write_together(db, calls)
    assert not db.connection.in_transaction
    return await _answers(calls)


async def _answers(calls: Sequence[ThreadCall[Database]]) -> list[object]:
    for call in calls:
        call.settle()
    futures = [call.future for call in calls]
    answers: list[object] = await asyncio.gather(*futures, return_exceptions=True)
    return answers


def _put(line: int) -> Callable[[Database], int]:
    def put(db: Database) -> int:
        db.run(_PUT, line=line)
        return line

    return put


def _leave(line: int) -> Callable[[Database], None]:
    def leave(db: Database) -> None:
        db.later(_PUT, line=line)
        db.pending.touch("touched")

    return leave


def _lines(db: Database) -> list[int]:
    return [line for (line,) in db.every("SELECT line FROM lines ORDER BY line")]


def _count_commits(db: Database) -> list[int]:
    commits = [0]

    def count() -> bool:
        commits[0] += 1
        return False

    db.connection.set_commit_hook(count)
    return commits


def _count_statements(db: Database) -> list[str]:
    statements: list[str] = []
    db.connection.trace_v2(
        apsw.SQLITE_TRACE_STMT, lambda event: statements.append(str(event["sql"]))
    )
    return statements
