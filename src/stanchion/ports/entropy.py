"""The entropy port: random numbers and tokens."""

from __future__ import annotations

from typing import Protocol


class Entropy(Protocol):
    """A source of randomness: the operating system, or a seeded generator in the simulator."""

    def unit(self) -> float:
        """A number in [0, 1)."""

    def token(self) -> str:
        """A unique random string: for owner tokens, nonces, ids."""
