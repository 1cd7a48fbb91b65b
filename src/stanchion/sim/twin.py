"""Twins: simulated days on a real store, with the memory store beside it.

Every command is executed by both, in the same step and at the same time of the same clock.
Replicas get the answers of the real store, the lead. The memory store must give the same ones; the
ledger compares its state. The lead is SQLite, whose threads are replaced by calls, each a
transaction of its own, and repeated in batches (``sim.batches``); the tests have one on a Valkey
server (``tests/sim/valkey.py``).

Which of the ready jobs are leased is up to a store, within its promises: the memory store leases
those that the lead has leased, and compares them with what it has ready. Cursors are a store's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import msgspec

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.queue import PROMOTED_AT_ONCE_MAX
from stanchion.core.why import OpenJob, RunFacts
from stanchion.ports.clock import Clock
from stanchion.ports.records import (
    FeedEntry,
    InboxEntry,
    JobState,
    LeasedJob,
    Loaded,
    OldestWaits,
    OutboxRow,
    Page,
    SlotAudit,
)
from stanchion.sim.batches import SqlitePair
from stanchion.sim.servers import SimStore

_Compare = Callable[[str | None], None]
_ALONE: Final = frozenset({"open", "close", "ping", "prepare_admissions"})
"""Methods of a store that are no commands."""
_CURSORS: Final = frozenset({"cursor", "after"})
"""Arguments whose values are of the store that issued them."""
_UNORDERED: Final = frozenset({"fire_timers", "expire_jobs"})
"""Commands whose answers have no order that is promised."""
_EXPIRED: Final = ("timed_out:", "died:")
"""The ids of inbox entries that ``expire_jobs`` writes."""
_FIRED: Final = "timer:"
"""Of those that ``fire_timers`` writes. They end with the time that was due."""
_SHOWN: Final = 300


class TwinStore(SimStore):
    """A real store that leads, and a memory store that must answer the same."""

    def __init__(self, clock: Clock, lead: Callable[[Clock], object] = SqlitePair) -> None:
        super().__init__(clock)
        self._state.promoted_at_once_max = PROMOTED_AT_ONCE_MAX
        self.lead = lead(clock)
        """The real store."""
        self._is_following = False
        """Whether the memory store executes a command, for which it may call others."""
        self.compare: _Compare = lambda _difference: None
        """Called with each command: how the answers differ, or ``None``."""
        self._cursors: dict[tuple[str, str], str] = {}
        """For each cursor or position of the lead in a list, that of the memory store."""
        led: dict[str, Callable[..., Coroutine[Any, Any, object]]] = {
            "lease_jobs": self._lease_the_same,
            "ready_tenants": self._name_the_same,
            "oldest_waits": self._wait_the_same,
            "take_outbox": self._take_the_same,
            "confirm_outbox": self._confirm_the_same,
            "defer_outbox": self._defer_the_same,
        }
        self._rows: dict[OutboxRow, OutboxRow] = {}
        """For each row that the lead has handed out, that of the memory store."""
        for verb, method in vars(SqliteStore).items():
            if callable(method) and not verb.startswith("_") and verb not in _ALONE:
                follow = getattr(self, verb)
                vars(self)[verb] = self._both(verb, getattr(self.lead, verb), follow, led.get(verb))

    def _both(
        self,
        verb: str,
        lead: Callable[..., Coroutine[Any, Any, object]],
        follow: Callable[..., Coroutine[Any, Any, object]],
        led: Callable[..., Coroutine[Any, Any, object]] | None,
    ) -> Callable[..., Coroutine[Any, Any, object]]:
        async def both(*arguments: Any, **named: Any) -> object:  # noqa: ANN401 - any verb's
            if self._is_following:
                return await follow(*arguments, **named)
            answer = await _outcome(lead(*arguments, **named))
            self._is_following = True
            if led is not None:
                other = await _outcome(led(answer, *arguments, **named))
            else:
                for name in _CURSORS & named.keys():
                    named[name] = self._cursors.get((repr(arguments), named[name] or ""))
                other = await _outcome(follow(*arguments, **named))
            self._is_following = False
            for place, own in zip(_places(answer), _places(other), strict=False):
                self._cursors[repr(arguments), place] = own
            one, two = _comparable(verb, answer), _comparable(verb, other)
            said = None
            if one != two:
                said = f"{verb}{arguments}: "[:_SHOWN] + _difference(one, two)
            self.compare(said)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return both

    async def _lease_the_same(
        self,
        leased: Collection[LeasedJob],
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> object:
        """Lease the same jobs: each the next of its tenant's queue, and as many as there are.

        Jobs whose leases expired join the queue again, several in one step and in any order.
        """
        state = self._state
        found: list[LeasedJob] = []
        for each in leased:
            job = each.job
            places = state.ready.places(job.topic, job.tenant)
            place = places.get(job.id)
            if place is None or job.topic not in topics or tenant not in {None, job.tenant}:
                return f"{job.id} is not asked for, or not ready"
            up_to = [at for at, order in places.items() if order <= place]
            if place and not all(state.jobs[at].deliveries for at in up_to):
                return f"{job.id} is not the next one: its place is {place}"
            state.ready.remove(job)
            found.append(self._lease(state.jobs[job.id], worker_id, ttl_ms))
        is_late = not_after is not None and state.now() > not_after
        if len(found) < max_jobs and not is_late:
            left = state.ready.tenants(topics, 1, tenant, ())
            if left:
                return f"{len(found)} of {max_jobs} jobs, and ready are {left}"
        return tuple(found)

    async def _name_the_same(
        self,
        named: Mapping[TenantId, int],
        topics: Collection[Topic],
        *,
        limit: int,
        tenant: TenantId | None = None,
        but_not: Collection[TenantId] = (),
    ) -> object:
        """Count the ready jobs of the same tenants, of which there are as many as asked for."""
        ready = self._state.ready.tenants(topics, len(self._state.accounts) + 1, tenant, but_not)
        if len(named) != min(limit, len(ready)):
            return f"{len(named)} tenants, and ready are {ready}"
        return {each: ready.get(each, 0) for each in named}

    async def _wait_the_same(self, named: object, tenant: TenantId | None) -> object:
        """The oldest waits. A lead with several shards may name a ready job of each."""
        waits = await MemoryStore.oldest_waits(self, tenant)
        if not isinstance(named, OldestWaits) or not {*waits.ready} <= {*named.ready}:
            return waits
        are_ready = all(self._state.jobs[each].state is JobState.READY for each in named.ready)
        return msgspec.structs.replace(waits, ready=named.ready) if are_ready else waits

    # The number of a row, by which a store knows if it has changed, is its own.

    async def _take_the_same(
        self, taken: Collection[OutboxRow], *, limit: int, hold_ms: int
    ) -> object:
        rows = await MemoryStore.take_outbox(self, limit=limit, hold_ms=hold_ms)
        by_run = {row.run_id: row for row in rows}
        if by_run.keys() != {row.run_id for row in taken}:
            return rows
        self._rows |= {row: by_run[row.run_id] for row in taken}
        return taken

    async def _confirm_the_same(self, _: object, rows: Collection[OutboxRow]) -> None:
        await MemoryStore.confirm_outbox(self, [self._rows.get(row, row) for row in rows])

    async def _defer_the_same(self, _: object, row: OutboxRow, *, delay_ms: int) -> None:
        await MemoryStore.defer_outbox(self, self._rows.get(row, row), delay_ms=delay_ms)


def _places(answer: object) -> list[str]:
    """The cursors and positions in an answer."""
    match answer:
        case str():
            return [answer]
        case Page(cursor=str(cursor)) | SlotAudit(cursor=str(cursor)):
            return [cursor]
        case tuple():
            return [each.position for each in answer if isinstance(each, FeedEntry)]
        case _:
            return []


async def _outcome(command: Coroutine[Any, Any, object]) -> object:
    try:
        return await command
    except Exception as error:  # noqa: BLE001 - compared, and raised for the caller
        return error


def _comparable(verb: str, answer: object) -> object:
    """An answer without what a store may choose, and with the sequences of JSON as lists."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    if isinstance(answer, Loaded):
        return (_plain(answer.run), [_plain(each) for each in _in_some_order(answer.inbox)])
    if isinstance(answer, Page):
        return (_plain(answer.items), answer.cursor is None)
    if isinstance(answer, SlotAudit):
        return answer.drifts  # tenants without runs may be left out
    if verb == "feed_position":
        return None
    if verb == "feed" and isinstance(answer, tuple):
        return [_plain(msgspec.structs.replace(each, position="")) for each in answer]
    if isinstance(answer, RunFacts):
        letters = sorted(answer.letters, key=lambda each: (each.at, each.id))
        found = tuple(map(_without_place, answer.jobs))
        return _plain(msgspec.structs.replace(answer, letters=tuple(letters), jobs=found))
    if verb in _UNORDERED and isinstance(answer, Collection):
        return sorted(map(repr, answer))
    return _plain(answer)


