"""Both clients: the same calls by the same names, and what each call sends."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import math
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

import stanchion
from stanchion.client import errors
from stanchion.core.retry import Budget, RetryClass
from stanchion.transport.blocking import BlockingTransport
from stanchion.transport.messages import HttpReply, Request
from tests.client.scripted import URL, run_view, started
from tests.transport.tiny_server import answer, tiny_server

CHANGE = {"run_id": "r1", "status": "running", "applied": False}
JOB = {
    "job_id": "r1:job@1",
    "run_id": "r1",
    "step_id": "job",
    "topic": "t",
    "status": "ready",
    "run_status": "running",
    "attempt": 1,
    "deliveries": 0,
    "output": None,
    "error": None,
}
WORKFLOW = {
    "id": "w",
    "version": 3,
    "risk": "high",
    "created_at": "2026-01-01T00:00:00Z",
    "definition": {},
}
YAML = 'steps: {}\n# a file\nid: "my-flow" # the name\n'


class Case(msgspec.Struct, frozen=True):
    """What is called, what that sends, and what the server answers."""

    call: Callable[[Any], Any]
    sends: str
    body: object
    answer: object


BULK = {
    "bulk_id": "b1",
    "action": "cancel",
    "matched": 5,
    "done": 4,
    "failed": 1,
    "errors": [],
    "status": "running",
    "tenant": "acme",
    "filter": {},
    "rate_per_s": 5,
    "actor": "kim",
    "created_at": "2026-11-15T19:00:00Z",
    "finished_at": None,
}
LIMIT = {
    "id": "llm",
    "topics": ["llm.*"],
    "per": "tenant",
    "max_running": 3,
    "rate_per_s": None,
    "running": None,
    "retry_after_ms": None,
}
CASES = {
    "start": Case(
        lambda c: c.start("a/b", {"q": 1}),
        "POST /v1/workflows/a%2Fb/runs",
        {"input": {"q": 1}},
        {"run_id": "r1", "status": "running"},
    ),
    "start with other mappings than dict": Case(
        lambda c: c.start("w", MappingProxyType({"q": MappingProxyType({"deep": [1]})})),
        "POST /v1/workflows/w/runs",
        {"input": {"q": {"deep": [1]}}},
        {"run_id": "r1", "status": "running"},
    ),
    "start without input": Case(
        lambda c: c.start("w"),
        "POST /v1/workflows/w/runs",
        {"input": {}},
        {"run_id": "r1", "status": "running"},
    ),
    "get": Case(lambda c: c.get("r1"), "GET /v1/runs/r1", None, run_view().body),
    "wait": Case(
        lambda c: c.wait("r1", timeout_s=4), "GET /v1/runs/r1?wait=4.000", None, run_view().body
    ),
    "list": Case(
        lambda c: c.list(workflow_id="w", status="running", limit=5, cursor="x="),
        "GET /v1/runs?workflow_id=w&status=running&limit=5&cursor=x%3D",
        None,
        {"runs": [], "cursor": "y"},
    ),
    "list by all filters": Case(
        lambda c: c.list(
            status=["failed", "cancelled"],
            labels={"team": "red", "url": "a:b"},
            since=datetime(2026, 11, 15, tzinfo=UTC),
            rerun_of="r0",
        ),
        "GET /v1/runs?status=failed&status=cancelled&label=team%3Ared&label=url%3Aa%3Ab"
        "&since=2026-11-15T00%3A00%3A00%2B00%3A00&rerun_of=r0&limit=100",
        None,
        {"runs": [], "cursor": None},
    ),
    "start with labels": Case(
        lambda c: c.start("w", labels={"team": "red"}),
        "POST /v1/workflows/w/runs",
        {"input": {}, "labels": {"team": "red"}},
        {"run_id": "r1", "status": "running"},
    ),
    "start_bulk": Case(
        lambda c: c.start_bulk("cancel", labels={"team": "red"}, rate_per_s=5),
        "POST /v1/bulk",
        {"action": "cancel", "filter": {"label": ["team:red"]}, "rate_per_s": 5},
        BULK,
    ),
    "plan_bulk": Case(
        lambda c: c.plan_bulk("rerun", status="failed"),
        "POST /v1/bulk",
        {"action": "rerun", "filter": {"status": ["failed"]}, "dry_run": True},
        {"matched": 3, "by_tenant": {"acme": 3}},
    ),
    "get_bulk": Case(lambda c: c.get_bulk("b1"), "GET /v1/bulk/b1", None, BULK),
    "stop_bulk": Case(lambda c: c.stop_bulk("b1"), "DELETE /v1/bulk/b1", None, BULK),
    "set_limit": Case(
        lambda c: c.set_limit("llm", ("llm.*",), per="tenant", max_running=3),
        "PUT /v1/admin/limits/llm",
        {"topics": ["llm.*"], "per": "tenant", "max_running": 3},
        LIMIT,
    ),
    "get_limit": Case(lambda c: c.get_limit("llm"), "GET /v1/admin/limits/llm", None, LIMIT),
    "delete_limit": Case(
        lambda c: c.delete_limit("llm"), "DELETE /v1/admin/limits/llm", None, LIMIT
    ),
    "why": Case(
        lambda c: c.why("r1"),
        "GET /v1/runs/r1/why",
        None,
        {"run_id": "r1", "status": None, "as_of": "2026-11-15T19:00:00Z", "findings": []},
    ),
    "timeline": Case(
        lambda c: c.timeline("r1"),
        "GET /v1/runs/r1/timeline?limit=1000",
        None,
        {"run_id": "r1", "entries": [], "cursor": None},
    ),
    "cancel": Case(
        lambda c: c.cancel("r1", reason="late"),
        "POST /v1/runs/r1/cancel",
        {"reason": "late"},
        CHANGE,
    ),
    "rerun": Case(
        lambda c: c.rerun("r1", from_step="plan"),
        "POST /v1/runs/r1/rerun",
        {"from_step": "plan"},
        {"run_id": "r2", "status": "running"},
    ),
    "rerun of failed items": Case(
        lambda c: c.rerun("r1", only="failed_items"),
        "POST /v1/runs/r1/rerun",
        {"from_step": None, "only": "failed_items"},
        {"run_id": "r2", "status": "running"},
    ),
    "start_many": Case(
        lambda c: c.start_many(
            "research",
            [{"input": MappingProxyType({"q": 1})}, {"key": "own"}, {"key": ""}],
            idempotency_key="k",
        ),
        "POST /v1/workflows/research/runs/batch",
        {"runs": [{"input": {"q": 1}, "key": "k/0"}, {"key": "own"}, {"key": ""}]},
        {"results": [{"status": 200, "run_id": each} for each in ("r1", "r2", "r3")]},
    ),
    "plan_rerun": Case(
        lambda c: c.plan_rerun("r1", version="newest", input=MappingProxyType({"q": 1})),
        "POST /v1/runs/r1/rerun",
        {"from_step": None, "version": "newest", "input": {"q": 1}, "dry_run": True},
        {
            "rerun_of": "r1",
            "workflow_id": "w",
            "workflow_version": 3,
            "version": "newest",
            "steps": {"plan": {"action": "runs_again"}},
        },
    ),
    "approve": Case(
        lambda c: c.approve("r1", "publish.review", comment="fine", data={"n": 1}),
        "POST /v1/runs/r1/steps/publish.review/approve",
        {"comment": "fine", "data": {"n": 1}},
        CHANGE,
    ),
    "reject": Case(
        lambda c: c.reject("r1", "review"),
        "POST /v1/runs/r1/steps/review/reject",
        {"comment": None},
        CHANGE,
    ),
    "submit_job": Case(
        lambda c: c.submit_job("agent.plan", None),
        "POST /v1/jobs",
        {"topic": "agent.plan", "input": None},
        {"job_id": "j", "run_id": "r1", "status": "pending"},
    ),
    "submit_job without input": Case(
        lambda c: c.submit_job("agent.plan"),
        "POST /v1/jobs",
        {"topic": "agent.plan", "input": {}},
        {"job_id": "j", "run_id": "r1", "status": "pending"},
    ),
    "job": Case(lambda c: c.job("r1:s[2]@1"), "GET /v1/jobs/r1%3As%5B2%5D%401", None, JOB),
    "apply_workflow": Case(
        lambda c: c.apply_workflow({"id": "w", "steps": {}}),
        "PUT /v1/workflows/w",
        {"id": "w", "steps": {}},
        {"id": "w", "version": 1},
    ),
    "workflow": Case(
        lambda c: c.workflow("w", version=3), "GET /v1/workflows/w?version=3", None, WORKFLOW
    ),
    "workflows": Case(
        lambda c: c.workflows(), "GET /v1/workflows?limit=100", None, {"workflows": []}
    ),
    "apply_workflow shared": Case(
        lambda c: c.apply_workflow({"id": "w", "steps": {}}, shared=True),
        "PUT /v1/shared/workflows/w",
        {"id": "w", "steps": {}},
        {"id": "w", "version": 2},
    ),
    "workflow shared": Case(
        lambda c: c.workflow("w", shared=True), "GET /v1/shared/workflows/w", None, WORKFLOW
    ),
    "workflow_usage": Case(
        lambda c: c.workflow_usage("w", limit=2),
        "GET /v1/shared/workflows/w/usage?limit=2",
        None,
        {"tenants": []},
    ),
    "request": Case(
        lambda c: c.request("PUT", "/v1/admin/tenants/acme", {"max_concurrent_runs": 2}),
        "PUT /v1/admin/tenants/acme",
        {"max_concurrent_runs": 2},
        {"max_concurrent_runs": 2},
    ),
}


@pytest.mark.parametrize("kind", ["blocking", "async"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_call_sends_what_the_api_says(case: Case, kind: str) -> None:
    told = case.answer if isinstance(case.answer, bytes) else msgspec.json.encode(case.answer)

    async def main(url: str) -> None:
        async with stanchion.AsyncClient(url, api_key="sk_1", tenant="acme") as client:
            await case.call(client)

    with tiny_server(lambda _heard: answer(told)) as server:
        if kind == "async":
            asyncio.run(main(server.url))
        else:
            with stanchion.Client(server.url, api_key="sk_1", tenant="acme") as client:
                case.call(client)
    [heard] = server.heard
    # What is left of the four seconds: some milliseconds may pass before it is sent.
    path = re.sub(r"(?<=[?]wait=)3[.]9\d\d$", "4.000", heard.path)
    assert f"{heard.method} {path}" == case.sends
    assert (msgspec.json.decode(heard.body) if heard.body else None) == case.body
    assert heard.headers["authorization"] == "Bearer sk_1"
    assert heard.headers["x-stanchion-tenant"] == "acme"
    if case.body is not None:
        assert heard.headers["content-type"] == "application/json"


def public(kind: type) -> dict[str, str]:
    """Every method, with what it takes."""
    found = inspect.getmembers(kind, inspect.isroutine)
    empty = inspect.Signature.empty
    return {
        name: str(inspect.signature(each).replace(return_annotation=empty))
        for name, each in found
        if name[0] != "_"
    }


@pytest.mark.parametrize(
    ("blocking", "other"),
    [
        (stanchion.Client, stanchion.AsyncClient),
        (stanchion.RunHandle, stanchion.AsyncRunHandle),
    ],
)
def test_the_two_clients_can_do_the_same(blocking: type, other: type) -> None:
    assert public(blocking) == public(other)
    assert len(public(blocking)) >= 8
    assert all(getattr(blocking, name).__doc__ for name in public(blocking))


BOTH = [
    (stanchion.Client, "RunHandle", "Generator[Event, None, None]"),
    (stanchion.AsyncClient, "AsyncRunHandle", "AsyncGenerator[Event, None]"),
]


@pytest.mark.parametrize(("kind", "handle", "feed"), BOTH)
def test_help_shows_what_one_calls(kind: Any, handle: str, feed: str) -> None:  # noqa: ANN401 - either
    for name in public(kind):
        method = getattr(kind, name)
        assert (method.__name__, method.__qualname__) == (name, f"{kind.__name__}.{name}")
        assert method.__module__ == kind.__module__
        assert inspect.unwrap(method) is method
        for internal in ("engine", "Op[", "Feed["):
            assert internal not in str(inspect.signature(method))
            assert internal not in str(method.__annotations__)
    text = pydoc.plain(pydoc.render_doc(kind.start))
    assert "workflow_id: 'str'" in text
    returned = {name: inspect.signature(getattr(kind, name)).return_annotation for name in CALLS}
    assert returned == {"start": handle, "get": "RunView", "events": feed}


CALLS = ("start", "get", "events")


@pytest.mark.parametrize("kind", [stanchion.RunHandle, stanchion.AsyncRunHandle])
def test_a_handle_does_not_ask_for_the_run_it_knows(kind: type) -> None:
    assert all("run_id" not in taken for taken in public(kind).values())
    assert str(inspect.signature(kind.wait)).startswith("(self, /, *, timeout_s:")  # type: ignore[attr-defined] # both have it


def test_every_call_of_the_api_was_tried_above() -> None:
    tried = {name.partition(" ")[0] for name in CASES}
    assert set(public(stanchion.Client)) - tried == {
        "approvals",
        "bulks",
        "close",
        "events",
        "items",
        "limits",
        "runs",
    }


def test_a_client_closes_the_connections_that_it_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(BlockingTransport, "close", lambda _: closed.append("once"))
    with stanchion.Client(URL):
        assert closed == []
    assert closed == ["once"]


def test_a_handle_knows_its_run() -> None:
    answers = [
        started().body,
        run_view().body,
        msgspec.json.encode(CHANGE),
        msgspec.json.encode(CHANGE),
        started("r2").body,
    ]
    with (
        tiny_server(lambda heard: answer(answers[heard.number - 1])) as server,
        stanchion.Client(server.url, timeout_s=math.inf) as client,
    ):
        run = client.start("w")
        assert run.wait(timeout_s=60).output == {"answer": 42}
        assert not run.approve("review").applied
        run.cancel(reason="enough")
        assert run.rerun().run_id == "r2"
        assert "r1" in repr(run)
    assert [heard.path for heard in server.heard][1:] == [
        "/v1/runs/r1?wait=25.000",
        "/v1/runs/r1/steps/review/approve",
        "/v1/runs/r1/cancel",
        "/v1/runs/r1/rerun",
    ]


def test_all_runs_are_read_page_by_page_as_they_are_needed() -> None:
    row = {
        "workflow_id": "w",
        "workflow_version": 1,
        "status": "running",
        "created_at": "2026-01-01T00:00:00Z",
        "finished_at": None,
        "error": None,
    }
    pages = [
        {"runs": [{"run_id": "a", **row}, {"run_id": "b", **row}], "cursor": "1"},
        {"runs": [], "cursor": "2"},  # A filter may leave a page empty that is not the last.
        {"runs": [{"run_id": "c", **row}], "cursor": None},
    ]
    with (
        tiny_server(lambda heard: answer(msgspec.json.encode(pages[heard.number - 1]))) as server,
        stanchion.Client(server.url) as client,
    ):
        following = client.runs(workflow_id="w")
        assert next(following).run_id == "a"
        assert len(server.heard) == 1
        assert [each.run_id for each in following] == ["b", "c"]
    assert [heard.path.partition("cursor=")[2] for heard in server.heard] == ["", "1", "2"]


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_items_and_approvals_are_read_page_by_page(kind: str) -> None:
    item = {"status": "failed", "attempt": 1, "output": None, "error": None, "job_id": None}
    ask: dict[str, Any] = {"run_id": "r1", "tenant": "acme", "workflow_id": "w"}
    ask["since"] = "2026-01-01T00:00:00Z"
    ask |= dict.fromkeys(("item", "ask", "message", "data", "data_schema", "expires_at"))
    ask |= {"starter": None, "labels": {}}
    pages = [
        {"items": [{"index": 3, **item}], "cursor": "4"},
        {"items": [{"index": 7, **item}], "cursor": None},
        {"approvals": [{"step_id": "a", **ask}], "cursor": "1"},
        {"approvals": [{"step_id": "b", **ask}], "cursor": None},
    ]

    async def both(url: str) -> tuple[list[int], list[str]]:
        async with stanchion.AsyncClient(url) as client:
            items = [row.index async for row in client.items("r1", "each", status="failed")]
            return items, [row.step_id async for row in client.approvals()]

    with tiny_server(lambda heard: answer(msgspec.json.encode(pages[heard.number - 1]))) as server:
        if kind == "async":
            seen = asyncio.run(both(server.url))
        else:
            with stanchion.Client(server.url) as client:
                items = [row.index for row in client.items("r1", "each", status="failed")]
                seen = items, [row.step_id for row in client.approvals()]
    assert seen == ([3, 7], ["a", "b"])
    assert [heard.path for heard in server.heard] == [
        "/v1/runs/r1/steps/each/items?status=failed&limit=1000",
        "/v1/runs/r1/steps/each/items?status=failed&limit=1000&cursor=4",
        "/v1/approvals?limit=100",
        "/v1/approvals?limit=100&cursor=1",
    ]


@pytest.mark.parametrize(
    ("definition", "path", "media"),
    [
        (YAML, "/v1/workflows/my-flow", "application/yaml"),
        ("id:   plain\r\nsteps: {}", "/v1/workflows/plain", "application/yaml"),
        ('{"steps": {}, "id": "in-json"}', "/v1/workflows/in-json", "application/json"),
        ({"id": "from-dict"}, "/v1/workflows/from-dict", "application/json"),
    ],
)
def test_a_workflow_goes_where_its_file_says(
    definition: str | dict[str, Any], path: str, media: str
) -> None:
    with (
        tiny_server(lambda _heard: answer(b'{"id": "w", "version": 1}')) as server,
        stanchion.Client(server.url) as client,
    ):
        assert client.apply_workflow(definition).version == 1
    [heard] = server.heard
    assert (heard.path, heard.headers["content-type"]) == (path, media)
    if isinstance(definition, str):
        assert heard.body.decode() == definition


class Unused:
    """A transport that must not be used."""

    def send(self, request: Request) -> HttpReply:
        raise AssertionError(request)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.get(""),
        lambda c: c.get(".."),
        lambda c: c.approve("r1", "."),
        lambda c: c.start(""),
        lambda c: c.apply_workflow("steps: {}"),
        lambda c: c.apply_workflow({"steps": {}}),
        lambda c: c.apply_workflow("[]"),
        lambda c: c.start("w", {"a": [{"b": float("nan")}]}),
        lambda c: c.submit_job("t", float("inf")),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
    call: Callable[[Any], Any],
) -> None:
    with pytest.raises(ValueError, match=r"must not be|has no id|NaN"):
        call(stanchion.Client(URL, transport=Unused()))


@pytest.mark.parametrize(
    "arguments",
    [
        {"api_key": "a\r\nb"},
        {"api_key": ""},
        {"tenant": "a b"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
    ],
)
def test_a_client_that_could_not_work_is_not_made(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))) as caught:
        stanchion.Client(URL, **arguments)
    assert "a\r\nb" not in str(caught.value)


def test_server_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_server(lambda _heard: answer(b'{"workflows": []}')) as server:
        monkeypatch.setenv("STANCHION_URL", server.url)
        monkeypatch.setenv("STANCHION_API_KEY", "sk_env")
        for key in (None, "sk_own"):
            with stanchion.Client(api_key=key) as client:
                client.workflows()
    keys = [heard.headers.get("authorization") for heard in server.heard]
    assert keys == ["Bearer sk_env", "Bearer sk_own"]


def test_a_real_failure_names_the_fix_and_is_bounded_by_the_budget() -> None:
    nothing = {each: Budget(tokens_max=0, refill_per_s=0) for each in RetryClass}
    pace = stanchion.Pace(budgets=stanchion.RetryBudgets(nothing))
    with (
        stanchion.Client("http://127.0.0.1:9", pace=pace) as client,
        pytest.raises(stanchion.ServerUnavailable, match="is the server running") as caught,
    ):
        client.start("w")
    assert caught.value.gave_up is errors.GaveUpBecause.BUDGET_SPENT


def test_a_blocking_client_pays_for_no_event_loop_and_no_server() -> None:
    # 100 ms are held by the benchmark. What costs most is named here.
    code = "import sys, stanchion; stanchion.Client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()
    heavy = {"asyncio", "ssl", "http.client", "email", "logging", "httpx2", "starlette", "redis"}
    heavy |= {"opentelemetry"}
    assert heavy & set(loaded) == set()
    ours = {name.split(".")[1] for name in loaded if name.startswith("stanchion.")}
    assert ours == {"client", "core", "telemetry", "transport", "wire"}
    third = {"msgspec", "cel_expr_python", "jsonschema_rs", "yaml", "apsw", "click"}
    assert third & set(loaded) == {"msgspec"}


def test_only_what_is_public_is_shown_and_the_version_is_known() -> None:
    assert dir(stanchion) == sorted([*stanchion.__all__, "__version__"])
    assert stanchion.__version__ == importlib.metadata.version("stanchion")


def test_every_public_name_is_there() -> None:
    assert [name for name in stanchion.__all__ if not hasattr(stanchion, name)] == []
    assert stanchion.TenantFull is errors.TenantFull
