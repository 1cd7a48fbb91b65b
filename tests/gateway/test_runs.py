"""Runs and single jobs over HTTP, from the start to the last line of the timeline."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stanchion import telemetry
from stanchion.core.bulk import BulkAction
from stanchion.core.faults import BATCH_FAULTS_MAX
from stanchion.core.faults import Fault as AnyFault
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.plan import Plan, link
from stanchion.core.schema import InputSchema
from stanchion.core.workflow import JobSpec, StepSpec, Workflow
from stanchion.gateway import GatewayOptions
from stanchion.gateway.views import decoded_run, encoded_run, has_small_outputs, item_row, run_view
from stanchion.wire.runs import RunView
from tests.gateway.asgi import opened
from tests.gateway.house import ADMIN, House, opened_house
from tests.services.faulty_locks import Fault

START = "/v1/workflows/one-step/runs"
APPROVAL = {
    "steps": {"ask": {"approval": {"message": "Now?"}}, "then": {"topic": "work", "needs": ["ask"]}}
}


async def finish(house: House, **result: object) -> dict[str, object]:
    """Lease the one job there is, and send this as its result."""
    job = await house.lease()
    sent = {"job_id": job["job_id"], "fence": job["fence"], **result}
    answer = await house.ask(
        "POST", "/v1/worker/results", {"worker_id": "worker-1", "results": [sent]}
    )
    assert answer.json == {"accepted": [job["job_id"]], "rejected": []}
    return job


async def test_a_run_goes_from_start_to_result_over_http(house: House) -> None:
    run_id = await house.start()
    begun = (await house.ask("GET", f"/v1/runs/{run_id}")).json
    assert begun["steps"]["only"]["waiting_for"] == "job"
    await finish(house, status="succeeded", output={"n": 1})
    run = await house.ask("GET", f"/v1/runs/{run_id}?wait=5")
    assert run.status == 200
    assert run.json["run_id"] == run_id
    assert run.json["workflow_id"] == "one-step"
    assert run.json["status"] == "succeeded"
    assert run.json["output"] == {"only": {"n": 1}}
    assert run.json["error"] is None
    only = run.json["steps"]["only"]
    assert (only["status"], only["attempt"], only["output"]) == ("succeeded", 1, {"n": 1})
    assert run.json["created_at"].endswith("Z")
    assert run.json["finished_at"].endswith("Z")


async def test_a_batch_is_judged_row_by_row_in_order_and_can_be_repeated(house: House) -> None:
    await house.start()
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": 71})
    schema = {"required": ["n"], "properties": {"n": {"type": "integer"}}}
    await house.ask(
        "PUT", "/v1/workflows/many", {"input_schema": schema, "steps": {"a": {"topic": "t"}}}
    )
    rows: list[dict[str, Any]] = [{"input": {"n": number}} for number in range(75)]
    rows[1] = {"input": {"n": "one"}}
    rows[2] = {"input": {"n": 2}, "labels": {"": "x"}}
    rows[3] = {"input": {"n": 3}, "labels": {"team": "red"}, "key": "own"}
    path, key = "/v1/workflows/many/runs/batch", [("Idempotency-Key", "k")]
    answer = await house.ask("POST", path, {"runs": rows}, headers=key)
    assert answer.status == 200, answer.body
    results = answer.json["results"]
    # One of the 71 slots was taken before, and two rows are wrong.
    expected = [200, 422, 422, *[200] * 69, *[429] * 3]
    assert [each["status"] for each in results] == expected
    assert results[1]["problem"]["code"] == "invalid_input"
    assert results[2]["problem"]["errors"][0]["path"] == "labels."
    assert results[72]["problem"]["limit"] == 71
    assert len({each["run_id"] for each in results if "run_id" in each}) == 70
    run = (await house.ask("GET", f"/v1/runs/{results[3]['run_id']}")).json
    assert (run["input"], run["labels"]) == ({"n": 3}, {"team": "red"})
    again = (await house.ask("POST", path, {"runs": rows}, headers=key)).json["results"]
    assert [each.get("run_id") for each in again] == [each.get("run_id") for each in results]
    rows[0], rows[3] = {"input": {"n": 9}}, {"input": {"n": 9}, "key": "own"}
    changed = (await house.ask("POST", path, {"runs": rows[:4]}, headers=key)).json["results"]
    codes = [each["problem"]["code"] for each in changed]
    assert codes[0] == codes[3] == "idempotency_mismatch"


async def test_a_batch_of_faulty_rows_makes_no_answer_of_megabytes(house: House) -> None:
    schema = {"allOf": [{"properties": {"a": {"enum": [f"{n:0200}"]}}} for n in range(110)]}
    file = {"steps": {"only": {"topic": "work"}}, "input_schema": schema}
    assert (await house.ask("PUT", "/v1/workflows/strict", file)).status == 200
    rows = [{"key": f"k-{number}", "input": {"a": 1}} for number in range(1_000)]
    answer = await house.ask("POST", "/v1/workflows/strict/runs/batch", {"runs": rows})
    assert len(answer.body) < 2 * 1024 * 1024  # it was 26 MB, and stopped the server for 90 ms
    problems = [row["problem"] for row in answer.json["results"]]
    assert {each["code"] for each in problems} == {"invalid_input"}
    first, last = problems[0]["errors"], problems[-1]["errors"]
    assert (len(first), first[-1]["message"]) == (101, "and 10 more faults")
    assert [each["path"] for each in last] == ["input.a", ""]
    assert last[-1]["message"] == "only the first fault is listed: the batch has too many"
    (at_limit,) = [each["errors"] for each in problems if 2 < len(each["errors"]) < 101]
    assert at_limit[-1]["message"] == f"more faults are left out: {102 - len(at_limit)}"


async def test_a_batch_of_faulty_rows_is_answered_in_pieces(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it in one go took 20 ms, and to find a hundred faults of each row a third of a second.
    schema = {"properties": {"x": {"items": {"type": "string"}}}}
    file = {"steps": {"only": {"topic": "work"}}, "input_schema": schema}
    assert (await house.ask("PUT", "/v1/workflows/strict", file)).status == 200
    found, faults = list[int](), InputSchema.faults
    loop, iteration, found_at = asyncio.get_running_loop(), 0, 0

    def counted(
        self: InputSchema, value: JsonValue, *, first_only: bool = False
    ) -> tuple[AnyFault, ...]:
        nonlocal found_at
        some = faults(self, value, first_only=first_only)
        found.append(len(some))
        found_at = iteration
        return some

    def count() -> None:
        nonlocal iteration
        iteration += 1
        if iteration < 10_000:
            loop.call_soon(count)

    monkeypatch.setattr(InputSchema, "faults", counted)
    monkeypatch.setattr("stanchion.services.work._PART_S", 0.0)
    rows = [{"key": f"k-{number}", "input": {"x": [1] * 100}} for number in range(200)]
    loop.call_soon(count)
    answer = await house.ask("POST", "/v1/workflows/strict/runs/batch", {"runs": rows})
    assert {row["status"] for row in answer.json["results"]} == {422}
    assert sum(found) < 2 * BATCH_FAULTS_MAX  # it was 40,000
    assert iteration - found_at >= 200


async def test_a_row_without_a_key_is_refused_alone_if_the_request_has_none(house: House) -> None:
    await house.start()
    path, rows = "/v1/workflows/one-step/runs/batch", [{"key": "a"}, {}, {"key": "b"}]
    answer = await house.ask("POST", path, {"runs": rows})
    assert answer.status == 200, answer.body
    results = answer.json["results"]
    assert [each["status"] for each in results] == [200, 422, 200]
    [fault] = results[1]["problem"]["errors"]
    assert (fault["path"], "Idempotency-Key" in fault["message"]) == ("key", True)
    keyed = await house.ask("POST", path, {"runs": rows}, headers=[("Idempotency-Key", "k")])
    assert [each["status"] for each in keyed.json["results"]] == [200] * 3
    assert keyed.json["results"][0] == results[0]


async def test_a_batch_without_rows_or_with_a_wrong_key_starts_nothing(house: House) -> None:
    await house.start()
    path = "/v1/workflows/one-step/runs/batch"
    wrong: list[list[dict[str, int]]] = [[], [{}] * 1_001]
    for runs in wrong:
        headers = [("Idempotency-Key", "k")]
        assert (await house.ask("POST", path, {"runs": runs}, headers=headers)).status == 422
    long = await house.ask("POST", path, {"runs": [{}]}, headers=[("Idempotency-Key", "k" * 254)])
    assert (long.status, long.json["errors"][0]["path"]) == (422, "Idempotency-Key")
    for row in ({"key": "z"}, 1):
        none = await house.ask("POST", "/v1/workflows/none/runs/batch", {"runs": [row]})
        assert (none.status, none.json["code"]) == (404, "not_found"), row
    faulty = await house.ask("POST", path, {"runs": [1]})
    assert (faulty.status, faulty.json["results"][0]["status"]) == (200, 422)
    assert len((await house.ask("GET", "/v1/runs")).json["runs"]) == 1


async def test_a_faulty_row_of_a_batch_is_refused_alone(house: House) -> None:
    await house.start()
    path, headers = "/v1/workflows/one-step/runs/batch", [("Idempotency-Key", "k")]
    faulty = [
        ({"input": 3}, "input"),
        ({"labels": []}, "labels"),
        ({"key": 5}, "key"),
        ({"priority": 10}, "priority"),
        ({"unknown": 1}, "unknown"),
        (["a list"], ""),
        (None, ""),
    ]
    rows = [{"input": {}}, *(row for row, _ in faulty), {"input": {}}]
    answer = await house.ask("POST", path, {"runs": rows}, headers=headers)
    assert answer.status == 200, answer.body
    results = answer.json["results"]
    assert [each["status"] for each in results] == [200, *[422] * len(faulty), 200]
    problems = [each["problem"] for each in results if "problem" in each]
    assert {each["code"] for each in problems} == {"invalid_request"}
    assert [each["errors"][0]["path"] for each in problems] == [path for _, path in faulty]
    broken = await house.ask("POST", path, b'{"runs": [{"input": {]}]}', headers=headers)
    assert (broken.status, broken.json["code"]) == (400, "malformed_json")


async def test_a_row_that_cannot_be_decoded_is_refused_alone_in_a_body_of_any_length(
    house: House,
) -> None:
    await house.start()
    path, headers = "/v1/workflows/one-step/runs/batch", [("Idempotency-Key", "k")]
    for text in (b"1e999", b'"\xff"'):
        for length in (1, 300, 20_000):
            row = b'{"input":{"a":%b}}' % text
            body = b'{"runs":[%b,{"input":{}}]}' % (row + b" " * length)
            answer = await house.ask("POST", path, body, headers=headers)
            assert answer.status in {200, 400}, (answer.status, answer.body, text, length)
    # Refused alone as well: Python reads no integer with so many digits. The colon in the text
    # makes the decoder look at the names of members.
    digits = b'{"runs":[{"input":{"a":%b,"b":":"}},{"input":{}}]}' % (b"1" * 5_000)
    answer = await house.ask("POST", path, digits, headers=headers)
    assert [each["status"] for each in answer.json["results"]] == [422, 200]
    twice = b'{"runs":[],"runs":[{"input":{"a":1e999}}]}'
    answer = await house.ask("POST", path, twice, headers=headers)
    assert (answer.status, answer.json["errors"][0]["path"]) == (422, "runs")


@pytest.mark.parametrize("text", [b"[%b]", b'{"a":%b}', b'{"a":":","a":%b}'])
async def test_a_value_of_any_depth_is_refused_in_words(house: House, text: bytes) -> None:
    # Each pass over a body may go a few levels less deep than the one before it.
    await house.start()
    start, batch = b'{"input":{"a":%b}}', b'{"runs":[{"input":{"a":%b},"key":"k"}]}'
    path = "/v1/workflows/one-step/runs"
    value = text.replace(b"%b", b"1")
    statuses = set[int]()
    for levels in range(1_000):
        if levels > 800:
            for target, body in ((path, start), (f"{path}/batch", batch)):
                statuses.add((await house.ask("POST", target, body % value)).status)
        value = text % value
    assert statuses <= {200, 422}, "a batch refuses the row, or all of its body"


async def test_a_row_of_a_batch_may_have_no_member_twice(house: House) -> None:
    await house.start()
    repeated = [
        b'{"input":{"a":1,"a":2},"key":"k"}',
        b'{"key":"k","input":{},"key":"k"}',
        b'{"input":{},"input":{"a":1}}',
        b'{"labels":{"a":"b"},"labels":{},"key":"k"}',
        b'{"input":{"a":{"b":1,"b":1}}}',
        b'{"input":{"\\u0061":1,"a":2}}',
        b'{"input" : {"a" :1, "a":2}}',
    ]
    once = [b'{"input":{"a":":{","b":[1]},"key":"x:{"}', b'{"input" : {"a" :{}}}', b"{}"]
    # In a short body a repeated member is found before the rows are looked at.
    body = b'{"runs":[' + b",".join((*repeated, *once)) + b" " * 20_000 + b"]}"
    path, headers = "/v1/workflows/one-step/runs/batch", [("Idempotency-Key", "k")]
    answer = await house.ask("POST", path, body, headers=headers)
    statuses = [each["status"] for each in answer.json["results"]]
    assert statuses == [422] * len(repeated) + [200] * len(once)


async def test_a_row_of_a_batch_is_checked_beside_many_others(house: House) -> None:
    await house.start()
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": None})
    path, headers = "/v1/workflows/one-step/runs/batch", [("Idempotency-Key", "k")]
    plain = [b'{"input":{"a":%d,"b":[1]},"key":"k%d"}' % (n, n) for n in range(100)]
    deep = b"[" * 65 + b"]" * 65
    cases: list[tuple[list[bytes], list[int]]] = [
        ([b'{"input":{"a":1,"a":2},"key":"a"}'], [422]),
        # Together they have as many colons as two plain rows.
        ([b'{"key":"b"}', b'{"input":{"a":{},"a":1},"key":"c"}'], [200, 422]),
        ([b'{"input":{"a":%b},"key":"d"}' % deep], [422]),
        ([b'{"input":{"a":9223372036854775808},"key":"e"}'], [422]),
        ([b'{"input":{"a":1}}', b'{"input":{"a":1,"a":2},"key":"f"}'], [200, 422]),
        ([b'{"input":{"a":1},"key":"g"}', b'{"input":{"a":2},"key":"g"}'], [200, 422]),
        ([b'{"input":{"a":1},"key":"h","labels":{"x":" "}}'], [422]),
    ]
    for some, wanted in cases:
        body = b'{"runs":[%b]}' % b",".join([*plain[:50], *some, *plain[50:]])
        answer = await house.ask("POST", path, body + b" " * 20_000, headers=headers)
        statuses = [each["status"] for each in answer.json["results"]]
        assert statuses == [200] * 50 + wanted + [200] * 50


async def test_a_batch_under_a_lock_is_judged_in_order(house: House) -> None:
    await house.start()
    await house.ask("PATCH", "/v1/admin/settings", {"admission": {"strategy": "lock"}})
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": 4})
    rows = [{"key": str(number)} for number in range(6)]
    answer = await house.ask("POST", "/v1/workflows/one-step/runs/batch", {"runs": rows})
    assert [each["status"] for each in answer.json["results"]] == [200] * 3 + [429] * 3


async def test_labels_are_shown_kept_by_a_rerun_and_part_of_the_request(house: House) -> None:
    await house.ask("PUT", "/v1/workflows/approval", APPROVAL)
    labels = {"team": "red", "of-what": "a:b", "Größe": "✓"}
    path, key = "/v1/workflows/approval/runs", [("Idempotency-Key", "k")]
    began = await house.ask("POST", path, {"labels": labels}, headers=key)
    assert began.status == 200, began.body
    run_id = began.json["run_id"]
    assert (await house.ask("GET", f"/v1/runs/{run_id}")).json["labels"] == labels
    assert (await house.ask("GET", "/v1/approvals")).json["approvals"][0]["labels"] == labels
    for body, status in (({"labels": labels}, 200), ({}, 422), ({"labels": {"team": "red"}}, 422)):
        assert (await house.ask("POST", path, body, headers=key)).status == status, body
    await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    again = (await house.ask("POST", f"/v1/runs/{run_id}/rerun")).json["run_id"]
    assert (await house.ask("GET", f"/v1/runs/{again}")).json["labels"] == labels
    plain = (await house.ask("POST", path, {}, headers=[("Idempotency-Key", "n")])).json["run_id"]
    same = await house.ask("POST", path, {"labels": {}}, headers=[("Idempotency-Key", "n")])
    assert same.json["run_id"] == plain


async def test_runs_are_listed_by_every_filter(house: House) -> None:
    await house.start()
    await house.ask("PUT", "/v1/workflows/other", {"steps": {"a": {"topic": "t"}}, "risk": "high"})
    ids = []
    for labels in ({"team": "red"}, {"team": "red", "url": "http://a"}, {}):
        began = await house.ask("POST", "/v1/workflows/other/runs", {"labels": labels})
        ids.append(began.json["run_id"])
    await house.ask("POST", f"/v1/runs/{ids[0]}/cancel")
    again = (await house.ask("POST", f"/v1/runs/{ids[0]}/rerun")).json["run_id"]
    created = {
        each: datetime.fromisoformat(
            (await house.ask("GET", f"/v1/runs/{each}")).json["created_at"]
        )
        for each in (*ids, again)
    }
    at = created[again].isoformat().replace("+00:00", "Z")
    # Runs of the same millisecond are at the same time.
    since = {each for each, when in created.items() if when >= created[again]}
    expected = {
        "label=team:red": {ids[0], ids[1], again},
        "label=team%3Ared&label=url:http://a": {ids[1]},
        "label=team:red&status=cancelled&status=failed": {ids[0]},
        f"rerun_of={ids[0]}": {again},
        f"workflow_id=other&since={at}": since,
        f"workflow_id=other&until={at}": {*ids} - since,
        "workflow_id=other&label=team:blue": set(),
    }
    for query, wanted in expected.items():
        page = await house.ask("GET", f"/v1/runs?{query}")
        assert {row["run_id"] for row in page.json["runs"]} == wanted, query
    (row,) = (await house.ask("GET", f"/v1/runs?rerun_of={ids[0]}")).json["runs"]
    assert (row["tenant"], row["labels"], row["risk"]) == ("default", {"team": "red"}, "high")


@pytest.mark.parametrize(
    "query",
    [
        *(
            "status=nonsense",
            "status=running&status=x",
            "label=team",
            "label=:red",
            "label=a:b%20c",
        ),
        *("since=yesterday", "since=2026-11-15T00:00:00", "until=5", "rerun_of=", "workflow_id="),
        "until=1e-5",
        *("&".join(["label=a:b"] * 17), "workflow_id=a&workflow_id=b", "labels=a:b"),
    ],
)
async def test_a_filter_that_cannot_be_is_422(house: House, query: str) -> None:
    refused = await house.ask("GET", f"/v1/runs?{query}")
    assert (refused.status, refused.code) == (422, "invalid_request")
    assert refused.json["errors"][0]["path"].startswith(query.split("=", maxsplit=1)[0])


async def test_a_refused_value_is_told_what_is_allowed(house: House) -> None:
    for path, message in (
        ("/v1/runs?label=red", "expected a label: write name:value"),
        ("/v1/runs?status=bogus", f"'bogus' is not one of {', '.join(RunStatus)}"),
        ("/v1/runs?rerun_of=", "expected a run's id"),
        ("/v1/workflows/a%20b", 'expected a letter, then letters, digits, "_" or "-"; 64 at most'),
        ("/v1/jobs/a%20b", "expected a job's id: run:step@attempt"),
        ("/v1/runs?workflow_id=%20", "expected 1 to 200 visible ASCII characters"),
    ):
        refused = await house.ask("GET", path)
        assert refused.json["errors"][0]["message"] == message
    bulk = await house.ask("POST", "/v1/bulk", {"action": "delete", "filter": {}})
    assert bulk.json["errors"][0]["message"] == f"'delete' is not one of {', '.join(BulkAction)}"


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ({"team": "two words"}, "labels.team"),
        ({"ok": "1", "team": ""}, "labels.team"),
        ({"team": "x" * 65}, "labels.team"),
        ({"team": 5}, "labels.team"),
        ({"": "red"}, "labels."),
        ({"a\tb": "red"}, "labels.a\tb"),
        ({"a:b": "zz"}, "labels.a:b"),
        ({str(number): "x" for number in range(17)}, "labels"),
        (["team"], "labels"),
    ],
)
async def test_a_faulty_label_is_named(house: House, labels: object, named: str) -> None:
    await house.start()
    refused = await house.ask("POST", START, {"labels": labels})
    assert (refused.status, refused.code) == (422, "invalid_request")
    assert [each["path"] for each in refused.json["errors"]] == [named], refused.json


async def test_a_wait_is_answered_when_the_run_ends_or_the_time_is_over(house: House) -> None:
    run_id = await house.start()
    began = time.perf_counter()
    still = await house.ask("GET", f"/v1/runs/{run_id}?wait=0.2")
    assert still.json["status"] == "running"
    assert time.perf_counter() - began >= 0.2
    async with opened(house.app, "GET", f"/v1/runs/{run_id}?wait=60") as feed:
        await asyncio.sleep(0)
        await finish(house, status="succeeded")
        assert (await feed.answer()).json["status"] == "succeeded"


async def test_steps_that_nothing_has_happened_to_are_shown(house: House) -> None:
    await house.ask("PUT", "/v1/workflows/approval", APPROVAL)
    run_id = (await house.ask("POST", "/v1/workflows/approval/runs")).json["run_id"]
    steps = (await house.ask("GET", f"/v1/runs/{run_id}")).json["steps"]
    assert (steps["ask"]["waiting_for"], steps["ask"]["question"]) == ("decision", "Now?")
    assert (steps["then"]["status"], steps["then"]["question"]) == ("pending", None)


@pytest.mark.parametrize(("word", "other"), [("approve", "reject"), ("reject", "approve")])
async def test_the_first_decision_counts_and_another_conflicts(
    house: House, word: str, other: str
) -> None:
    await house.ask("PUT", "/v1/workflows/approval", APPROVAL)
    run_id = (await house.ask("POST", "/v1/workflows/approval/runs")).json["run_id"]
    path = f"/v1/runs/{run_id}/steps/ask"
    early = await house.ask("POST", f"/v1/runs/{run_id}/steps/then/{word}")
    assert (early.status, early.code) == (409, "conflict")
    assert (await house.ask("POST", f"/v1/runs/{run_id}/steps/none/{word}")).status == 404
    first = await house.ask("POST", f"{path}/{word}", {"comment": "seen"})
    assert (first.status, first.json["applied"]) == (200, True)
    assert (await house.ask("POST", f"{path}/{word}")).status == 200
    second = await house.ask("POST", f"{path}/{other}")
    assert (second.status, second.code) == (409, "conflict")


DECIDED: dict[str, Any] = {
    "steps": {
        "ask": {
            "approval": {
                "message": "Pay ${input.sum}?",
                "timeout_s": 60,
                "not_by_starter": True,
                "data_schema": {"type": "object", "required": ["up_to"]},
            }
        }
    }
}


async def test_an_approval_is_decided_by_another_with_the_data_it_wants() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        keys = {}
        for role, name in (("runner", "kim"), ("approver", "lee"), ("approver", "kim")):
            asked = {"role": role, "tenant": "acme", "name": name}
            made = await house.ask("POST", "/v1/admin/keys", asked, key=ADMIN)
            keys[role, name] = made.json["key"]
        kim, lee = keys["runner", "kim"], keys["approver", "lee"]
        await house.ask("PUT", "/v1/workflows/pay", DECIDED, key=kim)
        shown = await house.ask("GET", "/v1/workflows/pay", key=kim)
        assert shown.json["definition"]["steps"] == DECIDED["steps"]
        began = await house.ask("POST", "/v1/workflows/pay/runs", {"input": {"sum": 5}}, key=kim)
        path = f"/v1/runs/{began.json['run_id']}"
        run = (await house.ask("GET", path, key=lee)).json
        assert (run["starter"], run["steps"]["ask"]["question"]) == ("kim", "Pay 5?")
        assert run["steps"]["ask"]["decide_by"] is not None
        listed = (await house.ask("GET", "/v1/approvals", key=lee)).json
        asked = DECIDED["steps"]["ask"]["approval"]
        said_of = {"message": "Pay 5?", "starter": "kim", "not_by_starter": True}
        where = {"run_id": run["run_id"], "step_id": "ask", "tenant": "acme", "workflow_id": "pay"}
        since = run["steps"]["ask"]["started_at"]
        times = {"since": since, "expires_at": run["steps"]["ask"]["decide_by"]}
        nothing: dict[str, object] = {"item": None, "ask": None, "data": None, "labels": {}}
        said_of["data_schema"] = asked["data_schema"]
        assert listed == {"approvals": [{**where, **said_of, **times, **nothing}], "cursor": None}
        everywhere = await house.ask("GET", "/v1/approvals", key=ADMIN, tenant="*")
        assert everywhere.json == listed
        elsewhere = await house.ask("GET", "/v1/approvals", key=ADMIN, tenant="globex")
        assert elsewhere.json["approvals"] == []
        approve, data = f"{path}/steps/ask/approve", {"up_to": 7}
        for key in (kim, keys["approver", "kim"]):
            own = await house.ask("POST", approve, {"data": data}, key=key)
            assert (own.status, own.code) == (403, "forbidden")
            assert "not_by_starter" in own.json["detail"]
        wrong = await house.ask("POST", approve, {"data": {}}, key=lee)
        assert (wrong.status, wrong.code) == (422, "invalid_input")
        assert [fault["path"] for fault in wrong.json["errors"]] == ["data.up_to"]
        assert (await house.ask("POST", approve, key=lee)).status == 422
        right = await house.ask("POST", approve, {"data": data, "comment": "ok"}, key=lee)
        assert (right.status, right.json["status"]) == (200, "succeeded")
        ended = (await house.ask("GET", path, key=lee)).json
        said = {"approved": True, "by": "lee", "comment": "ok", "data": data}
        assert ended["steps"]["ask"]["output"] == said
        assert ended["steps"]["ask"]["question"] == "Pay 5?"  # as it was asked
        assert (await house.ask("POST", approve, {"data": data}, key=lee)).status == 200
        other = await house.ask("POST", approve, {"data": {"up_to": 8}}, key=lee)
        assert (other.status, other.code) == (409, "conflict")
        assert other.json["detail"] == "step 'ask' was approved before, with other data"
        assert (await house.ask("GET", "/v1/approvals", key=lee)).json["approvals"] == []


async def test_pages_of_approvals_are_short_if_they_are_large(house: House) -> None:
    large = {"type": "object", "description": "x" * 40_000}
    flow = {"steps": {f"s{n}": {"approval": {"data_schema": large}} for n in range(6)}}
    assert (await house.ask("PUT", "/v1/workflows/large", flow)).status == 200
    for _ in range(10):
        assert (await house.ask("POST", "/v1/workflows/large/runs")).status == 200
    seen: list[tuple[str, str]] = []
    pages, after = 0, ""
    while pages == 0 or after:
        page = (await house.ask("GET", f"/v1/approvals?limit=1000{after}")).json
        seen += [(row["run_id"], row["step_id"]) for row in page["approvals"]]
        pages, after = pages + 1, f"&cursor={page['cursor']}" if page["cursor"] else ""
    assert (len(seen), len({*seen})) == (60, 60)
    assert pages == 2


async def test_a_cancel_of_a_run_that_was_started_here_takes_two_calls_of_the_store(
    house: House,
) -> None:
    run_id = await house.start()
    before = house.store.calls.copy()
    answer = await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "cancelled")
    made = house.store.calls - before
    assert [made[verb] for verb in ("post", "settle", "load", "commit")] == [1, 1, 0, 0]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_REPLY])
async def test_a_cancel_whose_settle_fails_is_applied_as_usual(house: House, fault: Fault) -> None:
    run_id = await house.start()
    house.store.script("settle", fault)
    answer = await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "cancelled")


async def test_a_cancelled_run_stays_cancelled_and_a_finished_one_conflicts(house: House) -> None:
    run_id = await house.start()
    for _ in range(2):
        answer = await house.ask("POST", f"/v1/runs/{run_id}/cancel", {"reason": "enough"})
        assert (answer.status, answer.json["status"]) == (200, "cancelled")
    done = await house.start()
    await finish(house, status="succeeded")
    await house.ask("GET", f"/v1/runs/{done}?wait=5")
    answer = await house.ask("POST", f"/v1/runs/{done}/cancel")
    assert (answer.status, answer.code) == (409, "conflict")


async def test_a_rerun_is_a_run_of_its_own(house: House) -> None:
    run_id = await house.start()
    early = await house.ask("POST", f"/v1/runs/{run_id}/rerun")
    assert (early.status, early.code) == (409, "conflict")
    await finish(house, status="failed", error="no luck")
    failed = (await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json
    assert (failed["status"], failed["error"]["code"]) == ("failed", "job_failed")
    assert failed["error"]["message"] == "no luck"
    unknown = await house.ask("POST", f"/v1/runs/{run_id}/rerun", {"from_step": "none"})
    assert (unknown.status, unknown.json["errors"][0]["path"]) == (422, "from_step")
    again = await house.ask("POST", f"/v1/runs/{run_id}/rerun", {"from_step": "only"})
    assert again.status == 200
    assert (await house.ask("GET", f"/v1/runs/{again.json['run_id']}")).json["rerun_of"] == run_id
    assert (await house.ask("POST", "/v1/runs/zz/rerun")).status == 404


LIST = {
    "input_schema": {"type": "object", "required": ["items"]},
    "steps": {
        "each": {"topic": "work", "for_each": "${input.items}", "parallel": 2},
        "last": {"topic": "work", "needs": ["each"]},
    },
}


async def test_a_rerun_of_failed_items_says_before_and_after_what_it_keeps(house: House) -> None:
    assert (await house.ask("PUT", "/v1/workflows/list", LIST)).status == 200
    given = {"items": [0, 1, 2]}
    run_id = (await house.ask("POST", "/v1/workflows/list/runs", {"input": given})).json["run_id"]
    for _ in range(3):
        job = await house.lease()
        how = {"status": "failed", "error": "no"} if job["item"] == 1 else {"status": "succeeded"}
        sent = {"job_id": job["job_id"], "fence": job["fence"], "output": job["item"], **how}
        body = {"worker_id": "worker-1", "results": [sent]}
        assert (await house.ask("POST", "/v1/worker/results", body)).json["accepted"]
    assert (await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json["status"] == "failed"
    path = f"/v1/runs/{run_id}/rerun"
    only = {"only": "failed_items"}
    plan = await house.ask("POST", path, {**only, "dry_run": True})
    assert plan.json == {
        "rerun_of": run_id,
        "workflow_id": "list",
        "workflow_version": 1,
        "workflow_source": "own",
        "version": "same",
        "steps": {
            "each": {"action": "runs_again", "items_reused": 2, "items_run_again": 1},
            "last": {"action": "runs_again", "items_reused": None, "items_run_again": None},
        },
    }
    assert (await house.ask("GET", "/v1/runs")).json["runs"][0]["run_id"] == run_id
    again = await house.ask("POST", path, only)
    new_id = again.json["run_id"]
    items = (await house.ask("GET", f"/v1/runs/{new_id}/steps/each/items")).json["items"]
    assert [(row["status"], row["output"], row["job_id"]) for row in items] == [
        ("succeeded", 0, None),
        ("running", None, f"{new_id}:each[1]@1"),
        ("succeeded", 2, None),
    ]
    lines = (await house.ask("GET", f"/v1/runs/{new_id}/timeline")).json["entries"]
    assert [line["detail"] for line in lines[:2]] == [
        f"rerun of {run_id}: 0 steps reused, 2 to run",
        "3 items: 2 reused, 1 to run",
    ]
    await finish(house, status="succeeded", output="again")
    await finish(house, status="succeeded")
    each = (await house.ask("GET", f"/v1/runs/{new_id}?wait=5")).json["steps"]["each"]
    assert each["output"] == [0, "again", 2]


async def test_a_rerun_of_failed_items_that_was_queued_keeps_the_others(house: House) -> None:
    assert (await house.ask("PUT", "/v1/workflows/list", LIST)).status == 200
    given = {"input": {"items": [0, 1, 2]}}
    run_id = (await house.ask("POST", "/v1/workflows/list/runs", given)).json["run_id"]
    for _ in range(3):
        job = await house.lease()
        how = {"status": "failed", "error": "no"} if job["item"] == 1 else {"status": "succeeded"}
        sent = {"job_id": job["job_id"], "fence": job["fence"], "output": job["item"], **how}
        body = {"worker_id": "worker-1", "results": [sent]}
        assert (await house.ask("POST", "/v1/worker/results", body)).json["accepted"]
    assert (await house.ask("GET", f"/v1/runs/{run_id}?wait=5")).json["status"] == "failed"
    queues = {"max_concurrent_runs": 1, "on_full": "queue"}
    assert (await house.ask("PUT", "/v1/admin/tenants/default", queues)).status == 200
    other = (await house.ask("POST", "/v1/workflows/list/runs", given)).json["run_id"]
    again = await house.ask("POST", f"/v1/runs/{run_id}/rerun", {"only": "failed_items"})
    assert again.json["status"] == "queued"
    assert (await house.ask("POST", f"/v1/runs/{other}/cancel")).status == 200
    new_id = again.json["run_id"]
    for _ in range(100):
        if (await house.ask("GET", f"/v1/runs/{new_id}")).json["status"] == "running":
            break
        await asyncio.sleep(0.02)
    items = (await house.ask("GET", f"/v1/runs/{new_id}/steps/each/items")).json["items"]
    assert [(row["status"], row["output"], row["job_id"]) for row in items] == [
        ("succeeded", 0, None),
        ("running", None, f"{new_id}:each[1]@1"),
        ("succeeded", 2, None),
    ]


INNER = {
    "steps": {
        "draft": {"topic": "work", "input": "${input.n}"},
        "check": {"topic": "work", "needs": ["draft"]},
    }
}
OUTER = """
steps:
  each:
    for_each: "${input.items}"
    workflow: inner
    input: {n: "${item}"}
    parallel: 2
