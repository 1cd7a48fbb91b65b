"""What happens to the proxied stack: the ways between a replica and its servers are spoiled.

Cut: connections break, and none is let in. Half-open: connections are accepted and kept, nothing
passes; what was on its way arrives when it is over. One-way: requests pass, answers are lost, and a
connection that lost something breaks when it is over, since TCP has no gaps. Slow: 300 ms each way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from stanchion.drills.proxy import Flow, Proxy
from tests.chaos.fault import Fault, is_soak
from tests.chaos.stack import ProxiedStack
from tests.servers import NatsServer, Server

__all__ = ["proxied_faults"]

_SLOW_S: Final = 0.3
_SPOILED: Final = ("cut", "half-open", "one-way", "slow")


def proxied_faults(stack: ProxiedStack, chance: random.Random) -> list[Fault]:
    """All of them, in an order and with durations by chance."""
    faults = []
    for how in _SPOILED:
        hurt = chance.randrange(len(stack.replicas))
        lasts_s = chance.uniform(5.0, 10.0)
        faults.append(_way_to_store(stack, how, hurt, lasts_s))
        faults.append(_ways_to_bus(stack, how, chance.uniform(5.0, 7.0)))
    faults.append(_stands_still(stack, stack.valkey, "Valkey", chance.uniform(5.0, 8.0)))
    faults.append(_stands_still(stack, stack.nats, "NATS", chance.uniform(5.0, 7.0)))
    faults.append(_cut_off(stack, chance.randrange(len(stack.replicas))))
    chance.shuffle(faults)
    return faults


def _way_to_store(stack: ProxiedStack, how: str, hurt: int, lasts_s: float) -> Fault:
    """One replica's. The other one goes on, and takes over its runs."""
    return _spoiled(
        f"one replica's way to Valkey {how}",
        how,
        [stack.store_ways[hurt]],
        lasts_s,
        survivors=_others(stack, hurt),
    )


def _ways_to_bus(stack: ProxiedStack, how: str, lasts_s: float) -> Fault:
    """Everybody's. Runs go on: the bus is the bell."""
    return _spoiled(
        f"all ways to NATS {how}", how, stack.bus_ways, lasts_s, survivors=_everyone(stack)
    )


def _cut_off(stack: ProxiedStack, hurt: int) -> Fault:
    """From everything, for long: its leases run out many times over."""
    ways = [stack.store_ways[hurt], stack.bus_ways[hurt]]
    lasts_s = 120.0 if is_soak() else 60.0
    return _spoiled(
        "one replica cut off from everything", "cut", ways, lasts_s, survivors=_others(stack, hurt)
    )


def _spoiled(
    name: str, how: str, ways: Sequence[Proxy], lasts_s: float, *, survivors: tuple[int, ...]
) -> Fault:
    async def begin() -> None:
        for way in ways:
            _spoil(way, how)

    async def end() -> None:
        for way in ways:
            way.hang_up_gaps()
            way.mend()

    return Fault(name=name, lasts_s=lasts_s, begin=begin, end=end, survivors=survivors)


def _spoil(way: Proxy, how: str) -> None:
    match how:
        case "cut":
            way.cut()
        case "half-open":
            way.set_flow(requests=Flow.IS_HELD, replies=Flow.IS_HELD)
        case "one-way":
            way.set_flow(replies=Flow.IS_LOST)
        case "slow":
            way.requests_delay_s = way.replies_delay_s = _SLOW_S
        case _:
            raise AssertionError(how)


def _stands_still(
    stack: ProxiedStack, server: Server | NatsServer, name: str, lasts_s: float
) -> Fault:
    async def begin() -> None:
        await asyncio.to_thread(server.pause)

    async def end() -> None:
        await asyncio.to_thread(server.resume)

    survivors = _everyone(stack) if server is stack.nats else ()
    return Fault(name=f"{name} paused", lasts_s=lasts_s, begin=begin, end=end, survivors=survivors)


def _everyone(stack: ProxiedStack) -> tuple[int, ...]:
    return tuple(range(len(stack.replicas)))


def _others(stack: ProxiedStack, number: int) -> tuple[int, ...]:
    return tuple(each for each in _everyone(stack) if each != number)
