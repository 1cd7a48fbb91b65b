"""A value that cannot be sent becomes a failure that says what is wrong."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, RESULT_BYTES_MAX
from stanchion.wire.worker import JobError, JobResult
from stanchion.worker import FinalError, results


@dataclass
class Page:
    title: str
    seen: dt.date


class Rude:
    """Its own code raises."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def _sent(result: JobResult) -> JobResult:
    """As the server reads it."""
    return msgspec.json.decode(msgspec.json.encode(result), type=JobResult)


def _error(result: JobResult) -> JobError:
    sent = _sent(result)
    assert sent.status == "failed"
    assert isinstance(sent.error, JobError)
    return sent.error


def test_whatever_has_a_place_in_json_is_sent() -> None:
    output = {"page": Page("a", dt.date(2026, 1, 2)), "n": [1, 2.5, None, True], 3: "three"}
    assert _sent(results.succeeded("j", 7, output)) == JobResult(
        job_id="j",
        fence=7,
        status="succeeded",
        output={
            "page": {"title": "a", "seen": "2026-01-02"},
            "n": [1, 2.5, None, True],
            "3": "three",
        },
    )


@pytest.mark.parametrize(
    "output",
    [object(), float("nan"), {"a": [float("inf"), None]}, "\ud800", {(1, 2): 3}, lambda: None],
    ids=["object", "nan", "infinity", "surrogate", "tuple key", "function"],
)
def test_what_is_not_json_is_a_final_failure(output: object) -> None:
    error = _error(results.succeeded("j", 1, output))
    assert (error.code, error.retryable) == ("output_not_json", False)
    assert error.message.startswith("the output is not JSON: ")


@dataclass(slots=True)
class Slotted:
    tags: object


class Record(msgspec.Struct):
    tags: object


@pytest.mark.parametrize("hidden", [b"x", bytearray(b"x"), {1}, frozenset({1}), {b"x": 1}])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: value,
        lambda value: {"a": [1, (value,)]},
        lambda value: Page(value, dt.date(2026, 1, 2)),
        Slotted,
        Record,
    ],
)
def test_bytes_and_sets_are_refused_wherever_they_are(
    hidden: object, wrap: Callable[[object], object]
) -> None:
    error = _error(results.succeeded("j", 1, wrap(hidden)))
    assert (error.code, error.retryable) == ("output_not_json", False)
    kind = "bytes" if isinstance(hidden, dict) else type(hidden).__name__
    assert error.message in {
        f"the output is not JSON: it holds {kind}",
        "the output is not JSON: Only dicts with str-like or number-like keys are supported",
    }


def test_an_output_that_contains_itself_is_a_final_failure() -> None:
    output: list[object] = []
    output.append(output)
    assert _error(results.succeeded("j", 1, output)).code == "output_not_json"


def test_the_largest_output_is_sent_and_one_byte_more_is_refused_with_both_sizes() -> None:
    fits = "x" * (RESULT_BYTES_MAX - 2)
    assert _sent(results.succeeded("j", 1, fits)).output == fits
    error = _error(results.succeeded("j", 1, fits + "x"))
    assert (error.code, error.retryable) == ("output_too_large", False)
    assert f"has {RESULT_BYTES_MAX + 1} bytes; at most {RESULT_BYTES_MAX}" in error.message


@pytest.mark.parametrize(("depth", "status"), [(64, "succeeded"), (65, "failed")])
def test_an_output_may_be_nested_as_deep_as_the_core_allows(depth: int, status: str) -> None:
    output: object = 1
    for level in range(depth):
        output = [output] if level % 2 else {"a": output, "b": 1}
    assert results.succeeded("j", 1, output).status == status


def test_a_wide_output_is_not_a_deep_one() -> None:
    assert results.succeeded("j", 1, [[]] * 1_000).status == "succeeded"
    deep: list[object] = []
    for _ in range(62):
        deep = [deep]
    assert results.succeeded("j", 1, [deep, *[[]] * 1_000]).status == "succeeded"
    assert results.succeeded("j", 1, [[deep], *[[]] * 1_000]).status == "failed"


def test_nothing_is_an_output_too() -> None:
    assert _sent(results.succeeded("j", 1, None)).output is None


@given(st.text(alphabet=st.characters(), max_size=50), st.integers(0, 300))
def test_any_message_arrives_bounded_and_readable(text: str, times: int) -> None:
    for error in (ValueError(text * times), FinalError(text * times)):
        message = _error(results.failed("j", 1, error)).message
        assert 0 < len(message) <= ERROR_MESSAGE_CHARS_MAX
        assert all(char.isprintable() or char in "\n\t" for char in message)


def test_an_error_whose_text_cannot_be_had_is_told_by_its_kind() -> None:
    assert _error(results.failed("j", 1, RudeError())).message == "RudeError"
    assert _error(results.failed("j", 1, RuntimeError())).message == "RuntimeError"
