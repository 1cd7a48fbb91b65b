"""Live updates: what is wrong with the deployment now, and when pages are out of date.

``Pulse`` checks the backends once a second while a viewer is connected, for all viewers together.
Every browser has one event stream, whose events carry the alarms and a number that changes when
something has changed for the viewer; the pages then fetch what they show again. ``Shared`` keeps
the rendered answer of such a fetch for a second, so that ten viewers of one page cost one
rendering.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal, TypeAlias

import msgspec

from stanchion.console.api import Api
from stanchion.core.escalation import Level, Order
from stanchion.core.lease import Moment, OnLockError
from stanchion.core.model import Instant, Risk, TenantId
from stanchion.gateway.auth import ANONYMOUS
from stanchion.gateway.problems import RequestRefused
from stanchion.gateway.state import GatewayState
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError
from stanchion.services.engine import Services
from stanchion.services.log import log_event
from stanchion.services.work import TenantOverloaded
from stanchion.wire.admin import Health

_LOOK_S: Final = 1.0
_PATIENCE_S: Final = 0.1
"""How long a page waits for backends that do not answer."""
_TICK_S: Final = 5.0
"""Pages are fetched again this often even without a change: leases run out, times pass."""
_TENANTS_MAX: Final = 10_000
_SAMPLE_MS: Final = 5_000
_SAMPLES_MAX: Final = 360
"""Half an hour of samples."""
_SAMPLED_TENANTS: Final = 1_000


AlarmLevel: TypeAlias = Literal["bad", "warn"]


class Alarm(msgspec.Struct, frozen=True):
    """Something that an operator must know on every page."""

    level: AlarmLevel
    text: str
    since: Instant | None
    """When this replica first saw it."""
    href: str | None = None
    """Where to look further."""
    brief: str = ""
    """The same in a few words, for the sentence of the overview."""


class AdmissionSample(msgspec.Struct, frozen=True, array_like=True):
    """Figures of all tenants together at one moment; counts are of the minute before it."""

    at_s: int
    active: int
    admitted: int
    refused: int
    unavailable: int


class Pulse:
    """Alarms, change numbers and samples of one replica, for all its viewers."""

    def __init__(self, services: Services, state: GatewayState) -> None:
        self._services = services
        self._state = state
        self._since: dict[str, Instant] = {}
        self._alarms: tuple[Alarm, ...] = ()
        self._changes: OrderedDict[TenantId, int] = OrderedDict()
        self._common = 0
        """Changes that concern every viewer: settings and escalation."""
        self._all = 0
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._beat = asyncio.Event()
        self._stops: tuple[Callable[[], None], ...] = ()
        self._asking: asyncio.Task[Health] | None = None
        self._last_health: Health | None = None
        self._samples: deque[AdmissionSample] = deque(maxlen=_SAMPLES_MAX)
        self._sampled_at: Moment | None = None
        self._api = Api(services, state, ANONYMOUS, tenant=None, request_id="console")

    def close(self) -> None:
        """Stop listening and looking."""
        self._listen(is_on=False)
        for task in (self._looking, self._asking):
            if task is not None:
                task.cancel()

    async def alarms(self) -> tuple[Alarm, ...]:
        """What is wrong now.

        The backends are asked at most twice a second. While one does not answer, a page waits for
        the result only a short time, and gets the last one.
        """
        health = await self._health()
        found = list(self._found(health.checks, is_draining=self._state.draining.is_set()))
        now = self._services.clock.now()
        self._since = {key: self._since.get(key, now) for key, _ in found}
        self._alarms = tuple(
            msgspec.structs.replace(alarm, since=self._since[key]) for key, alarm in found
        )
        return self._alarms

    async def _health(self) -> Health:
        asking = self._asking
        if asking is None:
            asking = asyncio.ensure_future(self._state.readiness.health(is_draining=False))
            self._asking = asking
        within_s = None if self._last_health is None else _PATIENCE_S
        await asyncio.wait({asking}, timeout=within_s)
        if asking.done():
            if self._asking is asking:  # first: if it has failed, the next page asks again
                self._asking = None
            self._last_health = asking.result()
        assert self._last_health is not None
        return self._last_health

    def version(self, tenant: str | None) -> int:
        """A number that rises with each change of the tenant's runs; of all runs for ``None``."""
        own = self._all if tenant is None else self._changes.get(TenantId(tenant), 0)
        return own + self._common

    @property
    def samples(self) -> tuple[AdmissionSample, ...]:
        """The samples of the last half hour, taken while anybody watched."""
        return tuple(self._samples)

    async def _sample(self) -> None:
        """Take a sample every five seconds."""
        now = self._services.clock.moment()
        is_due = self._sampled_at is None or now - self._sampled_at >= _SAMPLE_MS
        if not is_due:
            return
        self._sampled_at = now
        page = await self._api.get("/v1/admin/admission", limit=_SAMPLED_TENANTS)
        rows = page.tenants
        self.keep(
            AdmissionSample(
                self._services.clock.now() // 1000,
                sum(row.active for row in rows),
                sum(row.admitted_1m for row in rows),
                sum(row.full_1m for row in rows),
                sum(row.unavailable_1m for row in rows),
            )
        )

    def keep(self, sample: AdmissionSample) -> None:
        """Add a sample, for the charts of the overview."""
        self._samples.append(sample)

    async def events(self, tenant: str | None) -> AsyncGenerator[bytes, None]:
        """The events of one viewer's stream, until the server drains."""
        self._viewers += 1
        self._listen(is_on=True)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="console pulse")
        try:
            last, said_at = b"", self._services.clock.moment()
            yield b"retry: 1000\n\n"
            ticks = 0
            while not self._state.draining.is_set():
                now = self._services.clock.moment()
                if now - said_at >= _TICK_S * 1000:
                    ticks += 1
                beat = _encode({"alarms": self._alarms, "change": [self.version(tenant), ticks]})
                if beat != last:
                    last, said_at = beat, now
                    yield b"event: pulse\ndata: %b\n\n" % beat
                await self._beat.wait()
            await self.alarms()
            yield b"event: pulse\ndata: %b\n\n" % _encode({"alarms": self._alarms, "change": []})
        finally:
            self._viewers -= 1
            self._listen(is_on=self._viewers > 0)

    async def _look(self) -> None:
        """Check every second while a viewer is connected."""
        try:
            while self._viewers:
                try:
                    await self.alarms()
                    with suppress(BackendError, RequestRefused, TenantOverloaded):
                        await self._sample()
                except Exception as error:  # noqa: BLE001 - a failed look must not end the streams
                    log_event(logging.ERROR, "loop_failed", loop="console", error=repr(error))
                self._beat.set()
                self._beat.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._state.draining.wait()
                if self._state.draining.is_set():
                    self._beat.set()
                    return
        finally:
            self._looking = None

    def _listen(self, *, is_on: bool) -> None:
        """Listen to bells only while a viewer is connected: every start rings one."""
        if is_on and not self._stops:
            bus = self._services.bus
            self._stops = (
                bus.listen(Bell.CHANGED, lambda tenant: self._changed(TenantId(tenant))),
                bus.listen(Bell.SETTINGS, lambda _note: self._changed(None)),
            )
        elif not is_on:
            for stop in self._stops:
                stop()
            self._stops = ()

    def _changed(self, tenant: TenantId | None) -> None:
        self._all += 1
        if tenant is None:
            self._common += 1
            return
        self._changes[tenant] = self._changes.get(tenant, 0) + 1
        self._changes.move_to_end(tenant)
        if len(self._changes) > _TENANTS_MAX:
            self._changes.popitem(last=False)

    def _found(self, checks: dict[str, str], *, is_draining: bool) -> list[tuple[str, Alarm]]:
        found: list[tuple[str, Alarm]] = []

        def add(
            key: str, level: AlarmLevel, brief: str, text: str, href: str | None = None
        ) -> None:
            found.append((key, Alarm(level, text, None, href, brief)))

        if checks["store"] != "ok":
            text = "The store does not answer: starts and results wait."
            add("store", "bad", "the store does not answer", text)
        if checks["locks"] != "ok":
            add("locks", "bad", *self._without_locks(), "/console/leases")
        if checks["bus"] != "ok":
            text = "The bus does not answer: work goes on by polling, a little later."
            add("bus", "warn", "the bus does not answer", text)
        escalating = self._services.escalating
        closing = [risk for risk in Risk if escalating.closes(risk)]
        closed, are_many = _listed(closing), len(closing) > 1
        href = "/console/escalation"
        if escalating.forced is Order.FORCE_OPEN:
            text = "An operator forces locks to fail open: escalation is off."
            add("open", "bad", "locks are forced to fail open", text, href)
        elif escalating.forced is Order.FORCE_CLOSED:
            text = f"An operator forces {closed} to fail closed."
            brief = f"{closed} {'are' if are_many else 'is'} forced to fail closed"
            add("closed", "bad", brief, text, href)
        elif escalating.level is not Level.NORMAL:
            fail = "fail" if are_many else "fails"
            word = "Latched" if escalating.level is Level.LATCHED else "Escalated"
            text = f"{word}: too much ran without a lock, so {closed} {fail} closed."
            add("escalated", "bad", f"escalated, {closed} {fail} closed", text, href)
        if is_draining:
            text = "This server is shutting down: it takes no new work."
            add("draining", "warn", "this server is shutting down", text)
        return found

    def _without_locks(self) -> tuple[str, str]:
        """What the classes do without the lock store, in a few words and in a sentence."""
        policies, escalating = self._services.settings.current.policies, self._services.escalating
        open_ = [
            risk
            for risk in Risk
            if policies[risk].on_lock_error is OnLockError.FAIL_OPEN and not escalating.closes(risk)
        ]
        closed = [risk for risk in Risk if risk not in open_]
        parts = [
            *([f"{_listed(open_)} runs go on without one (fail open)"] if open_ else []),
            *([f"{_listed(closed)} runs wait (fail closed)"] if closed else []),
        ]
        brief = "locks fail open" if open_ else "locks fail closed"
        return brief, f"The lock store does not answer: {', '.join(parts)}."


