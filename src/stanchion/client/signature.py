"""Signatures: how a call reads to whoever makes it, in ``help()`` and in an editor.

A call is written once, for the engine, as a generator on its commands. As a method of a client it
has no engine, and gives what comes of it. What it is called and what it says of itself follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Final, TypeVar

__all__ = ["as_method", "named"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_SELF: Final = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


def as_method(
    method: _Method, written: Callable[..., Any], *, gives: str = "{}", known: int = 1
) -> _Method:
    """Show a method as it is called: with ``self`` in the place of what the object knows already.

    ``known`` is how many of the first parameters these are. ``gives`` is the type of what comes
    back, with the inner type of the engine's generator in the place of the braces.
    """
    update_wrapper(method, written)
    del method.__dict__["__wrapped__"]  # or whoever asks is shown the engine's side again
    signature = inspect.signature(written)
    parameters = list(signature.parameters.values())[known:]
    inner = str(signature.return_annotation)
    for outer in ("Op[", "Feed["):
        if inner.startswith(outer):
            inner = inner[len(outer) : -1]
    returns = gives.format(inner)
    method.__dict__["__signature__"] = inspect.Signature(
        [_SELF, *parameters], return_annotation=returns
    )
    method.__annotations__ = {each.name: each.annotation for each in parameters} | {
        "return": returns
    }
    return method


def named(cls: _Class) -> _Class:
    """Call the public functions of a class what the class calls them."""
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            member.__name__, member.__qualname__ = name, f"{cls.__name__}.{name}"
            member.__module__ = cls.__module__
    return cls
