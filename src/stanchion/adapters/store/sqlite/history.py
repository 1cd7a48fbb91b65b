"""History: what was committed, by run and by tenant."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite.codec import HISTORY, HISTORY_LINE, HISTORY_LINES, encode
from stanchion.core.model import RunId, TenantId
from stanchion.core.transition import TimelineEntry
from stanchion.ports.records import FeedEntry, Page

__all__ = ["feed", "feed_position", "lines", "timeline"]

_SQL = read_statements(__package__, "sql", "history.sql")
_FEED: Final = "feed"
_FEED_ENTRIES_MAX: Final = 10_000
"""A feed reaches back so far. Older rows are there as long as their run is, for its timeline."""
_TIMELINE: Final = "timeline"


def lines(entries: tuple[TimelineEntry, ...]) -> bytes | None:
    """A commit's lines as they are written; nothing, if it has none."""
    return encode(entries) if entries else None


def timeline(db: Database, run_id: RunId, cursor: str | None, limit: int) -> Page[TimelineEntry]:
    """See ``ports.store.Runs.timeline``. The cursor: a row, and how many of its lines are done."""
    at, done = (0, 0) if cursor is None else read_cursor(_TIMELINE, cursor, tuple[int, int])
    lines: list[TimelineEntry] = []
    # Every row has a line at least: so many rows hold a page and tell whether there is another.
    for position, entries in db.every(
        _SQL["read_timeline"], run_id=run_id, start=at, limit=limit + 2
    ):
        raw = HISTORY_LINES.decode(entries)
        first = done if position == at else 0
        for index in range(first, len(raw)):
            if len(lines) == limit:
                return Page(tuple(lines), write_cursor(_TIMELINE, position, index))
            lines.append(HISTORY_LINE.decode(raw[index]))
    return Page(tuple(lines))


def feed(db: Database, tenant: TenantId, after: str | None, limit: int) -> tuple[FeedEntry, ...]:
    """See ``ports.store.Runs.feed``."""
    (start,) = (0,) if after is None else read_cursor(_FEED, after, tuple[int])
    oldest = _feed_end(db, tenant) - _FEED_ENTRIES_MAX
    rows = db.every(_SQL["read_feed"], tenant=tenant, after=max(start, oldest), limit=limit)
    return tuple(
        FeedEntry(write_cursor(_FEED, position), run_id, HISTORY.decode(entries))
        for position, run_id, entries in rows
    )


def feed_position(db: Database, tenant: TenantId) -> str:
    """See ``ports.store.Runs.feed_position``."""
    return write_cursor(_FEED, _feed_end(db, tenant))


def _feed_end(db: Database, tenant: TenantId) -> int:
    found = db.first(_SQL["feed_end"], tenant=tenant)
    assert found is not None
    return int(found[0])
