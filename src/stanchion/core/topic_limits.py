"""Topic limits: how many jobs of some topics may be leased at once, and how many per second.

A limit names topics, or prefixes of topics: ``llm.*`` is every topic that begins with ``llm.``. It
holds for the whole deployment, or for each tenant separately. A leased job needs one token of every
limit that covers its topic. The tokens of a limit are in a pool: one for the deployment, or one for
each tenant.

A token expires later than its lease: its term is that of the lease × 1.02 + 2 s. It is taken before
the lease and renewed before the lease, and a lease or renewal that is more than a second behind its
token is refused. So an unexpired lease has a token, even if the clocks of two servers differ by a
second, and a pool never has more tokens than ``max_running``.

Tokens of several limits are taken in the order of the limits' ids, so that two callers who need the
same two limits do not each take one and then wait for the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from stanchion.core.admission import ConcurrencyLimit, Rate, RatePerS
from stanchion.core.model import Instant, JobId, TenantId, Topic

LIMITS_MAX: Final = 500
"""Limits of a deployment: every replica keeps all of them in memory."""
_TOPICS_KEPT: Final = 10_000
_GROUPS_KEPT: Final = 1_000
_GROUPED_MAX: Final = 50
_MARGIN_MS: Final = 2_000
_LATE_MS: Final = 1_000


class LimitScope(StrEnum):
    """Whether all tenants share a limit, or each has it for itself."""

    DEPLOYMENT = "deployment"
    TENANT = "tenant"


class TokenPool(msgspec.Struct, frozen=True):
    """The tokens of a limit, or of one tenant within it."""

    limit_id: str
    tenant: TenantId | None
    """``None`` for a limit of the deployment."""
    max_running: int | None
    rate_per_s: float | None

    @property
    def name(self) -> str:
        """A name that no other pool has: ids of limits contain no slash."""
        return f"{self.limit_id}/{self.tenant or ''}"


class TopicLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit. At least one of ``max_running`` and ``rate_per_s`` is given."""

    id: str
    topics: tuple[str, ...]
    """Topics, and prefixes that end in ``.*``."""
    per: LimitScope = LimitScope.DEPLOYMENT
    max_running: ConcurrencyLimit | None = None
    """Leases at the same time; 0 stops the topics."""
    rate_per_s: RatePerS | None = None
    """New leases per second, with a burst of ``max(1, rate_per_s)``."""

    def covers(self, topic: Topic) -> bool:
        """Whether the limit holds for the topic."""
        return any(_matches(pattern, topic) for pattern in self.topics)

    def pool(self, tenant: TenantId) -> TokenPool:
        """The pool for jobs of the tenant."""
        whose = tenant if self.per is LimitScope.TENANT else None
        return TokenPool(self.id, whose, self.max_running, self.rate_per_s)


def _matches(pattern: str, topic: Topic) -> bool:
    return topic.startswith(pattern[:-1]) if pattern.endswith(".*") else topic == pattern


class Groups(NamedTuple):
    """The topics of a worker, by the limits that hold for them."""

    topics: tuple[tuple[tuple[TopicLimit, ...], tuple[Topic, ...]], ...]
    limit_ids: frozenset[str]
    """Of all these limits."""


