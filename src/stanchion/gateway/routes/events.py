"""Event streams: the changes of a tenant's runs as server-sent events.

There is one event for each line of a timeline, in the order of commits. The last line of a commit
carries the commit's position in the tenant's feed as its id: a client that reconnects with
``Last-Event-ID`` misses nothing, as long as the store keeps the feed after that position. Without
it, the stream begins now; the stream of a single run begins with the oldest event that is kept.

Bells wake the streams, and a poll finds what a lost bell would have announced. The exchange checks
the stream's key. A page of the feed is read and encoded once for all streams at the same position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from itertools import chain, islice
from typing import Final

import msgspec

from stanchion.core.model import RunId
from stanchion.gateway.cursors import CursorSeal
from stanchion.gateway.problems import RequestRefused, invalid_member, not_found
from stanchion.gateway.route import RUNNERS, Call, NoBody, RouteScope, RouteTable, Stream
from stanchion.gateway.views import feed_line
from stanchion.ports.errors import BackendError
from stanchion.ports.records import BadCursor, FeedEntry
from stanchion.services.waiters import FeedPage
from stanchion.wire.identifiers import RunName
from stanchion.wire.problems import Code

ROUTES: Final = RouteTable()

EVENT_STREAM: Final = b"text/event-stream"
POLL_S: Final = 1.0
_PAGE_MIN: Final = 1
_PAGE_MAX: Final = 64
"""Commits in one read of the feed; fewer, if those of the last read had many lines."""
_PAGE_LINES: Final = 1_000
_PART_LINES: Final = 250
"""Lines that are encoded at once, and sent in one part."""
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
    if call.query.run_id is not None:
        # Read once for all streams that are opened at the same time: a run may be large.
        run_id = RunId(call.query.run_id)
        if await call.services.waiters.finished(run_id, within_s=0, of=call.tenant) is None:
            raise RequestRefused(not_found("run"))
    after = await _last_event_id(call)
    if after is None and call.query.run_id is None:
        after = await store.feed_position(call.tenant)
    seal = await call.state.cursors.of(*_feed_of(call))
    # The position is sent first, so that a client that is disconnected at once can resume from it.
    first = b": events follow\n\n" if after is None else b"id: %b\n\n" % seal.seal(after).encode()
    return Stream(_parts(call, after, first), EVENT_STREAM, call.tenant)


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
    call: Call[NoBody, Followed], after: str | None, first: bytes
) -> AsyncGenerator[bytes, None]:
    """The first part, then events and heartbeats, until the server drains.

    At most one encoded page is in memory: the next one is read when the client has read this one.
    """
    clock, run_id = call.services.clock, call.query.run_id
    heartbeat_ms = call.state.options.heartbeat_s * 1000
    limit = _PAGE_MIN
    yield first
    spoke_at = clock.moment()
    with call.services.waiters.feed(call.tenant) as changed:
        while not call.state.draining.is_set():
            page, seal = await _next(call, after, limit)
            if seal is not None:
                after = page.entries[-1].position
                lines = sum(len(each.entries) for each in page.entries)
                limit = min(2 * limit, _PAGE_MAX) if lines < _PAGE_LINES else _PAGE_MIN
                parts = await page.rendered(run_id, partial(_rendered, call, page, seal))
                # What was read is freed before it is sent: a client may read slowly, or not at all.
                page = _NOTHING
                for part in parts:
                    await _turn(call, part)
                    yield part
                    spoke_at = clock.moment()
                continue
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


async def _rendered(call: Call[NoBody, Followed], page: FeedPage, seal: CursorSeal) -> list[bytes]:
    """Encode the page's events in parts, for all streams at its position.

    Each part is charged to the tenant, and followed by a pause for the event loop.
    """
    run_id = call.query.run_id
    wanted = (each for each in page.entries if run_id is None or each.run_id == run_id)
    lines = chain.from_iterable(_lines(each, seal) for each in wanted)
    parts: list[bytes] = []
    while True:
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
