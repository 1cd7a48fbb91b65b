"""Schedules: stored as documents, watched by every replica, one run for each tick.

Every replica tries every tick. The store admits one: the tick is the run's idempotency key, in a
namespace that no caller can use, and the mark of the schedule rises in the step of the admission.
So a replica that was paused for days, with an old view of the schedule, starts nothing. What
happened is written into the schedule's document by compare-and-set. The tick that is tried is
written there before: until the gate has answered, no replica may list it as missed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from stanchion.core.audit import AuditEntry
from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.core.schedule import (
    MISSED_MAX,
    SCHEDULES_BYTES_MAX,
    SCHEDULES_MAX,
    UNANSWERED,
    DueTicks,
    MissedTick,
    Overlap,
    Schedule,
    ScheduleSpec,
    TickMark,
    TickOutcome,
    after_taken,
    decide_ticks,
    due_ticks,
    next_ticks,
    outcome_of,
    schedule_faults,
    with_held,
    with_missed,
    with_run,
    with_spec,
    with_trial,
    with_triggered,
)
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Document
from stanchion.services.context import ReplicaContext
from stanchion.services.gate import Gate
from stanchion.services.gate_answers import (
    GateFull,
    GateOverBudget,
    InvalidInput,
    KeyMismatch,
    RunStarted,
)
from stanchion.services.limiter import SingleFlight
from stanchion.services.log import OutageLogger, log_event
from stanchion.services.plans import Plans, UnknownWorkflow
from stanchion.services.work import TenantOverloaded, TenantWorkBudget

READ_S: Final = 5.0
"""How often the schedules are read, beside when one is changed."""
LOOK_S: Final = 0.5
"""How often it is checked whether a tick is due."""
RETRY_MS: Final = 1_000
"""Between two tries at a tick that was refused."""
FAILED_MS: Final = 30_000
"""Until a schedule that could not be handled is tried again, unless it changes."""
TRIAL_MS: Final = 5_000
"""How long a replica may try a tick alone: longer than the gate takes."""
BELL: Final = "schedules"
_KIND: Final = "schedule"
_NAMESPACE: Final = "\x1fschedule/"
"""The keys of callers are visible characters."""
_CONCURRENT_MAX: Final = 64
"""Schedules that are handled at one time, of one tenant each."""
_TRIES_MAX: Final = 10
_PAGE: Final = 100
"""Documents are decoded a page at a time, between which the event loop serves others."""
_ROWS_AT_ONCE: Final = 20
"""Rows of a list that are decoded in one iteration of the event loop."""
_Name = tuple[TenantId, str]


class ScheduleConflict(Exception):
    """The schedule was changed at the same time, again and again."""


class TooManySchedules(Exception):
    """The tenant has as many schedules as it may have. The text says which limit that is."""


class _ListedSpec(ScheduleSpec, frozen=True, kw_only=True):
    input: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment] # it is sent as it is


class ListedSchedule(Schedule, frozen=True, kw_only=True):
    """A schedule whose input is not decoded: a list only sends it, and it may be large."""

    spec: _ListedSpec


class ScheduleService:
    """The schedules of all tenants, and the loop that starts their runs."""

    def __init__(
        self, context: ReplicaContext, *, gate: Gate, plans: Plans, budget: TenantWorkBudget
    ) -> None:
        self._store = context.store
        self._clock = context.clock
        self._bus = context.bus
        self._signals = context.signals
        self._gate = gate
        self._plans = plans
        self._budget = budget
        self._known: dict[_Name, tuple[bytes, int]] = {}
        """What was read last, as JSON, with the revision of its document.

        Decoded, an input of many small values would take thirty times the memory.
        """
        self._sizes: dict[_Name, int] = {}
        """Bytes of the schedules that were read last, or stored here since."""
        self._wake_at: dict[_Name, tuple[int, Instant]] = {}
        """When there is something to do for a schedule, in this revision of it."""
        self._read_at: Instant | None = None
        self._next: OrderedDict[tuple[str, str], _Next] = OrderedDict()
        """The next ticks of rare expressions, by expression and time zone."""
        self._trials: dict[_Name, tuple[Instant, Instant]] = {}
        """Ticks that other replicas try: which, and since when that is known here."""
        self._handling: dict[TenantId, asyncio.Task[None]] = {}
        """Tenants whose schedules are being handled."""
        self._reads = SingleFlight()
        self._limiter = asyncio.Semaphore(_CONCURRENT_MAX)
        self._stop_hearing = self._bus.listen(Bell.SETTINGS, self._hear)

    # ── For the routes ───────────────────────────────────────────────────────────────────────────

    async def faults(self, tenant: TenantId, spec: ScheduleSpec) -> list[Fault]:
        """What is wrong with a schedule now. Raises ``BackendError`` and ``TenantOverloaded``."""
        self._budget.check(tenant)
        with self._budget.measured(tenant):
            faults = schedule_faults(spec)
        if faults:
            return faults
        linked = await self._plans.newest(tenant, spec.workflow_id, refresh=True)
        if isinstance(linked, UnknownWorkflow):
            return [Fault("workflow_id", "there is no such workflow")]
        if isinstance(linked, WorkflowFaults):
            return list(linked.faults)
        schema = linked.plan.body.schema
        with self._budget.measured(tenant):
            return [] if schema is None else list(schema.faults(spec.input))

    async def put(
        self, tenant: TenantId, schedule_id: str, spec: ScheduleSpec, audit: AuditEntry
    ) -> Schedule:
        """Store a schedule. The same one again changes nothing: its ticks go on.

        Raises ``BackendError``, ``ScheduleConflict`` and ``TooManySchedules``.
        """
        name, size = (tenant, schedule_id), _size(spec)
        self._check_room(name, size)

        def change(old: Schedule | None, tried_run: RunId | None) -> Schedule:
            now, author = self._clock.now(), audit.actor
            if old is None:
                return Schedule(spec=spec, generation=now, author=author, since=now, handled=now)
            if old.spec == spec:
                return old
            return with_spec(old, spec, author, now, tried_run=tried_run)

        changed = await self._change(name, change, audit)
        self._sizes[name] = size
        self._bus.ring(Bell.SETTINGS, BELL)
        return changed

    def _check_room(self, name: _Name, size: int) -> None:
        """Raise ``TooManySchedules`` if there is no room, as far as this replica knows."""
        others = [
            each for other, each in self._sizes.items() if other[0] == name[0] and other != name
        ]
        if len(others) >= SCHEDULES_MAX:
            raise TooManySchedules(f"a tenant has at most {SCHEDULES_MAX} schedules")
        if sum(others) + size > SCHEDULES_BYTES_MAX:
            raise TooManySchedules(
                f"the schedules of a tenant have at most {SCHEDULES_BYTES_MAX} bytes together"
            )

    async def get(self, tenant: TenantId, schedule_id: str) -> Schedule | None:
        """One schedule; ``None`` also if it cannot be read. Raises ``BackendError``."""
        found = await self._store.document(_KIND, _name((tenant, schedule_id)))
        return None if found is None else _decoded(found)

    async def delete(self, tenant: TenantId, schedule_id: str, audit: AuditEntry) -> bool:
        """Delete a schedule; its runs go on. ``False`` if there is none."""
        name = _name((tenant, schedule_id))
        stored = await self.get(tenant, schedule_id)
        entry = replace(audit, before=_shown(stored))
        removed = await self._store.delete_document(_KIND, name, audit=entry)
        self._sizes.pop((tenant, schedule_id), None)
        self._bus.ring(Bell.SETTINGS, BELL)
        return removed

    async def list(
        self, tenant: TenantId | None, *, after: _Name | None = None, limit: int | None = None
    ) -> list[tuple[_Name, ListedSchedule]]:
        """The schedules of a tenant, or of all, by tenant and id. Raises ``BackendError``.

        Callers that ask before a read begins share it: 200 at once made a server take a gigabyte.
        A schedule that cannot be read, because a newer version wrote it, is left out.
        """
        found = await self._reads.read(_KIND, self._documents)
        names = sorted(
            name for name in found if tenant in {None, name[0]} and (after is None or name > after)
        )
        rows: list[tuple[_Name, ListedSchedule]] = []
        for looked_at, name in enumerate(names):
            if len(rows) == limit:
                break
            # The loop logs those that cannot be read.
            with suppress(msgspec.ValidationError):
                rows.append((name, _LISTED_DECODER.decode(found[name][0])))
            if looked_at % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)
        return rows

    async def list_triggered(self, tenant: TenantId, schedule_id: str, run_id: RunId) -> None:
        """List a run that was triggered with those of the schedule. Raises ``BackendError``.

        The run is not listed if the schedule is deleted or changed again and again meanwhile.
        """
        name = (tenant, schedule_id)
        for _ in range(_TRIES_MAX):
            found = await self._store.document(_KIND, _name(name))
            if found is None:
                return
            schedule = _decoded(found)
            if schedule is None:
                return
            changed = with_triggered(schedule, self._clock.now(), run_id)
            if changed is schedule or await self._write(name, changed, found.revision) is not None:
                return

    def next_starts(self, name: _Name, schedule: Schedule, count: int) -> tuple[Instant, ...]:
        """When the next ticks will start their runs, with the jitter."""
        if schedule.spec.paused:
            return ()
        delay_ms = round(schedule.spec.jitter_s * 1_000 * _fraction(name))
        # After a clock was set back, ticks that were handled before are still to come.
        after = max(Instant(self._clock.now() - delay_ms), schedule.handled)
        ticks = self._next_ticks(schedule, Instant(max(after, schedule.since)), count)
        return tuple(Instant(each + delay_ms) for each in ticks)

    def due(self, name: _Name, schedule: Schedule) -> DueTicks | None:
        """The ticks of a schedule that are due and have no run yet."""
        return due_ticks(schedule, self._clock.now(), _fraction(name))

    def _next_ticks(self, schedule: Schedule, after: Instant, count: int) -> Sequence[Instant]:
        """The same as the function of the core. Ticks that are years apart are found once.

        They take six milliseconds to find, for each schedule with the same expression and each
        change of one, on each replica. They are kept from an hour ago on, since each schedule has
        an instant of its own from which its next ticks count.
        """
        spec = schedule.spec
        if spec.cron is None:
            return next_ticks(schedule, after, count)
        key = (spec.cron, spec.timezone)
        known = self._next.get(key)
        if known is None or not known.holds(after, count):
            since = Instant(after - _KEPT_FROM_MS)
            ticks = next_ticks(replace(schedule, since=since), since, count)
            known = _Next(since, count, ticks)
            if not known.holds(after, count):
                return next_ticks(schedule, after, count)  # not rare, so soon found
            self._next[key] = known
            if len(self._next) > _EXPRESSIONS_KEPT:
                self._next.popitem(last=False)
        return known.ticks

    # ── The loop ─────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Start the runs of ticks that are due, until cancelled."""
        outage = OutageLogger("schedules_unread", "schedules_read_again")
        try:
            while True:
                try:
                    await self.look()
                except BackendError as error:
                    outage.failed(error)
                else:
                    outage.worked()
                await self._clock.sleep(LOOK_S)
        finally:
            for task in self._handling.values():
                task.cancel()
            self._handling.clear()

    async def look(self) -> None:
        """Handle every schedule that is due. Raises ``BackendError``.

        Tenants are handled concurrently, and one that takes longer than ``LOOK_S`` is not waited
        for: a start may wait seconds for its tenant's admission lock, and others' ticks are due.
        """
        now = self._clock.now()
        if self._read_at is None or now - self._read_at >= READ_S * 1_000:
            await self._read()
            self._read_at = now
        due: dict[TenantId, list[_Name]] = {}
        for name, (_, revision) in self._known.items():
            decided_on, wake_at = self._wake_at.get(name, (revision, now))
            is_due = wake_at <= now or decided_on != revision
            if is_due and name[0] not in self._handling:
                due.setdefault(name[0], []).append(name)
        for tenant, names in due.items():
            task = asyncio.create_task(self._handle_all(names), name=f"schedules of {tenant}")
            self._handling[tenant] = task
        if not self._handling:
            return
        await asyncio.wait(self._handling.values(), timeout=LOOK_S)
        ended = [tenant for tenant, task in self._handling.items() if task.done()]
        errors = [self._handling.pop(tenant).exception() for tenant in ended]
        for error in filter(None, errors):
            raise error

    async def _handle_all(self, names: Iterable[_Name]) -> None:
        """Handle schedules of one tenant, one after the other."""
        for name in names:
            # For each of them: 64 tenants whose starts all wait must not hold up the others' ticks.
            async with self._limiter:
                found = self._known.get(name)
                if found is not None:
                    await self._handle_one(name, *found)
            # A tick that is years ahead takes a millisecond to find.
            await asyncio.sleep(0)

    async def _handle_one(self, name: _Name, text: bytes, revision: int) -> None:
        """Handle a schedule. One that fails holds up no others, and is tried again later.

        A newer version may have written it. Raises ``BackendError``.
        """
        try:
            await self._handle(name, _DECODER.decode(text), revision, self._clock.now())
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            _log_failed(name, error)
            _, written = self._known.get(name, (text, revision))  # it may have been written since
            self._wake_at[name] = (written, Instant(self._clock.now() + FAILED_MS))

    def close(self) -> None:
        """Stop listening."""
        self._stop_hearing()

    def _hear(self, note: str) -> None:
        if note == BELL:
            self._read_at = None

    async def _handle(self, name: _Name, schedule: Schedule, revision: int, now: Instant) -> None:
        busy = await self._unfinished(schedule, now)
        plan = decide_ticks(schedule, now, _fraction(name), busy)
        if plan.missed:
            schedule = with_missed(schedule, plan.missed)
            written = await self._write(name, schedule, revision)
            if written is None:
                return  # another replica was first; the next look reads it
            revision = written
            self._tell_missed(name, plan.missed)
        if plan.start is not None:
            await self._start(name, schedule, revision, plan.start)
            return
        if plan.hold is not None and schedule.tried != plan.hold:
            written = await self._write(name, with_held(schedule, plan.hold), revision)
            if written is None:
                return
            revision = written
        if plan.wake_at is not None:
            self._wake_at[name] = (revision, plan.wake_at)
        elif not plan.missed:
            self._wake_at[name] = (revision, _NEVER)

    def _tell_missed(self, name: _Name, missed: Sequence[MissedTick]) -> None:
        """Count missed ticks, the oldest first, and log the newest."""
        for each in missed:
            self._signals.tick(name[0], outcome_of(each))
        for each in missed[-MISSED_MAX:]:
            log_event(
                logging.WARNING,
                "schedule_missed",
                tenant=name[0],
                schedule=name[1],
                tick=_time(each.tick),
                reason=each.reason,
            )

    async def _unfinished(self, schedule: Schedule, now: Instant) -> RunId | None:
        """An unfinished run of the schedule, if a tick is due that must not overlap it."""
        if schedule.spec.overlap is Overlap.ALLOW or not schedule.runs:
            return None
        if decide_ticks(schedule, now, 0.0, None).start is None:
            return None
        last, *others = schedule.runs
        # Since the last change each run began after the end of the one before it. Those from
        # before that change may have been allowed to overlap.
        for each in (last, *(each for each in others if each.tick <= schedule.since)):
            loaded = await self._store.load(each.run_id)
            if loaded is not None and not loaded.run.status.is_finished:
                return each.run_id
        return None

    async def _start(self, name: _Name, schedule: Schedule, revision: int, tick: Instant) -> None:
        (tenant, schedule_id), spec = name, schedule.spec
        if self._is_tried_elsewhere(name, schedule, tick):
            self._wake_at[name] = (revision, Instant(self._clock.now() + RETRY_MS))
            return
        if tick > schedule.handled or schedule.refusal:
            # Each time: another replica may have given it up since it was refused here, or still
            # try it. What that one writes afterwards must find a newer revision.
            schedule = with_trial(schedule, tick)
            written = await self._write(name, schedule, revision)
            if written is None:
                return  # another replica was first; the next look reads it
            revision = written
        refusal = ""
        try:
            answer = await self._gate.start(
                tenant,
                spec.workflow_id,
                spec.input,
                key=_key(schedule_id, schedule.generation, tick),
                actor=f"schedule {schedule_id}",
                starter=schedule.author,
                labels=spec.labels,
                tick=TickMark(schedule_id, schedule.generation, tick),
            )
        except TenantOverloaded as overloaded:
            refusal = overloaded.detail
        else:
            if isinstance(answer, RunStarted):
                written = await self._write(name, with_run(schedule, tick, answer.run_id), revision)
                if written is None:
                    await self._record(name, tick, answer.run_id)
                else:
                    self._signals.tick(tenant, TickOutcome.STARTED)
                return
            if isinstance(answer, KeyMismatch):
                # Mostly the document that was read is old: then this is not written.
                self._read_at = None
                changed = after_taken(schedule, tick, answer.mark, self._clock.now())
                if await self._write(name, changed, revision) is not None:
                    self._tell_missed(name, [e for e in changed.missed if e not in schedule.missed])
                return
            refusal = _refusal(answer)
        retry_at = Instant(self._clock.now() + RETRY_MS)
        if (schedule.tried, schedule.refusal) != (tick, refusal):
            refused = replace(schedule, tried=tick, refusal=refusal)
            written = await self._write(name, refused, revision)
            if written is None:
                return  # another replica was first; the next look reads it
            revision = written
        self._wake_at[name] = (revision, retry_at)

    def _is_tried_elsewhere(self, name: _Name, schedule: Schedule, tick: Instant) -> bool:
        """Whether another replica tries the tick, as far as is known for ``TRIAL_MS``.

        If both tried it, one could be refused and the other not.
        """
        if schedule.tried != tick or schedule.refusal != "" or tick <= schedule.handled:
            return False
        now = self._clock.now()
        known, since = self._trials.setdefault(name, (tick, now))
        if known != tick:
            self._trials[name] = (tick, now)
        return known != tick or now - since < TRIAL_MS

    async def _record(self, name: _Name, tick: Instant, run_id: RunId) -> None:
        """Write the run of a tick into a schedule that was changed meanwhile."""
        for _ in range(_TRIES_MAX):
            try:
                found = await self._store.document(_KIND, _name(name))
            except BackendError:
                await self._clock.sleep(LOOK_S)
                continue
            schedule = None if found is None else _decoded(found)
            if found is None or schedule is None:
                return
            if any(each.run_id == run_id for each in schedule.runs):
                return
            changed = with_run(schedule, tick, run_id)
            if await self._write(name, changed, found.revision) is not None:
                self._signals.tick(name[0], TickOutcome.STARTED)
                return

    async def _tried_run(self, name: _Name, schedule: Schedule) -> RunId | None:
        """The run of the tick that is being tried, if the store has admitted it."""
        tenant, schedule_id = name
        if schedule.tried is None or schedule.refusal not in {"", UNANSWERED}:
            return None
        key = _key(schedule_id, schedule.generation, schedule.tried)
        known = (await self._store.check_starts(tenant, (), (key,))).known
        return known[key].run_id if key in known else None

    # ── Documents ────────────────────────────────────────────────────────────────────────────────

    async def _read(self) -> None:
        known = await self._documents()
        self._wake_at = {
            name: due
            for name, due in self._wake_at.items()
            if name in known and self._known.get(name) == known[name]
        }
        self._known = known
        self._sizes = {name: _stored_size(text) for name, (text, _) in known.items()}
        self._signals.scheduled({tenant for tenant, _ in known})
        self._trials = {name: trial for name, trial in self._trials.items() if name in known}

    async def _documents(self) -> dict[_Name, tuple[bytes, int]]:
        """All schedules, as in ``_known``. Those that have not changed are the same objects.

        That is told by their text: the revisions of one that was removed and made again begin at 1,
        and after a failover with loss they may count on from an earlier one.
        """
        documents: dict[_Name, tuple[bytes, int]] = {}
        async for page in self._pages():
            for name, document in page:
                found = (msgspec.json.encode(document.value), document.revision)
                known = self._known.get(name)
                documents[name] = known if known == found else found
        return documents

    async def _pages(self) -> AsyncIterator[Sequence[tuple[_Name, Document]]]:
        """The documents of all schedules."""
        cursor: str | None = None
        while True:
            page = await self._store.list_documents(_KIND, cursor=cursor, limit=_PAGE)
            found = []
            for name, document in page.items:
                tenant, _, schedule_id = name.partition("/")
                found.append(((TenantId(tenant), schedule_id), document))
            yield found
            cursor = page.cursor
            if cursor is None:
                return
            # What several stores have in memory is answered without a pause.
            await asyncio.sleep(0)

    async def _write(self, name: _Name, schedule: Schedule, revision: int) -> int | None:
        """The new revision; ``None`` if the document has changed, or is gone."""
        written = await self._store.put_document(
            _KIND, _name(name), msgspec.to_builtins(schedule), read=revision
        )
        if written is None:
            self._read_at = None
            return None
        self._known[name] = (msgspec.json.encode(schedule), written.revision)
        return written.revision

    async def _change(
        self,
        name: _Name,
        change: Callable[[Schedule | None, RunId | None], Schedule],
        audit: AuditEntry,
    ) -> Schedule:
        for _ in range(_TRIES_MAX):
            found = await self._store.document(_KIND, _name(name))
            old = None if found is None else _decoded(found)
            new = change(old, None if old is None else await self._tried_run(name, old))
            if new is old:
                return new
            entry = replace(audit, before=_shown(old), after=_shown(new))
            written = await self._store.put_document(
                _KIND,
                _name(name),
                msgspec.to_builtins(new),
                read=0 if found is None else found.revision,
                audit=entry,
            )
            if written is not None:
                if old is not None:
                    if new.runs != old.runs:  # the tick that was being tried has one
                        self._signals.tick(name[0], TickOutcome.STARTED)
                    gone = new.missed_total - old.missed_total  # at most the newest are listed
                    self._tell_missed(name, [*reversed(new.missed[: max(gone, 0)])])
                return new
        raise ScheduleConflict


