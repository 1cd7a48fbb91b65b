"""Two tenants on one server: what the quiet one notices of the other.

The quiet tenant's starts come in an open loop, so that a server that stands still is seen. First it
is alone, then the other sends half of what the server can take, in turns. At last the other sends
as much as goes through and more, and not one of the quiet tenant's starts may be refused.
"""

from __future__ import annotations

from statistics import median

from bench.http import BODY, PATH
from bench.loadgen import Load, Seen, send, sending
from bench.pace import Pace
from bench.row import Row, at_most, spread
from bench.serving import Site, distributed, embedded
from bench.workflows import ONE_JOB

__all__ = ["rows"]

QUIET, LOUD = "quiet", "loud"
QUIET_PER_S = 50.0
CROWD = 2_500
"""More than the server takes on at once, from one tenant and in all."""


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    with embedded() as site:
        on_sqlite = _on("SQLite", site, pace)
    with distributed() as site:
        on_redis = _on("Valkey", site, pace)
    return [*on_sqlite, *on_redis]


def _on(name: str, site: Site, pace: Pace) -> list[Row]:
    for tenant in (QUIET, LOUD):
        site.prepare({"one-job": ONE_JOB}, tenant=tenant)
    send(_from(site, LOUD, pace.seconds / 3)).only("200")
    capacity_per_s = send(_from(site, LOUD, pace.seconds)).only("200").per_s
    pairs = []
    for _ in range(pace.rounds):
        alone = send(_quiet(site, pace)).only("200")
        with sending(_from(site, LOUD, pace.seconds + 1, rate_per_s=capacity_per_s / 2)) as loud:
            beside = send(_quiet(site, pace)).only("200")
            loud()
        pairs.append((beside.percentile_ms(0.99), alone.percentile_ms(0.99)))
    with sending(_from(site, LOUD, pace.seconds + 1, connections=CROWD)) as loud:
        crowded = send(_quiet(site, pace))
        crowd = loud()
    return [_ratio(name, pairs, capacity_per_s), _refused(name, crowded, crowd)]


def _quiet(site: Site, pace: Pace) -> Load:
    # Long enough for a p99 of something.
    return _from(site, QUIET, max(2.0, pace.seconds), rate_per_s=QUIET_PER_S, connections=8)


def _from(
    site: Site,
    tenant: str,
    seconds: float,
    *,
    rate_per_s: float | None = None,
    connections: int = 64,
) -> Load:
    return Load(
        url=site.url + PATH,
        body=BODY,
        headers={"x-stanchion-tenant": tenant},
        connections=connections,
        seconds=seconds,
        rate_per_s=rate_per_s,
    )


def _ratio(name: str, pairs: list[tuple[float, float]], capacity_per_s: float) -> Row:
    ratios = [beside / alone for beside, alone in pairs]
    note = (
        f"{median(beside for beside, _ in pairs):.1f} ms against"
        f" {median(alone for _, alone in pairs):.1f} ms alone, capacity {capacity_per_s:,.0f}/s;"
        f" {spread(ratios)}"
    )
    label = f"quiet tenant's p99 on {name}, the other at half capacity"
    return at_most(label, median(ratios), "×", 2, note)


def _refused(name: str, quiet: Seen, crowd: Seen) -> Row:
    refused = quiet.requests - quiet.statuses.get("200", 0)
    p99_ms = quiet.percentile_ms(0.99)
    note = f"{_said(quiet)}, p99 {p99_ms:,.0f} ms; the other: {_said(crowd)}"
    return at_most(f"quiet tenant's refusals on {name}, at saturation", refused, "starts", 0, note)


def _said(seen: Seen) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in sorted(seen.statuses.items()))
