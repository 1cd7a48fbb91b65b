"""Repair: dead letters, drift of slots, and bulk actions."""

from __future__ import annotations

import secrets
from typing import Final

from stanchion.console.page import DONE, Data, Form, Nav, PageTable, Redirect, View
from stanchion.console.pages.runs import wanted_runs
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, RunStatus
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member
from stanchion.wire.problems import Code

PAGES: Final = PageTable()

_LIMIT: Final = 50

# ── Dead letters ─────────────────────────────────────────────────────────────────────────────────

_LETTER: Final = "POST /v1/admin/dead-letters/{letter_id}"


@PAGES.page(
    "/dead-letters",
    "Dead letters",
    "dead_letters.html",
    "GET /v1/admin/dead-letters",
    Nav("Repair", "Dead letters", "x"),
)
async def show_letters(view: View) -> Data:
    """Dead letters, oldest first."""
    page = await view.api.get(
        "/v1/admin/dead-letters", cursor=view.query.get("cursor"), limit=_LIMIT
    )
    return {
        "letters": page.dead_letters,
        "cursor": page.cursor,
        "may_act": view.api.allows(f"{_LETTER}/replay"),
        "chosen": set(view.form.all("letter")),
    }


@PAGES.action("/dead-letters", f"{_LETTER}/replay", show_letters)
async def act_on_letters(view: View) -> Redirect:
    """Replay or discard the chosen letters, one after the other.

    A letter that was replayed or discarded meanwhile is skipped, without an error.
    """
    verb, chosen = view.form.get("act"), view.form.all("letter")
    if verb not in {"replay", "discard"}:
        raise RequestRefused(invalid_member("act", "must be replay or discard"))
    if not chosen:
        raise RequestRefused(invalid_member("letter", "choose at least one letter"))
    if len(chosen) > _LIMIT:
        raise RequestRefused(invalid_member("letter", f"at most {_LIMIT} at a time"))
    for letter in chosen:
        try:
            await view.api.send(f"{_LETTER}/{verb}", {"letter_id": letter})
        except RequestRefused as refused:
            if refused.refusal.code is not Code.NOT_FOUND or len(chosen) == 1:
                raise
    run_id = view.form.get("run")
    page = view.at("runs", run_id) if run_id else view.at("dead-letters")
    return Redirect(page, f"letters_{verb}ed")


DONE["letters_replayed"] = "Replayed: the jobs are dispatched again."
DONE["letters_discarded"] = "Discarded: the steps of these jobs fail."


# ── Drift ────────────────────────────────────────────────────────────────────────────────────────

_AUDIT_SLOTS: Final = "POST /v1/admin/drift"


@PAGES.page("/drift", "Drift", "drift.html", "GET /v1/admin/drift", Nav("Repair", "Drift", "f"))
async def show_drift(view: View) -> Data:
    """The last audit of slots."""
    return {
        "audit": await view.api.get("/v1/admin/drift"),
        "dry": None,
        "may_audit": view.api.allows(_AUDIT_SLOTS),
    }


@PAGES.page(
    "/drift/try", "Drift: an audit that repairs nothing", "drift.html", _AUDIT_SLOTS, is_live=False
)
async def try_drift(view: View) -> Data:
    """An audit of slots now, which repairs nothing."""
    dry = await view.api.send(_AUDIT_SLOTS, dry_run="true")
    return {**await show_drift(view), "dry": dry}


@PAGES.action("/drift", _AUDIT_SLOTS, show_drift)
async def repair_drift(view: View) -> Redirect:
    """Audit the slots now, and repair what has drifted."""
    await view.api.send(_AUDIT_SLOTS)
    return Redirect(view.at("drift"), "drift_repaired")


DONE["drift_repaired"] = "All slots were compared with the runs, and repaired where they differed."


# ── Bulk ─────────────────────────────────────────────────────────────────────────────────────────

_BULK: Final = "POST /v1/bulk"
_VERBS: Final = ("cancel", "rerun", "replay", "discard", "approve", "reject")


@PAGES.page("/bulk", "Bulk actions", "bulks.html", "GET /v1/bulk", Nav("Repair", "Bulk", "b"))
async def show_bulks(view: View) -> Data:
    """Bulk actions, newest first, and the form for a new one with its dry run."""
    page = await view.api.get("/v1/bulk", cursor=view.query.get("cursor"), limit=_LIMIT)
    sent = view.form if view.problem is not None else view.query
    dry, is_everything = None, False
    if "dry" in view.query and view.problem is None:
        body = _bulk_of(view.query, view.now)
        is_everything = not body["filter"]
        dry = await view.api.send(_BULK, body=body | {"dry_run": True})
    return {
        "bulks": page.bulks,
        "cursor": page.cursor,
        "verbs": _VERBS,
        "statuses": [str(each) for each in RunStatus],
        "sent": sent,
        "wanted": wanted_runs(sent, view.now),
        "dry": dry,
        "is_everything": is_everything,
        "may_act": view.api.allows(_BULK),
        "key": secrets.token_hex(16),
    }


@PAGES.page("/bulk/{bulk_id}", "Bulk action", "bulk.html", "GET /v1/bulk/{bulk_id}")
async def show_bulk(view: View) -> Data:
    """One bulk action and how far it is."""
    bulk = await view.api.get("/v1/bulk/{bulk_id}", view.params)
    return {
        "bulk": bulk,
        "title": f"Bulk {bulk.action}",
        "may_stop": view.api.allows("DELETE /v1/bulk/{bulk_id}"),
    }


def _bulk_of(form: Form, now: Instant) -> JsonObject:
    """The body of a bulk action that is in the form."""
    filters: JsonObject = {name: value for name, value in wanted_runs(form, now).items() if value}
    body: JsonObject = {"action": form.get("action"), "filter": filters}
    rate = form.number("rate_per_s")
    if rate is not None:
        body["rate_per_s"] = rate
    return body


@PAGES.action("/bulk", _BULK, show_bulks)
async def start_bulk(view: View) -> Redirect:
    """Begin a bulk action. Sending the form again begins no second one."""
    body = _bulk_of(view.form, view.now)
    if not body["filter"] and view.form.get("everything") != "yes":
        detail = "this would act on every run: name a filter, or confirm that all are meant"
        raise RequestRefused(Refusal(code=Code.INVALID_REQUEST, detail=detail))
    begun = await view.api.send(_BULK, body=body, key=view.form.get("key") or None)
    return Redirect(view.at("bulk", begun.bulk_id), "bulk_begun")


@PAGES.action("/bulk/{bulk_id}/stop", "DELETE /v1/bulk/{bulk_id}", show_bulk)
async def stop_bulk(view: View) -> Redirect:
    """Stop a bulk action where it is."""
    await view.api.send("DELETE /v1/bulk/{bulk_id}", view.params)
    return Redirect(view.at("bulk", view.params["bulk_id"]), "bulk_stopped")


DONE["bulk_begun"] = "The bulk action has begun. It goes on if this page is closed."
DONE["bulk_stopped"] = "The bulk action was stopped. What it has done stays done."
