"""Settings and escalation: what is in force, and the forms that change it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, Shown, View
from stanchion.console.pictures import share_bar
from stanchion.console.text import duration, exact
from stanchion.core.model import Risk
from stanchion.gateway.problems import RequestRefused, invalid_member
from stanchion.wire.admin import AuditRow, EscalationCounters

PAGES: Final = PageTable()

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "admission.strategy": ("atomic", "lock"),
    "admission.lock_retry.kind": ("jitter", "fixed"),
    "lock_busy.kind": ("jitter", "fixed"),
    "escalation.closes": tuple(Risk),
}
_HINTS: Final[Mapping[str, str]] = {
    "admission.strategy": "atomic: one step in the store. lock: a lock per tenant around it.",
    "admission.lock_ttl_s": "How long the lock of a tenant's gate lasts.",
    "admission.lock_wait_s": "How long a start waits for that lock.",
    "lock_busy.delay_ms": "Before a run whose lock is busy is tried again.",
    "lock_busy.jitter_ms": "Spread around the delay, so that retries do not come in waves.",
    "lock_busy.backend_error_delay_ms": "Before a run is tried again when the lock store fails.",
    "escalation.fallbacks_per_s": "More runs without a lock than this trip the escalation.",
    "escalation.window_s": "Counted over this window.",
    "escalation.closes": "Classes that fail closed while it is tripped.",
    "escalation.dwell_s": "The least time that it stays tripped.",
    "escalation.quiet_divisor": "It ends when the rate is below the threshold divided by this.",
    "escalation.probes_min": "How many good answers of the lock store it takes to end.",
    "escalation.trips_per_day_max": "More trips than this in a day latch it until it is cleared.",
}
_SECTIONS: Final = {
    "admission": "Admission",
    "lock_busy": "When a run’s lock is busy",
    "escalation": "Escalation",
}


@PAGES.page(
    "/settings",
    "Settings",
    "settings.html",
    "GET /v1/admin/settings",
    Nav("System", "Settings", "s"),
    is_live=False,
)
async def show_settings(view: View) -> Data:
    """All settings in force, as a form."""
    document = await view.api.get("/v1/admin/settings")
    sections = [
        (title, [_field(view, name, value) for name, value in _flat(document[key], key)])
        for key, title in _SECTIONS.items()
        if key in document
    ]
    return {
        "sections": sections,
        "document": document,
        "may_change": view.api.allows("PATCH /v1/admin/settings"),
        "changes": None,
        "history": await _history(view),
        "has_policies": True,
    }


async def _history(view: View) -> list[tuple[Any, list[tuple[str, Any, Any]]]]:
    """The last changes: each audit entry with the settings that it changed, before and after."""
    if not view.api.allows("GET /v1/admin/audit"):
        return []
    entries: list[AuditRow] = []
    cursor: str | None = None
    for _ in range(_HISTORY_PAGES_MAX):
        # A page looks through so many entries of all kinds, and may have none of these.
        page = await view.api.get(
            "/v1/admin/audit", action="settings.patch", limit=_HISTORY_PAGE, cursor=cursor
        )
        entries += page.entries
        cursor = page.cursor
        if cursor is None or len(entries) >= _HISTORY:
            break
    return [(entry, _changed(entry.before, entry.after)) for entry in entries[:_HISTORY]]


_HISTORY: Final = 10
_HISTORY_PAGE: Final = 100
_HISTORY_PAGES_MAX: Final = 10


def _changed(before: Any, after: Any) -> list[tuple[str, Any, Any]]:  # noqa: ANN401 - JSON
    """The members that differ, by their paths."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    old, new = (dict(_flat(each, "")) for each in (before, after))
    return [
        (path.removeprefix("."), old.get(path), new.get(path))
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    ]


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in _flat(each, f"{path}.{key}")]
    return [(path, value)]


def _field(view: View, name: str, value: Any) -> Data:  # noqa: ANN401 - JSON
    is_list = isinstance(value, list)
    typed = view.form.all(name) if name in view.form else None
    shown = value if is_list else _text(value)
    if typed is not None and view.problem is not None:
        shown = typed if is_list else view.form.get(name)
    errors = () if view.problem is None else view.problem.errors
    faults = {each.path: each.message for each in errors}
    return {
        "name": name,
        "label": _label(name),
        "value": shown,
        "choices": _CHOICES.get(name),
        "is_list": is_list,
        "hint": _HINTS.get(name, ""),
        "fault": faults.get(name),
    }


def _label(name: str) -> str:
    """The name of a setting in words, its unit in parentheses."""
    words = name.partition(".")[2].replace("_", " ").replace(".", ", ")
    if words.endswith(" per s"):
        return f"{words}econd"
    for unit in ("ms", "s"):
        if words.endswith(f" {unit}"):
            return f"{words.removesuffix(unit)}({unit})"
    return words


def _text(value: object) -> str:
    return "" if value is None else exact(value) if isinstance(value, float) else str(value)


