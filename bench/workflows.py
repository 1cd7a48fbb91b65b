"""The measured workflows."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["FAN", "FAN_PARALLEL", "NOTHING", "ONE_JOB", "PARALLEL", "THREE_STEPS", "TOPICS"]

TOPICS: Final = ("bench.first", "bench.second", "bench.third")

ONE_JOB: Final[dict[str, Any]] = {
    "steps": {"only": {"topic": "bench.nobody", "input": {"n": "${input.n}"}}}
}
"""To be started, and left alone: no worker asks for its topic."""

NOTHING: Final[dict[str, Any]] = {
    "steps": {"only": {"topic": "bench.nobody", "when": "input.n < 0", "input": {"n": 0}}}
}
"""Over as soon as it begins: starts that leave nothing active behind."""

THREE_STEPS: Final[dict[str, Any]] = {
    "steps": {
        "first": {"topic": TOPICS[0], "input": {"n": "${input.n}"}},
        "second": {
            "topic": TOPICS[1],
            "needs": ["first"],
            "input": {"n": "${steps.first.output.n}"},
        },
        "third": {
            "topic": TOPICS[2],
            "needs": ["second"],
            "input": {"n": "${steps.second.output.n}"},
        },
    }
}
"""One after the other, each with what the one before it gave."""

_EACH: Final = {"for_each": "${input.items}", "topic": TOPICS[0], "input": {"n": "${item}"}}

FAN: Final[dict[str, Any]] = {"steps": {"each": _EACH}}
"""A job for each item of a list."""

PARALLEL: Final = 50
FAN_PARALLEL: Final[dict[str, Any]] = {"steps": {"each": {**_EACH, "parallel": PARALLEL}}}
"""The same, with at most so many jobs at a time."""
