"""The stream of events: as it happens, without gaps, and never without bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.core.model import Instant, RunId, TenantId, make_run_id
from stanchion.core.transition import TimelineEntry, Transition
from stanchion.gateway import GatewayOptions, cursors
from stanchion.gateway.routes import events
from stanchion.ports.records import FeedEntry, Tenant
from stanchion.services.waiters import FeedPage
from tests.contract.builders import WITHIN_MS, admission
from tests.gateway.asgi import opened
from tests.gateway.house import ADMIN, House, bearer, opened_house
from tests.services.faulty_locks import Fault

TENANT = ("X-Stanchion-Tenant", "acme")


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The events in a piece of stream: their fields, the data decoded."""
    events = []
    for block in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if "data" in fields:
            events.append({**fields, "data": msgspec.json.decode(fields["data"])})
    return events


async def test_what_happens_is_told_as_it_happens(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        assert (await feed.next()).startswith(b"id: ")
        run_id = await house.start()
        events = parsed(await feed.until(b"job_dispatched"))
        assert [each["event"] for each in events] == ["run_started", "job_dispatched"]
        assert {each["data"]["run_id"] for each in events} == {run_id}
        assert events[1]["data"]["step"] == "only"
        # The commit's position stands on its last line only.
        assert [("id" in each) for each in events] == [False, True]
    answer = await feed.answer()
    assert answer.headers["content-type"] == "text/event-stream"


async def test_a_reader_who_comes_back_misses_nothing_and_gets_nothing_twice(house: House) -> None:
    await house.start()
    async with opened(house.app, "GET", "/v1/events") as feed:
        first = await house.start()
        seen = parsed(await feed.until(b"job_dispatched"))
        last_id = seen[-1]["id"]
    second, third = await house.start(), await house.start()
    async with opened(house.app, "GET", "/v1/events", headers=[("Last-Event-ID", last_id)]) as feed:
        rest = parsed(await feed.until(third.encode()))
    assert {each["data"]["run_id"] for each in seen} == {first}
    assert [each["data"]["run_id"] for each in rest if each["event"] == "run_started"] == [
        second,
        third,
    ]


async def test_the_first_part_is_enough_to_come_back_to(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        began = (await feed.next()).decode().removeprefix("id: ").strip()
    run_id = await house.start()
    headers = [("Last-Event-ID", began)]
    async with opened(house.app, "GET", "/v1/events", headers=headers) as feed:
        assert run_id.encode() in await feed.until(b"job_dispatched")


async def test_of_one_run_everything_is_told_from_its_beginning_and_nothing_else(
    house: House,
) -> None:
    run_id, other = await house.start(), await house.start()
    async with opened(house.app, "GET", f"/v1/events?run_id={run_id}") as feed:
        await house.ask("POST", f"/v1/runs/{other}/cancel")
        await house.ask("POST", f"/v1/runs/{run_id}/cancel")
        events = parsed(await feed.until(b"event: run_cancelled"))
    assert {each["data"]["run_id"] for each in events} == {run_id}
    assert events[0]["event"] == "run_started"


async def test_a_run_is_read_once_for_streams_that_are_opened_at_the_same_time(
    house: House,
) -> None:
    run_id = await house.start()
    await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    before = house.store.calls["load"]
    async with AsyncExitStack() as streams:
        target = f"/v1/events?run_id={run_id}"
        feeds = [
            await streams.enter_async_context(opened(house.app, "GET", target)) for _ in range(20)
        ]
        # None of them has run yet: opening one does not wait for it.
        parts = await asyncio.gather(*(feed.next() for feed in feeds))
        assert set(parts) == {b": events follow\n\n"}
    assert house.store.calls["load"] - before <= 2


async def test_a_silent_stream_is_kept_warm() -> None:
    async with (
        opened_house(GatewayOptions(heartbeat_s=0)) as house,
        opened(house.app, "GET", "/v1/events") as feed,
    ):
        await feed.next()
        assert await feed.next() == b": heartbeat\n\n"


async def test_streams_end_when_the_server_drains_and_none_begins_then(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        house.app.drain()
        assert await feed.next() == b""
    answer = await house.ask("GET", "/v1/events")
    assert (answer.status, answer.code) == (503, "draining")


async def test_one_stream_too_many_is_refused_and_a_place_is_given_back() -> None:
    async with opened_house(GatewayOptions(streams_max=1)) as house:
        async with opened(house.app, "GET", "/v1/events") as feed:
            await feed.next()
            answer = await house.ask("GET", "/v1/events")
            assert (answer.status, answer.code) == (503, "overloaded")
        async with opened(house.app, "GET", "/v1/events") as feed:
            assert await feed.next()


async def test_a_tenant_with_too_many_streams_is_refused_and_others_are_not() -> None:
    async with opened_house(GatewayOptions(streams_per_tenant_max=1)) as house:
        async with opened(house.app, "GET", "/v1/events", headers=[TENANT]) as feed:
            await feed.next()
            answer = await house.ask("GET", "/v1/events", headers=[TENANT])
            assert (answer.status, answer.code) == (429, "tenant_overloaded")
            assert (answer.json["limit"], answer.json["active"]) == (1, 1)
            assert house.metric("stanchion_http_shed_total", reason="tenant_streams") == 1
            async with opened(house.app, "GET", "/v1/events") as other:
                assert await other.next()
        async with opened(house.app, "GET", "/v1/events", headers=[TENANT]) as feed:
            assert await feed.next()


async def test_streams_at_the_same_position_share_what_is_read_and_encoded(house: House) -> None:
    async with AsyncExitStack() as stack:
        streams = [opened(house.app, "GET", "/v1/events") for _ in range(20)]
        feeds = [await stack.enter_async_context(each) for each in streams]
        for feed in feeds:
            await feed.next()
        read = house.store.calls["feed"]
        run_id = await house.start()
        seen = [await feed.until(b"job_dispatched") for feed in feeds]
        assert all(run_id.encode() in each for each in seen)
        # Each of them for itself would have been twenty at least.
        assert house.store.calls["feed"] - read < 10


async def test_a_commit_with_many_lines_is_sent_in_parts(house: House) -> None:
    # Each step begins with 250 jobs at most.
    each = {"topic": "t", "for_each": "${input.items}"}
    wide = {"steps": {f"each-{number}": each for number in range(4)}}
    await house.ask("PUT", "/v1/workflows/wide", wide)
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        await house.ask("POST", "/v1/workflows/wide/runs", {"input": {"items": [0] * 250}})
        parts = [await feed.next()]
        while b"id: " not in parts[-1]:
            parts.append(await feed.next())
    assert max(part.count(b"event: ") for part in parts) <= 250
    events = parsed(b"".join(parts))
    assert sum(each["event"] == "job_dispatched" for each in events) == 1_000
    assert [each for each in events if "id" in each] == [events[-1]]


async def test_a_stream_that_breaks_through_a_fault_of_ours_is_logged_and_cut(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        house.store.script("feed", Fault.BUG, Fault.BUG)
        await house.start()
        async with asyncio.timeout(5):
            await feed.task
    assert [each.message for each in caplog.records] == ["request_failed"]
    assert house.metric("stanchion_http_under_way", kind="streams") == 0


async def test_a_revoked_key_ends_its_stream() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        key = await house.make_key("runner", "acme")
        async with opened(house.app, "GET", "/v1/events", headers=[bearer(key)]) as feed:
            await feed.next()
            await house.ask("DELETE", f"/v1/admin/keys/{key.split('_')[1]}", key=ADMIN)
            assert await feed.next() == b""


async def test_the_first_key_ends_streams_that_were_opened_without_one(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        await house.ask("POST", "/v1/admin/keys", {"role": "admin", "tenant": "*"})
        async with asyncio.timeout(5):
            assert await feed.next() == b""


async def test_a_stream_outlives_a_store_that_was_away(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        failed = house.store.calls["feed"]
        house.store.script("feed", Fault.ERROR)
        run_id = await house.start()
        assert run_id.encode() in await feed.until(b"job_dispatched")
        assert house.store.calls["feed"] >= failed + 2


async def test_a_stream_goes_on_with_the_key_that_replaced_a_lost_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "KEY_TRUSTED_MS", 1)
    async with opened(house.app, "GET", "/v1/events") as feed:
        await feed.next()
        await house.store.delete_document("secret", "cursors")
        other = cursors.Cursors(house.store.port, SystemEntropy(), SystemClock())
        await other.of("runs")  # another replica creates another key
        await asyncio.sleep(0.002)
        await house.start()
        seen = parsed(await feed.until(b"job_dispatched"))
    assert await other.open(seen[-1]["id"], "follow_events", "default")


@pytest.mark.parametrize("given", ["dream", "a" * 2000, b"\xff"])
async def test_an_id_that_is_not_of_this_stream_is_refused(
    house: House, given: str | bytes
) -> None:
    answer = await house.ask("GET", "/v1/events", headers=[("Last-Event-ID", given)])
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert answer.json["errors"][0]["path"] == "Last-Event-ID"


async def test_a_reader_whose_place_is_gone_is_told_of_one_gap(house: House) -> None:
    async with opened(house.app, "GET", "/v1/events") as feed:
        began = (await feed.next()).decode().removeprefix("id: ").strip()
    run_id = await _outlived(house)
    resumed = [("Last-Event-ID", began)]
    async with opened(house.app, "GET", "/v1/events", headers=resumed) as feed:
        gap, follows, *_ = parsed(await feed.until(b"run_started"))
    assert (gap["event"], gap["data"]["what"], gap["data"]["run_id"]) == ("gap", "gap", "")
    assert "no longer keeps them" in gap["data"]["detail"]
    assert ("id" in gap, "id" in follows) == (False, True)
    later = [("Last-Event-ID", follows["id"])]
    async with opened(house.app, "GET", "/v1/events", headers=later) as feed:
        assert b"event: gap" not in await feed.until(b"run_started")
    async with opened(house.app, "GET", f"/v1/events?run_id={run_id}", headers=resumed) as feed:
        gaps = parsed(await feed.until(run_id.encode()))
    assert [each["data"]["run_id"] for each in gaps] == ["", run_id]


async def test_a_stream_of_a_run_whose_end_is_gone_tells_so_at_its_end(house: House) -> None:
    run_id = await _outlived(house)
    async with opened(house.app, "GET", f"/v1/events?run_id={run_id}") as feed:
        (only,) = parsed(await feed.until(b"event: gap"))
    assert only["data"]["run_id"] == run_id
    assert "id" in only


async def test_a_run_that_goes_on_and_one_whose_end_is_kept_have_no_gap() -> None:
    async with opened_house(GatewayOptions(heartbeat_s=0)) as house:
        ended, goes_on = await house.start(), await house.start()
        await house.ask("POST", f"/v1/runs/{ended}/cancel")
        for run_id in (ended, goes_on):
            async with opened(house.app, "GET", f"/v1/events?run_id={run_id}") as feed:
                assert b"event: gap" not in await feed.until(b": heartbeat")
        await house.start()
        async with opened(house.app, "GET", f"/v1/events?run_id={goes_on}") as feed:
            last_id = parsed(await feed.until(b"job_dispatched"))[-1]["id"]
        headers = [("Last-Event-ID", last_id)]
        async with opened(house.app, "GET", f"/v1/events?run_id={ended}", headers=headers) as feed:
            assert b"event: gap" not in await feed.until(b": heartbeat")


async def _outlived(house: House) -> str:
    """A run that has ended, and whose tenant's feed has since been filled by other runs."""
    run_id = await house.start()
    await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    tenant = TenantId("default")
    await house.store.put_tenant(tenant, Tenant(max_concurrent_runs=None))
    created_at = SystemClock().now()
    wanted = admission(created_at, tenant=tenant)
    line = TimelineEntry(created_at, "run_started", "test")
    for number in range(10_001):
        other = replace(wanted.run, id=make_run_id(tenant, created_at, number))
        begun = Transition(status=other.status, timeline=(line,))
        await house.store.admit(replace(wanted, run=other, transition=begun), within_ms=WITHIN_MS)
    return run_id


async def test_streams_that_replay_much_take_turns_to_encode_and_live_ones_do_not_wait() -> None:
    encoded = 0

    @contextmanager
    def measured(_tenant: TenantId) -> Iterator[None]:
        nonlocal encoded
        encoded += 1
        yield

    state = SimpleNamespace(replays=asyncio.Lock(), work=SimpleNamespace(measured=measured))
    call: Any = SimpleNamespace(
        state=state, tenant=TenantId("acme"), query=SimpleNamespace(run_id=None)
    )
    seal: Any = SimpleNamespace(seal=str)

    def rendering(lines: int) -> asyncio.Task[list[bytes]]:
        line = TimelineEntry(Instant(0), "step_started", "stanchion")
        page = FeedPage((FeedEntry("1", RunId("r"), (line,) * lines),))
        return asyncio.create_task(events._rendered(call, page, seal, tells_gaps=False))  # noqa: SLF001 - it is about turns of the loop

    replays, live = [rendering(500) for _ in range(10)], rendering(2)
    highest = 0
    while not all(each.done() for each in replays):
        before = encoded
        await asyncio.sleep(0)
        if live.done():
            highest = max(highest, encoded - before)
        else:
            assert encoded < 10
    assert highest == 1
    assert [len(b"".join(await each).split(b"\n\n")) - 1 for each in (*replays, live)] == [
        *[500] * 10,
        2,
    ]
