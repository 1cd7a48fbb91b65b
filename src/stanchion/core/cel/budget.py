"""Budgets: how long an evaluation may take and how large its value may be.

Time is counted, not measured, so the same expression on the same data always ends the same way. A
unit of work is 0.1 to 0.2 µs: one node of syntax in one round of a loop, half a comparison of two
values in a list. What is faster in bulk costs less: 16 characters joined, 4 values of a result.
"""

from __future__ import annotations

from typing import Final, cast

from stanchion.core.cel.errors import BudgetSpent, ExpressionError
from stanchion.core.cel.value import Value, ValueKind
from stanchion.core.json_value import JsonValue
from stanchion.core.limits import JSON_DEPTH_MAX

__all__ = ["SIZE_MAX", "WORK_MAX", "EvaluationBudget"]

WORK_MAX: Final = 250_000
"""Units of work in one evaluation, or in all holes of one template."""
SIZE_MAX: Final = 4 * 1024 * 1024
"""What one evaluation, or all holes of one template, may make: one for each value, and one for each
character of text and keys. That is never more than the bytes of the same value as JSON."""
_SCALARS: Final = frozenset({type(None), bool, int, float})


class EvaluationBudget:
    """What is left. Evaluations that share a budget are bounded together."""

    __slots__ = ("size_left", "work_left")

    def __init__(self, *, work: int = WORK_MAX, size: int = SIZE_MAX) -> None:
        self.work_left = work
        self.size_left = size

    def work(self, units: int) -> None:
        """Take this much work, or end the evaluation."""
        self.work_left -= units
        if self.work_left < 0:
            raise BudgetSpent("too much work: it repeats too often or looks at too much data")

    def size(self, units: int) -> None:
        """Take this much size, or end the evaluation."""
        self.size_left -= units
        if self.size_left < 0:
            raise BudgetSpent("the result is too large")

    def keep(self, value: Value) -> JsonValue:
        """Take the size of a value that is to leave the evaluation, and make sure it is JSON."""
        self.size(1)
        if type(value) in _SCALARS:
            return cast("JsonValue", value)
        # Level by level, each value paid for before it is looked at. One list may be in a value a
        # million times over and cost no memory: so the walk ends with the budget if not before.
        level = [value]
        for _ in range(JSON_DEPTH_MAX + 1):
            below: list[Value] = []
            for part in level:
                if isinstance(part, str):
                    self.size(len(part))
                elif isinstance(part, list):
                    self.size(len(part))
                    self.work(1 + len(part) // 4)
                    below += part
                elif isinstance(part, dict):
                    self.size(len(part) + sum(map(len, part)))
                    self.work(3 + len(part) // 4)
                    below += part.values()
                elif isinstance(part, ValueKind):
                    raise ExpressionError(f"the result is, or holds, a type: {part.name}")
            if not below:
                return cast("JsonValue", value)
            level = below
        raise BudgetSpent(f"the result is nested more than {JSON_DEPTH_MAX} levels deep")
