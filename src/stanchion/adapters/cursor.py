"""Cursors: where the next page begins, in a form that invites nobody to take it apart.

A cursor names the list that it belongs to, so that one from another list is noticed. It holds the
position of the last item that was given out, never an offset: what is added or removed meanwhile
does not disturb the pages.
"""

from __future__ import annotations

import base64
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stanchion.ports.records import BadCursor

__all__ = ["read_cursor", "write_cursor"]

_Position = TypeVar("_Position")
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""Every store can count with these: Lua has doubles, SQLite signed integers of 64 bits."""
_decode: Final = msgspec.json.Decoder(list[_Number | str]).decode


def write_cursor(kind: str, *position: int | str) -> str:
    """The cursor that goes on after ``position`` in a list of this kind. Safe in a URL."""
    text = msgspec.json.encode([kind, *position])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read_cursor(kind: str, cursor: str, position: type[_Position]) -> _Position:
    """The position that a cursor holds, of the given shape: ``tuple[int, str]``, say.

    Raises ``BadCursor`` for whatever this function's twin did not write for the same kind of list.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found, *rest = _decode(text)
        if found == kind:
            return msgspec.convert(rest, position)
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadCursor(cursor) from error
    raise BadCursor(cursor)
