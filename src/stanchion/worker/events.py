"""What a worker tells: frozen facts for logs and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeAlias, assert_never

import msgspec

from stanchion.core.lease import FenceCause
from stanchion.worker.log import LOGGER, log_event

__all__ = [
    "Hook",
    "JobAbandoned",
    "JobEnded",
    "LoopStalled",
    "RenewalFailed",
    "ResultDropped",
    "ResultRejected",
    "ServerAway",
    "ServerBack",
    "WorkerEvent",
    "log",
]


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A handler ended, and its result goes to the server."""

    job_id: str
    topic: str
    status: Literal["succeeded", "failed"]
    took_ms: int


class JobAbandoned(msgspec.Struct, frozen=True, kw_only=True):
    """A handler was stopped, or its result thrown away: the job is left to another worker."""

    job_id: str
    topic: str
    cause: FenceCause | Literal["shutdown"]


class RenewalFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A renewal for so many leases ended in an error or a time-out."""

    leases: int
    error: str


class ResultRejected(msgspec.Struct, frozen=True, kw_only=True):
    """The server did not take a result."""

    job_id: str
    code: str


class ResultDropped(msgspec.Struct, frozen=True, kw_only=True):
    """A result was given up: the server could not be told while the lease was good."""

    job_id: str
    reason: str


class ServerAway(msgspec.Struct, frozen=True, kw_only=True):
    """No work could be asked for. Told once, until the server is back."""

    error: str


class ServerBack(msgspec.Struct, frozen=True, kw_only=True):
    """The server answers again."""


class LoopStalled(msgspec.Struct, frozen=True, kw_only=True):
    """The event loop stood still for so long: blocking code in an async handler, or a suspend."""

    stalled_ms: int


WorkerEvent: TypeAlias = (
    JobEnded
    | JobAbandoned
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
            _line(logging.ERROR, "job_lock_abandoned", event)
        case RenewalFailed():
            _line(logging.WARNING, "job_lock_renew_failed", event)
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


def _line(level: int, name: str, event: WorkerEvent) -> None:
    if LOGGER.isEnabledFor(level):
        log_event(level, name, **msgspec.structs.asdict(event))
