"""Two tenants on one server: how one tenant's load affects the other's latency.

The quiet tenant sends starts in an open loop, so that a stalled server shows in the figures. It is
measured alternately alone and while the other tenant uses half of the capacity measured just
before. Then the other tenant saturates the server, and none of the quiet tenant's starts may be
refused.

The same is measured on a bare endpoint without tenants and store, to show the effect of the
machine: callers and servers share its cores.

``neighbour_rows`` measures the quiet tenant beside the most expensive neighbours of the acceptance
tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.apart import percentile
from bench.http import BODY, PATH
from bench.loadgen import Load, Seen, send, sending
from bench.pace import Pace
from bench.row import Row, at_most, recorded
from bench.serving import Site, distributed, echoing, embedded
from bench.workflows import ONE_JOB
from tests.acceptance import quiet as hostile
from tests.acceptance.stack import Kind

__all__ = ["neighbour_rows", "rows"]

QUIET, LOUD = "quiet", "loud"
QUIET_PER_S = 50.0
WORST = (
    "event-streams",
    "pipelining",
    "cursor-walks",
    "reruns",
    "wide-for-each",
    "wide-batches",
    "results",
)
"""Those with the largest p99 in ``docs/explanation/neighbours.md``, also on a slower machine."""
CROWD = 2_500
"""More than the server takes on at once, from one tenant and in all."""


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    with echoing() as echo:
        with embedded() as site:
            on_sqlite = _on("SQLite", site, pace)
        with distributed() as site:
            on_redis = _on("Valkey", site, pace)
        return [*on_sqlite, *on_redis, _of_the_machine(echo, pace)]


def neighbour_rows(pace: Pace) -> list[Row]:
    """Measure beside the most expensive neighbours, on SQLite and on two replicas."""
    return [_beside_the_worst(kind, pace) for kind in (Kind.SQLITE, Kind.REPLICAS)]


def _on(name: str, site: Site, pace: Pace) -> list[Row]:
    for tenant in (QUIET, LOUD):
        site.prepare({"one-job": ONE_JOB}, tenant=tenant)
    measured = _beside_and_alone(site.url, pace)
    with sending(_from(site.url, LOUD, pace.seconds + 1, connections=CROWD)) as loud:
        crowded = send(_quiet(site.url, pace))
        crowd = loud()
    label = f"quiet tenant's p99 on {name}, the other at half capacity"
    return [
        at_most(label, measured.ratio, "×", 2, measured.note),
        _refused(name, crowded, crowd),
    ]


def _of_the_machine(echo: str, pace: Pace) -> Row:
    measured = _beside_and_alone(echo, pace)
    label = "quiet caller's p99 on a bare echo, the other at half capacity"
    return recorded(label, measured.ratio, "×", measured.note)


class _Measured(NamedTuple):
    ratio: float
    note: str


def _beside_and_alone(url: str, pace: Pace) -> _Measured:
    send(_from(url, LOUD, pace.seconds / 3)).only("200")
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    capacities_per_s = []
    for _ in range(pace.rounds):
        alone_ms += send(_quiet(url, pace)).only("200").latencies_ms
        # Measured each time, because the machine's capacity varies within minutes.
        capacity_per_s = send(_from(url, LOUD, pace.seconds / 3)).only("200").per_s
        capacities_per_s.append(capacity_per_s)
        with sending(_from(url, LOUD, pace.seconds + 1, rate_per_s=capacity_per_s / 2)) as loud:
            beside_ms += send(_quiet(url, pace)).only("200").latencies_ms
            loud()
    # Of all rounds together: one round has too few starts for a p99.
    alone, beside = (percentile(sorted(each), 0.99) for each in (alone_ms, beside_ms))
    note = (
        f"{beside:.1f} ms against {alone:.1f} ms alone, medians {median(beside_ms):.1f} and"
        f" {median(alone_ms):.1f} ms, capacity {median(capacities_per_s):,.0f}/s"
    )
    return _Measured(beside / alone, note)


def _beside_the_worst(kind: Kind, pace: Pace) -> Row:
    seen = asyncio.run(_beside_each(kind, WORST, max(2.0, pace.seconds)))
    name = max(WORST, key=lambda each: seen[each].p99_ms)
    worst, alone = seen[name], seen[QUIET]
    allowed_ms = max(50.0, 3 * alone.p99_ms)
    note = (
        f"{name}: {worst.p99_ms:.1f} ms, alone {alone.p99_ms:.1f} ms, allowed {allowed_ms:.1f} ms"
    )
    where = "SQLite" if kind is Kind.SQLITE else "two replicas"
    label = f"quiet tenant's p99 on {where} beside the worst neighbour, against its limit"
    return at_most(label, worst.p99_ms / allowed_ms, "×", 1, note)


async def _beside_each(kind: Kind, names: Sequence[str], seconds: float) -> dict[str, hostile.Seen]:
    with hostile.hostile_stack(kind) as stack:
        async with hostile.street(stack) as beside:
            await beside.quiet.measure(1.0)
            seen = {QUIET: await beside.quiet.measure(seconds)}
            for name in names:
                seen[name] = await beside.beside(name, seconds)
    return seen


def _quiet(url: str, pace: Pace) -> Load:
    # Long enough for a meaningful p99.
    return _from(url, QUIET, max(2.0, pace.seconds), rate_per_s=QUIET_PER_S, connections=8)


def _from(
    url: str,
    tenant: str,
    seconds: float,
    *,
    rate_per_s: float | None = None,
    connections: int = 64,
) -> Load:
    return Load(
        url=url + PATH,
        body=BODY,
        headers={"x-stanchion-tenant": tenant},
        connections=connections,
        seconds=seconds,
        rate_per_s=rate_per_s,
    )


def _refused(name: str, quiet: Seen, crowd: Seen) -> Row:
    refused = quiet.requests - quiet.statuses.get("200", 0)
    p99_ms = quiet.percentile_ms(0.99)
    note = f"{_said(quiet)}, p99 {p99_ms:,.0f} ms; the other: {_said(crowd)}"
    return at_most(f"quiet tenant's refusals on {name}, at saturation", refused, "starts", 0, note)


def _said(seen: Seen) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in sorted(seen.statuses.items()))
