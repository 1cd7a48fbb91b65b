"""Outcomes: what a handler returned or raised, as a result that the server will take.

A value that cannot be sent would be refused with everything sent beside it. So it is judged here,
and becomes a failure that says what is wrong. It is final: the next attempt would return the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, cast

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, JSON_DEPTH_MAX, RESULT_BYTES_MAX
from stanchion.wire.worker import JobError, JobResult
from stanchion.worker.errors import JobFailed

__all__ = ["failed", "refused", "succeeded"]

_ENCODER: Final = msgspec.json.Encoder()
_NULL: Final = b"null"


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
    # Infinity and NaN have no place in JSON, and are encoded as null without a word.
    if _NULL in encoded and any(not math.isfinite(number) for number in _floats(output)):
        why = "the output is not JSON: it holds NaN or an infinity"
        return refused(job_id, fence, "output_not_json", why)
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


def _floats(output: object) -> Iterator[float]:
    """Every float in an output that was encoded before, so it has an end."""
    todo = [msgspec.to_builtins(output)]
    while todo:
        each = todo.pop()
        if isinstance(each, float):
            yield each
        elif isinstance(each, dict):
            todo.extend(each.values())
        elif isinstance(each, list | tuple):
            todo.extend(each)
