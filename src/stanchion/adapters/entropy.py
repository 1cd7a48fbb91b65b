"""The operating system's chance."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

__all__ = ["SystemEntropy"]

_UNIT_BITS: Final = 53
"""As many as a float has digits: every value below one is hit exactly, and one itself never."""
_UNIT_BYTES: Final = 8
_TOKEN_BYTES: Final = 16
_STOCK_BYTES: Final = 4096
"""Fetched at once: asking the system for sixteen bytes costs as much as asking for all of these."""


class SystemEntropy:
    """Chance that nobody can foresee. Threads may share one; a forked child draws its own."""

    def __init__(self) -> None:
        self._stock = b""
        self._used = 0
        self._drawing = threading.Lock()
        # A child that was forked has the same stock, and must not give out the same tokens.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _renew(mine()))

    def unit(self) -> float:
        bits = int.from_bytes(self._draw(_UNIT_BYTES), "big") >> (8 * _UNIT_BYTES - _UNIT_BITS)
        return bits / (1 << _UNIT_BITS)

    def token(self) -> str:
        return self._draw(_TOKEN_BYTES).hex()

    def _draw(self, size: int) -> bytes:
        with self._drawing:
            start, end = self._used, self._used + size
            if end > len(self._stock):
                self._stock = os.urandom(_STOCK_BYTES)
                start, end = 0, size
            self._used = end
            return self._stock[start:end]

    def renew(self) -> None:
        """Throw the stock away. Whoever was about to draw from it does not exist any more."""
        self._drawing = threading.Lock()
        self._stock = b""
        self._used = 0


def _renew(entropy: SystemEntropy | None) -> None:
    if entropy is not None:
        entropy.renew()
