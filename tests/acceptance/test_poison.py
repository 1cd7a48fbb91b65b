"""Dead letters of results: one that cannot be applied is put aside, with its cause, and replayed.

A correct server applies every result it accepts, so something has to be broken under it: the
workflow is taken out of the store while the server is down, and put back later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.acceptance.caller import Caller, calling
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.acceptance.waiting import until
from tests.acceptance.worker import Worker, success
from tests.acceptance.workflows import one_job

BURIED_S = 30.0
"""Five failures, each a little later than the one before."""


@pytest.fixture(scope="module")
def broken() -> Iterator[Stack]:
    with running_stack(Kind.REDIS, job_lease_ttl_s=60.0) as stack:
        yield stack


@pytest.fixture
async def tenant(broken: Stack) -> AsyncIterator[Caller]:
    async with calling(broken.urls) as caller:
        yield caller


@contextlib.contextmanager
def without_workflows(stack: Stack, tenant: str) -> Iterator[None]:
    """The tenant's workflows are gone from the store for as long as the block lasts."""
    with stack.valkey.client() as client:
        names = [str(key) for key in client.scan_iter(match=f"*:workflows:{tenant}")]
        assert len(names) == 1, names
        client.rename(names[0], "aside")
        try:
            yield
        finally:
            client.rename("aside", names[0])


async def test_a_poison_result_is_put_aside_and_replayed_once(
    broken: Stack, tenant: Caller
) -> None:
    topic = f"{tenant.tenant}.work"
    await tenant.apply("work", one_job(topic))
    run_id = (await tenant.start("work")).run_id
    worker = Worker(tenant, topic)
    job = await worker.one()
    replica = broken.replicas[0]
    # A server remembers workflows that it has seen.
    await asyncio.to_thread(replica.stop)
    with without_workflows(broken, tenant.tenant):
        await asyncio.to_thread(replica.start)
        assert (await worker.send(success(job, "good")))["accepted"] == [job["job_id"]]

        async def is_buried() -> bool:
            return bool(await tenant.dead_letters())

        await until(is_buried, within_s=BURIED_S)
    letters = await tenant.dead_letters()
    assert [(each["kind"], each["run_id"]) for each in letters] == [("event", run_id)]
    assert "work" in letters[0]["cause"]
    run = await tenant.run(run_id)
    assert (run["status"], run["finished_at"]) == ("running", None)

    answer = await tenant.replay(letters[0]["id"])
    assert (answer.status, answer.body["replayed"]) == (200, True)
    run = await tenant.finished(run_id)
    assert (run["status"], run["output"]) == ("succeeded", {"work": "good"})
    assert await tenant.dead_letters() == []
    assert (await tenant.replay(letters[0]["id"])).status in {404, 409}, "it is replayed once"


async def test_a_run_whose_workflow_is_gone_is_no_server_error(
    broken: Stack, tenant: Caller
) -> None:
    await tenant.apply("work", one_job(f"{tenant.tenant}.work"))
    run_id = (await tenant.start("work")).run_id
    replica = broken.replicas[0]
    await asyncio.to_thread(replica.stop)
    with without_workflows(broken, tenant.tenant):
        await asyncio.to_thread(replica.start)
        for path in (f"/v1/runs/{run_id}", "/v1/runs", f"/v1/runs/{run_id}/timeline"):
            assert (await tenant.call("GET", path)).status in {200, 404, 503}
    assert (await tenant.run(run_id))["status"] == "running"
