"""A quiet tenant beside hostile neighbours: what it does, and how long its requests take.

    python -m tests.acceptance.quiet sqlite [NAME …]

prints a table in Markdown: for each neighbour of the catalogue p50 and p99 of the quiet tenant
beside it, in brackets its p99 alone just before, how long ``/livez`` took at the worst, refusals,
and how much longer the servers took because other processes had the cores. A row during which the
host of a virtual machine took the cores away is measured again.

The quiet tenant's rounds (start, read, list, cancel) begin at fixed times, whether or not earlier
ones have been answered, so that a server that does not answer for a while delays all requests of
that while and not only one. A latency counts from the moment of sending: the caller's own delays
are not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from bench.connection import Answer, Connection, as_bytes, connect
from stanchion.drills.processes import starvation
from stanchion.services.outbox import POLL_S
from tests.acceptance.caller import calling
from tests.acceptance.neighbours import CATALOGUE, Spec, Statuses
from tests.acceptance.stack import ADMIN_KEY, Kind, Stack, running_stack
from tests.acceptance.workflows import HOLD
from tests.integration.program import Program, running_program

__all__ = ["Bound", "Quiet", "Seen", "Street", "hostile_stack", "street"]

ROUNDS_PER_S: Final = 40
_ROUNDS_PER_DELAY: Final = 4
DELAY_S: Final = 0.1
ANSWER_S_MAX: Final = 10.0
LIVENESS_EVERY_S: Final = 0.05
OWN_STARVATION: Final = 1.5
"""What the processes of a test cause themselves on two cores: more is the work of others."""
STOLEN_STRETCH: Final = 20.0
STOLEN_STRETCH_MAX: Final = 8.0
STOLEN_MAX: Final = 0.02
"""With more of the time stolen, a row of the table is measured again."""
_TRIES_MAX: Final = 6
FILES_MAX: Final = 1_024
"""What a server may open, unless it raises the limit: the usual one of a shell."""
_BEGIN_S_MAX: Final = 60.0
_TENANT: Final = "quiet"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the quiet tenant saw in one window."""

    latencies_ms: list[float]
    refusals: dict[str, int]
    liveness_ms: list[float]
    """Of each look at ``/livez``; infinite if it was not answered with 200."""
    late_ms: list[float] = []
    """How late each of its own delays ended."""
    statuses: dict[str, int] = {}
    """What the neighbour was answered meanwhile."""
    own_lag_ms: float = 0.0
    """How late the caller itself woke up, p99: its own wait for a core, not the server's."""
    starvation: float = 1.0
    """How much longer the servers' work took because other processes had the cores."""
    stolen: float = 0.0
    """The share of the machine's time that the host of a virtual machine gave to others."""

    @property
    def p50_ms(self) -> float:
        return _percentile(self.latencies_ms, 0.5)

    @property
    def p99_ms(self) -> float:
        return _percentile(self.latencies_ms, 0.99)

    @property
    def liveness_max_ms(self) -> float:
        return max(self.liveness_ms, default=math.inf)


