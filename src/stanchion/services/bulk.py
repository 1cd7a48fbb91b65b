"""Bulk actions: cancel, rerun, replay, discard, approve or reject every run that a filter matched.

A bulk action is a document with its progress (``core.bulk``), and further documents with the ids of
its runs, 1,000 each. The replica that carries it out writes before it acts which runs it takes, and
holds the record for three seconds at a time. After it dies, another replica continues. Every action
uses the same service as the request about one run, so a rerun passes the gate, and a decision its
rules; a run whose tenant is full is tried again, without holding up the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.bulk import (
    BULK_ERRORS_MAX,
    BULK_RUNS_MAX,
    BULKS_MAX,
    Bulk,
    BulkAction,
    BulkDone,
    BulkFailed,
    BulkLater,
    BulkOutcome,
    BulkPace,
    BulkStatus,
    begin,
    fail_rest,
    settle,
    stop,
)
from stanchion.core.json_value import JsonObject
from stanchion.core.lease import Moment
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.ports.records import Page, RunFilter, RunSummary
from stanchion.services.bulk_actions import RunActions
from stanchion.services.context import Backends
from stanchion.services.gate_answers import (
    KeyMismatch,
)
from stanchion.services.inbox import (
    Inbox,
)
from stanchion.services.keys import Keys, end_of_key
from stanchion.services.log import log_event
from stanchion.services.reruns import Reruns
from stanchion.services.work import TenantOverloaded
from stanchion.wire.identifiers import ALL_TENANTS

HELD_MS: Final = 3_000
"""How long a replica holds a bulk action with each write."""
_EXTENDED_MS: Final = 1_000
"""A holder with nothing to write extends its hold this often."""
_LOOK_S: Final = 2.0
"""How often a replica looks for bulk actions that no replica carries out."""
_TICK_S: Final = 0.1
_KEY_CHECKED_MS: Final = 1_000
"""How often a bulk action's key is looked up."""
_AT_ONCE: Final = 128
"""Runs that are acted on at a time."""
_PAGE: Final = 1_000
_CHUNK: Final = 1_000
"""Run ids in one document."""
_KEPT_MS: Final = 30 * 24 * 60 * 60 * 1_000
_TIDY_MS: Final = 60 * 60 * 1_000
_CREATED_MS: Final = 10 * 60 * 1_000
"""Longer than the creation of a bulk action takes: its name comes right before its record."""
_FULL_RETRY_MS: Final = 5_000
_FAILED_MS: Final = 30_000
"""Until a bulk action that could not be carried out is tried again."""
_RECORDS: Final = "bulk"
_RUNNING: Final = "bulk_running"
"""Names of bulk actions that are not finished: what replicas look for."""
_RUNS: Final = "bulk_runs"
_KEYS: Final = "bulk_keys"
"""What was begun with an idempotency key. Written before the record, and removed before it."""
_LAST_TIME: Final = 2**44


