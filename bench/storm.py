"""A thousand concurrent callers of a tenant with a cap of two: the time until all have a response.

``atomic`` decides in one store operation; under ``lock`` callers first poll a lock every 10 ms.
Both are measured alternately, each time with a new tenant. Then refusals are timed: of a thousand
callers that each send one start at the same moment, over new and over kept connections, without and
with an idempotency key each; and, without a promise, of a thousand callers that never pause, as no
client that honours ``Retry-After`` would. The baseline is a bare endpoint with a thousand
concurrent callers on the same machine.

Then a storm of a minute is sent to a server that leaves receipts in one second and none in the
next. The processor time that it spends on an answer is compared between such neighbours: two
servers, or two storms, differ by some percent whatever they do.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from bench.http import BODY, PATH
from bench.loadgen import Load, Seen, send
from bench.pace import Pace
from bench.row import Row, at_most, below, recorded, spread
from bench.serving import ROOT, Site, distributed, echoing, embedded
from bench.workflows import ONE_JOB
from stanchion.cli import main
from stanchion.gateway import endpoint
from stanchion.services.receipts import ReceiptService

__all__ = ["rows", "serve_in_turns"]

CALLERS, CAP = 1_000, 2
STORM_S = 61.0
RECEIPTS_COST_MAX = 1.05
LOCKED = {"strategy": "lock", "lock_retry": {"kind": "fixed", "delay_ms": 10, "jitter_ms": 0}}


def rows(pace: Pace) -> list[Row]:
    """Measure both durable stores."""
    with echoing() as echo:
        with embedded() as site:
            on_sqlite = [
                *_all_at_once("SQLite", site, pace),
                *_refusals("SQLite", site, echo, pace),
            ]
        with _taking_turns() as (program, turns), embedded(program=program) as site:
            on_sqlite.append(_receipts("SQLite", site, turns, pace))
        with distributed() as site:
            on_redis = [
                *_all_at_once("Valkey", site, pace),
                *_refusals("Valkey", site, echo, pace),
            ]
        with _taking_turns() as (program, turns), distributed(program=program) as site:
            on_redis.append(_receipts("Valkey", site, turns, pace))
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


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """The refusals between two writes of receipts, and what they cost."""

    has_receipts: bool
    refusals: int
    cpu_s: float

    @property
    def cost_us(self) -> float:
        return self.cpu_s / self.refusals * 1_000_000


@contextmanager
def _taking_turns() -> Iterator[tuple[Sequence[str], Path]]:
    """A server's program that keeps receipts in every other turn, and the file with its turns."""
    with tempfile.TemporaryDirectory(prefix="turns-") as directory:
        turns = Path(directory) / "turns"
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r});"
            f" from bench.storm import serve_in_turns; serve_in_turns({str(turns)!r})"
        )
        yield ("-c", code), turns


def serve_in_turns(path: str) -> None:
    """Serve; keep receipts in every other turn, and write a line for each turn."""
    note, write = endpoint.note_refusal, ReceiptService.write
    has_receipts, refusals, since_s = False, 0, time.process_time()

    def noted(*args: Any, **given: Any) -> None:  # noqa: ANN401 - passed on
        nonlocal refusals
        refusals += 1
        if has_receipts:
            note(*args, **given)

    async def written(service: ReceiptService) -> bool:
        nonlocal has_receipts, refusals, since_s
        # A turn ends with the write of its receipts, so that this is a part of their cost.
        is_written = await write(service)
        now_s = time.process_time()
        file.write(msgspec.json.encode(Turn(has_receipts, refusals, now_s - since_s)) + b"\n")
        has_receipts, refusals, since_s = not has_receipts, 0, now_s
        return is_written

    endpoint.note_refusal = noted
    ReceiptService.write = written  # type: ignore[method-assign, assignment]  # what is compared
    with Path(path).open("ab", buffering=0) as file:
        main()


def _receipts(name: str, site: Site, file: Path, pace: Pace) -> Row:
    """What the receipts of a storm cost: processor time of the server for each answer."""
    site.prepare({"one-job": ONE_JOB}, tenant="full", cap=CAP)
    send(_asking(site.url, "full", requests_max=CALLERS))
    before = len(file.read_bytes().splitlines())
    send(_asking(site.url, "full", seconds=9.0 if pace.is_quick else STORM_S))
    lines = file.read_bytes().splitlines()[before:]
    # The first turn and the last are cut by the storm's beginning and end.
    turns = [msgspec.json.decode(line, type=Turn) for line in lines][1:-1]
    if turns and not turns[0].has_receipts:
        turns = turns[1:]
    pairs = [
        (one.cost_us, other.cost_us) for one, other in zip(turns[::2], turns[1::2], strict=False)
    ]
    ratios = [one / other for one, other in pairs]
    with_, bare = (median(side) for side in zip(*pairs, strict=True))
    low, _, high = quantiles(ratios, n=4)
    note = (
        f"{with_:.0f} µs against {bare:.0f} µs an answer, the median of {len(pairs)} pairs of"
        f" neighbouring seconds, half of them {low:.2f}–{high:.2f}"
    )
    label = f"a storm of {CALLERS:,} callers on {name}, with receipts against without"
    return at_most(label, median(ratios), "×", RECEIPTS_COST_MAX, note)


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
