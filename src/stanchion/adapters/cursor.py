"""Cursors: opaque tokens for the position of the next page.

A cursor names the list that it belongs to, so that one from another list is refused. It holds the
position of the last item of the page, not an offset: items that are added or removed between two
pages do not shift them.
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
"""The range that every store supports: Lua has doubles, SQLite signed 64-bit integers."""
_decode: Final = msgspec.json.Decoder(list[_Number | str]).decode


def write_cursor(kind: str, *position: int | str) -> str:
    """The cursor for the page after ``position`` in a list of this kind. Safe in a URL."""
    text = msgspec.json.encode([kind, *position])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read_cursor(kind: str, cursor: str, position: type[_Position]) -> _Position:
    """The position in a cursor, as the given type, such as ``tuple[int, str]``.

    Raises ``BadCursor`` if ``write_cursor`` did not write it for the same kind of list.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found, *rest = _decode(text)
        if found == kind:
            return msgspec.convert(rest, position)
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadCursor(cursor) from error
    raise BadCursor(cursor)
