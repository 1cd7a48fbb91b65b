"""Stacks become boxes: as wide as they were often, above what called them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.flames import LEAST, boxes, drawn, main

STACKS = [
    "MainThread;main (click/core.py:9);run (asyncio/runners.py:1);f (stanchion/a.py:1) 30",
    "MainThread;main (click/core.py:9);run (asyncio/runners.py:1);f (stanchion/a.py:2) 30",
    "MainThread;main (click/core.py:9);run (asyncio/runners.py:1) 20",
    "thread (8): /some/where/stanchion.db (writer);g (stanchion/<b>.py:3) 20",
]


def test_a_function_is_one_box_whatever_line_it_was_at() -> None:
    found = {box.frame: (box.depth, round(box.begins, 3), box.part) for box in boxes(STACKS)}
    assert found == {
        "MainThread": (0, 0.0, 0.8),
        "run (asyncio/runners.py)": (1, 0.0, 0.8),
        "f (stanchion/a.py)": (2, 0.0, 0.6),
        "stanchion.db (writer)": (0, 0.8, 0.2),
        "g (stanchion/<b>.py)": (1, 0.8, 0.2),
    }


def test_what_hardly_ever_was_under_way_is_left_out() -> None:
    seldom = ["MainThread;often (a.py:1) 9999", "MainThread;seldom (a.py:1) 1"]
    assert LEAST > 1 / 10_000
    assert [box.frame for box in boxes(seldom)] == ["MainThread", "often (a.py)"]


@pytest.mark.parametrize("stacks", [[], ["\n"]])
def test_of_nothing_there_is_an_empty_picture(stacks: list[str]) -> None:
    assert boxes(stacks) == []
    assert drawn([], "nothing").startswith("<svg")


def test_the_picture_names_no_place_of_the_machine(tmp_path: Path) -> None:
    stacks, picture = tmp_path / "stacks.txt", tmp_path / "flames.svg"
    stacks.write_text("\n".join(STACKS))
    main(str(stacks), str(picture), "who & what")
    text = picture.read_text()
    assert "/some" not in text
    assert "who &amp; what" in text
    assert "g (stanchion/&lt;b&gt;.py): 20.0%" in text
