"""``stanchion schedule``: runs that start by the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from stanchion.cli.api import path_to
from stanchion.cli.commands.run import labels_of, show_started
from stanchion.cli.completion import complete_schedules, complete_workflows
from stanchion.cli.runs import label_text
from stanchion.cli.session import Session, calls_server, json_of, key_option, list_command
from stanchion.cli.text import (
    Column,
    cell,
    clock,
    excerpt,
    ident,
    pairs,
    rows_of,
    whole_clock,
)

_KEPT: Final = (
    "workflow_id",
    "cron",
    "every_s",
    "timezone",
    "input",
    "labels",
    "overlap",
    "catch_up",
    "jitter_s",
    "paused",
)
"""The members that a PUT takes."""


@click.group("schedule")
def schedule() -> None:
    """Start runs by the clock."""


@schedule.command("set")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@click.option(
    "--workflow",
    "workflow_id",
    metavar="ID",
    help="The workflow to start. A new schedule needs it, and --cron or --every.",
    shell_complete=complete_workflows,
)
@click.option("--cron", metavar="FIELDS", help='When: five fields, like "0 9 * * MON-FRI".')
@click.option(
    "--every",
    "every_s",
    metavar="SECONDS",
    type=click.INT,
    help="The time between ticks, instead of --cron.",
)
@click.option(
    "--timezone",
    metavar="ZONE",
    help="The time zone of --cron, like Europe/Berlin; UTC for a new schedule.",
)
@click.option("--input", "given", metavar="JSON|@FILE", help="The input of each run.")
@click.option(
    "--label",
    "labels",
    metavar="NAME:VALUE",
    multiple=True,
    help="Mark each run; all labels that it shall have.",
)
@click.option("--no-labels", is_flag=True, help="Mark its runs no more.")
@click.option(
    "--overlap",
    type=click.Choice(("skip", "queue", "allow")),
    help="What a tick does while the last run is unfinished; skip for a new schedule.",
)
@click.option(
    "--catch-up",
    type=click.Choice(("none", "one", "all")),
    help="Which ticks that passed while no server ran get a run; none for a new schedule.",
)
@click.option(
    "--jitter",
    "jitter_s",
    metavar="SECONDS",
    type=click.INT,
    help="The longest random delay of a tick.",
)
@click.option("--paused", is_flag=True, help="Store it without starting runs, until resumed.")
@calls_server
def set_schedule(
    session: Session,
    /,
    schedule_id: str,
    given: str | None,
    labels: tuple[str, ...],
    *,
    no_labels: bool,
    paused: bool,
    **members: Any,  # noqa: ANN401 - the options that are sent as they are
) -> None:
    """Store a schedule, or change it. Options that are not given keep their values."""
    changes = {name: value for name, value in members.items() if value is not None}
    if given is not None:
        changes["input"] = json_of(given, "--input")
    if labels and no_labels:
        raise click.UsageError("--label and --no-labels contradict each other")
    if labels or no_labels:
        changes["labels"] = labels_of(labels)
    if paused:
        changes["paused"] = True
    if "cron" in changes and "every_s" in changes:
        raise click.UsageError("--cron and --every contradict each other")
    if "every_s" in changes and "timezone" in changes:
        raise click.UsageError(_NO_ZONE)
    if not changes:
        raise click.UsageError("nothing to change: give --cron FIELDS, or another option")
    path = path_to("schedules", schedule_id)
    # PUT replaces the whole schedule, so start from the present one.
    present = session.get_if_stored(path)
    if not present and "workflow_id" not in changes:
        raise click.UsageError(
            f"there is no schedule '{schedule_id}' yet: a new one needs --workflow"
        )
    body = _kept(present, changes) | changes
    if "timezone" in changes and "cron" not in body:
        raise click.UsageError(_NO_ZONE)
    session.show(session.send("PUT", path, body).document, _lines)


def _kept(present: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """The members of the present schedule that stay."""
    gone = {"cron", "timezone"} if "every_s" in changes else set()
    gone |= {"every_s"} if "cron" in changes else set()
    return {
        name: present[name] for name in _KEPT if present.get(name) is not None and name not in gone
    }


_NO_ZONE: Final = (
    "--timezone says where the times of --cron are meant; --every counts seconds, which are the"
    " same everywhere"
)


def _when(row: dict[str, Any]) -> str:
    if row["cron"] is not None:
        return f"{cell(row['cron'])} {cell(row['timezone'])}"
    return f"every {row['every_s']} s"


def _next(row: dict[str, Any]) -> str:
    return "paused" if row["paused"] else clock(next(iter(row["next"]), None))


def _columns(session: Session) -> Mapping[str, Column]:
    tenant: Mapping[str, Column] = {"TENANT": "tenant"} if session.server.tenant == "*" else {}
    return {
        "ID": "id",
        **tenant,
        "WORKFLOW": "workflow_id",
        "WHEN": _when,
        "NEXT": _next,
        "MISSED": "missed_total",
    }


list_command(
    schedule,
    "List schedules, by id; with --tenant '*' of all tenants.",
    path_to("schedules"),
    "schedules",
    _columns,
    is_of_tenant=True,
)


@schedule.command("show")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@calls_server
def show_schedule(session: Session, schedule_id: str) -> None:
    """Show a schedule: its next ticks, last runs, and ticks that were missed."""
    session.show(session.get(path_to("schedules", schedule_id)), _lines)


@schedule.command("pause")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@calls_server
def pause_schedule(session: Session, schedule_id: str) -> None:
    """Start no more runs of a schedule."""
    _set_paused(session, schedule_id, paused=True)


@schedule.command("resume")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@calls_server
def resume_schedule(session: Session, schedule_id: str) -> None:
    """Start runs again, from the next tick on."""
    _set_paused(session, schedule_id, paused=False)


def _set_paused(session: Session, schedule_id: str, *, paused: bool) -> None:
    path = path_to("schedules", schedule_id)
    body = {**_kept(session.get(path), {}), "paused": paused}
    session.show(session.send("PUT", path, body).document, _lines)


@schedule.command("trigger")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@key_option("run")
@calls_server
def trigger_schedule(session: Session, schedule_id: str, key: str | None) -> int:
    """Start a run of a schedule now, beside its ticks."""
    answer = session.create(path_to("schedules", schedule_id, "trigger"), None, key)
    return show_started(session, answer)


@schedule.command("delete")
@click.argument("schedule_id", metavar="ID", shell_complete=complete_schedules)
@calls_server
def delete_schedule(session: Session, schedule_id: str) -> None:
    """Delete a schedule. Its runs go on."""
    answer = session.send("DELETE", path_to("schedules", schedule_id))
    session.show(answer.document, lambda gone: [f"deleted: {cell(gone['id'])}"])


def _by(run: Mapping[str, Any]) -> str:
    return "trigger" if run.get("triggered") else "tick"


def _status(run: Mapping[str, Any]) -> str:
    status = run.get("status")
    return "not stored" if status is None else cell(status)


def _waiting_tick(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The tick that is due and has no run yet, and why; and how many are."""
    waiting = row.get("waiting")
    if waiting is not None:
        yield "waiting", f"{clock(waiting['tick'])}: {cell(waiting['reason'])}"
    due = row.get("due")
    if due is not None and due["count"] > 1:
        yield "due", f"{due['count']:,} ticks, the oldest {clock(due['oldest'])}"


