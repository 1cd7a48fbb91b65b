"""The worker protocol over HTTP."""

from __future__ import annotations

import asyncio
import time

import msgspec

from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX
from stanchion.gateway import GatewayOptions
from stanchion.wire.worker import LeaseRequest
from tests.gateway.asgi import opened
from tests.gateway.house import ADMIN, House, bearer, opened_house

LEASE = "/v1/worker/lease"


def asked(wait_s: float = 0, **more: object) -> dict[str, object]:
    return {"worker_id": "worker-1", "topics": ["work"], "wait_s": wait_s, **more}


async def test_a_lease_says_all_that_a_worker_needs(house: House) -> None:
    run_id = await house.start(tenant="acme")
    job = await house.lease()
    assert job["job_id"] == f"{run_id}:only@1"
    assert (job["tenant"], job["run_id"], job["step_id"]) == ("acme", run_id, "only")
    assert (job["topic"], job["attempt"], job["delivery"]) == ("work", 1, 1)
    assert (job["input"], job["lease_ttl_ms"]) == ({}, 30_000)
    assert isinstance(job["fence"], int)


async def test_a_long_poll_ends_with_the_first_job_and_says_how_long_it_waited(
    house: House,
) -> None:
    async with opened(house.app, "POST", LEASE, asked(wait_s=60)) as feed:
        await house.has_under_way("waits")
        assert house.metric("stanchion_http_under_way", kind="requests") == 0
        await house.start()
        answer = await feed.answer()
    assert len(answer.json["jobs"]) == 1
    assert answer.json["waited_ms"] > 0


async def test_a_poll_without_work_ends_after_its_time(house: House) -> None:
    began = time.perf_counter()
    answer = await house.ask("POST", LEASE, asked(wait_s=0.2))
    assert answer.json["jobs"] == []
    assert time.perf_counter() - began >= 0.2


def test_workers_that_wait_for_the_same_topics_share_their_texts() -> None:
    body = msgspec.json.encode(asked(wait_s=60, topics=["work.images", "work.texts"]))
    one, other = (msgspec.json.decode(body, type=LeaseRequest) for _ in range(2))
    assert one.topics == ("work.images", "work.texts")
    assert [*map(id, one.topics)] == [*map(id, other.topics)]


async def test_a_worker_that_hangs_up_waits_no_more_and_takes_no_job(house: House) -> None:
    async with opened(house.app, "POST", LEASE, asked(wait_s=60)) as feed:
        await house.has_under_way("waits")
        feed.hang_up()
        async with asyncio.timeout(5):
            await feed.task
    assert house.metric("stanchion_http_under_way", kind="waits") == 0
    await house.start()
    assert (await house.lease())["delivery"] == 1


async def test_a_long_poll_ends_when_the_server_drains(house: House) -> None:
    async with opened(house.app, "POST", LEASE, asked(wait_s=60)) as feed:
        await house.has_under_way("waits")
        house.app.drain()
        assert (await feed.answer()).json["jobs"] == []


async def test_one_wait_too_many_is_refused() -> None:
    async with opened_house(GatewayOptions(waits_max=0)) as house:
        answer = await house.ask("POST", LEASE, asked(wait_s=1))
        assert (answer.status, answer.code) == (503, "overloaded")
        assert (await house.ask("POST", LEASE, asked(wait_s=0))).status == 200
        assert house.metric("stanchion_http_under_way", kind="requests") == 0


async def test_while_draining_no_job_is_handed_out_but_results_are_taken(house: House) -> None:
    await house.start()
    job = await house.lease()
    house.app.drain()
    refused = await house.ask("POST", LEASE, asked())
    assert (refused.status, refused.code) == (503, "draining")
    start = await house.ask("POST", "/v1/workflows/one-step/runs", {})
    assert (start.status, start.code) == (503, "draining")
    ref = {"job_id": job["job_id"], "fence": job["fence"]}
    renewed = await house.ask("POST", "/v1/worker/renew", {"worker_id": "w", "leases": [ref]})
    assert renewed.json["renewed"] == [job["job_id"]]
    body = {"worker_id": "worker-1", "results": [{**ref, "status": "succeeded"}]}
    sent = await house.ask("POST", "/v1/worker/results", body)
    assert sent.json["accepted"] == [job["job_id"]]


