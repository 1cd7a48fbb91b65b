"""Pace: how long each figure is measured."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["FULL", "QUICK", "Pace"]


class Pace(msgspec.Struct, frozen=True):
    """Number and length of rounds. Compared systems alternate, round by round."""

    rounds: int
    seconds: float
    is_quick: bool = False


FULL: Final = Pace(rounds=5, seconds=3.0)
QUICK: Final = Pace(rounds=1, seconds=1.0, is_quick=True)
"""To see that a benchmark works. Its figures are not for the record."""
