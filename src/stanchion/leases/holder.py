"""Hold a name: queue within this process, then acquire it from the store, waiting if requested.

Renewal, trust, fencing and release are done by ``services.leasing``. This module adds waiting: a
caller that finds a name taken asks again under the same token until it is granted or its time is
over. Tasks of one process that want the same name queue here first, so that a process asks the
store once for each name.

The errors, by who has to act:

    LeaseNotGranted
    ├── LeaseBusy          another holder has it: the caller waits longer, or retries later
    └── LeaseUnavailable   the lock store failed, and the policy fails closed: an operator acts

A lease that was granted and then lost raises ``LeaseLost``: the body had begun.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.lease import LeasePolicy, LeaseTerms, Moment
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.leases.waiting import JitterWait, Order, QueueWait, WaitStrategy
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.turns import Turns
from stanchion.services import lease_events as events
from stanchion.services.lease_events import LeaseEvent, LeaseHook
from stanchion.services.leasing import LeaseContended, LeaseRefused, Leasing, Outcome
from stanchion.services.renewal import Lease, guarded


class HoldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to hold, under which policy, and how long and in which order to wait for it."""

    name: str
    risk: Risk
    policy: LeasePolicy
    wait_s: float
    order: Order
    floor: int


class LeaseHolder:
    """Holds names in one store, all with the same term."""

    def __init__(
        self,
        store: Turns,
        *,
        clock: Clock,
        entropy: Entropy,
        terms: LeaseTerms,
        retry: Backoff,
        tell: LeaseHook | None,
        prepare: Callable[[str], Awaitable[None]],
    ) -> None:
        """``prepare`` is awaited with the name before every hold, which raises its exceptions."""
        self.store = store
        self.clock = clock
        self.entropy = entropy
        self.retry = retry
        self.leasing = Leasing(
            store,
            clock=clock,
            entropy=entropy,
            terms=terms,
            tell=_silently if tell is None else self._retell,
        )
        self.queues = LocalQueues()
        self.asked_at: dict[str, Moment] = {}
        """When the task that has the turn for a name asked for it."""
        self.prepare = prepare
        self.tell = _silently if tell is None else guarded(tell)

    def hold(self, request: HoldRequest) -> LeaseHold:
        """Hold the name for a body. Raises ``LeaseNotGranted`` instead of running it."""
        return LeaseHold(self, request)

    async def close(self) -> None:
        """Stop the background task. Holds must have ended before."""
        await self.leasing.close()

    def _retell(self, event: LeaseEvent) -> None:
        """Report an event of one attempt as an event of the whole request."""
        match event:
            case events.Contended():
                pass  # reported once, when the caller gives up
            case events.Acquired():
                waited_ms = self.clock.moment() - self.asked_at[event.name]
                self.tell(replace(event, waited_ms=waited_ms))
            case _:
                self.tell(event)


def _silently(_: LeaseEvent) -> None:
    """Ignore the event."""


class LeaseHold(AbstractAsyncContextManager[Lease]):
    """One hold. A class, because a generator would cost every hold more."""

    def __init__(self, holder: LeaseHolder, request: HoldRequest) -> None:
        self._holder = holder
        self._request = request
        self._held: AbstractAsyncContextManager[Outcome]

    async def __aenter__(self) -> Lease:
        holder, request = self._holder, self._request
        await holder.prepare(request.name)
        asked_at = holder.clock.moment()
        if not await holder.queues.enter(request.name, wait_s=request.wait_s):
            raise self._busy(asked_at, None)
        try:
            holder.asked_at[request.name] = asked_at
            return await self._granted(asked_at)
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await self._held.__aexit__(kind, error, trace)
        finally:
            self._leave()

    def _leave(self) -> None:
        del self._holder.asked_at[self._request.name]
        self._holder.queues.exit(self._request.name)

    async def _granted(self, asked_at: Moment) -> Lease:
        """Try until the lease is granted. Raises ``LeaseNotGranted``."""
        holder, request = self._holder, self._request
        token = holder.entropy.token()
        strategy: WaitStrategy | None = None
        try:
            while True:
                self._held = holder.leasing.hold(
                    request.name,
                    risk=request.risk,
                    policy=request.policy,
                    floor=request.floor,
                    token=token,
                )
                outcome = await self._held.__aenter__()
                if isinstance(outcome, Lease):
                    # The grant removed the ticket from the queue. If the hold goes on without a
                    # lease because the store failed, the ticket expires.
                    strategy = None
                    return outcome
                await self._held.__aexit__(None, None, None)
                match outcome:
                    case LeaseRefused(error):
                        raise LeaseUnavailable(request.name, error)
                    case LeaseContended(expires_in_ms):
                        left_ms = math.ceil(
                            asked_at + request.wait_s * 1000 - holder.clock.moment()
                        )
                        if left_ms <= 0:
                            raise self._busy(asked_at, expires_in_ms)
                    case _:
                        assert_never(outcome)
                if strategy is None:
                    strategy = self._strategy(token)
                await strategy.pause(left_ms)
        finally:
            if strategy is not None:
                await strategy.end()

    def _strategy(self, token: str) -> WaitStrategy:
        holder, request = self._holder, self._request
        match request.order:
            case "fifo":
                return QueueWait(
                    holder.store, request.name, token, clock=holder.clock, entropy=holder.entropy
                )
            case "jitter":
                return JitterWait(holder.retry, holder.clock, holder.entropy)
            case _:
                assert_never(request.order)

    def _busy(self, asked_at: Moment, expires_in_ms: int | None) -> LeaseBusy:
        holder, request = self._holder, self._request
        holder.tell(
            events.Contended(name=request.name, risk=request.risk, expires_in_ms=expires_in_ms)
        )
        waited_s = (holder.clock.moment() - asked_at) / 1000
        return LeaseBusy(request.name, waited_s=waited_s, expires_in_ms=expires_in_ms)


class LeaseNotGranted(Exception):
    """The body did not run."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"the lease on '{name}' was not granted: {message}")
        self.name = name


class LeaseBusy(LeaseNotGranted):
    """Another holder has it, in this process or elsewhere."""

    def __init__(self, name: str, *, waited_s: float, expires_in_ms: int | None) -> None:
        super().__init__(name, f"another holder has it (waited for {waited_s:.1f} s)")
        self.waited_s = waited_s
        self.expires_in_ms = expires_in_ms
        """When it expires if it is not renewed; ``None`` if it is held in this process."""


class LeaseUnavailable(LeaseNotGranted):
    """The lock store failed, and the policy fails closed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, f"the lock store is unavailable ({reason})")
        self.reason = reason


class LocalQueues:
    """One queue of tasks for every name that this process holds or wants."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting tasks, for every name that a task of this process has entered."""

    async def enter(self, name: str, *, wait_s: float) -> bool:
        """Wait for the turn; ``False`` if it did not come within ``wait_s``. Else call ``exit``."""
        queue = self._queues.get(name)
        if queue is None:
            self._queues[name] = deque()
            return True
        if wait_s <= 0:
            return False
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                # Unless ``exit`` has removed it, since it was cancelled.
                with suppress(ValueError):
                    queue.remove(turn)
            else:
                self.exit(name)  # it got the turn while it was cancelled: pass it on
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def exit(self, name: str) -> None:
        """Give the turn to the next task."""
        queue = self._queues[name]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._queues[name]
