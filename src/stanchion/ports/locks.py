"""The lock port: named locks with a term (leases).

A grant carries a fence: a number that rises with every grant of the same name, so that a store can
refuse writes of a former holder. The rule for it is ``core.lease.next_fence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from stanchion.core.model import Instant


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """The caller has the lock."""

    fence: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Another holder has the lock; its term ends within ``expires_in_ms``."""

    expires_in_ms: int


class AcquireTooLate(msgspec.Struct, frozen=True, tag="too_late"):
    """The request was executed after its deadline; nothing was changed."""


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The term was restarted."""


class LockReleased(msgspec.Struct, frozen=True, tag="released"):
    """The lock is free."""


class NotOwned(msgspec.Struct, frozen=True, tag="not_owned"):
    """The caller does not have the lock: its lease expired."""


class LockHolder(msgspec.Struct, frozen=True):
    """The part of a token that is not secret: who holds the lock."""

    name: str | None = None
    """A replica, or the actor who holds it by hand; ``None`` if the token does not say."""
    is_operator: bool = False


class LockView(msgspec.Struct, frozen=True):
    """A lock as shown to an operator, without the token, which is secret."""

    name: str
    fence: int
    expires_in_ms: int
    holder: LockHolder = LockHolder()
    acquired_at: Instant | None = None
    """By the clock of the lock store; ``None`` if an older version granted it."""
    renewals: int = 0


class LockNote(msgspec.Struct, frozen=True):
    """What is to be recorded about a change of a lock by hand.

    The lock store writes it in the step of the change, and keeps it until it is recorded.
    """

    id: str
    name: str
    text: str
    fence: int = 0
    """Of the holder that the change concerns. Set by the lock store."""


_REPLICA: Final = "replica:"
_OPERATOR: Final = "operator:"


def replica_token(replica: str, secret: str) -> str:
    """A token that shows that a replica holds the lock."""
    return f"{_REPLICA}{replica}:{secret}"


def operator_token(actor: str, secret: str) -> str:
    """A token that shows that a person holds the lock."""
    return f"{_OPERATOR}{actor}:{secret}"


def holder_of(token: str) -> LockHolder:
    """The holder that a token names."""
    name = token.partition(":")[2].rpartition(":")[0] or None
    if token.startswith(_OPERATOR):
        return LockHolder(name, is_operator=True)
    return LockHolder(name if token.startswith(_REPLICA) else None)


AcquireAnswer: TypeAlias = Granted | Held | AcquireTooLate


class Locks(Protocol):
    """A store of leases. Every call returns within its time limit or raises ``BackendError``."""

    is_local: bool
    """Whether its calls return at once, because the locks are in the memory of this process."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        """Take the lock if it is free or if this token has it already.

        Idempotent by token, so that a lost answer does not lock the caller out: a repeat by the
        current holder returns the same fence and restarts the term. The caller waits at most
        ``within_ms``, and the server changes nothing after that time. The fence is above ``floor``:
        a current holder whose fence is not gets a new one.
        """

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        """Restart the term if the token still has the lock."""

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        """Release the lock if the token still has it. The store keeps the last fence."""

    async def inspect(self, name: str) -> LockView | None:
        """The holder of the lock; ``None`` if it is free."""

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        """The locks that are held, sorted by name."""

    async def force_release(self, name: str) -> bool:
        """Release the lock of any holder, for operators. ``False`` if it was free."""

    async def ping(self) -> None:
        """Return if the lock server answers. Raises ``BackendError``."""

    async def close(self) -> None:
        """Close all connections and files. Safe to call twice."""


class OperatorLocks(Locks, Protocol):
    """Locks that operators hold and release by hand, with notes of what they did."""

    async def hold(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, note: LockNote
    ) -> AcquireAnswer:
        """Like ``acquire``. The note is written in the same step, if the lock is granted."""

    async def release_by_hand(self, name: str, *, note: LockNote) -> bool:
        """Like ``force_release``. The note is written in the same step, if the lock was held."""

    async def notes(self, *, limit: int = 100) -> Sequence[LockNote]:
        """Notes that are not dropped yet."""

    async def drop_notes(self, notes: Sequence[LockNote]) -> None:
        """Remove notes that are recorded elsewhere."""
