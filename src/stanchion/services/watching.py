"""Watching: callers that wait for a run to end, or for anything to happen to a tenant's runs.

Bells wake them; behind the bells is a poll, so that a lost one costs a moment, not the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

import msgspec

from stanchion.core.model import Run, RunId, TenantId
from stanchion.ports.bus import Bell
from stanchion.ports.records import Loaded
from stanchion.ports.store import Runs
from stanchion.services.parts import Parts

__all__ = ["Changes", "Watching"]

POLL_S: Final = 1.0

_Waiting: TypeAlias = dict[asyncio.Event, None]
"""A set that keeps its order, so that the same history wakes the same in the same order."""


class Changes:
    """Tells when something happened to a tenant's runs."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    async def wait(self, timeout_s: float) -> None:
        """Return once something has happened, or may have, or after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()


class Watching:
    """Wakes those who wait."""

    def __init__(self, parts: Parts) -> None:
        self._runs: Runs = parts.store
        self._clock = parts.clock
        self._ends: dict[RunId, _Waiting] = {}
        self._ended: dict[RunId, Run] = {}
        """As they ended here, for those who wait: nothing about them changes any more."""
        self._tenants: dict[TenantId, _Waiting] = {}
        self._is_draining = False
        self._stops = (
            parts.bus.listen(Bell.FINISHED, lambda note: _set(self._ends.get(RunId(note)))),
            parts.bus.listen(Bell.CHANGED, lambda note: _set(self._tenants.get(TenantId(note)))),
        )

    async def finished(
        self, run_id: RunId, *, within_s: float, of: TenantId | None = None
    ) -> Loaded | None:
        """The run once it has ended, or as it is after the time.

        ``None`` at once if there is no such run, or it is not one ``of`` that tenant.
        """
        began = self._clock.moment()
        with self._waiting_for(run_id) as ended:
            while True:
                known = self._ended.get(run_id)
                loaded = await self._runs.load(run_id) if known is None else Loaded(known)
                if of is not None and loaded is not None and loaded.run.tenant != of:
                    return None
                left_s = within_s - (self._clock.moment() - began) / 1000
                if (
                    loaded is None
                    or loaded.run.status.is_finished
                    or left_s <= 0
                    or self._is_draining
                ):
                    return loaded
                try:
                    async with asyncio.timeout(min(left_s, POLL_S)):
                        await ended.wait()
                except TimeoutError:
                    continue
                ended.clear()

    def has_ended(self, run: Run) -> None:
        """It was committed here that the run has ended: whoever waits need not read it again."""
        if run.id in self._ends:
            self._ended[run.id] = msgspec.structs.replace(run, items={})

    @contextmanager
    def _waiting_for(self, run_id: RunId) -> Iterator[asyncio.Event]:
        try:
            with _among(self._ends, run_id) as ended:
                yield ended
        finally:
            if run_id not in self._ends:
                self._ended.pop(run_id, None)

    @contextmanager
    def feed(self, tenant: TenantId) -> Iterator[Changes]:
        """Be told of changes to the tenant's runs while inside."""
        with _among(self._tenants, tenant) as changed:
            yield Changes(changed)

    def drain(self) -> None:
        """End every wait now."""
        self._is_draining = True
        for waiting in (*self._ends.values(), *self._tenants.values()):
            _set(waiting)

    def close(self) -> None:
        """Listen no more."""
        for stop in self._stops:
            stop()


def _set(events: _Waiting | None) -> None:
    for event in events or ():
        event.set()


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
