"""Lists by name: one page of what several shards keep in the order of names."""

from __future__ import annotations

from collections.abc import Sequence

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.redis.client import RedisRequest
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis.shards import Shards

__all__ = ["page_of_names"]


async def page_of_names(
    shards: Shards,
    kind: str,
    indexes: Sequence[tuple[int, str]],
    cursor: str | None,
    limit: int,
    deadline: float,
) -> tuple[list[str], str | None]:
    """The next names of some indexes (slot and key) together, and the cursor behind them."""
    after = "-" if cursor is None else "(" + read_cursor(kind, cursor, tuple[str])[0]
    replies = await shards.ask_all(
        [
            # One more than asked for tells whether there is more.
            RedisRequest(slot, pack("ZRANGEBYLEX", key, after, "+", "LIMIT", 0, limit + 1))
            for slot, key in indexes
        ],
        deadline,
    )
    names = sorted(name for reply in replies for name in reply)
    page = [name.decode() for name in names[:limit]]
    return page, write_cursor(kind, page[-1]) if len(names) > limit else None
