"""The server as a worker calls it: lease, renew, results, and what each response means.

The outcome of a call is ``ServerAnswered``, ``ServerUnreachable`` (no usable response: retry later)
or ``ServerRefused`` (the server would answer the same again: an operator has to act).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from stanchion.transport.event_loop import loop_transport
from stanchion.transport.failover import parse_addresses
from stanchion.transport.messages import HttpReply, NoReply, Request
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

CONNECT_S_MAX: Final = 5.0
KEPT_MAX: Final = 8
"""Connections kept for the next request: one long poll, and a few results and renewals."""
_REQUEST_S_MAX: Final = 120.0
"""The caller sets the time-out. This bounds a request whose caller sets none."""


class TransportFailed(Exception):
    """No answer came. The request may have been executed all the same."""


class Transport(Protocol):
    """What carries a request to the server and its answer back."""

    async def post(self, path: str, body: bytes) -> HttpReply:
        """Send it and wait for the answer: the caller sets a limit. Raises ``TransportFailed``."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 over connections that are kept open. For one event loop."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None = None,
    ) -> None:
        headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
                raise ValueError("an API key is one word of printable ASCII characters")
            headers.append(("Authorization", f"Bearer {api_key}"))
        self._headers = tuple(headers)
        self._http = loop_transport(
            parse_addresses(url), connect_s_max=CONNECT_S_MAX, kept_max=KEPT_MAX
        )

    async def post(self, path: str, body: bytes) -> HttpReply:
        outcome = await self._http.send(
            Request(
                name="worker",
                method="POST",
                path=path,
                headers=self._headers,
                body=body,
                timeout_s=_REQUEST_S_MAX,
                # Renewals and results are idempotent, and a lease whose response is lost expires.
                is_repeatable=True,
            )
        )
        if isinstance(outcome, HttpReply):
            return outcome
        assert isinstance(outcome, NoReply)  # Streams are not asked for.
        raise TransportFailed(outcome.message)

    async def close(self) -> None:
        """Drop every connection, also those with a request under way."""
        await self._http.abort()


LEASE_PATH: Final = "/v1/worker/lease"
RENEW_PATH: Final = "/v1/worker/renew"
RESULTS_PATH: Final = "/v1/worker/results"
LEASE_GRACE_S: Final = 10.0
"""How much longer than the long poll its answer may take."""

_OK: Final = 200
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a retry may help. Any other status but 200 is final."""
_ENCODER: Final = msgspec.json.Encoder()
_PROBLEM: Final = msgspec.json.Decoder(Problem)
_LEASED: Final = msgspec.json.Decoder(LeaseAnswer)
_RENEWED: Final = msgspec.json.Decoder(RenewAnswer)
_TAKEN: Final = msgspec.json.Decoder(ResultsAnswer)

_T = TypeVar("_T")


class ServerAnswered(msgspec.Struct, Generic[_T], frozen=True):
    """The server did what was asked."""

    value: _T


class ServerUnreachable(msgspec.Struct, frozen=True):
    """No usable response. The request may have been executed, and a retry may help."""

    error: str
    retry_after_ms: int = 0


class ServerRefused(msgspec.Struct, frozen=True):
    """The server refused the request. A retry cannot help."""

    status: int
    code: str
    detail: str


Outcome: TypeAlias = ServerAnswered[_T] | ServerUnreachable | ServerRefused


class WorkerApi:
    """Sends the requests of one worker."""

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
        self, leases: tuple[LeaseRef, ...], *, timeout_s: float, wait_s: float = 0
    ) -> Outcome[RenewAnswer]:
        request = RenewRequest(worker_id=self._worker_id, leases=leases, wait_s=wait_s)
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
            return ServerUnreachable(f"no answer within {timeout_s:g} s")
        except TransportFailed as failure:
            return ServerUnreachable(str(failure))
        if answer.status == _OK:
            try:
                return ServerAnswered(decoder.decode(answer.body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                # Something between us and the server answered in its name.
                return ServerUnreachable(f"the answer is not understood: {error}")
        return _not_done(answer.status, answer.body)


def _not_done(status: int, body: bytes) -> ServerUnreachable | ServerRefused:
    try:
        problem = _PROBLEM.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = Problem(status=status, code="unknown", title="", detail=f"HTTP status {status}")
    if status in _AGAIN:
        wait_ms = problem.retry_after_ms or 0
        return ServerUnreachable(f"{status} {problem.code}: {problem.detail}", max(0, wait_ms))
    return ServerRefused(status, problem.code, problem.detail)
