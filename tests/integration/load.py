"""A process that works a store hard, and says what was acknowledged the moment it was.

    python -m tests.integration.load URL NAMESPACE SEED

``URL`` is ``sqlite:PATH`` or ``redis://…``. Callers admit, workers lease and answer, advancers take
the outbox and commit, all at the same time, until the process is killed or the store is gone. Each
acknowledgement is a line of JSON, written in one piece and not buffered.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock
from stanchion.core.admission import Admitted
from stanchion.core.json_value import JsonObject
from stanchion.core.model import JobId, RunId, TenantId, WorkflowId
from stanchion.core.plan import Plan
from stanchion.ports.errors import BackendError
from stanchion.ports.records import Accepted, Committed, Tenant
from stanchion.ports.store import Store
from tests.contract import builders
from tests.contract.builders import DELAY, FOR_EACH, TWO_JOBS

__all__ = [
    "CAP",
    "INPUT",
    "PLANS",
    "TENANTS",
    "Ack",
    "AckAccepted",
    "AckAdmitted",
    "AckCommitted",
    "advance_due",
    "open_store",
    "work_once",
]

TENANTS: Final = tuple(map(TenantId, ("north", "east", "south")))
CAP: Final = 15
PLANS: Final[Mapping[WorkflowId, Plan]] = {
    plan.workflow_id: plan for plan in (TWO_JOBS, FOR_EACH, DELAY)
}
INPUT: Final[JsonObject] = {"say": "hello", "items": [1, 2, 3]}
_CALLERS: Final = 6
_WORKERS: Final = 4
_ADVANCERS: Final = 4
_TERM_MS: Final = 300
"""Of leases and of outbox rows that were taken: so long they are missed after a crash."""
_PAUSE_S: Final = 0.005


class AckAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    """A run was let in."""

    run_id: RunId
    tenant: TenantId
    workflow_id: WorkflowId
    key: str | None


class AckAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A result was taken."""

    run_id: RunId
    job_id: JobId
    fence: int


class AckCommitted(msgspec.Struct, frozen=True, tag="committed"):
    """A transition became true."""

    run_id: RunId
    version: int
    nonce: str


Ack = AckAdmitted | AckAccepted | AckCommitted


async def open_store(url: str, namespace: str) -> Store:
    """The store behind a URL."""
    scheme, _, path = url.partition(":")
    if scheme == "sqlite":
        return await SqliteStore.open(path, clock=SystemClock(), timeout_s=5.0)
    return await RedisStore.open(url, namespace=namespace, timeout_s=5.0)


async def work_once(store: Store, chance: random.Random) -> list[AckAccepted]:
    """Lease a few jobs, and answer them all; what was taken."""
    leased = await builders.lease(store, max_jobs=5, ttl_ms=_TERM_MS)
    results = [builders.result_of(each, chance.choice(["good", "better"])) for each in leased]
    fences = {each.job.id: each.fence for each in leased}
    answers = await store.accept(results, row_due_in_ms=chance.choice([0, 20]))
    return [
        AckAccepted(answer.run_id, answer.job_id, fences[answer.job_id])
        for answer in answers
        if isinstance(answer, Accepted)
    ]


async def advance_due(store: Store) -> list[AckCommitted]:
    """Advance the runs whose outbox rows are due; what was committed."""
    committed: list[AckCommitted] = []
    rows = await store.take_outbox(limit=5, hold_ms=_TERM_MS)
    for row in rows:
        found = await store.load(row.run_id)
        assert found is not None
        answer = await builders.advance(store, PLANS[found.run.workflow_id], row.run_id)
        if isinstance(answer, Committed):
            stamp = answer.stamp
            committed.append(AckCommitted(row.run_id, stamp.version, stamp.nonce))
    await store.confirm_outbox(rows)
    return committed


async def _call(store: Store, chance: random.Random) -> None:
    while True:
        tenant, plan = chance.choice(TENANTS), PLANS[chance.choice(list(PLANS))]
        key = f"key-{chance.getrandbits(60)}" if chance.random() < 0.5 else None
        wanted = builders.admission(
            await store.now(), plan, tenant=tenant, run_input=INPUT, key=key
        )
        if isinstance(await store.admit(wanted, within_ms=5_000), Admitted):
            _say(AckAdmitted(wanted.run.id, tenant, plan.workflow_id, key))
        else:
            await asyncio.sleep(_PAUSE_S)


async def _work(store: Store, chance: random.Random) -> None:
    while True:
        accepted = await work_once(store, chance)
        for ack in accepted:
            _say(ack)
        if not accepted:
            await asyncio.sleep(_PAUSE_S)


async def _advance(store: Store) -> None:
    while True:
        committed = await advance_due(store)
        for ack in committed:
            _say(ack)
        if not committed:
            await asyncio.sleep(_PAUSE_S)


async def _keep(store: Store) -> None:
    while True:
        await store.fire_timers(limit=10)
        await store.expire_jobs(limit=10, max_deliveries=100)
        await asyncio.sleep(_PAUSE_S)


async def main(url: str, namespace: str, seed: int) -> None:
    chance = random.Random(seed)
    # Every process draws ids of its own.
    builders._chance = random.Random(seed)  # noqa: SLF001 - builders' chance is the same everywhere
    store = await open_store(url, namespace)
    for tenant in TENANTS:
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=CAP))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(_call(store, chance))
            for _ in range(_WORKERS):
                group.create_task(_work(store, chance))
            for _ in range(_ADVANCERS):
                group.create_task(_advance(store))
            group.create_task(_keep(store))
    except* BackendError:
        # The store was killed under us: what was said is what was acknowledged.
        await store.close()


def _say(ack: Ack) -> None:
    os.write(1, msgspec.json.encode(ack) + b"\n")


if __name__ == "__main__":
    _url, _namespace, _seed = sys.argv[1:]
    asyncio.run(main(_url, _namespace, int(_seed)))
