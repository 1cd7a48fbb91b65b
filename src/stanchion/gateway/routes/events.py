"""Event streams: the changes of a tenant's runs as server-sent events.

There is one event for each line of a timeline, in the order of commits. The last line of a commit
carries the commit's position in the tenant's feed as its id: a client that reconnects with
``Last-Event-ID`` misses nothing, as long as the store keeps the feed after that position. Without
it, the stream begins now; the stream of a single run begins with the oldest event that is kept.
Where events are missing because the store no longer keeps them, there is one event ``gap``.

Bells wake the streams, and a poll finds what a lost bell would have announced. The exchange checks
the stream's key. A page of the feed is read and encoded once for all streams at the same position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Final

import msgspec

from stanchion.core.audit import SYSTEM
from stanchion.core.model import RunId
from stanchion.gateway.cursors import CursorSeal
from stanchion.gateway.problems import RequestRefused, invalid_member, not_found
from stanchion.gateway.route import RUNNERS, Call, NoBody, RouteScope, RouteTable, Stream
from stanchion.gateway.views import feed_line, when
from stanchion.ports.errors import BackendError
from stanchion.ports.records import BadCursor, FeedEntry
from stanchion.services.waiters import FeedPage
from stanchion.wire.identifiers import RunName
from stanchion.wire.problems import Code
from stanchion.wire.runs import GAP, RUN_ENDS, FeedLine

ROUTES: Final = RouteTable()

EVENT_STREAM: Final = b"text/event-stream"
POLL_S: Final = 1.0
_PAGE_MIN: Final = 1
_PAGE_MAX: Final = 64
"""Commits in one read of the feed; fewer, if those of the last read had many lines."""
_PAGE_LINES: Final = 1_000
_PART_LINES: Final = 100
"""Lines that are encoded at once, and sent in one part."""
_LIVE_LINES: Final = 20
"""A page with more lines is replayed: live events are a few at a time."""
_OVER_MS_MAX: Final = 1_000
"""How long a stream of a tenant that is over its share pauses before each part."""
_SEND_S_PER_BYTE: Final = 5e-9
"""Measured processor time of sending (45 KB take 0.2 ms), charged to the tenant."""
_ID_BYTES_MAX: Final = 1_024


class Followed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Follow all runs, or one."""

    run_id: RunName | None = None


@ROUTES.add(
    "GET /v1/events",
    RUNNERS,
    RouteScope.TENANT,
    None,
    codes=(Code.NOT_FOUND, Code.DRAINING),
    admits=True,
)
async def follow_events(call: Call[NoBody, Followed]) -> Stream:
    """Server-sent events of the tenant's runs or of one, resumable by `Last-Event-ID`."""
    store = call.services.store
    has_ended = await _has_ended(call)
    if call.query.run_id is not None and has_ended is None:
        raise RequestRefused(not_found("run"))
    after = await _last_event_id(call)
    if after is None and call.query.run_id is None:
        after = await store.feed_position(call.tenant)
    seal = await call.state.cursors.of(*_feed_of(call))
    # The position is sent first, so that a client that is disconnected at once can resume from it.
    first = b": events follow\n\n" if after is None else b"id: %b\n\n" % seal.seal(after).encode()
    # The end of a run that has ended is either in the feed or no longer kept.
    ends = bool(has_ended) and after is None
    return Stream(_parts(call, after, first, ends=ends), EVENT_STREAM, call.tenant)


async def _has_ended(call: Call[NoBody, Followed]) -> bool | None:
    """Whether the run that is followed has ended; ``None`` if there is none."""
    if call.query.run_id is None:
        return None
    # Read once for all streams that are opened at the same time: a run may be large.
    run_id = RunId(call.query.run_id)
    found = await call.services.waiters.finished(run_id, within_s=0, of=call.tenant)
    return None if found is None else found.run.status.is_finished


def _feed_of(call: Call[NoBody, Followed]) -> tuple[str, str]:
    """What an event id is bound to: the tenant's feed. All its streams have the same ids."""
    return call.route.id, call.tenant


async def _last_event_id(call: Call[NoBody, Followed]) -> str | None:
    given = call.headers.get(b"last-event-id")
    if not given:
        return None
    try:
        if len(given) <= _ID_BYTES_MAX and given.isascii():
            after = await call.state.cursors.open(given.decode("ascii"), *_feed_of(call))
            await call.services.store.feed(call.tenant, after=after, limit=1)
            return after
    except BadCursor:
        pass
    raise RequestRefused(invalid_member("Last-Event-ID", "not an id of this stream"))


