"""The shelf: all that the memory store keeps, and the few changes that several verbs share."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from stanchion.adapters.cursor import write_cursor
from stanchion.adapters.store.memory.ready import ReadyIndex
from stanchion.adapters.store.memory.schedule import Schedule
from stanchion.core.admission import KeyRecord
from stanchion.core.events import Event, Timer
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    Run,
    RunId,
    TenantId,
    WorkflowId,
)
from stanchion.core.transition import TimelineEntry
from stanchion.ports.clock import Clock
from stanchion.ports.records import (
    DeadLetter,
    Document,
    FeedEntry,
    JobState,
    StoredWorkflow,
    Tenant,
)

__all__ = ["Account", "JobFile", "Key", "RunFile", "Shelf", "Shelved"]

_FEED_ENTRIES_MAX: Final = 10_000


@dataclass(slots=True)
class JobFile:
    """A job and where it stands."""

    job: Job
    state: JobState = JobState.READY
    fence: int = 0
    deliveries: int = 0
    worker_id: str | None = None
    expires_at: Instant | None = None
    progress: JsonValue = None


@dataclass(slots=True)
class RunFile:
    """A run and everything that goes when it goes. ``run`` has no items: they are beside it."""

    run: Run
    key: str | None
    items: dict[ItemKey, Item] = field(default_factory=dict)
    inbox: dict[str, Event] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    arrivals: int = 0
    """The number of the run's outbox row: how much was ever put into the inbox."""
    timeline: list[TimelineEntry] = field(default_factory=list)
    jobs: list[JobId] = field(default_factory=list)
    timers: dict[Timer, Instant] = field(default_factory=dict)
    letters: set[str] = field(default_factory=set)
    is_closed: bool = False
    """Whether the run's end has been seen to."""


@dataclass(slots=True)
class Key:
    """What an idempotency key stands for, and until when. It does not age before its run ended."""

    record: KeyRecord
    expires_at: Instant | None = None


@dataclass(slots=True)
class Account:
    """What is kept for a tenant."""

    config: Tenant | None = None
    active: int = 0
    """The count of slots: what admission looks at."""
    holders: set[RunId] = field(default_factory=set)
    """The unfinished runs with a slot: what the count must be equal to."""
    rate_used_until_ms: float = 0.0
    keys: dict[str, Key] = field(default_factory=dict)
    runs: list[tuple[Instant, RunId]] = field(default_factory=list)
    """In the order of their creation."""
    workflows: dict[WorkflowId, list[StoredWorkflow]] = field(default_factory=dict)
    feed: deque[FeedEntry] = field(default_factory=lambda: deque(maxlen=_FEED_ENTRIES_MAX))
    feed_length: int = 0
    """How many entries there ever were."""


class Shelf:
    """The state behind a memory store."""

    def __init__(self, clock: Clock, key_ttl_ms: int) -> None:
        self._clock = clock
        self.key_ttl_ms = key_ttl_ms
        self.runs: dict[RunId, RunFile] = {}
        self.jobs: dict[JobId, JobFile] = {}
        self.accounts: dict[TenantId, Account] = {}
        self.ready = ReadyIndex()
        self.leases: Schedule[JobId] = Schedule()
        self.timers: Schedule[tuple[RunId, Timer]] = Schedule()
        self.outbox: Schedule[RunId] = Schedule()
        self.finished: list[tuple[Instant, RunId]] = []
        """Runs that have ended, in the order of their ends."""
        self.letters: dict[str, tuple[int, DeadLetter]] = {}
        """By id, each with its place in the order of deaths."""
        self.letter_order = count()
        self.documents: dict[str, dict[str, Document]] = {}
        self.audited: TenantId | None = None
        """Where the last audit stopped."""

    def now(self) -> Instant:
        return self._clock.now()

    def now_us(self) -> int:
        return self._clock.now() * 1_000

    def account(self, tenant: TenantId) -> Account:
        """The tenant's account, for writing: opened if there is none."""
        return self.accounts.setdefault(tenant, Account())

    def peek(self, tenant: TenantId) -> Account:
        """The tenant's account, for reading: an empty one if there is none."""
        return self.accounts.get(tenant) or Account()

    def deliver(self, file: RunFile, entry_id: str, event: Event, due: Instant) -> bool:
        """Put an event into a run's inbox and see to its outbox row; ``False`` if it lies there."""
        if entry_id in file.inbox:
            return False
        file.inbox[entry_id] = event
        file.arrivals += 1
        self.outbox.hasten(file.run.id, due)
        return True

    def remove_entries(self, file: RunFile, *entry_ids: str) -> None:
        """Take entries out of a run's inbox; the outbox row goes with the last one."""
        for entry_id in entry_ids:
            file.inbox.pop(entry_id, None)
            file.failures.pop(entry_id, None)
        if not file.inbox:
            self.outbox.remove(file.run.id)

    def record(self, file: RunFile, entries: tuple[TimelineEntry, ...]) -> None:
        """Write lines into a run's timeline and its tenant's feed."""
        if not entries:
            return
        file.timeline.extend(entries)
        account = self.account(file.run.tenant)
        account.feed_length += 1
        position = write_cursor("feed", account.feed_length)
        account.feed.append(FeedEntry(position, file.run.id, entries))

    def add_letter(self, file: RunFile, letter: DeadLetter) -> None:
        """Lay a dead letter by, after all others."""
        file.letters.add(letter.id)
        self.letters[letter.id] = (next(self.letter_order), letter)

    def remove_letter(self, file: RunFile, letter_id: str) -> None:
        """Take a dead letter out."""
        file.letters.discard(letter_id)
        del self.letters[letter_id]

    def close_run(self, file: RunFile) -> None:
        """A run has just ended: its slot is free, its key ages, and nothing can happen to it."""
        file.is_closed = True
        account = self.account(file.run.tenant)
        if file.run.id in account.holders:
            account.holders.remove(file.run.id)
            account.active -= 1
        if file.key is not None:
            account.keys[file.key].expires_at = Instant(self.now() + self.key_ttl_ms)
        self.remove_entries(file, *file.inbox)
        insort(self.finished, (file.run.finished_at or self.now(), file.run.id))


class Shelved:
    """A part of the store: verbs over the one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
