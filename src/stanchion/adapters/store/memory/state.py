"""The state of the memory store, and the changes that several methods share.

Every topic has a ring of tenants with ready jobs. The oldest job of the tenant at the head is taken
and the tenant moves to the tail, so a tenant with one job waits for one job of each other tenant.
Of several topics, the one that was served longest ago comes first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final, Generic, TypeVar, assert_never

from msgspec.structs import replace

from stanchion.adapters.cursor import RunPage, write_cursor
from stanchion.adapters.outcomes import SummaryBoard
from stanchion.core.admission import KeyRecord
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import (
    BudgetTally,
    Reservation,
    charge,
    counted_usage,
    merge_usage,
    new_usage,
    reserve,
    rolled,
    settle,
)
from stanchion.core.events import Event, Promoted, Timer
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    PendingApproval,
    Run,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    WorkflowSource,
    split_name,
)
from stanchion.core.queue import PROMOTED_AT_ONCE_MAX, PROMOTED_ENTRY, FairQueue
from stanchion.core.receipts import Receipt
from stanchion.core.transition import TimelineEntry
from stanchion.core.upgrade import LEVEL
from stanchion.ports.clock import Clock
from stanchion.ports.records import (
    DeadLetter,
    Document,
    FeedEntry,
    JobState,
    RunFilter,
    RunIndex,
    StoredWorkflow,
    Tenant,
    index_for,
    label_texts,
)

_FEED_ENTRIES_MAX: Final = 10_000
_NEVER: Final = Instant(0)


@dataclass(slots=True)
class JobFile:
    """A job and its state."""

    job: Job
    state: JobState = JobState.READY
    fence: int = 0
    deliveries: int = 0
    worker_id: str | None = None
    expires_at: Instant | None = None
    progress: JsonValue = None
    usage: Mapping[str, int] = field(default_factory=dict)
    """What it has reported as used under its fence."""
    attempt_ends_at: Instant | None = None
    """The end of the attempt's time, once the job was leased."""


@dataclass(slots=True)
class RunFile:
    """A run and all data that is purged with it. ``run`` has no items: they are in ``items``."""

    run: Run
    key: str | None
    items: dict[ItemKey, Item] = field(default_factory=dict)
    inbox: dict[str, Event] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    arrivals: int = 0
    """The number of the outbox row of the run: how many entries were ever posted."""
    timeline: list[TimelineEntry] = field(default_factory=list)
    jobs: list[JobId] = field(default_factory=list)
    timers: dict[Timer, Instant] = field(default_factory=dict)
    letters: set[str] = field(default_factory=set)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    """By budget; none once the run has ended."""
    is_closed: bool = False
    """Whether ``close_run`` was called."""


@dataclass(slots=True)
class Key:
    """The record of an idempotency key, and its expiry, which begins when its run has ended."""

    record: KeyRecord
    expires_at: Instant | None = None


