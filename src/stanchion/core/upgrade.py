"""Upgrades: whether a feature that older replicas would break may be used.

Two numbers answer it. Every replica reports the level of its version. The store has a level too: a
process below it cannot open the store. A new store begins with the level of the version that made
it. Processes of level 1 do not report, so only an operator can know that none is left: the first
raise of an old store needs a declaration. From then on all processes report, and a raise happens by
itself once none that is older has reported for ten minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from stanchion.core.model import Instant

REPORTING_LEVEL: Final = 2
"""Processes of this level and above report themselves into the store."""
SHARED_WORKFLOWS: Final = 2
"""The level of shared workflows and pins: older replicas would look for an own workflow."""
ITEM_WORKFLOWS: Final = 2
"""The level of for-each steps with a workflow: older replicas cannot decode them."""
ADMISSION_QUEUE: Final = 3
"""The level of tenants that queue: older replicas would free slots without promoting a run."""
BUDGETS: Final = 3
"""The level of budgets: older replicas would admit runs without a reservation."""
TOPIC_LIMITS: Final = 3
"""The level of topic limits: older replicas would lease jobs without tokens."""
LEVEL: Final = 3
"""The level of this version."""


class ReportedLevel(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica reports about its version."""

    replica: str
    version: str
    level: int
    seen_at: Instant
    is_missing: bool
    """Whether it has not reported for a while: it has ended, or is cut off."""


class UpgradeFinished(msgspec.Struct, frozen=True):
    """Every process has the level."""


class MayRaise(msgspec.Struct, frozen=True):
    """Every process has the level, and the store may be raised to it."""


class UpgradeUnfinished(msgspec.Struct, frozen=True):
    """An older process may be left."""

    older: tuple[ReportedLevel, ...]
    """The replicas that report a lower level; none if the older processes do not report."""


UpgradeVerdict: TypeAlias = UpgradeFinished | MayRaise | UpgradeUnfinished


def judge_upgrade(
    needs: int, *, stored: int, replicas: Sequence[ReportedLevel], is_declared: bool = False
) -> UpgradeVerdict:
    """Whether a feature of level ``needs`` may be used, with the store at level ``stored``.

    ``is_declared``: an operator says that no older process is left. A replica that still reports
    contradicts that; one that is missing does not.
    """
    older = tuple(each for each in replicas if each.level < needs)
    running = tuple(each for each in older if not each.is_missing)
    if running:
        return UpgradeUnfinished(running)
    if stored >= needs:
        return UpgradeFinished()
    if is_declared or (stored >= REPORTING_LEVEL and not older):
        return MayRaise()
    return UpgradeUnfinished(older)
