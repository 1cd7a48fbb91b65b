"""Plans: no verb looks at rows that it is not about, however many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files

import apsw
import pytest
from msgspec.structs import replace

from stanchion.adapters.locks import sqlite as locks_module
from stanchion.adapters.sqlite.database import Database, read_statements
from stanchion.adapters.sqlite.opening import read_schema
from stanchion.adapters.store.sqlite import (
    admission as gate,
)
from stanchion.adapters.store.sqlite import (
    definitions,
    housekeeping,
    jobs,
    outbox,
    queue,
    runs,
)
from stanchion.adapters.store.sqlite.file import open_writer
from stanchion.adapters.system import ManualClock
from stanchion.core.events import CancelRequested
from stanchion.core.model import Instant, RunId, RunStatus, TenantId, Topic, place_of
from stanchion.core.run import decide
from stanchion.ports.records import (
    Admission,
    CommitAnswer,
    Committed,
    JobLease,
    LeasedJob,
    Result,
    RunFilter,
    SettleMissed,
    Tenant,
    result_event,
)
from tests.contract.builders import ONE_JOB, TOPIC, admission, commit_of

_STORE = "stanchion.adapters.store.sqlite"
_LOCKS = "stanchion.adapters.locks"

_MAY_SCAN = {
    "count_ready": "one row per topic and tenant with ready jobs: what waits, not what is kept",
    "count_rows": "one entry per run that is to be advanced: what waits, not what is kept",
    "highest_ticket": "once, when the store is opened, over what is waiting",
    "oldest_ready": "one row per topic and tenant with ready jobs, each with one look at an index",
    "list_notes": "notes of locks changed by hand that are not in the audit log yet",
    "look": "the first row of a table, and no more",
}

_CHEAP = {
    "read_facts": "SEARCH runs",
    "add_audit": "SEARCH audit_log USING COVERING INDEX audit_by_time",
    "list_workflows_in_force": "SCAN in_force",
    "list_workflow_uses": "SCAN known",
    "read_keys": "SCAN asked VIRTUAL TABLE INDEX 1:",
    "read_known_runs": "SCAN asked VIRTUAL TABLE INDEX 1:",
    "standings": "SCAN asked VIRTUAL TABLE INDEX 1:",
    "read_batch_facts": "SCAN asked VIRTUAL TABLE INDEX 1:, SEARCH runs, SEARCH jobs",
    **{f"begin_batch-{number}": "SCAN staged" for number in range(2, 12)},
    "begin_batch-10": "SCAN staged, USE TEMP B-TREE FOR GROUP BY",
}
"""The last row of a table or index, the rows of one page or one batch, the keys, runs or tenants
that were asked for."""


def _statements() -> Iterator[tuple[str, str, str]]:
    for script in files(_STORE).joinpath("sql").iterdir():
        for name, statement in read_statements(_STORE, "sql", script.name).items():
            yield _STORE, name, statement
    yield from _triggered()
    for name, statement in read_statements(_LOCKS, "sqlite.sql").items():
        yield _LOCKS, name, statement


def _triggered() -> Iterator[tuple[str, str, str]]:
    """What the triggers do: the plan of a statement that fires one does not show it."""
    script = files(_STORE).joinpath("sql", "together.sql").read_text("utf-8")
    lines = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("--"))
    for name, body in re.findall(r"CREATE TEMP TRIGGER (\w+).*?BEGIN(.*?)END;", lines, re.DOTALL):
        for number, statement in enumerate(body.split(";")[:-1], 1):
            yield _STORE, f"{name}-{number}", re.sub(r"NEW\.", ":", statement)


def test_every_trigger_is_looked_at() -> None:
    script = files(_STORE).joinpath("sql", "together.sql").read_text("utf-8")
    triggers = set(re.findall(r"TRIGGER (\w+)", script))
    assert {name.partition("-")[0] for _, name, _ in _triggered()} == triggers


@pytest.mark.parametrize(
    ("package", "name", "statement"), [pytest.param(*each, id=each[1]) for each in _statements()]
)
def test_no_statement_scans_a_table_or_sorts(package: str, name: str, statement: str) -> None:
    if name in _MAY_SCAN:
        return
    connection = _empty(package)
    values = dict.fromkeys(re.findall(r":(\w+)", statement), 1)
    plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
    connection.close()
    cheap = _CHEAP.get(name, "").split(", ")
    steps = [str(step) for *_, step in plan if step not in cheap]
    assert [step for step in steps if _is_costly(step)] == []


def test_the_statements_that_may_scan_exist() -> None:
    assert set(_MAY_SCAN) <= {name for _, name, _ in _statements()}


def test_every_statement_says_what_it_is_for() -> None:
    scripts = [*files(_STORE).joinpath("sql").iterdir(), files(_LOCKS).joinpath("sqlite.sql")]
    silent = [
        name
        for script in scripts
        for name, after in re.findall(
            r"^-- name: (\w+)\n(.*)", script.read_text("utf-8"), re.MULTILINE
        )
        if not after.startswith("-- ")
    ]
    assert silent == []


def test_a_statement_is_planned_once_whatever_its_parameters() -> None:
    connection = _empty(_STORE)
    assert connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, -1) == 1
    connection.close()


def _is_costly(step: str) -> bool:
    """Whether a step reads a whole table or index, or sorts what it has read."""
    if step.startswith("SCAN"):
        # A row of constants; an array that the caller gave.
        # The rows that the index of a list has picked, a page of them.
        return not step.startswith(("SCAN CONSTANT ROW", "SCAN json_each", "SCAN picked"))
    is_whole = step.startswith("SEARCH") and "(" not in step
    return is_whole or "TEMP B-TREE" in step or "AUTOMATIC" in step


def _empty(package: str) -> apsw.Connection:
    if package == _STORE:
        return open_writer(":memory:", ManualClock()).connection
    connection = apsw.Connection(":memory:")
    for script in read_schema(b"test", _LOCKS, "sqlite_migrations").migrations:
        connection.execute(script).fetchall()
    assert locks_module.__package__ == _LOCKS
    return connection


def test_starts_that_come_together_are_written_by_a_few_statements() -> None:
    world = _World(_FEW)
    world.db.pending.write()
    statements: list[str] = []
    world.db.connection.trace_v2(
        apsw.SQLITE_TRACE_PROFILE, lambda event: statements.append(str(event["sql"]))
    )
    for _ in range(32):
        gate.admit(world.db, world.fresh(_TENANTS[0]), _AHEAD, 1_000)
    world.db.pending.write()
    world.db.connection.trace_v2(0, None)
    kinds = [re.sub(r"\W.*", "", each.removeprefix("INSERT INTO ")) for each in statements]
    # One of each kind, for all of them.
    assert sorted(kinds) == ["SELECT", "beginnings", "dispatches", "settings_of_timers"]
    world.db.connection.close()


def test_settles_that_come_together_are_read_and_written_by_a_few_statements() -> None:
    world = _World(_FEW)
    settles = [world.settle() for _ in range(4)]
    statements: list[str] = []
    world.db.pending.write()
    world.db.connection.trace_v2(
        apsw.SQLITE_TRACE_PROFILE, lambda event: statements.append(str(event["sql"]))
    )
    answers = _in_one_batch(world.db, *settles)
    world.db.connection.trace_v2(0, None)
    assert [type(each) for each in answers] == [Committed] * 4
    kinds = [re.sub(r"\W.*", "", each.removeprefix("INSERT INTO ")) for each in statements]
    # One of each kind, for all of them: each run ends with its result.
    assert sorted(kinds) == ["SELECT", "SELECT", "commits", "results", "stops"]
    world.db.connection.close()


@pytest.mark.parametrize("change", ["its own entry", "another result", "a lost lease"])
def test_a_settle_sees_what_came_after_it_was_read_for(change: str) -> None:
    world = _World(_FEW)
    first, changed, last = (world.settle() for _ in range(3))
    run_id, (result,) = changed.commit.run_id, changed.results

    def between(db: Database) -> object:
        match change:
            case "its own entry":
                return outbox.post(db, run_id, CancelRequested(), entry_id="between")
            case "another result":
                return jobs.accept(db, [result])
            case _:
                db.run("UPDATE jobs SET fence = fence + 1 WHERE id = :id", id=result.job_id)
                return None

    answers = _in_one_batch(world.db, first, between, changed, last)
    assert [type(answers[place]) for place in (0, 2, 3)] == [Committed, SettleMissed, Committed]
    found = runs.load(world.db, run_id)
    assert found is not None
    assert not found.run.status.is_finished
    world.db.connection.close()


@pytest.mark.parametrize("has_more", [False, True], ids=["alone", "among other effects"])
def test_a_run_that_stops_takes_its_ready_jobs_out_of_their_queue(has_more: bool) -> None:
    world = _World(_FEW)
    before = sum(jobs.ready_topics(world.db).values())
    found = runs.load(world.db, world.queued_run())
    assert found is not None
    transition = decide(ONE_JOB, found.run, CancelRequested(), world.clock.now())
    if has_more:
        # A job of the same transition is ready before the run stops: it must not stay so.
        dispatched = world.fresh().transition.effects
        transition = replace(transition, effects=(*dispatched, *transition.effects))
    other = world.settle()
    _in_one_batch(world.db, other, lambda db: runs.commit(db, commit_of(found, transition)))
    assert sum(jobs.ready_topics(world.db).values()) == before - 1
    (left,) = world.db.first(
        "SELECT count(*) FROM jobs JOIN runs ON runs.run = jobs.run"
        " WHERE runs.id = :id AND state IN ('ready', 'leased')",
        id=found.run.id,
    ) or (None,)
    assert left == 0
    world.db.connection.close()


def _in_one_batch(db: Database, *acts: Callable[[Database], object]) -> list[object]:
    """Run operations as the writer does when they come together."""
    db.upcoming.extend(acts)
    answers = []
    while db.upcoming:
        answers.append(db.upcoming.popleft()(db))
    db.pending.write()
    return answers


def test_an_entry_that_lies_there_is_not_new_because_of_what_others_left_for_later() -> None:
    world = _World(_FEW)
    (run,) = world.db.first("SELECT run FROM runs WHERE ended_at IS NULL") or (0,)
    assert outbox.put_entry(world.db, run, "twice", CancelRequested(), Instant(1))
    gate.admit(world.db, world.fresh(), _AHEAD, 1_000)
    assert not outbox.put_entry(world.db, run, "twice", CancelRequested(), Instant(1))
    world.db.connection.close()


def test_a_queue_that_counts_more_jobs_than_there_are_does_not_stop_the_ring() -> None:
    world = _World(_FEW)
    world.db.run("UPDATE queues SET ready = ready + 7")
    ready_now = sum(jobs.ready_topics(world.db).values())
    leased = jobs.lease_jobs(world.db, "w", [TOPIC], max_jobs=1_000, ttl_ms=50)
    assert 0 < len(leased) < ready_now
    assert jobs.ready_topics(world.db) == {}
    world.db.connection.close()


@pytest.mark.parametrize("is_for_one", [False, True], ids=["all tenants", "one tenant"])
def test_a_lease_takes_no_statement_for_a_topic_without_jobs(is_for_one: bool) -> None:
    world = _World(_FEW)
    tenant = world.leased.job.tenant if is_for_one else None
    topics = [TOPIC, *(Topic(f"empty-{number}") for number in range(99))]
    statements: list[str] = []
    world.db.connection.trace_v2(
        apsw.SQLITE_TRACE_STMT, lambda event: statements.append(str(event["sql"]))
    )
    assert jobs.lease_jobs(world.db, "w", topics, max_jobs=2, ttl_ms=50, tenant=tenant)
    assert jobs.ready_tenants(world.db, topics, limit=2, tenant=tenant)
    assert not jobs.lease_jobs(world.db, "w", topics[1:], max_jobs=2, ttl_ms=50, tenant=tenant)
    assert len(statements) < 20
    world.db.connection.close()


# ── The same number of steps of SQLite's machine, with few runs and with many ────────────────────

_FEW, _MANY = 60, 400
_TENANTS = [TenantId(f"tenant-{number}") for number in range(3)]
_APART = TenantId("apart")
"""Has two runs, however many there are."""
_AHEAD = Instant(10**15)
_ENDED = (RunStatus.CANCELLED, RunStatus.FAILED)

_Verb = Callable[["_World"], object]
_VERBS: dict[str, _Verb] = {
    "admit": lambda world: gate.admit(world.db, world.fresh(), _AHEAD, 1_000),
    "load": lambda world: runs.load(world.db, world.run_id),
    "lease": lambda world: jobs.lease_jobs(
        world.db, "w", [TOPIC], max_jobs=2, ttl_ms=50, tenant=None
    ),
    "renew": lambda world: jobs.renew_jobs(
        world.db, [JobLease(world.leased.job.id, world.leased.fence)], ttl_ms=50
    ),
    "lost leases": lambda world: jobs.lost_leases(
        world.db, [JobLease(world.leased.job.id, world.leased.fence - 1)]
    ),
    "accept": lambda world: jobs.accept(world.db, [world.result()]),
    "progress": lambda world: jobs.progress(world.db, world.run_id, [world.leased.job.id]),
    "commit": lambda world: world.cancel(),
    "post": lambda world: outbox.post(world.db, world.run_id, CancelRequested(), entry_id="e"),
    "list": lambda world: runs.list_runs(world.db, _TENANTS[0], limit=5),
    "list by status": lambda world: runs.list_runs(
        world.db, _TENANTS[0], only=RunFilter(statuses=(RunStatus.RUNNING,)), limit=5
    ),
    "list by workflow": lambda world: runs.list_runs(
        world.db, _TENANTS[0], only=RunFilter(workflow_id=ONE_JOB.workflow_id), limit=5
    ),
    "list by label": lambda world: runs.list_runs(
        world.db, _TENANTS[0], only=RunFilter(labels=("team:red",)), limit=2
    ),
    "list reruns": lambda world: runs.list_runs(
        world.db, _TENANTS[0], only=RunFilter(rerun_of=world.first), limit=2
    ),
    "list of all tenants": lambda world: runs.list_runs(world.db, None, limit=5),
    "list of all tenants by status": lambda world: runs.list_runs(
        world.db, None, only=RunFilter(statuses=(RunStatus.CANCELLED,)), limit=5
    ),
    "list of all tenants by label": lambda world: runs.list_runs(
        world.db, None, only=RunFilter(labels=("team:red",), statuses=_ENDED), limit=1
    ),
    "timeline": lambda world: runs.timeline(world.db, world.run_id, limit=5),
    "feed": lambda world: runs.feed(world.db, _TENANTS[0], after=world.near_the_end, limit=5),
    "job": lambda world: jobs.job(world.db, world.leased.job.id),
    "expire": lambda world: jobs.expire_some(world.later().db, limit=5, max_deliveries=5),
    "fire timers": lambda world: outbox.fire_timers(world.later().db, limit=5),
    "take outbox": lambda world: outbox.take_outbox(world.db, limit=5, hold_ms=50),
    "audit": lambda world: housekeeping.audit_slots(world.db, limit=1),
    "oldest waits": lambda world: queue.oldest_waits(world.db, None).ready,
    "purge": lambda world: housekeeping.purge_some(world.db, finished_before=_AHEAD, limit=2),
}


@pytest.mark.parametrize("verb", _VERBS)
def test_a_verb_takes_as_many_steps_among_many_runs_as_among_few(verb: str) -> None:
    few, many = (_steps(_VERBS[verb], count) for count in (_FEW, _MANY))
    # Not quite the same: a look-up may step over a row more or less at the edge of a page.
    assert many <= few * 1.1 + 10, f"{few} steps among {_FEW} runs, {many} among {_MANY}"


def _steps(verb: _Verb, count: int) -> int:
    world = _World(count)
    verb(world)  # so that statements are prepared, and rings have turned
    with _counted(world.db.connection) as steps:
        assert verb(world), "there was nothing to do"
        world.db.pending.write()
    world.db.connection.close()
    return sum(steps)


@contextmanager
def _counted(connection: apsw.Connection) -> Iterator[list[int]]:
    steps: list[int] = []

    def note(event: dict[str, dict[str, int]]) -> None:
        status = event["stmt_status"]
        steps.append(status["SQLITE_STMTSTATUS_VM_STEP"])

    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, note)
    yield steps
    connection.trace_v2(0, None)


class _World:
    """A store with runs in every state, spread over a few tenants."""

    def __init__(self, count: int) -> None:
        self.clock = ManualClock()
        self.db: Database = open_writer(":memory:", self.clock)
        for tenant in _TENANTS:
            definitions.put_tenant(self.db, tenant, Tenant(max_concurrent_runs=None))
        for _ in range(2):
            gate.admit(self.db, self.fresh(_APART), _AHEAD, 1_000)
        self.first: RunId = RunId("00" + "0" * 21)
        self.ids = [self._start(number) for number in range(count)]
        for run_id in self.ids[count // 3 : count // 2]:
            outbox.post(self.db, run_id, CancelRequested(), entry_id="first")
        self._unfinished = iter(self.ids[1:])
        for _ in range(count // 4):
            self.cancel()
        held = jobs.lease_jobs(
            self.db, "w", [TOPIC], max_jobs=count // 4, ttl_ms=1_000, tenant=None
        )
        self._held = iter(held)
        self.leased: LeasedJob = held[-1]
        reported = JobLease(self.leased.job.id, self.leased.fence, "half")
        jobs.renew_jobs(self.db, [reported], ttl_ms=1_000)
        self.run_id: RunId = self.leased.job.run_id
        self.near_the_end: str = runs.feed(self.db, _TENANTS[0], after=None, limit=10_000)[
            -6
        ].position

    def _start(self, number: int) -> RunId:
        is_marked = number % 4 == 0
        wanted = admission(
            self.clock.now(),
            tenant=_TENANTS[number % len(_TENANTS)],
            labels={"team": "red"} if is_marked else None,
            rerun_of=self.first if is_marked else None,
        )
        gate.admit(self.db, wanted, _AHEAD, 1_000)
        self.clock.advance(1)
        return wanted.run.id

    def fresh(self, tenant: TenantId = _TENANTS[0]) -> Admission:
        return admission(self.clock.now(), tenant=tenant)

    def result(self) -> Result:
        leased = next(self._held)
        return Result(job_id=leased.job.id, fence=leased.fence, worker_id="w")

    def settle(self) -> runs.Settling:
        """The end of a run by the result of its one job."""
        result = self.result()
        found = runs.load(self.db, RunId(result.job_id.partition(":")[0]))
        assert found is not None
        place = place_of(result.job_id)
        event = result_event(result, place.step_id, place.item)
        transition = decide(ONE_JOB, found.run, event, self.clock.now())
        return runs.Settling([result], commit_of(found, transition))

    def queued_run(self) -> RunId:
        """A run whose job is ready."""
        (run_id,) = self.db.first(
            "SELECT runs.id FROM jobs JOIN runs ON runs.run = jobs.run"
            " WHERE state = 'ready' LIMIT 1"
        ) or ("",)
        return RunId(run_id)

    def later(self) -> _World:
        """The next day: leases have run out, and timers are due."""
        self.clock.advance(86_400_000)
        return self

    def cancel(self) -> CommitAnswer:
        found = runs.load(self.db, next(self._unfinished))
        assert found is not None
        transition = decide(ONE_JOB, found.run, CancelRequested(), self.clock.now())
        return runs.commit(self.db, commit_of(found, transition))
