"""Bulk actions: what is taken, what is settled, and at which rate."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stanchion.core.bulk import (
    BULK_ERRORS_MAX,
    OPEN_MAX,
    Bulk,
    BulkAction,
    BulkDone,
    BulkFailed,
    BulkPace,
    BulkStatus,
    begin,
    settle,
    stop,
)
from stanchion.core.model import Instant, RunId

BULK = Bulk(
    id="b",
    action=BulkAction.CANCEL,
    tenant=None,
    filter={},
    actor="kim",
    request_id="r",
    created_at=Instant(1),
    rate_per_s=10,
    matched=5,
)
NOW = Instant(99)


def test_runs_are_taken_in_their_order_and_each_once() -> None:
    bulk, first = begin(BULK, 2)
    bulk, second = begin(bulk, 9)
    assert ([*first], [*second]) == ([0, 1], [2, 3, 4])
    assert (bulk.next, bulk.open) == (5, (0, 1, 2, 3, 4))
    assert begin(bulk, 9) == (bulk, range(5, 5))


def test_no_more_are_open_than_the_limit() -> None:
    bulk, taken = begin(replace(BULK, matched=9_999), 9_999)
    assert len(taken) == OPEN_MAX
    assert begin(bulk, 1)[0] is bulk


def test_the_last_settled_run_finishes_it() -> None:
    bulk, _ = begin(BULK, 5)
    failed = BulkFailed(RunId("x"), "conflict", "no")
    bulk = settle(bulk, {0: BulkDone(), 3: failed, 7: BulkDone()}, NOW)
    assert (bulk.done, bulk.failed, bulk.open) == (1, 1, (1, 2, 4))
    assert (bulk.errors, bulk.status, bulk.finished_at) == ((failed,), BulkStatus.RUNNING, None)
    # What was settled before is not counted again.
    assert settle(bulk, {0: BulkDone()}, NOW) == bulk
    bulk = settle(bulk, {number: BulkDone() for number in (1, 2, 4)}, NOW)
    assert (bulk.done + bulk.failed, bulk.status, bulk.finished_at) == (5, "finished", NOW)
    assert stop(bulk, Instant(100)) is bulk


def test_without_runs_it_is_finished_at_once() -> None:
    assert settle(replace(BULK, matched=0), {}, NOW).status is BulkStatus.FINISHED


def test_the_first_failures_are_kept() -> None:
    bulk, taken = begin(replace(BULK, matched=500), 300)
    failures = {number: BulkFailed(RunId(str(number)), "conflict", "no") for number in taken}
    bulk = settle(bulk, failures, NOW)
    assert (bulk.failed, len(bulk.errors)) == (300, BULK_ERRORS_MAX)
    assert bulk.errors[0].run_id == "0"


def test_a_stopped_one_still_counts_what_was_under_way() -> None:
    bulk, _ = begin(BULK, 5)
    bulk = stop(bulk, NOW)
    assert (bulk.status, bulk.finished_at) == (BulkStatus.STOPPED, NOW)
    bulk = settle(bulk, {number: BulkDone() for number in range(5)}, Instant(200))
    assert (bulk.done, bulk.status, bulk.finished_at) == (5, BulkStatus.STOPPED, NOW)
    assert not bulk.is_free_for("a", Instant(10**9))


@pytest.mark.parametrize(
    ("replica", "now", "is_free"), [("a", 0, True), ("b", 49, False), ("b", 50, True)]
)
def test_it_is_free_for_its_holder_and_for_others_when_the_hold_is_over(
    replica: str, now: int, *, is_free: bool
) -> None:
    held = replace(BULK, holder="a", held_until=Instant(50))
    assert held.is_free_for(replica, Instant(now)) is is_free


@pytest.mark.parametrize("per_s", [0.5, 7.0, 300.0])
def test_the_rate_is_kept_over_ten_seconds(per_s: float) -> None:
    pace, taken = BulkPace(per_s), 0
    for tick in range(100):
        pace.wait(0.13 if tick % 2 else 0.07)
        taken += pace.count
        pace.take(pace.count)
    assert taken == pytest.approx(per_s * 10, abs=1.01)


def test_a_pause_is_not_made_up_for() -> None:
    pace = BulkPace(10)
    pace.wait(60)
    assert pace.count == 5


def test_a_run_with_nothing_to_do_is_done_and_counted_as_skipped() -> None:
    bulk, _ = begin(BULK, 5)
    bulk = settle(bulk, {0: BulkDone(is_skipped=True), 1: BulkDone()}, NOW)
    assert (bulk.done, bulk.failed, bulk.skipped, bulk.errors) == (2, 0, 1, ())
    rest: dict[int, BulkDone | BulkFailed] = {2: BulkDone(is_skipped=True), 3: BulkDone()}
    rest[4] = BulkFailed(RunId("x"), "gone", "no")
    bulk = settle(bulk, rest, NOW)
    assert (bulk.done + bulk.failed, bulk.skipped, bulk.status) == (5, 2, "finished")
