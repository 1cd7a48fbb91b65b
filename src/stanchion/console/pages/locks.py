"""Locks: the leases that are held, the fences of one, work without a lock, and the policies."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from markupsafe import Markup

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, View
from stanchion.console.pictures import FenceMark, fence_strip
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import RENEWAL_FAILURES_MAX, OnLockError, OnRenewalLost
from stanchion.core.model import Risk
from stanchion.gateway.problems import RequestRefused
from stanchion.wire.admin import LeaseMarkRow, LeaseRow
from stanchion.wire.problems import Code

PAGES: Final = PageTable()

_LEASES: Final = "GET /v1/admin/leases"
_RELEASE: Final = "DELETE /v1/admin/leases/{name}"
_AUDIT: Final = "GET /v1/admin/audit"
_PATCH: Final = "PATCH /v1/admin/settings"
_STRIP: Final = timedelta(minutes=15)
_LEASES_MAX: Final = 1_000


# ── Leases ───────────────────────────────────────────────────────────────────────────────────────


@PAGES.page("/leases", "Leases", "leases.html", _LEASES, Nav("Locks", "Leases", "l"))
async def show_leases(view: View) -> Data:
    """The locks that are held, and the history of one of them."""
    name = view.query.get("name") or None
    held = await view.api.get(
        "/v1/admin/leases", limit=_LEASES_MAX, cursor=view.query.get("cursor")
    )
    history = await view.api.get("/v1/admin/lock-history", name=name)
    marks = [_mark(each) for each in history.marks]
    waits = {each.name: each for each in history.waits}
    if name is not None:
        marks += await _by_hand(view, name)
    return {
        "leases": [
            {"row": row, "wait": waits.get(row.name), **_about(row.name)} for row in held.leases
        ],
        "cursor": held.cursor,
        "name": name,
        "history": history,
        "strip": _strip(marks, history.until) if marks else None,
        "unlocked": [{"row": row, **_about(row.name)} for row in history.unlocked[:200]],
        "may_release": view.api.allows(_RELEASE),
    }


def _about(name: str) -> dict[str, str | None]:
    """What a lock protects: a run, or the admission of a tenant."""
    kind, _, rest = name.partition("/")
    return {
        "run_id": rest if kind == "run" else None,
        "of_tenant": rest if kind == "admission" else None,
    }


def _strip(marks: list[FenceMark], until: datetime) -> Markup:
    """The fences of the last quarter of an hour; from the first moment on, if that is later."""
    first = min(mark.at for mark in marks) - timedelta(seconds=1)
    return fence_strip(marks, begin=max(first, until - _STRIP), end=until)


async def _held(view: View, name: str) -> LeaseRow | None:
    """The lock of this name, if it is held."""
    try:
        found: LeaseRow = await view.api.get("/v1/admin/leases/{name}", {"name": name})
    except RequestRefused as refused:
        if refused.refusal.code not in {Code.NOT_FOUND, Code.INVALID_REQUEST}:
            raise
        return None
    return found


async def _by_hand(view: View, name: str) -> list[FenceMark]:
    """The present holder, and the releases by operators."""
    marks, row = [], await _held(view, name)
    if row is not None and row.acquired_at is not None:
        marks.append(
            FenceMark(at=row.acquired_at, what="acquired", fence=row.fence, holder=row.holder or "")
        )
    if view.api.allows(_AUDIT):
        page = await view.api.get("/v1/admin/audit", action="lease.release", limit=100)
        marks += [
            FenceMark(at=entry.at, what="forced", fence=_fence(entry.before), holder=entry.actor)
            for entry in page.entries
            if entry.subject == f"lease/{name}"
        ]
    return marks


def _fence(before: JsonValue) -> int:
    fence = before.get("fence") if isinstance(before, dict) else None
    return fence if isinstance(fence, int) else 0


def _mark(row: LeaseMarkRow) -> FenceMark:
    match row.what:
        case "acquired":
            return FenceMark(at=row.at, what="acquired", fence=row.fence or 0)
        case "stale_write":
            return FenceMark(at=row.at, what="refused", fence=row.fence or 0)
        case "released" | "abandoned":
            return FenceMark(at=row.at, what="released", fence=row.fence or 0)


@PAGES.page("/leases/release", "Release a lock by force", "release.html", _RELEASE, is_live=False)
async def ask_release(view: View) -> Data:
    """The page that asks before a lock is released by force, and says what that may cost."""
    name = view.form.get("name") or view.query.get("name")
    return {"name": name, "row": await _held(view, name), **_about(name)}


@PAGES.action("/leases/release", _RELEASE, ask_release)
async def release(view: View) -> Redirect:
    """Release a lock by force."""
    name = view.form.get("name")
    await view.api.send(_RELEASE, {"name": name}, reason=view.form.get("reason"))
    return Redirect(view.at("leases", name=name), "lease_released")


DONE["lease_released"] = "The lock was released. Its holder notices when it renews or commits."


# ── Policies ─────────────────────────────────────────────────────────────────────────────────────

_EVENTS: Final = ("on_lock_error", "on_renewal_lost", "renewal_failures_max")
_CHOICES: Final = {
    "on_lock_error": [str(each) for each in OnLockError],
    "on_renewal_lost": [str(each) for each in OnRenewalLost],
    "renewal_failures_max": [str(each) for each in range(1, RENEWAL_FAILURES_MAX + 1)],
}
_MEANING: Final = {
    ("on_lock_error", "fail_open"): "goes on without a lock: two replicas may do the same work",
    ("on_lock_error", "fail_closed"): "waits until the lock store answers again",
    ("on_renewal_lost", "continue"): "goes on; its commit is refused if another has written",
    ("on_renewal_lost", "fence"): "stops at once; side effects are not done twice",
}


@PAGES.page(
    "/policies",
    "Policies",
    "policies.html",
    "GET /v1/admin/settings",
    Nav("Locks", "Policies", "y"),
)
async def show_policies(view: View) -> Data:
    """The policies in force, what overrides them, and what the form below would change."""
    settings: JsonObject = await view.api.get("/v1/admin/settings")
    escalation = await view.api.get("/v1/admin/escalation")
    policies = _policies(settings)
    wanted = _wanted(view, policies)
    return {
        "classes": [str(risk) for risk in Risk],
        "events": _EVENTS,
        "choices": _CHOICES,
        "meaning": _MEANING,
        "policies": policies,
        "wanted": wanted,
        "changes": _changes(policies, wanted),
        "is_preview": "preview" in view.query or view.problem is not None,
        "escalation": escalation,
        "closed_now": [str(risk) for risk in escalation.closed_now],
        "may_change": view.api.allows(_PATCH),
    }


def _policies(settings: JsonObject) -> dict[str, dict[str, str]]:
    found = settings["policies"]
    assert isinstance(found, dict)
    rows: dict[str, dict[str, str]] = {}
    for risk, policy in found.items():
        assert isinstance(policy, dict)
        rows[risk] = {event: str(policy[event]) for event in _EVENTS}
    return rows


def _wanted(view: View, policies: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The values of the form; the present value of a field that it does not have."""
    sent = view.form if view.problem is not None else view.query
    return {
        risk: {event: sent.get(f"{risk}.{event}") or value for event, value in policy.items()}
        for risk, policy in policies.items()
    }