class Bound(msgspec.Struct, frozen=True):
    """What a neighbour may do to the quiet tenant."""

    alone: Seen
    p99_ms: float = 50.0
    """What the quiet tenant's p99 may always be, beside any neighbour."""
    ratio_max: float = 3.0
    liveness_ms_max: float = 500.0
    starvation_max: float = 6.0
    slack: float = 1.0
    """For the p99 of few requests, which is the worst or the second worst of them."""

    @staticmethod
    def _stretch(seen: Seen) -> float:
        """Of all bounds: a host that takes the cores away does so for tens of milliseconds."""
        return min(STOLEN_STRETCH_MAX, 1 + STOLEN_STRETCH * seen.stolen)

    def p99_ms_max(self, seen: Seen) -> float:
        """The bound, stretched if server and caller waited longer for a core than alone."""
        bound_ms = self.slack * max(self.p99_ms, self.ratio_max * self.alone.p99_ms)
        bound_ms *= self._stretch(seen)
        own = min(OWN_STARVATION, self.alone.starvation)
        starved = min(self.starvation_max, max(1.0, seen.starvation / own))
        return bound_ms * starved + 2 * max(0.0, seen.own_lag_ms - self.alone.own_lag_ms)

    def faults(self, seen: Seen) -> list[str]:
        """What the quiet tenant or liveness suffered beyond the bound."""
        found = []
        if seen.refusals:
            found.append(f"refused: {seen.refusals}")
        p99_ms_max = self.p99_ms_max(seen)
        if seen.p99_ms > p99_ms_max:
            found.append(f"p99 {seen.p99_ms:.0f} ms, at most {p99_ms_max:.0f}")
        poll_ms = max(POLL_S * 1_000, _percentile(self.alone.late_ms, 0.99))
        late_ms_max = poll_ms * self._stretch(seen) + p99_ms_max
        if (late_ms := _percentile(seen.late_ms, 0.99)) > late_ms_max:
            found.append(f"a delay ended {late_ms:.0f} ms late, at most {late_ms_max:.0f}")
        liveness_ms_max = self.liveness_ms_max * max(1.0, seen.starvation) * self._stretch(seen)
        if seen.liveness_max_ms > liveness_ms_max:
            found.append(f"/livez took {seen.liveness_max_ms:.0f} ms")
        return found


