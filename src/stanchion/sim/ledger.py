"""The ledger: a record of all commands that the store executes, independent of the store.

It sees each command in the step in which the store executes it, and checks it against the
invariants. It derives its facts from commands and answers, and reads the state of the store only
to compare. The records of jobs, locks, budgets and queues are in
``job_ledger``, ``lock_ledger``, ``budget_ledger`` and ``queue_ledger``.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from stanchion.core import invariants as of_core
from stanchion.core.admission import Admitted, Full, Queued, QueueFull
from stanchion.core.events import Approved, CancelRequested, Rejected
from stanchion.core.model import Instant, Risk, Run, RunId, TenantId
from stanchion.core.plan import Plan
from stanchion.core.settings import DEFAULTS, Settings, read_settings
from stanchion.core.topic_limits import TokenGrant, TopicLimit
from stanchion.core.why import Finding, RunFacts, Surroundings, why
from stanchion.gateway.cursors import KEY_TRUSTED_MS
from stanchion.ports.bus import Disposition, Retry
from stanchion.ports.clock import Clock
from stanchion.ports.records import (
    Accepted,
    Admission,
    Commit,
    CommitConflict,
    Committed,
    Document,
    Loaded,
    OldestWaits,
    OutboxRow,
    PostAnswer,
    StartsChecked,
    Tenant,
)
from stanchion.services.gate_answers import (
    GateFailed,
    GateFull,
    GateOverBudget,
    JobThrottled,
    KeyMismatch,
    RunStarted,
)
from stanchion.sim import invariants as must
from stanchion.sim.budget_ledger import BUDGET_VERBS, BudgetLedger
from stanchion.sim.cadence import ACTS, CadenceRecord
from stanchion.sim.history import History
from stanchion.sim.job_ledger import ON_ITS_WAY_S, OPEN_JOBS, JobLedger
from stanchion.sim.lock_ledger import NEVER_S, LockLedger, ObservedHold
from stanchion.sim.loop import Process
from stanchion.sim.network import SimLink
from stanchion.sim.oracle import BulkRecord, ScheduleRecord
from stanchion.sim.queue_ledger import QueueLedger, gave_up_waiting
from stanchion.sim.servers import StoreServer
from stanchion.sim.shown import LogRecord, OffsetRecord, TokenRecord

Ambush: TypeAlias = Callable[[Process, RunId, ObservedHold], bool]
"""Called at every read under a lease; returns whether it acted, and is then removed."""
Trap: TypeAlias = Callable[[SimLink, Commit], bool]
"""Called at every commit, likewise."""
_LETTER_VERBS: Final = frozenset({"replay_dead_letter", "discard_dead_letter"})
_AUDITED_VERBS: Final = frozenset(
    {
        *(
            "admit",
            "admit_many",
            "put_workflow",
            "put_shared_workflow",
            "put_tenant",
            "delete_tenant",
        ),
        *("put_document", "delete_document", "audit_slots", "add_audit", "purge"),
    }
)
"""Methods that write an audit entry for some of their changes."""
_AUDITING: Final = _AUDITED_VERBS | _LETTER_VERBS | {"post"}
_AUDIT_CHECK: Final = "every change has its audit entry"
_ADMISSIONS: Final = frozenset({"admit", "admit_many"})
_COMMITS: Final = frozenset({"commit", "settle"})
_POLLS: Final = frozenset({"take_outbox", "fire_timers", "expire_jobs", "lease_jobs", "purge"})
"""Methods whose empty answers need no check: they have changed nothing."""
_READS: Final = frozenset(
    {
        *("active_runs", "budgets", "document", "feed", "items_at", "job", "list_documents"),
        *("list_runs", "load", "lost_leases", "now", "outbox_size", "pool_uses", "queued_runs"),
        *("ready_tenants", "ready_topics", "workflow", "list_standings", "standings"),
    }
)
"""Methods that change nothing. A defect that does is noticed at the next one that may."""
_CADENCE_SENT: Final = frozenset({"take_tokens", "defer_outbox"})
_BROUGHT: Final = frozenset(
    {
        *_COMMITS,
        "check_starts",
        *("items_at", "admit", "admit_many", "expire_jobs"),
        *("document", "put_document", "list_documents", "take_tokens", "report_replica"),
    }
)
"""Methods whose answers are counted by the replica, or tell it the settings."""
_DOCUMENT_VERBS: Final = frozenset({"document", "put_document", "list_documents"})
_KNOWN_DOCUMENTS: Final = frozenset({"limit", "settings"})
"""Documents by which replicas act. Most reads are of others."""
_CLOSED: Final = frozenset({Risk.HIGH, Risk.CRITICAL})
"""Classes whose policy no scenario changes: they fail closed."""


class SeenCommand(NamedTuple):
    """A command that the store has executed."""

    who: Process
    verb: str
    arguments: tuple[Any, ...]
    answer: Any
    is_late: bool


class PurgedRun(NamedTuple):
    """A run that was removed after its retention, and when."""

    run: Run
    at_s: float


@dataclass(slots=True)
class Ledger:
    """The record of the store."""

    history: History
    store: StoreServer
    plan_of: Callable[[Run], Plan | None]
    run_ttl_ms: int
    locks: LockLedger
    budgets: BudgetLedger
    tallies: defaultdict[str, Counter[str]]
    """The answers that reached each replica, by process: its metrics must match."""
    limits: InitVar[tuple[TopicLimit, ...]]
    job_ttl_ms: int
    retention_ms: int
    settings: list[Settings] = field(default_factory=lambda: [DEFAULTS])
    """All settings that were ever in force."""
    known_settings: dict[str, list[tuple[object, Settings]]] = field(default_factory=dict)
    """By process: the settings that it has read or written last, and those before them."""
    runs: dict[RunId, Run] = field(default_factory=dict)
    """Runs after their last accepted change."""
    keys: defaultdict[tuple[str, str], dict[RunId, None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    unfinished: Counter[str] = field(default_factory=Counter)
    ambushes: list[Ambush] = field(default_factory=list)
    """Faults that wait for a replica between reading a run and writing it."""
    traps: list[Trap] = field(default_factory=list)
    """Faults that wait for a commit that is about to be sent."""
    audit_entries: int = 0
    """How many audit entries the store has written."""
    failed_over_at_s: float = NEVER_S
    refused_at_s: dict[str, float] = field(default_factory=dict)
    """When the store last called each tenant full."""
    explained: dict[RunId, tuple[Finding, ...]] = field(default_factory=dict)
    """What ``why`` said about runs that have not changed since."""
    queues: QueueLedger = field(default_factory=QueueLedger)
    clocks: dict[str, Clock] = field(default_factory=dict)
    """The clock of each replica, by process."""
    cadences: dict[str, CadenceRecord] = field(default_factory=dict)
    """How soon and how often each replica asks, by process."""
    purged: dict[RunId, PurgedRun] = field(default_factory=dict)
    """Runs that were removed after their retention."""
    jobs: JobLedger = field(init=False)
    schedules: ScheduleRecord = field(init=False)
    bulks: BulkRecord = field(init=False)
    log: LogRecord = field(init=False)
    offsets: OffsetRecord = field(init=False)
    tokens: TokenRecord = field(init=False)
    _freed_by: dict[RunId, TenantId] = field(default_factory=dict)
    """Runs whose end has freed a slot, also of those that were promoted and never started."""
    _observers: dict[str, list[Callable[[SeenCommand], None]]] = field(default_factory=dict)
    sent_verbs: frozenset[str] = _COMMITS | _CADENCE_SENT | {"report_replica"}
    brought_verbs: frozenset[str] = _BROUGHT

    def __post_init__(self, limits: tuple[TopicLimit, ...]) -> None:
        self.jobs = JobLedger(
            self.history,
            self.store,
            ttl_ms=self.job_ttl_ms,
            limits=limits,
            check_rows=self._rows,
        )
        self.schedules, self.bulks = ScheduleRecord(self), BulkRecord(self)
        self.schedules.watch()
        self.bulks.watch()
        self.log = LogRecord(self.history)
        self.offsets = OffsetRecord(self.history, self.clocks)
        self.tokens = TokenRecord(self.history, self.job_ttl_ms)
        self.locks.term_ms_of = self._lock_terms_ms
        self.locks.on_gate = self._asks_for_lock

    def _asks_for_lock(self, process: Process) -> None:
        self.cadences[process.name].uses_locks = True

    # ── What replicas and workers do ─────────────────────────────────────────────────────────────

    def sends(self, link: SimLink, verb: str, arguments: tuple[Any, ...]) -> None:
        """A replica is about to send a commit, its report, or what its cadence depends on."""
        if verb in _CADENCE_SENT:
            cadence = self.cadences[link.caller.name]
            if verb == "take_tokens":
                cadence.takes_tokens(arguments[0], arguments[1])
            else:
                cadence.deferred(arguments[0].run_id)
            return
        commit = arguments[-1]
        if not isinstance(commit, Commit):
            self.offsets.sends(link.caller.name, commit)
            return
        self.locks.writes(link.caller, commit.run_id)
        for trap in list(self.traps):
            if trap(link, commit):
                self.traps.remove(trap)

    def brought(self, link: SimLink, verb: str, arguments: tuple[Any, ...], answer: object) -> None:
        """The answer of the store has reached the replica."""
        if verb in _DOCUMENT_VERBS and arguments[0] not in _KNOWN_DOCUMENTS:
            return
        tally = self.tallies[link.caller.name]
        self._shown(link.caller.name, verb, answer)
        self._paced(self.cadences[link.caller.name], verb, arguments, answer)
        match verb, answer:
            case ("commit", CommitConflict()) | ("items_at", None):
                tally["commit_conflicts"] += 1
            case "commit" | "settle", Committed() if arguments[-1].transition.status.is_finished:
                tally["runs_finished"] += 1
            case "admit", Admitted() if arguments[0].run.status.is_finished:
                tally["runs_finished"] += 1
            case "admit_many", tuple():
                tally["runs_finished"] += sum(
                    isinstance(verdict, Admitted) and each.run.status.is_finished
                    for each, verdict in zip(arguments[0], answer, strict=True)
                )
            case "expire_jobs", tuple():
                abandoned = sum(not job.is_timed_out for job in answer)
                tally["scheduler_job_lock_abandoned"] += abandoned
            case "list_documents", _ if arguments[0] == "limit":
                self.jobs.limits_arrived(link.caller.name)
            case "document", Document() if arguments[0] == "settings":
                self._learned(link.caller.name, answer.value)
            case "put_document", Document() if arguments[0] == "settings":
                self._learned(link.caller.name, arguments[2])
            case _:
                pass

    def _shown(self, name: str, verb: str, answer: object) -> None:
        """Note what the replica must show of this answer."""
        if verb in _ADMISSIONS:
            self.log.answered(name)
        elif isinstance(answer, TokenGrant):
            self.tallies[name]["topic_limit_leases"] += len(answer.tokens)
        elif verb == "report_replica" and isinstance(answer, int):
            self.offsets.brought(name, Instant(answer))

    def _paced(
        self, cadence: CadenceRecord, verb: str, arguments: tuple[Any, ...], answer: object
    ) -> None:
        """Note what the cadence of the replica depends on."""
        match verb, answer:
            case "commit", CommitConflict():
                cadence.conflicted(arguments[-1].run_id)
            case "commit" | "settle", Committed():
                cadence.committed(arguments[-1].run_id)
                done = arguments[-1]
                if done.transition.status.is_finished and done.run_id in self._freed_by:
                    cadence.ended(self._freed_by[done.run_id])
            case "take_tokens", TokenGrant():
                cadence.took_tokens(arguments[0], arguments[1], answer)
            case "admit", Admitted():
                cadence.store_answered()
                if arguments[0].run.status.is_finished and arguments[0].run.holds_slot:
                    cadence.ended(arguments[0].run.tenant)
            case "admit" | "admit_many" | "check_starts", _:
                cadence.store_answered()
            case "list_documents", _ if arguments[0] == "limit":
                cadence.limits_came([(name, each.value) for name, each in answer.items])  # type: ignore[attr-defined]  # a page
            case "document" | "put_document", _ if arguments[0] == "limit":
                # A limit that is stored again as it is opens its pools, too.
                cadence.limits_came((arguments, answer))
            case _:
                pass

    def _learned(self, name: str, document: Any) -> None:  # noqa: ANN401 - JSON
        known = self.known_settings.setdefault(name, [(None, DEFAULTS)])
        if known[-1][0] == document["settings"]:
            return
        settings = self.settings_in(document)
        if settings is not None:
            # What began under the settings before these may still end by them.
            known[:] = [known[-1], (document["settings"], settings)]

    def settings_in(self, document: Any) -> Settings | None:  # noqa: ANN401 - JSON
        """The settings in a stored document."""
        found = read_settings(document["settings"], run_lease_ttl_ms=self.run_ttl_ms)
        return found if isinstance(found, Settings) else None

    def last_read_settings(self, name: str) -> Settings:
        """The settings that a replica has read or written last."""
        return self.known_settings.get(name, [(None, DEFAULTS)])[-1][1]

    def _settings_of(self, name: str) -> list[Settings]:
        """The settings that a replica may act by."""
        if self.has_failed_over:
            return self.settings
        return [each for _, each in self.known_settings.get(name, [(None, DEFAULTS)])]

    def answered(self, process: Process, row: OutboxRow, said: Disposition) -> None:
        """A replica has answered a call of the bus."""
        if isinstance(said, Retry):
            self.cadences[process.name].deferred(row.run_id)
            settings = self._settings_of(process.name)
            self.history.check(
                "delays within policy", must.call_retries_in_bounds(said.delay_ms, settings)
            )

    def gated(self, process: Process, answer: object, took_s: float) -> None:
        """The gate has answered a caller."""
        if isinstance(
            answer, RunStarted | GateFull | GateOverBudget | KeyMismatch | JobThrottled | GateFailed
        ):
            self.tallies[process.name]["admission_decisions"] += 1
        self.history.check(
            "the gate answers in time",
            must.gate_answers_in_time(took_s, self._settings_of(process.name)),
        )

    def told_full(self, tenant: str, *, asked_at_s: float) -> None:
        """A caller was told that its tenant is full."""
        refused_at_s = self.refused_at_s.get(tenant, NEVER_S)
        said = must.refused_since(tenant, asked_at_s=asked_at_s, refused_at_s=refused_at_s)
        self.history.check("no refusal is older than its caller", said)

    def run_of_key(self, tenant: str, key: str) -> RunId | None:
        """The run that a start with this key must be answered with."""
        runs = self.keys.get((tenant, key), ())
        return next((each for each in runs if not gave_up_waiting(self.runs.get(each))), None)

    def told_full_despite(self, tenant: str, key: str, known: RunId | None) -> None:
        """A caller was told that its tenant is full, and its key had a run when it asked."""
        is_wrong = known is not None and self.run_of_key(tenant, key) == known
        said = f"{tenant} was told that it is full, and its key {key} has the run {known}"
        self.history.check("a known key is replayed", [said] if is_wrong else [])

    # ── What the store does ──────────────────────────────────────────────────────────────────────

    def stored(
        self,
        link: SimLink,
        verb: str,
        arguments: tuple[Any, ...],
        answer: object,
        *,
        is_late: bool,
    ) -> None:
        """The store has executed a command."""
        if verb in ACTS:
            self.cadences[link.caller.name].executed(verb, arguments)
        if verb in _READS:
            if verb == "list_documents" and arguments[0] == "limit":
                self.jobs.limits_sent(link.caller.name)
            if verb in _NOTES or verb in self._observers:
                self._note(link, verb, arguments, answer, is_late=is_late)
            return
        if not answer and verb in _POLLS:
            return
        if verb in _ADMISSIONS:
            self._admissions(SeenCommand(link.caller, verb, arguments, answer, is_late))
        else:
            if self.queues.queues:
                self._promoted()
            self._note(link, verb, arguments, answer, is_late=is_late)
        if verb in BUDGET_VERBS:
            self.budgets.stored(verb, arguments, answer)
        self._compare_audit(verb, arguments, answer)

    def _note(
        self,
        link: SimLink,
        verb: str,
        arguments: tuple[Any, ...],
        answer: object,
        *,
        is_late: bool,
    ) -> None:
        note, observers = _NOTES.get(verb), self._observers.get(verb)
        if note is None and observers is None:
            return
        seen = SeenCommand(link.caller, verb, arguments, answer, is_late)
        if note is not None:
            note(self, seen)
        for each in observers or ():
            each(seen)

    def _admissions(self, seen: SeenCommand) -> None:
        """The store has admitted or refused runs."""
        rows = self._rows_of(seen) if seen.verb == "admit_many" else [seen]
        for row in rows:
            if isinstance(row.answer, Queued):
                self._queued(row.arguments[0], row.answer)
        if self.queues.queues:
            self._promoted()
        for row in rows:
            self.admitted(row)
            for each in self._observers.get("admit", ()):
                each(row)
        if rows:
            # The store has counted all of them.
            self._slots(rows[0].arguments[0].run.tenant)

    def _rows_of(self, seen: SeenCommand) -> list[SeenCommand]:
        """The admissions of one call, as if one had come after the other."""
        pairs = zip(seen.arguments[0], seen.answer, strict=True)
        return [seen._replace(verb="admit", arguments=(each,), answer=said) for each, said in pairs]

    def _promoted(self) -> None:
        """Record the runs that got a slot from the queue in this step."""
        for run in self.queues.observe(self.store.real.state, self.history):
            said = must.version_counts(run.id, before=self.runs[run.id].stamp, now=run.stamp)
            self.history.check("commits form one chain", said)
            self.runs[run.id] = run
            self.unfinished[run.tenant] += 1
            self.explained.pop(run.id, None)
            self.history.tell(f"store  promoted {run.tenant}/{run.workflow_id} {run.id}")
            self._rows([run.id])

    def _queued(self, admission: Admission, answer: Queued) -> None:
        """Record a run that waits for a slot."""
        run_id, tenant = answer.run_id, admission.run.tenant
        if run_id in self.runs:
            return
        self.history.tell(f"store  queued {tenant}/{admission.run.workflow_id} {run_id}")
        self.queues.queued(admission, answer, self.history)
        self.runs[run_id] = self.store.real.state.runs[run_id].run
        if admission.key is not None:
            self._keyed((str(tenant), admission.key), run_id)

    def _keyed(self, key: tuple[str, str], run_id: RunId) -> None:
        """Record the run of a key, which no other run has."""
        runs = self.keys[key]
        for other in [each for each in runs if gave_up_waiting(self.runs.get(each))]:
            del runs[other]
        runs[run_id] = None
        self.history.check("one run per key", must.one_run_per_key(key, runs))

    def on(self, verb: str, note: Callable[[SeenCommand], None]) -> None:
        """Call ``note`` with each execution of a command, after the checks of this ledger."""
        self._observers.setdefault(verb, []).append(note)

    @property
    def has_failed_over(self) -> bool:
        """Whether the store has lost writes on this day."""
        return self.failed_over_at_s > NEVER_S

    def is_after_failover(self) -> bool:
        """Whether the store has just failed over: what was read before it may be lost."""
        now_s = asyncio.get_running_loop().time()
        return now_s <= self.failed_over_at_s + ON_ITS_WAY_S

    def may_be_lost(self, *, asked_at_s: float) -> bool:
        """Whether a cursor that was asked for then may be sealed with a key that was lost."""
        trusted_s = KEY_TRUSTED_MS / 1_000 / 0.99  # by a clock that drifts
        return asked_at_s <= self.failed_over_at_s + trusted_s

    def _compare_audit(self, verb: str, arguments: tuple[Any, ...], answer: object) -> None:
        """Check that the audit log grew by what a person has changed, and in the same step."""
        state = self.store.real.state
        length = state.audit_removed + len(state.audit_log)
        grown, self.audit_entries = length - self.audit_entries, length
        if not grown and verb not in _AUDITING:
            self.history.checks[_AUDIT_CHECK] += 1
            return
        if verb == "post":
            is_asked = isinstance(arguments[1], Approved | Rejected | CancelRequested)
            expected = int(is_asked and answer is PostAnswer.POSTED)
        elif verb in _LETTER_VERBS:
            expected = int(answer is not None)
        elif verb in _AUDITED_VERBS:
            return
        else:
            expected = 0
        said: Iterable[str] = ()
        if grown or expected:  # To name the change costs more than to check it.
            change = f"{verb} {arguments}" if grown != expected else verb
            said = must.audited_with_the_change(change, expected=expected, grown=grown)
        self.history.check(_AUDIT_CHECK, said)

    def failed_over(self) -> None:
        """The store has lost its last writes: take over its state."""
        state = self.store.real.state
        for cadence in self.cadences.values():
            cadence.knows_ends = False
        self.audit_entries = state.audit_removed + len(state.audit_log)
        self.schedules.failed_over(state)
        self.bulks.failed_over(state)
        self.failed_over_at_s = asyncio.get_running_loop().time()
        self.jobs.failed_over(state)
        self.explained.clear()
        self.budgets.failed_over()
        self.runs = {run_id: file.run for run_id, file in state.runs.items()}
        self.keys.clear()
        for run_id, file in state.runs.items():
            if file.key is not None:
                self.keys[file.run.tenant, file.key][run_id] = None
        self.unfinished = Counter(
            run.tenant for run in self.runs.values() if run.holds_slot and run.status.uses_slot
        )
        self.queues.failed_over(state)

    def admitted(self, seen: SeenCommand) -> None:
        """Check an admission."""
        admission: Admission = seen.arguments[0]
        run, check = admission.run, self.history.check
        if isinstance(seen.answer, Full | QueueFull):
            self._refused(run.tenant)
        if not isinstance(seen.answer, Admitted) or run.id in self.runs:
            return
        self.history.tell(f"store  {seen.who.name} admit {run.tenant}/{run.workflow_id} {run.id}")
        check(
            "nothing after its deadline",
            must.nothing_after_deadline(f"run {run.id}", is_late=seen.is_late, has_changed=True),
        )
        state = self.store.real.state
        self.runs[run.id] = state.runs[run.id].run
        check("a run has its starter", must.starter_is_actor(admission.transition, run))
        if admission.definitions:
            check("versions in force", must.versions_in_force(state, self.runs[run.id]))
        if run.holds_slot and not run.status.is_finished:
            self.unfinished[run.tenant] += 1
        if admission.key is not None:
            self._keyed((str(run.tenant), admission.key), run.id)
        if run.holds_slot:
            config = state.peek(run.tenant).config
            limit = None if config is None else config.max_concurrent_runs
            active = self.unfinished[run.tenant]
            check("never above the cap", must.cap_holds(run.tenant, active, limit))
        self._reused(admission)

    def checked(self, seen: SeenCommand) -> None:
        """Check what the store has told about starts without admitting them."""
        tenant, _, keys = seen.arguments
        answer: StartsChecked = seen.answer
        if any(isinstance(each, Full | QueueFull) for each in answer.refused):
            self._refused(tenant)
        state = self.store.real.state
        bound = {
            key: [
                run_id
                for run_id in self.keys.get((str(tenant), key), ())
                if run_id in state.runs and not gave_up_waiting(self.runs.get(run_id))
            ]
            for key in keys
        }
        found = {key: record.run_id for key, record in answer.known.items()}
        said = must.known_keys_are_found(tenant, bound, found)
        self.history.check("a known key is replayed", said)

    def _refused(self, tenant: TenantId) -> None:
        self.refused_at_s[tenant] = asyncio.get_running_loop().time()
        config = self.store.real.state.peek(tenant).config or Tenant()
        limit, active = config.max_concurrent_runs, self.unfinished[tenant]
        self.history.check("full only at the cap", must.full_at_cap(tenant, active, limit))
        if tenant == "quiet":
            said = ["a tenant that asks for little was told that it is full"]
            self.history.check("other tenants untouched", said)

    def _lock_terms_ms(self, name: str) -> set[int]:
        """The terms for which this lock may be taken."""
        if name.startswith("admission/"):
            return {round(each.admission.lock_ttl_s * 1_000) for each in self.settings}
        return {self.run_ttl_ms} if name.startswith("run/") else set()

    def granted_tokens(self, seen: SeenCommand) -> None:
        """Check the terms of tokens of topic limits."""
        pool, held = seen.arguments[0], self.store.real.state.pools[seen.arguments[0].name].tokens
        self.tokens.granted(pool, held, seen.answer)

    def _reused(self, admission: Admission) -> None:
        state, run = self.store.real.state, admission.run
        old = None if run.rerun_of is None else state.runs.get(run.rerun_of)
        if old is None or self.is_after_failover():
            return  # A failover may have lost what the rerun was made from.
        lines = admission.transition.timeline
        steps = [line.step for line in lines if line.what == "step_reused" and line.step]
        self.history.check(
            "what is reused is what it was",
            must.reused_is_what_it_was(state.runs[run.id], old, steps),
        )

    def committed(self, seen: SeenCommand) -> None:
        """Check a commit."""
        commit: Commit = seen.arguments[-1]
        before, state = self.runs.get(commit.run_id), self.store.real.state
        if not isinstance(seen.answer, Committed):
            self.history.tell(f"store  {seen.who.name} {seen.verb} {commit.run_id}: {seen.answer}")
        elif before is not None and before.stamp.nonce != commit.nonce:
            after = state.runs[commit.run_id].run
            self._changed(before, commit, after)
            self.queues.changed(before, after, self.history)
            if before.holds_slot and after.status.is_finished and before.status.uses_slot:
                self.unfinished[before.tenant] -= 1
                self._freed_by[commit.run_id] = before.tenant
            self.runs[commit.run_id] = after
            self.history.tell(f"store  {seen.who.name} {_told(commit)}")
            self._slots(before.tenant)
        self._work(commit.run_id)
        self._rows([commit.run_id])

    def settled(self, seen: SeenCommand) -> None:
        """Check results that were settled, and their commit."""
        results, commit = seen.arguments
        before = self.runs.get(commit.run_id)
        if isinstance(seen.answer, Committed) and (
            before is None or before.stamp.nonce != commit.nonce
        ):
            answers = tuple(Accepted(each.job_id, commit.run_id) for each in results)
            self.jobs.accepted(seen._replace(answer=answers))
            file = self.store.real.state.runs[commit.run_id]
            said = must.settle_overtakes_nothing(commit.run_id, list(file.inbox))
            self.history.check("a settle overtakes nothing", said)
        self.committed(seen)

    def explain(self, facts: RunFacts) -> None:
        """Have a run explained, and compare it with the record; its next change is compared too."""
        run_id, found = facts.run.id, why(facts, Surroundings())
        self.history.check("why tells the truth", must.why_names_facts(facts, found))
        leases = {job_id: fence for job_id, (fence, _) in self.jobs.leases.items()}
        self.history.check("why tells the truth", must.why_is_true(facts.run, found, leases))
        self.explained[run_id] = found

    def name_waits(self, named: OldestWaits) -> None:
        """Compare the runs that are said to have waited longest with all that wait."""
        said = must.waits_are_the_oldest(self.store.real.state, named)
        self.history.check("the oldest waits are named", said)

    def _changed(self, before: Run, commit: Commit, after: Run) -> None:
        run_id, check = commit.run_id, self.history.check
        found = self.explained.pop(run_id, None)
        if found is not None:
            check("why names what happens next", must.change_was_named(before, after, found))
        check(
            "commits form one chain",
            must.chain_holds(run_id, read=commit.read, present=before.stamp),
        )
        said = must.version_counts(run_id, before=before.stamp, now=after.stamp)
        check("commits form one chain", said)
        check(
            "finished is absorbing",
            must.finished_is_absorbing(run_id, was_finished=before.status.is_finished),
        )
        if commit.fence is None:
            must_close = before.risk in _CLOSED
            check(
                "unleased only by policy",
                must.unleased_only_by_policy(run_id, must_close=must_close),
            )
        else:
            check(
                "fences rise",
                must.fence_rises(f"run {run_id}", before=before.fence, now=commit.fence),
            )
        check("changes go forward", of_core.of_transition(before, commit.transition, after))
        plan = self.plan_of(after)
        if plan is not None:
            check("delays within policy", must.timers_in_bounds(plan, commit.transition))
            check("runs are in a state that the rules lead to", of_core.of_run(plan, after))

    def loaded(self, seen: SeenCommand) -> None:
        """Check a load of a run, and give ambushes their chance."""
        if not self.ambushes or not isinstance(seen.answer, Loaded) or not seen.answer.inbox:
            return
        run_id = seen.answer.run.id
        for hold in self.locks.held_by(seen.who, run_id):
            # In the store's process: the end of such a fault waits while the store is paused.
            run = self.store.process.context.run
            self.ambushes[:] = [
                each for each in self.ambushes if not run(each, seen.who, run_id, hold)
            ]

    def taken_up(self, seen: SeenCommand) -> None:
        """Record taken outbox rows and fired timers."""
        self._rows(getattr(each, "run_id", each) for each in seen.answer)

    def fired(self, seen: SeenCommand) -> None:
        """Check that tenants took turns."""
        self.taken_up(seen)
        for fired, left in self.store.real.fired:
            self.history.check("tenants take turns", must.tenants_take_turns(fired, left))

    def receipted(self, seen: SeenCommand) -> None:
        """Check that receipts of refusals can be read when they are written."""
        tenant, receipts = seen.arguments
        kept = [each.receipts for each in self.store.real.state.receipts if each.tenant == tenant]
        said = must.receipts_are_kept(tenant, is_kept=tuple(receipts) in kept)
        self.history.check("refusals have receipts", said)

    def purge(self, seen: SeenCommand) -> None:
        """Check that only runs past their retention are removed."""
        state = self.store.real.state
        if not seen.answer:
            return
        before = Instant(self.store.clock.now() - self.retention_ms)
        removed = [run for run_id, run in self.runs.items() if run_id not in state.runs]
        self.history.check(
            "only old runs are removed",
            must.only_old_runs_removed(removed, seen.answer, before),
        )
        for run in removed:
            del self.runs[run.id]
            self.explained.pop(run.id, None)
            self.purged[run.id] = PurgedRun(run, asyncio.get_running_loop().time())
            self.jobs.forget(run.id)
        for runs in self.keys.values():
            for run_id in self.purged.keys() & runs.keys():
                del runs[run_id]
        self.history.tell(f"store  {seen.who.name} removes {len(removed)} runs")

    def told(self, seen: SeenCommand) -> None:
        """Record a command that needs no check."""
        self.history.tell(f"store  {seen.who.name} {seen.verb} {seen.arguments[0]}")

    def poisoned(self, seen: SeenCommand) -> None:
        """A failure was counted against an event; no outage may lead to that."""
        said = [f"{seen.who.name}: {seen.verb} {seen.arguments}"]
        self.history.check("poison budget untouched by outages", said)

    def patched(self, seen: SeenCommand) -> None:
        """A document was written."""
        if isinstance(seen.answer, Document) and seen.arguments[0] == "limit":
            self.jobs.limit_changed(msgspec.convert(seen.arguments[2], TopicLimit))
        if isinstance(seen.answer, Document) and seen.arguments[0] == "settings":
            settings = self.settings_in(seen.arguments[2])
            if settings is not None:
                self.settings.append(settings)

    def audited(self, seen: SeenCommand) -> None:
        """Slots were compared with runs."""
        said = [f"the audit found {drift}" for drift in seen.answer.drifts]
        self.history.check("slots equal unfinished runs", said)

    # ── What is compared with the store's state ──────────────────────────────────────────────────

    def _work(self, run_id: RunId) -> None:
        """What steps wait for is really out there, and nothing else is."""
        state = self.store.real.state
        file = state.runs.get(run_id)
        plan = None if file is None else self.plan_of(file.run)
        if file is None or plan is None or file.run.status.is_finished:
            return
        open_jobs = [
            job
            for job in file.jobs
            if state.jobs[job].state in OPEN_JOBS and job not in self.jobs.orphans
        ]
        said = of_core.of_work(
            plan, file.run, file.items.items(), open_jobs=open_jobs, timers=list(file.timers)
        )
        if file.inbox or self.jobs.orphans:
            # What has happened and is not applied yet is waited for, and not out any more.
            said = [each for each in said if each.endswith("is out and not waited for")]
        self.history.check("what is waited for is out there", sorted(said))
        self.history.check("approvals are listed", must.approvals_listed(state, file))

    def _rows(self, run_ids: Iterable[RunId]) -> None:
        state = self.store.real.state
        for run_id in run_ids:
            self.history.check(
                "one row for whatever lies in an inbox", must.inbox_has_row(state, run_id)
            )

    def _slots(self, tenant: TenantId) -> None:
        counted = self.store.real.state.peek(tenant).active
        self.history.check(
            "slots equal unfinished runs",
            must.slots_are_unfinished_runs(tenant, counted, self.unfinished[tenant]),
        )


def _told(commit: Commit) -> str:
    lines = [f"{line.what} {line.step or ''}".strip() for line in commit.transition.timeline]
    fence = "without a lease" if commit.fence is None else f"fence {commit.fence}"
    return f"commit {commit.run_id} ({fence}): {', '.join(lines)}"


_NOTES: Final[Mapping[str, Callable[[Ledger, SeenCommand], None]]] = MappingProxyType(
    {
        "check_starts": Ledger.checked,
        "commit": Ledger.committed,
        "load": Ledger.loaded,
        "settle": Ledger.settled,
        "accept": lambda ledger, seen: ledger.jobs.accepted(seen),
        "lease_jobs": lambda ledger, seen: ledger.jobs.leased(seen),
        "renew_jobs": lambda ledger, seen: ledger.jobs.renewed(seen),
        "expire_jobs": lambda ledger, seen: ledger.jobs.expired(seen),
        "take_outbox": Ledger.taken_up,
        "fire_timers": Ledger.fired,
        "put_receipts": Ledger.receipted,
        "purge": Ledger.purge,
        "post": Ledger.told,
        "replay_dead_letter": Ledger.told,
        "discard_dead_letter": Ledger.told,
        "count_failure": Ledger.poisoned,
        "write_dead_letter": Ledger.poisoned,
        "put_document": Ledger.patched,
        "audit_slots": Ledger.audited,
        "take_tokens": Ledger.granted_tokens,
    }
)
