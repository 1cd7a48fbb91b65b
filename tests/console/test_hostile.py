"""Hostile content: what workflows, workers and callers write is shown as text, on every page."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import pytest
import pytest_asyncio

from stanchion.console.pages import PAGES
from tests.console.visits import Element, opened_console, parsed
from tests.gateway.house import ADMIN, House

LOUD = '"><script src=//evil></script><img src=x onerror=alert(1)>{{7*7}}<style>*{}</style>'
BENT = "gepj.exe"
EVIL = f"{LOUD}\u202e{BENT}"
WORKER = LOUD.replace(" ", "/")[:128]
WORKFLOW = {
    "steps": {
        "job": {"topic": "hostile", "input": {"echo": "${input}"}},
        "ask": {"approval": {"message": f"May {EVIL} ${{input.q}}?"}},
        "last": {"topic": "never", "needs": ["ask", "job"]},
    },
    "input_schema": {
        "type": "object",
        "title": EVIL,
        "properties": {EVIL: {"type": "string", "description": EVIL, "default": EVIL}},
    },
}
SEEN = {"aria-label", "data-confirm", "data-detail", "data-yes", "placeholder", "title"}
"""Attributes that are shown or read out."""
TURNING = re.compile("[\\u200b\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pages() -> AsyncIterator[dict[str, list[Element]]]:
    async with opened_console() as console:
        house = console.house
        run_id = await _poisoned(house)
        browser = await console.browser(ADMIN)
        found: dict[str, list[Element]] = {}
        for page in PAGES:
            path = page.path.format_map(_Params(run_id))
            answer = await browser.get(f"{path}?tenant=first&q={LOUD[:20]}&did={LOUD[:20]}")
            assert answer.status == (404 if "unknown" in path else 200), path
            found[page.path] = parsed(answer.body)
        unknown = await browser.get("/console/%3Cscript%3E?tenant=%22%3E%3Cscript%3E")
        found["a page that does not exist"] = parsed(unknown.body)
        yield found


class _Params(dict[str, str]):
    """Values for all parameters of paths."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id=run_id, workflow_id="hostile", step_id="job", schedule_id="hostile")

    def __missing__(self, key: str) -> str:
        return "unknown"


async def _poisoned(house: House) -> str:
    """Hostile text in everything that callers, workers and operators may write."""

    async def ask(method: str, path: str, body: object) -> dict[str, object]:
        answer = await house.ask(method, path, body, key=ADMIN, tenant="first")
        assert answer.status == 200, answer.body
        return dict(answer.json)

    await ask("PUT", "/v1/workflows/hostile", WORKFLOW)
    shared = await house.ask("PUT", "/v1/shared/workflows/hostile", WORKFLOW, key=ADMIN)
    assert shared.status == 200, shared.body
    start = {
        "input": {"q": EVIL, EVIL: EVIL},
        "labels": {"<script/src=//evil>": "<img/src=x/onerror=alert(1)>"},
    }
    run_id = str((await ask("POST", "/v1/workflows/hostile/runs", start))["run_id"])
    asked = {"worker_id": WORKER, "topics": ["hostile"], "wait_s": 1}
    jobs: Any = (await ask("POST", "/v1/worker/lease", asked))["jobs"]
    job = jobs[0]
    ref = {"job_id": job["job_id"], "fence": job["fence"]}
    renewed = {"worker_id": WORKER, "leases": [{**ref, "progress": {EVIL: EVIL}}]}
    await ask("POST", "/v1/worker/renew", renewed)
    error = {"code": "hostile", "message": EVIL}
    failed = {**ref, "status": "failed", "error": error}
    await ask("POST", "/v1/worker/results", {"worker_id": WORKER, "results": [failed]})
    other = str((await ask("POST", "/v1/workflows/hostile/runs", start))["run_id"])
    await ask("POST", f"/v1/runs/{other}/cancel", {"reason": LOUD})
    await ask("POST", "/v1/admin/keys", {"role": "runner", "tenant": "first", "note": EVIL})
    schedule = {"workflow_id": "hostile", "every_s": 3_600, **start}
    await ask("PUT", "/v1/schedules/hostile", schedule)
    await ask("POST", "/v1/schedules/hostile/trigger", {})
    return run_id


