"""Scenarios: the requests and faults of one simulated day, as a value.

All of it is drawn from the seed before the day begins: which callers send what and when, which
faults occur where and for how long. So a day can be printed, replayed, and reduced.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

TENANTS: Final = ("acme", "globex", "quiet")
WORKFLOWS: Final = (
    "three",
    "fan",
    "wide",
    "wide",
    "review",
    "patient",
    "nested",
    "tolerant",
    "items",
    "job",
)


class FaultKind(StrEnum):
    """The kinds of faults."""

    PAUSE_REPLICA = "replica is paused"
    CRASH_REPLICA = "replica crashes"
    DRAIN_REPLICA = "replica is drained and replaced"
    STEP_REPLICA = "replica's clock is set"
    PAUSE_WORKER = "worker is paused"
    CRASH_WORKER = "worker crashes"
    SLOW_WORKER = "worker is slow"
    CUT_WORKER = "worker is cut off"
    CUT_CALLER = "callers are cut off"
    CUT = "replica and server are disconnected"
    CUT_THERE = "requests to a server cut off"
    CUT_BACK = "answers of a server cut off"
    SLOW = "link to a server is slow"
    PAUSE_STORE = "store is paused"
    CRASH_STORE = "store restarts"
    FAIL_OVER = "store fails over, with loss"
    PAUSE_LOCKS = "lock server is paused"
    CRASH_LOCKS = "lock server restarts"
    EMPTY_LOCKS = "lock server loses its data"
    REPLACE_LOCKS = "lock server replaced, its clock behind"
    FORCE_RELEASE = "operator releases a lock"
    CRASH_BUS = "bus restarts, with loss"
    PAUSE_BUS = "bus is paused"
    CAP = "cap changes"
    SETTINGS = "settings change"
    WORKFLOW = "workflow changes"
    CRASH_BULK = "replica crashes in a bulk action"
    ORDER = "operator orders an escalation level"


class PlannedFault(msgspec.Struct, frozen=True):
    """A fault with its time and duration."""

    at_s: float
    kind: FaultKind
    target: int
    lasts_s: float
    amount: float
    """In [0, 1): the severity or the target, by kind."""

    def __str__(self) -> str:
        return f"{self.at_s:8.3f} s  {self.kind} (#{self.target}, {self.lasts_s:.1f} s)"


class Then(StrEnum):
    """What a caller does after a start."""

    WAIT = "wait"
    CANCEL = "cancel"
    RERUN = "rerun"
    LEAVE = "leave"
    RERUN_FROM = "rerun from a step"
    MISMATCH = "send other input with the key"
    READ = "read its timeline"


class Ask(msgspec.Struct, frozen=True):
    """A start by one or several callers."""

    at_s: float
    tenant: str
    workflow: str
    key: str
    copies: int
    """The number of callers that send it at the same time with the same key."""
    then: Then
    after_s: float
    has_key: bool = True
    """Without one, a start that may have been done is not repeated."""

    def __str__(self) -> str:
        many = "" if self.copies == 1 else f" ×{self.copies}"
        return f"{self.at_s:8.3f} s  {self.tenant} starts {self.workflow}{many}, then {self.then}"


class PlannedBulk(msgspec.Struct, frozen=True):
    """A bulk action on all runs of a workflow."""

    at_s: float
    tenant: str
    action: str
    workflow: str | None
    """``None``: all runs of the tenant."""
    key: str
    copies: int
    rate_per_s: float
    stops_after_s: float | None

    def __str__(self) -> str:
        which = self.workflow or "all"
        return f"{self.at_s:8.3f} s  {self.tenant} begins a bulk {self.action} of {which}"


class PlannedSchedule(msgspec.Struct, frozen=True):
    """A schedule, and when it is changed."""

    at_s: float
    tenant: str
    schedule_id: str
    workflow: str
    every_s: int
    jitter_s: int
    overlap: str
    catch_up: str
    changes_at_s: float
    is_deleted_first: bool
    """Whether the change is a deletion and a new schedule with the same name."""

    def __str__(self) -> str:
        return (
            f"{self.at_s:8.3f} s  {self.tenant} schedules {self.workflow} every {self.every_s} s,"
            f" overlap {self.overlap}, catch up {self.catch_up}; changed at {self.changes_at_s} s"
        )


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of deployment and the kinds of faults."""

    name: str
    replicas: tuple[int, int] = (2, 3)
    day_s: float = 40.0
    run_ttl_ms: int = 3_000
    job_ttl_ms: int = 6_000
    pause_s_max: float = 25.0
    asks: tuple[int, int] = (8, 20)
    faults: tuple[int, int] = (2, 9)
    kinds: tuple[FaultKind, ...] = ()
    is_embedded: bool = False
    is_sqlite: bool = False
    """Whether the store is SQLite, compared with the memory store: see ``sim.twin``."""
    store_loses: bool = False
    cap_factor: int = 1
    """A factor for the caps of tenants."""
    is_stormy: bool = True
    """Whether single calls fail as well."""
    queues: bool = False
    """Whether full tenants let starts wait for a slot."""
    workflows: tuple[str, ...] = WORKFLOWS
    lasts_s_min: float = 0.3
    bulks: tuple[int, ...] = (0, 0, 1, 1, 2)
    """Numbers of bulk actions on a day, of which one is drawn."""
    schedules: tuple[int, ...] = (0, 1, 1, 2)
    is_quick_to_escalate: bool = False
    """Whether escalation is set to short times on each such day; otherwise, on every other one."""


