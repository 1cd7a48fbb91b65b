"""Journeys through the console in a real browser, on two replicas with a lock store of their own.

Each test has a tenant of its own, so that they may run in any order. The one that cuts the lock
store puts it back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from stanchion.console.pages import PAGES
from tests.acceptance.stack import ADMIN_KEY
from tests.console import browser as found
from tests.console.scene import RESEARCH, WAIT, Scene, running_scene, sign_in, wait_for

pytestmark = [
    pytest.mark.alone,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        found.find() is None, reason="THERE IS NO BROWSER: the browser tests did not run"
    ),
]

Tab = Any
"""Playwright's page; "page" is a word of the console."""
WITHIN_MS: Final = 10_000


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with running_scene() as scene:
        scene.workflow("research", RESEARCH)
        # Replicas report their figures every few seconds: by the time of its test, they have.
        scene.tenant("full", 2)
        scene.workflow("wait", WAIT, "full")
        scene.full = [scene.start("wait", "full") for _ in range(2)]
        yield scene


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with found.open_browser() as browser:
        yield browser


class Visit:
    """A browser window: its tabs share cookies. What a page complains about is kept."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:  # noqa: ANN401 - Playwright's
        self.url = url
        self.context = browser.new_context(base_url=url, **options)
        self.context.set_default_timeout(WITHIN_MS)
        self.complaints: list[str] = []

    def tab(self, path: str) -> Tab:
        """A new tab at a page of the console."""
        tab = self.context.new_page()
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._listen)
        tab.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        tab.goto(f"/console{path}")
        return tab

    def _listen(self, message: Any) -> None:  # noqa: ANN401 - Playwright's
        # A page that is refused on purpose is a failed resource to the browser.
        if message.type == "error" and "status of 4" not in message.text:
            self.complaints.append(message.text)

    def sign_in(self, key: str = ADMIN_KEY) -> None:
        """Get a session without the form: one test uses that, and it takes its time."""
        sign_in(self.context, self.url, key)

    def close(self) -> None:
        self.context.close()


class Visits:
    def __init__(self, browser: Any, scene: Scene) -> None:  # noqa: ANN401 - Playwright's
        self._browser, self._scene = browser, scene
        self.open: list[Visit] = []

    def begin(self, *, key: str | None = ADMIN_KEY, url: str | None = None, **more: Any) -> Visit:  # noqa: ANN401 - Playwright's
        visit = Visit(self._browser, url or self._scene.url, **more)
        self.open.append(visit)
        if key is not None:
            visit.sign_in(key)
        return visit


@pytest.fixture
def visits(browser: Any, scene: Scene) -> Iterator[Visits]:  # noqa: ANN401 - Playwright's
    visits = Visits(browser, scene)
    yield visits
    for visit in visits.open:
        visit.close()
    assert [each for visit in visits.open for each in visit.complaints] == []


def shows(tab: Tab, text: str, *, within_ms: int = WITHIN_MS) -> None:
    """Wait until the page shows the text, without loading it again."""
    tab.get_by_text(text).first.wait_for(timeout=within_ms)


def confirm(tab: Tab) -> None:
    """Say yes in the console's own dialog."""
    tab.click("#confirm-yes")


# ── Journeys ─────────────────────────────────────────────────────────────────────────────────────


