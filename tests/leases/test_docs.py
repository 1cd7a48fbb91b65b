"""What the pages about leases show, runs."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to" / "guard-your-own-writes.md"
COMPARED = ROOT / "docs" / "explanation" / "leases-compared.md"


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Every block of a page: its language and its text."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _blocks_in(page: Path, language: str) -> list[str]:
    return [text for each, text in _blocks(page) if each == language]


def test_every_block_is_of_a_kind_that_is_run_here() -> None:
    assert {language for language, _ in _blocks(HOW_TO)} == {"python", "sh", "text"}
    assert _blocks(COMPARED) == []


async def test_the_snippets_run_one_after_the_other(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippets"}
    for snippet in _blocks_in(HOW_TO, "python"):
        code = compile(
            snippet.replace("redis://127.0.0.1:6379", server.url),
            "snippet",
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        )
        done = eval(code, names)  # noqa: S307 - our own page
        if inspect.isawaitable(done):
            await done
    names["db"].close()  # type: ignore[attr-defined]  # a sqlite3.Connection
    assert capsys.readouterr().out == "held\n1 1\n"


def test_the_example_prints_what_the_page_says() -> None:
    [command], [output] = _blocks_in(HOW_TO, "sh"), _blocks_in(HOW_TO, "text")
    python, *arguments = shlex.split(command)
    assert python == "python"
    ran = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", output)
