"""API calls of the command line: one request, its answer, and what a failure means.

Requests are not retried at the same server: the command prints the refusal and the time to wait. A
script that wants retries uses the client SDK. Of several servers, the next one is tried when one
does not answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import click
from msgspec.structs import replace

from stanchion.cli.errors import CallContext, CliError, Exit, error_from
from stanchion.transport.blocking import (
    BlockingFailover,
    BlockingStream,
    BlockingTransport,
    blocking_transport,
)
from stanchion.transport.failover import parse_addresses
from stanchion.transport.messages import HttpReply, NoReply, Request, Silence

_PATIENCE_S: Final = 35.0
"""The server answers within 30 s, or longer if it was asked to wait."""
_SILENCE_S: Final = 5.0
"""The same for one of several servers, if the request can be sent to the next one."""
_SAY_AFTER_S: Final = 3.0
"""After this long without an answer, the command prints what it waits for."""
_REPEATABLE_ENDS: Final = ("/cancel", "/approve", "/reject")
"""Posting these twice has the effect of once."""
_OK_MAX: Final = 299


class ApiAnswer(NamedTuple):
    """A response of the server."""

    document: Any
    is_replay: bool


class Content(NamedTuple):
    """A request body with a content type."""

    data: bytes
    kind: str


def path_to(*parts: str) -> str:
    """A path below ``/v1``. Each part is quoted, including slashes."""
    with _only_utf8():
        return "/v1/" + "/".join(quote(part, safe="") for part in parts)


@contextmanager
def _only_utf8() -> Iterator[None]:
    """An argument whose bytes are no UTF-8 cannot be a part of a URL."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise CliError(f"{error.object!r} is not UTF-8", Exit.USAGE) from error


@dataclass(slots=True, kw_only=True)
class ApiClient:
    """A server, and the credentials to call it with."""

    url: str
    api_key: str | None = None
    tenant: str | None = None
    patience_s: float = _PATIENCE_S
    """How long one answer may take, without the wait that the request asks for."""
    flags: str = ""
    """Flags that name the server and tenant, to be repeated in hints: `` --tenant acme``."""
    last: ApiAnswer | None = field(default=None, init=False, repr=False)
    """The last answer."""
    _transport: BlockingTransport | BlockingFailover | None = field(
        default=None, init=False, repr=False
    )

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
        key: str | None = None,
        wait_s: float = 0,
        role: str | None = None,
    ) -> ApiAnswer:
        """Send one request. A body other than ``Content`` or ``None`` is sent as JSON.

        ``role``: what the command needs, if that is more than this request. Raises ``CliError``.
        """
        asked = {
            name: value
            for name, value in (query or {}).items()
            if value is not None and value != ()
        }
        with _only_utf8():
            text = urlencode(asked, doseq=True)
        content = None if body is None else _content(body)
        headers = self._headers(key)
        if content is not None:
            headers["Content-Type"] = content.kind
        request = Request(
            name=path,
            method=method,
            path=path + (f"?{text}" if asked else ""),
            headers=tuple(headers.items()),
            body=b"" if content is None else content.data,
            timeout_s=self.patience_s + wait_s,
            # Otherwise it is sent once: if the response is lost, the user decides.
            is_repeatable=method in {"GET", "PUT"}
            or key is not None
            or path.endswith(_REPEATABLE_ENDS),
        )
        reply = self._send(request)
        document = _document(reply, self.url)
        if reply.status > _OK_MAX:
            tenant = self.tenant or (None if self.api_key else "default")
            caller = CallContext(self.api_key is not None, tenant, self.flags, role)
            raise error_from(document, status=reply.status, path=path, caller=caller)
        self.last = ApiAnswer(document, reply.headers.get("idempotency-replayed") == "true")
        return self.last

    def _headers(self, key: str | None) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {self.api_key}" if self.api_key else None,
            "X-Stanchion-Tenant": self.tenant,
            "Idempotency-Key": key,
        }
        given = {name: value for name, value in headers.items() if value is not None}
        for name, value in given.items():
            if not (value.isascii() and value.isprintable()):
                raise CliError(f"{name} should have visible ASCII characters only", Exit.USAGE)
        return given

    def _send(self, request: Request) -> HttpReply:
        if self._transport is None:
            try:
                self._transport = blocking_transport(parse_addresses(self.url))
            except ValueError as error:
                raise CliError(
                    "this is not the URL of a server",
                    Exit.USAGE,
                    fix="write --url http://HOST:PORT",
                ) from error
        others = self.url.count(",")
        if others and not request.is_repeatable:
            # It is sent once. So find a server that answers first.
            probe = replace(_PROBE, timeout_s=_SAY_AFTER_S)
            self._try_each(self._transport, probe, probe, others)
            others = 0
        # While there is another server to ask, a silent one gets less time.
        short = replace(request, timeout_s=request.timeout_s - self.patience_s + _SILENCE_S)
        with _notice_after(self.url, _SAY_AFTER_S + request.timeout_s - self.patience_s):
            outcome = self._try_each(self._transport, short, request, others)
        if isinstance(outcome, HttpReply):
            return outcome
        assert isinstance(outcome, NoReply)  # no streams are requested
        raise _unreachable(outcome, self.url, request.timeout_s)

    def _try_each(
        self,
        transport: BlockingTransport | BlockingFailover,
        first: Request,
        last: Request,
        others: int,
    ) -> HttpReply | NoReply | BlockingStream:
        """Send it to the next server, ``others`` times, while servers are silent."""
        for _ in range(others):
            outcome = transport.send(first)
            if not (isinstance(outcome, NoReply) and outcome.silence is Silence.TIMED_OUT):
                return outcome
        return transport.send(last)


