"""Apart: work in a process of its own that is told what to do, and prints what it saw."""

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
"""For answers that are still to come when the time is over. Then the process is ended."""
_Report = TypeVar("_Report")


@contextmanager
def apart(
    module: str, spec: msgspec.Struct, report: type[_Report], seconds: float
) -> Iterator[Callable[[], _Report]]:
    """Run a module of ours meanwhile; the call waits for its end, and reads its report."""
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
    """In order, and of many two thousand that stand for all of them."""
    ordered = sorted(latencies_ms)
    kept = min(len(ordered), KEPT_MAX)
    return [ordered[(number * len(ordered)) // kept] for number in range(kept)]


def percentile(ordered_ms: Sequence[float], part: float) -> float:
    """The latency that this part did not exceed; not a number if there were none."""
    if not ordered_ms:
        return float("nan")
    return ordered_ms[min(len(ordered_ms) - 1, int(len(ordered_ms) * part))]
