"""Runs: loading, commits with their effects, timelines, feeds and lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.adapters.cursor import RunPage, read_cursor, write_cursor
from stanchion.adapters.outcomes import by_place, dead_work, first_of_steps
from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.store.sqlite.budgets import settle_budgets
from stanchion.adapters.store.sqlite.codec import (
    APPROVAL,
    DEAD_LETTER,
    FAILURE,
    HISTORY,
    HISTORY_LINE,
    HISTORY_LINES,
    INBOX,
    ITEM,
    ITEM_STATES,
    LABELS,
    ORIGIN,
    SQL,
    TIMER,
    decode_steps,
    encode,
    encode_some,
    encode_text,
    pending_inbox,
    pending_job,
    pending_run,
    slot_freed,
)
from stanchion.adapters.store.sqlite.jobs import end_job, find_jobs, held_jobs, leave_ready
from stanchion.adapters.store.sqlite.queue import leave_queue, promote, queue_place
from stanchion.core.commit import (
    Apply,
    CommitAnswer,
    Committed,
    Gone,
    SettleAnswer,
    SettleMiss,
    SettleMissed,
    judge_commit,
    judge_settle,
)
from stanchion.core.events import Timer
from stanchion.core.json_value import decode_value
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    PendingApproval,
    Risk,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    TenantId,
    Topic,
)
from stanchion.core.queue import frees_key, goes_on
from stanchion.core.transition import (
    ClearTimer,
    CloseApproval,
    DispatchJob,
    Effect,
    OpenApproval,
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
)
from stanchion.core.why import (
    JOBS_LOOKED_AT_MAX,
    LETTERS_LOOKED_AT_MAX,
    TIMERS_LOOKED_AT_MAX,
    OpenJob,
    OpenJobState,
    PendingTimer,
    RunFacts,
    decided_steps,
)
from stanchion.ports.records import (
    EVERY_RUN,
    Commit,
    FeedEntry,
    InboxEntry,
    JobState,
    Loaded,
    Page,
    Result,
    RunFilter,
    RunIndex,
    RunSummary,
    index_for,
)


def load(db: Database, run_id: RunId) -> Loaded | None:
    """See ``ports.store.Runs.load``."""
    found = db.first(SQL["load_run"], run_id=run_id)
    if found is None:
        return None
    id_, tenant, workflow_id, workflow_version, created_at, *rest = found
    holds_slot, status, finished_at, version, nonce, fence, error, output, body, *others = rest
    steps, inbox = others
    origin = ORIGIN.decode(body)
    run = Run(
        id=id_,
        tenant=tenant,
        workflow_id=workflow_id,
        workflow_version=workflow_version,
        workflow_source=origin.workflow_source,
        input=origin.input,
        created_at=created_at,
        uses=origin.uses,
        risk=origin.risk,
        holds_slot=bool(holds_slot),
        rerun_of=origin.rerun_of,
        starter=origin.starter,
        labels=origin.labels,
        traceparent=origin.traceparent,
        status=RunStatus(status),
        output=None if output is None else decode_value(output),
        error=None if error is None else FAILURE.decode(error),
        finished_at=finished_at,
        steps=decode_steps(steps),
        stamp=Stamp(version, nonce),
        fence=fence,
    )
    entries = sorted(INBOX.decode(inbox), key=itemgetter(0))
    return Loaded(run, tuple(InboxEntry(entry_id, event) for _, entry_id, event in entries))


def items_at(
    db: Database, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
) -> dict[ItemKey, Item] | None:
    """See ``ports.store.Runs.items_at``."""
    found = db.first(SQL["read_stamp"], run_id=run_id)
    if found is None:
        return None
    *_, version, nonce, _ = found
    return load_items(db, run_id, wanted) if Stamp(version, nonce) == stamp else None


def commit(db: Database, commit: Commit) -> CommitAnswer:
    """See ``ports.store.Runs.commit``."""
    # What is written of a commit depends on the inbox, which is another statement's.
    db.settle(pending_run(commit.run_id), pending_inbox(commit.run_id))
    found = db.peek(SQL["read_stamp"], run_id=commit.run_id)
    if found is None:
        return Gone()
    verdict = _judged(found, commit)
    return _write(db, found, commit, verdict) if isinstance(verdict, Apply) else verdict


class Settling:
    """A settle that waits for its turn in a batch. See ``ports.store.Runs.settle``.

    The first one of a batch reads for those after it as well.
    """

    __slots__ = ("commit", "concerns", "results")

    def __init__(self, results: Sequence[Result], commit: Commit) -> None:
        self.results = results
        self.commit = commit
        run_id = commit.run_id
        self.concerns = (
            pending_run(run_id),
            pending_inbox(run_id),
            *(pending_job(each.job_id) for each in results),
        )

    def __call__(self, db: Database) -> SettleAnswer:
        """Settle, or return why not."""
        commit, results = self.commit, self.results
        db.settle(*self.concerns)
        place = _to_settle(commit.run_id)
        if place not in db.pending.known:
            _read_to_settle(db, self)
        found: _ToSettle | None = db.pending.known[place]
        if found is None:
            return SettleMissed(SettleMiss.GONE)
        *row, has_entries = found.row
        run, ended_at = row[0], row[5]
        held = {} if ended_at is not None else held_jobs(found.jobs, results, run)
        verdict = judge_settle(
            _judged(row, commit),
            inbox_is_clear=not has_entries or not _has_others(db, run, commit.applied),
            jobs_are_held=len(held) == len(results),
        )
        if not isinstance(verdict, Apply):
            return verdict
        for each in results:
            end_job(db, each, held[each.job_id], run)
        return _write(db, row, commit, verdict)


def _has_others(db: Database, run: int, applied: Sequence[str]) -> bool:
    """Whether an inbox that is not empty has entries besides these. No row of it may be pending."""
    if not applied:
        return True
    found = db.peek(SQL["read_others"], run=run, applied=encode_text(applied))
    assert found is not None
    return bool(found[0])


class _ToSettle(NamedTuple):
    """What a settle checks, without pending rows."""

    row: Row
    jobs: Mapping[JobId, Row]


_READ_AHEAD_MAX: Final = 200
"""Results of other settles that are read for."""


def _to_settle(run_id: RunId) -> tuple[str, RunId]:
    return "to settle", run_id


def _read_to_settle(db: Database, first: Settling) -> None:
    """Read what this settle checks, and those after it that no pending row concerns."""
    together, left = [first], _READ_AHEAD_MAX
    for each in db.upcoming:
        if isinstance(each, Settling) and not db.pending.touches(each.concerns):
            left -= len(each.results)
            if left < 0:
                break
            together.append(each)
    runs = encode_text([each.commit.run_id for each in together])
    rows = {run_id: row for run_id, *row in db.peek_every(SQL["read_to_settle"], run_ids=runs)}
    job_ids = [result.job_id for each in together for result in each.results]
    jobs = find_jobs(db, job_ids)
    for each in together:
        row = rows.get(each.commit.run_id)
        known = None if row is None else _ToSettle(tuple(row), jobs)
        db.pending.known[_to_settle(each.commit.run_id)] = known


def _judged(row: Sequence[Any], commit: Commit) -> Apply | CommitAnswer:
    """The verdict on a commit to the run of this row of ``read_stamp``."""
    *_, version, nonce, fence = row
    return judge_commit(
        Stamp(version, nonce), fence, read=commit.read, nonce=commit.nonce, fence=commit.fence
    )


def _write(db: Database, row: Sequence[Any], commit: Commit, verdict: Apply) -> Committed:
    run, tenant, holds_slot, status, queued, ended_at, has_budgets, *_ = row
    transition, now = commit.transition, db.now()
    stamp = verdict.stamp
    ends = transition.status.is_finished and ended_at is None
    is_queued = status == RunStatus.QUEUED
    holds_slot = holds_slot and not is_queued
    db.later(
        SQL["commit_run"],
        run=run,
        tenant=tenant,
        holds_slot=holds_slot,
        status=transition.status,
        finished_at=transition.finished_at,
        ended_at=now if ends else ended_at,
        version=stamp.version,
        nonce=stamp.nonce,
        fence=verdict.fence,
        error=encode_some(transition.error),
        output=encode_some(transition.output),
        steps=encode_text(transition.steps),
        entries=timeline_lines(transition.timeline),
        applied=encode_text(commit.applied),
        ends=ends,
    )
    db.pending.touch(pending_run(commit.run_id))
    if ends and holds_slot:
        db.pending.touch(slot_freed(tenant))
    put_items(db, run, transition.items, transition.steps)
    carry_out(db, run, tenant, transition.effects)
    if ends and has_budgets:
        settle_budgets(db, tenant, run)
    if ends and is_queued:
        leave_queue(db, run, tenant)
        if frees_key(transition):
            db.run(SQL["free_key"], run=run)
    if queued and goes_on(commit.applied, transition.status):
        return Committed(stamp, promote(db, tenant))
    return Committed(stamp)


def active_runs(db: Database, tenant: TenantId) -> int:
    """See ``ports.store.Runs.active_runs``."""
    found = db.first(SQL["active_runs"], tenant=tenant)
    return 0 if found is None else int(found[0])


def put_items(
    db: Database, run: int, items: Mapping[ItemKey, Item], steps: Mapping[StepId, Step]
) -> None:
    """Write the items that changed; ``steps`` has the states of their steps.

    All items of a step, as at its start, are written in blocks: ten thousand rows would take 20 ms,
    for which all other writes wait. A later change of one is a row.
    """
    by_step: dict[StepId, dict[int, Item]] = {}
    for (step_id, index), item in items.items():
        by_step.setdefault(step_id, {})[index] = item
    for step_id, theirs in by_step.items():
        counts = steps[step_id].items if step_id in steps else None
        is_start = counts is None or len(theirs) >= len(counts.to_run)
        rows = _put_blocks(db, run, step_id, theirs) if is_start else theirs
        for index, item in rows.items():
            db.later(SQL["put_item"], run=run, step_id=step_id, item=index, state=encode(item))


def _put_blocks(
    db: Database, run: int, step_id: StepId, items: Mapping[int, Item]
) -> dict[int, Item]:
    """Write items in blocks; returns those that must be rows."""
    blocks: dict[int, dict[int, Item]] = {}
    for index, item in items.items():
        blocks.setdefault(index // _BLOCK_ITEMS, {})[index] = item
    rows: dict[int, Item] = {}
    for number, theirs in blocks.items():
        if not _put_block(db, run, step_id, number, theirs):
            rows |= theirs
    return rows


_BLOCK_ITEMS: Final = 256
_BLOCK_ITEMS_MIN: Final = 16
_BLOCK_BYTES_MAX: Final = 256 * 1024
"""To read one item reads its block."""


def _put_block(
    db: Database, run: int, step_id: StepId, block: int, items: Mapping[int, Item]
) -> bool:
    """Write a block of items; ``False`` if they must be rows: few, large, or written before."""
    if len(items) < _BLOCK_ITEMS_MIN:
        return False
    first = min(items)
    last = first + len(items) - 1
    if list(items) != list(range(first, last + 1)):
        return False
    states = encode(list(items.values()))
    if len(states) > _BLOCK_BYTES_MAX:
        return False
    where = {"run": run, "step_id": step_id, "first": first}
    if not db.changed(SQL["put_item_block"], block=block, states=states, **where):
        return False
    db.run(SQL["replace_items"], last=last, **where)
    return True


def run_facts(db: Database, run_id: RunId) -> RunFacts | None:
    """See ``ports.store.Runs.run_facts``."""
    loaded, found = load(db, run_id), db.first(SQL["waits_of_run"], run_id=run_id)
    if loaded is None or found is None:
        return None
    number, failures, next_try_at = found
    timers = db.every(SQL["timers_of_run"], run=number, limit=TIMERS_LOOKED_AT_MAX)
    letters = db.every(SQL["letters_of_run"], run=number, limit=LETTERS_LOOKED_AT_MAX)
    return RunFacts(
        at=db.now(),
        run=loaded.run,
        inbox=len(loaded.inbox),
        decided=decided_steps(each.event for each in loaded.inbox),
        failures=failures,
        next_try_at=next_try_at,
        jobs=_open_jobs(db, number, loaded.run.tenant),
        timers=tuple(
            sorted(
                (PendingTimer(TIMER.decode(timer), due) for due, timer in timers),
                key=lambda each: (each.due, each.timer.key),
            )
        ),
        letters=tuple(dead_work(DEAD_LETTER.decode(body)) for (body,) in letters),
        place=queue_place(db, run_id),
    )


def _open_jobs(db: Database, run: int, tenant: TenantId) -> tuple[OpenJob, ...]:
    found: list[OpenJob] = []
    places: dict[JobId, int] = {}
    for state in OpenJobState.LEASED, OpenJobState.READY:
        left = JOBS_LOOKED_AT_MAX - len(found)
        for row in db.every(SQL["jobs_in_state"], run=run, state=state, limit=left):
            job_id, step_id, item, topic, deliveries, fence, worker_id, expires_at, ticket = row
            if state is OpenJobState.READY:
                places[job_id] = ticket
            found.append(
                OpenJob(
                    id=job_id,
                    step_id=step_id,
                    item=item,
                    topic=topic,
                    state=state,
                    deliveries=deliveries,
                    fence=fence,
                    worker_id=worker_id,
                    expires_at=expires_at,
                )
            )
    ahead: dict[JobId, int] = {}
    for job in first_of_steps(places, found):
        counted = db.first(
            SQL["count_ahead"],
            topic=job.topic,
            tenant=tenant,
            ticket=places[job.id],
        )
        ahead[job.id] = 0 if counted is None else counted[0]
    return by_place(replace(job, ahead=ahead[job.id]) if job.id in ahead else job for job in found)


def load_items(
    db: Database, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
) -> dict[ItemKey, Item]:
    """See ``ports.store.Runs.load_items``."""
    found: dict[ItemKey, Item] = {}
    for step_id, indexes in wanted.items():
        items = encode_text(list(indexes))
        rows = db.every(SQL["read_items"], run_id=run_id, step_id=step_id, items=items)
        states: dict[int, Any] = dict(rows)
        missing = [index for index in indexes if index not in states]
        if missing:
            states |= _states_in_blocks(db, run_id, step_id, missing)
        found |= {ItemKey(step_id, index): ITEM.decode(states[index]) for index in sorted(states)}
    return found


def _states_in_blocks(
    db: Database, run_id: RunId, step_id: StepId, indexes: Sequence[int]
) -> dict[int, msgspec.Raw]:
    """The encoded states of items that have not changed since they were written together."""
    blocks = encode_text(sorted({index // _BLOCK_ITEMS for index in indexes}))
    rows = db.every(SQL["read_item_blocks"], run_id=run_id, step_id=step_id, blocks=blocks)
    by_block = {
        first // _BLOCK_ITEMS: (first, ITEM_STATES.decode(states)) for first, states in rows
    }
    found: dict[int, msgspec.Raw] = {}
    for index in indexes:
        first, states = by_block.get(index // _BLOCK_ITEMS, (0, []))
        if 0 <= index - first < len(states):
            found[index] = states[index - first]
    return found


_FEED: Final = "feed"
_FEED_ENTRIES_MAX: Final = 10_000
"""Rows in a feed. Older rows are kept with their run, for its timeline."""
_TIMELINE: Final = "timeline"


def timeline_lines(entries: tuple[TimelineEntry, ...]) -> bytes | None:
    """The encoded timeline entries of a commit; ``None`` if it has none."""
    return encode(entries) if entries else None


def timeline(
    db: Database, run_id: RunId, *, cursor: str | None = None, limit: int = 100
) -> Page[TimelineEntry]:
    """See ``ports.store.Runs.timeline``. The cursor is a row and a number of its entries."""
    at, done = (0, 0) if cursor is None else read_cursor(_TIMELINE, cursor, tuple[int, int])
    lines: list[TimelineEntry] = []
    # Every row has at least one entry: this many rows cover a page and show if there is another.
    for position, entries in db.every(
        SQL["read_timeline"], run_id=run_id, start=at, limit=limit + 2
    ):
        raw = HISTORY_LINES.decode(entries)
        first = done if position == at else 0
        for index in range(first, len(raw)):
            if len(lines) == limit:
                return Page(tuple(lines), write_cursor(_TIMELINE, position, index))
            lines.append(HISTORY_LINE.decode(raw[index]))
    return Page(tuple(lines))


def feed(
    db: Database, tenant: TenantId, *, after: str | None, limit: int = 100
) -> tuple[FeedEntry, ...]:
    """See ``ports.store.Runs.feed``."""
    (start,) = (0,) if after is None else read_cursor(_FEED, after, tuple[int])
    oldest = _feed_end(db, tenant) - _FEED_ENTRIES_MAX
    found: list[FeedEntry] = []
    last = None if after is None else start
    for position, run_id, entries in db.every(
        SQL["read_feed"], tenant=tenant, after=max(start, oldest), limit=limit
    ):
        # Positions have no holes until entries are dropped, as too old or with their run.
        is_after_gap = last is not None and position > last + 1
        cursor = write_cursor(_FEED, position)
        found.append(FeedEntry(cursor, run_id, HISTORY.decode(entries), is_after_gap))
        last = position
    return tuple(found)


def feed_position(db: Database, tenant: TenantId) -> str:
    """See ``ports.store.Runs.feed_position``."""
    return write_cursor(_FEED, _feed_end(db, tenant))


def _feed_end(db: Database, tenant: TenantId) -> int:
    found = db.first(SQL["feed_end"], tenant=tenant)
    assert found is not None
    return int(found[0])


def list_runs(
    db: Database,
    tenant: TenantId | None,
    *,
    only: RunFilter = EVERY_RUN,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[RunSummary]:
    """See ``ports.store.Runs.list_runs``."""
    page = RunPage(only, cursor, limit)
    while not page.is_full:
        asked = page.wanted
        found = [_summary(row) for row in _rows(db, tenant, only, page, asked)]
        page.add(((run.created_at, run.id, _own(run, tenant)) for run in found), asked)
    return page.page()


def _own(run: RunSummary, tenant: TenantId | None) -> RunSummary | None:
    """The run, unless it is another tenant's: the index of reruns has the runs of all."""
    return run if tenant in {None, run.tenant} else None


