"""What happened at the gate, and who changed what: ``admission``, ``decision``, ``audit``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO, Final, TypeVar

import click

from stanchion.cli.api import path_to
from stanchion.cli.session import Session, calls_server, list_command, time_of, with_options
from stanchion.cli.text import Column, SpareHeading, cell, clock, ident, whole_ident

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_EXPORTED: Final = 1_000
"""Entries that an export asks for at a time."""


def _time(_context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is None:
        return None
    return time_of(text, option.opts[0], ago=True).replace("+00:00", "Z")


def time_option(flag: str, text: str) -> Callable[[_F], _F]:
    """An option that takes a time, or a duration before now."""
    return click.option(flag, metavar="TIME", callback=_time, help=text)


def _of(active: int | None, limit: int | None) -> str:
    return "-" if active is None else f"{active}/{'∞' if limit is None else limit}"


def _seconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def _change(before: object, after: object) -> str:
    if before is None or after is None:
        return cell(after if before is None else before)
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = ((name, before.get(name), after.get(name)) for name in before | after)
        changed = [
            f"{cell(name)}: {cell(was)} → {cell(now)}" for name, was, now in pairs if was != now
        ]
        if changed:
            return ", ".join(changed)
    return f"{cell(before)} → {cell(after)}"


@click.group("audit")
def audit() -> None:
    """See who changed what."""


_filters = with_options(
    click.option("--actor", metavar="ACTOR", help="Changes by one actor."),
    click.option("--action", metavar="ACTION", help="Changes of one kind, like run.cancel."),
    time_option("--since", "Changes from this time on."),
    time_option("--until", "Changes before this time, like 2027-01-31T12:00:00Z or 2h (ago)."),
)


def _tenant_heading(session: Session) -> str:
    """A list of one tenant can do without this column on a narrow terminal."""
    return "TENANT" if session.server.tenant in {None, "*"} else SpareHeading("TENANT")


def _audit_columns(session: Session) -> Mapping[str, Column]:
    return {
        "AT": ("at", clock),
        "ACTOR": "actor",
        "ACTION": "action",
        _tenant_heading(session): "tenant",
        "SUBJECT": ("subject", whole_ident),
        SpareHeading("CHANGE", 2): lambda row: _change(row["before"], row["after"]),
    }


list_command(
    audit,
    "List changes, newest first: of --tenant, or of all tenants.",
    path_to("admin", "audit"),
    "entries",
    _audit_columns,
    _filters,
    what="changes",
)


class _OutputFile(click.File):
    """A file that is there once all of it is written; a pipe or a device is written to as it is.

    Click would put a regular file in their place.
    """

    def convert(
        self,
        value: str | os.PathLike[str] | IO[Any],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> IO[Any]:
        is_path = isinstance(value, str) and value != "-" and os.path.exists(value)  # noqa: PTH110 - pathlib is slow to import
        is_special = is_path and not os.path.isfile(str(value))  # noqa: PTH113 - as above
        if is_special:
            return click.File("wb").convert(value, param, ctx)
        return super().convert(value, param, ctx)


@audit.command("export")
@_filters
@click.option(
    "--file",
    type=_OutputFile("wb", atomic=True),
    default="-",
    help="Where to write to, instead of standard output.",
)
@calls_server
def export_audit(session: Session, /, file: BinaryIO, **only: Any) -> None:  # noqa: ANN401 - the filters
    """Write all changes, newest first, as one JSON document a line (NDJSON)."""
    cursor: str | None = None
    while True:
        page = session.get(path_to("admin", "audit"), limit=_EXPORTED, cursor=cursor, **only)
        for entry in page["entries"]:
            line = json.dumps(entry, separators=(",", ":"), ensure_ascii=False)
            file.write(line.encode() + b"\n")
        cursor = page["cursor"]
        if cursor is None:
            return


@click.group("decision")
def decision() -> None:
    """See which starts were refused, and why."""


def _left_out(page: dict[str, Any]) -> str | None:
    left_out = sum(row["left_out"] for row in page["decisions"])
    return (
        f"{left_out} refusals among these have no receipt: there were too many"
        if left_out
        else None
    )


def _decision_columns(session: Session) -> Mapping[str, Column]:
    tenant = _tenant_heading(session)
    # Beside the tenants there is no room for whole keys of 32 or 36 characters in 80 columns.
    id_cell = whole_ident if isinstance(tenant, SpareHeading) else ident
    return {
        "AT": ("at", clock),
        tenant: "tenant",
        SpareHeading("WORKFLOW", 2): "workflow_id",
        "OUTCOME": ("outcome", whole_ident),
        SpareHeading("BUDGET"): lambda row: cell(row.get("budget")),
        SpareHeading("ACTIVE", 3): lambda row: _of(row["active"], row["limit"]),
        SpareHeading("RETRY", 4): ("retry_after_ms", _seconds),
        "KEY": ("key", id_cell),
        "REQUEST": ("request_id", ident),
    }


list_command(
    decision,
    """List refused starts, newest first: of --tenant, or of all tenants.

    The newest thousand of each tenant are kept for a day.
    """,
    path_to("admin", "decisions"),
    "decisions",
    _decision_columns,
    click.option("--key", metavar="KEY", help="Refusals of one idempotency key."),
    click.option("--request-id", metavar="ID", help="The refusal of one request."),
    click.option(
        "--outcome", metavar="OUTCOME", help="full, mismatch, or the code of the refusal."
    ),
    time_option("--since", "Refusals from this time on."),
    time_option("--until", "Refusals before this time, like 2027-01-31T12:00:00Z or 2h (ago)."),
    what="refused starts",
    watch=True,
    note=_left_out,
)


@click.group("admission")
def admission() -> None:
    """See how full tenants are, and what their callers were answered."""


def _missing(page: dict[str, Any]) -> str | None:
    names = ", ".join(map(cell, page["replicas_missing"]))
    return f"without the figures of servers that do not report: {names}" if names else None


list_command(
    admission,
    "Show every tenant's slots, and the answers of all servers in the last minute.",
    path_to("admin", "admission"),
    "tenants",
    {
        "TENANT": "tenant",
        "ACTIVE": lambda row: _of(row["active"], row["limit"]),
        "QUEUED": "queued",
        "ADMITTED": "admitted_1m",
        "FULL": "full_1m",
        "FAILED": "unavailable_1m",
        "P95": ("wait_p95_ms", lambda wait: "-" if wait is None else f"{wait} ms"),
        "RETRY": ("retry_after_ms", _seconds),
    },
    click.option(
        "--sort",
        type=click.Choice(["pressure", "tenant"]),
        default="pressure",
        show_default=True,
        help="The tenant whose callers are refused most first, or by name.",
    ),
    name="show",
    watch=True,
    note=_missing,
)
