"""Dependency graphs of steps.

Functions over ``{step: the steps it needs}``. None of them is recursive, so the length of a chain
is not limited by the Python stack.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

_Node = TypeVar("_Node", bound=Hashable)


def ancestors(needs: Mapping[_Node, Sequence[_Node]]) -> dict[_Node, frozenset[_Node]]:
    """All direct and indirect needs of each node. The graph must be free of cycles."""
    found: dict[_Node, frozenset[_Node]] = {}
    for root in needs:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in found:
                stack.pop()  # reached by two paths, and done on the first
                continue
            missing = [parent for parent in needs[node] if parent not in found]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            found[node] = frozenset(needs[node]).union(*(found[parent] for parent in needs[node]))
    return found


def dependants(needs: Mapping[_Node, Sequence[_Node]]) -> dict[_Node, tuple[_Node, ...]]:
    """The nodes that need each node directly, in the order of the mapping."""
    turned: dict[_Node, list[_Node]] = {node: [] for node in needs}
    for node, parents in needs.items():
        for parent in dict.fromkeys(parents):
            turned[parent].append(node)
    return {node: tuple(children) for node, children in turned.items()}


def cycle(needs: Mapping[_Node, Sequence[_Node]]) -> tuple[_Node, ...] | None:
    """A cycle: each node needs the next, and the last one the first. ``None`` if there is none.

    Names that are not nodes of the graph are ignored: another check reports them.
    """
    done: set[_Node] = set()
    for root in needs:
        trail: dict[_Node, None] = {}
        stack: list[tuple[_Node, bool]] = [(root, False)]
        while stack:
            node, leaving = stack.pop()
            if leaving:
                del trail[node]
                done.add(node)
            elif node in trail:
                path = list(trail)
                return tuple(path[path.index(node) :])
            elif node in needs and node not in done:
                trail[node] = None
                stack.append((node, True))
                stack.extend((parent, False) for parent in reversed(needs[node]))
    return None
