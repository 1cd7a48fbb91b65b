"""Oracles: what schedules, bulk actions and escalation must do, computed from what was asked.

Each is a record of its own of commands and counts, in the step in which they happen. It derives
what must follow without the code that it judges, and compares.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stanchion.core.admission import Admitted, RateExceeded
from stanchion.core.model import RunId
from stanchion.ports.records import Document
from stanchion.sim import invariants as must
from stanchion.sim.history import History

if TYPE_CHECKING:
    from stanchion.adapters.store.memory.state import MemoryState
    from stanchion.ports.records import Admission
    from stanchion.services.escalation import EscalationService
    from stanchion.sim.ledger import Ledger, SeenCommand
    from stanchion.sim.loop import LoopClock, Process

_CLOCK_STEP_MS: Final = 4_500
"""A replica's clock may be set back so far between its decision and the store's step."""


# ── Schedules ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class ScheduleRecord:
    """Every tick has one outcome: a run, or a place on the list of missed ticks."""

    ledger: Ledger
    _specs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """By name and generation: the stored schedule when the generation began."""
    _runs: defaultdict[tuple[str, int], dict[int, RunId]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By name and generation: the run of each tick."""
    _last: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Schedules as they were last written."""

    def watch(self) -> None:
        """Observe the store."""
        self.ledger.on("put_document", self._written)
        self.ledger.on("admit", self._admitted)

    def failed_over(self, state: MemoryState) -> None:
        """Forget the runs that were lost."""
        for ticks in self._runs.values():
            for tick in [tick for tick, run_id in ticks.items() if run_id not in state.runs]:
                del ticks[tick]

    def _written(self, seen: SeenCommand) -> None:
        if seen.arguments[0] == "schedule" and isinstance(seen.answer, Document):
            _, name, value = seen.arguments[:3]
            self._specs.setdefault((name, value["generation"]), value)
            before, self._last[name] = self._last.get(name), value
            if before is not None and before["generation"] != value["generation"]:
                self._check_ticks(name, before)

    def _admitted(self, seen: SeenCommand) -> None:
        admission: Admission = seen.arguments[0]
        mark, run = admission.tick, admission.run
        if mark is None or run.id not in self.ledger.store.real.state.runs:
            return
        name = f"{run.tenant}/{mark.schedule_id}"
        ticks, spec = self._runs[name, mark.generation], self._specs.get((name, mark.generation))
        first = ticks.setdefault(mark.tick, run.id)
        check = self.ledger.history.check
        check("one run per tick", must.one_run_per_tick(name, mark.tick, {first, run.id}))
        if spec is not None:
            clock = self.ledger.clocks[seen.who.name]
            check(
                "ticks are those of the schedule",
                must.tick_is_due(
                    name,
                    mark.tick,
                    since=spec["since"],
                    every_ms=spec["spec"]["every_s"] * 1_000,
                    now=clock.now() + _CLOCK_STEP_MS,
                ),
            )

    def _check_ticks(self, name: str, value: dict[str, Any]) -> None:
        """Compare what a schedule says at its end with the runs that were admitted for it."""
        generation, spec = value["generation"], value["spec"]
        if self.ledger.has_failed_over:
            return
        every_ms = spec["every_s"] * 1_000
        ticks = range(value["since"] + every_ms, value["handled"] + 1, every_ms)
        self.ledger.history.check(
            "every tick has one outcome",
            must.ticks_have_outcomes(
                name,
                [tick for tick in ticks if tick != value["tried"]],
                runs=self._runs[name, generation],
                missed={each["tick"]: None for each in value["missed"]},
            ),
        )


# ── Single jobs ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class RateRecord:
    """Submissions of single jobs are within their tenant's rate, and refused only above it."""

    ledger: Ledger
    rates: Mapping[str, float]
    _times: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _all: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Those too that a failover may have lost: they may be the reason of a refusal."""

    def watch(self) -> None:
        """Observe the store."""
        self.ledger.on("admit", self._admitted)

    def _admitted(self, seen: SeenCommand) -> None:
        admission: Admission = seen.arguments[0]
        tenant = str(admission.run.tenant)
        per_s, ledger = self.rates.get(tenant), self.ledger
        if not admission.is_rate_limited or per_s is None:
            return
        now, times = ledger.store.clock.now(), self._times[tenant]
        if isinstance(seen.answer, Admitted):
            self._all[tenant].append(now)
        if ledger.is_after_failover():
            return
        if isinstance(seen.answer, Admitted):
            times.append(now)
            said = must.within_rate(tenant, times, per_s)
            ledger.history.check("single jobs within their rate", said)
        elif isinstance(seen.answer, RateExceeded):
            said = must.throttled_with_reason(tenant, self._all[tenant], now, per_s)
            ledger.history.check("single jobs within their rate", said)


# ── Bulk actions ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _BulkSeen:
    run_ids: list[str]
    began: int
    holders: dict[str, None] = field(default_factory=dict)
    settled: int = 0


@dataclass(slots=True)
class BulkRecord:
    """Bulk actions are about the runs that matched, and act on each once."""

    ledger: Ledger
    on_taken: list[Any] = field(default_factory=list)
    """Faults that wait for a replica that has taken runs and not settled them."""
    _lists: dict[str, list[str]] = field(default_factory=dict)
    _bulks: dict[str, _BulkSeen] = field(default_factory=dict)
    _acts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _admitted_s: dict[RunId, float] = field(default_factory=dict)
    """When the store admitted each run."""
    _reads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each replica has read the record of each bulk action."""
    _entries: int = 0

    def watch(self) -> None:
        """Observe the store."""
        self.ledger.on("put_document", self._written)
        self.ledger.on("document", self._read)
        self.ledger.on("admit", self._admitted)
        for verb in ("post", "admit", "replay_dead_letter", "discard_dead_letter"):
            self.ledger.on(verb, lambda _seen: self._count())

    def failed_over(self, state: MemoryState) -> None:
        """Take over the store's state."""
        self._acts.clear()
        self._entries = state.audit_removed
        self._count(is_checked=False)
        known = state.documents.get("bulk", {})
        self._bulks = {name: each for name, each in self._bulks.items() if name in known}
        for name, each in self._bulks.items():
            each.settled = _settled(known[name].value)

    def _written(self, seen: SeenCommand) -> None:
        kind, name, value = seen.arguments[:3]
        if not isinstance(seen.answer, Document):
            return
        if kind == "bulk_runs":
            self._lists.setdefault(name.rpartition("-")[0], []).extend(value)
        elif kind == "bulk":
            self._progressed(name, value, seen)

    def _read(self, seen: SeenCommand) -> None:
        kind, name = seen.arguments
        if kind == "bulk":
            self._reads[name, seen.who.name] += 1

    def _progressed(self, bulk_id: str, value: dict[str, Any], seen: SeenCommand) -> None:
        check, known = self.ledger.history.check, self._bulks.get(bulk_id)
        now = self.ledger.store.clock.now()
        if known is None:
            known = _BulkSeen(self._lists.get(bulk_id, []), now)
            self._bulks[bulk_id] = known
            self.ledger.history.tell(f"store  bulk {value['action']} of {known.run_ids}")
            if value["tenant"] is not None and not self.ledger.is_after_failover():
                check(
                    "a bulk action is about what matched",
                    must.bulk_matches(bulk_id, known.run_ids, self._matching(value, known)),
                )
        holder = value.get("holder", "")
        if holder:
            known.holders[holder] = None
        taken = value.get("next", 0)
        check(
            "a bulk action goes forward",
            must.bulk_goes_forward(
                bulk_id, before=known.settled, value=value, matched=len(known.run_ids)
            ),
        )
        known.settled = _settled(value)
        earned = value["rate_per_s"] * ((now - known.began) / 1_000 + 0.5)
        # A replica that begins or goes on may take a run at once, and reads the record before.
        starts = 1 + sum(self._reads[bulk_id, each] for each in known.holders)
        check(
            "a bulk action keeps its rate",
            must.bulk_keeps_rate(bulk_id, taken=taken, most=earned * 1.02 + starts),
        )
        if value.get("open") and holder == seen.who.name:
            self.on_taken[:] = [each for each in self.on_taken if not each(seen.who)]

    def _admitted(self, seen: SeenCommand) -> None:
        run_id = seen.arguments[0].run.id
        if run_id in self.ledger.store.real.state.runs:
            self._admitted_s.setdefault(run_id, asyncio.get_running_loop().time())

    def _matching(self, value: dict[str, Any], listed: _BulkSeen) -> list[str]:
        """The runs that a bulk action must list.

        Of those that were admitted or removed while it was created, what it lists.
        """
        workflow = value["filter"].get("workflow_id")
        took_ms = max(0, self.ledger.store.clock.now() - value["created_at"])
        began_s = asyncio.get_running_loop().time() - took_ms / 1_000
        named = frozenset(listed.run_ids)
        there = [
            run
            for run in self.ledger.runs.values()
            if self._admitted_s.get(run.id, 0.0) < began_s or run.id in named
        ]
        there += [
            gone.run
            for gone in self.ledger.purged.values()
            if gone.at_s >= began_s and gone.run.id in named
        ]
        return [
            run.id
            for run in there
            if run.tenant == value["tenant"]
            and workflow in {None, run.workflow_id}
            and run.created_at <= value["created_at"]
        ]

    def _count(self, *, is_checked: bool = True) -> None:
        state = self.ledger.store.real.state
        log = state.audit_log
        for entry in log[self._entries - state.audit_removed :]:
            after: Any = entry.after
            bulk_id = after.get("bulk") if isinstance(after, dict) else None
            if bulk_id is None:
                continue
            act = (bulk_id, entry.action, entry.subject)
            self._acts[act] += 1
            if is_checked:
                self.ledger.history.tell(f"store  bulk {entry.action} {entry.subject}")
                self.ledger.history.check(
                    "a bulk action acts once on a run", must.acted_once(act, self._acts[act])
                )
        self._entries = state.audit_removed + len(log)

    def check_end(self, state: MemoryState, told: dict[str, dict[str, None]]) -> None:
        """Check that bulk actions of which callers were told have ended."""
        records = state.documents.get("bulk", {})
        statuses = {name: self._status(document.value) for name, document in records.items()}
        self.ledger.history.check("bulk actions end", must.bulks_end(told, statuses))

    @staticmethod
    def _status(value: Any) -> str:  # noqa: ANN401 - a document
        return str(value.get("status", "running"))


