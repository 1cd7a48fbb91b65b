"""Why a run does not go on: a pure function from facts to findings.

``why`` names everything that must change before the run can end, what needs a person first. The
facts come from two sides. ``RunFacts`` is one consistent look at the run within its shard. The
``Surroundings`` are what a replica knows of locks, workers and the bus, each with the time at which
it was seen. ``docs/reference/why.md`` documents the codes and their order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from stanchion.core.events import Approved, Event, Rejected, Timer, TimerKind
from stanchion.core.model import (
    Instant,
    JobId,
    OnDecision,
    OnDelay,
    OnItems,
    OnRetry,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    TenantId,
    Topic,
)
from stanchion.core.queue import QUEUE_TIMER, QueuePlace

NO_WORKER_MS: Final = 60_000
"""A topic that no worker has asked for in this time has no worker."""
JOBS_LOOKED_AT_MAX: Final = 1_000
TIMERS_LOOKED_AT_MAX: Final = 1_000
LETTERS_LOOKED_AT_MAX: Final = 100
FINDINGS_MAX: Final = 100
_OF_A_TENANT: Final = re.compile(r"stanchion (?:run|approval|job|dead-letter) [a-z][^,;()]*")
"""A command about one tenant, to its end, in a sentence."""

_Fact = TypeVar("_Fact", bound="OpenJob | PendingTimer | DeadWork")


class WhyCode(StrEnum):
    """Why a run does not go on, in the order of findings: what needs a person first."""

    FINISHED = "finished"
    QUEUED = "queued"
    CLASS_CLOSED = "class_closed"
    RUN_LOCKED = "run_locked"
    DEAD_LETTER = "dead_letter"
    NO_WORKER = "no_worker"
    SUSPENDED = "suspended"
    APPROVAL_PENDING = "approval_pending"
    TOPIC_LIMITED = "topic_limited"
    JOB_READY = "job_ready"
    RETRY_PENDING = "retry_pending"
    DELAY_PENDING = "delay_pending"
    JOB_LEASED = "job_leased"
    BACKEND_UNAVAILABLE = "backend_unavailable"


_RANK: Final = {code: rank for rank, code in enumerate(WhyCode)}


# ── Facts ────────────────────────────────────────────────────────────────────────────────────────


class OpenJobState(StrEnum):
    """The state of a job that has not ended."""

    READY = "ready"
    LEASED = "leased"
    SUSPENDED = "suspended"


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the run that has not ended."""

    id: JobId
    step_id: StepId
    topic: Topic
    state: OpenJobState
    item: int | None = None
    deliveries: int = 0
    fence: int = 0
    worker_id: str | None = None
    expires_at: Instant | None = None
    ahead: int | None = None
    """Ready jobs of the same tenant and topic before it; known for the first job of each step."""


class PendingTimer(msgspec.Struct, frozen=True):
    """A timer of the run, and when it is due."""

    timer: Timer
    due: Instant

    @property
    def step_id(self) -> StepId | None:
        return self.timer.step_id

    @property
    def item(self) -> int | None:
        return self.timer.item


