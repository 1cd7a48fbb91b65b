"""Answers: how much of what was said, and not yet taken, is held in memory."""

from __future__ import annotations

__all__ = ["Answers"]


class Answers:
    """Large answers that are being sent, all together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0

    def take(self, size: int) -> bool:
        """Make room for one; whether there was. One alone always fits."""
        if self._held_bytes and self._held_bytes + size > self._bytes_max:
            return False
        self._held_bytes += size
        return True

    def give(self, size: int) -> None:
        """It was sent, or nobody wants it any more."""
        self._held_bytes -= size
