"""Replicas: what each server process reports about itself, and what is known of the others.

Every replica writes one small summary into the store every three seconds: its version, the health
of its backends, the workers that called it, and what other services contribute. ``read`` returns
the summaries of all replicas. One that has not reported for 15 s is missing; its last summary is
kept for ten minutes. A replica that stops in order removes its summary.

    reporter.contribute("admission", admission_figures)    # a part, built at every report
    view = await reporter.read()
    view.missing                                           # replicas that do not report
    [each.summary.parts.get("admission") for each in view.replicas]

All times in a summary are those of the store's clock: a replica learns its offset from the answers
to its reports.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

import msgspec

from stanchion.core import __version__
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.upgrade import LEVEL
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, BackendFull, BackendUnavailable
from stanchion.ports.records import StoredSummaries, StoredSummary
from stanchion.ports.store import Store
from stanchion.services.context import Backends
from stanchion.services.log import OutageLogger
from stanchion.services.scheduler import WorkerSighting

REPORT_S: Final = 3.0
MISSING_MS: Final = 15_000
KEPT_MS: Final = 10 * 60 * 1000
CHECK_S: Final = 1.0
_NO_LOCK: Final = "run/-"
"""The name of a lock that is never held."""
_FAREWELL_S: Final = 0.5
"""How long a replica that stops waits for the store to remove its summary."""
_WORKERS_CHARS_MAX: Final = 100_000
_TOPICS_CHARS_MAX: Final = 100_000
_TOPICS_OF_WORKER_MAX: Final = 20

Ping: TypeAlias = Callable[[], Awaitable[None]]
Contribute: TypeAlias = Callable[[], JsonValue]
_Entry = TypeVar("_Entry")


class SeenWorker(msgspec.Struct, frozen=True):
    """A worker that called a replica."""

    worker_id: str
    tenant: TenantId | None
    """The one tenant whose jobs it asks for; ``None`` for all."""
    topics: tuple[Topic, ...]
    """At most 20 of its topics, those that it asked for last."""
    jobs: int
    last_seen_at: Instant
    version: str | None = None


class AskedTopic(msgspec.Struct, frozen=True):
    """When a worker last asked for jobs of a topic."""

    topic: Topic
    tenant: TenantId | None
    """The tenant of the worker that asked; ``None``: it takes jobs of all tenants."""
    asked_at: Instant


class ReplicaSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica reports about itself. Replicas of other versions may lack members."""

    version: str = ""
    level: int = 0
    """See ``core.upgrade``."""
    started_at: Instant = Instant(0)
    clock_offset_ms: int = 0
    """How far the clock of the replica is ahead of the store's."""
    settings_revision: int = 0
    store: str = "ok"
    locks: str = "ok"
    bus: str = "ok"
    runs_held: int = 0
    """Runs that the replica is advancing now."""
    workers: tuple[SeenWorker, ...] = ()
    topics: tuple[AskedTopic, ...] = ()
    left_out: int = 0
    """Workers and topics that did not fit."""
    parts: dict[str, JsonValue] = {}
    """What other services contribute, by name."""


class SeenReplica(msgspec.Struct, frozen=True):
    """A replica, and what it last reported."""

    replica: str
    seen_at: Instant
    is_missing: bool
    """Whether it has not reported for 15 s."""
    summary: ReplicaSummary


