"""Load on real processes: that what is counted is what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import callers, loadgen
from bench.apart import percentile, thinned
from bench.callers import Errand, run_through
from bench.filling import Stock, fill
from bench.http import start_load
from bench.loadgen import Load, send
from bench.peers.running import Peer
from bench.serving import echoing, embedded, working
from bench.workflows import THREE_STEPS
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import SystemClock
from stanchion.core.model import TenantId, Topic
from stanchion.core.workflow import Workflow


@asynccontextmanager
async def answering(answers: Callable[[bytes], bytes | None]) -> AsyncIterator[str]:
    """A server of a few lines: its address. ``None`` hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                answer = answers(head)
                if answer is None:
                    return
                writer.write(answer)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield f"http://{host}:{port}/"


def http_answer(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def test_a_process_of_callers_sends_as_much_as_it_was_told() -> None:
    with echoing() as url:
        seen = send(start_load(url, seconds=20.0, requests_max=500))

    assert seen.requests == 500
    assert seen.statuses == {"200": 500}
    assert 0 < seen.percentile_ms(0.5) <= seen.percentile_ms(0.99)


async def test_a_refusal_is_counted_with_its_code() -> None:
    full = http_answer("429 Too Many Requests", '{"code":"max_concurrent_runs_reached"}')
    async with answering(lambda _: full) as url:
        seen = await loadgen.run(Load(url=url, connections=2, requests_max=6))

    assert seen.statuses == {"429 max_concurrent_runs_reached": 6}
    with pytest.raises(AssertionError):
        seen.only("200")


async def test_an_open_loop_sends_at_its_rate_whatever_comes_back() -> None:
    async with answering(lambda _: http_answer("200 OK")) as url:
        seen = await loadgen.run(Load(url=url, connections=1, seconds=0.2, rate_per_s=100.0))

    assert seen.requests == 20


async def test_a_caller_who_is_hung_up_on_counts_it_and_comes_again() -> None:
    answers = iter([None, None, http_answer("200 OK")])
    async with answering(lambda _: next(answers)) as url:
        seen = await loadgen.run(Load(url=url, connections=1, requests_max=3))

    assert seen.statuses == {"lost": 2, "200": 1}


async def test_tenants_take_turns() -> None:
    named: list[int] = []

    def note(head: bytes) -> bytes:
        named.append(int(head.partition(b"x-stanchion-tenant: tenant-")[2].split()[0]))
        return http_answer("200 OK")

    async with answering(note) as url:
        await loadgen.run(Load(url=url, connections=1, requests_max=4, tenants=3))

    assert named == [(named[0] + place) % 3 for place in range(4)]


async def test_a_run_that_fails_is_no_figure() -> None:
    def answer(head: bytes) -> bytes:
        if head.startswith(b"POST"):
            return http_answer("200 OK", '{"run_id":"r"}')
        return http_answer("200 OK", '{"status":"failed"}')

    async with answering(answer) as url:
        with pytest.raises(AssertionError):
            await callers.run(Errand(urls=(url.rstrip("/"),), at_once=1, runs_max=1))


def test_callers_wait_for_the_end_of_their_runs() -> None:
    with embedded() as site, working(site.url):
        site.prepare({"three-steps": THREE_STEPS})
        ran = run_through(Errand(urls=site.urls, at_once=4, seconds=20.0, runs_max=8))
        listed = site.call("GET", "/v1/runs?status=succeeded")["runs"]

    assert ran.runs == len(listed) == 8
    assert len(ran.latencies_ms) == 8


async def test_a_store_is_filled_with_what_was_ordered() -> None:
    store = MemoryStore(SystemClock(), 60_000)

    await fill(store, Stock(finished=9, tenants=3, active=4))

    tenants = [TenantId(f"tenant-{number}") for number in range(3)]
    listed = [row for tenant in tenants for row in (await store.list_runs(tenant)).items]
    assert sum(row.finished_at is not None for row in listed) == 9
    assert sum(row.finished_at is None for row in listed) == 4
    assert await store.ready_topics() == {Topic("work"): 4}
    stored = (await store.list_workflows(tenants[2])).items
    assert [isinstance(each.workflow, Workflow) for each in stored] == [True, True]


def test_a_peer_that_is_not_there_says_how_to_get_it() -> None:
    peer = Peer("somebody", (Path("/nonexistent/peer"),), lambda _: pytest.fail("it ran"))

    assert "python -m bench.peers install" in peer.missing


def test_of_many_latencies_some_stand_for_all() -> None:
    kept = thinned([float(number) for number in reversed(range(10_000))])

    assert len(kept) == 2_000
    assert kept == sorted(kept)
    assert percentile(kept, 0.5) == pytest.approx(5_000, abs=5)
    assert percentile(kept, 0.99) == pytest.approx(9_900, abs=5)
