"""The lock port: names that one holder at a time has, for a while.

A grant carries a fence: a number that rises with every grant of the same name, so that whatever is
guarded can tell a late holder from the present one. The rule for it is ``core.lease.next_fence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

__all__ = [
    "AcquireAnswer",
    "AcquireTooLate",
    "Granted",
    "Held",
    "LockReleased",
    "LockView",
    "Locks",
    "NotOwned",
    "Renewed",
]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """The name is yours."""

    fence: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Another has the name for at most so long."""

    expires_in_ms: int


class AcquireTooLate(msgspec.Struct, frozen=True, tag="too_late"):
    """The request came to be executed after its own deadline, and nothing was changed."""


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The term begins anew."""


class LockReleased(msgspec.Struct, frozen=True, tag="released"):
    """The name is free."""


class NotOwned(msgspec.Struct, frozen=True, tag="not_owned"):
    """The name is another's, or nobody's: the lease ran out."""


class LockView(msgspec.Struct, frozen=True):
    """What an operator sees of a lock. The token is the holder's secret and is not shown."""

    name: str
    fence: int
    expires_in_ms: int


AcquireAnswer: TypeAlias = Granted | Held | AcquireTooLate


class Locks(Protocol):
    """Where leases are kept. Every call ends within its bound or raises ``BackendError``."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        """Take the name if it is free, or if this token has it already.

        Idempotent on the token: a lost answer must not lock the caller out. A repeat by the present
        holder gives the same fence and begins the term anew. The caller waits ``within_ms`` at
        most, and the server changes nothing after that time. The fence is above ``floor``, also for
        the present holder: if its fence is not, it gets a new one.
        """

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        """Begin the term anew, if the token still has the name."""

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        """Let go, if the token still has the name. The last fence is remembered."""

    async def inspect(self, name: str) -> LockView | None:
        """Who has it, without touching it."""

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        """The names that are held, in order."""

    async def force_release(self, name: str) -> bool:
        """Take the name from whoever has it. An operator's tool; ``False`` if nobody had it."""

    async def ping(self) -> None:
        """Answer, or raise."""

    async def close(self) -> None:
        """Let go of connections and files. Safe to call twice."""