def _listed(words: list[Risk]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else [*words])


_encode: Final = msgspec.json.Encoder().encode

_KEPT_MS: Final = 1_000
_PAGES_MAX: Final = 256


_Rendering: TypeAlias = asyncio.Task[tuple[int, str]]
"""Status and text of a page."""


class Shared:
    """Renders a page once for all viewers that fetch it within a second."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._kept: OrderedDict[object, tuple[Moment, _Rendering]] = OrderedDict()

    async def page(
        self, key: object, render: Callable[[], Awaitable[tuple[int, str]]]
    ) -> tuple[int, str]:
        """Status and text of the page; at most a second old."""
        now = self._moment()
        at, rendering = self._kept.get(key, (None, None))
        if rendering is None or at is None or now - at >= _KEPT_MS:
            rendering = asyncio.ensure_future(_awaited(render))
            rendering.add_done_callback(_retrieved)
            self._kept[key] = (now, rendering)
            self._kept.move_to_end(key)
            if len(self._kept) > _PAGES_MAX:
                self._kept.popitem(last=False)
        return await asyncio.shield(rendering)


async def _awaited(render: Callable[[], Awaitable[tuple[int, str]]]) -> tuple[int, str]:
    return await render()


def _retrieved(done: _Rendering) -> None:
    if not done.cancelled():
        done.exception()
