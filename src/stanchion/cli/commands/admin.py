"""``stanchion tenant``, ``stanchion key`` and ``stanchion settings``: limits, keys, policies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from stanchion.cli.api import path_to
from stanchion.cli.completion import complete_keys, complete_tenants
from stanchion.cli.errors import CliError, Exit
from stanchion.cli.session import (
    Session,
    calls_server,
    json_of,
    list_command,
    number_in,
    parsed_json,
    time_of,
)
from stanchion.cli.text import SpareHeading, cell, clock, pairs, whole_ident
from stanchion.core.queue_terms import OnFull, QueueMax, QueueWaitS


@click.group("tenant")
def tenant() -> None:
    """Configure tenants: caps, rates, admission."""


@tenant.command("set")
@click.argument("name", metavar="NAME", shell_complete=complete_tenants)
@click.option(
    "--max-concurrent-runs", "cap", type=click.IntRange(0), metavar="N", help="Runs at one time."
)
@click.option("--no-cap", is_flag=True, help="No limit on runs at one time.")
@click.option(
    "--job-rate", "rate", type=float, metavar="R", help="Single jobs a second, on average."
)
@click.option("--no-job-rate", is_flag=True, help="No limit on single jobs.")
@click.option(
    "--admission",
    metavar="JSON|@FILE",
    help="Other values of 'strategy' and 'lock_retry' for this tenant; null for none.",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="ID=VERSION",
    help="Run this version of a shared workflow in place of the newest; repeatable.",
)
@click.option(
    "--unpin", "unpins", multiple=True, metavar="ID", help="Run the newest version again."
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="NAME=LIMIT/WINDOW",
    help="What its runs may use in an hour, day, month or in total (tokens=2000000/day);"
    " repeatable.",
)
@click.option(
    "--on-full",
    type=click.Choice([each.value for each in OnFull]),
    help="What a start gets while no slot is free: 429, or a place in the queue.",
)
@click.option(
    "--queue-max",
    type=number_in(QueueMax),
    metavar="N",
    help="Runs that may wait for a slot.",
)
@click.option(
    "--queue-wait",
    "queue_wait_s",
    type=number_in(QueueWaitS),
    metavar="S",
    help="Seconds that a run may wait for a slot.",
)
@click.option(
    "--no-budget", "no_budgets", multiple=True, metavar="NAME", help="Remove this budget."
)
@calls_server
def set_tenant(  # noqa: PLR0913 - one for each option
    session: Session,
    name: str,
    cap: int | None,
    rate: float | None,
    admission: str | None,
    pins: tuple[str, ...],
    unpins: tuple[str, ...],
    *,
    budgets: tuple[str, ...],
    no_budgets: tuple[str, ...],
    no_cap: bool,
    no_job_rate: bool,
    on_full: str | None,
    queue_max: int | None,
    queue_wait_s: float | None,
) -> None:
    """Change a tenant's configuration. Options that are not given keep their values."""
    _refuse_other_tenant(name)
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
    queue = {"on_full": on_full, "queue_max": queue_max, "queue_wait_s": queue_wait_s}
    changes |= {name: value for name, value in queue.items() if value is not None}
    pinned = dict(map(_pin, pins))
    budgeted = dict(map(_budget, budgets))
    if not changes and not pinned and not unpins and not budgeted and not no_budgets:
        raise click.UsageError("nothing to change: give --max-concurrent-runs N, or another option")
    path = path_to("admin", "tenants", name)
    # PUT replaces the whole configuration, so start from the present one.
    present = session.get_to_change(path)
    kept = {each: present[each] for each in _TENANT_MEMBERS if each in present}
    _refuse_unknown("--unpin", unpins, {**present.get("workflows", {}), **pinned})
    _refuse_unknown("--no-budget", no_budgets, {**present.get("budgets", {}), **budgeted})
    if pinned or unpins:
        before = present.get("workflows", {})
        changes["workflows"] = {
            workflow_id: version
            for workflow_id, version in {**before, **pinned}.items()
            if workflow_id not in unpins
        }
    if budgeted or no_budgets:
        limits = {**present.get("budgets", {}), **budgeted}
        changes["budgets"] = {
            budget: limit for budget, limit in limits.items() if budget not in no_budgets
        }
    stored = session.send("PUT", path, kept | changes).document
    session.show(stored, lambda now: _tenant_lines(name, now))
    if (queue_max, queue_wait_s) != (None, None) and stored.get("on_full") == OnFull.REJECT:
        flags = f"--on-full queue{session.server.flags}"
        session.note(f"no run waits until you set: stanchion tenant set {name} {flags}")


