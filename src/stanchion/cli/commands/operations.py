"""``stanchion lease``, ``dead-letter``, ``escalation``, ``replica`` and ``upgrade``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from stanchion.cli.api import path_to
from stanchion.cli.completion import complete_letters, complete_locks
from stanchion.cli.session import Session, calls_server, list_command, show_repeatedly, watch_option
from stanchion.cli.text import (
    Column,
    SpareHeading,
    cell,
    clock,
    ident,
    pairs,
    rows_of,
    whole_ident,
)


def _lease_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind not in {"admission", "run"} or not rest:
        raise click.BadParameter("a lock is called admission/TENANT or run/RUN")
    return name


_name_argument = click.argument("name", metavar="NAME", callback=_lease_name)


@click.group("lease")
def lease() -> None:
    """See, hold and release locks."""


def _ends_in(row: dict[str, Any]) -> str:
    return f"{row['expires_in_ms'] / 1000:.1f} s"


list_command(
    lease,
    "List the locks that are held: admission/TENANT and run/RUN.",
    path_to("admin", "leases"),
    "leases",
    {
        "NAME": ("name", whole_ident),
        "HOLDER": "holder",
        SpareHeading("SINCE"): ("acquired_at", clock),
        "ENDS IN": _ends_in,
        SpareHeading("RENEWALS", 2): "renewals",
        "FENCE": "fence",
    },
    what="locks are held",
    watch=True,
)


@lease.command("show")
@click.argument("name", metavar="NAME", callback=_lease_name, shell_complete=complete_locks)
@calls_server
def show_lease(session: Session, name: str) -> None:
    """Show who holds a lock, since when and for how long."""
    session.show(session.get(path_to("admin", "leases", name)), _lease_lines)


@lease.command("hold")
@_name_argument
@click.option(
    "--ttl-s", type=float, required=True, metavar="SECONDS", help="The term after which it expires."
)
@calls_server
def hold_lease(session: Session, name: str, ttl_s: float) -> None:
    """Hold a lock as an operator, for a limited time. It is audited.

    NAME is run/RUN, or admission/TENANT, which matters only while the tenant's admission strategy
    is 'lock'.
    """
    body = {"name": name, "ttl_s": ttl_s}
    session.show(session.send("POST", path_to("admin", "leases"), body).document, _held_lines)


@lease.command("release")
@click.argument("name", metavar="NAME", callback=_lease_name, shell_complete=complete_locks)
@click.option("--reason", metavar="TEXT", help="Why; it is kept in the audit log.")
@calls_server
def release_lease(session: Session, name: str, reason: str | None) -> None:
    """Release a lock of any holder. It is audited.

    Its holder finds out when it renews or commits: the state stays right, work may be done twice.
    """
    path = path_to("admin", "leases", name)
    document = session.send("DELETE", path, query={"reason": reason}).document
    session.show(document, lambda _: [f"{cell(name)} is released"])


@lease.command("history")
@click.argument("name", metavar="[NAME]", required=False)
@calls_server
def lease_history(session: Session, name: str | None) -> None:
    """Show what this replica did without a lock, and the fences of the lock NAME.

    It is the memory of the replica that answers, since its start.
    """
    document = session.get(path_to("admin", "lock-history"), name=name)
    session.show(document, _history_lines)


def _history_lines(seen: dict[str, Any]) -> Iterator[str]:
    yield f"replica {cell(seen['replica'])} since {clock(seen['since'])}"
    yield f"without a lock: {seen['unlocked_count']}"
    unlocked: dict[str, Column] = {
        "AT": ("at", clock),
        "LOCK": "name",
        "CLASS": "risk",
        "ERROR": "error",
    }
    yield from rows_of(seen["unlocked"], unlocked)
    for replica, count in sorted(seen.get("unlocked_elsewhere", {}).items()):
        yield f"replica {cell(replica)} without a lock: {count}"
    yield f"locks found busy in the last minute: {sum(seen['busy'])}"
    waits: dict[str, Column] = {"WAITS FOR": "name", "SINCE": ("since", clock), "TRIES": "tries"}
    yield from rows_of(seen.get("waits", ()), waits)
    marks: dict[str, Column] = {"AT": ("at", clock), "WHAT": "what", "FENCE": "fence"}
    yield from rows_of(seen["marks"], marks)


def _lease_lines(row: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        (
            ("name", cell(row["name"])),
            ("holder", cell(row["holder"])),
            ("since", clock(row["acquired_at"])),
            ("ends in", _ends_in(row)),
            ("renewals", cell(row["renewals"])),
            ("fence", cell(row["fence"])),
        )
    )


def _held_lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{cell(row['name'])} is held with fence {row['fence']}; it ends in {_ends_in(row)}"


@click.group("dead-letter")
def dead_letter() -> None:
    """List, replay and discard dead letters."""


list_command(
    dead_letter,
    "List dead letters, oldest first.",
    path_to("admin", "dead-letters"),
    "dead_letters",
    {
        "ID": ("id", whole_ident),
        SpareHeading("KIND"): "kind",
        "AT": ("at", clock),
        "TENANT": "tenant",
        SpareHeading("RUN", 3): ("run_id", ident),
        SpareHeading("STEP", 2): "step_id",
        "CAUSE": "cause",
    },
    what="dead letters",
    watch=True,
    wraps=True,
)


@dead_letter.command("replay")
@click.argument("letter_id", metavar="ID", shell_complete=complete_letters)
@calls_server
def replay_letter(session: Session, letter_id: str) -> None:
    """Replay a dead letter."""
    path = path_to("admin", "dead-letters", letter_id, "replay")
    session.show(session.send("POST", path).document, _replayed_lines)


@dead_letter.command("discard")
@click.argument("letter_id", metavar="ID", shell_complete=complete_letters)
@calls_server
def discard_letter(session: Session, letter_id: str) -> None:
    """Discard a dead letter: its step fails, or its event is dropped."""
    path = path_to("admin", "dead-letters", letter_id, "discard")
    session.show(
        session.send("POST", path).document,
        lambda answer: [f"{cell(answer['id'])} is discarded (run {cell(answer['run_id'])})"],
    )


def _replayed_lines(answer: dict[str, Any]) -> Iterator[str]:
    how = "is replayed" if answer["replayed"] else "was replayed before"
    yield f"{cell(answer['id'])} {how} (run {cell(answer['run_id'])})"


@click.group("escalation")
def escalation() -> None:
    """See and override whether failing open is allowed."""


@escalation.command("show")
@watch_option
@calls_server
def show_escalation(session: Session, *, watch: bool) -> None:
    """Show the level, which risk classes are closed, and the counters beside their thresholds."""
    path = path_to("admin", "escalation")
    show_repeatedly(lambda: session.show(session.get(path), _escalation_lines), watch=watch)


@escalation.command("set")
@click.argument("order", metavar="ORDER", type=click.Choice(["force_open", "force_closed"]))
@click.option("--reason", metavar="TEXT", help="Why; shown and kept in the audit log.")
@click.option("--expires-at", metavar="TIME", help="When it ends by itself: 2027-01-31T12:00:00Z.")
@calls_server
def set_order(session: Session, order: str, reason: str | None, expires_at: str | None) -> None:
    """Give an order: force_open or force_closed, until it is cleared or its time is over."""
    given = {"reason": reason, "expires_at": expires_at}
    _send_order(session, order, {name: each for name, each in given.items() if each is not None})


@escalation.command("clear")
@calls_server
def clear_order(session: Session) -> None:
    """Clear every order and the latch."""
    _send_order(session, "clear")


def _send_order(session: Session, order: str, given: Mapping[str, str] | None = None) -> None:
    path, body = path_to("admin", "escalation"), {"order": order, **(given or {})}
    session.show(session.send("POST", path, body).document, _escalation_lines)


def _escalation_lines(view: dict[str, Any]) -> list[str]:
    return pairs(
        [
            ("level", cell(view["level"])),
            ("forced", cell(view["forced"])),
            ("by", cell(view.get("forced_by"))),
            ("reason", cell(view.get("reason"))),
            ("until", clock(view.get("expires_at"))),
            ("closes", ", ".join(map(cell, view["closes"])) or "nothing"),
            ("closed now", ", ".join(map(cell, view["closed_now"])) or "nothing"),
            ("trips today", cell(view["trips_today"])),
            *_counter_lines(view.get("counters")),
        ]
    )


def _counter_lines(seen: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What the replica has counted, beside what trips or ends an escalation."""
    if seen is None:  # an older server
        return
    rate, rate_max = seen["fallbacks_per_s"], seen["fallbacks_per_s_max"]
    window = f"over {seen['window_s']:g} s on {cell(seen['replica'])}"
    yield "without a lock", f"{rate:.3g}/s {window}; trips above {rate_max:g}/s"
    before = seen["duplicates_before"]
    yield "duplicates", f"{seen['duplicates']}; {before} in the window before"
    yield "quiet for", f"{seen['quiet_s']:.0f} s of {seen['dwell_s']:g} s"
    yield "probes", f"{seen['probes_ok']} of {seen['probes_min']}"


