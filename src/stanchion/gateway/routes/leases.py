"""Lease routes: the locks that are held, and the operators' way to hold or release one.

Holding and releasing are audited and logged with the actor. The escalation routes are here too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, Never, assert_never

import msgspec

from stanchion.core.escalation import Level, Order
from stanchion.core.model import Instant, Risk
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member, not_found
from stanchion.gateway.route import (
    OPERATORS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
)
from stanchion.gateway.views import LAST_INSTANT, to_instant, when, wire_view
from stanchion.ports.errors import BackendError, sentence
from stanchion.ports.locks import AcquireTooLate, Granted, Held, LockHolder, LockView
from stanchion.services.lease_signals import UNLOCKED_PART, LeaseMark, LockWait, Unlocked
from stanchion.services.lock_audit import LockAudit, RunNotMarked
from stanchion.services.log import log_event
from stanchion.wire.admin import (
    EscalationCounters,
    EscalationView,
    HoldLease,
    LeaseList,
    LeaseMarkRow,
    LeaseRow,
    LockHistory,
    LockWaitRow,
    SetEscalation,
    UnlockedRow,
)
from stanchion.wire.identifiers import Comment, Limit, LockName
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()


class PagedLeases(Paging, frozen=True, forbid_unknown_fields=True):
    """Which page of the locks; usually all of them."""

    limit: Limit = 1000


_LISTED_MAX: Final = 10_000
"""Locks that are read for a page."""


@ROUTES.add(
    "GET /v1/admin/leases",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    LeaseList,
    codes=(Code.LOCKS_UNAVAILABLE,),
)
async def list_leases(call: Call[NoBody, PagedLeases]) -> Reply:
    """List the locks that are held, by name, with holder and renewals.

    A cursor is the last name of the page before.
    """
    locks, query = call.services.locks, call.query
    if locks is None:
        return Reply(LeaseList(()))
    try:
        held = await locks.list(limit=_LISTED_MAX)
    except BackendError as error:
        _away(call, error)
    rest = [each for each in held if query.cursor is None or each.name > query.cursor]
    page = rest[: query.limit]
    cursor = page[-1].name if len(rest) > len(page) else None
    return Reply(LeaseList(tuple(_row(each) for each in page), cursor))


@ROUTES.add(
    "GET /v1/admin/leases/{name}",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    LeaseRow,
    codes=(Code.NOT_FOUND, Code.LOCKS_UNAVAILABLE),
)
async def get_lease(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """Show one lock, with holder and renewals; 404 while it is free."""
    locks = call.services.locks
    try:
        view = None if locks is None else await locks.inspect(call.params["name"])
    except BackendError as error:
        _away(call, error)
    return not_found("lease") if view is None else Reply(_row(view))


@ROUTES.add(
    "POST /v1/admin/leases",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    LeaseRow,
    audits="lease.hold",
    codes=(Code.CONFLICT, Code.LOCKS_UNAVAILABLE),
)
async def hold_lease(call: Call[HoldLease, NoQuery]) -> Reply | Refusal:
    """Hold a lock as an operator, for a limited time."""
    locks = _locks(call)
    name, ttl_ms = call.body.name, round(call.body.ttl_s * 1000)
    try:
        entry = call.audit("lease", tenant=None)
        answer = await locks.hold(name, ttl_ms=ttl_ms, audit=entry)
    except BackendError as error:
        _away(call, error)
    match answer:
        case Granted():
            log_event(
                logging.WARNING, "lease_held_by_hand", lease=name, ttl_ms=ttl_ms, actor=call.actor
            )
            holder = LockHolder(call.actor, is_operator=True)
            since = await _acquired_at(call, name, answer.fence)
            return Reply(_row(LockView(name, answer.fence, ttl_ms, holder, since)))
        case Held():
            detail = f"another holds it, for at most {answer.expires_in_ms / 1000:.1f} s"
            return Refusal(code=Code.CONFLICT, detail=detail)
        case AcquireTooLate():
            return call.state.unavailable(Code.LOCKS_UNAVAILABLE, "the lock store was too slow")
        case RunNotMarked():
            detail = "the store did not write the hold to the run, so the lock is free again"
            return call.state.unavailable(Code.STORE_UNAVAILABLE, detail)
        case _:
            assert_never(answer)


class WithReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why it is done, for the audit log."""

    reason: Comment | None = None