DEEP, HALF, LONG = "[" * 3_000, '{"a":"\\ud800"}', "9" * 5_000
FREE = {"steps": {"ask": {"approval": {"message": "?", "data_schema": {}}}}}
BOXES = {
    "steps": {
        "ask": {
            "approval": {
                "message": "?",
                "data_schema": {"type": "object", "properties": {"j": {}}},
            }
        }
    },
    "input_schema": {
        "type": "object",
        "properties": {"j": {}, "n": {"type": "array", "items": {"type": "integer"}}},
    },
}


async def test_texts_that_the_api_would_refuse_are_422_and_stay_in_the_form() -> None:
    async with opened_console() as console:
        house = console.house
        for name, definition in (("free", FREE), ("boxes", BOXES)):
            path = f"/v1/workflows/{name}"
            put = await house.ask("PUT", path, definition, key=ADMIN, tenant="first")
            assert put.status == 200, put.body
        begun = await house.ask(
            "POST", "/v1/workflows/boxes/runs", {"input": {}}, key=ADMIN, tenant="first"
        )
        run_id = begun.json["run_id"]
        ended = await house.ask(
            "POST", "/v1/workflows/free/runs", {"input": {}}, key=ADMIN, tenant="first"
        )
        other = ended.json["run_id"]
        await house.ask("POST", f"/v1/runs/{other}/cancel", {}, key=ADMIN, tenant="first")
        browser = await console.browser(ADMIN)
        await browser.get("/console?tenant=first")
        schedule = {"schedule_id": "s", "workflow_id": "free", "every_s": "60"}
        made = await browser.post("/console/schedules", tenant="first", **schedule)
        assert made.status == 303, made.body
        decision = {"run_id": run_id, "step_id": "ask", "verdict": "approve"}
        queue = {"of": "first", "on_full": "queue", "queue_max": "1", "queue_wait_s": "1"}
        limit = {"limit_id": "l", "topics": "a"}
        for path, fields, name, typed in (
            ("schedules", schedule, "input", DEEP),
            ("schedules", schedule, "input", HALF),
            ("schedules", schedule, "every_s", LONG),
            ("schedules", schedule, "every_s", "soon"),
            ("schedules/s", schedule, "input", DEEP),
            ("schedules/s", schedule, "jitter_s", LONG),
            (f"runs/{other}/rerun", {}, "input", DEEP),
            (f"runs/{other}/rerun", {}, "input", HALF),
            ("admission/cap", {"of": "first"}, "limit", LONG),
            ("admission/queue", queue, "queue_max", LONG),
            ("admission/queue", queue, "queue_wait_s", "nan"),
            ("workflows/free/start", {}, "input", HALF),
            ("workflows/free/start", {}, "input", DEEP),
            ("workflows/free/start", {}, "input", "1e999"),
            ("workflows/boxes/start", {}, "input.j", HALF),
            ("workflows/boxes/start", {}, "input.n", LONG),
            ("approvals/decide", decision, "data.j", '"\\ud800"'),
            ("limits/put", limit, "max_running", LONG),
            ("limits/put", limit, "rate_per_s", "inf"),
            ("policies", {}, "critical.renewal_failures_max", LONG),
            ("bulk", {"action": "cancel", "everything": "yes"}, "rate_per_s", "nan"),
            ("escalation/order", {"order": "close"}, "hours", LONG),
        ):
            sent = {**fields, "tenant": "first", name: typed}
            answer = await browser.post(f"/console/{path}", **sent)
            assert answer.status == 422, (path, name, typed[:20], answer.status)
            assert typed in unescape(answer.body.decode()), (path, name, typed[:20])


