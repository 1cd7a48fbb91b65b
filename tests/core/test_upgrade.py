"""Upgrades: which processes must be gone before a feature may be used."""

from __future__ import annotations

import pytest

from stanchion.core.model import Instant
from stanchion.core.upgrade import (
    MayRaise,
    ReportedLevel,
    UpgradeFinished,
    UpgradeUnfinished,
    judge_upgrade,
)


def replica(level: int, *, is_missing: bool = False) -> ReportedLevel:
    return ReportedLevel(
        replica=f"r{level}",
        version=f"0.{level}",
        level=level,
        seen_at=Instant(1),
        is_missing=is_missing,
    )


NEW, OLD, GONE = replica(3), replica(2), replica(2, is_missing=True)


@pytest.mark.parametrize(
    ("stored", "replicas", "verdict", "declared"),
    [
        # Processes of the first level do not report: only an operator can know.
        (1, [NEW], UpgradeUnfinished(()), MayRaise()),
        (1, [NEW, GONE], UpgradeUnfinished((GONE,)), MayRaise()),
        (1, [NEW, OLD], UpgradeUnfinished((OLD,)), UpgradeUnfinished((OLD,))),
        # All that can have it open report: it is finished when no older one is left.
        (2, [NEW], MayRaise(), MayRaise()),
        (2, [NEW, GONE], UpgradeUnfinished((GONE,)), MayRaise()),
        (2, [NEW, OLD, GONE], UpgradeUnfinished((OLD,)), UpgradeUnfinished((OLD,))),
        # An older one cannot start any more, but one may have been running.
        (3, [NEW], UpgradeFinished(), UpgradeFinished()),
        (3, [NEW, GONE], UpgradeFinished(), UpgradeFinished()),
        (3, [NEW, OLD], UpgradeUnfinished((OLD,)), UpgradeUnfinished((OLD,))),
    ],
)
def test_a_feature_waits_for_every_older_process(
    stored: int, replicas: list[ReportedLevel], verdict: object, declared: object
) -> None:
    assert judge_upgrade(3, stored=stored, replicas=replicas) == verdict
    assert judge_upgrade(3, stored=stored, replicas=replicas, is_declared=True) == declared
    assert judge_upgrade(2, stored=max(stored, 2), replicas=replicas) == UpgradeFinished()