"""
YAML = [("content-type", "application/yaml")]


async def test_a_workflow_for_each_item_over_http(house: House) -> None:
    for inner, fault in (
        ({"steps": {"ask": {"approval": {}}}}, "'inner' has an approval step, 'ask'"),
        (LIST, "'inner' has a for_each step, 'each'"),
    ):
        assert (await house.ask("PUT", "/v1/workflows/inner", inner)).status == 200
        refused = await house.ask("PUT", "/v1/workflows/outer", OUTER.encode(), headers=YAML)
        [error] = refused.json["errors"]
        assert (refused.status, error["path"], error["line"]) == (422, "steps.each.workflow", 5)
        assert fault in error["message"]
    assert (await house.ask("PUT", "/v1/workflows/inner", INNER)).status == 200
    stored = await house.ask("PUT", "/v1/workflows/outer", OUTER.encode(), headers=YAML)
    assert stored.status == 200, stored.json
    shown = (await house.ask("GET", "/v1/workflows/outer")).json["definition"]
    assert (await house.ask("PUT", "/v1/workflows/outer", shown)).json["version"] == 1
    path = "/v1/workflows/outer/runs"
    many = await house.ask("POST", path, {"input": {"items": [0] * 10_001}})
    assert (many.status, many.code) == (422, "invalid_input")
    assert "10001 items; at most 10000" in many.json["errors"][0]["message"]
    wide = {"steps": {f"s{n}": {"delay_s": 0} for n in range(3)}}
    assert (await house.ask("PUT", "/v1/workflows/inner", wide)).status == 200
    many = await house.ask("POST", path, {"input": {"items": [0] * 6_667}})
    assert (many.status, many.code) == (422, "invalid_input")
    assert "6667 items with 3 steps each; at most 20000" in many.json["errors"][0]["message"]
    assert (await house.ask("PUT", "/v1/workflows/inner", INNER)).status == 200

    run_id = (await house.ask("POST", path, {"input": {"items": [0, 1, 2]}})).json["run_id"]
    job = await finish(house, status="succeeded", output="d")
    assert (job["step_id"], job["item"], job["job_id"]) == (
        "each.draft",
        0,
        f"{run_id}:each.draft[0]@1",
    )
    failed = await finish(house, status="failed", error="no")
    assert (failed["step_id"], failed["item"]) == ("each.draft", 1)
    check = await finish(house, status="succeeded", output="c")
    shown = (await house.ask("GET", f"/v1/jobs/{str(check['job_id']).replace('[', '%5B')}")).json
    assert (shown["step_id"], shown["status"]) == ("each.check", "finished")
    last = await house.lease()
    items = f"/v1/runs/{run_id}/steps/each/items"
    rows = (await house.ask("GET", items)).json["items"]
    assert [(row["status"], row["attempt"], row["job_id"]) for row in rows] == [
        ("succeeded", 1, f"{run_id}:each.check[0]@1"),
        ("failed", 1, f"{run_id}:each.draft[1]@1"),
        ("running", 1, f"{run_id}:each.draft[2]@1"),
    ]
    assert rows[0]["output"] == {"check": "c"}
    assert rows[1]["error"] == {"code": "job_failed", "message": "no", "step": "each.draft"}
    assert (await house.ask("POST", f"/v1/runs/{run_id}/cancel")).json["status"] == "cancelled"
    leases = [{"job_id": last["job_id"], "fence": last["fence"]}]
    renewed = await house.ask(
        "POST", "/v1/worker/renew", {"worker_id": "worker-1", "leases": leases}
    )
    assert renewed.json["reasons"] == {last["job_id"]: "cancelled"}
    plan = await house.ask(
        "POST", f"/v1/runs/{run_id}/rerun", {"only": "failed_items", "dry_run": True}
    )
    assert plan.json["steps"] == {
        "each": {"action": "runs_again", "items_reused": 1, "items_run_again": 2}
    }
    again = await house.ask("POST", f"/v1/runs/{run_id}/rerun", {"only": "failed_items"})
    rows = (await house.ask("GET", items.replace(run_id, again.json["run_id"]))).json["items"]
    assert [row["status"] for row in rows] == ["succeeded", "running", "running"]
    assert rows[0]["job_id"] is None
    assert rows[0]["output"] == {"check": "c"}


def test_an_item_names_its_last_job_also_within_one_millisecond() -> None:
    now = Instant(1_700_000_000_000)
    run = Run(
        id=RunId("r"),
        tenant=TenantId("t"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input={},
        created_at=now,
        steps={StepId("each"): Step(status=StepStatus.RUNNING)},
    )
    done = Step(status=StepStatus.SUCCEEDED, attempt=1, dispatch=1, finished_at=now)
    steps = {StepId("each.draft"): done, StepId("each.check"): done}
    key = ItemKey(StepId("each"), 0)
    assert item_row(run, key, Item(steps=steps)).job_id == "r:each.check[0]@1"
    earlier = replace(done, finished_at=Instant(now - 1))
    steps[StepId("each.check")] = earlier
    assert item_row(run, key, Item(steps=steps)).job_id == "r:each.draft[0]@1"


async def test_a_rerun_takes_another_version_or_input(house: House) -> None:
    assert (await house.ask("PUT", "/v1/workflows/list", LIST)).status == 200
    given = {"items": [0]}
    run_id = (await house.ask("POST", "/v1/workflows/list/runs", {"input": given})).json["run_id"]
    path = f"/v1/runs/{run_id}/rerun"
    for dry_run in (False, True):
        early = await house.ask("POST", path, {"version": "newest", "dry_run": dry_run})
        assert (early.status, early.code) == (409, "conflict")
    assert (await house.ask("POST", f"/v1/runs/{run_id}/cancel")).status == 200
    newer = {
        "input_schema": {"type": "object", "required": ["more"]},
        "steps": {"other": {"topic": "work"}},
    }
    assert (await house.ask("PUT", "/v1/workflows/list", newer)).json["version"] == 2
    refusals: list[tuple[dict[str, Any], int, str]] = [
        ({"only": "failed_items", "version": "newest"}, 422, "version"),
        ({"only": "failed_items", "input": given}, 422, "input"),
        ({"from_step": "last", "only": "failed_items"}, 422, "from_step"),
        ({"from_step": "last", "version": "newest"}, 422, "version"),
        ({"from_step": "last", "input": given}, 422, "input"),
        ({"only": "some"}, 422, "only"),
        ({"version": 2}, 422, "version"),
        ({"input": {}}, 422, "items"),
        ({"version": "newest"}, 422, "more"),
        ({"version": "newest", "dry_run": True}, 422, "more"),
        ({"other": 1}, 422, "other"),
    ]
    for asked, status, fault in refusals:
        refused = await house.ask("POST", path, asked)
        assert (refused.status, fault in refused.json["errors"][0]["path"]) == (status, True), asked
    plan = await house.ask(
        "POST", path, {"version": "newest", "input": {"more": 1}, "dry_run": True}
    )
    assert (plan.json["workflow_version"], plan.json["version"]) == (2, "newest")
    assert plan.json["steps"]["other"]["action"] == "runs_again"
    assert plan.json["workflow_source"] == "own"
    headers = [("idempotency-key", "again")]
    body = {"version": "newest", "input": {"more": 1}}
    first = await house.ask("POST", path, body, headers=headers)
    run = (await house.ask("GET", f"/v1/runs/{first.json['run_id']}")).json
    assert (run["workflow_version"], run["input"], run["rerun_of"]) == (2, {"more": 1}, run_id)
    repeat = await house.ask("POST", path, body, headers=headers)
    assert (repeat.json, repeat.headers["idempotency-replayed"]) == (first.json, "true")
    others: list[dict[str, Any]] = [{}, {"version": "newest"}, {"input": {"items": []}}]
    for other in others:
        mismatch = await house.ask("POST", path, other, headers=headers)
        assert (mismatch.status, mismatch.code) == (422, "idempotency_mismatch"), other
    same = await house.ask("POST", path, {"version": "same", "input": {"items": [1, 2]}})
    run = (await house.ask("GET", f"/v1/runs/{same.json['run_id']}")).json
    assert (run["workflow_version"], run["steps"]["each"]["items_total"]) == (1, 2)


async def test_a_single_job_is_done_again_with_another_input(house: House) -> None:
    job = (await house.ask("POST", "/v1/jobs", {"topic": "work", "input": 1})).json
    await finish(house, status="succeeded")
    path = f"/v1/runs/{job['run_id']}/rerun"
    assert (await house.ask("GET", f"/v1/runs/{job['run_id']}?wait=5")).json["finished_at"]
    again = await house.ask("POST", path, {"version": "newest", "input": {"n": 2}})
    assert again.status == 200
    assert (await house.lease())["input"] == {"n": 2}


@pytest.mark.parametrize("word", ["start", "rerun"])
async def test_the_same_key_gives_the_same_run_and_says_so(house: House, word: str) -> None:
    run_id = await house.start()
    await house.ask("POST", f"/v1/runs/{run_id}/cancel")
    path = START if word == "start" else f"/v1/runs/{run_id}/rerun"
    headers = [("Idempotency-Key", "k-1")]
    first = await house.ask("POST", path, {}, headers=headers)
    again = await house.ask("POST", path, {}, headers=headers)
    assert first.json["run_id"] == again.json["run_id"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    other = await house.ask("POST", START, {"input": {"x": 1}}, headers=headers)
    assert (other.status, other.code) == (422, "idempotency_mismatch")


async def test_an_input_that_the_workflow_does_not_take_is_422_with_places(house: House) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    workflow = {"steps": {"only": {"topic": "work"}}, "input_schema": schema}
    assert (await house.ask("PUT", "/v1/workflows/strict", workflow)).status == 200
    answer = await house.ask("POST", "/v1/workflows/strict/runs", {"input": {"n": "x"}})
    assert (answer.status, answer.code) == (422, "invalid_input")
    assert answer.json["errors"]


async def test_lists_and_timelines_have_pages_and_filters(house: House) -> None:
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": None})
    runs = [await house.start() for _ in range(3)]
    await house.ask("POST", f"/v1/runs/{runs[0]}/cancel")
    page = (await house.ask("GET", "/v1/runs?limit=2")).json
    rest = (await house.ask("GET", f"/v1/runs?limit=2&cursor={page['cursor']}")).json
    assert {row["run_id"] for row in page["runs"] + rest["runs"]} == set(runs)
    cancelled = (await house.ask("GET", "/v1/runs?status=cancelled")).json["runs"]
    assert [row["run_id"] for row in cancelled] == [runs[0]]
    assert (await house.ask("GET", "/v1/runs?workflow_id=other")).json["runs"] == []
    lines = (await house.ask("GET", f"/v1/runs/{runs[0]}/timeline?limit=1")).json
    assert [line["what"] for line in lines["entries"]] == ["run_started"]
    more = f"/v1/runs/{runs[0]}/timeline?cursor={lines['cursor']}"
    later = (await house.ask("GET", more)).json["entries"]
    assert later[-1]["what"] == "run_cancelled"
    assert later[-1]["actor"] == "anonymous"


async def test_a_run_whose_workflow_is_gone_is_shown_and_what_needs_it_is_unavailable(
    house: House,
) -> None:
    run_id = await house.start()

    async def gone(*_arguments: object, **_named: object) -> None:
        return None

    house.services.plans._by_version.clear()  # noqa: SLF001 - as if this replica had just started
    house.store.workflow = gone  # type: ignore[attr-defined]  # damage, which no verb can do
    run = await house.ask("GET", f"/v1/runs/{run_id}")
    assert (run.status, run.json["status"]) == (200, "running")
    answer = await house.ask("POST", f"/v1/runs/{run_id}/steps/only/approve")
    assert (answer.status, answer.code) == (503, "store_unavailable")


async def test_a_single_job_is_a_run_without_a_slot(house: House) -> None:
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": 0})
    headers = [("Idempotency-Key", "j-1")]
    sent = {"topic": "work", "input": [1, {"a": None}]}
    submitted = await house.ask("POST", "/v1/jobs", sent, headers=headers)
    again = await house.ask("POST", "/v1/jobs", sent, headers=headers)
    assert again.json["job_id"] == submitted.json["job_id"]
    assert again.headers["idempotency-replayed"] == "true"
    path = "/v1/jobs/" + submitted.json["job_id"]
    ready = (await house.ask("GET", path)).json
    assert (ready["status"], ready["run_status"], ready["topic"]) == ("ready", "running", "work")
    assert (ready["worker_id"], ready["lease_ends_in_ms"]) == (None, None)
    job = await finish(house, status="succeeded", output="done")
    assert job["input"] == [1, {"a": None}]
    assert job["job_id"] == submitted.json["job_id"]
    await house.ask("GET", f"/v1/runs/{submitted.json['run_id']}?wait=5")
    done = (await house.ask("GET", path)).json
    assert (done["status"], done["output"], done["error"]) == ("finished", "done", None)
    assert (done["worker_id"], done["lease_ends_in_ms"]) == ("worker-1", None)


async def test_a_job_of_a_for_each_shows_its_items_result(house: House) -> None:
    steps = {"each": {"topic": "work", "for_each": "${input.list}", "input": "${item}"}}
    await house.ask("PUT", "/v1/workflows/many", {"steps": steps})
    started = await house.ask("POST", "/v1/workflows/many/runs", {"input": {"list": [7, 8]}})
    job = await finish(house, status="succeeded", output="seven")
    assert (job["item"], job["input"]) == (0, 7)
    await finish(house, status="failed", error={"message": "m", "code": "bad", "retryable": False})
    run = (await house.ask("GET", f"/v1/runs/{started.json['run_id']}?wait=5")).json
    assert run["steps"]["each"]["items_total"] == 2
    first = (await house.ask("GET", "/v1/jobs/" + str(job["job_id"]).replace("[", "%5B"))).json
    assert (first["step_id"], first["output"]) == ("each", "seven")


@pytest.mark.parametrize(
    "output",
    [
        None,
        "text",
        [],
        [7],
        {},
        {"a": 1},
        {"a": [1, 2], "b": {"c": None}, "ü": "é"},
        [0] * 200_000,
        ["x" * 300_000, 1, {"a": 1}],
        {f"m{each}": [each] * 50_000 for each in range(9)},
    ],
    ids=lambda output: msgspec.json.encode(output)[:20].decode(),
)
async def test_a_run_encoded_in_slices_is_the_run(output: JsonValue) -> None:
    run = Run(
        id=RunId("r"),
        tenant=TenantId("t"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input={},
        created_at=Instant(1_700_000_000_000),
        output=output,
        steps={StepId(name): Step(output=output) for name in ("one", "two", "three")},
    )
    view = run_view(run, None)
    wide = {name: replace(step, items_total=2) for name, step in view.steps.items()}
    for each in (view, replace(view, steps=wide)):
        encoding = asyncio.create_task(encoded_run(each))
        await asyncio.sleep(0)
        is_large = len(msgspec.json.encode(output)) > 256 * 1024
        assert encoding.done() is not is_large, "a large one lets the event loop go"
        text = await encoding
        assert text == msgspec.json.encode(each)
        decoding = asyncio.create_task(decoded_run(text))
        await asyncio.sleep(0)
        assert decoding.done() is not is_large, "the same for the console, which decodes it"
        assert await decoding == msgspec.json.decode(text, type=RunView)


@pytest.mark.parametrize(
    "output",
    [{"each": ["y" * 250_000] * 14}, {"a": {"b": ["y" * 250_000] * 14}}, [["y" * 250_000] * 14]],
)
async def test_a_large_value_inside_of_others_is_encoded_in_pieces(output: JsonValue) -> None:
    run = Run(
        id=RunId("r"),
        tenant=TenantId("t"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input={},
        created_at=Instant(1_700_000_000_000),
        output=output,
    )
    view = run_view(run, None)
    encoding, turns = asyncio.create_task(encoded_run(view)), 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 6  # 3.5 MB, in pieces of up to 500 KB
    assert await encoding == msgspec.json.encode(view)


@pytest.mark.parametrize(
    ("output", "output_bytes", "template", "is_small"),
    [
        ("small", 7, None, True),
        ("large", 100_000, None, False),
        ("of an older version", 0, None, False),
        ("small", 7, "${steps.one.output}", False),
    ],
)
async def test_only_a_run_with_small_outputs_is_encoded_in_one_go(
    output: str, output_bytes: int, template: str | None, is_small: bool
) -> None:
    steps: dict[StepId, StepSpec] = {StepId("one"): JobSpec(topic=Topic("t"))}
    plan = link(Workflow(id=WorkflowId("w"), steps=steps, output=template or msgspec.UNSET), {})
    assert isinstance(plan, Plan)
    run = Run(
        id=RunId("r"),
        tenant=TenantId("t"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input={},
        created_at=Instant(1_700_000_000_000),
        output={"one": output},
        steps={StepId("one"): Step(output=output, output_bytes=output_bytes)},
    )
    assert has_small_outputs(run, plan) is is_small
    assert not has_small_outputs(run, None)
    view = run_view(run, plan)
    assert await encoded_run(view, is_small=True) == await encoded_run(view)


async def _items(house: House, path: str, query: str = "") -> tuple[list[Any], str | None]:
    answer = await house.ask("GET", f"{path}{query}")
    assert answer.status == 200, answer.json
    return answer.json["items"], answer.json["cursor"]


async def test_the_items_of_a_for_each_are_listed_page_by_page_and_by_status(house: House) -> None:
    steps = {
        "each": {
            "topic": "work",
            "for_each": "${input.list}",
            "input": "${item}",
            "parallel": 2,
            "on_item_failure": "continue",
        },
        "then": {"topic": "work", "needs": ["each"]},
    }
    await house.ask("PUT", "/v1/workflows/wide", {"steps": steps})
    started = await house.ask("POST", "/v1/workflows/wide/runs", {"input": {"list": [0, 1, 2, 3]}})
    run_id = started.json["run_id"]
    path = f"/v1/runs/{run_id}/steps/each/items"
    await finish(house, status="succeeded", output="zero")
    error = {"code": "odd", "message": "is odd"}
    await finish(house, status="failed", error=error)
    # Each result that was applied sends the next item out.
    assert [(await house.lease())["item"] for _ in range(2)] == [2, 3]
    rows, cursor = await _items(house, path)
    assert cursor is None
    assert [row["status"] for row in rows] == ["succeeded", "failed", "running", "running"]
    assert rows[0] == {
        "index": 0,
        "status": "succeeded",
        "attempt": 1,
        "output": "zero",
        "error": None,
        "job_id": f"{run_id}:each[0]@1",
    }
    assert rows[1]["error"]["message"] == "is odd"

    page, cursor = await _items(house, path, "?limit=3")
    assert [row["index"] for row in page] == [0, 1, 2]
    page, cursor = await _items(house, path, f"?limit=3&cursor={cursor}")
    assert ([row["index"] for row in page], cursor) == ([3], None)
    page, cursor = await _items(house, path, "?status=running&limit=1")
    assert [row["index"] for row in page] == [2]
    page, cursor = await _items(house, path, f"?status=running&limit=1&cursor={cursor}")
    assert ([row["index"] for row in page], cursor) == ([3], None)
    assert await _items(house, path, "?status=pending") == ([], None)

    assert await _items(house, f"/v1/runs/{run_id}/steps/then/items") == ([], None)
    for wrong in (f"/v1/runs/{run_id}/steps/none/items", "/v1/runs/none/steps/each/items"):
        assert (await house.ask("GET", wrong)).status == 404
    assert (await house.ask("GET", f"{path}?status=odd")).status == 422

    await house.ask("POST", f"/v1/runs/{run_id}/cancel", {})
    rows, _ = await _items(house, path, "?status=cancelled")
    assert [row["index"] for row in rows] == [2, 3]


async def test_why_has_every_member_and_is_for_whoever_may_read_runs(guarded_house: House) -> None:
    house = guarded_house
    runner, approver = [await house.make_key(role, "a") for role in ("runner", "approver")]
    run_id = await house.start(key=runner)
    for key in (approver, await house.make_key("operator", "a")):
        assert (await house.ask("GET", f"/v1/runs/{run_id}/why", key=key)).status == 200
    found = (await house.ask("GET", f"/v1/runs/{run_id}/why", key=runner)).json
    assert (found["run_id"], found["status"]) == (run_id, "running")
    assert found["as_of"].endswith("Z")
    (finding,) = found["findings"]
    assert finding.pop("since").endswith("Z")
    assert finding.pop("remedy")
    assert finding.pop("detail").startswith("the job of step 'only' waits for a worker")
    assert finding["blocked_by"].pop("seen_at").endswith("Z")
    assert finding == {
        "code": "job_ready",
        "step_id": "only",
        "until": None,
        "blocked_by": {
            "kind": "job",
            "id": f"{run_id}:only@1",
            "item": None,
            "topic": "work",
            "worker_id": None,
            "fence": None,
            "ahead": 0,
            "rule": None,
        },
    }
    job = await house.lease(key=await house.make_key("worker", "a"))
    house.locks.always(Fault.ERROR, "inspect", "ping")
    answer = await house.ask("GET", f"/v1/runs/{run_id}/why", key=runner)
    first, second = answer.json["findings"]
    assert (first["code"], second["code"]) == ("job_leased", "backend_unavailable")
    assert (first["blocked_by"]["worker_id"], first["blocked_by"]["fence"]) == (
        "worker-1",
        job["fence"],
    )
    house.store.away()
    answer = await house.ask("GET", f"/v1/runs/{run_id}/why", key=runner)
    assert (answer.status, answer.json["status"]) == (200, None)
    assert answer.json["findings"][0]["code"] == "backend_unavailable"
    house.store.back()
    house.locks.always(Fault.NONE, "inspect", "ping")


async def test_log_lines_of_a_request_carry_its_ids(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    await house.ask("PUT", "/v1/workflows/a", {"steps": {"s": {"topic": "t"}}}, tenant="acme")
    house.store.always(Fault.ERROR, "admit")
    answer = await house.ask("POST", "/v1/workflows/a/runs", {"input": {}}, tenant="acme")
    assert answer.status == 503
    [line] = [each for each in caplog.records if each.message == "admission_failed"]
    fields = line.__dict__["fields"]
    assert (fields["tenant"], fields["request_id"]) == ("acme", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("GET", "/v1/runs?limit=many", None, "query: limit: expected integer, got string"),
        ("GET", "/v1/runs?limit=0", None, "query: limit: expected an integer of at least 1"),
        ("GET", "/v1/runs?nothing=1", None, "query: nothing: not a query parameter"),
        (
            "PUT",
            "/v1/admin/tenants/acme",
            {"max_concurrent_runs": "two"},
            "max_concurrent_runs: expected integer or null, got string",
        ),
        (
            "PUT",
            "/v1/admin/limits/llm",
            {"topics": ["llm.*"], "rate_per_s": 0},
            "rate_per_s: expected a number of at least 0.000001",
        ),
        (
            "POST",
            "/v1/bulk",
            {"action": "cancel", "filter": {"label": "team:red"}},
            "filter.label: expected list, got string",
        ),
    ],
)
async def test_a_wrong_type_is_named_in_the_words_of_json(
    house: House, method: str, path: str, body: object, detail: str
) -> None:
    answer = await house.ask(method, path, body)
    assert (answer.status, answer.json["detail"]) == (422, detail)


async def test_every_kind_of_start_continues_the_trace_of_its_caller(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracing", telemetry.Tracing(provider, None))
    old = await house.start()
    await house.ask("POST", f"/v1/runs/{old}/cancel")
    await house.ask("PUT", "/v1/schedules/hourly", {"workflow_id": "one-step", "every_s": 3600})
    bodies = {
        "/v1/workflows/one-step/runs": {},
        "/v1/workflows/one-step/runs/batch": {"runs": [{"key": "a"}]},
        f"/v1/runs/{old}/rerun": {},
        "/v1/jobs": {"topic": "work"},
        "/v1/schedules/hourly/trigger": {},
    }
    for number, (path, body) in enumerate(bodies.items(), 1):
        trace = f"{number:032x}"
        headers = [("traceparent", f"00-{trace}-{1:016x}-01")]
        answer = await house.ask("POST", path, body, headers=headers)
        assert answer.status == 200, answer.body
        traces = {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()}
        assert trace in traces, path
