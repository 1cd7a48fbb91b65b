"""Requests: how a call is encoded as HTTP, and its response decoded."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec.structs import replace

from stanchion import telemetry
from stanchion.client.engine import ApiCall, CallEngine
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.transport.messages import HttpReply, Request

T = TypeVar("T")
JSON: Final = "application/json"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_REPEATABLE: Final = frozenset({"GET", "PUT", "DELETE"})


def request_to(engine: CallEngine, name: str, method: str, path: str) -> Request:
    """A request of this client, without a body."""
    headers = (*engine.headers, ("Accept", JSON))
    traceparent = telemetry.current_traceparent()
    if traceparent is not None:
        headers = (*headers, ("traceparent", traceparent))
    return Request(
        name=name,
        method=method,
        path=path,
        headers=headers,
        timeout_s=engine.timeout_s,
        is_repeatable=method in _REPEATABLE,
    )


def with_body(request: Request, body: bytes, media: str = JSON) -> Request:
    """The request with a body."""
    headers = (*request.headers, ("Content-Type", media))
    return replace(request, headers=headers, body=body)


def with_key(request: Request, key: str) -> Request:
    """The request with an idempotency key: it may be sent twice."""
    headers = (*request.headers, ("Idempotency-Key", key))
    return replace(request, headers=headers, is_repeatable=True)


def get_call(engine: CallEngine, name: str, path: str, kind: type[T]) -> ApiCall[T]:
    """A GET whose response is decoded as ``kind``."""
    return ApiCall(request_to(engine, name, "GET", path), decoder_of(kind))


def post_request(engine: CallEngine, name: str, path: str, body: JsonObject) -> Request:
    """A POST with a JSON body. It is not repeatable unless the caller marks it so."""
    return with_body(request_to(engine, name, "POST", path), encoded(body))


def _mapping(value: object) -> dict[object, object]:
    """Any mapping as a JSON object. The encoder itself knows only ``dict``."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent: it is not JSON")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_mapping)


def encoded(value: JsonValue) -> bytes:
    """The value as JSON. A ``ValueError`` for numbers that JSON does not have."""
    body = _ENCODER.encode(value)
    # The encoder writes `null` for them. What was sent would not be what was meant.
    if b"null" in body and not _is_finite(value):
        raise ValueError("NaN and infinity cannot be sent: JSON has no such numbers")
    return body


def _is_finite(value: object) -> bool:
    match value:
        case float():
            return isfinite(value)
        case Mapping():
            return all(map(_is_finite, value.values()))
        case list() | tuple():
            return all(map(_is_finite, value))
        case _:
            return True


def quoted_segment(text: str, name: str) -> str:
    """One segment of a path."""
    # Empty, `.` and `..` would silently name another resource than was meant.
    if text in {"", ".", ".."}:
        raise ValueError(f"{name} must not be {text!r}")
    return quote(text, safe="")


def run_path(run_id: str) -> str:
    """The path of a run."""
    return f"/v1/runs/{quoted_segment(run_id, 'run_id')}"


def query_of(members: Mapping[str, str | int | Sequence[str] | None]) -> str:
    """What follows the path; members that are ``None`` are left out, lists are repeated."""
    given = {name: value for name, value in members.items() if value is not None and value != ()}
    return f"?{urlencode(given, doseq=True)}" if given else ""


def key_or_random(given: str | None) -> str:
    """The caller's idempotency key, checked, or a random one."""
    if given is None:
        return os.urandom(16).hex()
    if not _KEY.fullmatch(given):
        raise ValueError("idempotency_key must be 1 to 255 visible ASCII characters")
    return given


def decoder_of(kind: type[T]) -> Callable[[HttpReply], T]:
    """A decoder for responses of this kind."""

    def read(reply: HttpReply) -> T:
        decoder: msgspec.json.Decoder[T] | None = _DECODERS.get(kind)
        if decoder is None:
            with _MAKING:
                decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
        return decoder.decode(reply.body)

    return read


_DECODERS: Final[dict[type, msgspec.json.Decoder[Any]]] = {}
_MAKING: Final = threading.Lock()
"""Decoders are made by one thread at a time: msgspec crashes (SIGSEGV) if a thread decodes a type
that another one has not finished preparing."""


def any_json(reply: HttpReply) -> JsonValue:
    """The response's JSON, unchecked."""
    answer: JsonValue = msgspec.json.decode(reply.body) if reply.body else None
    return answer
