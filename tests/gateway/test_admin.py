"""Tenants, settings, leases, dead letters, keys and the escalation, over HTTP."""

from __future__ import annotations

import asyncio
import re

import pytest

from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, Risk, Topic
from stanchion.services.lease_events import Fallback
from tests.gateway.house import House

NO_QUEUE = {"on_full": "reject", "queue_max": 100, "queue_wait_s": 300}


async def test_a_tenant_that_nobody_configured_has_the_defaults(house: House) -> None:
    answer = await house.ask("GET", "/v1/admin/tenants/acme")
    assert answer.json == {
        "max_concurrent_runs": 10,
        "job_rate_per_s": None,
        "admission": None,
        "workflows": {},
        "budgets": {},
        **NO_QUEUE,
    }


async def test_a_configuration_is_stored_and_read_in_the_same_notation(house: House) -> None:
    # SQLite and Redis read a number of seconds back as a float: so the default is one.
    for body in ({}, {"queue_wait_s": 300}):
        stored = await house.ask("PUT", "/v1/admin/tenants/acme", body)
        assert b'"queue_wait_s":300.0' in stored.body
        assert (await house.ask("GET", "/v1/admin/tenants/acme")).body == stored.body


# ── Topic limits ─────────────────────────────────────────────────────────────────────────────────


async def test_a_limit_is_stored_shown_listed_and_deleted(house: House) -> None:
    path = "/v1/admin/limits"
    body = {"topics": ["llm.*", "embed"], "max_running": 2}
    shown = {
        "id": "llm",
        "topics": ["llm.*", "embed"],
        "per": "deployment",
        "max_running": 2,
        "rate_per_s": None,
        "tenant": None,
        "running": 0,
        "retry_after_ms": None,
    }
    assert (await house.ask("PUT", f"{path}/llm", body)).json == shown
    assert (await house.ask("GET", f"{path}/llm")).json == shown
    each = {"topics": ["mail"], "per": "tenant", "rate_per_s": 0.5}
    assert (await house.ask("PUT", f"{path}/each", each)).json["running"] is None
    first = (await house.ask("GET", f"{path}?limit=1")).json
    assert [row["id"] for row in first["limits"]] == ["each"]
    rest = (await house.ask("GET", f"{path}?limit=1&cursor={first['cursor']}")).json
    assert (rest["limits"], rest["cursor"]) == ([shown], None)
    assert (await house.ask("DELETE", f"{path}/llm")).json == shown
    for method in ("GET", "DELETE"):
        assert (await house.ask(method, f"{path}/llm")).status == 404


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"topics": ["llm.*"]}, "max_running"),
        ({"topics": [], "max_running": 1}, "topics"),
        ({"topics": ["llm*"], "max_running": 1}, "topics[0]"),
        ({"topics": ["*"], "max_running": 1}, "topics[0]"),
        ({"topics": ["a.*.b"], "max_running": 1}, "topics[0]"),
        ({"topics": ["a"], "max_running": -1}, "max_running"),
        ({"topics": ["a"], "rate_per_s": 0}, "rate_per_s"),
        ({"topics": ["a"], "max_running": 1, "per": "worker"}, "per"),
        ({"topics": ["a"], "max_running": 1, "burst": 2}, "burst"),
        ({"max_running": 1}, "topics"),
    ],
)
async def test_a_limit_that_makes_no_sense_is_refused_with_its_place(
    house: House, body: object, place: str
) -> None:
    answer = await house.ask("PUT", "/v1/admin/limits/llm", body)
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert answer.json["errors"][0]["path"] == place


