"""Tasks: which function handles which topic, and where it runs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec

from stanchion.core.limits import TOPIC_CHARS_MAX
from stanchion.worker.job import Job

__all__ = ["Async", "Blocking", "Computing", "Executor", "Task", "make_task"]

Executor: TypeAlias = Literal["thread", "process"]
_TOPIC: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")


class Async(msgspec.Struct, frozen=True):
    """Runs on the event loop."""

    handler: Callable[[Job], Awaitable[Any]]


class Blocking(msgspec.Struct, frozen=True):
    """Runs in a thread."""

    handler: Callable[[Job], Any]


class Computing(msgspec.Struct, frozen=True):
    """Runs in a process."""

    handler: Callable[[Job], Any]


Task: TypeAlias = Async | Blocking | Computing


def make_task(topic: str, handler: Callable[[Job], Any], executor: Executor | None) -> Task:
    """The task for a handler. Raises ``ValueError`` or ``TypeError`` with what is wrong."""
    if len(topic) > TOPIC_CHARS_MAX or _TOPIC.fullmatch(topic) is None:
        raise ValueError(
            f"{topic!r} is no topic: words of letters, digits, '_' or '-', with dots between them"
        )
    if not callable(handler):
        raise TypeError(f"the handler of {topic!r} cannot be called: put a topic in @app.task(…)")
    if _is_async(handler):
        if executor is not None:
            raise ValueError(f"{topic!r} has an async handler: it runs on the loop, in no executor")
        return Async(handler)
    match executor:
        case "thread" | None:
            return Blocking(handler)
        case "process":
            return Computing(handler)
        case _:
            raise ValueError(f"{executor!r} is no executor; there are 'thread' and 'process'")


def _is_async(handler: Callable[[Job], Any]) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if inspect.iscoroutinefunction(handler):
        return True
    # An object with an async __call__.
    return inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - looked at, not tested for
