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
TRACES_MAX = 3
"""On a busy machine every request of a trace may meet a background loop or an expired cache."""


def _named(heading: str) -> list[str]:
    """The files that the numbered steps below a heading name, in their order, each once."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    steps = section[section.index("\n1. ") :].partition("\n\n")[0]
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)", steps)))


@pytest.mark.parametrize("kind", ["start", "result"])
def test_a_walk_names_its_files_in_the_order_they_are_entered(kind: str) -> None:
    named = _named(f"A {kind}, through the files")
    assert len(named) >= 12
    walk: list[str] = []
    for _ in range(TRACES_MAX):
        walk = asyncio.run(walks_on())._asdict()[kind]
        is_in_order = set(named) <= set(walk) and named == sorted(named, key=walk.index)
        if is_in_order and len(walk) <= FILES_MAX:
            break
    assert [file for file in named if file not in walk] == []
    assert named == sorted(named, key=walk.index)
    assert len(walk) <= FILES_MAX


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
