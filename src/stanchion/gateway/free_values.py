"""Free values: inputs and outputs. Their shape is the workflow's business, their size is ours."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.gateway.bounds import fault_in
from stanchion.gateway.call import Call
from stanchion.gateway.problems import Refused, invalid, invalid_member

__all__ = ["check_value"]

_GROWTH_MAX: Final = 5
"""Written out again, a number may be so many times as long: ``1e15``."""


def check_value(call: Call[Any, Any], path: str, value: JsonValue, *, bytes_max: int) -> None:
    """Refuse a value that is too large, too deep, or holds an integer beyond 64 bits."""
    # The size first: what is within it is walked in a few milliseconds.
    if call.body_bytes * _GROWTH_MAX > bytes_max:
        size = len(msgspec.json.encode(value))
        if size > bytes_max:
            wrong = f"{size} bytes long; at most {bytes_max} are allowed"
            raise Refused(invalid_member(path, wrong))
    if call.is_suspect:
        fault = fault_in(value, path)
        if fault is not None:
            raise Refused(invalid((fault,), str(fault)))
