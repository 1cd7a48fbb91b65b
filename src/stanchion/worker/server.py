"""The server as a worker sees it: three questions, and what each answer means.

Whatever comes back is one of three things. An answer. *Away*: nobody knows, ask again later.
*Refused*: the server understood and will say the same again, so somebody has to act.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from stanchion.wire.problems import Problem
from stanchion.wire.worker import (
    JobResult,
    LeaseAnswer,
    LeaseRef,
    LeaseRequest,
    RenewAnswer,
    RenewRequest,
    ResultsAnswer,
    ResultsRequest,
)
from stanchion.worker.transport import Transport, TransportFailed

__all__ = ["Answered", "Away", "Refused", "Server"]

LEASE_PATH: Final = "/v1/worker/lease"
RENEW_PATH: Final = "/v1/worker/renew"
RESULTS_PATH: Final = "/v1/worker/results"
LEASE_GRACE_S: Final = 10.0
"""How much longer than the long poll its answer may take."""

_OK: Final = 200
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Asking again may help. Everything else that is not a 200 is the server's last word."""
_ENCODER: Final = msgspec.json.Encoder()
_PROBLEM: Final = msgspec.json.Decoder(Problem)
_LEASED: Final = msgspec.json.Decoder(LeaseAnswer)
_RENEWED: Final = msgspec.json.Decoder(RenewAnswer)
_TAKEN: Final = msgspec.json.Decoder(ResultsAnswer)

_T = TypeVar("_T")


class Answered(msgspec.Struct, Generic[_T], frozen=True):
    """The server did what was asked."""

    value: _T


class Away(msgspec.Struct, frozen=True):
    """Nobody knows. It may have been done, and asking again may help."""

    error: str
    retry_after_ms: int = 0


class Refused(msgspec.Struct, frozen=True):
    """The server will not do it, however often it is asked."""

    status: int
    code: str
    detail: str


Outcome: TypeAlias = Answered[_T] | Away | Refused


class Server:
    """Asks in one worker's name."""

    def __init__(self, transport: Transport, worker_id: str) -> None:
        self._transport = transport
        self._worker_id = worker_id

    async def lease(
        self, topics: tuple[str, ...], *, max_jobs: int, wait_s: float
    ) -> Outcome[LeaseAnswer]:
        request = LeaseRequest(
            worker_id=self._worker_id, topics=topics, max_jobs=max_jobs, wait_s=wait_s
        )
        return await self._post(LEASE_PATH, request, _LEASED, timeout_s=wait_s + LEASE_GRACE_S)

    async def renew(
        self, leases: tuple[LeaseRef, ...], *, timeout_s: float
    ) -> Outcome[RenewAnswer]:
        request = RenewRequest(worker_id=self._worker_id, leases=leases)
        return await self._post(RENEW_PATH, request, _RENEWED, timeout_s=timeout_s)

    async def results(
        self, results: tuple[JobResult, ...], *, timeout_s: float
    ) -> Outcome[ResultsAnswer]:
        request = ResultsRequest(worker_id=self._worker_id, results=results)
        return await self._post(RESULTS_PATH, request, _TAKEN, timeout_s=timeout_s)

    async def _post(
        self,
        path: str,
        request: msgspec.Struct,
        decoder: msgspec.json.Decoder[_T],
        *,
        timeout_s: float,
    ) -> Outcome[_T]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._transport.post(path, _ENCODER.encode(request))
        except TimeoutError:
            return Away(f"no answer within {timeout_s:g} s")
        except TransportFailed as failure:
            return Away(str(failure))
        if answer.status == _OK:
            try:
                return Answered(decoder.decode(answer.body))
            except msgspec.DecodeError as error:
                # Something between us and the server answered in its name.
                return Away(f"the answer is not understood: {error}")
        return _not_done(answer.status, answer.body)


def _not_done(status: int, body: bytes) -> Away | Refused:
    try:
        problem = _PROBLEM.decode(body)
    except msgspec.DecodeError:
        problem = Problem(status=status, code="unknown", title="", detail=f"HTTP status {status}")
    if status in _AGAIN:
        wait_ms = problem.retry_after_ms or 0
        return Away(f"{status} {problem.code}: {problem.detail}", max(0, wait_ms))
    return Refused(status, problem.code, problem.detail)