def _rows(
    db: Database, tenant: TenantId | None, only: RunFilter, page: RunPage, limit: int
) -> list[Row]:
    created_at, run_id = page.before
    every = partial(
        db.every, since=page.since, created_at=created_at, run_id=run_id, limit=limit, tenant=tenant
    )
    of_all = "_of_all" if tenant is None else ""
    index = index_for(only, tenant)
    match index:
        case RunIndex.RERUN:
            return every(SQL["list_reruns"], rerun_of=only.rerun_of)
        case RunIndex.LABEL:
            return every(SQL[f"list_runs_with_label{of_all}"], label=only.labels[0])
        case RunIndex.WORKFLOW:
            return every(SQL["list_runs_of_workflow"], workflow_id=only.workflow_id)
        case RunIndex.STATUS | RunIndex.AGE:
            ranges = {**_NO_STATUS, **_ranges({*only.statuses} or {*RunStatus})}
            return every(SQL[f"list_runs{of_all}"], **ranges)
        case _:
            assert_never(index)


_NO_STATUS: Final[Mapping[str, str | None]] = {f"s{number}": None for number in range(1, 9)}
"""The ranges of ``list_runs``, none of them used."""


def _ranges(statuses: Iterable[RunStatus]) -> dict[str, str]:
    return {f"s{number}": status for number, status in enumerate(statuses, 1)}