class TopicLimits:
    """All limits of a deployment, found by topic."""

    def __init__(self, limits: Iterable[TopicLimit] = ()) -> None:
        self.by_id: Mapping[str, TopicLimit] = {
            each.id: each for each in sorted(limits, key=lambda limit: limit.id)
        }
        self._by_pattern: dict[str, list[TopicLimit]] = {}
        for each in self.by_id.values():
            for pattern in each.topics:
                self._by_pattern.setdefault(pattern, []).append(each)
        self._known: dict[Topic, tuple[TopicLimit, ...]] = {}
        self._groups: dict[tuple[Topic, ...], Groups] = {}

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self.by_id)

    def covering(self, topic: Topic) -> tuple[TopicLimit, ...]:
        """The limits that hold for a topic, in the order of their ids."""
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _TOPICS_KEPT:
                self._known.clear()
            words = topic.split(".")
            prefixes = (".".join([*words[:count], "*"]) for count in range(1, len(words)))
            found = {
                each.id: each
                for pattern in (topic, *prefixes)
                for each in self._by_pattern.get(pattern, ())
            }
            known = self._known[topic] = tuple(found[name] for name in sorted(found))
        return known

    def grouped(self, topics: tuple[Topic, ...]) -> Groups:
        """The topics by the limits that hold for them: those with the same limits together."""
        known = self._groups.get(topics)
        if known is None:
            if len(self._groups) >= _GROUPS_KEPT:
                self._groups.clear()
            found: dict[tuple[TopicLimit, ...], list[Topic]] = {}
            for topic in topics:
                found.setdefault(self.covering(topic), []).append(topic)
            groups = tuple((limits, tuple(some)) for limits, some in found.items())
            ids = frozenset(each.id for limits in found for each in limits)
            known = Groups(groups, ids)
            # Workers ask for the same topics again and again; long lists are not worth their room.
            if len(topics) <= _GROUPED_MAX:
                self._groups[topics] = known
        return known

    def pools(self, topic: Topic, tenant: TenantId) -> tuple[TokenPool, ...]:
        """The pools of which a job needs a token each, in the order of the limits' ids."""
        return tuple(limit.pool(tenant) for limit in self.covering(topic))


def token_ttl_ms(lease_ttl_ms: int) -> int:
    """The term of a token for leases of this term."""
    return math.ceil(lease_ttl_ms * 1.02) + _MARGIN_MS


def not_after(taken_at: Instant) -> Instant:
    """The last time at which a lease may begin or be renewed with a token taken at this time."""
    return Instant(taken_at + _LATE_MS)


def token_name(job_id: JobId, fence: int) -> str:
    """The name of the token of a lease."""
    return f"{job_id}#{fence}"


# ── Pools ────────────────────────────────────────────────────────────────────────────────────────


class TokenGrant(msgspec.Struct, frozen=True):
    """The tokens that were taken from a pool."""

    tokens: tuple[str, ...]
    at: Instant
    """The time of the store."""
    running: int
    """The unexpired tokens of the pool, with these."""
    is_rate_spent: bool = False
    """Whether the rate was the reason that there are not more."""
    retry_after_ms: int = 0
    """When the rate allows the next token; 0 at once."""


class TokenRenewal(msgspec.Struct, frozen=True):
    """The tokens that were extended."""

    tokens: frozenset[str]
    at: Instant
    """The time of the store."""


class PoolUse(msgspec.Struct, frozen=True):
    """How much of a pool is in use."""

    running: int
    retry_after_ms: int
    """When the rate allows the next token; 0 at once."""
    at: Instant


class PoolGrant(msgspec.Struct, frozen=True):
    """How many tokens a pool grants, and its state afterwards."""

    count: int
    used_until_ms: float
    is_rate_spent: bool
    retry_after_ms: int


def grant_tokens(
    pool: TokenPool, wanted: int, *, running: int, used_until_ms: float, now: Instant
) -> PoolGrant:
    """How many of ``wanted`` new tokens the pool has, with ``running`` unexpired ones.

    ``used_until_ms`` is the time up to which the rate is used. ``take_tokens.lua`` does the same.
    """
    count = wanted if pool.max_running is None else min(wanted, max(0, pool.max_running - running))
    is_rate_spent = False
    if pool.rate_per_s is not None:
        rate = Rate(pool.rate_per_s, used_until_ms)
        used_ms = rate.after_one(now) - rate.cost_ms
        # One millionth more, because a sum of floats may be just below a whole number.
        allowed = math.floor((now + rate.burst_ms - used_ms) / rate.cost_ms + 1e-6)
        if allowed < count:
            count, is_rate_spent = max(0, allowed), True
        if count:
            used_until_ms = used_ms + count * rate.cost_ms
    return PoolGrant(count, used_until_ms, is_rate_spent, retry_after_ms(pool, used_until_ms, now))


def retry_after_ms(pool: TokenPool, used_until_ms: float, now: Instant) -> int:
    """How long until the rate of the pool allows a token; 0 if it does now."""
    if pool.rate_per_s is None:
        return 0
    return max(0, math.ceil(Rate(pool.rate_per_s, used_until_ms).spent_until(now) - now - 1e-6))
