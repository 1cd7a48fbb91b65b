"""``stanchion limit``: how many jobs of some topics may be leased at once, and per second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import click

from stanchion.cli.api import path_to
from stanchion.cli.completion import complete_limits
from stanchion.cli.session import Session, calls_server, list_command
from stanchion.cli.text import cell, pairs


@click.group("limit")
def limit() -> None:
    """Limit how many jobs of some topics run at once."""


def _topics(topics: list[str]) -> str:
    return cell(" ".join(topics))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


list_command(
    limit,
    "List topic limits, by id.",
    path_to("admin", "limits"),
    "limits",
    {
        "ID": "id",
        "TOPICS": ("topics", _topics),
        "PER": "per",
        "RUNNING": ("running", _shown),
        "MAX": ("max_running", _shown),
        "RATE/S": ("rate_per_s", _shown),
    },
)


@limit.command("show")
@click.argument("limit_id", metavar="ID", shell_complete=complete_limits)
@calls_server
def show_limit(session: Session, limit_id: str) -> None:
    """Show a topic limit, and how much of it is in use."""
    session.show(session.get(path_to("admin", "limits", limit_id)), _lines)


_NONE: Final = "none"
"""Clears a member of a limit."""


def _jobs(text: str) -> int | str:
    if text == _NONE:
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a whole number nor {_NONE}")
    return int(text)


def _rate(text: str) -> float | str:
    if text == _NONE:
        return text
    with suppress(ValueError):
        if math.isfinite(rate := float(text)):
            return rate
    raise click.BadParameter(f"{text!r} is neither a number nor {_NONE}")


@limit.command("set")
@click.argument("limit_id", metavar="ID", shell_complete=complete_limits)
@click.option(
    "--topic",
    "topics",
    metavar="TOPIC",
    multiple=True,
    help="A topic, or a prefix like llm.*; may be given several times. A new limit needs one.",
)
@click.option(
    "--per",
    type=click.Choice(("deployment", "tenant")),
    help="One limit for all tenants together, or one for each; deployment if not given.",
)
@click.option(
    "--max-running",
    metavar="N|none",
    type=_jobs,
    help="Jobs that run at once; none: no limit.",
)
@click.option(
    "--rate-per-s",
    metavar="N|none",
    type=_rate,
    help="Jobs that begin per second; none: no limit.",
)
@calls_server
def set_limit(
    session: Session,
    /,
    limit_id: str,
    topics: tuple[str, ...],
    **members: Any,  # noqa: ANN401 - the options that are sent as they are
) -> None:
    """Store a topic limit, or change it. Options that are not given keep their values."""
    given = {name: value for name, value in members.items() if value is not None}
    if topics:
        given["topics"] = topics
    if not given:
        raise click.UsageError("nothing to change: give --max-running N, or another option")
    path = path_to("admin", "limits", limit_id)
    # PUT replaces the whole limit, so start from the present one.
    present = session.get_if_stored(path, role="admin")
    if not topics and not present:
        raise click.UsageError(f"there is no limit '{limit_id}' yet: a new one needs --topic")
    merged = {name: present[name] for name in _KEPT if name in present} | given
    body = {name: value for name, value in merged.items() if value is not None and value != _NONE}
    session.show(session.send("PUT", path, body).document, _lines)


_KEPT: Final = ("topics", "per", "max_running", "rate_per_s")
"""The members that a PUT takes."""


@limit.command("delete")
@click.argument("limit_id", metavar="ID", shell_complete=complete_limits)
@calls_server
def delete_limit(session: Session, limit_id: str) -> None:
    """Delete a topic limit. Jobs that it held back can run at once."""
    answer = session.send("DELETE", path_to("admin", "limits", limit_id))
    session.show(answer.document, lambda gone: [f"deleted: {cell(gone['id'])}"])


def _running(row: dict[str, Any]) -> str:
    if row["running"] is None and row["per"] == "tenant":
        return "of each tenant: name one with --tenant"
    tenant = row.get("tenant")
    return _shown(row["running"]) + ("" if tenant is None else f" of tenant {cell(tenant)}")


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        (
            ("limit", cell(row["id"])),
            ("topics", _topics(row["topics"])),
            ("per", cell(row["per"])),
            ("running", _running(row)),
            ("max running", _shown(row["max_running"])),
            ("rate per s", _shown(row["rate_per_s"])),
        )
    )
