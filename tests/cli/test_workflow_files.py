"""Workflow files on the command line: checked without a server, shown as YAML, ids completed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.cli.errors import Exit
from stanchion.cli.text import yaml_lines
from stanchion.core.faults import Findings
from stanchion.core.json_value import JsonValue
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow
from stanchion.core.workflow_file.source import read_source
from stanchion.gateway.views import definition
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script, problem
from tests.cli.terminal import plain_environment
from tests.core.good_workflows import EVERY_MEMBER, RESEARCH
from tests.gateway.house import opened_house

PARENT = "id: parent\nsteps:\n  call: {workflow: child}\n"
CHILD = "id: child\nsteps:\n  work: {topic: work}\n  more: {workflow: elsewhere}\n"
BROKEN = "id: broken\nsteps:\n  work: {topic: work, needs: [plan]}\n  wait: {delay_s: -1}\n"
CIRCLE = "id: child\nsteps:\n  back: {workflow: parent}\n"


def files(directory: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [str(directory / f"{name}.yaml") for name in texts]


def test_files_are_checked_together_and_no_server_is_asked(
    cli: Cli, server: Script, tmp_path: Path
) -> None:
    parent, child = files(tmp_path, parent=PARENT, child=CHILD)
    outcome = cli("workflow", "check", parent, child)
    unknown = "  not checked: workflow elsewhere, which is not among the files\n"
    assert outcome == (0, f"{parent}: ok\n{unknown}{child}: ok\n{unknown}", "")
    assert server.requests == []
    alone = cli("workflow", "check", parent, "-o", "json")
    row = {"file": parent, "id": "parent", "errors": [], "not_checked": ["child"]}
    assert (alone.code, json.loads(alone.out)) == (0, {"files": [row]})


def test_every_fault_of_every_file_is_told(cli: Cli, tmp_path: Path) -> None:
    parent, circle, broken = files(tmp_path, parent=PARENT, circle=CIRCLE, broken=BROKEN)
    outcome = cli("workflow", "check", parent, circle, broken)
    assert outcome.code == Exit.FAILED
    assert (
        f"{parent}: 1 fault\n  line 3: steps.call.back.workflow: workflows contain" in outcome.out
    )
    assert f"{broken}: 2 faults\n  line 3: steps.work.needs[0]: there is no step" in outcome.out
    # The file of the sub-workflow is given, and cannot be used.
    seen = cli("workflow", "check", parent, broken)
    assert "workflow child, which is in none of the files without faults\n" in seen.out
    nowhere = cli("workflow", "check", str(tmp_path / "nowhere.yaml"))
    assert nowhere.code == Exit.USAGE


@pytest.mark.parametrize("text", [BROKEN, PARENT.replace("call:", "call: call:"), "", "[1]"])
async def test_the_faults_are_those_that_the_server_would_send(
    cli: Cli, tmp_path: Path, text: str
) -> None:
    [file] = files(tmp_path, broken=text)
    told = json.loads(cli("workflow", "check", "--id", "broken", file, "-o", "json").out)
    async with opened_house() as house:
        headers = [("Content-Type", "application/yaml")]
        put = await house.ask("PUT", "/v1/workflows/broken", text.encode(), headers=headers)
    assert put.status == 422
    assert told["files"][0]["errors"] == put.json["errors"]


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ("", "\n  line 1: id: missing; a workflow must have it\n"),
        ("id: 9 lives\n", '\n  line 1: id: must be an id: a letter, then letters, digits, "_" or'),
    ],
)
def test_a_file_with_a_bad_id_is_told_its_other_faults_too(
    first: str, fault: str, cli: Cli, server: Script, tmp_path: Path
) -> None:
    [file] = files(tmp_path, broken=first + BROKEN.removeprefix("id: broken\n"))
    wrong = 'expected a letter, then letters, digits, "_" or "-"; 64 at most'
    errors = [{"path": "workflow_id", "message": wrong}]
    server.says(problem(422, "invalid_request", detail=f"workflow_id: {wrong}", errors=errors))
    outcome = cli("workflow", "apply", file)
    assert fault in outcome.err
    line = 2 if not first else 3
    assert f"\n  line {line}: steps.work.needs[0]: there is no step" in outcome.err
    assert f"\n  line {line + 1}: steps.wait.delay_s: " in outcome.err


@pytest.mark.parametrize("second", ["id: b\n", "steps: {}\n"])
def test_files_after_a_bad_one_are_named_as_not_tried(
    second: str, cli: Cli, server: Script, tmp_path: Path
) -> None:
    names = files(tmp_path, a="id: a\n", b=second, c=PARENT, d=CHILD)
    faulty = problem(422, "invalid_workflow", errors=[{"path": "steps", "message": "is missing"}])
    server.says(problem(404, "not_found"), Said({"id": "a", "version": 1}), faulty)
    outcome = cli("workflow", "apply", *names)
    assert outcome.out == "workflow a is at version 1\n"
    assert f"\n  not tried: {names[2]}, {names[3]}\n" in outcome.err
    assert [each.method for each in server.requests].count("PUT") <= 2
    server.says(faulty)
    assert "not tried" not in cli("workflow", "apply", names[0]).err


def test_without_the_parsers_packages_a_missing_id_is_told(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = files(tmp_path, child="steps: {}\n")
    for name in [each for each in sys.modules if each.startswith("stanchion.core.workflow_file")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    outcome = cli("workflow", "apply", file)
    assert outcome.err.startswith(f"error: {file} has no id\nfix: add 'id: NAME'")


def test_without_the_parsers_packages_the_extra_is_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = files(tmp_path, child=CHILD)
    for name in [each for each in sys.modules if each.startswith("stanchion.core.workflow_file")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    outcome = cli("workflow", "check", file)
    assert outcome.code == Exit.FAILED
    assert "needs the package 'yaml'\nfix: pip install 'stanchion[server]'" in outcome.err


@pytest.mark.parametrize("text", [RESEARCH, EVERY_MEMBER])
def test_a_workflow_that_is_shown_as_yaml_is_the_same_workflow(
    cli: Cli, server: Script, text: str
) -> None:
    workflow = parse_workflow(text, format="yaml")
    assert isinstance(workflow, Workflow)
    server.says(Said({"definition": definition(workflow)}))
    outcome = cli("workflow", "show", "research", "-o", "yaml")
    assert outcome.code == 0
    assert parse_workflow(outcome.out, format="yaml") == workflow


def test_a_workflow_that_is_shown_as_yaml_begins_with_its_head_and_steps_with_their_kind(
    cli: Cli, server: Script
) -> None:
    text = """\
