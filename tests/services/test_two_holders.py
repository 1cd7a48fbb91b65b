"""No schedule makes two holders believe at once, and without the deadline rule some soon do."""

from __future__ import annotations

import pytest

from stanchion.core.lease import LeaseTerms, terms_for
from tests.conftest import SOAK
from tests.services.two_holders import search

SCHEDULES = 10_000 if SOAK else 500
PARTS = 10
TERMS = terms_for(30_000)


@pytest.mark.parametrize("part", range(PARTS))
def test_with_fencing_there_are_never_two_believers_at_the_same_instant(part: int) -> None:
    for seed in range(part, SCHEDULES, PARTS):
        assert search(seed, TERMS) == [], f"seed {seed}"


def test_the_search_finds_two_believers_when_only_failures_are_counted() -> None:
    class WithoutDeadline(LeaseTerms, frozen=True):
        """Three failures a third of the term apart, and no deadline: the rule we do not use."""

        @property
        def trusted_ms(self) -> int:
            return 3_600_000

        @property
        def retry_window_ms(self) -> tuple[int, int]:
            return self.renew_every_ms, self.renew_every_ms

    terms = WithoutDeadline(TERMS.ttl_ms, TERMS.margin_ms)
    assert any(search(seed, terms) for seed in range(100))


def test_a_schedule_replays() -> None:
    class Gullible(LeaseTerms, frozen=True):
        """Trusts a lease for an hour."""

        @property
        def trusted_ms(self) -> int:
            return 3_600_000

    terms = Gullible(TERMS.ttl_ms, TERMS.margin_ms)
    bad = next(seed for seed in range(100) if search(seed, terms))
    assert search(bad, terms) == search(bad, terms)
