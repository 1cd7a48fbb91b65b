"""The rest of the HTTP contract: what is listed, shown and configured, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.stack import Kind
from tests.acceptance.worker import Worker
from tests.acceptance.workflows import HOLD, one_job

ON_TWO = pytest.mark.parametrize("stack", [Kind.SQLITE, Kind.REPLICAS], indirect=True, ids=str)
ON_SQLITE = pytest.mark.parametrize("stack", [Kind.SQLITE], indirect=True, ids=str)


async def test_a_run_is_shown_whole(caller: Caller) -> None:
    topic = f"{caller.tenant}.work"
    await caller.apply("work", {**one_job(topic), "output": {"answer": "${steps.work.output}"}})
    run_id = (await caller.start("work", {"n": 1})).run_id
    before = await caller.run(run_id)
    assert (before["status"], before["output"], before["finished_at"]) == ("running", None, None)
    assert before["steps"]["work"]["status"] == "running"
    worker = Worker(caller, topic)
    await worker.finish(await worker.one(), 42)
    run = await caller.finished(run_id)
    expected = {
        "run_id": run_id,
        "workflow_id": "work",
        "workflow_version": 1,
        "tenant": caller.tenant,
        "status": "succeeded",
        "input": {"n": 1},
        "output": {"answer": 42},
        "error": None,
    }
    assert {name: run[name] for name in expected} == expected
    step = run["steps"]["work"]
    assert [step[name] for name in ("status", "attempt", "output", "error")] == [
        *("succeeded", 1, 42, None)
    ]
    created, finished = [datetime.fromisoformat(run[at]) for at in ("created_at", "finished_at")]
    assert created.utcoffset() == finished.utcoffset() == UTC.utcoffset(None)
    assert created <= finished


async def test_runs_are_listed_newest_first_page_by_page(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.apply("other", HOLD)
    started = [(await caller.start("hold")).run_id for _ in range(4)]
    started.append((await caller.start("other")).run_id)
    await caller.cancel(started[0])
    pages, path = [], "/v1/runs?limit=2"
    while True:
        page = await caller.get(path)
        pages.append([run["run_id"] for run in page["runs"]])
        if page["cursor"] is None:
            break
        path = f"/v1/runs?limit=2&cursor={page['cursor']}"
    listed = [run_id for page in pages for run_id in page]
    assert max(map(len, pages)) == 2
    assert set(listed) == set(started)
    assert len(listed) == len(started)
    times = [run["created_at"] for run in await caller.runs()]
    assert all(later >= earlier for later, earlier in pairwise(times))
    only = await caller.get("/v1/runs?workflow_id=other")
    assert [run["run_id"] for run in only["runs"]] == started[-1:]
    assert [run["run_id"] for run in await caller.runs("cancelled")] == started[:1]
    assert await caller.other().runs() == []


async def test_a_cancel_is_final_and_may_be_repeated(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    run_id = (await caller.start("hold")).run_id
    body = {"reason": "no longer needed"}
    first = await caller.call("POST", f"/v1/runs/{run_id}/cancel", body)
    assert (first.status, first.body["status"]) == (200, "cancelled")
    again = await caller.cancel(run_id)
    assert (again.status, again.body["status"]) == (200, "cancelled")
    run = await caller.run(run_id)
    assert (run["error"]["code"], run["error"]["message"]) == ("cancelled", "no longer needed")
    other = (await caller.start("hold")).run_id
    await caller.approve(other, "gate")
    assert (await caller.finished(other))["status"] == "succeeded"
    assert (await caller.cancel(other)).verdict == (409, "conflict")


@ON_TWO
async def test_a_tenants_configuration_is_replaced_whole(caller: Caller) -> None:
    path = f"/v1/admin/tenants/{caller.tenant}"
    default = {"max_concurrent_runs": 10, "job_rate_per_s": None, "admission": None}
    assert _of(await caller.get(path), default) == default
    wanted = {
        "max_concurrent_runs": 3,
        "job_rate_per_s": 2.5,
        "admission": {"strategy": "lock", "lock_retry": {"kind": "fixed", "delay_ms": 20}},
    }
    await caller.configure(**wanted)
    assert _of(await caller.get(path), wanted) == wanted
    await caller.configure(max_concurrent_runs=None)
    assert _of(await caller.get(path), default) == {**default, "max_concurrent_runs": None}


def _of(shown: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, object]:
    return {name: shown[name] for name in wanted}


@ON_SQLITE
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent_runs": -1},
        {"max_concurrent_runs": 1.5},
        {"max_concurrent_runs": True},
        {"job_rate_per_s": 0},
        {"job_rate_per_s": -1},
        {"admission": {"strategy": "none"}},
        {"admission": {"lock_ttl_s": 1}},
        {
            "admission": {
                "lock_retry": {"kind": "jitter", "delay_ms": 10, "jitter_ms": 11},
            }
        },
        {"slots": 3},
        [],
    ],
    ids=str,
)
async def test_a_tenants_configuration_that_cannot_be_is_refused(
    caller: Caller, wrong: object
) -> None:
    answer = await caller.call("PUT", f"/v1/admin/tenants/{caller.tenant}", wrong)
    assert answer.verdict == (422, "invalid_request")
    assert answer.body["errors"][0].keys() >= {"path", "message"}


@ON_TWO
async def test_an_operator_holds_lists_and_releases_locks(caller: Caller) -> None:
    name = f"admission/{caller.tenant}"
    assert (await caller.call("DELETE", f"/v1/admin/leases/{name}")).status == 404
    await caller.hold(name, ttl_s=20)
    listed = (await caller.get("/v1/admin/leases"))["leases"]
    mine = [lease for lease in listed if lease["name"] == name]
    assert len(mine) == 1
    assert 0 < mine[0]["expires_in_ms"] <= 20_000
    assert (await caller.get(f"/v1/admin/leases/{name}"))["fence"] == mine[0]["fence"]
    taken = await caller.call("POST", "/v1/admin/leases", {"name": name, "ttl_s": 20})
    assert taken.verdict == (409, "conflict")
    await caller.let_go(name)
    listed = (await caller.get("/v1/admin/leases"))["leases"]
    assert name not in {lease["name"] for lease in listed}


@ON_SQLITE
@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "nonsense", "ttl_s": 1},
        {"name": "admission/", "ttl_s": 1},
        {"name": "admission/acme", "ttl_s": 0},
        {"name": "admission/acme", "ttl_s": -1},
        {"name": "admission/acme"},
        {"name": "admission/ac\u0007me", "ttl_s": 1},
    ],
    ids=str,
)
async def test_a_lock_that_cannot_be_is_not_held(caller: Caller, wrong: object) -> None:
    answer = await caller.call("POST", "/v1/admin/leases", wrong)
    assert answer.verdict == (422, "invalid_request")


async def test_readiness_names_its_checks_and_liveness_has_none(caller: Caller) -> None:
    ready = await caller.get("/readyz")
    assert ready["status"] == "ok"
    assert ready["checks"] == {"store": "ok", "locks": "ok", "bus": "ok"}
    assert (await caller.call("GET", "/livez")).status == 200


async def test_every_answer_has_a_request_id(caller: Caller) -> None:
    answers = [await caller.call("GET", path) for path in ("/livez", "/v1/runs", "/nothing")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert answers[-1].body["request_id"] == ids[-1]


@ON_SQLITE
async def test_workflows_are_listed_and_shown_in_every_version(caller: Caller) -> None:
    topics = [f"{caller.tenant}.{name}" for name in ("old", "new")]
    for topic in topics:
        await caller.apply("work", one_job(topic))
    await caller.apply("hold", HOLD)
    listed = (await caller.get("/v1/workflows"))["workflows"]
    assert [(each["id"], each["version"]) for each in listed] == [("hold", 1), ("work", 2)]
    for version, topic in enumerate(topics, start=1):
        shown = await caller.get(f"/v1/workflows/work?version={version}")
        assert shown["definition"]["steps"]["work"]["topic"] == topic
    assert (await caller.get("/v1/workflows/work"))["version"] == 2
    assert (await caller.call("GET", "/v1/workflows/work?version=3")).status == 404
    assert (await caller.other().call("GET", "/v1/workflows/work")).status == 404


@ON_SQLITE
async def test_a_workflow_is_refused_with_all_its_faults(caller: Caller) -> None:
    broken = {
        "steps": {
            "a": {"topic": "x", "needs": ["absent"]},
            "b": {"topic": "x", "when": "1 +"},
            "c": {"workflow": "nowhere"},
        }
    }
    answer = await caller.call("PUT", "/v1/workflows/broken", broken)
    assert answer.verdict == (422, "invalid_workflow")
    places = {error["path"] for error in answer.body["errors"]}
    assert any("steps.a" in place for place in places)
    assert any("steps.b" in place for place in places)
    assert (await caller.call("GET", "/v1/workflows/broken")).status == 404
    unknown = await caller.call("PUT", "/v1/workflows/c", {"steps": {"c": {"workflow": "nowhere"}}})
    assert unknown.verdict == (422, "invalid_workflow")
