"""Admission figures: what the gate answered a tenant in the last minute, and which tenant is worst.

Every replica counts its own answers in windows of five seconds; the last twelve are a minute, of
which the newest window is not over yet. Figures of several replicas are added. Waits are counted in
buckets, so that they can be added too: a percentile is exact to the width of its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import msgspec

from stanchion.core.model import Instant, TenantId

WINDOW_MS: Final = 5_000
MINUTE_WINDOWS: Final = 12
WAIT_BOUNDS_MS: Final = (1, 2, 3, 5, 8, 12, 20, 35, 60, 100, 200, 400, 800, 1_500, 2_500, 5_000)
"""The upper bounds of the buckets of waits. Longer waits are counted in the last one."""


class GateWindow(msgspec.Struct):
    """What the gate answered one tenant in one window. Counted up while the window lasts."""

    number: int
    """Its time divided by the length of a window."""
    admitted: int = 0
    full: int = 0
    unavailable: int = 0
    waits: list[int] = msgspec.field(default_factory=lambda: [0] * len(WAIT_BOUNDS_MS))


class GateFigures(msgspec.Struct, frozen=True, array_like=True):
    """What the gate answered one tenant in the last minute. Reported by replicas as it is."""

    admitted: int = 0
    full: int = 0
    unavailable: int = 0
    retry_after_ms: int | None = None
    """The delay that the last refused caller was told."""
    refused_at: Instant = Instant(0)
    waits: tuple[int, ...] = (0,) * len(WAIT_BOUNDS_MS)


class TenantPressure(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's slots, and what its callers were answered."""

    tenant: TenantId
    limit: int | None
    active: int
    queued: int = 0
    figures: GateFigures = GateFigures()


def last_minute(
    windows: Iterable[GateWindow], now_window: int, *, told: tuple[int, Instant] | None = None
) -> GateFigures:
    """The figures of the windows of the last minute.

    ``told``: the delay that the last refused caller was told, and when.
    """
    recent = [each for each in windows if now_window - MINUTE_WINDOWS < each.number <= now_window]
    refused = any(each.full or each.unavailable for each in recent)
    retry_after_ms, refused_at = told if told is not None and refused else (None, Instant(0))
    return GateFigures(
        sum(each.admitted for each in recent),
        sum(each.full for each in recent),
        sum(each.unavailable for each in recent),
        retry_after_ms,
        refused_at,
        _sums([each.waits for each in recent]),
    )


def added(figures: Sequence[GateFigures]) -> GateFigures:
    """The figures of several replicas together."""
    told = max(figures, key=lambda each: each.refused_at, default=GateFigures())
    return GateFigures(
        sum(each.admitted for each in figures),
        sum(each.full for each in figures),
        sum(each.unavailable for each in figures),
        told.retry_after_ms,
        told.refused_at,
        _sums([each.waits for each in figures]),
    )


def _sums(waits: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sum of each bucket. Replicas of other versions may report fewer buckets, or more."""
    none = (0,) * len(WAIT_BOUNDS_MS)
    return tuple(map(sum, zip_longest(none, *waits, fillvalue=0)))[: len(none)]


def percentile_ms(waits: Sequence[int], share: float) -> int | None:
    """The upper bound of the bucket that a share of the waits does not exceed; ``None`` of none."""
    rank = share * sum(waits)
    if not rank:
        return None
    below = 0
    for bound, count in zip(WAIT_BOUNDS_MS, waits, strict=False):
        below += count
        if below >= rank:
            return bound
    return WAIT_BOUNDS_MS[-1]


def pressure_order(tenant: TenantPressure) -> tuple[float, float, int, str]:
    """The key that sorts tenants by pressure, the worst first.

    First those whose callers were refused most often in the last minute; then by the share of slots
    in use, by the number of slots, and by name.
    """
    refused = tenant.figures.full + tenant.figures.unavailable
    used = 0.0
    if tenant.limit is not None:
        used = tenant.active / tenant.limit if tenant.limit else float(tenant.active > 0)
    return -refused, -used, -tenant.active - tenant.queued, tenant.tenant


def together(reports: Iterable[Mapping[TenantId, GateFigures]]) -> dict[TenantId, GateFigures]:
    """The figures of all replicas, by tenant."""
    found: dict[TenantId, list[GateFigures]] = {}
    for report in reports:
        for tenant, figures in report.items():
            found.setdefault(tenant, []).append(figures)
    return {tenant: added(each) for tenant, each in found.items()}
