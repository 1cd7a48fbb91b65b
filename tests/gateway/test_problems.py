"""Problem documents: codes, texts, retry classes, and the ceiling of seconds."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stanchion.core.model import TenantId
from stanchion.gateway import GatewayOptions
from stanchion.gateway.problems import (
    STATUS,
    Refusal,
    answer_parts,
    retry_after_s,
    unavailable_after_ms,
)
from stanchion.services.keys import BELIEVED_MS
from stanchion.wire.problems import Code, Problem
from tests.gateway.house import ONE_STEP, House, opened_house
from tests.services.faulty_locks import Fault

START = "/v1/workflows/one-step/runs"


@pytest.mark.parametrize(
    ("milliseconds", "seconds"),
    [(1, 1), (999, 1), (1000, 1), (1001, 2), (29_999, 30), (30_000, 30)],
)
def test_retry_after_is_the_ceiling_of_the_milliseconds(milliseconds: int, seconds: int) -> None:
    assert retry_after_s(milliseconds) == seconds
    refusal = Refusal(code=Code.OVERLOADED, detail="", retry_after_ms=milliseconds)
    _, _, headers = answer_parts(refusal, "")
    assert dict(headers)[b"retry-after"] == str(seconds).encode()


@pytest.mark.parametrize("sample", [0.0, 0.5, 0.999_999])
def test_a_503_that_nobody_measured_stays_within_its_bounds(sample: float) -> None:
    assert 1_000 <= unavailable_after_ms(sample) <= 10_000


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_status_and_429_and_503_have_their_retry_class(code: Code) -> None:
    status, body, headers = answer_parts(Refusal(code=code, detail="why"), "id-1")
    problem = msgspec.json.decode(body, type=Problem)
    assert (problem.status, problem.code, problem.request_id) == (status, code, "id-1")
    assert problem.retry_class == {429: "quota", 503: "unavailable"}.get(status)
    assert dict(headers)[b"content-type"] == b"application/problem+json"
    assert STATUS[code] == status


async def test_a_full_tenant_is_told_so_in_the_words_of_the_contract(house: House) -> None:
    await house.ask("PUT", "/v1/admin/tenants/default", {"max_concurrent_runs": 1})
    await house.start()
    answer = await house.ask("POST", START, {})
    assert answer.status == 429
    problem = answer.json
    assert problem["code"] == "max_concurrent_runs_reached"
    assert problem["detail"] == "max concurrent runs reached"
    assert (problem["limit"], problem["active"]) == (1, 1)
    assert problem["retry_class"] == "quota"
    assert 1_000 <= problem["retry_after_ms"] <= 30_000
    assert int(answer.headers["retry-after"]) == retry_after_s(problem["retry_after_ms"])
    assert problem["request_id"] == answer.headers["x-request-id"]


async def test_a_silent_store_is_a_gate_that_is_unavailable(house: House) -> None:
    await house.start()
    house.store.away(Fault.ERROR)
    answer = await house.ask("POST", START, {})
    assert (answer.status, answer.code) == (503, "gate_unavailable")
    assert answer.json["detail"] == "workflow concurrency gate unavailable"
    assert answer.json["retry_class"] == "unavailable"
    assert 1 <= int(answer.headers["retry-after"]) <= 10
    house.store.back()
    assert (await house.ask("POST", START, {})).status == 200


async def test_a_store_that_says_nothing_is_answered_within_the_budget_and_half_a_second(
    house: House,
) -> None:
    await house.start()
    budget = {"admission": {"lock_wait_s": 0.5}}
    assert (await house.ask("PATCH", "/v1/admin/settings", budget)).status == 200
    house.store.away(Fault.HANG)
    # Past the time for which this replica believes that there are no keys.
    await asyncio.sleep(BELIEVED_MS / 1000)
    # Half a second more than promised: a busy machine stands still. The store answers after 2 s.
    async with asyncio.timeout(0.5 + 0.5 + 0.5):
        answer = await house.ask("POST", START, {})
    assert (answer.status, answer.code) == (503, "gate_unavailable")
    batch = await house.ask("POST", f"{START}/batch", {"runs": [{"key": "k"}]})
    assert (batch.status, batch.code) == (503, "gate_unavailable")


async def test_a_store_that_fails_behind_the_lock_is_a_check_that_failed(house: House) -> None:
    await house.start()
    await house.ask("PATCH", "/v1/admin/settings", {"admission": {"strategy": "lock"}})
    house.store.always(Fault.ERROR, "admit")
    answer = await house.ask("POST", START, {})
    assert (answer.status, answer.code) == (503, "limit_check_failed")
    assert answer.json["detail"] == "failed to enforce max concurrent runs"


async def test_a_lock_that_an_operator_holds_is_busy_under_lock_and_nothing_under_atomic(
    house: House,
) -> None:
    await house.start()
    held = await house.ask("POST", "/v1/admin/leases", {"name": "admission/default", "ttl_s": 60})
    assert held.status == 200
    assert (await house.ask("POST", START, {})).status == 200
    lock = {"admission": {"strategy": "lock", "lock_wait_s": 0.1}}
    assert (await house.ask("PATCH", "/v1/admin/settings", lock)).status == 200
    answer = await house.ask("POST", START, {})
    assert (answer.status, answer.code) == (503, "gate_busy")
    assert answer.json["detail"] == "workflow concurrency gate unavailable"


async def test_a_job_over_the_rate_is_told_to_come_back_in_30_s(house: House) -> None:
    await house.ask("PUT", "/v1/admin/tenants/default", {"job_rate_per_s": 0.01})
    assert (await house.ask("POST", "/v1/jobs", {"topic": "work"})).status == 200
    answer = await house.ask("POST", "/v1/jobs", {"topic": "work"})
    assert (answer.status, answer.code) == (429, "job_throttled")
    assert answer.headers["retry-after"] == "30"
    assert answer.json["retry_after_ms"] == 30_000


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/v1/runs", b""),
        ("GET", "/v1/runs/zz", b""),
        ("GET", "/v1/workflows", b""),
        ("GET", "/v1/jobs/zz", b""),
        ("PUT", "/v1/workflows/one-step", ONE_STEP),
        ("PUT", "/v1/admin/tenants/acme", {}),
        ("GET", "/v1/admin/tenants", b""),
        ("GET", "/v1/admin/dead-letters", b""),
        ("GET", "/v1/admin/keys", b""),
        ("POST", "/v1/worker/lease", {"worker_id": "w", "topics": ["work"]}),
        ("POST", "/v1/worker/renew", {"worker_id": "w", "leases": [{"job_id": "j", "fence": 1}]}),
        (
            "POST",
            "/v1/worker/results",
            {
                "worker_id": "w",
                "results": [{"job_id": "j", "fence": 1, "status": "succeeded"}],
            },
        ),
        ("GET", "/v1/events", b""),
        ("POST", "/v1/admin/escalation", {"order": "clear"}),
    ],
)
async def test_without_the_store_everything_else_is_503_and_never_a_wrong_answer(
    house: House, method: str, target: str, body: object
) -> None:
    assert (await house.ask("GET", "/v1/runs")).status == 200
    house.store.away(Fault.ERROR)
    answer = await house.ask(method, target, body)
    assert (answer.status, answer.code) == (503, "store_unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 10


async def test_without_the_locks_an_operator_is_told_which_part_is_missing(house: House) -> None:
    house.locks.always(Fault.ERROR, "acquire", "list", "inspect")
    for method, target, body in [
        ("GET", "/v1/admin/leases", b""),
        ("POST", "/v1/admin/leases", {"name": "run/x", "ttl_s": 1}),
        ("DELETE", "/v1/admin/leases/run/x", b""),
    ]:
        answer = await house.ask(method, target, body)
        assert (answer.status, answer.code) == (503, "locks_unavailable")


async def test_a_405_says_what_is_allowed(house: House) -> None:
    answer = await house.ask("DELETE", "/v1/admin/settings")
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD, PATCH"


async def test_a_sane_request_id_is_kept_and_another_replaced(house: House) -> None:
    kept = await house.ask("GET", "/nowhere", headers=[("X-Request-Id", "caller-7")])
    assert kept.headers["x-request-id"] == kept.json["request_id"] == "caller-7"
    made = await house.ask("GET", "/nowhere", headers=[("X-Request-Id", "a\tb")])
    assert made.headers["x-request-id"] == made.json["request_id"] != "a\tb"


async def test_a_head_is_a_get_without_its_body(house: House) -> None:
    whole = await house.ask("GET", "/v1/runs")
    head = await house.ask("HEAD", "/v1/runs")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


async def test_too_many_requests_at_once_are_shed_and_health_goes_on() -> None:
    options = GatewayOptions(requests_at_once_max=0)
    async with opened_house(options) as house:
        answer = await house.ask("GET", "/v1/runs")
        assert (answer.status, answer.code) == (503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        assert house.metric("stanchion_http_shed_total", reason="requests") == 1
        for vital in ("/livez", "/readyz", "/metrics", "/openapi.json"):
            assert (await house.ask("GET", vital)).status == 200


async def test_a_tenant_over_its_share_of_the_processor_is_told_when_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened_house() as house:

        async def overdrawn(*_: object, **__: object) -> None:
            house.services.work.charge(TenantId("acme"), 4)
            house.services.work.check(TenantId("acme"))

        monkeypatch.setattr(house.services.gate, "start", overdrawn)
        answer = await house.ask("POST", "/v1/workflows/any/runs", {}, tenant="acme")
        assert (answer.status, answer.code) == (429, "tenant_overloaded")
        assert 12_000 <= answer.json["retry_after_ms"] <= 15_000
        assert answer.json["retry_class"] == "quota"
        assert 12 <= int(answer.headers["retry-after"]) <= 15