def _without_place(job: OpenJob) -> OpenJob:
    """A job without its place, if its lease expired: one step puts several back in any order."""
    return msgspec.structs.replace(job, ahead=None) if job.deliveries else job


def _in_some_order(inbox: Iterable[InboxEntry]) -> Iterator[InboxEntry]:
    """The inbox, with neighbours that one step may have written in any order sorted by id.

    A step of ``expire_jobs`` ends several attempts, one of ``fire_timers`` fires several timers
    that were due at the same time.
    """
    for step, some in groupby(inbox, _step_of):
        entries = [*some]
        yield from entries if step is None else sorted(entries, key=lambda each: each.id)


def _step_of(entry: InboxEntry) -> str | None:
    if entry.id.startswith(_EXPIRED):
        return "expired"
    return entry.id.rpartition("#")[2] if entry.id.startswith(_FIRED) else None


def _difference(one: object, two: object, at: str = "the answer") -> str:
    """The first place at which two comparable answers differ."""
    if isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        for number, (left, right) in enumerate(zip(one, two, strict=True)):
            if left != right:
                return _difference(left, right, f"{at}[{number}]")
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        for key, left in one.items():
            if left != two[key]:
                return _difference(left, two[key], f"{at}[{key!r}]")
    return f"{at} is {str(one)[:_SHOWN]}, in memory {str(two)[:_SHOWN]}"


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, [_plain(each) for each in msgspec.structs.astuple(value)])
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
