"""Four processes at the same gate: the cap and the key hold across all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

from stanchion.adapters.store.redis import RedisStore
from stanchion.ports.records import Tenant
from tests.contract.builders import ACME, lease
from tests.integration.program import running_program
from tests.servers import Server

PROCESSES = 4
CALLERS = 250
CAP = 2


async def test_a_thousand_callers_in_four_processes_get_two_runs(
    valkey: Server, namespace: str
) -> None:
    store = await RedisStore.open(valkey.url, namespace=namespace)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=CAP))
    answers = await _all_at_once(valkey, namespace)
    assert Counter(verdict for verdict, _ in answers) == {
        "Admitted": CAP,
        "Full": PROCESSES * CALLERS - CAP,
    }
    assert await store.active_runs(ACME) == CAP
    listed = {each.id for each in (await store.list_runs(ACME)).items}
    assert listed == {run_id for _, run_id in answers if run_id is not None}
    assert {each.job.run_id for each in await lease(store, max_jobs=99)} == listed
    assert (await store.audit_slots(limit=100)).drifts == ()
    await store.close()


async def test_the_same_key_in_four_processes_is_one_run(valkey: Server, namespace: str) -> None:
    store = await RedisStore.open(valkey.url, namespace=namespace)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=CAP))
    answers = await _all_at_once(valkey, namespace, "the-key")
    assert Counter(verdict for verdict, _ in answers) == {
        "Admitted": 1,
        "Replayed": PROCESSES * CALLERS - 1,
    }
    (run_id,) = {run_id for _, run_id in answers}
    assert [each.id for each in (await store.list_runs(ACME)).items] == [run_id]
    assert await store.active_runs(ACME) == 1
    await store.close()


async def _all_at_once(server: Server, namespace: str, *key: str) -> list[tuple[str, str | None]]:
    """Start the processes, wait until all are ready, let them go, and gather their answers."""
    async with AsyncExitStack() as stack:
        programs = [
            await stack.enter_async_context(
                running_program(
                    "tests.integration.callers",
                    *(server.url, namespace, ACME, str(CALLERS), str(seed)),
                    *key,
                )
            )
            for seed in range(PROCESSES)
        ]
        assert [await each.line() for each in programs] == ["ready"] * PROCESSES
        for each in programs:
            each.tell("go")
        said = await asyncio.gather(*(each.line() for each in programs))
    return [(verdict, run_id) for lines in said for verdict, run_id in lines]
