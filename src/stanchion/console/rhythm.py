"""Rhythm: whether retries come in step, and what a policy would give.

Callers that were refused together and wait equally long come back together, and are refused again.
``synchrony`` measures that: it folds the times of retries by the period of the policy and returns
how much they agree in phase (the length of their mean vector): 1 if all come at the same moment of
each period, near 0 if they are spread over it.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from stanchion.core.retry import (
    RETRIES,
    BoundedJitter,
    Fixed,
    RetryClass,
    backoff_ms,
    honour_retry_after,
    sample_from,
)
from stanchion.core.settings import Rhythm

MODEL_CALLERS: Final = 40
MODEL_MS: Final = 6_000
MODEL_BUCKET_MS: Final = 50
_RETURN_SPREAD: Final = RETRIES[RetryClass.QUOTA].spread


def buckets(times_ms: Iterable[float], *, until_ms: float, bucket_ms: int, count: int) -> list[int]:
    """How many of the times are in each of the last buckets, oldest first."""
    counts = [0] * count
    for time in times_ms:
        place = count - 1 - math.floor((until_ms - time) / bucket_ms)
        if 0 <= place < count:
            counts[place] += 1
    return counts


def coarser(counts: Sequence[int], times: int) -> list[int]:
    """The same counts in buckets that are ``times`` as wide."""
    return [sum(counts[begin : begin + times]) for begin in range(0, len(counts), times)]


def synchrony(counts: Sequence[int], *, bucket_ms: float, period_ms: float) -> float | None:
    """How much the retries agree in phase, from 0 to 1; ``None`` with too few to tell."""
    total = sum(counts)
    if total < 8 or period_ms < 2 * bucket_ms:  # noqa: PLR2004 - below, chance decides
        return None
    turn = 2j * math.pi * bucket_ms / period_ms
    return abs(sum(count * cmath.exp(turn * place) for place, count in enumerate(counts))) / total


def policy_synchrony(rhythm: Rhythm) -> float:
    """How much callers that met once agree in phase after one delay of the policy."""
    if isinstance(rhythm, Fixed) or not rhythm.jitter_ms:
        return 1.0
    width = 2 * rhythm.jitter_ms / rhythm.delay_ms
    return abs(math.sin(math.pi * width) / (math.pi * width))


def simulated(rhythm: Rhythm) -> list[int]:
    """Retries of callers that all begin at once and never succeed, in buckets of 50 ms.

    The delays are those of the policy's own function; the samples depend on the caller's number
    only, so that the picture is the same each time.
    """
    return list(_simulated(rhythm))


@lru_cache(maxsize=64)
def _simulated(rhythm: Rhythm) -> tuple[int, ...]:
    times: list[float] = []
    for caller in range(MODEL_CALLERS):
        at, attempt = 0, 1
        while True:
            at += max(1, backoff_ms(rhythm, attempt, sample_from(caller, attempt)))
            if at >= MODEL_MS or attempt > MODEL_MS:
                break
            times.append(at)
            attempt += 1
    count = MODEL_MS // MODEL_BUCKET_MS
    return tuple(buckets(times, until_ms=MODEL_MS - 0.001, bucket_ms=MODEL_BUCKET_MS, count=count))


def expected_returns(refusals: Iterable[tuple[float, int]]) -> list[float]:
    """When callers retry that honour ``Retry-After`` and add a random part of it.

    Each refusal is its time and its ``Retry-After``, in milliseconds.
    """
    return [
        at + honour_retry_after(after_ms, 0, sample_from(number), _RETURN_SPREAD)
        for number, (at, after_ms) in enumerate(refusals)
    ]


def expected_retries(counts: Sequence[int], *, bucket_ms: int, rhythm: Rhythm) -> list[float]:
    """When the policy tries again what was found busy, in milliseconds from the first bucket."""
    times: list[float] = []
    for place, count in enumerate(counts):
        for number in range(count):
            delay_ms = backoff_ms(rhythm, 1, sample_from(place, number))
            times.append((place + 0.5) * bucket_ms + delay_ms)
    return times


def fixed_beside(rhythm: Rhythm) -> tuple[Fixed, BoundedJitter]:
    """The policy without and with jitter: its own, or two fifths of the delay if it has none."""
    jitter_ms = rhythm.jitter_ms or rhythm.delay_ms * 2 // 5
    return Fixed(rhythm.delay_ms), BoundedJitter(rhythm.delay_ms, jitter_ms)
