"""Live events: server-sent, in the order of commits, resumable on any replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.acceptance.caller import Caller
from tests.acceptance.workflows import HOLD


class Heard(msgspec.Struct, frozen=True):
    """One event, and the newest id when it came."""

    id: str
    what: str
    run_id: str


@asynccontextmanager
async def stream(
    caller: Caller, query: str = "", *, after: str | None = None
) -> AsyncIterator[AsyncIterator[Heard]]:
    """Listen from now on, or from after an event."""
    headers = dict(caller.headers) | ({} if after is None else {"Last-Event-ID": after})
    url = f"{caller.urls[0]}/v1/events{query}"
    async with (
        asyncio.timeout(15),
        caller.client.stream("GET", url, headers=headers, timeout=15) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        # It has begun when its first line is here: what happens now is told.
        await anext(lines)
        yield _heard(lines, after or "")


async def _heard(lines: AsyncIterator[str], event_id: str) -> AsyncIterator[Heard]:
    async for line in lines:
        if line.startswith("id:"):
            event_id = line[3:].strip()
        if line.startswith("data:"):
            data: dict[str, Any] = msgspec.json.decode(line[5:])
            yield Heard(event_id, data["what"], data["run_id"])


async def _until(events: AsyncIterator[Heard], what: str) -> list[Heard]:
    heard = []
    async for event in events:
        heard.append(event)
        if event.what == what:
            return heard
    raise AssertionError("the stream ended")


async def test_e_events_tell_what_happens_and_are_resumable(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    async with stream(caller.at(0)) as events:
        run_id = (await caller.start("hold")).run_id
        begun = await _until(events, "approval_requested")
        await caller.approve(run_id, "gate")
        ended = await _until(events, "run_succeeded")
    assert [event.what for event in begun + ended] == [
        line["what"] for line in await caller.timeline(run_id)
    ]
    assert {event.run_id for event in begun + ended} == {run_id}
    # From after the first commit on, told by the last replica there is.
    async with stream(caller.at(-1), after=begun[-1].id) as events:
        again = await _until(events, "run_succeeded")
    assert [event.what for event in again] == [event.what for event in ended]
    assert again[-1].id == ended[-1].id


async def test_e_events_of_one_run_begin_at_its_beginning(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    runs = [(await caller.start("hold")).run_id for _ in range(2)]
    for run_id in runs:
        await caller.cancel(run_id)
    async with stream(caller, f"?run_id={runs[0]}") as events:
        heard = await _until(events, "run_cancelled")
    assert heard[0].what == "run_started"
    assert {event.run_id for event in heard} == {runs[0]}


async def test_e_events_of_another_tenant_are_not_told(caller: Caller) -> None:
    second = caller.other()
    for each in (caller, second):
        await each.apply("hold", HOLD)
    async with stream(second) as events:
        foreign = (await caller.start("hold")).run_id
        own = (await second.start("hold")).run_id
        heard = await _until(events, "approval_requested")
    assert {event.run_id for event in heard} == {own}
    answer = await second.call("GET", f"/v1/events?run_id={foreign}")
    assert answer.verdict == (404, "not_found")


@pytest.mark.parametrize("wrong", ["0", "nonsense", "999999999999999999999", "x" * 2_000])
async def test_e_an_id_that_no_stream_gave_is_refused(caller: Caller, wrong: str) -> None:
    answer = await caller.call("GET", "/v1/events", headers={"Last-Event-ID": wrong})
    assert answer.verdict == (422, "invalid_request")
