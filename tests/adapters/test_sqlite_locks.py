"""Locks in a file: several processes, one holder; and a file that does not grow for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Final

import apsw
import pytest

from stanchion.adapters.locks.sqlite import SqliteLocks
from stanchion.adapters.sqlite.opening import Schema, bring_up_to_date, read_schema
from stanchion.adapters.system import ManualClock, SystemClock
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import AcquireTooLate, Granted, Held, NotOwned, Renewed

_ROOT: Final = Path(__file__).parents[2]
_PROCESSES: Final = 4
_TURNS: Final = 25
_WITHIN_MS: Final = 30_000
_DAY_MS: Final = 86_400_000


def test_processes_that_open_one_file_at_once_have_one_holder_at_a_time(tmp_path: Path) -> None:
    """Each adds one to a number in a file, many times, under the lock: none is lost."""
    path, number = tmp_path / "locks.db", tmp_path / "number"
    number.write_text("0")
    command = [sys.executable, "-m", "tests.adapters.test_sqlite_locks", str(path), str(number)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        for _ in range(_PROCESSES)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * _PROCESSES
    assert number.read_text() == str(_PROCESSES * _TURNS)
    fences = [int(line) for output in said for line in output.split()]
    assert len(set(fences)) == _PROCESSES * _TURNS


async def test_a_file_of_an_older_version_keeps_its_locks(tmp_path: Path) -> None:
    path, clock = tmp_path / "locks.db", ManualClock()
    whole = read_schema(b"STLK", "stanchion.adapters.locks", "sqlite_migrations")
    with closing(apsw.Connection(str(path))) as connection:
        bring_up_to_date(connection, "f", Schema(whole.application_id, whole.migrations[:2]))
        held = ("run/1", "me", 7, clock.now() + _DAY_MS)
        connection.execute("INSERT INTO locks VALUES (?, ?, ?, ?)", held).fetchall()
    locks = await SqliteLocks.open(path, clock=clock)
    try:
        assert await locks.renew("run/1", "me", ttl_ms=1_000, within_ms=_WITHIN_MS) == Renewed()
        view = await locks.inspect("run/1")
        assert view is not None
        assert (view.fence, view.acquired_at, view.renewals) == (7, None, 1)
    finally:
        await locks.close()


async def test_two_openers_in_one_process_see_the_same_locks(tmp_path: Path) -> None:
    clock = ManualClock()
    one = await SqliteLocks.open(tmp_path / "locks.db", clock=clock)
    other = await SqliteLocks.open(tmp_path / "locks.db", clock=clock)
    answers = await asyncio.gather(
        *(
            locks.acquire("a", f"{locks is one}-{number}", ttl_ms=1_000, within_ms=_WITHIN_MS)
            for number in range(20)
            for locks in (one, other)
        )
    )
    assert Counter(map(type, answers)) == {Granted: 1, Held: 39}
    await one.close()
    assert await other.inspect("a") is not None
    await other.close()


async def test_a_request_that_had_to_wait_too_long_never_happens(tmp_path: Path) -> None:
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=ManualClock(), timeout_s=10.0)
    await locks.acquire("b", "me", ttl_ms=1_000, within_ms=_WITHIN_MS)
    with closing(apsw.Connection(str(tmp_path / "locks.db"))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(BackendTimeout):
            await locks.acquire("a", "me", ttl_ms=1_000, within_ms=20)
        with pytest.raises(BackendTimeout):
            await locks.release("b", "me", within_ms=20)
        connection.execute("ROLLBACK")
    assert await locks.inspect("a") is None
    assert await locks.inspect("b") is not None
    await locks.close()


async def test_a_request_that_is_executed_after_its_time_changes_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=clock, timeout_s=10.0)
    with closing(apsw.Connection(str(tmp_path / "locks.db"))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        asked = asyncio.ensure_future(locks.acquire("a", "me", ttl_ms=1_000, within_ms=5_000))
        await asyncio.sleep(0)
        clock.advance(5_001)
        connection.execute("ROLLBACK")
    assert await asked == AcquireTooLate()
    assert await locks.inspect("a") is None
    await locks.close()


async def test_a_file_that_stays_locked_is_told_after_a_while(tmp_path: Path) -> None:
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=ManualClock(), timeout_s=0.1)
    with closing(apsw.Connection(str(tmp_path / "locks.db"))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(BackendTimeout):
            await locks.ping()
        connection.execute("ROLLBACK")
    await locks.close()


async def test_a_clock_that_is_set_back_brings_no_released_lock_back(tmp_path: Path) -> None:
    clock = ManualClock()
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=clock)
    first = await locks.acquire("a", "me", ttl_ms=1_000, within_ms=_WITHIN_MS)
    await locks.release("a", "me", within_ms=_WITHIN_MS)
    clock.step(-60_000)
    assert await locks.inspect("a") is None
    second = await locks.acquire("a", "you", ttl_ms=1_000, within_ms=_WITHIN_MS)
    assert isinstance(first, Granted)
    assert second == Granted(first.fence + 1)
    await locks.close()


async def test_names_that_nobody_uses_any_more_are_forgotten(tmp_path: Path) -> None:
    clock = ManualClock()
    locks = await SqliteLocks.open(tmp_path / "locks.db", clock=clock)
    await locks.acquire("kept", "me", ttl_ms=3 * _DAY_MS, within_ms=_WITHIN_MS)
    for number in range(30):
        await locks.acquire(f"old/{number}", "me", ttl_ms=1_000, within_ms=_WITHIN_MS)
        await locks.release(f"old/{number}", "me", within_ms=_WITHIN_MS)
    clock.advance(2 * _DAY_MS)
    for number in range(10):
        await locks.acquire(f"new/{number}", "me", ttl_ms=1_000, within_ms=_WITHIN_MS)
    assert await _names(tmp_path / "locks.db") == ["kept", *(f"new/{each}" for each in range(10))]
    assert await locks.renew("kept", "me", ttl_ms=1_000, within_ms=_WITHIN_MS) != NotOwned()
    await locks.close()


async def _names(path: Path) -> list[str]:
    with closing(apsw.Connection(str(path))) as connection:
        return [str(name) for (name,) in connection.execute("SELECT name FROM locks ORDER BY name")]


# ── One of the processes ─────────────────────────────────────────────────────────────────────────


async def _count(path: str, number: Path) -> None:
    locks = await SqliteLocks.open(path, clock=SystemClock(), timeout_s=20.0)
    for turn in range(_TURNS):
        token = f"{id(locks)}-{turn}"
        answer = await locks.acquire("number", token, ttl_ms=20_000, within_ms=20_000)
        while not isinstance(answer, Granted):
            await asyncio.sleep(0.001)
            answer = await locks.acquire("number", token, ttl_ms=20_000, within_ms=20_000)
        _add_one(number)
        sys.stdout.write(f"{answer.fence}\n")
        await locks.release("number", token, within_ms=20_000)
    await locks.close()


def _add_one(number: Path) -> None:
    number.write_text(str(int(number.read_text()) + 1))


if __name__ == "__main__":
    asyncio.run(_count(sys.argv[1], Path(sys.argv[2])))
