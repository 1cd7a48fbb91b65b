"""Whatever one tenant or stranger does, a quiet tenant beside it does not notice.

Every neighbour of the catalogue is put beside a quiet tenant, on SQLite and on two replicas. The
quiet tenant is refused nothing, its p99 stays within three times of what it is alone or 50 ms, and
``/livez`` is answered.

``make test`` puts two of them beside it at a time: what does no harm together does none alone. A
p99 of a hundred requests is the second worst, and a busy machine can make two requests late by
itself. So the bound is stretched if the servers waited longer for a core than alone, or if the host
of a virtual machine took its cores away, and neighbours that seem to do harm are measured again
after all others and for longer, in other pairs, then one at a time: a stall of the server comes
back each time, a pause of the machine does not. A refusal is never forgiven.

One neighbour by itself: ``python -m tests.acceptance.quiet sqlite NAME``. What a server keeps of
its memory after a storm of all of them, in ten minutes: ``pytest -m soak -k memory`` of this file.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import pytest

from stanchion.services.watchdog import CHECK_S, LOOKS_UNTIL_NEXT, TRIMS_AFTER
from tests.acceptance.neighbours import CATALOGUE
from tests.acceptance.quiet import Bound, Street, hostile_stack, street
from tests.acceptance.stack import Kind, Stack
from tests.conftest import SOAK

pytestmark = pytest.mark.alone
PASSES = ((3.0, 1), (6.0, 1), (12.0, 1)) if SOAK else ((0.5, 2), (1.0, 2), (2.5, 1), (2.5, 1))
"""For how long each pass measures, and how many neighbours at a time."""
ALONE_S = 6.0 if SOAK else 1.0
SLACK = 1.0 if SOAK else 1.5
WHOLE_S_MAX = 1_800.0 if SOAK else 300.0
STORM_S = 1.0
"""Of each neighbour. What it can fill is full after a second."""
STORMS = 3
FRESH_LOOKS = 4
SETTLE_LOOKS = LOOKS_UNTIL_NEXT * (TRIMS_AFTER + 1)
"""A minute and more: a server trims its memory four times after it has grown."""
MEMORY_RATIO_MAX = 1.5
"""After every storm, of what it was before the first."""
GROWTH_MAX = 1.05
"""After the last storm, of what it was after the one before it: it does not go on growing."""
ON_BOTH = pytest.mark.parametrize("kind", [Kind.SQLITE, Kind.REPLICAS], ids=str)


@ON_BOTH
async def test_a_quiet_tenant_does_not_notice_its_neighbours(kind: Kind) -> None:
    with hostile_stack(kind) as stack:
        async with asyncio.timeout(WHOLE_S_MAX), street(stack) as beside:
            await beside.quiet.measure(0.5)
            bound = Bound(await beside.alone(ALONE_S), slack=SLACK)
            left = dict.fromkeys(CATALOGUE, "")
            for number, (seconds, at_once) in enumerate(PASSES):
                before, left = left, {}
                for place, names in enumerate(_grouped(list(before), at_once)):
                    # Again before a pass, and before each that is then measured by itself: a
                    # machine that others use too is not always as fast.
                    if number and (place == 0 or at_once == 1):
                        bound = Bound(await beside.alone(ALONE_S), slack=SLACK)
                    if faults := await _harm(beside, bound, " ".join(names), seconds):
                        said = f"\n  in {seconds:g} s: {faults}"
                        left |= {name: before[name] + said for name in names}
    assert not left, _report(left)


def _grouped(names: Sequence[str], at_once: int) -> list[Sequence[str]]:
    """Groups of names that are far from each other: neighbours in a row do similar things."""
    groups = -(-len(names) // at_once)
    return [names[first::groups] for first in range(groups)]


async def _harm(beside: Street, bound: Bound, names: str, seconds: float) -> str:
    """What neighbours do beyond the bound; empty if nothing."""
    seen = await beside.beside(names, seconds)
    assert not seen.refusals, (names, seen.refusals)
    faults = bound.faults(seen)
    return f"{'; '.join(faults)}; it was answered {seen.statuses}" if faults else ""


def _report(left: dict[str, str]) -> str:
    return "\n".join(f"{name}: {CATALOGUE[name].says}{said}" for name, said in left.items())


@pytest.mark.soak
@ON_BOTH
async def test_memory_after_a_storm_returns_to_what_it_was(
    kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    with hostile_stack(kind) as stack:
        async with street(stack) as beside:
            await beside.quiet.measure(ALONE_S)
            sizes = [await _settled(stack, FRESH_LOOKS)]
            for _ in range(STORMS):
                await _storm(beside)
                sizes.append(await _settled(stack, SETTLE_LOOKS))
                with capsys.disabled():  # also when it passes
                    _say(kind, sizes)
    fresh, *after = sizes
    assert all(_ratio(fresh, each) <= MEMORY_RATIO_MAX for each in after), sizes
    assert _ratio(*after[-2:]) <= GROWTH_MAX, sizes


def _ratio(before: list[int], after: list[int]) -> float:
    """How much the server has grown that has grown most."""
    return max(now / was for was, now in zip(before, after, strict=True))


def _say(kind: Kind, sizes: list[list[int]]) -> None:
    """For the table in the docs: fresh, and after each storm."""
    shown = " → ".join(", ".join(f"{each / 2**20:.0f}" for each in some) for some in sizes)
    ratios = ", ".join(f"{_ratio(sizes[0], some):.2f}" for some in sizes[1:])
    sys.stderr.write(f"\n{kind}: {shown} MiB; {ratios} times the first\n")


async def _storm(beside: Street) -> None:
    for name in CATALOGUE:
        await beside.beside(name, STORM_S)


async def _settled(stack: Stack, looks: int) -> list[int]:
    """The least memory of each server in so many looks."""
    least = [replica.resident_bytes() for replica in stack.replicas]
    for _ in range(looks):
        await asyncio.sleep(CHECK_S)
        now = [replica.resident_bytes() for replica in stack.replicas]
        least = [min(pair) for pair in zip(least, now, strict=True)]
    return least
