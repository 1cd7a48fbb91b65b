"""Who asks, for whom, and with what in the body."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stanchion.cli import api
from stanchion.cli.errors import Exit
from stanchion.core.model import RunStatus, WorkflowSource
from stanchion.core.rerun import RerunAction, RerunVersion
from stanchion.transport.blocking import BlockingTransport
from stanchion.transport.messages import Request
from stanchion.wire import admin, runs
from tests.cli.cases import AUDIT, BATCH, RUN, SCHEDULE
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script, problem, running_script

LIST = Said(runs.RunList(()))
STARTED = Said(runs.StartAnswer("07-01h", RunStatus.RUNNING))


def test_without_a_key_and_a_tenant_neither_is_sent(cli: Cli, server: Script) -> None:
    server.says(LIST)
    cli("run", "list")
    headers = server.requests[-1].headers
    assert "Authorization" not in headers
    assert "X-Stanchion-Tenant" not in headers


def test_key_and_tenant_come_from_the_environment_and_flags_win(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANCHION_API_KEY", "sk_one")
    monkeypatch.setenv("STANCHION_TENANT", "first")
    server.says(LIST)
    cli("run", "list")
    cli("run", "list", "--api-key", "sk_two", "--tenant", "second")
    asked = [
        (request.headers["Authorization"], request.headers["X-Stanchion-Tenant"])
        for request in server.requests
    ]
    assert asked == [("Bearer sk_one", "first"), ("Bearer sk_two", "second")]


def test_the_key_may_come_from_a_file_and_a_flag_wins(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.says(Said({"runs": []}))
    file = tmp_path / "key"
    file.write_text("sk_file\n", encoding="utf-8")
    monkeypatch.setenv("STANCHION_API_KEY_FILE", str(file))
    assert cli("run", "list").code == 0
    assert cli("run", "list", "--api-key", "sk_flag").code == 0
    keys = [request.headers["Authorization"] for request in server.requests]
    assert keys == ["Bearer sk_file", "Bearer sk_flag"]
    monkeypatch.setenv("STANCHION_API_KEY", "sk_env")
    both = cli("run", "list")
    assert both.code == Exit.USAGE
    assert "set STANCHION_API_KEY or STANCHION_API_KEY_FILE" in both.err
    monkeypatch.delenv("STANCHION_API_KEY")
    file.unlink()
    missing = cli("run", "list")
    assert missing.code == Exit.USAGE
    assert f"STANCHION_API_KEY_FILE: the file '{file}' cannot be read" in missing.err


def test_of_several_servers_the_first_that_answers_is_asked(cli: Cli, server: Script) -> None:
    server.says(STARTED)
    with socket.socket() as taken:  # Bound and not listening: refused.
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert cli("run", "start", "w", "--url", f"{dead},{server.url}").code == 0
        nowhere = cli("run", "list", "--url", f"{dead},{dead}/v2")
    assert nowhere.code == Exit.UNAVAILABLE
    assert "no server answers: no connection to 127.0.0.1" in nowhere.err
    assert len(server.requests) == 1


def test_all_tenants_are_asked_for_by_the_header(cli: Cli, server: Script) -> None:
    row = {
        "run_id": "07-01h",
        "workflow_id": "w",
        "workflow_version": 1,
        "status": "failed",
        "created_at": "2026-11-15T19:00:00Z",
        "finished_at": None,
        "error": None,
        "tenant": "acme",
        "risk": "high",
        "labels": {"team": "red"},
    }
    server.says(Said({"runs": [row]}))
    said = cli("run", "list", "--tenant", "*")
    assert server.requests[0].headers["X-Stanchion-Tenant"] == "*"
    assert "acme" in said.out
    assert "team:red" in said.out


def test_a_refusal_of_the_tenant_header_names_the_flag(cli: Cli, server: Script) -> None:
    detail = "X-Stanchion-Tenant: '*' is not possible here"
    server.says(problem(422, "invalid_request", detail=detail))
    said = cli("workflow", "list", "--tenant", "*")
    assert "--tenant: '*' is not possible here" in said.err


def test_a_filter_of_time_may_be_an_age(cli: Cli, server: Script) -> None:
    server.says(LIST)
    assert (
        cli("run", "list", "--since", "2h", "--status", "failed", "--status", "running").code == 0
    )
    assert server.requests[-1].query["since"].endswith("+00:00")
    wrong = cli("run", "list", "--until", "yesterday")
    assert (wrong.code, "--until: 'yesterday'" in wrong.err) == (Exit.USAGE, True)


@pytest.mark.parametrize("time", ["999999d", "0001-01-01T00:00:00+23:00"])
@pytest.mark.parametrize("of", ["run", "audit", "decision"])
def test_a_time_that_no_calendar_has_is_a_wrong_use(cli: Cli, of: str, time: str) -> None:
    wrong = cli(of, "list", "--since", time)
    assert (wrong.code, f"--since: '{time}' is before" in wrong.err) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    "args", [("run", "show", "a\udcff"), ("run", "list", "--workflow", "a\udcff")]
)
def test_an_argument_that_is_no_text_is_a_wrong_use(cli: Cli, args: tuple[str, ...]) -> None:
    wrong = cli(*args)
    assert (wrong.code, "is not UTF-8" in wrong.err) == (Exit.USAGE, True)


def test_an_input_that_is_nested_too_deeply_is_a_wrong_use(cli: Cli) -> None:
    wrong = cli("run", "start", "report", "--input", "[" * 50_000)
    assert (wrong.code, "it is nested too deeply" in wrong.err) == (Exit.USAGE, True)


def test_a_url_whose_host_no_name_server_could_know_is_a_wrong_use(cli: Cli) -> None:
    wrong = cli("run", "list", "--url", "http://a..b:8420")
    assert (wrong.code, "not the URL of a server" in wrong.err) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("team:red", "team:red"),
        ("team=red", "team:red"),
        ("url:a=b", "url:a=b"),
        ("url=a:b", "url:a:b"),
    ],
)
def test_a_label_is_given_as_lists_show_it_or_with_an_equals_sign(
    cli: Cli, server: Script, given: str, sent: str
) -> None:
    server.says(LIST)
    assert cli("run", "list", "--label", given).code == 0
    assert server.requests[-1].query["label"] == sent


@pytest.mark.parametrize("given", ["red", ":red", "team:", "="])
def test_what_is_no_label_is_refused_with_the_form(cli: Cli, given: str) -> None:
    wrong = cli("run", "list", "--label", given)
    assert wrong.code == Exit.USAGE
    assert "not NAME:VALUE" in wrong.err


@pytest.mark.parametrize(
    "command",
    [("run", "start", "w"), ("schedule", "set", "s", "--workflow", "w", "--every", "60")],
)
def test_a_label_that_is_given_twice_is_refused(
    cli: Cli, server: Script, command: tuple[str, ...]
) -> None:
    wrong = cli(*command, "--label", "team:red", "--label", "a:b", "--label", "team=blue")
    assert wrong.code == Exit.USAGE
    assert "error: --label team is given twice: team:red and team:blue\n" in wrong.err
    assert server.requests == []


@pytest.mark.parametrize(
    ("step", "note"),
    [
        ({"status": "succeeded"}, "no items of step report: it is not a for-each\n"),
        ({"status": "running"}, "no items of step report: it is not a for-each\n"),
        ({"status": "pending"}, "no items of step report: the step is pending\n"),
        (
            {"status": "failed"},
            (
                "no items of step report: it is not a for-each, or it ended before its list was"
                " known\n"
            ),
        ),
        ({"status": "succeeded", "items_total": 0}, "no items of step report\n"),
    ],
)
def test_a_step_without_items_says_why(
    cli: Cli, server: Script, step: dict[str, object], note: str
) -> None:
    none = Said({"items": [], "cursor": None})
    server.says(none, Said({"run_id": "07-01h", "steps": {"report": step}}))
    shown = cli("run", "items", "07-01h", "report")
    assert (shown.code, shown.err) == (0, note)
    server.says(none, problem(503, "store_unavailable"))
    shown = cli("run", "items", "07-01h", "report")
    assert (shown.code, shown.err) == (0, "no items of step report\n")
    server.says(none)
    server.requests.clear()
    assert cli("run", "items", "07-01h", "report", "-o", "json").err == ""
    assert len(server.requests) == 1


_KEY = {"id": "k1", "role": "admin", "tenant": "*", "revoked_at": None, "expires_at": None}


@pytest.mark.parametrize(
    ("others", "is_last"),
    [
        ({}, True),
        ({"id": "k2"}, False),
        ({"id": "k2", "role": "operator"}, True),
        ({"id": "k2", "tenant": "acme"}, True),
        ({"id": "k2", "revoked_at": "2026-11-15T19:00:00Z"}, True),
        ({"id": "k2", "expires_at": "2026-11-15T19:00:00Z"}, True),
    ],
)
def test_the_last_admin_key_is_revoked_only_with_yes(
    cli: Cli, server: Script, others: dict[str, str], is_last: bool
) -> None:
    pages = {"keys": [{**_KEY, **others}], "cursor": "c"}, {"keys": [_KEY], "cursor": None}
    server.says(*map(Said, pages), Said({**_KEY, "name": None}))
    done = cli("key", "revoke", "k1")
    assert (done.code == Exit.USAGE) is is_last
    assert ("this is the last admin key for all tenants" in done.err) is is_last
    assert ("give --yes" in done.err) is is_last


def test_only_a_key_that_is_made_without_one_can_be_the_first(cli: Cli, server: Script) -> None:
    made = {**_KEY, "name": None, "note": None, "expires_at": None, "key": "sk_k1_s"}
    server.says(*[Said(made)] * 2)
    words = ("key", "create", "--role", "admin", "--for", "*")
    assert "This is the first key" in cli(*words).out
    assert "first key" not in cli(*words, "--api-key", "sk_other").out


def test_with_yes_no_key_is_looked_at(cli: Cli, server: Script) -> None:
    server.says(Said({**_KEY, "name": None}))
    assert cli("key", "revoke", "k1", "--yes").code == 0
    assert [each.method for each in server.requests] == ["DELETE"]


def test_a_server_may_live_below_a_path(cli: Cli, server: Script) -> None:
    server.says(LIST)
    cli("run", "list", "--url", f"{server.url}/behind/proxy/")
    assert server.requests[-1].path == "/behind/proxy/v1/runs"


def test_input_comes_from_a_file_or_from_standard_input(
    cli: Cli, server: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"question": "wozu – überhaupt?"}', encoding="utf-8")
    typed = io.TextIOWrapper(io.BytesIO(b'{"question": "stdin"}'))
    monkeypatch.setattr(sys, "stdin", typed)
    server.says(STARTED)
    cli("run", "start", "research", "--input", f"@{file}")
    cli("run", "start", "research", "--input", "@-")
    asked = [request.document["input"]["question"] for request in server.requests]
    assert asked == ["wozu – überhaupt?", "stdin"]


def test_a_replay_is_told_to_a_person_and_not_to_a_program(cli: Cli, server: Script) -> None:
    replay = Said(STARTED.document, headers={"Idempotency-Replayed": "true"})
    server.says(replay)
    assert "this is the same run" in cli("run", "start", "x", "--idempotency-key", "k").err
    assert cli("run", "start", "x", "--idempotency-key", "k", "-o", "json").err == ""


LIMIT = {
    "id": "llm",
    "topics": ["llm.*"],
    "per": "tenant",
    "max_running": 3,
    "rate_per_s": 7.5,
    "running": None,
    "retry_after_ms": None,
}


def test_a_limit_keeps_what_is_not_given_and_none_clears_a_member(cli: Cli, server: Script) -> None:
    server.says(Said(LIMIT))
    assert cli("limit", "set", "llm", "--max-running", "9").code == 0
    kept = {"topics": ["llm.*"], "per": "tenant", "max_running": 9, "rate_per_s": 7.5}
    assert server.requests[-1].document == kept
    assert cli("limit", "set", "llm", "--rate-per-s", "none").code == 0
    cleared = {"topics": ["llm.*"], "per": "tenant", "max_running": 3}
    assert server.requests[-1].document == cleared
    assert "nothing to change" in cli("limit", "set", "llm").err
    for option, typed, words in (
        ("--max-running", "many", "'many' is neither a whole number nor none"),
        ("--max-running", "-1", "'-1' is neither a whole number nor none"),
        ("--rate-per-s", "fast", "'fast' is neither a number nor none"),
        ("--rate-per-s", "nan", "'nan' is neither a number nor none"),
    ):
        refused = cli("limit", "set", "llm", option, typed)
        assert (refused.code, words in refused.err) == (Exit.USAGE, True), refused.err


def test_a_new_limit_has_what_is_given_and_needs_a_topic(cli: Cli, server: Script) -> None:
    server.says(problem(404, "not_found"), Said(LIMIT))
    assert cli("limit", "set", "llm", "--topic", "llm.*", "--max-running", "9").code == 0
    assert server.requests[-1].document == {"topics": ["llm.*"], "max_running": 9}
    server.says(problem(404, "not_found"))
    without = cli("limit", "set", "llm", "--max-running", "9")
    assert (without.code, "a new one needs --topic" in without.err) == (Exit.USAGE, True)
    server.says(problem(503, "store_unavailable"))
    assert cli("limit", "set", "llm", "--max-running", "9").code == Exit.UNAVAILABLE
    assert server.requests[-1].method == "GET"


NIGHTLY = {
    "workflow_id": "research",
    "cron": "0 2 * * *",
    "timezone": "Europe/Berlin",
    "input": {"n": 1},
    "labels": {"team": "red"},
    "overlap": "skip",
    "catch_up": "one",
    "jitter_s": 30,
    "paused": True,
}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("--overlap", "allow"), {"overlap": "allow"}),
        (("--timezone", "UTC"), {"timezone": "UTC"}),
        (("--label", "team:blue"), {"labels": {"team": "blue"}}),
        (("--no-labels",), {"labels": {}}),
        (("--input", "{}", "--jitter", "0"), {"input": {}, "jitter_s": 0}),
        (("--workflow", "other"), {"workflow_id": "other"}),
    ],
)
def test_a_schedule_keeps_what_is_not_given(
    options: tuple[str, ...], changes: dict[str, object], cli: Cli, server: Script
) -> None:
    server.says(Said(msgspec.to_builtins(SCHEDULE) | NIGHTLY))
    assert cli("schedule", "set", "nightly", *options).code == 0
    assert [each.method for each in server.requests] == ["GET", "PUT"]
    assert server.requests[-1].document == NIGHTLY | changes


def test_an_interval_takes_the_place_of_a_cron_expression_and_the_other_way_round(
    cli: Cli, server: Script
) -> None:
    server.says(Said(msgspec.to_builtins(SCHEDULE) | NIGHTLY))
    assert cli("schedule", "set", "nightly", "--every", "60").code == 0
    kept = {name: value for name, value in NIGHTLY.items() if name not in {"cron", "timezone"}}
    assert server.requests[-1].document == kept | {"every_s": 60}
    by_interval = msgspec.to_builtins(SCHEDULE) | kept
    server.says(Said(by_interval | {"cron": None, "every_s": 60, "timezone": "UTC"}))
    assert cli("schedule", "set", "nightly", "--cron", "0 3 * * *").code == 0
    by_cron = {**kept, "cron": "0 3 * * *", "timezone": "UTC"}
    assert server.requests[-1].document == by_cron
    for options in (("--every", "60", "--timezone", "UTC"), ("--timezone", "Europe/Berlin")):
        wrong = cli("schedule", "set", "nightly", *options)
        assert wrong.code == Exit.USAGE
        assert "--every counts seconds, which are the same everywhere" in wrong.err
    for both in (("--every", "60", "--cron", "0 3 * * *"), ("--label", "a:b", "--no-labels")):
        assert "contradict each other" in cli("schedule", "set", "nightly", *both).err
    assert server.requests[-1].method == "GET"


def test_a_new_schedule_has_what_is_given_and_needs_a_workflow(cli: Cli, server: Script) -> None:
    server.says(problem(404, "not_found"), Said(SCHEDULE))
    assert cli("schedule", "set", "nightly", "--workflow", "research", "--every", "60").code == 0
    assert server.requests[-1].document == {"workflow_id": "research", "every_s": 60}
    server.says(problem(404, "not_found"))
    without = cli("schedule", "set", "nightly", "--every", "60")
    assert (without.code, "a new one needs --workflow" in without.err) == (Exit.USAGE, True)
    nothing = cli("schedule", "set", "nightly")
    assert (nothing.code, "nothing to change" in nothing.err) == (Exit.USAGE, True)
    server.says(problem(503, "store_unavailable"))
    unavailable = cli("schedule", "set", "nightly", "--workflow", "research", "--every", "60")
    assert unavailable.code == Exit.UNAVAILABLE
    assert server.requests[-1].method == "GET"


def test_a_dry_run_of_a_rerun_says_what_would_happen_in_80_columns(
    cli: Cli, server: Script
) -> None:
    steps = {
        "plan": runs.RerunStepPlan(RerunAction.REUSED),
        "search": runs.RerunStepPlan(RerunAction.RUNS_AGAIN, 9_998, 2),
        "review": runs.RerunStepPlan(RerunAction.SKIPPED),
        "write": runs.RerunStepPlan(RerunAction.RUNS_AGAIN),
    }
    server.says(Said(runs.RerunPlan("07-01h", "research", 3, RerunVersion.SAME, steps)))
    seen = cli("run", "rerun", "07-01h", "--only", "failed-items", "--dry-run")
    assert seen.out.splitlines() == [
        "rerun of  07-01h",
        "workflow  research@3",
        "version   same",
        "",
        "STEP    WOULD       ITEMS",
        "plan    be reused   -",
        "search  run again   9998 reused, 2 run again",
        "review  be skipped  -",
        "write   run again   -",
    ]
    [request] = server.requests
    assert request.document == {"from_step": None, "only": "failed_items", "dry_run": True}
    assert "Idempotency-Key" not in request.headers
    again = cli("run", "rerun", "07-01h", "--only", "failed_items", "--dry-run")
    assert again == seen  # the API's spelling
    shared = runs.RerunPlan("07-01h", "research", 4, RerunVersion.NEWEST, {}, WorkflowSource.SHARED)
    server.says(Said(shared))
    newest = cli("run", "rerun", "07-01h", "--version", "newest", "--dry-run")
    assert newest.out.splitlines()[1] == "workflow  research@4 (shared)"


@pytest.mark.parametrize("command", [("run", "start"), ("schedule", "trigger")])
def test_a_run_that_fails_at_once_is_told_with_its_reason(
    command: tuple[str, str], cli: Cli, server: Script
) -> None:
    error = {"code": "expression_error", "message": "input: no such key", "step": "plan"}
    server.says(Said(runs.StartAnswer("07-01h", RunStatus.FAILED)), Said({"error": error}))
    seen = cli(*command, "research")
    assert (seen.code, seen.out) == (Exit.FAILED, "07-01h  failed\n")
    assert seen.err == ("the run has failed at once: plan: input: no such key (expression_error)\n")


@pytest.mark.parametrize("words", [("start", "x"), ("batch", "x", BATCH), ("rerun", "07-01h")])
def test_an_interrupt_names_the_key_under_which_a_run_may_have_been_started(
    words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Request] = []

    def send(_self: object, request: Request) -> None:
        sent.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingTransport, "send", send)
    outcome = cli("run", *words)
    assert outcome.code == Exit.INTERRUPTED
    assert f"--idempotency-key {dict(sent[-1].headers)['Idempotency-Key']}" in outcome.err
    assert "--idempotency-key" not in cli("run", *words, "--idempotency-key", "k").err


@pytest.mark.parametrize(
    ("code", "is_said"),
    [("no_worker", True), ("queued", True), ("approval_pending", True), ("job_leased", False)],
)
def test_watching_says_why_the_run_does_not_go_on_and_what_to_do(
    code: str, is_said: bool, cli: Cli, server: Script
) -> None:
    step = {"status": "running", "attempt": 1, "error": None}
    run = {"run_id": "07-01h", "status": "running", "steps": {"plan": step}, "output": None}
    ended = {
        **run,
        **dict.fromkeys(("workflow_id", "workflow_version", "tenant", "risk", "created_at")),
        "status": "succeeded",
        "finished_at": None,
        "error": None,
    }
    why = {"findings": [{"code": code, "detail": "no worker asks", "remedy": "start one"}]}
    server.says(*[Said(run)] * 3, Said(why), Said(ended))
    seen = cli("run", "watch", "07-01h")
    assert ("no worker asks; to do: start one" in seen.err.splitlines()) is is_said


@pytest.mark.parametrize(
    ("remedy", "said"),
    [
        (
            "stanchion run cancel R, or stanchion approval list",
            "stanchion run cancel R --tenant cap, or stanchion approval list --tenant cap",
        ),
        (
            "a cap (stanchion tenant set cap --max N), or stanchion run cancel R",
            "a cap (stanchion tenant set cap --max N), or stanchion run cancel R --tenant cap",
        ),
        ("restore it; then stanchion worker list", "restore it; then stanchion worker list"),
    ],
)
def test_commands_to_do_name_the_tenant_that_was_given(
    remedy: str, said: str, cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = dict.fromkeys(("step_id", "since", "until", "blocked_by"))
    finding |= {"code": "approval_pending", "detail": "it waits", "remedy": remedy}
    server.says(*[Said({"findings": [finding]})] * 3)
    assert f"to do: {said}\n" in cli("run", "why", "07-01h", "--tenant", "cap").out
    assert f"to do: {remedy}\n" in cli("run", "why", "07-01h").out
    monkeypatch.setenv("STANCHION_TENANT", "cap")
    assert f"to do: {said}\n" in cli("run", "why", "07-01h").out


def test_a_reason_is_wrapped_between_words_and_a_command_is_not(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = dict.fromkeys(("step_id", "since", "until", "blocked_by"))
    remedy = "stanchion run cancel 07-01h with a flag or two"
    finding |= {"code": "job_ready", "detail": "the job waits for a worker", "remedy": remedy}
    server.says(Said({"findings": [finding]}))
    monkeypatch.setenv("COLUMNS", "20")
    out = cli("run", "why", "07-01h").out
    assert out.startswith("the job waits for a\nworker (job_ready)\n")
    assert f"\nto do:\n  {remedy}\n\n" in out


def test_a_long_message_is_cut_in_the_list_of_approvals(cli: Cli, server: Script) -> None:
    row = dict.fromkeys(("starter", "since", "expires_at"))
    row |= dict.fromkeys(("run_id", "step_id", "tenant", "workflow_id"), "x")
    server.says(Said({"approvals": [row | {"message": "m" * 2_000}], "cursor": None}))
    line = cli("approval", "list").out.splitlines()[1]
    assert line.endswith("mm…")
    assert len(line) < 200


@pytest.mark.parametrize("command", [("run", "list"), ("run", "show", "x"), ("key", "list")])
def test_json_of_another_service_is_not_taken_for_an_answer(
    command: tuple[str, ...], cli: Cli, server: Script
) -> None:
    server.says(Said({"hello": [{"world": 1}]}))
    seen = cli(*command)
    assert seen.code == Exit.UNAVAILABLE
    assert "is it a Stanchion server" in seen.err
    assert "Traceback" not in seen.err


def test_a_silent_server_and_a_proxys_502_lead_to_the_next_server(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says(STARTED)
    monkeypatch.setattr(api, "_SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts, and says nothing.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli("run", "start", "w", "--url", f"{url},{server.url}").code == 0
    page = Said(status=502, text=b"<html>Bad Gateway</html>")
    with running_script() as proxy:
        proxy.says(page)
        assert cli("run", "start", "w", "--url", f"{proxy.url},{server.url}").code == 0
        assert len(proxy.requests) == 1
    assert len(server.requests) == 2


def test_what_is_sent_once_goes_to_a_server_that_answers(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_SAY_AFTER_S", 0.2)
    server.says(Said({"status": "ok"}), Said({"max_concurrent_runs": 3}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli("tenant", "delete", "acme", "--yes", "--url", f"{url},{server.url}").code == 0
        assert [(each.method, each.path) for each in server.requests] == [
            ("GET", "/livez"),
            ("DELETE", "/v1/admin/tenants/acme"),
        ]
        defaults = api.ApiClient.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "patience_s", 0.6)
        seen = cli("tenant", "delete", "acme", "--yes", "--url", url)
    assert seen.code == Exit.UNAVAILABLE
    assert f"waiting for {url}: no answer for 0 s\n" in seen.err


def test_deleting_a_tenant_says_what_applies_now(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says(Said({"max_concurrent_runs": 3, "job_rate_per_s": None, "admission": None}))
    seen = cli("tenant", "delete", "acme")
    assert seen.out == "the configuration of tenant acme is deleted: the defaults apply\n"
    typed = io.StringIO("n\n")
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", typed)
    refused = cli("tenant", "delete", "acme")
    assert refused.code == Exit.INTERRUPTED
    assert refused.err.endswith("nothing was changed\n")
    assert len(server.requests) == 1
    assert cli("tenant", "delete", "acme", "--yes").code == Exit.OK


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((200, 202), Exit.OK),
        ((429, 429), Exit.FULL),
        ((200, 429), Exit.FULL),
        ((429, 503), Exit.UNAVAILABLE),
        ((404, 503), Exit.NOT_FOUND),
        ((422, 404), Exit.FAILED),
    ],
)
def test_a_batch_ends_with_the_code_of_the_refusal_that_a_retry_helps_least(
    statuses: tuple[int, int], code: Exit, cli: Cli, server: Script
) -> None:
    server.says(Said({"results": [{"status": status} for status in statuses]}))
    assert cli("run", "batch", "research", BATCH).code == code


def test_a_run_in_the_queue_is_shown_with_what_decides_its_place(cli: Cli, server: Script) -> None:
    waits = replace(RUN, status=RunStatus.QUEUED, position=3, priority=7, fairness_key="blue")
    server.says(Said(waits))
    lines = cli("run", "show", "07-01h").out.splitlines()
    assert [
        line.split(maxsplit=1) for line in lines if line.startswith(("queue ", "priority "))
    ] == [
        ["queue", "position 3"],
        ["priority", "7"],
    ]
    assert "fairness key  blue" in lines
    server.says(Said(replace(waits, fairness_key="")))
    assert "fairness key" not in cli("run", "show", "07-01h").out
    server.says(Said(replace(waits, priority=None, fairness_key=None)))
    assert "priority" not in cli("run", "show", "07-01h").out, "of an older server"


def test_a_batch_shows_lines_of_the_file_and_places_in_the_queue(cli: Cli, server: Script) -> None:
    waits = {"status": 202, "run_id": "07-01h", "position": 3, "estimate_s": 20.0}
    full = {"status": 429, "problem": {"detail": "max concurrent runs reached"}}
    server.says(Said({"results": [waits, full]}))
    outcome = cli("run", "batch", "research", BATCH)
    assert outcome.out.splitlines() == [
        "LINE  STATUS  RUN     DETAIL",
        "1     202     07-01h  position 3, about 20 s",
        "3     429     -       max concurrent runs reached",  # line 2 is empty
    ]
    assert outcome.err.startswith("not started: 1 of 2 runs; to try again: add\n")


def test_a_batch_is_sent_in_requests_that_a_server_accepts(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text((json.dumps({"input": {"text": "x" * 261_000}}) + "\n") * 4)
    done = {"status": 200, "run_id": "07-01h"}
    server.says(Said({"results": [done] * 3}), Said({"results": [done]}))
    assert cli("run", "batch", "research", str(file), "--idempotency-key", "k").code == Exit.OK
    assert max(len(each.body) for each in server.requests) <= 1 << 20
    keys = [[row["key"] for row in each.document["runs"]] for each in server.requests]
    assert keys == [["k/0", "k/1", "k/2"], ["k/3"]]


@pytest.mark.parametrize(
    "args", [("run", "start", "research"), ("run", "batch", "research", BATCH)]
)
def test_an_empty_key_is_not_replaced(args: tuple[str, ...], cli: Cli, server: Script) -> None:
    server.says(problem(422, "invalid_request"))  # as a server answers
    assert cli(*args, "--idempotency-key", "").code == Exit.FAILED
    assert server.requests[-1].headers["Idempotency-Key"] == ""


def test_an_audit_entry_shows_only_the_members_that_changed(cli: Cli, server: Script) -> None:
    def change(before: object, after: object) -> str:
        server.says(
            Said(
                {
                    "entries": [{**msgspec.to_builtins(AUDIT), "before": before, "after": after}],
                    "cursor": None,
                }
            )
        )
        return cli("audit", "list").out.splitlines()[1].split("tenant/acme  ")[1]

    before = {"max_concurrent_runs": 2, "on_full": "reject", "queue_max": 100}
    after = before | {"max_concurrent_runs": 3, "on_full": "queue", "budgets": {"tokens": 5}}
    assert change(before, after) == (
        'max_concurrent_runs: 2 → 3, on_full: reject → queue, budgets: - → {"tokens": 5}'
    )
    assert change({"a": 1}, None) == '{"a": 1}'
    assert change({"a": None}, {}) == '{"a": null} → {}'


def test_an_empty_key_of_a_row_is_not_replaced(cli: Cli, server: Script, tmp_path: Path) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text('{"key": ""}\n{"key": null}\n')
    server.says(Said({"results": [{"status": 422, "problem": {"detail": "key"}}]}))
    cli("run", "batch", "research", str(file), "--idempotency-key", "k")
    keys = [row["key"] for row in server.requests[0].document["runs"]]
    assert keys == ["", "k/1"]


@pytest.mark.parametrize(
    ("verb", "more"), [("set", ("--job-rate", "5")), ("show", ()), ("delete", ("--yes",))]
)
def test_a_tenant_that_is_named_twice_must_be_the_same(
    verb: str, more: tuple[str, ...], cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says(Said(admin.TenantConfig(max_concurrent_runs=2)))
    refused = cli("tenant", verb, "acme", "--tenant", "globex", *more)
    assert refused.code == Exit.USAGE
    assert "acme and --tenant globex contradict each other" in refused.err
    assert server.requests == []
    assert cli("tenant", verb, "acme", "--tenant", "acme", *more).code == Exit.OK
    monkeypatch.setenv("STANCHION_TENANT", "globex")  # for other commands
    assert cli("tenant", verb, "acme", *more).code == Exit.OK


@pytest.mark.parametrize(("on_full", "is_told"), [("reject", True), ("queue", False)])
def test_a_queue_of_a_tenant_that_rejects_needs_an_order(
    on_full: str, is_told: bool, cli: Cli, server: Script
) -> None:
    server.says(Said({**msgspec.to_builtins(admin.TenantConfig()), "on_full": on_full}))
    outcome = cli("tenant", "set", "acme", "--queue-max", "5")
    assert ("stanchion tenant set acme --on-full queue\n" in outcome.err) is is_told
    assert cli("tenant", "set", "acme", "--job-rate", "5").err == ""


def test_a_tenant_without_a_configuration_is_said_to_have_none(cli: Cli, server: Script) -> None:
    def row(name: str, *, is_configured: bool) -> admin.TenantRow:
        return admin.TenantRow(
            tenant=name,
            max_concurrent_runs=10,
            job_rate_per_s=None,
            admission=None,
            is_configured=is_configured,
        )

    rows = row("acme", is_configured=True), row("seen", is_configured=False)
    pages = Said(admin.TenantList(rows[:1], "next")), Said(admin.TenantList(rows[1:]))
    for name, said in (
        ("acme", ""),
        ("seen", "not configured: these are the defaults\n"),
        ("nosuch", "not configured: these are the defaults\n"),
    ):
        server.says(Said(admin.TenantConfig()), *pages)
        assert cli("tenant", "show", name).err == said
        server.says(Said(admin.TenantConfig(max_concurrent_runs=2)))
        assert cli("tenant", "show", name).err == ""


@pytest.mark.parametrize(("count", "line"), [(1, "1 run\n"), (2, "2 runs\n")])
def test_a_preview_of_a_bulk_action_counts_in_english(
    count: int, line: str, cli: Cli, server: Script
) -> None:
    server.says(Said({"matched": count, "by_tenant": {}}))
    seen = cli("bulk", "start", "cancel", "--dry-run")
    assert (seen.out, "runs that have ended are counted too" in seen.err) == (line, True)
    assert "ended" not in cli("bulk", "start", "cancel", "--status", "running", "--dry-run").err
    assert "ended" not in cli("bulk", "start", "rerun", "--dry-run").err


# ── Applying files ───────────────────────────────────────────────────────────────────────────────

APPLIED = Said(runs.ApplyAnswer("research", 4))


@pytest.mark.parametrize(
    ("name", "text", "asked", "kind"),
    [
        ("a.yaml", "# first\nid: research\nsteps: {}\n", "research", "application/yaml"),
        ("a.yml", 'steps: {}\nid: "research"  # its name\r\n', "research", "application/yaml"),
        ("a.yaml", "steps:\n  id:\n    id: no\nid: 'b-2'\n", "b-2", "application/yaml"),
        ("a.yaml", "id: 9 lives\n", "9 lives", "application/yaml"),
        ("a.json", '{"steps": {}, "id": "research"}', "research", "application/json"),
    ],
)
def test_a_file_is_applied_as_it_is_under_the_id_it_says(
    name: str, text: str, asked: str, kind: str, cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode())
    server.says(APPLIED)
    outcome = cli("workflow", "apply", str(file))
    assert outcome.out == "workflow research is at version 4\n"
    request = server.requests[-1]
    assert (request.method, request.path) == ("PUT", f"/v1/workflows/{asked}")
    assert (request.headers["Content-Type"], request.body) == (kind, text.encode())


@pytest.mark.parametrize(
    ("before", "flags", "is_told"),
    [
        (Said({"id": "research", "source": "shared", "pinned": False}), (), True),
        (Said({"id": "research", "source": "shared", "pinned": True}), ("--tenant", "a"), True),
        (Said({"id": "research", "source": "own", "pinned": False}), (), False),
        (problem(404, "not_found"), (), False),
        (problem(503, "store_unavailable"), (), False),
    ],
)
def test_an_own_workflow_in_place_of_the_shared_one_is_told(
    before: Said, flags: tuple[str, ...], is_told: bool, cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("id: research\n", encoding="utf-8")
    server.says(before, APPLIED)
    outcome = cli("workflow", "apply", str(file), *flags)
    assert (outcome.code, outcome.out) == (0, "workflow research is at version 4\n")
    note = (
        "until now the tenant ran the shared workflow research; from now on it runs its own"
        " version: later versions of the shared workflow and a pin have no effect for it\n"
    )
    assert outcome.err == (note if is_told else "")
    assert [each.method for each in server.requests] == ["GET", "PUT"]


@pytest.mark.parametrize("flags", [("--shared",), ("-o", "json")])
def test_a_shared_workflow_and_a_program_need_no_look_at_what_was_in_force(
    flags: tuple[str, ...], cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("id: research\n", encoding="utf-8")
    server.says(APPLIED)
    outcome = cli("workflow", "apply", str(file), *flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert [each.method for each in server.requests] == ["PUT"]


def test_several_files_are_applied_in_their_order(cli: Cli, server: Script, tmp_path: Path) -> None:
    files = [tmp_path / "b.yaml", tmp_path / "a.yaml"]
    for file in files:
        file.write_text(f"id: {file.stem}\n", encoding="utf-8")
    server.says(APPLIED)
    outcome = cli("workflow", "apply", *map(str, files), "-o", "json")
    assert [request.path for request in server.requests] == ["/v1/workflows/b", "/v1/workflows/a"]
    assert outcome.out == '{\n  "id": "research",\n  "version": 4\n}\n' * 2


@pytest.mark.parametrize(
    ("name", "text", "said", "code"),
    [
        ("a.yaml", "steps: {}\n", "has no id", Exit.USAGE),
        ("a.yaml", "id:\n", "has no id", Exit.USAGE),
        ("a.json", '{"id": 5}', "has no id", Exit.USAGE),
        ("a.json", "[]", "has no id", Exit.USAGE),
        ("a.json", "{", "is not JSON", Exit.FAILED),
    ],
)
def test_a_file_without_an_id_is_not_sent(
    name: str, text: str, said: str, code: Exit, cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    outcome = cli("workflow", "apply", str(file))
    assert outcome.code == code
    assert said in outcome.err
    assert server.requests == []


def test_a_file_without_an_id_is_sent_under_the_one_that_is_given(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("steps: {}\n", encoding="utf-8")
    server.says(APPLIED)
    assert cli("workflow", "apply", "--id", "research", str(file)).code == 0
    assert server.requests[-1].path == "/v1/workflows/research"


def test_faults_are_told_with_the_file_they_are_in(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("id: research\n", encoding="utf-8")
    server.says(
        problem(422, "invalid_workflow", errors=[{"path": "steps", "message": "is missing"}])
    )
    outcome = cli("workflow", "apply", str(file))
    assert outcome.code == Exit.FAILED
    assert outcome.err.startswith(f"error: {file}: this is invalid_workflow")
    assert "\n  steps: is missing\n" in outcome.err


def test_a_run_is_found_by_the_end_of_its_id_as_a_narrow_terminal_shows_it(
    cli: Cli, server: Script
) -> None:
    run_id = "391m7j29yam9bpdg3cgekdk"
    server.says(
        Said({"runs": [{"run_id": run_id}, {"run_id": "391m7j29yavn28cj15tj13y"}]}),
        Said({"run_id": run_id, "status": "cancelled", "applied": True}),
    )
    assert cli("run", "cancel", f"…{run_id[-8:]}").code == 0
    assert server.requests[-1].path == f"/v1/runs/{run_id}/cancel"


def test_an_end_that_several_ids_have_is_refused(cli: Cli, server: Script) -> None:
    server.says(Said({"runs": [{"run_id": "391m7j2-3cgekdk0"}, {"run_id": "491m7j2-3cgekdk0"}]}))
    outcome = cli("run", "cancel", "3cgekdk0")
    assert outcome.code == Exit.USAGE
    assert "2 runs have an id that ends with 3cgekdk0" in outcome.err


def test_an_export_writes_a_line_for_each_entry_of_all_pages(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    rows = [{"actor": "kim", "at": str(number), "after": {"é": "a\nb"}} for number in range(3)]
    for args in ((), ("--file", str(tmp_path / "log"))):
        server.says(
            Said({"entries": rows[:2], "cursor": "next"}),
            Said({"entries": [], "cursor": "more"}),
            Said({"entries": rows[2:], "cursor": None}),
        )
        outcome = cli("audit", "export", "--actor", "kim", *args)
        assert outcome.code == 0, outcome.err
        written = (tmp_path / "log").read_text("utf-8") if args else outcome.out
        assert [json.loads(line) for line in written.splitlines()] == rows
        asked = [request.query for request in server.requests[-3:]]
        assert [each.get("cursor") for each in asked] == [None, "next", "more"]
        assert {each["actor"] for each in asked} == {"kim"}


def test_an_export_writes_to_a_pipe_and_does_not_take_its_place(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        server.says(Said({"entries": [{"actor": "kim"}], "cursor": None}))
        assert cli("audit", "export", "--file", str(pipe)).code == 0
        assert os.read(reading, 1_000) == b'{"actor":"kim"}\n'
    finally:
        os.close(reading)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("option", "there"), [("--no-budget", "calls"), ("--unpin", "report")], ids=str
)
def test_what_is_not_there_cannot_be_removed_from_a_tenant(
    option: str, there: str, cli: Cli, server: Script
) -> None:
    budget = admin.BudgetConfig(limit=1, window="hour")
    server.says(Said(admin.TenantConfig(budgets={"calls": budget}, workflows={"report": 1})))
    outcome = cli("tenant", "set", "acme", option, "misspelt")
    assert outcome.code == Exit.NOT_FOUND
    assert f"{option} misspelt: the tenant has none of this name" in outcome.err
    assert f"it has: {there}" in outcome.err
    assert [request.method for request in server.requests] == ["GET"]
