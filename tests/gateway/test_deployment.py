"""Replicas, workers and reports of drills over HTTP."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from stanchion import __version__
from stanchion.core.json_value import JsonObject
from stanchion.gateway import GatewayOptions
from tests.gateway.house import ADMIN, House, opened_house


async def test_a_replica_is_listed_with_all_members(house: House) -> None:
    answer = await house.ask("GET", "/v1/admin/replicas")
    (row,) = answer.json["replicas"]
    started_at, seen_at = (
        datetime.fromisoformat(row.pop(each)) for each in ("started_at", "seen_at")
    )
    assert started_at <= seen_at
    assert abs(row.pop("clock_offset_ms")) < 1_000
    assert row == {
        "replica": "house",
        "version": __version__,
        "settings_revision": 0,
        "store": "ok",
        "locks": "ok",
        "bus": "ok",
        "runs_held": 0,
    }
    assert answer.json["cursor"] is None


async def test_a_replica_that_does_not_report_is_unknown(house: House) -> None:
    store = house.services.store
    long_ago: JsonObject = {"version": "0.1", "started_at": 0, "store": "ok"}
    await store.report_replica("gone", long_ago, keep_ms=10**9)
    board = vars(vars(house.store)["real"])["_state"].summaries
    board.report("gone", long_ago, keep_ms=10**9, now=await store.now() - 16_000)
    page = await house.ask("GET", "/v1/admin/replicas?limit=1")
    (gone,) = page.json["replicas"]
    assert (gone["replica"], gone["store"], gone["locks"]) == ("gone", "unknown", "unknown")
    cursor = page.json["cursor"]
    (here,) = (await house.ask("GET", f"/v1/admin/replicas?cursor={cursor}")).json["replicas"]
    assert (here["replica"], here["store"]) == ("house", "ok")


async def test_workers_are_listed_for_those_who_may_see_them(guarded_house: House) -> None:
    house = guarded_house
    keys = {tenant: await house.make_key("worker", tenant) for tenant in ("a", "b", "*")}
    for tenant, key in keys.items():
        asked = {"worker_id": f"w-{tenant}", "topics": ["y", "x"], "wait_s": 0}
        headers = [("User-Agent", "stanchion/0.2.0")]
        await house.ask("POST", "/v1/worker/lease", asked, key=key, headers=headers)
    everyone = (await house.ask("GET", "/v1/admin/workers", key=ADMIN)).json["workers"]
    assert [each["worker_id"] for each in everyone] == ["w-*", "w-a", "w-b"]
    assert everyone[1].pop("last_seen_at")
    assert everyone[1] == {
        "worker_id": "w-a",
        "tenant": "a",
        "topics": ["x", "y"],
        "jobs": 0,
        "version": "0.2.0",
    }
    operator = await house.make_key("operator", "b")
    own = (await house.ask("GET", "/v1/admin/workers", key=operator)).json["workers"]
    assert [each["worker_id"] for each in own] == ["w-b"]
    # Workers for all tenants serve a tenant too; only a key for all tenants sees them.
    served = (await house.ask("GET", "/v1/admin/workers", key=ADMIN, tenant="b")).json["workers"]
    assert [each["worker_id"] for each in served] == ["w-*", "w-b"]
    page = await house.ask("GET", "/v1/admin/workers?limit=2", key=ADMIN, tenant="*")
    rest = await house.ask("GET", f"/v1/admin/workers?cursor={page.json['cursor']}", key=ADMIN)
    assert [each["worker_id"] for each in rest.json["workers"]] == ["w-b"]


async def test_the_jobs_of_a_worker_are_counted(house: House) -> None:
    await house.start()
    job = await house.lease()
    (row,) = (await house.ask("GET", "/v1/admin/workers")).json["workers"]
    assert (row["worker_id"], row["tenant"], row["jobs"]) == ("worker-1", "*", 1)
    result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    body = {"worker_id": "worker-1", "results": [result]}
    await house.ask("POST", "/v1/worker/results", body)
    (row,) = (await house.ask("GET", "/v1/admin/workers")).json["workers"]
    assert row["jobs"] == 0


async def test_drift_is_shown_repaired_and_remembered(house: House) -> None:
    await house.start(tenant="acme")
    account = vars(vars(house.store)["real"])["_state"].account("acme")
    account.active += 1
    for _ in range(2):
        dry = await house.ask("POST", "/v1/admin/drift?dry_run=true")
        assert dry.json["drifted"] == 1
        assert account.active == 2
    done = await house.ask("POST", "/v1/admin/drift")
    assert done.json["checked"] == 1
    assert done.json["repaired"] == [{"tenant": "acme", "counted": 2, "true": 1}]
    assert account.active == 1
    assert (await house.ask("GET", "/v1/admin/drift")).json == done.json
    assert (await house.ask("POST", "/v1/admin/drift?dry=1")).status == 422
    assert (await house.ask("POST", "/v1/admin/drift?dry_run=maybe")).status == 422
    assert (await house.ask("POST", "/v1/admin/drift", {"x": 1})).status == 422


async def test_reports_of_drills_are_read_from_the_directory(tmp_path: Path) -> None:
    promise = {"id": "a", "says": "it holds", "measured": "3", "holds": True}
    for name, began in (
        ("retry", "2026-08-01T10:00:00+00:00"),
        ("renewal", "2026-08-02T10:00:00Z"),
    ):
        report = {
            "drill": name,
            "verdict": "pass",
            "seed": 7,
            "started_at": began,
            "duration_s": 3.5,
            "environment": {},
            "promises": [promise],
            "figures": {},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(msgspec.json.encode(report))
    (tmp_path / "retry" / "charts.json").write_text('[{"type": "lines"}]', encoding="utf-8")
    for name, text in (("broken", "{"), ("naive", '{"started_at": "2026-08-01T10:00:00"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(text, encoding="utf-8")
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "report.json").write_bytes(b'{"drill": "\xff"}')
    async with opened_house(GatewayOptions(drill_reports=str(tmp_path))) as house:
        found = (await house.ask("GET", "/v1/admin/drills")).json
        one = (await house.ask("GET", "/v1/admin/drills?drill=retry")).json["drills"]
        assert (await house.ask("GET", "/v1/admin/drills?dril=x")).status == 422
    assert [(row["drill"], row["charts"]) for row in one] == [("retry", [{"type": "lines"}])]
    assert all(row["charts"] == [] for row in found["drills"])
    assert [row["drill"] for row in found["drills"]] == ["renewal", "retry"]
    assert found["drills"][0]["promises"] == [promise]
    async with opened_house(GatewayOptions(drill_reports=str(tmp_path / "none"))) as house:
        assert (await house.ask("GET", "/v1/admin/drills")).json["drills"] == []
