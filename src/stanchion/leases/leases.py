"""Leases for your own code: a body runs only while it holds a name, and has a fence for its writes.

    leases = Leases("redis://127.0.0.1:6379")
    async with leases.hold("invoice:42", wait_s=10) as lease:
        await db.execute("UPDATE … WHERE fence <= ?", lease.fence)

The body is cancelled when the lease can no longer be trusted, before another holder can get it;
then the ``async with`` raises ``LeaseLost``. A body that cannot be cancelled, or whose process was
paused, may write after that. The fence protects against it: a number that rises with every grant,
to be compared where the write happens.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from typing import Final, Literal, Self, TypeAlias, get_args

from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.core import lease
from stanchion.core import lease as rules
from stanchion.core import retry as backoffs
from stanchion.core.faults import Faults
from stanchion.core.lease import DEFAULT_POLICIES, LeasePolicy, LeaseTerms, terms_for
from stanchion.core.model import Risk
from stanchion.core.retry import Backoff
from stanchion.leases.backend import store_at
from stanchion.leases.holder import HoldRequest, LeaseHolder, LeaseUnavailable
from stanchion.leases.waiting import DEFAULT_RETRY, Order
from stanchion.ports.errors import BackendRefused
from stanchion.services.lease_events import LeaseHook
from stanchion.services.renewal import Lease

RiskName: TypeAlias = Literal["low", "standard", "high", "critical"]

_ORDERS: Final = get_args(Order)
_NAME_LENGTH_MAX: Final = 512
_WAIT_S_MAX: Final = 86_400.0


class Leases:
    """Leases in one store, all with the same term. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float = 30.0,
        namespace: str = "leases",
        retry: Backoff = DEFAULT_RETRY,
        on_event: LeaseHook | None = None,
    ) -> None:
        """Name the lock store; it is opened by the first hold. Raises ``ValueError``.

        ``retry`` is the backoff of holds that wait with ``order="jitter"``. ``on_event`` is called
        with the events of every lease, for metrics and logs.
        """
        clock = SystemClock()
        _check("retry", backoffs.faults(retry))
        self._store = store_at(url, namespace=namespace, clock=clock)
        self._holder = LeaseHolder(
            self._store,
            clock=clock,
            entropy=SystemEntropy(),
            terms=_terms(ttl_s),
            retry=retry,
            tell=on_event,
            prepare=self._prepare,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def hold(
        self,
        name: str,
        *,
        risk: Risk | RiskName = "high",
        policy: LeasePolicy | None = None,
        wait_s: float = 0.0,
        order: Order = "fifo",
        floor: int = 0,
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold ``name`` for the body. The lease's fence is above ``floor``.

        ``risk`` chooses what happens when the lock store fails, ``policy`` sets it in detail; by
        default the body neither starts nor continues without a lease. ``wait_s`` is how long to
        wait while another holder has the name: in a queue (``fifo``), or by retrying (``jitter``).

        Raises ``LeaseBusy`` or ``LeaseUnavailable`` instead of running the body, and ``LeaseLost``
        after cancelling it. Exceptions of the body propagate unchanged.
        """
        request = _request(name, Risk(risk), policy, wait_s, order, floor)
        return self._holder.hold(request)

    async def close(self) -> None:
        """Close connections and files. Holds must have ended before. Safe to call twice."""
        self._is_closed = True
        await self._holder.close()
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _prepare(self, name: str) -> None:
        """Open the store before the first hold. Raises ``LeaseUnavailable`` if it is refused.

        A store that cannot be reached is left to the hold's policy.
        """
        running = asyncio.get_running_loop()
        self._loop = self._loop or running
        if self._loop is not running:
            raise RuntimeError("these Leases belong to another event loop: make one for each")
        if self._is_closed:
            raise RuntimeError("these Leases are closed")
        if not self._store.was_tried:
            try:
                await self._store.open()
            except BackendRefused as error:
                raise LeaseUnavailable(name, str(error)) from error


def _request(
    name: str, risk: Risk, policy: LeasePolicy | None, wait_s: float, order: Order, floor: int
) -> HoldRequest:
    if not 0 < len(name) <= _NAME_LENGTH_MAX:
        raise ValueError(f"a name has 1 to {_NAME_LENGTH_MAX} characters, not {len(name)}")
    if not 0 <= wait_s <= _WAIT_S_MAX:
        raise ValueError(f"wait_s is from 0 to {_WAIT_S_MAX:.0f}, not {wait_s}")
    if order not in _ORDERS:
        raise ValueError(f"order is one of {', '.join(_ORDERS)}, not {order!r}")
    if policy is None:
        policy = DEFAULT_POLICIES[risk]
    else:
        _check("policy", lease.policy_faults(policy))
    return HoldRequest(name=name, risk=risk, policy=policy, wait_s=wait_s, order=order, floor=floor)


def _terms(ttl_s: float) -> LeaseTerms:
    if not math.isfinite(ttl_s):
        raise ValueError(f"ttl_s is a number of seconds, not {ttl_s}")
    terms = terms_for(round(ttl_s * 1000))
    _check("ttl_s", rules.faults(terms))
    return terms


def _check(what: str, faults: Faults) -> None:
    if faults:
        raise ValueError(f"{what}: " + "; ".join(f"{each.path}: {each.message}" for each in faults))
