"""Chance from a seed: the entropy port, replayable."""

from __future__ import annotations

import zlib
from random import Random

__all__ = ["SeededEntropy", "share"]


class SeededEntropy:
    """See ``ports.entropy``."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # noqa: S311 - to be foreseen is the point

    def unit(self) -> float:
        return self._random.random()

    def token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


def share(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone: not on what was drawn before."""
    return zlib.crc32("/".join(map(str, parts)).encode()) / 2**32
