"""What a worker reports about itself: frozen events for hooks and metrics, and their log lines.

A log record's message is the event's name, and ``record.fields`` has its fields. A program that has
not configured logging gets one readable line an event on standard error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, assert_never

import msgspec

from stanchion import telemetry
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import FenceCause

__all__ = [
    "LOGGER",
    "Hook",
    "JobAbandoned",
    "JobCancelled",
    "JobEnded",
    "LoopStalled",
    "RenewalFailed",
    "ResultDropped",
    "ResultRejected",
    "ServerAway",
    "ServerBack",
    "WorkerEvent",
    "log",
    "log_event",
    "show_lines",
]

LOGGER: Final = logging.getLogger("stanchion.worker")


def log_event(
    level: int, name: str, *, raised: BaseException | None = None, **fields: JsonValue
) -> None:
    """Write an event's line; with what was raised, its traceback too."""
    fields |= telemetry.log_ids(fields)
    LOGGER.log(level, name, exc_info=raised, extra={"fields": fields})


def show_lines(level: str = "INFO") -> None:
    """Show lines on standard error, unless the program has configured logging."""
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        LOGGER.setLevel(level)


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as in the base class
        fields: dict[str, JsonValue] = getattr(record, "fields", {})
        shown = "".join(f" {key}={value}" for key, value in fields.items())
        return super().formatMessage(record) + shown


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A handler ended, and its result goes to the server."""

    job_id: str
    topic: str
    status: Literal["succeeded", "failed"]
    took_ms: int


class JobAbandoned(msgspec.Struct, frozen=True, kw_only=True):
    """A handler was stopped, or its result dropped: another worker gets the job."""

    job_id: str
    topic: str
    cause: FenceCause | Literal["shutdown"]
    stalled_ms: int = 0
    """For how long the event loop was blocked meanwhile, if the lease was not renewed in time."""


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A handler was stopped, because the job's run was cancelled."""

    job_id: str
    topic: str


class RenewalFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A renewal of several leases ended in an error or a time-out."""

    leases: int
    error: str
    left_ms: int
    """For how long all of these leases are still trusted; 0 if one has been given up."""


class ResultRejected(msgspec.Struct, frozen=True, kw_only=True):
    """The server rejected a result."""

    job_id: str
    code: str


class ResultDropped(msgspec.Struct, frozen=True, kw_only=True):
    """A result was dropped: it could not be sent while the lease was valid."""

    job_id: str
    reason: str


class ServerAway(msgspec.Struct, frozen=True, kw_only=True):
    """Leasing jobs failed. Reported once, until the server answers again."""

    error: str


class ServerBack(msgspec.Struct, frozen=True, kw_only=True):
    """The server answers again."""


class LoopStalled(msgspec.Struct, frozen=True, kw_only=True):
    """The event loop was blocked, by an async handler or because the machine was suspended."""

    stalled_ms: int


WorkerEvent: TypeAlias = (
    JobEnded
    | JobAbandoned
    | JobCancelled
    | RenewalFailed
    | ResultRejected
    | ResultDropped
    | ServerAway
    | ServerBack
    | LoopStalled
)
Hook: TypeAlias = Callable[[WorkerEvent], None]


def log(event: WorkerEvent) -> None:
    """Write an event's line."""
    match event:
        case JobEnded():
            _line(logging.DEBUG, "job_ended", event)
        case JobAbandoned():
            _line(logging.ERROR, "job_lock_abandoned", event, hint=_stall_hint(event))
        case JobCancelled():
            _line(logging.INFO, "job_cancelled", event)
        case RenewalFailed():
            _line(logging.WARNING, "job_lock_renew_failed", _with_time_left(event))
        case ResultRejected():
            _line(logging.WARNING, "job_result_rejected", event)
        case ResultDropped():
            _line(logging.ERROR, "job_result_dropped", event)
        case ServerAway():
            _line(logging.WARNING, "server_away", event)
        case ServerBack():
            _line(logging.INFO, "server_back", event)
        case LoopStalled():
            _line(logging.WARNING, "worker_loop_stalled", event)
        case _:
            assert_never(event)


def _with_time_left(event: RenewalFailed) -> RenewalFailed:
    if event.left_ms == 0:
        return event
    error = f"{event.error}, can hold on for {event.left_ms // 1000} s"
    return msgspec.structs.replace(event, error=error)


def _stall_hint(event: JobAbandoned) -> str | None:
    if event.stalled_ms == 0:
        return None
    return (
        f"the event loop was blocked for {event.stalled_ms / 1000:.1f} s and could not renew;"
        " put blocking code into a def handler"
    )


def _line(level: int, name: str, event: WorkerEvent, hint: str | None = None) -> None:
    if LOGGER.isEnabledFor(level):
        fields = msgspec.structs.asdict(event)
        if hint is not None:
            fields["hint"] = hint
        log_event(level, name, **fields)