async def test_a_long_name_or_address_makes_no_long_header() -> None:
    async with opened_console() as console:
        browser = await console.browser(ADMIN)
        await browser.get("/console")
        refused = await browser.post("/console/policies", tenant="x" * 70_000)
        assert refused.status == 422
        assert (await browser.post("/console/policies", tenant="first")).status == 303
        themed = await browser.post("/console/theme", next="/console/" + "x" * 30_000)
        assert (themed.status, themed.headers["location"]) == (303, "/console")


@pytest.mark.usefixtures("as_in_a_server")
async def test_a_large_page_is_made_in_turn_with_other_requests() -> None:
    choices = {f"p{n}": {"enum": [f"{m:050}" for m in range(10)]} for n in range(60)}
    ask = {"approval": {"message": "?", "data_schema": {"properties": choices}}}
    dense = {
        f"s{n}": {"delay_s": 1, "needs": [f"s{m}" for m in range(max(0, n - 50), n)]}
        for n in range(200)
    }
    async with opened_console() as console:
        house = console.house
        for name, steps in (("many", {"ask": ask}), ("dense", dense)):
            put = await house.ask("PUT", f"/v1/workflows/{name}", {"steps": steps}, key=ADMIN)
            assert put.status == 200, put.body
        cap = {"max_concurrent_runs": 30}
        await house.ask("PUT", "/v1/admin/tenants/default", cap, key=ADMIN)
        rows = {"runs": [{"key": str(n)} for n in range(25)]}
        await house.ask("POST", "/v1/workflows/many/runs/batch", rows, key=ADMIN)
        browser = await console.browser(ADMIN)
        longest_s = 0.0

        async def others() -> None:
            nonlocal longest_s
            while True:
                begun_s = time.thread_time()
                await asyncio.sleep(0)
                longest_s = max(longest_s, time.thread_time() - begun_s)

        for path in ("approvals", "workflows/dense"):
            assert (await browser.get(f"/console/{path}")).status == 200
            waiting = asyncio.create_task(others())
            assert len((await browser.get(f"/console/{path}")).body) > 50_000, path
            waiting.cancel()
        assert longest_s < 0.05  # it was 140 ms for the one and half a minute for the other


def test_no_page_has_an_element_or_attribute_that_content_brought(
    pages: dict[str, list[Element]],
) -> None:
    for path, elements in pages.items():
        for element in elements:
            place = (path, element.name, element.attributes)
            if element.name == "script":
                assert element.attributes.get("src", "").startswith("/console/static/"), place
                assert not element.text.strip(), place
            assert element.name not in {"base", "embed", "iframe", "img", "object", "style"}, place
            for name, value in element.attributes.items():
                assert not name.startswith("on"), place
                assert name not in {"srcdoc", "style"}, place
                assert not name.startswith("hx-"), place
                if name in {"href", "action", "formaction", "src"}:
                    assert value.startswith(("/console", "#", "?")), place


def test_no_page_lets_content_change_the_direction_of_text(
    pages: dict[str, list[Element]],
) -> None:
    for path, elements in pages.items():
        for element in elements:
            seen = [element.attributes[name] for name in SEEN & set(element.attributes)]
            for text in (element.text, *seen):
                if element.name not in {"input", "textarea", "option"}:
                    assert TURNING.search(text) is None, (path, element.name)


def test_hostile_text_is_readable_where_it_belongs(pages: dict[str, list[Element]]) -> None:
    for path in (
        *("/console", "/console/runs", "/console/runs/{run_id}", "/console/approvals"),
        "/console/schedules/{schedule_id}",
    ):
        assert any(LOUD[:30] in element.text for element in pages[path]), path
    run = pages["/console/runs/{run_id}"]
    assert any(element.name == "bdi" and BENT in element.text for element in run)
    assert any(LOUD[:30] in element.text for element in pages["/console/keys"])
