"""Dead letters: what was tried as often as is allowed."""

from __future__ import annotations

import logging
from typing import Final

from stanchion.core.model import TenantId
from stanchion.gateway.problems import Refusal, not_found
from stanchion.gateway.route import (
    OPERATORS,
    RUNNERS,
    Call,
    NoBody,
    NoQuery,
    Paging,
    Reply,
    RouteScope,
    RouteTable,
    Takes,
)
from stanchion.gateway.views import dead_letter_row
from stanchion.ports.records import DeadLetter
from stanchion.ports.store import Store
from stanchion.services.log import log_event
from stanchion.wire.admin import (
    DeadLetterList,
    DiscardAnswer,
    DiscardLetter,
    ReplayAnswer,
    ReplayLetter,
)
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()


@ROUTES.add(
    "GET /v1/admin/dead-letters", RUNNERS, RouteScope.ONE_OR_ALL, DeadLetterList, names_all=False
)
async def list_dead_letters(call: Call[NoBody, Paging]) -> Reply:
    """List dead letters, oldest first: those of the key's tenant, or all."""
    page = await call.services.store.list_dead_letters(
        call.only, cursor=call.query.cursor, limit=call.query.limit
    )
    return Reply(DeadLetterList(tuple(map(dead_letter_row, page.items)), page.cursor))


@ROUTES.add(
    "POST /v1/admin/dead-letters/{letter_id}/replay",
    OPERATORS,
    RouteScope.ONE_OR_ALL,
    ReplayAnswer,
    takes=Takes.JSON_OR_NOTHING,
    audits="dead_letter.replay",
    names_all=False,
    codes=(Code.NOT_FOUND, Code.CONFLICT),
)
async def replay_dead_letter(call: Call[ReplayLetter, NoQuery]) -> Reply | Refusal:
    """Replay a dead letter, once. That of a run that has ended can only be discarded."""
    name, store = call.params["letter_id"], call.services.store
    found = await _letter(store, call.only, name)
    if found is None:
        return not_found("dead letter")
    loaded = await store.load(found.run_id)
    if loaded is not None and loaded.run.status.is_finished:
        detail = f"run '{found.run_id}' has ended: {loaded.run.status}; discard the dead letter"
        return Refusal(code=Code.CONFLICT, detail=detail)
    entry = call.audit(f"dead_letter/{name}", tenant=call.only)
    letter = await call.services.inbox.replay(name, actor=call.actor, audit=entry)
    if letter is None:
        return not_found("dead letter")
    log_event(logging.INFO, "dead_letter_replayed", letter=name, actor=call.actor)
    return Reply(ReplayAnswer(letter.id, letter.run_id, replayed=True))


@ROUTES.add(
    "POST /v1/admin/dead-letters/{letter_id}/discard",
    OPERATORS,
    RouteScope.ONE_OR_ALL,
    DiscardAnswer,
    takes=Takes.JSON_OR_NOTHING,
    audits="dead_letter.discard",
    names_all=False,
    codes=(Code.NOT_FOUND,),
)
async def discard_dead_letter(call: Call[DiscardLetter, NoQuery]) -> Reply | Refusal:
    """Discard a dead letter: the step of its job fails, its event is dropped."""
    name = call.params["letter_id"]
    if call.only is not None and await _letter(call.services.store, call.only, name) is None:
        return not_found("dead letter")
    entry = call.audit(f"dead_letter/{name}", tenant=call.only)
    letter = await call.services.inbox.discard(name, actor=call.actor, audit=entry)
    if letter is None:
        return not_found("dead letter")
    log_event(logging.INFO, "dead_letter_discarded", letter=name, actor=call.actor)
    return Reply(DiscardAnswer(letter.id, letter.run_id, discarded=True))


async def _letter(store: Store, tenant: TenantId | None, name: str) -> DeadLetter | None:
    """The letter of this tenant, or of any. Letters are few, and this is an operator's route."""
    cursor: str | None = None
    while True:
        page = await store.list_dead_letters(tenant, cursor=cursor, limit=1000)
        found = next((letter for letter in page.items if letter.id == name), None)
        cursor = page.cursor
        if found is not None or cursor is None:
            return found