async def test_a_job_behind_a_limit_says_so(house: House) -> None:
    await house.ask("PUT", "/v1/admin/limits/llm", {"topics": ["llm.*"], "max_running": 1})
    await house.ask("PUT", "/v1/workflows/one", {"steps": {"a": {"topic": "llm.chat"}}})
    runs = [(await house.ask("POST", "/v1/workflows/one/runs", {})).json["run_id"] for _ in "ab"]
    asked = {"worker_id": "w", "topics": ["llm.chat"], "max_jobs": 5}
    (job,) = (await house.ask("POST", "/v1/worker/lease", asked)).json["jobs"]
    waiting = next(run for run in runs if run != job["run_id"])
    (found,) = (await house.ask("GET", f"/v1/runs/{waiting}/why")).json["findings"]
    assert found["code"] == "topic_limited"
    assert "1 of max_running 1 jobs are leased" in found["detail"]
    assert (found["blocked_by"]["kind"], found["blocked_by"]["id"]) == ("limit", "llm")
    assert (await house.ask("GET", "/v1/admin/limits/llm")).json["running"] == 1
    done = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    await house.ask("POST", "/v1/worker/results", {"worker_id": "w", "results": [done]})
    assert (await house.ask("GET", "/v1/admin/limits/llm")).json["running"] == 0
    assert len((await house.ask("POST", "/v1/worker/lease", asked)).json["jobs"]) == 1


async def test_a_limit_of_each_tenant_shows_the_use_of_the_tenant_that_is_named(
    house: House,
) -> None:
    path, steps = "/v1/admin/limits/each", {"steps": {"a": {"topic": "llm.chat"}}}
    limit = {"topics": ["llm.*"], "per": "tenant", "max_running": 1, "rate_per_s": 50}
    await house.ask("PUT", path, limit)
    await house.ask("PUT", "/v1/workflows/one", steps, tenant="acme")
    runs = {
        (await house.ask("POST", "/v1/workflows/one/runs", {}, tenant="acme")).json["run_id"]
        for _ in "ab"
    }
    asked = {"worker_id": "w", "topics": ["llm.chat"], "max_jobs": 5}
    (job,) = (await house.ask("POST", "/v1/worker/lease", asked)).json["jobs"]
    (waiting,) = runs - {job["run_id"]}
    (found,) = (await house.ask("GET", f"/v1/runs/{waiting}/why", tenant="acme")).json["findings"]
    assert found["remedy"].endswith("its use: stanchion limit show each --tenant acme")

    async def shown(tenant: str | None) -> tuple[object, ...]:
        one = (await house.ask("GET", path, tenant=tenant)).json
        (row,) = (await house.ask("GET", "/v1/admin/limits", tenant=tenant)).json["limits"]
        assert row == one
        return one["tenant"], one["running"], one["retry_after_ms"]

    assert await shown("acme") == ("acme", 1, 0)
    assert await shown("globex") == ("globex", 0, 0)
    assert await shown(None) == (None, None, None)


# ── Tenants ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_put_replaces_and_is_in_force_when_answered(house: House) -> None:
    path = "/v1/admin/tenants/acme"
    override = {"strategy": "lock", "lock_retry": {"kind": "fixed", "delay_ms": 20}}
    full = {
        "max_concurrent_runs": 0,
        "job_rate_per_s": 2.5,
        "admission": override,
        "workflows": {},
        "budgets": {"tokens": {"limit": 5, "window": "hour"}},
        **NO_QUEUE,
    }
    assert (await house.ask("PUT", path, full)).json == full
    assert (await house.ask("GET", path)).json == full
    await house.ask("PUT", "/v1/workflows/one", {"steps": {"a": {"topic": "t"}}}, tenant="acme")
    refused = await house.ask("POST", "/v1/workflows/one/runs", {}, tenant="acme")
    assert (refused.status, refused.json["limit"]) == (429, 0)
    replaced = await house.ask("PUT", path, {"max_concurrent_runs": None})
    assert replaced.json == {
        "max_concurrent_runs": None,
        "job_rate_per_s": None,
        "admission": None,
        "workflows": {},
        "budgets": {},
        **NO_QUEUE,
    }
    assert (await house.ask("POST", "/v1/workflows/one/runs", {}, tenant="acme")).status == 200
    listed = (await house.ask("GET", "/v1/admin/tenants")).json
    assert [row["tenant"] for row in listed["tenants"]] == ["acme"]


