"""Errors of expressions, split by who can mend them.

ExpressionFault       the author of the workflow: the text is wrong, whatever the data
ExpressionError       whoever made the data: the text has no value for it
  BudgetSpent         either: the text asks for too much of so much data
"""

from __future__ import annotations

__all__ = ["BudgetSpent", "ExpressionError", "ExpressionFault"]


class ExpressionFault(Exception):
    """An expression that can never be evaluated: found when it is compiled."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message, position)
        self.message = message
        self.position = position
        """The character at which it was noticed, the first being 1, if that is known."""

    def __str__(self) -> str:
        return self.message if self.position is None else f"{self.message} (at {self.position})"


class ExpressionError(Exception):
    """An expression that has no value for this data."""


class BudgetSpent(ExpressionError):
    """An evaluation that was ended, because it took too long or its value grew too large."""
