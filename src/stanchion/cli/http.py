"""The server as the command line calls it: one request, one response or one ``Ending``.

Nothing is retried here: the caller sees the answer and the time to wait. A script that wants
retries uses the client SDK.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from stanchion.cli.endings import Ending, Exit
from stanchion.cli.problems import Caller, ending_of
from stanchion.transport.blocking import BlockingTransport
from stanchion.transport.messages import NoReply, Reply, Request, Silence, parse_address

__all__ = ["Answer", "Content", "Server", "path_to"]

_PATIENCE_S: Final = 35.0
"""The server answers within 30 s, or longer if it was asked to wait."""
_OK_MAX: Final = 299


class Answer(NamedTuple):
    """What a server said."""

    document: Any
    is_replay: bool


class Content(NamedTuple):
    """A body that is not JSON of ours."""

    data: bytes
    kind: str


def path_to(*parts: str) -> str:
    """A path below ``/v1``. Each part is quoted, also its slashes."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(slots=True, kw_only=True)
class Server:
    """Where it is, and who asks."""

    url: str
    api_key: str | None = None
    tenant: str | None = None
    flags: str = ""
    """Flags that say which server and tenant, as hints repeat them: `` --tenant acme``."""
    _transport: BlockingTransport | None = field(default=None, init=False, repr=False)

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
        key: str | None = None,
        wait_s: float = 0,
    ) -> Answer:
        """Send one request. A body is sent as JSON; one that is ``None`` is left out."""
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        content = None if body is None else _content(body)
        headers = self._headers(key)
        if content is not None:
            headers["Content-Type"] = content.kind
        request = Request(
            name=path,
            method=method,
            path=path + (f"?{urlencode(asked)}" if asked else ""),
            headers=tuple(headers.items()),
            body=b"" if content is None else content.data,
            timeout_s=_PATIENCE_S + wait_s,
            # Sent once: if an answer is lost, the caller is told so and decides.
            is_repeatable=method == "GET",
        )
        reply = self._send(request)
        document = _document(reply, self.url)
        if reply.status > _OK_MAX:
            tenant = self.tenant or (None if self.api_key else "default")
            caller = Caller(self.api_key is not None, tenant, self.flags)
            raise ending_of(document, status=reply.status, path=path, caller=caller)
        return Answer(document, reply.headers.get("idempotency-replayed") == "true")

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
                raise Ending(f"{name} should have visible ASCII characters only", Exit.USAGE)
        return given

    def _send(self, request: Request) -> Reply:
        if self._transport is None:
            try:
                self._transport = BlockingTransport(parse_address(self.url))
            except ValueError as error:
                raise Ending(
                    "this is not the URL of a server",
                    Exit.USAGE,
                    fix="write --url http://HOST:PORT",
                ) from error
        outcome = self._transport.send(request)
        if isinstance(outcome, Reply):
            return outcome
        assert isinstance(outcome, NoReply)  # Streams are not asked for.
        raise _unreachable(outcome, self.url, request.timeout_s)


def _content(body: object) -> Content:
    if isinstance(body, Content):
        return body
    return Content(json.dumps(body).encode(), "application/json")


def _document(reply: Reply, url: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(reply.body) if reply.body else None
    except ValueError as error:
        raise Ending(
            f"{url} answered {reply.status} with something that is not JSON:"
            " is it a Stanchion server?",
            Exit.UNAVAILABLE,
            fix="check --url or STANCHION_URL, and any proxy in between",
        ) from error


def _unreachable(outcome: NoReply, url: str, timeout_s: float) -> Ending:
    if outcome.silence is Silence.TIMED_OUT:
        message = f"{url} did not answer within {timeout_s:.0f} s"
        fix = "look at the server's log, and at its /readyz"
    elif "refused" in outcome.message:
        message = f"no server listens at {url}"
        fix = "is the server running? start one with: stanchion serve (or give --url)"
    else:
        message = f"{url} cannot be reached: {outcome.message}"
        fix = "check --url or STANCHION_URL"
    return Ending(
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