def _summary(row: Row) -> RunSummary:
    run_id, tenant, workflow_id, workflow_version, status, created_at, finished_at, *rest = row
    error, risk, labels, rerun_of = rest
    return RunSummary(
        id=run_id,
        tenant=tenant,
        workflow_id=workflow_id,
        workflow_version=workflow_version,
        status=RunStatus(status),
        created_at=created_at,
        finished_at=finished_at,
        error=None if error is None else FAILURE.decode(error),
        risk=Risk.STANDARD if risk is None else Risk(risk),
        labels={} if labels is None else LABELS.decode(labels),
        rerun_of=rerun_of,
    )


_APPROVALS: Final = "approvals"


def list_approvals(
    db: Database, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
) -> Page[PendingApproval]:
    """See ``ports.store.Runs.list_approvals``."""
    since, run_id, step_id = (
        (-1, "", "") if cursor is None else read_cursor(_APPROVALS, cursor, tuple[int, str, str])
    )
    after = {"since": since, "run_id": run_id, "step_id": step_id, "limit": limit + 1}
    rows = (
        db.every(SQL["list_approvals"], **after)
        if tenant is None
        else db.every(SQL["list_approvals_of_tenant"], tenant=tenant, **after)
    )
    found = tuple(APPROVAL.decode(body) for (body,) in rows[:limit])
    if len(rows) <= limit:
        return Page(found)
    last = found[-1]
    return Page(found, write_cursor(_APPROVALS, last.since, last.run_id, last.step_id))


