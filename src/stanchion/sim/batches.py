"""Batches: two SQLite stores, one with a transaction for each call, one with many calls in one.

The writer thread of SQLite serves the calls that wait in one transaction, and writes their rows by
statement instead of by call. Here the first store executes each call alone and gives the answers.
The second one, the packed store, executes the same calls later, as that thread does: up to twenty
in a transaction, each at the time at which it was made. After each transaction its answers and its
rows must be those of the first store.

A pending row is written before the next read, so only neighbours can show a mistake. To have more
of them, calls that changed nothing and found nothing are left out, and calls that concern no run
come first in a transaction. Most of the calls of a simulated day are such polls and tokens.

Which of the ready jobs are leased is up to a store: the packed store leases those that the first
one has leased, each of which must be the next of its queue. The places of tenants in their turns
may differ, and so may those of two runs in the feed of their tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.opening import MEMORY
from stanchion.adapters.sqlite.thread import ThreadCall, WorkerThread, write_together
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.store.sqlite.file import open_writer
from stanchion.adapters.store.sqlite.housekeeping import Purged
from stanchion.adapters.store.sqlite.jobs import Expired, read_inputs
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, Job
from stanchion.ports.clock import Clock
from stanchion.ports.records import LeasedJob

_Answer = TypeVar("_Answer")
_Act = Callable[[Database], Any]
_TOGETHER_MAX: Final = 20
"""Calls in one transaction."""
_OF_NO_RUN: Final = frozenset({"take_tokens", "renew_tokens", "release_tokens", "put_receipts"})
"""Methods whose rows no other method reads: their calls may be moved before others."""
_CHOSEN: Final = frozenset({"position", "turn", "served"})
"""Columns that may differ: places in the feed of a tenant, and in turns."""
_NEVER_PENDING: Final = (
    *("audit_log", "documents", "limit_rates", "limit_tokens", "newest_workflows", "pins"),
    *("receipts", "sqlite_sequence", "tenants", "workflows"),
)
"""Tables that are not compared: each call writes its rows at once, in its turn."""
_RANKS: Final = {"ticket": "iif(ticket IS NULL, NULL, rank() OVER (ORDER BY ticket))"}
"""Columns of which only the order is compared: a call that is left out may have drawn a ticket."""
_DAY_MS: Final = 86_400_000
_SHOWN: Final = 300


class SqlitePair:
    """The methods of the first store. Each call that matters is repeated by the packed store."""

    def __init__(self, clock: Clock, *, seed: str = "batches") -> None:
        self.compare: Callable[[str | None], None] = lambda _difference: None
        """Called after each transaction of the packed store: what differs, or ``None``."""
        self._clock = clock
        self._alone = open_writer(MEMORY, clock)
        self._together = open_writer(MEMORY, _ClockOfCalls(clock, self._time_of_call))
        self._first = _store(InlineThread(self._alone), clock)
        self._acts: list[_Act] = []
        """What the call that is repeated has the writer thread do."""
        self._packed = _store(_Recorder(self._acts), clock)
        self._calls: list[_Call] = []
        """Those of the next transaction."""
        self._chance = Random(seed)  # noqa: S311 - to be foreseen is the point
        self._size = self._chance.randint(1, _TOGETHER_MAX)
        self._tables = _tables(self._alone)

    def __getattr__(self, verb: str) -> Callable[..., Coroutine[Any, Any, object]]:
        method, connection = getattr(self._first, verb), self._alone.connection

        async def call(*arguments: Any, **named: Any) -> object:  # noqa: ANN401 - any verb's
            before = connection.total_changes()
            try:
                answer = await method(*arguments, **named)
            except Exception as error:
                await self._repeat(verb, arguments, named, error)
                raise
            if answer or connection.total_changes() > before:
                await self._repeat(verb, arguments, named, answer)
            return answer

        vars(self)[verb] = call
        return call

    async def _repeat(
        self, verb: str, arguments: tuple[Any, ...], named: Mapping[str, Any], answer: object
    ) -> None:
        if verb == "lease_jobs" and isinstance(answer, tuple):
            for leased in answer:
                await self._add(verb, *_lease_the_same(leased, arguments, named), (leased,))
        else:
            await self._add(verb, arguments, named, answer)
        if len(self._calls) >= self._size:
            self.write_batch()

    async def _add(
        self, verb: str, arguments: tuple[Any, ...], named: Mapping[str, Any], answer: object
    ) -> None:
        with suppress(_Noted):
            await getattr(self._packed, verb)(*arguments, **named)
        now = self._clock.now()
        self._calls += [_Call(verb, arguments, act, now, answer) for act in self._acts]
        self._acts.clear()

    def write_batch(self) -> None:
        """Execute the calls that wait in one transaction of the packed store, and compare."""
        loop = asyncio.get_running_loop()
        self._calls.sort(key=lambda each: each.verb not in _OF_NO_RUN)
        together = [ThreadCall(each.act, loop) for each in self._calls]
        write_together(self._together, together)
        answers: list[object] = []
        for call in together:
            call.settle()
            answers.append(call.future.exception() or call.future.result())
        self.compare(next(self._differences(answers), None))
        self._calls.clear()
        self._size = self._chance.randint(1, _TOGETHER_MAX)

    def _time_of_call(self) -> Instant:
        """When the call was made that is executed now: that before those of ``upcoming``."""
        if not self._calls:
            return self._clock.now()
        return self._calls[-1 - len(self._together.upcoming)].at

    def _differences(self, answers: Sequence[object]) -> Iterator[str]:
        verbs = " ".join(call.verb for call in self._calls)
        for number, (call, answer) in enumerate(zip(self._calls, answers, strict=True), 1):
            one, two = _comparable(call.answer), _comparable(answer)
            if one != two:
                said = f"alone {one!s:.{_SHOWN}}, together {two!s:.{_SHOWN}}"
                yield f"{call.verb}{call.arguments!s:.{_SHOWN}}: {said} ({number} of {verbs})"
        for table, statement in self._tables.items():
            alone, together = (
                database.connection.execute(statement).fetchall()
                for database in (self._alone, self._together)
            )
            if alone != together:
                one, two = (
                    [row for row in rows if row not in others]
                    for rows, others in ((alone, together), (together, alone))
                )
                yield f"{table}: alone {one!s:.{_SHOWN}}, together {two!s:.{_SHOWN}} ({verbs})"


class InlineThread:
    """A database whose calls are served at once, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def call(self, act: Callable[[Database], _Answer], **_wait: float) -> _Answer:
        """Run ``act``; returns its result at once, whatever ``wait_s`` is."""
        call = ThreadCall(act, asyncio.get_running_loop())
        write_together(self._database, [call])
        call.settle()
        answer: _Answer = call.future.result()
        return answer


