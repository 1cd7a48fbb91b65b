"""Cadence: how soon a replica acts on what it hears, and how often it asks.

A bell that is not heeded is replaced by a poll, and a call that is repeated without cause changes
nothing. So neither breaks another invariant. Here each replica has a record of its bells, polls and
refusals, and each rule is one of those that the modules of ``services`` state.

What a rule expects of the next moment is compared only if the replica ran all the time and none of
the calls that it needs met a fault.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from stanchion.core.model import Instant, JobId, RunId, TenantId, Topic
from stanchion.core.topic_limits import TokenGrant, TokenPool
from stanchion.ports.bus import Bell
from stanchion.ports.records import JobLease
from stanchion.services.gate_answers import GateCode, GateFailed, GateFull, GateOverBudget
from stanchion.sim.history import History
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.network import SimLink

HEEDED_S: Final = 0.15
"""A bell is acted on within this time."""
_IDLE_S: Final = 0.2
"""A request of a worker that has not asked the store for so long waits for a bell."""
_CALL_S: Final = 2.5
"""A call to the store has ended after this time, also one that met a fault."""
WATCHED_S: Final = 1.4
"""Watched leases are polled once a second."""
CLOSED_S: Final = 0.9
"""How long a pool without a token is not asked."""
_EARLY: Final = 0.985
"""A replica's clock is at most a hundredth faster, and counts milliseconds."""
_CONFLICTS_MAX: Final = 20
_OUTAGE_FORGOTTEN_S: Final = 30.0
_RETRY_MS: Final = (1_000, 10_000)
_FULL_MS_MAX: Final = 30_000
_GAPS_UNKNOWN_MS: Final = (2_000.0, 2_000.0)
_NEWEST: Final = 0.3
"""The weight of the newest gap between the ends of two runs."""
_ANSWERED_S: Final = 0.06
"""A replica that drains answers the requests that wait within this time."""
_DEFERRED_S: Final = 2.5
_PROMPT: Final = "bells are acted on at once"
_CAUSELESS: Final = "nothing is asked again without cause"
_LOOK: Final = frozenset(
    {
        *("lease_jobs", "ready_tenants", "take_tokens", "renew_tokens", "release_tokens"),
        *("list_documents", "lost_leases", "pool_uses", "ready_topics", "document"),
    }
)
"""The calls of one look for jobs, limits, settings or lost leases."""
ACTS: Final = frozenset({"lease_jobs", "ready_tenants", "take_tokens", "list_documents"}) | {
    *("document", "lost_leases", "pool_uses", "load"),
}
"""The commands that are reported when the store executes them."""


# ── Rules ────────────────────────────────────────────────────────────────────────────────────────


def heeded(replica: str, what: str, *, late_s: float) -> Iterator[str]:
    """What a replica hears it acts on at once."""
    if late_s > HEEDED_S:
        yield f"{replica}: {what} was not acted on for {late_s:.2f} s"


def is_polled(replica: str, job_id: str, *, unasked_s: float) -> Iterator[str]:
    """A watched lease is asked about once a second, whatever bells were lost."""
    if unasked_s > WATCHED_S:
        yield f"{replica}: the store was not asked about {job_id} for {unasked_s:.2f} s"


def asked_when_open(replica: str, pool: str, *, early_s: float) -> Iterator[str]:
    """A pool that had no token is not asked before it may have one."""
    if early_s > 0:
        yield f"{replica}: {pool} was asked {early_s:.3f} s before it may have room"


def named_once(replica: str, verb: str, things: Sequence[object]) -> Iterator[str]:
    """A command names each thing once."""
    if len(set(things)) < len(things):
        yield f"{replica}: {verb} names something twice: {[*things]}"


def read_again(replica: str, name: str, *, conflicts: int, is_read: bool) -> Iterator[str]:
    """After a conflict the run is read again, under the same lease, up to a number of times."""
    if not is_read and conflicts < _CONFLICTS_MAX:
        yield f"{replica} left {name} after {conflicts} conflicts in a row"


def grows_with_outage(replica: str, *, retry_after_ms: int, lasted_s: float) -> Iterator[str]:
    """The longer an outage lasts, the later callers shall retry: half of the window is jitter."""
    low_ms, high_ms = _RETRY_MS
    latest_ms = min(high_ms, 2 * low_ms + 1_000 * lasted_s / 2)
    if retry_after_ms < max(low_ms, latest_ms / 2) * _EARLY - 50:
        yield f"{replica}: an outage lasts {lasted_s:.1f} s, and Retry-After is {retry_after_ms} ms"


