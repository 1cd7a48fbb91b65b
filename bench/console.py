"""The console: how long a page takes with much behind it, and what open consoles cost the server.

The store holds ten thousand active runs and a thousand tenants; one more tenant has a full inbox of
approvals, and a schedule with runs. Every page is fetched by itself, again and again. Then ten
viewers keep their streams open and fetch their pages again every second, as the console's script
does while something changes all the time.
"""

from __future__ import annotations

import http.client
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench.apart import percentile
from bench.filling import Stock, filled_file
from bench.pace import Pace
from bench.row import Row, below
from bench.serving import Site, embedded
from stanchion.console.pages import PAGES

__all__ = ["rows"]

STOCK: Final = Stock(finished=1_000, tenants=1_000, active=10_000)
STOCK_QUICK: Final = Stock(finished=100, tenants=20, active=50)
TIMES, TIMES_QUICK = 50, 3
VIEWERS: Final = 10
WATCHED_S, WATCHED_S_QUICK = 20.0, 2.0
WATCHED: Final = ("/console", "/console/runs", "/console/admission")
INBOX: Final = "inbox"
"""The tenant whose runs wait for a person."""
ASKS: Final = {"steps": {"ask": {"approval": {"message": "May it go out?"}}}}
INPUT: Final = {"text": "x" * 10_000}
APPROVALS, TRIGGERED = 25, 20


def rows(pace: Pace) -> list[Row]:
    """Measure both."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        file = Path(directory) / "store.db"
        filled_file(STOCK_QUICK if pace.is_quick else STOCK, file)
        with embedded(file) as site:
            _ask(site)
            return [_pages(site, pace), _viewers(site, pace)]


def _ask(site: Site) -> None:
    """Fill the first page of the inbox and the list of a schedule's runs."""
    site.prepare({"ask": ASKS}, tenant=INBOX)
    for _ in range(APPROVALS):
        site.call("POST", "/v1/workflows/ask/runs", {"input": INPUT}, INBOX)
    schedule = {"workflow_id": "ask", "every_s": 86_400, "input": INPUT}
    site.call("PUT", "/v1/schedules/daily", schedule, INBOX)
    for _ in range(TRIGGERED):
        site.call("POST", "/v1/schedules/daily/trigger", {}, INBOX)


def _pages(site: Site, pace: Pace) -> Row:
    """The slowest page, by its 95th percentile."""
    times_ms: dict[str, list[float]] = {}
    paths = [page.path for page in PAGES if "{" not in page.path and page.nav is not None]
    with closing(_connection(site)) as connection:
        (run,) = site.call("GET", "/v1/runs?limit=1", tenant="*")["runs"]
        paths.append(f"/console/runs/{run['run_id']}?tenant={run['tenant']}")
        paths.append(f"/console/schedules/daily?tenant={INBOX}")
        for path in paths:
            _fetch(connection, path)  # the first fetch compiles the template
            for _ in range(TIMES_QUICK if pace.is_quick else TIMES):
                began_s = time.perf_counter()
                _fetch(connection, path)
                times_ms.setdefault(path, []).append((time.perf_counter() - began_s) * 1000)
    worst = {path: percentile(sorted(taken), 0.95) for path, taken in times_ms.items()}
    slowest = max(worst, key=lambda path: worst[path])
    name = "page of the console, 10,000 active runs, 1,000 tenants"
    note = f"p95 of {slowest}, the slowest of {len(worst)} pages"
    return below(name, worst[slowest], "ms", 50, note)


def _viewers(site: Site, pace: Pace) -> Row:
    """The processor time of ten viewers' streams and refreshes, as a share of one core.

    What the server uses while no console is open is measured first, and not counted.
    """
    watched_s = WATCHED_S_QUICK if pace.is_quick else WATCHED_S
    before_s = site.cpu_s
    time.sleep(watched_s / 2)
    idle = (site.cpu_s - before_s) / (watched_s / 2) * 100
    until_s = time.monotonic() + watched_s
    before_s = site.cpu_s
    viewers = [
        threading.Thread(target=_watch, args=(site, WATCHED[place % len(WATCHED)], until_s))
        for place in range(VIEWERS)
    ]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    share = (site.cpu_s - before_s) / watched_s * 100 - idle
    note = f"each fetches its page every second; {idle:.1f} % without a console"
    return below("ten open consoles", share, "% of a core", 5, note)


def _watch(site: Site, path: str, until_s: float) -> None:
    """Keep a stream open, and fetch a page again every second."""
    with closing(_connection(site)) as stream, closing(_connection(site)) as connection:
        stream.request("GET", "/console/live")
        answer = stream.getresponse()
        assert answer.status == http.HTTPStatus.OK
        while time.monotonic() < until_s:
            _fetch(connection, path, {"HX-Request": "true"})
            time.sleep(1)


def _connection(site: Site) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", urlsplit(site.url).port, timeout=30)


def _fetch(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str] | None = None
) -> None:
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == http.HTTPStatus.OK, (path, answer.status, body[:500])
