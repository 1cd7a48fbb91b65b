"""Waiting for the first of several things, and ending those that are not waited for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["end", "first"]


async def first(
    *awaitables: asyncio.Task[None] | Coroutine[Any, Any, object], timeout_s: float | None = None
) -> None:
    """Wait until one of them has ended, or the time is over. Those begun here are ended here."""
    given = {each for each in awaitables if isinstance(each, asyncio.Task)}
    own = {asyncio.create_task(each) for each in awaitables if not isinstance(each, asyncio.Task)}
    try:
        await asyncio.wait(given | own, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in own:
            await end(each)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel it and wait for it; what it raised is of no interest any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
