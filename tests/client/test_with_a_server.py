"""The client and the real server: each call once, over a socket, against a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from msgspec.structs import replace

import stanchion
from stanchion.core.retry import RETRIES, RetryClass

NAP = """
id: nap
steps:
  pack: {delay_s: 0.05}
  review: {approval: {}, needs: [pack]}
"""


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server in a process of its own, stopped afterwards."""
    command = [sys.executable, "-m", "stanchion", "serve", "--port", "0", "--store", "memory:"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        lines = (msgspec.json.decode(line) for line in process.stdout)
        ready = next(line for line in lines if line["event"] == "server_ready")
        draining = threading.Thread(target=lambda: list(lines))
        draining.start()
        try:
            yield ready["url"], process
        finally:
            process.terminate()
            process.wait(20)
            draining.join(5)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (running, _process):
        yield running


def test_a_client_of_two_servers_goes_on_when_one_is_killed(url: str) -> None:
    with serving() as (first, process), stanchion.Client([first, url], tenant="two") as client:
        client.apply_workflow(NAP)
        client.start("nap")
        stanchion.Client(url, tenant="two").apply_workflow(NAP)  # The two share no store here.
        process.kill()
        process.wait(20)
        run = client.start("nap")
        assert [row.run_id for row in client.runs()] == [run.run_id]


def test_a_run_from_start_to_end_with_an_approval(url: str) -> None:
    with stanchion.Client(url, tenant="acme") as client:
        assert client.apply_workflow(NAP).version == 1
        run = client.start("nap", {"n": 1})
        with pytest.raises(stanchion.WaitTimeout):
            run.wait(timeout_s=0)
        waiting = next(each for each in run.events() if each.line.what == "approval_requested")
        assert waiting.line.run_id == run.run_id
        assert run.approve("review", comment="fine").run_id == run.run_id
        assert run.wait(timeout_s=10).status == "succeeded"
        # To the end, from the beginning and from the middle.
        whole = [each.line.what for each in run.events()]
        assert (whole[0], whole[-1]) == ("run_started", "run_succeeded")
        rest = [each.line.what for each in client.events(run.run_id, after=waiting.id)]
        assert rest == whole[-len(rest) :] != whole
        assert [line.what for line in run.timeline().entries] == whole
        assert [row.run_id for row in client.runs(status="succeeded")] == [run.run_id]
        assert client.workflow("nap").version == 1
        with pytest.raises(stanchion.Conflict):
            run.reject("review")


def test_what_the_server_refuses_has_its_error(url: str) -> None:
    with stanchion.Client(url, tenant="acme") as client:
        client.apply_workflow(NAP)
        with pytest.raises(stanchion.NotFound):
            client.get("no-such-run")
        with pytest.raises(stanchion.InvalidRequest) as caught:
            client.apply_workflow({"id": "bad", "steps": {"a": {"topic": "t", "needs": ["b"]}}})
        assert caught.value.errors[0].path == "steps.a.needs[0]"
        with pytest.raises(stanchion.InvalidRequest, match="body_too_large"):
            client.start("nap", {"text": "x" * 1_100_000})
        first = client.start("nap", {"n": 1}, idempotency_key="k")
        again = client.start("nap", {"n": 1}, idempotency_key="k")
        assert (first.run_id, first.is_replay, again.is_replay) == (again.run_id, False, True)
        with pytest.raises(stanchion.IdempotencyMismatch):
            client.start("nap", {"n": 2}, idempotency_key="k")
        assert first.cancel().status == first.cancel().status == "cancelled"


def test_a_full_tenant_is_told_with_its_numbers(url: str) -> None:
    impatient = stanchion.Pace(
        policies={each: replace(RETRIES[each], attempts_max=1) for each in RetryClass}
    )

    async def main() -> list[stanchion.AsyncRunHandle | BaseException]:
        async with stanchion.AsyncClient(url, tenant="first", pace=impatient) as client:
            await client.apply_workflow(NAP)
            await client.request("PUT", "/v1/admin/tenants/first", {"max_concurrent_runs": 2})
            starts = (client.start("nap") for _ in range(10))
            return await asyncio.gather(*starts, return_exceptions=True)

    outcomes = asyncio.run(main())
    full = [each for each in outcomes if isinstance(each, stanchion.TenantFull)]
    assert len([each for each in outcomes if isinstance(each, stanchion.AsyncRunHandle)]) == 2
    assert len(full) == 8
    assert all((each.limit, each.active) == (2, 2) for each in full)
    assert all(0 < each.retry_after_s <= 30 for each in full)


def test_single_jobs_are_submitted_and_seen(url: str) -> None:
    with stanchion.Client(url, tenant="second") as client:
        submitted = client.submit_job("agent.plan", [1, 2])
        assert client.job(submitted.job_id).topic == "agent.plan"
        assert client.get(submitted.run_id).input == {"input": [1, 2]}
    with stanchion.Client(url, tenant="acme") as other, pytest.raises(stanchion.NotFound):
        other.job(submitted.job_id)
