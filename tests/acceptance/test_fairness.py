"""Tenants take turns: one job does not wait behind another tenant's thousands.

And keys: a worker's key may be for every tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.acceptance.caller import Caller, calling, fresh_name
from tests.acceptance.stack import ADMIN_KEY, Kind, Stack, running_stack
from tests.acceptance.worker import Worker

BACKLOG = 2_000
BACKLOG_LONG = 10_000
TOPIC = "shared.work"
ON_TWO = pytest.mark.parametrize("locked", [Kind.SQLITE, Kind.REDIS], indirect=True, ids=str)


@pytest.fixture(scope="module")
def locked(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack that wants keys."""
    with running_stack(request.param, admin_key=ADMIN_KEY, job_lease_ttl_s=60.0) as stack:
        yield stack


@pytest.fixture
async def admin(locked: Stack) -> AsyncIterator[Caller]:
    async with calling(locked.urls) as caller:
        yield caller.bearing(ADMIN_KEY)


async def key_for(admin: Caller, role: str, tenant: str) -> Caller:
    answer = await admin.call("POST", "/v1/admin/keys", {"role": role, "tenant": tenant})
    assert answer.status in {200, 201}, answer.text
    return admin.bearing(answer.body["key"], tenant)


@ON_TWO
async def test_one_job_waits_one_round_behind_a_backlog(admin: Caller) -> None:
    await _one_round(admin, BACKLOG)


@pytest.mark.soak
@ON_TWO
async def test_one_job_waits_one_round_behind_a_long_backlog(admin: Caller) -> None:
    await _one_round(admin, BACKLOG_LONG)


async def _one_round(admin: Caller, backlog: int) -> None:
    many, few = [await key_for(admin, "runner", fresh_name(name)) for name in ("first", "second")]
    each = {"topic": TOPIC, "for_each": "${input.items}", "input": "${item}"}
    for caller in (many, few):
        await caller.apply("work", {"steps": {"each": each}})
    await many.start("work", {"items": list(range(backlog))})
    worker = Worker(await key_for(admin, "worker", "*"), TOPIC)
    for _ in range(3):
        assert [job["tenant"] for job in await worker.lease()] == [many.tenant]
    run_id = (await few.start("work", {"items": [0]})).run_id
    round_of_two = [job for _ in range(2) for job in await worker.lease()]
    assert few.tenant in {job["tenant"] for job in round_of_two}
    mine = next(job for job in round_of_two if job["tenant"] == few.tenant)
    await worker.finish(mine)
    assert (await few.finished(run_id))["status"] == "succeeded"
    # The same within one batch.
    run_id = (await few.start("work", {"items": [0, 1, 2]})).run_id
    batch = await worker.lease(max_jobs=6)
    assert sum(job["tenant"] == few.tenant for job in batch) == 3
    # What is left over must not be in the way of the next test.
    for run in await many.unfinished():
        await many.cancel(run["run_id"])
    await few.cancel(run_id)


@ON_TWO
async def test_a_key_is_for_its_tenant_and_its_role(admin: Caller) -> None:
    first, second = fresh_name("first"), fresh_name("second")
    runner = await key_for(admin, "runner", first)
    stranger = await key_for(admin, "runner", second)
    worker = await key_for(admin, "worker", first)
    await runner.apply("work", {"steps": {"work": {"topic": TOPIC}}})
    run_id = (await runner.start("work")).run_id
    assert (await stranger.call("GET", f"/v1/runs/{run_id}")).status == 404
    assert (await stranger.start("work")).status == 404
    assert (await worker.start("work")).verdict == (403, "forbidden")
    assert (await runner.call("GET", "/v1/admin/settings")).verdict == (403, "forbidden")
    nobody = runner.bearing("sk_nothing_nothing")
    refused = await nobody.call("GET", f"/v1/runs/{run_id}")
    assert refused.verdict == (401, "unauthenticated")
    assert "www-authenticate" in refused.headers
    # Naming another tenant in a header does not make one of it.
    tricky = await stranger.call("GET", f"/v1/runs/{run_id}", headers={"X-Stanchion-Tenant": first})
    assert tricky.status in {403, 404, 422}
    job = await Worker(worker, TOPIC).one()
    assert (job["run_id"], job["tenant"]) == (run_id, first)
    await Worker(worker, TOPIC).finish(job)
    assert (await runner.finished(run_id))["status"] == "succeeded"


@ON_TWO
async def test_a_workers_key_for_one_tenant_gets_no_other_tenants_jobs(admin: Caller) -> None:
    first, second = fresh_name("first"), fresh_name("second")
    runner = await key_for(admin, "runner", first)
    await runner.apply("work", {"steps": {"work": {"topic": TOPIC}}})
    run_id = (await runner.start("work")).run_id
    other = Worker(await key_for(admin, "worker", second), TOPIC)
    assert await other.lease(wait_s=0.3) == []
    job = await Worker(await key_for(admin, "worker", first), TOPIC).one()
    answer = await other.send({**_result(job), "output": "stolen"})
    assert answer["accepted"] == []
    assert answer["rejected"] == [{"job_id": job["job_id"], "code": "unknown_job"}]
    assert (await other.renew(job))["renewed"] == []
    await runner.cancel(run_id)


def _result(job: dict[str, object]) -> dict[str, object]:
    return {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}


@ON_TWO
async def test_a_revoked_key_is_refused(admin: Caller) -> None:
    runner = await key_for(admin, "runner", fresh_name("first"))
    assert (await runner.call("GET", "/v1/runs")).status == 200
    listed = (await admin.get("/v1/admin/keys"))["keys"]
    mine = next(key for key in listed if key["tenant"] == runner.tenant)
    assert "key" not in mine, "a secret is shown once"
    answer = await admin.call("DELETE", f"/v1/admin/keys/{mine['id']}")
    assert answer.status in {200, 204}, answer.text
    assert (await runner.call("GET", "/v1/runs")).status == 401
