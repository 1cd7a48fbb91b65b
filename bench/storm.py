"""A thousand concurrent callers of a tenant with a cap of two: the time until all have a response.

``atomic`` decides in one store operation; under ``lock`` callers first poll a lock every 10 ms.
Both are measured alternately, each time with a new tenant. Then refusals are timed: of a thousand
callers that each send one start at the same moment, over new and over kept connections, without and
with an idempotency key each; and, without a promise, of a thousand callers that never pause, as no
client that honours ``Retry-After`` would. The baseline is a bare endpoint with a thousand
concurrent callers on the same machine.

The same storm is then sent to two servers in turns: ours, and one that writes no receipts. The
processor time that the server spends on an answer is compared, as it depends less on what else the
machine does than the time that passes.
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median

from bench.http import BODY, PATH
from bench.loadgen import Load, Seen, send
from bench.pace import Pace
from bench.row import Row, at_most, below, recorded, spread
from bench.serving import Site, backends, distributed, echoing, embedded
from bench.workflows import ONE_JOB
from stanchion.services.receipts import EVERY_S as RECEIPTS_EVERY_S

__all__ = ["rows"]

CALLERS, CAP = 1_000, 2
STORM_S = 2.0
RECEIPTS_COST_MAX = 1.05
WITHOUT_RECEIPTS = (
    "-c",
    (
        "import stanchion.cli, stanchion.gateway.endpoint as endpoint;"
        " endpoint.note_refusal = lambda *_, **__: None; stanchion.cli.main()"
    ),
)
"""A server whose refusals leave no receipt."""
LOCKED = {"strategy": "lock", "lock_retry": {"kind": "fixed", "delay_ms": 10, "jitter_ms": 0}}


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    with echoing() as echo:
        with embedded() as site:
            on_sqlite = [
                *_all_at_once("SQLite", site, pace),
                *_refusals("SQLite", site, echo, pace),
            ]
        with embedded() as site, embedded(program=WITHOUT_RECEIPTS) as without:
            on_sqlite.append(_receipts("SQLite", site, without, pace))
        with distributed() as site:
            on_redis = [
                *_all_at_once("Valkey", site, pace),
                *_refusals("Valkey", site, echo, pace),
            ]
        with (
            backends() as behind,
            distributed(behind=behind) as site,
            distributed(behind=behind, program=WITHOUT_RECEIPTS) as without,
        ):
            on_redis.append(_receipts("Valkey", site, without, pace))
    return [*on_sqlite, *on_redis]


def _all_at_once(name: str, site: Site, pace: Pace) -> list[Row]:
    pairs: list[tuple[float, float]] = []
    answers: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for number in range(pace.rounds):
        atomic = _burst(site, f"atomic-{number}")
        locked = _burst(site, f"locked-{number}", LOCKED)
        pairs.append((atomic.seconds, locked.seconds))
        for counted, seen in zip(answers, (atomic, locked), strict=True):
            counted.update(seen.statuses)
    ratios = [atomic / locked for atomic, locked in pairs]
    note = (
        f"{median(atomic for atomic, _ in pairs) * 1000:,.0f} ms ({_said(answers[0])}) against"
        f" {median(locked for _, locked in pairs) * 1000:,.0f} ms ({_said(answers[1])});"
        f" {spread(ratios)}"
    )
    label = f"{CALLERS:,} callers at cap {CAP} on {name}: atomic against lock"
    return [at_most(label, median(ratios), "×", 0.1, note), _unanswered(name, answers[0])]


def _unanswered(name: str, answers: Counter[str]) -> Row:
    """The share of other responses: a fast "overloaded" is not a decision."""
    asked = sum(answers.values())
    decided = sum(count for status, count in answers.items() if status[:3] in {"200", "429"})
    label = f"{CALLERS:,} callers at cap {CAP} on {name}: answers other than 200 and 429"
    return at_most(label, (asked - decided) / asked, "part", 0, _said(answers))


def _burst(site: Site, tenant: str, admission: object = None) -> Seen:
    site.prepare({"one-job": ONE_JOB}, tenant=tenant)
    limits = {"max_concurrent_runs": CAP, "admission": admission}
    site.call("PUT", f"/v1/admin/tenants/{tenant}", limits)
    seen = send(_asking(site.url, tenant, seconds=30, requests_max=CALLERS))
    # Under the lock most callers time out: fewer than two may be admitted, never more.
    assert seen.statuses.get("200", 0) <= CAP, seen.statuses
    return seen


def _refusals(name: str, site: Site, echo: str, pace: Pace) -> list[Row]:
    site.prepare({"one-job": ONE_JOB}, tenant="full", cap=CAP)
    send(_asking(site.url, "full", requests_max=CAP))
    fresh, kept, keyed, bare, unending = [], [], [], [], []
    for _ in range(pace.rounds):
        fresh.append(send(_asking(site.url, "full", requests_max=CALLERS, fresh=True)))
        kept.append(send(_asking(site.url, "full", requests_max=CALLERS)))
        keyed.append(send(_asking(site.url, "full", requests_max=CALLERS, keys=True)))
        bare.append(send(_asking(echo, "full", requests_max=CALLERS)))
        unending.append(send(_asking(site.url, "full", seconds=pace.seconds)))
    label = f"p99 of a refusal on {name}, {CALLERS:,}"
    echoed = f"a bare echo {_p99(bare):.0f} ms"
    return [
        below(f"{label} new connections", _p99(fresh), "ms", 400, _noted(fresh)),
        below(f"{label} kept connections", _p99(kept), "ms", 150, f"{_noted(kept)}; {echoed}"),
        below(
            f"{label} kept connections with keys",
            _p99(keyed),
            "ms",
            150,
            f"{_noted(keyed)}; {echoed}",
        ),
        recorded(f"{label} callers without a pause", _p99(unending), "ms", _noted(unending)),
    ]


def _receipts(name: str, site: Site, without: Site, pace: Pace) -> Row:
    """What the receipts of a storm cost: processor time of the server for each answer."""
    for each in (site, without):
        each.prepare({"one-job": ONE_JOB}, tenant="full", cap=CAP)
        send(_asking(each.url, "full", requests_max=CALLERS))
    seconds = 1.0 if pace.is_quick else STORM_S
    pairs = []
    for number in range(pace.rounds * 2):
        # Alternate which server is first, so that order effects cancel out.
        turns = (site, without) if number % 2 else (without, site)
        costs = {each: _cost_us(each, seconds) for each in turns}
        pairs.append((costs[site], costs[without]))
    # The lowest of each side: what else the machine does only adds time.
    with_, bare = (min(side) for side in zip(*pairs, strict=True))
    ratios = spread([one / other for one, other in pairs])
    note = f"{with_:.0f} µs against {bare:.0f} µs an answer, the lowest of each; pairs {ratios}"
    label = f"a storm of {CALLERS:,} callers on {name}, with receipts against without"
    return at_most(label, with_ / bare, "×", RECEIPTS_COST_MAX, note)


def _cost_us(site: Site, seconds: float) -> float:
    before_s = site.cpu_s
    seen = send(_asking(site.url, "full", seconds=seconds))
    # The receipts of the last second are written now: they belong to the storm.
    time.sleep(RECEIPTS_EVERY_S + 0.2)
    return (site.cpu_s - before_s) / seen.requests * 1_000_000


def _asking(
    url: str,
    tenant: str,
    *,
    seconds: float = 5.0,
    requests_max: int = 10_000_000,
    fresh: bool = False,
    keys: bool = False,
) -> Load:
    return Load(
        url=url + PATH,
        body=BODY,
        headers={"x-stanchion-tenant": tenant},
        connections=CALLERS,
        seconds=seconds,
        requests_max=requests_max,
        fresh=fresh,
        keys=keys,
    )


def _p99(rounds: list[Seen]) -> float:
    return median(seen.percentile_ms(0.99) for seen in rounds)


def _noted(rounds: list[Seen]) -> str:
    answers: Counter[str] = Counter()
    for seen in rounds:
        answers.update(seen.statuses)
    times_ms = [seen.percentile_ms(0.99) for seen in rounds]
    per_s = median(seen.per_s for seen in rounds)
    return f"{per_s:,.0f}/s ({_said(answers)}); {spread(times_ms)}"


def _said(answers: Counter[str]) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in sorted(answers.items()))
