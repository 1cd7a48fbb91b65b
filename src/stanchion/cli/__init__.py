"""The command line: what a person or a script says to a server.

``serve`` and ``worker`` run something here. Everything else is a few HTTP requests: the command
line never opens a store. It starts fast, so a command's module is imported when it is called, and
what only a person looks at (live tables) when a person looks.
"""

from __future__ import annotations

from stanchion.cli.app import main

__all__ = ["main"]
