"""Settings in force, and the tenants' configurations as a replica knows them.

``SettingsService`` keeps the deployment's settings: one document in the store, the same on every
replica within two seconds. ``current`` is in memory, so reading it costs nothing and works while
the store is unavailable; then the last values stay in force. When ``patch`` returns, the change is
in force on this replica; the others are woken by a bell, and poll once a second.

``TenantConfigs`` caches which tenants override their admission settings. A cached value is used
for 250 ms, and ``put`` returns only after that time: then the change is in force on every replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge

from stanchion.core.audit import AuditEntry, changed_members
from stanchion.core.escalation import Level
from stanchion.core.faults import Fault, shown
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import LeaseOverride, LeasePolicy, Moment, policy_for
from stanchion.core.merge_patch import changed_paths
from stanchion.core.model import Instant, Risk, TenantId
from stanchion.core.retry import Backoff, BoundedJitter, Fixed
from stanchion.core.settings import DEFAULTS, Settings, patched, read_settings, settings_document
from stanchion.ports.bus import Bell
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, BackendTimeout, BackendUnavailable, sentence
from stanchion.ports.records import Document, Tenant
from stanchion.ports.store import Documents
from stanchion.ports.store import Tenants as StoredTenants
from stanchion.services.limiter import CoalescedRead
from stanchion.services.log import log_event

POLL_S: Final = 1.0
LOOK_MAX_S: Final = 0.9
"""A read is given up before the next one is due, so that a recovery is noticed in time."""
TRIES_MAX: Final = 10
"""Lost compare-and-set races in a row before ``patch`` fails."""

_KIND: Final = "settings"
_NAME: Final = "current"


class Bells(Protocol):
    """The part of the bus that carries bells."""

    def ring(self, bell: Bell, note: str = "") -> None: ...

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]: ...


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored value: the settings, and who wrote them when."""

    settings: JsonValue
    actor: str
    at: Instant


