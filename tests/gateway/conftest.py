"""A house without keys, and one with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from stanchion.gateway import GatewayOptions
from tests.gateway.house import ADMIN, House, opened_house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with opened_house() as opened:
        yield opened


@pytest.fixture
async def guarded_house() -> AsyncIterator[House]:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as opened:
        yield opened
