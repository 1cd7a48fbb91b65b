"""Run the peers as their documentation describes, each in a separate directory."""

from __future__ import annotations

import http.client
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from bench.callers import Ran
from bench.loadgen import Load, send
from bench.peers.installing import PYTHON, RESTATE, TEMPORAL, missing
from bench.serving import ROOT, free_port, process, until_answering

__all__ = ["PEERS", "Peer"]

AT_ONCE = 64
GRACE_S = 90.0


class Peer(msgspec.Struct, frozen=True):
    """Another system that does the same work."""

    name: str
    needs: tuple[Path, ...]
    measure: Callable[[float], Ran]
    """For so many seconds, after a third as many to get warm."""

    @property
    def missing(self) -> str:
        """Why it cannot be measured; empty if it can."""
        return missing(*self.needs)


def _restate(seconds: float) -> Ran:
    """Server and service are two processes; callers use the server's HTTP ingress."""
    ingress, admin, node, service = (free_port() for _ in range(4))
    with tempfile.TemporaryDirectory(prefix="restate-", ignore_cleanup_errors=True) as directory:
        environment = {
            "RESTATE_BASE_DIR": directory,
            "RESTATE_BIND_IP": "127.0.0.1",
            "RESTATE_BIND_PORT": str(node),
            "RESTATE_ADVERTISED_HOST": "127.0.0.1",
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_INGRESS__BIND_PORT": str(ingress),
            "RESTATE_ADMIN__BIND_PORT": str(admin),
            "RESTATE_DISABLE_TELEMETRY": "true",
            "RUST_LOG": "error",
        }
        serve = [
            *(str(PYTHON), "-m", "hypercorn", "--bind", f"127.0.0.1:{service}"),
            *("--log-level", "error", "bench.peers.restate_service:app"),
        ]
        with process([str(RESTATE)], environment=environment) as server, process(serve) as app:
            until_answering(server, admin, "/health")
            until_answering(app, service, "/health")
            _register(admin, f"http://127.0.0.1:{service}")
            url = f"http://127.0.0.1:{ingress}/Flow/run"
            load = Load(url=url, body='{"n":7}', connections=AT_ONCE, seconds=seconds)
            send(msgspec.structs.replace(load, seconds=seconds / 3)).only("200")
            seen = send(load).only("200")
    return Ran(runs=seen.requests, seconds=seen.seconds, latencies_ms=seen.latencies_ms)


def _register(admin: int, service: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=30.0)
    body = msgspec.json.encode({"uri": service})
    connection.request("POST", "/deployments", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status in {200, 201}, (answer.status, text)


def _temporal(seconds: float) -> Ran:
    """The development server on a file, a worker process, and a process of callers."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="temporal-", ignore_cleanup_errors=True) as directory:
        serve = [
            *(str(TEMPORAL), "server", "start-dev", "--headless", "--log-level", "error"),
            *("--ip", "127.0.0.1", "--port", str(port)),
            *("--db-filename", str(Path(directory) / "temporal.db")),
        ]
        work = [str(PYTHON), "-m", "bench.peers.temporal_worker", address]
        with process(serve) as server:
            _until_healthy(server, address)
            with process(work):
                return _told("bench.peers.temporal_load", address, seconds)


def _until_healthy(server: subprocess.Popen[bytes], address: str) -> None:
    command = [str(TEMPORAL), "operator", "cluster", "health", "--address", address]
    for _ in range(30):
        assert server.poll() is None, "temporal ended"
        # The command itself waits for a while.
        done = subprocess.run(command, capture_output=True, check=False, timeout=30)  # noqa: S603 - theirs
        if done.returncode == 0:
            return
    raise RuntimeError("temporal does not become ready")


def _dbos(seconds: float) -> Ran:
    """A library: one process on a SQLite file."""
    with tempfile.TemporaryDirectory(prefix="dbos-", ignore_cleanup_errors=True) as directory:
        return _told("bench.peers.dbos_runs", str(Path(directory) / "dbos.sqlite"), seconds)


def _told(module: str, where: str, seconds: float) -> Ran:
    """Run a module in the peers' environment, and parse its last output line."""
    command = [str(PYTHON), "-m", module, where, str(AT_ONCE), str(seconds), str(seconds / 3)]
    done = subprocess.run(  # noqa: S603 - a module of ours
        command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=seconds * 2 + GRACE_S
    )
    # The exit code is ignored: temporalio's threads sometimes outlive the interpreter and abort.
    assert done.stdout, f"{module} ended with {done.returncode} and said nothing"
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Ran)


PEERS: Final = (
    Peer("Restate", (PYTHON, RESTATE), _restate),
    Peer("Temporal's dev server", (PYTHON, TEMPORAL), _temporal),
    Peer("DBOS on SQLite", (PYTHON,), _dbos),
)
