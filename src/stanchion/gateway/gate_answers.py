"""What the gate said, as answers: the texts that people script against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

from stanchion.gateway.call import Reply
from stanchion.gateway.problems import (
    GATE_UNAVAILABLE,
    LIMIT_CHECK_FAILED,
    TENANT_FULL,
    Headers,
    Refusal,
)
from stanchion.services.gate_answers import (
    GateCode,
    GateFailed,
    GateFull,
    JobThrottled,
    KeyMismatch,
    RunStarted,
)
from stanchion.wire.problems import Code

__all__ = ["REPLAYED", "refusal_of", "started"]

REPLAYED: Final[Headers] = ((b"idempotency-replayed", b"true"),)

_FAILED: Final[Mapping[GateCode, tuple[Code, str]]] = {
    GateCode.GATE_UNAVAILABLE: (Code.GATE_UNAVAILABLE, GATE_UNAVAILABLE),
    GateCode.GATE_BUSY: (Code.GATE_BUSY, GATE_UNAVAILABLE),
    GateCode.LIMIT_CHECK_FAILED: (Code.LIMIT_CHECK_FAILED, LIMIT_CHECK_FAILED),
}


def started(answer: RunStarted, value: object) -> Reply:
    """The run is there; a header says whether this very request made it."""
    return Reply(value, headers=REPLAYED if answer.replayed else ())


def refusal_of(answer: GateFull | KeyMismatch | JobThrottled | GateFailed) -> Refusal:
    """Why there is no run."""
    match answer:
        case GateFull():
            return Refusal(
                code=Code.MAX_CONCURRENT_RUNS_REACHED,
                detail=TENANT_FULL,
                retry_after_ms=answer.retry_after_ms,
                limit=answer.limit,
                active=answer.active,
            )
        case KeyMismatch():
            return Refusal(
                code=Code.IDEMPOTENCY_MISMATCH,
                detail="this Idempotency-Key was used for another request",
            )
        case JobThrottled():
            return Refusal(
                code=Code.JOB_THROTTLED,
                detail="job rate limit reached",
                retry_after_ms=answer.retry_after_ms,
            )
        case GateFailed():
            code, detail = _FAILED[answer.code]
            return Refusal(code=code, detail=detail, retry_after_ms=answer.retry_after_ms)
        case _:
            assert_never(answer)
