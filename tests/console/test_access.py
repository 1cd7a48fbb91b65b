"""Who gets into the console: sessions, origins, form tokens, roles and tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote, urlencode

import pytest
import pytest_asyncio

from stanchion.console.pages import ACTIONS, PAGES
from stanchion.wire.admin import Role
from tests.console.visits import HOST, SAME_SITE, Browser, ConsoleHouse, opened_console
from tests.gateway.asgi import Stuck, opened
from tests.gateway.house import ADMIN, ONE_STEP

SETTLED = ("Sec-Fetch-Site", "same-origin")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[ConsoleHouse]:
    async with opened_console() as console:
        yield console


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@in_one_loop
async def test_every_page_leads_to_the_login_form_without_a_session(world: ConsoleHouse) -> None:
    browser = await world.browser()
    for page in PAGES:
        path = page.path.replace("{", "").replace("}", "")
        answer = await browser.get(path)
        assert answer.status == 303, path
        assert answer.headers["location"].startswith("/console/login?next=%2Fconsole"), path
    for action in ACTIONS:
        path = action.path.replace("{", "").replace("}", "")
        assert (await browser.post(path)).status == 303, path
    assert (await browser.get("/console/live")).status == 401
    assert (await browser.get("/console/login")).status == 200


@in_one_loop
async def test_the_login_form_opens_a_session_that_logging_out_ends(world: ConsoleHouse) -> None:
    browser = await world.browser()
    refused = await browser.post("/console/login", key="sk_not_known")
    assert refused.status == 403
    assert b"sk_not_known" not in refused.body
    answer = await browser.post("/console/login", key=ADMIN, next="/console/runs?status=running")
    assert (answer.status, answer.headers["location"]) == (303, "/console/runs?status=running")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Max-Age=43200" in cookie
    assert ADMIN not in cookie
    assert (await browser.get("/console")).status == 200
    assert (await browser.post("/console/logout")).status == 303
    stolen = await world.browser()
    stolen.cookies = {"stanchion-session": cookie.partition("=")[2].partition(";")[0]}
    assert (await stolen.get("/console")).status == 303


@in_one_loop
async def test_over_tls_the_cookie_is_secure_and_bound_to_the_host(world: ConsoleHouse) -> None:
    headers = [("Origin", f"https://{HOST}"), *SAME_SITE[1:]]
    body = urlencode({"key": ADMIN}).encode()
    answer = await world.house.ask("POST", "/console/login", body, headers=headers)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-stanchion=")
    assert "; Secure" in cookie
    assert "Path=/;" in cookie


@in_one_loop
async def test_a_method_that_no_page_has_is_answered_with_those_that_there_are(
    world: ConsoleHouse,
) -> None:
    answer = await world.house.ask("DELETE", "/console/runs")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")


@in_one_loop
@pytest.mark.parametrize(
    "other",
    ['prefs={"theme":"dark"}', "path=/app", "a b=c", "list[1]=2", 'q="open', "é=1", "=", ""],
)
async def test_cookies_of_other_programs_do_not_hide_the_session(
    world: ConsoleHouse, other: str
) -> None:
    browser = await world.browser(ADMIN)
    own = f"stanchion-session={browser.cookies['stanchion-session']}"
    for both in (f"{other}; {own}", f"{own}; {other}"):
        answer = await world.house.ask("GET", "/console", headers=[("Cookie", both.encode())])
        assert answer.status == 200, both


@in_one_loop
async def test_a_cookie_without_the_prefix_does_not_count_over_tls(world: ConsoleHouse) -> None:
    browser = await world.browser(ADMIN)
    plain = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
    for host, status in ((HOST, 200), ("console.example", 303)):
        headers = [("Host", host), SETTLED, plain]
        answer = await world.house.ask("GET", "/console", headers=headers)
        assert answer.status == status, host


@in_one_loop
async def test_a_program_may_log_in_but_no_other_site(world: ConsoleHouse) -> None:
    body = urlencode({"key": ADMIN}).encode()
    for headers, status in (
        ([], 303),
        ([("Origin", f"http://{HOST}")], 303),
        ([("Origin", "http://evil.example")], 403),
        ([("Origin", "null")], 403),
        ([("Sec-Fetch-Site", "cross-site")], 403),
        ([("Origin", f"http://{HOST}"), ("Sec-Fetch-Site", "same-site")], 403),
    ):
        sent = [SAME_SITE[2], *headers]
        answer = await world.house.ask("POST", "/console/login", body, headers=sent)
        assert answer.status == status, headers


@in_one_loop
async def test_login_goes_on_to_pages_of_the_console_only(world: ConsoleHouse) -> None:
    for wanted in ("//evil.example", "https://evil.example", "/v1/runs", "/console\\@evil", ""):
        browser = await world.browser()
        answer = await browser.post("/console/login", key=ADMIN, next=wanted)
        assert answer.headers["location"] == "/console", wanted


@in_one_loop
@pytest.mark.parametrize(
    "wanted",
    [
        "/console/../../x",
        "/console/..",
        "/console/.. ",
        "/console/./runs",
        "/console/runs/../../v1/runs?status=failed",
        "/console/%2e%2e/x",
        "/console/.%2E/x",
        "/console/%2E./x",
        "/console/%2e/runs",
        "/console/..%2Fx",
        "/console/..#runs",
        "/consoles",
        "/console%2f..%2fx",
        "/console#x",
    ],
)
async def test_login_does_not_leave_the_console_by_dot_segments(
    world: ConsoleHouse, wanted: str
) -> None:
    browser = await world.browser()
    answer = await browser.post("/console/login", key=ADMIN, next=wanted)
    assert answer.headers["location"] == "/console"


@in_one_loop
async def test_login_goes_on_to_a_page_with_dots_in_its_address(world: ConsoleHouse) -> None:
    for wanted in ("/console/workflows/a..b.c", "/console/runs?label=../x", "/console?tenant=.."):
        browser = await world.browser()
        answer = await browser.post("/console/login", key=ADMIN, next=wanted)
        assert answer.headers["location"] == wanted


@in_one_loop
@pytest.mark.parametrize(
    ("referrer", "expected"),
    [
        (f"http://{HOST}/console/limits?tenant=first", "/console/limits?tenant=first"),
        (f"http://{HOST}/console", "/console"),
        (f"http://{HOST}/console/limits/put", "/console"),  # an action: it cannot be opened
        (f"http://{HOST}/console/login?next=%2Fconsole%2Fruns", "/console"),
        (f"http://{HOST}/v1/runs", "/console"),
        ("http://evil.example/console/limits", "/console"),
        (f"https://{HOST}/console/limits", "/console"),
        (f"http://{HOST}.evil.example/console/limits", "/console"),
        ("not an address", "/console"),
        (None, "/console"),
    ],
)
async def test_a_form_sent_after_its_session_leads_back_to_its_page(
    world: ConsoleHouse, referrer: str | None, expected: str
) -> None:
    browser = await world.browser()
    headers = [] if referrer is None else [("Referer", referrer)]
    answer = await browser.send("/console/limits/put?tenant=first", (), headers)
    assert answer.status == 303
    assert answer.headers["location"] == f"/console/login?next={quote(expected, safe='')}"


@in_one_loop
async def test_a_revoked_key_ends_its_sessions_and_streams(world: ConsoleHouse) -> None:
    key = await world.house.make_key("runner", "first")
    browser = await world.browser(key)
    assert (await browser.get("/console/runs")).status == 200
    cookie = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
    async with opened(world.house.app, "GET", "/console/live", b"", [cookie]) as feed:
        await feed.until(b"event: pulse")
        path = f"/v1/admin/keys/{key.split('_')[1]}"
        assert (await world.house.ask("DELETE", path, key=ADMIN)).status == 200
        while await feed.next():
            pass
    assert (await browser.get("/console/runs")).status == 303


BAD_ORIGINS: list[tuple[str, list[tuple[str, str]]]] = [
    ("no origin", [SETTLED]),
    ("no site", [("Origin", f"http://{HOST}")]),
    ("no site over TLS", [("Origin", f"https://{HOST}")]),
    ("another origin", [("Origin", "http://evil.example"), SETTLED]),
    ("null origin", [("Origin", "null"), SETTLED]),
    ("another port", [("Origin", "http://127.0.0.1:1"), SETTLED]),
    ("another site", [("Origin", f"http://{HOST}"), ("Sec-Fetch-Site", "cross-site")]),
    ("the same site", [("Origin", f"http://{HOST}"), ("Sec-Fetch-Site", "same-site")]),
]


@in_one_loop
async def test_a_change_from_elsewhere_is_refused(world: ConsoleHouse) -> None:
    browser = await world.browser(ADMIN)
    await browser.get("/console")
    run_id = await world.house.start(key=ADMIN, tenant="first")
    path = f"/console/runs/{run_id}/cancel"
    cookie = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
    right = urlencode({"form_token": browser.token, "tenant": "first"}).encode()
    for name, headers in BAD_ORIGINS:
        sent = [*headers, SAME_SITE[2], cookie]
        answer = await world.house.ask("POST", path, right, headers=sent)
        assert answer.status == 403, name
    for token in ("", "0" * 64):
        wrong = urlencode({"form_token": token, "tenant": "first"}).encode()
        answer = await world.house.ask("POST", path, wrong, headers=[*SAME_SITE, cookie])
        assert answer.status == 403
    plain = [SAME_SITE[0], SAME_SITE[1], ("Content-Type", "text/plain"), cookie]
    assert (await world.house.ask("POST", path, right, headers=plain)).status == 415
    answer = await world.house.ask("POST", path, right, headers=[*SAME_SITE, cookie])
    assert answer.headers["location"].endswith("did=run_cancelled")


@in_one_loop
async def test_the_cookie_does_not_count_outside_the_console(world: ConsoleHouse) -> None:
    browser = await world.browser(ADMIN)
    cookie = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
    assert (await world.house.ask("GET", "/v1/runs", headers=[cookie])).status == 401


@in_one_loop
async def test_every_page_has_a_strict_policy(world: ConsoleHouse) -> None:
    browser = await world.browser(ADMIN)
    for path in ("/console", "/console/nothing", "/console/login", "/console/runs/unknown"):
        headers = (await browser.get(path)).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"


async def test_a_server_without_keys_needs_no_session_but_still_the_origin() -> None:
    async with opened_console(has_keys=False) as console:
        browser = await console.browser()
        assert (await browser.get("/console")).status == 200
        assert (await browser.get("/console/login")).status == 303
        run_id = await console.house.start()
        path = f"/console/runs/{run_id}/cancel"
        no_origin = [SAME_SITE[2]]
        assert (await console.house.ask("POST", path, b"", headers=no_origin)).status == 403
        assert (await browser.post(path, tenant="default")).status == 303
        elsewhere = [("Host", "evil.example")]
        assert (await console.house.ask("GET", "/console", headers=elsewhere)).status == 403


async def test_a_browser_that_opens_the_servers_address_finds_the_console() -> None:
    async with opened_console(has_keys=False) as console:
        page = ("Accept", "text/html,application/xhtml+xml")
        answer = await console.house.ask("GET", "/", headers=[page])
        assert (answer.status, answer.headers["location"]) == (303, "/console")
        for method, path, headers in (
            ("GET", "/", []),
            ("POST", "/", [page]),
            ("GET", "//console", [page]),
            ("GET", "/consoles", [page]),
        ):
            answer = await console.house.ask(method, path, headers=headers)
            assert (answer.status, answer.code) == (404, "not_found"), path


# ── The isolation matrix ──────────────────────────────────────────────────────────────────────────

PARAMS = {
    "workflow_id": "one-step",
    "step_id": "only",
    "bulk_id": "b1",
    "drill": "unknown",
    "schedule_id": "nightly",
}
NIGHTLY = {"workflow_id": "one-step", "every_s": 3_600, "paused": True}
EVERY = frozenset(Role)
READERS = EVERY - {Role.WORKER}
RUNNERS = READERS - {Role.APPROVER}
OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
ADMINS = frozenset({Role.ADMIN})
OF_ONE_TENANT: dict[str, frozenset[Role]] = {
    "/console": EVERY,
    "/console/approvals": READERS,
    "/console/audit": OPERATORS,
    "/console/bulk": RUNNERS,
    "/console/bulk/{bulk_id}": RUNNERS,
    "/console/dead-letters": RUNNERS,
    "/console/decisions": RUNNERS,
    "/console/keys": ADMINS,
    "/console/runs": READERS,
    "/console/runs/{run_id}": READERS,
    "/console/runs/{run_id}/steps/{step_id}": READERS,
    "/console/schedules": RUNNERS,
    "/console/schedules/{schedule_id}": RUNNERS,
    "/console/search": EVERY,
    "/console/workers": OPERATORS,
    "/console/workflows": RUNNERS,
    "/console/workflows/{workflow_id}": RUNNERS,
}
"""Which roles of a key for one tenant may open a page. Pages that are not listed: none."""
OF_ALL: dict[str, frozenset[Role]] = {
    "/console": OPERATORS | {Role.WORKER},
    "/console/keys": ADMINS,
    "/console/search": OPERATORS | {Role.WORKER},
    **{
        f"/console/{page}": OPERATORS
        for page in (
            "admission",
            "approvals",
            "audit",
            "bulk",
            "bulk/{bulk_id}",
            "dead-letters",
            "decisions",
            "drift",
            "drills",
            "drift/try",
            "escalation",
            "leases",
            "leases/release",
            "limits",
            "policies",
            "replicas",
            "retries",
            "runs",
            "runs/{run_id}",
            "runs/{run_id}/steps/{step_id}",
            "schedules",
            "schedules/{schedule_id}",
            "settings",
            "shared/{workflow_id}",
            "workers",
            "workflows",
            "workflows/{workflow_id}",
        )
    },
}
"""The same for a key for all tenants; approvers and runners are of one tenant."""


@in_one_loop
async def test_each_role_opens_its_pages_and_no_others(world: ConsoleHouse) -> None:
    run_id = await world.house.start(key=ADMIN, tenant="first")
    shared = "/v1/shared/workflows/one-step"
    assert (await world.house.ask("PUT", shared, ONE_STEP, key=ADMIN)).status == 200
    nightly = "/v1/schedules/nightly"
    made = await world.house.ask("PUT", nightly, NIGHTLY, key=ADMIN, tenant="first")
    assert made.status == 200, made.body
    for tenant, allowed in (("first", OF_ONE_TENANT), ("*", OF_ALL)):
        assert {page.path for page in PAGES} <= set(OF_ALL), "a page is not in the matrix"
        for role in Role if tenant != "*" else (Role.WORKER, *OPERATORS):
            browser = await world.browser(await world.house.make_key(role, tenant))
            for page in PAGES:
                path = page.path.format_map({**PARAMS, "run_id": run_id})
                answer = await browser.get(f"{path}?tenant=first")
                expected = 200 if role in allowed.get(page.path, frozenset()) else 403
                if expected == 200 and "{bulk_id}" in page.path:
                    expected = 404  # there is none
                assert answer.status == expected, (page.path, role, tenant)


@in_one_loop
async def test_a_tenants_key_sees_and_changes_its_tenant_only(world: ConsoleHouse) -> None:
    run_id = await world.house.start(key=ADMIN, tenant="first")
    browser: Browser = await world.browser(await world.house.make_key("admin", "second"))
    assert run_id.encode() not in (await browser.get("/console/runs")).body
    assert (await browser.get(f"/console/runs/{run_id}")).status == 404
    assert (await browser.get("/console/runs?tenant=first")).status == 403
    assert (await browser.post(f"/console/runs/{run_id}/cancel")).status == 404
    assert (await browser.post(f"/console/runs/{run_id}/cancel", tenant="first")).status == 403


@in_one_loop
async def test_a_tenants_key_sees_and_changes_its_own_schedules_only(world: ConsoleHouse) -> None:
    await world.house.start(key=ADMIN, tenant="first")  # stores the workflow
    path = "/v1/schedules/secret"
    made = await world.house.ask("PUT", path, NIGHTLY, key=ADMIN, tenant="first")
    assert made.status == 200, made.body
    browser = await world.browser(await world.house.make_key("admin", "second"))
    assert b"secret" not in (await browser.get("/console/schedules")).body
    page = "/console/schedules/secret"
    assert (await browser.get(page)).status == 404
    assert (await browser.get(f"{page}?tenant=first")).status == 403
    for verb in ("/pause", "/trigger", "/delete"):
        assert (await browser.post(f"{page}{verb}")).status == 404, verb
        assert (await browser.post(f"{page}{verb}", tenant="first")).status == 403, verb
    assert (await browser.post(page, tenant="first", workflow_id="one-step")).status == 403
    left = await world.house.ask("GET", path, key=ADMIN, tenant="first")
    assert (left.status, left.json["generation"]) == (200, made.json["generation"])


@in_one_loop
async def test_a_key_for_all_tenants_names_one_before_it_changes_anything(
    world: ConsoleHouse,
) -> None:
    run_id = await world.house.start(key=ADMIN)
    browser = await world.browser(ADMIN)
    await browser.get("/console")
    assert (await browser.post(f"/console/runs/{run_id}/cancel")).status == 422
    answer = await browser.post(f"/console/runs/{run_id}/cancel", tenant="default")
    assert answer.status == 303


@in_one_loop
async def test_chosen_runs_are_acted_on_in_their_own_tenants(world: ConsoleHouse) -> None:
    house = world.house
    mine = await house.start(key=ADMIN, tenant="third")
    other = await house.start(key=ADMIN, tenant="fourth")
    runner = await world.browser(await house.make_key("runner", "third"))
    await runner.get("/console/runs")
    answer = await runner.post("/console/runs", verb="cancel", run=f"fourth/{other}")
    assert answer.status == 404
    assert (await runner.post("/console/runs", verb="delete", run=f"third/{mine}")).status == 422
    assert (await runner.post("/console/runs", verb="cancel")).status == 422
    browser = await world.browser(ADMIN)
    await browser.get("/console/runs")
    pairs = [("run", f"third/{mine}"), ("run", f"fourth/{other}"), ("run", f"third/{other}")]
    answer = await browser.send("/console/runs?status=active", [("verb", "cancel"), *pairs])
    done = "/console/runs?status=active&did=runs_cancelled&count=2&of=3"
    assert (answer.status, answer.headers["location"]) == (303, done)
    assert b"2 of 3 runs were cancelled." in (await browser.get(done)).body


@in_one_loop
async def test_half_a_login_form_takes_nothing_from_others(world: ConsoleHouse) -> None:
    house = world.house
    state = house.app.state
    half = [
        asyncio.create_task(house.ask("POST", path, headers=SAME_SITE, parts=[b"key=", Stuck]))
        for path in ("/console/login", "/console/theme")
        for _ in range(100)
    ]
    async with asyncio.timeout(5):
        # Without a session no form of a page is read at all, and of the others the newest are.
        await asyncio.wait(half, return_when=asyncio.FIRST_COMPLETED)
        assert (await (await world.browser()).post("/console/login", key=ADMIN)).status == 303
        for path in ("/console/logout", "/console/keys"):
            answer = await house.ask("POST", path, headers=SAME_SITE, parts=[b"a=", Stuck])
            assert answer.status == 303, path
    ended = [each.result() for each in half if each.done()]
    assert {(each.status, each.headers.get("connection")) for each in ended} == {(503, "close")}
    # Callers without a key cause hundreds of these a second: no template is rendered for them.
    assert max(len(each.body) for each in ended) < 300
    assert state.load.requests <= 128
    large: list[bytes | type[Stuck]] = [b"key=" + b"k" * 40_000, Stuck]
    refused = await house.ask("POST", "/console/login", headers=SAME_SITE, parts=large)
    assert refused.status == 413
    for each in half:
        each.cancel()
    await asyncio.gather(*half, return_exceptions=True)
    assert state.load.requests == state.bodies.reading == 0


async def test_a_form_that_does_not_come_is_not_waited_for() -> None:
    async with opened_console(body_timeout_s=0.05) as console:
        parts: list[bytes | type[Stuck]] = [b"key=", Stuck]
        answer = await console.house.ask("POST", "/console/login", headers=SAME_SITE, parts=parts)
        assert answer.status == 503
