"""Run work in a separate process, which gets a specification and prints a report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["apart", "percentile", "thinned"]

ROOT = Path(__file__).parents[1]
KEPT_MAX = 2_000
GRACE_S = 60.0
"""Time for outstanding responses after the end. Then the process is stopped."""
_Report = TypeVar("_Report")


@contextmanager
def apart(
    module: str, spec: msgspec.Struct, report: type[_Report], seconds: float
) -> Iterator[Callable[[], _Report]]:
    """Run one of our modules in the background; the returned call waits and reads its report."""
    text = msgspec.json.encode(spec).decode()
    process = subprocess.Popen(  # noqa: S603 - a module of ours
        [sys.executable, "-m", module, text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )

    def result() -> _Report:
        said, _ = process.communicate(timeout=seconds + GRACE_S)
        assert process.returncode == 0, f"{module} ended with {process.returncode}"
        return msgspec.json.decode(said, type=report)

    try:
        yield result
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def thinned(latencies_ms: Sequence[float]) -> list[float]:
    """Sort the values; reduce them to at most two thousand evenly spaced ones."""
    ordered = sorted(latencies_ms)
    kept = min(len(ordered), KEPT_MAX)
    return [ordered[(number * len(ordered)) // kept] for number in range(kept)]


def percentile(ordered_ms: Sequence[float], part: float) -> float:
    """Return the latency at this quantile; NaN without values."""
    if not ordered_ms:
        return float("nan")
    return ordered_ms[min(len(ordered_ms) - 1, int(len(ordered_ms) * part))]