id: site
risk: high
timeout_s: 600
steps:
  pages:
    topic: web.fetch
    for_each: "${input.urls}"
    input: "${item}"
    parallel: 5
  ask:
    approval:
      message: "Go on?"
    needs: [pages]
    on_failure: continue
output: "${steps.pages.output}"
"""
    workflow = parse_workflow(text, format="yaml")
    assert isinstance(workflow, Workflow)
    server.says(Said({"definition": definition(workflow)}))
    assert cli("workflow", "show", "site", "-o", "yaml").out == text


_TEXTS = st.text() | st.sampled_from(["yes", "null", "1", "2026-01-31", "a: b", "- a", "#", "${a}"])
_VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_TEXTS, _VALUES, min_size=1, max_size=4))
def test_yaml_is_read_as_the_value_that_was_written(value: dict[str, JsonValue]) -> None:
    text = "\n".join(yaml_lines(value))
    findings = Findings()
    assert read_source(text, "yaml", findings).tree == value, findings
    assert text.replace("\n", "").isprintable()


def test_a_key_that_is_too_long_for_one_line_is_written_apart() -> None:
    value = {"k" * 2000: {"a": [1]}, "b": [{}, [], [[]]]}
    assert read_source("\n".join(yaml_lines(value)), "yaml", Findings()).tree == value


def completed(server: Script, line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "_STANCHION_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "STANCHION_URL": server.url,
    }
    done = subprocess.run(
        [sys.executable, "-m", "stanchion"],
        env=plain_environment(**asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [word.removeprefix("plain,") for word in done.stdout.split()]


def test_ids_are_completed_from_what_the_server_lists(server: Script) -> None:
    server.says(Said({"workflows": [{"id": "research"}, {"id": "other"}]}))
    assert completed(server, "stanchion run start --tenant acme re") == ["research"]
    assert server.requests[-1].headers["X-Stanchion-Tenant"] == "acme"
    server.says(Said({"runs": [{"run_id": "07-01h"}, {"run_id": "08-01h"}]}))
    assert completed(server, "stanchion run show 07") == ["07-01h"]
    server.says(Said({"tenants": [{"tenant": "acme"}]}))
    assert completed(server, "stanchion run list --tenant ") == ["acme"]
    assert [request.path for request in server.requests] == [
        "/v1/workflows",
        "/v1/runs",
        "/v1/admin/tenants",
    ]


STEPS: JsonValue = {
    "plan": {"items_total": None},
    "plan.inner": {"items_total": None},
    "pages": {"items_total": 3},
}


@pytest.mark.parametrize(
    ("line", "path", "listed", "words"),
    [
        ("schedule show n", "schedules", {"schedules": [{"id": "nightly"}]}, ["nightly"]),
        ("schedule set s --workflow r", "workflows", {"workflows": [{"id": "rep"}]}, ["rep"]),
        ("limit set l", "admin/limits", {"limits": [{"id": "llm"}, {"id": "gpu"}]}, ["llm"]),
        ("bulk stop ", "bulk", {"bulks": [{"bulk_id": "b1"}]}, ["b1"]),
        (
            "approval approve ",
            "approvals",
            {"approvals": [{"run_id": "07", "step_id": "a"}, {"run_id": "07", "step_id": "b"}]},
            ["07"],
        ),
        (
            "run reject 07 ",
            "approvals",
            {"approvals": [{"run_id": "07", "step_id": "a"}, {"run_id": "08", "step_id": "b"}]},
            ["a"],
        ),
        ("workflow usage r", "shared/workflows", {"workflows": [{"id": "rep"}]}, ["rep"]),
        ("workflow show --shared r", "shared/workflows", {"workflows": [{"id": "rep"}]}, ["rep"]),
        ("workflow show r", "workflows", {"workflows": [{"id": "rep"}]}, ["rep"]),
        ("lease release r", "admin/leases", {"leases": [{"name": "run/07"}]}, ["run/07"]),
        ("run items 07 ", "runs/07", {"steps": STEPS}, ["pages"]),
        ("run rerun 07 --from-step pl", "runs/07", {"steps": STEPS}, ["plan", "plan.inner"]),
    ],
)
def test_what_a_command_takes_is_completed_from_its_list(
    line: str, path: str, listed: JsonValue, words: list[str], server: Script
) -> None:
    server.says(Said(listed))
    assert completed(server, f"stanchion {line}") == words
    assert server.requests[-1].path == f"/v1/{path}"


def test_a_server_that_refuses_means_no_words_and_no_error(server: Script) -> None:
    server.says(problem(401, "unauthenticated"))
    assert completed(server, "stanchion run show ") == []
    assert completed(server, "stanchion run show --url http://127.0.0.1:9 ") == []