class Quiet:
    """A tenant that does little, on connections of its own to every replica."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._urls = tuple(urls)
        self._headers = {"authorization": f"Bearer {key}"}
        self._idle: list[tuple[str, Connection]] = []
        self._turn = 0

    async def measure(self, seconds: float) -> Seen:
        """Begin rounds for so long, and wait for their ends."""
        latencies_ms: list[float] = []
        refusals: Counter[str] = Counter()
        liveness_ms: list[float] = []
        stop = asyncio.Event()
        looking = [asyncio.create_task(self._look(url, liveness_ms, stop)) for url in self._urls]
        late_ms: list[float] = []
        lags_ms: list[float] = []
        looking.append(asyncio.create_task(_lag(lags_ms, stop)))
        rounds = set()
        began = time.perf_counter()
        for number in range(int(seconds * ROUNDS_PER_S)):
            await asyncio.sleep(max(0.0, began + number / ROUNDS_PER_S - time.perf_counter()))
            rounds.add(asyncio.create_task(self._round(latencies_ms, refusals)))
            if number % _ROUNDS_PER_DELAY == 0:
                rounds.add(asyncio.create_task(self._delay(late_ms, refusals)))
        await asyncio.gather(*rounds)
        stop.set()
        await asyncio.gather(*looking)
        return Seen(
            latencies_ms=latencies_ms,
            refusals=dict(refusals),
            liveness_ms=liveness_ms,
            late_ms=late_ms,
            own_lag_ms=_percentile(lags_ms, 0.99),
        )

    def close(self) -> None:
        """Hang up."""
        for _, connection in self._idle:
            connection.close()

    async def _round(self, latencies_ms: list[float], refusals: Counter[str]) -> None:
        """Start a run, read it, list runs, cancel it."""
        self._turn += 1
        url, connection = self._idle.pop(0) if len(self._idle) > 8 else await self._fresh()
        run_id = "none"
        for method, path in (
            ("POST", "/v1/workflows/hold/runs"),
            ("GET", "/v1/runs/{}"),
            ("GET", "/v1/runs?limit=10"),
            ("POST", "/v1/runs/{}/cancel"),
        ):
            body = "{}" if method == "POST" else ""
            request = as_bytes(method, url + path.format(run_id), body, self._headers)
            sent = time.perf_counter()
            answer = await _asked(connection, request)
            latencies_ms.append((time.perf_counter() - sent) * 1_000)
            if answer.status not in {"200", "202"}:
                refusals[f"{answer.status} {answer.body[:80].decode(errors='replace')}"] += 1
                connection.close()
                return
            if run_id == "none":
                run_id = msgspec.json.decode(answer.body)["run_id"]
        self._idle.append((url, connection))

    async def _delay(self, late_ms: list[float], refusals: Counter[str]) -> None:
        """Start a run that only waits, and see when it has ended."""
        url, connection = await self._fresh()
        start = as_bytes("POST", url + "/v1/workflows/delay/runs", "{}", self._headers)
        answer = await _asked(connection, start)
        began = time.perf_counter()
        if answer.status == "200":
            run_id = msgspec.json.decode(answer.body)["run_id"]
            path = f"/v1/runs/{run_id}?wait={ANSWER_S_MAX - 1:.0f}"
            answer = await _asked(connection, as_bytes("GET", url + path, "", self._headers))
            late_ms.append((time.perf_counter() - began - DELAY_S) * 1_000)
        if answer.status != "200":
            refusals[f"{answer.status} {answer.body[:80].decode(errors='replace')}"] += 1
        connection.close()

    async def _fresh(self) -> tuple[str, Connection]:
        url = self._urls[self._turn % len(self._urls)]
        return url, await connect(url)

    async def _look(self, url: str, liveness_ms: list[float], stop: asyncio.Event) -> None:
        """Ask for liveness, each time on a connection of its own."""
        while not stop.is_set():
            sent = time.perf_counter()
            try:
                connection = await connect(url)
                answer = await _asked(connection, as_bytes("GET", url + "/livez"))
                connection.close()
            except OSError:
                answer = _NONE
            took_ms = (time.perf_counter() - sent) * 1_000
            liveness_ms.append(took_ms if answer.status == "200" else math.inf)
            await asyncio.sleep(LIVENESS_EVERY_S)


_NONE: Final = Answer("none")
_LAG_EVERY_S: Final = 0.005


async def _lag(lags_ms: list[float], stop: asyncio.Event) -> None:
    """Note how late this process wakes up."""
    while not stop.is_set():
        due = time.perf_counter() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags_ms.append((time.perf_counter() - due) * 1_000)


async def _asked(connection: Connection, request: bytes) -> Answer:
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            return await connection.ask(request)
    except TimeoutError:
        connection.close()
        return _NONE


class Street:
    """A quiet tenant and its neighbours, on one stack."""

    def __init__(self, stack: Stack, quiet: Quiet, program: Program) -> None:
        self.quiet = quiet
        self._stack = stack
        self._program = program

    async def alone(self, seconds: float) -> Seen:
        """Measure the quiet tenant without a neighbour."""
        before = [replica.processor_ns() for replica in self._stack.replicas]
        stolen_before = _stolen()
        seen = await self.quiet.measure(seconds)
        after = [replica.processor_ns() for replica in self._stack.replicas]
        stolen, passed = (now - was for was, now in zip(stolen_before, _stolen(), strict=True))
        return msgspec.structs.replace(
            seen,
            starvation=max(map(starvation, before, after)),
            stolen=stolen / passed if passed else 0.0,
        )

    async def beside(self, names: str, seconds: float) -> Seen:
        """Measure the quiet tenant beside a neighbour, or several with a space between names."""
        self._program.tell(names)
        begun = await self._program.line(_BEGIN_S_MAX)
        assert begun == {"begun": names}, begun
        seen = await self.alone(seconds)
        self._program.tell("stop")
        said = msgspec.convert(await self._program.line(_BEGIN_S_MAX), Statuses)
        return msgspec.structs.replace(seen, statuses=said.statuses)


@contextmanager
def hostile_stack(kind: Kind) -> Iterator[Stack]:
    """A stack that wants keys, started with the usual limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as cleaning:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES_MAX, hard), hard))
        try:
            stack = cleaning.enter_context(running_stack(kind, admin_key=ADMIN_KEY))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield stack


