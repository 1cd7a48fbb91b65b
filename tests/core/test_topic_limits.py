"""Topic limits: which topics they cover, in which order they are taken, and what a pool grants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.model import Instant, JobId, TenantId, Topic
from stanchion.core.topic_limits import (
    LimitScope,
    TokenPool,
    TopicLimit,
    TopicLimits,
    grant_tokens,
    not_after,
    retry_after_ms,
    token_name,
    token_ttl_ms,
)

_ACME = TenantId("acme")
_NOW = Instant(1_800_000_000_000)


@pytest.mark.parametrize(
    ("pattern", "topic", "covers"),
    [
        ("llm.*", "llm.gpt", True),
        ("llm.*", "llm.gpt.large", True),
        ("llm.*", "llm", False),
        ("llm.*", "llm.", True),
        ("llm.*", "llms.gpt", False),
        ("llm.*", "my.llm.gpt", False),
        ("llm.gpt.*", "llm.gpt", False),
        ("llm.gpt.*", "llm.gpt.large", True),
        ("llm.gpt", "llm.gpt", True),
        ("llm.gpt", "llm.gpt.large", False),
        ("LLM.*", "llm.gpt", False),
    ],
)
def test_a_limit_covers_its_topics_and_prefixes(pattern: str, topic: str, *, covers: bool) -> None:
    limit = TopicLimit(id="a", topics=("something else", pattern), max_running=1)
    assert limit.covers(Topic(topic)) is covers


def test_limits_are_taken_in_the_order_of_their_ids() -> None:
    limits = TopicLimits(
        [
            TopicLimit(id="z", topics=("llm.*",), max_running=1),
            TopicLimit(id="a", topics=("llm.gpt",), per=LimitScope.TENANT, rate_per_s=2.0),
            TopicLimit(id="m", topics=("mail",), max_running=1),
        ]
    )
    assert limits.pools(Topic("llm.gpt"), _ACME) == (
        TokenPool("a", _ACME, None, 2.0),
        TokenPool("z", None, 1, None),
    )
    assert limits.covering(Topic("other")) == ()
    assert bool(limits)
    assert not TopicLimits()


@pytest.mark.parametrize("more", [0, 100])
def test_topics_are_grouped_by_the_limits_that_cover_them(more: int) -> None:
    llm = TopicLimit(id="z", topics=("llm.*",), max_running=1)
    mail = TopicLimit(id="a", topics=("mail", "llm.gpt"), rate_per_s=2.0)
    others = tuple(Topic(f"free.{number}") for number in range(1 + more))
    topics = (Topic("llm.gpt"), Topic("llm.b"), *others, Topic("mail"), Topic("llm.c"))
    limits = TopicLimits([llm, mail])
    for _ in range(2):  # also when the answer is remembered
        groups = limits.grouped(topics)
        assert dict(groups.topics) == {
            (mail, llm): (Topic("llm.gpt"),),
            (llm,): (Topic("llm.b"), Topic("llm.c")),
            (): others,
            (mail,): (Topic("mail"),),
        }
        assert groups.limit_ids == {"a", "z"}
    assert limits.grouped(others).limit_ids == frozenset()


def test_pools_have_names_of_their_own() -> None:
    pools = [TokenPool(name, tenant, 1, None) for name in ("a", "b") for tenant in (None, _ACME)]
    assert len({pool.name for pool in pools}) == len(pools)
    assert token_name(JobId("r:s@1"), 7) == "r:s@1#7"


@given(ttl_ms=st.integers(1_000, 3_600_000), late_ms=st.integers(0, 1_000))
def test_a_token_ends_a_second_after_its_lease(ttl_ms: int, late_ms: int) -> None:
    leased_at = _NOW + late_ms
    assert leased_at <= not_after(_NOW)
    assert _NOW + token_ttl_ms(ttl_ms) >= leased_at + ttl_ms * 1.02 + 1_000 - 1e-3


@given(
    rate=st.floats(0.01, 1_000),
    gaps=st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 50)), max_size=30),
)
def test_a_rate_is_kept_and_nothing_of_it_is_lost(rate: float, gaps: list[tuple[int, int]]) -> None:
    pool, used_until_ms, now, granted = TokenPool("a", None, None, rate), 0.0, _NOW, 0
    for gap_ms, wanted in gaps:
        now = Instant(now + gap_ms)
        grant = grant_tokens(pool, wanted, running=0, used_until_ms=used_until_ms, now=now)
        used_until_ms = grant.used_until_ms
        granted += grant.count
        assert grant.is_rate_spent is (grant.count < wanted)
        assert granted <= max(1.0, rate) + rate * (now - _NOW) / 1000 + 1e-3
        if grant.is_rate_spent:
            later = Instant(now + max(1, grant.retry_after_ms))
            assert retry_after_ms(pool, used_until_ms, later) == 0
            assert grant_tokens(pool, 1, running=0, used_until_ms=used_until_ms, now=later).count


@pytest.mark.parametrize(
    ("max_running", "running", "wanted", "count"),
    [(3, 0, 2, 2), (3, 2, 2, 1), (3, 3, 2, 0), (3, 5, 2, 0), (0, 0, 1, 0), (None, 99, 2, 2)],
)
def test_a_pool_grants_what_is_free(
    max_running: int | None, running: int, wanted: int, count: int
) -> None:
    pool = TokenPool("a", None, max_running, None)
    grant = grant_tokens(pool, wanted, running=running, used_until_ms=0.0, now=_NOW)
    assert (grant.count, grant.is_rate_spent, grant.retry_after_ms) == (count, False, 0)