class _Noted(Exception):
    """A call was noted and not executed: there is no answer with which a method could go on."""


class _Recorder:
    """A thread that notes what it is to do."""

    def __init__(self, acts: list[_Act]) -> None:
        self._acts = acts

    async def call(self, act: _Act, **_wait: float) -> None:
        self._acts.append(act)
        raise _Noted


class _Nowhere:
    """A thread for reads, which are not repeated."""

    async def call(self, act: _Act, **_wait: float) -> None:
        """Do nothing."""


def _store(writer: InlineThread | _Recorder, clock: Clock) -> SqliteStore:
    """A store whose methods never wait."""
    reader = writer if isinstance(writer, InlineThread) else _Nowhere()
    return SqliteStore(
        path=MEMORY,
        writer=cast("WorkerThread[Database]", writer),
        reader=cast("WorkerThread[Database]", reader),
        clock=clock,
        key_ttl_ms=_DAY_MS,
        audit_ttl_ms=90 * _DAY_MS,
        timeout_s=2.0,
    )


class _Call(NamedTuple):
    """A call that the packed store is to repeat."""

    verb: str
    arguments: tuple[Any, ...]
    act: _Act
    at: Instant
    answer: object
    """That of the first store, or its error."""


class _ClockOfCalls:
    """A clock that shows when calls were made."""

    def __init__(self, clock: Clock, now: Callable[[], Instant]) -> None:
        self._clock = clock
        self.now = now

    def moment(self) -> Moment:
        return self._clock.moment()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


def _lease_the_same(
    leased: LeasedJob, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments with which the next job of the same queue is leased."""
    worker_id, _ = arguments
    job = leased.job
    return (worker_id, [job.topic]), {**named, "max_jobs": 1, "tenant": job.tenant}


def _comparable(answer: object) -> object:
    """An answer as the method gives it: some work on those of the thread."""
    match answer:
        case Exception():
            return type(answer).__name__
        case Purged(runs, _):
            return runs
        case Expired(jobs, _):
            return jobs
        case (LeasedJob(job=Job(input=msgspec.Raw())), *_):
            return read_inputs(cast("tuple[LeasedJob, ...]", answer))
        case _:
            return answer


def _tables(database: Database) -> dict[str, str]:
    """For each compared table the statement that reads its rows, in order."""
    found: dict[str, str] = {}
    execute = database.connection.execute
    tables = execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'").fetchall()
    for table in sorted({str(name) for (name,) in tables}.difference(_NEVER_PENDING)):
        columns = [str(row[1]) for row in execute(f"PRAGMA table_info({table})").fetchall()]
        compared = [_RANKS.get(name, name) for name in columns if name not in _CHOSEN]
        order = "run, position" if table == "history" else "1, 2, 3"[: 3 * len(compared) - 2]
        found[table] = f"SELECT {', '.join(compared)} FROM {table} ORDER BY {order}"  # noqa: S608
    return found
