"""A lock server is replaced by one whose clock is behind: work goes on through the floor.

The new server gives fences below those that have written. The store refuses them and says which was
the highest; with that as the floor, the same holder gets one above it.
"""

from __future__ import annotations

from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.system import ManualClock
from stanchion.core.model import Instant
from stanchion.ports.locks import Granted, Held, Locks
from stanchion.ports.records import Committed, StaleFence
from stanchion.ports.store import Store
from tests.contract.builders import WITHIN_MS, commit_of, loaded, nothing, start
from tests.servers import Server

LONG_MS = 60_000
HOUR_MS = 3_600_000
NOW = Instant(1_790_000_000_000)
NAME = "run/one"


async def test_locks_in_memory_with_a_clock_that_is_behind() -> None:
    store = MemoryStore(ManualClock(NOW))
    old = MemoryLocks(ManualClock(NOW))
    new = MemoryLocks(ManualClock(Instant(NOW - HOUR_MS)))
    await _replace(store, old, new)


async def test_a_new_server_that_is_behind_what_the_old_one_gave_out(
    valkey: Server, namespace: str
) -> None:
    # A server's clock cannot be set from here. Instead, the old one gives fences of an hour ahead.
    store = await RedisStore.open(valkey.url, namespace=namespace)
    old = await RedisLocks.open(valkey.url, namespace=f"{namespace}-old")
    new = await RedisLocks.open(valkey.url, namespace=f"{namespace}-new")
    ahead = int((await store.now() + HOUR_MS) * 1_000)
    await _replace(store, old, new, floor=ahead)
    for each in (store, old, new):
        await each.close()


async def _replace(store: Store, old: Locks, new: Locks, *, floor: int = 0) -> None:
    run_id = await start(store)
    before = await _acquire(old, "first", floor=floor)
    found = await loaded(store, run_id)
    assert isinstance(await store.commit(commit_of(found, nothing(found), fence=before)), Committed)

    behind = await _acquire(new, "second")
    assert behind < before, "the new server is not behind"
    found = await loaded(store, run_id)
    refused = await store.commit(commit_of(found, nothing(found), fence=behind))
    assert refused == StaleFence(before)
    above = await _acquire(new, "second", floor=refused.highest)
    assert above > before
    assert isinstance(await store.commit(commit_of(found, nothing(found), fence=above)), Committed)
    # It had the name all the time.
    other = await new.acquire(NAME, "other", ttl_ms=LONG_MS, within_ms=WITHIN_MS)
    assert isinstance(other, Held)
    # From here on the new server knows: nobody needs a floor any more.
    await new.release(NAME, "second", within_ms=WITHIN_MS)
    after = await _acquire(new, "third")
    assert after > above
    found = await loaded(store, run_id)
    assert isinstance(await store.commit(commit_of(found, nothing(found), fence=after)), Committed)


async def _acquire(locks: Locks, token: str, *, floor: int = 0) -> int:
    granted = await locks.acquire(NAME, token, ttl_ms=LONG_MS, within_ms=WITHIN_MS, floor=floor)
    assert isinstance(granted, Granted)
    assert granted.fence > floor
    return granted.fence
