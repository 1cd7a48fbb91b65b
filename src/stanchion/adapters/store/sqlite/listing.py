"""Lists of runs: newest first, by creation and then by id, each page from an index."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.sqlite.database import Database, Row
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite.codec import FAILURE
from stanchion.core.model import RunStatus, TenantId
from stanchion.ports.records import Page, RunFilter, RunSummary

__all__ = ["list_runs"]

_SQL = read_statements(__package__, "sql", "listing.sql")
_LIST: Final = "runs"
_AFTER_ALL: Final = (2**63 - 1, "")
"""Later than any run: where the first page begins."""
_ROWS_MAX: Final = 1_000
"""How many rows one page may look at. By workflow some of them do not count: an index for it would
cost every start more than it saves the few who ask."""


def list_runs(
    db: Database, tenant: TenantId, only: RunFilter, cursor: str | None, limit: int
) -> Page[RunSummary]:
    """See ``ports.store.Runs.list_runs``."""
    before = _AFTER_ALL if cursor is None else read_cursor(_LIST, cursor, tuple[int, str])
    sifts = only.workflow_id is not None
    row_limit = max(_ROWS_MAX, limit) if sifts else limit
    rows = _rows(db, tenant, only, before, row_limit + 1)
    found: list[RunSummary] = []
    last: Row | None = None
    for row in rows[:row_limit]:
        if len(found) == limit:
            break
        last = row
        if not sifts or row[1] == only.workflow_id:
            found.append(_summary(row))
    is_end = last is None or last is rows[-1]
    return Page(tuple(found), None if last is None or is_end else _cursor(last))


def _rows(
    db: Database, tenant: TenantId, only: RunFilter, before: tuple[int, str], limit: int
) -> list[Row]:
    created_at, run_id = before
    match only:
        case RunFilter(status=RunStatus() as status):
            return db.every(
                _SQL["list_runs_by_status"],
                tenant=tenant,
                status=status,
                created_at=created_at,
                run_id=run_id,
                limit=limit,
            )
        case _:
            return db.every(
                _SQL["list_runs"],
                tenant=tenant,
                created_at=created_at,
                run_id=run_id,
                limit=limit,
            )


def _cursor(row: Row) -> str:
    return write_cursor(_LIST, row[4], row[0])


def _summary(row: Row) -> RunSummary:
    run_id, workflow_id, workflow_version, status, created_at, finished_at, error = row
    return RunSummary(
        id=run_id,
        workflow_id=workflow_id,
        workflow_version=workflow_version,
        status=RunStatus(status),
        created_at=created_at,
        finished_at=finished_at,
        error=None if error is None else FAILURE.decode(error),
    )
