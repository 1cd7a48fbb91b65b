"""What is due, in all shards, earliest first.

Looking touches nothing. Whoever acts on what was found runs a step per thing that asks again
whether it is still so, because others look at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from stanchion.adapters.store.redis.shards import Shards
from stanchion.ports.errors import BackendError

__all__ = ["Due", "act_on_due", "find_due"]

_LOOKS_MAX: Final = 32
"""How often one call looks, when others were quicker than it."""

_Done = TypeVar("_Done")


class Due(NamedTuple):
    """One thing that is due."""

    at: int
    name: str
    shard: int


async def find_due(shards: Shards, index: str, limit: int, deadline: float) -> list[Due]:
    """At most ``limit`` things of an index that are due, the earliest of all shards."""
    replies = await shards.run_on_all("due", [index], limit, deadline=deadline)
    found = [
        Due(int(at), name.decode(), shard)
        for shard, reply in enumerate(replies)
        if not isinstance(reply, BackendError)
        for name, at in zip(reply[::2], reply[1::2], strict=True)
    ]
    return sorted(found)[:limit]


async def act_on_due(
    shards: Shards,
    index: str,
    act: Callable[[Sequence[Due]], Awaitable[list[_Done]]],
    limit: int,
    deadline: float,
) -> tuple[_Done, ...]:
    """Act on what is due until so much is done, or nothing is left. ``act`` says what it did."""
    done: list[_Done] = []
    for _ in range(_LOOKS_MAX):
        due = await find_due(shards, index, limit - len(done), deadline)
        done_now = await act(due) if due else []
        done += done_now
        # What was found and not done, others did: then there may be more behind it.
        if len(done_now) >= len(due):
            break
    return tuple(done)
