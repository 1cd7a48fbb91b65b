"""Hostile neighbours: a catalogue of what one tenant, or a caller without a key, can do.

    python -m tests.acceptance.neighbours SPEC

The program runs in a process of its own at the lowest priority, so that the caller whose latency
is measured shares neither its interpreter nor its share of the processor. It reads lines with the
names of one or more neighbours from its standard input. For each line it prepares what they need,
prints a line once their loads are on, keeps them on until the next line of input, and prints how
often each status was answered.

A neighbour is a coroutine function that takes a ``Loud`` and returns the load: a coroutine that
goes on until it is cancelled. ``CATALOGUE`` lists them by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import uvloop

from bench.connection import LOST, Connection, connect
from tests.acceptance.workflows import HOLD

__all__ = ["CATALOGUE", "Neighbour", "Spec", "Statuses"]

_INPUT_BYTES: Final = 250_000
_BODY_BYTES: Final = 900_000
_CALL_S_MAX: Final = 20.0
_RETRY_S: Final = 0.02
_RATE_PER_S: Final = 600.0
"""Of cheap requests: faster, and it is the machine's cores that are shared out, not the server."""
_BURST_EVERY_S: Final = 0.3
_OPENED_PER_S: Final = 1_500.0
_BEGIN_S_MAX: Final = 3.0
_LOAD_S_MAX: Final = 600.0
_TIMERS: Final = 4_000
_TIMERS_S: Final = 4.0


class Spec(msgspec.Struct, frozen=True):
    """Where the servers are, and the key that makes other keys."""

    ports: tuple[int, ...]
    admin_key: str


class Statuses(msgspec.Struct, frozen=True):
    """What a neighbour was answered."""

    statuses: dict[str, int]


class Neighbour(msgspec.Struct, frozen=True):
    """One way to be hostile."""

    name: str
    says: str
    prepare: Callable[[Loud], Awaitable[Awaitable[None]]]


