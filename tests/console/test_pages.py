"""What the pages do: forms that change something, and keep what was typed when they are refused."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import pytest_asyncio

from stanchion import console
from stanchion.charts import LineChart, Series
from stanchion.console.live import AdmissionSample
from stanchion.console.pages.fleet import ABSENT_AFTER, served_topics
from stanchion.console.pages.overview import reporting
from stanchion.core.model import Instant, WorkflowId
from stanchion.core.schedule import CatchUp, Schedule, ScheduleSpec
from stanchion.drills.page import write_report
from stanchion.drills.verdict import DrillResult, Promise, report_of
from stanchion.wire.admin import ReplicaRow, WorkerRow
from tests.console.visits import Browser, ConsoleHouse, opened_console, parsed
from tests.gateway.asgi import Answer
from tests.gateway.house import ADMIN, ONE_STEP
from tests.services.faulty_locks import Fault

in_one_loop = pytest.mark.asyncio(loop_scope="module")

REVIEWED = {
    "steps": {
        "ask": {
            "approval": {
                "message": "How much?",
                "data_schema": {
                    "type": "object",
                    "required": ["budget"],
                    "properties": {"budget": {"type": "integer", "minimum": 0}},
                },
            }
        }
    },
    "input_schema": {
        "type": "object",
        "required": ["question"],
        "properties": {"question": {"type": "string", "minLength": 3}},
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[ConsoleHouse]:
    async with opened_console() as opened:
        for name, workflow in (("reviewed", REVIEWED), ("one-step", ONE_STEP)):
            path = f"/v1/workflows/{name}"
            put = await opened.house.ask("PUT", path, workflow, key=ADMIN, tenant="acme")
            assert put.status == 200, put.body
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(world: ConsoleHouse) -> Browser:
    browser = await world.browser(ADMIN)
    await browser.get("/console")
    return browser


def values(answer: Answer) -> dict[str, str]:
    """What the fields of a page hold, by name."""
    found = {}
    for element in parsed(answer.body):
        name = element.attributes.get("name")
        if name is not None and element.name in {"input", "textarea"}:
            found[name] = element.attributes.get("value", element.text.removeprefix("\n"))
    return found


def notice(answer: Answer) -> str:
    """What a page says was wrong."""
    found = [each for each in parsed(answer.body) if each.attributes.get("class") == "problem"]
    return found[0].text if found else ""


async def started(browser: Browser, **fields: str) -> Answer:
    path = "/console/workflows/reviewed/start?tenant=acme"
    return await browser.post(path, tenant="acme", **fields)


@in_one_loop
async def test_a_form_starts_one_run_however_often_it_is_sent(browser: Browser) -> None:
    page = await browser.get("/console/workflows/reviewed?tenant=acme")
    key = values(page)["key"]
    fields = {"key": key, "input.question": "why?", "labels": "team:red env=test"}
    first, second = [await started(browser, **fields) for _ in range(2)]
    assert first.status == 303
    assert first.headers["location"] == second.headers["location"]
    shown = (await browser.get(first.headers["location"])).body
    assert b"The run was started." in shown
    assert b"team:red" in shown
    assert b"env:test" in shown


@in_one_loop
async def test_a_refused_form_keeps_what_was_typed(browser: Browser) -> None:
    fields = {"key": "a-key", "input.question": "no", "labels": "team:red"}
    answer = await started(browser, **fields)
    assert answer.status == 422
    kept = values(answer)
    assert {name: kept[name] for name in fields} == fields
    assert "does not accept this input" in notice(answer)


@in_one_loop
async def test_a_decision_carries_the_data_that_its_schema_asks_for(browser: Browser) -> None:
    run = urlsplit((await started(browser, **{"input.question": "why?"})).headers["location"])
    run_id = run.path.rpartition("/")[2]
    page = await browser.get(f"/console/runs/{run_id}?tenant=acme")
    # The key is for all tenants, so a command that is copied from here must name this one.
    approve = f"stanchion approval approve {run_id} ask --data @data.json --tenant acme"
    assert approve in page.body.decode()
    form = {"tenant": "acme", "run_id": run_id, "step_id": "ask", "verdict": "approve"}
    for typed, status in (("much", 422), ("-1", 422)):
        fields = {**form, "data.budget": typed, "comment": "fine"}
        answer = await browser.post("/console/approvals/decide?tenant=acme", **fields)
        assert answer.status == status, typed
        assert "fine" in [
            each.attributes.get("value")
            for each in parsed(answer.body)
            if each.attributes.get("name") == "comment"
        ]
    fields = {**form, "data.budget": "40", "comment": "fine"}
    unsaid = await browser.post("/console/approvals/decide", **{**fields, "verdict": ""})
    assert unsaid.status == 422, "a form without a verdict decides nothing"
    answer = await browser.post("/console/approvals/decide?tenant=acme", **fields)
    assert answer.headers["location"].endswith("did=approved")
    ended = await browser.house.ask("GET", f"/v1/runs/{run_id}", key=ADMIN, tenant="acme")
    assert ended.json["steps"]["ask"]["output"]["data"] == {"budget": 40}


async def test_a_tenants_board_is_there_however_many_others_there_are() -> None:
    async with opened_console() as console:
        house = console.house
        for number in range(1_001):
            cap = {"max_concurrent_runs": 3}
            put = f"/v1/admin/tenants/t{number:04}"
            assert (await house.ask("PUT", put, cap, key=ADMIN)).status == 200
        browser = await console.browser(ADMIN)
        for tenant, is_there in (("t0000", True), ("t1000", True), ("nobody", False)):
            page = await browser.get(f"/console/admission?tenant={tenant}")
            assert (f'id="tenant-{tenant}"'.encode() in page.body) == is_there, tenant


@in_one_loop
async def test_jobs_of_other_tenants_are_not_shown_as_those_of_the_chosen_one(
    world: ConsoleHouse, browser: Browser
) -> None:
    house = world.house
    for tenant in ("busy", "quiet"):
        await house.ask("PUT", "/v1/workflows/w", JOB_OF_MANY, key=ADMIN, tenant=tenant)
    await house.ask("POST", "/v1/workflows/w/runs", {}, key=ADMIN, tenant="busy")
    for path in ("/console", "/console/workers"):
        everyone = (await browser.get(path)).body
        assert b"many.work" in everyone, path
        chosen = (await browser.get(f"{path}?tenant=quiet")).body
        assert b"no worker serves" not in chosen, path
        assert b"Jobs that wait" not in chosen, path


JOB_OF_MANY = {"steps": {"work": {"topic": "many.work"}}}


@in_one_loop
async def test_the_newest_of_many_approvals_has_its_form_and_keeps_its_data(
    world: ConsoleHouse, browser: Browser
) -> None:
    house, path = world.house, "/v1/workflows/queue"
    note = {"type": "string", "description": "x" * 22_000}  # 50 of them fill a page of the list
    schema = {"type": "object", "properties": {"note": note}}
    steps = {"ask": {"approval": {"message": "Now?", "data_schema": schema}}}
    await house.ask("PUT", "/v1/admin/tenants/many", {"max_concurrent_runs": 1_000}, key=ADMIN)
    await house.ask("PUT", path, {"steps": steps}, key=ADMIN, tenant="many")
    rows = [{"key": str(number)} for number in range(520)]
    begun = await house.ask("POST", f"{path}/runs/batch", {"runs": rows}, key=ADMIN, tenant="many")
    run_id = begun.json["results"][-1]["run_id"]
    page = await browser.get(f"/console/runs/{run_id}?tenant=many")
    assert b'name="data.note"' in page.body
    form = {"tenant": "many", "run_id": run_id, "step_id": "ask", "verdict": "approve"}
    await browser.post("/console/approvals/decide?tenant=many", **form, **{"data.note": "go"})
    ended = await house.ask("GET", f"/v1/runs/{run_id}", key=ADMIN, tenant="many")
    assert ended.json["steps"]["ask"]["output"]["data"] == {"note": "go"}


@in_one_loop
async def test_who_started_a_run_cannot_decide_a_step_for_four_eyes(
    world: ConsoleHouse, browser: Browser
) -> None:
    house, steps = world.house, {"ask": {"approval": {"not_by_starter": True}}}
    path = "/v1/workflows/four-eyes"
    await house.ask("PUT", path, {"steps": steps}, key=ADMIN, tenant="pairs")
    await house.ask("POST", f"{path}/runs", {}, key=ADMIN, tenant="pairs")
    made = {"role": "approver", "tenant": "pairs", "name": "bo"}
    other = await house.ask("POST", "/v1/admin/keys", made, key=ADMIN)
    for looking, says, is_disabled in (
        (browser, b"You started this run", True),
        (await world.browser(other.json["key"]), b"you may", False),
    ):
        page = await looking.get("/console/approvals?tenant=pairs")
        assert says in page.body
        buttons = [each for each in parsed(page.body) if each.attributes.get("name") == "verdict"]
        assert [("disabled" in each.attributes) for each in buttons] == [is_disabled] * 2


@in_one_loop
async def test_a_lock_shows_who_waits_for_it(world: ConsoleHouse, browser: Browser) -> None:
    house = world.house
    await house.ask("POST", "/v1/admin/leases", {"name": "run/held", "ttl_s": 60}, key=ADMIN)
    house.services.lease_history.was_busy("run/held")
    assert b"1 try</span>" in (await browser.get("/console/leases")).body


async def test_a_drills_charts_are_drawn_and_those_of_another_version_left_out(
    tmp_path: Path,
) -> None:
    promise = Promise(id="a", says="it holds", measured="3", holds=True)
    result = DrillResult(
        promises=(promise,),
        figures={},
        charts=(
            LineChart(title="Waits <b>", unit="ms", series=(Series("p95", ((0, 1), (1, 3))),)),
        ),
        settings={},
    )
    times = {"started_at": 1_790_000_000.0, "duration_s": 1.0}
    report = report_of("retry", result, seed=7, environment={}, **times)
    write_report(report, result.charts, tmp_path)
    other = tmp_path / "retry" / "charts.json"
    other.write_bytes(other.read_bytes().rstrip()[:-1] + b',{"type":"pie"}]')
    async with opened_console(drill_reports=tmp_path) as world:
        browser = await world.browser(ADMIN)
        assert b"drill=retry" in (await browser.get("/console/drills")).body
        page = (await browser.get("/console/drills?drill=retry")).body
        assert page.count(b"Chart 1") == 1
        assert b"Chart 2" not in page
        assert b"Waits &lt;b&gt;" in page
        assert b"There is no report" in (await browser.get("/console/drills?drill=none")).body


async def test_a_full_tenant_shows_since_when_and_what_another_slot_would_do() -> None:
    async with opened_console() as world:
        house, browser = world.house, await world.browser(ADMIN)
        await house.ask("PUT", "/v1/admin/tenants/tight", {"max_concurrent_runs": 1}, key=ADMIN)
        await house.ask("PUT", "/v1/workflows/one", ONE_STEP, key=ADMIN, tenant="tight")
        starts = [
            await house.ask("POST", "/v1/workflows/one/runs", {}, key=ADMIN, tenant="tight")
            for _ in range(3)
        ]
        assert [each.status for each in starts] == [200, 429, 429]
        await house.services.receipts.write()
        page = (await browser.get("/console/admission?tenant=tight")).body.decode()
        assert "filled <time" in page
        assert "1 of 2" in page  # a second slot stays taken: no run has ended
        page = (await browser.get("/console/admission?tenant=tight&if_cap=40")).body.decode()
        assert '<tr class="chosen"><td>40</td><td class="num">2 of 2</td>' in page
        for odd in ("0", "1", "x", "9" * 30):
            assert (
                await browser.get(f"/console/admission?tenant=tight&if_cap={odd}")
            ).status == 200


async def test_the_overview_leads_to_the_runs_that_have_waited_longest() -> None:
    async with opened_console() as world:
        house, browser = world.house, await world.browser(ADMIN)
        assert "Waiting longest" in (await browser.get("/console")).body.decode()
        queue = {"max_concurrent_runs": 1, "on_full": "queue"}
        await house.ask("PUT", "/v1/admin/tenants/lined", queue, key=ADMIN)
        await house.ask("PUT", "/v1/workflows/one", ONE_STEP, key=ADMIN, tenant="lined")
        ready, queued = [
            (await house.ask("POST", "/v1/workflows/one/runs", {}, key=ADMIN, tenant="lined")).json
            for _ in range(2)
        ]
        told = (await house.ask("GET", "/v1/waits", key=ADMIN, tenant="*")).json["waits"]
        assert {(each["waits_for"], each["run_id"]) for each in told} == {
            ("worker", ready["run_id"]),
            ("slot", queued["run_id"]),
        }
        page = (await browser.get("/console")).body.decode()
        assert "run has waited" not in page, "every job waits a moment"
        later = Instant(house.services.clock.now() + 65_000)
        house.services.clock.now = lambda: later  # type: ignore[method-assign] # a minute later
        for path in ("/console", "/console?tenant=lined"):
            page = (await browser.get(path)).body.decode()
            assert "run has waited 1 min 5 s" in page
            assert ">1 min</a>" in page, "one unit: it is in a narrow box"
            for run in (ready, queued):
                assert f'href="/console/runs/{run["run_id"]}?tenant=lined"' in page


@in_one_loop
async def test_a_rerun_says_first_what_it_would_do(browser: Browser) -> None:
    run_id = await browser.house.start(key=ADMIN, tenant="acme")
    path = f"/console/runs/{run_id}"
    assert (await browser.post(f"{path}/rerun", tenant="acme")).status == 409
    cancelled = await browser.post(f"{path}/cancel", tenant="acme", reason="wrong")
    assert cancelled.status == 303
    shown = await browser.post(f"{path}/rerun", tenant="acme", dry_run="yes")
    assert shown.status == 200
    assert b"It would run" in shown.body
    bad = await browser.post(f"{path}/rerun", tenant="acme", input="{no")
    assert (bad.status, values(bad)["input"]) == (422, "{no")
    again = await browser.post(f"{path}/rerun", tenant="acme")
    assert again.headers["location"].endswith("did=run_rerun")


@in_one_loop
@pytest.mark.parametrize("page", ["runs", "decisions", "audit"])
async def test_a_filter_keeps_the_tenant_that_was_chosen(browser: Browser, page: str) -> None:
    shown = parsed((await browser.get(f"/console/{page}?tenant=acme")).body)
    (at,) = [n for n, each in enumerate(shown) if each.attributes.get("class") == "filters"]
    assert shown[at + 1].attributes == {"type": "hidden", "name": "tenant", "value": "acme"}


@in_one_loop
async def test_a_form_that_is_sent_as_it_is_shown_changes_no_digit(browser: Browser) -> None:
    house, path = browser.house, "/v1/admin/settings"
    rate = {"escalation": {"fallbacks_per_s": 0.12345678}}
    before = (await house.ask("PATCH", path, rate, key=ADMIN)).json
    shown = values(await browser.get("/console/settings"))
    closes = [("escalation.closes", risk) for risk in before["escalation"]["closes"]]
    kept = [each for each in shown.items() if each[0] not in {"form_token", *dict(closes)}]
    sent = await browser.send("/console/settings/change", [*kept, *closes])
    assert sent.headers["location"].endswith("did=settings_same")


async def test_a_change_of_settings_is_found_behind_a_thousand_other_changes() -> None:
    async with opened_console() as console:
        house = console.house
        change = {"escalation": {"window_s": 301}}
        assert (await house.ask("PATCH", "/v1/admin/settings", change, key=ADMIN)).status == 200
        for number in range(1_001):
            put = f"/v1/admin/tenants/t{number:04}"
            await house.ask("PUT", put, {"max_concurrent_runs": 3}, key=ADMIN)
        browser = await console.browser(ADMIN)
        assert b"escalation.window_s</" in (await browser.get("/console/settings")).body
        page = await browser.get("/console/audit?action=settings.patch")
        (following,) = [
            each.attributes["href"] for each in parsed(page.body) if each.text == "next page"
        ]
        assert b"settings.patch" in (await browser.get(following)).body.partition(b"<tbody>")[2]


async def test_a_queues_form_that_is_sent_as_it_is_shown_changes_no_digit() -> None:
    async with opened_console() as console:
        house, path = console.house, "/v1/admin/tenants/waits"
        config = {"on_full": "queue", "queue_wait_s": 1234.5678, "queue_max": 7}
        put = (await house.ask("PUT", path, config, key=ADMIN)).json
        browser = await console.browser(ADMIN)
        shown = values(await browser.get("/console/admission?tenant=waits"))
        form = {name: shown[name] for name in ("queue_max", "queue_wait_s")}
        await browser.post("/console/admission/queue", of="waits", on_full="queue", **form)
        assert (await house.ask("GET", path, key=ADMIN)).json == put


@in_one_loop
async def test_the_value_of_a_label_may_have_an_equals_sign_or_a_colon(browser: Browser) -> None:
    await browser.house.start(key=ADMIN, tenant="marked")
    path, typed = "/console/workflows/one-step/start", "filter:env=prod url=http://a"
    form = {"tenant": "marked", "input": "{}"}
    started = await browser.post(path, labels=typed, **form)
    run_id = urlsplit(started.headers["location"]).path.rpartition("/")[2]
    run = await browser.house.ask("GET", f"/v1/runs/{run_id}", key=ADMIN, tenant="marked")
    assert run.json["labels"] == {"filter": "env=prod", "url": "http://a"}
    listed = await browser.get("/console/runs?tenant=marked&label=filter%3Aenv%3Dprod")
    assert run_id.encode() in listed.body
    twice = await browser.post(path, labels="team:red team=blue", **form)
    assert (twice.status, "team is given twice" in notice(twice)) == (422, True)


@in_one_loop
@pytest.mark.parametrize(
    "key", ["\x1fschedule/nightly/1/1800000000000", "bulk 1 2", "kéy", "k" * 256]
)
async def test_a_form_cannot_use_a_key_that_the_api_refuses(browser: Browser, key: str) -> None:
    """Those of schedules and bulk actions: a run that has one would be taken for theirs."""
    run_id = await browser.house.start(key=ADMIN, tenant="keyed")
    await browser.post(f"/console/runs/{run_id}/cancel", tenant="keyed")
    form = {"tenant": "keyed", "key": key}
    for path, more in ((f"runs/{run_id}/rerun", {}), ("workflows/one-step/start", {"input": "{}"})):
        answer = await browser.post(f"/console/{path}", **form, **more)
        assert (answer.status, "visible ASCII" in notice(answer)) == (422, True), path
    listed = await browser.house.ask("GET", "/v1/runs", key=ADMIN, tenant="keyed")
    assert {row["status"] for row in listed.json["runs"]} == {"cancelled"}


@in_one_loop
async def test_a_cap_is_changed_in_place_and_the_rest_is_kept(browser: Browser) -> None:
    config = {"max_concurrent_runs": 2, "job_rate_per_s": 5.0}
    put = await browser.house.ask("PUT", "/v1/admin/tenants/capped", config, key=ADMIN)
    assert put.status == 200
    answer = await browser.post("/console/admission/cap", of="capped", limit="many")
    assert answer.status == 422
    assert "must be an integer" in notice(answer)
    for typed, limit in (("7", 7), ("", None)):
        changed = await browser.post("/console/admission/cap", of="capped", limit=typed)
        assert changed.headers["location"].endswith("did=cap_changed")
        now = await browser.house.ask("GET", "/v1/admin/tenants/capped", key=ADMIN)
        assert now.json["max_concurrent_runs"] == limit
        assert now.json["job_rate_per_s"] == 5.0


@in_one_loop
async def test_a_tenants_queue_is_changed_and_its_runs_lead_to_the_list(browser: Browser) -> None:
    house, path = browser.house, "/v1/admin/tenants/lined"
    config = {"max_concurrent_runs": 1, "budgets": {"tokens": {"limit": 9, "window": "day"}}}
    await house.ask("PUT", path, config, key=ADMIN)
    form = {"of": "lined", "on_full": "queue", "queue_max": "3", "queue_wait_s": "60"}
    for wrong in ({"queue_max": "many"}, {"queue_max": "1.5"}, {"queue_wait_s": "-1"}):
        refused = await browser.post("/console/admission/queue?tenant=lined", **(form | wrong))
        assert (refused.status, notice(refused) != "") == (422, True), wrong
    done = await browser.post("/console/admission/queue?tenant=lined", **form)
    assert done.headers["location"].endswith("did=queue_changed")
    board = "/console/admission?sort=tenant&tenant=lined"
    for action in ("queue", "cap"):
        sent = await browser.post(
            board.replace("?", f"/{action}?"), tenant="lined", limit="1", **form
        )
        assert sent.headers["location"] == f"{board}&did={action}_changed"
    now = (await house.ask("GET", path, key=ADMIN)).json
    assert (now["on_full"], now["queue_max"], now["queue_wait_s"]) == ("queue", 3, 60)
    assert (now["max_concurrent_runs"], now["budgets"]) == (1, config["budgets"])
    await house.ask("PUT", "/v1/workflows/one", ONE_STEP, key=ADMIN, tenant="lined")
    starts = [
        await house.ask("POST", "/v1/workflows/one/runs", {}, key=ADMIN, tenant="lined")
        for _ in range(2)
    ]
    assert [each.status for each in starts] == [200, 202]
    form = {"tenant": "lined", "input": "{}"}
    third = await browser.post("/console/workflows/one/start?tenant=lined", **form)
    assert third.headers["location"].endswith("did=run_queued")
    listed = await browser.get("/console/runs?tenant=lined&status=queued")
    assert starts[1].json["run_id"].encode() in listed.body
    run = await browser.get(f"/console/runs/{starts[1].json['run_id']}?tenant=lined")
    assert b"is full; position 1 in its queue" in run.body
    facts = dict(re.findall(r"<dt>(.+?)</dt><dd>(.+?)</dd>", run.body.decode()))
    shown = {name: facts[name] for name in ("Position", "Priority", "Fairness key")}
    assert shown == {"Position": "1", "Priority": "5", "Fairness key": "none"}
    begun = await browser.get(f"/console/runs/{starts[0].json['run_id']}?tenant=lined")
    assert b"Fairness key" not in begun.body
    assert b'href="/console/admission?tenant=lined"' in run.body


@in_one_loop
async def test_a_limit_is_made_changed_and_deleted(browser: Browser) -> None:
    form = {"limit_id": "gpt", "topics": "llm.*, search", "max_running": "5", "rate_per_s": "0.5"}
    wrong = await browser.post("/console/limits/put", **(form | {"rate_per_s": "fast"}))
    assert (wrong.status, values(wrong)["topics"]) == (422, form["topics"])
    made = await browser.post("/console/limits/put", **form, per="deployment")
    assert made.headers["location"].endswith("did=limit_stored")
    (seen,) = (await browser.house.ask("GET", "/v1/admin/limits", key=ADMIN)).json["limits"]
    assert (seen["topics"], seen["max_running"], seen["rate_per_s"]) == (
        ["llm.*", "search"],
        5,
        0.5,
    )
    edited = values(await browser.get("/console/limits?limit=gpt"))
    assert (edited["topics"], edited["max_running"]) == ("llm.* search", "5")
    gone = await browser.post("/console/limits/delete", limit_id="gpt")
    assert gone.headers["location"].endswith("did=limit_deleted")
    assert b"There are no topic limits." in (await browser.get("/console/limits")).body


@in_one_loop
async def test_settings_are_changed_after_a_preview(browser: Browser) -> None:
    closes = [("escalation.closes", "high"), ("escalation.closes", "standard")]
    change = [("lock_busy.delay_ms", "750"), *closes]
    path = "/console/settings/change"
    shown = await browser.send(path, change)
    assert shown.status == 200
    assert b"This would change 1 setting" in shown.body
    settings = await browser.house.ask("GET", "/v1/admin/settings", key=ADMIN)
    assert settings.json["lock_busy"]["delay_ms"] == 500
    done = await browser.send(path, [*change, ("sure", "yes")])
    assert done.headers["location"].endswith("did=settings_changed")
    settings = await browser.house.ask("GET", "/v1/admin/settings", key=ADMIN)
    assert settings.json["lock_busy"]["delay_ms"] == 750
    assert settings.json["escalation"]["closes"] == ["high", "standard"]
    wrong = await browser.send(path, [("lock_busy.delay_ms", "soon"), *closes])
    assert (wrong.status, values(wrong)["lock_busy.delay_ms"]) == (422, "soon")
    bad = [("lock_busy.delay_ms", "-5"), *closes, ("sure", "yes")]
    assert (await browser.send(path, bad)).status == 422


@in_one_loop
async def test_a_new_key_is_shown_once_and_can_be_revoked(browser: Browser) -> None:
    form = {"role": "runner", "for_tenant": "acme", "name": "ann", "note": "of team red"}
    made = await browser.post("/console/keys/create", **form)
    assert made.status == 200
    (secret,) = [each.text for each in parsed(made.body) if each.name == "pre"]
    assert (await browser.house.ask("GET", "/v1/runs", key=secret)).status == 200
    assert secret.encode() not in (await browser.get("/console/keys")).body
    gone = await browser.post("/console/keys/revoke", key_id=secret.split("_")[1])
    assert gone.headers["location"].endswith("did=key_revoked")
    assert (await browser.house.ask("GET", "/v1/runs", key=secret)).status == 401
    bad = await browser.post("/console/keys/create", role="runner", for_tenant="*", name="bob")
    assert (bad.status, values(bad)["name"]) == (422, "bob")


@in_one_loop
async def test_search_goes_straight_to_a_run(browser: Browser) -> None:
    run_id = await browser.house.start(key=ADMIN, tenant="acme")
    answer = await browser.get(f"/console/search?tenant=acme&q={run_id}")
    assert answer.headers["location"] == f"/console/runs/{run_id}?tenant=acme"
    for path in (f"/console/search?q={run_id}", f"/console/runs/{run_id}"):  # of all tenants
        found = await browser.get(path)
        assert found.headers["location"] == f"/console/runs/{run_id}?tenant=acme"
    shown = await browser.get("/console/search?tenant=acme&q=reviewed")
    assert b"/console/workflows/reviewed?tenant=acme" in shown.body
    for query in ("", "nothing-has-this-name", "%22%3E", "a" * 300):
        assert (await browser.get(f"/console/search?q={query}")).status == 200, query


@in_one_loop
async def test_wrong_addresses_are_explained_and_never_an_error(browser: Browser) -> None:
    for path, status in (
        ("/console/runs?status=sleeping", 422),
        ("/console/runs?cursor=forged", 422),
        ("/console/runs?label=nocolon", 422),
        ("/console/runs/unknown?tenant=acme", 404),
        ("/console/runs/a%20b?tenant=acme", 422),
        ("/console/runs?tenant=%00", 422),
        ("/console/workflows/unknown?tenant=acme", 404),
        ("/console/workflows/reviewed?tenant=acme&version=0", 422),
        ("/console/workflows/reviewed?tenant=acme&version=9", 404),
        ("/console/runs?%ff=%ff", 422),
        ("/console/shared/unknown", 404),
    ):
        answer = await browser.get(path)
        assert answer.status == status, path
        assert b"<h1>" in answer.body, path
    assert (await browser.house.ask("PUT", "/console", key=ADMIN)).status == 405


def test_files_of_others_are_the_published_ones_and_nothing_is_fetched_elsewhere() -> None:
    static = Path(console.__file__).parent / "static"
    listed = (static / "VENDORED.txt").read_text(encoding="utf-8")
    noted = re.findall(r"^(\S+\.(?:js|css)) .*\n  sha256 (\w{64})$", listed, re.MULTILINE)
    assert {name for name, _ in noted} == {"htmx.min.js"}
    for name, digest in noted:
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest, name
    own = [each for each in static.iterdir() if each.suffix in {".css", ".js"}]
    for file in own:
        if file.name not in dict(noted):
            text = file.read_text(encoding="utf-8")
            assert re.search(r"https?://|//[a-z]+\.|eval\(|innerHTML", text) is None, file.name
    for template in (static.parent / "templates").iterdir():
        text = template.read_text(encoding="utf-8")
        assert "|safe" not in text, template.name
        assert re.search(r"\sstyle=|\son\w+=|<script(?! src)", text) is None, template.name


@in_one_loop
async def test_a_browser_fetches_less_than_100_kb_of_files(browser: Browser) -> None:
    page = parsed((await browser.get("/console")).body)
    paths = {
        each.attributes.get("src") or each.attributes["href"]
        for each in page
        if each.name in {"script", "link"}
    }
    served = {path.rpartition("/")[2]: len((await browser.get(path)).body) for path in paths}
    static = Path(console.__file__).parent / "static"
    kept = {each.name: each.stat().st_size for each in static.iterdir() if each.suffix != ".txt"}
    assert served == kept, "every file is used, and sent as it is"
    assert sum(served.values()) < 100_000, served


@in_one_loop
async def test_a_schedule_has_a_page_with_its_runs_and_is_changed_there(
    world: ConsoleHouse, browser: Browser
) -> None:
    fields = {"workflow_id": "one-step", "cron": "0 9 * * MON-FRI", "timezone": "Europe/Berlin"}
    made = await browser.post(
        "/console/schedules",
        **{"tenant": "acme", "schedule_id": "morning", "input": '{"n": 7}', **fields},
        labels="team:red",
        jitter_s="30",
    )
    here = "/console/schedules/morning?tenant=acme"
    assert made.headers["location"] == f"{here}&did=schedule_stored"
    page = (await browser.get(here)).body
    assert page.count(b"<li><time") == 5, "the next ticks"
    for words in (b"It has not run yet.", b"skip the tick", b"none yet", b"team:red"):
        assert words in page, words
    listed = "/console/schedules?tenant=acme"
    assert b"none yet" in (await browser.get(listed)).body
    triggered = await browser.post("/console/schedules/morning/trigger", tenant="acme")
    run_id = urlsplit(triggered.headers["location"]).path.rpartition("/")[2]
    assert b"none yet" not in (await browser.get(listed)).body
    page = (await browser.get(here)).body
    assert b"none yet" not in page
    (row,) = [each for each in parsed(page) if each.name == "tr" and run_id in each.text]
    assert "running" in row.text
    assert "a trigger" in row.text
    stored = values(await browser.get(here))
    assert (stored["input"], stored["labels"], stored["jitter_s"]) == ('{"n":7}', "team:red", "30")
    wrong = await browser.post(here, **{**stored, "tenant": "acme", "cron": "soon"})
    assert wrong.status == 422
    assert values(wrong)["cron"] == "soon"
    changed = await browser.post(here, **{**stored, "tenant": "acme", "overlap": "allow"})
    assert changed.status == 303, changed.body
    for name in ("schedule_paused", "schedule_resumed"):
        answer = await browser.post("/console/schedules/morning/pause", tenant="acme")
        assert answer.headers["location"] == f"{here}&did={name}"
    path = "/v1/schedules/morning"
    after = (await world.house.ask("GET", path, key=ADMIN, tenant="acme")).json
    assert (after["overlap"], after["input"], after["labels"], after["jitter_s"]) == (
        *("allow", {"n": 7}, {"team": "red"}),
        30,
    )
    answer = await browser.post("/console/schedules/morning/pause", tenant="acme", back="list")
    assert answer.headers["location"] == f"{listed}&did=schedule_paused"
    wanted = values(await browser.get("/console/schedules/morning?tenant=acme"))["wanted"]
    for _ in range(2):  # a browser may send a form again
        await browser.post("/console/schedules/morning/pause", tenant="acme", wanted=wanted)
        now = await browser.house.ask("GET", "/v1/schedules/morning", key=ADMIN, tenant="acme")
        assert now.json["paused"] is False
    gone = await browser.post("/console/schedules/morning/delete", tenant="acme")
    assert gone.status == 303
    assert (await browser.get(here)).status == 404


@in_one_loop
async def test_ticks_that_are_caught_up_are_counted_with_the_oldest(
    world: ConsoleHouse, browser: Browser
) -> None:
    services = world.house.services
    # An unknown workflow: its ticks are tried, and stay due.
    spec = ScheduleSpec(workflow_id=WorkflowId("none"), every_s=60, catch_up=CatchUp.ALL)
    since = Instant(services.clock.now() - 20 * 60_000 - 30_000)
    behind = Schedule(spec=spec, generation=1, since=since, handled=since)
    document = msgspec.to_builtins(behind)
    await services.store.put_document("schedule", "acme/behind", document, read=0)
    path = "/v1/schedules/behind"
    shown = (await world.house.ask("GET", path, key=ADMIN, tenant="acme")).json["due"]
    assert shown["count"] == 20
    assert datetime.fromisoformat(shown["oldest"]).timestamp() * 1_000 == since + 60_000
    page = (await browser.get("/console/schedules/behind?tenant=acme")).body
    assert b"20 ticks are due and have no run yet" in page
    listed = await world.house.ask("GET", "/v1/schedules", key=ADMIN, tenant="acme")
    (row,) = listed.json["schedules"]
    assert row["due"] is None, "a list does not count"
    await browser.post("/console/schedules/behind/delete", tenant="acme")


@in_one_loop
async def test_the_inbox_shows_what_is_approved(world: ConsoleHouse, browser: Browser) -> None:
    steps = {
        "draft": {"topic": "draft.work"},
        "ask": {"approval": {"message": "May it go out?"}, "needs": ["draft"]},
    }
    house = world.house
    put = await house.ask(
        "PUT", "/v1/workflows/letters", {"steps": steps}, key=ADMIN, tenant="mail"
    )
    assert put.status == 200, put.body
    body = {"input": {"to": "kim", "long": "x" * 10_000}}
    path = "/v1/workflows/letters/runs"
    run = (await house.ask("POST", path, body, key=ADMIN, tenant="mail")).json["run_id"]
    lease = {"worker_id": "w", "topics": ["draft.work"], "wait_s": 1}
    asked = await house.ask("POST", "/v1/worker/lease", lease, key=ADMIN, tenant="mail")
    (job,) = asked.json["jobs"]
    result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
    results = {"worker_id": "w", "results": [{**result, "output": {"text": "Dear Kim"}}]}
    await house.ask("POST", "/v1/worker/results", results, key=ADMIN, tenant="mail")
    page = await browser.get("/console/approvals?tenant=mail")
    (card,) = [each for each in parsed(page.body) if each.name == "article"]
    for words in ("May it go out?", "letters v1", '"to": "kim"', "Result of draft", "Dear Kim"):
        assert words in card.text, words
    assert "more characters" in card.text, "a long input is cut"
    assert "/console/workflows/letters?version=1&amp;tenant=mail" in page.body.decode()
    approver = await world.browser(await house.make_key("approver", "mail"))
    own = (await approver.get("/console/approvals")).body
    assert b"Dear Kim" in own
    assert b"/console/workflows/letters" not in own, "its role may not open that page"
    assert run.encode() in own


@in_one_loop
async def test_time_in_the_queue_is_not_run_time(world: ConsoleHouse, browser: Browser) -> None:
    house = world.house
    queues = {"max_concurrent_runs": 1, "on_full": "queue"}
    await house.ask("PUT", "/v1/admin/tenants/line", queues, key=ADMIN)
    await house.ask("PUT", "/v1/workflows/one-step", ONE_STEP, key=ADMIN, tenant="line")
    first = await house.start(key=ADMIN, tenant="line")
    queued = await house.ask("POST", "/v1/workflows/one-step/runs", {}, key=ADMIN, tenant="line")
    second = queued.json["run_id"]

    async def facts(run_id: str) -> str:
        page = parsed((await browser.get(f"/console/runs/{run_id}?tenant=line")).body)
        (found,) = [each for each in page if "run-facts" in each.attributes.get("class", "")]
        return " ".join(found.text.split())

    assert "In the queue" not in await facts(first)
    waiting = await facts(second)
    assert "In the queue" in waiting
    assert re.search("Runs for ?not begun", waiting), waiting
    await house.ask("POST", f"/v1/runs/{first}/cancel", {}, key=ADMIN, tenant="line")
    lease = {"worker_id": "w", "topics": ["work"], "max_jobs": 5, "wait_s": 5}
    leased = await house.ask("POST", "/v1/worker/lease", lease, key=ADMIN, tenant="line")
    assert [job["run_id"] for job in leased.json["jobs"]] == [second]
    begun = await facts(second)
    assert re.search(r"In the queue ?\d+(\.\d)? m?s .*Runs for ?\d+ ms", begun), begun


@in_one_loop
async def test_a_budget_that_is_exhausted_is_not_shown_as_slots_in_use(
    world: ConsoleHouse, browser: Browser
) -> None:
    house, tenant = world.house, "spent"
    config = {"budgets": {"tokens": {"limit": 250, "window": "day"}}}
    await house.ask("PUT", f"/v1/admin/tenants/{tenant}", config, key=ADMIN)
    path = "/v1/workflows/costly"
    costly = {**ONE_STEP, "budget": {"tokens": 300}}
    await house.ask("PUT", path, costly, key=ADMIN, tenant=tenant)
    refused = await house.ask("POST", f"{path}/runs", {}, key=ADMIN, tenant=tenant)
    assert refused.json["code"] == "budget_exhausted"
    page = b""
    async with asyncio.timeout(5):
        while b"budget exhausted" not in page:  # receipts are written within a second
            await asyncio.sleep(0.05)
            page = (await browser.get(f"/console/decisions?tenant={tenant}")).body
    assert b"of 250" not in page
    (in_use,) = re.findall(r'<td class="num">(.*limit.*?)</td>', page.decode())
    assert re.sub("<.+?>", "", in_use) == "tokens, limit 250"


@in_one_loop
async def test_what_waits_for_a_decision_is_called_an_approval_on_the_overview(
    browser: Browser,
) -> None:
    # The page "Decisions" lists refused starts.
    await started(browser, **{"input.question": "why?"})
    page = (await browser.get("/console?tenant=acme")).body.decode()
    assert "Approvals waiting" in page
    assert "Oldest approvals" in page
    assert re.search(r"\d+ approvals? waits?, the oldest", page)


def test_a_replica_that_does_not_report_is_not_counted() -> None:
    row = ReplicaRow(
        replica="a",
        version="1",
        started_at=NOW,
        seen_at=NOW,
        clock_offset_ms=0,
        settings_revision=0,
        store="ok",
        locks="ok",
        bus="ok",
        runs_held=0,
    )
    failing = msgspec.structs.replace(row, store="no answer within 1 s")
    missing = msgspec.structs.replace(row, store="unknown", locks="unknown", bus="unknown")
    assert reporting((row, failing)) == "2"
    assert reporting((row, missing, failing)) == "2 of 3"


async def test_the_overview_says_for_how_long_locks_have_failed() -> None:
    async with opened_console(has_keys=False) as opened:
        opened.house.locks.always(Fault.ERROR, "ping")
        browser = await opened.browser()
        page = (await browser.get("/console")).body.decode()
        assert re.search(r"Locks fail open \(for [\d.]+ m?s\)", page)


NOW = datetime(2026, 11, 19, 4, 0, tzinfo=UTC)


def a_worker(*topics: str, seconds_ago: float) -> WorkerRow:
    return WorkerRow(
        worker_id=f"w-{seconds_ago}",
        tenant="*",
        topics=topics,
        jobs=0,
        last_seen_at=NOW - timedelta(seconds=seconds_ago),
        version=None,
    )


def test_a_worker_that_has_not_called_for_a_minute_serves_no_topic() -> None:
    workers = [
        a_worker("search", seconds_ago=300),
        a_worker("search", "plan", seconds_ago=90),
        a_worker("plan", seconds_ago=5),
    ]
    found = served_topics(workers, {"search": 7, "write": 2}, NOW - ABSENT_AFTER)
    assert [(each.topic, each.ready, each.workers) for each in found] == [
        ("search", 7, 0),
        ("write", 2, 0),
        ("plan", 0, 1),
    ]
    assert found[0].last_seen_at == NOW - timedelta(seconds=90)
    assert found[1].last_seen_at is None


@in_one_loop
async def test_a_step_that_failed_before_its_first_attempt_is_not_called_not_begun(
    world: ConsoleHouse, browser: Browser
) -> None:
    broken = {"steps": {"calc": {"topic": "calc.work", "input": {"x": "${input.missing}"}}}}
    house, path = world.house, "/v1/workflows/broken"
    put = await house.ask("PUT", path, broken, key=ADMIN, tenant="acme")
    assert put.status == 200, put.body
    started = await house.ask("POST", f"{path}/runs", {}, key=ADMIN, tenant="acme")
    run_id = started.json["run_id"]
    page = (await browser.get(f"/console/runs/{run_id}?tenant=acme")).body
    assert b"failed before it began" in page
    assert b"not begun" not in page


async def test_charts_are_drawn_by_the_server_and_a_series_can_be_hidden() -> None:
    async with opened_console(has_keys=False) as opened:
        browser = await opened.browser()
        assert b"Charts of the last half hour begin here" in (await browser.get("/console")).body
        pulse = opened.console.pulse
        pulse.keep(AdmissionSample(1_000, 3, 10, 0, 0))
        pulse.keep(AdmissionSample(1_005, 4, 12, 900, 0))
        page = parsed((await browser.get("/console")).body)
        series = next(
            each.attributes["data-series"] for each in page if "data-series" in each.attributes
        )
        assert series == "[[1000,1005],[3,4],[10,12],[0,900],[0,0]]"
        labels = [
            each.attributes["aria-label"]
            for each in page
            if each.name == "svg" and each.attributes.get("class") == "chart"
        ]
        assert labels == [
            "Active runs, in runs: active up to 4",
            (
                "Starts in a minute, in starts: admitted up to 12; refused up to 900;"
                " gate unavailable up to 0"
            ),
        ]
        links = {each.text: each.attributes["href"] for each in page if each.name == "a"}
        hidden = parsed((await browser.get(links["hide refused"])).body)
        plot = next(each for each in hidden if each.attributes.get("id") == "plot-starts")
        assert plot.attributes["data-pick"] == "2 4"
        assert "now: admitted 12, gate unavailable 0" in plot.text
        assert "900" not in plot.text, "the axis fits what is shown"
        again = {each.text: each.attributes["href"] for each in hidden if each.name == "a"}
        assert again["show refused"] == "/console"
        assert again["hide admitted"] == "/console?hide=admitted&hide=refused"


def test_no_paragraph_holds_a_block() -> None:
    # The browser ends the paragraph there, and what follows is outside of its box.
    block = re.compile(
        r"<p\b[^>]*>((?:(?!</p>).)*?)<(pre|div|table|ul|ol|dl|section|form|details|h[1-6])\b",
        re.DOTALL,
    )
    templates = Path(console.__file__).parent / "templates"
    found = {each.name: block.search(each.read_text("utf-8")) for each in templates.iterdir()}
    assert [name for name, match in found.items() if match] == []