@ROUTES.add(
    "DELETE /v1/admin/leases/{name}",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    LeaseRow,
    audits="lease.release",
    codes=(Code.NOT_FOUND, Code.LOCKS_UNAVAILABLE),
)
async def release_lease(call: Call[NoBody, WithReason]) -> Reply | Refusal:
    """Release a lock by force, whichever process holds it."""
    locks = _locks(call)
    name, reason = call.params["name"], call.query.reason
    try:
        entry = call.audit("lease", tenant=None, after=reason and {"reason": reason})
        view = await locks.release(name, audit=entry)
    except BackendError as error:
        _away(call, error)
    if view is None:
        return not_found("lease")
    log_event(
        logging.WARNING,
        "lease_released_by_hand",
        lease=name,
        fence=view.fence,
        actor=call.actor,
        reason=reason,
    )
    return Reply(_row(view))


class OneLock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lock whose moments are returned."""

    name: LockName | None = None


@ROUTES.add("GET /v1/admin/lock-history", OPERATORS, RouteScope.DEPLOYMENT, LockHistory)
async def get_lock_history(call: Call[NoBody, OneLock]) -> Reply:
    """What this replica did without a lock, when locks were busy, and a lock's fences."""
    services, history = call.services, call.services.lease_history
    now = services.clock.now()
    marks = () if call.query.name is None else history.of_lock(call.query.name)
    return Reply(
        LockHistory(
            replica=services.replicas.replica,
            since=when(history.since),
            unlocked_count=history.unlocked_count,
            unlocked=tuple(map(_unlocked, reversed(history.unlocked))),
            unlocked_elsewhere=await _unlocked_elsewhere(call),
            until=when(now),
            bucket_ms=_BUCKET_MS,
            busy=_buckets(history.busy, now),
            waits=tuple(map(_wait, history.waits)),
            marks=tuple(map(_mark, marks)),
        )
    )


async def _unlocked_elsewhere(call: Call[Any, Any]) -> dict[str, int]:
    """How often the other replicas say that they worked without a lock."""
    replicas, found = call.services.replicas, {}
    with suppress(BackendError):
        for each in (await replicas.read(max_age_ms=_VIEW_MS)).replicas:
            count = each.summary.parts.get(UNLOCKED_PART)
            if each.replica != replicas.replica and isinstance(count, int) and count > 0:
                found[each.replica] = count
    return found


_VIEW_MS: Final = 1_000
"""How old the summaries of other replicas may be."""
_BUCKET_MS: Final = 50
"""Fine enough to see whether retries of a policy of some hundred milliseconds come in step."""
_BUCKETS: Final = 1_200


def _buckets(times: Iterable[Instant], until: Instant) -> tuple[int, ...]:
    """How many of the times are in each of the last buckets, oldest first."""
    counts = [0] * _BUCKETS
    for time in times:
        place = _BUCKETS - 1 - (until - time) // _BUCKET_MS
        if 0 <= place < _BUCKETS:
            counts[place] += 1
    return tuple(counts)


def _locks(call: Call[Any, Any]) -> LockAudit:
    if call.services.lock_audit is None:
        refusal = call.state.unavailable(Code.LOCKS_UNAVAILABLE, "there is no lock backend")
        raise RequestRefused(refusal)
    return call.services.lock_audit


def _away(call: Call[Any, Any], error: BackendError) -> Never:
    log_event(logging.WARNING, "lease_route_failed", error=sentence(error))
    refusal = call.state.unavailable(Code.LOCKS_UNAVAILABLE, "the lock backend does not answer")
    raise RequestRefused(refusal) from error


