"""``stanchion key``: who may do what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, limit_and_cursor, list_of, talks
from stanchion.cli.text import cell, clock, pairs, table

__all__ = ["command"]


@click.group("key")
def command() -> None:
    """Make and revoke API keys."""


@command.command("create")
@click.option(
    "--role",
    type=click.Choice(["runner", "worker", "operator", "admin"]),
    required=True,
    help="What it may do.",
)
@click.option(
    "--for",
    "tenant_of_key",
    required=True,
    metavar="TENANT",
    help="Whom it is for; '*' for all tenants.",
)
@click.option("--note", metavar="TEXT", help="What it is for, for whoever looks at the list.")
@talks
def create(session: Session, role: str, tenant_of_key: str, note: str | None) -> None:
    """Make a key. It is shown this once."""
    body = {"role": role, "tenant": tenant_of_key, "note": note}
    session.show(session.send("POST", path_to("admin", "keys"), body).document, _created)


@command.command("list")
@limit_and_cursor
@talks
def list_keys(session: Session, limit: int, cursor: str | None) -> None:
    """List keys, without their secrets."""
    page = session.get(path_to("admin", "keys"), limit=limit, cursor=cursor)
    list_of(session, page, _rows, "keys")


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@talks
def revoke(session: Session, key_id: str) -> None:
    """Make a key worthless, on every server within 2 s."""
    document = session.send("DELETE", path_to("admin", "keys", key_id)).document
    session.show(document, lambda _: [f"key {cell(key_id)} is revoked"])


def _created(key: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        [
            ("key", cell(key["key"])),
            ("id", cell(key["id"])),
            ("role", cell(key["role"])),
            ("tenant", cell(key["tenant"])),
            ("note", cell(key["note"])),
        ]
    )
    yield ""
    yield "Keep the key now: it is not shown again. Use it as STANCHION_API_KEY."


def _rows(page: dict[str, Any]) -> Iterator[str]:
    if page["keys"]:
        yield from table(
            ("ID", "ROLE", "TENANT", "CREATED", "REVOKED", "NOTE"),
            (
                (
                    cell(row["id"]),
                    cell(row["role"]),
                    cell(row["tenant"]),
                    clock(row["created_at"]),
                    clock(row["revoked_at"]),
                    cell(row["note"]),
                )
                for row in page["keys"]
            ),
        )
