"""Run ids: where a run lives, when it began, and who it is.

An id begins with its shard, so that whoever holds an id knows where to look, without asking whose
run it is. The shard is a stable hash of the tenant: all that must change together with a tenant's
count of runs lies in one place. After it come the time, so that ids of a shard sort by age, and
sixty bits of chance.
"""

from __future__ import annotations

import hashlib
from typing import Final

from stanchion.core.model import Instant, RunId, TenantId

__all__ = ["SHARDS", "make_run_id", "shard_of_run", "shard_of_tenant"]

SHARDS: Final = 64
"""Fixed for ever: it is part of every id and every key."""

_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_DIGITS: Final = 9
_CHANCE_DIGITS: Final = 12


def make_run_id(tenant: TenantId, at: Instant, chance: int) -> RunId:
    """Build an id. ``chance`` is a random integer of at least sixty bits."""
    shard = shard_of_tenant(tenant)
    return RunId(f"{shard:02x}{_digits(at, _TIME_DIGITS)}{_digits(chance, _CHANCE_DIGITS)}")


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
    return shard if shard < SHARDS and len(run_id) == 2 + _TIME_DIGITS + _CHANCE_DIGITS else None


def _digits(number: int, count: int) -> str:
    return "".join(_DIGITS[(number >> (5 * place)) & 31] for place in reversed(range(count)))
