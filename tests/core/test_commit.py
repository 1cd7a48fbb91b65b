"""Commits: which may become true, and what the writer of another is told."""

from __future__ import annotations

import pytest

from stanchion.core.commit import (
    Apply,
    CommitAnswer,
    CommitConflict,
    Committed,
    Gone,
    SettleMiss,
    SettleMissed,
    StaleFence,
    judge_commit,
    judge_settle,
)
from stanchion.core.model import Stamp

STORED = Stamp(7, "n7")
OTHER = Stamp(6, "n6")
SAME_VERSION = Stamp(7, "other")
HIGHEST = 100


@pytest.mark.parametrize(
    ("read", "nonce", "fence", "expected"),
    [
        pytest.param(STORED, "new", 100, Apply(Stamp(8, "new"), 100), id="same fence"),
        pytest.param(STORED, "new", 101, Apply(Stamp(8, "new"), 101), id="higher fence"),
        pytest.param(STORED, "new", None, Apply(Stamp(8, "new"), 100), id="no lease"),
        pytest.param(STORED, "new", 99, StaleFence(100), id="stale fence"),
        pytest.param(OTHER, "new", 100, CommitConflict(), id="older version"),
        pytest.param(SAME_VERSION, "new", 100, CommitConflict(), id="same version, other nonce"),
        pytest.param(OTHER, "new", None, CommitConflict(), id="no lease and an older version"),
        pytest.param(OTHER, "n7", 100, Committed(STORED), id="repeated"),
        pytest.param(OTHER, "n7", 99, Committed(STORED), id="repeated after a later holder"),
        pytest.param(OTHER, "new", 99, StaleFence(100), id="stale fence and an older version"),
    ],
)
def test_a_commit_is_judged_by_nonce_then_fence_then_stamp(
    read: Stamp, nonce: str, fence: int | None, expected: object
) -> None:
    assert judge_commit(STORED, HIGHEST, read=read, nonce=nonce, fence=fence) == expected


MAY_BE_WRITTEN = Apply(Stamp(8, "new"), 100)


@pytest.mark.parametrize(
    ("verdict", "inbox_is_clear", "jobs_are_held", "expected"),
    [
        (MAY_BE_WRITTEN, True, True, MAY_BE_WRITTEN),
        (MAY_BE_WRITTEN, False, True, SettleMissed(SettleMiss.INBOX)),
        (MAY_BE_WRITTEN, True, False, SettleMissed(SettleMiss.JOB)),
        (MAY_BE_WRITTEN, False, False, SettleMissed(SettleMiss.INBOX)),
        # The answer of the first one was lost: it has emptied the inbox and ended the jobs.
        (Committed(STORED), False, False, Committed(STORED)),
        (Gone(), True, True, SettleMissed(SettleMiss.GONE)),
        (StaleFence(100), True, True, SettleMissed(SettleMiss.STALE_FENCE)),
        (CommitConflict(), True, True, SettleMissed(SettleMiss.CHANGED)),
    ],
)
def test_a_settle_is_a_commit_that_overtakes_nothing_and_takes_results_of_holders_only(
    verdict: Apply | CommitAnswer, *, inbox_is_clear: bool, jobs_are_held: bool, expected: object
) -> None:
    judged = judge_settle(verdict, inbox_is_clear=inbox_is_clear, jobs_are_held=jobs_are_held)
    assert judged == expected
