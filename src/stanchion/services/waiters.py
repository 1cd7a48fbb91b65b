"""Waits for the end of a run and for changes of a tenant's feed.

Bells wake the waiting callers; a poll finds what a lost bell would have announced, a second later.
A run or a page of a feed is read once for all callers that wait for it, so the cost of a waiting
caller does not depend on the size of what it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from stanchion.core.lease import Moment
from stanchion.core.model import Run, RunId, TenantId
from stanchion.ports.bus import Bell
from stanchion.ports.records import FeedEntry, Loaded
from stanchion.ports.store import Runs
from stanchion.services.context import ReplicaContext
from stanchion.services.limiter import SingleFlight, TenantLimiter, retrieve
from stanchion.services.run_cache import RunCache

POLL_S: Final = 1.0
FEED_READS_AT_ONCE: Final = 2
"""Concurrent reads of one tenant's feed: streams that catch up with a long feed take turns."""
FINAL_MAX: Final = 4
"""Finished runs that are kept for a second after several callers got them, or a large one."""
LARGE_BYTES: Final = 256 * 1024
"""Outputs of a large run: reading and rendering it again for each caller costs others time."""
FIRST_S_MAX: Final = 0.1
"""How long a shared read waits for one that began before it."""
_WOKEN_AT_ONCE: Final = 16
_Rendered = TypeVar("_Rendered")

_Waiting: TypeAlias = dict[asyncio.Event, None]
"""An ordered set, so that a seed replays."""


class Changes:
    """Tells when something happened to a tenant's runs."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    async def wait(self, timeout_s: float) -> None:
        """Return once something has happened or may have happened, or after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()


class FeedPage:
    """A page of a tenant's feed, read once for all streams at the same position."""

    __slots__ = ("_rendered", "entries")

    def __init__(self, entries: tuple[FeedEntry, ...]) -> None:
        self.entries = entries
        self._rendered: dict[Hashable, asyncio.Future[Any]] = {}

    async def rendered(
        self, stream: Hashable, render: Callable[[], Coroutine[Any, Any, _Rendered]]
    ) -> _Rendered:
        """The page as streams of this kind send it; rendered once for all of them."""
        rendering = self._rendered.get(stream)
        if rendering is None:
            rendering = self._rendered[stream] = asyncio.ensure_future(render())
            rendering.add_done_callback(retrieve)
        shared: _Rendered = await asyncio.shield(rendering)
        return shared


class _Reading:
    """A run as it was read: shared by all callers that wait for it, and rendered once for them."""

    __slots__ = ("began", "loaded", "rendering")

    def __init__(self, loaded: Loaded | None, began: Moment) -> None:
        self.loaded = loaded
        self.began = began
        self.rendering: asyncio.Future[Any] | None = None


class _Watched:
    """A run that callers wait for."""

    __slots__ = ("bells", "ended", "first", "newest", "waiting")

    def __init__(self) -> None:
        self.waiting: _Waiting = {}
        self.first: asyncio.Future[None] | None = None
        """The read of a caller that was alone, until it ends."""
        self.bells = 0
        """Bells received for the run's end: a reading made before the last one is out of date."""
        self.newest: _Reading | None = None
        self.ended: _Reading | None = None
        """The run as it ended on this replica: final."""


