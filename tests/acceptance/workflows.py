"""Workflows that the tests start."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["AROUND", "HOLD", "every_kind", "four_jobs", "inner", "one_job"]

HOLD: Final[dict[str, Any]] = {"steps": {"gate": {"approval": {}}}}
"""Keeps its slot until somebody decides: no worker is needed."""

AROUND: Final[dict[str, Any]] = {"steps": {"inside": {"workflow": "hold"}}}
"""The same inside of another workflow."""


def one_job(topic: str, *, timeout_s: float | None = None, **members: object) -> dict[str, Any]:
    """One step for a worker; the time is that of the run."""
    workflow: dict[str, Any] = {"steps": {"work": {"topic": topic, "input": "${input}", **members}}}
    return workflow if timeout_s is None else {**workflow, "timeout_s": timeout_s}


def four_jobs(topic: str) -> dict[str, Any]:
    """What load is made of: a job, a timer, and a job for each of three."""
    return {
        "steps": {
            "first": {"topic": topic, "input": "${input}"},
            "pause": {"delay_s": 0.05, "needs": ["first"]},
            "each": {
                "topic": topic,
                "needs": ["pause"],
                "for_each": "${[1, 2, 3]}",
                "input": {"n": "${item}"},
            },
        }
    }


def every_kind(topic: str) -> dict[str, Any]:
    """For-each, approval, delay, retry, condition and sub-workflow. It contains ``inner``."""
    return {
        "steps": {
            "plan": {
                "topic": topic,
                "input": {"q": "${input.question}"},
                "retry": {"max_attempts": 2, "backoff": {"kind": "fixed", "delay_ms": 50}},
            },
            "search": {
                "topic": topic,
                "needs": ["plan"],
                "for_each": "${steps.plan.output.queries}",
                "input": {"q": "${item}"},
            },
            "cool": {"delay_s": 0.1, "needs": ["search"]},
            "review": {"approval": {"message": "Publish?"}, "needs": ["cool"]},
            "extra": {"topic": topic, "needs": ["review"], "when": "input.question == 'never'"},
            "publish": {
                "workflow": "inner",
                "needs": ["extra"],
                "input": {"text": "${steps.search.output}"},
            },
        },
        "output": "${steps.publish.output}",
    }


def inner(topic: str) -> dict[str, Any]:
    """What ``every_kind`` contains."""
    return {
        "steps": {"draw": {"topic": topic, "input": "${input.text}"}},
        "output": "${steps.draw.output}",
    }
