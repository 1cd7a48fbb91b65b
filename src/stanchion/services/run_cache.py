"""Run cache: the last committed values of runs that this replica has changed.

A run in the cache is decided on without reading it. The value may be out of date: a decision on it
counts only if the store compares its stamp. The cache is limited by number, by size and by time.

``RunClasses`` keeps what is needed to request a run's lease, which never changes and is small.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final
from weakref import ref

import msgspec
from msgspec.structs import replace

from stanchion.core.json_value import JsonValue
from stanchion.core.lease import LeaseOverride, Moment
from stanchion.core.model import Risk, Run, RunId, TenantId
from stanchion.core.plan import Plan
from stanchion.ports.clock import Clock
from stanchion.ports.records import Admission, AlikeStart, AlikeStarts

RUNS_KEPT: Final = 4_096
CLASSES_KEPT: Final = 2 * RUNS_KEPT
"""Also of runs that are not kept. Without its class, a run is read before its lease is asked for,
and not after that."""
RUN_KEPT_MS: Final = 60_000
"""How long a run is kept after its last change. Then it waits for something slow."""
RUN_KEPT_BYTES_MAX: Final = 64 * 1024
"""Larger runs are not kept in memory, but read again for every change."""
RUNS_KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
WIDE_RUN_KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A run is wide while a for-each of it has many items to go. It has as many changes to come, and
its list may be in its input: to read it for each of them would cost more than the changes."""
WIDE_RUNS_KEPT_BYTES_MAX: Final = 16 * 1024 * 1024
WIDE_ITEMS_MIN: Final = 100
_NODE_BYTES: Final = 64
"""The approximate memory of a value, besides its text."""
_BYTES_PER_CHAR: Final = 10
"""The approximate memory of a large value, per character of its JSON."""
_SHORT_INPUT_BYTES: Final = 512
"""The memory of an input up to this size is estimated from its JSON, which is quicker."""


class KnownRun(msgspec.Struct, gc=False):
    """The last committed value of a run, without items, and its plan."""

    run: Run
    plan: ref[Plan]
    """A weak reference: plans have a memory limit of their own."""
    input_bytes: int
    size_bytes: int
    changed_at: Moment
    leased_at: Moment | None = None
    """When its lease was granted here, and the run was advanced under it."""
    like: tuple[Admission, AlikeStart] | None = None
    """If set, ``run`` is another run that began alike, from which this one is made when needed."""


