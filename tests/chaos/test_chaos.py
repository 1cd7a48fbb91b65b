"""Chaos on whole stacks: whatever happens, every statement holds and everything works again.

The order of faults and their durations come from a seed, which is in the verdict:
``STANCHION_TEST_CHAOS_SEED=7`` makes the same faults happen in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.chaos.failover import failover_faults
from tests.chaos.fault import chosen_seed
from tests.chaos.proxied import proxied_faults
from tests.chaos.round import play_round
from tests.chaos.stack import failover_stack, proxied_stack
from tests.chaos.verdict import Verdict, show

pytestmark = pytest.mark.chaos


async def test_servers_that_die_and_are_replaced(tell: Callable[[Verdict], None]) -> None:
    async with failover_stack() as stack:
        verdict = await play_round(stack, partial(failover_faults, stack), chosen_seed())
        _judge(verdict, tell, stack.last_words())


async def test_ways_to_servers_that_are_spoiled(tell: Callable[[Verdict], None]) -> None:
    async with proxied_stack() as stack:
        verdict = await play_round(stack, partial(proxied_faults, stack), chosen_seed())
        _judge(verdict, tell, stack.last_words())


def _judge(verdict: Verdict, tell: Callable[[Verdict], None], last_words: str) -> None:
    tell(verdict)
    if not verdict.is_good:
        pytest.fail("\n".join([*show(verdict), last_words]), pytrace=False)
