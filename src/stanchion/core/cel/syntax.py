"""Syntax: the nodes of a parsed expression.

``library`` builds these nodes and ``evaluation`` compiles them. Operators are calls under their CEL
names (``_+_``, ``_[_]``); a method call (``text.size()``) has its receiver as first argument.
Macros are one node, ``Loop``: CEL has no other loops.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, assert_never

import msgspec


class _Node(msgspec.Struct, frozen=True):
    position: int | None


class Constant(_Node, frozen=True):
    """A literal."""

    value: bool | int | float | str | None


class Name(_Node, frozen=True):
    """A root name, the variable of a macro, or the name of a type."""

    name: str


class Select(_Node, frozen=True):
    """``operand.field``."""

    operand: Node
    field: str


class Has(_Node, frozen=True):
    """``has(operand.field)``."""

    operand: Node
    field: str


class CallNode(_Node, frozen=True):
    """A function or an operator."""

    function: str
    arguments: tuple[Node, ...]


class ListOf(_Node, frozen=True):
    """``[a, b]``."""

    items: tuple[Node, ...]


class MapOf(_Node, frozen=True):
    """``{k: v}``."""

    entries: tuple[tuple[Node, Node], ...]


class Macro(Enum):
    """The result of a loop."""

    ALL = "all"
    EXISTS = "exists"
    EXISTS_ONE = "exists_one"
    COLLECT = "collect"
    """``map`` and ``filter``: the list of ``value`` where ``condition`` holds."""


class Loop(_Node, frozen=True):
    """``over.macro(variable, condition, value)``."""

    macro: Macro
    variable: str
    over: Node
    condition: Node | None
    value: Node | None


Node: TypeAlias = Constant | Name | Select | Has | CallNode | ListOf | MapOf | Loop


def children(node: Node) -> tuple[Node, ...]:
    """The child nodes."""
    match node:
        case Constant() | Name():
            return ()
        case Select(operand=operand) | Has(operand=operand):
            return (operand,)
        case CallNode(arguments=arguments):
            return arguments
        case ListOf(items=items):
            return items
        case MapOf(entries=entries):
            return tuple(part for entry in entries for part in entry)
        case Loop(over=over, condition=condition, value=value):
            return tuple(part for part in (over, condition, value) if part is not None)
        case _:
            assert_never(node)
