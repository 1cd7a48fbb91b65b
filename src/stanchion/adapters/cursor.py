"""Cursors: opaque tokens for the position of the next page; and the pages of filtered lists.

A cursor names the list that it belongs to, so that one from another list is refused. It holds the
position of the last item of the page, not an offset: items that are added or removed between two
pages do not shift them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stanchion.ports.records import BadCursor, Page, RunFilter, RunSummary

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


_RUNS: Final = "runs"
_LAST: Final = 2**53 - 1
"""Later than any run."""
_LOOKED_AT_PER_RUN: Final = 10
"""Rows that a page may look at, for each run that it may hold."""


class RunPage:
    """A page of the list of runs while it is filled from an index, newest first.

    The store reads ``wanted`` rows of the index before ``before`` and not older than ``since``, and
    adds them, until ``is_full``.
    """

    def __init__(self, only: RunFilter, cursor: str | None, limit: int) -> None:
        self._only = only
        self._limit = limit
        self._found: list[RunSummary] = []
        self._left = _LOOKED_AT_PER_RUN * limit
        self._has_more = False
        self.is_full = False
        """Whether the page needs no more rows."""
        position = (
            (_LAST, "") if cursor is None else read_cursor(_RUNS, cursor, tuple[_Number, str])
        )
        until = _LAST if only.until is None else max(0, min(only.until, _LAST))
        self.before: tuple[int, str] = min(position, (until, ""))
        """The time of creation and the id of the run after which the next rows come."""
        self.since = 0 if only.since is None else max(0, only.since)

    @property
    def wanted(self) -> int:
        """How many rows to read next: one more than is looked at shows whether there are more."""
        return min(self._limit, self._left) + 1

    def add(self, rows: Iterable[tuple[int, str, RunSummary | None]], asked: int) -> None:
        """Add rows: time of creation, id, run. ``None`` stands for a run that is gone.

        Fewer than ``asked`` rows are the last ones.
        """
        count = 0
        for created_at, run_id, run in rows:
            if len(self._found) == self._limit or not self._left:
                self._has_more = self.is_full = True
                return
            count += 1
            self._left -= 1
            self.before = (created_at, run_id)
            if run is not None and self._only.fits(run):
                self._found.append(run)
        self.is_full = count < asked

    def page(self) -> Page[RunSummary]:
        """The page, with a cursor if there are more rows."""
        cursor = write_cursor(_RUNS, *self.before) if self._has_more else None
        return Page(tuple(self._found), cursor)
