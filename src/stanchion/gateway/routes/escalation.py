"""Escalation: whether failing open is allowed at the moment, and an operator's word on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from stanchion.core.escalation import Level, Order
from stanchion.core.model import Risk
from stanchion.gateway.call import Call, NoBody, NoQuery, Reply
from stanchion.gateway.route import OPERATORS, Reach, Route, Takes
from stanchion.wire.admin import EscalationView, SetEscalation

__all__ = ["ROUTES"]

_LEVELS: Final[Mapping[Level, Literal["normal", "escalated", "latched"]]] = {
    Level.NORMAL: "normal",
    Level.ESCALATED: "escalated",
    Level.LATCHED: "latched",
}
_FORCED: Final[Mapping[Order | None, Literal["force_open", "force_closed"]]] = {
    Order.FORCE_OPEN: "force_open",
    Order.FORCE_CLOSED: "force_closed",
}


async def get_escalation(call: Call[NoBody, NoQuery]) -> Reply:
    """The level in force on this replica."""
    return Reply(_view(call))


async def set_escalation(call: Call[SetEscalation, NoQuery]) -> Reply:
    """Force open or closed, or clear: here at once, elsewhere at the next look."""
    await call.services.escalating.order(Order(call.body.order), actor=call.actor)
    return Reply(_view(call))


def _view(call: Call[Any, Any]) -> EscalationView:
    escalating = call.services.escalating
    return EscalationView(
        level=_LEVELS[escalating.level],
        forced=_FORCED.get(escalating.forced),
        closes=call.services.settings.current.escalation.closes,
        closed_now=tuple(risk for risk in Risk if escalating.closes(risk)),
        trips_today=escalating.trips_today,
    )


ROUTES: Final = (
    Route(
        method="GET",
        path="/v1/admin/escalation",
        handler=get_escalation,
        says="Whether the closed classes fail closed now, and why.",
        roles=OPERATORS,
        reach=Reach.DEPLOYMENT,
        answer=EscalationView,
    ),
    Route(
        method="POST",
        path="/v1/admin/escalation",
        handler=set_escalation,
        says="An operator's word: `force_open`, `force_closed`, or `clear`.",
        roles=OPERATORS,
        reach=Reach.DEPLOYMENT,
        takes=Takes.JSON,
        body=SetEscalation,
        answer=EscalationView,
    ),
)
