"""Cursors: what was written is read, and whatever else is refused by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.ports.records import BadCursor


@given(number=st.integers(0, 2**53 - 1), text=st.text())
def test_a_cursor_is_read_as_it_was_written(number: int, text: str) -> None:
    cursor = write_cursor("runs", number, text)
    assert read_cursor("runs", cursor, tuple[int, str]) == (number, text)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", cursor)


@given(st.text())
def test_whatever_else_is_a_bad_cursor(text: str) -> None:
    with pytest.raises(BadCursor):
        read_cursor("runs", text, tuple[int, str])


def test_a_cursor_of_another_list_is_bad() -> None:
    with pytest.raises(BadCursor):
        read_cursor("runs", write_cursor("tenants", 1, "a"), tuple[int, str])


def test_a_cursor_of_another_shape_is_bad() -> None:
    for wrong in (write_cursor("runs"), write_cursor("runs", 1), write_cursor("runs", "a", 1)):
        with pytest.raises(BadCursor):
            read_cursor("runs", wrong, tuple[int, str])


def test_a_cursor_that_was_tampered_with_is_bad() -> None:
    cursor = write_cursor("runs", 1, "a")
    for wrong in (cursor[:-1], cursor[1:], cursor + "A", "", "=", cursor + "\n"):
        with pytest.raises(BadCursor):
            read_cursor("runs", wrong, tuple[int, str])


@pytest.mark.parametrize("number", [2**53, 2**63, 2**64, 10**40, -1, -(2**63) - 1])
def test_a_number_that_no_store_can_count_with_is_bad(number: int) -> None:
    with pytest.raises(BadCursor):
        read_cursor("runs", write_cursor("runs", number), tuple[int])


def test_a_bad_cursor_says_what_was_given_in_short() -> None:
    with pytest.raises(BadCursor, match="nonsense") as caught:
        read_cursor("runs", "nonsense" * 1_000, tuple[int, str])
    assert len(str(caught.value)) < 200
    assert isinstance(caught.value, ValueError)