class ReplicaView(msgspec.Struct, frozen=True):
    """All replicas as of one instant of the store's clock, sorted by name."""

    at: Instant
    replicas: tuple[SeenReplica, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """The replicas that have not reported for 15 s."""
        return tuple(each.replica for each in self.replicas if each.is_missing)


class ReplicaReporter:
    """Reports the summary of this replica, and reads those of all."""

    def __init__(
        self,
        replica: str,
        backends: Backends,
        *,
        runs_held: Callable[[], int],
        settings_revision: Callable[[], int],
        workers: Callable[[], tuple[WorkerSighting, ...]],
        lock_error: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``lock_error``: why this replica does not call the lock store now, if it does not."""
        self.replica = replica
        self._store: Store = backends.store
        self._clock: Clock = backends.clock
        self._locks = backends.locks
        self._lock_error = lock_error
        self._pings: Mapping[str, Ping] = {"locks": self._look_at_locks, "bus": backends.bus.ping}
        self._runs_held = runs_held
        self._settings_revision = settings_revision
        self._workers = workers
        self._parts: dict[str, Contribute] = {}
        self._began = self._clock.moment()
        self._started_at: Instant | None = None
        self._store_time: tuple[Instant, Moment] | None = None
        """A time of the store, and when it was that time here."""
        self._offset_ms = 0
        self._health: dict[str, str] = {}
        self._down_since: dict[str, Instant] = {}
        self._stored: tuple[StoredSummaries, Moment] | None = None

    def contribute(self, name: str, make: Contribute) -> None:
        """Add a part to the summary, built for each report. It must be small."""
        self._parts[name] = make

    async def run(self) -> None:
        """Report every three seconds, until cancelled."""
        outage = OutageLogger("replica_report_failed", "replica_report_recovered")
        while True:
            try:
                await self.report()
            except BackendError as error:
                outage.failed(error)
                self._note("store", is_ok=False)
            else:
                outage.worked()
                self._note("store", is_ok=True)
            await self._clock.sleep(REPORT_S)

    async def report(self) -> None:
        """Write this replica's summary into the store. Raises ``BackendError``."""
        if self._store_time is None:
            sent, before = self._clock.moment(), self._clock.now()
            self._learn(await self._store.now(), sent, before)
        self._health = await check_backends(self._pings)
        for name, said in self._health.items():
            self._note(name, is_ok=said == "ok")
        summary = msgspec.to_builtins(self._summary())
        sent, before = self._clock.moment(), self._clock.now()
        now = await self._store.report_replica(self.replica, summary, keep_ms=KEPT_MS)
        self._learn(now, sent, before)

    async def read(self, *, max_age_ms: int = 0) -> ReplicaView:
        """What all replicas reported last; of this one what it knows now. Raises ``BackendError``.

        This replica is part of the view even before its first report. What the others reported may
        have been read ``max_age_ms`` ago.
        """
        now = self._clock.moment()
        if self._stored is None or now - self._stored[1] > max_age_ms:
            self._stored = (await self._store.replica_summaries(), now)
        stored, read_at = self._stored
        self._store_time = self._store_time or (stored.at, read_at)
        at = Instant(stored.at + self._clock.moment() - read_at)
        found = {each.replica: _seen(each, at) for each in stored.summaries}
        found[self.replica] = SeenReplica(
            self.replica, at, is_missing=False, summary=self._summary()
        )
        return ReplicaView(at, tuple(found[name] for name in sorted(found)))

    def down_since(self, backend: str) -> Instant | None:
        """Since when ``store``, ``locks`` or ``bus`` has not answered; ``None`` if it does.

        It is asked every three seconds.
        """
        return self._down_since.get(backend)

    async def withdraw(self) -> None:
        """Remove this replica's summary: it stops. Without the store the summary expires."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._store.remove_replica(self.replica)

    async def _look_at_locks(self) -> None:
        """Read from the lock store. Its ``ping`` also writes, too often for an idle replica."""
        error = self._lock_error()
        if error is not None:
            raise BackendUnavailable(error)
        if self._locks is not None:
            await self._locks.inspect(_NO_LOCK)

    def _note(self, backend: str, *, is_ok: bool) -> None:
        if is_ok:
            self._down_since.pop(backend, None)
        else:
            now = self._clock.now()
            if self._store_time is not None:
                now = self._instant(self._clock.moment())
            self._down_since.setdefault(backend, now)

    def _learn(self, now: Instant, sent: Moment, before: Instant) -> None:
        """Learn the store's time from an answer: it was that time midway."""
        took_ms = self._clock.moment() - sent
        self._store_time = (now, Moment(sent + took_ms // 2))
        self._offset_ms = before + took_ms // 2 - now
        if self._started_at is None:
            self._started_at = self._instant(self._began)

    def _instant(self, moment: Moment) -> Instant:
        """The time of the store's clock at a moment of this replica's."""
        assert self._store_time is not None
        at, when = self._store_time
        return Instant(at + moment - when)

    def _summary(self) -> ReplicaSummary:
        sightings = self._workers()
        workers, more_workers = _fitting(
            (
                (each.tenant, self._worker(each))
                for each in sorted(sightings, key=lambda each: -each.seen_at)
            ),
            _WORKERS_CHARS_MAX,
        )
        asked: dict[tuple[TenantId | None, Topic], Moment] = {}
        for sighting in sightings:
            for topic, at in sighting.topics.items():
                place = (sighting.tenant, topic)
                asked[place] = max(at, asked.get(place, at))
        topics, more_topics = _fitting(
            (
                (tenant, AskedTopic(topic, tenant, self._instant(at)))
                for (tenant, topic), at in sorted(asked.items(), key=lambda entry: -entry[1])
            ),
            _TOPICS_CHARS_MAX,
        )
        return ReplicaSummary(
            version=__version__,
            level=LEVEL,
            started_at=self._started_at or self._instant(self._began),
            clock_offset_ms=self._offset_ms,
            settings_revision=self._settings_revision(),
            locks=self._health.get("locks", "ok"),
            bus=self._health.get("bus", "ok"),
            runs_held=self._runs_held(),
            workers=workers,
            topics=topics,
            left_out=more_workers + more_topics,
            parts={name: make() for name, make in self._parts.items()},
        )

    def _worker(self, seen: WorkerSighting) -> SeenWorker:
        newest = sorted(seen.topics, key=lambda topic: (-seen.topics[topic], topic))
        return SeenWorker(
            seen.worker_id,
            seen.tenant,
            tuple(sorted(newest[:_TOPICS_OF_WORKER_MAX])),
            seen.jobs,
            self._instant(seen.seen_at),
            seen.version,
        )


async def check_backends(pings: Mapping[str, Ping]) -> dict[str, str]:
    """Ping each backend; returns ``ok``, or what is wrong, by name."""
    words = await asyncio.gather(*(_check(ping) for ping in pings.values()))
    return dict(zip(pings, words, strict=True))


async def _check(ping: Ping) -> str:
    try:
        async with asyncio.timeout(CHECK_S):
            await ping()
    except TimeoutError:
        return f"no answer within {CHECK_S:g} s"
    except BackendFull:
        return "no room left: the disk is full"
    except BackendError:
        # The error's text may contain addresses; it is in the log.
        return "unavailable"
    return "ok"


def _fitting(
    entries: Iterable[tuple[TenantId | None, _Entry]], chars_max: int
) -> tuple[tuple[_Entry, ...], int]:
    """As many entries as fit, in turn of each tenant; and how many do not fit."""
    of_tenant: defaultdict[TenantId | None, int] = defaultdict(int)
    ranked: list[tuple[int, _Entry]] = []
    for tenant, entry in entries:
        ranked.append((of_tenant[tenant], entry))
        of_tenant[tenant] += 1
    ranked.sort(key=lambda each: each[0])
    chars = 0
    for count, (_, entry) in enumerate(ranked):
        chars += len(msgspec.json.encode(entry))
        if chars > chars_max:
            return tuple(entry for _, entry in ranked[:count]), len(ranked) - count
    return tuple(entry for _, entry in ranked), 0


def _seen(stored: StoredSummary, now: Instant) -> SeenReplica:
    try:
        summary = msgspec.convert(stored.summary, ReplicaSummary)
    except msgspec.ValidationError:
        summary = ReplicaSummary()  # of another version
    is_missing = now - stored.seen_at > MISSING_MS
    return SeenReplica(stored.replica, stored.seen_at, is_missing, summary)
