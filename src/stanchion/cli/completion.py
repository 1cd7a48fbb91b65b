"""Completion of ids in the shell: of whatever the server can list.

The request uses the flags of the command line so far, or the environment. If the server does not
answer within a second, or refuses, there are no suggestions; errors are never printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from stanchion.cli.api import ApiClient, path_to
from stanchion.cli.session import URL

_PATIENCE_S: Final = 1.0
_WORDS_MAX: Final = 1000
_RUNS_MAX: Final = 100
"""Only the newest runs are suggested."""
_SHARED: Final = path_to("shared", "workflows")
_LIMITS: Final = path_to("admin", "limits")
_LOCKS: Final = path_to("admin", "leases")
_TENANTS: Final = path_to("admin", "tenants")
_OF_DEPLOYMENT: Final = frozenset((_SHARED, _LIMITS, _LOCKS, _TENANTS))
"""These are asked for without the tenant that is being typed."""


def complete_workflows(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of workflows; with ``--shared`` of shared ones."""
    if context.params.get("shared"):
        return complete_shared_workflows(context, _parameter, typed)
    return _listed(context, path_to("workflows"), "workflows", "id", typed)


def complete_shared_workflows(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of shared workflows."""
    return _listed(context, _SHARED, "workflows", "id", typed)


def complete_runs(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of the newest runs."""
    return _listed(context, path_to("runs"), "runs", "run_id", typed, limit=_RUNS_MAX)


def complete_steps(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of the steps of the run that is typed already."""
    return [step_id for step_id in _steps(context) if step_id.startswith(typed)]


def complete_for_each_steps(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of the steps with items, of the run that is typed already."""
    return [
        step_id
        for step_id, step in _steps(context).items()
        if step_id.startswith(typed) and step["items_total"] is not None
    ]


def complete_undecided(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of runs with a step that waits for a decision."""
    found = _listed(context, path_to("approvals"), "approvals", "run_id", typed)
    return list(dict.fromkeys(found))


def complete_undecided_steps(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of the steps that wait for a decision, of the run that is typed already."""
    of_run = {"run_id": context.params.get("run_id")}
    return _listed(context, path_to("approvals"), "approvals", "step_id", typed, only=of_run)


def complete_schedules(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of schedules."""
    return _listed(context, path_to("schedules"), "schedules", "id", typed)


def complete_limits(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of topic limits."""
    return _listed(context, _LIMITS, "limits", "id", typed)


def complete_locks(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Names of locks that are held."""
    return _listed(context, _LOCKS, "leases", "name", typed)


def complete_bulks(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of bulk actions."""
    return _listed(context, path_to("bulk"), "bulks", "bulk_id", typed)


def complete_tenants(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Names of tenants that are configured or were seen."""
    return _listed(context, _TENANTS, "tenants", "tenant", typed)


def complete_letters(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of dead letters."""
    return _listed(context, path_to("admin", "dead-letters"), "dead_letters", "id", typed)


def complete_keys(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of API keys."""
    return _listed(context, path_to("admin", "keys"), "keys", "id", typed)


def _listed(
    context: click.Context,
    path: str,
    rows: str,
    member: str,
    typed: str,
    *,
    limit: int = _WORDS_MAX,
    only: Mapping[str, object] | None = None,
) -> list[str]:
    try:
        page = _asked(context, path, limit=limit)
        found = [
            str(row[member])
            for row in page[rows]
            if all(row[name] == value for name, value in (only or {}).items())
        ]
    except Exception:  # noqa: BLE001 - a shell that completes has no place for an error
        return []
    return [word for word in found if word.startswith(typed)]


def _steps(context: click.Context) -> Mapping[str, Mapping[str, object]]:
    """The steps of the run that is typed already, by id."""
    # click stops at an option whose value is being typed: what is in front of it is not named yet.
    of_run = context.params.get("run_id") or next(iter(context.args), "")
    try:
        found: Mapping[str, Mapping[str, object]]
        found = _asked(context, path_to("runs", of_run))["steps"]
    except Exception:  # noqa: BLE001 - a shell that completes has no place for an error
        return {}
    return found


def _asked(context: click.Context, path: str, **query: object) -> Mapping[str, Any]:
    given = context.params
    server = ApiClient(
        url=given.get("url") or URL,
        api_key=given.get("api_key"),
        tenant=None if path in _OF_DEPLOYMENT else given.get("tenant"),
        patience_s=_PATIENCE_S,
    )
    answered: Mapping[str, Any] = server.ask("GET", path, query=query).document
    return answered
