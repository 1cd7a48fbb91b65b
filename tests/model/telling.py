"""Telling a story: taking a store and the model through it, and comparing all there is to see."""

from __future__ import annotations

from typing import Final

from tests.contract.harness import Harness
from tests.model.call import Call
from tests.model.instead import busy
from tests.model.jobs import Accept, Answer, Lease
from tests.model.keeping import Audit, FireTimers, PutTenant, Take
from tests.model.observation import broken_promises, observe
from tests.model.runs import Advance
from tests.model.strategies import Story
from tests.model.world import World, tenants

__all__ = ["tell"]

_NAMES: Final = {together: tenants(together=together) for together in (True, False)}
_AT_ONCE: Final = 4
_ROUNDS: Final = 2
"""Of work on what is left, before the rest is cancelled."""


async def tell(harness: Harness, story: Story) -> None:
    """Take the store through the story, then every run to its end. Raises when it differs."""
    store = await harness.open_store(key_ttl_ms=story.key_ttl_ms)
    names = _NAMES[story.tenants_share_a_shard]
    world = World(harness, await store.now(), names, story.key_ttl_ms)
    await world.perform(*(PutTenant(tenant=n, cap=cap) for n, cap in enumerate(story.caps)))
    for batch in story.batches:
        await world.perform(*(busy(operation, world) for operation in batch))
    await _compare(world)
    await _bring_to_an_end(world)
    await _compare(world)


async def _compare(world: World) -> None:
    """Both sides show the same, and what must hold of it holds."""
    subject = world.pair.subject
    jobs = sorted({grant.job_id for grant in subject.grants if grant.job_id})
    look = Call("look at everything", lambda side: observe(side, world.tenants, world.runs, jobs))
    await world.pair.send([look])
    assert await broken_promises(subject, world.tenants, world.runs) == []


async def _bring_to_an_end(world: World) -> None:
    """Nothing that happened may keep a run from ending, and its end frees all that it held."""
    await world.pair.pass_time()
    await world.perform(FireTimers())
    await world.perform(Take())
    for _ in range(_ROUNDS):
        await world.perform(*(Lease(queue=pick, max_jobs=3) for pick in range(2)))
        await world.perform(*(Accept(answers=(Answer(pick),)) for pick in range(_AT_ONCE)))
        await world.perform(*(Advance(run=pick) for pick in range(_AT_ONCE)))
    for _ in world.runs:
        if world.unfinished:
            await world.perform(*(Advance(run=pick, also="cancel") for pick in range(_AT_ONCE)))
    await world.perform(Audit())
    store = world.pair.subject.store
    assert [await store.active_runs(tenant) for tenant in world.tenants] == [0] * len(world.tenants)
    assert await store.outbox_size() == 0
    assert not any((await store.ready_topics()).values())
