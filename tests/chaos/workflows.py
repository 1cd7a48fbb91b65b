"""What runs are made of under chaos, and what the history of each must say at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tests.chaos.worker import TOPIC

__all__ = ["CANARY", "KINDS", "Kind"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One workflow."""

    definition: Mapping[str, Any]
    ends: Mapping[str, int]
    """How many times each step ends well, its items not counted."""
    items: Mapping[str, int] = {}
    failures: int = 0
    """How many attempts are meant to fail."""


def _job(ms: int, *needs: str, **members: object) -> dict[str, Any]:
    return {"topic": TOPIC, "input": {"ms": ms}, "needs": list(needs), **members}


CANARY: Final = Kind(
    definition={"steps": {"first": _job(10), "second": _job(10, "first")}},
    ends={"first": 1, "second": 1},
)
KINDS: Final[Mapping[str, Kind]] = {
    "chain": Kind(
        definition={
            "risk": "low",
            "steps": {
                "plan": _job(30),
                "draft": _job(300, "plan"),
                "publish": _job(30, "draft"),
            },
        },
        ends={"plan": 1, "draft": 1, "publish": 1},
    ),
    "fan": Kind(
        definition={
            "risk": "high",
            "steps": {
                "plan": _job(20),
                "search": _job(150, "plan", for_each="${[1, 2, 3]}"),
                "cool": {"delay_s": 0.2, "needs": ["search"]},
                "publish": _job(20, "cool"),
            },
        },
        ends={"plan": 1, "search": 1, "cool": 1, "publish": 1},
        items={"search": 3},
    ),
    "flaky": Kind(
        definition={
            "steps": {
                "try": {
                    "topic": TOPIC,
                    "input": {"ms": 30, "fails": 1},
                    "retry": {
                        "max_attempts": 3,
                        "backoff": {"kind": "fixed", "delay_ms": 100},
                    },
                },
                "publish": _job(20, "try"),
            },
        },
        ends={"try": 1, "publish": 1},
        failures=1,
    ),
}
