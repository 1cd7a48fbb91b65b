"""The isolation matrix: every route, with every wrong key.

The rows come from the table of routes. What a key of the wrong tenant gets is written down here for
each route, and a route without a row is a failure: a new one cannot be forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import pytest_asyncio

from stanchion.gateway import GatewayOptions
from stanchion.gateway.route import Route, RouteScope
from stanchion.gateway.routes import ROUTES
from stanchion.wire.admin import Role
from tests.gateway.asgi import Answer, opened
from tests.gateway.house import ADMIN, ONE_STEP, House, bearer, opened_house

GUARDED = [route for route in ROUTES if route.scope is not RouteScope.OPEN]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


EACH = pytest.mark.parametrize("route", GUARDED, ids=named)


class World(NamedTuple):
    """Two tenants, and what the first one has."""

    house: House
    ids: dict[str, str]
    keys: dict[tuple[str, str], str]
    job: dict[str, Any]
    letter: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        keys = {
            (str(role), tenant): await house.make_key(role, tenant)
            for role in Role
            for tenant in ("first", "second")
        }
        run_id = await house.start(key=keys["runner", "first"])
        job = await house.lease(key=keys["worker", "first"])
        letter = await _letter(house, keys["runner", "first"])
        await house.ask("POST", "/v1/admin/leases", {"name": "run/x", "ttl_s": 60}, key=ADMIN)
        nothing = {"action": "cancel", "filter": {"label": ["no:one"]}}
        bulk = await house.ask("POST", "/v1/bulk", nothing, key=keys["runner", "first"])
        ids = {
            "bulk_id": bulk.json["bulk_id"],
            "workflow_id": "one-step",
            "run_id": run_id,
            "step_id": "only",
            "job_id": quote(str(job["job_id"]), safe=""),
            "tenant": "first",
            "key_id": keys["worker", "first"].split("_")[1],
            "name": "run/x",
            "letter_id": quote(letter, safe=""),
            "schedule_id": "nightly",
            "limit_id": "llm",
        }
        yield World(house, ids, keys, job, letter)


async def _letter(house: House, key: str) -> str:
    """A dead letter of the first tenant's: a job that was handed out too often."""
    await house.ask("PUT", "/v1/workflows/doomed", {"steps": {"a": {"topic": "doom"}}}, key=key)
    await house.ask("POST", "/v1/workflows/doomed/runs", {}, key=key)
    store = house.services.store
    (leased,) = await store.lease_jobs("w", ["doom"], max_jobs=1, ttl_ms=1)  # type: ignore[list-item] # a topic
    async with asyncio.timeout(5):
        while not await store.expire_jobs(limit=10, max_deliveries=1):
            pass
    (letter,) = (await store.list_dead_letters(leased.job.tenant)).items
    return letter.id


def path_of(route: Route, world: World) -> str:
    path = route.path
    for name, value in world.ids.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def body_of(route: Route, world: World) -> object:
    """A body that the route would take."""
    ref = {"job_id": world.job["job_id"], "fence": world.job["fence"]}
    bodies: dict[str, object] = {
        "put_workflow": ONE_STEP,
        "put_schedule": {"workflow_id": "one-step", "every_s": 3600, "paused": True},
        "put_limit": {"topics": ["llm.*"], "max_running": 1},
        "start_batch": {"runs": [{"key": "k"}]},
        "put_shared_workflow": ONE_STEP,
        "submit_job": {"topic": "work"},
        "lease_jobs": {"worker_id": "w", "topics": ["work", "doom"]},
        "renew_leases": {"worker_id": "w", "leases": [ref]},
        "take_results": {"worker_id": "w", "results": [{**ref, "status": "succeeded"}]},
        "put_tenant": {"max_concurrent_runs": 1},
        "patch_settings": {},
        "hold_lease": {"name": "run/y", "ttl_s": 1},
        "start_bulk": {"action": "cancel", "filter": {}, "dry_run": True},
        "create_key": {"role": "runner", "tenant": "first"},
        "set_escalation": {"order": "clear"},
    }
    return bodies.get(route.id, {})


async def call(route: Route, world: World, key: str | None) -> Answer:
    path, body = path_of(route, world), body_of(route, world)
    if route.id != "follow_events":
        return await world.house.ask(route.method, path, body, key=key)
    headers = [] if key is None else [bearer(key)]
    async with opened(world.house.app, route.method, path, headers=headers) as feed:
        await feed.next()
    return await feed.answer()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@EACH
async def test_without_a_key_it_is_401(route: Route, world: World) -> None:
    answer = await call(route, world, None)
    assert (answer.status, answer.code) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer ")


@EACH
@pytest.mark.parametrize("key", ["nonsense", "sk_nobody_secret", "sk__", "sk_{id}_wrong"])
async def test_with_a_wrong_key_it_is_401(route: Route, world: World, key: str) -> None:
    answer = await call(route, world, key.format(id=world.ids["key_id"]))
    assert (answer.status, answer.code) == (401, "unauthenticated")