@click.group("replica")
def replica() -> None:
    """See the server processes of the deployment."""


def _health(row: dict[str, Any]) -> str:
    """``ok``, or what is wrong with which backend."""
    wrong = {name: row[name] for name in ("store", "locks", "bus") if row[name] != "ok"}
    if set(wrong.values()) == {"unknown"}:
        return "unknown"
    return ", ".join(f"{name}: {cell(said)}" for name, said in wrong.items()) or "ok"


list_command(
    replica,
    "List the replicas. One that has not reported for 15 s is 'unknown'.",
    path_to("admin", "replicas"),
    "replicas",
    {
        "REPLICA": ("replica", ident),
        "VERSION": "version",
        SpareHeading("STARTED"): ("started_at", clock),
        "SEEN": ("seen_at", clock),
        "CLOCK MS": "clock_offset_ms",
        "SETTINGS": "settings_revision",
        "RUNS": "runs_held",
        "HEALTH": _health,
    },
    watch=True,
    wraps=True,
)


@click.group("upgrade")
def upgrade() -> None:
    """See whether an upgrade is finished, and finish it."""


@upgrade.command("show")
@calls_server
def show_upgrade(session: Session) -> None:
    """Show whether every process has the newest version, and which has not."""
    session.show(session.get(path_to("admin", "upgrade")), _upgrade_lines)