_REPLICAS: Final = (
    *(FaultKind.PAUSE_REPLICA,) * 3,
    *(FaultKind.CRASH_REPLICA,) * 3,
    *(FaultKind.DRAIN_REPLICA,) * 2,
    FaultKind.STEP_REPLICA,
    *(FaultKind.PAUSE_WORKER,) * 2,
    *(FaultKind.CRASH_WORKER,) * 2,
    FaultKind.SLOW_WORKER,
    FaultKind.CUT_WORKER,
    FaultKind.CUT_CALLER,
    *(FaultKind.CUT,) * 2,
    FaultKind.CUT_THERE,
    *(FaultKind.CUT_BACK,) * 2,
    *(FaultKind.SLOW,) * 2,
    FaultKind.PAUSE_STORE,
    FaultKind.CRASH_STORE,
    FaultKind.PAUSE_LOCKS,
    *(FaultKind.CRASH_LOCKS,) * 2,
    *(FaultKind.EMPTY_LOCKS,) * 2,
    FaultKind.REPLACE_LOCKS,
    FaultKind.FORCE_RELEASE,
    FaultKind.CRASH_BUS,
    FaultKind.PAUSE_BUS,
    FaultKind.CAP,
    FaultKind.SETTINGS,
    FaultKind.WORKFLOW,
    *(FaultKind.CRASH_BULK,) * 3,
    FaultKind.ORDER,
)
_EMBEDDED: Final = (
    *(FaultKind.CRASH_REPLICA,) * 3,
    FaultKind.DRAIN_REPLICA,
    FaultKind.PAUSE_REPLICA,
    FaultKind.STEP_REPLICA,
    FaultKind.PAUSE_WORKER,
    FaultKind.CRASH_WORKER,
    FaultKind.SLOW_WORKER,
    FaultKind.CUT_WORKER,
    FaultKind.CUT_CALLER,
    FaultKind.SLOW,
    FaultKind.PAUSE_STORE,
    FaultKind.CAP,
    FaultKind.SETTINGS,
    FaultKind.WORKFLOW,
    *(FaultKind.CRASH_BULK,) * 3,
)

