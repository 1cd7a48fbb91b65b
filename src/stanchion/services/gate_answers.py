"""What the gate answers. Each says who must act: nobody, the caller, the tenant, the operator."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from stanchion.core.faults import Fault, WorkflowFaults
from stanchion.core.model import RunId, RunStatus
from stanchion.core.rerun import RerunRefused
from stanchion.services.plans import UnknownWorkflow

__all__ = [
    "GateCode",
    "GateFailed",
    "InvalidInput",
    "JobThrottled",
    "KeyMismatch",
    "Passed",
    "RerunAnswer",
    "StartAnswer",
    "Started",
    "SubmitAnswer",
    "TenantFull",
    "UnknownRun",
]


class Started(msgspec.Struct, frozen=True):
    """The run is there."""

    run_id: RunId
    status: RunStatus
    replayed: bool
    """The same key made it before, and this request made nothing."""


class InvalidInput(msgspec.Struct, frozen=True):
    """The workflow does not accept this input."""

    faults: tuple[Fault, ...]


class UnknownRun(msgspec.Struct, frozen=True):
    """The tenant has no such run."""

    run_id: RunId


class TenantFull(msgspec.Struct, frozen=True):
    """The tenant has as many unfinished runs as it may."""

    limit: int
    active: int
    retry_after_ms: int


class KeyMismatch(msgspec.Struct, frozen=True):
    """The idempotency key was used for another request."""


class JobThrottled(msgspec.Struct, frozen=True):
    """The tenant submits jobs faster than it may."""

    retry_after_ms: int = 30_000


class GateCode(StrEnum):
    """Why nobody could say whether the run may begin."""

    GATE_UNAVAILABLE = "gate_unavailable"
    """The store or the lock store is silent."""
    GATE_BUSY = "gate_busy"
    """Others had the tenant's lock for as long as the caller could wait."""
    LIMIT_CHECK_FAILED = "limit_check_failed"
    """The lock was ours, and the store behind it failed."""


class GateFailed(msgspec.Struct, frozen=True):
    """No run was made, as far as anybody knows; with the same key it is safe to ask again."""

    code: GateCode
    error: str
    retry_after_ms: int


Passed: TypeAlias = Started | KeyMismatch | TenantFull | JobThrottled | GateFailed
"""What can come of a run that was ready to begin."""
StartAnswer: TypeAlias = Passed | UnknownWorkflow | WorkflowFaults | InvalidInput
RerunAnswer: TypeAlias = Passed | UnknownRun | RerunRefused
SubmitAnswer: TypeAlias = Started | KeyMismatch | JobThrottled | GateFailed