class RunWaiters:
    """Callers of this replica that wait for runs and feeds."""

    def __init__(self, context: ReplicaContext, cache: RunCache) -> None:
        self._cache = cache
        self._runs: Runs = context.store
        self._clock = context.clock
        self._watched: dict[RunId, _Watched] = {}
        self._final: dict[RunId, _Reading] = {}
        """Finished runs that callers got, for a second: they do not change."""
        self._reads = SingleFlight()
        self._tenants: dict[TenantId, _Waiting] = {}
        self._feed_turns = TenantLimiter(FEED_READS_AT_ONCE)
        self._is_draining = False
        self._stops = (
            context.bus.listen(Bell.FINISHED, lambda note: self._hear(RunId(note))),
            context.bus.listen(Bell.CHANGED, lambda note: self._hear_change(TenantId(note))),
        )

    async def finished(
        self, run_id: RunId, *, within_s: float, of: TenantId | None = None
    ) -> Loaded | None:
        """Return the run once it has ended, or as it is after ``within_s``.

        ``None`` at once if there is no such run, or it is not a run ``of`` that tenant.
        """
        with self._waiting_for(run_id) as (watched, woken):
            reading = await self._awaited(run_id, watched, woken, within_s, of)
            return None if reading is None else reading.loaded

    async def rendered(
        self,
        run_id: RunId,
        render: Callable[[Loaded], Coroutine[Any, Any, _Rendered]],
        *,
        within_s: float,
        of: TenantId,
    ) -> _Rendered | None:
        """The same, rendered once for all callers that get the same reading.

        ``render`` must return the same for all of them.
        """
        with self._waiting_for(run_id) as (watched, woken):
            reading = await self._awaited(run_id, watched, woken, within_s, of)
            if reading is None or reading.loaded is None:
                return None
            is_shared = len(watched.waiting) > 1 or _is_large(reading.loaded.run)
            if not is_shared and reading.rendering is None:
                return await render(reading.loaded)
            if reading.rendering is None:
                reading.rendering = asyncio.ensure_future(render(reading.loaded))
                reading.rendering.add_done_callback(retrieve)
            shared: _Rendered = await asyncio.shield(reading.rendering)
            return shared

    async def _awaited(
        self,
        run_id: RunId,
        watched: _Watched,
        woken: asyncio.Event,
        within_s: float,
        of: TenantId | None,
    ) -> _Reading | None:
        came = self._clock.moment()
        if within_s > 0:
            reading = self._as_known(run_id, watched, came) or await self._recent(run_id, watched)
        else:
            reading = await self._read(run_id, watched)
        while reading.loaded is not None:
            if of is not None and reading.loaded.run.tenant != of:
                return None
            now = self._clock.moment()
            left_s = within_s - (now - came) / 1000
            if reading.loaded.run.status.is_finished:
                return reading
            if left_s <= 0 or self._is_draining:
                # A reading from before the call may miss the caller's own writes.
                return reading if reading.began >= came else await self._read(run_id, watched)
            poll_s = POLL_S - (now - reading.began) / 1000
            try:
                async with asyncio.timeout(max(0, min(left_s, poll_s))):
                    await woken.wait()
            except TimeoutError:
                pass
            else:
                woken.clear()
            reading = await self._recent(run_id, watched)
        return None

    def _as_known(self, run_id: RunId, watched: _Watched, now: Moment) -> _Reading | None:
        """The unfinished run as this replica last committed it: no read is needed yet.

        If another replica has ended it since, its bell is on the way; a lost one is replaced by the
        poll. Dated before the call, so that it is never returned as the final reading.
        """
        known = None if watched.newest or watched.ended else self._cache.get(run_id)
        return None if known is None else _Reading(Loaded(known.run), Moment(now - 1))

    async def _recent(self, run_id: RunId, watched: _Watched) -> _Reading:
        """A reading of the last second, unless the run may have ended since; else a new one."""
        newest = watched.ended or watched.newest
        if newest is not None and (
            newest is watched.ended or self._clock.moment() - newest.began < POLL_S * 1000
        ):
            return newest
        return await self._read(run_id, watched)

    async def _read(self, run_id: RunId, watched: _Watched) -> _Reading:
        """A reading that begins now or later."""
        if watched.ended is not None:
            return watched.ended
        if len(watched.waiting) > 1 or watched.first is not None:
            return await self._reads.read(run_id, lambda: self._load_after_first(run_id, watched))
        first = watched.first = asyncio.get_running_loop().create_future()
        try:
            return await self._load(run_id, watched)
        finally:
            watched.first = None
            first.set_result(None)

    async def _load_after_first(self, run_id: RunId, watched: _Watched) -> _Reading:
        """A shared read, unless one before it finds that the run has ended: then that is final."""
        if watched.first is not None:
            await asyncio.wait({watched.first}, timeout=FIRST_S_MAX)
        return watched.ended or await self._load(run_id, watched)

    async def _load(self, run_id: RunId, watched: _Watched) -> _Reading:
        began, bells = self._clock.moment(), watched.bells
        reading = _Reading(await self._runs.load(run_id), began)
        if watched.bells == bells:
            watched.newest = reading
        if reading.loaded is not None and reading.loaded.run.status.is_finished:
            watched.ended = reading
        return reading

    def has_ended(self, run: Run) -> None:
        """Note that this replica committed the run's end: waiting callers need no further read."""
        watched = self._watched.get(run.id)
        if watched is not None:
            ended = Loaded(msgspec.structs.replace(run, items={}))
            watched.ended = _Reading(ended, self._clock.moment())

    def _hear(self, run_id: RunId) -> None:
        self._cache.forget(run_id)
        watched = self._watched.get(run_id)
        if watched is not None:
            watched.bells += 1
            watched.newest = None
            _set(watched.waiting)

    def _hear_change(self, tenant: TenantId) -> None:
        waiting = self._tenants.get(tenant)
        if waiting is not None:
            _set(waiting)

    @contextmanager
    def _waiting_for(self, run_id: RunId) -> Iterator[tuple[_Watched, asyncio.Event]]:
        watched, woken = self._watched.setdefault(run_id, _Watched()), asyncio.Event()
        watched.ended = watched.ended or self._final.get(run_id)
        watched.waiting[woken] = None
        try:
            yield watched, woken
        finally:
            del watched.waiting[woken]
            if not watched.waiting and self._watched.get(run_id) is watched:
                del self._watched[run_id]
                self._keep(run_id, watched.ended)

    def _keep(self, run_id: RunId, ended: _Reading | None) -> None:
        """Keep what callers of a finished run got: more of them may be on their way."""
        if ended is None or ended.rendering is None or run_id in self._final:
            return
        if len(self._final) < FINAL_MAX:
            self._final[run_id] = ended
            asyncio.get_running_loop().call_later(POLL_S, self._final.pop, run_id, None)

    async def read_feed(self, tenant: TenantId, *, after: str | None, limit: int) -> FeedPage:
        """The feed after a position, read once for all callers that ask at the same time.

        A tenant's streams take turns at the store. The limit of the first caller applies.
        """
        return await self._reads.read(
            (tenant, after), lambda: self._read_feed(tenant, after, limit)
        )

    async def _read_feed(self, tenant: TenantId, after: str | None, limit: int) -> FeedPage:
        await self._feed_turns.enter(tenant, may_share=False)
        try:
            return FeedPage(await self._runs.feed(tenant, after=after, limit=limit))
        finally:
            self._feed_turns.leave(tenant)

    @contextmanager
    def feed(self, tenant: TenantId) -> Iterator[Changes]:
        """Receive changes of the tenant's runs during the body."""
        with _among(self._tenants, tenant) as changed:
            yield Changes(changed)

    def drain(self) -> None:
        """End every wait now."""
        self._is_draining = True
        runs = [watched.waiting for watched in self._watched.values()]
        for waiting in (*runs, *self._tenants.values()):
            _set(waiting)

    def close(self) -> None:
        """Stop listening to bells."""
        for stop in self._stops:
            stop()


def _is_large(run: Run) -> bool:
    """Whether a run has outputs that are large: then its callers share what is rendered."""
    return sum(step.output_bytes for step in run.steps.values()) >= LARGE_BYTES


def _set(events: _Waiting) -> None:
    """Set the events, a few in each iteration of the event loop, so that others get a turn."""
    _set_some(tuple(events))


def _set_some(events: tuple[asyncio.Event, ...]) -> None:
    for event in events[:_WOKEN_AT_ONCE]:
        event.set()
    if len(events) > _WOKEN_AT_ONCE:
        asyncio.get_running_loop().call_soon(_set_some, events[_WOKEN_AT_ONCE:])


_Key = TypeVar("_Key", bound=str)


@contextmanager
def _among(waiting: dict[_Key, _Waiting], key: _Key) -> Iterator[asyncio.Event]:
    event = asyncio.Event()
    waiting.setdefault(key, {})[event] = None
    try:
        yield event
    finally:
        del waiting[key][event]
        if not waiting[key]:
            del waiting[key]
