"""Waiting for a name that another holder has: in a queue, or with jittered pauses.

In a queue (``fifo``), a waiter has a ticket in the store's queue, renews it, and asks again when
its bell rings or something expires. With ``jitter`` there is no ticket: it asks again after a
pause. Waiters in the queue go first.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal, Protocol, TypeAlias

from stanchion.core.retry import Backoff, BoundedJitter, backoff_ms
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError
from stanchion.ports.turns import Turns

__all__ = ["DEFAULT_RETRY", "JitterWait", "Order", "QueueWait", "WaitStrategy"]

Order: TypeAlias = Literal["fifo", "jitter"]

DEFAULT_RETRY: Final = BoundedJitter(delay_ms=50, jitter_ms=25)
TICKET_MS: Final = 2_000
"""How long whoever crashed while waiting holds up the others, at most."""
LOOK_EVERY_MS: Final = TICKET_MS // 3
"""Often enough to renew a ticket twice before it ends, and for a bell that was not heard."""
CALL_MS_MAX: Final = 1_000
AFTER_ERROR: Final = BoundedJitter(delay_ms=100, jitter_ms=50)


class WaitStrategy(Protocol):
    """One caller's way of waiting."""

    async def pause(self, left_ms: int) -> None:
        """Come back when it is worth asking again, ``left_ms`` from now at the latest."""

    async def end(self) -> None:
        """Nobody waits any more: leave nothing behind."""


class JitterWait:
    """By chance."""

    def __init__(self, retry: Backoff, clock: Clock, entropy: Entropy) -> None:
        self._retry = retry
        self._clock = clock
        self._entropy = entropy
        self._tries = 0

    async def pause(self, left_ms: int) -> None:
        self._tries += 1
        # Chance may say nothing at all; asking without a pause would be a busy loop.
        pause_ms = max(1, backoff_ms(self._retry, self._tries, self._entropy.unit()))
        await self._clock.sleep(min(left_ms, pause_ms) / 1000)

    async def end(self) -> None:
        """There is nothing to leave."""


class QueueWait:
    """In line."""

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
                # What that means is for policy to say: whoever waits asks for the lease once more.
                pause_ms = backoff_ms(AFTER_ERROR, 1, self._entropy.unit())
                await self._clock.sleep(min(left_ms, pause_ms) / 1000)
                return
            wait_ms = min(look_again_in_ms, LOOK_EVERY_MS, until - self._clock.moment())
            if wait_ms <= 0 or await self._turns.bell(self._name, self._token, at_most_ms=wait_ms):
                return

    async def end(self) -> None:
        if self._joining is not None:
            # Shielded: whoever is cancelled while leaving must not stay in line.
            await asyncio.shield(asyncio.create_task(self._leave(self._joining)))

    async def _join(self, left_ms: int) -> int:
        """How long until it is worth looking again."""
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
        # A ticket that is still being asked for must not arrive after it was given back.
        await asyncio.wait({joining})
        if not joining.cancelled():
            joining.exception()
        try:
            async with asyncio.timeout(CALL_MS_MAX / 1000):
                await self._turns.leave(self._name, self._token, within_ms=CALL_MS_MAX)
        except (BackendError, TimeoutError):
            """Then the ticket runs out by itself."""