@dataclass(slots=True)
class Account:
    """The data of a tenant."""

    config: Tenant | None = None
    seen_at: Instant = _NEVER
    """When it last started a run."""
    active: int = 0
    """The count of slots, which admission compares with the limit."""
    holders: set[RunId] = field(default_factory=set)
    """The unfinished runs with a slot: their number must equal the count."""
    queue: FairQueue = field(default_factory=FairQueue)
    """The runs that wait for a slot."""
    rate_used_until_ms: float = 0.0
    budgets: dict[str, BudgetTally] = field(default_factory=dict)
    ticks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The mark of each schedule: generation and tick of its last run."""
    keys: dict[str, Key] = field(default_factory=dict)
    workflows: dict[WorkflowId, list[StoredWorkflow]] = field(default_factory=dict)
    approvals: list[tuple[Instant, RunId, StepId]] = field(default_factory=list)
    """The approvals that wait for a decision, oldest first."""
    feed: deque[FeedEntry] = field(default_factory=lambda: deque(maxlen=_FEED_ENTRIES_MAX))
    feed_length: int = 0
    """The total number of entries ever written."""

    @property
    def has_free_slot(self) -> bool:
        limit = (self.config or Tenant()).max_concurrent_runs
        return limit is None or self.active < limit


@dataclass(slots=True)
class PoolFile:
    """The tokens of a topic limit."""

    tokens: dict[str, Instant] = field(default_factory=dict)
    """When each expires, in the order in which they were taken."""
    used_until_ms: float = 0.0
    """The time up to which the rate is used."""

    def may_extend(self, token: str, max_running: int | None, *, is_renamed: bool) -> bool:
        """Whether the token may be extended, or taken if it is not there."""
        if max_running is None or (is_renamed and token in self.tokens):
            return True
        if token in self.tokens:
            return list(self.tokens).index(token) < max_running
        return len(self.tokens) < max_running

    def extend(self, token: str, name: str, expires_at: Instant) -> None:
        """Extend a token under a new name, in its place in the order."""
        if token not in self.tokens or token == name:
            self.tokens[name] = expires_at
            return
        self.tokens.pop(name, None)  # another replica may have taken one under the new name
        self.tokens = {
            (name if each == token else each): (expires_at if each == token else at)
            for each, at in self.tokens.items()
        }


@dataclass(frozen=True, slots=True)
class MemoryReceipts:
    """A batch of receipts."""

    number: int
    id: str
    tenant: TenantId
    at: Instant
    receipts: tuple[Receipt, ...]


class MemoryState:
    """The state of a memory store."""

    def __init__(self, clock: Clock, key_ttl_ms: int, audit_ttl_ms: int) -> None:
        self._clock = clock
        self.key_ttl_ms = key_ttl_ms
        self.audit_ttl_ms = audit_ttl_ms
        self.runs: dict[RunId, RunFile] = {}
        self.jobs: dict[JobId, JobFile] = {}
        self.accounts: dict[TenantId, Account] = {}
        self.ready = ReadyIndex()
        self.pools: dict[str, PoolFile] = {}
        """The tokens of topic limits, by the name of their pool."""
        self.leases: DueTimes[JobId] = DueTimes()
        self.timers: TimesInTurn[tuple[RunId, Timer]] = TimesInTurn()
        self.outbox: DueTimes[RunId] = DueTimes()
        self.approvals: dict[tuple[RunId, StepId], PendingApproval] = {}
        self.places = RunPlaces()
        self.finished: list[tuple[Instant, RunId]] = []
        """Finished runs, in the order of their end."""
        self.letters: dict[str, tuple[int, DeadLetter]] = {}
        """By id, each with its place in the order of dead letters."""
        self.letter_order = count()
        self.documents: dict[str, dict[str, Document]] = {}
        self.summaries = SummaryBoard()
        self.level = LEVEL
        self.promoted_at_once_max = PROMOTED_AT_ONCE_MAX
        self.shared: dict[WorkflowId, list[StoredWorkflow]] = {}
        """The versions of shared workflows."""
        self.audit_log: list[AuditEntry] = []
        """Oldest first."""
        self.audit_removed = 0
        """Entries that were removed from the log, because they were too old."""
        self.audited_once: set[str] = set()
        self.receipts: list[MemoryReceipts] = []
        """Oldest first."""
        self.receipt_order = count(1)

    def now(self) -> Instant:
        return self._clock.now()

    def now_us(self) -> int:
        return self._clock.now() * 1_000

    def account(self, tenant: TenantId) -> Account:
        """The account of the tenant, for writing: created if there is none."""
        return self.accounts.setdefault(tenant, Account())

    def peek(self, tenant: TenantId) -> Account:
        """The account of the tenant, for reading: an empty one if there is none."""
        return self.accounts.get(tenant) or Account()

    def version_in_force(self, account: Account, name: WorkflowId) -> int:
        """The version that the tenant runs, of its own workflow or of a shared one; 0 for none."""
        source, workflow_id = split_name(name)
        if source is WorkflowSource.OWN:
            return len(account.workflows.get(workflow_id, ()))
        pins = {} if account.config is None else account.config.workflows
        return pins.get(workflow_id) or len(self.shared.get(workflow_id, ()))

    def deliver(self, file: RunFile, entry_id: str, event: Event, due: Instant) -> bool:
        """Post an event to an inbox and update the outbox row; ``False`` if it is there already."""
        if entry_id in file.inbox:
            return False
        file.inbox[entry_id] = event
        file.arrivals += 1
        self.outbox.hasten(file.run.id, due)
        return True

    def remove_entries(self, file: RunFile, *entry_ids: str) -> None:
        """Remove entries from an inbox; the outbox row is removed with the last one."""
        for entry_id in entry_ids:
            file.inbox.pop(entry_id, None)
            file.failures.pop(entry_id, None)
        if not file.inbox:
            self.outbox.remove(file.run.id)

    def record(self, file: RunFile, entries: tuple[TimelineEntry, ...]) -> None:
        """Add entries to the timeline of a run and the feed of its tenant."""
        if not entries:
            return
        file.timeline.extend(entries)
        account = self.account(file.run.tenant)
        account.feed_length += 1
        position = write_cursor("feed", account.feed_length)
        account.feed.append(FeedEntry(position, file.run.id, entries))

    def audit(self, entry: AuditEntry | None) -> None:
        """Write an entry, if there is one."""
        if entry is None:
            return
        # The time of an entry never falls, so that the order of the log is that of its times.
        last_at = self.audit_log[-1].at if self.audit_log else 0
        at = max(self.now(), last_at)
        self.audit_log.append(replace(entry, at=Instant(at)))

    def add_letter(self, file: RunFile, letter: DeadLetter) -> None:
        """Store a dead letter, as the newest."""
        file.letters.add(letter.id)
        # Removed first: a value that is replaced keeps its place in a dictionary.
        self.letters.pop(letter.id, None)
        self.letters[letter.id] = (next(self.letter_order), letter)

    def remove_letter(self, file: RunFile, letter_id: str) -> None:
        """Remove a dead letter."""
        file.letters.discard(letter_id)
        del self.letters[letter_id]

    def open_approval(self, approval: PendingApproval) -> None:
        """List an approval that waits for a decision."""
        self.approvals[approval.run_id, approval.step_id] = approval
        place = (approval.since, approval.run_id, approval.step_id)
        insort(self.account(approval.tenant).approvals, place)

    def close_approvals(self, run_id: RunId, step_ids: Iterable[StepId]) -> None:
        """Remove approvals from the list, if they are on it."""
        for step_id in step_ids:
            gone = self.approvals.pop((run_id, step_id), None)
            if gone is not None:
                self.account(gone.tenant).approvals.remove((gone.since, run_id, step_id))

    def tallies(self, tenant: TenantId) -> dict[str, BudgetTally]:
        """The tallies of the present windows of the tenant's budgets."""
        account = self.peek(tenant)
        limits = {} if account.config is None else account.config.budgets
        return {
            name: rolled(account.budgets.get(name), limits[name].window, self.now())
            for name in limits
        }

    def reserve_budgets(self, file: RunFile, asked: Mapping[str, int]) -> None:
        """Reserve what a new run asks for, of each budget that the tenant has."""
        for name, tally in self.tallies(file.run.tenant).items():
            after, reservation = reserve(tally, asked.get(name, 0))
            self.account(file.run.tenant).budgets[name] = after
            file.reservations[name] = reservation

    def charge_usage(self, job: JobFile, told: Mapping[str, int]) -> None:
        """Charge what a report of a job adds to earlier ones under the same fence."""
        file, tallies = self.runs[job.job.run_id], self.account(job.job.tenant).budgets
        counted = counted_usage(told, file.reservations)
        for name, amount in new_usage(job.usage, counted).items():
            after, reservation = charge(tallies.get(name), file.reservations[name], amount)
            file.reservations[name] = reservation
            if after is not None:
                tallies[name] = after
        job.usage = merge_usage(job.usage, counted)

    def settle_budgets(self, file: RunFile) -> None:
        """Return what is left of the reservations of a run that has ended."""
        tallies = self.account(file.run.tenant).budgets
        for name, reservation in file.reservations.items():
            after = settle(tallies.get(name), reservation)
            if after is not None:
                tallies[name] = after
        file.reservations.clear()

    def take_slot(self, run: Run) -> None:
        """Count a slot for the run."""
        account = self.account(run.tenant)
        account.holders.add(run.id)
        account.active += 1

    def promote(self, tenant: TenantId) -> tuple[RunId, ...]:
        """Give free slots of the tenant to the next queued runs; returns these runs."""
        account = self.accounts.get(tenant)
        promoted: list[RunId] = []
        while (
            account is not None
            and account.queue
            and account.has_free_slot
            and len(promoted) < self.promoted_at_once_max
        ):
            run_id = account.queue.take()
            assert run_id is not None
            promoted.append(run_id)
            file = self.runs[run_id]
            # Without chance: the state after a promotion depends on the state before it alone.
            stamp = Stamp(file.run.stamp.version + 1, f"+{file.run.stamp.nonce}")
            file.run = replace(file.run, status=RunStatus.PENDING, stamp=stamp)
            self.places.move(file.run, RunStatus.QUEUED)
            self.take_slot(file.run)
            self.deliver(file, PROMOTED_ENTRY, Promoted(), self.now())
        return tuple(promoted)

    def close_run(self, file: RunFile, *, frees_key: bool) -> None:
        """Handle the end of a run: free its slot, start the expiry of its key, clear its inbox."""
        file.is_closed = True
        account = self.account(file.run.tenant)
        account.queue.remove(file.run.id)
        if file.run.id in account.holders:
            account.holders.remove(file.run.id)
            account.active -= 1
        self.settle_budgets(file)
        if file.key is not None and frees_key:
            del account.keys[file.key]
        elif file.key is not None:
            account.keys[file.key].expires_at = Instant(self.now() + self.key_ttl_ms)
        self.remove_entries(file, *file.inbox)
        insort(self.finished, (file.run.finished_at or self.now(), file.run.id))