@asynccontextmanager
async def street(stack: Stack) -> AsyncIterator[Street]:
    """Keys and workflows for all tenants, and the process of the neighbours."""
    async with calling(stack.urls) as caller:
        admin = caller.bearing(ADMIN_KEY)
        answer = await admin.call(
            "PUT", f"/v1/admin/tenants/{_TENANT}", {"max_concurrent_runs": None}
        )
        assert answer.status == 200, answer.text
        asked = {"role": "runner", "tenant": _TENANT}
        answer = await admin.call("POST", "/v1/admin/keys", asked)
        assert answer.status == 200, answer.text
        quiet_key = str(answer.body["key"])
        await admin.bearing(quiet_key).apply("hold", HOLD)
        await admin.bearing(quiet_key).apply("delay", {"steps": {"nap": {"delay_s": DELAY_S}}})
    quiet = Quiet(stack.urls, quiet_key)
    spec = Spec(tuple(replica.port for replica in stack.replicas), ADMIN_KEY)
    text = msgspec.json.encode(spec).decode()
    async with running_program("tests.acceptance.neighbours", text) as program:
        yield Street(stack, quiet, program)
    quiet.close()


def _stolen() -> tuple[int, int]:
    """The time that the host took from this machine so far, and all time, in ticks of all cores."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
    return ticks[-1], sum(ticks)


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.inf


# ── The table ────────────────────────────────────────────────────────────────────────────────────


async def _table(kind: Kind, names: Sequence[str], seconds: float) -> str:
    """Measure each neighbour on a stack of its own, so that none suffers from an earlier one."""
    rows = [_HEAD]
    for name in names:
        bound, seen = await _row(kind, name, seconds)
        for _ in range(_TRIES_MAX - 1):
            if seen.stolen <= STOLEN_MAX:
                break
            again = await _row(kind, name, seconds)
            bound, seen = min((bound, seen), again, key=lambda pair: pair[1].stolen)
        # On a machine of its own: nothing is forgiven.
        plain = msgspec.structs.replace(bound, starvation_max=1.0)
        as_is = msgspec.structs.replace(seen, own_lag_ms=0.0, stolen=0.0)
        faults = "; ".join(plain.faults(as_is))
        rows.append(
            f"| `{name}` | {CATALOGUE[name].says} | {seen.p50_ms:.1f} / {seen.p99_ms:.1f}"
            f" ({bound.alone.p99_ms:.1f}) | {seen.liveness_max_ms:.0f} |"
            f" {sum(seen.refusals.values())} | {seen.starvation:.1f} |\n"
        )
        stolen = f"{seen.stolen:.1%} stolen"
        late = f"delays late by {_percentile(seen.late_ms, 0.99):.0f} ms"
        late += f" ({_percentile(bound.alone.late_ms, 0.99):.0f})"
        said = f"{faults or 'ok'}; {late}; {stolen}; answered {seen.statuses}"
        sys.stderr.write(f"{name}: {said}\n")
    return "".join(rows)


async def _row(kind: Kind, name: str, seconds: float) -> tuple[Bound, Seen]:
    with hostile_stack(kind) as stack:
        async with street(stack) as beside:
            await beside.quiet.measure(0.5)
            bound = Bound(await beside.alone(2.0))
            return bound, await beside.beside(name, seconds)


_PAGE: Final = Path("docs/explanation/neighbours.md")
_HEAD: Final = """\
| neighbour | what it does | p50 / p99 (alone) | `/livez` | refused | starved |
|---|---|---|---|---|---|
"""


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.quiet")
    parser.add_argument("kind", type=Kind)
    parser.add_argument("names", nargs="*", default=list(CATALOGUE))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--write", action="store_true", help=f"put the table into {_PAGE}")
    asked = parser.parse_intermixed_args()
    table = asyncio.run(_table(asked.kind, asked.names, asked.seconds))
    sys.stdout.write(table)
    if asked.write:
        before, begin, rest = _PAGE.read_text(encoding="utf-8").partition(
            f"<!-- {asked.kind} -->\n"
        )
        _, end, after = rest.partition("<!-- end -->")
        assert begin, f"{_PAGE} has no place for it"
        assert end, f"{_PAGE} has no place for it"
        _PAGE.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    _main()
