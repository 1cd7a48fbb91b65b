"""What drills measure is really there: a figure that could not be read is not taken for zero."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from stanchion.drills import admission, callers, processes
from stanchion.drills.admission import drift_between
from stanchion.drills.callers import DrillTenant, Sample, drill_tenant
from stanchion.drills.observe import (
    Metrics,
    monitored,
    parse_metrics,
    read_metrics,
    read_whole_metrics,
)
from stanchion.drills.processes import (
    ChildProcess,
    CouldNotRun,
    Deployment,
    ServerProcess,
    free_port,
    running_valkey,
)
from stanchion.drills.promises.admission import AdmissionSeen, judge_admission
from stanchion.drills.retry import _RecordingTransport
from stanchion.sim import loop
from stanchion.transport.messages import HttpReply, Request
from tests.drills.test_judging import GOOD

SOON_S = 5.0


class Replicas(DrillTenant):
    """A tenant of replicas that answer each call with one of these."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        super().__init__(["http://127.0.0.1:9"] * len(answers), "drill-x")
        self._answers = answers

    async def call(
        self,
        method: str,  # noqa: ARG002 - the answer is the same to all
        path: str,  # noqa: ARG002
        body: object = None,  # noqa: ARG002
        *,
        key: str | None = None,  # noqa: ARG002
        replica: int | None = None,
        timeout_s: float = SOON_S,  # noqa: ARG002
    ) -> Sample:
        status, document = self._answers[replica or 0]
        return Sample(at=0.0, took_s=0.0, status=status, document=document)


async def test_metrics_that_a_replica_did_not_give_are_not_zero() -> None:
    page = "stanchion_slot_drift_total 0.0\n"
    assert (await read_metrics(Replicas((200, page), (200, page)))).silent == 0
    for deaf in ((0, ""), (401, {"code": "unauthorized"}), (404, "<html>"), (503, "overloaded")):
        replicas = Replicas((200, page), deaf)
        assert (await read_metrics(replicas)).silent == 1
        with pytest.raises(CouldNotRun, match="do not answer /metrics"):
            await read_whole_metrics(replicas, within_s=0.0)


def drifted(number: float, *, silent: int = 0) -> Metrics:
    return Metrics(0.0, parse_metrics(f"stanchion_slot_drift_total {number}"), silent=silent)


@pytest.mark.parametrize(
    ("before", "after", "is_whole", "expected"),
    [
        (drifted(2), drifted(2), True, 0.0),
        (drifted(2), drifted(3), True, 1.0),
        (drifted(2), drifted(2), False, None),
        (drifted(2, silent=1), drifted(2), True, None),
        (drifted(2), drifted(2, silent=1), True, None),
        # Another replica behind the same address.
        (drifted(2), drifted(0), True, None),
    ],
)
def test_drift_is_judged_only_if_the_metrics_of_all_replicas_were_read(
    before: Metrics, after: Metrics, is_whole: bool, expected: float | None
) -> None:
    drift = drift_between(before, after, is_whole=is_whole)
    assert drift == expected
    promises = judge_admission(AdmissionSeen(bursts=(GOOD,), drift=drift))
    assert [each.holds for each in promises if each.id == "drift"] == (
        [] if expected is None else [expected == 0]
    )


async def test_a_monitor_that_the_lock_server_ended_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watching = monitored(port)
    async with asyncio.timeout(SOON_S):
        commands = await watching.__aenter__()
        await commands.ended.wait()
        with pytest.raises(CouldNotRun, match="MONITOR"):
            await watching.__aexit__(None, None, None)
    server.close()


async def test_bursts_whose_process_fails_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_words: object, **_options: object) -> list[Sample]:
        return []

    def failing(*_words: object, log: Path, **_options: object) -> ChildProcess:
        words = [sys.executable, "-c", "raise SystemExit('no noise')"]
        with log.open("wb") as sink:
            process = subprocess.Popen(words, stderr=sink)
        process.wait()
        return ChildProcess(process)

    replica = ServerProcess(port=0, flags=(), settings={}, log=tmp_path / "replica.log")
    monkeypatch.setattr(replica, "processor_ns", lambda: (0, 0))
    deployment = Deployment(replicas=(replica,), directory=tmp_path)
    quiet, noisy = Replicas((200, {})), Replicas((200, {}))
    monkeypatch.setattr(quiet, "paced", none)
    monkeypatch.setattr(admission, "start_program", failing)
    monkeypatch.setattr(admission, "_NOISE_STARTS_S", 0.0)
    with pytest.raises(CouldNotRun, match="no noise"):
        await admission._beside(  # noqa: SLF001 - what the drill calls between its servers
            quiet, noisy, Random(1), deployment, 1.0, "hold"
        )


NO_DOCUMENTS = [b"<html>502 Bad Gateway</html>", b"[]", b"", b'{"code": "\xff"}']