def test_first_visit_start_watch_approve_done(scene: Scene, visits: Visits) -> None:
    visit = visits.begin(key=None)
    tab = visit.tab("/workflows/research?tenant=default")
    tab.fill("input[name=key]", ADMIN_KEY)
    tab.click("main button")
    tab.wait_for_url("**/console/workflows/research?tenant=default")
    # What was typed is kept beside what is wrong with it.
    tab.fill("[name='input.question']", "What holds a rope?")
    tab.fill("[name='input.depth']", "nine")
    tab.check("[name='input.review']")
    tab.click("text=Start the run")
    shows(tab, "must be an integer")
    assert tab.input_value("[name='input.question']") == "What holds a rope?"
    assert tab.input_value("[name='input.depth']") == "nine"
    assert tab.is_checked("[name='input.review']")
    tab.fill("[name='input.depth']", "2")
    tab.click("text=Start the run")
    tab.wait_for_url("**/console/runs/*")
    # The worker goes on, and the page follows by itself.
    scene.finish(scene.lease("agent.plan"), {"queries": ["materials", "history"]})
    jobs = scene.lease("agent.search")
    scene.finish(jobs[:1], {"found": 3})
    scene.finish(jobs[1:], error="the search engine did not answer")
    scene.finish(scene.lease("agent.search"), {"found": 9})
    shows(tab, "May the report on “What holds a rope?” go out?")
    assert "2 attempts" in tab.inner_text(".gantt")
    tab.click("button:text-is('Approve')")
    scene.finish(scene.lease("agent.write"), "a report")
    scene.finish(scene.lease("agent.check"), {"ok": True})
    tab.wait_for_selector(".run-facts .status.succeeded")
    assert tab.locator(".step-graph .st-succeeded").count() == 5


def test_a_full_tenant_is_seen_and_its_cap_raised(scene: Scene, visits: Visits) -> None:
    refused = "max_concurrent_runs_reached"
    assert scene.start("wait", "full", status=429) == refused
    tab = visits.begin().tab("/admission")
    row = tab.locator("#tenant-full")
    row.locator(".slots.full").wait_for()
    links = row.locator(".slots a").evaluate_all("all => all.map(each => each.href)")
    assert {link.split("?")[0].rpartition("/")[2] for link in links} == set(scene.full)
    row.locator("input[name=limit]").fill("3")
    row.get_by_role("button", name="Set").click()
    wait_for("the cap", lambda: row.locator("input[name=limit]").input_value() == "3")
    tab.wait_for_load_state()
    assert scene.start("wait", "full") not in {*scene.full, refused}


def test_a_cut_lock_store_is_on_every_open_page_in_time(scene: Scene, visits: Visits) -> None:
    first, second = visits.begin(), visits.begin(url=scene.other_url)
    tabs = [first.tab("/runs"), first.tab("/leases"), second.tab("/policies")]
    assert not any(tab.locator(".alarm").count() for tab in tabs)
    scene.stack.locks.pause()
    try:
        cut = time.monotonic()
        for tab in tabs:
            shows(tab, "The lock store does not answer", within_ms=6_000)
        assert time.monotonic() - cut < 3.0
    finally:
        scene.stack.locks.resume()
    back = time.monotonic()
    for tab in tabs:
        tab.locator(".alarm").first.wait_for(state="detached")
    assert time.monotonic() - back < 5.0


def test_a_lock_is_released_by_force_with_a_reason(scene: Scene, visits: Visits) -> None:
    scene.ask("POST", "/v1/admin/leases", {"name": "run/stuck", "ttl_s": 600})
    tab = visits.begin().tab("/leases")
    tab.locator("tr", has_text="stuck").get_by_role("link", name="Release").click()
    shows(tab, "What is at stake")
    tab.fill("input[name=reason]", "its replica is gone")
    tab.click("text=Release the lock")
    shows(tab, "The lock was released")
    names = [row["name"] for row in scene.ask("GET", "/v1/admin/leases")["leases"]]
    assert "run/stuck" not in names
    tab.goto("/console/audit?action=lease.release")
    tab.click("main summary")
    assert "its replica is gone" in tab.inner_text("main table")


def test_a_policy_changed_on_one_replica_is_seen_on_the_other(scene: Scene, visits: Visits) -> None:
    there = visits.begin(url=scene.other_url).tab("/policies")
    assert there.locator(".pol.fail_closed").count() == 2
    here = visits.begin().tab("/policies")
    try:
        here.select_option("[name='standard.on_lock_error']", "fail_closed")
        here.click("text=Show what changes")
        assert "waits until the lock store answers again" in here.inner_text(".changes")
        here.click("text=Put in force")
        shows(here, "The policies were changed")
        wait_for("the change", lambda: there.locator(".pol.fail_closed").count() == 3)
    finally:
        scene.ask("PATCH", "/v1/admin/settings", {"policies": None})


