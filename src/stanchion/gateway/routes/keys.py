"""Keys: make, list, revoke. An administrator of one tenant sees and makes keys of that tenant."""

from __future__ import annotations

from typing import Final

from stanchion.gateway.call import Call, NoBody, NoQuery, Reply
from stanchion.gateway.problems import Refusal, invalid_member, not_found
from stanchion.gateway.route import ADMINS, Reach, Route, Takes
from stanchion.gateway.routes.workflows import PagedWorkflows
from stanchion.gateway.views import key_row, when
from stanchion.wire.admin import CreateKey, KeyCreated, KeyList, KeyRow, Role
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

__all__ = ["ROUTES"]

_LOCKED_OUT: Final = (
    "this would be the first key, and from then on every request needs one: first make an admin key"
    " for '*', or start the server with STANCHION_ADMIN_KEY"
)


async def create_key(call: Call[CreateKey, NoQuery]) -> Reply | Refusal:
    """Make a key. Its secret is shown this once."""
    wanted = call.body
    if call.only is not None and wanted.tenant != call.only:
        detail = (
            "a key for one tenant makes keys for that tenant only:"
            " this needs a key for all tenants ('*') with the role admin"
        )
        return Refusal(code=Code.FORBIDDEN, detail=detail)
    if wanted.role is Role.RUNNER and wanted.tenant == ALL_TENANTS:
        return invalid_member("tenant", "a runner's key is for one tenant")
    if await call.desk.keys.would_lock_out(role=wanted.role, tenant=wanted.tenant):
        return Refusal(code=Code.CONFLICT, detail=_LOCKED_OUT)
    made = await call.desk.keys.create(
        role=wanted.role, tenant=wanted.tenant, note=wanted.note, actor=call.actor
    )
    return Reply(
        KeyCreated(
            id=made.id,
            key=made.key,
            role=wanted.role,
            tenant=wanted.tenant,
            note=wanted.note,
            created_at=when(made.record.created_at),
        )
    )


async def list_keys(call: Call[NoBody, PagedWorkflows]) -> Reply:
    """Keys, by id, without their secrets."""
    query = call.query
    page = await call.desk.keys.list(call.only, cursor=query.cursor, limit=query.limit)
    return Reply(KeyList(tuple(key_row(*each) for each in page.items), page.cursor))


async def revoke_key(call: Call[NoBody, NoQuery]) -> Reply | Refusal:
    """End a key: here at once, elsewhere within two seconds."""
    key_id = call.params["key_id"]
    keys = call.desk.keys
    found = await keys.record(key_id)
    if found is None or (call.only is not None and found.tenant != call.only):
        return not_found("key")
    revoked = await keys.revoke(key_id, actor=call.actor)
    return not_found("key") if revoked is None else Reply(key_row(key_id, revoked))


ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/admin/keys",
        handler=create_key,
        says="Make a key. Its secret is shown this once.",
        roles=ADMINS,
        reach=Reach.ONE_OR_ALL,
        takes=Takes.JSON,
        body=CreateKey,
        answer=KeyCreated,
        codes=(Code.CONFLICT,),
    ),
    Route(
        method="GET",
        path="/v1/admin/keys",
        handler=list_keys,
        says="List keys, by id, without their secrets.",
        roles=ADMINS,
        reach=Reach.ONE_OR_ALL,
        query=PagedWorkflows,
        answer=KeyList,
    ),
    Route(
        method="DELETE",
        path="/v1/admin/keys/{key_id}",
        handler=revoke_key,
        says="Revoke a key: here at once, elsewhere within 2 s.",
        roles=ADMINS,
        reach=Reach.ONE_OR_ALL,
        answer=KeyRow,
        codes=(Code.NOT_FOUND,),
    ),
)
