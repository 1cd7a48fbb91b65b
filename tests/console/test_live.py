"""Live updates: alarms on every page and stream, and one rendering for many viewers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stanchion.console.live import Shared
from stanchion.core.escalation import Announcement, Level, Order
from stanchion.core.lease import Moment
from stanchion.gateway.state import KEPT_MS
from stanchion.services.watchdog import CHECK_S
from tests.console.visits import ConsoleHouse, opened_console
from tests.gateway.asgi import Feed, opened
from tests.gateway.house import ADMIN
from tests.services.faulty_locks import Fault


async def test_a_failing_lock_store_is_on_every_page_and_stream_until_it_is_back() -> None:
    async with opened_console() as console:
        browser = await console.browser(ADMIN)
        cookie = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
        async with opened(console.house.app, "GET", "/console/live", b"", [cookie]) as feed:
            assert await _alarms(feed) == []
            console.house.locks.always(Fault.ERROR, "ping")
            (alarm,) = await _alarms(feed)
            assert alarm.startswith("The lock store does not answer: low and standard runs go on")
            assert alarm.endswith("high and critical runs wait (fail closed).")
            for path in ("/console", "/console/runs", "/console/nothing"):
                assert alarm.encode() in (await browser.get(path)).body, path
            console.house.locks.always(Fault.NONE, "ping")
            assert await _alarms(feed) == []
        assert b"lock store does not answer" not in (await browser.get("/console")).body


async def _alarms(feed: Feed) -> list[str]:
    """The alarms of the next event whose alarms differ from those of the one before."""
    text = (await feed.until(b"event: pulse")).decode()
    data = text.partition("data: ")[2].partition("\n")[0]
    found: list[str] = [each["text"] for each in msgspec.json.decode(data)["alarms"]]
    return found


async def test_pages_do_not_wait_for_a_lock_store_that_hangs() -> None:
    async with opened_console(has_keys=False) as console:
        browser = await console.browser()
        await browser.get("/console/runs")
        console.house.locks.always(Fault.HANG, "ping")
        await asyncio.sleep(KEPT_MS / 1000)  # the last result counts for so long
        async with asyncio.timeout(CHECK_S / 2):
            assert (await browser.get("/console/runs")).status == 200


async def test_a_failure_that_nobody_expects_is_over_with_the_page_that_met_it() -> None:
    async with opened_console() as world:
        browser = await world.browser(ADMIN)
        world.house.store.script("ping", Fault.BUG)
        assert (await browser.get("/console")).status == 500
        assert (await browser.get("/console")).status == 200


async def test_an_order_of_an_operator_is_on_every_page() -> None:
    async with opened_console() as console:
        browser = await console.browser(ADMIN)
        await browser.get("/console")
        for order, words in (
            ("force_open", b"escalation is off"),
            ("force_closed", b"forces standard and high to fail closed"),
            ("clear", b""),
        ):
            answer = await browser.post("/console/escalation/order", order=order)
            assert answer.status == 303
            page = (await browser.get("/console/runs")).body
            assert words in page
            assert (b'class="alarm bad"' in page) == bool(words)


@pytest.mark.parametrize(
    ("closes", "said"),
    [
        (["high"], ("high is forced to fail closed", "so high fails closed.")),
        (
            ["standard", "high"],
            ("standard and high are forced to fail closed", "so standard and high fail closed."),
        ),
    ],
)
async def test_one_closed_class_is_and_several_are(
    closes: list[str], said: tuple[str, str]
) -> None:
    async with opened_console() as console:
        house = console.house
        patch = {"escalation": {"closes": closes}}
        answer = await house.ask("PATCH", "/v1/admin/settings", patch, key=ADMIN)
        assert answer.status == 200, answer.body
        escalating = house.services.escalating
        await escalating.order(Order.FORCE_CLOSED, actor="kim")
        (forced,) = await console.console.pulse.alarms()
        await escalating.order(Order.CLEAR, actor="kim")
        escalating.hear(Announcement("other", Level.ESCALATED, house.services.clock.now()))
        (escalated,) = await console.console.pulse.alarms()
    assert (forced.brief, escalated.text.partition(", ")[2]) == said


async def test_a_stream_says_when_something_has_changed_for_its_viewer() -> None:
    async with opened_console() as console:
        key = await console.house.make_key("runner", "first")
        browser = await console.browser(key)
        cookie = ("Cookie", f"stanchion-session={browser.cookies['stanchion-session']}")
        async with opened(console.house.app, "GET", "/console/live", b"", [cookie]) as feed:
            before = await _change(feed)
            await console.house.start(key=ADMIN, tenant="second")
            await console.house.start(key=key)
            assert await _change(feed) != before
            assert console.console.pulse.version("first") == 1
            assert console.console.pulse.version(None) == 2


async def _change(feed: Feed) -> object:
    text = (await feed.until(b"event: pulse")).decode()
    return msgspec.json.decode(text.partition("data: ")[2].partition("\n")[0])["change"]


async def test_viewers_of_one_page_share_a_rendering_for_a_second() -> None:
    now, rendered = [0], []

    async def render() -> tuple[int, str]:
        await asyncio.sleep(0)
        rendered.append(now[0])
        return 200, f"page {len(rendered)}"

    shared = Shared(lambda: Moment(now[0]))
    pages = await asyncio.gather(*(shared.page("runs", render) for _ in range(10)))
    assert pages == [(200, "page 1")] * 10
    now[0] = 999
    assert await shared.page("runs", render) == (200, "page 1")
    assert await shared.page("other", render) == (200, "page 2")
    now[0] = 1_000
    assert await shared.page("runs", render) == (200, "page 3")


async def _refreshed(console: ConsoleHouse, key: str) -> tuple[str, bytes]:
    browser = await console.browser(key)
    await browser.get("/console/runs")
    answer = await browser.get("/console/escalation", [("HX-Request", "true")])
    assert answer.status == 200
    return browser.token, answer.body


async def test_a_shared_rendering_carries_each_viewers_own_form_token() -> None:
    async with opened_console() as console:
        keys = [await console.house.make_key("operator", "*") for _ in range(2)]
        (one, first), (two, second) = [await _refreshed(console, key) for key in keys]
        assert one != two
        assert one.encode() in first
        assert two.encode() in second
        assert first.replace(one.encode(), b"") == second.replace(two.encode(), b"")
        assert first.startswith(b'<div id="live">')