def _refuse_other_tenant(name: str) -> None:
    """Raise an error if --tenant names another tenant than the argument, which decides."""
    context = click.get_current_context()
    given = context.params["tenant"]
    is_flag = context.get_parameter_source("tenant") is click.core.ParameterSource.COMMANDLINE
    if is_flag and given not in {name, "*"}:
        raise click.UsageError(f"{name} and --tenant {given} contradict each other: leave one out")


def _refuse_unknown(option: str, names: Sequence[str], known: Mapping[str, object]) -> None:
    """Raise an error for a name that there is nothing to remove for: it may be misspelt."""
    for name in names:
        if name not in known:
            there = ", ".join(map(cell, sorted(known))) or "none"
            raise CliError(
                f"{option} {cell(name)}: the tenant has none of this name",
                Exit.NOT_FOUND,
                fix=f"it has: {there}",
            )


_TENANT_MEMBERS = (
    *("max_concurrent_runs", "job_rate_per_s", "admission", "workflows", "budgets"),
    *("on_full", "queue_max", "queue_wait_s"),
)


def _pin(given: str) -> tuple[str, int]:
    workflow_id, equals, version = given.partition("=")
    if not equals or not workflow_id or not version.isdecimal():
        raise click.UsageError(f"--pin takes ID=VERSION, as in --pin report=3: {given!r}")
    return workflow_id, int(version)


def _budget(given: str) -> tuple[str, dict[str, object]]:
    name, equals, rest = given.rpartition("=")
    limit, _, window = rest.partition("/")
    if not equals or not name or not limit.isdecimal() or window not in _WINDOWS:
        raise click.UsageError(
            "--budget takes NAME=LIMIT/WINDOW, as in --budget tokens=2000000/day, with one of"
            f" {', '.join(_WINDOWS)}: {given!r}"
        )
    return name, {"limit": int(limit), "window": window}


_WINDOWS = ("hour", "day", "month", "total")


@tenant.command("show")
@click.argument("name", metavar="NAME", shell_complete=complete_tenants)
@calls_server
def show_tenant(session: Session, name: str) -> None:
    """Show a tenant's configuration. A tenant without one has the defaults."""
    _refuse_other_tenant(name)
    found = session.get(path_to("admin", "tenants", name))
    session.show(found, lambda now: _tenant_lines(name, now))
    if not session.is_json and _is_default(found) and not _is_configured(session, name):
        session.note("not configured: these are the defaults")


def _is_default(found: dict[str, Any]) -> bool:
    from stanchion.wire.admin import TenantConfig  # noqa: PLC0415 - only here

    return bool(found == msgspec.to_builtins(TenantConfig()))


def _is_configured(session: Session, name: str) -> bool:
    """Whether the list of tenants has a configuration of this one."""
    cursor = None
    while True:
        page = session.get(path_to("admin", "tenants"), limit=_ROWS_AT_ONCE, cursor=cursor)
        for row in page["tenants"]:
            if row["tenant"] == name:
                return bool(row.get("is_configured", True))
        cursor = page.get("cursor")
        if cursor is None:
            return False


@tenant.command("delete")
@click.argument("name", metavar="NAME", shell_complete=complete_tenants)
@click.option("--yes", is_flag=True, help="Do not ask, also on a terminal.")
@calls_server
def delete_tenant(session: Session, name: str, *, yes: bool) -> None:
    """Delete a tenant's configuration: the defaults apply again. Its runs stay."""
    _refuse_other_tenant(name)
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete the configuration of tenant {name}?", abort=True, err=True)
    removed = session.send("DELETE", path_to("admin", "tenants", name)).document
    session.show(
        removed,
        lambda _was: [f"the configuration of tenant {cell(name)} is deleted: the defaults apply"],
    )


list_command(
    tenant,
    "List the tenants that are configured or started a run in the last 30 days.",
    path_to("admin", "tenants"),
    "tenants",
    {
        "TENANT": "tenant",
        "ACTIVE": lambda row: cell(row.get("active")),
        "QUEUED": lambda row: cell(row.get("queued")),
        "MAX RUNS": lambda row: _or(row["max_concurrent_runs"], "no cap"),
        "JOBS/S": lambda row: _or(row["job_rate_per_s"], "no limit"),
        "ADMISSION": "admission",
    },
    watch=True,
)


