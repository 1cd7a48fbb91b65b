"""``stanchion lease``: locks, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, list_of, talks
from stanchion.cli.text import cell, table

__all__ = ["command"]


def _checked(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind not in {"admission", "run"} or not rest:
        raise click.BadParameter("a lock is called admission/TENANT or run/RUN")
    return name


_name = click.argument("name", metavar="NAME", callback=_checked)


@click.group("lease")
def command() -> None:
    """See, hold and release locks."""


@command.command("list")
@talks
def list_leases(session: Session) -> None:
    """List the locks that are held: admission/TENANT and run/RUN."""
    list_of(session, session.get(path_to("admin", "leases")), _rows, "locks are held")


@command.command("hold")
@_name
@click.option(
    "--ttl-s", type=float, required=True, metavar="SECONDS", help="It ends by itself after this."
)
@talks
def hold(session: Session, name: str, ttl_s: float) -> None:
    """Hold a lock by hand, for a while. It is audited.

    NAME is run/RUN, or admission/TENANT, which matters only while the tenant's admission strategy
    is 'lock'.
    """
    body = {"name": name, "ttl_s": ttl_s}
    session.show(session.send("POST", path_to("admin", "leases"), body).document, _one)


@command.command("release")
@_name
@talks
def release(session: Session, name: str) -> None:
    """Release a lock, whoever holds it. It is audited.

    Its holder finds out when it renews or commits: the state stays right, work may be done twice.
    """
    document = session.send("DELETE", path_to("admin", "leases", name)).document
    session.show(document, lambda _: [f"{cell(name)} is released"])


def _rows(page: dict[str, Any]) -> Iterator[str]:
    if page["leases"]:
        yield from table(
            ("NAME", "FENCE", "ENDS IN"),
            ((cell(row["name"]), cell(row["fence"]), _ends(row)) for row in page["leases"]),
        )


def _one(row: dict[str, Any]) -> Iterator[str]:
    yield f"{cell(row['name'])} is held with fence {row['fence']}; it ends in {_ends(row)}"


def _ends(row: dict[str, Any]) -> str:
    return f"{row['expires_in_ms'] / 1000:.1f} s"