def _next_ticks(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The next ticks, one per line: the whole list is wider than a terminal."""
    if row["paused"] or not row["next"]:
        yield "next", "paused" if row["paused"] else "never"
        return
    for number, tick in enumerate(row["next"]):
        yield "" if number else "next", clock(tick)


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        (
            ("schedule", cell(row["id"])),
            ("tenant", cell(row["tenant"])),
            ("workflow", cell(row["workflow_id"])),
            ("when", _when(row)),
            ("overlap", cell(row["overlap"])),
            ("catch up", cell(row["catch_up"])),
            ("jitter", f"{row['jitter_s']} s" if row["jitter_s"] else "-"),
            ("labels", label_text(row["labels"])),
            ("input", excerpt(cell(row["input"])) if row["input"] else "-"),
            *_waiting_tick(row),
            *_next_ticks(row),
        )
    )
    if row["runs"]:
        yield ""
        yield from rows_of(
            row["runs"],
            {"AT": ("tick", clock), "BY": _by, "STATUS": _status, "RUN": ("run_id", ident)},
        )
    if row["missed"]:
        yield ""
        yield from rows_of(row["missed"], {"MISSED": ("tick", whole_clock), "REASON": "reason"})
        if row["missed_total"] > len(row["missed"]):
            yield f"(the newest {len(row['missed'])} of {row['missed_total']} missed ticks)"
