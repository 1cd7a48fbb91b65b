"""Commits: whether a transition may be written.

The rules, in this order:

1. The stored nonce is the writer's: the commit succeeded before, and its answer was lost.
2. The writer's fence is below the highest that the run has seen: a later holder has written.
3. The stored stamp is not the one that the writer read: the run has changed since.
4. Otherwise the commit is applied.

The nonce comes first, so that a repeated commit is a success even after a later holder has written.
The fence comes before the stamp, so that a stale holder learns that its lease is gone: a conflict
would only make it load the run and try again.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from stanchion.core.model import Stamp

__all__ = [
    "Apply",
    "CommitAnswer",
    "CommitConflict",
    "Committed",
    "Gone",
    "StaleFence",
    "judge_commit",
]


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The transition is written and durable."""

    stamp: Stamp


class CommitConflict(msgspec.Struct, frozen=True, tag="conflict"):
    """The run is no longer what was read: load it and decide again."""


class StaleFence(msgspec.Struct, frozen=True, tag="stale_fence"):
    """A holder with a higher fence has written. Drop the lease and acquire one above it."""

    highest: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """There is no such run."""


CommitAnswer: TypeAlias = Committed | CommitConflict | StaleFence | Gone


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
