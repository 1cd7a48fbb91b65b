"""Endings: how a command stops when it cannot do what it was asked, and what would mend it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import click

from stanchion.cli.text import printable

__all__ = ["Ending", "Exit"]


class Exit(IntEnum):
    """What a process says to whoever started it."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    FULL = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


class Ending(Exception):
    """A sentence, the faults behind it, and a sentence that names the fix.

    ``problem`` is the same for programs: the document that the server sent, or one like it.
    """

    def __init__(
        self,
        message: str,
        exit_code: Exit,
        *,
        faults: Sequence[str] = (),
        fix: str | None = None,
        problem: dict[str, Any] | None = None,
        may_have_happened: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.faults = faults
        self.fix = fix
        self.problem = problem
        self.may_have_happened = may_have_happened
        """Whether what was asked may be done all the same: the answer was lost, not the request."""
        self.is_json = False
        """Whether whoever asked is a program."""

    def text(self) -> str:
        """What a person is told."""
        lines = [f"error: {self.message}", *(f"  {fault}" for fault in self.faults)]
        if self.fix:
            lines.append(f"fix: {self.fix}")
        # What a server says is text from outside: nothing in it may steer the terminal.
        return "\n".join(printable(line) for line in lines)

    def show(self) -> None:
        """Say it where errors are said."""
        is_document = self.is_json and self.problem is not None
        click.echo(json.dumps(self.problem) if is_document else self.text(), err=True)
