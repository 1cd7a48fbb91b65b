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
    Reply,
    Route,
    RouteScope,
    Takes,
)
from stanchion.gateway.routes.workflows import PagedWorkflows
from stanchion.gateway.views import dead_letter_row
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

__all__ = ["ROUTES"]


async def list_dead_letters(call: Call[NoBody, PagedWorkflows]) -> Reply:
    """Dead letters, oldest first."""
    page = await call.services.store.list_dead_letters(
        call.only, cursor=call.query.cursor, limit=call.query.limit
    )
    return Reply(DeadLetterList(tuple(map(dead_letter_row, page.items)), page.cursor))


async def replay_dead_letter(call: Call[ReplayLetter, NoQuery]) -> Reply | Refusal:
    """Replay a dead letter, once."""
    name = call.params["letter_id"]
    if call.only is not None and not await _is_own(call.services.store, call.only, name):
        return not_found("dead letter")
    entry = call.audit(f"dead_letter/{name}", tenant=call.only)
    letter = await call.services.inbox.replay(name, actor=call.actor, audit=entry)
    if letter is None:
        return not_found("dead letter")
    log_event(logging.INFO, "dead_letter_replayed", letter=name, actor=call.actor)
    return Reply(ReplayAnswer(letter.id, letter.run_id, replayed=True))


async def discard_dead_letter(call: Call[DiscardLetter, NoQuery]) -> Reply | Refusal:
    """Discard a dead letter: the step of its job fails, its event is dropped."""
    name = call.params["letter_id"]
    if call.only is not None and not await _is_own(call.services.store, call.only, name):
        return not_found("dead letter")
    entry = call.audit(f"dead_letter/{name}", tenant=call.only)
    letter = await call.services.inbox.discard(name, actor=call.actor, audit=entry)
    if letter is None:
        return not_found("dead letter")
    log_event(logging.INFO, "dead_letter_discarded", letter=name, actor=call.actor)
    return Reply(DiscardAnswer(letter.id, letter.run_id, discarded=True))


async def _is_own(store: Store, tenant: TenantId, name: str) -> bool:
    """Whether this tenant has such a letter. Letters are few, and this is an operator's route."""
    cursor: str | None = None
    while True:
        page = await store.list_dead_letters(tenant, cursor=cursor, limit=1000)
        if any(letter.id == name for letter in page.items):
            return True
        cursor = page.cursor
        if cursor is None:
            return False


ROUTES: Final = (
    Route(
        method="GET",
        path="/v1/admin/dead-letters",
        handler=list_dead_letters,
        summary="List dead letters, oldest first: those of the key's tenant, or all.",
        roles=RUNNERS,
        scope=RouteScope.ONE_OR_ALL,
        names_all=False,
        query=PagedWorkflows,
        answer=DeadLetterList,
    ),
    Route(
        method="POST",
        path="/v1/admin/dead-letters/{letter_id}/replay",
        handler=replay_dead_letter,
        audits="dead_letter.replay",
        summary="Replay a dead letter, once.",
        roles=OPERATORS,
        scope=RouteScope.ONE_OR_ALL,
        names_all=False,
        takes=Takes.JSON_OR_NOTHING,
        body=ReplayLetter,
        answer=ReplayAnswer,
        codes=(Code.NOT_FOUND,),
    ),
    Route(
        method="POST",
        path="/v1/admin/dead-letters/{letter_id}/discard",
        handler=discard_dead_letter,
        audits="dead_letter.discard",
        summary="Discard a dead letter: the step of its job fails, its event is dropped.",
        roles=OPERATORS,
        scope=RouteScope.ONE_OR_ALL,
        names_all=False,
        takes=Takes.JSON_OR_NOTHING,
        body=DiscardLetter,
        answer=DiscardAnswer,
        codes=(Code.NOT_FOUND,),
    ),
)
