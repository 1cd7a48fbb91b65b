"""What a command says and how it ends when it cannot do what it was asked."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import msgspec
import pytest

from stanchion.cli.errors import Exit
from stanchion.wire.problems import Problem
from tests.cli.cases import BATCH
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script, problem

REFUSALS = [
    (
        problem(
            429,
            "max_concurrent_runs_reached",
            detail="max concurrent runs reached",
            limit=2,
            active=2,
            retry_after_ms=3_400,
        ),
        Exit.FULL,
        [
            "error: max concurrent runs reached (max_concurrent_runs_reached); 2 of 2",
            "2 of 2 runs are active; retry in 3.4 s",
            "or let an admin raise the cap:",
            "stanchion tenant set default --max-concurrent-runs N",
        ],
    ),
    (
        problem(429, "queue_full", limit=1, active=1, retry_after_ms=2_000),
        Exit.FULL,
        ["1 of 1 runs are active", "let an admin", "stanchion tenant set default --queue-max N"],
    ),
    (problem(429, "job_throttled"), Exit.FULL, ["let an admin raise the rate:", "--job-rate R"]),
    (
        problem(
            429,
            "budget_exhausted",
            budget="tokens",
            resets_at="2026-11-17T00:00:00Z",
            retry_after_ms=30_000,
        ),
        Exit.FULL,
        [
            "(budget_exhausted); it resets at 2026-11-17 00:00:00Z",
            "let an admin raise the limit:",
            "stanchion tenant set default --budget tokens=LIMIT/WINDOW",
        ],
    ),
    (
        problem(429, "budget_exhausted", budget="tokens", resets_at=None, retry_after_ms=30_000),
        Exit.FULL,
        ["(budget_exhausted); it never resets"],
    ),
    (
        problem(429, "budget_exhausted", budget="t", retry_class="quota", retry_after_ms=2_500),
        Exit.FULL,
        ["(budget_exhausted); retry in 2.5 s"],
    ),
    (
        problem(404, "not_found", detail="there is no such workflow"),
        Exit.NOT_FOUND,
        [
            "error: there is no such workflow: research (not_found)\n",
            "see what there is: stanchion workflow list",
        ],
    ),
    (
        problem(401, "unauthenticated"),
        Exit.FAILED,
        [
            "give a key with --api-key or STANCHION_API_KEY",
            "restart the server with STANCHION_ADMIN_KEY set",
        ],
    ),
    (problem(403, "forbidden"), Exit.FAILED, ["stanchion key create --role"]),
    (
        problem(403, "forbidden", detail="the key is for another tenant than X-Stanchion-Tenant"),
        Exit.FAILED,
        ["leave --tenant and STANCHION_TENANT out or name the key's own tenant", "--for default"],
    ),
    (
        problem(403, "forbidden", detail="without keys, only requests for a loopback host"),
        Exit.FAILED,
        ["--url http://127.0.0.1:PORT"],
    ),
    (problem(409, "conflict"), Exit.FAILED, ["error: this is conflict (conflict)"]),
    (problem(422, "idempotency_mismatch"), Exit.FAILED, ["give a new --idempotency-key"]),
    (
        problem(503, "gate_busy", detail="workflow concurrency gate unavailable"),
        Exit.UNAVAILABLE,
        ["error: the tenant's admission lock is busy (gate_busy)\n", "stanchion lease list"],
    ),
    (problem(503, "store_unavailable"), Exit.UNAVAILABLE, ["/readyz"]),
    (problem(503, "draining"), Exit.UNAVAILABLE, ["use another replica"]),
    (problem(500, "internal"), Exit.UNAVAILABLE, ["request id r-1"]),
    (Said({}, 500), Exit.UNAVAILABLE, ["the server refused"]),
    (Said([], 400), Exit.FAILED, ["the server refused"]),
    (Said(text=b"<html>", status=502), Exit.UNAVAILABLE, ["answered 502", "is it a Stanchion"]),
    (Said(text=b"<html>", status=200), Exit.UNAVAILABLE, ["something that is not JSON"]),
    (Said([], 200), Exit.UNAVAILABLE, ["is it a Stanchion server?"]),
    (Said(hangs_up=True), Exit.UNAVAILABLE, ["cannot be reached", "check --url"]),
    (
        problem(
            422,
            "invalid_workflow",
            errors=[
                {"path": "steps.plan.needs[1]", "message": "no such step", "line": 4},
                {"path": "", "message": "too many steps"},
            ],
        ),
        Exit.FAILED,
        ["\n  line 4: steps.plan.needs[1]: no such step\n  too many steps\n"],
    ),
]


@pytest.mark.parametrize(("said", "code", "texts"), REFUSALS)
def test_a_refusal_ends_with_its_code_and_names_the_fix(
    said: Said, code: Exit, texts: list[str], cli: Cli, server: Script
) -> None:
    server.says(said)
    outcome = cli("run", "start", "research")
    assert (outcome.code, outcome.out) == (code, "")
    for text in texts:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        (
            ("run", "show", "x"),
            "stanchion run list; of all tenants: stanchion run list --tenant '*'",
        ),
        (
            ("run", "show", "x", "--tenant", "acme"),
            "stanchion run list --tenant acme; of all tenants: stanchion run list --tenant '*'",
        ),
        (("run", "show", "x", "--tenant", "*"), "stanchion run list --tenant '*'"),
        (
            ("workflow", "show", "x"),
            "stanchion workflow list; of another tenant: add --tenant NAME",
        ),
        (("key", "revoke", "x"), "stanchion key list"),
        (("lease", "release", "run/x"), "stanchion lease list"),
        (("dead-letter", "replay", "x"), "stanchion dead-letter list"),
        (
            ("schedule", "show", "x"),
            "stanchion schedule list; of all tenants: stanchion schedule list --tenant '*'",
        ),
        (
            ("schedule", "delete", "x", "--tenant", "a"),
            (
                "stanchion schedule list --tenant a;"
                " of all tenants: stanchion schedule list --tenant '*'"
            ),
        ),
        (("limit", "show", "x"), "stanchion limit list"),
        (
            ("bulk", "show", "x", "--tenant", "acme"),
            "stanchion bulk list --tenant acme; of all tenants: stanchion bulk list --tenant '*'",
        ),
        (("workflow", "show", "x", "--shared"), "stanchion workflow list --shared"),
        (("tenant", "show", "x"), "stanchion tenant list"),
    ],
)
def test_what_was_not_found_can_be_looked_for(
    args: tuple[str, ...], fix: str, cli: Cli, server: Script
) -> None:
    server.says(problem(404, "not_found"))
    outcome = cli(*args)
    assert outcome.code == Exit.NOT_FOUND
    assert f"fix: see what there is: {fix}\n" in outcome.err


@pytest.mark.parametrize(
    ("args", "said", "fix"),
    [
        (
            ("run", "rerun", "07-01h", "--from-step", "revew"),
            {"detail": "from_step: the run has no step 'revew'"},
            "see the run's steps: stanchion run show 07-01h",
        ),
        (
            ("schedule", "set", "morning", "--workflow", "reprot", "--every", "60"),
            {"detail": "workflow_id: there is no such workflow"},
            "see what there is: stanchion workflow list",
        ),
    ],
)
def test_a_name_that_does_not_exist_can_be_looked_for(
    args: tuple[str, ...], said: dict[str, str], fix: str, cli: Cli, server: Script
) -> None:
    server.says(*[problem(422, "invalid_request", **said)] * 2)
    assert f"fix: {fix}\n" in cli(*args).err


def test_a_missing_sub_workflow_is_to_be_applied_first(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "parent.yaml"
    file.write_text("id: parent\nsteps:\n  call: {workflow: child}\n", encoding="utf-8")
    fault = {"path": "steps.call.workflow", "message": "there is no workflow 'child'", "line": 3}
    server.says(problem(422, "invalid_workflow", errors=[fault]))
    fix = "fix: apply that workflow first: stanchion workflow apply FILE\n"
    assert fix in cli("workflow", "apply", str(file)).err


def test_a_missing_shared_workflow_is_to_be_applied_as_a_shared_one(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "parent.yaml"
    file.write_text("id: parent\nsteps:\n  call: {workflow: child}\n", encoding="utf-8")
    said = "there is no shared workflow 'child'"
    fault = {"path": "steps.call.workflow", "message": said, "line": 3}
    server.says(problem(422, "invalid_workflow", errors=[fault]))
    fix = "fix: apply that workflow first: stanchion workflow apply --shared FILE\n"
    assert fix in cli("workflow", "apply", "--shared", str(file)).err


def test_a_job_that_does_not_exist_is_named(cli: Cli, server: Script) -> None:
    server.says(problem(404, "not_found", detail="there is no such job"))
    assert "error: there is no such job: nope (not_found)\n" in cli("job", "show", "nope").err


def test_a_parameter_that_is_refused_is_the_message(cli: Cli, server: Script) -> None:
    fault = {"path": "outcome", "message": "expected one of full, mismatch"}
    text = "outcome: expected one of full, mismatch"
    server.says(problem(422, "invalid_request", detail=f"query: {text}", errors=[fault]))
    assert cli("decision", "list").err == f"error: {text} (invalid_request)\n"
    other = {"path": "since", "message": "not a time"}
    server.says(problem(422, "invalid_request", detail=f"query: {text}", errors=[fault, other]))
    assert cli("decision", "list").err == (
        f"error: the request is not valid (invalid_request)\n  {text}\n  since: not a time\n"
    )


def test_an_https_url_of_a_server_without_tls_says_so(cli: Cli, server: Script) -> None:
    outcome = cli("run", "list", "--url", server.url.replace("http:", "https:"))
    assert outcome.code == Exit.UNAVAILABLE
    assert f"fix: there is no TLS at this address: try --url {server.url}\n" in outcome.err


def test_an_error_is_wrapped_between_words_and_its_commands_are_not(
    cli: Cli, server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    message = "not a member of retry, which may have max_attempts"
    fault = {"path": "steps.plan.retry.max", "message": message, "line": 4}
    server.says(problem(429, "queue_full", detail="the queue is full", errors=[fault]))
    assert cli("run", "start", "research").err.splitlines() == [
        "error: the queue is full (queue_full)",
        "  line 4: steps.plan.retry.max: not a",
        "    member of retry, which may have",
        "    max_attempts",
        "fix: wait for a run to end, or let an",
        "  admin allow more runs to wait:",
        "  stanchion tenant set default --queue-max N",
    ]


FOR_OPERATORS = "this needs a key for all tenants ('*') with the role operator or admin"

HINTS = [
    (
        ("run", "items", "07-01h", "nostep", "--tenant", "acme"),
        problem(404, "not_found", detail="there is no such step"),
        ["stanchion run show 07-01h --tenant acme"],
    ),
    (
        ("run", "approve", "07-01h", "nostep"),
        problem(404, "not_found", detail="there is no step 'nostep' of run '07-01h'"),
        ["stanchion run show 07-01h"],
    ),
    (
        ("workflow", "show", "flow", "--version", "9", "--tenant", "acme"),
        problem(404, "not_found", detail="there is no version 9 of workflow 'flow': …"),
        ["stanchion workflow show flow --tenant acme"],
    ),
    (
        ("workflow", "show", "flow", "--version", "9", "--shared"),
        problem(404, "not_found", detail="there is no version 9 of shared workflow 'flow': …"),
        ["stanchion workflow show flow --shared"],
    ),
    (("job", "show", "07-01h:a@1"), problem(404, "not_found"), ["stanchion run why 07-01h"]),
    (("job", "show", "x"), problem(404, "not_found"), ["stanchion run why RUN"]),
    (
        ("run", "rerun", "07-01h"),
        problem(409, "conflict", detail="run '07-01h' is still running"),
        ["stanchion run watch 07-01h", "stanchion run cancel 07-01h"],
    ),
    (
        ("key", "create", "--role", "runner", "--for", "acme"),
        problem(409, "conflict", detail="this would be the first key, and from then on …"),
        ["stanchion key create --role admin --for '*'"],
    ),
    (
        ("lease", "list"),
        problem(403, "forbidden", detail="this needs the role operator or admin; this key has …"),
        ["stanchion key create --role operator --for TENANT"],
    ),
    (
        ("limit", "list"),
        problem(403, "forbidden", detail=f"{FOR_OPERATORS}; this key has the role runner"),
        ["stanchion key create --role operator --for '*'"],
    ),
    (
        ("tenant", "set", "acme", "--job-rate", "5"),
        problem(403, "forbidden", detail=f"{FOR_OPERATORS}; this key has the role runner"),
        ["stanchion key create --role admin --for '*'"],
    ),
    (
        ("limit", "delete", "llm"),
        problem(
            403, "forbidden", detail="this needs a key for all tenants ('*') with the role admin"
        ),
        ["stanchion key create --role admin --for '*'"],
    ),
    (
        ("run", "list", "--tenant", "*"),
        problem(403, "forbidden", detail="the key is for another tenant than X-Stanchion-Tenant"),
        ["stanchion key create --role operator --for '*'"],
    ),
    (
        ("run", "list", "--tenant", "acme"),
        problem(403, "forbidden", detail="the key is for another tenant than X-Stanchion-Tenant"),
        ["stanchion key create --role ROLE --for acme"],
    ),
    (
        ("workflow", "list", "--shared"),
        problem(
            403,
            "forbidden",
            detail="this needs a key for all tenants ('*') with the role runner or operator",
        ),
        ["stanchion key create --role operator --for '*'"],
    ),
    (
        ("key", "create", "--role", "runner", "--for", "*"),
        problem(
            422,
            "invalid_request",
            detail="tenant: a key with the role runner is for one tenant",
        ),
        [
            "stanchion key create --role runner --for TENANT",
            "stanchion key create --role operator --for '*'",
        ],
    ),
    (
        ("run", "show", "x", "--tenant", "acme"),
        problem(404, "not_found"),
        ["stanchion run list --tenant acme", "stanchion run list --tenant '*'"],
    ),
    (
        ("run", "start", "w", "--tenant", "acme"),
        problem(429, "max_concurrent_runs_reached"),
        ["stanchion tenant set acme --max-concurrent-runs N"],
    ),
    (
        ("run", "start", "w", "--tenant", "beta"),
        problem(429, "budget_exhausted", budget="tokens", resets_at=None),
        [
            "stanchion tenant limits --tenant beta",
            "stanchion tenant set beta --budget tokens=LIMIT/WINDOW",
        ],
    ),
    (("run", "start", "w"), problem(503, "gate_busy"), ["stanchion lease list"]),
    (
        ("approval", "approve", "07-01h", "ask", "--tenant", "acme"),
        problem(422, "invalid_input", detail="the approval does not accept this data: data: …"),
        ["stanchion approval list -o json --tenant acme"],
    ),
    (
        ("run", "start", "w", "--tenant", "acme"),
        problem(422, "invalid_input", detail="the workflow does not accept this input: …"),
        ["stanchion workflow show w --tenant acme"],
    ),
    (
        ("run", "rerun", "07-01h", "--from-step", "x"),
        problem(422, "invalid_request", detail="from_step: the run has no step 'x'"),
        ["stanchion run show 07-01h"],
    ),
]


@pytest.mark.parametrize(("args", "said", "commands"), HINTS)
def test_a_hint_names_the_next_command_and_that_one_exists(
    args: tuple[str, ...], said: Said, commands: list[str], cli: Cli, server: Script
) -> None:
    server.says(said)
    hint = cli(*args).err.partition("fix: ")[2]
    assert re.findall(r"stanchion [a-z][^;\n]*", hint) == commands
    server.says(Said({}))
    for each in commands:
        _, *words = shlex.split(each)
        known = cli(*words[:2], "--help")
        assert known.code == 0
        for flag in (word for word in words if word.startswith("--")):
            assert flag in known.out


def test_a_step_that_does_not_exist_is_named_with_its_run(cli: Cli, server: Script) -> None:
    server.says(problem(404, "not_found", detail="there is no such step"))
    said = cli("run", "items", "07-01h", "a step").err
    assert "error: there is no step 'a step' of run '07-01h' (not_found)\n" in said


@pytest.mark.parametrize(
    ("rule", "fix"),
    [
        ("'kim' started the run and cannot decide step 'ask'", "another person must decide"),
        ("step 'ask' cannot be decided: who started the run is unknown", "start it again"),
    ],
)
def test_who_may_not_decide_is_not_told_to_create_another_key(
    rule: str, fix: str, cli: Cli, server: Script
) -> None:
    server.says(problem(403, "forbidden", detail=f"not_by_starter: {rule}"))
    hint = cli("approval", "approve", "07-01h", "ask").err.partition("fix: ")[2]
    assert fix in hint
    assert "key create" not in hint


def test_a_command_that_reads_before_it_changes_names_the_role_of_the_change(
    cli: Cli, server: Script
) -> None:
    server.says(problem(403, "forbidden", detail=f"{FOR_OPERATORS}; this key has the role runner"))
    said = cli("tenant", "set", "acme", "--job-rate", "5").err
    assert "('*') with the role admin; this key has the role runner (forbidden)" in said


@pytest.mark.parametrize("code", ["gate_busy", "draining"])
def test_who_was_told_that_nothing_was_begun_is_not_told_to_look(
    code: str, cli: Cli, server: Script
) -> None:
    server.says(problem(503, code))
    assert "may have been started" not in cli("run", "start", "research").err
    server.says(problem(503, "gate_unavailable"))
    assert "may have been started" in cli("run", "start", "research").err


FAULTS = [
    {"path": "steps.plan.topic", "message": "is missing", "line": 4},
    {"path": "", "message": "too many steps"},
]


@pytest.mark.parametrize(
    ("detail", "errors", "said"),
    [
        (
            "the workflow has 1 fault: line 4: steps.plan.topic: is missing",
            FAULTS[:1],
            "error: the workflow has 1 fault (invalid)\n  line 4: steps.plan.topic: is missing\n",
        ),
        (
            "the workflow has 2 faults: line 4: steps.plan.topic: is missing",
            FAULTS,
            (
                "error: the workflow has 2 faults (invalid)\n"
                "  line 4: steps.plan.topic: is missing\n  too many steps\n"
            ),
        ),
        ("too many steps", FAULTS[1:], "error: too many steps (invalid)\n"),
        ("no", FAULTS[1:], "error: no (invalid)\n  too many steps\n"),
    ],
)
def test_no_fault_is_told_twice(
    detail: str, errors: list[object], said: str, cli: Cli, server: Script
) -> None:
    server.says(problem(422, "invalid", detail=detail, errors=errors))
    assert cli("run", "cancel", "x").err == said


def test_a_first_key_that_would_lock_everybody_out_is_refused_with_the_way_out(
    cli: Cli, server: Script
) -> None:
    detail = "first make an admin key for '*', or start the server with STANCHION_ADMIN_KEY"
    server.says(problem(409, "conflict", detail=detail))
    outcome = cli("key", "create", "--role", "worker", "--for", "*")
    assert (outcome.code, outcome.err) == (Exit.FAILED, f"error: {detail} (conflict)\n")


def test_an_empty_list_says_whose_it_is(cli: Cli, server: Script) -> None:
    server.says(Said({"runs": [], "cursor": None}))
    assert "no runs of tenant acme (see --tenant)" in cli("run", "list", "--tenant", "acme").err
    keyed = cli("run", "list", "--api-key", "sk_a_b").err
    assert "no runs of the key's tenant (a key for all tenants: default; see --tenant)" in keyed


@pytest.mark.parametrize("filter_", [("--label", "x=y"), ("--status", "failed"), ("--since", "1h")])
def test_an_empty_list_with_a_filter_says_that_no_run_matches(
    filter_: tuple[str, str], cli: Cli, server: Script
) -> None:
    server.says(Said({"runs": [], "cursor": None}))
    said = cli("run", "list", *filter_).err
    assert said == "no runs of tenant default (see --tenant) match these filters\n"


@pytest.mark.parametrize(
    ("command", "rows", "what"),
    [
        ("approval", "approvals", "pending approvals"),
        ("schedule", "schedules", "schedules"),
        ("bulk", "bulks", "bulk actions"),
    ],
)
def test_an_empty_list_of_one_tenant_says_that_there_are_others(
    command: str, rows: str, what: str, cli: Cli, server: Script
) -> None:
    server.says(Said({rows: [], "cursor": None}))
    assert cli(command, "list").err == f"no {what} of tenant default (see --tenant)\n"
    assert cli(command, "list", "--tenant", "*").err == f"no {what} of all tenants\n"


def test_a_key_that_was_refused_is_not_asked_for_again(cli: Cli, server: Script) -> None:
    server.says(problem(401, "unauthenticated"))
    outcome = cli("run", "list", "--api-key", "sk_old")
    assert "the key is unknown or revoked, or has expired" in outcome.err
    assert "sk_old" not in outcome.err


def test_a_program_gets_the_problem_as_a_document(cli: Cli, server: Script) -> None:
    said = problem(429, "max_concurrent_runs_reached", retry_class="quota", retry_after_ms=3_400)
    server.says(said)
    outcome = cli("run", "start", "research", "-o", "json")
    assert (outcome.code, outcome.out) == (Exit.FULL, "")
    assert json.loads(outcome.err) == said.document


# ── Nobody answers ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nobody() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def test_where_nobody_listens_one_is_told_how_to_start_a_server(cli: Cli, nobody: str) -> None:
    outcome = cli("run", "list", "--url", nobody)
    assert outcome.code == Exit.UNAVAILABLE
    assert outcome.err == (
        f"error: no server listens at {nobody}\n"
        "fix: is the server running? start one with: stanchion serve (or give --url)\n"
    )


def test_a_program_is_told_in_a_problem_document_too(cli: Cli, nobody: str) -> None:
    outcome = cli("run", "list", "--url", nobody, "-o", "json")
    assert outcome.code == Exit.UNAVAILABLE
    said = msgspec.json.decode(outcome.err, type=Problem)
    assert (said.code, said.retry_class) == ("unreachable", "unavailable")


def test_a_tenant_that_only_the_key_names_is_a_placeholder(cli: Cli, server: Script) -> None:
    server.says(problem(429, "budget_exhausted", budget="tokens"))
    outcome = cli("run", "start", "research", "--api-key", "sk_a_b")
    assert "stanchion tenant set TENANT --budget tokens=LIMIT/WINDOW" in outcome.err


def test_a_start_that_was_not_sent_has_not_happened(cli: Cli, nobody: str) -> None:
    assert "--idempotency-key" not in cli("run", "start", "research", "--url", nobody).err


@pytest.mark.parametrize(
    "args",
    [
        ("run", "start", "research"),
        ("run", "batch", "research", BATCH),
        ("job", "submit", "mail.send"),
    ],
)
def test_after_a_lost_answer_one_is_told_the_key_to_ask_again_with(
    args: tuple[str, ...], cli: Cli, server: Script
) -> None:
    server.says(Said(hangs_up=True))
    outcome = cli(*args)
    sent = server.requests[-1].headers["Idempotency-Key"]
    assert len(sent) == 32
    assert f"add --idempotency-key {sent}" in outcome.err
    cli(*args, "-o", "json")
    assert server.requests[-1].headers["Idempotency-Key"] != sent


def test_a_program_finds_the_key_in_the_document(cli: Cli, server: Script) -> None:
    server.says(problem(503, "gate_unavailable"))
    outcome = cli("run", "start", "research", "-o", "json")
    sent = server.requests[-1].headers["Idempotency-Key"]
    assert json.loads(outcome.err)["idempotency_key"] == sent


@pytest.mark.parametrize(
    "args", [("run", "start", "research"), ("run", "batch", "research", BATCH)]
)
def test_who_brought_a_key_is_not_told_it(args: tuple[str, ...], cli: Cli, server: Script) -> None:
    server.says(Said(hangs_up=True))
    outcome = cli(*args, "--idempotency-key", "mine")
    assert server.requests[-1].headers["Idempotency-Key"] == "mine"
    assert "--idempotency-key" not in outcome.err


def test_a_batch_that_is_refused_on_the_way_names_the_key(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text("{}\n" * 1_001)
    started = [{"status": 200, "run_id": "07-01h"}] * 1_000
    server.says(Said({"results": started}), problem(429, "tenant_overloaded"))
    outcome = cli("run", "batch", "research", str(file))
    assert outcome.code == Exit.FULL
    first, second = (each.headers["Idempotency-Key"] for each in server.requests)
    assert first == second
    assert f"add --idempotency-key {first}" in outcome.err
    server.says(problem(429, "tenant_overloaded"))  # nothing was started
    assert "--idempotency-key" not in cli("run", "batch", "research", BATCH).err


# ── Wrong usage ──────────────────────────────────────────────────────────────────────────────────

MISUSES = [
    (("run", "strat"), "No such command 'strat'"),
    (("run", "list", "--limit", "0"), "0 is not in the range 1<=x<=1000"),
    (("run", "list", "--limit", "ten"), "'ten' is not a whole number."),
    (("tenant", "set", "acme", "--job-rate", "ten"), "'ten' is not a number."),
    (("tenant", "set", "acme", "--queue-wait", "ten"), "'ten' is not a number."),
    (("run", "list", "--status", "done"), "'done' is not one of"),
    (("run", "list", "--url", "localhost:8420"), "write --url http://HOST:PORT"),
    (("run", "list", "--url", "ftp://here"), "write --url http://HOST:PORT"),
    (("run", "list", "--url", "http://here:99999"), "write --url http://HOST:PORT"),
    (("run", "list", "--url", "http://key@here"), "write --url http://HOST:PORT"),
    (("run", "list", "--tenant", "a\nb"), "X-Stanchion-Tenant should have visible ASCII"),
    (("run", "list", "--api-key", "k\u00e9y"), "Authorization should have visible ASCII"),
    (("run", "start", "x", "--input", "{"), "--input is not JSON"),
    (("run", "start", "x", "--input", "@/nowhere"), "--input: /nowhere: No such file"),
    (("workflow", "apply"), "Missing argument 'FILE...'"),
    (("workflow", "apply", "/nowhere.yaml"), "/nowhere.yaml: No such file"),
    (("workflow", "apply", "--id", "x", "a", "b"), "--id goes with one file"),
    (("tenant", "set", "acme"), "nothing to change"),
    (("bulk", "start", "cancel"), "this would cancel every run: give a filter like --label"),
    (("bulk", "cancel"), "write: stanchion bulk start cancel --label team:red"),
    (("bulk", "start", "cancel", "--all", "--label", "a=b"), "--all and a filter"),
    (("workflow", "list", "--shared", "--tenant", "x"), "leave --tenant out"),
    (("tenant", "set", "acme", "--no-cap", "--max-concurrent-runs", "1"), "contradict"),
    (("tenant", "set", "acme", "--no-job-rate", "--job-rate", "1"), "contradict"),
    (("settings", "set"), "give PATH=VALUE, or --patch"),
    (("settings", "set", "a=1", "--patch", "{}"), "give PATH=VALUE, or --patch"),
    (("settings", "set", "strategy"), "'strategy' is not PATH=VALUE"),
    (("settings", "set", "a..b=1"), "'a..b=1' is not PATH=VALUE"),
    (("settings", "set", "a=1", "a.b=1"), "goes into a value that was given before it"),
    (("escalation", "set", "clear"), "'clear' is not one of"),
    (("key", "create", "--role", "worker"), "Missing option '--for'"),
    (("lease", "hold", "run/x"), "Missing option '--ttl-s'"),
    (("lease", "hold", "acme", "--ttl-s", "5"), "admission/TENANT or run/RUN"),
    (("lease", "release", "run/"), "admission/TENANT or run/RUN"),
    (("drill", "admission", "--fast"), "No such option"),
    (("drill", "weather"), "'weather' is not one of"),
]


@pytest.mark.parametrize(("args", "said"), MISUSES, ids=[" ".join(args) for args, _ in MISUSES])
def test_wrong_usage_ends_with_two_and_sends_nothing(
    args: tuple[str, ...], said: str, cli: Cli, server: Script
) -> None:
    outcome = cli(*args)
    assert outcome.code == Exit.USAGE
    assert said in outcome.err
    assert server.requests == []


def test_a_strangers_text_cannot_steer_the_terminal(cli: Cli, server: Script) -> None:
    server.says(problem(409, "conflict", detail="\x1b[2J\x07gone\u202e\r"))
    assert r"error: \u001b[2J\u0007gone\u202e\r (conflict)" in cli("run", "cancel", "x").err
