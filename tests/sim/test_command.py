"""What ``stanchion sim`` is told, and what it refuses to take for an answer."""

from __future__ import annotations

import pytest

from stanchion.sim.command import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--seeds", "5..5"], "no days"),
        (["--seeds", "5..3"], "no days"),
        (["--seeds", "five"], "not A..B"),
        (["--seed", "3", "--seeds", "0..2"], "give one of them"),
        (["--seeds", "0..2", "--only", "fail-open-for-all"], "--only needs"),
        (["--seeds", "0..2", "--workers", "0"], "above 0"),
        (["--mutants", "--seeds-max", "-1"], "above 0"),
    ],
)
def test_what_would_check_nothing_or_something_else_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_good_day_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ALL GOOD"


def test_a_day_with_a_defect_that_shows_ends_with_what_broke(
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes = {main(["--seed", str(seed), "--only", "fail-open-for-all"]) for seed in range(5)}
    assert 1 in codes
    assert "BROKEN" in capsys.readouterr().out
