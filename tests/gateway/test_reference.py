"""The page about the interface says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stanchion.core.why import WhyCode
from stanchion.gateway import GatewayOptions
from stanchion.gateway.openapi import code_table, route_table
from stanchion.gateway.routes import ROUTES

WHY = Path(__file__).parents[2] / "docs" / "reference" / "why.md"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"


@pytest.mark.parametrize(
    ("name", "table"), [("codes", code_table()), ("routes", route_table(ROUTES))]
)
def test_the_tables_of_the_page_are_those_of_the_code(name: str, table: str) -> None:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == f"{table}\n", f"put this between the marks:\n\n{table}"


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    page, options = " ".join(PAGE.read_text().split()), GatewayOptions()
    for said in (
        f"handles {options.requests_at_once_max} requests at a time",
        f"tenant may have {options.requests_at_once_per_tenant_max} requests",
        f"{options.waits_per_tenant_max:,} waits and",
        f"{options.streams_per_tenant_max} streams; beyond that the answer is 429",
        f"{options.waits_max:,} waits",
        f"{options.streams_max} streams",
        f"head must arrive within {options.head_timeout_s:g} s",
        f"body within {options.body_timeout_s:g} s more",
        f"answered within {options.request_deadline_s:g} s",
        f"does not read its response for {options.write_timeout_s:g} s",
        f"every {options.heartbeat_s:g} s keeps",
        f"A path over {options.path_bytes_max // 1024} KiB",
        f"a query over {options.query_bytes_max // 1024} KiB",
        f"More than {options.headers_max} headers",
        f"or more than {options.header_bytes_max // 1024} KiB of them",
    ):
        assert said in page, said


def test_the_page_about_why_has_every_code_in_order() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", WHY.read_text(), re.MULTILINE)
    assert rows == [str(code) for code in WhyCode]