class NewBulk(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a bulk action."""

    action: BulkAction
    tenant: TenantId | None
    only: RunFilter
    filter: JsonObject
    rate_per_s: float
    actor: str
    request_id: str
    key_id: str | None = None
    idempotency_key: str | None = None

    @property
    def key_name(self) -> str:
        """The name of its idempotency key's document."""
        whole = f"{self.tenant or ALL_TENANTS} {self.idempotency_key}"
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """The same for the same request."""
        members = [self.action, self.filter, float(self.rate_per_s)]
        return hashlib.sha256(msgspec.json.encode(members, order="sorted")).hexdigest()


class BulkBegun(msgspec.Struct, frozen=True):
    """A bulk action that was begun, now or before with the same idempotency key."""

    bulk: Bulk
    replayed: bool


class _BegunWithKey(msgspec.Struct, frozen=True):
    fingerprint: str
    bulk: Bulk
    """As it began: a replica that finds no record writes this one."""


class TooManyRuns(Exception):
    """The filter matches more runs than one bulk action may have."""


class BulkService:
    """Creates bulk actions, and carries out those that no other replica does."""

    def __init__(self, replica: str, backends: Backends, *, reruns: Reruns, inbox: Inbox) -> None:
        self._replica = replica
        self._store = backends.store
        self._clock = backends.clock
        self._entropy = backends.entropy
        self._actions = RunActions(backends, reruns=reruns, inbox=inbox)
        self._keys = Keys(
            documents=backends.store, clock=backends.clock, entropy=backends.entropy, admin_key=None
        )
        self._wake = asyncio.Event()
        self._under_way: set[str] = set()
        self._failed: dict[str, Moment] = {}
        """Bulk actions that could not be carried out, and when each is tried again."""
        self._tenants: dict[str, TenantId | None] = {}
        """Of the bulk actions that this replica carries out, or is about to."""
        self._being_created: set[str] = set()

    # ── What callers ask for ─────────────────────────────────────────────────────────────────────

    async def count(self, wanted: NewBulk) -> Counter[TenantId]:
        """How many runs of each tenant match now. Changes nothing. Raises ``TooManyRuns``."""
        counted: Counter[TenantId] = Counter()
        async for page in self._matching(wanted, await self._store.now()):
            counted.update(run.tenant for run in page)
        return counted

    async def create(
        self, wanted: NewBulk, audit: Callable[[str], AuditEntry] | None = None
    ) -> BulkBegun | KeyMismatch:
        """Fix the runs and begin, unless the same key did before.

        ``audit`` makes the entry for its id. Raises ``TooManyRuns`` and ``TenantOverloaded``.
        """
        has_key = wanted.idempotency_key is not None
        known = await self._begun_before(wanted, audit) if has_key else None
        if known is not None:
            return known
        now = await self._store.now()
        of_tenant = sum(each == wanted.tenant for each in self._tenants.values())
        if wanted.tenant is not None and of_tenant >= BULKS_MAX:
            detail = f"{BULKS_MAX} bulk actions of the tenant are running"
            raise TenantOverloaded(detail, _FULL_RETRY_MS)
        # Ids of later ones sort before those of earlier ones: the list begins with the newest.
        bulk_id = f"{_LAST_TIME - now:011x}{self._entropy.token()[:12]}"
        self._tenants[bulk_id] = wanted.tenant
        self._being_created.add(bulk_id)
        try:
            begun = await self._create(wanted, bulk_id, now, audit)
        except BaseException:
            self._tenants.pop(bulk_id, None)
            raise
        finally:
            self._being_created.discard(bulk_id)
        if not (
            isinstance(begun, BulkBegun)
            and begun.bulk.id == bulk_id
            and begun.bulk.status is BulkStatus.RUNNING
        ):
            self._tenants.pop(bulk_id, None)
        return begun

    async def _create(
        self, wanted: NewBulk, bulk_id: str, now: Instant, audit: Callable[[str], AuditEntry] | None
    ) -> BulkBegun | KeyMismatch:
        has_key = wanted.idempotency_key is not None
        run_ids = [run.id async for page in self._matching(wanted, now) for run in page]
        bulk = Bulk(
            id=bulk_id,
            action=wanted.action,
            tenant=wanted.tenant,
            filter=wanted.filter,
            actor=wanted.actor,
            request_id=wanted.request_id,
            created_at=now,
            rate_per_s=wanted.rate_per_s,
            matched=len(run_ids),
            key_id=wanted.key_id,
        )
        bulk = settle(bulk, {}, now)
        for number, first in enumerate(range(0, len(run_ids), _CHUNK)):
            some = run_ids[first : first + _CHUNK]
            await self._store.put_document(_RUNS, _chunk(bulk_id, number), [*some], read=None)
        if has_key:
            value = msgspec.to_builtins(_BegunWithKey(wanted.fingerprint, bulk))
            if await self._store.put_document(_KEYS, wanted.key_name, value, read=0) is None:
                await self.clean_up(bulk)
                known = await self._begun_before(wanted, audit)
                if known is None:
                    raise BackendUnavailable("the idempotency key has just expired")
                return known
        await self._begin(bulk, audit)
        return BulkBegun(bulk, replayed=False)

    async def _begun_before(
        self, wanted: NewBulk, audit: Callable[[str], AuditEntry] | None
    ) -> BulkBegun | KeyMismatch | None:
        """What the idempotency key began before; ``None`` if the key is new."""
        found = await self._store.document(_KEYS, wanted.key_name)
        if found is None:
            return None
        known = msgspec.convert(found.value, _BegunWithKey)
        if known.fingerprint != wanted.fingerprint:
            return KeyMismatch()
        bulk = await self.get(known.bulk.id)
        if bulk is None:
            await self._begin(known.bulk, audit)
        return BulkBegun(bulk or known.bulk, replayed=True)

    async def _begin(self, bulk: Bulk, audit: Callable[[str], AuditEntry] | None) -> None:
        """Write the name that replicas look for, then the record, unless it is there."""
        is_running, begun_at = bulk.status is BulkStatus.RUNNING, self._clock.moment()
        if is_running:
            await self._store.put_document(_RUNNING, bulk.id, bulk.created_at, read=0)
        entry = None if audit is None else audit(bulk.id)
        value = msgspec.to_builtins(bulk)
        if await self._store.put_document(_RECORDS, bulk.id, value, read=0, audit=entry) is None:
            return
        if is_running and self._clock.moment() - begun_at > _CREATED_MS // 2:
            # This process was paused, and another replica may have removed the name.
            await self._store.put_document(_RUNNING, bulk.id, bulk.created_at, read=0)
        log_event(
            logging.INFO,
            "bulk_created",
            bulk=bulk.id,
            action=str(bulk.action),
            matched=bulk.matched,
            actor=bulk.actor,
        )
        self._wake.set()

    async def get(self, bulk_id: str) -> Bulk | None:
        """One bulk action; ``None`` also if it cannot be read."""
        try:
            found = await self._read(bulk_id)
        except msgspec.ValidationError:
            return None  # of another version; the loop logs it
        return None if found is None else found[0]

    async def page(self, tenant: TenantId | None, *, cursor: str | None, limit: int) -> Page[Bulk]:
        """Bulk actions, newest first: those about one tenant, or all. A page may be short.

        Those that cannot be read, because a newer version wrote them, are left out.
        """
        page = await self._store.list_documents(_RECORDS, cursor=cursor, limit=limit)
        found: list[Bulk] = []
        for _, each in page.items:
            with suppress(msgspec.ValidationError):
                bulk = msgspec.convert(each.value, Bulk)
                if tenant in {None, bulk.tenant}:
                    found.append(bulk)
        return Page(tuple(found), page.cursor)

    async def stop(self, bulk_id: str, audit: AuditEntry | None = None) -> Bulk | None:
        """Stop a bulk action: no further run is acted on; ``None`` if there is none."""
        while True:
            found = await self._read(bulk_id)
            if found is None:
                return None
            bulk, revision = found
            stopped = stop(bulk, await self._store.now())
            if stopped is bulk:
                return bulk
            value = msgspec.to_builtins(stopped)
            written = await self._store.put_document(
                _RECORDS, bulk_id, value, read=revision, audit=audit
            )
            if written is not None:
                log_event(logging.INFO, "bulk_stopped", bulk=bulk_id)
                return stopped

    # ── Carrying out ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Carry out bulk actions that no other replica does, until cancelled."""
        tidied_at = self._clock.moment()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                with suppress(BackendError):
                    created = {*self._tenants} - self._being_created
                    page = await self._store.list_documents(_RUNNING, limit=_PAGE)
                    if page.cursor is None:
                        # Other replicas may have carried them out before this one looked.
                        for bulk_id in created.difference(name for name, _ in page.items):
                            self._tenants.pop(bulk_id, None)
                    names = [name for name, _ in page.items]
                    self._failed = {
                        name: self._failed[name] for name in names if name in self._failed
                    }
                    for bulk_id in names:
                        is_due = self._clock.moment() >= self._failed.get(bulk_id, 0)
                        if is_due and bulk_id not in self._under_way:
                            self._under_way.add(bulk_id)
                            tasks.create_task(self._carry_out(bulk_id))
                    if self._clock.moment() - tidied_at >= _TIDY_MS:
                        tidied_at = self._clock.moment()
                        await self.tidy()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()

    async def tidy(self) -> None:
        """Remove bulk actions that ended a month ago, with their lists of runs.

        What cannot be read is left to the version that wrote it.
        """
        before = await self._store.now() - _KEPT_MS
        for kind in (_KEYS, _RECORDS, _RUNNING, _RUNS):
            cursor: str | None = None
            while True:
                page = await self._store.list_documents(kind, cursor=cursor, limit=_PAGE)
                for name, each in page.items:
                    with suppress(ValueError):
                        bulk_id = name
                        if kind == _KEYS:
                            bulk_id = msgspec.convert(each.value, _BegunWithKey).bulk.id
                        if _created_at(bulk_id) < before:
                            await self._store.delete_document(kind, name)
                cursor = page.cursor
                if cursor is None:
                    break

    async def _carry_out(self, bulk_id: str) -> None:
        """Carry out a bulk action. One that fails holds up no others, and is tried again later.

        A newer version may have written it.
        """
        try:
            found = await self._read(bulk_id)
            if found is None:
                await self._forget_failed(bulk_id)
                return
            bulk, revision = found
            self._tenants[bulk_id] = bulk.tenant
            if bulk.status is not BulkStatus.RUNNING:
                await self.clean_up(bulk)
            elif bulk.is_free_for(self._replica, await self._store.now()):
                if bulk.holder:
                    log_event(logging.WARNING, "bulk_taken_over", bulk=bulk_id, holder=bulk.holder)
                await _Course(self, self._actions, bulk, revision).run()
        except BackendError:
            return  # the next look begins again
        except Exception as error:  # noqa: BLE001 - see above
            log_event(logging.ERROR, "bulk_failed", bulk=bulk_id, error=repr(error))
            self._failed[bulk_id] = Moment(self._clock.moment() + _FAILED_MS)
        finally:
            self._under_way.discard(bulk_id)
            self._tenants.pop(bulk_id, None)

    async def _forget_failed(self, bulk_id: str) -> None:
        """Remove the name of a bulk action without a record, if it is not being created now.

        Its list of runs stays for a repeat with the idempotency key, which writes name and record.
        """
        if await self._store.now() - _created_at(bulk_id) > _CREATED_MS:
            await self._store.delete_document(_RUNNING, bulk_id)

    async def write(self, bulk: Bulk, revision: int) -> tuple[Bulk, int] | None:
        """Write the record and extend the hold; ``None`` if another replica or a stop was first."""
        held = replace(
            bulk, holder=self._replica, held_until=Instant(await self._store.now() + HELD_MS)
        )
        written = await self._store.put_document(
            _RECORDS, bulk.id, msgspec.to_builtins(held), read=revision
        )
        return None if written is None else (held, written.revision)

    async def clean_up(self, bulk: Bulk) -> None:
        """Remove the list of runs of a bulk action that has ended, and then its name."""
        for number in range(-(-bulk.matched // _CHUNK)):
            await self._store.delete_document(_RUNS, _chunk(bulk.id, number))
        await self._store.delete_document(_RUNNING, bulk.id)

    async def finish(self, bulk: Bulk) -> None:
        """Clean up after the last write."""
        await self.clean_up(bulk)
        log_event(logging.INFO, "bulk_finished", bulk=bulk.id, done=bulk.done, failed=bulk.failed)

    async def reread(self, bulk_id: str) -> tuple[Bulk, int] | None:
        """The record as it is now."""
        return await self._read(bulk_id)

    async def end_of_key(self, bulk: Bulk) -> str | None:
        """What ended the key that began it; ``None`` if it still works, or if there was none."""
        if bulk.key_id is None:
            return None
        return end_of_key(await self._keys.record(bulk.key_id), self._clock.now())

    async def run_ids(self, bulk_id: str, number: int) -> Sequence[str]:
        """One chunk of the list of runs."""
        found = await self._store.document(_RUNS, _chunk(bulk_id, number))
        return [] if found is None else msgspec.convert(found.value, list[str])

    def moment_ms(self) -> int:
        """Monotonic time."""
        return self._clock.moment()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._clock.sleep(seconds)

    async def now(self) -> Instant:
        """The time of the store."""
        return await self._store.now()

    async def _matching(self, wanted: NewBulk, now: Instant) -> AsyncIterator[Sequence[RunSummary]]:
        until = Instant(now + 1)
        if wanted.only.until is not None:
            until = min(until, wanted.only.until)
        only = replace(wanted.only, until=until)
        cursor: str | None = None
        count = 0
        while True:
            page = await self._store.list_runs(wanted.tenant, only=only, cursor=cursor, limit=_PAGE)
            count += len(page.items)
            if count > BULK_RUNS_MAX:
                raise TooManyRuns
            yield page.items
            cursor = page.cursor
            if cursor is None:
                return

    async def _read(self, bulk_id: str) -> tuple[Bulk, int] | None:
        found = await self._store.document(_RECORDS, bulk_id)
        return None if found is None else (msgspec.convert(found.value, Bulk), found.revision)


class _Course:
    """A bulk action while this replica carries it out."""

    def __init__(
        self, service: BulkService, actions: RunActions, bulk: Bulk, revision: int
    ) -> None:
        self._service = service
        self._actions = actions
        self._bulk = bulk
        self._revision = revision
        self._due = dict.fromkeys(bulk.open, 0)
        """Open runs, and when each may be tried again."""
        self._repeats = frozenset(bulk.open)
        self._outcomes: dict[int, BulkDone | BulkFailed] = {}
        self._pace = BulkPace(bulk.rate_per_s)
        self._written_at = -HELD_MS
        self._key_checked_at: int | None = None
        self._chunks: dict[int, Sequence[str]] = {}

    async def run(self) -> None:
        """Act until the last run is settled, the bulk action is stopped or was taken over."""
        seen_at = self._service.moment_ms()
        while True:
            now = self._service.moment_ms()
            self._pace.wait((now - seen_at) / 1_000)
            seen_at = now
            if not await self._advance(now):
                return
            numbers = [number for number, at in self._due.items() if at <= now][:_AT_ONCE]
            await self._act_on(numbers)
            took_ms = self._service.moment_ms() - now
            await self._service.sleep(max(0.0, _TICK_S - took_ms / 1_000))

    async def _act_on(self, numbers: Sequence[int]) -> None:
        """Act on these runs, and extend the hold meanwhile: a run may have thousands of letters."""
        acting = asyncio.gather(*(self._act(number) for number in numbers))
        try:
            while not (await asyncio.wait({acting}, timeout=_EXTENDED_MS / 1_000))[0]:
                written = await self._service.write(self._bulk, self._revision)
                if written is None:
                    break  # it was stopped, or taken over: the next write finds out as well
                self._bulk, self._revision = written
            await acting
        finally:
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)  # none acts on after this

    async def _advance(self, now: int) -> bool:
        """Write outcomes and take the next runs; ``False`` if there is nothing more to do here."""
        bulk = settle(self._bulk, self._outcomes, await self._service.now())
        ended = await self._end_of_key(now)
        if ended is not None and bulk.status is BulkStatus.RUNNING:
            bulk = await self._without_key(bulk, ended)
        bulk, taken = begin(bulk, min(self._pace.count, _AT_ONCE))
        is_over = bulk.status is not BulkStatus.RUNNING
        if not (is_over or self._outcomes or taken or now - self._written_at >= _EXTENDED_MS):
            return True
        written = await self._service.write(bulk, self._revision)
        if written is None:
            await self._give_up()
            return False
        self._bulk, self._revision = written
        self._written_at = now
        self._pace.take(len(taken))
        self._due |= dict.fromkeys(taken, 0)
        self._outcomes.clear()
        if self._bulk.status is BulkStatus.RUNNING:
            return True
        await self._service.finish(self._bulk)
        return False

    async def _end_of_key(self, now: int) -> str | None:
        checked_at = self._key_checked_at
        if checked_at is not None and now - checked_at < _KEY_CHECKED_MS:
            return None
        ended = await self._service.end_of_key(self._bulk)
        self._key_checked_at = now
        return ended

    async def _without_key(self, bulk: Bulk, ended: str) -> Bulk:
        """The bulk action after its key has ended: the rest of its runs fails."""
        left = (*bulk.open, *range(bulk.next, bulk.matched))
        detail = f"not acted on: the key that began the bulk action is {ended}"
        failures = [
            BulkFailed(await self._run_id(number) or RunId(""), "unauthenticated", detail)
            for number in left[: BULK_ERRORS_MAX - len(bulk.errors)]
        ]
        log_event(logging.WARNING, "bulk_key_ended", bulk=bulk.id, key=bulk.key_id, left=len(left))
        return fail_rest(bulk, failures, await self._service.now())

    async def _give_up(self) -> None:
        """Count what was done, if the bulk action was stopped meanwhile."""
        while (found := await self._service.reread(self._bulk.id)) is not None:
            bulk, revision = found
            if bulk.status is not BulkStatus.STOPPED or not self._outcomes:
                return
            settled = settle(bulk, self._outcomes, await self._service.now())
            if await self._service.write(settled, revision) is not None:
                return

    async def _act(self, number: int) -> None:
        run_id = await self._run_id(number)
        outcome: BulkOutcome = (
            BulkFailed(RunId(""), "not_found", "the list of runs is gone")
            if run_id is None
            else await self._actions.act(self._bulk, run_id, is_repeat=number in self._repeats)
        )
        if isinstance(outcome, BulkLater):
            self._due[number] = self._service.moment_ms() + outcome.delay_ms
        else:
            del self._due[number]
            self._outcomes[number] = outcome

    async def _run_id(self, number: int) -> RunId | None:
        chunk, place = divmod(number, _CHUNK)
        run_ids = self._chunks.get(chunk)
        if run_ids is None:
            run_ids = await self._service.run_ids(self._bulk.id, chunk)
            self._chunks[chunk] = run_ids
        return RunId(run_ids[place]) if place < len(run_ids) else None


def _created_at(bulk_id: str) -> Instant:
    return Instant(_LAST_TIME - int(bulk_id[:11], 16))


def _chunk(bulk_id: str, number: int) -> str:
    return f"{bulk_id}-{number:04d}"