REPLICAS: Final = Profile(name="replicas", kinds=_REPLICAS)
FAILOVER: Final = Profile(
    name="failover", kinds=(*_REPLICAS, *(FaultKind.FAIL_OVER,) * 25), store_loses=True
)
EMBEDDED: Final = Profile(name="embedded", replicas=(1, 1), kinds=_EMBEDDED, is_embedded=True)
SQLITE: Final = Profile(
    name="sqlite", replicas=(1, 1), kinds=_EMBEDDED, is_embedded=True, is_sqlite=True
)
CROWD: Final = Profile(
    name="crowd",
    replicas=(3, 3),
    day_s=40.0,
    asks=(30, 50),
    faults=(3, 8),
    cap_factor=10,
    kinds=(
        *(FaultKind.CRASH_LOCKS,) * 4,
        *(FaultKind.EMPTY_LOCKS,) * 2,
        *(FaultKind.PAUSE_LOCKS,) * 2,
        *(FaultKind.SLOW,) * 3,
        *(FaultKind.PAUSE_REPLICA,) * 3,
        FaultKind.CRASH_REPLICA,
        FaultKind.DRAIN_REPLICA,
        FaultKind.FORCE_RELEASE,
    ),
)
"""Many concurrent runs and a lock server that is down, so that writers collide."""
OPERATORS: Final = Profile(
    name="operators",
    asks=(15, 25),
    faults=(3, 6),
    cap_factor=2,
    bulks=(2, 3, 4),
    schedules=(1, 2, 3),
    kinds=(
        *(FaultKind.CRASH_BULK,) * 5,
        *(FaultKind.CRASH_REPLICA,) * 2,
        *(FaultKind.PAUSE_REPLICA,) * 2,
        FaultKind.DRAIN_REPLICA,
        FaultKind.STEP_REPLICA,
        FaultKind.CUT,
        FaultKind.CUT_BACK,
        FaultKind.PAUSE_STORE,
        FaultKind.CAP,
        FaultKind.SETTINGS,
        FaultKind.WORKFLOW,
        FaultKind.ORDER,
    ),
)
"""Many schedules and bulk actions, whose replicas crash."""
OUTAGE: Final = Profile(
    name="outage",
    replicas=(3, 3),
    day_s=60.0,
    asks=(50, 70),
    faults=(2, 3),
    cap_factor=30,
    workflows=("wide", "wide", "wide", "tolerant", "three", "items"),
    lasts_s_min=8.0,
    is_quick_to_escalate=True,
    kinds=(
        *(FaultKind.CRASH_LOCKS,) * 3,
        *(FaultKind.PAUSE_LOCKS,) * 2,
        FaultKind.EMPTY_LOCKS,
        FaultKind.ORDER,
    ),
)
"""The lock server is down for long under load: escalation trips, recovers, and may latch."""
LONG: Final = Profile(
    name="long",
    day_s=1_200.0,
    run_ttl_ms=30_000,
    job_ttl_ms=60_000,
    pause_s_max=120.0,
    asks=(40, 80),
    faults=(10, 30),
    kinds=_REPLICAS,
)
CALM: Final = Profile(name="calm", kinds=_REPLICAS, faults=(0, 0), is_stormy=False)
QUEUE: Final = Profile(
    name="queue", asks=(20, 40), kinds=(*_REPLICAS, *(FaultKind.CAP,) * 8), queues=True
)
"""Tenants whose starts wait while they are full, and operators who change caps."""
PROFILES: Final = MappingProxyType(
    {
        each.name: each
        for each in (
            *(REPLICAS, FAILOVER, EMBEDDED, SQLITE, CROWD, OPERATORS, OUTAGE, LONG, CALM, QUEUE),
        )
    }
)
MIXED: Final = "mixed"
"""Chosen by the seed: mostly replicas, some failovers and single servers."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One day."""

    seed: int
    profile: Profile
    replicas: int
    workers: int
    asks: tuple[Ask, ...]
    faults: tuple[PlannedFault, ...]
    is_stormy: bool
    max_deliveries: int
    retention_s: float | None = None
    """How long runs that have ended are kept; ``None``: for the whole day."""
    bulks: tuple[PlannedBulk, ...] = ()
    schedules: tuple[PlannedSchedule, ...] = ()


def draw(seed: int, profile_name: str = MIXED) -> Scenario:
    """Draw the day of a seed."""
    chance = Random(f"day {seed} {profile_name}")  # noqa: S311 - to be foreseen is the point
    if profile_name == MIXED:
        profile = chance.choice(
            (*(REPLICAS,) * 5, FAILOVER, FAILOVER, EMBEDDED, EMBEDDED, CROWD, OPERATORS, OUTAGE)
        )
        # Not drawn: the days before it stay what they were.
        profile = msgspec.structs.replace(profile, queues=seed % 7 == 3)  # noqa: PLR2004 - some days
    else:
        profile = PROFILES[profile_name]
        if profile.is_sqlite:
            profile = msgspec.structs.replace(profile, queues=seed % 2 == 1)
    asks = tuple(_ask(chance, profile, number) for number in range(chance.randint(*profile.asks)))
    asks += _more_asks(Random(f"more {seed} {profile_name}"), profile)  # noqa: S311 - likewise
    faults = tuple(_fault(chance, profile) for _ in range(chance.randint(*profile.faults)))
    return Scenario(
        seed=seed,
        profile=profile,
        replicas=chance.randint(*profile.replicas),
        workers=chance.randint(2, 3),
        asks=tuple(sorted(asks, key=lambda each: each.at_s)),
        faults=tuple(sorted(faults, key=lambda each: each.at_s)),
        max_deliveries=chance.choice((5, 2)),
        is_stormy=profile.is_stormy and chance.random() < 0.8,  # noqa: PLR2004 - most days
        retention_s=_RETENTION_S if seed % 6 == 5 else None,  # noqa: PLR2004 - some days
        bulks=_bulks(Random(f"bulks {seed} {profile_name}"), profile),  # noqa: S311 - likewise
        schedules=_schedules(Random(f"schedules {seed} {profile_name}"), profile),  # noqa: S311 - likewise
    )


