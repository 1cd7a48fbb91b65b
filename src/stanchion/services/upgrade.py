"""Upgrades: refuses what an older replica would break, until none is left.

A feature asks ``require`` before its first effect on stored data, so when it is configured and not
with every start. ``finish`` takes an operator's word that no older process is left.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from stanchion.core.audit import SYSTEM, AuditEntry
from stanchion.core.upgrade import (
    LEVEL,
    MayRaise,
    ReportedLevel,
    UpgradeFinished,
    UpgradeUnfinished,
    UpgradeVerdict,
    judge_upgrade,
)
from stanchion.ports.store import Replicas
from stanchion.services.replicas import ReplicaReporter


class UpgradeState(msgspec.Struct, frozen=True):
    """How far the upgrade to this version is."""

    level: int
    """The level of the store."""
    verdict: UpgradeVerdict


class Upgrades:
    """Knows whether all processes of the deployment have the level of a feature."""

    def __init__(self, store: Replicas, reporter: ReplicaReporter) -> None:
        self._store = store
        self._reporter = reporter

    async def require(self, level: int) -> UpgradeUnfinished | None:
        """Why a feature of this level cannot be used yet; ``None`` if it can.

        Raises the level of the store if no older process can be left.
        """
        verdict = (await self._judged(level, is_declared=False)).verdict
        match verdict:
            case UpgradeFinished():
                return None
            case MayRaise():
                by_itself = AuditEntry(
                    action="upgrade.finish", actor=SYSTEM, subject="upgrade", after={"level": level}
                )
                await self._store.raise_level(level, audit=by_itself)
                return None
            case UpgradeUnfinished():
                return verdict
            case _:
                assert_never(verdict)

    async def state(self) -> UpgradeState:
        """How far the upgrade is; changes nothing."""
        return await self._judged(LEVEL, is_declared=False)

    async def finish(self, *, audit: AuditEntry | None = None) -> UpgradeState:
        """Raise the store to the level of this version, unless an older replica still reports."""
        state = await self._judged(LEVEL, is_declared=True)
        if not isinstance(state.verdict, MayRaise):
            return state
        await self._store.raise_level(LEVEL, audit=audit)
        return UpgradeState(LEVEL, UpgradeFinished())

    async def _judged(self, level: int, *, is_declared: bool) -> UpgradeState:
        # Not what was read earlier in the same millisecond.
        stored, view = await self._store.level(), await self._reporter.read(max_age_ms=-1)
        replicas = [
            ReportedLevel(
                replica=each.replica,
                version=each.summary.version,
                level=each.summary.level,
                seen_at=each.seen_at,
                is_missing=each.is_missing,
            )
            for each in view.replicas
        ]
        verdict = judge_upgrade(level, stored=stored, replicas=replicas, is_declared=is_declared)
        return UpgradeState(stored, verdict)


def remedy(unfinished: UpgradeUnfinished) -> str:
    """The operator's next step towards finishing the upgrade."""
    if unfinished.older:
        names = ", ".join(f"{each.replica} ({each.version})" for each in unfinished.older[:5])
        return f"upgrade or stop the older replicas: {names}"
    return (
        "this store was made by an older version, whose replicas do not report: when none is left,"
        " an admin runs 'stanchion upgrade finish'"
    )