def full_says_when(
    replica: str,
    *,
    retry_after_ms: int,
    gap_ms: float,
    since_end_ms: int,
    ahead: int,
    unanswered: int = 0,
    gap_ms_max: float = 0.0,
) -> Iterator[str]:
    """A full tenant's caller is told when one of the next slots will be free.

    ``ahead`` callers were refused since the tenant's last run ended, which is ``since_end_ms`` ago,
    and perhaps those that went ``unanswered``; ``gap_ms`` is the time between two ends, or between
    it and ``gap_ms_max`` if that is longer.
    """
    gap_ms = max(gap_ms, since_end_ms)
    # A replica's clock is at most a hundredth faster or slower than that of the record.
    shortest_ms, longest_ms = gap_ms * _EARLY, max(gap_ms, gap_ms_max) / _EARLY
    latest_ms = min(max(longest_ms * (1 + ahead + unanswered), 2_000), _FULL_MS_MAX)
    least_ms = min(max(shortest_ms * (1 + ahead), 2_000), _FULL_MS_MAX)
    earliest_ms = min(max(shortest_ms / 2, 1_000), least_ms / 2)
    if not earliest_ms - 2 <= retry_after_ms <= latest_ms + 2:
        yield (
            f"{replica}: {ahead} callers are ahead, slots are free every {gap_ms:.0f} ms,"
            f" and Retry-After is {retry_after_ms} ms"
        )


def _gap_ms(span_ms: float) -> float:
    """The time between two ends, as it is averaged. The time of day may have been set back."""
    return min(_FULL_MS_MAX, max(0.0, span_ms))


# ── The record of one replica ────────────────────────────────────────────────────────────────────


class _Expected(NamedTuple):
    at_s: float
    pauses: tuple[int, int]
    what: str


class _Wait(NamedTuple):
    since_s: float
    topics: Collection[Topic]


@dataclass(slots=True)
class _Pool:
    """A pool that this replica found without a token."""

    closed_at_s: float = 0.0
    open_at_s: float = 0.0
    timer_at_s: float = 0.0
    """When the time of its rate comes. Then it is asked whatever was the reason of a refusal."""


@dataclass(slots=True)
class _Ends:
    """The ends of a tenant's runs that a replica has committed."""

    last_at: tuple[int, int]
    """When the last run ended or, before the first end, the first caller was refused: at the
    earliest and at the latest. Of rows of a batch only the answer is seen, which may come later."""
    gap_ms: tuple[float, float] | None = None
    """The shortest and the longest time between two ends by which the replica may answer."""
    is_sure: bool = True
    """Whether the replica noted the first of these times: not if its caller was not refused."""
    refused: int = 0
    unanswered: int = 0
    """Callers that left: they may have been refused."""


