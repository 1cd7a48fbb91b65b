"""The admission queue: runs that wait for a slot of their tenant, and who gets the next one.

A tenant whose configuration says ``on_full: queue`` keeps the starts that find no free slot. A
queued run is stored and holds no slot. The order of the queue:

* The highest priority is served first, strictly.
* Within a priority, fairness keys take turns: the key at the head of the ring gives one run and
  moves to the tail. A key without waiting runs leaves the ring, and joins at the tail when it comes
  back.
* Within a key, the oldest run is first.

``FairQueue`` states this order. The memory store uses it; SQLite and Redis keep the same order in
tables and sorted sets, and the contract suite compares them. Every step of a store that frees or
adds a slot promotes waiting runs in the same step, so that no slot is free while a run waits.

One step promotes ``PROMOTED_AT_ONCE_MAX`` runs at most, because other tenants wait for it. If a
raised cap makes room for more, ``promote`` continues, and so does the commit of the first decision
of every promoted run: a slot can be free while a run waits only as long as a promoted run is not
decided on, so a crash between two steps does not leave a slot free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import msgspec

from stanchion.core.events import Timer, TimerKind
from stanchion.core.model import Instant, Run, RunId, RunStatus
from stanchion.core.queue_terms import (
    FAIRNESS_KEY_CHARS_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    OnFull,
    Priority,
    QueueMax,
    QueueWaitS,
)
from stanchion.core.transition import Transition

__all__ = [
    "ANY_PLACE",
    "ENDS_MAX",
    "ENDS_MIN",
    "FAIRNESS_KEY_CHARS_MAX",
    "KEYS_COUNTED_MAX",
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "PROMOTED_AT_ONCE_MAX",
    "PROMOTED_ENTRY",
    "QUEUE_TIMEOUT",
    "QUEUE_TIMER",
    "FairQueue",
    "OnFull",
    "Priority",
    "QueueMax",
    "QueuePlace",
    "QueueRequest",
    "QueueWaitS",
    "SlotUse",
    "estimate_s",
    "frees_key",
    "goes_on",
    "has_begun",
]

KEYS_COUNTED_MAX: Final = 100
"""Fairness keys of one priority for which a position is exact. To look at each of thousands, for
each start, would take a store milliseconds."""
PROMOTED_AT_ONCE_MAX: Final = 100
"""Runs that one step promotes: some 10 ms of work for SQLite or Redis."""
QUEUE_TIMEOUT: Final = "queue_timeout"
"""The error code of a run that waited too long."""
QUEUE_TIMER: Final = Timer(TimerKind.QUEUE)
PROMOTED_ENTRY: Final = "promoted"
"""The id of the inbox entry that a promotion adds."""
ENDS_MIN: Final = 2
ENDS_MAX: Final = 20
"""How many ends of runs an estimate is made from."""


class QueueRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a start wants to wait, if it has to."""

    priority: Priority = PRIORITY_DEFAULT
    fairness_key: str = ""
    on_full: OnFull | None = None
    """``None``: as the tenant's configuration says."""


ANY_PLACE: Final = QueueRequest()


class QueuePlace(msgspec.Struct, frozen=True):
    """Where a run waits, and what decides its place."""

    position: int
    """1 is the next run."""
    priority: int
    fairness_key: str


