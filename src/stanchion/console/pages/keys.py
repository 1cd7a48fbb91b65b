"""Keys: who may call, with which role and for which tenant."""

from __future__ import annotations

from typing import Final

from stanchion.console.page import DONE, Data, Nav, PageTable, Redirect, Shown, View
from stanchion.wire.admin import Role

PAGES: Final = PageTable()

_LIMIT: Final = 100
_MEANING: Final = {
    Role.APPROVER: "reads runs and decides approvals",
    Role.RUNNER: "starts and follows runs",
    Role.WORKER: "takes jobs",
    Role.OPERATOR: "also leases, dead letters, escalation",
    Role.ADMIN: "everything, also keys, tenants, settings",
}


@PAGES.page(
    "/keys", "Keys", "keys.html", "GET /v1/admin/keys", Nav("System", "Keys", "k"), is_live=False
)
async def list_keys(view: View) -> Data:
    """The keys, without their secrets."""
    page = await view.api.get("/v1/admin/keys", limit=_LIMIT, cursor=view.query.get("cursor"))
    return {"keys": page.keys, "cursor": page.cursor, "roles": _MEANING, "created": None}


@PAGES.action("/keys/create", "POST /v1/admin/keys", list_keys)
async def create(view: View) -> Shown:
    """Create a key and show its secret, once."""
    form = view.form
    expires = form.get("expires_at")
    body = {
        "role": form.get("role"),
        "tenant": form.get("for_tenant").strip(),
        "name": form.get("name").strip() or None,
        "note": form.get("note").strip() or None,
        "expires_at": f"{expires}T00:00:00Z" if expires else None,
    }
    return Shown({"created": await view.api.send("POST /v1/admin/keys", {}, body)})


@PAGES.action("/keys/revoke", "DELETE /v1/admin/keys/{key_id}", list_keys)
async def revoke(view: View) -> Redirect:
    """Revoke a key."""
    params = {"key_id": view.form.get("key_id")}
    await view.api.send("DELETE /v1/admin/keys/{key_id}", params)
    return Redirect(view.at("keys"), "key_revoked")


DONE["key_revoked"] = "The key was revoked: here at once, on other replicas within 2 seconds."
