"""Servers to measure: whole processes, as in production.

``embedded`` is one server on a SQLite file. ``distributed`` is one or several on a Valkey that
syncs its log every second, and a NATS. All processes listen on 127.0.0.1 at free ports and are
stopped by process id.
"""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from stanchion.drills.processes import ServerProcess, free_port
from tests.servers import running_nats, running_server

__all__ = [
    "OURS",
    "ROOT",
    "Backends",
    "Site",
    "backends",
    "cpu_s",
    "distributed",
    "echoing",
    "embedded",
    "free_port",
    "process",
    "python_of",
    "until_answering",
    "working",
]

ROOT: Final = Path(__file__).parents[1]
OURS: Final = ("-m", "stanchion")
"""What Python runs as a server."""
STOP_S_MAX: Final = 10.0
READY_S_MAX: Final = 30.0
LOOK_EVERY_S: Final = 0.05
_DURABLE: Final = ("--appendonly", "yes", "--appendfsync", "everysec")


class Backends(msgspec.Struct, frozen=True):
    """A Valkey and a NATS."""

    store: str
    bus: str
    pids: tuple[int, ...]


class Site:
    """The servers of one deployment."""

    def __init__(self, replicas: Sequence[ServerProcess]) -> None:
        self.replicas = tuple(replicas)

    @property
    def url(self) -> str:
        return self.replicas[0].url

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(replica.url for replica in self.replicas)

    @property
    def cpu_s(self) -> float:
        """Return the processor time of the servers so far."""
        return sum(cpu_s(replica.process.pid) for replica in self.replicas)

    @property
    def resident_bytes(self) -> int:
        return sum(replica.resident_bytes() for replica in self.replicas)

    def call(self, method: str, path: str, body: object = None, tenant: str = "default") -> Any:  # noqa: ANN401 - any JSON value
        """Send one set-up request, which must succeed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.replicas[0].port, timeout=30.0)
        headers = {"Content-Type": "application/json", "X-Stanchion-Tenant": tenant}
        try:
            connection.request(method, path, msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == http.HTTPStatus.OK, (method, path, answer.status, text)
        return msgspec.json.decode(text)

    def prepare(
        self,
        workflows: Mapping[str, Mapping[str, object]],
        *,
        tenant: str = "default",
        cap: int | None = None,
    ) -> None:
        """Create a tenant with these workflows, by default without a cap."""
        self.call("PUT", f"/v1/admin/tenants/{tenant}", {"max_concurrent_runs": cap})
        for name, definition in workflows.items():
            self.call("PUT", f"/v1/workflows/{name}", definition, tenant)


@contextmanager
def embedded(file: Path | None = None, *, program: Sequence[str] = OURS) -> Iterator[Site]:
    """One server on a SQLite file: a new one, unless one is given."""
    flags = ["--store", f"sqlite:{file}"] if file else []
    with _serving(flags, count=1, program=program) as site:
        yield site


@contextmanager
def distributed(
    replicas: int = 1,
    behind: Backends | None = None,
    *,
    namespace: str | None = None,
    program: Sequence[str] = OURS,
) -> Iterator[Site]:
    """Servers on a Valkey and a NATS: new ones, unless some are given."""
    with ExitStack() as stack:
        behind = behind or stack.enter_context(backends())
        name = namespace or f"bench-{secrets.token_hex(4)}"
        flags = ["--store", behind.store, "--bus", behind.bus, "--namespace", name]
        yield stack.enter_context(_serving(flags, count=replicas, program=program))


@contextmanager
def backends() -> Iterator[Backends]:
    """Run a Valkey with an append-only file, and a NATS."""
    with running_server(None, *_DURABLE) as valkey, running_nats() as nats:
        yield Backends(valkey.url, nats.url, (valkey.process.pid, nats.process.pid))


@contextmanager
def _serving(flags: Sequence[str], count: int, program: Sequence[str]) -> Iterator[Site]:
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(made))
        replicas = []
        for number in range(count):
            replica = ServerProcess(
                port=free_port(),
                flags=["--data-dir", str(directory / f"data-{number}"), *flags],
                settings={"STANCHION_LOG_LEVEL": "error"},
                log=directory / f"server-{number}.log",
                program=program,
            )
            stack.callback(replica.stop)
            replica.start()
            replicas.append(replica)
        yield Site(replicas)


@contextmanager
def working(
    url: str, concurrency: int = 64, *, checkout: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker process with our SDK, or with that of another checkout."""
    flags = ["--url", url, "--concurrency", str(concurrency), "--drain-s", "2"]
    command = [python_of(checkout), *OURS, "worker", "bench.worker_app:app", *flags]
    with process(command, directory=checkout) as worker:
        yield worker


def python_of(checkout: Path) -> str:
    """This interpreter, or that of another checkout."""
    here = checkout.resolve() == ROOT
    return sys.executable if here else str(checkout.resolve() / ".venv" / "bin" / "python")


@contextmanager
def echoing() -> Iterator[str]:
    """Run the bare endpoint; yield its address."""
    port = free_port()
    with process([sys.executable, "-m", "bench.echo", str(port)]) as echo:
        until_answering(echo, port, "/readyz")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def process(
    command: Sequence[str],
    *,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process during the block. Its output is shown only if it fails."""
    started = subprocess.Popen(  # noqa: S603 - what a benchmark names
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=directory or ROOT,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        try:
            started.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def until_answering(of: subprocess.Popen[bytes], port: int, path: str) -> None:
    """Wait until a server answers with 200 at this path."""
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until:
        assert of.poll() is None, f"{of.args!r} ended with {of.returncode}"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        time.sleep(LOOK_EVERY_S)
    raise RuntimeError(f"{of.args!r} does not become ready")


def cpu_s(pid: int) -> float:
    """The processor time of a process, with all threads it has had, to the nanosecond."""
    clock = ~pid << 3 | _CPUCLOCK_SCHED  # as clock_getcpuclockid(3) makes it
    return time.clock_gettime_ns(clock) / 1_000_000_000


_CPUCLOCK_SCHED: Final = 2
