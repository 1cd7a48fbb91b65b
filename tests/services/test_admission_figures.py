"""Figures of the gate: each wait is counted in its bucket."""

from __future__ import annotations

import pytest

from stanchion.adapters.system import ManualClock
from stanchion.core.model import TenantId
from stanchion.core.pressure import WAIT_BOUNDS_MS
from stanchion.services.signals import AdmissionFigures

ACME = TenantId("acme")


@pytest.mark.parametrize(
    ("wait_ms", "bucket"),
    [(0, 0), (1, 0), (1.01, 1), (5_000, len(WAIT_BOUNDS_MS) - 1), (1e9, len(WAIT_BOUNDS_MS) - 1)],
)
def test_a_wait_is_counted_in_the_first_bucket_that_holds_it(wait_ms: float, bucket: int) -> None:
    figures = AdmissionFigures(ManualClock())
    figures.record(ACME, "admitted", wait_ms / 1000, None)
    waits = figures.read()[ACME].waits
    assert [place for place, count in enumerate(waits) if count] == [bucket]