class FairQueue:
    """The waiting runs of one tenant, in the order in which they get slots."""

    def __init__(self) -> None:
        # Dictionaries keep their order and allow removal: rings of keys, each with its runs.
        self._rings: dict[int, dict[str, dict[RunId, None]]] = {}
        self._places: dict[RunId, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, run_id: RunId) -> bool:
        return run_id in self._places

    def __iter__(self) -> Iterator[RunId]:
        return iter(self._places)

    def add(self, run_id: RunId, request: QueueRequest) -> None:
        """Add a run at the tail of its key; a key without runs joins at the tail of the ring."""
        ring = self._rings.setdefault(request.priority, {})
        ring.setdefault(request.fairness_key, {})[run_id] = None
        self._places[run_id] = (request.priority, request.fairness_key)

    def remove(self, run_id: RunId) -> bool:
        """Remove a run; ``False`` if it does not wait."""
        place = self._places.pop(run_id, None)
        if place is None:
            return False
        priority, key = place
        del self._rings[priority][key][run_id]
        self._tidy(priority, key)
        return True

    def take(self) -> RunId | None:
        """Remove and return the next run; ``None`` if none waits."""
        if not self._places:
            return None
        priority = max(self._rings)
        ring = self._rings[priority]
        key = next(iter(ring))
        runs = ring.pop(key)
        run_id = next(iter(runs))
        del runs[run_id]
        ring[key] = runs
        self._tidy(priority, key)
        del self._places[run_id]
        return run_id

    def place(self, run_id: RunId) -> QueuePlace | None:
        """The place of a run and what decides it; ``None`` if it does not wait."""
        position = self.position(run_id)
        return None if position is None else QueuePlace(position, *self._places[run_id])

    def position(self, run_id: RunId) -> int | None:
        """The place of a run: 1 is the next one. ``None`` if it does not wait.

        With many fairness keys it is the last place that the run can have: as if each of the others
        had as many runs as turns. It is exact then for the first run of a key.
        """
        place = self._places.get(run_id)
        if place is None:
            return None
        priority, key = place
        ring = self._rings[priority]
        before = list(ring[key]).index(run_id)
        ahead = before + sum(
            len(runs)
            for each, ring_of in self._rings.items()
            if each > priority
            for runs in ring_of.values()
        )
        if len(ring) > KEYS_COUNTED_MAX:
            others = sum(map(len, ring.values())) - len(ring[key])
            return ahead + min(others, (len(ring) - 1) * before + list(ring).index(key)) + 1
        is_earlier = True
        for other, runs in ring.items():
            if other == key:
                is_earlier = False
                continue
            # Each turn of the run's own key is preceded by one of every other key; those earlier
            # in the ring have one turn more.
            ahead += min(len(runs), before + is_earlier)
        return ahead + 1

    def _tidy(self, priority: int, key: str) -> None:
        ring = self._rings[priority]
        if not ring[key]:
            del ring[key]
        if not ring:
            del self._rings[priority]


def goes_on(applied: Collection[str], status: RunStatus) -> bool:
    """Whether a commit promotes: it ends a run, or is the first decision of a promoted one."""
    return status.is_finished or PROMOTED_ENTRY in applied


def frees_key(transition: Transition) -> bool:
    """Whether the run ends without ever having begun, so that its key may be used again."""
    return transition.error is not None and transition.error.code == QUEUE_TIMEOUT


def has_begun(run: Run) -> bool:
    """Whether a run that has ended had a slot before: a step of its own has begun.

    A rerun has steps that began in the run before it.
    """
    since = 0 if run.rerun_of is None else run.created_at
    begun = (step.started_at for step in run.steps.values())
    return any(at is not None and at >= since for at in begun)


class SlotUse(NamedTuple):
    """A run that held a slot, and has ended."""

    created_at: Instant
    ended_at: Instant


def estimate_s(
    ended: Sequence[SlotUse],
    held: Sequence[Instant],
    *,
    slots: int,
    position: int,
    now: Instant,
) -> float | None:
    """How long a waiting run will probably wait for its slot.

    ``ended``: the last runs that held one. ``held``: when the runs that hold one were created;
    there may be more of them, ``slots`` in all. Only times in which a slot was used count, so an
    idle tenant's runs do not seem slow. ``None`` until two runs have ended, and if none is under
    way.
    """
    newest = sorted(ended, key=lambda use: use.ended_at)[-ENDS_MAX:]
    if len(newest) < ENDS_MIN or not held:
        return None
    ends = [use.ended_at for use in newest]
    # A run that waited got its slot from the run that ended this many ends before it.
    freed = [use.created_at for use in newest[:slots]] + ends[:-slots]
    usual_ms = sum(
        max(0, use.ended_at - max(use.created_at, at))
        for use, at in zip(newest, freed, strict=True)
    ) / len(newest)
    if slots > len(held):
        return round(position * usual_ms / slots / 1000, 1)
    begun = [
        max(created_at, freed_at)
        for created_at, freed_at in zip_longest(
            sorted(held, reverse=True), reversed(ends[-len(held) :]), fillvalue=Instant(0)
        )
    ]
    # A run that takes longer than usual probably takes as much longer again.
    left_ms = sorted(abs(usual_ms - max(0, now - at)) for at in begun)
    rounds, place = divmod(position - 1, len(held))
    return round((left_ms[place] + rounds * usual_ms) / 1000, 1)
