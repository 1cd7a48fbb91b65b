"""Mutants: deliberate defects, each of which the invariants must find out.

A check that never fails proves nothing. Here is what it takes to make each of them fail: the
mistakes that systems of this kind really make, applied to the simulated world by subclassing a
server or a port, or by replacing one rule for the length of a day.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from stanchion.adapters.outcomes import SummaryBoard
from stanchion.adapters.store.memory import runs as memory_runs
from stanchion.adapters.store.memory import state as memory_state
from stanchion.adapters.store.memory.runs import carry_out
from stanchion.adapters.store.memory.state import (
    Account,
    JobFile,
    MemoryState,
    RunFile,
    RunPlaces,
    TimesInTurn,
)
from stanchion.adapters.store.sqlite import file as sqlite_file
from stanchion.core import admission, budget, escalation, lease, rerun, schedule
from stanchion.core import run as run_module
from stanchion.core import why as why_module
from stanchion.core.admission import Admitted, KeyRecord, Rate, Replayed, Verdict
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import BudgetTally, Reservation
from stanchion.core.bulk import Bulk, BulkPace
from stanchion.core.draft import Draft, ItemDraft
from stanchion.core.escalation import Escalation, EscalationState
from stanchion.core.events import Event
from stanchion.core.expression import Expression, Template
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import (
    AcquireDecision,
    AcquireOutcome,
    LeasePolicy,
    LeaseTerms,
    ProceedLocal,
)
from stanchion.core.model import (
    Instant,
    Item,
    JobId,
    Run,
    RunId,
    RunStatus,
    StepId,
    StepStatus,
    TenantId,
    WorkflowId,
    WorkflowSource,
)
from stanchion.core.plan import Plan, PlannedStep
from stanchion.core.queue import QueueRequest
from stanchion.core.receipts import Receipt
from stanchion.core.retry import RetryClass
from stanchion.core.schedule import MissedTick, Schedule
from stanchion.core.topic_limits import TokenPool, TokenRenewal
from stanchion.core.transition import DispatchJob
from stanchion.core.why import Finding, RunFacts, WhyCode
from stanchion.ports.bus import Disposition, Handler, Retry
from stanchion.ports.errors import BackendError
from stanchion.ports.locks import AcquireAnswer, Granted, LockReleased, NotOwned, Renewed
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    Admission,
    Commit,
    CommitAnswer,
    Committed,
    ExpiredJob,
    FeedEntry,
    JobLease,
    JobState,
    OutboxRow,
    PostAnswer,
    Renewals,
    Result,
    RunIndex,
    RunSummary,
    SettleAnswer,
    StartsChecked,
    StartTerms,
)
from stanchion.services import schedules as schedule_service
from stanchion.services.bulk import BulkService, NewBulk
from stanchion.services.limiter import SharedChecks, StartFound, TenantLimiter
from stanchion.services.settings import RulesInForce, SettingsService
from stanchion.sim.bus import BusPort
from stanchion.sim.replica import Mutant
from stanchion.sim.servers import LockPort, SimLocks, SimStore

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.workload import Callers

__all__ = ["ALL"]


# ── Timers ──────────────────────────────────────────────────────────────────────────────────────

_put, _remove = TimesInTurn.put, TimesInTurn.remove


def _put_into_one_line(
    times: TimesInTurn[object], _tenant: TenantId, thing: object, due: Instant
) -> None:
    _put(times, TenantId("all"), thing, due)


def _remove_from_one_line(times: TimesInTurn[object], _tenant: TenantId, thing: object) -> None:
    _remove(times, TenantId("all"), thing)


@contextmanager
def _one_line_for_all() -> Iterator[None]:
    put = _patched(TimesInTurn, "put", _put_into_one_line)
    with put(), _patched(TimesInTurn, "remove", _remove_from_one_line)():
        yield


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────


def _timer_of_written_run() -> str:
    """The triggers of SQLite, of which that of a timer reads the tenant from the row of its run."""
    text = sqlite_file._TOGETHER  # noqa: SLF001 - the triggers as they are, but for one
    given = "NEW.tenant, NEW.step_id, NEW.key, NEW.due, NEW.timer\n        WHERE"
    assert given in text
    read = "tenant, NEW.step_id, NEW.key, NEW.due, NEW.timer FROM runs WHERE run = NEW.run AND"
    return text.replace(given, read)


# ── The queue ────────────────────────────────────────────────────────────────────────────────────

_promote = MemoryState.promote


def _promotes_nobody(_state: MemoryState, _tenant: TenantId) -> tuple[RunId, ...]:
    return ()


def _promotes_again(state: MemoryState, tenant: TenantId) -> tuple[RunId, ...]:
    """A promoted run stays in the queue, and gets another slot."""
    promoted = _promote(state, tenant)
    for run_id in promoted:
        state.account(tenant).queue.add(run_id, QueueRequest())
    return promoted


def _promotes_the_last(state: MemoryState, tenant: TenantId) -> tuple[RunId, ...]:
    """The run that came last is first."""
    queue = state.account(tenant).queue
    for run_id in list(queue)[:-1]:
        queue.remove(run_id)
        queue.add(run_id, QueueRequest())
    return _promote(state, tenant)


def _ends_promote(_applied: Collection[str], status: RunStatus) -> bool:
    """The first decision of a promoted run does not promote the next."""
    return status.is_finished


# ── Locks ────────────────────────────────────────────────────────────────────────────────────────


class _AnybodyReleases(SimLocks):
    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:  # noqa: ARG002 - the defect
        return LockReleased() if self._holders.pop(name, None) is not None else NotOwned()


class _Counting(SimLocks):
    """Fences by INCR: a counter in memory, gone with it."""

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        before = self._fences.get(name, 0)
        holder = self._present(name)
        answer = await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor)
        if not isinstance(answer, Granted):
            return answer
        fence = before if holder is not None and before > floor else max(before, floor) + 1
        self._fences[name] = self._holders[name].fence = fence
        return Granted(fence)


class _LateGrants(SimLocks):
    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        return await super().acquire(
            name, token, ttl_ms=ttl_ms, within_ms=max(0, within_ms), floor=floor
        )


class _DeafToNotOwned(LockPort):
    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        await super().renew(name, token, ttl_ms=ttl_ms, within_ms=within_ms)
        return Renewed()


class _NoFloor(LockPort):
    async def acquire(
        self,
        name: str,
        token: str,
        *,
        ttl_ms: int,
        within_ms: int,
        floor: int = 0,  # noqa: ARG002 - the defect
    ) -> AcquireAnswer:
        return await super().acquire(name, token, ttl_ms=ttl_ms, within_ms=within_ms)


def _for_ever(_terms: LeaseTerms) -> int:
    return 10**9


def _always_open(
    outcome: AcquireOutcome, policy: LeasePolicy, *, escalated: bool
) -> AcquireDecision:
    decision = _on_acquire(outcome, policy, escalated=escalated)
    return ProceedLocal(decision.error) if isinstance(decision, lease.Refuse) else decision


_on_acquire: Final = lease.on_acquire


# ── The store ────────────────────────────────────────────────────────────────────────────────────


class _VersionOnly(SimStore):
    async def commit(self, commit: Commit) -> CommitAnswer:
        file = self._state.runs.get(commit.run_id)
        if file is not None and file.run.stamp.version == commit.read.version:
            commit = replace(commit, read=file.run.stamp)
        return await super().commit(commit)


class _NoFenceCheck(SimStore):
    async def commit(self, commit: Commit) -> CommitAnswer:
        file = self._state.runs.get(commit.run_id)
        is_stale = file is not None and commit.fence is not None and commit.fence < file.run.fence
        if not is_stale:
            return await super().commit(commit)
        answer = await super().commit(replace(commit, fence=None))
        if isinstance(answer, Committed) and file is not None:
            file.run = replace(file.run, fence=commit.fence or 0)
        return answer


class _SourceForgotten(SimStore):
    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        run = replace(admission.run, workflow_source=WorkflowSource.OWN)
        return await super().admit(replace(admission, run=run), within_ms=within_ms)


def _moved_only_in(places: RunPlaces, run: Run, was: RunStatus) -> None:
    if run.status is not was:
        places._put(run, RunIndex.STATUS, run.status)  # noqa: SLF001 - half of what it should do


def _unpinned(state: MemoryState, account: Account, name: WorkflowId) -> int:
    config = account.config and replace(account.config, workflows={})
    return _version_in_force(state, dataclasses.replace(account, config=config), name)


_version_in_force: Final = MemoryState.version_in_force


class _SlotLater(SimStore):
    """The slot is freed in a second step, a moment after the run has ended."""

    async def commit(self, commit: Commit) -> CommitAnswer:
        file = self._state.runs.get(commit.run_id)
        was_open = file is not None and not file.is_closed and file.run.holds_slot
        answer = await super().commit(commit)
        if file is not None and was_open and file.is_closed:
            account = self._state.account(file.run.tenant)
            account.active += 1
            asyncio.get_running_loop().call_later(0.005, self._free, file.run.tenant)
        return answer

    def _free(self, tenant: TenantId) -> None:
        self._state.account(tenant).active -= 1


class _TickTwice(SimStore):
    """Neither mark nor key tells that a tick has its run."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        if admission.tick is not None:
            key = f"{admission.key} {admission.run.id}"
            admission = replace(admission, tick=None, key=key)
        return await super().admit(admission, within_ms=within_ms)