class SettingsService:
    """One replica's view of the settings. It can change them for all replicas."""

    def __init__(
        self,
        documents: Documents,
        *,
        clock: Clock,
        bells: Bells,
        registry: CollectorRegistry,
        run_lease_ttl_ms: int = 30_000,
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._bells = bells
        self._run_lease_ttl_ms = run_lease_ttl_ms
        self._current = DEFAULTS
        self._taken: Document | None = None
        self._takes = 0
        """Documents put in force so far: a read that began before the last one is too old."""
        self._is_away = False
        self._changes = Counter(
            "stanchion_settings_changes",
            "Changes of the settings that came into force on this replica.",
            registry=registry,
        )
        self._invalid = Counter(
            "stanchion_settings_invalid",
            "Stored settings that could not be read; the last good ones stay in force.",
            registry=registry,
        )
        self._stale = Gauge(
            "stanchion_settings_stale",
            "1 while the store is unavailable and the last settings stay in force.",
            registry=registry,
        )

    @property
    def current(self) -> Settings:
        """The settings in force here."""
        return self._current

    @property
    def revision(self) -> int:
        """The revision of the settings in force here; 0 for the defaults."""
        return 0 if self._taken is None else self._taken.revision

    def get(self) -> Settings:
        """The settings in force here, as a callable for services that read them at each use."""
        return self._current

    def document(self) -> JsonObject:
        """All settings in force, as a JSON document."""
        return settings_document(self._current)

    async def patch(
        self, merge_patch: JsonValue, *, actor: str, audit: AuditEntry | None = None
    ) -> Settings | tuple[Fault, ...]:
        """Change the settings by a JSON merge patch; return them, or the patch's faults.

        Raises ``BackendError``. After a time-out the change may have been made; repeating the
        patch is safe.
        """
        for _ in range(TRIES_MAX):
            stored = await self._documents.document(_KIND, _NAME)
            base = self._read(stored)
            # A document that cannot be read is replaced by the last good values, patched.
            wanted = patched(
                base if isinstance(base, Settings) else self._current,
                merge_patch,
                run_lease_ttl_ms=self._run_lease_ttl_ms,
            )
            if not isinstance(wanted, Settings):
                return wanted
            if stored is not None and wanted == base:
                self._take(stored)
                return wanted
            before = base if isinstance(base, Settings) else self._current
            revision = 0 if stored is None else stored.revision
            written = await self._write(wanted, actor, revision, _audited(audit, before, wanted))
            if written is not None:
                self._take(written)
                self._bells.ring(Bell.SETTINGS)
                return wanted
        raise BackendUnavailable(f"others changed the settings {TRIES_MAX} times in a row")

    async def run(self) -> None:
        """Read the settings at every bell, and once a second, until cancelled."""
        rung = asyncio.Event()
        stop = self._bells.listen(Bell.SETTINGS, lambda _note: rung.set())
        try:
            while True:
                rung.clear()
                await self.look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await rung.wait()
        finally:
            stop()

    async def look(self) -> None:
        """Read the stored settings, and put them in force if they have changed."""
        takes = self._takes
        try:
            stored = await self._ask()
        except BackendError as error:
            self._away(sentence(error))
            return
        self._away(None)
        # If a patch ended meanwhile, this answer may be older than it.
        if takes == self._takes:
            self._take(stored)

    async def _ask(self) -> Document | None:
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                return await self._documents.document(_KIND, _NAME)
        except TimeoutError:
            raise BackendTimeout(f"no answer within {LOOK_MAX_S} s") from None

    async def _write(
        self, settings: Settings, actor: str, read: int, audit: AuditEntry | None
    ) -> Document | None:
        written = _Written(settings_document(settings), actor, self._clock.now())
        value = msgspec.to_builtins(written)
        return await self._documents.put_document(_KIND, _NAME, value, read=read, audit=audit)

    def _read(self, stored: Document | None) -> Settings | tuple[Fault, ...]:
        if stored is None:
            return DEFAULTS
        try:
            written = msgspec.convert(stored.value, _Written)
        except msgspec.ValidationError as error:
            return (Fault("", str(error)),)
        return read_settings(written.settings, run_lease_ttl_ms=self._run_lease_ttl_ms)

    def _take(self, stored: Document | None) -> None:
        """Put the document in force. One that cannot be read is logged, and changes nothing."""
        # Revisions are not compared: a store that lost its last writes may reuse a number.
        if stored == self._taken:
            return
        self._taken = stored
        self._takes += 1
        revision = 0 if stored is None else stored.revision
        settings = self._read(stored)
        if not isinstance(settings, Settings):
            self._invalid.inc()
            log_event(
                logging.ERROR,
                "settings_invalid",
                revision=revision,
                faults=[str(fault) for fault in settings],
            )
            return
        before, self._current = self._current, settings
        places = changed_paths(settings_document(before), settings_document(settings))
        if places:
            self._changes.inc()
            actor = "nobody" if stored is None else msgspec.convert(stored.value, _Written).actor
            log_event(
                logging.INFO,
                "settings_changed",
                actor=actor,
                revision=revision,
                changed=[shown(place) for place in places],
            )

    def _away(self, error: str | None) -> None:
        if (error is not None) is self._is_away:
            return
        self._is_away = error is not None
        self._stale.set(self._is_away)
        if error is None:
            log_event(logging.INFO, "settings_readable")
        else:
            log_event(logging.WARNING, "settings_unreadable", error=error)


def _audited(entry: AuditEntry | None, before: Settings, after: Settings) -> AuditEntry | None:
    """The audit entry for a change of the settings: the members that differ."""
    if entry is None:
        return None
    old, new = changed_members(settings_document(before), settings_document(after))
    return replace(entry, before=old, after=new)


BELIEVED_MS: Final = 250
KEPT_MAX: Final = 10_000
LISTED_MAX: Final = 1_000
"""If more tenants have admission overrides, each tenant's configuration is read."""
_GATES_KIND: Final = "gates"
_LIST: Final = TenantId("")
_Value = TypeVar("_Value")


class Stored(StoredTenants, Documents, Protocol):
    """The parts of the store port that ``TenantConfigs`` needs."""


class RulesInForce:
    """The rules of ``context.Rules``, from the settings and the escalation level in force now."""

    def __init__(self, settings: SettingsService) -> None:
        self._settings = settings
        self._is_escalated = False

    def on_level(self, level: Level) -> None:
        """Take note of the escalation level."""
        self._is_escalated = level is not Level.NORMAL

    def lease_policy(self, risk: Risk, override: LeaseOverride | None) -> LeasePolicy:
        return policy_for(risk, self._settings.current.policies, override)

    def closes(self, risk: Risk) -> bool:
        return self._is_escalated and risk in self._settings.current.escalation.closes

    def lock_busy(self) -> Backoff:
        return self._settings.current.lock_busy.retry

    def backend_error(self) -> Backoff:
        """The delay for an unavailable backend, with the jitter of the lock-busy retry."""
        busy = self._settings.current.lock_busy
        delay_ms = busy.backend_error_delay_ms
        if isinstance(busy.retry, Fixed):
            return Fixed(delay_ms=delay_ms)
        return BoundedJitter(delay_ms=delay_ms, jitter_ms=min(busy.retry.jitter_ms, delay_ms))


class TenantConfigs:
    """Tenants' admission overrides, cached for 250 ms; writes wait until all caches are current."""

    def __init__(self, stored: Stored, *, clock: Clock) -> None:
        self._stored = stored
        self._clock = clock
        self._known: OrderedDict[TenantId, tuple[object, Moment]] = OrderedDict()
        self._reading: CoalescedRead[TenantId, object] = CoalescedRead()
        self._changed: OrderedDict[TenantId, Moment] = OrderedDict()
        """When this replica last changed a tenant's admission override."""
        self._forgotten = 0

    async def admission(self, tenant: TenantId) -> JsonObject | None:
        """The tenant's admission override; ``None`` if it has none. Raises ``BackendError``."""
        if self.has_none(tenant):
            return None
        listed = await self._believed(_LIST, self._read_list)
        if listed is not None and tenant not in listed:
            return None
        return await self._believed(tenant, lambda: self._read_tenant(tenant))

    def has_none(self, tenant: TenantId) -> bool:
        """Whether the tenant is known to have no admission override, without a read."""
        known = self._known.get(_LIST)
        if known is None or self._clock.moment() - known[1] >= BELIEVED_MS:
            return False
        listed = known[0]
        return isinstance(listed, frozenset) and tenant not in listed

    async def _read_list(self) -> frozenset[str] | None:
        """The tenants that may have an override; ``None`` if there are too many to list."""
        page = await self._stored.list_documents(_GATES_KIND, limit=LISTED_MAX)
        return frozenset(name for name, _ in page.items) if page.cursor is None else None

    async def _read_tenant(self, tenant: TenantId) -> JsonObject | None:
        return (await self._stored.tenant(tenant)).admission

    async def _believed(self, key: TenantId, read: Callable[[], Awaitable[_Value]]) -> _Value:
        came_at = self._clock.moment()
        while True:
            known = self._known.get(key)
            now = self._clock.moment()
            # A read that began after this call is new enough, however long it took: otherwise the
            # callers that joined it would read one after the other while the store is slow.
            if known is not None and (now - known[1] < BELIEVED_MS or known[1] >= came_at):
                return cast("_Value", known[0])  # each key has its own kind of value
            if not self._reading.is_under_way(key):
                return await self._read(key, read, now)
            await self._reading.found(key)

    async def _read(
        self, key: TenantId, read: Callable[[], Awaitable[_Value]], now: Moment
    ) -> _Value:
        forgotten = self._forgotten
        found = cast("_Value", await self._reading.read(key, read))
        # If a write ended meanwhile, this answer may be older than it.
        if forgotten == self._forgotten:
            self._known[key] = (found, now)
            if len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return found

    async def put(
        self, tenant: TenantId, config: Tenant, *, audit: AuditEntry | None = None
    ) -> None:
        """Replace a tenant's configuration: in force on every replica when this returns."""
        before = await self._stored.tenant(tenant)
        if config.admission is not None:
            # Listed before the write and never removed: a listed tenant is always read.
            await self._stored.put_document(_GATES_KIND, tenant, {}, read=None)
        await self._stored.put_tenant(tenant, config, audit=audit)
        await self._promote_all(tenant)
        await self._wait_in_force(tenant, before, config)

    async def delete(self, tenant: TenantId, *, audit: AuditEntry | None = None) -> Tenant | None:
        """Delete a tenant's configuration and return it; ``None`` if there was none.

        The defaults are in force on every replica when this returns.
        """
        before = await self._stored.tenant(tenant)
        if not await self._stored.delete_tenant(tenant, audit=audit):
            return None
        await self._promote_all(tenant)
        await self._wait_in_force(tenant, before, Tenant())
        return before

    async def _promote_all(self, tenant: TenantId) -> None:
        """Give the slots that a change has added to waiting runs, in steps that are short."""
        # The change is made. If the store fails now, decisions on promoted runs promote the others.
        with suppress(BackendError):
            while await self._stored.promote(tenant):
                pass

    async def _wait_in_force(self, tenant: TenantId, before: Tenant, config: Tenant) -> None:
        """Clear this replica's cache, and wait until those of the others have expired."""
        now = self._clock.moment()
        self._known.pop(tenant, None)
        self._known.pop(_LIST, None)
        self._forgotten += 1
        # A write that changes nothing may follow a change that is not in force everywhere yet.
        changed_at = self._changed.get(tenant)
        is_recent = changed_at is not None and now - changed_at < BELIEVED_MS
        if config.admission is None and before.admission is None and not is_recent:
            return
        self._changed[tenant] = now
        self._changed.move_to_end(tenant)
        if len(self._changed) > KEPT_MAX:
            self._changed.popitem(last=False)
        await self._clock.sleep(BELIEVED_MS / 1_000)