async def _parts(
    call: Call[NoBody, Followed], after: str | None, first: bytes, *, ends: bool
) -> AsyncGenerator[bytes, None]:
    """The first part, then events and heartbeats, until the server drains.

    At most one encoded page is in memory: the next one is read when the client has read this one.
    If the end of the run must come (``ends``) and does not, the client learns that it is missing.
    """
    clock, run_id = call.services.clock, call.query.run_id
    heartbeat_ms = call.state.options.heartbeat_s * 1000
    limit = _PAGE_MIN
    # A run's stream that begins by itself begins with the oldest line: gaps before it are none.
    tells_gaps = run_id is None or after is not None
    yield first
    spoke_at = clock.moment()
    with call.services.waiters.feed(call.tenant) as changed:
        while not call.state.draining.is_set():
            page, seal = await _next(call, after, limit)
            if seal is not None:
                after = page.entries[-1].position
                lines = sum(len(each.entries) for each in page.entries)
                limit = min(2 * limit, _PAGE_MAX) if lines < _PAGE_LINES else _PAGE_MIN
                parts = await page.rendered(
                    (run_id, tells_gaps),
                    partial(_rendered, call, page, seal, tells_gaps=tells_gaps),
                )
                if tells_gaps and any(each.is_after_gap for each in page.entries):
                    ends = await _may_miss_end(call)
                tells_gaps = tells_gaps or bool(parts)
                ends = ends and not any(_is_end(each, run_id) for each in page.entries)
                # What was read is freed before it is sent: a client may read slowly, or not at all.
                page = _NOTHING
                for part in parts:
                    await _turn(call, part)
                    yield part
                    spoke_at = clock.moment()
                continue
            if ends and (gap := await _missing_end(call, after)):
                ends = False
                yield gap
                spoke_at = clock.moment()
            if clock.moment() - spoke_at >= heartbeat_ms:
                yield b": heartbeat\n\n"
                spoke_at = clock.moment()
            await changed.wait(POLL_S)


async def _turn(call: Call[NoBody, Followed], part: bytes) -> None:
    """Wait until the part may be sent: a tenant over its share pauses, and tenants take turns."""
    over_ms = call.state.work.wait_ms(call.tenant)
    if over_ms > 0:
        await call.services.clock.sleep(min(over_ms, _OVER_MS_MAX) / 1000)
    call.state.work.charge(call.tenant, len(part) * _SEND_S_PER_BYTE)
    await call.state.answers.turn(len(part), call.tenant)


async def _next(
    call: Call[NoBody, Followed], after: str | None, limit: int
) -> tuple[FeedPage, CursorSeal | None]:
    """The next page, and the seal for its ids; no seal if the page has no entries."""
    try:
        page = await call.services.waiters.read_feed(call.tenant, after=after, limit=limit)
        # For each page: a stream outlives the time for which a key is trusted.
        seal = await call.state.cursors.of(*_feed_of(call)) if page.entries else None
    except BackendError:
        return _NOTHING, None  # the store is unavailable: the stream stays open and resumes later
    return page, seal


async def _may_miss_end(call: Call[NoBody, Followed]) -> bool:
    """Whether the end of the run that is followed can be in a gap: it has ended, or is gone."""
    try:
        return call.query.run_id is not None and await _has_ended(call) is not False
    except BackendError:
        return True


async def _missing_end(call: Call[NoBody, Followed], after: str | None) -> bytes:
    """The gap of a run that has ended, if its end is not in the feed; else nothing."""
    store = call.services.store
    try:
        if await _has_ended(call) is False:
            return b""  # its end is still to come
        # Read for this stream alone: a shared read may have begun before the run ended.
        if await store.feed(call.tenant, after=after, limit=1):
            return b""
        at = after or await store.feed_position(call.tenant)
        seal = await call.state.cursors.of(*_feed_of(call))
    except BackendError:
        return b""  # the next poll finds it out
    return _gap(call, seal.seal(at), call.query.run_id)


def _is_end(entry: FeedEntry, run_id: str | None) -> bool:
    return entry.run_id == run_id and any(each.what in RUN_ENDS for each in entry.entries)


def _gap(
    call: Call[NoBody, Followed], event_id: str | None = None, run_id: str | None = None
) -> bytes:
    """Events are missing here: any, or the end of a run.

    Without an id, a client that is disconnected here gets the gap again.
    """
    line = FeedLine(
        at=when(call.services.clock.now()),
        what=GAP,
        actor=SYSTEM,
        detail="events are missing here: the store no longer keeps them",
        run_id=run_id or "",
    )
    head = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    return b"%bevent: %b\ndata: %b\n\n" % (head, GAP.encode(), _encode(line))


async def _rendered(
    call: Call[NoBody, Followed], page: FeedPage, seal: CursorSeal, *, tells_gaps: bool
) -> list[bytes]:
    """Encode the page's events in parts, for all streams at its position.

    Each part is charged to the tenant, and followed by a pause for the event loop. Streams that
    replay much take turns: in each iteration of the loop only one of them encodes a part.
    """
    run_id = call.query.run_id

    def lines_of(entry: FeedEntry) -> Iterator[bytes]:
        is_wanted = run_id is None or entry.run_id == run_id
        if tells_gaps and entry.is_after_gap:
            yield _gap(call, None if is_wanted else seal.seal(entry.position))
        if is_wanted:
            yield from _lines(entry, seal)

    lines = chain.from_iterable(map(lines_of, page.entries))
    is_replay = sum(len(each.entries) for each in page.entries) > _LIVE_LINES
    parts: list[bytes] = []
    while True:
        async with call.state.replays if is_replay else nullcontext():
            with call.state.work.measured(call.tenant):
                part = b"".join(islice(lines, _PART_LINES))
            if not part:
                return parts
            parts.append(part)
            await asyncio.sleep(0)


def _lines(entry: FeedEntry, seal: CursorSeal) -> Iterator[bytes]:
    last = len(entry.entries) - 1
    for place, each in enumerate(entry.entries):
        line = feed_line(each, run_id=entry.run_id)
        event = b"event: %b\ndata: %b\n\n" % (each.what.encode(), _encode(line))
        # Only the last line has an id: a client that received a part of a commit gets it again.
        yield (
            event if place < last else b"id: %b\n%b" % (seal.seal(entry.position).encode(), event)
        )


_encode: Final = msgspec.json.Encoder().encode
_NOTHING: Final = FeedPage(())