class Loud:
    """A tenant that asks for more than its share.

    Each neighbour is a tenant of its own: what is charged to one is not the next one's.
    """

    def __init__(self, spec: Spec, tenant: str) -> None:
        self.tenant = tenant
        self.statuses: Counter[str] = Counter()
        self.begun = asyncio.Event()
        self.ports = itertools.cycle(spec.ports)
        self._keys = {"admin": spec.admin_key}

    async def register(self) -> None:
        """Have keys made for the tenant, once."""
        if "runner" in self._keys:
            return
        await self.limit(None)
        for role in ("runner", "worker"):
            asked = {"role": role, "tenant": self.tenant}
            made = await self.call(self.request("POST", "/v1/admin/keys", asked, role="admin"))
            assert "key" in made, made
            self._keys[role] = made["key"]

    async def limit(self, cap: int | None) -> None:
        """Say how many runs the tenant may have."""
        path = f"/v1/admin/tenants/{self.tenant}"
        await self.call(self.request("PUT", path, {"max_concurrent_runs": cap}, role="admin"))

    def request(
        self,
        method: str,
        path: str,
        body: object = b"",
        *,
        role: str | None = "runner",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """A request as bytes; a body that is not bytes is sent as JSON."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.head(method, path, len(content), role=role, headers=headers) + content

    def head(
        self,
        method: str,
        path: str,
        length: int | None = 0,
        *,
        role: str | None = "runner",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The head of a request; without a length its body is chunked."""
        key = None if role is None else self._keys[role]
        sized = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            sized,
            *([] if key is None else [f"authorization: Bearer {key}"]),
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def start_request(self, workflow_id: str, value: object) -> bytes:
        path = f"/v1/workflows/{workflow_id}/runs"
        return self.request("POST", path, {"input": value})

    # ── Preparing ────────────────────────────────────────────────────────────────────────────────

    async def call(self, request: bytes) -> Any:  # noqa: ANN401 - whatever the answer is
        """One request, and the body of the answer, whatever its status.

        It is sent again if the connection was closed: the server may not have noticed yet that the
        hundreds of connections of the neighbour before are gone, and closes idle ones.
        """
        async with asyncio.timeout(_CALL_S_MAX):
            answer = LOST
            while answer is LOST:
                connection = await self.connection()
                try:
                    answer = await connection.ask(request)
                finally:
                    connection.close()
        return msgspec.json.decode(answer.body) if answer.body else {}

    async def apply(self, workflow_id: str, definition: object) -> None:
        await self.call(self.request("PUT", f"/v1/workflows/{workflow_id}", definition))

    async def start(self, workflow_id: str, value: object = None) -> str:
        """Start a run; its id, or ``none`` if the server refused."""
        answer = await self.call(self.start_request(workflow_id, value or {}))
        return str(answer.get("run_id", "none"))

    async def hold(self) -> str:
        """A workflow whose runs wait for an approval; its id."""
        await self.apply("hold", HOLD)
        return "hold"

    async def finished_run(self, items: int, output: object) -> str:
        """A finished run with so many items, each with this output; its id."""
        topic = f"{self.tenant}.items"
        each = {"topic": topic, "for_each": "${input.items}", "input": "${item}"}
        await self.apply("items", {"steps": {"each": each}})
        run_id = await self.start("items", {"items": list(range(items))})
        at_once = max(1, _BODY_BYTES // (len(msgspec.json.encode(output)) + 200))
        left = items
        while left > 0:
            asked = {"worker_id": "loud", "topics": [topic], "max_jobs": min(left, at_once)}
            leased = await self.call(self.request("POST", "/v1/worker/lease", asked, role="worker"))
            results = [
                {
                    "job_id": job["job_id"],
                    "fence": job["fence"],
                    "status": "succeeded",
                    "output": output,
                }
                for job in leased.get("jobs", ())
            ]
            if not results:
                break
            left -= len(results)
            sent = {"worker_id": "loud", "results": results}
            await self.call(self.request("POST", "/v1/worker/results", sent, role="worker"))
        return run_id

    # ── Loads ────────────────────────────────────────────────────────────────────────────────────

    async def connection(self) -> Connection:
        return await connect(f"http://127.0.0.1:{next(self.ports)}")

    async def flood(
        self,
        requests: Iterable[bytes],
        *,
        connections: int = 16,
        rate_per_s: float | None = None,
        is_fresh: bool = False,
    ) -> None:
        """Send these in turn and again, each connection when it has its answer."""
        upcoming = itertools.cycle(requests)
        pause_s = 0.0 if rate_per_s is None else connections / rate_per_s

        async def one() -> None:
            async for connection in self._reconnecting():
                status = (await connection.ask(next(upcoming))).status
                self.statuses[status] += 1
                if is_fresh:
                    connection.close()
                if pause_s:
                    await asyncio.sleep(pause_s)

        self.begun.set()
        await self.together(one() for _ in range(connections))

    async def bursts(self, requests: Sequence[bytes], count: int) -> None:
        """Send so many requests at the same moment, each on its connection, and again."""
        moment = asyncio.Event()
        upcoming = itertools.cycle(requests)

        async def one() -> None:
            async for connection in self._reconnecting():
                await moment.wait()
                self.statuses[(await connection.ask(next(upcoming))).status] += 1

        async def begin() -> None:
            while True:
                await asyncio.sleep(_BURST_EVERY_S)
                moment.set()
                self.begun.set()
                await asyncio.sleep(0)
                moment.clear()

        await self.together([begin(), *(one() for _ in range(count))])

    async def _reconnecting(self) -> AsyncIterator[Connection]:
        """A connection again and again: the same one for as long as it is open."""
        connection: Connection | None = None
        try:
            while True:
                try:
                    if connection is None or connection.is_closing:
                        connection = await self.connection()
                    yield connection
                except OSError:
                    self.statuses["refused"] += 1
                    await asyncio.sleep(_RETRY_S)
                if connection is not None and connection.is_closing:
                    await asyncio.sleep(_RETRY_S)
        finally:
            if connection is not None:
                connection.close()

    async def converse(
        self, talk: Callable[[Connection], Awaitable[None]], *, connections: int = 16
    ) -> None:
        """Requests that follow from answers, on each connection again and again."""

        async def one() -> None:
            async for connection in self._reconnecting():
                await talk(connection)

        self.begun.set()
        await self.together(one() for _ in range(connections))

    async def ask(self, connection: Connection, request: bytes) -> Any:  # noqa: ANN401 - as above
        answer = await connection.ask(request)
        self.statuses[answer.status] += 1
        return msgspec.json.decode(answer.body) if answer.body else {}

    async def keep_open(
        self,
        count: int,
        opening: Sequence[bytes],
        *,
        more: Iterable[bytes] = (),
        every_s: float = 0.1,
        reads: bool = True,
    ) -> None:
        """Open connections, send these in turn, and keep them; ``more`` is sent a part at a time.

        A connection that the server closes is opened again.
        """
        openings = itertools.cycle(opening)
        parts = tuple(more)
        opened = 0
        loop = asyncio.get_running_loop()

        def connection() -> _Held:
            return _Held(self.statuses, next(openings), reads=reads)

        async def one(number: int) -> None:
            nonlocal opened
            await asyncio.sleep(number / _OPENED_PER_S)
            while True:
                port = next(self.ports)
                try:
                    _, held = await loop.create_connection(connection, "127.0.0.1", port)
                except OSError:
                    self.statuses["refused"] += 1
                    await asyncio.sleep(_RETRY_S)
                    continue
                opened += 1
                if opened >= count:
                    self.begun.set()
                try:
                    for part in itertools.cycle(parts):
                        if held.closed.is_set():
                            break
                        held.transport.write(part)
                        await asyncio.sleep(every_s)
                    await held.closed.wait()
                finally:
                    held.transport.abort()
                await asyncio.sleep(_RETRY_S)

        await self.together(one(number) for number in range(count))

    async def together(self, loads: Iterable[Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(_as_coroutine(load))


async def _as_coroutine(load: Awaitable[None]) -> None:
    await load


class _Held(asyncio.Protocol):
    """A connection that is kept open, and read or not."""

    transport: asyncio.Transport

    def __init__(self, statuses: Counter[str], opening: bytes, *, reads: bool) -> None:
        self.closed = asyncio.Event()
        self._statuses = statuses
        self._opening = opening
        self._reads = reads
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._opening)
        if not self._reads:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._statuses[data[9:12].decode("latin-1")] += 1

    def connection_lost(self, _exc: Exception | None) -> None:
        self._statuses["closed"] += 1
        self.closed.set()


# ── The catalogue ────────────────────────────────────────────────────────────────────────────────

CATALOGUE: Final[dict[str, Neighbour]] = {}
_Prepare = Callable[[Loud], Awaitable[Awaitable[None]]]


def _neighbour(says: str) -> Callable[[_Prepare], _Prepare]:
    def enter(prepare: _Prepare) -> _Prepare:
        name = prepare.__name__.strip("_").replace("_", "-")
        CATALOGUE[name] = Neighbour(name, says, prepare)
        return prepare

    return enter


def _checked(schema: object) -> dict[str, object]:
    return {"input_schema": schema, **HOLD}


@_neighbour("starts with 130,900 zeros, each checked against `anyOf` of 488 constants")
async def _schema_any_of(loud: Loud) -> Awaitable[None]:
    # Each zero is compared with all constants: the one that it equals is the last.
    items = {"anyOf": [{"const": number} for number in range(487, -1, -1)]}
    await loud.apply("any-of", _checked({"properties": {"x": {"items": items}}}))
    return loud.flood([loud.start_request("any-of", {"x": [0] * 130_900})], connections=3)


@_neighbour("starts with 40,000 numbers that must be unique, 100 times over")
async def _schema_unique(loud: Loud) -> Awaitable[None]:
    listed = {"allOf": [{"uniqueItems": True, "minItems": each} for each in range(100)]}
    await loud.apply("unique", _checked({"properties": {"x": listed}}))
    return loud.flood([loud.start_request("unique", {"x": list(range(40_000))})], connections=3)


@_neighbour("starts with 60,000 texts, each checked against 30 patterns")
async def _schema_patterns(loud: Loud) -> Awaitable[None]:
    items = {"allOf": [{"pattern": f"^a+[a-z]*{each}?$"} for each in range(30)]}
    await loud.apply("patterns", _checked({"properties": {"x": {"items": items}}}))
    value = {"x": ["a"] * 60_000}
    return loud.flood([loud.start_request("patterns", value)], connections=3)


@_neighbour("1,000 connections without a key that send an empty line and nothing else")
async def _empty_lines(loud: Loud) -> Awaitable[None]:
    return loud.keep_open(1_000, [b"\r\n"])


@_neighbour("20 scrapers of `/metrics`, with a series for each of 300 workflows")
async def _metrics_scrapers(loud: Loud) -> Awaitable[None]:
    async def use(numbers: range) -> None:
        for number in numbers:
            await loud.apply(f"series-{number}", HOLD)
            await loud.start(f"series-{number}")

    await loud.together(use(range(first, 300, 10)) for first in range(10))
    scrapes = [loud.request("GET", "/metrics", role=role) for role in (None, "runner")]
    return loud.flood(scrapes, connections=20, rate_per_s=_RATE_PER_S)


@_neighbour("a workflow file with 3,206 similar step names and 100 unknown needs")
async def _similar_names(loud: Loud) -> Awaitable[None]:
    steps: dict[str, object] = {
        f"a{'b' * 44}{number:05d}": {"delay_s": 1} for number in range(3_205)
    }
    steps["last"] = {"delay_s": 1, "needs": [f"a{'b' * 43}{each:05d}x" for each in range(100)]}
    files = _different({"steps": steps})
    return loud.flood(_puts(loud, "similar", files), connections=3)


@_neighbour("workflow files with 120 expressions of 2,000 characters")
async def _heavy_expressions_file(loud: Loud) -> Awaitable[None]:
    expression = "${[" + ", ".join(["input.a"] * 200) + "]}"
    steps = {f"s{number}": {"topic": "t", "input": expression} for number in range(120)}
    files = _different({"steps": steps})
    return loud.flood(_puts(loud, "expressions", files), connections=3)


@_neighbour("workflow files with schemas of 470 subschemas and 40 patterns")
async def _heavy_schema_file(loud: Loud) -> Awaitable[None]:
    members = {
        f"m{number}": {"type": "string", "pattern": f"^[a-z]+{number}$"}
        if number < 40
        else {"enum": list(range(20))}
        for number in range(470)
    }
    files = _different(_checked({"properties": members}))
    return loud.flood(_puts(loud, "schemas", files), connections=3)


def _different(file: Mapping[str, object]) -> list[dict[str, object]]:
    """Ten files of the same weight, so that none is answered from a cache."""
    return [{**file, "timeout_s": 1_000 + number} for number in range(10)]


def _puts(loud: Loud, workflow_id: str, files: Iterable[object]) -> list[bytes]:
    return [loud.request("PUT", f"/v1/workflows/{workflow_id}", each) for each in files]


@_neighbour("490 event streams, while 40 runs a second are started")
async def _event_streams(loud: Loud) -> Awaitable[None]:
    hold = await loud.hold()
    streams = loud.keep_open(490, [loud.request("GET", "/v1/events")])
    return loud.together([streams, loud.flood([loud.start_request(hold, {})], rate_per_s=40)])


@_neighbour("100 event streams from the beginning of the feed, never read")
async def _unread_streams(loud: Loud) -> Awaitable[None]:
    run_id = await loud.finished_run(1_000, {"done": True})
    streams = [loud.request("GET", f"/v1/events?run_id={run_id}")]
    return loud.keep_open(100, streams, reads=False)


@_neighbour("event streams that replay a run of 1,000 items, hung up and opened again")
async def _replayed_streams(loud: Loud) -> Awaitable[None]:
    run_id = await loud.finished_run(1_000, {"done": True})
    stream = loud.request("GET", f"/v1/events?run_id={run_id}")

    async def one() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", next(loud.ports))
            writer.write(stream)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while await reader.read(65_536):
                        loud.statuses["read"] += 1
            writer.close()

    loud.begun.set()
    return loud.together(one() for _ in range(16))


@_neighbour("400 waits for one run with an input of 250 KB")
async def _waits(loud: Loud) -> Awaitable[None]:
    hold = await loud.hold()
    run_id = await loud.start(hold, {"x": "y" * _INPUT_BYTES})
    return loud.keep_open(400, [loud.request("GET", f"/v1/runs/{run_id}?wait=60")])


@_neighbour("2 starts a second with 100 costly conditions that fail")
async def _costly_expressions(loud: Loud) -> Awaitable[None]:
    when = "input.l.all(x, input.l.all(y, x + y >= 0)) && input.missing"
    steps = {f"s{number}": {"topic": "t", "when": when} for number in range(100)}
    await loud.apply("costly", {"steps": steps})
    value = {"l": list(range(300))}
    return loud.flood([loud.start_request("costly", value)], connections=4, rate_per_s=2)


@_neighbour("starts whose bodies are small and wrong")
async def _small_bodies(loud: Loud) -> Awaitable[None]:
    bodies = [b"", b"{", b"[]", b'{"input": 1}', b'{"x": 1}', b"\xff", b'{"input": {"a": NaN}}']
    path = f"/v1/workflows/{await loud.hold()}/runs"
    return loud.flood(
        [loud.request("POST", path, each) for each in bodies],
        connections=32,
        rate_per_s=_RATE_PER_S,
    )


@_neighbour("bodies of 1 MB with 49,000 lists that are not JSON at their end")
async def _broken_large_bodies(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    body = b'{"input": {"x": [' + b"[0]," * 49_000 + b'"%s"!]}}' % (b"y" * 800_000)
    return loud.flood([loud.request("POST", path, body)], connections=4)


@_neighbour("bodies of 1 MB with numbers like `1e300`, which are slow to read")
async def _extreme_numbers(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    body = b'{"input": {"x": [' + b"1e300," * 170_000 + b"0]}}"
    return loud.flood([loud.request("POST", path, body)], connections=4)


@_neighbour("bodies of 64 KB with 50 fractions where whole numbers are due")
async def _fractions(loud: Loud) -> Awaitable[None]:
    leases = [{"job_id": f"j-{number}", "fence": 1.0} for number in range(60)]
    padding = [{"job_id": f"{'j' * 100}-{number}", "fence": 1} for number in range(400)]
    body = {"worker_id": "loud", "leases": leases + padding}
    renew = loud.request("POST", "/v1/worker/renew", body, role="worker")
    return loud.flood([renew], connections=4)


@_neighbour("50 requests in a row on each of 16 connections, before the first is answered")
async def _pipelining(loud: Loud) -> Awaitable[None]:
    many = loud.request("GET", "/v1/runs?limit=1") * 50
    return loud.keep_open(16, [many], more=[many], every_s=0.1)


@_neighbour("GETs of runs with 3.5 MB of outputs, 8 at a time, 30 a second")
async def _large_outputs(loud: Loud) -> Awaitable[None]:
    run_id = await loud.finished_run(14, "y" * _INPUT_BYTES)
    read = loud.request("GET", f"/v1/runs/{run_id}")
    return loud.flood([read], connections=8, rate_per_s=30)


@_neighbour("64 callers that ask for 3.5 MB and read none of it")
async def _slow_readers(loud: Loud) -> Awaitable[None]:
    run_id = await loud.finished_run(14, "y" * _INPUT_BYTES)
    return loud.keep_open(64, [loud.request("GET", f"/v1/runs/{run_id}")], reads=False)


@_neighbour("starts of a for-each with 10,000 items, cancelled at once")
async def _wide_for_each(loud: Loud) -> Awaitable[None]:
    each = {"topic": "loud.wide", "for_each": "${input.items}", "input": "${item}"}
    await loud.apply("wide", {"steps": {"each": each}})
    start = loud.start_request("wide", {"items": list(range(10_000))})
    return loud.converse(lambda connection: _cancelled(loud, connection, start), connections=1)


async def _cancelled(loud: Loud, connection: Connection, start: bytes) -> None:
    run_id = (await loud.ask(connection, start)).get("run_id", "none")
    await loud.ask(connection, loud.request("POST", f"/v1/runs/{run_id}/cancel", {}))


@_neighbour("batches of 1,000 starts, from 4 callers")
async def _batches(loud: Loud) -> Awaitable[None]:
    await loud.apply("single", {"steps": {"only": {"topic": "loud.batch", "input": "${input.n}"}}})
    return loud.converse(_batch(loud, "single", {"n": 1}), connections=4)


@_neighbour("batches of 1,000 starts of a for-each with 100 items")
async def _wide_batches(loud: Loud) -> Awaitable[None]:
    each = {"topic": "loud.wide-batch", "for_each": "${input.items}", "input": "${item}"}
    await loud.apply("items-of-batch", {"steps": {"each": each}})
    given = {"items": list(range(100))}
    return loud.converse(_batch(loud, "items-of-batch", given), connections=1)


@_neighbour("batches of 300 starts of 200 jobs with a copy of 2.4 KB each")
async def _wide_rows(loud: Loud) -> Awaitable[None]:
    steps = {f"s{number}": {"topic": "loud.row", "input": "${input}"} for number in range(200)}
    await loud.apply("wide-row", {"steps": steps})
    return loud.converse(_batch(loud, "wide-row", {"d": "y" * 2_400}, rows=300), connections=2)


@_neighbour("4,000 delays that end at the same time")
async def _due_timers(loud: Loud) -> Awaitable[None]:
    due = asyncio.get_running_loop().time() + _TIMERS_S
    for _ in range(_TIMERS // 1_000):
        left_s = due - asyncio.get_running_loop().time()
        await loud.apply("delay", {"steps": {"nap": {"delay_s": max(0.0, round(left_s, 3))}}})
        path = "/v1/workflows/delay/runs/batch"
        headers = {"idempotency-key": secrets.token_hex(8)}
        content = msgspec.json.encode({"runs": [{}] * 1_000})
        await loud.call(loud.request("POST", path, content, headers=headers))
    await asyncio.sleep(due - asyncio.get_running_loop().time())
    loud.begun.set()
    return asyncio.sleep(_LOAD_S_MAX)


def _batch(
    loud: Loud, workflow_id: str, given: object, rows: int = 1_000
) -> Callable[[Connection], Awaitable[None]]:
    """Sends batches, each with keys of its own."""
    path, body = f"/v1/workflows/{workflow_id}/runs/batch", {"runs": [{"input": given}] * rows}
    content = msgspec.json.encode(body)

    async def talk(connection: Connection) -> None:
        headers = {"idempotency-key": secrets.token_hex(8)}
        await loud.ask(connection, loud.request("POST", path, content, headers=headers))

    return talk


@_neighbour("one idempotency key, from 32 callers at once")
async def _hot_key(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    start = loud.request("POST", path, {}, headers={"idempotency-key": secrets.token_hex(4)})
    return loud.flood([start], connections=32, rate_per_s=_RATE_PER_S)


@_neighbour("walks through all runs by pages of one")
async def _cursor_walks(loud: Loud) -> Awaitable[None]:
    async def walk(connection: Connection) -> None:
        cursor = ""
        for _ in range(100):
            page = await loud.ask(connection, loud.request("GET", f"/v1/runs?limit=1{cursor}"))
            if page.get("cursor") is None:
                break
            cursor = f"&cursor={page['cursor']}"

    return loud.converse(walk, connections=16)


@_neighbour("lists of 1,000 runs, 8 at a time")
async def _long_lists(loud: Loud) -> Awaitable[None]:
    await loud.hold()
    return loud.flood([loud.request("GET", "/v1/runs?limit=1000")], connections=8)


@_neighbour("timelines of 1,000 lines, 8 at a time")
async def _long_timelines(loud: Loud) -> Awaitable[None]:
    run_id = await loud.finished_run(1_000, {"done": True})
    read = loud.request("GET", f"/v1/runs/{run_id}/timeline?limit=1000")
    return loud.flood([read], connections=8)


@_neighbour("guesses of keys, each another one, from 32 callers")
async def _key_guessing(loud: Loud) -> Awaitable[None]:
    guesses = [
        loud.request("GET", "/v1/runs", role=None, headers={"authorization": f"Bearer sk_{guess}"})
        for guess in (f"{secrets.token_hex(6)}_{secrets.token_hex(16)}" for _ in range(5_000))
    ]
    return loud.flood(guesses, connections=32, rate_per_s=_RATE_PER_S)


@_neighbour("paths, runs and workflows that do not exist")
async def _not_found(loud: Loud) -> Awaitable[None]:
    paths = ["/nothing", "/v1/runs/none", "/v1/workflows/none", "/v1/jobs/none"]
    return loud.flood(
        [loud.request("GET", path) for path in paths], connections=32, rate_per_s=_RATE_PER_S
    )


@_neighbour("bodies that are announced as 2 MB, and sent, 100 a second")
async def _too_large_bodies(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    # The rest of a refused body is read and dropped, so that its sender sees the 413. A thousand a
    # second would be two gigabytes, and measure the machine's bandwidth.
    large = loud.request("POST", path, b" " * 2_000_000)
    return loud.flood([large], connections=8, rate_per_s=100)


@_neighbour("bodies of 1 MB that are blank but for 50 bytes, 140 at once, three times a second")
async def _blank_bodies(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    return loud.bursts([loud.request("POST", path, b'{"input": {}}' + b" " * 1_000_000)], 140)


@_neighbour("the same without a key")
async def _blank_bodies_of_strangers(loud: Loud) -> Awaitable[None]:
    body = b'{"input": {}}' + b" " * 1_000_000
    return loud.bursts([loud.request("POST", "/v1/workflows/x/runs", body, role=None)], 140)


@_neighbour("batches of 1,000 rows with 100 faults each")
async def _faulty_batches(loud: Loud) -> Awaitable[None]:
    texts = {"items": {"type": "string", "maxLength": 3}}
    await loud.apply("faulty", _checked({"properties": {"x": texts}}))
    return loud.converse(_batch(loud, "faulty", {"x": [1] * 100}), connections=4)


@_neighbour("starts of 64 jobs with inputs of 250 KB each")
async def _large_inputs(loud: Loud) -> Awaitable[None]:
    steps = {f"s{number}": {"topic": "loud.doc", "input": "${input.doc}"} for number in range(64)}
    await loud.apply("doc", {"steps": steps})
    start = loud.start_request("doc", {"doc": "y" * _INPUT_BYTES})
    return loud.converse(lambda connection: _cancelled(loud, connection, start), connections=4)


@_neighbour("starts of 4 jobs with 60 copies of 4 KB each, from 64 callers")
async def _copied_inputs(loud: Loud) -> Awaitable[None]:
    copies = "${[" + ",".join(["input.doc"] * 60) + "]}"
    steps = {f"s{number}": {"topic": "loud.copies", "input": copies} for number in range(4)}
    await loud.apply("copies", {"steps": steps})
    start = loud.start_request("copies", {"doc": "y" * 4_096})
    return loud.converse(lambda connection: _cancelled(loud, connection, start), connections=64)


@_neighbour("batches of 300 starts of 4 jobs with 130 copies of 1.8 KB each")
async def _copied_batches(loud: Loud) -> Awaitable[None]:
    copies = "${[" + ",".join(["input.doc"] * 130) + "]}"
    steps = {f"s{number}": {"topic": "loud.copies", "input": copies} for number in range(4)}
    await loud.apply("copies", {"steps": steps})
    return loud.converse(_batch(loud, "copies", {"doc": "y" * 1_800}, rows=300), connections=4)


@_neighbour("300 bodies that come by one byte in 100 ms")
async def _slow_bodies(loud: Loud) -> Awaitable[None]:
    head = loud.head("POST", f"/v1/workflows/{await loud.hold()}/runs", 10_000)
    return loud.keep_open(300, [head], more=[b" "], every_s=0.1)


@_neighbour("1,000 login forms without a key, half of which is sent")
async def _half_logins(loud: Loud) -> Awaitable[None]:
    half = (
        b"POST /console/login HTTP/1.1\r\nhost: 127.0.0.1\r\nsec-fetch-site: same-origin\r\n"
        b"content-type: application/x-www-form-urlencoded\r\ncontent-length: 1000\r\n\r\nkey="
    )
    return loud.keep_open(1_000, [half])


@_neighbour("100 chunked bodies in chunks of one byte, 200 at a time")
async def _chunked_dribble(loud: Loud) -> Awaitable[None]:
    head = loud.head("POST", f"/v1/workflows/{await loud.hold()}/runs", None)
    return loud.keep_open(100, [head], more=[b"1\r\n \r\n" * 200], every_s=0.1)


@_neighbour("starts of a tenant that is full, from 64 callers")
async def _full_tenant(loud: Loud) -> Awaitable[None]:
    hold = await loud.hold()
    await loud.limit(2)
    return loud.flood([loud.start_request(hold, {})], connections=64, rate_per_s=_RATE_PER_S)


@_neighbour("starts, cancels and reruns in turn, from 16 callers")
async def _reruns(loud: Loud) -> Awaitable[None]:
    hold = await loud.hold()

    async def talk(connection: Connection) -> None:
        run_id = (await loud.ask(connection, loud.start_request(hold, {}))).get("run_id", "none")
        for _ in range(3):
            await loud.ask(connection, loud.request("POST", f"/v1/runs/{run_id}/cancel", {}))
            again = loud.request("POST", f"/v1/runs/{run_id}/rerun", {})
            run_id = (await loud.ask(connection, again)).get("run_id", "none")

    return loud.converse(talk, connections=16)


@_neighbour("400 workers that wait for jobs of 100 topics each")
async def _long_polls(loud: Loud) -> Awaitable[None]:
    topics = [f"loud.nothing.{number}" for number in range(100)]
    asked = {"worker_id": "loud", "topics": topics, "wait_s": 60}
    return loud.keep_open(400, [loud.request("POST", "/v1/worker/lease", asked, role="worker")])


@_neighbour("leases of 1,000 topics that are asked for again and again")
async def _many_topics(loud: Loud) -> Awaitable[None]:
    topics = [f"loud.{'t' * 100}.{number}" for number in range(1_000)]
    asked = {"worker_id": "loud", "topics": topics, "max_jobs": 1_000}
    lease = loud.request("POST", "/v1/worker/lease", asked, role="worker")
    return loud.flood([lease], connections=8)


@_neighbour("renewals of 1,000 unknown jobs at a time")
async def _renewals(loud: Loud) -> Awaitable[None]:
    leases = [{"job_id": f"none-{number}", "fence": number + 1} for number in range(1_000)]
    body = {"worker_id": "loud", "leases": leases}
    return loud.flood(
        [loud.request("POST", "/v1/worker/renew", body, role="worker")], connections=8
    )


@_neighbour("results for 1,000 unknown jobs at a time")
async def _results(loud: Loud) -> Awaitable[None]:
    results = [
        {"job_id": f"none-{number}", "fence": number + 1, "status": "succeeded"}
        for number in range(1_000)
    ]
    body = {"worker_id": "loud", "results": results}
    request = loud.request("POST", "/v1/worker/results", body, role="worker")
    return loud.flood([request], connections=8)


@_neighbour("single jobs with an input of 250 KB")
async def _large_jobs(loud: Loud) -> Awaitable[None]:
    body = {"topic": "loud.large-job", "input": "y" * _INPUT_BYTES}
    return loud.flood([loud.request("POST", "/v1/jobs", body)], connections=8, rate_per_s=60)


@_neighbour("workflow files of three steps, stored again and again under 200 names")
async def _workflow_files(loud: Loud) -> Awaitable[None]:
    steps = {name: {"topic": name, "input": {"q": "${input.q}"}} for name in ("a", "b", "c")}
    puts = [
        loud.request("PUT", f"/v1/workflows/file-{number % 200}", {"steps": steps, "timeout_s": at})
        for number, at in enumerate(range(1, 1_000))
    ]
    return loud.flood(puts, connections=16)


@_neighbour("lists of 100 schedules with years between two ticks, changed in turn")
async def _rare_schedules(loud: Loud) -> Awaitable[None]:
    wanted = {"workflow_id": await loud.hold(), "cron": "0 0 * 2 1#5"}
    puts = [
        loud.request("PUT", f"/v1/schedules/rare-{number}", {**wanted, "jitter_s": each})
        for each in (1, 2)
        for number in range(100)
    ]
    for put in puts[:100]:
        await loud.call(put)
    listed = loud.request("GET", "/v1/schedules?limit=1000")
    requests = [each for put in puts[100:] + puts[:100] for each in (listed, put)]
    return loud.flood(requests, connections=4, rate_per_s=100)


@_neighbour("compressed bodies, odd encodings, 100 headers")
async def _odd_headers(loud: Loud) -> Awaitable[None]:
    path = f"/v1/workflows/{await loud.hold()}/runs"
    many = {f"x-{number}": "y" * 250 for number in range(90)}
    requests = [
        loud.request("POST", path, b"\x1f\x8b\x08", headers={"content-encoding": "gzip"}),
        loud.request("POST", path, {}, headers={"content-type": "text/plain; charset=utf-7"}),
        loud.request("GET", "/v1/runs", headers={"accept-encoding": "gzip, br;q=0.1, *;q=0"}),
        loud.request("GET", "/v1/runs?limit=1", headers=many),
    ]
    return loud.flood(requests, connections=32, rate_per_s=_RATE_PER_S)


@_neighbour("TLS greetings and random bytes on connections without a key")
async def _garbage(loud: Loud) -> Awaitable[None]:
    openings = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500)]
    openings += [os.urandom(200) + b"\r\n\r\n" for _ in range(20)]
    return loud.keep_open(32, openings)


@_neighbour("connections that are opened for one request each")
async def _churn(loud: Loud) -> Awaitable[None]:
    return loud.flood(
        [loud.request("GET", "/v1/runs?limit=1")],
        connections=32,
        rate_per_s=_RATE_PER_S,
        is_fresh=True,
    )


# ── The program ──────────────────────────────────────────────────────────────────────────────────


async def _main(spec: Spec) -> None:
    """Do what each line of the input says, until there is none."""
    known = {name: Loud(spec, name) for name in CATALOGUE}
    lines = _lines()
    async for line in lines:
        some = [known[name] for name in line.split()]
        loads = []
        try:
            for loud in some:  # before any of them begins
                await loud.register()
            for loud in some:
                loud.statuses.clear()
                loud.begun.clear()
                loads.append(asyncio.ensure_future(await CATALOGUE[loud.tenant].prepare(loud)))
        except (OSError, TimeoutError) as error:
            _say({"begun": None, "fault": f"cannot prepare {line}: {error!r}"})
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEGIN_S_MAX):
                    await asyncio.gather(*(loud.begun.wait() for loud in some))
            _say({"begun": line})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(lines, ""), _LOAD_S_MAX)
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        if len(loads) == len(some):
            counted = sum((loud.statuses for loud in some), Counter[str]())
            _say(Statuses({key: count for key, count in counted.items() if count}))


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def _say(line: object) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.nice(19)
    uvloop.run(_main(msgspec.json.decode(sys.argv[1], type=Spec)))
