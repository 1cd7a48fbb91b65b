"""The OpenAPI document is the table of routes, and the table is whole."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from stanchion.gateway.openapi import document, refusals, text
from stanchion.gateway.problems import STATUS
from stanchion.gateway.route import PARAMETERS, Route, RouteScope
from stanchion.gateway.routes import ROUTES
from stanchion.wire.problems import Code
from tests.gateway.house import House

FILE = Path(__file__).parents[2] / "schema" / "openapi.json"


def test_the_committed_document_is_the_one_that_is_generated() -> None:
    assert FILE.read_text() == text(ROUTES), (
        "write it anew: python -m stanchion.gateway > schema/openapi.json"
    )


async def test_what_is_served_is_what_is_committed(house: House) -> None:
    answer = await house.ask("GET", "/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == msgspec.json.decode(FILE.read_bytes())


def test_every_reference_leads_somewhere() -> None:
    whole = document(ROUTES)
    for found in set(re.findall(r'"#/([^"]+)"', text(ROUTES))):
        part: object = whole
        for name in found.split("/"):
            assert isinstance(part, dict)
            part = part[name]


def test_patterns_are_such_as_every_language_reads() -> None:
    assert r"\\Z" not in text(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.id)
def test_every_route_is_declared_whole(route: Route) -> None:
    assert route.summary.endswith(".")
    assert set(re.findall(r"\{(\w+)\}", route.path)) <= set(PARAMETERS)
    assert bool(route.roles) is (route.scope is not RouteScope.OPEN)
    assert Code.INTERNAL not in refusals(route), "never a 500"
    assert all(STATUS[code] not in route.statuses for code in refusals(route))


def test_no_two_routes_share_a_place_or_a_name() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert len({route.id for route in ROUTES}) == len(ROUTES)


def test_every_code_but_those_of_the_router_belongs_to_a_route() -> None:
    used = {code for route in ROUTES for code in refusals(route)}
    assert set(Code) - used == {Code.INTERNAL, Code.METHOD_NOT_ALLOWED}
