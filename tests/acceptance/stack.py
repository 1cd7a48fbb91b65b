"""Stacks: servers as somebody would run them, each a process of its own.

``sqlite`` is one server with a file. ``redis`` is one server with Valkey and NATS. ``replicas`` is
two servers with the same Valkey and NATS. Everything listens on 127.0.0.1 at free ports, is stopped
by its process id, and has a log that is shown when a test fails. Every wait here is bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from tests.servers import NatsServer, Server, running_nats, running_server

__all__ = ["ADMIN_KEY", "JOB_TTL_S", "RUN_TTL_S", "Kind", "Replica", "Stack", "running_stack"]

JOB_TTL_S: Final = 1.5
"""Short, so that a worker's death is noticed within a test."""
RUN_TTL_S: Final = 3.0
ADMIN_KEY: Final = "sk_admin_of-the-acceptance-tests-0123456789abcdef"

_ROOT: Final = Path(__file__).parents[2]
_READY_S_MAX: Final = 30.0
"""A process starts slowly on a machine that is busy."""
_STOP_S_MAX: Final = 12.0
_LOOK_EVERY_S: Final = 0.02
_LOG_CHARS_MAX: Final = 6_000


class Kind(StrEnum):
    """Which servers a stack has."""

    SQLITE = "sqlite"
    REDIS = "redis"
    REPLICAS = "replicas"


class Replica:
    """One server process, which can be ended and started again at the same address."""

    def __init__(
        self, *, port: int, flags: Sequence[str], settings: Mapping[str, str], log: Path
    ) -> None:
        self.port = port
        self.log = log
        self._flags = tuple(flags)
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        # The server refuses variables that it does not know, and tests have some of their own.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("STANCHION_")
        }
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "stanchion", "serve"),
                    *("--port", str(self.port)),
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**inherited, **self._settings},
                cwd=_ROOT,
            )
        self._until_ready()

    def is_ready(self) -> bool:
        """What it says itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """Stop it in its tracks; it knows nothing of the time that passes."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a chance to write anything down."""
        self.process.kill()
        self.process.wait(_STOP_S_MAX)

    def stop(self) -> None:
        """End it in an orderly way; without one, if it will not."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self.terminate()
        try:
            self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def resident_bytes(self) -> int:
        """How much memory it has at the moment."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def last_words(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-_LOG_CHARS_MAX:]

    def _until_ready(self) -> None:
        until = time.monotonic() + _READY_S_MAX
        while time.monotonic() < until:
            if self.is_ready():
                return
            code = self.process.poll()
            if code is not None:
                raise RuntimeError(f"the server ended with {code}:\n{self.last_words()}")
            time.sleep(_LOOK_EVERY_S)
        self.stop()
        raise RuntimeError(f"the server does not become ready:\n{self.last_words()}")


class Stack:
    """Servers that belong together."""

    def __init__(
        self,
        kind: Kind,
        replicas: Sequence[Replica],
        *,
        valkey: Server | None = None,
        nats: NatsServer | None = None,
        locks: Server | None = None,
    ) -> None:
        self.kind = kind
        self.replicas = tuple(replicas)
        self._valkey = valkey
        self._nats = nats
        self._locks = locks

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(replica.url for replica in self.replicas)

    @property
    def valkey(self) -> Server:
        assert self._valkey is not None, f"a stack of kind {self.kind} has no Valkey"
        return self._valkey

    @property
    def nats(self) -> NatsServer:
        assert self._nats is not None, f"a stack of kind {self.kind} has no NATS"
        return self._nats

    @property
    def locks(self) -> Server:
        """The lock server, where it is another one than the store's."""
        assert self._locks is not None, "this stack's locks are its store's"
        return self._locks

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"── {replica.url}\n{replica.last_words()}" for replica in self.replicas)


@contextlib.contextmanager
def running_stack(
    kind: Kind, *, has_own_locks: bool = False, **settings: str | float
) -> Iterator[Stack]:
    """A stack for as long as the block lasts.

    Settings are variables of the environment without their prefix: ``job_lease_ttl_s=0.5``.
    """
    chosen = {"run_lease_ttl_s": RUN_TTL_S, "job_lease_ttl_s": JOB_TTL_S, **settings}
    variables = {f"STANCHION_{name.upper()}": str(value) for name, value in chosen.items()}
    with contextlib.ExitStack() as cleaning:
        made = tempfile.TemporaryDirectory(prefix="stack-", ignore_cleanup_errors=True)
        directory = Path(cleaning.enter_context(made))
        if kind is Kind.SQLITE:
            assert not has_own_locks, "an embedded server's run leases are in memory"
            flags = ["--data-dir", str(directory / "data")]
            stack = Stack(kind, [_replica(directory, 0, flags, variables)])
        else:
            stack = _distributed(kind, directory, cleaning, variables, has_own_locks=has_own_locks)
        for replica in stack.replicas:
            cleaning.callback(replica.stop)
            replica.start()
        yield stack


def _distributed(
    kind: Kind,
    directory: Path,
    cleaning: contextlib.ExitStack,
    variables: Mapping[str, str],
    *,
    has_own_locks: bool,
) -> Stack:
    valkey = cleaning.enter_context(running_server())
    nats = cleaning.enter_context(running_nats())
    locks = cleaning.enter_context(running_server()) if has_own_locks else None
    variables = {**variables, "STANCHION_NAMESPACE": f"stack-{secrets.token_hex(4)}"}
    replicas = []
    for number in range(2 if kind is Kind.REPLICAS else 1):
        flags = ["--store", valkey.url, "--bus", nats.url]
        if locks is not None:
            flags += ["--locks", locks.url]
        flags += ["--data-dir", str(directory / f"data-{number}")]
        replicas.append(_replica(directory, number, flags, variables))
    return Stack(kind, replicas, valkey=valkey, nats=nats, locks=locks)


def _replica(
    directory: Path, number: int, flags: Sequence[str], variables: Mapping[str, str]
) -> Replica:
    log = directory / f"replica-{number}.log"
    return Replica(port=_free_port(), flags=flags, settings=variables, log=log)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
