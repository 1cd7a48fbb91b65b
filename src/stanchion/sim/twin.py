"""Twins: simulated days on the SQLite store, with the memory store beside it.

Every command is executed by both, in the same step and at the same time of the same clock.
Replicas get the answers of SQLite. The memory store must give the same ones; the ledger compares
its state. The threads of the SQLite store are replaced by calls, each a transaction of its own.

Which of the ready jobs are leased is up to a store, within its promises: the memory store leases
those that SQLite has leased, and compares them with what it has ready. Cursors are a store's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeVar, cast

import msgspec

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.opening import MEMORY
from stanchion.adapters.sqlite.thread import ThreadCall, WorkerThread, write_together
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.store.sqlite.file import open_writer
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.queue import PROMOTED_AT_ONCE_MAX
from stanchion.ports.clock import Clock
from stanchion.ports.records import InboxEntry, LeasedJob, Loaded, Page, SlotAudit
from stanchion.sim.servers import SimStore

_Answer = TypeVar("_Answer")
_Compare = Callable[[str | None], None]
_DAY_MS: Final = 86_400_000
_ALONE: Final = frozenset({"open", "close", "ping", "prepare_admissions"})
"""Methods of the SQLite store that are no commands."""
_UNORDERED: Final = frozenset({"fire_timers", "take_outbox", "expire_jobs"})
"""Commands whose answers have no order that is promised."""
_EXPIRED: Final = ("timed_out:", "died:")
"""The ids of inbox entries that ``expire_jobs`` writes."""
_SHOWN: Final = 300


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


class TwinStore(SimStore):
    """A SQLite store, and a memory store that must answer the same."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._state.promoted_at_once_max = PROMOTED_AT_ONCE_MAX
        thread = cast("WorkerThread[Database]", InlineThread(open_writer(MEMORY, clock)))
        self._sqlite = SqliteStore(
            path=MEMORY,
            writer=thread,
            reader=thread,
            clock=clock,
            key_ttl_ms=_DAY_MS,
            audit_ttl_ms=90 * _DAY_MS,
            timeout_s=2.0,
        )
        self._is_following = False
        """Whether the memory store executes a command, for which it may call others."""
        self.compare: _Compare = lambda _difference: None
        """Called with each command: how the answers differ, or ``None``."""
        self._cursors: dict[str, str] = {}
        """For each cursor of the SQLite store, that of the memory store."""
        led: dict[str, Callable[..., Coroutine[Any, Any, object]]] = {
            "lease_jobs": self._lease_the_same,
            "ready_tenants": self._name_the_same,
        }
        for verb, method in vars(SqliteStore).items():
            if callable(method) and not verb.startswith("_") and verb not in _ALONE:
                lead, follow = getattr(self._sqlite, verb), getattr(self, verb)
                vars(self)[verb] = self._both(verb, lead, follow, led.get(verb))

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
                if named.get("cursor") is not None:
                    named["cursor"] = self._cursors.get(named["cursor"])
                other = await _outcome(follow(*arguments, **named))
            self._is_following = False
            if isinstance(answer, Page) and isinstance(other, Page) and answer.cursor is not None:
                self._cursors[answer.cursor] = other.cursor or ""
            one, two = _comparable(verb, answer), _comparable(verb, other)
            said = None
            if one != two:
                said = f"{verb}{arguments}: {answer}"[:_SHOWN] + f", in memory {other}"[:_SHOWN]
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
        """Lease the same jobs: each the next of its tenant's queue, and as many as there are."""
        state = self._state
        found: list[LeasedJob] = []
        for each in leased:
            job = each.job
            place = state.ready.places(job.topic, job.tenant).get(job.id)
            if place != 0 or job.topic not in topics or tenant not in {None, job.tenant}:
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


async def _outcome(command: Coroutine[Any, Any, object]) -> object:
    try:
        return await command
    except Exception as error:  # noqa: BLE001 - compared, and raised for the caller
        return error


def _comparable(verb: str, answer: object) -> object:
    """An answer without what a store may choose, and with JSON as lists, whoever has read it."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    if isinstance(answer, Loaded):
        return (_plain(answer.run), [_plain(each) for each in _in_some_order(answer.inbox)])
    if isinstance(answer, Page):
        return (_plain(answer.items), answer.cursor is None)
    if isinstance(answer, SlotAudit):
        return answer.drifts  # tenants without runs may be left out
    if verb in _UNORDERED and isinstance(answer, Collection):
        return sorted(map(repr, answer))
    return _plain(answer)


def _in_some_order(inbox: Iterable[InboxEntry]) -> Iterator[InboxEntry]:
    """The inbox, with neighbours that one step of ``expire_jobs`` may have written sorted by id.

    Such a step ends several attempts, in any order.
    """
    for is_expired, some in groupby(inbox, lambda each: each.id.startswith(_EXPIRED)):
        entries = [*some]
        yield from sorted(entries, key=lambda each: each.id) if is_expired else entries


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, [_plain(each) for each in msgspec.structs.astuple(value)])
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
