"""Entropy: chance, as an argument to everything that needs it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Entropy"]


class Entropy(Protocol):
    """A source of chance. The real one is the operating system's; the simulator's is seeded."""

    def unit(self) -> float:
        """A number in [0, 1)."""

    def token(self) -> str:
        """A string that nobody else will ever draw: owner tokens, nonces, ids."""