def test_many_runs_are_counted_then_cancelled_at_once(scene: Scene, visits: Visits) -> None:
    scene.workflow("wait", WAIT, "bulk")
    runs = [scene.start("wait", "bulk", labels={"stage": "test"}) for _ in range(4)]
    kept = scene.start("wait", "bulk", labels={"stage": "live"})
    tab = visits.begin().tab("/bulk?tenant=bulk")
    tab.select_option("[name=action]", "cancel")
    tab.fill("[name=label]", "stage:test")
    tab.click("text=Count first")
    shows(tab, "This would cancel 4 runs")
    tab.click("main .danger")
    confirm(tab)
    tab.wait_for_selector(".status.finished")
    assert tab.locator(".figure", has_text="Done").locator("dd").inner_text() == "4"
    assert {scene.run(run, "bulk")["status"] for run in runs} == {"cancelled"}
    assert scene.run(kept, "bulk")["status"] == "waiting"


def test_what_one_tab_changes_another_one_shows(scene: Scene, visits: Visits) -> None:
    scene.workflow("wait", WAIT, "tabs")
    run = scene.start("wait", "tabs")
    visit = visits.begin()
    watching = visit.tab("/runs?tenant=tabs")
    watching.wait_for_selector(".status.waiting")
    acting = visit.tab(f"/runs/{run}?tenant=tabs")
    acting.click("text=Cancel the run")
    confirm(acting)
    acting.wait_for_selector(".run-facts .status.cancelled")
    watching.wait_for_selector(".status.cancelled")


HOSTILE: Final = '<img src=x onerror="window.pwned=1">\'"><script>window.pwned=1</script>\u202e'


def test_hostile_text_is_only_text_on_every_page(scene: Scene, visits: Visits) -> None:
    scene.workflow(
        "hostile",
        {
            "steps": {
                "work": {"topic": "hostile.work", "input": {"x": "${input.x}"}},
                "ask": {"approval": {"message": "${input.x}"}, "needs": ["work"]},
            }
        },
        "evil",
    )
    worker = "<script>window.pwned=1</script>"
    given = {"x": HOSTILE, HOSTILE: 1}
    run = scene.start("hostile", "evil", input=given, labels={"a": worker})
    failed = scene.start("hostile", "evil", input=given, labels={"a": worker})
    jobs = scene.lease("hostile.work", worker, "evil")
    by_run = {job["run_id"]: job for job in jobs}
    scene.finish([by_run[run]], {HOSTILE: HOSTILE}, worker=worker, tenant="evil")
    scene.finish([by_run[failed]], error=HOSTILE, worker=worker, tenant="evil")
    wait_for("the question", lambda: scene.run(run, "evil")["status"] == "waiting")
    key = {"role": "runner", "tenant": "evil", "note": HOSTILE, "name": "a<b>"}
    scene.ask("POST", "/v1/admin/keys", key, status=None)
    visit = visits.begin()
    tab = visit.tab(f"/runs/{run}?tenant=evil")
    assert "onerror" in tab.inner_text("main"), "the text is there, as text"
    for path in (
        f"/runs/{failed}?tenant=evil",
        *(page.removeprefix("/console") + "?tenant=evil" for page in plain_pages()),
        f"/search?q={run}&tenant=evil",
    ):
        tab.goto(f"/console{path}")
        assert tab.evaluate("window.pwned") is None, path
        assert "\u202e" not in tab.content(), path


def test_without_a_session_or_the_role_there_is_nothing_to_see(
    scene: Scene, visits: Visits
) -> None:
    stranger = visits.begin(key=None).tab("/leases")
    assert "/console/login?next=" in stranger.url
    assert "Leases" not in stranger.inner_text("body")
    visit = visits.begin(key=scene.key("runner", "default"))
    tab = visit.tab("/leases")
    assert tab.locator("nav.side a", has_text="Leases").count() == 0
    assert tab.locator("table").count() == 0
    tab.goto("/console/runs")
    tab.click("text=Log out")
    tab.goto("/console/runs")
    assert "/console/login" in tab.url