def _settled(value: Any) -> int:  # noqa: ANN401 - a document
    """The runs that a bulk action has settled."""
    return int(value.get("done", 0) + value.get("failed", 0))


# ── Escalation ───────────────────────────────────────────────────────────────────────────────────

_SLICES: Final = 5
_EVENTS_KEPT: Final = 4_000
_LONG_AGO: Final = -(10**15)


@dataclass(slots=True)
class EscalationRecord:
    """One replica trips when its counts say so, not otherwise, and recovers after quiet time."""

    history: History
    process: Process
    clock: LoopClock
    service: EscalationService
    latch: Callable[[], object]
    """The latch that the store keeps: every replica obeys it, whatever its own counts are."""
    counts: Counter[str] = field(default_factory=Counter)
    """All that the replica has counted."""
    _events: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))
    """When, how many fallbacks, how many duplicates."""
    _since: int = 0
    """From then on the replica has counted what is recorded here, and nothing else."""
    _checked_to: int = 0
    _fixed: tuple[object, ...] = ()
    _was_up: bool = False
    _noise_at: int = _LONG_AGO
    _probes_ok: int = 0
    _unknown_at: int = _LONG_AGO
    """When a boundary was passed whose verdict is not known. The replica may evaluate it later."""

    def counted(self, counts: dict[str, int]) -> None:
        """The replica is about to count something."""
        self.counts.update(counts)
        self.compare()
        now = self.clock.now()
        fallbacks, duplicates = counts.get("fallbacks", 0), counts.get("duplicates", 0)
        if duplicates or counts.get("probes_failed", 0):
            self._noise_at, self._probes_ok = now, 0
        self._probes_ok += counts.get("probes_ok", 0)
        if fallbacks or duplicates:
            self._events.append((now, fallbacks, duplicates))

    def compare(self) -> None:
        """Compare the replica's own level with what its counts lead to."""
        now, is_up = self.clock.now(), vars(self.service)["_state"].level > 0
        rules = vars(self.service)["_settings"]()
        slice_ms = round(rules.window_s * 1_000) // _SLICES
        self._restart_if_changed(now, slice_ms)
        end = now // slice_ms * slice_ms
        # The last boundary again: the replica may have evaluated it after the last comparison.
        first = max(self._checked_to, end - 20 * slice_ms)
        verdicts = [
            self._trips(each, slice_ms, rules.fallbacks_per_s)
            for each in range(first, end + 1, slice_ms)
        ]
        check = self.history.check
        if None in verdicts:
            self._unknown_at = now
        is_unknown = is_up and not any(verdicts) and now - self._unknown_at <= _LOOK_MS_MAX
        if not self._was_up and None not in verdicts and not is_unknown:
            said = must.escalation_follows(self.process.name, is_up=is_up, must_trip=any(verdicts))
            # The replica evaluates at its next look.
            if is_up or not any(verdicts):
                check("escalation follows the counts", said)
                self._checked_to = end
            elif now - end > _LOOK_MS_MAX:
                check("escalation follows the counts", said)
        else:
            self._checked_to = end
        if self._was_up and not is_up:
            check(
                "escalation follows the counts",
                must.recovery_was_quiet(
                    self.process.name,
                    quiet_ms=now - self._noise_at,
                    dwell_ms=round(rules.dwell_s * 1_000),
                    probes=self._probes_ok,
                    probes_min=rules.probes_min,
                ),
            )
            self._events.clear()
            self._since = now
        elif is_up and not self._was_up:
            self._noise_at, self._probes_ok = now, 0
        self._was_up = is_up

    def _trips(self, end: int, slice_ms: int, threshold: float) -> bool | None:
        """Whether the window that ends at ``end`` trips; ``None`` if that is not known."""
        begin, before = end - _SLICES * slice_ms, end - 2 * _SLICES * slice_ms
        if begin < self._since:
            return None
        per_slice, during, earlier = [0] * _SLICES, 0, 0
        for at, fallbacks, duplicates in self._events:
            if begin <= at < end:
                per_slice[(at - begin) // slice_ms] += fallbacks
                during += duplicates
            elif before <= at < begin:
                earlier += duplicates
        least = threshold * slice_ms / 1_000
        is_sustained = all(each >= least - 1e-9 for each in per_slice)
        return is_sustained and sum(per_slice) > _SLICES * least + 1e-9 and during > earlier

    def _restart_if_changed(self, now: int, slice_ms: int) -> None:
        """Start again from nothing if the replica may have counted otherwise.

        After a pause, a set clock, other rules, an order or a latch, two windows must pass.
        """
        service = vars(self.service)
        fixed = (
            self.process.pauses,
            self.clock.step_ms,
            service["_settings"](),
            service["_obeyed"],
            self.latch(),
        )
        if fixed != self._fixed:
            self._fixed = fixed
            self._since = now + 2 * _SLICES * slice_ms
            self._checked_to = now // slice_ms * slice_ms
            self._was_up = service["_state"].level > 0
            self._noise_at, self._probes_ok = _LONG_AGO, 10**6


_LOOK_MS_MAX: Final = 12_000
"""A replica looks every two seconds, later if its calls time out."""
