"""Growth: the throughput does not depend on the amount of data in the store.

Two servers run at the same time: one with a small store, and one whose store holds a million
finished runs, or ten thousand tenants, or ten thousand active runs. Both are loaded alternately,
with starts and with whole runs of three steps, and adjacent rounds are compared. The started
workflow ends at once, so that the number of active runs does not change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TypeAlias

from bench.callers import Errand, run_through
from bench.filling import Stock, filled_file, filled_namespace
from bench.http import BODY
from bench.loadgen import Load, send
from bench.pace import Pace
from bench.row import Row, at_least, at_most, spread
from bench.serving import Site, backends, distributed, embedded, working

__all__ = ["BEGINS", "rows"]

BEGINS = "growth on "
"""The prefix of the row names."""
FLOOR = 0.9
SMALL = Stock()
WARM_S = 60.0
_ALL = 10_000_000
Sides: TypeAlias = tuple[tuple[Site, Stock], tuple[Site, Stock]]


def rows(pace: Pace) -> list[Row]:
    """Measure each store and each kind of growth, with starts and whole runs."""
    found = []
    for store, opened, finished in (
        ("SQLite", _on_sqlite, 1_000_000),
        ("Valkey", _on_valkey, 100_000),
    ):
        for what, large in _larger(finished, pace).items():
            with opened(large) as sides:
                name = f"{BEGINS}{store}, {what}"
                if large.finished > SMALL.finished:
                    found += _pages(name, sides, pace)
                found += _compare(name, sides, pace)
    return found


def _larger(finished: int, pace: Pace) -> dict[str, Stock]:
    tenants = active = 10_000
    if pace.is_quick:
        finished, tenants, active = 5_000, 200, 500
    return {
        f"{finished:,} finished runs": Stock(finished=finished),
        f"{tenants:,} tenants": Stock(tenants=tenants),
        f"{active:,} active runs": Stock(active=active),
    }


@contextmanager
def _on_sqlite(large: Stock) -> Iterator[Sides]:
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(made))

        def side(name: str, stock: Stock) -> tuple[Site, Stock]:
            filled_file(stock, directory / f"{name}.db")
            return stack.enter_context(embedded(directory / f"{name}.db")), stock

        yield side("large", large), side("small", SMALL)


@contextmanager
def _on_valkey(large: Stock) -> Iterator[Sides]:
    # One Valkey for both, so that both namespaces see the same noise.
    with backends() as behind, ExitStack() as stack:

        def side(name: str, stock: Stock) -> tuple[Site, Stock]:
            filled_namespace(stock, behind.store, name)
            return stack.enter_context(distributed(1, behind, namespace=name)), stock

        yield side("large", large), side("small", SMALL)


_FILTERS = {
    "a page by label": ("label=team:red&status=succeeded&limit=5", None),
    "a page by status and workflow": ("status=succeeded&workflow_id=one-job&limit=50", None),
    "a page of all tenants": ("label=team:red&limit=5", "*"),
}
"""Filtered pages that both stores can fill: the query, and the tenant."""
PAGE_CEILING = 1.3
_PAGES_PER_S = 20.0
"""Slow enough for the tenant's share of processor time: the latency counts."""


def _pages(name: str, sides: Sides, pace: Pace) -> list[Row]:
    """How much longer a filtered page takes with many runs."""
    found = []
    for what, (query, tenant) in _FILTERS.items():

        def page_ms(site: Site, query: str = query, tenant: str | None = tenant) -> float:
            load = Load(
                url=f"{site.url}/v1/runs?{query}",
                method="GET",
                body="",
                headers={"X-Stanchion-Tenant": tenant or "tenant-0"},
                connections=2,
                seconds=pace.seconds,
                rate_per_s=_PAGES_PER_S,
            )
            return median(send(load).only("200").latencies_ms)

        pairs = [
            tuple(page_ms(site) for site, _ in sides) for _ in range(1 + max(1, pace.rounds // 2))
        ][1:]  # the first round reads what is not in memory yet
        large, small = (median(side) for side in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        note = f"{large:.2f} ms against {small:.2f} ms"
        found.append(at_most(f"{name}: {what}", ratio, "×", PAGE_CEILING, note))
    return found


def _compare(name: str, sides: Sides, pace: Pace) -> list[Row]:
    starts = _ratio(f"{name}: starts", _in_turns(_starts_per_s, sides, pace))
    with ExitStack() as stack:
        for site, _ in sides:
            stack.enter_context(working(site.url))
        runs = _ratio(f"{name}: runs", _in_turns(_runs_per_s, sides, pace))
    return [starts, runs]


def _in_turns(
    per_s: Callable[[Site, Stock, float, int], float], sides: Sides, pace: Pace
) -> list[tuple[float, float]]:
    for site, stock in sides:
        # Start once per tenant: the first start reads the workflow, which is not measured here.
        is_many = stock.tenants > 1
        per_s(
            site, stock, WARM_S if is_many else pace.seconds / 3, stock.tenants if is_many else _ALL
        )
    pairs = []
    for number in range(pace.rounds):
        # Alternate which server is first, so that order effects cancel out.
        turns = sides if number % 2 else (sides[1], sides[0])
        first, second = (per_s(*side, pace.seconds, _ALL) for side in turns)
        pairs.append((first, second) if number % 2 else (second, first))
    return pairs


def _starts_per_s(site: Site, stock: Stock, seconds: float, at_most: int) -> float:
    load = Load(
        url=f"{site.url}/v1/workflows/nothing/runs",
        body=BODY,
        seconds=seconds,
        requests_max=at_most,
        tenants=stock.tenants,
    )
    return send(load).only("200").per_s


def _runs_per_s(site: Site, stock: Stock, seconds: float, at_most: int) -> float:
    errand = Errand(urls=site.urls, seconds=seconds, runs_max=at_most, tenants=stock.tenants)
    return run_through(errand).per_s


def _ratio(label: str, pairs: list[tuple[float, float]]) -> Row:
    ratios = [large / small for large, small in pairs]
    large, small = (median(side) for side in zip(*pairs, strict=True))
    note = f"{large:,.0f}/s against {small:,.0f}/s; {spread(ratios)}"
    return at_least(label, median(ratios), "×", FLOOR, note, pair=(large, small))