async def test_results_are_judged_one_by_one(house: House) -> None:
    run_id = await house.start()
    job = await house.lease()
    good = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    stale = {**good, "fence": 1}
    strange = {**good, "job_id": f"{run_id}:only@9"}
    body = {"worker_id": "worker-1", "results": [stale, strange, good]}
    answer = await house.ask("POST", "/v1/worker/results", body)
    assert answer.json["accepted"] == [job["job_id"]]
    assert answer.json["rejected"] == [
        {"job_id": job["job_id"], "code": "stale_fence"},
        {"job_id": f"{run_id}:only@9", "code": "unknown_job"},
    ]
    again = await house.ask(
        "POST", "/v1/worker/results", {"worker_id": "worker-1", "results": [good]}
    )
    assert again.json == {"accepted": [job["job_id"]], "rejected": []}


async def test_the_second_of_two_results_that_contradict_each_other_is_rejected(
    house: House,
) -> None:
    run_id = await house.start()
    job = await house.lease()
    good = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded", "output": 1}
    contrary = {**good, "status": "failed", "output": None}
    stale = [{**good, "fence": 1}, {**contrary, "fence": 1}]
    body = {"worker_id": "worker-1", "results": stale}
    refused = {"job_id": job["job_id"], "code": "stale_fence"}
    answer = await house.ask("POST", "/v1/worker/results", body)
    assert answer.json == {"accepted": [], "rejected": [refused] * 2}
    body["results"] = [good, contrary, good]
    answer = await house.ask("POST", "/v1/worker/results", body)
    assert answer.json == {
        "accepted": [job["job_id"]] * 2,
        "rejected": [{"job_id": job["job_id"], "code": "already_finished"}],
    }
    run = (await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json
    assert (run["status"], run["steps"]["only"]["output"]) == ("succeeded", 1)


async def test_a_fault_in_one_result_names_its_place_and_takes_none(house: House) -> None:
    await house.start()
    job = await house.lease()
    good = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    bad = {**good, "output": {"x": 2**70}}
    body = {"worker_id": "worker-1", "results": [good, bad]}
    answer = await house.ask("POST", "/v1/worker/results", body)
    assert answer.status == 422
    assert answer.json["errors"][0]["path"] == "results[1].output"
    job_now = (await house.ask("GET", f"/v1/jobs/{job['job_id']}")).json
    assert (job_now["status"], job_now["worker_id"]) == ("leased", "worker-1")
    assert 0 < job_now["lease_ends_in_ms"] <= 30_000


async def test_what_waits_for_a_worker_is_counted_by_topic(house: House) -> None:
    assert (await house.ask("GET", "/v1/worker/topics")).json == {"ready": {}}
    for topic, tenant in (("b", "first"), ("a", "first"), ("b", "second")):
        await house.ask("POST", "/v1/jobs", {"topic": topic}, tenant=tenant)
    assert (await house.ask("GET", "/v1/worker/topics")).json == {"ready": {"a": 1, "b": 2}}
    await house.lease(topic="b")
    assert (await house.ask("GET", "/v1/worker/topics")).json == {"ready": {"a": 1, "b": 1}}


async def test_a_message_that_is_too_long_is_cut_and_not_refused(house: House) -> None:
    run_id = await house.start()
    job = await house.lease()
    result = {
        "job_id": job["job_id"],
        "fence": job["fence"],
        "status": "failed",
        "error": {"message": "x" * 10_000, "code": "Boom", "retryable": False},
    }
    sent = await house.ask(
        "POST", "/v1/worker/results", {"worker_id": "worker-1", "results": [result]}
    )
    assert sent.json["accepted"] == [job["job_id"]]
    run = (await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json
    assert run["error"]["code"] == "Boom"
    assert len(run["error"]["message"]) == ERROR_MESSAGE_CHARS_MAX


async def test_a_key_for_all_tenants_serves_all_of_them_and_one_for_one_only_that() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        for tenant in ("first", "second"):
            await house.start(key=await house.make_key("runner", tenant))
        only = await house.make_key("worker", "second")
        every = await house.make_key("worker", "*")
        got = await house.ask("POST", LEASE, asked(max_jobs=10), key=only)
        assert [job["tenant"] for job in got.json["jobs"]] == ["second"]
        rest = await house.ask("POST", LEASE, asked(max_jobs=10), key=every)
        assert [job["tenant"] for job in rest.json["jobs"]] == ["first"]


async def test_a_key_that_is_revoked_while_its_holder_waits_gets_no_job() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        key = await house.make_key("worker", "*")
        wanted = {"worker_id": "w", "topics": ["work"], "wait_s": 30}
        async with opened(house.app, "POST", "/v1/worker/lease", wanted, [bearer(key)]) as feed:
            await asyncio.sleep(0.05)
            await house.ask("DELETE", f"/v1/admin/keys/{key.split('_')[1]}", key=ADMIN)
            answer = await asyncio.wait_for(feed.answer(), 5)
        assert answer.status == 401


async def test_the_order_of_an_answer_does_not_tell_which_foreign_jobs_exist(
    guarded_house: House,
) -> None:
    house = guarded_house
    runner = await house.make_key("runner", "acme")
    for _ in range(2):
        await house.start(key=runner)
    worker, stranger = await house.make_key("worker", "acme"), await house.make_key("worker", "x")
    first, second = [await house.lease(key=worker) for _ in range(2)]
    ghosts = [f"{job['run_id']}:ghost@1" for job in (first, second)]
    names = [ghosts[0], first["job_id"], "nonsense", second["job_id"], ghosts[1]]
    refs: list[dict[str, object]] = [{"job_id": name, "fence": first["fence"]} for name in names]
    asked = {"worker_id": "w", "leases": refs}
    renewed = await house.ask("POST", "/v1/worker/renew", asked, key=stranger)
    unknown = dict.fromkeys(names, "unknown_job")
    assert renewed.json == {"renewed": [], "lost": names, "reasons": unknown}
    results = [{**each, "status": "succeeded"} for each in refs]
    sent = {"worker_id": "w", "results": results}
    answer = await house.ask("POST", "/v1/worker/results", sent, key=stranger)
    rejected = [{"job_id": name, "code": "unknown_job"} for name in names]
    assert answer.json == {"accepted": [], "rejected": rejected}
    assert house.store.calls["job"] == 0  # nothing is loaded to learn whose job it is


async def test_progress_is_shown_on_the_job_and_on_the_runs_step(house: House) -> None:
    run_id = await house.start()
    job = await house.lease()

    async def renew(progress: object) -> int:
        ref = {"job_id": job["job_id"], "fence": job["fence"], "progress": progress}
        asked = {"worker_id": "worker-1", "leases": [ref]}
        return (await house.ask("POST", "/v1/worker/renew", asked)).status

    async def shown() -> list[object]:
        at_job = await house.ask("GET", f"/v1/jobs/{job['job_id']}")
        at_run = await house.ask("GET", f"/v1/runs/{run_id}")
        return [at_job.json["progress"], at_run.json["steps"]["only"]["progress"]]

    assert await shown() == [None, None]
    assert await renew({"pages": 3}) == 200
    assert await shown() == [{"pages": 3}] * 2
    assert await renew("x" * 4_094) == 200
    assert await renew("x" * 4_095) == 422
    assert await shown() == ["x" * 4_094] * 2
    result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    await house.ask("POST", "/v1/worker/results", {"worker_id": "w", "results": [result]})
    assert await shown() == [None, None]


# ── Renewals that wait ───────────────────────────────────────────────────────────────────────────

RENEW = "/v1/worker/renew"


def held_call(*jobs: dict[str, object], wait_s: float = 60) -> dict[str, object]:
    refs = [{"job_id": job["job_id"], "fence": job["fence"]} for job in jobs]
    return {"worker_id": "worker-1", "leases": refs, "wait_s": wait_s}


async def test_a_held_renewal_ends_when_the_run_is_cancelled(house: House) -> None:
    first, second = await house.start(), await house.start()
    jobs = [await house.lease(), await house.lease()]
    async with opened(house.app, "POST", RENEW, held_call(*jobs)) as feed:
        await house.has_under_way("waits")
        await house.ask("POST", f"/v1/runs/{second}/cancel", {})
        answer = await feed.answer()
    lost = f"{second}:only@1"
    assert answer.json == {
        "renewed": [f"{first}:only@1"],
        "lost": [lost],
        "reasons": {lost: "cancelled"},
    }
    assert house.store.calls["renew_jobs"] == 1
    again = await house.ask("POST", RENEW, held_call(*jobs))
    assert again.json == answer.json, "at once, if one is lost already"


async def test_a_held_renewal_answers_within_a_third_of_the_term() -> None:
    async with opened_house(job_lease_ttl_ms=900) as house:
        await house.start()
        job = await house.lease()
        began = time.perf_counter()
        answer = await house.ask("POST", RENEW, held_call(job))
        assert 0.25 <= time.perf_counter() - began < 0.8
        assert answer.json == {"renewed": [job["job_id"]], "lost": [], "reasons": {}}
        began = time.perf_counter()
        await house.ask("POST", RENEW, held_call(job, wait_s=0.1))
        assert time.perf_counter() - began >= 0.098  # Timers of a loop have whole milliseconds.


async def test_a_held_renewal_ends_when_the_server_drains(house: House) -> None:
    await house.start()
    job = await house.lease()
    async with opened(house.app, "POST", RENEW, held_call(job)) as feed:
        await house.has_under_way("waits")
        house.app.drain()
        assert (await feed.answer()).json["renewed"] == [job["job_id"]]
    at_once = await house.ask("POST", RENEW, held_call(job))
    assert at_once.json == {"renewed": [job["job_id"]], "lost": [], "reasons": {}}


async def test_a_worker_that_hangs_up_a_held_renewal_keeps_its_lease(house: House) -> None:
    await house.start()
    job = await house.lease()
    async with opened(house.app, "POST", RENEW, held_call(job)) as feed:
        await house.has_under_way("waits")
        feed.hang_up()
        async with asyncio.timeout(5):
            await feed.task
    assert house.metric("stanchion_http_under_way", kind="waits") == 0
    answer = await house.ask("POST", RENEW, held_call(job, wait_s=0))
    assert answer.json == {"renewed": [job["job_id"]], "lost": [], "reasons": {}}


async def test_a_renewal_says_why_each_lease_is_lost(house: House) -> None:
    for _ in range(3):
        await house.start()
    done, stale, cancelled = [await house.lease() for _ in range(3)]
    result = {"job_id": done["job_id"], "fence": done["fence"], "status": "succeeded"}
    await house.ask("POST", "/v1/worker/results", {"worker_id": "w", "results": [result]})
    await house.ask("POST", f"/v1/runs/{cancelled['run_id']}/cancel", {})
    stale["fence"] = 1
    unknown: dict[str, object] = {"job_id": "nonsense", "fence": 1}
    jobs = [done, stale, cancelled, unknown]
    answer = await house.ask("POST", RENEW, held_call(*jobs))
    assert answer.json["lost"] == [job["job_id"] for job in jobs]
    assert list(answer.json["reasons"].values()) == [
        *("stale_fence", "stale_fence", "cancelled", "unknown_job")
    ]


async def test_a_renewal_waits_for_a_minute_at_most(house: House) -> None:
    for wait_s in (-1, 61, "long"):
        body: dict[str, object] = {"worker_id": "w", "leases": [], "wait_s": wait_s}
        answer = await house.ask("POST", RENEW, body)
        assert (answer.status, answer.json["errors"][0]["path"]) == (422, "wait_s")
    nothing = await house.ask("POST", RENEW, {"worker_id": "w", "leases": [], "wait_s": 60})
    assert nothing.json == {"renewed": [], "lost": [], "reasons": {}}