@tenant.command("limits")
@calls_server
def show_limits(session: Session) -> None:
    """Show what the key's own tenant may use, and what it uses. For every role."""
    session.show(session.get(path_to("tenant")), _limit_lines)


def _limit_lines(limits: dict[str, Any]) -> list[str]:
    cap = _or(limits["max_concurrent_runs"], "no cap")
    budgets = [
        (f"budget {cell(name)}", _use_of(budget)) for name, budget in limits["budgets"].items()
    ]
    return pairs(
        [
            ("tenant", cell(limits["tenant"])),
            ("active runs", f"{limits['active']} of {cap}"),
            ("queued", cell(limits["queued"])),
            # A server of an earlier version does not say it.
            *([("on_full", _on_full(limits))] if "on_full" in limits else []),
            ("job_rate_per_s", _or(limits["job_rate_per_s"], "no limit")),
            *budgets,
        ]
    )


def _use_of(budget: dict[str, Any]) -> str:
    used = f"{budget['used']} used, {budget['reserved']} reserved of {budget['limit']}"
    if budget["resets_at"] is None:
        return f"{used} in total"
    return f"{used} per {budget['window']}, until {clock(budget['resets_at'])}"


def _tenant_lines(name: str, tenant: dict[str, Any]) -> list[str]:
    return pairs(
        [
            ("tenant", cell(name)),
            ("max_concurrent_runs", _or(tenant["max_concurrent_runs"], "no cap")),
            ("job_rate_per_s", _or(tenant["job_rate_per_s"], "no limit")),
            ("admission", _or(tenant.get("admission"), "as in the settings")),
            ("on_full", _on_full(tenant)),
            ("workflows", _pins(tenant)),
            ("budgets", _budgets(tenant)),
        ]
    )


def _on_full(tenant: dict[str, Any]) -> str:
    if tenant.get("on_full", "reject") == "reject":
        return "reject"
    most, wait_s = tenant["queue_max"], tenant["queue_wait_s"]
    return f"queue: at most {most} run{'' if most == 1 else 's'}, {wait_s:g} s each"


def _pins(tenant: dict[str, Any]) -> str:
    pins = tenant.get("workflows") or {}
    return ", ".join(f"{cell(each)}={pins[each]}" for each in sorted(pins)) or "none pinned"


def _budgets(tenant: dict[str, Any]) -> str:
    budgets = tenant.get("budgets") or {}
    shown = (f"{cell(name)}={each['limit']}/{each['window']}" for name, each in budgets.items())
    return ", ".join(sorted(shown)) or "none"


def _or(value: object, nothing: str) -> str:
    return nothing if value is None else cell(value)


@click.group("key")
def key() -> None:
    """Create, list and revoke API keys."""


@key.command("create")
@click.option(
    "--role",
    type=click.Choice(["approver", "runner", "worker", "operator", "admin"]),
    required=True,
    help="What it may do.",
)
@click.option(
    "--for",
    "tenant_of_key",
    required=True,
    metavar="TENANT",
    shell_complete=complete_tenants,
    help="The tenant it is for; '*' for all tenants.",
)
@click.option("--name", metavar="NAME", help="The holder's name; shown as the actor.")
@click.option(
    "--expires",
    metavar="TIME|DURATION",
    help="Until when it works: 2027-01-31T12:00:00Z, or 90d, 12h, 30m from now.",
)
@click.option("--note", metavar="TEXT", help="What it is for; shown in the list.")
@calls_server
def create_key(
    session: Session,
    role: str,
    tenant_of_key: str,
    name: str | None,
    expires: str | None,
    note: str | None,
) -> None:
    """Create a key. It is shown only once."""
    body = {"role": role, "tenant": tenant_of_key, "note": note}
    if name is not None:
        body["name"] = name
    if expires is not None:
        body["expires_at"] = time_of(expires, "--expires")
    is_first = session.server.api_key is None  # with keys, this call has needed one
    session.show(
        session.send("POST", path_to("admin", "keys"), body).document,
        lambda key: _new_key_lines(key, is_first=is_first),
    )


def _ended(row: dict[str, Any]) -> str:
    """When a key was revoked. Where EXPIRES is left out, a key that is over must not look valid."""
    revoked_at = row["revoked_at"]
    return "expired" if revoked_at is None and _is_over(row) else clock(revoked_at)


def _is_over(row: dict[str, Any]) -> bool:
    ends = row["expires_at"]
    return ends is not None and datetime.fromisoformat(ends) <= datetime.now(UTC)


