"""Budgets: how much a process retries in all, however many callers it has.

A server that is down is asked once by every caller. If each asked eight times, the callers would be
the next outage. So every retry takes a token from a bucket that all clients of the process share,
one bucket a class; when it is empty, calls fail at once instead.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from stanchion.core.model import Instant
from stanchion.core.retry import BUDGETS, Budget, BudgetState, RetryClass, full_budget, spend

__all__ = ["SHARED", "RetryBudgets"]


class RetryBudgets:
    """A bucket for each class. Used by many threads at once."""

    def __init__(self, budgets: Mapping[RetryClass, Budget] = BUDGETS) -> None:
        self._budgets = dict(budgets)
        self._states: dict[RetryClass, BudgetState] = {}
        self._turn = threading.Lock()

    def take(self, retry_class: RetryClass, now: Instant) -> bool:
        """Take one token, or say that there is none."""
        budget = self._budgets[retry_class]
        with self._turn:
            state = self._states.get(retry_class) or full_budget(budget, now)
            self._states[retry_class], taken = spend(budget, state, now)
        return taken


SHARED: Final = RetryBudgets()
"""The process's own. A client that is not given others draws on these."""
