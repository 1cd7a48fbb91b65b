"""Drills can fail: each names the promise that the defect it is for has broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.drills.defects.sitecustomize import DEFECTS
from tests.drills.test_drills import drill

pytestmark = [pytest.mark.alone, pytest.mark.xdist_group("defects")]
FOLDER = Path(__file__).parent / "defects"
AT_ONCE = 3
FOUND_BY = [
    ("admission", "cap_off_by_one", "cap_exact"),
    ("retry", "budgets_ignored", "within_budget"),
    ("fallback", "fail_open_for_all", "closed_stop"),
    ("renewal", "fencing_by_count_only", "no_overlap"),
    ("lock-busy", "no_jitter", "delay_spread"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defects")


def _run(name: str, defect: str, out: Path) -> CompletedProcess[str]:
    arguments = (name, "--quick", "--out", str(out / name))
    return drill(*arguments, PYTHONPATH=str(FOLDER), DRILL_DEFECT=defect)


@pytest.fixture(scope="module")
def ended(out: Path) -> Mapping[str, CompletedProcess[str]]:
    """Three at a time: they wait most of the time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {name: pool.submit(_run, name, defect, out) for name, defect, _ in FOUND_BY}
        return {name: each.result() for name, each in started.items()}


def test_every_defect_has_its_drill() -> None:
    assert {defect for _, defect, _ in FOUND_BY} == set(DEFECTS)


@pytest.mark.parametrize(("name", "defect", "promise"), FOUND_BY)
def test_a_drill_finds_the_defect_it_is_for(
    name: str, defect: str, promise: str, out: Path, ended: Mapping[str, CompletedProcess[str]]
) -> None:
    done = ended[name]
    if f"BROKEN  {promise}:" not in done.stdout:
        # On a busy machine the load may have been too small to show it.
        done = _run(name, defect, out)
    assert done.returncode == 1, f"{defect}: {done.stdout}{done.stderr}"
    assert "sitecustomize" not in done.stderr, "the defect is not there"
    assert f"BROKEN  {promise}:" in done.stdout
    report = json.loads((out / name / name / "report.json").read_bytes())
    assert report["verdict"] == "fail"
    assert promise in {each["id"] for each in report["promises"] if not each["holds"]}