@pytest.mark.parametrize("body", NO_DOCUMENTS)
async def test_an_answer_that_is_no_document_is_recorded_and_passed_on(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From a load balancer in front of a deployment in use.
    answer = HttpReply(status=502, headers={"retry-after": "1"}, body=body)

    async def send(_request: Request) -> HttpReply:
        return answer

    recording = _RecordingTransport("http://127.0.0.1:9", 0.0, hides_retry_after=True)
    monkeypatch.setattr(recording, "_inner", SimpleNamespace(send=send))
    request = Request(name="start", method="POST", path="/", timeout_s=1.0, is_repeatable=True)
    outcome = await recording.send(request)
    assert isinstance(outcome, HttpReply)
    assert (outcome.status, outcome.body, outcome.headers) == (502, body, {})
    assert [(each.status, each.code) for each in recording.tries] == [(502, None)]


@pytest.mark.parametrize("body", NO_DOCUMENTS)
async def test_an_answer_that_is_no_document_has_no_code(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(_request: Request) -> HttpReply:
        return HttpReply(status=502, headers={}, body=body)

    tenant = DrillTenant(["http://127.0.0.1:9"], "drill-x")
    monkeypatch.setattr(tenant, "_ways", [SimpleNamespace(send=send)])
    sample = await tenant.call("GET", "/v1/tenant")
    assert (sample.status, sample.code) == (502, None)


def test_a_server_is_not_taken_for_another_one_at_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another drill may have taken the port since it was found free: its server answers as well.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerProcess(
            port=port, flags=(), settings={}, log=tmp_path / "log", program=("-c", "pass")
        )
        monkeypatch.setattr(server, "is_ready", lambda: True)
        with pytest.raises(CouldNotRun, match=f"port {port} of this machine is taken"):
            server.start()


def test_a_valkey_of_another_drill_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_valkey() as other:
        ports = iter([other.port, free_port()])
        monkeypatch.setattr(processes, "free_port", lambda: next(ports))
        with running_valkey() as ours:
            assert ours.port != other.port
            assert ours.process.poll() is None


# ── Leaving nothing behind ───────────────────────────────────────────────────────────────────────


class Deployed(DrillTenant):
    """A tenant whose one run ends only after some cancels; ``None`` for a server that is silent."""

    cancels_left: int | None = 3
    deleted = 0

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,  # noqa: ARG002
        *,
        key: str | None = None,  # noqa: ARG002
        replica: int | None = None,  # noqa: ARG002
        timeout_s: float = SOON_S,
    ) -> Sample:
        if self.cancels_left is None and method != "PUT":
            await asyncio.sleep(timeout_s)
            return Sample(at=0.0, took_s=timeout_s, status=0)
        if path.endswith("/cancel"):
            assert self.cancels_left is not None
            self.cancels_left -= 1
        self.deleted += method == "DELETE"
        status = "waiting" if self.cancels_left else "cancelled"
        runs = {"runs": [{"run_id": "r", "status": status}], "cursor": None}
        return Sample(at=0.0, took_s=0.0, status=200, document=runs)


Removed: TypeAlias = Callable[[int | None, str | None], tuple[Deployed, float]]


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> Removed:
    """Use and remove a tenant that takes so many cancels; it, and the virtual seconds it took."""

    def use(cancels: int | None, error: str | None) -> tuple[Deployed, float]:
        async def main() -> tuple[Deployed, float]:
            tenant = Deployed(["http://127.0.0.1:9"], "drill-x")
            tenant.cancels_left = cancels
            monkeypatch.setattr(callers, "DrillTenant", lambda *_words, **_options: tenant)
            since = asyncio.get_running_loop().time()
            with pytest.raises(CouldNotRun, match=error) if error else nullcontext():
                async with drill_tenant(tenant.urls, "x", is_removed=True):
                    if error == "401":
                        raise CouldNotRun("PUT was answered 401")
                    await tenant.configure(max_concurrent_runs=1)
            return tenant, asyncio.get_running_loop().time() - since

        return loop.run(main())

    return use


def test_the_tenant_of_a_drill_is_removed_once_its_busy_runs_are_cancelled(
    removed: Removed,
) -> None:
    tenant, _ = removed(12, None)
    assert (tenant.cancels_left, tenant.deleted) == (0, 1)


def test_a_tenant_that_is_left_behind_is_named_in_time(removed: Removed) -> None:
    _, took_s = removed(None, r"left behind .* stanchion tenant delete drill-x$")
    assert took_s < 30


def test_a_tenant_of_which_nothing_was_stored_is_not_removed(removed: Removed) -> None:
    tenant, took_s = removed(None, "401")
    assert (tenant.deleted, took_s) == (0, 0)


def test_every_tenant_that_is_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Deployed):
        cancels_left: int | None = None

    monkeypatch.setattr(callers, "DrillTenant", Silent)

    async def main() -> None:
        async with AsyncExitStack() as cleaning:
            for purpose in ("one", "two"):
                tenant = await cleaning.enter_async_context(
                    drill_tenant(["http://127.0.0.1:9"], purpose, is_removed=True)
                )
                await tenant.configure(max_concurrent_runs=1)

    with pytest.raises(CouldNotRun, match="drill-one-") as raised:
        loop.run(main())
    assert "drill-two-" in str(raised.value)
