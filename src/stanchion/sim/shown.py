"""What processes show of themselves: log lines, metrics, events of workers, their own summaries.

Each is compared with what the simulation has seen of the process itself. Nothing here decides how a
day goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from stanchion.core.model import Instant
from stanchion.core.topic_limits import TokenGrant, TokenPool
from stanchion.ports.clock import Clock
from stanchion.sim.history import History
from stanchion.sim.loop import CURRENT
from stanchion.worker import events

_ENDED_BY: Final[Mapping[str, str]] = {
    "admission_failed": "admission_recovered",
    "limits_unreadable": "limits_readable",
    "ready_poll_failed": "ready_poll_recovered",
    "replica_report_failed": "replica_report_recovered",
    "schedules_unread": "schedules_read_again",
    "server_away": "server_back",
}
"""Log events that begin an outage, and those that end it, of what is done every few seconds."""
_BEGUN_BY: Final = {end: begin for begin, end in _ENDED_BY.items()}
_OUTAGE: Final = "outages are logged when they begin and when they end"
_TRIED_AGAIN_S: Final = 35.0
"""Everything is tried again within this time: a poll of a worker is given up after 20 s."""
_TOKEN_SHARE: Final = 1.02
_TOKEN_EXTRA_MS: Final = 2_000
"""A token lasts so much longer than the lease that it is for."""


def same_count(what: str, *, shown: float, seen: float) -> Iterator[str]:
    """A process shows as many as were seen."""
    if shown != seen:
        yield f"{what}: {shown:g} are shown, and {seen:g} were seen"


def offset_is_right(replica: str, *, shown_ms: int, expected_ms: int) -> Iterator[str]:
    """A replica shows how far its clock is from the store's at the middle of its last report."""
    if abs(shown_ms - expected_ms) > 1:
        yield f"{replica} shows {shown_ms} ms between its clock and the store's, of {expected_ms}"


def is_whole_ms(what: str, seconds: float) -> Iterator[str]:
    """Durations are measured by clocks that count milliseconds, and so is their sum."""
    if abs(seconds * 1_000 - round(seconds * 1_000)) > 1e-3:  # noqa: PLR2004 - sums of floats
        yield f"{what} is {seconds!r} s"


@dataclass(slots=True)
class LogRecord:
    """Outages that processes have logged."""

    history: History
    _open: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    """By process and first event: when it began, and how many starts were answered before."""
    _answered: Counter[str] = field(default_factory=Counter)

    def logged(self, event: str) -> None:
        """A process writes a line."""
        begin = _BEGUN_BY.get(event)
        if begin is None and event not in _ENDED_BY:
            return
        process = CURRENT.get()
        if process is None:
            return
        if begin is None:
            is_wrong = (process.name, event) in self._open
            now_s = asyncio.get_running_loop().time()
            self._open[process.name, event] = (now_s, self._answered[process.name])
        else:
            is_wrong = self._open.pop((process.name, begin), None) is None
        said = [f"{process.name}: {event} is logged out of order"] if is_wrong else []
        self.history.check(_OUTAGE, said)

    def answered(self, process: str) -> None:
        """The store has answered a start of the replica."""
        self._answered[process] += 1

    def check_end(self, up: set[str]) -> None:
        """Check, when all faults are long over, that every outage was logged as over."""
        now_s = asyncio.get_running_loop().time()
        for (process, begin), (begun_s, before) in self._open.items():
            if begin == "server_away":
                continue  # a poll may wait for long, and only its answer ends the outage
            # A replica that no caller asks does not learn that the store is back.
            is_unknown = begin == "admission_failed" and self._answered[process] == before
            is_over = now_s - begun_s > _TRIED_AGAIN_S
            is_wrong = process in up and is_over and not is_unknown
            said = [f"{process}: {begin} is not followed by {_ENDED_BY[begin]}"]
            self.history.check(_OUTAGE, said if is_wrong else [])


@dataclass(slots=True)
class WorkerRecord:
    """The events of one worker."""

    history: History
    _ended: set[str] = field(default_factory=set)

    def told(self, event: events.WorkerEvent) -> None:
        """The worker tells of an event."""
        if isinstance(event, events.JobEnded):
            self._ended.add(event.job_id)

    def reports(self, job_id: str) -> None:
        """The worker sends a result: its handler ended before."""
        said = [f"{job_id}: a result is sent, and no event tells of its end"]
        is_told = job_id in self._ended
        self.history.check("workers tell of jobs that end", [] if is_told else said)


@dataclass(slots=True)
class OffsetRecord:
    """The differences of clocks that replicas show in their summaries."""

    history: History
    clocks: Mapping[str, Clock]
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By replica: wall clock and steady clock when its last report was sent."""
    _expected: dict[str, int] = field(default_factory=dict)

    def sends(self, replica: str, summary: Any) -> None:  # noqa: ANN401 - JSON
        """A replica is about to report."""
        clock = self.clocks[replica]
        expected_ms = self._expected.get(replica)
        if expected_ms is not None:
            shown_ms = summary.get("clock_offset_ms", 0)
            said = offset_is_right(replica, shown_ms=shown_ms, expected_ms=expected_ms)
            self.history.check("replicas show the offset of their clocks", said)
        self._sent[replica] = (clock.now(), clock.moment())

    def brought(self, replica: str, at: Instant) -> None:
        """The answer, the store's time, has reached the replica."""
        now, moment = self._sent[replica]
        took_ms = self.clocks[replica].moment() - moment
        self._expected[replica] = now + took_ms // 2 - at


@dataclass(slots=True)
class TokenRecord:
    """The tokens of topic limits that replicas take."""

    history: History
    job_ttl_ms: int

    def granted(self, pool: TokenPool, until: Mapping[str, Instant], grant: TokenGrant) -> None:
        """The store has given tokens: each outlives the lease that it is for."""
        expected = grant.at + ceil(self.job_ttl_ms * _TOKEN_SHARE) + _TOKEN_EXTRA_MS
        for token in grant.tokens:
            said = [f"a token of {pool.name} lasts until {until[token]}, and not {expected}"]
            self.history.check(
                "a token outlives its lease", said if until[token] != expected else []
            )
