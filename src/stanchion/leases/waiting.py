"""Waiting for a name that another holder has: in a queue, or with jittered pauses.

In a queue (``fifo``), a waiter has a ticket in the store's queue, renews it, and retries when its
bell rings or a lease or ticket before it expires. With ``jitter`` there is no ticket: it retries
after a pause. Waiters in the queue go first.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Literal, Protocol, TypeAlias

from stanchion.core.retry import Backoff, BoundedJitter, backoff_ms
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError
from stanchion.ports.turns import Turns

Order: TypeAlias = Literal["fifo", "jitter"]

DEFAULT_RETRY: Final = BoundedJitter(delay_ms=50, jitter_ms=25)
TICKET_MS: Final = 2_000
"""The term of a ticket: a waiter that crashed delays those behind it by at most this."""
LOOK_EVERY_MS: Final = TICKET_MS // 3
"""Renews a ticket twice within its term, and bounds the delay of a lost bell."""
CALL_MS_MAX: Final = 1_000
AFTER_ERROR: Final = BoundedJitter(delay_ms=100, jitter_ms=50)


class WaitStrategy(Protocol):
    """How one hold waits for its name."""

    async def pause(self, left_ms: int) -> None:
        """Return when a retry may succeed, after ``left_ms`` at the latest."""

    async def end(self) -> None:
        """End the wait, and remove what it left in the store."""


class JitterWait:
    """Waits for jittered pauses."""

    def __init__(self, retry: Backoff, clock: Clock, entropy: Entropy) -> None:
        self._retry = retry
        self._clock = clock
        self._entropy = entropy
        self._tries = 0

    async def pause(self, left_ms: int) -> None:
        self._tries += 1
        # The jittered backoff may be 0, and retrying without a pause would be a busy loop.
        pause_ms = max(1, backoff_ms(self._retry, self._tries, self._entropy.unit()))
        await self._clock.sleep(min(left_ms, pause_ms) / 1000)

    async def end(self) -> None:
        """Do nothing: there is no ticket."""


class QueueWait:
    """Waits in the store's queue, with a ticket."""

    def __init__(
        self, turns: Turns, name: str, token: str, *, clock: Clock, entropy: Entropy
    ) -> None:
        self._turns = turns
        self._name = name
        self._token = token
        self._clock = clock
        self._entropy = entropy
        self._joining: asyncio.Task[int] | None = None

    async def pause(self, left_ms: int) -> None:
        until = self._clock.moment() + left_ms
        while (left_ms := until - self._clock.moment()) > 0:
            try:
                look_again_in_ms = await self._join(left_ms)
            except (BackendError, TimeoutError):
                # Retry the lease after a pause: its policy decides what a failed store means.
                pause_ms = backoff_ms(AFTER_ERROR, 1, self._entropy.unit())
                await self._clock.sleep(min(left_ms, pause_ms) / 1000)
                return
            wait_ms = min(look_again_in_ms, LOOK_EVERY_MS, until - self._clock.moment())
            if wait_ms <= 0 or await self._turns.bell(self._name, self._token, at_most_ms=wait_ms):
                return

    async def end(self) -> None:
        if self._joining is not None:
            # Shielded: a waiter that is cancelled while leaving must not keep its ticket.
            await asyncio.shield(asyncio.create_task(self._leave(self._joining)))

    async def _join(self, left_ms: int) -> int:
        """Join the queue or renew the ticket; return how long until the next check."""
        within_ms = max(1, min(CALL_MS_MAX, left_ms))
        self._joining = asyncio.create_task(self._ask(within_ms))
        return await asyncio.shield(self._joining)

    async def _ask(self, within_ms: int) -> int:
        async with asyncio.timeout(within_ms / 1000):
            place = await self._turns.join(
                self._name, self._token, ticket_ms=TICKET_MS, within_ms=within_ms
            )
        return place.look_again_in_ms

    async def _leave(self, joining: asyncio.Task[int]) -> None:
        # A join that is under way must not create the ticket after ``leave`` removed it.
        await asyncio.wait({joining})
        if not joining.cancelled():
            joining.exception()
        with suppress(BackendError, TimeoutError):  # else the ticket expires
            async with asyncio.timeout(CALL_MS_MAX / 1000):
                await self._turns.leave(self._name, self._token, within_ms=CALL_MS_MAX)