def carry_out(db: Database, run: int, tenant: TenantId, effects: Collection[Effect]) -> None:
    """Apply effects in order."""
    for effect in effects:
        match effect:
            case DispatchJob(job):
                _dispatch(db, run, job)
            case SetTimer(timer, due):
                _set_timer(db, run, tenant, timer, due)
            case ClearTimer(timer):
                _set_timer(db, run, tenant, timer, None)
            case OpenApproval(approval):
                db.run(
                    SQL["open_approval"],
                    run=run,
                    step_id=approval.step_id,
                    tenant=approval.tenant,
                    since=approval.since,
                    run_id=approval.run_id,
                    body=encode(approval),
                )
            case CloseApproval(step_id):
                db.run(SQL["close_approval"], run=run, step_id=step_id)
            case RevokeJob(job_id):
                _revoke(db, db.every(SQL["open_job"], run=run, id=job_id))
            case StopStep(step_id):
                db.run(SQL["close_approvals_of_step"], run=run, step_id=step_id)
                _revoke(db, db.every(SQL["open_jobs_of_step"], run=run, step_id=step_id))
                db.run(SQL["clear_timers_of_step"], run=run, step_id=step_id)
            case StopRun():
                # Pending rows of several effects would not be written in their order.
                (db.later if len(effects) == 1 else db.run)(SQL["stop_run"], run=run)
            case _:
                assert_never(effect)


