"""History: what happened in the world, line by line, and what was wrong about it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["History"]


class History:
    """Lines in the order in which things happened. The same seed gives the same digest."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken: list[str] = []
        self.faults: Counter[str] = Counter()
        self.checks: Counter[str] = Counter()
        """How often each invariant was looked at: one that never was proves nothing."""
        self._is_wrong = asyncio.Event()
        self._digest = hashlib.blake2b(digest_size=16)

    def tell(self, text: str) -> None:
        """Write a line."""
        line = f"{asyncio.get_running_loop().time():9.3f}  {text}"
        self.lines.append(line)
        self._digest.update(line.encode() + b"\n")

    def check(self, name: str, sentences: Iterable[str]) -> None:
        """Write down every sentence that says what is wrong."""
        self.checks[name] += 1
        for sentence in sentences:
            self.broken.append(f"{name}: {sentence}")
            self.tell(f"BROKEN  {name}: {sentence}")
            self._is_wrong.set()

    async def go_on(self, seconds: float) -> None:
        """Let time pass, unless something is wrong."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_wrong.wait()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()
