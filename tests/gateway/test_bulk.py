"""Bulk actions over HTTP: each does what the request about one run does, to all that fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stanchion.core.bulk import BULKS_MAX
from stanchion.core.model import Topic
from tests.gateway.house import ADMIN, House, opened_house

ASK = {"steps": {"ask": {"approval": {"message": "Now?"}}}}


async def begin(house: House, count: int, workflow: str = "one-step") -> list[str]:
    """So many runs with the label ``in:bulk``, and one without."""
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": None})
    await house.start()
    await house.ask("PUT", "/v1/workflows/ask", ASK)
    path, body = f"/v1/workflows/{workflow}/runs", {"labels": {"in": "bulk"}}
    await house.ask("POST", path)
    started = [await house.ask("POST", path, body) for _ in range(count)]
    return [each.json["run_id"] for each in started]


async def act(house: House, action: str, **members: Any) -> str:  # noqa: ANN401 - any member
    asked = {"action": action, "filter": {"label": ["in:bulk"]}, "rate_per_s": 1000, **members}
    began = await house.ask("POST", "/v1/bulk", asked)
    assert began.status == 200, began.body
    return str(began.json["bulk_id"])


async def ended(house: House, bulk_id: str) -> dict[str, Any]:
    async with asyncio.timeout(8):
        while True:
            found = await house.ask("GET", f"/v1/bulk/{bulk_id}")
            if found.json["status"] != "running":
                return dict(found.json)
            await asyncio.sleep(0.02)


async def statuses(house: House, run_ids: list[str]) -> set[str]:
    return {(await house.ask("GET", f"/v1/runs/{each}")).json["status"] for each in run_ids}


async def test_runs_are_cancelled_and_run_again_each_once(house: House) -> None:
    run_ids = await begin(house, 5)
    dry = {"action": "cancel", "filter": {"label": ["in:bulk"]}, "dry_run": True}
    preview = await house.ask("POST", "/v1/bulk", dry, tenant="*")
    assert preview.json == {"matched": 5, "by_tenant": {"default": 5}}
    assert await statuses(house, run_ids) == {"running"}
    bulk_id = await act(house, "cancel")
    bulk = await ended(house, bulk_id)
    assert (bulk["matched"], bulk["done"], bulk["failed"], bulk["errors"]) == (5, 5, 0, [])
    assert (bulk["status"], bulk["filter"]) == ("finished", {"label": ["in:bulk"]})
    assert await statuses(house, run_ids) == {"cancelled"}
    again = await ended(house, await act(house, "rerun"))
    assert (again["matched"], again["done"]) == (5, 5)
    for run_id in run_ids:
        (row,) = (await house.ask("GET", f"/v1/runs?rerun_of={run_id}")).json["runs"]
        assert row["labels"] == {"in": "bulk"}
    # The reruns are still running, and the first ones cannot be cancelled twice.
    both = await ended(house, await act(house, "rerun"))
    assert (both["matched"], both["done"], both["failed"]) == (10, 5, 5)
    assert {each["code"] for each in both["errors"]} == {"conflict"}
    bulks = (await house.ask("GET", "/v1/bulk?limit=2")).json
    assert [each["action"] for each in bulks["bulks"]] == ["rerun", "rerun"]
    older = (await house.ask("GET", f"/v1/bulk?cursor={bulks['cursor']}")).json
    assert [each["bulk_id"] for each in older["bulks"]] == [bulk_id]
    entries = (await house.ask("GET", "/v1/admin/audit?action=bulk.start")).json["entries"]
    assert [each["after"]["action"] for each in entries] == ["rerun", "rerun", "cancel"]


@pytest.mark.parametrize(("action", "after"), [("approve", "succeeded"), ("reject", "failed")])
async def test_every_step_that_waits_is_decided(house: House, action: str, after: str) -> None:
    run_ids = await begin(house, 3, "ask")
    bulk = await ended(house, await act(house, action))
    assert (bulk["matched"], bulk["done"]) == (3, 3)
    assert await statuses(house, run_ids) == {after}
    # The audit log has the entries that decisions about single runs make, with the bulk's id.
    single = (await house.ask("POST", "/v1/workflows/ask/runs")).json["run_id"]
    await house.ask("POST", f"/v1/runs/{single}/steps/ask/{action}", {})
    path = f"/v1/admin/audit?action=step.{action}"
    by_hand, *by_bulk = (await house.ask("GET", path)).json["entries"]
    assert by_hand["subject"] == f"run/{single}/step/ask"
    assert {each["subject"] for each in by_bulk} == {f"run/{each}/step/ask" for each in run_ids}
    for each in by_bulk:
        assert each["before"] == by_hand["before"]
        assert each["after"] == by_hand["after"] | {"bulk": bulk["bulk_id"]}


@pytest.mark.parametrize(("action", "after"), [("replay", "running"), ("discard", "failed")])
async def test_dead_letters_are_taken(house: House, action: str, after: str) -> None:
    run_ids = await begin(house, 2)
    store = house.services.store
    async with asyncio.timeout(5):
        # All four runs; the engine's own reconciler may be first, and gives a job back.
        while len((await store.list_dead_letters(None)).items) < 4:
            await store.lease_jobs("w", [Topic("work")], max_jobs=9, ttl_ms=1)
            await store.expire_jobs(limit=10, max_deliveries=1)
    bulk = await ended(house, await act(house, action))
    assert (bulk["matched"], bulk["done"]) == (2, 2), bulk
    assert await statuses(house, run_ids) == {after}
    none_left = await ended(house, await act(house, action))
    assert (none_left["failed"], none_left["errors"][0]["code"]) == (2, "not_found")


async def test_dead_letters_of_runs_that_have_ended_are_not_replayed(house: House) -> None:
    run_ids = await begin(house, 1)
    store = house.services.store
    async with asyncio.timeout(5):
        # All three runs; the engine's own reconciler may be first, and gives a job back.
        while len((await store.list_dead_letters(None)).items) < 3:
            await store.lease_jobs("w", [Topic("work")], max_jobs=9, ttl_ms=1)
            await store.expire_jobs(limit=10, max_deliveries=1)
    await house.ask("POST", f"/v1/runs/{run_ids[0]}/cancel")
    bulk = await ended(house, await act(house, "replay"))
    assert (bulk["failed"], bulk["errors"][0]["code"]) == (1, "conflict")


async def test_a_full_tenant_is_tried_again_and_a_stop_is_obeyed(house: House) -> None:
    run_ids = await begin(house, 4)
    await ended(house, await act(house, "cancel", filter={}))
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": 2})
    bulk_id = await act(house, "rerun")
    async with asyncio.timeout(8):
        while (now := (await house.ask("GET", f"/v1/bulk/{bulk_id}")).json)["done"] < 2:  # noqa: ASYNC110 - as a user would
            await asyncio.sleep(0.02)
    assert (now["done"], now["failed"], now["status"]) == (2, 0, "running")
    stopped = await house.ask("DELETE", f"/v1/bulk/{bulk_id}")
    assert (stopped.status, stopped.json["status"]) == (200, "stopped")
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": None})
    listed = [await house.ask("GET", f"/v1/runs?rerun_of={each}") for each in run_ids]
    assert sum(len(each.json["runs"]) for each in listed) == 2
    assert (await ended(house, bulk_id))["done"] == 2


async def test_a_tenant_has_a_bounded_number_of_bulk_actions_at_a_time(house: House) -> None:
    await begin(house, 20)
    asked = {"action": "cancel", "filter": {"label": ["in:bulk"]}, "rate_per_s": 0.1}
    began = await asyncio.gather(
        *(house.ask("POST", "/v1/bulk", asked) for _ in range(BULKS_MAX + 2))
    )
    assert sorted(each.status for each in began) == [200] * BULKS_MAX + [429] * 2
    (refused, _) = (each.json for each in began if each.status == 429)
    assert refused["code"] == "tenant_overloaded"
    assert refused["detail"] == "10 bulk actions of the tenant are running"
    running = [each.json["bulk_id"] for each in began if each.status == 200]
    for bulk_id in running:
        await house.ask("DELETE", f"/v1/bulk/{bulk_id}")
    again = [await house.ask("POST", "/v1/bulk", asked)]
    while again[-1].status != 200 and len(again) < 400:
        await asyncio.sleep(0.02)
        again.append(await house.ask("POST", "/v1/bulk", asked))
    assert again[-1].status == 200


async def test_what_cannot_be_is_refused(house: House) -> None:
    for body, path in (
        ({"action": "cancel"}, "filter"),
        ({"action": "delete", "filter": {}}, "action"),
        ({"action": "cancel", "filter": {"labels": ["a:b"]}}, "filter.labels"),
        ({"action": "cancel", "filter": {"label": "a:b"}}, "filter.label"),
        ({"action": "cancel", "filter": {}, "rate_per_s": 0}, "rate_per_s"),
        ({"action": "cancel", "filter": {"status": []}}, "filter.status"),
        ({"action": "cancel", "filter": {"workflow_id": None}}, "filter.workflow_id"),
        ({"action": "cancel", "filter": {"since": None}}, "filter.since"),
        ({"action": "cancel", "filter": {"until": None}}, "filter.until"),
        ({"action": "cancel", "filter": {"rerun_of": None}}, "filter.rerun_of"),
        ({"action": "cancel", "filter": {"label": [], "status": ["running"]}}, "filter.label"),
    ):
        refused = await house.ask("POST", "/v1/bulk", body)
        assert (refused.status, refused.json["errors"][0]["path"]) == (422, path)
    empty = await house.ask("POST", "/v1/bulk", {"action": "cancel", "filter": {}})
    assert (empty.json["matched"], empty.json["status"]) == (0, "finished")
    assert (await house.ask("GET", "/v1/bulk/nonsense")).status == 404
    assert (await house.ask("DELETE", "/v1/bulk/nonsense")).status == 404


async def test_the_same_idempotency_key_begins_one_bulk_action(house: House) -> None:
    await begin(house, 2)
    body = {"action": "cancel", "filter": {"label": ["in:bulk"]}, "rate_per_s": 1000}
    headers = [("Idempotency-Key", "k1")]
    both = await asyncio.gather(
        *(house.ask("POST", "/v1/bulk", body, headers=headers) for _ in range(2))
    )
    (bulk_id,) = {each.json["bulk_id"] for each in both}
    done = await ended(house, bulk_id)
    assert (done["matched"], done["done"]) == (2, 2)
    again = await house.ask("POST", "/v1/bulk", body, headers=headers)
    assert (again.json, again.headers["idempotency-replayed"]) == (done, "true")
    assert len((await house.ask("GET", "/v1/bulk")).json["bulks"]) == 1
    other = await house.ask("POST", "/v1/bulk", body | {"action": "rerun"}, headers=headers)
    assert (other.status, other.code) == (422, "idempotency_mismatch")
    elsewhere = await house.ask("POST", "/v1/bulk", body, headers=headers, tenant="other")
    assert elsewhere.json["bulk_id"] != bulk_id
    assert "idempotency-replayed" not in elsewhere.headers


async def test_a_runner_cannot_touch_dead_letters_nor_other_tenants() -> None:
    from stanchion.gateway import GatewayOptions  # noqa: PLC0415 - beside its one use

    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        runner = await house.make_key("runner", "acme")
        refused = await house.ask(
            "POST", "/v1/bulk", {"action": "discard", "filter": {}}, key=runner
        )
        assert (refused.status, refused.code) == (403, "forbidden")
        everywhere = {"action": "cancel", "filter": {}}
        others = await house.ask("POST", "/v1/bulk", everywhere, key=ADMIN, tenant="*")
        path = f"/v1/bulk/{others.json['bulk_id']}"
        assert (await house.ask("GET", path, key=runner)).status == 404
        assert (await house.ask("GET", "/v1/bulk", key=runner)).json["bulks"] == []
        assert (await house.ask("GET", path, key=ADMIN)).json["tenant"] == "*"


async def test_a_bulk_action_ends_with_its_key() -> None:
    from stanchion.gateway import GatewayOptions  # noqa: PLC0415 - beside its one use

    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        limits = {"max_concurrent_runs": None}
        await house.ask("PUT", "/v1/admin/tenants/acme", limits, key=ADMIN)
        runner = await house.make_key("runner", "acme")
        run_ids = {await house.start(key=ADMIN, tenant="acme") for _ in range(4)}
        slow = {"action": "cancel", "filter": {}, "rate_per_s": 0.1}
        began = await house.ask("POST", "/v1/bulk", slow, key=runner)
        path = f"/v1/bulk/{began.json['bulk_id']}"
        await house.ask("DELETE", f"/v1/admin/keys/{runner.split('_')[1]}", key=ADMIN)
        async with asyncio.timeout(8):
            while True:
                bulk = (await house.ask("GET", path, key=ADMIN)).json
                if bulk["status"] != "running":
                    break
                await asyncio.sleep(0.02)
        assert (bulk["status"], bulk["done"] + bulk["failed"]) == ("finished", 4)
        failed = {each["run_id"] for each in bulk["errors"]}
        assert len(failed) == bulk["failed"] >= 3
        assert failed <= run_ids
        codes = {(each["code"], each["detail"].rpartition(" ")[2]) for each in bulk["errors"]}
        assert codes == {("unauthenticated", "revoked")}


async def test_a_cancel_skips_runs_that_have_ended(house: House) -> None:
    run_ids = await begin(house, 3, "ask")
    for verb in ("approve", "reject"):
        await house.ask("POST", f"/v1/runs/{run_ids.pop()}/steps/ask/{verb}", {})
    bulk = await ended(house, await act(house, "cancel"))
    assert [bulk[name] for name in ("matched", "done", "failed", "skipped")] == [3, 3, 0, 2]
    assert (bulk["errors"], await statuses(house, run_ids)) == ([], {"cancelled"})
