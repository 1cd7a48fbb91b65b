"""``stanchion dead-letter``: what was tried as often as is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, limit_and_cursor, list_of, talks
from stanchion.cli.text import cell, clock, ident, table

__all__ = ["command"]


@click.group("dead-letter")
def command() -> None:
    """See what was given up, and replay it."""


@command.command("list")
@limit_and_cursor
@talks
def list_letters(session: Session, limit: int, cursor: str | None) -> None:
    """List dead letters, oldest first."""
    page = session.get(path_to("admin", "dead-letters"), limit=limit, cursor=cursor)
    list_of(session, page, _rows, "dead letters")


@command.command("replay")
@click.argument("letter_id", metavar="ID")
@talks
def replay(session: Session, letter_id: str) -> None:
    """Put a dead letter back to work."""
    path = path_to("admin", "dead-letters", letter_id, "replay")
    session.show(session.send("POST", path).document, _replayed)


def _replayed(answer: dict[str, Any]) -> Iterator[str]:
    how = "is back at work" if answer["replayed"] else "was replayed before"
    yield f"{cell(answer['id'])} {how} (run {cell(answer['run_id'])})"


def _rows(page: dict[str, Any]) -> Iterator[str]:
    if page["dead_letters"]:
        yield from table(
            ("ID", "KIND", "AT", "TENANT", "RUN", "STEP", "CAUSE"),
            (
                (
                    ident(row["id"]),
                    cell(row["kind"]),
                    clock(row["at"]),
                    cell(row["tenant"]),
                    ident(row["run_id"]),
                    cell(row["step_id"]),
                    cell(row["cause"]),
                )
                for row in page["dead_letters"]
            ),
        )
