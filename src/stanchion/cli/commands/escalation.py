"""``stanchion escalation``: whether failing open is allowed at the moment."""

from __future__ import annotations

from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, talks
from stanchion.cli.text import cell, pairs

__all__ = ["command"]


@click.group("escalation")
def command() -> None:
    """See and overrule whether failing open is allowed."""


@command.command("show")
@talks
def show(session: Session) -> None:
    """Show the level, and which risk classes are closed."""
    session.show(session.get(path_to("admin", "escalation")), _lines)


@command.command("set")
@click.argument("order", metavar="ORDER", type=click.Choice(["force_open", "force_closed"]))
@talks
def set_order(session: Session, order: str) -> None:
    """Overrule: force_open or force_closed, until it is cleared."""
    _order(session, order)


@command.command("clear")
@talks
def clear(session: Session) -> None:
    """Take back every order, and lift the latch."""
    _order(session, "clear")


def _order(session: Session, order: str) -> None:
    path = path_to("admin", "escalation")
    session.show(session.send("POST", path, {"order": order}).document, _lines)


def _lines(view: dict[str, Any]) -> list[str]:
    return pairs(
        [
            ("level", cell(view["level"])),
            ("forced", cell(view["forced"])),
            ("closes", ", ".join(map(cell, view["closes"])) or "nothing"),
            ("closed now", ", ".join(map(cell, view["closed_now"])) or "nothing"),
            ("trips today", cell(view["trips_today"])),
        ]
    )
