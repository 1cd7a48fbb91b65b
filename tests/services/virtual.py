"""Tests in virtual time: an hour of waiting takes no time, and nothing real is waited for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from stanchion.sim import loop

__all__ = ["in_virtual_time"]

_Stage = TypeVar("_Stage")


def in_virtual_time(
    stage: Callable[[], _Stage],
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test on a virtual loop, with a fresh stage as its first argument."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def play(**arguments: object) -> None:
            async def main() -> None:
                await test(stage(), **arguments)

            loop.run(main())

        # pytest passes what the signature names: all but the stage.
        _, *rest = inspect.signature(test).parameters.values()
        play.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]  # read by inspect
        return play

    return decorate
