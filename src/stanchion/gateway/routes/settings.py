"""Settings: how the deployment behaves, changed while it runs."""

from __future__ import annotations

from typing import Final

from stanchion.core.json_value import JsonObject
from stanchion.gateway.call import Call, NoBody, NoQuery, Reply
from stanchion.gateway.free_values import check_value
from stanchion.gateway.problems import Refusal, invalid
from stanchion.gateway.route import ADMINS, OPERATORS, Reach, Route, Takes

__all__ = ["ROUTES"]

_PATCH_BYTES_MAX: Final = 64 * 1024


async def get_settings(call: Call[NoBody, NoQuery]) -> Reply:
    """The whole document, as it is in force here."""
    return Reply(call.services.settings.document())


async def patch_settings(call: Call[JsonObject, NoQuery]) -> Reply | Refusal:
    """Apply a JSON merge patch; the answer is the whole document."""
    check_value(call, "", call.body, bytes_max=_PATCH_BYTES_MAX)
    outcome = await call.services.settings.patch(call.body, actor=call.actor)
    if isinstance(outcome, tuple):
        return invalid(outcome, str(outcome[0]))
    return Reply(call.services.settings.document())


ROUTES: Final = (
    Route(
        method="GET",
        path="/v1/admin/settings",
        handler=get_settings,
        says="The settings in force, as one document.",
        roles=OPERATORS,
        reach=Reach.DEPLOYMENT,
        answer=JsonObject,
    ),
    Route(
        method="PATCH",
        path="/v1/admin/settings",
        handler=patch_settings,
        says="Change settings with a JSON merge patch. In force everywhere within 2 s.",
        roles=ADMINS,
        reach=Reach.DEPLOYMENT,
        takes=Takes.JSON,
        body=JsonObject,
        answer=JsonObject,
    ),
)
