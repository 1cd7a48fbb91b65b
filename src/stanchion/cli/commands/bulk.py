"""``stanchion bulk``: one action on every run that fits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import click

from stanchion.cli.api import path_to
from stanchion.cli.commands.run import selection, selects_runs
from stanchion.cli.completion import complete_bulks
from stanchion.cli.errors import Exit
from stanchion.cli.session import Session, calls_server, key_option, list_command, number_in
from stanchion.cli.text import SpareHeading, cell, clock, ident, pairs, rows_of, table, whole_ident
from stanchion.core.bulk import BulkRatePerS

_ACTIONS: Final = ("cancel", "rerun", "replay", "discard", "approve", "reject")
_LOOK_S: Final = 0.5
_watch_option = click.option("--watch", is_flag=True, help="Stay and show a progress bar.")


class _Bulk(click.Group):
    """The group. For an action in place of a command, the error says what to write."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ACTIONS:
            raise click.UsageError(
                f"write: stanchion bulk start {cmd_name} --label team:red, with another filter, or"
                " with --all; --dry-run only says how many runs fit",
                ctx,
            )
        return super().get_command(ctx, cmd_name)


@click.group("bulk", cls=_Bulk)
def bulk() -> None:
    """Cancel, rerun, replay, discard, approve or reject many runs."""


@bulk.command("start")
@click.argument("action", type=click.Choice(_ACTIONS))
@selects_runs
@click.option(
    "--rate",
    type=number_in(BulkRatePerS),
    default=50,
    show_default=True,
    help="Runs a second.",
)
@click.option("--dry-run", is_flag=True, help="Only say how many runs fit, by tenant.")
@click.option("--all", "everything", is_flag=True, help="Act on every run, without a filter.")
@key_option("bulk action")
@_watch_option
@calls_server
def start_bulk(
    session: Session,
    /,
    action: str,
    rate: float,
    key: str | None,
    *,
    dry_run: bool,
    everything: bool,
    watch: bool,
    **options: Any,  # noqa: ANN401 - the options of selects_runs
) -> int:
    """Act on all runs that fit every filter and exist now; with --tenant '*' of all tenants."""
    chosen = selection(options)
    given = {name: value for name, value in chosen.items() if value is not None and value != ()}
    if everything and given:
        raise click.UsageError("--all and a filter contradict each other")
    body = {"action": action, "filter": given, "dry_run": dry_run, "rate_per_s": rate}
    if dry_run:
        session.show(session.send("POST", path_to("bulk"), body).document, _preview_lines)
        if action == "cancel" and "status" not in given:
            session.note("runs that have ended are counted too, and are not changed")
        return Exit.OK
    if not given and not everything:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"this would {action} every run: give a filter like --label team:red, or --all"
            )
        question = f"Without a filter: {action} every run of {session.whose}?"
        click.confirm(question, abort=True, err=True)
    answer = session.create(path_to("bulk"), body, key, what="bulk action").document
    if not watch and answer["status"] == "running":
        flags = session.server.flags
        session.note(f"to follow it: stanchion bulk show {answer['bulk_id']} --watch{flags}")
    return _shown(session, answer, watch=watch)


list_command(
    bulk,
    "List bulk actions, newest first; with --tenant '*' of all tenants.",
    path_to("bulk"),
    "bulks",
    {
        "BULK": ("bulk_id", whole_ident),
        "ACTION": "action",
        "TENANT": "tenant",
        "STATUS": "status",
        "DONE": "done",
        "FAILED": "failed",
        "MATCHED": "matched",
        SpareHeading("CREATED"): ("created_at", clock),
    },
    what="bulk actions",
    is_of_tenant=True,
)


@bulk.command("show")
@click.argument("bulk_id", metavar="BULK", shell_complete=complete_bulks)
@_watch_option
@calls_server
def show_bulk(session: Session, bulk_id: str, *, watch: bool) -> int:
    """Show a bulk action: its progress, and the first runs that it failed on."""
    return _shown(session, session.get(path_to("bulk", bulk_id)), watch=watch)


@bulk.command("stop")
@click.argument("bulk_id", metavar="BULK", shell_complete=complete_bulks)
@calls_server
def stop_bulk(session: Session, bulk_id: str) -> None:
    """Stop a bulk action: no further run is acted on."""
    session.show(session.send("DELETE", path_to("bulk", bulk_id)).document, _bulk_lines)


def _shown(session: Session, found: dict[str, Any], *, watch: bool) -> int:
    if watch:
        found = _followed(session, found)
    session.show(found, _bulk_lines)
    is_over = found["status"] != "running"
    return Exit.FAILED if watch and is_over and found["failed"] else Exit.OK


def _followed(session: Session, found: dict[str, Any]) -> dict[str, Any]:
    """Ask until the bulk action has ended. Interrupting does not stop it."""
    path = path_to("bulk", found["bulk_id"])
    bar = None
    if session.is_live:
        bar = click.progressbar(length=found["matched"], label=f"{found['action']}")
    settled = 0
    try:
        while True:
            now = found["done"] + found["failed"]
            if bar is not None:
                bar.update(now - settled)
            settled = now
            if found["status"] != "running":
                return found
            time.sleep(_LOOK_S)
            found = session.get(path)
    except KeyboardInterrupt:
        again = f"stanchion bulk show {found['bulk_id']} --watch{session.server.flags}"
        session.note(f"it continues; to watch it again: {again}")
        raise
    finally:
        if bar is not None:
            bar.render_finish()


def _preview_lines(preview: dict[str, Any]) -> Iterator[str]:
    matched = preview["matched"]
    yield f"{matched} run{'' if matched == 1 else 's'}"
    if preview["by_tenant"]:
        rows = ((cell(tenant), cell(count)) for tenant, count in preview["by_tenant"].items())
        yield from table(("TENANT", "RUNS"), rows)


def _skipped(found: dict[str, Any]) -> str:
    count = found.get("skipped")
    return f"{count} of those done had ended before" if count else "-"


def _bulk_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        [
            ("bulk", cell(found["bulk_id"])),
            ("action", cell(found["action"])),
            ("tenant", cell(found["tenant"])),
            ("filter", cell(found["filter"])),
            ("status", cell(found["status"])),
            ("matched", cell(found["matched"])),
            ("done", cell(found["done"])),
            ("failed", cell(found["failed"])),
            ("skipped", _skipped(found)),
            ("rate", f"{found['rate_per_s']:g}/s"),
            ("actor", cell(found["actor"])),
            ("created", clock(found["created_at"])),
            ("finished", clock(found["finished_at"])),
        ]
    )
    if found["errors"]:
        yield ""
        yield from rows_of(
            found["errors"],
            {"RUN": ("run_id", ident), "CODE": "code", "DETAIL": "detail"},
            wraps=True,
        )
