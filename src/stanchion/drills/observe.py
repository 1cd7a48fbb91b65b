"""Observation from outside: metrics over time, commands that reach the lock store, log lines."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from stanchion.charts import Series
from stanchion.core.json_value import DECODE_ERRORS
from stanchion.drills.callers import DrillTenant
from stanchion.drills.processes import CouldNotRun

METRICS_OLD_S: Final = 1.2
"""A server renders its metrics once a second: what is read may be so old."""
WHOLE_S_MAX: Final = 10.0
"""How long a replica that does not answer is asked for its metrics again."""
_LINE: Final = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WORD: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_VERBS: Final = {5: "acquire", 3: "renew", 2: "release"}
"""Scripts on locks, by the number of their arguments: name, token, term, deadline and floor."""
_EVALSHA_HEAD: Final = 3
_BUFFER_BYTES: Final = 1 << 22
_SAMPLE_EVERY_S: Final = 0.25
_TIMER_S: Final = 0.01


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────


class MetricSample(msgspec.Struct, frozen=True):
    """One line of ``/metrics``."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """The samples of all replicas at one moment."""

    def __init__(self, at: float, samples: Sequence[MetricSample], *, silent: int = 0) -> None:
        self.at = at
        self.silent = silent
        """How many replicas did not answer."""
        self._by_name: dict[str, list[MetricSample]] = defaultdict(list)
        for sample in samples:
            self._by_name[sample.name].append(sample)

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all replicas and all other labels."""
        return sum(
            sample.value
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == wanted for key, wanted in labels.items())
        )

    def highest(self, name: str) -> float:
        """The highest value on any replica."""
        return max((sample.value for sample in self._by_name.get(name, ())), default=0.0)


def parse_metrics(text: str) -> list[MetricSample]:
    """Read the text format of Prometheus, as far as our servers write it."""
    samples = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is not None:
            name, labels, value = found.groups()
            samples.append(MetricSample(name, dict(_LABEL.findall(labels or "")), float(value)))
    return samples


async def read_metrics(tenant: DrillTenant) -> Metrics:
    """What the replicas count at the moment. One that does not answer is ``silent``."""
    answers = await asyncio.gather(
        *(
            tenant.call("GET", "/metrics", replica=replica, timeout_s=5.0)
            for replica in range(len(tenant.urls))
        )
    )
    samples: list[MetricSample] = []
    silent = 0
    for answer in answers:
        if answer.status == HTTPStatus.OK and isinstance(answer.document, str):
            samples += parse_metrics(answer.document)
        else:
            silent += 1
    return Metrics(time.time(), samples, silent=silent)


async def read_whole_metrics(tenant: DrillTenant, *, within_s: float = WHOLE_S_MAX) -> Metrics:
    """What all replicas count at the moment. Raises ``CouldNotRun`` if some do not answer."""
    until = time.monotonic() + within_s
    while (metrics := await read_metrics(tenant)).silent:
        if time.monotonic() >= until:
            raise CouldNotRun(f"{metrics.silent} of {len(tenant.urls)} do not answer /metrics")
        await asyncio.sleep(_SAMPLE_EVERY_S)
    return metrics