@upgrade.command("finish")
@calls_server
def finish_upgrade(session: Session) -> None:
    """Declare that no process of an older version is left.

    Such a process cannot start on this store afterwards. It is refused while an older replica
    reports.
    """
    session.show(session.send("POST", path_to("admin", "upgrade"), {}).document, _upgrade_lines)


def _upgrade_lines(view: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        [
            ("finished", "yes" if view["finished"] else "no"),
            ("level", f"{view['level']} of {view['newest_level']}"),
            ("fix", cell(view["remedy"])),
        ]
    )
    if view["older"]:
        yield ""
        older: dict[str, Column] = {
            "OLDER REPLICA": ("replica", ident),
            "VERSION": "version",
            "SEEN": ("seen_at", clock),
        }
        yield from rows_of(view["older"], older)


@click.group("drift")
def drift() -> None:
    """See and repair counts of slots that differ from the runs."""


@drift.command("show")
@watch_option
@calls_server
def show_drift(session: Session, *, watch: bool) -> None:
    """Show the last audit of slots. Servers audit all tenants all the time."""
    path = path_to("admin", "drift")
    show_repeatedly(lambda: session.show(session.get(path), _drift_lines), watch=watch)


@drift.command("run")
@click.option("--dry-run", is_flag=True, help="Only look: repair nothing.")
@calls_server
def run_drift(session: Session, *, dry_run: bool) -> None:
    """Audit the slots of all tenants now, and repair what differs. Repairs are audited."""
    query = {"dry_run": "true"} if dry_run else {}
    answer = session.server.ask("POST", path_to("admin", "drift"), query=query)
    session.show(answer.document, _drift_lines)
    if dry_run and answer.document["drifted"]:
        session.note("nothing was repaired: run it again without --dry-run")


def _drift_lines(audit: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        [
            ("audited", clock(audit["at"])),
            ("tenants", cell(audit["checked"])),
            ("drifted", cell(audit["drifted"])),
        ]
    )
    if audit["repaired"]:
        yield ""
        yield from rows_of(
            audit["repaired"], {"TENANT": "tenant", "COUNTED": "counted", "TRUE": "true"}
        )
