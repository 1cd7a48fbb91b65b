"""``stanchion tenant``: what a tenant may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, json_of, limit_and_cursor, list_of, talks
from stanchion.cli.text import cell, pairs, table

__all__ = ["command"]


@click.group("tenant")
def command() -> None:
    """Say what a tenant may do."""


@command.command("set")
@click.argument("name", metavar="NAME")
@click.option(
    "--max-concurrent-runs", "cap", type=click.IntRange(0), metavar="N", help="Runs at one time."
)
@click.option("--no-cap", is_flag=True, help="As many runs at one time as there are.")
@click.option(
    "--job-rate", "rate", type=float, metavar="R", help="Single jobs a second, on average."
)
@click.option("--no-job-rate", is_flag=True, help="As many single jobs as are sent.")
@click.option(
    "--admission",
    metavar="JSON|@FILE",
    help="Other values of 'strategy' and 'lock_retry' for this tenant; null for none.",
)
@talks
def set_tenant(
    session: Session,
    name: str,
    cap: int | None,
    rate: float | None,
    admission: str | None,
    *,
    no_cap: bool,
    no_job_rate: bool,
) -> None:
    """Change what a tenant may do. What is not named stays as it is."""
    if no_cap and cap is not None:
        raise click.UsageError("--no-cap and --max-concurrent-runs contradict each other")
    if no_job_rate and rate is not None:
        raise click.UsageError("--no-job-rate and --job-rate contradict each other")
    changes: dict[str, object] = {}
    if cap is not None or no_cap:
        changes["max_concurrent_runs"] = cap
    if rate is not None or no_job_rate:
        changes["job_rate_per_s"] = rate
    if admission is not None:
        changes["admission"] = json_of(admission, "--admission")
    if not changes:
        raise click.UsageError("nothing to change: give --max-concurrent-runs N, or another option")
    path = path_to("admin", "tenants", name)
    # PUT replaces the whole, and a person who raises a cap does not mean to drop a rate.
    present = session.get(path)
    kept = {each: present.get(each) for each in _MEMBERS}
    session.show(session.send("PUT", path, kept | changes).document, lambda now: _whole(name, now))


_MEMBERS = ("max_concurrent_runs", "job_rate_per_s", "admission")


@command.command("show")
@click.argument("name", metavar="NAME")
@talks
def show(session: Session, name: str) -> None:
    """Show what a tenant may do. An unknown one has the defaults."""
    session.show(session.get(path_to("admin", "tenants", name)), lambda now: _whole(name, now))


@command.command("list")
@limit_and_cursor
@talks
def list_tenants(session: Session, limit: int, cursor: str | None) -> None:
    """List the tenants that have been set."""
    page = session.get(path_to("admin", "tenants"), limit=limit, cursor=cursor)
    list_of(session, page, _rows, "tenants")


def _whole(name: str, tenant: dict[str, Any]) -> list[str]:
    return pairs(
        [
            ("tenant", cell(name)),
            ("max_concurrent_runs", _or(tenant["max_concurrent_runs"], "no cap")),
            ("job_rate_per_s", _or(tenant["job_rate_per_s"], "no limit")),
            ("admission", _or(tenant.get("admission"), "as in the settings")),
        ]
    )


def _rows(page: dict[str, Any]) -> Iterator[str]:
    if page["tenants"]:
        yield from table(
            ("TENANT", "MAX RUNS", "JOBS/S", "ADMISSION"),
            (
                (
                    cell(row["tenant"]),
                    _or(row["max_concurrent_runs"], "no cap"),
                    _or(row["job_rate_per_s"], "no limit"),
                    cell(row["admission"]),
                )
                for row in page["tenants"]
            ),
        )


def _or(value: object, nothing: str) -> str:
    return nothing if value is None else cell(value)
