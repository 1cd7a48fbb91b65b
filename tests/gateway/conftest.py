"""A house without keys, and one with; and no test that holds the event loop for seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest

from stanchion.gateway import GatewayOptions
from tests.gateway.house import ADMIN, House, opened_house

STALL_CPU_MS_MAX: Final = 2_000
"""Processor time, which does not depend on the machine's load: far more than any test needs."""


@pytest.fixture(autouse=True)
def no_long_stall(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which the event loop computed for seconds without a pause."""
    yield
    told = [each for each in caplog.get_records("call") if each.message == "loop_stalled"]
    fields = [each.__dict__["fields"] for each in told]
    assert not [each for each in fields if each["cpu_ms"] >= STALL_CPU_MS_MAX]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with opened_house() as opened:
        yield opened


@pytest.fixture
async def guarded_house() -> AsyncIterator[House]:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as opened:
        yield opened