_Place = tuple[int, str]
"""The time of creation and the id of a run."""


class RunPlaces:
    """The indexes of the list of runs: for one tenant or all, the places in order of creation."""

    def __init__(self) -> None:
        self._places: dict[tuple[TenantId | None, RunIndex, str], list[_Place]] = {}

    def add(self, run: Run) -> None:
        """Add a new run to all indexes."""
        for index, value in self._entries(run):
            self._put(run, index, value)

    def move(self, run: Run, was: RunStatus) -> None:
        """Move a run whose status has changed."""
        if run.status is not was:
            self._drop(run, RunIndex.STATUS, was)
            self._put(run, RunIndex.STATUS, run.status)

    def remove(self, run: Run) -> None:
        """Remove a run from all indexes."""
        for index, value in self._entries(run):
            self._drop(run, index, value)

    def read(
        self, tenant: TenantId | None, only: RunFilter, page: RunPage, limit: int
    ) -> list[_Place]:
        """At most ``limit`` places of the index for this filter, newest first."""
        index = index_for(only, tenant)
        values: Iterable[str]
        match index:
            case RunIndex.RERUN:
                values = (only.rerun_of or "",)
            case RunIndex.LABEL:
                values = only.labels[:1]
            case RunIndex.WORKFLOW:
                values = (only.workflow_id or "",)
            case RunIndex.STATUS:
                values = {*only.statuses}
            case RunIndex.AGE:
                values = ("",)
            case _:
                assert_never(index)
        lists = [self._places.get((tenant, index, value), []) for value in values]
        # Of each list the newest are enough; ids are text, so a bound with "" is below all of them.
        spans = [
            each[
                max(
                    bisect_left(each, (page.since, "")), bisect_left(each, page.before) - limit
                ) : bisect_left(each, page.before)
            ]
            for each in lists
        ]
        return list(islice(heapq.merge(*(reversed(span) for span in spans), reverse=True), limit))

    def oldest(self, tenant: TenantId | None, status: RunStatus) -> RunId | None:
        """The run of this status that was created first."""
        places = self._places.get((tenant, RunIndex.STATUS, status))
        return RunId(places[0][1]) if places else None

    def of_workflow(self, tenant: TenantId, workflow_id: WorkflowId) -> Sequence[_Place]:
        """The places of all runs of a tenant's workflow."""
        return self._places.get((tenant, RunIndex.WORKFLOW, workflow_id), [])

    def _entries(self, run: Run) -> Iterator[tuple[RunIndex, str]]:
        yield RunIndex.AGE, ""
        yield RunIndex.STATUS, run.status
        yield RunIndex.WORKFLOW, run.workflow_id
        for label in label_texts(run.labels):
            yield RunIndex.LABEL, label
        if run.rerun_of is not None:
            yield RunIndex.RERUN, run.rerun_of

    def _put(self, run: Run, index: RunIndex, value: str) -> None:
        for tenant in (run.tenant, None):
            insort(self._places.setdefault((tenant, index, value), []), (run.created_at, run.id))

    def _drop(self, run: Run, index: RunIndex, value: str) -> None:
        for tenant in (run.tenant, None):
            places = self._places[tenant, index, value]
            del places[bisect_left(places, (run.created_at, run.id))]
            if not places:
                del self._places[tenant, index, value]


