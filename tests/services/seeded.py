"""Chance from a seed: the same every time."""

from __future__ import annotations

from random import Random

__all__ = ["SeededEntropy"]


class SeededEntropy:
    """The entropy port, replayable."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def unit(self) -> float:
        return self._random.random()

    def token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"
