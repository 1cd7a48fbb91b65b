"""Hostile requests: each with the answer it gets. None of them is a 500, none is let through."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec
import pytest

from stanchion.core.limits import INPUT_BYTES_MAX
from stanchion.core.model import TenantId
from stanchion.gateway import GatewayOptions
from stanchion.gateway.body import decoded, fault_in, is_suspect, refuse_costly
from stanchion.gateway.load import (
    TURN_BYTES,
    WAIT_S_MAX,
    HeavyRequests,
    LargeAnswers,
    Load,
    LoadKind,
)
from stanchion.gateway.problems import RequestRefused
from stanchion.ports.records import Result
from stanchion.services.keys import Keys
from stanchion.wire.admin import Role
from stanchion.wire.runs import StartRun
from tests.gateway.asgi import Stuck
from tests.gateway.house import ADMIN, ONE_STEP, House, opened_house
from tests.services.faulty_locks import Fault

MIB = 1024 * 1024
START = "/v1/workflows/one-step/runs"
LEASE = "/v1/worker/lease"
RESULTS = "/v1/worker/results"


class Hostile(NamedTuple):
    """A request that means no good, and what it is told."""

    name: str
    method: str
    target: str
    status: int
    code: str | None
    body: object = b""
    headers: tuple[tuple[str, str | bytes], ...] = ()


def deep(levels: int) -> bytes:
    return b'{"input": {"x": ' + b"[" * levels + b"]" * levels + b"}}"


def lease(**members: object) -> dict[str, object]:
    return {"worker_id": "w", "topics": ["work"], **members}


def results(**members: object) -> dict[str, object]:
    result = {"job_id": "r:s@1", "fence": 1, "status": "succeeded", **members}
    return {"worker_id": "w", "results": [result]}


BAD_JSON = "malformed_json"
INVALID = "invalid_request"

BODIES = [
    Hostile("nothing where JSON must be", "POST", LEASE, 400, BAD_JSON),
    Hostile("half an object", "POST", START, 400, BAD_JSON, b'{"input": {'),
    Hostile("a member twice", "POST", START, 422, INVALID, b'{"input": {}, "input": {}}'),
    Hostile("a member twice inside", "POST", START, 422, INVALID, b'{"input": {"a": 1, "a": 1}}'),
    Hostile("a name escaped", "POST", START, 422, INVALID, b'{"input": {"a": 1, "\\u0061": 1}}'),
    Hostile("two documents", "POST", START, 400, BAD_JSON, b"{}{}"),
    Hostile("single quotes", "POST", START, 400, BAD_JSON, b"{'input': {}}"),
    Hostile("a trailing comma", "POST", START, 400, BAD_JSON, b'{"input": {},}'),
    Hostile("a leading zero", "POST", START, 400, BAD_JSON, b'{"input": {"n": 01}}'),
    Hostile("a byte order mark", "POST", START, 400, BAD_JSON, b"\xef\xbb\xbf{}"),
    Hostile("bytes that are not UTF-8", "POST", START, 400, BAD_JSON, b'{"input": {"x": "\xff"}}'),
    Hostile("UTF-16", "POST", START, 400, BAD_JSON, '{"input": {}}'.encode("utf-16")),
    Hostile(
        "half a surrogate pair", "POST", START, 400, BAD_JSON, b'{"input": {"x": "\\ud800"}}'
    ),
    Hostile("half a pair as a name", "POST", START, 400, BAD_JSON, b'{"input": {"\\udfff": 1}}'),
    Hostile("a raw control character", "POST", START, 400, BAD_JSON, b'{"input": {"x": "\x01"}}'),
    Hostile("a form", "POST", START, 400, BAD_JSON, b"input=1"),
    Hostile("NaN", "POST", START, 422, INVALID, b'{"input": {"x": NaN}}'),
    Hostile("Infinity", "POST", START, 422, INVALID, b'{"input": {"x": Infinity}}'),
    Hostile("-Infinity", "POST", START, 422, INVALID, b'{"input": {"x": [-Infinity]}}'),
    Hostile("a number beyond floats", "POST", START, 422, INVALID, b'{"input": {"x": 1e999}}'),
    Hostile("2 to the 63", "POST", START, 422, INVALID, b'{"input": {"x": 9223372036854775808}}'),
    Hostile("-2 to the 63, less one", "POST", START, 422, INVALID,
            b'{"input": {"x": -9223372036854775809}}'),
    Hostile("five thousand digits", "POST", START, 422, INVALID,
            b'{"input": {"x": ' + b"1" * 5000 + b"}}"),
    Hostile("65 levels deep", "POST", START, 422, INVALID, deep(64)),
    Hostile("100,000 levels deep", "POST", START, 422, INVALID, deep(100_000)),
    Hostile("deep and cut off", "POST", START, 422, INVALID, b'{"input": ' + b"[" * 200_000),
    Hostile("a list instead of an object", "POST", START, 422, INVALID, b"[]"),
    Hostile("null instead of an object", "POST", START, 422, INVALID, b"null"),
    Hostile("an unknown member", "POST", START, 422, INVALID, {"input": {}, "inptu": 1}),
    Hostile("an input that is a list", "POST", START, 422, INVALID, {"input": []}),
    Hostile("an input that is null", "POST", START, 422, INVALID, {"input": None}),
    Hostile("an input of 257 KiB", "POST", START, 422, INVALID, {"input": {"x": "y" * 257 * 1024}}),
    Hostile("one byte over 1 MiB", "POST", START, 413, "body_too_large",
            b'{"input": {"x": "' + b"y" * (MIB - 19) + b'"}}'),
    Hostile("a length that is a lie", "POST", START, 413, "body_too_large", b"{}",
            (("Content-Length", "99999999999999999999999"),)),
    Hostile("a length that is no number", "POST", START, 400, "malformed_request", b"{}",
            (("Content-Length", "2x"),)),
    Hostile("a negative length", "POST", START, 400, "malformed_request", b"{}",
            (("Content-Length", "-2"),)),
    Hostile("a compressed body", "POST", START, 415, "unsupported_media_type", b"\x1f\x8b",
            (("Content-Encoding", "gzip"),)),
]  # fmt: skip

MEMBERS = [
    Hostile("no jobs wanted", "POST", LEASE, 422, INVALID, lease(max_jobs=0)),
    Hostile("too many jobs wanted", "POST", LEASE, 422, INVALID, lease(max_jobs=1001)),
    Hostile("a parameter of the metrics", "GET", "/metrics?name=x", 422, INVALID),
    Hostile("an outcome", "GET", "/v1/admin/decisions?outcome=bogus", 422, INVALID),
    Hostile("half a job wanted", "POST", LEASE, 422, INVALID, lease(max_jobs=1.5)),
    Hostile("a number as text", "POST", LEASE, 422, INVALID, lease(max_jobs="1")),
    Hostile("true as a number", "POST", LEASE, 422, INVALID, lease(max_jobs=True)),
    Hostile("a wait below zero", "POST", LEASE, 422, INVALID, lease(wait_s=-0.1)),
    Hostile("a wait over a minute", "POST", LEASE, 422, INVALID, lease(wait_s=60.1)),
    Hostile("no topics", "POST", LEASE, 422, INVALID, lease(topics=[])),
    Hostile("a topic with a star", "POST", LEASE, 422, INVALID, lease(topics=["agent.*"])),
    Hostile("a topic with a line break", "POST", LEASE, 422, INVALID, lease(topics=["work\n"])),
    Hostile("a topic of 129 characters", "POST", LEASE, 422, INVALID, lease(topics=["t" * 129])),
    Hostile("a worker without a name", "POST", LEASE, 422, INVALID, lease(worker_id="")),
    Hostile("a worker named NUL", "POST", LEASE, 422, INVALID, lease(worker_id="\0")),
    Hostile("a worker with an escape", "POST", LEASE, 422, INVALID, lease(worker_id="a\x1b[31m")),
    Hostile("a fence below zero", "POST", RESULTS, 422, INVALID, results(fence=-1)),
    Hostile("a fence beyond 64 bits", "POST", RESULTS, 422, INVALID, results(fence=2**63)),
    Hostile("a status of its own", "POST", RESULTS, 422, INVALID, results(status="done")),
    Hostile("a success with an error", "POST", RESULTS, 422, INVALID, results(error="no")),
    Hostile("a job id with a break", "POST", RESULTS, 422, INVALID, results(job_id="r:s@1\n")),
    Hostile("an output of 257 KiB", "POST", RESULTS, 422, INVALID,
            results(output="y" * 257 * 1024)),
    Hostile("a thousand and one results", "POST", RESULTS, 422, INVALID,
            {"worker_id": "w", "results": results()["results"] * 1001}),  # type: ignore[operator] # a list
    Hostile("a tenant with a slash", "PUT", "/v1/admin/tenants/a%2Fb", 404, "not_found", {}),
    Hostile("a cap below zero", "PUT", "/v1/admin/tenants/acme", 422, INVALID,
            {"max_concurrent_runs": -1}),
    Hostile("a rate of nothing", "PUT", "/v1/admin/tenants/acme", 422, INVALID,
            {"job_rate_per_s": 0}),
    Hostile("a strategy nobody knows", "PUT", "/v1/admin/tenants/acme", 422, INVALID,
            {"admission": {"strategy": "hope"}}),
    Hostile("settings that are a list", "PATCH", "/v1/admin/settings", 422, INVALID, []),
    Hostile("a setting nobody knows", "PATCH", "/v1/admin/settings", 422, INVALID,
            {"admision": {}}),
    Hostile("jitter above the delay", "PATCH", "/v1/admin/settings", 422, INVALID,
            {"lock_busy": {"jitter_ms": 10_000}}),
    Hostile("a lock of another kind", "POST", "/v1/admin/leases", 422, INVALID,
            {"name": "settings/all", "ttl_s": 1}),
    Hostile("a lock held for ever", "POST", "/v1/admin/leases", 422, INVALID,
            {"name": "run/x", "ttl_s": 1e9}),
    Hostile("a role nobody has", "POST", "/v1/admin/keys", 422, INVALID,
            {"role": "root", "tenant": "acme"}),
    Hostile("a runner for all tenants", "POST", "/v1/admin/keys", 422, INVALID,
            {"role": "runner", "tenant": "*"}),
    Hostile("an order nobody gives", "POST", "/v1/admin/escalation", 422, INVALID,
            {"order": "latch"}),
    Hostile("a topic for a job that is none", "POST", "/v1/jobs", 422, INVALID, {"topic": ".."}),
]  # fmt: skip

PLACES = [
    Hostile("a path that is not there", "GET", "/v1/nothing", 404, "not_found"),
    Hostile("no path", "GET", "", 404, "not_found"),
    Hostile("a slash too many", "GET", "/v1/runs/", 404, "not_found"),
    Hostile("a doubled slash", "GET", "//v1/runs", 404, "not_found"),
    Hostile("a climb", "GET", "/v1/../livez", 404, "not_found"),
    Hostile("a hidden climb", "GET", "/v1/%2e%2e/livez", 404, "not_found"),
    Hostile("another case", "GET", "/V1/RUNS", 404, "not_found"),
    Hostile("a run with NUL in it", "GET", "/v1/runs/a%00b", 422, INVALID),
    Hostile("a run with a break in it", "GET", "/v1/runs/a%0d%0ab", 422, INVALID),
    Hostile("a lock with a break in it", "GET", "/v1/admin/leases/run/a%0ab", 422, INVALID),
    Hostile("a lock with a break behind it", "DELETE", "/v1/admin/leases/run/a%0a", 422, INVALID),
    Hostile("a letter with a break in it", "POST", "/v1/admin/dead-letters/a%0ab/replay", 422,
            INVALID),
    Hostile("a run that is not UTF-8", "GET", "/v1/runs/%ff", 422, INVALID),
    Hostile("a run named by a quote", "GET", "/v1/runs/'%20or%201=1", 422, INVALID),
    Hostile("a run that is not there", "GET", "/v1/runs/zz", 404, "not_found"),
    Hostile("a very long run", "GET", f"/v1/runs/{'a' * 129}", 422, INVALID),
    Hostile("a workflow that begins wrong", "PUT", "/v1/workflows/1st", 422, INVALID, {}),
    Hostile("a workflow of 65 letters", "PUT", f"/v1/workflows/{'a' * 65}", 422, INVALID, {}),
    Hostile("a path of 5 KiB", "GET", f"/v1/{'a' * 5000}", 414, "uri_too_long"),
    Hostile("a query of 9 KiB", "GET", f"/v1/runs?cursor={'a' * 9000}", 414, "uri_too_long"),
    Hostile("a method that is not there", "DELETE", "/v1/runs", 405, "method_not_allowed"),
    Hostile("TRACE", "TRACE", "/v1/runs", 405, "method_not_allowed"),
    Hostile("a method of its own", "PURGE", "/livez", 405, "method_not_allowed"),
    Hostile("an unknown parameter", "GET", "/v1/runs?limt=1", 422, INVALID),
    Hostile("a repeated parameter", "GET", "/v1/runs?limit=1&limit=2", 422, INVALID),
    Hostile("a limit of none", "GET", "/v1/runs?limit=0", 422, INVALID),
    Hostile("a limit of 1001", "GET", "/v1/runs?limit=1001", 422, INVALID),
    Hostile("a limit with an exponent", "GET", "/v1/runs?limit=1e2", 422, INVALID),
    Hostile("a limit with a fraction", "GET", "/v1/runs?limit=1.0", 422, INVALID),
    Hostile("a limit in words", "GET", "/v1/runs?limit=ten", 422, INVALID),
    Hostile("a limit without a number", "GET", "/v1/runs?limit=", 422, INVALID),
    Hostile("a status nobody has", "GET", "/v1/runs?status=sleeping", 422, INVALID),
    Hostile("a cursor from nowhere", "GET", "/v1/runs?cursor=abc", 422, INVALID),
    Hostile("a parameter that is not UTF-8", "GET", "/v1/runs?cursor=%ff", 422, INVALID),
    Hostile("a wait of NaN", "GET", "/v1/runs/zz?wait=nan", 422, INVALID),
    Hostile("a wait without end", "GET", "/v1/runs/zz?wait=inf", 422, INVALID),
    Hostile("a wait of 61", "GET", "/v1/runs/zz?wait=61", 422, INVALID),
    Hostile("a parameter where none is", "GET", "/v1/admin/settings?x=1", 422, INVALID),
    Hostile("a version of null", "GET", "/v1/workflows/one-step?version=null", 422, INVALID),
    Hostile("a status of null", "GET", "/v1/runs?status=Null", 422, INVALID),
    Hostile("version nought", "GET", "/v1/workflows/one-step?version=0", 422, INVALID),
    Hostile("events of nobody's run", "GET", "/v1/events?run_id=zz", 404, "not_found"),
    Hostile("events after a dream", "GET", "/v1/events", 422, INVALID,
            headers=(("Last-Event-ID", "dream"),)),
]  # fmt: skip

HEADERS = [
    Hostile("an empty key", "POST", START, 422, INVALID, {}, (("Idempotency-Key", ""),)),
    Hostile("a key with a space", "POST", START, 422, INVALID, {}, (("Idempotency-Key", "a b"),)),
    Hostile("a key beyond ASCII", "POST", START, 422, INVALID, {},
            (("Idempotency-Key", b"\xc3\xa9"),)),
    Hostile("a key of 256", "POST", START, 422, INVALID, {}, (("Idempotency-Key", "k" * 256),)),
    Hostile("two keys", "POST", START, 400, "malformed_request", {},
            (("Idempotency-Key", "a"), ("Idempotency-Key", "b"))),
    Hostile("two tenants", "GET", "/v1/runs", 400, "malformed_request", b"",
            (("X-Stanchion-Tenant", "a"), ("X-Stanchion-Tenant", "b"))),
    Hostile("a tenant that is empty", "GET", "/v1/runs", 422, INVALID, b"",
            (("X-Stanchion-Tenant", ""),)),
    Hostile("a tenant that climbs", "GET", "/v1/runs", 422, INVALID, b"",
            (("X-Stanchion-Tenant", "../b"),)),
    Hostile("a tenant of 65", "GET", "/v1/runs", 422, INVALID, b"",
            (("X-Stanchion-Tenant", "t" * 65),)),
    Hostile("too many headers", "GET", "/v1/runs", 431, "headers_too_large", b"",
            tuple((f"X-{n}", "1") for n in range(101))),
    Hostile("too large a header", "GET", "/v1/runs", 431, "headers_too_large", b"",
            (("X-Large", "y" * 33_000),)),
    Hostile("too large a header, nowhere", "GET", "/nowhere", 431, "headers_too_large", b"",
            (("X-Large", "y" * 33_000),)),
    Hostile("a page of another origin", "POST", START, 403, "forbidden", {},
            (("Origin", "https://evil.example"),)),
    Hostile("a name that was rebound", "GET", "/v1/runs", 403, "forbidden", b"",
            (("Host", "evil.example:8420"),)),
    Hostile("no host", "GET", "/v1/runs", 403, "forbidden", b"", (("Host", ""),)),
    *(
        Hostile(f"{said} for {path}", "GET", path, 403, "forbidden", b"", (header,))
        for path in ("/livez", "/readyz", "/metrics", "/openapi.json", "/v1/runs", "/nowhere")
        for said, header in (
            ("a foreign name", ("Host", "attacker.example")),
            ("another site", ("Sec-Fetch-Site", "cross-site")),
            ("another port", ("Sec-Fetch-Site", "same-site")),
            ("another origin", ("Origin", "https://evil.example")),
        )
    ),
    Hostile("a foreign name, a wrong method", "PUT", "/metrics", 403, "forbidden", b"",
            (("Host", "attacker.example"),)),
    Hostile("a foreign address for what is no probe", "GET", "/metrics", 403, "forbidden", b"",
            (("Host", "10.0.0.7:8420"),)),
]  # fmt: skip

HOSTILE = [*BODIES, *MEMBERS, *PLACES, *HEADERS]


async def test_every_hostile_request_gets_the_answer_that_is_written_down() -> None:
    async with opened_house() as house:
        put = await house.ask("PUT", "/v1/workflows/one-step", ONE_STEP)
        assert put.status == 200
        wrong = []
        for each in HOSTILE:
            answer = await house.ask(each.method, each.target, each.body, headers=each.headers)
            if (answer.status, answer.code) != (each.status, each.code):
                wrong.append(f"{each.name}: {answer.status} {answer.code} {answer.body[:200]!r}")
            elif answer.code == INVALID and not answer.json["errors"]:
                wrong.append(f"{each.name}: no errors named")
        assert not wrong, "\n".join(wrong)
        listed = await house.ask("GET", "/v1/runs")
        assert listed.json["runs"] == [], "one of them was let through"


async def test_without_keys_probes_may_name_an_address_or_nothing(house: House) -> None:
    for host in ("10.0.0.7:8420", "[fe80::1]:8420", ""):
        for path in ("/livez", "/readyz"):
            assert (await house.ask("GET", path, headers=[("Host", host)])).status == 200, host


async def test_requests_of_this_servers_own_pages_are_answered(house: House) -> None:
    for site in ("same-origin", "none"):
        own = [("Sec-Fetch-Site", site), ("Host", "localhost:8420")]
        assert (await house.ask("GET", "/v1/runs", headers=own)).status == 200


async def test_with_keys_any_host_and_site_is_answered(guarded_house: House) -> None:
    foreign = [("Host", "stanchion.example"), ("Sec-Fetch-Site", "cross-site")]
    for path in ("/livez", "/readyz", "/v1/runs"):
        assert (await guarded_house.ask("GET", path, key=ADMIN, headers=foreign)).status == 200


async def test_a_first_key_made_elsewhere_opens_other_hosts(house: House) -> None:
    foreign = [("Host", "stanchion.example")]
    assert (await house.ask("GET", "/readyz", headers=foreign)).status == 403
    elsewhere = Keys(
        documents=house.services.store,
        clock=house.services.clock,
        entropy=house.services.entropy,
        admin_key=None,
    )
    await elsewhere.create(role=Role.ADMIN, tenant="*", note=None, actor="test")
    async with asyncio.timeout(5):
        while (await house.ask("GET", "/readyz", headers=foreign)).status != 200:  # noqa: ASYNC110 - it is read in the background, nobody is told
            await asyncio.sleep(0.05)


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert len(HOSTILE) >= 60
    assert len({each.name for each in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize("parts", [[b"[" * MIB, b"[" * MIB], [b"x" * 600_000] * 3])
async def test_a_body_in_pieces_is_refused_once_it_is_too_large(
    house: House, parts: list[bytes]
) -> None:
    # The last part never comes: nobody waits for it.
    answer = await house.ask("POST", START, parts=[*parts, Stuck])
    assert (answer.status, answer.code) == (413, "body_too_large")


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with opened_house(GatewayOptions(body_timeout_s=0.05)) as house:
        answer = await house.ask("POST", START, parts=[b'{"in', Stuck])
        assert (answer.status, answer.code) == (408, "request_timeout")


async def test_a_body_that_has_come_is_not_blamed_for_the_wait_for_its_turn() -> None:
    async with opened_house(GatewayOptions(body_timeout_s=0.05)) as house:
        turns = house.app.state.heavy._turns  # noqa: SLF001 - as if another body were decoded
        await turns.acquire(TenantId("other"))
        answer = await house.ask("POST", START, b"{}".ljust(20_000))
        assert (answer.status, answer.code) == (503, "overloaded")
        turns.release()


async def test_all_bodies_together_are_bounded() -> None:
    async with opened_house(GatewayOptions(bodies_bytes_max=1000)) as house:
        large = b'{"input": {"x": "' + b"y" * 2000 + b'"}}'
        answer = await house.ask("POST", START, large)
        assert (answer.status, answer.code) == (503, "overloaded")
        pieces = [large[:900], large[900:]]
        assert (await house.ask("POST", START, parts=pieces)).code == "overloaded"
        # What was refused, and what was answered, is not counted any more, and not twice either.
        small = b'{"input": {}}' + b" " * 800
        for _ in range(3):
            assert (await house.ask("POST", START, small)).status == 404
            assert (await house.ask("POST", START, parts=[small[:500], small[500:]])).status == 404
        assert (await house.ask("POST", START, large[:1001])).code == "overloaded"


async def test_the_bodies_of_one_tenant_leave_room_for_others() -> None:
    large = b'{"input": {"x": "' + b"y" * 180 + b'"}}'
    async with opened_house(GatewayOptions(bodies_bytes_max=1000, admin_key=ADMIN)) as house:
        loud, quiet = [await house.make_key("runner", each) for each in ("loud", "quiet")]
        worker = await house.make_key("worker", "loud")
        waits = b'{"worker_id": "w", "topics": ["t"], "wait_s": 60}' + b" " * 151
        waiting = asyncio.create_task(house.ask("POST", LEASE, waits, key=worker))
        await house.has_under_way("waits")
        for parts in ([large], [large[:20], large[20:]]):
            answer = await house.ask("POST", START, parts=parts, key=loud)
            assert (answer.status, answer.code) == (429, "tenant_overloaded")
            assert (await house.ask("POST", START, parts=parts, key=quiet)).status == 404
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        # What has ended is not counted any more. A single body may exceed the share.
        assert (await house.ask("POST", START, large, key=loud)).status == 404
        larger = large + b" " * 400
        for parts in ([larger], [larger[:400], larger[400:]]):
            assert (await house.ask("POST", START, parts=parts, key=loud)).status == 404


async def test_the_largest_good_values_pass(house: House) -> None:
    await house.ask("PUT", "/v1/workflows/one-step", ONE_STEP)
    good = (
        b'{"input": {"x": ' + b"[" * 62 + b"]" * 62 + b', "n": 9223372036854775807, "m": -1e308}}'
    )
    assert (await house.ask("POST", START, good)).status == 200
    inside = b'{"input": {"x": "' + b"{[" * 500 + b'", "d": "' + b"9" * 40 + b'"}}'
    assert (await house.ask("POST", START, inside)).status == 200


async def test_a_whole_number_may_be_written_with_a_fraction_of_nothing(house: House) -> None:
    written = b'{"max_concurrent_runs": 2.0, "job_rate_per_s": 3}'
    answer = await house.ask("PUT", "/v1/admin/tenants/acme", written)
    assert answer.json["max_concurrent_runs"] == 2
    many = b'{"worker_id": "w", "leases": [' + b",".join(
        b'{"job_id": "j%d", "fence": %d.0}' % (n, n) for n in range(1, 400)
    )
    renewed = await house.ask("POST", "/v1/worker/renew", many + b"]}")
    assert len(renewed.json["lost"]) == 399
    budgets = (
        b'{"budgets": {"a": {"limit": 5.0, "window": "day"}, "b": {"limit": 6.0, "window": "day"}}}'
    )
    answer = await house.ask("PUT", "/v1/admin/tenants/acme", budgets)
    assert [each["limit"] for each in answer.json["budgets"].values()] == [5, 6]
    lease = b'{"job_id": "j", "fence": 1, "usage": {"a": 3.0, "b": 4.0}}'
    used = b'{"worker_id": "w", "leases": [' + lease + b"]}"
    assert (await house.ask("POST", "/v1/worker/renew", used)).json["lost"] == ["j"]
    half = await house.ask("POST", "/v1/worker/renew", used.replace(b"3.0", b"3.5"))
    assert (half.status, half.json["errors"][0]["path"]) == (422, "leases[0].usage.a")
    for wrong, path in (
        (budgets.replace(b"6.0", b"-1"), "budgets.b.limit"),
        (budgets.replace(b'"limit": 5.0, ', b""), "budgets.a.limit"),
        (budgets.replace(b'"b"', b'"b.[c]"').replace(b"6.0", b"[]"), "budgets.b.[c].limit"),
    ):
        answer = await house.ask("PUT", "/v1/admin/tenants/acme", wrong)
        assert (answer.status, answer.json["errors"][0]["path"]) == (422, path)
    for wrong in (b'{"max_concurrent_runs": 2.5}', b'{"max_concurrent_runs": 1e300}'):
        answer = await house.ask("PUT", "/v1/admin/tenants/acme", wrong)
        assert (answer.status, answer.json["errors"][0]["path"]) == (422, "max_concurrent_runs")
    # A free value stays as it was written.
    await house.ask("PUT", "/v1/workflows/one-step", ONE_STEP)
    started = await house.ask("POST", START, b'{"input": {"x": 1.0}}')
    run = await house.ask("GET", f"/v1/runs/{started.json['run_id']}")
    assert b'"input":{"x":1.0}' in run.body


async def test_a_fault_of_our_own_is_a_500_without_a_trace_and_a_line_in_the_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.store.script("list_runs", Fault.BUG)
    answer = await house.ask("GET", "/v1/runs", headers=[("X-Request-Id", "mine-1")])
    assert (answer.status, answer.code) == (500, "internal")
    assert b"bug in the adapter" not in answer.body
    (line,) = [each for each in caplog.records if each.message == "request_failed"]
    assert line.__dict__["fields"]["request_id"] == "mine-1"


async def test_an_answer_that_cannot_be_written_is_a_fault_like_any_other(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.services.settings, "document", lambda: {"x": object()})
    answer = await house.ask("GET", "/v1/admin/settings")
    assert (answer.status, answer.code) == (500, "internal")


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        (b"!", 400, "the body is not JSON: JSON is malformed: invalid character (byte 180018)"),
        (b"-Infinity", 422, "-Infinity is not a finite number"),
        (b'"\\ud83d"', 400, "the body is not JSON: text holds half of a surrogate pair"),
        (b'"\\ud83d\\ude00" "', 400, "the body is not JSON: JSON is malformed"),
    ],
)
async def test_what_is_wrong_at_the_end_of_a_large_body_is_told(
    house: House, end: bytes, status: int, says: str
) -> None:
    answer = await house.ask("POST", START, b'{"input": {"xy": [' + b"[0]," * 45_000 + end)
    assert answer.status == status
    assert says in answer.json["detail"]


def filled(unit: bytes, begin: bytes = b'{"input": {"x": [', end: bytes = b"0]}}") -> bytes:
    """A body of one megabyte made of this unit."""
    return begin + unit * ((MIB - len(begin) - len(end)) // len(unit)) + end


class Large(NamedTuple):
    """A body at a limit, and what is said about it."""

    name: str
    body: bytes
    says: str = ""


_LISTS = "more than 50,000 objects and lists"
_EXTREME = "more than 500 numbers with an exponent of three digits, or with more than 100 digits"
_LARGE = "more than 10,000 numbers over 1e20"
LARGEST = [
    Large("lists", filled(b"[0],"), _LISTS),
    Large("nested lists", filled(b"[[[[[[[[]]]]]]]],"), _LISTS),
    Large("as many lists as allowed", b'{"input": {"x": [' + b"[0]," * 49_990 + b"0]}}"),
    Large("as many objects as allowed", b'{"input": {"x": [' + b'{"":0},' * 49_990 + b"0]}}"),
    Large("names", b'{"input":{%s}}' % b",".join(b'"%x":0' % each for each in range(100_000))),
    Large("one name again and again", filled(b'"a":0,', b'{"input": {', b'"b": 0}}')),
    Large("digits", filled(b"0,")),
    Large("texts", filled(b'"a",')),
    Large("escapes", filled(b'"\\u00e9",')),
    Large("hash values", filled(b'"%s",' % (b"0e000e12345678ab" * 4))),
    Large("numbers of 16 digits with exponents", filled(b"1.234567890123456e-05,")),
    Large("1e300", filled(b"1e300,"), _EXTREME),
    Large("1E-0310", filled(b"1E-0310 ,"), _EXTREME),
    Large("the largest number", filled(b"1.7976931348623157e+308\n,"), _EXTREME),
    Large("250 zeros", filled(b"1" + b"0" * 250 + b".0,"), _EXTREME),
    Large("integers of 4,000 digits", filled(b"9" * 4_000 + b","), _EXTREME),
    Large("1e23", filled(b"1e23,"), _LARGE),
    Large("0.1E+24", filled(b"0.1E+24,"), _LARGE),
    Large("halfway, with a fraction", filled(b"672422035976010.9375,"), _LARGE),
    Large("halfway, whole", filled(b"12735691767528779.0,"), _LARGE),
    Large("halfway, with an exponent", filled(b"53.127243883872785e14,"), _LARGE),
    Large("halfway, of 26 digits", filled(b"881604254509.06256103515625,"), _LARGE),
    Large("times in microseconds", filled(b"1731783456123456.2,")),
    Large("small numbers", filled(b"0.0001234567890123456,")),
    Large("account numbers", filled(b'"DE89370400440532013000",')),
    Large("1e300 in 2 KB", b'{"input": {"x": [' + b"1e300," * 335 + b"0]}}"),
]
DECODE_S_MAX = 0.02
MARGIN = 1.5
"""What is refused here took 45 ms to 2.9 s."""
LOOP_S = 0.0011
"""What ``_slowness`` takes on the processor by which the bounds were chosen."""


def _slowness() -> float:
    """How much slower the processor is at the moment: its host may give a part of it to others."""
    began_s, total = time.thread_time(), 0
    for number in range(20_000):
        total += number * number
    return max(1.0, (time.thread_time() - began_s) / LOOP_S)


@pytest.mark.usefixtures("as_in_a_server")
@pytest.mark.parametrize("large", LARGEST, ids=lambda each: each.name)
def test_no_body_holds_the_event_loop_for_long(large: Large) -> None:
    assert len(large.body) <= MIB
    decoder = msgspec.json.Decoder(StartRun)
    for body in (large.body, large.body[:-3] + b"!"):
        took_s, said = list[float](), ""
        for _ in range(7):
            slowness = _slowness()
            # Others are served between the pieces of the check, and before the decoding.
            ends_s = [time.thread_time()]
            try:
                ends_s += (time.thread_time() for _ in chain(refuse_costly(body), [None]))
                value = decoded(body, decoder, is_checked=True)
                if is_suspect(body) and len(msgspec.json.encode(value.input)) <= INPUT_BYTES_MAX:
                    fault_in(value.input, "input")
            except RequestRefused as refused:
                said = refused.refusal.detail
            ends_s.append(time.thread_time())
            longest_s = max(end_s - begin_s for begin_s, end_s in pairwise(ends_s))
            took_s.append(longest_s / slowness)
        assert min(took_s) < MARGIN * DECODE_S_MAX
        assert (large.says or ("" if body is large.body else "not JSON")) in said
        assert bool(said) == (bool(large.says) or body is not large.body)


async def test_large_bodies_and_answers_are_charged_to_their_tenant(house: House) -> None:
    work = house.services.work
    large = {"topic": "work", "input": "y" * 250_000}
    answer = await house.ask("POST", "/v1/jobs", large, tenant="acme")
    assert answer.status == 200
    charged_s = house.metric("stanchion_tenant_work_seconds_total", tenant="acme")
    assert charged_s
    run_id = answer.json["run_id"]
    read = await house.ask("GET", f"/v1/runs/{run_id}", tenant="acme")
    assert read.status == 200
    read_s = house.metric("stanchion_tenant_work_seconds_total", tenant="acme")
    assert read_s is not None
    assert read_s - charged_s >= 0.003
    work.charge(TenantId("acme"), 5)
    for method, target, body in (
        ("GET", f"/v1/runs/{run_id}", b""),
        ("GET", "/v1/runs", b""),
        ("POST", "/v1/jobs", large),
    ):
        answer = await house.ask(method, target, body, tenant="acme")
        assert (answer.status, answer.code) == (429, "tenant_overloaded"), target
    assert (await house.ask("POST", "/v1/jobs", {"topic": "work"}, tenant="acme")).status == 200
    assert (await house.ask("GET", "/v1/runs", tenant="other")).status == 200


def test_one_tenants_readers_hold_a_quarter_of_all_large_answers() -> None:
    answers = LargeAnswers(400)
    one, other = TenantId("one"), TenantId("other")
    held, more = bytes(60), bytes(bytearray(60))
    assert not answers.is_tenant_full(bytes(500), one), "one alone fits"
    assert answers.take(held, one)
    assert answers.is_tenant_full(more, one)
    assert not answers.is_tenant_full(bytes(40), one)
    assert not answers.is_tenant_full(bytes(100), other)
    assert not answers.is_tenant_full(held, one), "what several callers are sent is held once"
    assert answers.take(held, one)
    answers.give(held, one)
    assert answers.is_tenant_full(more, one)
    answers.give(held, one)
    assert not answers.is_tenant_full(bytes(101), one)


async def test_large_answers_are_written_by_turns() -> None:
    answers, written = LargeAnswers(400), list[str]()
    loud, quiet = TenantId("loud"), TenantId("quiet")

    async def write(tenant: TenantId, size: int = TURN_BYTES // 2) -> None:
        await answers.turn(size, tenant)
        written.append(tenant)

    writing = [asyncio.create_task(write(loud)) for _ in range(20)]
    left = asyncio.create_task(write(loud))
    writing += [asyncio.create_task(write(quiet)), asyncio.create_task(write(loud, 9 * TURN_BYTES))]
    await asyncio.sleep(0)
    assert written == [loud, loud]
    left.cancel()
    before = 2
    while len(written) < 22:
        await asyncio.sleep(0)
        assert len(written) - before <= 2
        before = len(written)
    assert written.index(quiet) < 6
    await asyncio.gather(*writing)
    assert len(written) == 22


async def test_large_answers_leave_most_of_the_event_loop_to_others() -> None:
    answers, took_s, count = LargeAnswers(400), 0.004, 10

    async def write() -> None:
        await answers.turn(9 * TURN_BYTES, TenantId("loud"))
        time.sleep(took_s)  # noqa: ASYNC251 - it takes the event loop so long to write it

    began_s = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(count)))
    assert time.perf_counter() - began_s >= took_s * (1 + 4 * (count - 1))


async def test_a_schema_of_many_alternatives_does_not_hold_up_the_server() -> None:
    alternatives = {"anyOf": [{"const": each + 1} for each in range(488)]}
    schema = {"properties": {"x": {"type": "array", "items": alternatives}}}
    async with opened_house() as house:
        file = {"steps": {"only": {"topic": "work"}}, "input_schema": schema}
        put = await house.ask("PUT", "/v1/workflows/costly", file)
        assert put.status == 200, put.body
        body = {"input": {"x": [0] * 130_900}}
        answer = await house.ask("POST", "/v1/workflows/costly/runs", body)
        assert (answer.status, answer.code) == (422, "invalid_input")
        (error,) = answer.json["errors"]
        assert error["path"] == "input"
        assert error["message"].startswith("too large for the workflow's schema")
        spent_s = house.metric("stanchion_tenant_work_seconds_total", tenant="default")
        assert spent_s is not None
        assert spent_s < 1  # it was 7 s


async def test_large_bodies_take_turns_behind_small_requests(house: House) -> None:
    load = house.app.state.load
    bodies = house.app.state.bodies
    turns = HeavyRequests(load, bodies)
    done: list[str] = []

    async def large(name: str) -> None:
        with _under_way(load):
            await turns.take(TenantId("loud"), turns.patience_ends_s())
            done.append(name)
            await asyncio.sleep(0)  # from here on it is the next one's turn
            done.append(f"{name} waits")

    with _under_way(load):
        first, second = asyncio.create_task(large("first")), asyncio.create_task(large("second"))
        await asyncio.sleep(0.005)
        assert done == []
    async with asyncio.timeout(5):
        await asyncio.gather(first, second)
    assert done == ["first", "first waits", "second", "second waits"]
    # A small request that is never answered holds nothing up for long, however many turns follow.
    loop = asyncio.get_running_loop()
    with _under_way(load), _under_way(load):
        began_s = loop.time()
        until_s = turns.patience_ends_s()
        for _ in range(20):
            async with asyncio.timeout(5):
                await turns.take(TenantId("loud"), until_s)
        assert loop.time() - began_s < 10 * WAIT_S_MAX
        await asyncio.sleep(0)


async def test_tenants_take_turns_with_large_bodies_and_leave_time_to_others(house: House) -> None:
    load, took_s = house.app.state.load, 0.004
    turns, done = HeavyRequests(load, house.app.state.bodies), list[str]()

    async def large(tenant: str) -> None:
        with _under_way(load):
            await turns.take(TenantId(tenant), loop.time())  # it has no patience left
            time.sleep(took_s)  # noqa: ASYNC251 - it takes the event loop so long to decode it
            done.append(tenant)
            await asyncio.sleep(0)

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with _under_way(load):  # another request, all the time
        bodies = [asyncio.create_task(large("loud")) for _ in range(10)]
        await asyncio.sleep(0)
        bodies[5].cancel()
        bodies.append(asyncio.create_task(large("quiet")))
        await asyncio.gather(*bodies, return_exceptions=True)
    assert done.index("quiet") <= 3
    assert len(done) == 10
    assert loop.time() - began_s >= took_s * (2 * len(done) - 1)


async def test_large_bodies_do_not_wait_for_clients_that_send_no_body(house: House) -> None:
    state = house.app.state
    sending = asyncio.create_task(house.ask("POST", START, parts=[Stuck]))
    await house.has_under_way("requests")
    loop = asyncio.get_running_loop()
    with _under_way(state.load):
        began_s = loop.time()
        await state.heavy.take(TenantId("loud"), began_s + 60)
        assert loop.time() - began_s < 30
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    assert state.bodies.reading == 0


async def test_heavy_starts_that_wait_for_a_lock_hold_up_nothing_behind_them(house: House) -> None:
    await house.ask("PUT", "/v1/workflows/w", {"steps": {"only": {"topic": "work"}}})
    config = {"max_concurrent_runs": 10, "admission": {"strategy": "lock"}}
    assert (await house.ask("PUT", "/v1/admin/tenants/default", config)).status == 200
    held = {"name": "admission/default", "ttl_s": 60}
    assert (await house.ask("POST", "/v1/admin/leases", held)).status == 200
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    large = {"input": {"x": "y" * 17_000}}
    starts = [
        asyncio.create_task(house.ask("POST", "/v1/workflows/w/runs", large)) for _ in range(8)
    ]
    await asyncio.sleep(0.05)
    result = {"job_id": "j", "fence": 1, "status": "succeeded", "output": "y" * 17_000}
    sent = {"worker_id": "w", "results": [result]}
    answered_s = loop.time()
    assert (await house.ask("POST", "/v1/worker/results", sent)).status == 200
    assert loop.time() - answered_s < 1  # it was behind all of them, two seconds each
    async with asyncio.timeout(30):
        assert {(await each).code for each in starts} == {"gate_busy"}
    assert loop.time() - began_s < 8  # one after the other they took sixteen


async def test_a_tenants_heavy_requests_are_handled_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def results(given: Sequence[Result], **_: object) -> tuple[()]:
        name = given[0].worker_id
        under_way[name] += 1
        most[name] = max(most[name], under_way[name])
        await asyncio.sleep(0.001)
        under_way[name] -= 1
        return ()

    def many(name: str, count: int) -> dict[str, object]:
        some = [
            {"job_id": f"{'j' * 40}{n}", "fence": 1, "status": "succeeded"} for n in range(count)
        ]
        return {"worker_id": name, "results": some}

    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        monkeypatch.setattr(house.services.inbox, "results", results)
        acme, other = await house.make_key("worker", "acme"), await house.make_key("worker", "b")
        answers = await asyncio.gather(
            *(house.ask("POST", RESULTS, many("large", 300), key=acme) for _ in range(5)),
            *(house.ask("POST", RESULTS, many("small", 3), key=acme) for _ in range(5)),
            house.ask("POST", RESULTS, many("other", 300), key=other),
        )
    assert {answer.status for answer in answers} == {200}
    assert most == {"large": 1, "small": 5, "other": 1}


@contextmanager
def _under_way(load: Load) -> Iterator[None]:
    load.begin(LoadKind.REQUESTS)
    try:
        yield
    finally:
        load.end(LoadKind.REQUESTS)