class _Next(msgspec.Struct, frozen=True):
    """The next ticks of a cron expression, as they were found."""

    after: Instant
    count: int
    ticks: list[Instant]

    def holds(self, after: Instant, count: int) -> bool:
        """Whether these are also the ticks after this instant."""
        return (
            self.count == count
            and self.after <= after
            and (not self.ticks or after < self.ticks[0])
        )


class _SpecText(msgspec.Struct):
    spec: msgspec.Raw


_LISTED_DECODER: Final = msgspec.json.Decoder(ListedSchedule)
_DECODER: Final = msgspec.json.Decoder(Schedule)
_SPEC_DECODER: Final = msgspec.json.Decoder(_SpecText)
_KEPT_FROM_MS: Final = 3_600_000
_EXPRESSIONS_KEPT: Final = 1_000
_NEVER: Final = Instant(2**62)
"""There is nothing to do before the schedule changes."""


def _log_failed(name: _Name, error: Exception) -> None:
    tenant, schedule_id = name
    log_event(
        logging.ERROR, "schedule_failed", tenant=tenant, schedule=schedule_id, error=repr(error)
    )


def _time(tick: Instant) -> str:
    """A tick in a log line."""
    at = datetime.fromtimestamp(tick // 1_000, UTC) + timedelta(milliseconds=tick % 1_000)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _key(schedule_id: str, generation: int, tick: Instant) -> str:
    """The idempotency key of the run of a tick."""
    return f"{_NAMESPACE}{schedule_id}/{generation}/{tick}"


def _name(name: _Name) -> str:
    return f"{name[0]}/{name[1]}"


def _size(spec: ScheduleSpec) -> int:
    return len(msgspec.json.encode(spec))


def _stored_size(text: bytes) -> int:
    """The size of the specification of a schedule as it was read."""
    try:
        return len(_SPEC_DECODER.decode(text).spec)
    except msgspec.ValidationError:
        return len(text)


def _decoded(document: Document) -> Schedule | None:
    """The schedule; ``None`` if it cannot be read, which the loop logs."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(document.value, Schedule)
    return None


def _shown(schedule: Schedule | None) -> JsonObject | None:
    """A schedule in the audit log. Its input may be secret."""
    if schedule is None:
        return None
    shown: JsonObject = msgspec.to_builtins(schedule.spec)
    if shown.pop("input"):
        shown["redacted"] = ["input"]
    return shown


def _fraction(name: _Name) -> float:
    """A fraction that is the same on every replica, for the jitter."""
    digest = hashlib.sha256(_name(name).encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _refusal(answer: object) -> str:
    match answer:
        case GateFull(queue_max=int(queue_max)):
            return f"the tenant was full, and so was its queue: {_runs(queue_max)}"
        case GateFull(limit=limit):
            return f"the tenant was full: {_runs(limit)}"
        case GateOverBudget(over=over):
            return f"too little was left of the budget '{over.budget}' of {over.limit}"
        case UnknownWorkflow():
            return "there was no such workflow"
        case InvalidInput(faults=faults) | WorkflowFaults(faults=faults):
            return f"the workflow refused it: {faults[0]}"
        case _:
            return UNANSWERED
