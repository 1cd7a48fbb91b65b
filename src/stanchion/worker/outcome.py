"""Outcomes: what a handler returned or raised, as a result that the server will take.

A value that cannot be sent would be refused with everything sent beside it. So it is judged here,
and becomes a failure that says what is wrong. It is final: the next attempt would return the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, cast

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, JSON_DEPTH_MAX, RESULT_BYTES_MAX
from stanchion.wire.worker import JobError, JobResult
from stanchion.worker.errors import JobFailed

__all__ = ["failed", "refused", "succeeded", "why_not_json"]

_ENCODER: Final = msgspec.json.Encoder()


def succeeded(job_id: str, fence: int, output: object) -> JobResult:
    """The result of a handler that returned ``output``; a failure, if that cannot be sent."""
    try:
        encoded = _ENCODER.encode(output)
    except Exception as error:  # noqa: BLE001 - a value's own code may raise anything
        return refused(job_id, fence, "output_not_json", f"the output is not JSON: {error}")
    if len(encoded) > RESULT_BYTES_MAX:
        return refused(
            job_id,
            fence,
            "output_too_large",
            f"the output has {len(encoded)} bytes; at most {RESULT_BYTES_MAX} are taken."
            " Store it elsewhere and return where it is.",
        )
    # Most outputs are small and shallow: a look at the bytes spares the walk.
    if encoded.count(b"[") + encoded.count(b"{") > JSON_DEPTH_MAX:
        depth = _depth(msgspec.json.decode(encoded))
        if depth > JSON_DEPTH_MAX:
            why = f"the output is nested {depth} deep; at most {JSON_DEPTH_MAX} are taken"
            return refused(job_id, fence, "output_too_deep", why)
    why_not = why_not_json(output)
    if why_not is not None:
        return refused(job_id, fence, "output_not_json", f"the output is not JSON: {why_not}")
    # Encoded once: the request takes these bytes as they are.
    ready = cast("JsonValue", msgspec.Raw(encoded))
    return JobResult(job_id=job_id, fence=fence, status="succeeded", output=ready)


def failed(job_id: str, fence: int, error: BaseException) -> JobResult:
    """The result of a handler that raised."""
    if isinstance(error, JobFailed):
        told = JobError(message=_bounded(error.message), code=error.code, retryable=error.retryable)
    else:
        text = _text_of(error)
        kind = type(error).__name__
        told = JobError(message=_bounded(f"{kind}: {text}" if text else kind))
    return JobResult(job_id=job_id, fence=fence, status="failed", error=told)


def refused(job_id: str, fence: int, code: str, why: str) -> JobResult:
    """The result of a handler whose output cannot be sent."""
    told = JobError(message=_bounded(why), code=code, retryable=False)
    return JobResult(job_id=job_id, fence=fence, status="failed", error=told)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error's own code raised
        return ""


def _bounded(text: str) -> str:
    """A text that may stand in an answer: not too long, no control characters, valid UTF-8."""
    text = text[: 2 * ERROR_MESSAGE_CHARS_MAX].encode("utf-8", "replace").decode()
    text = "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)
    if len(text) > ERROR_MESSAGE_CHARS_MAX:
        text = text[: ERROR_MESSAGE_CHARS_MAX - 1] + "…"
    return text.strip() or "no message"


def _depth(value: JsonValue) -> int:
    deepest, level = 0, [value]
    while level:
        below: list[JsonValue] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
            else:
                continue
        deepest += any(isinstance(each, dict | list) for each in level)
        level = below
    return deepest


def why_not_json(value: object) -> str | None:
    """What has no form in JSON in a value that was encoded before; ``None`` if all of it has.

    The encoder writes bytes as Base64, sets as lists, and NaN and infinities as null: what arrives
    would not be what was meant.
    """
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, bytes | bytearray | memoryview | set | frozenset):
            return f"it holds {type(each).__name__}"
        if isinstance(each, float) and not math.isfinite(each):
            return "it holds NaN or an infinity"
        todo.extend(inner for inner in _members(each) if type(inner) not in _SCALARS)
    return None


_SCALARS: Final = frozenset({str, int, bool, type(None)})


def _members(value: object) -> Iterable[object]:
    """What a value consists of, as the encoder sees it."""
    match value:
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple():
            return value
        case msgspec.Struct():
            return [getattr(value, name) for name in value.__struct_fields__]
        case _ if hasattr(value, "__dataclass_fields__") or hasattr(value, "__attrs_attrs__"):
            return vars(value).values() if hasattr(value, "__dict__") else _slots(value)
        case _:
            return ()


def _slots(value: object) -> list[object]:
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [getattr(value, name, None) for name in names]