def test_the_keyboard_goes_everywhere(scene: Scene, visits: Visits) -> None:
    scene.workflow("wait", WAIT, "keyboard")
    run = scene.start("wait", "keyboard")
    tab = visits.begin().tab("?tenant=keyboard")
    tab.keyboard.press("g")
    tab.keyboard.press("r")
    tab.wait_for_url("**/console/runs?tenant=keyboard")
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**/console/runs/{run}**")
    tab.keyboard.press("?")
    tab.wait_for_selector("#keys[open]")
    tab.keyboard.press("Escape")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "q"


def test_a_chart_is_read_with_pointer_and_keys(visits: Visits) -> None:
    tab = visits.begin().tab("")
    # A sample is taken every five seconds while a console is open.
    tab.locator("#plot-starts svg").wait_for(timeout=15_000)
    plot, words = tab.locator("#plot-starts"), tab.locator("#plot-starts output")
    assert words.inner_text().startswith("now: admitted ")
    plot.locator("svg").hover()
    assert plot.locator(".cursor").count() == 1
    assert "admitted " in words.inner_text()
    assert not words.inner_text().startswith("now")
    tab.mouse.move(0, 0)
    wait_for("the end", lambda: words.inner_text().startswith("now"))
    assert plot.locator(".cursor").count() == 0
    plot.focus()
    tab.keyboard.press("ArrowLeft")
    assert plot.locator(".cursor").count() == 1
    assert words.get_attribute("aria-live") == "polite"
    plot.get_by_role("link", name="hide refused").click()
    tab.wait_for_url("**/console?hide=refused")
    assert tab.locator("#plot-starts").get_attribute("data-pick") == "2 4"


def test_the_error_of_a_run_is_in_sight_on_a_small_screen(scene: Scene, visits: Visits) -> None:
    tenant, workflow = "a-tenant-with-a-rather-long-name", "summarise-the-letters-of-the-week"
    scene.workflow(workflow, {"steps": {"work": {"topic": "wide.work"}}}, tenant)
    labels = {f"label-number-{number}": "with-a-value-of-some-length" for number in range(4)}
    run = scene.start(workflow, tenant, labels=labels)
    error = "TimeoutError: the model did not answer within 60 s"
    scene.finish(scene.lease("wide.work", tenant=tenant), error=error, tenant=tenant)
    wait_for("the failure", lambda: scene.run(run, tenant)["status"] == "failed")
    tab = visits.begin(viewport={"width": 1280, "height": 800}).tab("/runs")
    row = tab.locator(f"#row-{run}")
    assert row.get_by_text(error).bounding_box()["x"] < 1150
    assert tab.evaluate(_FITS)


def test_long_names_leave_the_other_columns_in_sight(scene: Scene, visits: Visits) -> None:
    tenant, name = f"customer-{'x' * 55}", "n" * 64
    scene.tenant(tenant, 1)
    scene.workflow(name, WAIT, tenant)
    scene.start(name, tenant)
    nightly = {"workflow_id": name, "cron": "0 3 * * 1-5", "timezone": "America/Indiana/Vincennes"}
    scene.ask("PUT", f"/v1/schedules/{name}", nightly, tenant=tenant)
    key = {"role": "runner", "tenant": tenant, "name": "The reports of the night shift"}
    scene.ask("POST", "/v1/admin/keys", key)
    scene.ask("PUT", f"/v1/admin/limits/{name}", {"topics": ["long.*"], "max_running": 1})
    tab = visits.begin(viewport={"width": 1280, "height": 800}).tab("/")
    cut = []
    for path, long in (
        ("/admission", tenant),
        (f"/schedules?tenant={tenant}", name),
        ("/keys", tenant),
        ("/limits", name),
    ):
        tab.goto(f"/console{path}")
        shows(tab, long)
        cut += [path] if not tab.evaluate(_FITS) else []
    scene.ask("DELETE", f"/v1/admin/limits/{name}")
    assert cut == []


_FITS: Final = "(each => each.scrollWidth <= each.clientWidth)(document.querySelector('.scroll'))"


