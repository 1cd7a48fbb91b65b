"""A6, A7: one key, one run, whatever was answered before."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tests.acceptance.caller import Caller
from tests.acceptance.waiting import until
from tests.acceptance.workflows import HOLD, one_job

MISMATCH = (422, "idempotency_mismatch")


async def test_a6_fifty_starts_with_one_key_make_one_run(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=2)
    answers = await asyncio.gather(*(caller.start("hold", key="order-1") for _ in range(50)))
    assert len({answer.run_id for answer in answers}) == 1
    assert sum(not answer.is_replayed for answer in answers) == 1
    assert len(await caller.runs()) == 1


async def test_a6_a_429_does_not_poison_a_key(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    holding = (await caller.start("hold")).run_id
    for _ in range(3):
        assert (await caller.start("hold", key="later")).status == 429
    await caller.cancel(holding)
    answer = await caller.start("hold", key="later")
    assert answer.run_id != holding
    assert not answer.is_replayed
    assert (await caller.start("hold", key="later")).is_replayed


async def test_a6_a_503_does_not_poison_a_key(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1, admission={"strategy": "lock"})
    lock = f"admission/{caller.tenant}"
    await caller.hold(lock)
    assert (await caller.start("hold", key="later")).verdict == (503, "gate_busy")
    await caller.let_go(lock)
    answer = await caller.start("hold", key="later")
    assert answer.status == 200
    assert not answer.is_replayed


async def test_a7_keys_belong_to_a_tenant(caller: Caller) -> None:
    second = caller.other()
    for each in (caller, second):
        await each.apply("hold", HOLD)
    ours, theirs = [await each.start("hold", key="order-1") for each in (caller, second)]
    assert ours.run_id != theirs.run_id
    assert not theirs.is_replayed
    assert (await second.call("GET", f"/v1/runs/{ours.run_id}")).verdict == (404, "not_found")


async def test_a7_the_same_key_with_something_else_is_refused(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.apply("other", HOLD)
    await caller.configure(max_concurrent_runs=1)
    run_id = (await caller.start("hold", {"n": 1}, key="order-1")).run_id
    # The tenant is full by now: what is wrong with the request is said first.
    assert (await caller.start("hold", {"n": 2}, key="order-1")).verdict == MISMATCH
    assert (await caller.start("other", {"n": 1}, key="order-1")).verdict == MISMATCH
    await caller.cancel(run_id)
    assert (await caller.start("hold", {"n": 2}, key="order-1")).verdict == MISMATCH


async def test_a7_a_replay_is_marked_and_passes_a_full_gate(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    first = await caller.start("hold", key="order-1")
    assert (await caller.start("hold")).status == 429
    again = await caller.start("hold", key="order-1")
    assert again.is_replayed
    assert again.run_id == first.run_id
    await caller.cancel(first.run_id)
    late = await caller.start("hold", key="order-1")
    assert late.is_replayed
    assert late.body == {"run_id": first.run_id, "status": "cancelled"}


async def test_a7_what_counts_is_the_json_value_not_its_spelling(caller: Caller) -> None:
    await caller.apply("hold", HOLD)
    bodies = [
        b'{"input": {"a": 1, "b": [true, null]}}',
        b'{"input":{"b":[true,null],"a":1}}',
        b'{ "input" : { "\\u0061" : 1, "b" : [ true, null ] } }',
    ]
    run_ids = set()
    for body in bodies:
        answer = await caller.call(
            "POST",
            "/v1/workflows/hold/runs",
            msgspec.Raw(body),
            headers={"Idempotency-Key": "order-1"},
        )
        run_ids.add(answer.run_id)
    assert len(run_ids) == 1


async def test_a7_a_refused_input_leaves_no_key_behind(caller: Caller) -> None:
    workflow = one_job(f"{caller.tenant}.work")
    schema = {"type": "object", "required": ["n"]}
    await caller.apply("strict", {**workflow, "input_schema": schema})
    refused = await caller.start("strict", {}, key="order-1")
    assert refused.verdict == (422, "invalid_input")
    assert refused.body["errors"]
    answer = await caller.start("strict", {"n": 1}, key="order-1")
    assert answer.status == 200
    assert not answer.is_replayed


async def test_a_refused_start_is_found_by_its_key_and_its_request_on_every_replica(
    caller: Caller,
) -> None:
    await caller.apply("hold", HOLD)
    await caller.configure(max_concurrent_runs=1)
    first, last = caller.at(0), caller.at(-1)
    assert (await first.start("hold", key="order-1")).status == 200
    refused = await first.start("hold", key="order-2")
    mismatch = await first.start("hold", {"other": 1}, key="order-1")
    assert (refused.status, mismatch.verdict) == (429, MISMATCH)

    async def decisions(query: str) -> list[dict[str, Any]]:
        return [*(await last.get(f"/v1/admin/decisions?{query}"))["decisions"]]

    async def are_readable() -> bool:
        return len(await decisions("limit=10")) == 2

    await until(are_readable, within_s=2.0)
    (row,) = await decisions("key=order-2")
    assert [row] == await decisions(f"request_id={refused.headers['x-request-id']}")
    assert row["at"].endswith("Z")
    assert (row["tenant"], row["workflow_id"], row["outcome"]) == (caller.tenant, "hold", "full")
    assert (row["limit"], row["active"], row["actor"]) == (1, 1, "anonymous")
    assert row["retry_after_ms"] == refused.body["retry_after_ms"]
    (row,) = await decisions("outcome=mismatch")
    assert (row["key"], row["limit"], row["retry_after_ms"]) == ("order-1", None, None)
    assert await caller.other().get("/v1/admin/decisions") == {"decisions": [], "cursor": None}
