"""Budgets: reserved with a run, charged with reports of its workers, settled when it ends.

The functions are parts of the transactions that admit, renew, accept and commit. Their rows are
never pending, so that ``peek`` reads them as they are; only tenants with budgets pay for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.codec import SQL, encode
from stanchion.core.budget import (
    BudgetLimit,
    BudgetTally,
    BudgetWindow,
    Reservation,
    charge,
    counted_usage,
    merge_usage,
    new_usage,
    reserve,
    rolled,
    settle,
)
from stanchion.core.model import Instant, JobId, TenantId

_USAGE: Final = msgspec.json.Decoder(dict[str, int])


def stored_tallies(db: Database, tenant: TenantId) -> dict[str, BudgetTally]:
    """The tallies of a tenant's budgets as they were last written."""
    rows = db.peek_every(SQL["read_budgets"], tenant=tenant)
    return {name: _tally(*rest) for name, *rest in rows}


def present_tallies(
    db: Database, tenant: TenantId, limits: Mapping[str, BudgetLimit]
) -> dict[str, BudgetTally]:
    """The tallies of the present windows."""
    stored, now = stored_tallies(db, tenant), db.now()
    return {name: rolled(stored.get(name), limits[name].window, now) for name in limits}


def reserve_budgets(
    db: Database,
    tenant: TenantId,
    run: int,
    tallies: Mapping[str, BudgetTally],
    asked: Mapping[str, int],
) -> None:
    """Reserve what a new run asks for, of each of these budgets."""
    for name, tally in tallies.items():
        after, reservation = reserve(tally, asked.get(name, 0))
        _put_tally(db, tenant, name, after)
        _put_reservation(db, run, name, reservation)


def charge_usage(db: Database, job_id: JobId, told: Mapping[str, int]) -> None:
    """Charge what a report of a leased job adds to earlier ones under the same fence."""
    found = db.first(SQL["read_usage"], job_id=job_id)
    assert found is not None, "it is leased"
    job, run, tenant, said = found
    reservations = _reservations(db, run)
    counted = counted_usage(told, reservations)
    if not counted:
        return
    before = {} if said is None else _USAGE.decode(said)
    for name, amount in new_usage(before, counted).items():
        tally, after = charge(_read_tally(db, tenant, name), reservations[name], amount)
        _put_reservation(db, run, name, after)
        if tally is not None:
            _put_tally(db, tenant, name, tally)
    db.run(SQL["put_usage"], job=job, usage=encode(merge_usage(before, counted)))


def settle_budgets(db: Database, tenant: TenantId, run: int) -> None:
    """Return what is left of the reservations of a run that ends."""
    for name, reservation in _reservations(db, run).items():
        tally = settle(_read_tally(db, tenant, name), reservation)
        if tally is not None:
            _put_tally(db, tenant, name, tally)
    db.run(SQL["delete_reservations"], run=run)


def _reservations(db: Database, run: int) -> dict[str, Reservation]:
    rows = db.peek_every(SQL["read_reservations"], run=run)
    return {name: Reservation(*rest) for name, *rest in rows}


def _read_tally(db: Database, tenant: TenantId, name: str) -> BudgetTally | None:
    found = db.peek(SQL["read_budget"], tenant=tenant, name=name)
    return None if found is None else _tally(*found)


def _tally(window: str, start: int, *rest: int) -> BudgetTally:
    return BudgetTally(BudgetWindow(window), Instant(start), *rest)


def _put_tally(db: Database, tenant: TenantId, name: str, tally: BudgetTally) -> None:
    db.run(
        SQL["put_budget"],
        tenant=tenant,
        name=name,
        window=tally.window,
        start=tally.start,
        generation=tally.generation,
        used=tally.used,
        held=tally.held,
    )


def _put_reservation(db: Database, run: int, name: str, reservation: Reservation) -> None:
    db.run(
        SQL["put_reservation"],
        run=run,
        name=name,
        generation=reservation.generation,
        reserved=reservation.reserved,
        used=reservation.used,
    )