_PROBE: Final = Request(
    name="/livez",
    method="GET",
    path="/livez",
    headers=(),
    body=b"",
    timeout_s=_SAY_AFTER_S,
    is_repeatable=True,
)
"""Any server answers it at once."""


@contextmanager
def _notice_after(url: str, seconds: float) -> Iterator[None]:
    """Say on standard error that a server takes long, if the block does."""
    said = f"waiting for {url}: no answer for {seconds:.0f} s"
    timer = threading.Timer(seconds, lambda: click.echo(said, err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _content(body: object) -> Content:
    if isinstance(body, Content):
        return body
    return Content(json.dumps(body).encode(), "application/json")


def _document(reply: HttpReply, url: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        document = json.loads(reply.body) if reply.body else None
    except (ValueError, RecursionError) as error:
        raise _not_our_server(reply, url, "not JSON") from error
    if reply.status <= _OK_MAX and not isinstance(document, dict):
        raise _not_our_server(reply, url, "not a JSON object")
    return document


def _not_our_server(reply: HttpReply, url: str, what: str) -> CliError:
    return CliError(
        f"{url} answered {reply.status} with something that is {what}: is it a Stanchion server?",
        Exit.UNAVAILABLE,
        fix="check --url or STANCHION_URL, and any proxy in between",
    )


def _unreachable(outcome: NoReply, url: str, timeout_s: float) -> CliError:
    if "," in url:
        message = f"no server answers: {outcome.message}"
        fix = "check --url or STANCHION_URL, and the servers' logs"
    elif outcome.silence is Silence.TIMED_OUT:
        message = f"{url} did not answer within {timeout_s:.0f} s"
        fix = "look at the server's log, and at its /readyz"
    elif outcome.silence is Silence.UNREACHED and "is the server running?" in outcome.message:
        message = f"no server listens at {url}"
        fix = "is the server running? start one with: stanchion serve (or give --url)"
    else:
        message = f"{url} cannot be reached: {outcome.message}"
        fix = "check --url or STANCHION_URL"
        if any(each in outcome.message for each in _NO_TLS):
            fix = f"there is no TLS at this address: try --url http{url.removeprefix('https')}"
    return CliError(
        message,
        Exit.UNAVAILABLE,
        fix=fix,
        may_have_happened=outcome.may_have_run,
        problem={
            "status": 503,
            "code": "unreachable",
            "title": "Unreachable",
            "detail": message,
            "type": "about:blank",
            "retry_class": "unavailable",
            "retry_after_ms": None,
            "request_id": "",
        },
    )


_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's words for a server that does not speak TLS: before version 3.4, and since."""
