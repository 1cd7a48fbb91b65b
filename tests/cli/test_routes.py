"""What commands send is what the gateway takes, and what they print is what it answers."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import msgspec
import pytest

from stanchion.core.json_value import JsonObject
from stanchion.gateway.body import read_query
from stanchion.gateway.route import Route, Takes
from stanchion.gateway.routes import ROUTES
from tests.cli.cases import CASES, Case

# What scripts and dashboards use, and a person has no need to type.
# Reports of drills are files, which their command writes.
NOT_OURS = {
    "/v1/admin/drills",
    "/livez",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/events",
    "/v1/worker/",
}


def route_of(case: Case) -> Route:
    method, path = case.asks
    [route] = [
        route for route in ROUTES if route.method == method and _pattern(route.path).fullmatch(path)
    ]
    return route


def _pattern(template: str) -> re.Pattern[str]:
    # A slash may be part of what is named last: a lock, a dead letter.
    names = re.sub(r"\\\{(\w+)\\\}", r"[^/]+", re.escape(template))
    return re.compile(re.sub(r"leases/\[\^/\]\+", r"leases/.+", names))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.args))
def test_a_commands_request_is_one_that_its_route_takes(case: Case) -> None:
    route = route_of(case)
    shape = JsonObject if case.shape is None else case.shape
    assert shape in (route.answer, route.queued_answer)
    assert route.takes_key is case.has_key
    if case.query:
        read_query(urlencode(case.query).encode(), route.query)
    if case.body is not None:
        msgspec.convert(case.body, route.body)
    else:
        assert route.takes in {Takes.NOTHING, Takes.JSON_OR_NOTHING}


def test_every_route_for_people_has_a_command() -> None:
    ours = {route_of(case).id for case in CASES}
    applied = {route.id for route in ROUTES if route.takes is Takes.TEXT}
    for route in ROUTES:
        if not any(route.path.startswith(path) for path in NOT_OURS):
            assert route.id in ours | applied, route.path
