"""Budgets: what the runs of a tenant may use in a window of time, in units of the tenant's choice.

A run reserves when it is admitted and is charged what its workers report. A tally counts what the
runs of one window have used, and what its unfinished runs hold: their reservations, less what they
have used of them. The sum of both is Σ max(reserved, used) over the runs of the window, and an
admission must not raise it above the limit. Reports are never refused, so what runs use beyond
their reservations may do so.

    admission     held + reserved
    report        used + new, held − new (not below the reservation's zero)
    end of a run  held − what is left of its reservation

A run is charged to the window in which it was admitted: each window has a number of its own, its
generation, and a charge for another generation changes no tally. Every store makes these changes
inside its transactions. The memory and SQLite stores call the functions; Redis repeats them in
``part_budgets.lua``, and the contract suite compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stanchion.core.model import Instant
from stanchion.core.ranges import check_ranges

BUDGET_NAME_CHARS_MAX: Final = 64
BUDGET_NAME_PATTERN: Final = (
    r"[^\x00-\x20\x7f-\xa0\xad\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
    rf"\ufff0-\uffff]{{1,{BUDGET_NAME_CHARS_MAX}}}"
)
"""Visible characters."""
BUDGETS_MAX: Final = 16
"""Names in one configuration, workflow or report."""
BudgetMax: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
"""The limit of a budget."""
BUDGET_AMOUNT_MAX: Final = 10**12
"""The largest reservation, and the largest usage of one delivery of a job."""
BudgetAmount: TypeAlias = Annotated[int, Meta(ge=0, le=BUDGET_AMOUNT_MAX)]
CLOCK_STEP_MAX_MS: Final = 3_600_000
"""A window that begins further than this in the future was made by a wrong clock."""
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_DECEMBER: Final = 12


class BudgetWindow(StrEnum):
    """The time over which a budget is counted, in UTC. ``total`` never ends."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


class BudgetLimit(msgspec.Struct, frozen=True):
    """A budget in the configuration of a tenant."""

    limit: BudgetMax
    window: BudgetWindow

    def __post_init__(self) -> None:
        """Check the range that every store supports. Raises ``ValueError``."""
        check_ranges(self)


class BudgetTally(msgspec.Struct, frozen=True):
    """What the runs that were admitted in one window use and hold of a budget."""

    window: BudgetWindow
    start: Instant
    generation: int
    """A number of its own for each window of a tenant's budget; it only rises."""
    used: int = 0
    held: int = 0
    """What unfinished runs have reserved and not used."""


class Reservation(msgspec.Struct, frozen=True):
    """What an unfinished run has reserved and used of one budget."""

    generation: int
    """Of the tally in which the run was admitted."""
    reserved: int
    used: int = 0

    @property
    def held(self) -> int:
        """What is left of the reservation."""
        return max(0, self.reserved - self.used)


class BudgetStanding(msgspec.Struct, frozen=True):
    """A budget as it is shown: its limit, and the tally of the present window."""

    limit: int
    window: BudgetWindow
    used: int
    reserved: int
    """What unfinished runs have reserved and not used."""
    resets_at: Instant | None
    """The end of the window; ``None`` if it never ends."""


class OverBudget(msgspec.Struct, frozen=True, tag="over_budget"):
    """A run would reserve more than is left of a budget."""

    budget: str
    limit: int
    used: int
    reserved: int
    resets_at: Instant | None
    asked: int
    """What the run would reserve."""

    def can_end_within(self, ms: int, now: Instant) -> bool:
        """Whether the same start could be admitted so soon.

        Either the window ends, or unfinished runs could end and return what they hold.
        """
        is_over_soon = self.resets_at is not None and self.resets_at - now <= ms
        return self.is_held or (is_over_soon and self.asked <= self.limit)

    @property
    def is_final(self) -> bool:
        """Whether the same start can never be admitted, unless the limit is raised."""
        return self.asked > self.limit or (self.resets_at is None and not self.is_held)

    @property
    def is_held(self) -> bool:
        """Whether enough would be left if unfinished runs returned what they hold."""
        return self.used + self.asked <= self.limit