_RETENTION_S: Final = 25.0


# Drawn by generators of their own, so that a change here leaves the rest of the days as it is.


def _more_asks(chance: Random, profile: Profile) -> tuple[Ask, ...]:
    """Starts of workflows with time limits, conditions and expressions; starts without a key."""
    return tuple(
        Ask(
            at_s=round(chance.uniform(0, 0.8) * profile.day_s, 3),
            tenant=chance.choice(("acme", "acme", "globex", "quiet", "quiet")),
            workflow=chance.choice(_MORE_WORKFLOWS),
            key=f"more-{number}",
            copies=chance.choice((1, 1, 2)),
            then=chance.choice((*Then, *_MORE_THEN, *_MORE_THEN)),
            after_s=round(chance.uniform(0, 6), 3),
            has_key=chance.random() < 0.7,  # noqa: PLR2004 - most
        )
        for number in range(chance.randint(4, 8))
    )


_MORE_THEN: Final = (Then.RERUN_FROM, Then.MISMATCH, Then.READ)
_MORE_WORKFLOWS: Final = (
    *("routed", "routed", "bounded", "bounded", "hurried", "hurried"),
    *("fan", "tolerant", "items", "review", "three", "job"),
)


def _bulks(chance: Random, profile: Profile) -> tuple[PlannedBulk, ...]:
    count = chance.choice(profile.bulks)
    bulks = [
        PlannedBulk(
            at_s=round(chance.uniform(0.1, 0.9) * profile.day_s, 3),
            tenant=chance.choice(("acme", "globex")),
            action=chance.choice(("cancel", *("rerun",) * 3, "approve", "replay", "discard")),
            workflow=chance.choice((*dict.fromkeys(profile.workflows), None, None, None, None)),
            key=f"bulk-{number}",
            copies=chance.choice((1, 1, 2)),
            rate_per_s=chance.choice((1.0, 5.0, 50.0)),
            stops_after_s=chance.choice((None, None, None, 2.0)),
        )
        for number in range(count)
    ]
    return tuple(sorted(bulks, key=lambda each: each.at_s))


def _schedules(chance: Random, profile: Profile) -> tuple[PlannedSchedule, ...]:
    count = chance.choice(profile.schedules)
    planned = (
        PlannedSchedule(
            at_s=round(chance.uniform(0, profile.day_s / 3), 3),
            tenant=chance.choice(TENANTS),
            schedule_id=f"schedule-{number}",
            workflow=chance.choice(("three", "wide", "patient")),
            every_s=max(1, round(profile.day_s / chance.choice((30, 15, 8)))),
            jitter_s=chance.choice((0, 0, 3)),
            overlap=chance.choice(("skip", "queue", "allow")),
            catch_up=chance.choice(("none", "one", "all")),
            changes_at_s=round(chance.uniform(0.4, 1.5) * profile.day_s, 3),
            is_deleted_first=chance.random() < 0.5,  # noqa: PLR2004 - every other one
        )
        for number in range(count)
    )
    # The quiet tenant asks for little: its runs do not pile up while a replica is paused.
    return tuple(
        replace(each, overlap="skip") if each.tenant == "quiet" else each for each in planned
    )


def _ask(chance: Random, profile: Profile, number: int) -> Ask:
    # Most starts come early and together, so that caps are reached and faults hit active work.
    at_s = chance.uniform(0, profile.day_s) * chance.random()
    return Ask(
        at_s=round(at_s, 3),
        tenant=chance.choice(("acme", "acme", "globex")) if chance.random() < 0.9 else "quiet",  # noqa: PLR2004 - most
        workflow=chance.choice(profile.workflows),
        key=f"key-{number}",
        copies=chance.choice((1, 1, 1, 2, 3)),
        then=chance.choice((Then.WAIT, Then.WAIT, Then.LEAVE, Then.CANCEL, Then.RERUN)),
        after_s=round(chance.uniform(0, 6), 3),
    )


def _fault(chance: Random, profile: Profile) -> PlannedFault:
    kind = chance.choice(profile.kinds)
    at_s = chance.uniform(0, profile.day_s)
    # Short and long faults: some end before they are noticed, some after every lease.
    lasts_s = profile.pause_s_max ** chance.random() if chance.random() < 0.8 else 0.3  # noqa: PLR2004 - most
    lasts_s = max(lasts_s, profile.lasts_s_min)
    return PlannedFault(
        round(at_s, 3), kind, chance.randrange(12), round(lasts_s, 3), chance.random()
    )
