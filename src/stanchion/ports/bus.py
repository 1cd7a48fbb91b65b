"""The bus port: calls to advance runs, and notifications (bells).

The store is the queue; the bus only notifies. It carries two things:

* **Calls** to advance a run that has entries in its inbox. A call names the run, not its contents,
  so a lost call loses no data: its outbox row is still in the store and becomes due again. The
  handler of a call returns one of three dispositions: ``Ack`` (the effect is committed), ``Retry``
  (deliver again after exactly this delay; used for contended locks and outages, without a limit),
  ``Dead`` (never deliver again; a dead letter was written).
* **Bells**: a notification that something has changed. Bells may be lost, repeated or late: every
  listener also polls.

At most one call per run is pending: publishing another has no effect. A call is pending from its
publication until ``Ack`` or ``Dead``, including while it is handled and while it waits for its
retry. So a handler must return ``Ack`` only after it has seen the inbox empty: entries that arrived
while the call was pending caused no call of their own. Entries that arrive after that check have an
outbox row, which becomes due.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from stanchion.ports.records import OutboxRow


class Ack(msgspec.Struct, frozen=True):
    """Done: the effect of the call is committed."""


class Retry(msgspec.Struct, frozen=True):
    """Deliver it again after exactly this delay; zero means at once."""

    delay_ms: int


class Dead(msgspec.Struct, frozen=True):
    """Never deliver it again: a dead letter was written."""

    cause: str


Disposition: TypeAlias = Ack | Retry | Dead
Handler: TypeAlias = Callable[[OutboxRow], Awaitable[Disposition]]


class Bell(StrEnum):
    """What has changed. The note identifies the object."""

    READY = "ready"
    """A job can be leased; the note is its topic."""
    FINISHED = "finished"
    """A run has ended; the note is its id."""
    REVOKED = "revoked"
    """Jobs may have been taken from their workers; the note is the id of their run."""
    CHANGED = "changed"
    """A tenant's feed has grown; the note is the tenant."""
    SETTINGS = "settings"
    """Settings were written; the note is the tenant, empty for the deployment."""
    ROOM = "room"
    """A token of a topic limit was released; the note is the name of its pool."""
    ESCALATION = "escalation"
    """The escalation level of a replica; the note is the announcement as JSON."""


class Bus(Protocol):
    """Carries calls and bells between replicas."""

    has_turns: bool
    """Whether tenants take turns at its calls. If not, a call waits for all that were published
    before it."""

    async def publish(self, calls: Sequence[OutboxRow]) -> int:
        """Publish calls to advance these runs; returns how many were new.

        After the return the bus has stored them. A call for a run that has one pending is dropped.
        Raises ``BackendError``.
        """

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        """Pass calls to ``handle``, at most ``at_once_max`` at a time, until cancelled.

        Continues through outages. If a handler raises, the call is retried after one second. On
        cancellation the handlers are cancelled, and their calls are delivered to the next consumer.
        """

    def ring(self, bell: Bell, note: str = "") -> None:
        """Notify listeners on this and all other replicas. Does not wait and does not raise."""

    def listen(self, bell: Bell, hear: Callable[[str], None]) -> Callable[[], None]:
        """Call ``hear`` with the note of every such bell. Returns a function that stops it."""

    async def pending(self) -> int:
        """The number of pending calls."""

    async def backlog(self) -> int:
        """``pending``, without the calls that wait for their retry if ``has_turns``."""

    async def ping(self) -> None:
        """Return if the bus answers. Raises ``BackendError``."""

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
