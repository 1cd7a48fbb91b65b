"""Drills can fail: each names the promise that the defect it is for has broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drills.defects.sitecustomize import DEFECTS
from tests.drills.test_drills import drill

FOLDER = Path(__file__).parent / "defects"
FOUND_BY = [
    ("admission", "cap_off_by_one", "cap_exact"),
    ("retry", "budgets_ignored", "within_budget"),
    ("fallback", "fail_open_for_all", "closed_stop"),
    ("renewal", "fencing_by_count_only", "no_overlap"),
    ("lock-busy", "no_jitter", "delay_spread"),
]


def test_every_defect_has_its_drill() -> None:
    assert {defect for _, defect, _ in FOUND_BY} == set(DEFECTS)


@pytest.mark.parametrize(("name", "defect", "promise"), FOUND_BY)
def test_a_drill_finds_the_defect_it_is_for(
    name: str, defect: str, promise: str, tmp_path: Path
) -> None:
    arguments = (name, "--quick", "--out", str(tmp_path))
    done = drill(*arguments, PYTHONPATH=str(FOLDER), DRILL_DEFECT=defect)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sitecustomize" not in done.stderr, "the defect is not there"
    assert f"BROKEN  {promise}:" in done.stdout
    report = json.loads((tmp_path / name / "report.json").read_bytes())
    assert report["verdict"] == "fail"
    assert promise in {each["id"] for each in report["promises"] if not each["holds"]}