class RunCache:
    """The last committed values of runs that this process has changed, least recent first.

    None of them has ended. They may be out of date: a decision on one of them counts only if the
    store compares its stamp. A bell for the end of a run removes it. Large ones, which are kept
    only while they are wide, have a limit of their own, so that they displace no others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs = _LeastRecent()
        self._wide = _LeastRecent()

    def get(self, run_id: RunId) -> KnownRun | None:
        known = self._runs.by_id.get(run_id) or self._wide.by_id.get(run_id)
        if known is not None and known.like is not None:
            like, start = known.like
            known.run, known.like = start.like(like).run, None
        return known

    def put(self, run: Run, plan: Plan) -> None:
        """Replace the value of a run. One that has ended or is too large is forgotten."""
        before = self.forget(run.id)
        if run.status.is_finished:
            return
        # The input never changes, so it is measured once.
        input_bytes = _input_size_of(run) if before is None else before.input_bytes
        size_bytes = input_bytes
        for step in run.steps.values():
            size_bytes += step.output_bytes + 4 * _NODE_BYTES
        if size_bytes > WIDE_RUN_KEPT_BYTES_MAX:
            return
        is_large = size_bytes > RUN_KEPT_BYTES_MAX
        if is_large and not _is_wide(run):
            return
        kept = replace(run, items={}) if run.items else run
        known = KnownRun(kept, ref(plan), input_bytes, size_bytes, self._clock.moment())
        if before is not None:
            known.leased_at = before.leased_at
        if is_large:
            self._wide.add(run.id, known, size_bytes_max=WIDE_RUNS_KEPT_BYTES_MAX)
        else:
            self._runs.add(run.id, known, size_bytes_max=RUNS_KEPT_BYTES_MAX)

    def put_alike(self, starts: AlikeStarts, plan: Plan) -> None:
        """Add new runs that begin alike. Each is made when it is needed."""
        first, plan_ref, now = starts.first, ref(plan), self._clock.moment()
        run, known, encoded = first.run, self._runs.by_id, msgspec.json.encode
        steps_bytes = 4 * _NODE_BYTES * len(run.steps)
        added: dict[RunId, KnownRun] = {}
        for start in starts.rows:
            text_bytes = len(encoded(start.input))
            if text_bytes > _SHORT_INPUT_BYTES or start.run_id in known:
                self.put(start.like(first).run, plan)
                continue
            input_bytes = _BYTES_PER_CHAR * text_bytes
            added[start.run_id] = KnownRun(
                run, plan_ref, input_bytes, input_bytes + steps_bytes, now, like=(first, start)
            )
        self._runs.add_all(added, size_bytes_max=RUNS_KEPT_BYTES_MAX)

    def forget(self, run_id: RunId) -> KnownRun | None:
        """Remove a run; returns what was known of it."""
        return self._runs.remove(run_id) or self._wide.remove(run_id)

    def forget_idle(self) -> list[RunId]:
        """Remove the runs that have not changed for a minute; returns their ids."""
        until = Moment(self._clock.moment() - RUN_KEPT_MS)
        return [*self._runs.remove_until(until), *self._wide.remove_until(until)]


class RunClass(msgspec.Struct, frozen=True, gc=False):
    """What decides how the lease of a run is requested, and what its log lines and spans name."""

    risk: Risk
    override: LeaseOverride | None
    tenant: TenantId
    traceparent: str | None

    @classmethod
    def of(cls, run: Run, override: LeaseOverride | None) -> RunClass:
        """That of a run whose workflow has this lease policy."""
        return cls(run.risk, override, run.tenant, run.traceparent)

    @property
    def trace_id(self) -> str | None:
        """The id of the trace of the run."""
        return None if self.traceparent is None else self.traceparent[3:35]


class RunClasses:
    """The classes of runs that this process has changed, least recent first."""

    def __init__(self) -> None:
        self._classes: OrderedDict[RunId, RunClass] = OrderedDict()

    def get(self, run_id: RunId) -> RunClass | None:
        return self._classes.get(run_id)

    def put(self, run: Run, override: LeaseOverride | None) -> None:
        """Note the class of a run."""
        self._classes[run.id] = RunClass.of(run, override)
        self._classes.move_to_end(run.id)
        self._make_room()

    def put_alike(self, starts: AlikeStarts, override: LeaseOverride | None) -> None:
        """Note the class of new runs that begin alike."""
        known = RunClass.of(starts.first.run, override)
        for start in starts.rows:
            self._classes[start.run_id] = known
        self._make_room()

    def forget(self, run_ids: Iterable[RunId]) -> None:
        """Remove the classes of runs."""
        for run_id in run_ids:
            self._classes.pop(run_id, None)
        if not self._classes:
            self._classes.clear()  # else its table stays as large as it was

    def _make_room(self) -> None:
        while len(self._classes) > CLASSES_KEPT:
            self._classes.popitem(last=False)


class _LeastRecent:
    """Known runs with a limit on their number and size, least recently changed first."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[RunId, KnownRun] = OrderedDict()
        self._size_bytes = 0

    def add(self, run_id: RunId, known: KnownRun, *, size_bytes_max: int) -> None:
        self.by_id[run_id] = known
        self._size_bytes += known.size_bytes
        self._make_room(size_bytes_max)

    def add_all(self, added: Mapping[RunId, KnownRun], *, size_bytes_max: int) -> None:
        self.by_id.update(added)
        self._size_bytes += sum([known.size_bytes for known in added.values()])
        self._make_room(size_bytes_max)

    def _make_room(self, size_bytes_max: int) -> None:
        while len(self.by_id) > RUNS_KEPT or self._size_bytes > size_bytes_max:
            _, oldest = self.by_id.popitem(last=False)
            self._size_bytes -= oldest.size_bytes

    def remove(self, run_id: RunId) -> KnownRun | None:
        known = self.by_id.pop(run_id, None)
        if known is not None:
            self._size_bytes -= known.size_bytes
        return known

    def remove_until(self, moment: Moment) -> list[RunId]:
        """Remove those that were changed until then; returns their ids."""
        removed = list(
            itertools.takewhile(lambda run_id: self.by_id[run_id].changed_at <= moment, self.by_id)
        )
        for run_id in removed:
            self.remove(run_id)
        if removed and not self.by_id:
            self.by_id.clear()  # else its table stays as large as it was
        return removed


def _is_wide(run: Run) -> bool:
    """Whether a for-each of the run has many items to go."""
    counts = (step.items for step in run.steps.values() if step.status.is_active)
    return any(each is not None and each.unfinished >= WIDE_ITEMS_MIN for each in counts)


def _input_size_of(run: Run) -> int:
    """Roughly the memory of a run's input."""
    text_bytes = len(msgspec.json.encode(run.input))
    if text_bytes <= _SHORT_INPUT_BYTES:  # every start comes through here
        return _BYTES_PER_CHAR * text_bytes
    own = _size_of_value(run.input, RUN_KEPT_BYTES_MAX)
    if own > RUN_KEPT_BYTES_MAX and _is_wide(run):
        # Not counted value by value: that would hold the event loop for several milliseconds.
        own = max(own, _BYTES_PER_CHAR * len(msgspec.json.encode(run.input)))
    return own


def _size_of_value(value: JsonValue, at_most: int) -> int:
    """Roughly the memory of a value. Stops counting above ``at_most``."""
    size_bytes, left = 0, [value]
    while left and size_bytes <= at_most:
        each = left.pop()
        size_bytes += _NODE_BYTES
        if type(each) is str:  # every start comes through here
            size_bytes += len(each)
        elif type(each) is list:
            left += each
        elif type(each) is dict:
            size_bytes += sum(map(len, each))
            left += each.values()
    return size_bytes
