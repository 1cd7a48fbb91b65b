"""The server, as the command line speaks to it: one request, one answer or one ``Ending``.

On the standard library, because a command must start at once. Nothing is tried again here: who
types sees the answer and the time to wait. A script that wants retries uses the client SDK.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import gaierror
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from stanchion.cli.endings import Ending, Exit
from stanchion.cli.problems import ending_of

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


class _Request(NamedTuple):
    method: str
    target: str
    content: Content | None
    headers: dict[str, str]
    timeout_s: float


def path_to(*parts: str) -> str:
    """A path below ``/v1``. Each part is quoted, also its slashes."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where it is, and who asks."""

    url: str
    api_key: str | None = None
    tenant: str | None = None

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
        at = _address(self.url)
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        target = at.path.rstrip("/") + path + (f"?{urlencode(asked)}" if asked else "")
        content = None if body is None else _content(body)
        request = _Request(method, target, content, self._headers(key), _PATIENCE_S + wait_s)
        status, said, is_replay = self._exchange(at, request)
        document = _document(said, status, self.url)
        if status > _OK_MAX:
            raise ending_of(document, status=status, path=path, has_key=self.api_key is not None)
        return Answer(document, is_replay)

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

    def _exchange(self, at: SplitResult, request: _Request) -> tuple[int, bytes, bool]:
        kind = HTTPSConnection if at.scheme == "https" else HTTPConnection
        connection = kind(at.hostname or "", at.port, timeout=request.timeout_s)
        headers = request.headers
        if request.content is not None:
            headers = headers | {"Content-Type": request.content.kind}
        try:
            connection.request(
                request.method,
                request.target,
                body=None if request.content is None else request.content.data,
                headers=headers,
            )
            response = connection.getresponse()
            said = response.read()
            return response.status, said, response.headers["Idempotency-Replayed"] == "true"
        except (OSError, HTTPException) as error:
            raise _unreachable(error, self.url, request.timeout_s) from error
        finally:
            connection.close()


def _content(body: object) -> Content:
    if isinstance(body, Content):
        return body
    return Content(json.dumps(body).encode(), "application/json")


def _address(url: str) -> SplitResult:
    wrong = Ending(
        "this is not the URL of a server", Exit.USAGE, fix="write --url http://HOST:PORT"
    )
    try:
        at = urlsplit(url)
        is_whole = at.scheme in {"http", "https"} and bool(at.hostname) and at.port != 0
    except ValueError:
        raise wrong from None
    if not is_whole or at.query or at.fragment or at.username is not None:
        raise wrong
    return at


def _document(said: bytes, status: int, url: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(said) if said else None
    except ValueError as error:
        raise Ending(
            f"{url} answered {status} with something that is not JSON: is it a Stanchion server?",
            Exit.UNAVAILABLE,
            fix="check --url or STANCHION_URL, and any proxy in between",
        ) from error


def _unreachable(error: Exception, url: str, timeout_s: float) -> Ending:
    if isinstance(error, TimeoutError):
        message = f"{url} did not answer within {timeout_s:.0f} s"
        fix = "look at the server's log, and at its /readyz"
    elif isinstance(error, ConnectionRefusedError):
        message = f"nobody listens at {url}"
        fix = "is the server running? start one with: stanchion serve (or give --url)"
    else:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        message = f"{url} cannot be reached: {reason}"
        fix = "check --url or STANCHION_URL"
    return Ending(
        message,
        Exit.UNAVAILABLE,
        fix=fix,
        may_have_happened=not isinstance(error, ConnectionRefusedError | gaierror),
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
