"""Waiting for what a server will do by itself: by looking, and never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["until"]

_LOOK_EVERY_S: Final = 0.03


async def until(
    holds: Callable[[], Awaitable[bool]], *, within_s: float = 10.0, since: float | None = None
) -> None:
    """Look until it holds. That must be so within the time, counted from now or from ``since``."""
    began = time.monotonic() if since is None else since
    while not await holds():
        assert time.monotonic() - began < within_s, f"not so within {within_s} s"
        await asyncio.sleep(_LOOK_EVERY_S)