class MemoryPart:
    """A part of the store: methods on the shared state."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state


class ReadyIndex:
    """The ready jobs. Dictionaries serve as queues that allow removal: they keep their order."""

    def __init__(self) -> None:
        self._rings: dict[Topic, dict[TenantId, dict[JobId, int]]] = {}
        """The jobs of a queue, with numbers in the order in which they became ready."""
        self._served: dict[Topic, int] = {}
        self._turns = count(1)
        self._numbers = count(1)

    def add(self, job: Job) -> None:
        """Add the job at the tail of its tenant's queue."""
        self._rings.setdefault(job.topic, {}).setdefault(job.tenant, {})[job.id] = next(
            self._numbers
        )

    def remove(self, job: Job) -> None:
        """Remove the job, if it is there."""
        queue = self._rings.get(job.topic, {}).get(job.tenant)
        if queue is not None and job.id in queue:
            del queue[job.id]
            self._tidy(job.topic, job.tenant)

    def take(self, topics: Collection[Topic], tenant: TenantId | None = None) -> JobId | None:
        """Remove and return the next job; ``None`` if none is ready."""
        for topic in sorted(set(topics), key=lambda topic: (self._served.get(topic, 0), topic)):
            ring = self._rings.get(topic, {})
            whose = next(iter(ring), None) if tenant is None else tenant
            if whose is None or whose not in ring:
                continue
            queue = ring.pop(whose)
            job_id = next(iter(queue))
            del queue[job_id]
            ring[whose] = queue
            self._served[topic] = next(self._turns)
            self._tidy(topic, whose)
            return job_id
        return None

    def places(self, topic: Topic, tenant: TenantId) -> dict[JobId, int]:
        """The place of each ready job in its tenant's queue; the first has 0."""
        queue = self._rings.get(topic, {}).get(tenant, {})
        return {job_id: place for place, job_id in enumerate(queue)}

    def tenants(
        self,
        topics: Collection[Topic],
        limit: int,
        tenant: TenantId | None,
        but_not: Collection[TenantId],
    ) -> dict[TenantId, int]:
        """The first tenants in the rings of these topics, with the number of their ready jobs."""
        found: dict[TenantId, int] = {}
        for topic in dict.fromkeys(topics):
            for each, queue in self._rings.get(topic, {}).items():
                if tenant in {None, each} and each not in but_not:
                    found[each] = found.get(each, 0) + len(queue)
        return dict(islice(found.items(), limit))

    def oldest(self, tenant: TenantId | None) -> JobId | None:
        """The job that became ready first, of one tenant or of all."""
        heads = [
            next((number, job_id) for job_id, number in queue.items())
            for ring in self._rings.values()
            for each, queue in ring.items()
            if tenant in {None, each}
        ]
        return min(heads)[1] if heads else None

    def counts(self) -> dict[Topic, int]:
        """The number of ready jobs, by topic."""
        return {topic: sum(map(len, ring.values())) for topic, ring in self._rings.items()}

    def _tidy(self, topic: Topic, tenant: TenantId) -> None:
        ring = self._rings[topic]
        if not ring[tenant]:
            del ring[tenant]
        if not ring:
            del self._rings[topic]


