"""The two walks of ARCHITECTURE.md name files in the order in which requests enter them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.request_paths import FILES_MAX, walks_on

ROOT = Path(__file__).parent.parent.parent


def _named(heading: str) -> list[str]:
    """The files that the numbered steps below a heading name, in their order, each once."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    steps = section[section.index("\n1. ") :].partition("\n\n")[0]
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)", steps)))


@pytest.mark.parametrize("kind", ["start", "result"])
def test_a_walk_names_its_files_in_the_order_they_are_entered(kind: str) -> None:
    walks = asyncio.run(walks_on())._asdict()
    named = _named(f"A {kind}, through the files")
    assert len(named) >= 12
    assert [file for file in named if file not in walks[kind]] == []
    assert named == sorted(named, key=walks[kind].index)
    assert len(walks[kind]) <= FILES_MAX


def test_the_count_is_a_command_of_its_own() -> None:
    script = ROOT / "scripts" / "request_paths.py"
    help_text = subprocess.run(
        [sys.executable, script, "--help"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    ).stdout
    assert "--list" in help_text
