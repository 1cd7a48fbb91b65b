"""A server that says what it was told to say, and the command line in front of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

__all__ = ["Request", "Said", "Script", "problem", "running_script"]


@dataclass(frozen=True)
class Request:
    """What the command line sent."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:  # noqa: ANN401 - any JSON value
        return json.loads(self.body)


@dataclass(frozen=True)
class Said:
    """One answer. ``None`` as its body: the connection is closed without one."""

    document: object = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    text: bytes | None = None
    hangs_up: bool = False


def problem(status: int, code: str, **members: object) -> Said:
    document = {
        "status": status,
        "code": code,
        "title": code,
        "detail": f"this is {code}",
        "type": "about:blank",
        "retry_class": None,
        "retry_after_ms": None,
        "request_id": "r-1",
    }
    return Said(document | members, status, {"Content-Type": "application/problem+json"})


@dataclass
class Script:
    """What is said next, and what was asked. The last answer is said again and again."""

    url: str
    answers: list[Said] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def says(self, *answers: Said) -> Script:
        self.answers = list(answers)
        return self

    def next(self, request: Request) -> Said:
        self.requests.append(request)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def running_script() -> Iterator[Script]:
    """Real HTTP on loopback, on a port of our own."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            said = script.next(
                Request(
                    self.command,
                    unquote(parts.path),
                    dict(parse_qsl(parts.query)),
                    dict(self.headers),
                    self.rfile.read(length),
                )
            )
            if said.hangs_up:
                return
            text = said.text
            if text is None:
                text = b"" if said.document is None else msgspec.json.encode(said.document)
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - its names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Nobody wants to read it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script = Script(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
