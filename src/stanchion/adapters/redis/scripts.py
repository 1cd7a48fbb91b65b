"""Scripts: what the server does in one indivisible step.

A script is a file. It opens with its contract, and the contract is what the loader reads:

    -- KEYS  run inbox outbox        the names of its keys, in order: ``key.inbox`` is ``KEYS[2]``;
                                     with a star (``index*``): any number of such keys
    -- USES  time inbox              parts (``part_time.lua`` …) that stand before its own text,
                                     from beside the script or, for all adapters, from here

The server knows a script by its SHA-1. One that has forgotten it (a restart, a failover) says
NOSCRIPT and has done nothing; the script is then sent along with the repeated call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from importlib import resources

from stanchion.adapters.redis.gather import pack

__all__ = ["Script"]


class Script:
    """One script, ready to be called."""

    def __init__(self, name: str, source: str, key_names: tuple[str, ...]) -> None:
        self.name = name
        self.key_names = key_names
        """Empty for a script that takes any number of keys."""
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    @classmethod
    def read(cls, package: str, name: str) -> Script:
        """Read a script that lies beside the adapter, with the parts that it uses."""
        text = _text(package, name)
        key_names = tuple(word for word in _words(text, "KEYS") if not word.endswith("*"))
        parts = [_text(package, f"part_{part}") for part in _words(text, "USES")]
        source = "\n".join([*parts, text])
        # By name for whoever reads it, by number for the server: a table would be built every time.
        for place, key in enumerate(key_names, start=1):
            source = re.sub(rf"\bkey\.{key}\b", f"KEYS[{place}]", source)
        undeclared = re.search(r"\bkey\.\w+", source)
        assert undeclared is None, f"{name}.lua does not declare {undeclared}"
        return cls(name, source, key_names)

    def call(self, keys: Iterable[str], arguments: Iterable[str | bytes | int]) -> bytes:
        """The command that runs it."""
        known = [*keys]
        assert not self.key_names or len(known) == len(self.key_names), self.name
        return pack("EVALSHA", self.sha, len(known), *known, *arguments)

    def load(self) -> bytes:
        """The command that makes it known."""
        return pack("SCRIPT", "LOAD", self.source)


def _text(package: str, name: str) -> str:
    for place in (package, __package__):
        file = resources.files(place).joinpath(f"{name}.lua")
        if file.is_file():
            return file.read_text("utf-8")
    raise FileNotFoundError(f"{name}.lua")


def _words(text: str, label: str) -> list[str]:
    """The words behind a label of the contract; the label may stand on several lines."""
    lines = re.findall(rf"^-- {label}\s+(.+)$", text, re.MULTILINE)
    return [word for line in lines for word in line.split()]
