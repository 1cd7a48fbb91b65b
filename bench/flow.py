"""Three-step runs from end to end, 64 at a time: ours, and the same on other systems.

Server, worker and callers are separate processes. A caller starts a run over HTTP and waits for its
end; every start, result and transition is durable. Each round starts each system again, one after
the other, and adjacent rounds are compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from statistics import median

import msgspec

from bench.callers import Errand, Ran, run_through
from bench.pace import Pace
from bench.peers.running import PEERS
from bench.row import Row, at_least, at_most, skipped, spread
from bench.serving import Site, distributed, embedded, working
from bench.workflows import THREE_STEPS

__all__ = ["rows"]

ROUNDS_MAX = 3
CORES_MIN = 6
"""For two servers, two workers, callers, Valkey and NATS; a second server needs so many cores."""
PROMISES = {"Restate": 3.0, "Temporal's dev server": 15.0, "DBOS on SQLite": 15.0}
DISTRIBUTED_OF_RESTATE = 2.0
EMBEDDED, ONE, TWO = "embedded", "on Valkey and NATS", "on two replicas"


class Measured(msgspec.Struct, frozen=True):
    """One round of one of our configurations."""

    ran: Ran
    cpu_us: float
    """Processor time of the servers per run."""

    @property
    def per_s(self) -> float:
        return self.ran.per_s


def rows(pace: Pace) -> list[Row]:
    """Measure Stanchion and all installed peers."""
    ours: dict[str, list[Measured]] = {EMBEDDED: [], ONE: [], TWO: []}
    peers: dict[str, list[Ran]] = {peer.name: [] for peer in PEERS}
    # A round waits for the last runs that began in it: longer than a run of the slowest peer.
    seconds = pace.seconds * 2
    for _ in range(min(pace.rounds, ROUNDS_MAX)):
        ours[EMBEDDED].append(measure(embedded(), seconds))
        for peer in PEERS:
            if not peer.missing:
                peers[peer.name].append(peer.measure(seconds))
        ours[ONE].append(measure(distributed(1), seconds))
        ours[TWO].append(measure(distributed(2), seconds))
    against = [
        _against(EMBEDDED, ours[EMBEDDED], peer.name, peers[peer.name], PROMISES[peer.name])
        for peer in PEERS
    ]
    on_redis = _against(ONE, ours[ONE], "Restate", peers["Restate"], DISTRIBUTED_OF_RESTATE)
    return [*against, on_redis, _replicas(ours[ONE], ours[TWO])]


def measure(opening: AbstractContextManager[Site], seconds: float) -> Measured:
    """Measure with one worker per server, and callers of all servers."""
    with opening as site, ExitStack() as stack:
        site.prepare({"three-steps": THREE_STEPS})
        for url in site.urls:
            stack.enter_context(working(url))
        run_through(Errand(urls=site.urls, seconds=seconds / 3))
        before_s = site.cpu_s
        ran = run_through(Errand(urls=site.urls, seconds=seconds))
        return Measured(ran, (site.cpu_s - before_s) / ran.runs * 1e6)


def _against(
    where: str, ours: Sequence[Measured], peer: str, theirs: Sequence[Ran], floor: float
) -> Row:
    label = f"three-step runs {where}, against {peer}"
    if not theirs:
        missing = next(each.missing for each in PEERS if each.name == peer)
        note = f"{missing}; ours {_summary(ours)}"
        return skipped(label, "×", f"≥ {floor:g}", note)
    ratios = [mine.per_s / other.per_s for mine, other in zip(ours, theirs, strict=True)]
    pair = (median(each.per_s for each in ours), median(each.per_s for each in theirs))
    p99_ms = median(each.percentile_ms(0.99) for each in theirs)
    note = f"{_summary(ours)} against {pair[1]:,.0f}/s, p99 {p99_ms:,.0f} ms; {spread(ratios)}"
    return at_least(label, median(ratios), "×", floor, note, pair=pair)


def _summary(ours: Sequence[Measured]) -> str:
    return (
        f"{median(each.per_s for each in ours):,.0f}/s,"
        f" p99 {median(each.ran.percentile_ms(0.99) for each in ours):,.0f} ms,"
        f" {median(each.cpu_us for each in ours):,.0f} µs of server"
    )


def _replicas(one: Sequence[Measured], two: Sequence[Measured]) -> Row:
    note = f"{_summary(two)} against {_summary(one)}"
    if (os.cpu_count() or 1) >= CORES_MIN:
        ratios = [more.per_s / less.per_s for more, less in zip(two, one, strict=True)]
        return at_least(
            "three-step runs on two replicas, against one", median(ratios), "×", 1.5, note
        )
    ratios = [more.cpu_us / less.cpu_us for more, less in zip(two, one, strict=True)]
    label = "servers' time for a run on two replicas, against one"
    return at_most(label, median(ratios), "×", 1.2, f"{os.cpu_count()} cores; {note}")
