"""Commits: whether a transition may be written.

The rules, in this order:

1. The stored nonce is the writer's: the commit succeeded before, and its answer was lost.
2. The writer's fence is below the highest that the run has seen: a later holder has written.
3. The stored stamp is not the one that the writer read: the run has changed since.
4. Otherwise the commit is applied.

``judge_settle`` judges a commit together with the results that it applies, which are not in the
inbox. It also requires that the inbox has no entries but those that the commit applies, so that no
event is overtaken, and that every result comes from the holder of its job. Any other outcome is a
miss: nothing is written.

The nonce comes first, so that a repeated commit is a success even after a later holder has written.
The fence comes before the stamp, so that a stale holder learns that it has lost its lease: a
conflict would only make it load the run and try again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from stanchion.core.model import RunId, Stamp


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The transition is written and durable."""

    stamp: Stamp
    promoted: tuple[RunId, ...] = ()
    """Queued runs that got the slots which the commit freed. A repeated commit names none."""


class CommitConflict(msgspec.Struct, frozen=True, tag="conflict"):
    """The run is no longer what was read: load it and decide again."""


class StaleFence(msgspec.Struct, frozen=True, tag="stale_fence"):
    """A holder with a higher fence has written. Drop the lease and acquire one above it."""

    highest: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """There is no such run."""


CommitAnswer: TypeAlias = Committed | CommitConflict | StaleFence | Gone


class SettleMiss(StrEnum):
    """Why results and their transition were not written in one step."""

    GONE = "gone"
    STALE_FENCE = "stale_fence"
    """A holder with a higher fence has written to the run."""
    CHANGED = "changed"
    """The run is no longer what was read."""
    INBOX = "inbox"
    """Another event waits in the inbox."""
    JOB = "job"
    """A result is not from the holder of its job."""


class SettleMissed(msgspec.Struct, frozen=True, tag="missed"):
    """Nothing is written: accept the results instead."""

    cause: SettleMiss


SettleAnswer: TypeAlias = Committed | SettleMissed


class Apply(msgspec.Struct, frozen=True):
    """The commit may be written, with this stamp and this fence."""

    stamp: Stamp
    fence: int


def judge_commit(
    stored: Stamp, highest: int, *, read: Stamp, nonce: str, fence: int | None
) -> Apply | Committed | CommitConflict | StaleFence:
    """Decide on a commit to a run whose stamp is ``stored`` and whose highest fence is ``highest``.

    ``read`` is the stamp that the writer decided on, ``nonce`` its choice for the new one, and
    ``fence`` that of its lease; ``None`` if policy lets it commit without one.
    """
    if stored.nonce == nonce:
        return Committed(stored)
    if fence is not None and fence < highest:
        return StaleFence(highest)
    if stored != read:
        return CommitConflict()
    return Apply(Stamp(stored.version + 1, nonce), highest if fence is None else fence)


def judge_settle(
    verdict: Apply | CommitAnswer, *, inbox_is_clear: bool, jobs_are_held: bool
) -> Apply | SettleAnswer:
    """Decide on results and their commit, from the verdict on the commit alone.

    ``inbox_is_clear``: whether it has no entries but those that the commit applies.
    """
    match verdict:
        case Apply():
            if not inbox_is_clear:
                return SettleMissed(SettleMiss.INBOX)
            return verdict if jobs_are_held else SettleMissed(SettleMiss.JOB)
        case Committed():
            return verdict
        case Gone():
            return SettleMissed(SettleMiss.GONE)
        case StaleFence():
            return SettleMissed(SettleMiss.STALE_FENCE)
        case CommitConflict():
            return SettleMissed(SettleMiss.CHANGED)
        case _:
            assert_never(verdict)
