"""A collector of traces: receives OTLP over HTTP, and puts spans together to trees."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["CollectedSpan", "Collector", "collecting"]

_WAIT_S_MAX: Final = 20.0
_LOOK_EVERY_S: Final = 0.05


class CollectedSpan(NamedTuple):
    """One span as it was exported."""

    name: str
    service: str
    instance: str
    """The replica or the worker."""
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[str, ...]
    begin_ns: int
    end_ns: int
    attributes: dict[str, str | int]
    is_error: bool


class Collector:
    """The spans that were received so far."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._spans: list[CollectedSpan] = []

    def add(self, body: bytes) -> None:
        """Take the spans of one request."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes: dict[str, str | int] = {
                        each.key: each.value.string_value or each.value.int_value
                        for each in span.attributes
                    }
                    self._spans.append(
                        CollectedSpan(
                            name=span.name,
                            service=named.get("service.name", ""),
                            instance=named.get("service.instance.id", ""),
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            links=tuple(link.span_id.hex() for link in span.links),
                            begin_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes=attributes,
                            is_error=span.status.code == 2,
                        )
                    )

    def trace(
        self, trace_id: str, *, until: Callable[[list[CollectedSpan]], bool]
    ) -> list[CollectedSpan]:
        """The spans of a trace, as soon as ``until`` holds for them; in the order of begin."""
        ends_at = time.monotonic() + _WAIT_S_MAX
        while True:
            found = [span for span in list(self._spans) if span.trace_id == trace_id]
            found.sort(key=lambda span: span.begin_ns)
            if until(found):
                return found
            assert time.monotonic() < ends_at, [span.name for span in found]
            time.sleep(_LOOK_EVERY_S)

    def everything(self) -> list[CollectedSpan]:
        """All spans of all traces."""
        return list(self._spans)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - theirs
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()