def test_the_lines_of_an_error_are_kept_and_fit_the_page(scene: Scene, visits: Visits) -> None:
    scene.workflow("traced", {"steps": {"work": {"topic": "traced.work"}}})
    run = scene.start("traced")
    error = f"Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: {'x' * 600}"
    scene.finish(scene.lease("traced.work"), error=error)
    wait_for("the failure", lambda: scene.run(run)["status"] == "failed")
    tab = visits.begin(viewport={"width": 1280, "height": 800}).tab(f"/runs/{run}?tenant=default")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280
    shown = tab.locator(".note.bad .message").inner_text().split("\n")
    assert [line[:20] for line in shown] == [line[:20] for line in error.split("\n")]


# ── Every page ───────────────────────────────────────────────────────────────────────────────────


def plain_pages() -> list[str]:
    """The pages that are about nothing in particular."""
    return [page.path for page in PAGES if "{" not in page.path]


def test_axe_finds_nothing_and_a_phone_is_wide_enough(scene: Scene, visits: Visits) -> None:
    scene.tenant("axe", 3)
    scene.workflow("research", RESEARCH, "axe")
    given = {"question": "Why?", "depth": 1, "review": True}
    run = scene.start("research", "axe", input=given, labels={"team": "red"})
    scene.finish(scene.lease("agent.plan", tenant="axe"), {"queries": ["a"]}, tenant="axe")
    scene.finish(scene.lease("agent.search", tenant="axe"), {"found": 1}, tenant="axe")
    wait_for("the question", lambda: scene.run(run, "axe")["status"] == "waiting")
    # axe is a script of ours that the policy of the pages would refuse.
    tab = visits.begin(bypass_csp=True).tab("?tenant=axe")
    wrong = _axe(visits.begin(key=None, bypass_csp=True).tab("/login"), "/login")
    shared = {"steps": {"only": {"topic": "shared.work"}}}
    scene.ask("PUT", "/v1/shared/workflows/common", shared)
    bulk = {"action": "cancel", "filter": {"label": ["team:none"]}}
    names = {
        "run_id": run,
        "step_id": "search",
        "workflow_id": "research",
        "bulk_id": scene.ask("POST", "/v1/bulk", bulk, tenant="axe")["bulk_id"],
        "schedule_id": "hourly",
    }
    hourly = {"workflow_id": "research", "every_s": 3_600, "input": given}
    scene.ask("PUT", "/v1/schedules/hourly", hourly, tenant="axe")
    scene.ask("POST", "/v1/schedules/hourly/trigger", {}, tenant="axe")
    paths = [
        page.path.replace("shared/{workflow_id}", "shared/common").format(**names) for page in PAGES
    ]
    for path in ["", *paths]:
        tab.goto(f"{path}?tenant=axe" if path else "/console")
        if not path:
            tab.locator(".plot svg").first.wait_for(timeout=15_000)
        wrong += _axe(tab, path or "/console")
        tab.set_viewport_size({"width": PHONE, "height": 800})
        width = tab.evaluate("document.documentElement.scrollWidth")
        wrong += [f"{path} is {width} px wide on a phone"] if width > PHONE else []
        tab.set_viewport_size({"width": 1280, "height": 800})
    assert wrong == []


PHONE = 320
"""A small phone; also what is left of a screen of 1280 px at 400 % zoom."""


def _axe(tab: Tab, path: str) -> list[str]:
    """What axe finds in light; in dark only colours can differ.

    The frame is the same on all pages, so that of the overview stands for it.
    """
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - as in browser.py

    tab.emulate_media(color_scheme="light")
    part = "html" if path in {"/console", "/login"} else "#main"
    only_wrong = {"resultTypes": ["violations"]}
    light = Axe().run(tab, part, only_wrong).response["violations"]
    tab.emulate_media(color_scheme="dark")
    colours = {**only_wrong, "runOnly": {"type": "rule", "values": ["color-contrast"]}}
    dark = tab.evaluate(
        "async ([part, options]) => (await axe.run(part, options)).violations", [part, colours]
    )
    return [
        f"{path} in {theme}: {each['id']}: {[node['target'] for node in each['nodes']][:3]}"
        for theme, found in (("light", light), ("dark", dark))
        for each in found
    ]