def _set_timer(db: Database, run: int, tenant: TenantId, timer: Timer, due: Instant | None) -> None:
    db.later(
        SQL["set_timer"],
        run=run,
        tenant=tenant,
        step_id=timer.step_id or "",
        key=timer.key,
        due=due,
        timer=encode(timer),
    )


def _dispatch(db: Database, run: int, job: Job) -> None:
    db.later(
        SQL["dispatch_job"],
        id=job.id,
        run=run,
        tenant=job.tenant,
        topic=job.topic,
        step_id=job.step_id,
        item=job.item,
        attempt=job.attempt,
        dispatch=job.dispatch,
        max_deliveries=job.max_deliveries,
        attempt_timeout_ms=job.attempt_timeout_ms,
        trace=encode_some(job.trace),
        ticket=db.ticket(),
        input=encode(job.input),
    )
    db.pending.touch(pending_job(job.id))


def _revoke(db: Database, jobs: Sequence[Row]) -> None:
    leaving: Counter[tuple[Topic, TenantId]] = Counter()
    for _, topic, tenant, state in jobs:
        leaving[topic, tenant] += state == JobState.READY
    if jobs:
        db.run(SQL["revoke_jobs"], jobs=encode_text([job for job, *_ in jobs]))
    for (topic, tenant), count in leaving.items():
        leave_ready(db, topic, tenant, count)