class _BulkTwice(SimStore):
    """A rerun by a bulk action has a new key each time, so that a repeat is another run."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        if admission.key is not None and admission.key.startswith("bulk "):
            admission = replace(admission, key=f"{admission.key} {admission.run.id}")
        return await super().admit(admission, within_ms=within_ms)


class _ChangeWithoutEntry(SimStore):
    async def post(
        self,
        run_id: RunId,
        event: Event,
        *,
        entry_id: str,
        audit: AuditEntry | None = None,  # noqa: ARG002 - the defect
    ) -> PostAnswer:
        return await super().post(run_id, event, entry_id=entry_id)


class _ReceiptsLost(SimStore):
    async def put_receipts(
        self, tenant: TenantId, receipts: Sequence[Receipt], *, batch_id: str
    ) -> None:
        pass


class _KeyLater(SimStore):
    """The key is looked up in one step and bound to its run in another."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        verdict = await super().admit(admission, within_ms=within_ms)
        if isinstance(verdict, Admitted) and admission.key is not None:
            tenant, key = admission.run.tenant, admission.key
            bound = self._state.account(tenant).keys.pop(key, None)
            if bound is not None:
                keys = self._state.account(tenant).keys
                asyncio.get_running_loop().call_later(0.01, keys.setdefault, key, bound)
        return verdict


