"""Every order of steps of a small model: what the rules prevent, and what weaker ones do not."""

from __future__ import annotations

import pytest

from stanchion.sim.model import Bounds, ModelRules, search

SMALL = Bounds(commits=3, grants=3)
WITH_EVENT = Bounds(commits=2, grants=1, losses=0, events=1)


def test_with_all_rules_nothing_goes_wrong_in_any_order() -> None:
    found = search(ModelRules(), SMALL)
    assert found.broken is None
    assert found.states > 50_000


def test_with_all_rules_no_event_is_overtaken_in_any_order() -> None:
    found = search(ModelRules(), WITH_EVENT)
    assert found.broken is None
    assert found.states > 5_000


@pytest.mark.soak
def test_with_all_rules_nothing_goes_wrong_in_longer_stories_either() -> None:
    found = search(ModelRules(), Bounds())
    assert found.broken is None
    assert found.states > 400_000


def test_a_version_alone_lets_a_lost_history_back_in() -> None:
    found = search(ModelRules(compares_nonce=False), SMALL)
    assert found.broken == "a commit decided on a lost history was accepted"
    assert any("fails over" in step for step in found.story)
    assert found.story[-1].endswith("accepted")


def test_fences_by_a_counter_are_given_out_twice() -> None:
    found = search(ModelRules(fences_by_clock=False), SMALL)
    assert found.broken == "fence 1 is given out again"
    assert found.story == (
        "A gets the lease with fence 1",
        "the lock server loses everything",
        "B gets the lease with fence 1",
    )


def test_without_the_fence_check_a_stale_holder_writes() -> None:
    found = search(ModelRules(checks_fence=False), SMALL)
    assert found.broken == "a commit of a stale holder was accepted"


def test_without_a_look_at_the_inbox_a_settled_result_overtakes_an_event() -> None:
    found = search(ModelRules(checks_inbox=False), WITH_EVENT)
    assert found.broken == "a settled result overtook an event"
    assert found.story[-2:] == (
        "an event arrives in the inbox",
        "A settles a result on version 0: accepted",
    )


def test_without_failovers_a_version_alone_would_do() -> None:
    assert search(ModelRules(compares_nonce=False), Bounds(3, 3, failovers=0)).broken is None


def test_without_losses_a_counter_would_do() -> None:
    assert search(ModelRules(fences_by_clock=False), Bounds(3, 3, losses=0)).broken is None