async def test_a_deleted_tenant_has_the_defaults_when_answered(house: House) -> None:
    path = "/v1/admin/tenants/acme"
    full: dict[str, object] = {
        "max_concurrent_runs": 0,
        "job_rate_per_s": 2.5,
        "admission": None,
        "workflows": {},
        "budgets": {},
        **NO_QUEUE,
    }
    await house.ask("PUT", path, full)
    await house.ask("PUT", "/v1/workflows/one", {"steps": {"a": {"topic": "t"}}}, tenant="acme")
    assert (await house.ask("DELETE", path)).json == full
    assert (await house.ask("POST", "/v1/workflows/one/runs", {}, tenant="acme")).status == 200
    assert (await house.ask("GET", path)).json["max_concurrent_runs"] == 10
    (row,) = (await house.ask("GET", "/v1/admin/tenants")).json["tenants"]
    assert (row["tenant"], row["is_configured"]) == ("acme", False)
    again = await house.ask("DELETE", path)
    assert (again.status, again.json["code"]) == (404, "not_found")


async def test_an_override_says_where_it_is_wrong(house: House) -> None:
    override = {"admission": {"lock_retry": {"kind": "jitter", "delay_ms": 1, "jitter_ms": 2}}}
    answer = await house.ask("PUT", "/v1/admin/tenants/acme", override)
    assert answer.status == 422
    assert answer.json["errors"][0]["path"].startswith("admission.lock_retry")


async def test_settings_are_patched_and_answered_as_a_whole(house: House) -> None:
    before = (await house.ask("GET", "/v1/admin/settings")).json
    assert before["admission"]["strategy"] == "atomic"
    assert before["lock_busy"]["backend_error_delay_ms"] == 1000
    patch = {"admission": {"lock_wait_s": 1}}
    after = await house.ask("PATCH", "/v1/admin/settings", patch)
    assert after.status == 200
    assert after.json["admission"] == {**before["admission"], "lock_wait_s": 1}
    assert (await house.ask("GET", "/v1/admin/settings")).json == after.json
    reset = await house.ask("PATCH", "/v1/admin/settings", {"admission": {"lock_wait_s": None}})
    assert reset.json == before


async def test_an_operator_holds_a_lock_lists_it_and_takes_it_away(house: House) -> None:
    assert (await house.ask("GET", "/v1/admin/leases")).json["leases"] == []
    asked = {"name": "admission/acme", "ttl_s": 60}
    held = await house.ask("POST", "/v1/admin/leases", asked)
    assert held.json["name"] == "admission/acme"
    (row,) = (await house.ask("GET", "/v1/admin/leases")).json["leases"]
    assert (row["name"], row["fence"]) == ("admission/acme", held.json["fence"])
    assert 0 < row["expires_in_ms"] <= 60_000
    assert (row["holder"], row["renewals"]) == (held.json["holder"], 0) == ("anonymous", 0)
    assert row["acquired_at"] == held.json["acquired_at"]
    assert row["acquired_at"].endswith("Z")
    for name in ("admission/acme", "admission%2Facme"):
        one = (await house.ask("GET", f"/v1/admin/leases/{name}")).json
        assert one | {"expires_in_ms": 0} == row | {"expires_in_ms": 0}
    free = await house.ask("GET", "/v1/admin/leases/run/x")
    assert (free.status, free.code) == (404, "not_found")
    await house.ask("POST", "/v1/admin/leases", {"name": "run/x", "ttl_s": 60})
    page = (await house.ask("GET", "/v1/admin/leases?limit=1")).json
    assert [each["name"] for each in page["leases"]] == ["admission/acme"]
    rest = (await house.ask("GET", f"/v1/admin/leases?cursor={page['cursor']}")).json
    assert ([each["name"] for each in rest["leases"]], rest["cursor"]) == (["run/x"], None)
    second = await house.ask("POST", "/v1/admin/leases", asked)
    assert (second.status, second.code) == (409, "conflict")
    assert re.fullmatch(r"another holds it, for at most \d+\.\d s", second.json["detail"])
    # As it is, and as a client encodes it.
    released = await house.ask("DELETE", "/v1/admin/leases/admission%2Facme")
    assert (released.status, released.json["name"]) == (200, "admission/acme")
    assert released.json["acquired_at"] == row["acquired_at"]
    gone = await house.ask("DELETE", "/v1/admin/leases/admission/acme")
    assert (gone.status, gone.code) == (404, "not_found")


