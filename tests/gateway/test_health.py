"""Health, metrics, and what is shed so that the rest gets through."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from stanchion.adapters.system import ManualClock
from stanchion.gateway import GatewayOptions
from stanchion.gateway.problems import RequestRefused
from stanchion.gateway.state import ANSWERS_MAX, CACHED_MS, WAITING_MAX, MetricsPage
from stanchion.ports.errors import BackendFull
from stanchion.services.replicas import check_backends
from tests.gateway.asgi import ask, opened
from tests.gateway.house import ADMIN, House, opened_house
from tests.services.faulty_locks import Fault


async def test_livez_depends_on_nothing(house: House) -> None:
    house.store.away(Fault.HANG)
    house.app.drain()
    answer = await house.ask("GET", "/livez", headers=[("Host", "10.0.0.7:8420")])
    assert (answer.status, answer.json["status"]) == (200, "ok")


@pytest.mark.parametrize("query", ["x", "x=1", "x=1&x=2", "%ff", "&".join(["x"] * 60)])
async def test_a_probe_is_answered_whatever_its_query_says(house: House, query: str) -> None:
    for path in ("/livez", "/readyz"):
        assert (await house.ask("GET", f"{path}?{query}")).status == 200


async def test_readyz_names_its_checks(house: House) -> None:
    answer = await house.ask("GET", "/readyz")
    assert answer.status == 200
    assert answer.json == {"status": "ok", "checks": {"store": "ok", "locks": "ok", "bus": "ok"}}


@pytest.mark.parametrize(
    ("fault", "word"), [(Fault.ERROR, "unavailable"), (Fault.HANG, "no answer")]
)
async def test_readyz_says_what_is_missing_and_does_not_wait_for_it(
    house: House, fault: Fault, word: str
) -> None:
    house.store.away(fault)
    async with asyncio.timeout(1.8):
        answer = await house.ask("GET", "/readyz")
    assert (answer.status, answer.json["status"]) == (503, "unavailable")
    assert word in answer.json["checks"]["store"]
    assert answer.json["checks"]["bus"] == "ok"


async def test_a_check_says_that_the_disk_is_full() -> None:
    async def ping() -> None:
        raise BackendFull("data/stanchion.db: the disk is full; free some space")

    assert await check_backends({"store": ping}) == {"store": "no room left: the disk is full"}


async def test_without_locks_it_is_ready_all_the_same_and_says_so(house: House) -> None:
    house.locks.always(Fault.ERROR, "ping")
    answer = await house.ask("GET", "/readyz")
    assert (answer.status, answer.json["status"]) == (200, "degraded")
    assert answer.json["checks"] == {"store": "ok", "locks": "unavailable", "bus": "ok"}


async def test_many_probes_ask_the_store_once(house: House) -> None:
    await asyncio.gather(*(house.ask("GET", "/readyz") for _ in range(50)))
    assert house.store.calls["ping"] == 1


async def test_readyz_is_off_while_draining(house: House) -> None:
    house.app.drain()
    answer = await house.ask("GET", "/readyz")
    assert (answer.status, answer.json["status"]) == (503, "draining")


async def test_metrics_count_requests_by_route_and_kind_of_answer(house: House) -> None:
    await house.ask("GET", "/v1/runs/zz")
    await house.ask("GET", "/v1/runs/yy")
    await house.ask("GET", "/nowhere/at/all")
    answer = await house.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    labels = 'method="GET",route="/v1/runs/{run_id}",status="4xx"'
    assert f"stanchion_http_request_seconds_count{{{labels}}} 2.0" in answer.body.decode()
    assert 'route="none",status="4xx"} 1.0' in answer.body.decode()
    assert "/nowhere" not in answer.body.decode()


async def test_scrapes_at_once_are_answered_with_one_text_and_few_at_a_time() -> None:
    registry, clock = CollectorRegistry(), ManualClock()
    threads: list[int] = []

    def look() -> float:
        threads.append(threading.get_ident())
        return len(threads)

    Gauge("looks", "Rises with each rendering.", registry=registry).set_function(look)
    page = MetricsPage(registry, clock)
    try:
        first = [asyncio.create_task(page.text()) for _ in range(ANSWERS_MAX)]
        texts = await asyncio.gather(*first)
        assert set(texts) == {texts[0]}
        waiting = [asyncio.create_task(page.text()) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="too many scrapes"):
            await page.text()
        assert not any(each.done() for each in waiting)
        answered = 0
        while answered < WAITING_MAX:
            clock.advance(CACHED_MS)
            async with asyncio.timeout(5):
                while sum(each.done() for each in waiting) < answered + ANSWERS_MAX:  # noqa: ASYNC110 - a thread works
                    await asyncio.sleep(0.002)
            answered += ANSWERS_MAX
            assert sum(each.done() for each in waiting) == answered
        assert {each.result() for each in waiting}.isdisjoint(texts)
        assert len(threads) == 1 + WAITING_MAX / ANSWERS_MAX
        assert threading.get_ident() not in threads
    finally:
        page.close()
    with pytest.raises(RequestRefused, match="shutting down"):
        await page.text()


async def test_a_rendering_that_takes_more_than_a_second_is_an_answer_too() -> None:
    clock, rendered = ManualClock(), 0

    def render(_: Collector) -> bytes:
        nonlocal rendered
        rendered += 1
        clock.advance(2 * CACHED_MS)
        return b"text %d" % rendered

    page = MetricsPage(CollectorRegistry(), clock, render=render)
    async with asyncio.timeout(10):
        assert await page.text() == b"text 1"
        assert set(await asyncio.gather(*(page.text() for _ in range(WAITING_MAX)))) == {
            b"text %d" % number for number in range(2, 2 + WAITING_MAX // ANSWERS_MAX)
        }
    page.close()


async def test_metrics_need_an_operators_key_once_there_are_keys() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        assert (await house.ask("GET", "/metrics")).code == "unauthenticated"
        for role, tenant, status in (
            ("operator", "*", 200),
            ("admin", "*", 200),
            ("operator", "acme", 403),
            ("runner", "acme", 403),
            ("worker", "*", 403),
        ):
            key = await house.make_key(role, tenant)
            assert (await house.ask("GET", "/metrics", key=key)).status == status, (role, tenant)


async def test_metrics_can_be_left_open() -> None:
    options = GatewayOptions(admin_key=ADMIN, metrics_open=True)
    async with opened_house(options) as house:
        assert (await house.ask("GET", "/metrics")).status == 200
        assert (await house.ask("GET", "/v1/runs")).status == 401


@pytest.mark.parametrize(
    ("is_private", "path", "host", "status"),
    [
        (True, "/metrics", "127.0.0.1:9464", 200),
        (True, "/livez", "localhost", 200),
        (True, "/metrics", "attacker.example", 403),
        (True, "/v1/runs", "localhost", 404),
        (True, "/readyz", "localhost", 404),
        (False, "/metrics", "stanchion.internal:9464", 401),
        (False, "/livez", "stanchion.internal:9464", 200),
    ],
)
async def test_a_listener_for_metrics_serves_nothing_else(
    is_private: bool, path: str, host: str, status: int
) -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        app = house.app.scraping(is_private=is_private)
        assert (await ask(app, "GET", path, b"", [("Host", host)])).status == status


async def test_one_tenants_burst_does_not_keep_another_out() -> None:
    options = GatewayOptions(requests_at_once_per_tenant_max=1)
    async with opened_house(options) as house:
        await house.ask("PUT", "/v1/workflows/a", {"steps": {"s": {"topic": "t"}}}, tenant="first")
        house.store.always(Fault.SLOW, "list_runs")
        slow = [("X-Stanchion-Tenant", "first")]
        async with opened(house.app, "GET", "/v1/runs", headers=slow) as feed:
            await house.has_under_way("requests")
            same = await house.ask("GET", "/v1/workflows", tenant="first")
            assert (same.status, same.code) == (429, "tenant_overloaded")
            assert 1 <= int(same.headers["retry-after"]) <= 30
            assert (await house.ask("GET", "/v1/workflows", tenant="second")).status == 200
            assert (await feed.answer()).status == 200
        assert (await house.ask("GET", "/v1/workflows", tenant="first")).status == 200
        assert house.metric("stanchion_http_shed_total", reason="tenant_requests") == 1


async def test_one_tenants_waits_do_not_keep_another_from_waiting() -> None:
    async with opened_house(GatewayOptions(waits_per_tenant_max=1)) as house:
        first, second = await house.start(tenant="first"), await house.start(tenant="second")
        waiting = [("X-Stanchion-Tenant", "first")]
        async with opened(house.app, "GET", f"/v1/runs/{first}?wait=5", headers=waiting) as feed:
            await house.has_under_way("waits")
            same = await house.ask("GET", f"/v1/runs/{first}?wait=5", tenant="first")
            assert (same.status, same.code) == (429, "tenant_overloaded")
            poll = {"worker_id": "w", "topics": ["none"], "wait_s": 5}
            worker = await house.ask("POST", "/v1/worker/lease", poll, tenant="first")
            assert (worker.status, worker.code) == (429, "tenant_overloaded")
            other = await house.ask("GET", f"/v1/runs/{second}?wait=0.01", tenant="second")
            assert other.status == 200
            # Who does not wait is not counted among the waits.
            assert (await house.ask("GET", f"/v1/runs/{first}", tenant="first")).status == 200
            house.app.drain()
            assert (await feed.answer()).status == 200
        assert house.metric("stanchion_http_under_way", kind="waits") == 0
        assert house.metric("stanchion_http_under_way", kind="requests") == 0


async def test_a_request_that_takes_too_long_is_given_up() -> None:
    async with opened_house(GatewayOptions(request_deadline_s=0.1)) as house:
        assert (await house.ask("GET", "/v1/runs")).status == 200
        house.store.always(Fault.HANG, "list_runs")
        answer = await house.ask("GET", "/v1/runs")
        assert (answer.status, answer.code) == (503, "overloaded")
        assert house.metric("stanchion_http_under_way", kind="requests") == 0


async def test_metrics_are_in_openmetrics_for_a_scraper_that_accepts_it(house: House) -> None:
    accepts = [("Accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")]
    answer = await house.ask("GET", "/metrics", headers=accepts)
    text = answer.body.decode()
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    parsed = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # not typed
    families = {family.name for family in parsed}
    assert {"stanchion_build_info", "stanchion_http_request_seconds"} <= families
    assert {"process_cpu_seconds", "process_resident_memory_bytes"} <= families