def window_start(window: BudgetWindow, now: Instant) -> Instant:
    """When the window that contains ``now`` began."""
    match window:
        case BudgetWindow.HOUR:
            return Instant(now - now % _HOUR_MS)
        case BudgetWindow.DAY:
            return Instant(now - now % _DAY_MS)
        case BudgetWindow.MONTH:
            day = datetime.fromtimestamp(now // 1000, UTC)
            return _midnight(day.year, day.month)
        case BudgetWindow.TOTAL:
            return Instant(0)


def window_end(window: BudgetWindow, start: Instant) -> Instant | None:
    """When the window that began at ``start`` ends; ``None`` if never."""
    match window:
        case BudgetWindow.HOUR:
            return Instant(start + _HOUR_MS)
        case BudgetWindow.DAY:
            return Instant(start + _DAY_MS)
        case BudgetWindow.MONTH:
            first = datetime.fromtimestamp(start // 1000, UTC)
            is_last = first.month == _DECEMBER
            return _midnight(first.year + is_last, 1 if is_last else first.month + 1)
        case BudgetWindow.TOTAL:
            return None


def _midnight(year: int, month: int) -> Instant:
    return Instant(int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * 1000)


def rolled(tally: BudgetTally | None, window: BudgetWindow, now: Instant) -> BudgetTally:
    """The tally of the present window: the given one, or an empty one of the next generation.

    A clock that is set back by a little does not bring a former window back.
    """
    start = window_start(window, now)
    if tally is None:
        return BudgetTally(window, start, 1)
    is_ahead = start < tally.start <= now + CLOCK_STEP_MAX_MS
    if tally.window is window and (tally.start == start or is_ahead):
        return tally
    return BudgetTally(window, start, tally.generation + 1)


def over_budget(
    limits: Mapping[str, BudgetLimit], tallies: Mapping[str, BudgetTally], asked: Mapping[str, int]
) -> OverBudget | None:
    """The first budget, by name, that has too little left for a run; ``None`` if all have enough.

    ``tallies`` are those of the present windows. What is not limited is not counted.
    """
    for name in sorted(asked):
        limit = limits.get(name)
        if limit is None:
            continue
        tally = tallies[name]
        if tally.used + tally.held + asked[name] > limit.limit:
            return OverBudget(
                budget=name,
                limit=limit.limit,
                used=tally.used,
                reserved=tally.held,
                resets_at=window_end(tally.window, tally.start),
                asked=asked[name],
            )
    return None


def reserve(tally: BudgetTally, amount: int) -> tuple[BudgetTally, Reservation]:
    """Reserve for a run that is admitted; ``amount`` is 0 for one that reserves nothing."""
    return replace(tally, held=tally.held + amount), Reservation(tally.generation, amount)


def charge(
    tally: BudgetTally | None, reservation: Reservation, amount: int
) -> tuple[BudgetTally | None, Reservation]:
    """Charge new usage to a run and, if its window is still the present one, to the tally."""
    after = replace(reservation, used=reservation.used + amount)
    if tally is None or tally.generation != reservation.generation:
        return tally, after
    held = tally.held - (reservation.held - after.held)
    return replace(tally, used=tally.used + amount, held=held), after


def settle(tally: BudgetTally | None, reservation: Reservation) -> BudgetTally | None:
    """Return what is left of the reservation of a run that has ended."""
    if tally is None or tally.generation != reservation.generation:
        return tally
    return replace(tally, held=tally.held - reservation.held)


def counted_usage(
    told: Mapping[str, int], reservations: Mapping[str, Reservation]
) -> dict[str, int]:
    """What of a report counts: the budgets of the run.

    A job keeps no other names, because each report may have new ones.
    """
    return {name: amount for name, amount in told.items() if name in reservations}


def new_usage(before: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    """What a cumulative report adds to those before it, for the same job and fence."""
    more = {name: amount - before.get(name, 0) for name, amount in told.items()}
    return {name: amount for name, amount in more.items() if amount > 0}


def merge_usage(before: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    """The usage of a job after a report: of each budget the larger amount."""
    return {**before, **{name: max(told[name], before.get(name, 0)) for name in told}}


def standing_of(limit: BudgetLimit, tally: BudgetTally | None, now: Instant) -> BudgetStanding:
    """A budget as it is shown at ``now``."""
    present = rolled(tally, limit.window, now)
    return BudgetStanding(
        limit=limit.limit,
        window=limit.window,
        used=present.used,
        reserved=present.held,
        resets_at=window_end(present.window, present.start),
    )