def _changes(
    before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]
) -> list[dict[str, str]]:
    return [
        {
            "risk": risk,
            "event": event,
            "before": policy[event],
            "after": after[risk][event],
            "means": _MEANING.get((event, after[risk][event]), ""),
        }
        for risk, policy in before.items()
        for event in _EVENTS
        if policy[event] != after[risk][event]
    ]


@PAGES.action("/policies", _PATCH, show_policies)
async def change_policies(view: View) -> Redirect:
    """Put the policies of the form in force."""
    settings: JsonObject = await view.api.get("/v1/admin/settings")
    before = _policies(settings)
    patch: dict[str, JsonObject] = {}
    for risk, policy in before.items():
        for event, value in policy.items():
            sent = view.form.get(f"{risk}.{event}")
            if sent and sent != value:
                is_count = event == "renewal_failures_max"
                after = view.form.integer(f"{risk}.{event}") if is_count else sent
                patch.setdefault(risk, {})[event] = after
    if patch:
        await view.api.send(_PATCH, body={"policies": patch})
    return Redirect(view.at("policies"), "policies_changed" if patch else "policies_same")


DONE["policies_changed"] = "The policies were changed: here at once, on other replicas within 2 s."
DONE["policies_same"] = "Nothing was changed: the form has what is in force."
