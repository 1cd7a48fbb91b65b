"""Workflow files over HTTP: versions, faults, sub-workflows, and expensive ones."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from stanchion.core.model import TenantId
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow
from stanchion.gateway.views import definition
from stanchion.services.work import WAITING_MAX
from tests.gateway.house import ONE_STEP, House, older_store, opened_house

YAML = b"""
id: research
risk: high
lock_policy: {on_renewal_lost: fence}
timeout_s: 600
input_schema: {type: object}
steps:
  plan:
    topic: agent.plan
    input: {q: "${input.q}"}
    retry: {max_attempts: 3, backoff: {kind: fixed, delay_ms: 5}}
  search:
    topic: agent.search
    needs: [plan]
    for_each: "${steps.plan.output.queries}"
    input: {q: "${item}"}
  cool:    {delay_s: 5, needs: [search]}
  review: {approval: {message: "Fine?"}, needs: [cool], when: "input.review", timeout_s: 60}
  again:   {approval: {}}
output: "${steps.search.output}"
"""


@pytest.mark.parametrize(
    "kind", ["application/yaml", "text/yaml; charset=utf-8", "application/x-yaml"]
)
async def test_yaml_is_told_by_its_content_type(house: House, kind: str) -> None:
    headers = [("Content-Type", kind)]
    answer = await house.ask("PUT", "/v1/workflows/research", YAML, headers=headers)
    assert (answer.status, answer.json) == (200, {"id": "research", "version": 1})


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", None])
async def test_yaml_without_its_content_type_is_refused_with_the_type_to_send(
    house: House, kind: str | None
) -> None:
    headers = [] if kind is None else [("Content-Type", kind)]
    refused = await house.ask("PUT", "/v1/workflows/research", YAML, headers=headers)
    assert (refused.status, refused.code) == (422, "invalid_workflow")
    assert refused.json["detail"].endswith("; send YAML with Content-Type: application/yaml")
    for text in (b"", b' {"steps": {}'):  # not YAML that was sent as something else
        refused = await house.ask("PUT", "/v1/workflows/research", text, headers=headers)
        assert (refused.status, "YAML" in refused.json["detail"]) == (422, False)


async def test_the_same_workflow_keeps_its_version_and_another_gets_the_next(house: House) -> None:
    path = "/v1/workflows/one-step"
    for version, steps in [(1, "work"), (1, "work"), (2, "play")]:
        answer = await house.ask("PUT", path, {"steps": {"only": {"topic": steps}}})
        assert answer.json == {"id": "one-step", "version": version}
    newest = await house.ask("GET", path)
    assert newest.json["version"] == 2
    first = await house.ask("GET", f"{path}?version=1")
    assert first.json["definition"]["steps"] == {"only": {"topic": "work"}}
    later = await house.ask("GET", f"{path}?version=3")
    there = "there is no version 3 of workflow 'one-step': version 2 is in force"
    assert (later.status, later.json["detail"]) == (404, there)
    absent = await house.ask("GET", "/v1/workflows/absent?version=3")
    assert (absent.status, absent.json["detail"]) == (404, "there is no such workflow")


async def test_what_is_wrong_with_a_file_is_said_place_by_place(house: House) -> None:
    wrong = {"steps": {"a": {"topic": "x y"}, "b": {"topic": "t", "needs": ["c"]}}, "risc": 1}
    answer = await house.ask("PUT", "/v1/workflows/bad", wrong)
    assert (answer.status, answer.code) == (422, "invalid_workflow")
    paths = {error["path"] for error in answer.json["errors"]}
    assert paths == {"steps.a.topic", "steps.b.needs[0]", "risc"}
    assert all(error["message"] for error in answer.json["errors"])
    assert (await house.ask("GET", "/v1/workflows/bad")).status == 404


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"steps: {", b"[]", b"NaN"])
async def test_text_that_is_no_workflow_is_422_with_errors(house: House, body: bytes) -> None:
    for kind in ("application/json", "application/yaml"):
        headers = [("Content-Type", kind)]
        answer = await house.ask("PUT", "/v1/workflows/bad", body, headers=headers)
        assert (answer.status, answer.code) == (422, "invalid_workflow")
        assert answer.json["errors"]


async def test_a_file_that_says_another_name_is_refused(house: House) -> None:
    answer = await house.ask("PUT", "/v1/workflows/one", {"id": "two", **ONE_STEP})
    assert answer.status == 422
    assert answer.json["errors"][0]["path"] == "id"


async def test_a_sub_workflow_must_be_there_and_circles_are_refused(house: House) -> None:
    outer = {"steps": {"a": {"workflow": "inner"}}}
    answer = await house.ask("PUT", "/v1/workflows/outer", outer)
    assert (answer.status, answer.code) == (422, "invalid_workflow")
    assert answer.json["errors"] == [
        {"path": "steps.a.workflow", "message": "there is no workflow 'inner'", "line": 1}
    ]
    assert (await house.ask("PUT", "/v1/workflows/inner", ONE_STEP)).status == 200
    assert (await house.ask("PUT", "/v1/workflows/outer", outer)).status == 200
    circle = await house.ask("PUT", "/v1/workflows/inner", {"steps": {"b": {"workflow": "outer"}}})
    assert "circle" in circle.json["errors"][0]["message"]
    # Another tenant's is not there.
    other = await house.ask("PUT", "/v1/workflows/outer", outer, tenant="second")
    assert other.status == 422


async def test_lists_have_pages(house: House) -> None:
    for name in ("a", "b", "c"):
        await house.ask("PUT", f"/v1/workflows/{name}", ONE_STEP)
    seen, cursor = [], ""
    while True:
        page = (await house.ask("GET", f"/v1/workflows?limit=2{cursor}")).json
        seen += [row["id"] for row in page["workflows"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == ["a", "b", "c"]


def test_what_is_shown_of_a_workflow_can_be_sent_again() -> None:
    workflow = parse_workflow(YAML, format="yaml")
    assert isinstance(workflow, Workflow)
    text = msgspec.json.encode(definition(workflow))
    assert parse_workflow(text, format="json") == workflow


def test_times_are_shown_as_they_were_sent() -> None:
    sent = {
        "id": "timed",
        "timeout_s": 600,
        "steps": {
            "call": {"topic": "x", "attempt_timeout_s": 2.5, "timeout_s": 30},
            "wait": {"delay_s": 5, "needs": ["call"]},
            "ask": {"approval": {"timeout_s": 60}, "needs": ["wait"]},
        },
    }
    workflow = parse_workflow(msgspec.json.encode(sent), format="json")
    assert isinstance(workflow, Workflow)
    assert msgspec.json.encode(definition(workflow), order="sorted") == msgspec.json.encode(
        sent, order="sorted"
    )


def test_numbers_in_place_of_an_input_or_output_are_shown_as_they_were_sent() -> None:
    # As an integer, 1e22 would be refused when it is sent again.
    sent = {"id": "counted", "output": 3.0, "steps": {"a": {"topic": "x", "input": 1e22}}}
    workflow = parse_workflow(msgspec.json.encode(sent), format="json")
    assert isinstance(workflow, Workflow)
    shown = msgspec.json.encode(definition(workflow), order="sorted")
    assert shown == msgspec.json.encode(sent, order="sorted")


async def test_expensive_files_are_read_one_at_a_time_and_others_go_on() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(10)

    async with opened_house() as house:
        reading = asyncio.create_task(house.services.executor.run(TenantId("acme"), slow))
        await asyncio.to_thread(begun.wait, 10)
        assert (await house.ask("GET", "/livez")).status == 200
        path = "/v1/workflows/other"
        puts = [
            asyncio.create_task(house.ask("PUT", path, ONE_STEP, tenant="acme"))
            for _ in range(WAITING_MAX + 4)
        ]
        refused = [await each for each in puts[WAITING_MAX:]]
        assert {(each.status, each.code) for each in refused} == {(429, "tenant_overloaded")}
        other = asyncio.create_task(house.ask("PUT", path, ONE_STEP, tenant="globex"))
        go_on.set()
        await reading
        assert (await other).status == 200
        assert {(await each).status for each in puts[:WAITING_MAX]} == {200}


async def _share(house: House, name: str, **steps: object) -> None:
    answer = await house.ask("PUT", f"/v1/shared/workflows/{name}", {"steps": steps})
    assert answer.status == 200, answer.body


async def test_every_tenant_runs_a_shared_workflow_by_own_pin_or_newest(house: House) -> None:
    await _share(house, "inner", work={"topic": "a"})
    await _share(house, "flow", sub={"workflow": "inner"})
    await _share(house, "flow", sub={"workflow": "inner"}, more={"topic": "b"})
    own = {"steps": {"only": {"topic": "own"}}}
    await house.ask("PUT", "/v1/workflows/flow", own, tenant="owner")
    config = {"max_concurrent_runs": 5, "workflows": {"flow": 1}}
    pinned = await house.ask("PUT", "/v1/admin/tenants/pinner", config)
    assert pinned.json["workflows"] == {"flow": 1}
    seen = []
    for tenant in ("newest", "owner", "pinner"):
        found = (await house.ask("GET", "/v1/workflows/flow", tenant=tenant)).json
        listed = (await house.ask("GET", "/v1/workflows", tenant=tenant)).json["workflows"]
        (row,) = [each for each in listed if each["id"] == "flow"]
        started = await house.ask("POST", "/v1/workflows/flow/runs", {}, tenant=tenant)
        path = f"/v1/runs/{started.json['run_id']}"
        run = (await house.ask("GET", path, tenant=tenant)).json
        assert (row["source"], row["version"]) == (found["source"], found["version"])
        assert (run["workflow_source"], run["workflow_version"]) == (row["source"], row["version"])
        seen.append((found["source"], found["version"], found["pinned"], sorted(run["steps"])))
        inner = [{"id": "inner", "version": 1, "source": "shared"}]
        assert run["uses"] == ([] if tenant == "owner" else inner)
    assert seen == [
        ("shared", 2, False, ["more", "sub", "sub.work"]),
        ("own", 1, False, ["only"]),
        ("shared", 1, True, ["sub", "sub.work"]),
    ]
    other = await house.ask("GET", "/v1/workflows/flow?source=shared&version=2", tenant="owner")
    assert list(other.json["definition"]["steps"]) == ["sub", "more"]
    assert (await house.ask("GET", "/v1/workflows/inner?source=own")).status == 404
    assert (await house.ask("GET", "/v1/workflows/flow?source=both")).status == 422
    first = (await house.ask("GET", "/v1/shared/workflows/flow/usage?limit=2")).json
    rest = (
        await house.ask("GET", f"/v1/shared/workflows/flow/usage?cursor={first['cursor']}")
    ).json
    rows = [*first["tenants"], *rest["tenants"]]
    assert [tuple(row.values()) for row in rows] == [
        ("newest", "shared", 2, None, 1),
        ("owner", "own", 1, None, 0),
        ("pinner", "shared", 1, 1, 1),
    ]
    older = await house.ask("GET", "/v1/shared/workflows/flow?version=1")
    assert list(older.json["definition"]["steps"]) == ["sub"]
    listed = (await house.ask("GET", "/v1/shared/workflows")).json["workflows"]
    assert [(each["id"], each["version"], each["source"]) for each in listed] == [
        ("flow", 2, "shared"),
        ("inner", 1, "shared"),
    ]


async def test_a_planned_rerun_names_the_source_of_its_workflow(house: House) -> None:
    await _share(house, "flow", only={"topic": "t"})
    run_id = (await house.ask("POST", "/v1/workflows/flow/runs", {})).json["run_id"]
    assert (await house.ask("POST", f"/v1/runs/{run_id}/cancel")).status == 200
    await house.ask("PUT", "/v1/workflows/flow", ONE_STEP)
    for version, source in (("same", "shared"), ("newest", "own")):
        asked = {"version": version, "dry_run": True}
        plan = (await house.ask("POST", f"/v1/runs/{run_id}/rerun", asked)).json
        assert (plan["workflow_version"], plan["workflow_source"]) == (1, source)


async def test_what_is_missing_of_a_shared_workflow_is_named(house: House) -> None:
    await house.ask("PUT", "/v1/workflows/inner", ONE_STEP)
    body = {"steps": {"sub": {"workflow": "inner"}}}
    answer = await house.ask("PUT", "/v1/shared/workflows/flow", body)
    assert (answer.status, answer.code) == (422, "invalid_workflow")
    (error,) = answer.json["errors"]
    assert error["path"] == "steps.sub.workflow"
    assert error["message"] == "there is no shared workflow 'inner'"
    for path in ("flow", "flow?version=1", "flow/usage"):
        assert (await house.ask("GET", f"/v1/shared/workflows/{path}")).status == 404
    await _share(house, "flow", only={"topic": "t"})
    later = await house.ask("GET", "/v1/shared/workflows/flow?version=2")
    there = "there is no version 2 of shared workflow 'flow': version 1 is in force"
    assert (later.status, later.json["detail"]) == (404, there)
    for pins, path in (({"flow": 2}, "workflows.flow"), ({"none": 1}, "workflows.none")):
        answer = await house.ask("PUT", "/v1/admin/tenants/acme", {"workflows": pins})
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert answer.json["errors"][0]["path"] == path
    # A tenant's own workflow may contain a shared one.
    contains = {"steps": {"sub": {"workflow": "flow"}}}
    assert (await house.ask("PUT", "/v1/workflows/outer", contains)).status == 200


BUDGET = {"limit": 5, "window": "day"}


async def test_shared_workflows_and_budgets_wait_until_no_older_process_is_left(
    house: House,
) -> None:
    await _share(house, "flow", only={"topic": "t"})
    older_store(house)

    async def refused() -> list[str]:
        """What each request that an older replica would break is told to do."""
        answers = [
            await house.ask("PUT", "/v1/shared/workflows/flow", ONE_STEP),
            await house.ask("PUT", "/v1/admin/tenants/acme", {"workflows": {"flow": 1}}),
            await house.ask("PUT", "/v1/admin/tenants/acme", {"budgets": {"tokens": BUDGET}}),
            await house.ask("PUT", "/v1/admin/limits/llm", {"topics": ["llm"], "max_running": 1}),
        ]
        for answer in answers:
            assert (answer.status, answer.code) == (409, "upgrade_unfinished"), answer.body
            assert answer.json["retry_class"] is None
        return [answer.json["remedy"] for answer in answers]

    assert all("stanchion upgrade finish" in each for each in await refused())
    seen = (await house.ask("GET", "/v1/admin/upgrade")).json
    assert (seen["finished"], seen["level"], seen["older"]) == (False, 1, [])
    store = house.services.store
    await store.report_replica("old-1", {"version": "0.1.9"}, keep_ms=60_000)
    assert all("old-1 (0.1.9)" in each for each in await refused())
    denied = await house.ask("POST", "/v1/admin/upgrade", {})
    assert (denied.status, denied.code) == (409, "upgrade_unfinished")
    seen = (await house.ask("GET", "/v1/admin/upgrade")).json
    assert [each["replica"] for each in seen["older"]] == ["old-1"]
    await store.remove_replica("old-1")
    assert (await house.ask("POST", "/v1/admin/upgrade")).json["finished"] is True
    await _share(house, "flow", only={"topic": "u"})
    # An older replica of a version that reports is noticed also afterwards.
    await store.report_replica("old-2", {"version": "0.1.9"}, keep_ms=60_000)
    assert all("old-2" in each for each in await refused())
    assert (await house.ask("PUT", "/v1/admin/tenants/acme", {})).status == 200