class _BatchReadOnce(SimStore):
    """All rows of a batch are judged by the keys that were known before the first."""

    async def admit_many(
        self, admissions: Sequence[Admission], *, within_ms: int
    ) -> tuple[Verdict, ...]:
        keys = self._state.account(admissions[0].run.tenant).keys
        known, verdicts, bound = {*keys}, list[Verdict](), dict[str, Any]()
        for each in admissions:
            bound |= {key: keys.pop(key) for key in [*keys] if key not in known}
            verdicts.append(await self.admit(each, within_ms=within_ms))
        keys |= bound
        return tuple(verdicts)


class _NoKeysChecked(SimStore):
    """Starts of a full tenant are checked without a look at their keys."""

    async def check_starts(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked:
        return replace(await super().check_starts(tenant, terms, keys), known={})


async def _check_once(
    checks: SharedChecks, tenant: TenantId, terms: StartTerms, key: str | None
) -> StartFound | None:
    """A refusal is kept, and told to the callers of the next two seconds."""
    kept: dict[TenantId, tuple[float, StartFound]] = vars(checks).setdefault("kept", {})
    told_s, found = kept.get(tenant, (-10.0, None))
    now_s = asyncio.get_running_loop().time()
    if found is None or now_s - told_s > 2.0:
        found = await _check(checks, tenant, terms, key)
        if found is not None and found.known is None and found.refused is not None:
            kept[tenant] = (now_s, found)
    return found


_check: Final = SharedChecks.check


class _CapRead(SimStore):
    """The cap is compared with a count that was read a moment ago."""

    def __init__(self, clock: Any) -> None:  # noqa: ANN401 - as in the class it is from
        super().__init__(clock)
        self._seen: dict[TenantId, tuple[float, int]] = {}

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        tenant, now_s = admission.run.tenant, asyncio.get_running_loop().time()
        account = self._state.account(tenant)
        read_s, active = self._seen.get(tenant, (-1.0, 0))
        if now_s - read_s > 2.0:
            active = account.active
            self._seen[tenant] = (now_s, active)
        really, account.active = account.active, min(active, account.active)
        before = account.active
        try:
            return await super().admit(admission, within_ms=within_ms)
        finally:
            account.active = really + account.active - before


class _LateAdmits(SimStore):
    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        return await super().admit(admission, within_ms=max(0, within_ms))


class _AnyFence(SimStore):
    """A result is taken from whoever had the job at some time."""

    async def accept(
        self,
        results: Sequence[Result],
        *,
        row_due_in_ms: int = 0,
        tenant: TenantId | None = None,
    ) -> tuple[Acceptance, ...]:
        taken: list[Result] = []
        for result in results:
            file = self._state.jobs.get(result.job_id)
            is_open = file is not None and file.state in {JobState.LEASED, JobState.READY}
            if file is not None and is_open and file.fence != result.fence:
                taken.append(replace(result, fence=file.fence))
            else:
                taken.append(result)
        return await super().accept(taken, row_due_in_ms=row_due_in_ms, tenant=tenant)


class _SettlesForAnybody(SimStore):
    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        jobs = [self._state.jobs.get(each.job_id) for each in results]
        present = [
            each if job is None else replace(each, fence=job.fence)
            for each, job in zip(results, jobs, strict=True)
        ]
        return await super().settle(present, commit)


class _SettlesPastTheInbox(SimStore):
    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        file = self._state.runs.get(commit.run_id)
        if file is None or not file.inbox:
            return await super().settle(results, commit)
        waiting = {key: each for key, each in file.inbox.items() if key not in commit.applied}
        file.inbox = {}
        due = self._state.outbox.due(commit.run_id)
        answer = await super().settle(results, commit)
        if not file.is_closed:
            file.inbox = waiting
            if due is not None:
                self._state.outbox.put(commit.run_id, due)
        return answer


class _SettlesUnread(SimStore):
    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        file = self._state.runs.get(commit.run_id)
        present = commit if file is None else replace(commit, read=file.run.stamp)
        return await super().settle(results, present)


class _SettlesHalf(SimStore):
    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        return await super().settle(results[: max(1, len(results) // 2)], commit)


class _Forgetful(SimStore):
    """A row that was taken is gone: whoever took it will see to it."""

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        rows = await super().take_outbox(limit=limit, hold_ms=hold_ms)
        for row in rows:
            self._state.outbox.remove(row.run_id)
        return rows


class _OneSummary(SimStore):
    """The summary of the last replica takes the place of all others."""

    async def report_replica(self, replica: str, summary: JsonValue, *, keep_ms: int) -> Instant:
        self._state.summaries = SummaryBoard()
        return await super().report_replica(replica, summary, keep_ms=keep_ms)


def _no_retry(*_facts: object) -> Finding:
    return Finding(code=WhyCode.DELAY_PENDING, detail="", remedy="")


class _OldFacts(SimStore):
    """Facts about a run are remembered, and told again after the run has changed."""

    def __init__(self, clock: Any) -> None:  # noqa: ANN401 - as in the class it is from
        super().__init__(clock)
        self._kept: dict[RunId, RunFacts | None] = {}

    async def run_facts(self, run_id: RunId) -> RunFacts | None:
        if run_id not in self._kept:
            self._kept[run_id] = await super().run_facts(run_id)
        return self._kept[run_id]


class _OnceOnly(SimStore):
    """A row that was taken is never due again: whoever took it will see to it."""

    async def take_outbox(self, *, limit: int, hold_ms: int) -> tuple[OutboxRow, ...]:
        return await super().take_outbox(limit=limit, hold_ms=1_000 * hold_ms)


class _Early(SimStore):
    """Work is put out before the commit that asks for it is accepted."""

    async def commit(self, commit: Commit) -> CommitAnswer:
        file = self._state.runs.get(commit.run_id)
        if file is not None and not file.is_closed:
            jobs = [each for each in commit.transition.effects if isinstance(each, DispatchJob)]
            carry_out(self._state, file, jobs)
        return await super().commit(commit)


class _OldListing(SimStore):
    """Leases are ended by a list that was made a moment ago: a renewal meanwhile is not seen."""

    def __init__(self, clock: Any) -> None:  # noqa: ANN401 - as in the class it is from
        super().__init__(clock)
        self._listed: dict[JobId, Instant] = {}

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        now = self._state.now()
        for job_id, until in self._listed.items():
            file = self._state.jobs.get(job_id)
            if until <= now and file is not None and file.state is JobState.LEASED:
                self._state.leases.put(job_id, now)
        self._listed = {
            job_id: file.expires_at
            for job_id, file in self._state.jobs.items()
            if file.expires_at is not None
        }
        return await super().expire_jobs(limit=limit, max_deliveries=max_deliveries)


class _TokensLost(SimStore):
    """Tokens are lost when they get the names of their jobs."""

    async def renew_tokens(
        self, pool: TokenPool, tokens: Mapping[str, str], *, ttl_ms: int
    ) -> TokenRenewal:
        renewal = await super().renew_tokens(pool, tokens, ttl_ms=ttl_ms)
        lost = [name for held, name in tokens.items() if held != name]
        await self.release_tokens(pool, lost)
        return renewal


# ── Services and SDKs ────────────────────────────────────────────────────────────────────────────


def _accepts_blindly(replica: Replica) -> None:
    """Workers are told "accepted" before the result is durable."""
    inbox = replica.services.inbox
    really = inbox.results
    waiting: set[asyncio.Task[object]] = set()

    async def store(results: Sequence[Result], tenant: TenantId | None) -> None:
        await asyncio.sleep(0.05)
        try:
            await really(results, tenant=tenant)
        except BackendError:
            return

    async def results(
        results: Sequence[Result], *, tenant: TenantId | None = None
    ) -> tuple[Acceptance, ...]:
        task: asyncio.Task[object] = asyncio.create_task(store(results, tenant))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        return tuple(
            Accepted(each.job_id, RunId(each.job_id.partition(":")[0])) for each in results
        )

    vars(inbox)["results"] = results


class _WildRetries(BusPort):
    """Jitter without bounds."""

    async def consume(self, handle: Handler, *, at_once_max: int) -> None:
        async def wild(row: OutboxRow) -> Disposition:
            said = await handle(row)
            return Retry(said.delay_ms * 3) if isinstance(said, Retry) else said

        await super().consume(wild, at_once_max=at_once_max)


async def _reads_no_more(_service: SettingsService) -> None:
    """Leave the settings as they were read at the beginning."""
    await asyncio.Event().wait()


def _renews_no_tokens(replica: Replica) -> None:
    """A lease is renewed, and its tokens are not."""
    limits, store = replica.services.limits, replica.services.store
    ttl_ms = replica.services.scheduler.ttl_ms

    async def renew(leases: Sequence[JobLease], *, tenant: TenantId | None) -> Renewals:
        return await store.renew_jobs(leases, ttl_ms=ttl_ms, tenant=tenant)

    vars(limits)["renew"] = renew


def _boundless(callers: Callers) -> None:
    """Every retry finds a token."""

    def take(_retry_class: RetryClass, _now: Instant) -> bool:
        return True

    vars(callers.budgets)["take"] = take


def _not_returned(_state: MemoryState, file: RunFile) -> None:
    file.reservations.clear()


def _added_up(_before: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    return dict(told)


def _in_any_window(
    tally: BudgetTally | None, reservation: Reservation, amount: int
) -> tuple[BudgetTally | None, Reservation]:
    if tally is not None:
        reservation = replace(reservation, generation=tally.generation)
    return budget.charge(tally, reservation, amount)


def _handled_in_silence(given: Schedule, missed: tuple[MissedTick, ...]) -> Schedule:
    """Of several missed ticks only the last is listed."""
    return _with_missed(given, missed[-1:])


_with_missed: Final = schedule.with_missed


async def _settled_when_taken(
    service: BulkService, bulk: Bulk, revision: int
) -> tuple[Bulk, int] | None:
    if bulk.holder != service._replica and bulk.open:  # noqa: SLF001 - the defect
        bulk = replace(bulk, done=bulk.done + len(bulk.open) + 1, open=())
    return await _write(service, bulk, revision)


_write: Final = BulkService.write


def _take_nothing(_pace: BulkPace, _count: int) -> None:
    """Use up nothing."""


async def _without_the_newest(
    service: BulkService, wanted: NewBulk, now: Instant
) -> AsyncIterator[Sequence[RunSummary]]:
    async for page in _matching(service, wanted, now):
        yield page[1:]


_matching: Final = BulkService._matching  # noqa: SLF001 - the rule that the defect replaces


def _seen_within_a_slice(settings: Escalation, state: EscalationState) -> bool:
    return state.clock - state.observed_at <= settings.slice_ms


def _without_output(item: Item) -> Item:
    return replace(_reused(item), output=None)


_reused: Final = rerun._reused  # noqa: SLF001 - the rule that the defect replaces


def _newest(self: RunPlaces, tenant: TenantId | None, status: RunStatus) -> RunId | None:
    places = self._places.get((tenant, RunIndex.STATUS, status))
    return RunId(places[-1][1]) if places else None


# ── Meaning, terms and what is left ──────────────────────────────────────────────────────────────

_end_step, _evaluate, _leave_limiter = Draft.end, Draft.evaluate, TenantLimiter.leave


def _backwards(draft: Draft, step: PlannedStep, status: StepStatus, **how: Any) -> None:  # noqa: ANN401 - passed on
    if isinstance(how.get("output"), list):
        how["output"] = how["output"][::-1]
    _end_step(draft, step, status, **how)


def _never_false(draft: Draft, step: PlannedStep, expression: Expression | Template) -> JsonValue:
    value = _evaluate(draft, step, expression)
    return True if value is False else value


def _only_the_first(plan: Plan, first: Iterable[tuple[StepId, bool]]) -> frozenset[StepId]:  # noqa: ARG001 - the defect
    return frozenset(step_id for step_id, _ in first)


def _any_input(known: KeyRecord, fingerprint: str) -> Verdict:  # noqa: ARG001 - the defect
    return Replayed(known.run_id)


def _sometimes_leave(limiter: TenantLimiter, tenant: TenantId) -> None:
    if tenant != "globex":
        _leave_limiter(limiter, tenant)


class _SkipsALine(SimStore):
    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        entries = await super().feed(tenant, after=after, limit=limit)
        return entries[1:] if len(entries) == limit > 1 else entries


class _StandsStill(SimStore):
    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        return () if limit == 1 else await super().feed(tenant, after=after, limit=limit)


class _LongTerms(SimStore):
    def _begin_term(self, file: JobFile, ttl_ms: int) -> Instant:
        return super()._begin_term(file, ttl_ms + 1_000)


class _PurgesEarly(SimStore):
    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        return await super().purge(finished_before=Instant(finished_before + 9_000), limit=limit)


def _patched(
    where: ModuleType | type, name: str, by: object
) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def applied() -> Iterator[None]:
        really = getattr(where, name)
        setattr(where, name, by)
        try:
            yield
        finally:
            setattr(where, name, really)

    return applied


ALL: Final = (
    Mutant(
        name="release-without-token",
        says="any caller can release a lock",
        locks=_AnybodyReleases,
    ),
    Mutant(name="fence-by-incr", says="fences are counted in memory", locks=_Counting),
    Mutant(
        name="version-without-nonce",
        says="compare-and-set by version alone",
        store=_VersionOnly,
        profile="failover",
    ),
    Mutant(name="no-fence-check", says="a stale holder may commit", store=_NoFenceCheck),
    Mutant(
        name="count-only-fencing",
        says="trust ends by failed renewals alone, not by the deadline",
        applied=_patched(LeaseTerms, "trusted_ms", property(_for_ever)),
    ),
    Mutant(
        name="renewal-ignores-not-owned",
        says="the reply 'not owned' counts as a renewal",
        lock_port=_DeafToNotOwned,
    ),
    Mutant(
        name="acquire-without-floor",
        says="a holder whose fence is below the run's acquires the same fence again",
        lock_port=_NoFloor,
    ),
    Mutant(
        name="fail-open-for-all",
        says="every class works without a lock",
        applied=_patched(lease, "on_acquire", _always_open),
    ),
    Mutant(
        name="late-grant",
        says="a grant is made after its caller's deadline",
        locks=_LateGrants,
    ),
    Mutant(
        name="late-admit",
        says="a run is admitted after its caller's deadline",
        store=_LateAdmits,
    ),
    Mutant(
        name="known-key-told-full",
        says="starts of a full tenant are refused together, also those of known keys",
        store=_NoKeysChecked,
    ),
    Mutant(
        name="refusal-kept",
        says="a refusal is told to callers that ask after it",
        applied=_patched(SharedChecks, "check", _check_once),
    ),
    Mutant(
        name="forget-the-waiter",
        says="the step that frees a slot promotes no run",
        applied=_patched(MemoryState, "promote", _promotes_nobody),
        profile="queue",
    ),
    Mutant(
        name="promote-twice",
        says="a promoted run stays in the queue",
        applied=_patched(MemoryState, "promote", _promotes_again),
        profile="queue",
    ),
    Mutant(
        name="last-come-first-served",
        says="the queue is served from its tail, without priorities and turns",
        applied=_patched(MemoryState, "promote", _promotes_the_last),
        profile="queue",
    ),
    Mutant(
        name="promotion-stops-half-way",
        says="what a step has left to promote waits for the next end",
        applied=_patched(memory_runs, "goes_on", _ends_promote),
        profile="queue",
    ),
    Mutant(name="slot-freed-later", says="the slot is freed in a second step", store=_SlotLater),
    Mutant(
        name="listed-as-it-was",
        says="a run stays in the list of the status that it had",
        applied=_patched(RunPlaces, "move", _moved_only_in),
    ),
    Mutant(
        name="source-not-recorded",
        says="a run of a shared workflow is stored as one of its tenant's own",
        store=_SourceForgotten,
    ),
    Mutant(
        name="pin-ignored",
        says="a tenant runs the newest shared version in place of the one it pins",
        applied=_patched(MemoryState, "version_in_force", _unpinned),
    ),
    Mutant(
        name="key-reserved-apart",
        says="key and run are written in two steps",
        store=_KeyLater,
    ),
    Mutant(
        name="tick-twice",
        profile="operators",
        says="a tick of a schedule is started by every replica that sees it",
        store=_TickTwice,
    ),
    Mutant(
        name="tick-forgotten",
        profile="operators",
        says="of several missed ticks only the last is listed",
        applied=_patched(schedule_service, "with_missed", _handled_in_silence),
    ),
    Mutant(
        name="bulk-acts-twice",
        profile="operators",
        says="after a crash, a bulk action reruns a run that it has rerun before",
        store=_BulkTwice,
    ),
    Mutant(
        name="bulk-settles-taken",
        profile="operators",
        says="runs that a bulk action has taken count as settled after a crash",
        applied=_patched(BulkService, "write", _settled_when_taken),
    ),
    Mutant(
        name="bulk-without-rate",
        profile="operators",
        says="a bulk action acts as fast as it can",
        applied=_patched(BulkPace, "take", _take_nothing),
    ),
    Mutant(
        name="bulk-forgets-own",
        profile="operators",
        says="a bulk action leaves out the newest run that matches",
        applied=_patched(BulkService, "_matching", _without_the_newest),
    ),
    Mutant(
        name="looks-as-unseen",
        says="a slice shorter than the time between two looks is never quiet",
        profile="outage",
        applied=_patched(escalation, "_is_seen", _seen_within_a_slice),
    ),
    Mutant(
        name="never-recovers",
        says="escalation ends only by an operator",
        profile="outage",
        applied=_patched(escalation, "_is_well_again", lambda _settings, _state: False),
    ),
    Mutant(
        name="escalation-unheeded",
        says="an escalated replica goes on without a lock",
        profile="outage",
        applied=_patched(RulesInForce, "closes", lambda _rules, _risk: False),
    ),
    Mutant(
        name="change-without-entry",
        says="a decision is recorded and its audit entry is not",
        store=_ChangeWithoutEntry,
    ),
    Mutant(
        name="receipts-lost",
        says="receipts of refusals are acknowledged and not stored",
        store=_ReceiptsLost,
    ),
    Mutant(
        name="batch-read-once",
        says="the rows of a batch do not know the keys of those before them",
        store=_BatchReadOnce,
    ),
    Mutant(name="cap-read-before", says="the cap is checked on an old count", store=_CapRead),
    Mutant(
        name="limit-token-lost",
        says="the token of a lease is lost when it gets the name of the job",
        store=_TokensLost,
    ),
    Mutant(
        name="token-not-renewed",
        says="a lease is renewed, and its tokens expire",
        on_replica=_renews_no_tokens,
    ),
    Mutant(
        name="ack-before-commit",
        says="a result is accepted before it is durable",
        on_replica=_accepts_blindly,
    ),
    Mutant(
        name="publish-before-commit",
        says="jobs are visible before the commit that creates them",
        store=_Early,
    ),
    Mutant(name="outbox-forgets", says="a row is deleted when it is read", store=_Forgetful),
    Mutant(
        name="relay-never-again",
        says="a row that is due again is not published again",
        store=_OnceOnly,
    ),
    Mutant(
        name="one-summary-for-all",
        says="a replica's summary replaces those of the others",
        store=_OneSummary,
    ),
    Mutant(
        name="old-facts",
        says="a run is explained by facts that were true before",
        store=_OldFacts,
    ),
    Mutant(
        name="newest-wait-named",
        says="of the queued runs the one is named that was created last",
        applied=_patched(RunPlaces, "oldest", _newest),
    ),
    Mutant(
        name="why-without-retries",
        says="a step that waits for its next attempt is not named",
        applied=_patched(why_module, "_retry", _no_retry),
    ),
    Mutant(
        name="result-from-anybody",
        says="results are accepted with any fence",
        store=_AnyFence,
    ),
    Mutant(
        name="settle-fence-not-checked",
        says="results are settled with any fence of their jobs",
        store=_SettlesForAnybody,
    ),
    Mutant(
        name="settle-inbox-not-checked",
        says="results are settled although other events wait",
        store=_SettlesPastTheInbox,
    ),
    Mutant(
        name="settle-stamp-not-checked",
        says="results are settled although the run has changed",
        store=_SettlesUnread,
    ),
    Mutant(
        name="settle-half-a-batch",
        says="the transition is written, and only half of its results are accepted",
        store=_SettlesHalf,
    ),
    Mutant(
        name="reconciler-without-recheck",
        says="job leases are expired from a stale list",
        store=_OldListing,
    ),
    Mutant(
        name="jitter-out-of-bounds",
        says="retry delays are outside their window",
        bus_port=_WildRetries,
    ),
    Mutant(
        name="settings-read-once",
        says="a replica reads the settings when it begins, and not again",
        applied=_patched(SettingsService, "run", _reads_no_more),
    ),
    Mutant(
        name="item-stops-others",
        says="a step of an item that ran out of time revokes the jobs of all items",
        applied=_patched(ItemDraft, "stop", Draft.stop),
    ),
    Mutant(
        name="rerun-loses-output",
        says="an item that a rerun keeps has no output",
        applied=_patched(rerun, "_reused", _without_output),
    ),
    Mutant(
        name="reserve-without-release",
        says="a run that ends keeps what it has reserved",
        applied=_patched(MemoryState, "settle_budgets", _not_returned),
    ),
    Mutant(
        name="usage-charged-twice",
        says="the reports of a job are added up",
        applied=_patched(memory_state, "new_usage", _added_up),
    ),
    Mutant(
        name="charged-to-any-window",
        says="what a run uses is charged to the present window, not to that of its reservation",
        applied=_patched(memory_state, "charge", _in_any_window),
    ),
    Mutant(
        name="items-backwards",
        says="the outputs of items are collected from the last to the first",
        applied=_patched(Draft, "end", _backwards),
    ),
    Mutant(
        name="condition-never-false",
        says="a step whose condition is false runs",
        applied=_patched(Draft, "evaluate", _never_false),
    ),
    Mutant(
        name="rerun-keeps-dependants",
        says="a rerun from a step keeps the steps that depend on it",
        applied=_patched(rerun, "_built_on", _only_the_first),
    ),
    Mutant(
        name="queued-rerun-without-items",
        says="a rerun that was queued begins without the items that it keeps",
        profile="queue",
        applied=_patched(run_module, "_items_kept", lambda _plan, _run: {}),
    ),
    Mutant(
        name="key-for-any-input",
        says="a key is replayed for another input",
        applied=_patched(admission, "judge_key", _any_input),
    ),
    Mutant(
        name="feed-skips-a-line",
        says="a page of the feed that is full begins one commit too late",
        store=_SkipsALine,
    ),
    Mutant(
        name="feed-stands-still",
        says="a stream of events that asks for one commit gets none",
        store=_StandsStill,
    ),
    Mutant(
        name="place-not-given-back",
        says="calls of a tenant keep their places in the limiter",
        applied=_patched(TenantLimiter, "leave", _sometimes_leave),
    ),
    Mutant(
        name="term-too-long",
        says="a job is leased for longer than its term",
        store=_LongTerms,
    ),
    Mutant(
        name="purged-early",
        says="runs are removed before their retention is over",
        store=_PurgesEarly,
    ),
    Mutant(
        name="rate-ignored",
        says="single jobs are admitted above their tenant's rate",
        applied=_patched(Rate, "spent_until", lambda _rate, now: now),
    ),
    Mutant(
        name="timers-by-time-alone",
        says="the timers of one tenant fire before those of others that are due later",
        applied=_one_line_for_all,
    ),
    Mutant(
        name="timer-of-written-run",
        profile="sqlite",
        says="a timer is dropped if the row of its run is written later in the same batch",
        applied=_patched(sqlite_file, "_TOGETHER", _timer_of_written_run()),
    ),
    Mutant(
        name="retry-without-budget",
        says="callers retry without a budget",
        on_callers=_boundless,
    ),
)
