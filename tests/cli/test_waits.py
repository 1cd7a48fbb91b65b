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


def limited(step: str) -> Said:
    """Why, if a limit holds back the job of one step."""
    blocker = {"kind": "limit", "id": "llm"}
    other = {"code": "job_ready", "step_id": "other", "blocked_by": {"kind": "job", "id": "j"}}
    found = {"code": "topic_limited", "step_id": step, "blocked_by": blocker}
    return Said({"findings": [found, other]})


NO_FINDING = Said({"findings": []})


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
    server.says(waiting(), said, NO_FINDING)
    outcome = cli("run", "show", "07-01h")
    assert (outcome.code, outcome.err) == (Exit.OK, "")
    line = rf"^step-0  running  2        -      {re.escape(waits)} +-$"
    assert re.search(line, outcome.out, re.MULTILINE)
    assert server.requests[1].path == "/v1/jobs/07-01h:step-0@2"


@pytest.mark.parametrize(
    ("told", "waits"),
    [
        (limited("step-0"), ["topic limit llm", "a worker for agent.plan"]),
        (limited("step-1"), ["a worker for agent.plan", "topic limit llm"]),
        (problem(503, "store_unavailable"), ["a worker for agent.plan"] * 2),
    ],
)
def test_a_job_that_a_topic_limit_holds_back_waits_for_the_limit(
    told: Said, waits: list[str], cli: Cli, server: Script
) -> None:
    server.says(waiting(2), job("ready"), job("ready"), told)
    rows = re.findall("^step-.*$", cli("run", "show", "07-01h").out, re.MULTILINE)
    assert [wait in row for wait, row in zip(waits, rows, strict=True)] == [True, True], rows
    asked = [request.path for request in server.requests[1:]]
    assert asked == [
        *(f"/v1/jobs/07-01h:step-{number}@2" for number in range(2)),
        "/v1/runs/07-01h/why",
    ]


def test_no_more_than_ten_jobs_are_asked_for(cli: Cli, server: Script) -> None:
    server.says(waiting(30), *[job("ready")] * 10, NO_FINDING)
    outcome = cli("run", "show", "07-01h")
    assert len(server.requests) == 1 + 10 + 1
    assert outcome.out.count("a worker for agent.plan") == 10


def test_a_program_gets_the_run_and_asks_for_jobs_itself(cli: Cli, server: Script) -> None:
    server.says(waiting())
    cli("run", "show", "07-01h", "-o", "json")
    assert len(server.requests) == 1
