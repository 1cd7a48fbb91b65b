"""Completion of ids in the shell: of whatever the server can list.

The request uses the flags of the command line so far, or the environment. If the server does not
answer within a second, or refuses, there are no suggestions; errors are never printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from stanchion.cli.session import URL, ApiClient, path_to

_PATIENCE_S: Final = 1.0
_WORDS_MAX: Final = 1000
_RUNS_MAX: Final = 100
"""Only the newest runs are suggested."""


def complete_workflows(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[str]:
    """Ids of workflows."""
    return _listed(context, path_to("workflows"), "workflows", "id", typed)


def complete_runs(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of the newest runs."""
    return _listed(context, path_to("runs"), "runs", "run_id", typed, limit=_RUNS_MAX)


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
    return _listed(context, path_to("admin", "limits"), "limits", "id", typed)


def complete_bulks(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Ids of bulk actions."""
    return _listed(context, path_to("bulk"), "bulks", "bulk_id", typed)


def complete_tenants(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Names of configured tenants."""
    return _listed(context, path_to("admin", "tenants"), "tenants", "tenant", typed)


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
    given = context.params
    try:
        server = ApiClient(
            url=given.get("url") or URL,
            api_key=given.get("api_key"),
            # These are listed for the deployment, whichever tenant is being typed.
            tenant=None if rows in {"tenants", "limits"} else given.get("tenant"),
            patience_s=_PATIENCE_S,
        )
        page = server.ask("GET", path, query={"limit": limit}).document
        found = [
            str(row[member])
            for row in page[rows]
            if all(row[name] == value for name, value in (only or {}).items())
        ]
    except Exception:  # noqa: BLE001 - a shell that completes has no place for an error
        return []
    return [word for word in found if word.startswith(typed)]