async def test_the_history_of_locks_says_what_ran_without_one(house: House) -> None:
    history, clock = house.services.lease_history, house.services.clock
    history.mark("run/x", "acquired", 7)
    history.was_busy("run/z")
    history.was_busy("run/z")
    history.was_busy("run/x")
    history.mark("run/x", "acquired", 8)
    history.busy.appendleft(Instant(clock.now() - 60_001))
    error = Fallback(name="run/y", risk=Risk.LOW, error="cut")
    history.fell_back(error)
    other: JsonObject = {"version": "0.1", "parts": {"unlocked": 12}}
    await house.services.store.report_replica("other", other, keep_ms=60_000)
    seen = (await house.ask("GET", "/v1/admin/lock-history?name=run%2Fx")).json
    assert (seen["marks"][0]["what"], seen["marks"][0]["fence"]) == ("acquired", 7)
    assert (len(seen["busy"]), sum(seen["busy"]), seen["bucket_ms"]) == (1200, 3, 50)
    assert [(wait["name"], wait["tries"]) for wait in seen["waits"]] == [("run/z", 2)]
    assert (seen["unlocked_count"], seen["unlocked"][0]["name"]) == (1, "run/y")
    assert seen["unlocked_elsewhere"] == {"other": 12}
    assert (await house.ask("GET", "/v1/admin/lock-history")).json["marks"] == []
    assert (await house.ask("GET", "/v1/admin/lock-history?nam=x")).status == 422


async def test_what_an_operator_does_to_locks_is_in_the_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="stanchion")
    await house.ask("POST", "/v1/admin/leases", {"name": "run/x", "ttl_s": 60})
    await house.ask("DELETE", "/v1/admin/leases/run/x?reason=its%20holder%20is%20gone")
    lines = {each.message: each.__dict__["fields"] for each in caplog.records}
    assert lines["lease_held_by_hand"]["actor"] == "anonymous"
    assert lines["lease_released_by_hand"]["lease"] == "run/x"
    assert lines["lease_released_by_hand"]["reason"] == "its holder is gone"
    (entry, *_) = (await house.ask("GET", "/v1/admin/audit?action=lease.release")).json["entries"]
    assert entry["after"] == {"reason": "its holder is gone"}


async def let_a_job_die(house: House) -> str:
    """Make a dead letter of the job that is ready; its id."""
    store = house.services.store
    (leased,) = await store.lease_jobs("w", [Topic("work")], max_jobs=1, ttl_ms=1)
    async with asyncio.timeout(5):
        while not await store.expire_jobs(limit=10, max_deliveries=1):
            pass  # the lease lasts a millisecond
    return leased.job.id


async def test_a_discarded_dead_letter_fails_its_step_and_frees_the_slot(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="stanchion")
    run_id = await house.start()
    await let_a_job_die(house)
    (row,) = (await house.ask("GET", "/v1/admin/dead-letters")).json["dead_letters"]
    path = f"/v1/admin/dead-letters/{row['id']}/discard"
    discarded = await house.ask("POST", path)
    assert discarded.json == {"id": row["id"], "run_id": run_id, "discarded": True}
    assert (await house.ask("POST", path)).status == 404
    run = (await house.ask("GET", f"/v1/runs/{run_id}")).json
    (step,) = run["steps"].values()
    assert (run["status"], step["error"]["code"]) == ("failed", "dead_letter_discarded")
    lines = {each.message: each.__dict__["fields"] for each in caplog.records}
    assert lines["dead_letter_discarded"]["actor"] == "anonymous"


async def test_a_dead_letter_is_listed_and_replayed_once(house: House) -> None:
    run_id = await house.start()
    job_id = await let_a_job_die(house)
    (row,) = (await house.ask("GET", "/v1/admin/dead-letters")).json["dead_letters"]
    assert (row["kind"], row["run_id"], row["job_id"]) == ("job", run_id, job_id)
    assert (await house.ask("GET", "/v1/admin/dead-letters", tenant="other")).json == {
        "dead_letters": [],
        "cursor": None,
    }
    path = f"/v1/admin/dead-letters/{row['id']}/replay"
    replayed = await house.ask("POST", path)
    assert replayed.json == {"id": row["id"], "run_id": run_id, "replayed": True}
    assert (await house.ask("POST", path)).status == 404
    assert (await house.lease())["run_id"] == run_id