@EACH
async def test_with_a_revoked_key_it_is_401(route: Route, world: World) -> None:
    key = await world.house.make_key(max(route.roles), "*" if max(route.roles) != "runner" else "a")
    key_id = key.split("_")[1]
    revoked = await world.house.ask("DELETE", f"/v1/admin/keys/{key_id}", key=ADMIN)
    assert revoked.json["revoked_at"] is not None
    answer = await call(route, world, key)
    assert (answer.status, answer.code) == (401, "unauthenticated")


@EACH
async def test_with_a_role_that_is_not_enough_it_is_403(route: Route, world: World) -> None:
    assert Role.ADMIN in route.roles
    for role in set(Role) - route.roles:
        answer = await call(route, world, world.keys[role, "first"])
        assert (answer.status, answer.code) == (403, "forbidden"), role
        needed = str(answer.json["detail"]).partition(";")[0]
        assert all(each in needed for each in route.roles), needed
        assert role not in needed
        assert ("for all tenants ('*')" in needed) is (route.scope is RouteScope.DEPLOYMENT)


@EACH
async def test_all_tenants_are_named_only_where_a_route_is_about_all(
    route: Route, world: World
) -> None:
    path, body = path_of(route, world), body_of(route, world)
    if route.takes_all:
        harmless = path.replace(world.ids["key_id"], "nobody")
        answer = await world.house.ask(route.method, harmless, {"x": 1}, key=ADMIN, tenant="*")
        assert "X-Stanchion-Tenant" not in str(answer.json)
    else:
        answer = await world.house.ask(route.method, path, body, key=ADMIN, tenant="*")
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert answer.json["errors"][0]["path"] == "X-Stanchion-Tenant"
    for role in route.roles:
        key = world.keys[role, "first"]
        answer = await world.house.ask(route.method, path, body, key=key, tenant="*")
        is_for_larger_keys = route.takes_all or route.scope is RouteScope.DEPLOYMENT
        expected = (403, "forbidden") if is_for_larger_keys else (422, "invalid_request")
        assert (answer.status, answer.code) == expected


async def test_without_the_header_lists_outside_of_admin_are_of_the_default_tenant(
    world: World,
) -> None:
    house, runner = world.house, world.keys["runner", "first"]
    await house.ask("PUT", "/v1/workflows/ask", {"steps": {"a": {"approval": {}}}}, key=runner)
    await house.ask("POST", "/v1/workflows/ask/runs", {}, key=runner)
    lists = [each for each in ROUTES if each.takes_all and each.path in _ROWS]
    assert len(lists) == len(_ROWS) + 1  # POST /v1/bulk
    for route in lists:
        if route.method == "GET":
            rows = [
                (await house.ask("GET", route.path, key=ADMIN, tenant=tenant)).json[
                    _ROWS[route.path]
                ]
                for tenant in (None, "*", "default")
            ]
            is_of_all = route.path.startswith("/v1/admin/")
            assert rows[0] == (rows[1] if is_of_all else rows[2]), route.path
            if route.path in {"/v1/runs", "/v1/approvals", "/v1/bulk"}:
                assert len(rows[1]) > len(rows[0]), route.path


_ROWS = {
    "/v1/runs": "runs",
    "/v1/approvals": "approvals",
    "/v1/waits": "waits",
    "/v1/schedules": "schedules",
    "/v1/bulk": "bulks",
    "/v1/admin/workers": "workers",
    "/v1/admin/decisions": "decisions",
}


@EACH
async def test_a_key_for_one_tenant_is_for_that_tenant_whatever_a_header_says(
    route: Route, world: World
) -> None:
    for role in route.roles:
        answer = await world.house.ask(
            route.method,
            path_of(route, world),
            body_of(route, world),
            key=world.keys[role, "second"],
            tenant="first",
        )
        assert (answer.status, answer.code) == (403, "forbidden"), role


# ── The wrong tenant's key ───────────────────────────────────────────────────────────────────────


def not_there(answer: Answer, _world: World) -> bool:
    return (answer.status, answer.code) == (404, "not_found")


def forbidden(answer: Answer, _world: World) -> bool:
    return (answer.status, answer.code) == (403, "forbidden")


def empty(member: str) -> Callable[[Answer, World], bool]:
    return lambda answer, _world: answer.status == 200 and answer.json[member] == []


def own_only(answer: Answer, _world: World) -> bool:
    keys = answer.json["keys"]
    return bool(keys) and all(key["tenant"] == "second" for key in keys)


def own_workers(answer: Answer, _world: World) -> bool:
    return {each["tenant"] for each in answer.json["workers"]} <= {"second"}


def own_entries(answer: Answer, _world: World) -> bool:
    return answer.status == 200 and all(
        entry["tenant"] == "second" for entry in answer.json["entries"]
    )


