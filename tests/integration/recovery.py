"""Recovery: what must hold of a store that was killed, and opened again.

Nothing that was acknowledged is missing, no slot is leaked, and the indexes alone (outbox, timers,
ready jobs, leases) lead every run to its end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Final, assert_never

from msgspec.structs import replace

from stanchion.core import invariants
from stanchion.core.admission import Replayed
from stanchion.core.model import Item, ItemKey, OnJob, RunId, StepId, TenantId
from stanchion.ports.records import JobState, Loaded
from stanchion.ports.store import Store
from tests.contract.builders import WITHIN_MS, admission
from tests.integration.load import (
    CAP,
    INPUT,
    PLANS,
    TENANTS,
    Ack,
    AckAccepted,
    AckAdmitted,
    AckCommitted,
    advance_due,
    work_once,
)

__all__ = ["check_kept", "check_sound", "finish_all"]

_END_S_MAX: Final = 20.0
_PAUSE_S: Final = 0.01


async def check_kept(store: Store, acks: Iterable[Ack]) -> None:
    """Everything that was acknowledged is there."""
    for ack in acks:
        found = await store.load(ack.run_id)
        assert found is not None, f"lost: {ack}"
        match ack:
            case AckAdmitted():
                await _check_key(store, ack)
            case AckAccepted():
                await _check_result(store, found, ack)
            case AckCommitted(version=version, nonce=nonce):
                stamp = found.run.stamp
                assert stamp.version >= version, f"lost: {ack}, it is at {stamp}"
                assert stamp.version > version or stamp.nonce == nonce, f"lost: {ack}"
            case _:
                assert_never(ack)


async def check_sound(store: Store) -> None:
    """Every run is one that the rules lead to, and slots and outbox agree with the runs."""
    with_mail = 0
    for tenant in TENANTS:
        found = await _runs(store, tenant)
        with_mail += sum(bool(each.inbox) for each in found)
        for each in found:
            run = replace(each.run, items=await _items(store, each))
            assert invariants.of_run(PLANS[run.workflow_id], run) == []
        counted = await store.active_runs(tenant)
        assert counted <= CAP
        assert invariants.of_slots(counted=counted, runs=[each.run for each in found]) == []
    assert (await store.audit_slots(limit=100)).drifts == ()
    assert await store.outbox_size() == with_mail, "inbox without outbox row, or the reverse"


async def finish_all(store: Store) -> None:
    """Bring every run to its end with nothing but what the indexes say."""
    chance = random.Random(1)
    until = time.monotonic() + _END_S_MAX
    while active := [n for tenant in TENANTS if (n := await store.active_runs(tenant))]:
        assert time.monotonic() < until, f"{active} runs do not end"
        fired = await store.fire_timers(limit=100)
        expired = await store.expire_jobs(limit=100, max_deliveries=100)
        accepted = await work_once(store, chance)
        committed = await advance_due(store)
        if not (fired or expired or accepted or committed):
            await asyncio.sleep(_PAUSE_S)
    assert await store.outbox_size() == 0
    assert not any((await store.ready_topics()).values())
    assert (await store.list_dead_letters(None)).items == ()


async def _check_key(store: Store, ack: AckAdmitted) -> None:
    if ack.key is None:
        return
    again = admission(
        await store.now(),
        PLANS[ack.workflow_id],
        tenant=ack.tenant,
        run_input=INPUT,
        key=ack.key,
    )
    verdict = await store.admit(again, within_ms=WITHIN_MS)
    assert verdict == Replayed(ack.run_id), f"lost: the key of {ack}"


async def _check_result(store: Store, found: Loaded, ack: AckAccepted) -> None:
    view = await store.job(ack.job_id)
    assert view is not None, f"lost: {ack}"
    assert (view.state, view.fence) == (JobState.FINISHED, ack.fence), f"lost: {ack}"
    if any(entry.id == f"result:{ack.job_id}#{ack.fence}" for entry in found.inbox):
        return
    # Not in the inbox: then it has been applied, and nobody waits for it any more.
    waits = [step.wait for step in found.run.steps.values()]
    waits += [item.wait for item in (await _items(store, found)).values()]
    assert found.run.status.is_finished or OnJob(ack.job_id) not in waits, f"lost: {ack}"


async def _runs(store: Store, tenant: TenantId) -> list[Loaded]:
    cursor: str | None = None
    ids: list[RunId] = []
    for _ in range(1_000):
        page = await store.list_runs(tenant, cursor=cursor, limit=200)
        ids += [each.id for each in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    return [found for found in await asyncio.gather(*map(store.load, ids)) if found is not None]


async def _items(store: Store, found: Loaded) -> dict[ItemKey, Item]:
    wanted: dict[StepId, range] = {
        step_id: range(step.items.total)
        for step_id, step in found.run.steps.items()
        if step.items is not None
    }
    return await store.load_items(found.run.id, wanted)