class Sampler:
    """Metrics over time."""

    def __init__(self) -> None:
        self.seen: list[Metrics] = []

    def values(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """A counter or gauge over time, as (time of day, value)."""
        return [(each.at, each.sum(name, **labels)) for each in self.seen]

    def last_rise(self, name: str, **labels: str) -> float | None:
        """When the counter was last seen higher than the time before."""
        found = None
        values = self.values(name, **labels)
        for (_, before), (at, after) in pairwise(values):
            if after > before:
                found = at
        return found


@asynccontextmanager
async def sampled(tenant: DrillTenant) -> AsyncIterator[Sampler]:
    """Read the metrics again and again while the block lasts."""
    sampler = Sampler()

    async def sample() -> None:
        while True:
            # A paused replica must not keep the others from being seen.
            sampler.seen.append(await read_metrics(tenant))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    task = asyncio.create_task(sample(), name="sample metrics")
    try:
        yield sampler
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# ── The lock store ───────────────────────────────────────────────────────────────────────────────


class LockCommand(msgspec.Struct, frozen=True):
    """One command on a lock, as the lock server executed it."""

    at: float
    verb: str
    """``acquire``, ``renew`` or ``release``."""
    name: str
    token: str


class LockCommands:
    """Commands on locks, in the order in which the lock server executed them."""

    def __init__(self) -> None:
        self.seen: list[LockCommand] = []
        self.ended = asyncio.Event()
        """Set when the lock server shows no more commands."""

    def attempts(self, name: str, *, since: float = 0.0) -> list[float]:
        """When this lock was asked for."""
        return self._times("acquire", name, since)

    def renewals(self, name: str) -> list[float]:
        """When a holder renewed this lock, or tried to."""
        return self._times("renew", name, 0.0)

    def _times(self, verb: str, name: str, since: float) -> list[float]:
        return [
            each.at
            for each in self.seen
            if each.name == name and each.verb == verb and each.at >= since
        ]


def parse_lock_command(line: bytes) -> LockCommand | None:
    """Read a line of Valkey's MONITOR; ``None`` if it is no command on a lock."""
    if b'"evalsha"' not in line.lower():
        return None
    words = [word.decode(errors="replace") for word in _WORD.findall(line)]
    if len(words) < _EVALSHA_HEAD or not words[2].isdigit():
        return None
    arguments = words[_EVALSHA_HEAD + int(words[2]) :]
    verb = _VERBS.get(len(arguments))
    if verb is None:
        return None
    at = float(line.lstrip(b"+").partition(b" ")[0])
    return LockCommand(at, verb, arguments[0], arguments[1])


@asynccontextmanager
async def monitored(port: int) -> AsyncIterator[LockCommands]:
    """Watch a lock server of the drill's own with MONITOR while the block lasts.

    Raises ``CouldNotRun`` at its end if commands can have been missed.
    """
    commands = LockCommands()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_BUFFER_BYTES)
    writer.write(b"MONITOR\r\n")
    await reader.readline()

    async def follow() -> None:
        try:
            while line := await reader.readline():
                command = parse_lock_command(line)
                if command is not None:
                    commands.seen.append(command)
        finally:
            commands.ended.set()

    task = asyncio.create_task(follow(), name="monitor locks")
    try:
        yield commands
        if commands.ended.is_set():
            raise CouldNotRun("the lock server ended MONITOR: not all commands on locks were seen")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


# ── Logs ─────────────────────────────────────────────────────────────────────────────────────────


def time_of(text: str) -> float:
    """A time in ISO 8601, as the time of day in seconds."""
    return datetime.fromisoformat(text).timestamp()


def log_lines(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a server's log that tell of this event."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        with suppress(*DECODE_ERRORS):
            document = msgspec.json.decode(line)
            if isinstance(document, dict) and document.get("event") == event:
                found.append(document)
    return found


# ── Times ────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def late_timers() -> AsyncIterator[list[float]]:
    """Note how late this process wakes up while the block lasts, in seconds."""
    late_s: list[float] = []

    async def note() -> None:
        while True:
            due = time.perf_counter() + _TIMER_S
            await asyncio.sleep(_TIMER_S)
            late_s.append(time.perf_counter() - due)

    task = asyncio.create_task(note(), name="note late timers")
    try:
        yield late_s
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def counts_per(times: Iterable[float], width_s: float, *, since: float, until: float) -> list[int]:
    """How many of the times lie in each stretch of ``width_s``."""
    size = max(1, round((until - since) / width_s))
    counted = Counter(int((at - since) / width_s) for at in times if since <= at < until)
    return [counted[number] for number in range(size)]


def rate_series(
    label: str, times: Iterable[float], width_s: float, *, since: float, until: float
) -> Series:
    """Events per stretch of time, as a line."""
    counts = counts_per(times, width_s, since=since, until=until)
    points = tuple((number * width_s, float(count)) for number, count in enumerate(counts))
    return Series(label, points)


def cumulative(label: str, times: Iterable[float], *, until: float) -> Series:
    """How many there have been so far, as a line from 0 to ``until``."""
    ordered = sorted(times)
    points = [(0.0, 0.0), *((at, float(number)) for number, at in enumerate(ordered, 1))]
    return Series(label, (*points, (until, float(len(ordered)))))
