"""Replicas that are killed, or sleep, under load: every admitted run finishes, once.

Embedded, the one server is started again on the same file. With replicas, the other one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.load import Load
from tests.acceptance.stack import RUN_TTL_S, Kind, Stack, running_stack
from tests.acceptance.waiting import until
from tests.acceptance.workflows import HOLD

ROUNDS = 3
ROUNDS_OF_CHAOS = 30
RECOVERED_S = 15.0
"""The dead one's leases run out within three seconds; the rest is for looking."""
ON_TWO = pytest.mark.parametrize("killed", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)


@pytest.fixture(scope="module")
def killed(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(request.param) as stack:
        yield stack


@pytest.fixture
async def tenant(killed: Stack) -> AsyncIterator[Caller]:
    async with calling(killed.urls) as caller:
        yield caller


@ON_TWO
async def test_every_admitted_run_finishes_exactly_once(killed: Stack, tenant: Caller) -> None:
    await _rounds(killed, tenant, ROUNDS, random.Random(7))


@pytest.mark.chaos
@ON_TWO
async def test_every_admitted_run_finishes_exactly_once_in_many_rounds(
    killed: Stack, tenant: Caller
) -> None:
    await _rounds(killed, tenant, ROUNDS_OF_CHAOS, random.Random(8))


@pytest.mark.parametrize("killed", [Kind.REPLICAS], indirect=True, ids=str)
async def test_c4_a_replica_that_sleeps_past_its_leases_changes_nothing_when_it_wakes(
    killed: Stack, tenant: Caller
) -> None:
    load = Load(tenant, callers=12)
    await load.begin(cap=40)
    try:
        for number in (0, 1):
            await load.more(30)
            sleeper = killed.replicas[number]
            sleeper.pause()
            try:
                # By the end of this its leases are others', and their work is done.
                await asyncio.sleep(RUN_TTL_S * 1.3)
            finally:
                sleeper.resume()
        await load.more(10)
        await load.end()
    finally:
        await load.stop()
    await load.check()


@ON_TWO
async def test_every_change_has_its_audit_entry_and_every_entry_its_change(
    killed: Stack, tenant: Caller
) -> None:
    await _audited_rounds(killed, tenant, rounds=1, chance=random.Random(9))


@pytest.mark.chaos
@ON_TWO
async def test_every_change_has_its_audit_entry_in_many_rounds(
    killed: Stack, tenant: Caller
) -> None:
    await _audited_rounds(killed, tenant, rounds=ROUNDS_OF_CHAOS, chance=random.Random(10))


async def _audited_rounds(
    stack: Stack, caller: Caller, *, rounds: int, chance: random.Random
) -> None:
    """Kill a server while callers change things; then compare the log with what has changed."""
    others = [caller.other() for _ in range(4)]
    for each in others:
        await each.apply("held", HOLD)
    is_over = asyncio.Event()
    changing = [asyncio.create_task(_change(each, is_over)) for each in others]
    for number in range(rounds):
        await asyncio.sleep(chance.uniform(0.1, 0.4))
        killed = number % len(stack.replicas)
        stack.replicas[killed].kill()
        await asyncio.to_thread(stack.replicas[killed].start)
    # Not cancelled: a server may act on a request whose caller has left, after the comparison.
    is_over.set()
    await asyncio.gather(*changing)
    for each in others:
        await _compare(each)


async def _change(caller: Caller, is_over: asyncio.Event) -> None:
    """Change a run, a configuration and a workflow, again and again, until it is over.

    On a slow machine files without a pause use up the tenant's share of work, and starts would be
    refused as well: so a run is changed before the first of them.
    """
    for number in itertools.count(1):
        if is_over.is_set():
            return
        with contextlib.suppress(httpx2.TransportError, AssertionError):
            await caller.cancel((await caller.start("held")).run_id)
            await caller.configure(max_concurrent_runs=1_000 + number)
            await caller.apply("changing", {**HOLD, "timeout_s": number})
        await asyncio.sleep(0)


async def _compare(caller: Caller) -> None:
    async def all_that_were_cancelled_have_ended() -> bool:
        subjects = {entry["subject"] for entry in await _log(caller, "run.cancel")}
        return not subjects & {f"run/{run['run_id']}" for run in await caller.unfinished()}

    await until(all_that_were_cancelled_have_ended, within_s=RECOVERED_S)
    cancelled = sorted(f"run/{run['run_id']}" for run in await caller.runs("cancelled"))
    assert sorted(entry["subject"] for entry in await _log(caller, "run.cancel")) == cancelled
    assert cancelled
    configs = await _log(caller, "tenant.put")
    assert [entry["before"] for entry in configs] == [
        *(entry["after"] for entry in configs[1:]),
        None,
    ]
    config = await caller.get(f"/v1/admin/tenants/{caller.tenant}")
    assert configs[0]["after"]["max_concurrent_runs"] == config["max_concurrent_runs"]
    versions = [
        entry["after"]["version"]
        for entry in await _log(caller, "workflow.put")
        if entry["subject"] == "workflow/changing"
    ]
    newest = (await caller.get("/v1/workflows/changing"))["version"]
    assert versions == [*range(newest, 0, -1)]


async def _log(caller: Caller, action: str) -> list[dict[str, Any]]:
    """The caller's entries of one kind, newest first."""
    found: list[dict[str, Any]] = []
    path = f"/v1/admin/audit?action={action}&limit=1000"
    while True:
        page = await caller.get(path)
        found += page["entries"]
        if page["cursor"] is None:
            return found
        path = f"/v1/admin/audit?action={action}&limit=1000&cursor={page['cursor']}"


@ON_TWO
async def test_a_bulk_action_goes_on_after_the_death_of_its_replica(
    killed: Stack, tenant: Caller
) -> None:
    await _bulk_is_whole(killed, tenant, runs=50, rate_per_s=50)


@pytest.mark.chaos
@ON_TWO
async def test_ten_thousand_runs_are_cancelled_through_the_death_of_a_replica(
    killed: Stack, tenant: Caller
) -> None:
    await _bulk_is_whole(killed, tenant.other(), runs=10_000, rate_per_s=1_000)


async def _bulk_is_whole(stack: Stack, tenant: Caller, *, runs: int, rate_per_s: int) -> None:
    """Cancel runs of one label, kill the replica that does it, and see that each is done once."""
    await tenant.apply("held", {"steps": {"a": {"topic": "nobody"}}})
    await tenant.call("PUT", f"/v1/admin/tenants/{tenant.tenant}", {"max_concurrent_runs": None})
    for first in range(0, runs, 1_000):
        numbers = range(first, min(runs, first + 1_000))
        rows = {"runs": [{"key": f"k{number}", "labels": {"team": "red"}} for number in numbers]}
        started = await tenant.call("POST", "/v1/workflows/held/runs/batch", rows)
        assert {each["status"] for each in started.body["results"]} == {200}
    asked = {"action": "cancel", "filter": {"label": ["team:red"]}, "rate_per_s": rate_per_s}
    preview = await tenant.call("POST", "/v1/bulk", {**asked, "dry_run": True})
    assert preview.body == {"matched": runs, "by_tenant": {tenant.tenant: runs}}
    bulk = (await tenant.at(0).call("POST", "/v1/bulk", asked)).body
    path = f"/v1/bulk/{bulk['bulk_id']}"

    async def is_under_way() -> bool:
        return bool((await tenant.at(0).get(path))["done"] >= runs // 10)

    await until(is_under_way, within_s=30)
    stack.replicas[0].kill()
    if len(stack.replicas) == 1:
        await asyncio.to_thread(stack.replicas[0].start)
    survivor = tenant.at(-1)

    async def has_ended() -> bool:
        return bool((await survivor.get(path))["status"] == "finished")

    await until(has_ended, within_s=RECOVERED_S + 10 * runs / rate_per_s)
    ended = await survivor.get(path)
    assert (ended["matched"], ended["done"], ended["failed"]) == (runs, runs, 0)
    left = await survivor.get("/v1/runs?label=team:red&status=running&limit=100")
    assert left["runs"] == []
    subjects = [entry["subject"] for entry in await _log(survivor, "run.cancel")]
    assert len(subjects) == len({*subjects}) == runs
    if len(stack.replicas) > 1:
        await asyncio.to_thread(stack.replicas[0].start)


async def _rounds(stack: Stack, caller: Caller, rounds: int, chance: random.Random) -> None:
    load = Load(caller, callers=12)
    await load.begin(cap=40)
    try:
        for number in range(rounds):
            await load.more(chance.randint(20, 40))
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            killed = number % len(stack.replicas)
            stack.replicas[killed].kill()
            if len(stack.replicas) > 1:
                # The other one goes on by itself, also with what the dead one had in its hands.
                await _recovers(caller.at(killed - 1))
            await asyncio.to_thread(stack.replicas[killed].start)
        await load.more(10)
        await load.end()
    finally:
        await load.stop()
    await load.check()


async def _recovers(caller: Caller) -> None:
    left = {run["run_id"] for run in await caller.unfinished()}

    async def all_have_ended() -> bool:
        left.intersection_update(run["run_id"] for run in await caller.unfinished())
        return not left

    await until(all_have_ended, within_s=RECOVERED_S)
