"""No page shows a command or an option that is not there; what operators are told to type works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from stanchion.cli.app import app
from stanchion.sim.command import arguments as sim_arguments
from tests.docs.terminal import ROOT, Terminal, blocks_of, serving

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GENERATED = ROOT / "docs" / "reference" / "cli.md"
TYPED_HERE = {
    "docs/how-to/choose-policies.md": [
        "stanchion tenant set acme --max-concurrent-runs 20",
        "stanchion settings set admission.strategy=lock",
    ],
    "docs/how-to/lock-incidents.md": ["stanchion lease list", "stanchion dead-letter list"],
    "docs/reference/configuration.md": ["stanchion settings show"],
}


def shown(page: Path) -> list[str]:
    """Every command of ours on a page, in a block or in a sentence."""
    text = page.read_text(encoding="utf-8")
    in_sentences = re.findall(r"`(?:\.venv/bin/)?(stanchion [a-z][^`\n]*)`", text)
    in_blocks = re.findall(r"^(?:\.venv/bin/)?(stanchion .*)$", text, re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in (*in_sentences, *in_blocks)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_exists_with_its_options(page: Path) -> None:
    if page != GENERATED:
        for line in shown(page):
            check(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_a_release_that_there_is_not(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # It quotes what errors say.
        return
    installed = re.findall(r"pip install +'?stanchion", page.read_text(encoding="utf-8"))
    assert not installed, "there is no release yet: pip install '.[…]' in a clone"


def test_commands_are_found_on_the_pages() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 25


def check(line: str) -> None:
    command: click.Command = app
    _, *words = shlex.split(line)
    if words[:1] == ["sim"]:
        sim_arguments().parse_args(
            words[1:]
        )  # It reads its own arguments, and ends if they are wrong.
        return
    if words[:1] == ["worker"] and words[1:2] not in ([], ["list"], ["run"]):
        words.insert(1, "run")  # the short form
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"{line}: there is no {words[0]!r}"
        command, words = found, words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert given <= known | {"--help"}, line


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("operator")
    with serving(folder) as url:
        yield Terminal(folder, url)


@pytest.mark.parametrize("page", TYPED_HERE)
def test_what_an_operator_is_told_to_type_works(page: str, shell: Terminal) -> None:
    for line in TYPED_HERE[page]:
        assert line in shown(ROOT / page)
        shell.type(line)


def test_every_change_of_settings_that_is_shown_is_taken(shell: Terminal) -> None:
    page = ROOT / "docs" / "reference" / "settings.md"
    document, *patches = [block.text for block in blocks_of(page) if block.kind == "json"]
    assert len(patches) >= 3
    for patch in (document, *patches):
        shell.type(f"stanchion settings set --patch {shlex.quote(patch)}")
