"""Lock busy: retries of runs that another holder had, fixed beside jittered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from stanchion.charts import BarChart, Bars, Chart, LineChart
from stanchion.core.json_value import JsonValue
from stanchion.drills.observe import counts_per, rate_series
from stanchion.drills.verdict import Promise, percentile, ratio, seconds

FIXED, JITTER = "500 ms", "500 ± 200 ms"
DELAY_MS, JITTER_MS = 500, 200
SPREAD_MIN_MS: Final = 200
"""Of 400 ms, what jittered delays must span at the least."""
BUCKET_S: Final = 0.05
HALF_S: Final = 0.5
"""The bucket of the burst metric."""


class ArmSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of ``lock_busy``. Times are seconds since the results were sent."""

    name: str
    runs: int
    waits_s: tuple[float, ...]
    """From a run's result to its end."""
    delays_ms: tuple[int, ...]
    """What the bus was told: how long to wait before a call comes again."""
    attempts_s: tuple[float, ...]
    """When the replicas asked again for locks of these runs."""
    retries: float
    """Retries, as the replicas counted them."""
    buckets: float
    """In how many half seconds, as ``stanchion_lock_busy_retry_burst`` counted them."""
    unfinished: int = 0

    @property
    def burst(self) -> float:
        """Retries in a half second that had any, on average: the burst metric."""
        return ratio(self.retries, self.buckets)

    @property
    def fullest(self) -> int:
        """The most attempts within 50 ms."""
        if not self.attempts_s:
            return 0
        end = max(self.attempts_s) + BUCKET_S
        return max(counts_per(self.attempts_s, BUCKET_S, since=0.0, until=end))


class LockBusySeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the drill observed."""

    arms: tuple[ArmSeen, ...]
    dead_letters: float
    """Messages that were given up: the poison budget was spent."""
    poison_failures: int = 0
    """Failures that were counted against an event."""

    def arm(self, name: str) -> ArmSeen:
        return next(arm for arm in self.arms if arm.name == name)


def judge_lock_busy(seen: LockBusySeen) -> tuple[Promise, ...]:
    """What was promised, compared with what was seen."""
    fixed, jitter = seen.arm(FIXED), seen.arm(JITTER)
    spread = max(jitter.delays_ms, default=0) - min(jitter.delays_ms, default=0)
    outside = [each for each in jitter.delays_ms if not _LOW <= each <= _HIGH]
    off = [each for each in fixed.delays_ms if each != DELAY_MS]
    waits = {arm.name: percentile(arm.waits_s, 0.95) for arm in (fixed, jitter)}
    unfinished = sum(arm.unfinished for arm in seen.arms)
    return (
        Promise(
            id="delay_in_window",
            says=f"every retry waits {DELAY_MS} ms when fixed, {_LOW} to {_HIGH} ms with jitter",
            measured=f"{len(off)} of {len(fixed.delays_ms)} fixed and {len(outside)} of"
            f" {len(jitter.delays_ms)} jittered delays are outside",
            holds=bool(fixed.delays_ms) and bool(jitter.delays_ms) and not off and not outside,
        ),
        Promise(
            id="delay_spread",
            says=f"jittered delays are spread over {SPREAD_MIN_MS} ms and more",
            measured=f"{spread} ms between the shortest and the longest",
            holds=spread >= SPREAD_MIN_MS,
        ),
        Promise(
            id="burst_lower",
            says="the burst metric (retries in a half second) and the attempts in the fullest"
            " 50 ms are lower with jitter than fixed",
            measured=f"{jitter.burst:.1f} against {fixed.burst:.1f} retries,"
            f" {jitter.fullest} against {fixed.fullest} attempts",
            holds=0 < jitter.burst < fixed.burst and 0 < jitter.fullest < fixed.fullest,
        ),
        Promise(
            id="wait_lower",
            says="the p95 wait for a busy run is lower with jitter than with a fixed delay",
            measured=f"{seconds(waits[JITTER])} against {seconds(waits[FIXED])}",
            holds=bool(jitter.waits_s) and waits[JITTER] < waits[FIXED],
        ),
        Promise(
            id="poison_untouched",
            says="a busy lock spends no poison budget: nothing is given up, every run ends",
            measured=f"{seen.dead_letters:.0f} dead letters, {seen.poison_failures} failures"
            f" counted, {unfinished} runs unfinished",
            holds=seen.dead_letters == 0 and seen.poison_failures == 0 and unfinished == 0,
        ),
    )


_LOW, _HIGH = DELAY_MS - JITTER_MS, DELAY_MS + JITTER_MS


# ── The report ───────────────────────────────────────────────────────────────────────────────────


def figures_of(seen: LockBusySeen) -> dict[str, JsonValue]:
    """The tables of the page, and ``figures`` in the report."""
    rows: list[JsonValue] = [
        {
            "lock_busy": arm.name,
            "runs": arm.runs,
            "p50_wait_s": round(percentile(arm.waits_s, 0.5), 2),
            "p95_wait_s": round(percentile(arm.waits_s, 0.95), 2),
            "last_s": round(max(arm.waits_s, default=0.0), 2),
            "retries": arm.retries,
            "retries_in_a_half_second": round(arm.burst, 2),
            "attempts_in_the_fullest_50_ms": arm.fullest,
            "shortest_delay_ms": min(arm.delays_ms, default=None),
            "longest_delay_ms": max(arm.delays_ms, default=None),
        }
        for arm in seen.arms
    ]
    return {"dead_letters": seen.dead_letters, "arms": rows}


def charts_of(seen: LockBusySeen, first: Mapping[str, ArmSeen]) -> list[Chart]:
    """The pictures of the page, the most telling one first."""
    until_s = max((max(arm.attempts_s, default=1.0) for arm in first.values()), default=1.0)
    attempts = tuple(
        rate_series(name, arm.attempts_s, 0.1, since=0.0, until=until_s + 0.1)
        for name, arm in first.items()
    )
    retries = tuple(
        rate_series(name, arm.attempts_s, HALF_S, since=0.0, until=until_s + HALF_S)
        for name, arm in first.items()
    )
    shares = (0.5, 0.75, 0.95, 1.0)
    return [
        LineChart(
            title="Attempts on the locks of busy runs, one round each",
            unit="per 100 ms",
            series=attempts,
        ),
        LineChart(
            title="The same in half seconds, as the burst metric counts retries",
            unit="per 500 ms",
            series=retries,
        ),
        BarChart(
            title="How long busy runs waited",
            unit="seconds",
            groups=("p50", "p75", "p95", "the last one"),
            series=tuple(
                Bars(arm.name, tuple(percentile(arm.waits_s, share) for share in shares))
                for arm in seen.arms
            ),
        ),
    ]
