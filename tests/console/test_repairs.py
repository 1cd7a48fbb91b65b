"""What the pages of repair and of locks do: the same as a request to the API, and what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio

from stanchion.core.model import Risk
from stanchion.services.lease_events import Fallback
from tests.console.visits import Browser, ConsoleHouse, opened_console, parsed
from tests.gateway.house import ADMIN, ONE_STEP

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[ConsoleHouse]:
    async with opened_console() as console:
        yield console


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(world: ConsoleHouse) -> Browser:
    return await world.browser(ADMIN)


async def _dead_letter(world: ConsoleHouse, tenant: str) -> str:
    """A job that was handed out too often."""
    ask, store = world.house.ask, world.house.services.store
    headers = [("X-Stanchion-Tenant", tenant)]
    doomed = {"max_deliveries": 1, "steps": {"a": {"topic": "doom"}}}
    await ask("PUT", "/v1/workflows/doomed", doomed, key=ADMIN, headers=headers)
    await ask("POST", "/v1/workflows/doomed/runs", {}, key=ADMIN, headers=headers)
    await store.lease_jobs("w", ["doom"], max_jobs=1, ttl_ms=1)  # type: ignore[list-item] # a topic
    async with asyncio.timeout(5):
        while not (await store.list_dead_letters(None)).items:
            await store.expire_jobs(limit=10, max_deliveries=1)
            await asyncio.sleep(0)
    (letter,) = (await store.list_dead_letters(None)).items
    return letter.id


async def _letters(world: ConsoleHouse) -> list[Any]:
    answer = await world.house.ask("GET", "/v1/admin/dead-letters", key=ADMIN)
    return list(answer.json["dead_letters"])


@in_one_loop
async def test_dead_letters_are_replayed_or_discarded(
    world: ConsoleHouse, browser: Browser
) -> None:
    for verb in ("replay", "discard"):
        letter = await _dead_letter(world, f"letters-{verb}")
        page = await browser.get("/console/dead-letters")
        assert letter.encode() in page.body
        nothing = await browser.post("/console/dead-letters", act=verb)
        assert (nothing.status, b"choose at least one" in nothing.body) == (422, True)
        wrong = await browser.post("/console/dead-letters", act="bury", letter=letter)
        assert wrong.status == 422
        done = await browser.post("/console/dead-letters", act=verb, letter=letter)
        assert (done.status, await _letters(world)) == (303, [])
        gone = await browser.post("/console/dead-letters", act=verb, letter=letter)
        assert gone.status == 404


@in_one_loop
async def test_a_runs_page_replays_its_dead_letter_and_is_shown_again(
    world: ConsoleHouse, browser: Browser
) -> None:
    letter = await _dead_letter(world, "letters-of-run")
    (row,) = await _letters(world)
    run_id, tenant = row["run_id"], row["tenant"]
    page = await browser.get(f"/console/runs/{run_id}?tenant={tenant}")
    assert b"Replay this dead letter?" in page.body
    assert f'value="{letter}"'.encode() in page.body
    form = {"act": "replay", "letter": letter, "run": run_id, "tenant": tenant}
    done = await browser.post("/console/dead-letters", **form)
    assert done.status == 303
    assert done.headers["location"].startswith(f"/console/runs/{run_id}?")


@in_one_loop
async def test_slots_are_compared_and_repaired(browser: Browser) -> None:
    assert b"The last audit" in (await browser.get("/console/drift")).body
    assert b"repaired nothing" in (await browser.get("/console/drift/try")).body
    done = await browser.post("/console/drift")
    assert (done.status, done.headers["location"]) == (303, "/console/drift?did=drift_repaired")


@in_one_loop
async def test_a_bulk_action_on_everything_must_be_meant(
    world: ConsoleHouse, browser: Browser
) -> None:
    await world.house.start(key=ADMIN, tenant="bulk")
    counted = await browser.get("/console/bulk?tenant=bulk&action=cancel&dry=1")
    assert b"This would cancel 1 run" in counted.body
    assert b"Those that have ended are counted too" in counted.body
    assert b"every run of bulk is meant" in counted.body
    refused = await browser.post("/console/bulk", tenant="bulk", action="cancel")
    assert (refused.status, b"confirm that all are meant" in refused.body) == (422, True)
    odd = await browser.post("/console/bulk", tenant="bulk", action="cancel", rate_per_s="fast")
    assert (odd.status, b'value="fast"' in odd.body) == (422, True)
    begun = await browser.post("/console/bulk", tenant="bulk", action="cancel", everything="yes")
    assert begun.status == 303
    page = await browser.get(begun.headers["location"])
    assert (page.status, b"Bulk cancel" in page.body) == (200, True)


@in_one_loop
async def test_a_form_that_is_sent_twice_starts_its_runs_once(browser: Browser) -> None:
    house = browser.house
    old = await house.start(key=ADMIN, tenant="twice")
    await house.ask("POST", f"/v1/runs/{old}/cancel", key=ADMIN, tenant="twice")
    for name in ("first", "second"):
        spec = {"workflow_id": "one-step", "every_s": 3600}
        put = await house.ask("PUT", f"/v1/schedules/{name}", spec, key=ADMIN, tenant="twice")
        assert put.status == 200, put.body

    async def sent_twice(
        page: str, path: str, fields: Mapping[str, str] = MappingProxyType({}), *, at: int = 0
    ) -> set[str]:
        shown = parsed((await browser.get(f"/console/{page}")).body)
        keys = [each.attributes["value"] for each in shown if each.attributes.get("name") == "key"]
        form = {"tenant": "twice", "key": keys[at], **fields}
        answers = [await browser.post(f"/console/{path}", **form) for _ in range(2)]
        assert {answer.status for answer in answers} == {303}
        return {answer.headers["location"] for answer in answers}

    chosen = {"run": f"twice/{old}", "verb": "rerun"}
    await sent_twice("runs?tenant=twice", "runs?tenant=twice", chosen)
    begun = await sent_twice("schedules?tenant=twice", "schedules/first/trigger")
    # The same workflow with the same input, of the same page.
    begun |= await sent_twice("schedules?tenant=twice", "schedules/second/trigger", at=1)
    begun |= await sent_twice("schedules/first?tenant=twice", "schedules/first/trigger")
    assert len(begun) == 3
    listed = await house.ask("GET", "/v1/runs", key=ADMIN, tenant="twice")
    assert len(listed.json["runs"]) == 1 + 4
    counted = "bulk?tenant=twice&action=cancel&status=running&dry=1"
    wanted = {"action": "cancel", "status": "running"}
    assert len(await sent_twice(counted, "bulk", wanted)) == 1
    bulks = await house.ask("GET", "/v1/bulk", key=ADMIN, tenant="twice")
    assert len(bulks.json["bulks"]) == 1


@in_one_loop
async def test_more_locks_than_a_page_has_are_all_shown_and_can_be_released() -> None:
    async with opened_console() as opened:
        for number in range(1_001):
            name = f"run/held-{number:04}"
            await opened.house.locks.real.acquire(name, "x", ttl_ms=60_000, within_ms=1_000)
        browser = await opened.browser(ADMIN)
        first = await browser.get("/console/leases")
        assert b"run/held-1000" not in first.body
        (following,) = [
            each.attributes["href"]
            for each in parsed(first.body)
            if each.attributes.get("rel") == "next"
        ]
        assert b"name=run%2Fheld-1000" in (await browser.get(following)).body
        asked = await browser.get("/console/leases/release?name=run/held-1000")
        assert b"Release the lock" in asked.body
        fences = await browser.get("/console/leases?name=run/held-1000")
        assert b'class="strip"' in fences.body


@in_one_loop
async def test_a_filter_of_the_list_of_runs_is_that_of_the_bulk_action(browser: Browser) -> None:
    page = await browser.get(
        "/console/bulk?tenant=none&action=cancel&status=active&label=a:b+c%3Dd&age=hour&dry=1"
    )
    assert page.status == 200
    assert b'value="a:b c:d"' in page.body
    for status in (b"pending", b"running", b"waiting"):
        assert b'value="%b" checked' % status in page.body
    assert b'name="since" value="20' in page.body
    labelled, until = {"labels": {"a": "b", "c": "d"}}, "2100-08-01T15:00:00Z"
    ask = browser.house.ask
    await ask("PUT", "/v1/workflows/one", ONE_STEP, key=ADMIN, tenant="filtered")
    await ask("POST", "/v1/workflows/one/runs", labelled, key=ADMIN, tenant="filtered")
    listed = await browser.get(f"/console/runs?tenant=filtered&label=a:b+c:d&until={until}")
    (link,) = [
        each.attributes["href"]
        for each in parsed(listed.body)
        if each.attributes.get("href", "").startswith("/console/bulk?label")
    ]
    page = await browser.get(link)
    assert b'value="a:b c:d"' in page.body
    assert f'name="until" value="{until}"'.encode() in page.body


@in_one_loop
async def test_a_filter_that_is_typed_wrong_stays_in_its_field(browser: Browser) -> None:
    for name in ("runs", "decisions", "audit"):
        page = await browser.get(f"/console/{name}?tenant=none&since=yesterday&until=2100")
        assert (page.status, b'value="yesterday"' in page.body) == (422, True), name
        assert b'value="2100"' in page.body
        assert b"<b>Not done.</b>" in page.body


@in_one_loop
async def test_policies_are_previewed_then_changed(browser: Browser) -> None:
    query = "preview=1&low.on_lock_error=fail_closed&low.renewal_failures_max=5"
    preview = await browser.get(f"/console/policies?{query}")
    assert b"waits until the lock store answers again" in preview.body
    fields = {"low.on_lock_error": "fail_closed", "critical.on_lock_error": "fail_closed"}
    done = await browser.post("/console/policies", **fields)
    assert done.headers["location"] == "/console/policies?did=policies_changed"
    again = await browser.post("/console/policies", **fields)
    assert again.headers["location"] == "/console/policies?did=policies_same"
    wrong = await browser.post("/console/policies", **{"low.on_lock_error": "fail_sideways"})
    assert (wrong.status, b"fail_sideways" in wrong.body) == (422, True)


@in_one_loop
async def test_work_without_a_lock_is_a_check_list(world: ConsoleHouse, browser: Browser) -> None:
    history = world.house.services.lease_history
    history.fell_back(Fallback(name="run/abc", risk=Risk.LOW, error="cut"))
    page = (await browser.get("/console/leases")).body
    assert b"made without a lock" in page
    assert page.count(b"data-keep=") == 1
    lock = {"name": "run/taken", "ttl_s": 60}
    await world.house.ask("POST", "/v1/admin/leases", lock, key=ADMIN)
    held = (await browser.get("/console/leases?name=run/taken")).body
    assert b"1 term in" in held
    done = await browser.post("/console/leases/release", name="run/taken", reason="gone")
    assert done.status == 303
    assert b"released by force: fence" in (await browser.get("/console/leases?name=run/taken")).body
    gone = await browser.get("/console/leases/release?name=run/none")
    assert b"not held any more" in gone.body