def its_own(answer: Answer, _world: World) -> bool:
    """It made something for the second tenant: nothing of the first one's was touched."""
    return answer.status == 200


EXPECTED: dict[str, Callable[[Answer, World], bool]] = {
    "start_run": not_there,
    "start_batch": not_there,
    "get_run": not_there,
    "list_runs": empty("runs"),
    "get_timeline": not_there,
    "explain_run": not_there,
    "list_items": not_there,
    "rerun_run": not_there,
    "cancel_run": not_there,
    "list_approvals": empty("approvals"),
    "list_waits": empty("waits"),
    "approve_step": not_there,
    "reject_step": not_there,
    "take_results": lambda answer, world: (
        answer.json["accepted"] == []
        and answer.json["rejected"] == [{"job_id": world.job["job_id"], "code": "unknown_job"}]
    ),
    "lease_jobs": empty("jobs"),
    "renew_leases": lambda answer, world: (
        answer.json["renewed"] == []
        and answer.json["reasons"] == {world.job["job_id"]: "unknown_job"}
    ),
    "ready_topics": forbidden,
    "metrics": forbidden,
    "submit_job": its_own,
    "get_job": not_there,
    "put_workflow": its_own,
    "list_workflows": empty("workflows"),
    "get_workflow": not_there,
    "put_shared_workflow": forbidden,
    "list_shared_workflows": forbidden,
    "get_shared_workflow": forbidden,
    "list_workflow_uses": forbidden,
    "get_upgrade": forbidden,
    "finish_upgrade": forbidden,
    "list_schedules": empty("schedules"),
    "get_schedule": not_there,
    "put_schedule": lambda answer, _world: answer.status == 422,  # it has no such workflow
    "delete_schedule": not_there,
    "trigger_schedule": not_there,
    "follow_events": lambda answer, world: world.ids["run_id"].encode() not in answer.body,
    "put_limit": forbidden,
    "delete_limit": forbidden,
    "get_limit": forbidden,
    "list_limits": forbidden,
    "put_tenant": forbidden,
    "delete_tenant": forbidden,
    "get_tenant": forbidden,
    "list_tenants": forbidden,
    "start_bulk": its_own,
    "list_bulks": empty("bulks"),
    "get_bulk": not_there,
    "stop_bulk": not_there,
    "own_tenant": lambda answer, _world: answer.json["tenant"] == "second",
    "get_settings": forbidden,
    "patch_settings": forbidden,
    "list_leases": forbidden,
    "get_lease": forbidden,
    "hold_lease": forbidden,
    "release_lease": forbidden,
    "get_lock_history": forbidden,
    "list_drills": forbidden,
    "list_dead_letters": empty("dead_letters"),
    "replay_dead_letter": not_there,
    "discard_dead_letter": not_there,
    "create_key": forbidden,
    "list_keys": own_only,
    "revoke_key": not_there,
    "get_drift": forbidden,
    "audit_drift": forbidden,
    "list_replicas": forbidden,
    "list_workers": own_workers,
    "get_escalation": forbidden,
    "set_escalation": forbidden,
    "list_audit": own_entries,
    "list_decisions": empty("decisions"),
    "show_admission": forbidden,
}
MAKERS = ("put_workflow", "submit_job")
"""They leave something with the second tenant, which the lists of others would then show."""
MAKERS_LAST = sorted(GUARDED, key=lambda route: route.id in MAKERS)


@pytest.mark.parametrize("route", MAKERS_LAST, ids=named)
async def test_with_another_tenants_key_nothing_is_seen_or_touched(
    route: Route, world: World
) -> None:
    for role in sorted(route.roles):
        answer = await call(route, world, world.keys[role, "second"])
        assert EXPECTED[route.id](answer, world), (role, answer)


async def test_nothing_of_the_first_tenants_was_touched(world: World) -> None:
    run = await world.house.ask("GET", path_run(world), key=world.keys["runner", "first"])
    assert run.json["status"] == "running"
    for key in (ADMIN, world.keys["runner", "first"]):
        letters = await world.house.ask("GET", "/v1/admin/dead-letters", key=key)
        assert [each["id"] for each in letters.json["dead_letters"]] == [world.letter]
    events = await world.house.ask("GET", "/v1/workflows", key=world.keys["runner", "first"])
    assert {each["version"] for each in events.json["workflows"]} == {1}


def path_run(world: World) -> str:
    return f"/v1/runs/{world.ids['run_id']}"


async def test_every_guarded_route_has_its_row() -> None:
    assert {route.id for route in GUARDED} == set(EXPECTED)
    assert all(route.roles for route in GUARDED)


async def test_events_of_another_tenants_run_are_not_there(world: World) -> None:
    target = f"/v1/events?run_id={world.ids['run_id']}"
    answer = await world.house.ask("GET", target, key=world.keys["runner", "second"])
    assert (answer.status, answer.code) == (404, "not_found")
