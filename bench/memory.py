"""Memory of an embedded server: idle, and per active run."""

from __future__ import annotations

import time

from bench.http import start_load
from bench.loadgen import send
from bench.pace import Pace
from bench.row import Row, at_most
from bench.serving import embedded
from bench.workflows import ONE_JOB

__all__ = ["rows"]

WARM, ACTIVE, ACTIVE_QUICK = 2_000, 10_000, 1_000
SETTLE_S = 1.0


def rows(pace: Pace) -> list[Row]:
    """Measure."""
    active = ACTIVE_QUICK if pace.is_quick else ACTIVE
    with embedded() as site:
        site.prepare({"one-job": ONE_JOB})
        time.sleep(SETTLE_S)
        idle_bytes = site.resident_bytes
        # These pay the one-time costs.
        send(start_load(site.url, 60, WARM)).only("200")
        time.sleep(SETTLE_S)
        before_bytes = site.resident_bytes
        send(start_load(site.url, 60, active)).only("200")
        time.sleep(SETTLE_S)
        each_bytes = (site.resident_bytes - before_bytes) / active
    note = f"of {active:,} more, {before_bytes / 2**20:.0f} MiB before"
    return [
        at_most("an idle server, embedded", idle_bytes / 2**20, "MiB", 90),
        at_most("a server's memory for an active run", each_bytes / 2**10, "KiB", 4, note),
    ]
