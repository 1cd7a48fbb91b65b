"""Count and list our files that a start and a result execute, on SQLite and on Redis.

A request that runs through many small files is hard to follow. ``make check`` prints the counts and
fails above ``FILES_MAX``; a test compares the two walks of ARCHITECTURE.md with the same lists.

A file counts if a function of it is called, in any thread, between the first byte of the request
and the last byte of the response; for a result also until the next step has been dispatched, since
a result is answered before it is applied. It must be called in all of several requests, which
excludes the files of background loops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from stanchion.assemble import run_server
from stanchion.config import Config
from tests.servers import running_nats, running_server

__all__ = ["FILES_MAX", "Walks", "walks_on"]

FILES_MAX: Final = 40
"""The maximum number of files per request."""
_ROOT: Final = Path(__file__).parent.parent / "src" / "stanchion"
_ROUNDS: Final = 16
_AGAIN_MAX: Final = 3
"""How often the count is repeated if it is over the limit."""
_REST_S: Final = 0.03
"""Pause before each request, so that the work of the previous one has ended."""
_APPLIED: Final = frozenset({"adapters/bus/local.py"})
"""Rings the bells, on every bus: the last action for a result, after its commit."""
_HEARD_S: Final = 0.01
"""Time for bells to be handled."""
_APPLIED_S_MAX: Final = 2.0
_SAMPLERS: Final = frozenset({"services/watchdog.py"})
"""Samples the event loop continuously and takes no part in requests."""
_WAIT_S_MAX: Final = 60.0
_SHARE_PERCENT: Final = 10_000
_WORKFLOW: Final = {
    "steps": {
        "one": {"topic": "walk", "input": {"x": "${input.x}"}},
        "two": {"topic": "walk", "needs": ["one"], "input": {"x": "${steps.one.output}"}},
    }
}


class Walks(NamedTuple):
    """The files of each kind of request, in the order of first entry."""

    start: list[str]
    result: list[str]


class _Recorder:
    """Records our files in which functions are called, while it is on."""

    def __init__(self) -> None:
        self._prefix = str(_ROOT)
        self._seen: dict[str, None] | None = None

    def install(self) -> None:
        threading.setprofile(self._note)  # for new threads
        sys.setprofile(self._note)

    def uninstall(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    async def record(
        self, request: Callable[[], Awaitable[object]], *, until: frozenset[str] = frozenset()
    ) -> list[str]:
        """The files of a request, from its first byte until it is answered and these are seen."""
        await asyncio.sleep(_REST_S)
        self._seen = {}
        try:
            await request()
            async with asyncio.timeout(_APPLIED_S_MAX):
                while not until <= {_short(name) for name in list(self._seen)}:  # noqa: ASYNC110 - the server does not tell
                    await asyncio.sleep(0.001)
            if until:
                await asyncio.sleep(_HEARD_S)
        finally:
            seen, self._seen = self._seen, None
        return [name for name in map(_short, seen) if name not in _SAMPLERS]

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        seen = self._seen
        if seen is not None and event == "call":
            name = frame.f_code.co_filename
            if name.startswith(self._prefix):
                seen[name] = None


def _short(name: str) -> str:
    return Path(name).relative_to(_ROOT).as_posix()


async def walks_on(store: str | None = None, bus: str | None = None) -> Walks:
    """Start a server on this store, send it requests, and return the files that they entered."""
    recorder = _Recorder()
    recorder.install()
    try:
        with tempfile.TemporaryDirectory() as directory:
            # A traced request takes long enough to exceed a tenant's share, and would be decided
            # in another thread.
            config = Config(
                port=0,
                data_dir=directory,
                store=store,
                bus=bus,
                drain_s=1.0,
                tenant_work_percent=_SHARE_PERCENT,
            )
            async with asyncio.timeout(_WAIT_S_MAX), _served(config) as connection:
                return await _walk(connection, recorder)
    finally:
        recorder.uninstall()


async def _walk(connection: _Connection, recorder: _Recorder) -> Walks:
    starts: list[list[str]] = []
    results: list[list[str]] = []
    await connection.ask("PUT", "/v1/workflows/walk", _WORKFLOW)
    # The first rounds fill caches and import what is imported late.
    for _ in range(_ROUNDS + 2):
        start = partial(connection.ask, "POST", "/v1/workflows/walk/runs", {"input": {"x": 1}})
        starts.append(await recorder.record(start))
        for _step in range(2):
            leased = await connection.ask(
                "POST", "/v1/worker/lease", {"worker_id": "w", "topics": ["walk"], "wait_s": 5}
            )
            (job,) = leased["jobs"]
            result = {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded"}
            sent = {"worker_id": "w", "results": [{**result, "output": 1}]}
            send = partial(connection.ask, "POST", "/v1/worker/results", sent)
            results.append(await recorder.record(send, until=_APPLIED))
    # Every second result is of the first step, and dispatches the next one.
    return Walks(_in_all(starts[2:]), _in_all(results[4::2]))


def _in_all(walks: list[list[str]]) -> list[str]:
    """The files that are in every walk, in the order of the shortest one.

    Every other walk reads again what it had cached, or meets a background loop.
    """
    common = set(walks[0]).intersection(*walks[1:])
    return [name for name in min(walks, key=len) if name in common]


class _Connection:
    """A minimal HTTP connection that does not use our files."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, method: str, path: str, body: object) -> Any:  # noqa: ANN401 - any JSON
        raw = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(raw)}\r\n\r\n"
        self._writer.write(head.encode() + raw)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(answered.partition("content-length: ")[2].partition("\r\n")[0])
        text = await self._reader.readexactly(length)
        if " 200 " not in answered.partition("\r\n")[0]:
            raise RuntimeError(f"{method} {path}: {answered} {text.decode()}")
        return json.loads(text)


@asynccontextmanager
async def _served(config: Config) -> AsyncIterator[_Connection]:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        run_server(config, on_ready=lambda ready, _metrics: url.set_result(ready))
    )
    waiting: set[asyncio.Future[Any]] = {serving, url}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not url.done():
        raise RuntimeError(f"the server ended with {serving.result()}")
    host, _, port = url.result().removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield _Connection(reader, writer)
    finally:
        writer.close()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def main() -> int:
    """Print the counts, and with ``--list`` the files; return 1 if a count is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every file")
    is_listed = parser.parse_args().list
    logging.getLogger("stanchion").setLevel(logging.CRITICAL)
    is_good = True
    with ExitStack() as servers:
        redis, nats = servers.enter_context(running_server()), servers.enter_context(running_nats())
        for name, where in {"SQLite": (None, None), "Redis": (redis.url, nats.url)}.items():
            walks = asyncio.run(walks_on(*where))._asdict()
            # The first use of each slot asks for its server: by chance, that can be in all of them.
            for _ in range(_AGAIN_MAX):
                if max(map(len, walks.values())) > FILES_MAX:
                    more = asyncio.run(walks_on(*where))._asdict()
                    walks = {
                        kind: [name for name in files if name in more[kind]]
                        for kind, files in walks.items()
                    }
            for kind, files in walks.items():
                is_good = is_good and len(files) <= FILES_MAX
                count = f"{len(files)} files (at most {FILES_MAX})"
                sys.stdout.write(f"a {kind} on {name}: {count}\n")
                if is_listed:
                    sys.stdout.writelines(f"    {file}\n" for file in files)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(main())
