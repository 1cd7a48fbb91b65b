"""What happened at the gate, and who changed what: ``admission``, ``decision``, ``audit``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final, TypeVar

import click

from stanchion.cli.session import (
    Session,
    limit_and_cursor,
    list_of,
    path_to,
    shown_again,
    talks,
    watch_option,
)
from stanchion.cli.text import cell, clock, ident, table

__all__ = ["admission", "audit", "decision", "time_option"]

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


@click.group("decision")
def decision() -> None:
    """See which starts were refused, and why."""


@decision.command("list")
@click.option("--key", metavar="KEY", help="Refusals of one idempotency key.")
@click.option("--request-id", metavar="ID", help="The refusal of one request.")
@click.option("--outcome", metavar="OUTCOME", help="full, mismatch, or the code of the refusal.")
@time_option("--since", "Refusals from this time on.")
@time_option("--until", "Refusals before this time, like 2027-01-31T12:00:00Z or 2h (ago).")
@watch_option
@limit_and_cursor
@talks
def list_decisions(  # noqa: PLR0913 - one for each option
    session: Session,
    *,
    watch: bool,
    limit: int,
    cursor: str | None,
    key: str | None,
    request_id: str | None,
    outcome: str | None,
    since: str | None,
    until: str | None,
) -> None:
    """List refused starts, newest first: of --tenant, or of all tenants.

    The newest thousand of each tenant are kept for a day.
    """

    def show() -> None:
        page = session.get(
            path_to("admin", "decisions"),
            limit=limit,
            cursor=cursor,
            key=key,
            request_id=request_id,
            outcome=outcome,
            since=since,
            until=until,
        )
        list_of(session, page, _decision_rows, "refused starts")
        left_out = sum(row["left_out"] for row in page["decisions"])
        if left_out:
            session.note(f"{left_out} refusals among these have no receipt: there were too many")

    shown_again(show, watch=watch)


def _decision_rows(page: dict[str, Any]) -> Iterator[str]:
    if page["decisions"]:
        yield from table(
            ("AT", "TENANT", "WORKFLOW", "OUTCOME", "ACTIVE", "RETRY", "KEY", "REQUEST"),
            (
                (
                    clock(row["at"]),
                    cell(row["tenant"]),
                    cell(row["workflow_id"]),
                    cell(row["outcome"]),
                    _of(row["active"], row["limit"]),
                    _seconds(row["retry_after_ms"]),
                    cell(row["key"]),
                    ident(row["request_id"]),
                )
                for row in page["decisions"]
            ),
        )


@click.group("admission")
def admission() -> None:
    """See how full tenants are, and what their callers were answered."""


@admission.command("show")
@click.option(
    "--sort",
    type=click.Choice(["pressure", "tenant"]),
    default="pressure",
    show_default=True,
    help="The tenant whose callers are refused most first, or by name.",
)
@watch_option
@limit_and_cursor
@talks
def show_admission(
    session: Session, sort: str, limit: int, cursor: str | None, *, watch: bool
) -> None:
    """Show every tenant's slots, and the answers of all servers in the last minute."""

    def show() -> None:
        path = path_to("admin", "admission")
        page = session.get(path, sort=sort, limit=limit, cursor=cursor)
        list_of(session, page, _admission_rows, "tenants")
        if page["replicas_missing"]:
            names = ", ".join(map(cell, page["replicas_missing"]))
            session.note(f"without the figures of servers that do not report: {names}")

    shown_again(show, watch=watch)


def _admission_rows(page: dict[str, Any]) -> Iterator[str]:
    if page["tenants"]:
        yield from table(
            ("TENANT", "ACTIVE", "QUEUED", "ADMITTED", "FULL", "FAILED", "P95", "RETRY"),
            (
                (
                    cell(row["tenant"]),
                    _of(row["active"], row["limit"]),
                    cell(row["queued"]),
                    cell(row["admitted_1m"]),
                    cell(row["full_1m"]),
                    cell(row["unavailable_1m"]),
                    "-" if row["wait_p95_ms"] is None else f"{row['wait_p95_ms']} ms",
                    _seconds(row["retry_after_ms"]),
                )
                for row in page["tenants"]
            ),
        )


def _of(active: int | None, limit: int | None) -> str:
    return "-" if active is None else f"{active}/{'∞' if limit is None else limit}"


def _seconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def _change(before: object, after: object) -> str:
    if before is None or after is None:
        return cell(after if before is None else before)
    return f"{cell(before)} → {cell(after)}"
