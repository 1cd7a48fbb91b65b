"""Commands that ask no server, and how any command ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stanchion.cli.errors import Exit
from stanchion.wire import runs
from tests.cli.conftest import Cli
from tests.cli.scripted import Said, Script
from tests.cli.terminal import plain_environment


@pytest.mark.parametrize(
    ("shell", "fragment"),
    [
        ("bash", "complete -o nosort -F _stanchion_completion stanchion"),
        ("zsh", "#compdef stanchion"),
        ("fish", "complete --no-files --command stanchion"),
    ],
)
def test_a_shell_gets_its_script(shell: str, fragment: str, cli: Cli) -> None:
    outcome = cli("completion", shell)
    assert outcome.code == 0
    assert fragment in outcome.out


def test_a_shell_gets_its_words() -> None:
    asked = {
        "_STANCHION_COMPLETE": "bash_complete",
        "COMP_WORDS": "stanchion run re",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "stanchion"],
        env=plain_environment(**asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["plain,reject", "plain,rerun"]


def test_the_version_is_the_packages(cli: Cli) -> None:
    assert re.fullmatch(r"stanchion \d+\.\d+\.\S+\n", cli("--version").out)


def test_without_a_command_one_sees_the_help_and_it_is_no_success(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code == Exit.USAGE
    assert "Commands:" in outcome.err + outcome.out


def test_a_reader_that_went_away_is_no_reason_for_a_traceback(server: Script) -> None:
    server.says(Said(runs.RunList(())))
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "stanchion", "run", "list", "-o", "json", "--url", server.url],
        env=plain_environment(),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (Exit.FAILED, "")


def test_a_terminal_of_another_encoding_shows_other_characters_by_their_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stanchion", "serve", "--help"],
        env=plain_environment(PYTHONIOENCODING="latin-1"),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (Exit.OK, b"")
    assert b"redis://\\u2026" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs an output that is always full")
def test_a_full_disk_is_named_and_is_no_success() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stanchion", "--help"],
            env=plain_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    told = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (Exit.FAILED, told)


# ── serve and worker, as far as they come without a server ───────────────────────────────────────


def test_a_server_that_was_told_wrong_names_every_fault_and_does_not_start(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "stanchion.toml"
    file.write_text("prot = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STANCHION_HSOT", "x")
    outcome = cli("serve", "--port", "many")
    assert outcome.code == Exit.USAGE
    assert outcome.err == (
        "error: this configuration cannot be used:\n"
        f"  {file}:1: prot: no such setting; did you mean 'port'?\n"
        "  STANCHION_HSOT: no such setting; did you mean 'STANCHION_HOST'?\n"
        "  --port: should be a whole number from 0 to 65535\n"
        "fix: see docs/reference/configuration.md, or: stanchion serve --help\n"
    )


def test_a_redis_store_without_nats_is_refused_with_the_fix(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("serve", "--store", "redis://cache:6379")
    assert outcome.code == Exit.USAGE
    assert "add --bus nats://HOST:4222 (or STANCHION_BUS)" in outcome.err


def test_a_configuration_file_that_is_not_there_is_a_fault(cli: Cli) -> None:
    outcome = cli("serve", "--config", "/nowhere.toml")
    assert outcome.code == Exit.USAGE
    assert "--config: there is no file '/nowhere.toml'" in outcome.err


def test_a_worker_that_cannot_be_found_says_what_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stanchion", "worker", "nowhere_at_all:app"],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.USAGE
    assert "nowhere_at_all" in done.stderr
    assert "Traceback" not in done.stderr
