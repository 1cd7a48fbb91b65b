"""Renewal: leases that went from a holder that could not renew to the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from stanchion.charts import BarChart, Bars, Chart, Limit, LineChart, Series, Window
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.drills.programs import TICK_S, HolderLine
from stanchion.drills.verdict import Promise, seconds

FAILURES_MAX: Final = 3
LEASES, REPLICA = "Leases", "replica's run lease"
"""Kinds of holders: a process with the public API, and a replica at work on a run."""


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that went from one holder to the next. Times are seconds since the round began."""

    kind: str
    """``LEASES``, ``REPLICA``, ``job lease`` or ``paused worker``."""
    policy: str
    ttl_s: float
    fault: tuple[float, float]
    trusting_until: float
    """When the first holder last believed to be alone."""
    acting_until: float
    """When it last did something."""
    third_failure_at: float | None
    """When it knew of the third failed renewal, or was fenced before that."""
    expired_at: float | None
    """When its lease ended at the store, if that was seen."""
    rival_at: float | None
    """When the next holder had the lease."""
    rival_fence_is_higher: bool = True

    @property
    def trusting_overlap_s(self) -> float:
        """For how long two holders believed to be alone."""
        return 0.0 if self.rival_at is None else max(0.0, self.trusting_until - self.rival_at)

    @property
    def acting_overlap_s(self) -> float:
        """For how long two holders acted."""
        return 0.0 if self.rival_at is None else max(0.0, self.acting_until - self.rival_at)

    @property
    def slack_s(self) -> float | None:
        """How long before its lease ended the holder knew that it was lost."""
        end = self.rival_at if self.expired_at is None else self.expired_at
        if end is None or self.third_failure_at is None:
            return None
        return end - self.third_failure_at


class RenewalSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the drill observed."""

    hand_overs: tuple[HandOver, ...]
    outage_s: float
    """How long the short outage lasted."""
    outage_deliveries: tuple[int, ...]
    """How often each job was delivered that was at work in a short outage."""
    stale_verdicts: tuple[str, ...]
    """What writers with an old fence were told."""
    stale_counted: float
    """The same, as the metric counted it."""
    paused_runs: int = 0
    paused_unfinished: int = 0
    paused_changed_twice: int = 0


class HolderPicture(NamedTuple):
    """What both holders of one lease wrote, and when renewals were lost."""

    policy: str
    holders: tuple[list[HolderLine], list[HolderLine]]
    fault: tuple[float, float]


def judge_renewal(seen: RenewalSeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    fenced = [each for each in seen.hand_overs if each.policy == "fence"]
    continued = [each for each in seen.hand_overs if each.policy == "continue"]
    return (
        _taken_over(seen.hand_overs),
        _no_overlap(fenced),
        _continued(continued),
        _known_in_time(fenced),
        _short_outage(seen),
        _stale_refused(seen),
        _paused_replica(seen),
    )


def _taken_over(rows: Sequence[HandOver]) -> Promise:
    waiting = [row for row in rows if row.rival_at is None]
    lower = [row for row in rows if not row.rival_fence_is_higher]
    return Promise(
        id="taken_over",
        says="every lease that is not renewed goes to the next holder, with a higher fence",
        measured=f"{len(rows) - len(waiting)} of {len(rows)}, {len(lower)} without a higher fence",
        holds=bool(rows) and not waiting and not lower,
    )


def _no_overlap(rows: Sequence[HandOver]) -> Promise:
    worst = max((row.trusting_overlap_s for row in rows), default=0.0)
    acting = max((row.acting_overlap_s for row in rows if row.kind != "paused worker"), default=0.0)
    return Promise(
        id="no_overlap",
        says="under `fence` two holders never trust the same lease, and the first one has stopped",
        measured=f"{worst * 1000:.0f} ms trusting, {acting * 1000:.0f} ms acting,"
        f" in {len(rows)} hand-overs",
        holds=bool(rows) and worst == 0 and acting <= 2 * TICK_S,
    )


def _continued(rows: Sequence[HandOver]) -> Promise:
    trusting = max((row.trusting_overlap_s for row in rows), default=0.0)
    # A replica acts on only until its call to the store fails, which may be before the next begins.
    acting = [row.acting_overlap_s for row in rows if row.kind != REPLICA]
    replicas = [row.acting_overlap_s for row in rows if row.kind == REPLICA]
    shown = ", ".join(seconds(each) for each in acting)
    if replicas:
        shown += f", replicas for {', '.join(seconds(each) for each in replicas)}"
    return Promise(
        id="continue_measured",
        says="under `continue` the holder continues without trust, at the cost of an overlap",
        measured=f"acting together for {shown}; trusting together {trusting * 1000:.0f} ms",
        holds=bool(acting) and trusting == 0 and all(each > 0 for each in acting),
    )


def _known_in_time(rows: Sequence[HandOver]) -> Promise:
    slacks = [row.slack_s for row in rows if row.kind != "paused worker"]
    unknown = sum(slack is None for slack in slacks)
    least = min((slack for slack in slacks if slack is not None), default=0.0)
    unseen = f"; not seen in {unknown} of {len(slacks)} hand-overs" if unknown else ""
    return Promise(
        id="known_before_expiry",
        says="the third failed renewal is known before the lease can have ended",
        measured=(
            f"{seconds(max(0.0, least))} before, at the least"
            if least >= 0
            else f"{seconds(-least)} too late"
        )
        + unseen,
        holds=bool(slacks) and unknown == 0 and least > 0,
    )


def _short_outage(seen: RenewalSeen) -> Promise:
    lost = sum(count != 1 for count in seen.outage_deliveries)
    return Promise(
        id="short_outage",
        says=f"an outage of {seconds(seen.outage_s)} costs no job and no delivery",
        measured=f"{lost} of {len(seen.outage_deliveries)} jobs were delivered again",
        holds=bool(seen.outage_deliveries) and lost == 0,
    )


def _stale_refused(seen: RenewalSeen) -> Promise:
    accepted = [verdict for verdict in seen.stale_verdicts if verdict == "accepted"]
    told = ", ".join(f"{n} × {name}" for name, n in Counter(seen.stale_verdicts).items())
    return Promise(
        id="stale_refused",
        says="results under an old fence are refused, and each is counted",
        measured=f"{told}; counted {seen.stale_counted:.0f}",
        holds=bool(seen.stale_verdicts)
        and not accepted
        and seen.stale_counted >= len(seen.stale_verdicts),
    )


def _paused_replica(seen: RenewalSeen) -> Promise:
    return Promise(
        id="paused_replica",
        says="after a pause of a replica every run ends, and no step or run ends twice",
        measured=f"{seen.paused_runs} runs: {seen.paused_unfinished} unfinished,"
        f" {seen.paused_changed_twice} changed twice",
        holds=seen.paused_runs > 0 and not seen.paused_unfinished and not seen.paused_changed_twice,
    )


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def figures_of(seen: RenewalSeen) -> dict[str, JsonValue]:
    """The tables of the page, and ``figures`` in the report."""
    rows: list[JsonValue] = []
    for each in seen.hand_overs:
        row: JsonObject = {
            "holder": each.kind,
            "policy": each.policy,
            "ttl_s": each.ttl_s,
            "renewals_lost_from_s": round(each.fault[0], 2),
            "third_failure_known_s": _rounded(each.third_failure_at),
            "trusted_until_s": _rounded(each.trusting_until),
            "lease_ended_s": _rounded(each.expired_at),
            "next_holder_s": _rounded(each.rival_at),
            "acting_overlap_ms": round(each.acting_overlap_s * 1000),
        }
        rows.append(row)
    return {
        "stale_results": dict(Counter(seen.stale_verdicts)),
        "paused_replica_runs": seen.paused_runs,
        "hand_overs": rows,
    }


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 2)


def charts_of(seen: RenewalSeen, pictures: Sequence[HolderPicture]) -> list[Chart]:
    """The pictures of the page, the most telling one first."""
    charts: list[Chart] = []
    if pictures:
        began = min(
            line.at for each in pictures for line in each.holders[0] if line.what == "granted"
        )
        series = tuple(Series(each.policy, _acting(each.holders, began)) for each in pictures)
        since, end = pictures[0].fault
        charts.append(
            LineChart(
                title="Holders of one lease that act, when the first one cannot renew",
                unit="holders",
                series=series,
                windows=(Window(since - began, end - began, "renewals lost"),),
                limits=(Limit(1.0, "at most one is safe"),),
            )
        )
    kinds = list(dict.fromkeys((each.kind, each.policy) for each in seen.hand_overs))

    def worst(measure: Callable[[HandOver], float]) -> tuple[float, ...]:
        return tuple(
            max(
                measure(each) * 1000 for each in seen.hand_overs if (each.kind, each.policy) == kind
            )
            for kind in kinds
        )

    charts.append(
        BarChart(
            title="Overlap of two holders, the longest of all rounds",
            unit="milliseconds",
            groups=tuple(f"{kind}|{policy}" for kind, policy in kinds),
            series=(
                Bars("both act", worst(lambda each: each.acting_overlap_s)),
                Bars("both trust", worst(lambda each: each.trusting_overlap_s)),
            ),
        )
    )
    return charts


def _acting(
    holders: Sequence[Sequence[HolderLine]], began: float
) -> tuple[tuple[float, float], ...]:
    """How many holders acted, over time: each from its grant to its last act."""
    changes = []
    for lines in holders:
        acts = [line.at for line in lines if line.what in {"granted", "tick", "done", "stopped"}]
        if acts:
            changes += [(min(acts) - began, 1), (max(acts) - began, -1)]
    points, count = [(0.0, 0.0)], 0
    for at, change in sorted(changes):
        points.append((at, float(count)))
        count += change
        points.append((at, float(count)))
    return tuple(points)
