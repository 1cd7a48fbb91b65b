"""The admission queue over HTTP: what a start, its tenant and a reader are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stanchion.services import queue
from tests.gateway.asgi import Answer
from tests.gateway.house import House, older_store

TENANT = "/v1/admin/tenants/default"
START = "/v1/workflows/one-step/runs"
QUEUES = {"max_concurrent_runs": 1, "on_full": "queue", "queue_max": 3}


async def _full(house: House, **config: object) -> str:
    """A tenant that queues, and the run that has its slot."""
    put = await house.ask("PUT", TENANT, {**QUEUES, **config})
    assert put.status == 200, put.body
    return await house.start()


async def _start(house: House, key: str | None = None, **body: object) -> Answer:
    headers = () if key is None else [("Idempotency-Key", key)]
    return await house.ask("POST", START, body, headers=headers)


async def _cancel(house: House, run_id: str) -> None:
    assert (await house.ask("POST", f"/v1/runs/{run_id}/cancel", {})).status in {200, 202}


async def _ended(house: House, run_id: str) -> dict[str, Any]:
    return dict((await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json)


async def test_a_start_of_a_full_tenant_waits_and_is_shown_everywhere(house: House) -> None:
    first = await _full(house)
    queued = await _start(house, "k")
    assert queued.status == 202
    run_id = queued.json["run_id"]
    assert queued.json == {
        "run_id": run_id,
        "status": "queued",
        "position": 1,
        "estimate_s": None,
    }
    again = await _start(house, "k")
    assert (again.status, again.json) == (202, queued.json)
    assert again.headers["idempotency-replayed"] == "true"
    urgent = await _start(house, priority=9, fairness_key="blue")
    assert (urgent.status, urgent.json["position"]) == (202, 1)
    assert (await _start(house, on_full="reject")).json["code"] == "max_concurrent_runs_reached"
    batch = await house.ask(
        "POST",
        f"{START}/batch",
        {"runs": [{"priority": 0}, {}]},
        headers=[("Idempotency-Key", "b")],
    )
    rows = batch.json["results"]
    assert [row["status"] for row in rows] == [202, 429]
    assert (rows[0]["position"], rows[1]["problem"]["code"]) == (3, "queue_full")
    assert (rows[0]["estimate_s"], "estimate_s" in rows[1]) == (None, False)
    refused = await _start(house)
    assert (refused.status, refused.json["code"]) == (429, "queue_full")
    assert refused.json["retry_class"] == "quota"
    assert refused.json["detail"] == "max concurrent runs reached, and 3 runs wait already"

    shown = (await house.ask("GET", f"/v1/runs/{run_id}")).json
    assert (shown["status"], shown["position"]) == ("queued", 2)
    why = (await house.ask("GET", f"/v1/runs/{run_id}/why")).json
    (finding,) = why["findings"]
    assert (finding["code"], finding["blocked_by"]["ahead"]) == ("queued", 1)
    assert finding["until"] is not None
    assert "position 2" in finding["detail"]
    listed = (await house.ask("GET", "/v1/runs?status=queued")).json["runs"]
    assert {row["run_id"] for row in listed} >= {run_id, urgent.json["run_id"]}
    tenant = (await house.ask("GET", "/v1/tenant")).json
    assert (tenant["active"], tenant["queued"], tenant["on_full"]) == (1, 3, "queue")
    (row,) = (await house.ask("GET", "/v1/admin/admission")).json["tenants"]
    assert (row["active"], row["queued"]) == (1, 3)
    (row,) = (await house.ask("GET", "/v1/admin/tenants")).json["tenants"]
    assert (row["queue_max"], row["queue_wait_s"], row["queued"]) == (3, 300, 3)
    decisions = (await house.ask("GET", "/v1/admin/decisions?outcome=queue_full")).json
    assert isinstance(decisions["decisions"], list)

    assert house.metric("stanchion_queue_length", tenant="default") == 3
    await _cancel(house, first)
    job = await house.lease()
    assert job["run_id"] == urgent.json["run_id"]
    await _cancel(house, urgent.json["run_id"])
    assert (await house.lease())["run_id"] == run_id
    replayed = await _start(house, "k")
    assert (replayed.status, replayed.json["status"]) == (200, "running")
    lines = (await house.ask("GET", f"/v1/runs/{run_id}/timeline")).json["entries"]
    assert [line["what"] for line in lines][:2] == ["run_queued", "run_started"]
    waited = house.metric("stanchion_queue_wait_seconds_count", tenant="default")
    assert waited == 2
    # Two runs have ended: from now on there is an estimate.
    assert (await _start(house)).json["estimate_s"] is not None


async def test_a_run_that_waits_shows_what_decides_its_place(house: House) -> None:
    first = await _full(house)
    waits = (await _start(house)).json["run_id"]
    urgent = (await _start(house, priority=9, fairness_key="blue")).json["run_id"]
    shown = [(await house.ask("GET", f"/v1/runs/{each}")).json for each in (urgent, waits, first)]
    assert [(run["position"], run["priority"], run["fairness_key"]) for run in shown] == [
        (1, 9, "blue"),
        (2, 5, ""),
        (None, None, None),
    ]
    (finding,) = (await house.ask("GET", f"/v1/runs/{waits}/why")).json["findings"]
    assert "position 2 in its queue, 1 run ahead: priority 5 (" in finding["detail"]


async def test_why_says_that_no_slot_becomes_free_at_a_cap_of_0(house: House) -> None:
    await _full(house)
    waits = await _start(house)
    assert (await house.ask("PUT", TENANT, {**QUEUES, "max_concurrent_runs": 0})).status == 200
    path = f"/v1/runs/{waits.json['run_id']}/why"
    (finding,) = (await house.ask("GET", path)).json["findings"]
    assert finding["remedy"].startswith("no slot becomes free before an admin raises the cap: ")


async def test_only_runs_that_had_a_slot_count_for_the_estimate(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "BELIEVED_MS", 0)
    first = await _full(house, queue_max=30)
    for _ in range(3):
        await _cancel(house, (await _start(house)).json["run_id"])
    assert (await _start(house)).json["estimate_s"] is None
    await _cancel(house, first)
    assert (await _start(house)).json["estimate_s"] is None
    await _work(house, "work", 1)
    await _work(house, "work", 1)
    holder = await _start(house)
    assert holder.json["status"] != "queued"
    assert (await _start(house)).json["estimate_s"] is not None
    # Single jobs and runs that left the queue, more than are looked at, hide no end of a run.
    for _ in range(21):
        await house.ask("POST", "/v1/jobs", {"topic": "alone"})
        await _cancel(house, (await _start(house)).json["run_id"])
    await _work(house, "alone", 21)
    assert (await _start(house)).json["estimate_s"] is not None


async def _work(house: House, topic: str, count: int) -> None:
    """Lease so many jobs, and succeed with them."""
    wish = {"worker_id": "w", "topics": [topic], "max_jobs": count, "wait_s": 2}
    jobs = (await house.ask("POST", "/v1/worker/lease", wish)).json["jobs"]
    assert len(jobs) == count
    results = [
        {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded", "output": {}}
        for job in jobs
    ]
    body = {"worker_id": "w", "results": results}
    assert (await house.ask("POST", "/v1/worker/results", body)).status == 200
    await _ended(house, str(jobs[0]["run_id"]))


async def test_a_run_times_out_in_the_queue_and_frees_its_key(house: House) -> None:
    await _full(house, queue_wait_s=0.1)
    queued = await _start(house, "k")
    run = await _ended(house, queued.json["run_id"])
    assert (run["status"], run["error"]["code"]) == ("timed_out", "queue_timeout")
    assert run["error"]["message"] == "no slot was free within the tenant's queue_wait_s of 0.1 s"
    again = await _start(house, "k")
    assert (again.status, again.headers.get("idempotency-replayed")) == (202, None)
    assert again.json["run_id"] != queued.json["run_id"]


async def test_a_raised_cap_starts_those_that_wait_within_a_second(house: House) -> None:
    await _full(house)
    waits = [(await _start(house)).json["run_id"] for _ in range(3)]
    await house.lease()
    await house.ask("PUT", TENANT, {**QUEUES, "max_concurrent_runs": 4})
    async with asyncio.timeout(1):
        leased = [(await house.lease())["run_id"] for _ in waits]
    assert sorted(map(str, leased)) == sorted(waits)


async def test_reruns_and_schedules_queue_alike(house: House) -> None:
    first = await _full(house)
    second = (await _start(house)).json["run_id"]
    await _cancel(house, first)
    await _ended(house, first)
    rerun = await house.ask("POST", f"/v1/runs/{first}/rerun", {})
    assert (rerun.status, rerun.json["status"], rerun.json["position"]) == (202, "queued", 1)
    spec = {"workflow_id": "one-step", "every_s": 3600}
    assert (await house.ask("PUT", "/v1/schedules/hourly", spec)).status == 200
    triggered = await house.ask("POST", "/v1/schedules/hourly/trigger", {})
    assert (triggered.status, triggered.json["position"]) == (202, 2)
    (row,) = (await house.ask("GET", "/v1/schedules/hourly")).json["runs"]
    assert row | {"tick": ""} == {
        "tick": "",
        "run_id": triggered.json["run_id"],
        "triggered": True,
        "status": "queued",
    }
    await _cancel(house, second)
    assert (await house.lease())["run_id"] in {second, rerun.json["run_id"]}


async def test_bad_wishes_are_422_and_older_replicas_409(house: House) -> None:
    await house.start()
    for body, path in (
        ({"priority": 10}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"fairness_key": "x" * 65}, "fairness_key"),
        ({"fairness_key": "\x00"}, "fairness_key"),
        ({"fairness_key": "a\nb\x1b[31m"}, "fairness_key"),
        ({"fairness_key": "a\u202eb"}, "fairness_key"),
        ({"on_full": "maybe"}, "on_full"),
        ({"on_full": "queue"}, "on_full"),
    ):
        refused = await _start(house, **body)
        assert (refused.status, refused.json["code"]) == (422, "invalid_request"), body
        assert refused.json["errors"][0]["path"] == path
    for config in ({"queue_max": 0}, {"queue_wait_s": 0}, {"on_full": "drop"}):
        assert (await house.ask("PUT", TENANT, config)).status == 422
    older_store(house)
    refused = await house.ask("PUT", TENANT, QUEUES)
    assert (refused.status, refused.json["code"]) == (409, "upgrade_unfinished")


async def test_defaults_stay_out_of_the_fingerprint(house: House) -> None:
    await house.start()
    plain = await _start(house, "k")
    spelled = await _start(house, "k", priority=5, fairness_key="", on_full=None)
    assert (spelled.status, spelled.json["run_id"]) == (200, plain.json["run_id"])
    other = await _start(house, "k", priority=6)
    assert other.json["code"] == "idempotency_mismatch"
