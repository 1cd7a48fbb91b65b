"""Stacks: servers as somebody would run them, each a process of its own.

``sqlite`` is one server with a file. ``redis`` is one server with Valkey and NATS. ``replicas`` is
two servers with the same Valkey and NATS. Everything listens on 127.0.0.1 at free ports, is stopped
by its process id, and has a log that is shown when a test fails. Every wait here is bounded.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from stanchion.drills.processes import ServerProcess, free_port
from tests.servers import NatsServer, Server, running_nats, running_server

__all__ = ["ADMIN_KEY", "JOB_TTL_S", "RUN_TTL_S", "Kind", "Stack", "running_stack"]

JOB_TTL_S: Final = 1.5
"""Short, so that a worker's death is noticed within a test."""
RUN_TTL_S: Final = 3.0
ADMIN_KEY: Final = "sk_admin_of-the-acceptance-tests-0123456789abcdef"


class Kind(StrEnum):
    """Which servers a stack has."""

    SQLITE = "sqlite"
    REDIS = "redis"
    REPLICAS = "replicas"


class Stack:
    """Servers that belong together."""

    def __init__(
        self,
        kind: Kind,
        replicas: Sequence[ServerProcess],
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
) -> ServerProcess:
    log = directory / f"replica-{number}.log"
    return ServerProcess(port=free_port(), flags=flags, settings=variables, log=log)
