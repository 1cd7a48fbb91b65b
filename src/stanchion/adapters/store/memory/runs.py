"""Runs in memory: admission, commits and their effects, the inbox, and lists."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from stanchion.adapters.cursor import RunPage, read_cursor, write_cursor
from stanchion.adapters.outcomes import by_place, dead_work, first_of_steps, queued_admission
from stanchion.adapters.store.memory.jobs import end_job, is_held
from stanchion.adapters.store.memory.state import (
    Account,
    JobFile,
    Key,
    MemoryPart,
    MemoryState,
    RunFile,
)
from stanchion.core.admission import (
    Admitted,
    Facts,
    KeyRecord,
    Queued,
    Rate,
    Verdict,
    judge,
    refusal,
)
from stanchion.core.audit import AuditEntry
from stanchion.core.budget import over_budget
from stanchion.core.commit import (
    Apply,
    CommitAnswer,
    Committed,
    Gone,
    SettleAnswer,
    SettleMiss,
    SettleMissed,
    judge_commit,
    judge_settle,
)
from stanchion.core.events import Event, Timer
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    PendingApproval,
    Run,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    TenantId,
)
from stanchion.core.queue import OnFull, QueuePlace, frees_key, goes_on
from stanchion.core.run import evolve
from stanchion.core.transition import (
    ClearTimer,
    CloseApproval,
    DispatchJob,
    Effect,
    OpenApproval,
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
    Transition,
)
from stanchion.core.why import (
    JOBS_LOOKED_AT_MAX,
    LETTERS_LOOKED_AT_MAX,
    TIMERS_LOOKED_AT_MAX,
    OpenJob,
    OpenJobState,
    PendingTimer,
    RunFacts,
    decided_steps,
)
from stanchion.ports.records import (
    EVERY_RUN,
    Admission,
    Commit,
    FeedEntry,
    InboxEntry,
    JobState,
    Loaded,
    OldestWaits,
    Page,
    PostAnswer,
    Result,
    RunFilter,
    RunSummary,
    StartsChecked,
    StartTerms,
    Tenant,
)

_DEFAULTS = Tenant()
_OPEN = {JobState.READY: OpenJobState.READY, JobState.LEASED: OpenJobState.LEASED}


class MemoryRuns(MemoryPart):
    """See ``ports.store.Runs``."""

    admissions_max = 100

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        self._state.promote(admission.run.tenant)
        return self._admit(admission, within_ms)

    async def admit_many(
        self, admissions: Sequence[Admission], *, within_ms: int
    ) -> tuple[Verdict, ...]:
        # One step, because ``admit`` never waits. The first one promotes.
        first = [await self.admit(each, within_ms=within_ms) for each in admissions[:1]]
        return (*first, *(self._admit(each, within_ms) for each in admissions[1:]))

    def _admit(self, admission: Admission, within_ms: int) -> Verdict:
        facts = self._facts(admission, within_ms)
        verdict = judge(facts)
        if isinstance(verdict, Admitted) and not facts.exists:
            self._begin(admission, facts)
        elif isinstance(verdict, Queued) and not facts.exists:
            return self._enqueue(admission, facts)
        return verdict

    def prepare_admissions(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        return admissions

    async def check_starts(
        self, tenant: TenantId, terms: Sequence[StartTerms], keys: Collection[str]
    ) -> StartsChecked:
        account, now = self._state.peek(tenant), self._state.now()
        found = ((key, _key_record(account, key, now)) for key in keys)
        return StartsChecked(
            tuple(refusal(self._facts_of(tenant, each, now)) for each in terms),
            {key: record for key, record in found if record is not None},
        )

    async def load(self, run_id: RunId) -> Loaded | None:
        file = self._state.runs.get(run_id)
        if file is None:
            return None
        return Loaded(file.run, tuple(InboxEntry(*each) for each in file.inbox.items()))

    async def run_facts(self, run_id: RunId) -> RunFacts | None:
        file, state = self._state.runs.get(run_id), self._state
        if file is None:
            return None
        timers = (PendingTimer(timer, due) for timer, due in file.timers.items())
        letters = [state.letters[letter_id] for letter_id in file.letters]
        return RunFacts(
            at=state.now(),
            run=file.run,
            inbox=len(file.inbox),
            decided=decided_steps(file.inbox.values()),
            failures=max((file.failures.get(entry, 0) for entry in file.inbox), default=0),
            next_try_at=state.outbox.due(run_id),
            jobs=self._open_jobs(file),
            timers=tuple(
                sorted(timers, key=lambda each: (each.due, each.timer.key))[:TIMERS_LOOKED_AT_MAX]
            ),
            letters=tuple(
                dead_work(letter)
                for _, letter in sorted(letters, key=lambda each: each[0])[:LETTERS_LOOKED_AT_MAX]
            ),
            place=state.peek(file.run.tenant).queue.place(run_id),
        )

    def _open_jobs(self, file: RunFile) -> tuple[OpenJob, ...]:
        found: list[OpenJob] = []
        places: dict[JobId, int] = {}
        for each in (self._state.jobs[job_id] for job_id in file.jobs):
            if each.state not in _OPEN or len(found) == JOBS_LOOKED_AT_MAX:
                continue
            if each.state is JobState.READY and each.job.id not in places:
                places |= self._state.ready.places(each.job.topic, each.job.tenant)
            found.append(
                OpenJob(
                    id=each.job.id,
                    step_id=each.job.step_id,
                    item=each.job.item,
                    topic=each.job.topic,
                    state=_OPEN[each.state],
                    deliveries=each.deliveries,
                    fence=each.fence,
                    worker_id=each.worker_id,
                    expires_at=each.expires_at,
                )
            )
        first = {job.id: job for job in first_of_steps(places, found)}
        return by_place(
            replace(job, ahead=places[job.id]) if job.id in first else job for job in found
        )

    async def load_items(
        self, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item]:
        file = self._state.runs.get(run_id)
        if file is None:
            return {}
        keys = (ItemKey(step_id, index) for step_id in wanted for index in wanted[step_id])
        return {key: file.items[key] for key in keys if key in file.items}

    async def items_at(
        self, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
    ) -> dict[ItemKey, Item] | None:
        file = self._state.runs.get(run_id)
        if file is None or file.run.stamp != stamp:
            return None
        return await self.load_items(run_id, wanted)

    async def commit(self, commit: Commit) -> CommitAnswer:
        file = self._state.runs.get(commit.run_id)
        if file is None:
            return Gone()
        verdict = _judged(file, commit)
        return self._write(file, commit, verdict) if isinstance(verdict, Apply) else verdict

    async def settle(self, results: Sequence[Result], commit: Commit) -> SettleAnswer:
        file = self._state.runs.get(commit.run_id)
        if file is None:
            return SettleMissed(SettleMiss.GONE)
        jobs = {each.job_id: self._state.jobs.get(each.job_id) for each in results}
        verdict = judge_settle(
            _judged(file, commit),
            inbox_is_clear=file.inbox.keys() <= set(commit.applied),
            jobs_are_held=len(jobs) == len(results)
            and all(
                job is not None and job.job.run_id == commit.run_id and is_held(job, each)
                for job, each in zip(jobs.values(), results, strict=True)
            ),
        )
        if not isinstance(verdict, Apply):
            return verdict
        for job, each in zip(jobs.values(), results, strict=True):
            assert job is not None
            end_job(self._state, job, each)
        return self._write(file, commit, verdict)

    def _write(self, file: RunFile, commit: Commit, verdict: Apply) -> Committed:
        after = evolve(file.run, commit.transition)
        after = replace(after, stamp=verdict.stamp, fence=verdict.fence)
        self._state.remove_entries(file, *commit.applied)
        self._become(file, after, commit.transition)
        does_promote = goes_on(commit.applied, after.status)
        promoted = self._state.promote(after.tenant) if does_promote else ()
        return Committed(verdict.stamp, promoted)

    async def post(
        self, run_id: RunId, event: Event, *, entry_id: str, audit: AuditEntry | None = None
    ) -> PostAnswer:
        file = self._state.runs.get(run_id)
        if file is None:
            return PostAnswer.UNKNOWN
        if file.run.status.is_finished:
            return PostAnswer.FINISHED
        if not self._state.deliver(file, entry_id, event, self._state.now()):
            return PostAnswer.REPEATED
        self._state.audit(audit)
        return PostAnswer.POSTED

    async def timeline(
        self, run_id: RunId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[TimelineEntry]:
        start = 0 if cursor is None else read_cursor("timeline", cursor, tuple[int])[0]
        file = self._state.runs.get(run_id)
        if file is None:
            return Page(())
        end = start + limit
        more = end < len(file.timeline)
        return Page(
            tuple(file.timeline[start:end]), write_cursor("timeline", end) if more else None
        )

    async def list_runs(
        self,
        tenant: TenantId | None,
        *,
        only: RunFilter = EVERY_RUN,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[RunSummary]:
        page = RunPage(only, cursor, limit)
        while not page.is_full:
            asked = page.wanted
            places = self._state.places.read(tenant, only, page, asked)
            rows = [(*place, summary_of(self._state.runs[RunId(place[1])].run)) for place in places]
            page.add(rows, asked)
        return page.page()

    async def feed(
        self, tenant: TenantId, *, after: str | None, limit: int = 100
    ) -> tuple[FeedEntry, ...]:
        position = 0 if after is None else read_cursor("feed", after, tuple[int])[0]
        account = self._state.peek(tenant)
        oldest = account.feed_length - len(account.feed)
        start = max(0, position - oldest)
        found = tuple(islice(account.feed, start, start + limit))
        if after is None or position >= oldest:
            return found
        return (replace(found[0], is_after_gap=True), *found[1:])

    async def feed_position(self, tenant: TenantId) -> str:
        return write_cursor("feed", self._state.peek(tenant).feed_length)

    async def list_approvals(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PendingApproval]:
        after = (Instant(-1), RunId(""), StepId(""))
        if cursor is not None:
            after = read_cursor("approvals", cursor, tuple[Instant, RunId, StepId])
        accounts = (
            list(self._state.accounts.values()) if tenant is None else [self._state.peek(tenant)]
        )
        lists = [
            islice(each.approvals, bisect_right(each.approvals, after), None) for each in accounts
        ]
        found = list(islice(heapq.merge(*lists), limit + 1))
        page = found[:limit]
        return Page(
            tuple(self._state.approvals[run_id, step_id] for _, run_id, step_id in page),
            write_cursor("approvals", *page[-1]) if len(found) > limit else None,
        )

    async def active_runs(self, tenant: TenantId) -> int:
        return self._state.peek(tenant).active

    async def queued_runs(self, tenant: TenantId) -> int:
        return len(self._state.peek(tenant).queue)

    async def queue_place(self, run_id: RunId) -> QueuePlace | None:
        file = self._state.runs.get(run_id)
        return None if file is None else self._state.peek(file.run.tenant).queue.place(run_id)

    async def oldest_waits(self, tenant: TenantId | None) -> OldestWaits:
        job_id = self._state.ready.oldest(tenant)
        return OldestWaits(
            queued=self._state.places.oldest(tenant, RunStatus.QUEUED),
            ready=() if job_id is None else (job_id,),
        )

    def _facts(self, admission: Admission, within_ms: int) -> Facts:
        run = admission.run
        account = self._state.peek(run.tenant)
        config = account.config or _DEFAULTS
        now, tick = self._state.now(), admission.tick
        rate = None
        if admission.is_rate_limited and config.job_rate_per_s is not None:
            rate = Rate(config.job_rate_per_s, account.rate_used_until_ms)
        terms = StartTerms(admission.definitions, admission.budget, admission.queue.on_full)
        return replace(
            self._facts_of(run.tenant, terms, now),
            run_id=run.id,
            not_after=Instant(now + within_ms),
            exists=run.id in self._state.runs,
            position=account.queue.position(run.id),
            key=_key_record(account, admission.key, now),
            fingerprint=admission.fingerprint,
            tick_taken=None if tick is None else tick.taken_by(account.ticks.get(tick.schedule_id)),
            takes_slot=run.holds_slot,
            on_full=config.on_full if admission.before is not None else OnFull.REJECT,
            rate=rate,
        )

    def _facts_of(self, tenant: TenantId, terms: StartTerms, now: Instant) -> Facts:
        """The facts about a start with these terms and a new key."""
        account = self._state.peek(tenant)
        config = account.config or _DEFAULTS
        return Facts(
            run_id=RunId(""),
            now=now,
            not_after=now,
            definition_is_current=all(
                self._state.version_in_force(account, name) == version
                for name, version in terms.definitions.items()
            ),
            over_budget=over_budget(config.budgets, self._state.tallies(tenant), terms.budget)
            if config.budgets
            else None,
            limit=config.max_concurrent_runs,
            active=account.active,
            on_full=config.on_full,
            asked_on_full=terms.on_full,
            queued=len(account.queue),
            queue_max=config.queue_max,
        )

    def _begin(self, admission: Admission, facts: Facts) -> None:
        run = admission.run
        account = self._state.account(run.tenant)
        file = self._state.runs[run.id] = RunFile(run, admission.key)
        self._state.places.add(run)
        account.seen_at = run.created_at
        if run.holds_slot and run.status is not RunStatus.QUEUED:
            self._state.take_slot(run)
        if admission.key is not None:
            account.keys[admission.key] = Key(KeyRecord(admission.fingerprint, run.id))
        self._state.reserve_budgets(file, admission.budget)
        if admission.tick is not None:
            mark = (admission.tick.generation, admission.tick.tick)
            account.ticks[admission.tick.schedule_id] = mark
        if facts.rate is not None:
            account.rate_used_until_ms = facts.rate.after_one(facts.now)
        self._become(file, run, admission.transition)
        self._state.audit(admission.audit)

    def _enqueue(self, admission: Admission, facts: Facts) -> Queued:
        run = admission.run
        account = self._state.account(run.tenant)
        config = account.config or _DEFAULTS
        self._begin(queued_admission(admission, config.queue_wait_ms), facts)
        account.queue.add(run.id, admission.queue)
        return Queued(run.id, account.queue.position(run.id) or 0)

    def _become(self, file: RunFile, after: Run, transition: Transition) -> None:
        file.items.update(transition.items)
        self._state.places.move(after, file.run.status)
        file.run = replace(after, items={})
        carry_out(self._state, file, transition.effects)
        self._state.record(file, transition.timeline)
        if after.status.is_finished and not file.is_closed:
            self._state.close_run(file, frees_key=frees_key(transition))


def _judged(file: RunFile, commit: Commit) -> Apply | CommitAnswer:
    return judge_commit(
        file.run.stamp,
        file.run.fence,
        read=commit.read,
        nonce=commit.nonce,
        fence=commit.fence,
    )


def _key_record(account: Account, key: str | None, now: Instant) -> KeyRecord | None:
    found = None if key is None else account.keys.get(key)
    if found is None or (found.expires_at is not None and found.expires_at <= now):
        return None
    return found.record


def summary_of(run: Run) -> RunSummary:
    """The run in a list."""
    return RunSummary(
        id=run.id,
        tenant=run.tenant,
        workflow_id=run.workflow_id,
        workflow_version=run.workflow_version,
        status=run.status,
        created_at=run.created_at,
        finished_at=run.finished_at,
        error=run.error,
        risk=run.risk,
        labels=run.labels,
        rerun_of=run.rerun_of,
    )


def carry_out(state: MemoryState, file: RunFile, effects: Iterable[Effect]) -> None:
    """Apply effects in order."""
    for effect in effects:
        match effect:
            case DispatchJob(job):
                _dispatch(state, file, job)
            case SetTimer(timer, due):
                file.timers[timer] = due
                state.timers.put(file.run.tenant, (file.run.id, timer), due)
            case ClearTimer(timer):
                _clear(state, file, [timer])
            case OpenApproval(approval):
                state.open_approval(approval)
            case CloseApproval(step_id):
                state.close_approvals(file.run.id, [step_id])
            case RevokeJob(job_id):
                _revoke(state, [job_id] if job_id in state.jobs else [])
            case StopStep():
                _stop(state, file, effect)
            case StopRun():
                state.close_approvals(file.run.id, file.run.steps)
                _revoke(state, file.jobs)
                _clear(state, file, list(file.timers))
            case _:
                assert_never(effect)


def _stop(state: MemoryState, file: RunFile, effect: StopStep) -> None:
    def is_in(step_id: str | None) -> bool:
        return step_id is not None and (
            step_id == effect.step_id or step_id.startswith(effect.inside)
        )

    state.close_approvals(file.run.id, [each for each in file.run.steps if is_in(each)])
    _revoke(state, [id_ for id_ in file.jobs if is_in(state.jobs[id_].job.step_id)])
    _clear(state, file, [each for each in file.timers if is_in(each.step_id)])


def _dispatch(state: MemoryState, file: RunFile, job: Job) -> None:
    known = state.jobs.get(job.id)
    if known is None:
        state.jobs[job.id] = JobFile(job)
        file.jobs.append(job.id)
    elif known.state is JobState.DEAD:
        # A replay. The fence is kept, since the next one must be above it.
        state.jobs[job.id] = JobFile(job, fence=known.fence)
    else:
        return
    state.ready.add(job)


def _revoke(state: MemoryState, job_ids: Iterable[JobId]) -> None:
    for job_id in job_ids:
        file = state.jobs[job_id]
        if file.state in {JobState.READY, JobState.LEASED}:
            state.ready.remove(file.job)
            state.leases.remove(job_id)
            file.state = JobState.REVOKED
            file.worker_id = file.expires_at = file.progress = None


def _clear(state: MemoryState, file: RunFile, timers: Iterable[Timer]) -> None:
    for timer in timers:
        file.timers.pop(timer, None)
        state.timers.remove(file.run.tenant, (file.run.id, timer))