async def test_the_dead_letter_of_a_run_that_has_ended_can_only_be_discarded(house: House) -> None:
    run_id = await house.start()
    await let_a_job_die(house)
    await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    (row,) = (await house.ask("GET", "/v1/admin/dead-letters")).json["dead_letters"]
    path = f"/v1/admin/dead-letters/{row['id']}"
    replayed = await house.ask("POST", f"{path}/replay")
    assert (replayed.status, replayed.code) == (409, "conflict")
    assert (
        replayed.json["detail"] == f"run '{run_id}' has ended: cancelled; discard the dead letter"
    )
    assert (await house.ask("POST", f"{path}/discard")).status == 200
    assert (await house.ask("GET", "/v1/admin/dead-letters")).json["dead_letters"] == []


async def test_an_operators_word_on_the_escalation_is_in_force_when_answered(
    house: House,
) -> None:
    path = "/v1/admin/escalation"
    house.services.escalating.count(fallbacks=2, duplicates=1)
    calm = (await house.ask("GET", path)).json
    counters = calm.pop("counters")
    assert (counters["fallbacks_running"], counters["duplicates_running"]) == (2, 1)
    assert (counters["fallbacks_per_s"], counters["fallbacks_per_s_max"]) == (0, 0.1)
    assert calm == {
        "level": "normal",
        "forced": None,
        **dict.fromkeys(("forced_by", "forced_at", "reason", "expires_at")),
        "closes": ["high", "standard"],
        "closed_now": [],
        "trips_today": 0,
    }
    ends = "2999-01-01T00:00:00Z"
    for wrong in (
        {"order": "clear", "expires_at": ends},
        {"order": "force_open", "expires_at": "2020-01-01T00:00:00Z"},
        {"order": "force_open", "expires_at": "9999-12-31T23:59:59-05:00"},
    ):
        assert (await house.ask("POST", path, wrong)).json["errors"][0]["path"] == "expires_at"
    order = {"order": "force_closed", "reason": "maintenance", "expires_at": ends}
    closed = (await house.ask("POST", path, order)).json
    assert (closed["reason"], closed["expires_at"]) == ("maintenance", ends)
    assert closed["forced_by"] == "anonymous"
    assert (closed["level"], closed["forced"]) == ("escalated", "force_closed")
    assert set(closed["closed_now"]) == {"high", "standard"}
    cleared = (await house.ask("POST", path, {"order": "clear"})).json
    assert cleared.pop("counters")["fallbacks_running"] == 0
    assert cleared == calm


async def test_keys_are_shown_once_listed_without_secrets_and_revoked(guarded_house: House) -> None:
    house = guarded_house
    created = await house.ask(
        "POST",
        "/v1/admin/keys",
        {"role": "operator", "tenant": "acme", "note": "night shift"},
        key="the-admin-key",
    )
    made = created.json
    secret = made["key"].split("_")[2]
    assert made["key"] == f"sk_{made['id']}_{secret}"
    assert len(secret) == 64
    listed = await house.ask("GET", "/v1/admin/keys", key="the-admin-key")
    assert secret.encode() not in listed.body
    (row,) = listed.json["keys"]
    assert (row["id"], row["role"], row["tenant"]) == (made["id"], "operator", "acme")
    assert (row["note"], row["revoked_at"]) == ("night shift", None)
    assert (await house.ask("GET", "/v1/runs", key=made["key"])).status == 200
    path = f"/v1/admin/keys/{made['id']}"
    assert (await house.ask("DELETE", path, key="the-admin-key")).json["revoked_at"]
    assert (await house.ask("GET", "/v1/runs", key=made["key"])).status == 401
    assert (await house.ask("DELETE", "/v1/admin/keys/none", key="the-admin-key")).status == 404