async def _acquired_at(call: Call[Any, Any], name: str, fence: int) -> Instant | None:
    """Since when the lock store says that this fence holds the lock, if it can be read."""
    view = None
    if call.services.locks is not None:
        with suppress(BackendError):
            view = await call.services.locks.inspect(name)
    return view.acquired_at if view is not None and view.fence == fence else None


_row = wire_view(LockView, LeaseRow, holder="holder.name")
_unlocked = wire_view(Unlocked, UnlockedRow)
_wait = wire_view(LockWait, LockWaitRow)
_mark = wire_view(LeaseMark, LeaseMarkRow)


_LEVELS: Final[Mapping[Level, Literal["normal", "escalated", "latched"]]] = {
    Level.NORMAL: "normal",
    Level.ESCALATED: "escalated",
    Level.LATCHED: "latched",
}
_FORCED: Final[Mapping[Order | None, Literal["force_open", "force_closed"]]] = {
    Order.FORCE_OPEN: "force_open",
    Order.FORCE_CLOSED: "force_closed",
}


@ROUTES.add("GET /v1/admin/escalation", OPERATORS, RouteScope.DEPLOYMENT, EscalationView)
async def get_escalation(call: Call[NoBody, NoQuery]) -> Reply:
    """The escalation level: whether the closed classes fail closed now, and why."""
    return Reply(_view(call))


@ROUTES.add(
    "POST /v1/admin/escalation",
    OPERATORS,
    RouteScope.DEPLOYMENT,
    EscalationView,
    audits="escalation.set",
)
async def set_escalation(call: Call[SetEscalation, NoQuery]) -> Reply | Refusal:
    """Give an operator's order: `force_open`, `force_closed`, or `clear`."""
    body, ends_at = call.body, None
    if body.expires_at is not None:
        ends_at = to_instant(body.expires_at)
        if body.order == "clear" or ends_at <= call.services.clock.now():
            return invalid_member("expires_at", "must be later than now, and not for a clear")
        if ends_at > LAST_INSTANT:
            return invalid_member("expires_at", "must be before the year 10000 in UTC")
    await call.services.escalating.order(
        Order(body.order),
        actor=call.actor,
        reason=body.reason,
        expires_at=ends_at,
        audit=call.audit("escalation", tenant=None),
    )
    return Reply(_view(call))


def _view(call: Call[Any, Any]) -> EscalationView:
    escalating = call.services.escalating
    order = escalating.order_in_force
    return EscalationView(
        level=_LEVELS[escalating.level],
        forced=_FORCED.get(escalating.forced),
        forced_by=None if order is None else order.actor,
        forced_at=None if order is None else when(order.at),
        reason=None if order is None else order.reason,
        expires_at=None if order is None or order.expires_at is None else when(order.expires_at),
        closes=call.services.settings.current.escalation.closes,
        closed_now=tuple(risk for risk in Risk if escalating.closes(risk)),
        trips_today=escalating.trips_today,
        counters=_counters(call),
    )


def _counters(call: Call[Any, Any]) -> EscalationCounters:
    counts = call.services.escalating.counts
    rules = call.services.settings.current.escalation
    return EscalationCounters(
        replica=call.services.replicas.replica,
        window_s=rules.window_s,
        fallbacks_per_s=counts.fallbacks_per_s,
        fallbacks_per_s_max=rules.fallbacks_per_s,
        fifths_at_threshold=counts.slices_at_threshold,
        duplicates=counts.duplicates,
        duplicates_before=counts.duplicates_before,
        fallbacks_running=counts.fallbacks_running,
        duplicates_running=counts.duplicates_running,
        quiet_s=counts.quiet_ms / 1000,
        dwell_s=rules.dwell_s,
        probes_ok=counts.probes_ok,
        probes_min=rules.probes_min,
        trips_per_day_max=rules.trips_per_day_max,
    )
