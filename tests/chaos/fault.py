"""Faults, one after the other under load, and what was seen of each."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from tests.chaos.canary import sing
from tests.chaos.load import CANARY_TENANT, TENANTS, Load
from tests.chaos.stack import JOB_TTL_S, Stack

__all__ = ["RECOVERED_S", "Act", "Fault", "Seen", "chosen_seed", "is_soak", "play"]

Act = Callable[[], Awaitable[object]]

RECONCILE_S: Final = 1.0
OFFERED_AGAIN_S: Final = 5.0
RECOVERED_S: Final = JOB_TTL_S + OFFERED_AGAIN_S + RECONCILE_S
"""A job whose worker is gone is offered again within its lease and five seconds (the contract); the
reconciler looks every second. Nothing else keeps a fresh run waiting."""
_CALM_S: Final = 1.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens, lasts, and is over."""

    name: str
    lasts_s: float
    begin: Act
    end: Act
    survivors: tuple[int, ...] = ()
    """The replicas that must do fresh runs meanwhile."""
    survived_s_max: float = RECOVERED_S
    """How long after its begin they may take to."""
    losing_at: list[float] = []
    """Filled while it happens: when a server was taken away that may have acknowledged something
    which it had not passed on."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one fault was like from outside. Times of day, and seconds."""

    fault: str
    began_at: float
    ended_at: float
    survived_s: float | None
    """From its begin until a fresh run was done through every survivor."""
    survived_s_max: float
    recovered_s: float
    """From its end until a fresh run was done through every replica."""
    recovered_s_max: float
    answered: dict[str, int]
    """Starts answered with a run while it lasted, by tenant."""
    refused: int
    unanswered: int
    losing_at: list[float]

    @property
    def lasted_s(self) -> float:
        return self.ended_at - self.began_at


async def play(stack: Stack, load: Load, faults: Sequence[Fault]) -> list[Seen]:
    """Let them happen one after the other."""
    seen = []
    for fault in faults:
        await asyncio.sleep(_CALM_S)
        load.check()
        seen.append(await _play_one(stack, load, fault))
    return seen


async def _play_one(stack: Stack, load: Load, fault: Fault) -> Seen:
    canary = load.caller(CANARY_TENANT)
    began_at = time.time()
    await fault.begin()
    surviving = [
        asyncio.create_task(sing(canary, each, since=began_at)) for each in fault.survivors
    ]
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        await fault.end()
    ended_at = time.time()
    survived = await asyncio.gather(*surviving)
    recovered = await asyncio.gather(
        *(sing(canary, each, since=ended_at) for each in range(len(stack.replicas)))
    )
    meanwhile = [each for each in load.heard if began_at <= each.at <= ended_at]
    return Seen(
        fault=fault.name,
        began_at=began_at,
        ended_at=ended_at,
        survived_s=max(survived, default=None),
        survived_s_max=fault.survived_s_max,
        recovered_s=max(recovered),
        recovered_s_max=RECOVERED_S,
        answered={
            tenant: sum(each.tenant == tenant and each.status == 200 for each in meanwhile)
            for tenant in TENANTS
        },
        refused=sum(each.status in {429, 503} for each in meanwhile),
        unanswered=sum(each.status == 0 for each in meanwhile),
        losing_at=fault.losing_at,
    )


def chosen_seed() -> int:
    """Of this chaos: the one that is asked for, or another one every time."""
    wish = os.environ.get("STANCHION_TEST_CHAOS_SEED")
    return int(wish) if wish else random.SystemRandom().randrange(1_000_000)


def is_soak() -> bool:
    """Whether there is a lot of time."""
    return os.environ.get("STANCHION_TEST_SCALE") == "soak"