def _patch(view: View, document: Mapping[str, Any]) -> tuple[Data, list[tuple[str, Any, Any]]]:
    """The merge patch of what was changed in the form, and each change with before and after.

    Raises ``RequestRefused`` for a number that cannot be read.
    """
    patch: Data = {}
    changes: list[tuple[str, Any, Any]] = []
    for key in _SECTIONS:
        for name, before in _flat(document.get(key, {}), key):
            if name not in view.form and not isinstance(before, list):
                continue
            after = _read(view, name, before)
            if after == before:
                continue
            changes.append((name, before, after))
            *parents, last = name.split(".")
            place = patch
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = after
    return patch, changes


def _read(view: View, name: str, before: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(before, list):
        chosen = view.form.all(name)
        return before if set(chosen) == set(before) else chosen
    typed = view.form.get(name).strip()
    if isinstance(before, str):
        return typed
    number = view.form.number(name)
    if number is None:
        raise RequestRefused(invalid_member(name, "must be a number"))
    return number


@PAGES.action("/settings/change", "PATCH /v1/admin/settings", show_settings)
async def preview(view: View) -> Shown | Redirect:
    """Show what would change; change it when that was confirmed."""
    document = await view.api.get("/v1/admin/settings")
    patch, changes = _patch(view, document)
    if not changes:
        return Redirect(view.at("settings"), "settings_same")
    if view.form.get("sure") != "yes":
        return Shown({"changes": changes})
    await view.api.send("PATCH /v1/admin/settings", {}, patch)
    return Redirect(view.at("settings"), "settings_changed")


@PAGES.page(
    "/escalation",
    "Escalation",
    "escalation.html",
    "GET /v1/admin/escalation",
    Nav("Locks", "Escalation", "e"),
)
async def show_escalation(view: View) -> Data:
    """The level in force, what trips it, and what it closes."""
    shown = await view.api.get("/v1/admin/escalation")
    settings = await view.api.get("/v1/admin/settings")
    return {
        "escalation": shown,
        "rules": settings["escalation"],
        "policies": settings["policies"],
        "risks": list(Risk),
        "counters": _counters(shown.counters, settings["escalation"]["quiet_divisor"]),
        "may_order": view.api.allows("POST /v1/admin/escalation"),
    }


def _counters(seen: EscalationCounters, quiet_divisor: int) -> list[Data]:
    """Each counter beside its threshold: the first three trip the escalation, the rest end it."""
    window = duration(seen.window_s * 1000)
    calm = seen.fallbacks_per_s_max / quiet_divisor
    return [
        _counter(
            "Runs without a lock, per second",
            seen.fallbacks_per_s,
            seen.fallbacks_per_s_max,
            f"Over the last {window}. It trips above the threshold, if duplicates rise as well.",
        ),
        _counter(
            "Fifths of the window at that rate",
            seen.fifths_at_threshold,
            5,
            "All five must be: a short burst does not trip it.",
        ),
        _counter(
            "Runs written by two replicas at once",
            seen.duplicates,
            seen.duplicates_before + 1,
            f"In the same window; it had {seen.duplicates_before} in the one before.",
        ),
        _counter(
            "Quiet for",
            seen.quiet_s,
            seen.dwell_s,
            f"Below {calm:.3g} per second, no duplicates, no failed probe: then it ends.",
            is_bad=False,
            is_time=True,
        ),
        _counter(
            "Answers of the lock store since then",
            seen.probes_ok,
            seen.probes_min,
            "How many it takes to end.",
            is_bad=False,
        ),
    ]


def _counter(
    name: str,
    now: float,
    threshold: float,
    means: str,
    *,
    is_bad: bool = True,
    is_time: bool = False,
) -> Data:
    shown, of = (
        (duration(now * 1000), duration(threshold * 1000))
        if is_time
        else (f"{round(now, 3):,g}", f"{threshold:,g}")
    )
    return {
        "name": name,
        "now": shown,
        "threshold": of,
        "is_reached": now >= threshold,
        "is_bad": is_bad,
        "bar": share_bar(now, threshold, f"{shown} of {of}", is_bad=is_bad),
        "means": means,
    }


_HOURS_MAX: Final = 24 * 366


@PAGES.action("/escalation/order", "POST /v1/admin/escalation", show_escalation)
async def order(view: View) -> Redirect:
    """Give an order, or clear it."""
    body: dict[str, object] = {"order": view.form.get("order")}
    reason, hours = view.form.get("reason").strip(), view.form.integer("hours")
    if reason:
        body["reason"] = reason
    if hours is not None:
        if not 0 < hours <= _HOURS_MAX:
            raise RequestRefused(invalid_member("hours", f"must be 1 to {_HOURS_MAX}, or empty"))
        body["expires_at"] = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
    await view.api.send("POST /v1/admin/escalation", {}, body)
    return Redirect(view.at("escalation"), "escalation_ordered")


DONE.update(
    {
        "settings_changed": "The settings were changed: in force everywhere within 2 seconds.",
        "settings_same": "Nothing was different, so nothing was changed.",
        "escalation_ordered": "Done: in force here now, on other replicas within 2 seconds.",
    }
)