@dataclass(slots=True)
class CadenceRecord:
    """What one replica heard, asked and was told, and when."""

    history: History
    process: Process
    clock: LoopClock
    link: SimLink
    """Its way to the store."""
    hears_bells: bool
    """Whether its bells are reported."""
    is_leaving: Callable[[], bool]
    is_leased: Callable[[JobId, int], bool]
    """Whether a job is leased with a fence: then its worker must learn that it is not any more."""
    knows_ends: bool = True
    """Whether every end that it was told of is recorded: not those that a failover lost."""
    uses_locks: bool = False
    """Whether its gate has asked for a lock: then not all outages are of the store."""
    _born_s: float = field(init=False)
    _expected: dict[str, _Expected] = field(default_factory=dict)
    """By the command that must follow."""
    _waits: list[_Wait] = field(default_factory=list)
    """Requests of workers that wait for jobs."""
    _looked_s: float = -1e9
    _looks: dict[asyncio.Task[Any] | None, float] = field(default_factory=dict)
    """When the look for jobs of each task began: what it asks may have been decided then."""
    _watches: list[dict[tuple[JobId, int], float]] = field(default_factory=list)
    """By held call: when the store was last asked about each of its leases."""
    _pools: dict[str, _Pool] = field(default_factory=dict)
    _asked: dict[tuple[str, str], float] = field(default_factory=dict)
    """By pool and first token: when the store was asked."""
    _room_s: float = -1e9
    """When a bell for room in a pool was last heard."""
    _limits: object = None
    _conflicts: dict[RunId, tuple[int, bool]] = field(default_factory=dict)
    """By run: conflicts in a row, and whether it was read since."""
    _put_off: dict[RunId, float] = field(default_factory=dict)
    _outage: tuple[float, float] | None = None
    """When starts failed first and last, if none was answered since."""
    _ends: dict[TenantId, _Ends] = field(default_factory=dict)
    _rows: Counter[TenantId] = field(default_factory=Counter)
    """Rows of batches that are being judged, by tenant."""

    def __post_init__(self) -> None:
        self._born_s = self._now_s()

    def _now_s(self) -> float:
        return self.process.loop.now_s

    # ── Bells ────────────────────────────────────────────────────────────────────────────────────

    def heard(self, bell: Bell, note: str) -> None:
        """A bell has reached the replica."""
        now_s = self._now_s()
        if bell is Bell.ROOM:
            self._room_s = now_s
            self._pools.pop(note, None)
        if bell is Bell.READY and self._is_waited_for(Topic(note), now_s):
            self._expect("lease_jobs", f"the bell for {note}", now_s)
        elif bell is Bell.SETTINGS and note == "limits":
            self._expect("list_documents", "the bell for topic limits", now_s)
        elif bell is Bell.SETTINGS and not note:
            self._expect("document", "the bell for settings", now_s)

    def executed(self, verb: str, arguments: tuple[Any, ...]) -> None:
        """The store has executed a command of the replica."""
        now_s = self._now_s()
        match verb:
            case "lost_leases":
                for watch in self._watches:
                    keys = {(each.job_id, each.fence) for each in arguments[0]}
                    watch.update(dict.fromkeys(keys & watch.keys(), now_s))
            case "pool_uses":
                said = named_once(self.process.name, verb, arguments[0])
                self.history.check(_CAUSELESS, said)
            case "load":
                known = self._conflicts.get(arguments[0])
                if known is not None:
                    self._conflicts[arguments[0]] = (known[0], True)
            case "list_documents" if arguments[0] != "limit":
                pass
            case "document" if arguments[0] != "settings":
                pass
            case _:
                self._met(verb, now_s)
        if verb in {"lease_jobs", "ready_tenants", "take_tokens"}:
            self._looked_s = now_s

    def _is_waited_for(self, topic: Topic, now_s: float) -> bool:
        """Whether a worker waits for the topic, and none is being answered just now."""
        return now_s - self._looked_s >= _IDLE_S and any(
            topic in each.topics and now_s - each.since_s >= _IDLE_S for each in self._waits
        )

    def _expect(self, verb: str, what: str, now_s: float) -> None:
        # Its loops begin a moment after it was born.
        if self.hears_bells and now_s - self._born_s > _CALL_S and verb not in self._expected:
            self._expected[verb] = _Expected(now_s, self._pauses(), what)

    def _met(self, verb: str, now_s: float) -> None:
        expected = self._expected.pop(verb, None)
        if expected is not None and self._is_calm(expected.at_s, expected.pauses):
            late_s = now_s - expected.at_s
            said = heeded(self.process.name, expected.what, late_s=late_s)
            self.history.check(_PROMPT, said)

    def _pauses(self) -> tuple[int, int]:
        """How often the replica and the store have been paused; a pause counts when it is over."""
        server = self.link.server.process
        return self.process.pauses, server.pauses - server.is_still

    def _is_calm(self, since_s: float, pauses: tuple[int, int]) -> bool:
        """Whether the replica and the store ran since then, and no call of a look met a fault."""
        server, faults = self.link.server, self.link.troubled_at_s
        return (
            pauses == self._pauses()
            and not (server.process.is_still or server.is_down or self.is_leaving())
            and all(faults.get(verb, -1e9) < since_s - _CALL_S for verb in _LOOK)
        )

    # ── Requests that wait ───────────────────────────────────────────────────────────────────────

    @contextmanager
    def waits_for_jobs(self, topics: Collection[Topic]) -> Iterator[None]:
        """A worker's request for jobs is served."""
        wait = _Wait(self._now_s(), topics)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
            self._met("lease_jobs", self._now_s())

    @contextmanager
    def looks_for_jobs(self) -> Iterator[None]:
        """A task looks for jobs once."""
        task = asyncio.current_task()
        self._looks[task] = self._now_s()
        try:
            yield
        finally:
            self._looks.pop(task, None)

    @contextmanager
    def watches(self, leases: Sequence[JobLease], lost: Mapping[JobId, object]) -> Iterator[None]:
        """A worker's call is held until one of its leases is lost; ``lost`` is filled by then."""
        began_s, pauses = self._now_s(), self._pauses()
        watch = {(each.job_id, each.fence): began_s for each in leases}
        self._watches.append(watch)
        try:
            yield
        finally:
            # Not remove(): two calls may watch the same leases, and equal ones are not the same.
            self._watches = [each for each in self._watches if each is not watch]
            now_s = self._now_s()
            if self._is_calm(min(began_s, now_s - WATCHED_S), pauses):
                for (job_id, fence), asked_s in watch.items():
                    if job_id not in lost and self.is_leased(job_id, fence):
                        said = is_polled(self.process.name, job_id, unasked_s=now_s - asked_s)
                        self.history.check("watched leases are polled", said)

    def drains(self) -> tuple[float, tuple[int, int]]:
        """The replica begins to drain. Returns what ``drained`` is to be told."""
        return self._now_s(), self._pauses()

    def drained(self, since: tuple[float, tuple[int, int]]) -> None:
        """The replica ends; it has drained since then. Requests that waited are answered."""
        since_s, pauses = since
        if self._now_s() - since_s < _ANSWERED_S or pauses != self._pauses():
            return
        is_calm = all(self.link.troubled_at_s.get(verb, -1e9) < since_s - _CALL_S for verb in _LOOK)
        if is_calm and not self.link.server.process.is_still and not self.link.server.is_down:
            for wait in self._waits:
                said = [f"{self.process.name} ends, and does not answer a worker that waits"]
                self.history.check(_PROMPT, said if wait.since_s < since_s else [])

    # ── Topic limits ─────────────────────────────────────────────────────────────────────────────

    def takes_tokens(self, pool: TokenPool, tokens: Sequence[str]) -> None:
        """The replica is about to ask for tokens."""
        now_s = self._now_s()
        self._asked[pool.name, tokens[0]] = now_s
        known = self._pools.get(pool.name)
        began_s = self._looks.get(asyncio.current_task(), 0.0)
        if known is not None and self.hears_bells and began_s >= known.closed_at_s:
            early_s = known.open_at_s - now_s
            said = asked_when_open(self.process.name, pool.name, early_s=early_s)
            self.history.check(_CAUSELESS, said)

    def took_tokens(self, pool: TokenPool, tokens: Sequence[str], grant: TokenGrant) -> None:
        """The answer has arrived."""
        now_s = self._now_s()
        sent_s = self._asked.pop((pool.name, tokens[0]), -1e9)
        # A bell is heard here before the replica's services hear it, at the same moment.
        is_told = self._room_s >= sent_s or any(
            sent_s <= each.timer_at_s <= now_s for each in self._pools.values()
        )
        if len(grant.tokens) == len(tokens) or is_told:
            return
        wait_ms = grant.retry_after_ms if grant.is_rate_spent else 0
        known = self._pools.setdefault(pool.name, _Pool())
        known.closed_at_s = now_s
        known.open_at_s = now_s + (wait_ms / 1_000 or CLOSED_S) * _EARLY - 0.002
        if known.timer_at_s > now_s:
            known.open_at_s = min(known.open_at_s, known.timer_at_s)
        elif wait_ms:
            known.timer_at_s = now_s + wait_ms / 1_000

    def limits_came(self, limits: object) -> None:
        """The replica has read the topic limits: others than before let it ask every pool."""
        if limits != self._limits:
            self._limits = limits
            self._pools.clear()

    # ── Runs ─────────────────────────────────────────────────────────────────────────────────────

    def conflicted(self, run_id: RunId) -> None:
        """A commit was told that the run has changed."""
        before, _ = self._conflicts.get(run_id, (0, True))
        self._conflicts[run_id] = (before + 1, False)

    def committed(self, run_id: RunId) -> None:
        """A commit was told that it is done."""
        if self._conflicts:
            self._conflicts.pop(run_id, None)

    def left(self, name: str, *, is_done: bool) -> None:
        """A hold of a run has ended; ``is_done``: nothing was raised, and its lease is trusted."""
        if not self._conflicts:
            return
        known = self._conflicts.pop(RunId(name.partition("/")[2]), None)
        if known is not None and is_done:
            conflicts, is_read = known
            said = read_again(self.process.name, name, conflicts=conflicts, is_read=is_read)
            self.history.check("a conflict is tried again", said)

    def puts_off(self, run_id: RunId) -> None:
        """A call to advance the run is to be repeated later: bus or store must hear of it."""
        now_s = self._now_s()
        for other, at_s in self._put_off.items():
            said = f"{self.process.name}: the call of {other} was put off, and is not deferred"
            is_late = now_s - at_s > _DEFERRED_S
            self.history.check("calls are deferred", [said] if is_late else [])
        self._put_off[run_id] = now_s

    def deferred(self, run_id: RunId) -> None:
        """The bus or the store was told."""
        self._put_off.pop(run_id, None)

    # ── Callers ──────────────────────────────────────────────────────────────────────────────────

    def ended(self, tenant: TenantId) -> None:
        """The replica has committed the end of a run that held a slot."""
        now, known = self.clock.now(), self._ends.get(tenant)
        gap_ms, is_sure = None, True
        if known is not None:
            earliest, latest = known.last_at
            newest = _gap_ms(now - latest), _gap_ms(now - earliest)
            gap_ms = newest
            if known.gap_ms is not None:
                shortest, longest = known.gap_ms
                gap_ms = (
                    shortest + _NEWEST * (newest[0] - shortest),
                    longest + _NEWEST * (newest[1] - longest),
                )
            if not known.is_sure:
                # Else this end is the first time that it has noted, or this gap its first.
                other = _GAPS_UNKNOWN_MS if known.gap_ms is None else newest
                gap_ms = min(gap_ms[0], other[0]), max(gap_ms[1], other[1])
                is_sure = known.gap_ms is not None
        self._ends[tenant] = _Ends((now, now), gap_ms, is_sure)

    def _full(self, tenant: TenantId, retry_after_ms: int | None) -> None:
        """A caller of a full tenant was refused."""
        now = self.clock.now()
        known = self._ends.setdefault(tenant, _Ends((now, now)))
        if not known.is_sure and known.gap_ms is None:
            known.last_at, known.is_sure = (known.last_at[0], now), True
        if retry_after_ms is not None and self.knows_ends:
            earliest, latest = known.last_at
            shortest, longest = known.gap_ms or _GAPS_UNKNOWN_MS
            said = full_says_when(
                self.process.name,
                retry_after_ms=retry_after_ms,
                gap_ms=shortest,
                since_end_ms=max(0, now - latest),
                ahead=known.refused,
                unanswered=known.unanswered + self._rows[tenant],
                gap_ms_max=max(longest, now - earliest),
            )
            self.history.check("delays within policy", said)
        known.refused += 1

    @contextmanager
    def asks_gate(self, tenant: TenantId, rows: int) -> Iterator[Instant]:
        """A start is judged, or so many rows of a batch, whose answers come together.

        Yields the time of the replica.
        """
        self._rows[tenant] += rows
        asked_at = self.clock.now()
        try:
            yield asked_at
        except BaseException:
            self._unanswered(tenant, max(1, rows), asked_at, is_refused=False)
            raise
        finally:
            self._rows[tenant] -= rows

    def _unanswered(
        self, tenant: TenantId, count: int, asked_at: Instant, *, is_refused: bool
    ) -> None:
        """So many callers were refused, or may have been, at times that are not known."""
        now = self.clock.now()
        known = self._ends.setdefault(tenant, _Ends((asked_at, now), is_sure=is_refused))
        if is_refused and not known.is_sure and known.gap_ms is None:
            known.last_at, known.is_sure = (known.last_at[0], now), True
        known.unanswered += count

    def gated(
        self, tenant: TenantId, answer: object, *, batch_asked_at: Instant | None = None
    ) -> None:
        """A start was answered. ``batch_asked_at``: the batch of which it is a row was asked."""
        if isinstance(answer, GateFull | GateOverBudget) and batch_asked_at is not None:
            # It was refused a while ago, perhaps before the last end.
            is_refused = isinstance(answer, GateFull)
            self._unanswered(tenant, 1, batch_asked_at, is_refused=is_refused)
        elif isinstance(answer, GateFull):
            self._full(tenant, answer.retry_after_ms)
        elif isinstance(answer, GateOverBudget) and answer.over.is_held:
            self._full(tenant, None)
        if not isinstance(answer, GateFailed) or answer.code is GateCode.GATE_BUSY:
            return
        if batch_asked_at is not None:
            return  # the row failed a while ago, perhaps before the store last answered
        now_s = self._now_s()
        began_s, failed_s = self._outage or (now_s, now_s)
        if now_s - failed_s > _OUTAGE_FORGOTTEN_S * _EARLY:
            began_s = now_s
        self._outage = (began_s, now_s)
        if not self.uses_locks:
            said = grows_with_outage(
                self.process.name,
                retry_after_ms=answer.retry_after_ms,
                lasted_s=now_s - began_s,
            )
            self.history.check("delays within policy", said)

    def store_answered(self) -> None:
        """The store has answered a start: an outage is over."""
        self._outage = None
