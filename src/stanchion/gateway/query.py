"""Query strings: each parameter once, known and well formed."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from stanchion.core.faults import Fault
from stanchion.gateway.bounds import why_not
from stanchion.gateway.problems import Refused, invalid, invalid_member

__all__ = ["read_query"]

_PARAMETERS_MAX: Final = 50


def read_query(text: bytes, shape: type[Any]) -> Any:  # noqa: ANN401 - the route's own type
    """The parameters as the route's type, or a refusal that names the one at fault."""
    given: dict[str, str] = {}
    parts = text.split(b"&")
    if len(parts) > _PARAMETERS_MAX:
        raise Refused(invalid_member("", f"more than {_PARAMETERS_MAX} query parameters"))
    for part in filter(None, parts):
        name, _, value = part.partition(b"=")
        key = _text(name, "a query parameter's name")
        if key in given:
            raise Refused(invalid_member(key, "given more than once"))
        given[key] = _text(value, key)
    try:
        query = msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        fault = why_not(error)
        raise Refused(invalid((_as_parameter(fault),), f"query: {fault}")) from None
    for key in given:
        # The decoder takes ``null`` for nothing; a parameter that is given has a value.
        if getattr(query, key) is None:
            raise Refused(invalid_member(key, "must not be null"))
    return query


def _text(encoded: bytes, path: str) -> str:
    try:
        return unquote_to_bytes(encoded.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(invalid_member(path, "not UTF-8")) from None


def _as_parameter(fault: Fault) -> Fault:
    known = "not a member", "not a query parameter"
    return Fault(fault.path, fault.message.replace(*known))
