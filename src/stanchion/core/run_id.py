"""Run ids: where a run lives, when it began, and who it is.

An id begins with its shard, so that whoever holds an id knows where to look, without asking whose
run it is. The shard is a stable hash of the tenant: all that must change together with a tenant's
count of runs lies in one place. After it come the time, so that ids of a shard sort by age, and
sixty bits of chance.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import Final

from stanchion.core.model import Instant, RunId, TenantId

__all__ = ["SHARDS", "make_run_id", "shard_of_run", "shard_of_tenant"]

SHARDS: Final = 64
"""Fixed for ever: it is part of every id and every key."""

_ALPHABET: Final = b"0123456789abcdefghjkmnpqrstvwxyz"
"""In the order of their values, without what is easily taken for another: ids sort by age."""
_OURS: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET)
_TIME_DIGITS: Final = 9
_CHANCE_DIGITS: Final = 12
_DIGITS: Final = _TIME_DIGITS + _CHANCE_DIGITS
_CHANCE_BITS: Final = 5 * _CHANCE_DIGITS
_CHANCE_MASK: Final = (1 << _CHANCE_BITS) - 1
_TIME_MASK: Final = (1 << 5 * _TIME_DIGITS) - 1
_BYTES: Final = 15
"""As many as the digits need, in the groups of five that become eight digits."""


def make_run_id(tenant: TenantId, at: Instant, chance: int) -> RunId:
    """Build an id. ``chance`` is a random integer of at least sixty bits."""
    number = (at & _TIME_MASK) << _CHANCE_BITS | chance & _CHANCE_MASK
    digits = base64.b32encode(number.to_bytes(_BYTES, "big")).translate(_OURS)
    return RunId(_prefix(tenant) + digits[-_DIGITS:].decode())


@functools.lru_cache(maxsize=4096)
def _prefix(tenant: TenantId) -> str:
    return f"{shard_of_tenant(tenant):02x}"


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
