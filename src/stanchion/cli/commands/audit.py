"""``stanchion audit``: who changed what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final, TypeVar

import click

from stanchion.cli.session import Session, limit_and_cursor, list_of, path_to, talks
from stanchion.cli.text import cell, clock, table

__all__ = ["audit", "time_option"]

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_EXPORTED: Final = 1_000
"""Entries that an export asks for at a time."""


def _time(_context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """A time in ISO 8601, from such a time or from a duration before now, like ``2h``."""
    if text is None:
        return None
    duration = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if duration is not None:
        time = datetime.now(UTC) - timedelta(**{_UNITS[duration[2]]: int(duration[1])})
    else:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            wrong = f"{text!r} is neither a time like 2027-01-31T12:00:00Z nor one like 2h, for ago"
            raise click.BadParameter(wrong, param=option) from None
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def time_option(flag: str, text: str) -> Callable[[_F], _F]:
    """An option that takes a time, or a duration before now."""
    return click.option(flag, metavar="TIME", callback=_time, help=text)


@click.group("audit")
def audit() -> None:
    """See who changed what."""


def _filters(function: _F) -> _F:
    for decorate in (
        time_option("--until", "Changes before this time, like 2027-01-31T12:00:00Z or 2h (ago)."),
        time_option("--since", "Changes from this time on."),
        click.option("--action", metavar="ACTION", help="Changes of one kind, like run.cancel."),
        click.option("--actor", metavar="ACTOR", help="Changes by one actor."),
    ):
        function = decorate(function)
    return function


@audit.command("list")
@_filters
@limit_and_cursor
@talks
def list_audit(
    session: Session,
    limit: int,
    cursor: str | None,
    actor: str | None,
    action: str | None,
    since: str | None,
    until: str | None,
) -> None:
    """List changes, newest first: of --tenant, or of all tenants."""
    page = session.get(
        path_to("admin", "audit"),
        limit=limit,
        cursor=cursor,
        actor=actor,
        action=action,
        since=since,
        until=until,
    )
    list_of(session, page, _rows, "changes")


@audit.command("export")
@_filters
@click.option(
    "--file",
    type=click.File("wb", atomic=True),
    default="-",
    help="Where to write to, instead of standard output.",
)
@talks
def export_audit(
    session: Session,
    file: BinaryIO,
    actor: str | None,
    action: str | None,
    since: str | None,
    until: str | None,
) -> None:
    """Write all changes, newest first, as one JSON document a line (NDJSON)."""
    cursor: str | None = None
    while True:
        page = session.get(
            path_to("admin", "audit"),
            limit=_EXPORTED,
            cursor=cursor,
            actor=actor,
            action=action,
            since=since,
            until=until,
        )
        for entry in page["entries"]:
            line = json.dumps(entry, separators=(",", ":"), ensure_ascii=False)
            file.write(line.encode() + b"\n")
        cursor = page["cursor"]
        if cursor is None:
            return


def _rows(page: dict[str, Any]) -> Iterator[str]:
    if page["entries"]:
        yield from table(
            ("AT", "ACTOR", "ACTION", "TENANT", "SUBJECT", "CHANGE"),
            (
                (
                    clock(row["at"]),
                    cell(row["actor"]),
                    cell(row["action"]),
                    cell(row["tenant"]),
                    cell(row["subject"]),
                    _change(row["before"], row["after"]),
                )
                for row in page["entries"]
            ),
        )


def _change(before: object, after: object) -> str:
    if before is None or after is None:
        return cell(after if before is None else before)
    return f"{cell(before)} → {cell(after)}"