async def test_the_first_key_closes_the_door_for_those_without(house: House) -> None:
    assert (await house.ask("GET", "/v1/runs")).status == 200
    made = await house.ask("POST", "/v1/admin/keys", {"role": "admin", "tenant": "*"})
    assert (await house.ask("GET", "/v1/runs")).status == 401
    assert (await house.ask("GET", "/v1/runs", key=made.json["key"])).status == 200


@pytest.mark.parametrize(
    ("role", "tenant"), [("runner", "acme"), ("worker", "*"), ("operator", "*"), ("admin", "acme")]
)
async def test_the_first_key_is_one_that_can_make_others(
    house: House, role: str, tenant: str
) -> None:
    asked = {"role": role, "tenant": tenant}
    refused = await house.ask("POST", "/v1/admin/keys", asked)
    assert (refused.status, refused.code) == (409, "conflict")
    for way_out in ("an admin key for '*'", "STANCHION_ADMIN_KEY"):
        assert way_out in refused.json["detail"]
    assert (await house.ask("GET", "/v1/admin/keys")).json["keys"] == []
    made = await house.ask("POST", "/v1/admin/keys", {"role": "admin", "tenant": "*"})
    then = await house.ask("POST", "/v1/admin/keys", asked, key=made.json["key"])
    assert then.status == 200


async def test_a_key_for_all_tenants_names_one(guarded_house: House) -> None:
    house, admin = guarded_house, "the-admin-key"
    run_id = await house.start(key=admin, tenant="acme")
    assert (await house.ask("GET", f"/v1/runs/{run_id}", key=admin)).status == 404
    found = await house.ask("GET", f"/v1/runs/{run_id}", key=admin, tenant="acme")
    assert found.json["tenant"] == "acme"


