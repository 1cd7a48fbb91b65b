"""Deliberate defects: each is found out, so each check can fail."""

from __future__ import annotations

from itertools import count, islice

import pytest

from stanchion.sim import world
from stanchion.sim.command import hunt, shrunk
from stanchion.sim.replica import Mutant
from stanchion.sim.scenario import draw
from stanchion.sim.world import play
from tests.sim import mutants

FOUND_ON = {
    "release-without-token": (0, "only the owner releases"),
    "fence-by-incr": (5, "fences rise"),
    "version-without-nonce": (5, "commits form one chain"),
    "no-fence-check": (25, "fences rise"),
    "count-only-fencing": (0, "no deadline is after the server's"),
    "renewal-ignores-not-owned": (104, "no deadline is after the server's"),
    "acquire-without-floor": (25, "everything ends"),
    "fail-open-for-all": (0, "unleased only by policy"),
    "late-grant": (0, "nothing after its deadline"),
    "late-admit": (6, "nothing after its deadline"),
    "known-key-told-full": (0, "a known key is replayed"),
    "refusal-kept": (0, "no refusal is older than its caller"),
    "forget-the-waiter": (0, "no slot idles while a run waits"),
    "promote-twice": (0, "who waits is in the queue"),
    "last-come-first-served": (7, "nobody overtakes"),
    "promotion-stops-half-way": (96, "no slot idles while a run waits"),
    "slot-freed-later": (0, "slots equal unfinished runs"),
    "listed-as-it-was": (1, "lists equal scans"),
    "source-not-recorded": (0, "versions in force"),
    "pin-ignored": (0, "versions in force"),
    "key-reserved-apart": (1, "one run per key"),
    "batch-read-once": (6, "one run per key"),
    "tick-twice": (4, "one run per"),
    "tick-forgotten": (2, "every tick has one outcome"),
    "bulk-acts-twice": (10, "one run per key"),
    "bulk-settles-taken": (0, "a bulk action goes forward"),
    "bulk-without-rate": (11, "a bulk action keeps its rate"),
    "bulk-forgets-own": (0, "a bulk action is about what matched"),
    "looks-as-unseen": (5, "escalation ends"),
    "never-recovers": (5, "escalation ends"),
    "escalation-unheeded": (0, "unleased only by policy"),
    "change-without-entry": (0, "every change has its audit entry"),
    "receipts-lost": (0, "refusals have receipts"),
    "cap-read-before": (0, "never above the cap"),
    "limit-token-lost": (1, "never above a topic limit"),
    "token-not-renewed": (0, "never above a topic limit"),
    "ack-before-commit": (0, "no accepted result is lost"),
    "publish-before-commit": (32, "what is waited for is out there"),
    "outbox-forgets": (0, "one row for whatever lies in an inbox"),
    "relay-never-again": (8, "everything ends"),
    "one-summary-for-all": (0, "every replica reports"),
    "old-facts": (0, "why "),
    "newest-wait-named": (3, "the oldest waits are named"),
    "why-without-retries": (5, "why names what happens next"),
    "result-from-anybody": (13, "each effect is accepted once"),
    "settle-fence-not-checked": (23, "each effect is accepted once"),
    "settle-inbox-not-checked": (0, "a settle overtakes nothing"),
    "settle-stamp-not-checked": (0, "commits form one chain"),
    "settle-half-a-batch": (2, "what is waited for is out there"),
    "reconciler-without-recheck": (5, "grants are disjoint"),
    "jitter-out-of-bounds": (0, "delays within policy"),
    "reserve-without-release": (0, "budgets count what runs reserve and use"),
    "usage-charged-twice": (0, "budgets count what runs reserve and use"),
    "charged-to-any-window": (0, "budgets count what runs reserve and use"),
    "settings-read-once": (6, "settings are in force everywhere"),
    "item-stops-others": (8, "what is waited for is out there"),
    "rerun-loses-output": (2, "what is reused is what it was"),
    "items-backwards": (0, "runs give what they mean"),
    "condition-never-false": (0, "runs give what they mean"),
    "rerun-keeps-dependants": (0, "a rerun keeps what it must"),
    "queued-rerun-without-items": (4, "a rerun keeps what it must"),
    "key-for-any-input": (1, "a key belongs to its input"),
    "feed-skips-a-line": (0, "subscribers miss nothing"),
    "feed-stands-still": (0, "subscribers miss nothing"),
    "place-not-given-back": (0, "nothing is left in a process"),
    "term-too-long": (0, "a lease lasts its term"),
    "purged-early": (5, "only old runs are removed"),
    "rate-ignored": (6, "single jobs within their rate"),
    "timers-by-time-alone": (33, "tenants take turns"),
    "timer-of-written-run": (8, "calls together are as one by one"),
    "retry-without-budget": (0, "retries within budget"),
}
"""A day on which each was found out, and by which statement. Days change when services do."""
DAYS_MAX = 60
ENDS = "everything ends"
PATIENCE_S = 60.0
"""How long a day with a defect waits for runs that never end: the same day without needs less."""


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.name)
def test_a_defect_is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "HEAL_S_MAX", PATIENCE_S)
    seed, name = FOUND_ON[mutant.name]
    days = (play(draw(each, mutant.profile), mutant) for each in count(seed))
    # Another invariant may notice it first; this one must, too.
    told = ((day, any(each.startswith(name) for each in day.broken)) for day in days)
    found = next((day.scenario for day, is_told in islice(told, DAYS_MAX) if is_told), None)
    assert found is not None
    if name == ENDS:
        assert play(found).broken == ()


def test_there_are_at_least_a_dozen_defects_each_with_a_sentence() -> None:
    assert len(mutants.ALL) >= 12
    assert {mutant.name for mutant in mutants.ALL} == set(FOUND_ON)
    assert all(mutant.says for mutant in mutants.ALL)


def test_a_defect_leaves_nothing_behind() -> None:
    before = play(draw(0)).digest
    for mutant in mutants.ALL:
        with mutant.applied():
            pass
    assert play(draw(0)).digest == before


def test_a_hunt_says_what_was_found_and_how_soon() -> None:
    said: list[str] = []
    assert hunt("slot-freed-later", seeds_max=3, say=said.append) == 0
    assert "slots equal unfinished runs" in said[1]
    assert said[-1] == "days to find out: median 1, worst 1"


def test_a_hunt_that_finds_nothing_says_so() -> None:
    said: list[str] = []
    assert hunt("result-from-anybody", seeds_max=1, say=said.append) == 1
    assert "not within 1 days" in said[1]


def test_a_broken_day_is_made_shorter_and_stays_broken() -> None:
    (mutant,) = (each for each in mutants.ALL if each.name == "key-reserved-apart")
    whole = play(draw(1), mutant)
    small = shrunk(whole, lambda scenario: play(scenario, mutant), plays_max=40)
    assert small.broken[0].startswith("one run per key")
    assert len(small.scenario.asks) < len(whole.scenario.asks)
    assert small.scenario.faults == ()
