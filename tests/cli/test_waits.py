"""What a run's steps wait for, as ``run show`` finds it out."""

from __future__ import annotations

import re

import msgspec
import pytest

from stanchion.cli.errors import Exit
from stanchion.core.model import RunStatus, StepStatus
from stanchion.wire import runs
from tests.cli.cases import RUN
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script, problem


def waiting(count: int = 1) -> Said:
    """A run whose first steps have a job each, in the second attempt."""
    step = runs.StepView(
        status=StepStatus.RUNNING, attempt=2, output=None, error=None, waiting_for="job"
    )
    steps = {f"step-{number}": step for number in range(count)}
    run = msgspec.structs.replace(RUN, status=RunStatus.RUNNING, steps=steps)
    return Said(run)


def job(status: str, **more: object) -> Said:
    return Said({"status": status, "topic": "agent.plan", "worker_id": None, **more})


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        (job("ready"), "a worker for agent.plan"),
        (
            job("leased", worker_id="worker-1", lease_ends_in_ms=41_700),
            "worker worker-1, lease ends in 42 s",
        ),
        (job("leased", worker_id="worker-1"), "worker worker-1, leased"),
        (job("finished", worker_id="worker-1"), "job"),
        (problem(404, "not_found"), "job"),
        (problem(503, "store_unavailable"), "job"),
    ],
)
def test_a_step_with_a_job_says_whom_it_waits_for(
    said: Said, waits: str, cli: Cli, server: Script
) -> None:
    server.says(waiting(), said)
    outcome = cli("run", "show", "07-01h")
    assert (outcome.code, outcome.err) == (Exit.OK, "")
    line = rf"^step-0  running  2        -      {re.escape(waits)} +-$"
    assert re.search(line, outcome.out, re.MULTILINE)
    assert server.requests[-1].path == "/v1/jobs/07-01h:step-0@2"


def test_no_more_than_ten_jobs_are_asked_for(cli: Cli, server: Script) -> None:
    server.says(waiting(30), job("ready"))
    outcome = cli("run", "show", "07-01h")
    assert len(server.requests) == 1 + 10
    assert outcome.out.count("a worker for agent.plan") == 10


def test_a_program_gets_the_run_and_asks_for_jobs_itself(cli: Cli, server: Script) -> None:
    server.says(waiting())
    cli("run", "show", "07-01h", "-o", "json")
    assert len(server.requests) == 1
