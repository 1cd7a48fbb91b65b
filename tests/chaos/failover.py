"""What happens to the failover stack: processes are killed and stopped, and others take over."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from tests.chaos.fault import RECOVERED_S, Act, Fault, is_soak
from tests.chaos.sentinels import FAILOVER_S_MAX
from tests.chaos.stack import JOB_TTL_S, FailoverStack, WorkerProcess

__all__ = ["failover_faults"]

_BLINK_S: Final = 0.8
"""Shorter than the Sentinels wait: nobody takes over."""
_IN_HAND: Final = 2
_MOMENT_S_MAX: Final = 3.0
_LOOK_EVERY_S: Final = 0.01


def failover_faults(stack: FailoverStack, chance: random.Random) -> list[Fault]:
    """All of them, in an order and with durations by chance."""
    faults = [
        _replica_killed(stack, chance),
        _replica_stopped(stack, chance),
        _worker_killed(stack, chance),
        *(_worker_stopped(worker, stack, chance) for worker in stack.workers),
        _valkey_blinks(stack),
        _primary_killed(stack),
        _primary_replaced_alive(stack, chance),
        _nats_killed(stack, chance, leads=False),
        _nats_killed(stack, chance, leads=True),
    ]
    chance.shuffle(faults)
    return faults


def _replica_killed(stack: FailoverStack, chance: random.Random) -> Fault:
    number = chance.randrange(len(stack.replicas))
    replica = stack.replicas[number]
    return Fault(
        name="replica killed, started again",
        lasts_s=chance.uniform(5.0, 8.0),
        begin=_aside(replica.kill),
        end=_aside(replica.start),
        survivors=_others(stack, number),
    )


def _replica_stopped(stack: FailoverStack, chance: random.Random) -> Fault:
    number = chance.randrange(len(stack.replicas))
    replica = stack.replicas[number]
    return Fault(
        name="replica paused",
        lasts_s=chance.uniform(20.0, 40.0) if is_soak() else chance.uniform(6.0, 14.0),
        begin=_aside(replica.pause),
        end=_aside(replica.resume),
        survivors=_others(stack, number),
    )


def _worker_killed(stack: FailoverStack, chance: random.Random) -> Fault:
    worker = chance.choice(stack.workers)
    return Fault(
        name="worker killed, started again",
        lasts_s=chance.uniform(5.0, 7.0),
        begin=_with_jobs_in_hand(worker, worker.kill),
        end=_aside(worker.start),
        survivors=_everyone(stack),
    )


def _worker_stopped(worker: WorkerProcess, stack: FailoverStack, chance: random.Random) -> Fault:
    """For so long that its jobs are done by another, and it wakes with results in its hands."""
    return Fault(
        name=f"{worker.kind} worker paused",
        lasts_s=JOB_TTL_S + chance.uniform(2.0, 4.0),
        begin=_with_jobs_in_hand(worker, worker.pause),
        end=_aside(worker.resume),
        survivors=_everyone(stack),
    )


def _valkey_blinks(stack: FailoverStack) -> Fault:
    stopped: list[int] = []

    def begin() -> None:
        stopped.append(stack.valkeys.primary())
        stack.valkeys.servers[stopped[-1]].pause()

    def end() -> None:
        stack.valkeys.servers[stopped[-1]].resume()

    return Fault(
        name="Valkey primary blinks, is not replaced",
        lasts_s=_BLINK_S,
        begin=_aside(begin),
        end=_aside(end),
    )


def _primary_killed(stack: FailoverStack) -> Fault:
    killed: list[int] = []
    losing_at: list[float] = []

    def begin() -> None:
        killed.append(stack.valkeys.primary())
        stack.valkeys.servers[killed[-1]].kill()
        losing_at.append(time.time())

    def end() -> None:
        stack.valkeys.until_replaced(killed[-1])
        stack.valkeys.start(killed[-1])
        stack.valkeys.until_whole()

    return Fault(
        name="Valkey primary killed, a replica promoted",
        lasts_s=0.0,
        begin=_aside(begin),
        end=_aside(end),
        survivors=_everyone(stack),
        survived_s_max=FAILOVER_S_MAX + RECOVERED_S,
        losing_at=losing_at,
    )


def _primary_replaced_alive(stack: FailoverStack, chance: random.Random) -> Fault:
    """The machine that it shares with a Sentinel hangs, the one that everybody asks first.

    It wakes up and takes itself for the primary, with whoever is still connected to it. But it has
    no replicas any more, so it takes no writes (``min-replicas-to-write``), except what it does in
    the moment before it notices.
    """
    stopped: list[int] = []
    losing_at: list[float] = []

    def begin() -> None:
        stopped.append(stack.valkeys.primary())
        stack.valkeys.servers[stopped[-1]].pause()
        stack.valkeys.sentinels[0].pause()
        losing_at.append(time.time())

    def end() -> None:
        stack.valkeys.until_replaced(stopped[-1])
        stack.valkeys.servers[stopped[-1]].resume()
        stack.valkeys.sentinels[0].resume()
        losing_at.append(time.time())
        stack.valkeys.until_whole()

    return Fault(
        name="Valkey primary and a Sentinel hang, are replaced, wake",
        lasts_s=chance.uniform(5.0, 8.0),
        begin=_aside(begin),
        end=_aside(end),
        survivors=_everyone(stack),
        survived_s_max=FAILOVER_S_MAX + RECOVERED_S,
        losing_at=losing_at,
    )


def _nats_killed(stack: FailoverStack, chance: random.Random, *, leads: bool) -> Fault:
    place = chance.randrange(len(stack.nats.nodes) - 1)
    killed: list[int] = []

    async def begin() -> None:
        leader = await stack.nats.leader_of(stack.stream)
        followers = [number for number in range(len(stack.nats.nodes)) if number != leader]
        killed.append(leader if leads else followers[place])
        await asyncio.to_thread(stack.nats.nodes[killed[-1]].kill)

    async def end() -> None:
        await asyncio.to_thread(stack.nats.nodes[killed[-1]].start)

    return Fault(
        name="NATS leader of three killed" if leads else "NATS follower of three killed",
        lasts_s=chance.uniform(5.0, 8.0),
        begin=begin,
        end=end,
        survivors=_everyone(stack),
    )


def _with_jobs_in_hand(worker: WorkerProcess, act: Callable[[], object]) -> Act:
    """Wait for the moment: it hurts more then."""

    def begin() -> None:
        until = time.monotonic() + _MOMENT_S_MAX
        while worker.jobs_in_hand() < _IN_HAND and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        act()

    return _aside(begin)


def _aside(act: Callable[[], object]) -> Act:
    """Not on the loop: callers go on meanwhile."""

    async def aside() -> object:
        return await asyncio.to_thread(act)

    return aside


def _everyone(stack: FailoverStack) -> tuple[int, ...]:
    return tuple(range(len(stack.replicas)))


def _others(stack: FailoverStack, number: int) -> tuple[int, ...]:
    return tuple(each for each in _everyone(stack) if each != number)
