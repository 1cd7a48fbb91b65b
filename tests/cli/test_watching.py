"""Watching a run without a terminal: remarks on one stream, the result on the other."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from stanchion.cli.errors import Exit
from stanchion.core.model import RunStatus, StepStatus
from stanchion.wire import admin, runs
from tests.cli.cases import RUN
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script, problem


def view(status: RunStatus, **steps: StepStatus) -> Said:
    views = {
        name: runs.StepView(status=step, attempt=1, output=None, error=None)
        for name, step in steps.items()
    }
    return Said(msgspec.structs.replace(RUN, status=status, steps=views, error=None))


def test_each_change_is_told_once(cli: Cli, server: Script) -> None:
    server.says(
        view(RunStatus.RUNNING, plan=StepStatus.RUNNING, search=StepStatus.PENDING),
        view(RunStatus.RUNNING, plan=StepStatus.RUNNING, search=StepStatus.PENDING),
        view(RunStatus.RUNNING, plan=StepStatus.SUCCEEDED, search=StepStatus.RUNNING),
        view(RunStatus.SUCCEEDED, plan=StepStatus.SUCCEEDED, search=StepStatus.SUCCEEDED),
    )
    outcome = cli("run", "watch", "07-01h")
    assert outcome.err.splitlines() == [
        "run: running",
        "step plan: running",
        "step plan: succeeded",
        "step search: running",
        "step search: succeeded",
        "run: succeeded",
    ]
    assert "status    succeeded\n" in outcome.out


def test_the_first_look_is_at_once_and_the_next_ones_wait(cli: Cli, server: Script) -> None:
    server.says(view(RunStatus.RUNNING), view(RunStatus.SUCCEEDED))
    cli("run", "watch", "07-01h")
    assert [request.query for request in server.requests] == [{}, {"wait": "1"}]


@pytest.mark.parametrize("status", [status for status in RunStatus if status.is_finished])
def test_only_a_run_that_succeeded_ends_with_zero(
    status: RunStatus, cli: Cli, server: Script
) -> None:
    server.says(view(status))
    expected = Exit.OK if status is RunStatus.SUCCEEDED else Exit.FAILED
    assert cli("run", "watch", "07-01h").code == expected


def test_a_program_gets_the_finished_run_and_nothing_else(cli: Cli, server: Script) -> None:
    started = Said(runs.StartAnswer("07-01h", RunStatus.RUNNING))
    server.says(started, view(RunStatus.RUNNING), view(RunStatus.SUCCEEDED))
    outcome = cli("run", "start", "research", "--watch", "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    assert msgspec.convert(json.loads(outcome.out), runs.RunView).status is RunStatus.SUCCEEDED


def test_start_and_rerun_can_stay_until_the_end(cli: Cli, server: Script) -> None:
    started = Said(runs.StartAnswer("07-01h", RunStatus.RUNNING))
    for args in (("start", "research"), ("rerun", "06-99z")):
        server.says(started, view(RunStatus.FAILED))
        outcome = cli("run", *args, "--watch")
        assert outcome.code == Exit.FAILED
        assert "run 07-01h\n" in outcome.err


def test_a_server_that_goes_away_takes_only_the_view_with_it(cli: Cli, server: Script) -> None:
    server.says(view(RunStatus.RUNNING), problem(503, "draining"))
    outcome = cli("run", "watch", "07-01h")
    assert outcome.code == Exit.UNAVAILABLE
    assert "the run goes on; to see it again: stanchion run watch 07-01h" in outcome.err


def test_a_server_that_drains_and_answers_at_once_is_not_asked_in_a_loop(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("stanchion.cli.runs._APART_S", 60)
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.says(*[view(RunStatus.RUNNING)] * 3, view(RunStatus.SUCCEEDED))
    assert cli("run", "watch", "07-01h").code == Exit.OK
    assert [round(pause, -1) for pause in pauses] == [60, 60]


def test_a_run_that_is_not_there_does_not_go_on(cli: Cli, server: Script) -> None:
    server.says(problem(404, "not_found"))
    outcome = cli("run", "watch", "07-01h")
    assert outcome.code == Exit.NOT_FOUND
    assert "goes on" not in outcome.err


def test_a_list_is_shown_again_until_the_interrupt(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    empty = Said(admin.WorkerList(()))
    server.says(empty, empty)
    outcome = cli("worker", "list", "--watch")
    assert outcome.code == Exit.INTERRUPTED
    assert outcome.err.count("no workers") == 2
    assert pauses == [2.0, 2.0]
