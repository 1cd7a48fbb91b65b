"""The audit log over HTTP: every route that changes something writes an entry with the change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from stanchion.core.audit import AuditFilter
from stanchion.core.pressure import WAIT_BOUNDS_MS
from stanchion.core.upgrade import LEVEL
from stanchion.gateway import GatewayOptions
from stanchion.gateway.routes import ROUTES
from tests.gateway.asgi import Answer
from tests.gateway.house import ADMIN, ONE_STEP, House, older_store, opened_house
from tests.services.faulty_locks import Fault

STARTS: Final = frozenset({"start_run", "start_batch", "submit_job", "trigger_schedule"})
WORKER_PROTOCOL: Final = frozenset({"lease_jobs", "renew_leases", "take_results"})
CHANGING: Final = {
    route.id: route
    for route in ROUTES
    if route.method != "GET" and route.id not in STARTS | WORKER_PROTOCOL
}
ASKED: Final[dict[str, Any]] = {"steps": {"ask": {"approval": {}}}}


class Expected(NamedTuple):
    """What a request answered, and what its entry must say."""

    answer: Answer
    subject: str
    tenant: str | None
    before: Any
    after: Any


async def _waiting(house: House) -> str:
    """A run of tenant ``acme`` that waits for an approval."""
    await house.ask("PUT", "/v1/workflows/asked", ASKED, key=ADMIN, tenant="acme")
    answer = await house.ask("POST", "/v1/workflows/asked/runs", {}, key=ADMIN, tenant="acme")
    return str(answer.json["run_id"])


async def _letter(house: House) -> str:
    body = {"steps": {"a": {"topic": "doom"}}}
    await house.ask("PUT", "/v1/workflows/doomed", body, key=ADMIN, tenant="acme")
    await house.ask("POST", "/v1/workflows/doomed/runs", {}, key=ADMIN, tenant="acme")
    store = house.services.store
    await store.lease_jobs("w", ["doom"], max_jobs=1, ttl_ms=1)  # type: ignore[list-item] # a topic
    async with asyncio.timeout(5):
        while not await store.expire_jobs(limit=10, max_deliveries=1):
            pass
    return (await store.list_dead_letters(None)).items[-1].id


async def _put_workflow(house: House) -> Expected:
    answer = await house.ask("PUT", "/v1/workflows/w", ONE_STEP, key=ADMIN, tenant="acme")
    return Expected(answer, "workflow/w", "acme", None, {"version": 1})


async def _put_shared_workflow(house: House) -> Expected:
    answer = await house.ask("PUT", "/v1/shared/workflows/common", ONE_STEP, key=ADMIN)
    return Expected(answer, "shared_workflow/common", None, None, {"version": 1})


async def _finish_upgrade(house: House) -> Expected:
    older_store(house)
    answer = await house.ask("POST", "/v1/admin/upgrade", {}, key=ADMIN)
    return Expected(answer, "upgrade", None, {"level": 1}, {"level": LEVEL})


async def _cancel(house: House) -> Expected:
    run_id = await house.start(key=ADMIN, tenant="acme")
    path, body = f"/v1/runs/{run_id}/cancel", {"reason": "late"}
    answer = await house.ask("POST", path, body, key=ADMIN, tenant="acme")
    after = {"status": "cancelled", "reason": "late"}
    return Expected(answer, f"run/{run_id}", "acme", {"status": "running"}, after)


async def _rerun(house: House) -> Expected:
    run_id = await house.start(key=ADMIN, tenant="acme")
    await house.ask("POST", f"/v1/runs/{run_id}/cancel", {}, key=ADMIN, tenant="acme")
    answer = await house.ask("POST", f"/v1/runs/{run_id}/rerun", {}, key=ADMIN, tenant="acme")
    options = {"from_step": None, "version": "same", "only": None}
    after = {"run_id": answer.json["run_id"], **options}
    return Expected(answer, f"run/{run_id}", "acme", None, after)


def _decide(verb: str, data: object) -> Callable[[House], Awaitable[Expected]]:
    async def change(house: House) -> Expected:
        run_id = await _waiting(house)
        path, body = f"/v1/runs/{run_id}/steps/ask/{verb}", {"comment": "ok", "data": data}
        answer = await house.ask("POST", path, body, key=ADMIN, tenant="acme")
        after: dict[str, Any] = {"approved": verb == "approve", "comment": "ok"}
        if data is not None:
            after["redacted"] = ["data"]
        return Expected(answer, f"run/{run_id}/step/ask", "acme", None, after)

    return change


def _of_letter(verb: str) -> Callable[[House], Awaitable[Expected]]:
    async def change(house: House) -> Expected:
        letter = await _letter(house)
        path = f"/v1/admin/dead-letters/{quote(letter, safe='')}/{verb}"
        answer = await house.ask("POST", path, {}, key=ADMIN)
        return Expected(answer, f"dead_letter/{letter}", "acme", None, None)

    return change


async def _put_tenant(house: House) -> Expected:
    body = {"max_concurrent_runs": 7}
    answer = await house.ask("PUT", "/v1/admin/tenants/acme", body, key=ADMIN)
    return Expected(answer, "tenant/acme", "acme", None, answer.json)


async def _delete_tenant(house: House) -> Expected:
    await house.ask("PUT", "/v1/admin/tenants/gone", {"max_concurrent_runs": 7}, key=ADMIN)
    answer = await house.ask("DELETE", "/v1/admin/tenants/gone", key=ADMIN)
    return Expected(answer, "tenant/gone", "gone", answer.json, None)


async def _patch_settings(house: House) -> Expected:
    body = {"admission": {"lock_wait_s": 1.5}}
    answer = await house.ask("PATCH", "/v1/admin/settings", body, key=ADMIN)
    return Expected(answer, "settings", None, {"admission": {"lock_wait_s": 2}}, body)


async def _hold(house: House) -> Expected:
    body = {"name": "admission/acme", "ttl_s": 60}
    answer = await house.ask("POST", "/v1/admin/leases", body, key=ADMIN)
    after = {"fence": answer.json["fence"], "ttl_ms": 60_000}
    return Expected(answer, "lease/admission/acme", "acme", None, after)


async def _release(house: House) -> Expected:
    run_id = await house.start(key=ADMIN, tenant="acme")
    body = {"name": f"run/{run_id}", "ttl_s": 60}
    await house.ask("POST", "/v1/admin/leases", body, key=ADMIN)
    answer = await house.ask("DELETE", f"/v1/admin/leases/run/{run_id}", key=ADMIN)
    return Expected(answer, f"lease/run/{run_id}", "acme", {"fence": answer.json["fence"]}, None)


_LATER: Final = "2100-01-01T00:00:00.250000Z"
_KEY: Final = {"name": "kim", "role": "runner", "tenant": "acme", "note": "n", "expires_at": _LATER}


async def _create_key(house: House) -> Expected:
    answer = await house.ask("POST", "/v1/admin/keys", _KEY, key=ADMIN)
    after = {**_KEY, "revoked": False, "redacted": ["key"]}
    return Expected(answer, f"key/{answer.json['id']}", "acme", None, after)


async def _revoke_key(house: House) -> Expected:
    made = (await _create_key(house)).answer
    answer = await house.ask("DELETE", f"/v1/admin/keys/{made.json['id']}", key=ADMIN)
    before = {**_KEY, "revoked": False, "redacted": ["key"]}
    after = {**before, "revoked": True}
    return Expected(answer, f"key/{made.json['id']}", "acme", before, after)


async def _set_escalation(house: House) -> Expected:
    body = {"order": "force_closed", "reason": "an incident", "expires_at": _LATER}
    answer = await house.ask("POST", "/v1/admin/escalation", body, key=ADMIN)
    return Expected(answer, "escalation", None, None, body)


async def _drift(house: House) -> Expected:
    await house.start(key=ADMIN, tenant="drifting")
    account = vars(vars(house.store)["real"])["_state"].account("drifting")
    account.active += 2
    dry = await house.ask("POST", "/v1/admin/drift?dry_run=true", {}, key=ADMIN)
    assert dry.json["repaired"] == [{"tenant": "drifting", "counted": 3, "true": 1}]
    answer = await house.ask("POST", "/v1/admin/drift", key=ADMIN)
    assert (answer.json["drifted"], account.active) == (1, 1)
    return Expected(answer, "tenant/drifting", "drifting", {"active": 3}, {"active": 1})


async def _start_bulk(house: House, rate_per_s: float = 100) -> Expected:
    await house.start(key=ADMIN, tenant="acme")
    asked = {"action": "cancel", "filter": {"workflow_id": "one-step"}, "rate_per_s": rate_per_s}
    answer = await house.ask("POST", "/v1/bulk", asked, key=ADMIN, tenant="acme")
    after = {"action": "cancel", "rate_per_s": rate_per_s}
    return Expected(answer, f"bulk/{answer.json['bulk_id']}", "acme", None, after)


async def _stop_bulk(house: House) -> Expected:
    begun = (await _start_bulk(house, rate_per_s=0.1)).answer
    path = f"/v1/bulk/{begun.json['bulk_id']}"
    answer = await house.ask("DELETE", path, key=ADMIN, tenant="acme")
    after = {"status": "stopped"}
    return Expected(answer, f"bulk/{begun.json['bulk_id']}", "acme", {"status": "running"}, after)


def _holds(found: Any, expected: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Whether a value has the members that are expected. A configuration may have more."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return bool(found == expected)
    return all(found.get(name) == value for name, value in expected.items())


_SCHEDULE: Final = {"workflow_id": "one-step", "every_s": 60, "paused": True}


async def _put_schedule(house: House) -> Expected:
    await house.start(key=ADMIN, tenant="acme")
    body = {**_SCHEDULE, "input": {"password": "hunter2"}}
    answer = await house.ask(
        "PUT", "/v1/schedules/nightly", body, key=ADMIN, headers=[("X-Stanchion-Tenant", "acme")]
    )
    after = {**_SCHEDULE, "redacted": ["input"]}
    return Expected(answer, "schedule/nightly", "acme", None, after)


async def _delete_schedule(house: House) -> Expected:
    await _put_schedule(house)
    answer = await house.ask(
        "DELETE", "/v1/schedules/nightly", key=ADMIN, headers=[("X-Stanchion-Tenant", "acme")]
    )
    before = {**_SCHEDULE, "redacted": ["input"]}
    return Expected(answer, "schedule/nightly", "acme", before, None)


_LIMIT: Final = {"topics": ["llm.*"], "per": "tenant", "max_running": 3, "rate_per_s": None}


async def _put_limit(house: House) -> Expected:
    await house.ask("PUT", "/v1/admin/limits/llm", {**_LIMIT, "max_running": 2}, key=ADMIN)
    answer = await house.ask("PUT", "/v1/admin/limits/llm", _LIMIT, key=ADMIN)
    return Expected(answer, "limit/llm", None, {**_LIMIT, "max_running": 2}, _LIMIT)


async def _delete_limit(house: House) -> Expected:
    await house.ask("PUT", "/v1/admin/limits/llm", _LIMIT, key=ADMIN)
    answer = await house.ask("DELETE", "/v1/admin/limits/llm", key=ADMIN)
    return Expected(answer, "limit/llm", None, _LIMIT, None)


CHANGES: Final[dict[str, Callable[[House], Awaitable[Expected]]]] = {
    "put_workflow": _put_workflow,
    "put_schedule": _put_schedule,
    "delete_schedule": _delete_schedule,
    "put_limit": _put_limit,
    "delete_limit": _delete_limit,
    "put_shared_workflow": _put_shared_workflow,
    "finish_upgrade": _finish_upgrade,
    "cancel_run": _cancel,
    "rerun_run": _rerun,
    "approve_step": _decide("approve", {"password": "hunter2"}),
    "reject_step": _decide("reject", None),
    "replay_dead_letter": _of_letter("replay"),
    "discard_dead_letter": _of_letter("discard"),
    "start_bulk": _start_bulk,
    "stop_bulk": _stop_bulk,
    "put_tenant": _put_tenant,
    "delete_tenant": _delete_tenant,
    "patch_settings": _patch_settings,
    "hold_lease": _hold,
    "release_lease": _release,
    "create_key": _create_key,
    "revoke_key": _revoke_key,
    "set_escalation": _set_escalation,
    "audit_drift": _drift,
}


async def test_every_change_has_one_entry_with_before_and_after_and_no_secret() -> None:
    assert set(CHANGES) == set(CHANGING), "a route that changes something needs a case here"
    assert {name for name, route in CHANGING.items() if route.audits is None} == set()
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        for name, change in CHANGES.items():
            expected = await change(house)
            assert expected.answer.status in {200, 202}, (name, expected.answer.body)
            request_id = expected.answer.headers["x-request-id"]
            log = await house.ask("GET", "/v1/admin/audit?limit=1000", key=ADMIN)
            (entry,) = [row for row in log.json["entries"] if row["request_id"] == request_id]
            assert (entry["action"], entry["actor"]) == (CHANGING[name].audits, "admin")
            assert (entry["subject"], entry["tenant"]) == (expected.subject, expected.tenant), name
            assert _holds(entry["before"], expected.before), name
            assert _holds(entry["after"], expected.after), name
        log = await house.ask("GET", "/v1/admin/audit?limit=1000", key=ADMIN)
        text = log.body.decode()
        assert "hunter2" not in text
        assert "sk_" not in text
        assert len({row["action"] for row in log.json["entries"]}) == len(CHANGES)


async def test_a_lock_is_audited_also_if_the_store_was_away_or_the_process_died(
    house: House,
) -> None:
    body = {"name": "admission/acme", "ttl_s": 60}
    house.store.always(Fault.ERROR, "add_audit")
    held = await house.ask("POST", "/v1/admin/leases", body)
    assert held.status == 200, "the lock is held, and its entry follows"
    assert (await house.services.store.list_audit()).items == ()
    assert len(await house.locks.notes()) == 1
    house.store.always(Fault.NONE, "add_audit")
    audit = house.services.lock_audit
    assert audit is not None
    # Two replicas find the same note; one of them dies before it drops it.
    notes = await house.locks.notes()
    await audit.move()
    house.locks.real._notes = {note.id: note for note in notes}  # noqa: SLF001 - not dropped
    await audit.move()
    (entry,) = (await house.services.store.list_audit()).items
    assert (entry.action, entry.tenant) == ("lease.hold", "acme")
    assert entry.after == {"fence": held.json["fence"], "ttl_ms": 60_000}
    assert await house.locks.notes() == []


async def test_a_run_is_not_held_while_the_store_is_away(house: House) -> None:
    body = {"name": f"run/{await house.start()}", "ttl_s": 60}
    house.store.always(Fault.ERROR, "commit")
    refused = await house.ask("POST", "/v1/admin/leases", body)
    assert (refused.status, refused.json["code"]) == (503, "store_unavailable")
    house.store.always(Fault.NONE, "commit")
    assert (await house.ask("POST", "/v1/admin/leases", body)).status == 200


async def test_what_changes_nothing_has_no_entry(house: House) -> None:
    run_id = await house.start()
    await house.ask("POST", "/v1/jobs", {"topic": "other"})
    job = await house.lease()
    result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    await house.ask("POST", "/v1/worker/results", {"worker_id": "worker-1", "results": [result]})
    await house.ask("GET", f"/v1/runs/{run_id}?wait=5")
    before = (await house.services.store.list_audit(limit=1_000)).items
    assert {entry.action for entry in before} == {"workflow.put"}, "starts and results have none"
    refused = [
        ("POST", f"/v1/runs/{run_id}/cancel", {}, 409),
        ("POST", "/v1/runs/nobody/cancel", {}, 404),
        ("POST", f"/v1/runs/{run_id}/rerun", {"from_step": "no"}, 422),
        ("PUT", "/v1/workflows/one-step", ONE_STEP, 200),
        ("PATCH", "/v1/admin/settings", {"admission": {"strategy": "odd"}}, 422),
        ("DELETE", "/v1/admin/tenants/nobody", b"", 404),
        ("DELETE", "/v1/admin/leases/run/x", b"", 404),
        ("POST", "/v1/admin/dead-letters/x/replay", {}, 404),
        ("DELETE", "/v1/admin/keys/nobody", b"", 404),
    ]
    for method, path, body, status in refused:
        assert (await house.ask(method, path, body)).status == status, path
    assert (await house.services.store.list_audit(limit=1_000)).items == before


async def test_admission_shows_slots_and_the_answers_of_the_last_minute(house: House) -> None:
    for tenant, cap in (("calm", 5), ("stormy", 1), ("closed", 0), ("unlimited", None)):
        await house.ask("PUT", f"/v1/admin/tenants/{tenant}", {"max_concurrent_runs": cap})
    for tenant in ("calm", "stormy", "unlimited"):
        await house.start(tenant=tenant)
    refusals = [
        await house.ask("POST", "/v1/workflows/one-step/runs", {}, tenant="stormy")
        for _ in range(3)
    ]
    assert {refused.status for refused in refusals} == {429}
    answer = await house.ask("GET", "/v1/admin/admission")
    assert answer.json["replicas_missing"] == []
    stormy, *others = answer.json["tenants"]
    assert stormy.pop("wait_p95_ms") in WAIT_BOUNDS_MS
    assert stormy.pop("retry_after_ms") == refusals[-1].json["retry_after_ms"]
    assert stormy == {
        "tenant": "stormy",
        "limit": 1,
        "active": 1,
        "queued": 0,
        "admitted_1m": 1,
        "full_1m": 3,
        "unavailable_1m": 0,
    }
    assert [row["tenant"] for row in others] == ["calm", "unlimited", "closed"]
    assert [row["limit"] for row in others] == [5, None, 0]
    assert others[-1]["wait_p95_ms"] is others[-1]["retry_after_ms"] is None
    for sort, expected in (
        ("tenant", ["calm", "closed", "stormy", "unlimited"]),
        ("pressure", ["stormy", "calm", "unlimited", "closed"]),
    ):
        names: list[str] = []
        query = f"?sort={sort}&limit=1"
        while True:
            page = (await house.ask("GET", f"/v1/admin/admission{query}")).json
            names += [row["tenant"] for row in page["tenants"]]
            if page["cursor"] is None:
                break
            query = f"?sort={sort}&limit=1&cursor={page['cursor']}"
        assert names == expected
    first = (await house.ask("GET", "/v1/admin/admission?limit=1")).json["cursor"]
    other = await house.ask("GET", f"/v1/admin/admission?sort=tenant&cursor={first}")
    assert (other.status, other.code) == (422, "invalid_request")


async def test_refusals_have_receipts_also_of_a_batch_and_of_an_outage(house: House) -> None:
    await house.ask("PUT", "/v1/admin/tenants/acme", {"max_concurrent_runs": 1})
    await house.start(tenant="acme")
    rows = {"runs": [{"key": "first"}, {"key": "second"}]}
    batch = await house.ask("POST", "/v1/workflows/one-step/runs/batch", rows, tenant="acme")
    assert [row["status"] for row in batch.json["results"]] == [429, 429]
    house.store.away()
    away = await house.ask("POST", "/v1/workflows/one-step/runs", {}, tenant="acme")
    assert (away.status, away.code) == (503, "gate_unavailable")
    assert not await house.services.receipts.write(), "the store is away: they wait"
    house.store.back()
    assert await house.services.receipts.write()
    await house.services.receipts.write()
    answer = await house.ask("GET", "/v1/admin/decisions", tenant="acme")
    found = [(row["outcome"], row["key"]) for row in answer.json["decisions"]]
    assert found == [("gate_unavailable", None), ("full", "second"), ("full", "first")]
    assert {row["request_id"] for row in answer.json["decisions"]} == {
        batch.headers["x-request-id"],
        away.headers["x-request-id"],
    }


async def test_only_refused_starts_have_receipts_also_while_draining(house: House) -> None:
    poll = {"worker_id": "w", "topics": ["work"], "wait_s": 0}
    house.store.away()
    away = await house.ask("POST", "/v1/worker/lease", poll, tenant="acme")
    assert (away.status, away.code) == (503, "store_unavailable")
    house.store.back()
    house.app.drain()
    for method, path, body in (
        ("POST", "/v1/worker/lease", poll),
        ("GET", "/v1/events", None),
        ("POST", "/v1/workflows/one-step/runs", {}),
    ):
        refused = await house.ask(method, path, body, tenant="acme")
        assert (refused.status, refused.code) == (503, "draining")
    assert await house.services.receipts.write()
    answer = await house.ask("GET", "/v1/admin/decisions", tenant="acme")
    found = [(row["outcome"], row["workflow_id"]) for row in answer.json["decisions"]]
    assert found == [("draining", "one-step")]


async def test_receipts_of_reruns_and_schedules_name_the_workflow(house: House) -> None:
    await house.start(tenant="acme")
    ended = await house.start(tenant="acme")
    await house.ask("POST", f"/v1/runs/{ended}/cancel", tenant="acme")
    daily = {"workflow_id": "one-step", "every_s": 86_400}
    made = await house.ask("PUT", "/v1/schedules/daily", daily, tenant="acme")
    assert made.status == 200, made.json
    await house.ask("PUT", "/v1/admin/tenants/acme", {"max_concurrent_runs": 1})
    for path in (f"/v1/runs/{ended}/rerun", "/v1/schedules/daily/trigger"):
        full = await house.ask("POST", path, {}, tenant="acme")
        assert full.status == 429, full.json
        assert "workflow_id" not in full.json
    await house.services.receipts.write()
    receipts = await house.ask("GET", "/v1/admin/decisions", tenant="acme")
    assert [row["workflow_id"] for row in receipts.json["decisions"]] == ["one-step"] * 2


async def test_a_tenants_admin_reads_its_own_entries_and_filters_hold(
    guarded_house: House,
) -> None:
    house = guarded_house
    keys = {
        (role, tenant): await house.make_key(role, tenant)
        for role in ("admin", "operator")
        for tenant in ("acme", "globex")
    }
    for tenant in ("acme", "globex"):
        await house.start(key=keys["admin", tenant])
        await house.ask("PUT", f"/v1/admin/tenants/{tenant}", {}, key=ADMIN)

    async def listed(query: str, key: str) -> list[dict[str, Any]]:
        answer = await house.ask("GET", f"/v1/admin/audit{query}", key=key)
        assert answer.status == 200, answer.body
        return [*answer.json["entries"]]

    for role in ("admin", "operator"):
        own = await listed("", keys[role, "acme"])
        assert {row["tenant"] for row in own} == {"acme"}
        assert {row["action"] for row in own} == {"key.create", "workflow.put", "tenant.put"}
        assert await listed("?tenant=globex", keys[role, "acme"]) == []
        assert await listed("?tenant=acme", keys[role, "acme"]) == own
    assert {row["tenant"] for row in await listed("", ADMIN)} == {"acme", "globex"}
    assert {row["tenant"] for row in await listed("?tenant=globex", ADMIN)} == {"globex"}
    (key_id,) = {row["actor"] for row in await listed("?action=workflow.put&tenant=acme", ADMIN)}
    assert key_id == f"key:{keys['admin', 'acme'].split('_')[1]}"
    assert len(await listed(f"?actor={quote(key_id)}", ADMIN)) == 1
    at = (await listed("?action=tenant.put&limit=1", ADMIN))[0]["at"]
    assert await listed(f"?until={at}&action=tenant.put&tenant=globex", ADMIN) == []
    assert len(await listed(f"?since={at}&action=tenant.put&tenant=globex", ADMIN)) == 1
    for query in ("?since=yesterday", "?since=2026-08-01T14:02:00", "?actor=", "?colour=red"):
        answer = await house.ask("GET", f"/v1/admin/audit{query}", key=ADMIN)
        assert (answer.status, answer.code) == (422, "invalid_request"), query
    everything = await house.services.store.list_audit(AuditFilter(actor="admin"), limit=1_000)
    assert all(entry.request_id for entry in everything.items)
