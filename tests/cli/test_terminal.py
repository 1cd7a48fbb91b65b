"""What a person sees on a terminal. The pictures are in ``snapshots``."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import pytest
from rich.cells import cell_len

from stanchion.cli.errors import Exit
from stanchion.cli.text import (
    FlexibleCell,
    SpareHeading,
    clock,
    ident,
    sentence,
    table,
    whole_ident,
)
from stanchion.core.model import Failure, RunStatus, StepId, StepStatus
from stanchion.wire import runs
from tests.cli.cases import CASES, RUN, Case
from tests.cli.scripted import Said, Script, problem
from tests.cli.terminal import on_terminal, plain_environment, snapshot

PICTURED = {
    "workflow list",
    "run list",
    "run show",
    "run why",
    "tenant set",
    "settings show",
    "lease list",
    "key create",
    "dead-letter list",
    "escalation show",
    "replica list",
    "worker list",
}


@pytest.mark.parametrize(
    "case",
    [
        case
        for command in sorted(PICTURED)
        for case in [next(case for case in CASES if case.command == command)]
    ],
    ids=lambda case: case.command,
)
def test_a_command_looks_on_a_terminal_as_it_did(case: Case, server: Script) -> None:
    earlier = [] if case.before is None else [Said(case.before)]
    server.says(*earlier, Said(case.answer))
    seen = on_terminal(*case.args, "--url", server.url)
    assert seen.code == 0
    assert seen.text == snapshot(case.command.replace(" ", "-"), seen.text)


def test_a_refusal_looks_as_it_did(server: Script) -> None:
    server.says(
        problem(
            429,
            "max_concurrent_runs_reached",
            detail="max concurrent runs reached",
            limit=2,
            active=2,
            retry_after_ms=3_400,
        )
    )
    seen = on_terminal("run", "start", "research", "--url", server.url)
    assert seen.code == Exit.FULL
    assert seen.text == snapshot("refusal", seen.text)


def test_the_help_looks_as_it_did() -> None:
    seen = on_terminal("--help")
    assert seen.text == snapshot("help", seen.text)


def test_at_80_columns_a_list_of_runs_shows_its_errors(server: Script) -> None:
    row = runs.RunRow(
        run_id="391m7hyamb0c54vpc3gd7bz",
        workflow_id="quarterly-research-report",
        workflow_version=3,
        status=RunStatus.TIMED_OUT,
        created_at=RUN.created_at,
        finished_at=RUN.created_at,
        error=Failure("step_timed_out", "took longer than 30 s", step=StepId("write")),
    )
    server.says(Said(runs.RunList((row,))))
    seen = on_terminal("run", "list", "--url", server.url, env={"NO_COLOR": "1"}, columns=80)
    heading, line, hint = seen.text.splitlines()
    assert heading.endswith("ERROR")
    assert "write: took longer" in line
    assert line.count("11-15 19:00") == 1  # FINISHED is left out before the id is cut
    assert line.startswith("391m7hyamb0c54vpc3gd7bz  ")
    assert max(len(each) for each in (heading, line)) <= 80
    assert "-o json shows all" in hint
    wide = on_terminal("run", "list", "--url", server.url, env={"NO_COLOR": "1"}, columns=200)
    assert "391m7hyamb0c54vpc3gd7bz" in wide.text
    assert "-o json" not in wide.text


def test_at_80_columns_a_timeline_shows_its_details(server: Script) -> None:
    entry = {
        "at": "2026-11-16T10:26:59.123Z",
        "what": "job_dead_lettered",
        "step": "a-step-with-a-long-name",
        "attempt": 2,
        "actor": "worker-host-01.example.org-31337-ab12cd34",
        "detail": "delivered 5 times without a result",
    }
    server.says(Said({"entries": [entry]}))
    args = ("run", "show", "391m7h", "--timeline", "--url", server.url)
    seen = on_terminal(*args, env={"NO_COLOR": "1"}, columns=80)
    heading, line, *more = seen.text.splitlines()
    assert heading.endswith("DETAIL")
    assert "10:26:59.123" in line
    shown = " ".join([line[heading.index("DETAIL") :], *(rest.strip() for rest in more)])
    assert "delivered 5 times without a result" in shown
    assert max(map(len, (line, *more))) <= 80


def test_at_80_columns_ids_of_keys_are_whole(server: Script) -> None:
    names = ("created_at", "expires_at", "last_used_at", "revoked_at")
    times = dict.fromkeys(names, "2026-11-16T10:26:59Z")
    row = {
        "id": "0123456789abcdef",
        "role": "operator",
        "tenant": "a-tenant-with-a-long-name",
        "name": "a name that is long as well",
        "note": "and a note",
        **times,
    }
    server.says(Said({"keys": [row], "cursor": None}))
    seen = on_terminal("key", "list", "--url", server.url, env={"NO_COLOR": "1"}, columns=80)
    assert "0123456789abcdef  " in seen.text
    assert max(map(len, seen.text.splitlines())) <= 80


def test_at_80_columns_a_key_that_has_expired_does_not_look_valid(server: Script) -> None:
    row = {
        "id": "0123456789abcdef",
        "role": "operator",
        "tenant": "a-tenant-with-a-long-name",
        "name": "a name that is long as well",
        "note": None,
        "created_at": "2026-11-16T10:26:59Z",
        "expires_at": "2026-11-16T10:27:59Z",
        "last_used_at": "2026-11-16T10:27:09Z",
        "revoked_at": None,
    }
    server.says(Said({"keys": [row], "cursor": None}))
    seen = on_terminal("key", "list", "--url", server.url, env={"NO_COLOR": "1"}, columns=80)
    assert "EXPIRES" not in seen.text
    assert "  expired" in seen.text


def test_at_80_columns_what_the_next_command_takes_is_whole(server: Script) -> None:
    subject = "run/391m7hyamb0c54vpc3gd7bz"
    entry = {
        "at": "2026-11-16T10:26:59Z",
        "actor": "kim from the night shift",
        "action": "run.cancel",
        "tenant": "a-tenant-with-a-long-name",
        "subject": subject,
        "before": {"status": "running"},
        "after": {"status": "cancelled", "reason": "not needed any more"},
    }
    key, request = "7d0c1b9e-4f6a-4d0e-9a55-0c3f6b1f7a11", "81ec218b52c3-2041"
    refusal = {
        "at": "2026-11-16T10:26:59Z",
        "tenant": "a-tenant-with-a-long-name",
        "workflow_id": "quarterly-research-report",
        "outcome": "full",
        "active": 10,
        "limit": 10,
        "retry_after_ms": 1900,
        "key": key,
        "request_id": request,
        "left_out": 0,
    }
    spent = {**refusal, "outcome": "budget_exhausted", "budget": "tokens", "active": None}
    unchecked = {**refusal, "outcome": "limit_check_failed"}
    one, all_tenants = ("--tenant", "a-tenant-with-a-long-name"), ()
    for command, whose, rows, wanted in (
        ("audit", one, {"entries": [entry]}, (subject, "run.cancel")),
        ("audit", all_tenants, {"entries": [entry]}, (subject, "run.cancel", "TENANT")),
        ("decision", one, {"decisions": [refusal]}, (key, request, "full")),
        ("decision", one, {"decisions": [spent]}, (key, "…2c3-2041", "budget_exhausted")),
        ("decision", one, {"decisions": [unchecked]}, (key, "limit_check_failed")),
        (
            *("decision", all_tenants, {"decisions": [spent]}),
            ("…6b1f7a11", "…2c3-2041", "budget_exhausted"),
        ),
        (
            *("decision", all_tenants, {"decisions": [refusal]}),
            ("a-tenant-with-a-long-name", "…6b1f7a11", "…2c3-2041", "full"),
        ),
    ):
        server.says(Said({**rows, "cursor": None}))
        args = (command, "list", "--url", server.url, *whose)
        seen = on_terminal(*args, env={"NO_COLOR": "1"}, columns=80)
        assert set(wanted) <= set(seen.text.split()), command
        assert max(map(len, seen.text.splitlines())) <= 80
        assert "-o json shows all" in seen.text.splitlines()[-1]


def test_at_80_columns_a_workflow_keeps_its_version(server: Script) -> None:
    def row(name: str, version: int, error: Failure | None = None) -> runs.RunRow:
        return runs.RunRow(
            run_id="391m7hyamb0c54vpc3gd7bz",
            tenant="acme",
            workflow_id=name,
            workflow_version=version,
            status=RunStatus.SUCCEEDED if error is None else RunStatus.TIMED_OUT,
            created_at=RUN.created_at,
            finished_at=RUN.created_at,
            error=error,
        )

    late = Failure("step_timed_out", "took longer than 30 s", step=StepId("write"))
    rows = (row("summarise", 1), row("summarise", 2), row("summarise", 2, late))
    for more, whose, wanted in (
        ((), (), ("summarise@1", "summarise@2")),
        ((), ("--tenant", "*"), ("acme", "summarise@1", "summarise@2")),
        ((row("quarterly-research-report", 17),), ("--tenant", "*"), ("acme", "quarter…@17")),
    ):
        server.says(Said(runs.RunList(rows + more)))
        args = ("run", "list", "--url", server.url, *whose)
        seen = on_terminal(*args, env={"NO_COLOR": "1"}, columns=80)
        assert set(wanted) <= set(seen.text.split()), seen.text
        assert "write: to" in seen.text
        assert max(map(len, seen.text.splitlines())) <= 80


def test_short_ids_leave_room_for_spare_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("TENANT", SpareHeading("WORKFLOW"), "KEY")
    monkeypatch.setenv("COLUMNS", "40")
    shown = table(heads, [["a" * 16, "report", ident("k" * 32)]])
    assert shown[1].split() == ["a" * 16, "report", "…" + "k" * 8]


def test_wide_characters_take_two_cells_and_accents_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [
        ["搜索", "waiting", "decision", "模型没有在规定时间内回答请求请稍后再试一次" * 2],
        ["schreiben", "running", "-", "u\u0308ber die Grenze"],
    ]
    shown = [click.unstyle(line) for line in table(("STEP", "STATUS", "WAITS", "ERROR"), rows)]
    shown += map(click.unstyle, table(("STEP", "STATUS", "WAITS", "ERROR"), rows, wraps=True))
    assert max(map(cell_len, shown)) <= 60
    rows_shown = [line.partition("ing") for line in shown if "ing" in line]
    assert {cell_len(before) for before, _, _ in rows_shown} == {len("schreiben  runn")}
    monkeypatch.setenv("COLUMNS", "40")
    said = sentence(
        "the step waits for an answer: 模型没有 在规定时间 内回答请 求请稍后再 试一次 now"
    )
    assert max(map(cell_len, said.splitlines())) <= 40


def test_words_of_a_rare_error_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [
        ["fetch", "running", "worker vm-23260-d811d81b, lease ends in 60 s", "-"],
        ["wait", "waiting", "delay", "-"],
        ["retry", "waiting", "retry", "RuntimeError: page cannot be read (job_failed)"],
    ]
    heads = ("STEP", "STATUS", "WAITS FOR", "ERROR")
    shown = [click.unstyle(line) for line in table(heads, rows, wraps=True)]
    words = " ".join(line.rsplit("  ", 1)[-1] for line in shown[3:7]).split()
    assert words == ["RuntimeError:", "page", "cannot", "be", "read", "(job_failed)"]
    assert max(map(len, shown)) <= 60


def test_at_80_columns_a_batch_says_in_full_why_a_run_was_not_started(
    server: Script, tmp_path: Path
) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_text("{}\n", encoding="utf-8")
    detail = "the workflow does not accept this input: input.s: the value is not of type number"
    refused = {"status": 422, "problem": {"status": 422, "detail": detail}}
    server.says(Said({"results": [refused]}))
    seen = on_terminal(
        *("run", "batch", "research", str(file), "--url", server.url),
        columns=80,
    )
    assert detail in " ".join(seen.text.split())
    assert "shortened" not in seen.text


def test_at_80_columns_a_bulk_action_says_in_full_what_failed(server: Script) -> None:
    detail = "not_by_starter: 'anonymous' started the run and cannot decide step 'ask'"
    case = next(case for case in CASES if case.command == "bulk show")
    shown = msgspec.to_builtins(case.answer)
    error = {"run_id": "391m7hyamb0c54vpc3gd7bz", "code": "forbidden", "detail": detail}
    server.says(Said(shown | {"errors": [error]}))
    seen = on_terminal(*case.args, "--url", server.url, columns=80)
    assert detail in " ".join(seen.text.split())


def test_only_missing_text_is_told_to_be_shortened() -> None:
    heads, moment = ("AT", "ID", SpareHeading("TENANT")), clock("2020-11-16T10:26:59Z")
    row = [moment, whole_ident("391m7hyamb0c54vpc3gd7bz"), "acme"]

    def remark(columns: int, *cells: str) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            return "shortened" in table(heads[: len(cells)], [cells])[-1]

    assert [remark(columns, *row) for columns in (100, 49, 44)] == [False, False, True]
    assert remark(44, "x" * 40, ident("391m7hyamb0c54vpc3gd7bz"))
    assert remark(40, moment, "y" * 40)
    assert not remark(60, moment, "y" * 40)


def test_at_80_columns_a_time_of_another_year_keeps_its_year(server: Script) -> None:
    row = {
        "id": "0123456789abcdef",
        "role": "operator",
        "tenant": "acme",
        "name": "kim",
        "note": None,
        "created_at": "2026-11-16T10:26:59Z",
        "expires_at": "2027-02-15T10:26:59Z",
        "last_used_at": None,
        "revoked_at": None,
    }
    server.says(Said({"keys": [row], "cursor": None}))
    seen = on_terminal("key", "list", "--url", server.url, env={"NO_COLOR": "1"}, columns=80)
    assert "2027-02-15 10:26" in seen.text
    assert "2026" not in seen.text
    assert max(map(len, seen.text.splitlines())) <= 80


def test_at_80_columns_missed_ticks_differ_by_their_seconds(server: Script) -> None:
    case = next(case for case in CASES if case.command == "schedule show")
    shown = msgspec.to_builtins(case.answer)
    ticks = [f"2026-11-19T20:38:{second:02}Z" for second in (0, 3, 6)]
    missed = [{"tick": tick, "reason": "the tenant was full"} for tick in ticks]
    missed[1]["reason"] = "the run before it was unfinished: " + "r" * 60
    server.says(Said(shown | {"missed": missed, "missed_total": 3}))
    args = ("schedule", "show", "nightly", "--url", server.url)
    seen = on_terminal(*args, env={"NO_COLOR": "1"}, columns=80)
    lines = seen.text.splitlines()
    rows = lines[next(at for at, line in enumerate(lines) if line.startswith("MISSED")) + 1 :]
    assert [row[:20] for row in rows[:3]] == [tick.replace("T", " ") for tick in ticks]
    assert rows[1].endswith("r…")
    assert "-o json shows all" in rows[3]
    assert max(map(len, lines)) <= 80


def test_at_80_columns_a_wrong_use_is_told_in_lines_that_fit() -> None:
    seen = on_terminal("tenant", "set", "acme", "--budget", "tokens=many", columns=80)
    assert seen.code == Exit.USAGE
    assert max(map(len, seen.text.splitlines())) <= 80
    said = " ".join(seen.text.split())
    assert said.startswith("Usage: stanchion tenant set [OPTIONS] NAME Try 'stanchion tenant set")
    assert "Error: --budget takes NAME=LIMIT/WINDOW, as in --budget tokens=2000000/day" in said
    assert said.endswith("'tokens=many'")


def test_the_year_that_is_left_out_is_the_present_one() -> None:
    year = datetime.now(UTC).year
    shown = clock(f"{year}-02-15T10:26:59Z"), clock(f"{year + 1}-02-15T10:26:59Z")
    assert [each.short for each in shown if isinstance(each, FlexibleCell)] == [
        "02-15 10:26",
        f"{year + 1}-02-15 10:26",
    ]


def test_at_80_columns_errors_causes_and_topics_are_whole(server: Script) -> None:
    error = Failure(
        "job_failed", "ValueError: the ticket cannot be parsed as JSON", StepId("classify")
    )
    step = runs.StepView(status=StepStatus.FAILED, attempt=2, output=None, error=error)
    told = "its job became a dead letter, which root discarded because of a defect"
    failed = Failure("dead_letter_discarded", told, StepId("classify"))
    run = msgspec.structs.replace(RUN, steps={"classify": step}, error=failed)
    job_id = f"{RUN.run_id}:classify[1]@2"
    item = {"index": 1, "status": "failed", "attempt": 2, "job_id": job_id}
    item |= {"error": msgspec.to_builtins(error)}
    cause = "delivered 5 times, and no worker finished it"
    letter = {"id": "job:051m7nj7ne32sp5gh1g3f5x:parse@1#1", "kind": "job", "tenant": "acme"}
    letter |= {"at": "2026-11-17T20:13:37Z", "run_id": "x", "step_id": "parse", "cause": cause}
    row = {"worker_id": "vm-14099-139fad25", "tenant": "*", "jobs": 0, "version": "0.1.0.dev0"}
    row |= {"last_seen_at": "2026-11-17T20:13:37Z"}
    topics = [f"agent.topic-{number}" for number in range(6)]
    for args, answer, words in (
        (("run", "show", "07-01h"), run, f"{error.message} (job_failed)"),
        (("run", "show", "07-01h"), run, f"classify: {told} (dead_letter_discarded)"),
        (
            ("run", "items", "07-01h", "classify"),
            {"items": [item], "cursor": None},
            f"{error.message} (job_failed)",
        ),
        (("dead-letter", "list"), {"dead_letters": [letter], "cursor": None}, cause),
        (("worker", "list"), {"workers": [row | {"topics": topics}]}, ", ".join(topics)),
    ):
        server.says(Said(answer))
        command = (*args, "--url", server.url)
        seen = on_terminal(*command, env={"NO_COLOR": "1"}, columns=80)
        lines = seen.text.splitlines()
        assert max(map(len, lines)) <= 80, seen.text
        assert "…" not in seen.text, seen.text
        first = next(each for each in lines if words.split()[0] in each)
        column = first.index(words.split()[0])
        shown = " ".join(each[column:].strip() for each in lines[lines.index(first) :])
        assert words in shown, seen.text


def test_at_80_columns_the_live_view_has_its_command_on_one_line(server: Script) -> None:
    todo = "stanchion approval approve 051m7nj7ne32sp5gh1g3f5x review --tenant acme"
    finding = {"code": "approval_pending", "detail": "step 'review' waits", "remedy": todo}
    running = Said(msgspec.structs.replace(RUN, status=RunStatus.RUNNING, error=None))
    ended = Said(msgspec.structs.replace(RUN, status=RunStatus.SUCCEEDED, error=None))
    server.says(*[running] * 3, Said({"findings": [finding]}), ended)
    args = ("run", "watch", "07-01h", "--url", server.url)
    seen = on_terminal(*args, env={"NO_COLOR": "1"}, columns=80)
    assert todo in seen.text


def test_a_pipe_gets_whole_lines_unless_columns_are_given(server: Script) -> None:
    row = runs.RunRow(
        run_id="391m7hyamb0c54vpc3gd7bz",
        workflow_id="quarterly-research-report",
        workflow_version=3,
        status=RunStatus.TIMED_OUT,
        created_at=RUN.created_at,
        finished_at=RUN.created_at,
        error=Failure("step_timed_out", "took longer than 30 s", step=StepId("write")),
    )
    server.says(Said(runs.RunList((row,))))
    args = (sys.executable, "-m", "stanchion", "run", "list", "--url", server.url)
    for more, is_whole in (({}, True), ({"COLUMNS": "80"}, False)):
        made = subprocess.run(
            args, env=plain_environment(**more), capture_output=True, text=True, check=True
        )
        assert ("took longer than 30 s" in made.stdout) is is_whole
        assert (max(map(len, made.stdout.splitlines())) > 80) is is_whole


def test_a_long_line_is_cut_at_the_edge_of_the_terminal(server: Script) -> None:
    row = runs.RunRow(
        run_id="07-01h",
        workflow_id="research",
        workflow_version=3,
        status=RunStatus.FAILED,
        created_at=RUN.created_at,
        finished_at=None,
        error=Failure("job_failed", "x" * 200),
    )
    server.says(Said(runs.RunList((row,))))
    seen = on_terminal("run", "list", "--url", server.url, env={"NO_COLOR": "1"})
    lines = seen.text.splitlines()
    assert len(lines[1]) == 100
    assert lines[1].endswith("xxx…")
    assert "␛" not in seen.text


def test_no_color_means_none(server: Script) -> None:
    server.says(Said(RUN))
    with_color = on_terminal("run", "show", "x", "--url", server.url)
    without = on_terminal("run", "show", "x", "--url", server.url, env={"NO_COLOR": "1"})
    assert "␛[31mfailed␛[0m" in with_color.text
    assert "␛" not in without.text


def view(status: RunStatus, done: int) -> runs.RunView:
    """The run, with so many items of its search done."""
    search = msgspec.structs.replace(
        RUN.steps["search"],
        status=StepStatus.SUCCEEDED if status.is_finished else StepStatus.RUNNING,
        error=None,
        items_succeeded=done,
        items_failed=0,
    )
    steps = {"plan": RUN.steps["plan"], "search": search}
    return msgspec.structs.replace(RUN, status=status, steps=steps, error=None)


def test_a_watched_run_is_a_live_table_that_leaves_the_result(server: Script) -> None:
    server.says(
        Said(view(RunStatus.RUNNING, 1)),
        Said(view(RunStatus.RUNNING, 2)),
        Said(view(RunStatus.SUCCEEDED, 3)),
    )
    seen = on_terminal("run", "watch", "07-01h", "--url", server.url)
    assert seen.code == 0
    for done in ("1/3", "2/3", "3/3"):
        assert done in seen.text
    assert "━" in seen.text
    assert "␛[2K" in seen.text  # It is drawn over itself.
    assert "␛[?25h" in seen.text  # And the cursor is back.
    assert "status    ␛[32msucceeded␛[0m" in seen.text


def test_ctrl_c_stops_watching_and_gives_the_terminal_back(server: Script) -> None:
    server.says(Said(view(RunStatus.RUNNING, 1)))
    seen = on_terminal(
        "run", "watch", "07-01h", "--url", server.url, interrupt_when=lambda text: "1/3" in text
    )
    assert seen.code == Exit.INTERRUPTED
    assert seen.text.rindex("␛[?25h") > seen.text.rindex("␛[?25l")
    again = f"stanchion run watch 07-01h --url {server.url}"
    assert seen.text.rstrip().endswith(f"to see it again: {again}")