async def test_secrets_are_never_logged(
    guarded_house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    key = await guarded_house.make_key("runner", "acme")
    await guarded_house.start(key=key)
    await guarded_house.ask("GET", "/v1/runs", key=key + "x")
    guarded_house.store.script("list_runs", _broken)
    await guarded_house.ask("GET", "/v1/runs", key=key)
    said = " ".join(f"{each.getMessage()} {each.__dict__}" for each in caplog.records)
    assert "request_failed" in said
    assert key.split("_")[2] not in said
    assert "the-admin-key" not in said
    assert "the-admin-key" not in repr(guarded_house.app.options)


async def _broken() -> None:
    raise ValueError("a bug")


async def test_a_tenant_that_is_only_seen_is_listed_and_sees_its_own_limits(house: House) -> None:
    await house.start(tenant="acme")
    (row,) = (await house.ask("GET", "/v1/admin/tenants")).json["tenants"]
    assert (row["tenant"], row["active"], row["max_concurrent_runs"]) == ("acme", 1, 10)
    assert row["is_configured"] is False
    await house.ask("PUT", "/v1/admin/tenants/acme", {"max_concurrent_runs": 3})
    assert (await house.ask("GET", "/v1/tenant", tenant="acme")).json == {
        "tenant": "acme",
        "max_concurrent_runs": 3,
        "active": 1,
        "queued": 0,
        "job_rate_per_s": None,
        "budgets": {},
        **NO_QUEUE,
    }


async def test_without_keys_all_tenants_are_not_the_default_tenant(house: House) -> None:
    await house.start()
    for path in ("/v1/workflows", "/v1/admin/tenants", "/v1/admin/dead-letters"):
        answer = await house.ask("GET", path, tenant="*")
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert answer.json["errors"][0]["path"] == "X-Stanchion-Tenant"
    await house.start(tenant="acme")
    everywhere = (await house.ask("GET", "/v1/runs", tenant="*")).json["runs"]
    # Two runs of the same millisecond are in the order of their ids, which are random.
    assert sorted(row["tenant"] for row in everywhere) == ["acme", "default"]
    assert len((await house.ask("GET", "/v1/runs")).json["runs"]) == 1


async def test_budgets_are_shown_as_they_were_configured_and_refuse_with_a_receipt(
    house: House,
) -> None:
    day = {"limit": 100, "window": "day"}
    budgets = {"tokens": day, "größe:1": {"limit": 0, "window": "total"}}
    path = "/v1/admin/tenants/acme"
    answer = await house.ask("PUT", path, {"budgets": budgets})
    assert (answer.status, answer.json["budgets"]) == (200, budgets)
    assert (await house.ask("GET", path)).json["budgets"] == budgets
    (row,) = (await house.ask("GET", "/v1/admin/tenants")).json["tenants"]
    assert row["budgets"] == budgets
    shown = (await house.ask("GET", "/v1/tenant", tenant="acme")).json["budgets"]
    assert shown["größe:1"] == {
        "limit": 0,
        "window": "total",
        "used": 0,
        "reserved": 0,
        "resets_at": None,
    }
    steps = {"steps": {"a": {"topic": "t"}}, "budget": {"tokens": 101}}
    stored = await house.ask("PUT", "/v1/workflows/spend", steps, tenant="acme")
    assert stored.status == 200
    file = (await house.ask("GET", "/v1/workflows/spend", tenant="acme")).json
    assert file["definition"]["budget"] == {"tokens": 101}
    refused = await house.ask("POST", "/v1/workflows/spend/runs", {}, tenant="acme")
    assert (refused.status, refused.code) == (429, "budget_exhausted")
    # It asks for more than the whole budget: no wait helps.
    told = ("budget", "limit", "used", "reserved", "resets_at", "retry_class")
    resets_at = shown["tokens"]["resets_at"]
    assert [refused.json[each] for each in told] == ["tokens", 100, 0, 0, resets_at, None]
    batch = await house.ask(
        "POST", "/v1/workflows/spend/runs/batch", {"runs": [{"key": "k"}]}, tenant="acme"
    )
    (result,) = batch.json["results"]
    assert (result["status"], result["problem"]["code"]) == (429, "budget_exhausted")
    assert result["problem"]["budget"] == "tokens"
    async with asyncio.timeout(5):
        while True:
            query = "/v1/admin/decisions?outcome=budget_exhausted"
            found = (await house.ask("GET", query, tenant="acme")).json["decisions"]
            if found:
                break
            await asyncio.sleep(0.05)
    receipts = {(each["workflow_id"], each["limit"], each["budget"]) for each in found}
    assert receipts == {("spend", 100, "tokens")}
    labels = {"tenant": "acme", "workflow": "spend", "outcome": "budget_exhausted"}
    assert house.metric("stanchion_admission_decisions_total", **labels) == 2
    (entry,) = (await house.ask("GET", "/v1/admin/audit?action=tenant.put")).json["entries"]
    assert entry["after"]["budgets"] == budgets


@pytest.mark.parametrize(
    "budget",
    [
        {"tokens": {"limit": -1, "window": "day"}},
        {"tokens": {"limit": 10**15 + 1, "window": "day"}},
        {"tokens": {"limit": 1.5, "window": "day"}},
        {"tokens": {"limit": 1, "window": "week"}},
        {"tokens": {"limit": 1}},
        {"tokens": {"limit": 1, "window": "day", "other": 1}},
        {"": {"limit": 1, "window": "day"}},
        {"a b": {"limit": 1, "window": "day"}},
        {"x" * 65: {"limit": 1, "window": "day"}},
        {f"n{number}": {"limit": 1, "window": "day"} for number in range(17)},
        [],
    ],
)
async def test_a_budget_that_is_none_is_refused(house: House, budget: object) -> None:
    answer = await house.ask("PUT", "/v1/admin/tenants/acme", {"budgets": budget})
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert answer.json["errors"][0]["path"].startswith("budgets")


@pytest.mark.parametrize("usage", [{"t": -1}, {"t": 1.5}, {"t": 10**12 + 1}, {"a b": 1}, 5])
async def test_a_usage_that_is_none_is_refused(house: House, usage: object) -> None:
    lease = {"job_id": "r:s@1", "fence": 1, "usage": usage}
    asked: dict[str, dict[str, object]] = {
        "renew": {"worker_id": "w", "leases": [lease]},
        "results": {"worker_id": "w", "results": [{**lease, "status": "succeeded"}]},
    }
    for path, body in asked.items():
        answer = await house.ask("POST", f"/v1/worker/{path}", body)
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert "usage" in answer.json["errors"][0]["path"]
