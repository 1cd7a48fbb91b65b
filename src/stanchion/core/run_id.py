"""Run ids: where a run lives, when it began, and who it is.

An id begins with its shard, so that whoever holds an id knows where to look, without asking whose
run it is. The shard is a stable hash of the tenant: all that must change together with a tenant's
count of runs lies in one place. After it come the time, so that ids of a shard sort by age, and
sixty bits of chance.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Final

from stanchion.core.model import Instant, RunId, TenantId

__all__ = ["SHARDS", "make_run_id", "shard_of_run", "shard_of_tenant"]

SHARDS: Final = 64
"""Fixed for ever: it is part of every id and every key."""

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""In the order of their values, without what is easily taken for another: ids sort by age."""
_PAIRS: Final = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_TIME_DIGITS: Final = 9
_CHANCE_DIGITS: Final = 12
_DIGITS: Final = _TIME_DIGITS + _CHANCE_DIGITS


def make_run_id(tenant: TenantId, at: Instant, chance: int) -> RunId:
    """Build an id. ``chance`` is a random integer of at least sixty bits."""
    # Written out, because every start needs one: a loop over the digits takes three times as long.
    return RunId(
        f"{_prefix(tenant)}{_time(at)}{_PAIRS[chance >> 50 & 1023]}{_PAIRS[chance >> 40 & 1023]}"
        f"{_PAIRS[chance >> 30 & 1023]}{_PAIRS[chance >> 20 & 1023]}{_PAIRS[chance >> 10 & 1023]}"
        f"{_PAIRS[chance & 1023]}"
    )


@functools.lru_cache(maxsize=64)
def _time(at: Instant) -> str:
    places = range(_TIME_DIGITS - 1, -1, -1)
    return "".join(_ALPHABET[at >> 5 * place & 31] for place in places)


def _prefix(tenant: TenantId) -> str:
    return f"{shard_of_tenant(tenant):02x}"


@functools.lru_cache(maxsize=16_384)
def shard_of_tenant(tenant: TenantId) -> int:
    """The place of everything that is the tenant's."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % SHARDS


def shard_of_run(run_id: RunId) -> int | None:
    """The place that the id names; ``None`` if it cannot be the id of a run."""
    try:
        shard = int(run_id[:2], 16)
    except ValueError:
        return None
    return shard if shard < SHARDS and len(run_id) == 2 + _DIGITS else None
