"""The walkthrough, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_walkthrough_ends_well_and_shows_its_result() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "core_walkthrough.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "run demo: succeeded" in ran.stdout
    assert 'output: {"report":"8 hits in 2 searches","checked":true}' in ran.stdout
