"""Paths: which endpoint a path means, found by looking up one segment after the other.

A template is a path with parameters in braces, each of which stands for one segment. Where one
template has a parameter, no other may have a word: so there is never a choice. Templates with a
parameter that may have slashes in it are left to a router that can take a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from stanchion.gateway.route import PATHS

__all__ = ["Paths"]

_Endpoint = TypeVar("_Endpoint")


class Paths(Generic[_Endpoint]):
    """A table of templates."""

    def __init__(self, endpoints: Mapping[str, _Endpoint]) -> None:
        self.left_out = [path for path in endpoints if any(f"{{{name}}}" in path for name in PATHS)]
        """Those with a parameter that has no bounds."""
        self._root: _Node[_Endpoint] = _Node()
        for template, endpoint in endpoints.items():
            if template not in self.left_out:
                self._put(template.split("/"), endpoint)

    def find(self, path: str) -> tuple[_Endpoint, dict[str, str]] | None:
        """The endpoint, and what stands where its template has parameters."""
        node, segments = self._root, path.split("/")
        for segment in segments:
            below = node.words.get(segment) or (node.anything if segment else None)
            if below is None:
                return None
            node = below
        if node.endpoint is None:
            return None
        return node.endpoint, {name: segments[place] for name, place in node.parameters}

    def _put(self, segments: list[str], endpoint: _Endpoint) -> None:
        node, parameters = self._root, []
        for place, segment in enumerate(segments):
            if segment.startswith("{"):
                parameters.append((segment[1:-1], place))
                node.anything = node.anything or _Node()
                below = node.anything
            else:
                below = node.words.setdefault(segment, _Node())
            assert node.anything is None or not node.words, f"{segments}: {segment} has rivals"
            node = below
        node.endpoint, node.parameters = endpoint, tuple(parameters)


class _Node(Generic[_Endpoint]):
    __slots__ = ("anything", "endpoint", "parameters", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[_Endpoint]] = {}
        self.anything: _Node[_Endpoint] | None = None
        self.endpoint: _Endpoint | None = None
        self.parameters: tuple[tuple[str, int], ...] = ()
        """Of the endpoint, each with its place in the path."""
