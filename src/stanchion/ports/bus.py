"""The bus port: who should look at a run, and bells.

The store is the queue, the bus is the bell. The bus carries two things:

* **Calls** to advance a run that has something in its inbox. A call names the run, never its
  contents, so losing one loses nothing: its outbox row is still in the store and becomes due again.
  Whoever handles a call answers with a disposition, always one of three: ``Ack`` (the effect is
  committed), ``Retry`` (come again after exactly this delay; a busy lock or an outage is no fault
  of the call's, so calls are retried for ever), ``Dead`` (never again; it has been put aside).
* **Bells**: something has changed that somebody may wait for. They may be lost, repeated or late:
  behind each of them is a poll.

At most one call per run is pending: publishing another changes nothing. A call is pending from its
publication until ``Ack`` or ``Dead``, also while it is being handled and while it waits for its
retry. So a handler answers ``Ack`` only when it has seen the inbox empty: nobody else was told of
what came in meanwhile. What comes in after that look is still in the outbox, and due again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from stanchion.ports.records import OutboxRow

__all__ = ["Ack", "Bell", "Bus", "Dead", "Disposition", "Handler", "Retry"]


class Ack(msgspec.Struct, frozen=True):
    """Done: what the call was about is committed."""


class Retry(msgspec.Struct, frozen=True):
    """Deliver it again after exactly this delay; zero means at once."""

    delay_ms: int


class Dead(msgspec.Struct, frozen=True):
    """Never deliver it again: what it was about lies with the dead letters."""

    cause: str


Disposition: TypeAlias = Ack | Retry | Dead
Handler: TypeAlias = Callable[[OutboxRow], Awaitable[Disposition]]


class Bell(StrEnum):
    """What has changed. The note beside it says which one."""

    READY = "ready"
    """A job can be leased; the note is its topic."""
    FINISHED = "finished"
    """A run has ended; the note is its id."""
    CHANGED = "changed"
    """A tenant's feed has grown; the note is the tenant."""
    SETTINGS = "settings"
    """Settings were written; the note is the tenant whose they are, empty for all."""
    ESCALATION = "escalation"
    """A replica's view; the note is the announcement, as JSON."""


class Bus(Protocol):
    """Carries calls and bells between replicas."""

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        """Ask for these runs to be advanced; how many were new. Raises ``BackendError``.

        Returning means that the bus has them. One for a run that is pending already changes
        nothing.
        """

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        """Hand calls to ``handle``, so many at a time, until cancelled.

        Goes on through outages. A handler that raises is taken as ``Retry`` after one second. When
        cancelled, it cancels the handlers, and what they did not answer goes to whoever consumes
        next.
        """

    def ring(self, bell: Bell, note: str = "") -> None:
        """Tell whoever listens, here and on other replicas. Never waits, never raises."""

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        """Have ``hear`` called with the note of every such bell; call the answer to stop."""

    async def pending(self) -> int:
        """How many calls are pending."""

    async def ping(self) -> None:
        """Answer, or raise."""

    async def close(self) -> None:
        """Let go of connections. Safe to call twice."""