class DeadWork(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter of the run."""

    id: str
    step_id: StepId | None
    item: int | None = None
    cause: str
    at: Instant


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run and all that it waits for, read in one step within its shard."""

    at: Instant
    """The time of the store."""
    run: Run
    """Without its items."""
    inbox: int = 0
    """Accepted events that are not applied yet."""
    decided: frozenset[StepId] = frozenset()
    """The approvals whose decision is among them."""
    failures: int = 0
    """How often applying one of them has failed, the highest count."""
    next_try_at: Instant | None = None
    """When a replica tries to apply them next."""
    jobs: tuple[OpenJob, ...] = ()
    """At most ``JOBS_LOOKED_AT_MAX``, sorted by step and item."""
    timers: tuple[PendingTimer, ...] = ()
    letters: tuple[DeadWork, ...] = ()
    place: QueuePlace | None = None
    """The place in its tenant's queue; ``None`` if it is not queued."""


def decided_steps(events: Iterable[Event]) -> frozenset[StepId]:
    """The steps that these events decide about."""
    return frozenset(each.step_id for each in events if isinstance(each, Approved | Rejected))


class RunLock(msgspec.Struct, frozen=True):
    """The lease of the run while it is held."""

    name: str
    fence: int
    expires_at: Instant
    seen_at: Instant
    holder: str | None = None
    """The replica or the operator that holds it."""
    is_by_hand: bool = False
    """Whether an operator holds it."""


class ClosedClass(msgspec.Struct, frozen=True):
    """The lock store is unavailable, and a rule makes the run's class wait for it."""

    rule: str
    since: Instant | None
    seen_at: Instant
    remedy: str


class Outage(msgspec.Struct, frozen=True):
    """A backend that does not answer this replica."""

    backend: str
    """``store``, ``locks`` or ``bus``."""
    error: str
    since: Instant | None
    seen_at: Instant


class TopicDemand(msgspec.Struct, frozen=True):
    """When a worker that may take the tenant's jobs last asked for a topic, on any replica."""

    asked_at: Instant | None
    is_known: bool
    """Whether all replicas are known for at least ``NO_WORKER_MS``, so that silence means none."""
    seen_at: Instant


class ReachedLimit(msgspec.Struct, frozen=True):
    """A limit that keeps jobs of a topic from being leased."""

    id: str
    rule: str
    frees: str
    """What gives it room again."""
    seen_at: Instant
    until: Instant | None = None
    """When it has room again: known of a rate, not of jobs that are leased."""
    tenant: TenantId | None = None
    """The tenant, if each tenant has its own limit."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica knows besides the run's shard. Everything that is absent is not the cause."""

    lock: RunLock | None = None
    closed: ClosedClass | None = None
    outages: tuple[Outage, ...] = ()
    topics: Mapping[Topic, TopicDemand] = {}
    limits: Mapping[Topic, ReachedLimit] = {}
    cap: int | None = None
    """How many runs of the tenant may be active at once; known for a queued run."""
    needs_data: frozenset[StepId] = frozenset()
    """Approvals whose ``data_schema`` refuses an approval without data."""
    not_by_starter: frozenset[StepId] = frozenset()
    """Approvals that the starter of the run may not decide."""


# ── Findings ─────────────────────────────────────────────────────────────────────────────────────


class Blocker(msgspec.Struct, frozen=True, kw_only=True):
    """What the run waits for, as data."""

    kind: str
    """``job``, ``timer``, ``approval``, ``dead_letter``, ``lock``, ``rule``, ``backend``, …"""
    id: str | None = None
    item: int | None = None
    topic: Topic | None = None
    worker_id: str | None = None
    fence: int | None = None
    ahead: int | None = None
    rule: str | None = None
    seen_at: Instant | None = None
    """When it was seen, for what is not part of the run's own shard."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must change before the run can end."""

    code: WhyCode
    detail: str
    remedy: str
    step_id: StepId | None = None
    since: Instant | None = None
    until: Instant | None = None
    blocked_by: Blocker | None = None


def why(facts: RunFacts, around: Surroundings) -> tuple[Finding, ...]:
    """Everything that must change before the run can end, what needs a person first.

    Never empty. The first finding of a run that has not finished is the one to look after.
    """
    if facts.run.status.is_finished:
        return (_finished(facts.run),)
    if facts.place is not None:
        return (_queued(facts, facts.place, around.cap),)
    stops_all = [*_stops_all(facts, around)]
    waits = sorted(_waits(facts, around), key=lambda found: _RANK[found.code])
    # A run always waits for something. If it does not, a replica finds out at its next try.
    causes = [*stops_all, *waits] or [_unapplied(facts)]
    return tuple([*causes, *_beside(facts, around)][:FINDINGS_MAX])


def remedy_for(remedy: str, tenant: str | None) -> str:
    """The remedy with commands that name the tenant, for a reader that may act for several."""
    if not tenant:
        return remedy
    return _OF_A_TENANT.sub(lambda found: f"{found[0]} --tenant {shlex.quote(tenant)}", remedy)


def store_outage(outage: Outage) -> Finding:
    """What can be said while the store, which has the run, does not answer."""
    return _unavailable(outage, "nothing changes until it answers")


def _finished(run: Run) -> Finding:
    said = f"the run has ended: {run.status}"
    if run.error is not None:
        said += f", {run.error.message} ({run.error.code})"
    if run.status is RunStatus.SUCCEEDED:
        remedy = f"stanchion run show {run.id}"
    elif run.error is not None and run.error.code in _FAULTS_OF_INPUT:
        # The same input on the same version would fail in the same way.
        remedy = (
            f"with another input: stanchion run rerun {run.id} --input @input.json;"
            f" with a corrected workflow: stanchion run rerun {run.id} --version newest"
        )
    else:
        remedy = f"stanchion run rerun {run.id}"
    return Finding(code=WhyCode.FINISHED, detail=said, since=run.finished_at, remedy=remedy)


_FAULTS_OF_INPUT: Final = frozenset({"expression_error", "invalid_input"})
"""Codes of failures that depend only on the run's input, results so far, and workflow."""


def _queued(facts: RunFacts, place: QueuePlace, cap: int | None) -> Finding:
    run, ahead = facts.run, place.position - 1
    key = f"'{place.fairness_key}'" if place.fairness_key else "none"
    full = "is full" if cap != 0 else "may have no active run (max_concurrent_runs is 0)"
    return Finding(
        code=WhyCode.QUEUED,
        detail=(
            f"tenant '{run.tenant}' {full}; position {place.position} in its queue,"
            f" {_number(ahead, 'run')} ahead: priority {place.priority} (higher ones go first),"
            f" fairness key {key} (keys of one priority take turns, oldest run first)"
        ),
        since=run.created_at,
        until=next((each.due for each in facts.timers if each.timer == QUEUE_TIMER), None),
        blocked_by=Blocker(kind="queue", id=run.tenant, ahead=ahead),
        remedy=_queue_remedy(run, cap),
    )


def _queue_remedy(run: Run, cap: int | None) -> str:
    raising = f"stanchion tenant set {shlex.quote(run.tenant)} --max-concurrent-runs N"
    if cap == 0:
        # No end of another run helps: there is none.
        first = f"no slot becomes free before an admin raises the cap: {raising}"
    else:
        first = f"wait for a slot, or let an admin raise the cap: {raising}"
    return f"{first}; or stanchion run cancel {run.id}"


def _stops_all(facts: RunFacts, around: Surroundings) -> Iterator[Finding]:
    """What keeps a replica from applying events to the run, whatever they are."""
    run, closed = facts.run, around.closed
    if closed is not None:
        yield Finding(
            code=WhyCode.CLASS_CLOSED,
            detail=(
                f"the lock store does not answer, and class '{run.risk}' waits for it:"
                f" {closed.rule}"
            ),
            since=closed.since,
            blocked_by=Blocker(kind="rule", rule=closed.rule, seen_at=closed.seen_at),
            remedy=closed.remedy,
        )
    if not facts.inbox:
        return
    if around.lock is not None:
        yield _locked(facts, around.lock)
    elif closed is None:
        yield _unapplied(facts)


def _locked(facts: RunFacts, lock: RunLock) -> Finding:
    who = "another process" if lock.holder is None else f"'{lock.holder}'"
    waiting = f"; {_number(facts.inbox, 'accepted event')} to be applied" if facts.inbox else ""
    return Finding(
        code=WhyCode.RUN_LOCKED,
        detail=f"{who} holds the run's lease{waiting}",
        until=lock.expires_at,
        blocked_by=Blocker(
            kind="lock", id=lock.name, worker_id=lock.holder, fence=lock.fence, seen_at=lock.seen_at
        ),
        remedy=(
            f"an operator can release it: stanchion lease release {lock.name}"
            if lock.is_by_hand
            else "wait: it is released or expires; an operator can release it by force:"
            f" stanchion lease release {lock.name}"
        ),
    )


def _unapplied(facts: RunFacts) -> Finding:
    """Accepted events are applied at the next try. Also for a run that waits for nothing else."""
    failed = f"; applying them failed {facts.failures} times" if facts.failures else ""
    return Finding(
        code=WhyCode.RETRY_PENDING,
        detail=f"{_number(facts.inbox, 'accepted event')} to be applied at the next try{failed}",
        until=facts.next_try_at,
        blocked_by=Blocker(kind="inbox", id=facts.run.id),
        remedy=(
            "look at inbox_entry_failed in the servers' logs; the event becomes a dead letter"
            if facts.failures
            else f"wait a second, then: stanchion run why {facts.run.id}"
        ),
    )


def _waits(facts: RunFacts, around: Surroundings) -> Iterator[Finding]:
    """What the active steps wait for."""
    yield from _dead_letters(facts)
    for step_id, step in facts.run.steps.items():
        if not step.status.is_active:
            continue
        match step.wait:
            case OnDecision() if step_id in facts.decided:
                pass  # what keeps its decision from being applied is a finding
            case OnDecision():
                yield _approval(facts, around, step_id, step, step.wait)
            case OnDelay():
                yield _delay(facts.run.id, step_id, step, step.wait.due)
            case OnRetry():
                timer = PendingTimer(
                    Timer(TimerKind.RETRY, step_id, None, step.attempt), step.wait.due
                )
                yield _retry(facts.run.id, step_id, step, timer, 1)
            case OnItems():
                yield from _item_retries(facts, step_id, step)
                yield from _inside_items(facts, around, step_id, step)
            case _:
                pass
        yield from _jobs(facts, around, step_id, step)


def _inside_items(
    facts: RunFacts, around: Surroundings, step_id: StepId, step: Step
) -> Iterator[Finding]:
    """What the steps of items with a workflow wait for; their ids begin with that of the step."""
    named = {job.step_id for job in facts.jobs}
    named |= {timer.step_id for timer in facts.timers if timer.step_id is not None}
    for inner in sorted(each for each in named if each.startswith(f"{step_id}.")):
        yield from _item_retries(facts, inner, step)
        yield from _item_delays(facts, inner, step, TimerKind.DELAY)
        yield from _jobs(facts, around, inner, step)
    yield from _item_delays(facts, step_id, step, TimerKind.ITEMS)


def _item_delays(
    facts: RunFacts, step_id: StepId, step: Step, kind: TimerKind
) -> Iterator[Finding]:
    due = [each.due for each in facts.timers if each.timer.kind is kind and each.step_id == step_id]
    if due:
        yield _delay(facts.run.id, step_id, step, min(due))


def _dead_letters(facts: RunFacts) -> Iterator[Finding]:
    for step_id in dict.fromkeys(letter.step_id for letter in facts.letters):
        some = [letter for letter in facts.letters if letter.step_id == step_id]
        first = _first(some)
        what = "an event of the run" if step_id is None else f"the job of {_named(some)}"
        yield Finding(
            code=WhyCode.DEAD_LETTER,
            detail=f"{what} is a dead letter: {first.cause}",
            step_id=step_id,
            since=first.at,
            blocked_by=Blocker(kind="dead_letter", id=first.id, item=first.item),
            remedy=(
                f"an operator decides: stanchion dead-letter replay {first.id},"
                f" or stanchion dead-letter discard {first.id}"
            ),
        )


def _approval(
    facts: RunFacts, around: Surroundings, step_id: StepId, step: Step, wait: OnDecision
) -> Finding:
    run_id, starter = facts.run.id, facts.run.starter
    asked = "" if wait.message is None else f": {wait.message}"
    whose = f" of another person than '{starter}'" if step_id in around.not_by_starter else ""
    limit = Timer(TimerKind.STEP_TIMEOUT, step_id)
    ends = [wait.due, *(each.due for each in facts.timers if each.timer == limit)]
    data, schema = "", ""
    if step_id in around.needs_data:
        data = " --data @data.json"
        schema = "; what the data must be, its data_schema: stanchion approval list -o json"
    return Finding(
        code=WhyCode.APPROVAL_PENDING,
        detail=f"step '{step_id}' waits for a decision{whose}{asked}",
        step_id=step_id,
        since=step.started_at,
        until=min((each for each in ends if each is not None), default=None),
        blocked_by=Blocker(kind="approval", id=step_id),
        remedy=(
            f"stanchion approval approve {run_id} {step_id}{data},"
            f" or stanchion approval reject {run_id} {step_id}{schema}"
        ),
    )


def _delay(run_id: RunId, step_id: StepId, step: Step, due: Instant) -> Finding:
    return Finding(
        code=WhyCode.DELAY_PENDING,
        detail=f"step '{step_id}' waits for the end of its delay",
        step_id=step_id,
        since=step.started_at,
        until=due,
        blocked_by=Blocker(kind="timer", id=step_id),
        remedy=f"wait, or stanchion run cancel {run_id}",
    )


def _item_retries(facts: RunFacts, step_id: StepId, step: Step) -> Iterator[Finding]:
    some = sorted(
        (
            each
            for each in facts.timers
            if each.timer.kind is TimerKind.RETRY and each.step_id == step_id
        ),
        key=lambda each: (each.due, each.item or 0),
    )
    if some:
        yield _retry(facts.run.id, step_id, step, some[0], len(some))


def _retry(run_id: RunId, step_id: StepId, step: Step, first: PendingTimer, count: int) -> Finding:
    item, due = first.item, first.due
    failed = f" ({step.error.message})" if step.error is not None and item is None else ""
    place = f"step '{step_id}'" if item is None else f"item {item} of step '{step_id}'"
    more = f", and {_number(count - 1, 'other item')}" if count > 1 else ""
    return Finding(
        code=WhyCode.RETRY_PENDING,
        detail=(
            f"the last attempt at {place} failed{failed}{more}; the next one has a delay"
            if first.timer.attempt
            else f"{place} has a large input{more}; its job is dispatched after those before it"
        ),
        step_id=step_id,
        since=step.started_at,
        until=due,
        blocked_by=Blocker(kind="timer", id=step_id, item=item),
        remedy=f"wait, or see the error: stanchion run show {run_id} --timeline",
    )


def _jobs(facts: RunFacts, around: Surroundings, step_id: StepId, step: Step) -> Iterator[Finding]:
    """One finding for each kind of wait among the open jobs of a step."""
    groups: dict[WhyCode, list[OpenJob]] = {}
    for job in facts.jobs:
        if job.step_id == step_id:
            groups.setdefault(_job_code(job, facts.at, around), []).append(job)
    for code, some in groups.items():
        if code is WhyCode.JOB_LEASED:
            first = min(some, key=lambda job: (job.expires_at or 0, job.item or 0))
        else:
            first = min(some, key=lambda job: (job.ahead is None, job.ahead or 0, job.item or 0))
        yield _job(facts, around, step, code, first, _named(some, first))


def _job_code(job: OpenJob, now: Instant, around: Surroundings) -> WhyCode:
    if job.state is OpenJobState.SUSPENDED:
        return WhyCode.SUSPENDED
    if job.state is OpenJobState.LEASED:
        return WhyCode.JOB_LEASED
    if job.topic in around.limits:
        return WhyCode.TOPIC_LIMITED
    demand = around.topics.get(job.topic)
    if demand is not None and demand.is_known:
        asked_at = demand.asked_at
        if asked_at is None or now - asked_at > NO_WORKER_MS:
            return WhyCode.NO_WORKER
    return WhyCode.JOB_READY


def _job(
    facts: RunFacts, around: Surroundings, step: Step, code: WhyCode, job: OpenJob, place: str
) -> Finding:
    run_id = facts.run.id
    demand, limit = around.topics.get(job.topic), around.limits.get(job.topic)
    blocker = Blocker(
        kind="job",
        id=job.id,
        item=job.item,
        topic=job.topic,
        seen_at=None if demand is None else demand.seen_at,
    )
    base = Finding(
        code=code,
        detail="",
        remedy="",
        step_id=job.step_id,
        since=step.started_at,
        blocked_by=blocker,
    )
    changed = msgspec.structs.replace
    match code:
        case WhyCode.JOB_LEASED:
            is_over = job.expires_at is not None and job.expires_at <= facts.at
            ended = "; its lease has expired and the job is offered again" if is_over else ""
            times = f", delivery {job.deliveries}" if job.deliveries > 1 else ""
            return changed(
                base,
                detail=f"worker '{job.worker_id}' has the job of {place}"
                f" (fence {job.fence}{times}){ended}",
                until=job.expires_at,
                blocked_by=changed(blocker, worker_id=job.worker_id, fence=job.fence, seen_at=None),
                remedy=f"wait for its result; its progress: stanchion job show {job.id}",
            )
        case WhyCode.NO_WORKER:
            assert demand is not None
            return changed(
                base,
                detail=f"no worker has asked for topic '{job.topic}' of tenant '{facts.run.tenant}'"
                f" for {NO_WORKER_MS // 1000} s: the job of {place} is ready",
                since=step.started_at if demand.asked_at is None else demand.asked_at,
                blocked_by=changed(blocker, ahead=job.ahead),
                remedy=f"start a worker with a handler for '{job.topic}':"
                " stanchion worker MODULE:APP; or wait, if its workers have as many jobs as they"
                " take; an operator can see them: stanchion worker list",
            )
        case WhyCode.TOPIC_LIMITED:
            assert limit is not None
            option = "--max-running" if limit.until is None else "--rate-per-s"
            whose = "" if limit.tenant is None else f" --tenant {limit.tenant}"
            return changed(
                base,
                detail=f"limit '{limit.id}' holds back the job of {place}: {limit.rule};"
                f" room comes with {limit.frees}",
                until=limit.until,
                blocked_by=changed(
                    blocker, kind="limit", id=limit.id, rule=limit.rule, seen_at=limit.seen_at
                ),
                remedy="wait, or let an admin raise it:"
                f" stanchion limit set {limit.id} {option} N;"
                f" an operator can see its use: stanchion limit show {limit.id}{whose}",
            )
        case WhyCode.SUSPENDED:
            return changed(
                base,
                detail=f"the job of {place} asked a question and waits for the answer",
                blocked_by=changed(blocker, fence=job.fence, seen_at=None),
                remedy=f"stanchion approval list, then stanchion approval approve {run_id}"
                f" {job.step_id}",
            )
        case _:
            ahead = 0 if job.ahead is None else job.ahead
            unknown = "" if demand is None or demand.is_known else _not_known(demand, facts.at)
            return changed(
                base,
                detail=f"the job of {place} waits for a worker of topic '{job.topic}';"
                f" {_number(ahead, 'job')} of this tenant ahead{unknown}",
                blocked_by=changed(blocker, ahead=ahead),
                remedy="wait, or start more workers of the topic; an operator can see those that"
                " run: stanchion worker list",
            )


def _not_known(demand: TopicDemand, now: Instant) -> str:
    is_recent = demand.asked_at is not None and now - demand.asked_at <= NO_WORKER_MS
    if is_recent:
        return ""
    return "; whether it has a worker is known 60 s after the last start of a server"


def _beside(facts: RunFacts, around: Surroundings) -> Iterator[Finding]:
    """What delays the run, or will stop it at its next event, but is not its cause now."""
    if around.lock is not None and around.lock.is_by_hand and not facts.inbox:
        yield _locked(facts, around.lock)
    for outage in around.outages:
        if outage.backend == "bus":
            yield _unavailable(outage, "polls replace its messages, about a second later")
        elif around.closed is None:
            yield _unavailable(outage, f"class '{facts.run.risk}' goes on without it")


def _unavailable(outage: Outage, consequence: str) -> Finding:
    return Finding(
        code=WhyCode.BACKEND_UNAVAILABLE,
        detail=f"the {_BACKENDS[outage.backend]} does not answer: {consequence}",
        since=outage.since,
        blocked_by=Blocker(kind="backend", id=outage.backend, seen_at=outage.seen_at),
        remedy=(
            "restore it; an operator can see what each server sees: stanchion replica list;"
            " what to do: docs/how-to/lock-incidents.md"
        ),
    )


_BACKENDS: Final = {"store": "store", "locks": "lock store", "bus": "bus"}


def _first(some: Sequence[_Fact]) -> _Fact:
    return min(some, key=lambda each: each.item or 0)


def _named(some: Sequence[OpenJob | DeadWork], first: OpenJob | DeadWork | None = None) -> str:
    """``step 'plan'``, or ``item 3 of step 'search' (and 7 other items)``."""
    one = first or _first(some)
    if one.item is None:
        return f"step '{one.step_id}'"
    more = f" (and {_number(len(some) - 1, 'other item')})" if len(some) > 1 else ""
    return f"item {one.item} of step '{one.step_id}'{more}"


def _number(count: int, noun: str) -> str:
    """``1 job``, ``3 jobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