list_command(
    key,
    "List keys, without their secrets.",
    path_to("admin", "keys"),
    "keys",
    {
        "ID": ("id", whole_ident),
        "ROLE": "role",
        "TENANT": "tenant",
        "NAME": "name",
        SpareHeading("CREATED", 3): ("created_at", clock),
        SpareHeading("EXPIRES"): ("expires_at", clock),
        "LAST USED": ("last_used_at", clock),
        "REVOKED": _ended,
        SpareHeading("NOTE", 2): "note",
    },
)


@key.command("revoke")
@click.argument("key_id", metavar="ID", shell_complete=complete_keys)
@click.option("--yes", is_flag=True, help="Do not ask, also if it is the last admin key.")
@calls_server
def revoke_key(session: Session, key_id: str, *, yes: bool) -> None:
    """Revoke a key, on every server within 2 s.

    Asks first if it is the last key of an admin of all tenants.
    """
    if not yes and _is_last_admin(session, key_id):
        if not sys.stdin.isatty():
            raise click.UsageError(f"{_LAST_ADMIN}: to revoke it all the same, give --yes")
        click.confirm(f"{_LAST_ADMIN}. Revoke it?", abort=True, err=True)
    document = session.send("DELETE", path_to("admin", "keys", key_id)).document
    session.show(document, lambda _: [f"key {cell(key_id)} is revoked"])


_LAST_ADMIN = (
    "this is the last admin key for all tenants: without it, only a server that is started with"
    " STANCHION_ADMIN_KEY can create keys"
)


def _is_last_admin(session: Session, key_id: str) -> bool:
    """Whether no other key that still works is of an admin of all tenants."""
    admins, cursor = set[str](), None
    while True:
        page = session.get(path_to("admin", "keys"), limit=_ROWS_AT_ONCE, cursor=cursor)
        for each in page["keys"]:
            if (each["role"], each["tenant"]) == ("admin", "*") and not each["revoked_at"]:
                admins |= set() if _is_over(each) else {each["id"]}
        cursor = page["cursor"]
        if cursor is None:
            return admins == {key_id}


_ROWS_AT_ONCE = 1_000


def _new_key_lines(key: dict[str, Any], *, is_first: bool) -> Iterator[str]:
    yield from pairs(
        [
            ("key", cell(key["key"])),
            ("id", cell(key["id"])),
            ("role", cell(key["role"])),
            ("tenant", cell(key["tenant"])),
            ("name", cell(key["name"])),
            ("note", cell(key["note"])),
            ("expires", clock(key["expires_at"])),
        ]
    )
    yield ""
    yield "Store the key now: it is not shown again. Use it as STANCHION_API_KEY."
    if is_first:
        yield "This is the first key: from now on every command, worker and client needs one."


@click.group("settings")
def settings() -> None:
    """See and change the settings of running servers."""


@settings.command("show")
@calls_server
def show_settings(session: Session) -> None:
    """Show all settings."""
    session.show(session.get(path_to("admin", "settings")), _settings_lines)


@settings.command("set")
@click.argument("changes", metavar="[PATH=VALUE]...", nargs=-1)
@click.option("--patch", metavar="JSON|@FILE", help="A JSON merge patch, instead of PATH=VALUE.")
@calls_server
def set_settings(session: Session, changes: tuple[str, ...], patch: str | None) -> None:
    """Change settings on every server, within 2 s.

    For example: stanchion settings set admission.strategy=lock lock_busy.jitter_ms=0

    A VALUE is JSON; what is not JSON is taken as text.
    """
    if (patch is None) == (not changes):
        raise click.UsageError("give PATH=VALUE, or --patch with a JSON merge patch")
    merge = _merge_patch(changes) if patch is None else json_of(patch, "--patch")
    session.show(
        session.send("PATCH", path_to("admin", "settings"), merge).document, _settings_lines
    )


def _merge_patch(changes: tuple[str, ...]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise click.UsageError(f"{change!r} is not PATH=VALUE, such as admission.strategy=lock")
        place = patch
        for name in names[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise click.UsageError(f"{change!r} goes into a value that was given before it")
        place[names[-1]] = _json_or_text(text)
    return patch


def _json_or_text(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return parsed_json(text)
    except ValueError:
        return text


def _settings_lines(settings: dict[str, Any]) -> list[str]:
    return pairs(
        (path, "null" if value is None else cell(value)) for path, value in _flattened(settings)
    )


def _flattened(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, member in value.items():
        path = cell(prefix + name)
        if isinstance(member, dict) and member:
            yield from _flattened(member, path + ".")
        else:
            yield path, member