_Thing = TypeVar("_Thing", bound=Hashable)


class DueTimes(Generic[_Thing]):
    """A set of values with due times. ``take`` returns the earliest first, then the oldest."""

    def __init__(self, order: Iterator[int] | None = None) -> None:
        self._due: dict[_Thing, tuple[Instant, int]] = {}
        # Also holds entries that were moved or removed: ``take`` skips those that are not in
        # ``_due``. That is cheaper than searching the heap.
        self._heap: list[tuple[Instant, int, _Thing]] = []
        self._order = count() if order is None else order

    def put(self, thing: _Thing, due: Instant) -> None:
        """Add the value, or change its due time."""
        order = next(self._order)
        self._due[thing] = (due, order)
        heapq.heappush(self._heap, (due, order, thing))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(due, order, thing) for thing, (due, order) in self._due.items()]
            heapq.heapify(self._heap)

    def hasten(self, thing: _Thing, due: Instant) -> None:
        """Add the value, or make it due earlier."""
        present = self.due(thing)
        if present is None or due < present:
            self.put(thing, due)

    def remove(self, thing: _Thing) -> None:
        """Remove the value, if it is there."""
        self._due.pop(thing, None)

    def due(self, thing: _Thing) -> Instant | None:
        """The due time; ``None`` if the value is not there."""
        entry = self._due.get(thing)
        return None if entry is None else entry[0]

    def take(self, now: Instant, limit: int) -> list[_Thing]:
        """Remove and return at most ``limit`` values that are due."""
        taken: list[_Thing] = []
        while len(taken) < limit and self._heap and self._heap[0][0] <= now:
            due, order, thing = heapq.heappop(self._heap)
            if self._due.get(thing) == (due, order):
                del self._due[thing]
                taken.append(thing)
        return taken

    def next_due(self) -> Instant | None:
        """The earliest due time; ``None`` if there is no value."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._due)


class TimesInTurn(Generic[_Thing]):
    """Values of tenants with due times. If many are due, tenants take turns."""

    def __init__(self) -> None:
        self._order = count()
        self._of_tenants: dict[TenantId, DueTimes[_Thing]] = {}
        self._turns: DueTimes[TenantId] = DueTimes(self._order)
        """When each tenant's next value is due; if it is due already, since its last turn."""

    def put(self, tenant: TenantId, thing: _Thing, due: Instant) -> None:
        """Add the value, or change its due time."""
        self._of_tenants.setdefault(tenant, DueTimes(self._order)).put(thing, due)
        self._turns.hasten(tenant, due)

    def remove(self, tenant: TenantId, thing: _Thing) -> None:
        """Remove the value, if it is there."""
        own = self._of_tenants.get(tenant)
        if own is not None:
            own.remove(thing)

    def take(self, now: Instant, limit: int) -> list[_Thing]:
        """Remove and return at most ``limit`` values that are due, as many of each tenant."""
        taken: list[_Thing] = []
        served: list[TenantId] = []
        has_more: list[TenantId] = []

        def take_some(tenants: Sequence[TenantId]) -> list[TenantId]:
            """Take as many of each; returns the tenants that may have more."""
            share = max(1, (limit - len(taken)) // len(tenants))
            left = []
            for tenant in tenants:
                some = self._of_tenants[tenant].take(now, min(share, limit - len(taken)))
                taken.extend(some)
                left += [tenant] if len(some) == share else []
            return left

        # Of some tenants all values may have been removed: then others are looked at.
        while len(taken) < limit and (waiting := self._turns.take(now, limit - len(taken))):
            served += waiting
            has_more += take_some(waiting)
        while len(taken) < limit and has_more:
            has_more = take_some(has_more)
        for tenant in served:
            due = self._of_tenants[tenant].next_due()
            if due is None:
                del self._of_tenants[tenant]
            else:
                self._turns.put(tenant, max(now, due))
        return taken
