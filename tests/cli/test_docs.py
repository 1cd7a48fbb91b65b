"""The reference pages say what the commands and options say of themselves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from scripts.generate_reference import CLI_PAGE, CONFIGURATION_PAGE, cli_text, configuration_text
from stanchion.cli.errors import Exit
from stanchion.config import Config, load
from tests.cli.conftest import Cli

MEND = "run: python scripts/generate_reference.py"


@pytest.fixture(autouse=True)
def _plain_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STANCHION_URL", raising=False)


def test_the_page_about_the_command_line_is_up_to_date() -> None:
    assert CLI_PAGE.read_text(encoding="utf-8") == cli_text(), MEND


def test_the_table_of_options_is_up_to_date() -> None:
    assert CONFIGURATION_PAGE.read_text(encoding="utf-8") == configuration_text(), MEND


def test_every_exit_code_is_on_the_page() -> None:
    codes = re.findall(r"^\| (\d+) \|", CLI_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(code) for code in codes] == list(Exit)


def blocks(language: str) -> list[str]:
    page = CONFIGURATION_PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_file_that_is_shown_can_be_used(tmp_path: Path) -> None:
    [shown] = blocks("toml")
    file = tmp_path / "stanchion.toml"
    file.write_text(shown, encoding="utf-8")
    config = load({}, {"XDG_DATA_HOME": "/data"}, file)
    assert isinstance(config, Config)
    assert config.store == tomllib.loads(shown)["store"]


def test_the_faults_that_are_shown_are_those_that_are_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [shown] = [block for block in blocks("text") if block.startswith("error:")]
    (tmp_path / "stanchion.toml").write_text("\n\nprot = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STANCHION_URL", raising=False)
    monkeypatch.setenv("STANCHION_STORE", "")
    outcome = cli("serve", "--config", "stanchion.toml", "--run-lease-ttl-s", "0")
    assert (outcome.code, outcome.err) == (Exit.USAGE, shown)
