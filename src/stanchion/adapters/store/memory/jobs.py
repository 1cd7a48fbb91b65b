"""Jobs in memory: leases, results, expiry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stanchion.adapters.outcomes import (
    is_last_delivery,
    job_dead_letter,
    job_died_entry,
    timed_out_entry,
    why_lost,
)
from stanchion.adapters.store.memory.state import JobFile, MemoryPart, MemoryState, PoolFile
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import next_fence
from stanchion.core.model import Instant, JobId, RunId, TenantId, Topic
from stanchion.core.topic_limits import (
    PoolUse,
    TokenGrant,
    TokenPool,
    TokenRenewal,
    grant_tokens,
    retry_after_ms,
)
from stanchion.ports.records import (
    Acceptance,
    Accepted,
    ExpiredJob,
    JobLease,
    JobState,
    JobView,
    LeasedJob,
    LostReason,
    RejectedCode,
    Renewals,
    Result,
    ResultRefused,
    result_event,
)


class MemoryJobs(MemoryPart):
    """See ``ports.store.Jobs``."""

    async def lease_jobs(
        self,
        worker_id: str,
        topics: Collection[Topic],
        *,
        max_jobs: int,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> tuple[LeasedJob, ...]:
        leased: list[LeasedJob] = []
        if self._is_after(not_after):
            return ()
        while len(leased) < max_jobs:
            job_id = self._state.ready.take(topics, tenant)
            if job_id is None:
                break
            leased.append(self._lease(self._state.jobs[job_id], worker_id, ttl_ms))
        return tuple(leased)

    async def ready_tenants(
        self,
        topics: Collection[Topic],
        *,
        limit: int,
        tenant: TenantId | None = None,
        but_not: Collection[TenantId] = (),
    ) -> Mapping[TenantId, int]:
        return self._state.ready.tenants(topics, limit, tenant, but_not)

    async def renew_jobs(
        self,
        leases: Sequence[JobLease],
        *,
        ttl_ms: int,
        tenant: TenantId | None = None,
        not_after: Instant | None = None,
    ) -> Renewals:
        renewed: list[JobId] = []
        lost: list[JobId] = []
        if self._is_after(not_after):
            return Renewals((), ())
        for lease in leases:
            file = self._find(lease.job_id, tenant)
            if file is not None and self._is_current(file, lease.fence):
                self._begin_term(file, ttl_ms)
                if lease.progress is not None:
                    file.progress = lease.progress
                if lease.usage:
                    self._state.charge_usage(file, lease.usage)
                renewed.append(lease.job_id)
            else:
                lost.append(lease.job_id)
        return Renewals(tuple(renewed), tuple(lost))

    async def lost_leases(
        self, leases: Sequence[JobLease], *, tenant: TenantId | None = None
    ) -> dict[JobId, LostReason]:
        lost: dict[JobId, LostReason] = {}
        for lease in leases:
            file = self._find(lease.job_id, tenant)
            if file is None:
                lost[lease.job_id] = LostReason.UNKNOWN_JOB
            elif not self._is_current(file, lease.fence):
                status = self._state.runs[file.job.run_id].run.status
                has_fence = file.fence == lease.fence
                lost[lease.job_id] = why_lost(file.state, status, has_fence=has_fence)
        return lost

    async def accept(
        self, results: Sequence[Result], *, row_due_in_ms: int = 0, tenant: TenantId | None = None
    ) -> tuple[Acceptance, ...]:
        row_due = Instant(self._state.now() + row_due_in_ms)
        return tuple(self._accept(result, row_due, tenant) for result in results)

    async def job(self, job_id: JobId) -> JobView | None:
        file = self._state.jobs.get(job_id)
        if file is None:
            return None
        return JobView(
            job=file.job,
            state=file.state,
            fence=file.fence,
            deliveries=file.deliveries,
            worker_id=file.worker_id,
            expires_at=file.expires_at,
            progress=file.progress,
        )

    async def progress(self, run_id: RunId, jobs: Collection[JobId]) -> dict[JobId, JsonValue]:
        files = [self._state.jobs.get(job_id) for job_id in jobs]
        return {
            file.job.id: file.progress
            for file in files
            if file is not None and file.job.run_id == run_id and file.progress is not None
        }

    async def expire_jobs(self, *, limit: int, max_deliveries: int) -> tuple[ExpiredJob, ...]:
        expired = self._state.leases.take(self._state.now(), limit)
        return tuple(self._expire(self._state.jobs[job_id], max_deliveries) for job_id in expired)

    async def ready_topics(self) -> Mapping[Topic, int]:
        return self._state.ready.counts()

    def _lease(self, file: JobFile, worker_id: str, ttl_ms: int) -> LeasedJob:
        file.state = JobState.LEASED
        file.worker_id = worker_id
        file.progress, file.usage = None, {}
        file.deliveries += 1
        file.fence = next_fence(file.fence, 0, self._state.now_us())
        timeout_ms = file.job.attempt_timeout_ms
        if timeout_ms is not None and file.attempt_ends_at is None:
            file.attempt_ends_at = Instant(self._state.now() + timeout_ms)
        expires_at = self._begin_term(file, ttl_ms)
        return LeasedJob(file.job, file.fence, file.deliveries, expires_at)

    def _is_after(self, not_after: Instant | None) -> bool:
        return not_after is not None and self._state.now() > not_after

    def _begin_term(self, file: JobFile, ttl_ms: int) -> Instant:
        expires_at = file.expires_at = Instant(self._state.now() + ttl_ms)
        ends_at = expires_at if file.attempt_ends_at is None else file.attempt_ends_at
        self._state.leases.put(file.job.id, min(expires_at, ends_at))
        return expires_at

    def _is_current(self, file: JobFile, fence: int) -> bool:
        return (
            file.state is JobState.LEASED
            and file.fence == fence
            and file.expires_at is not None
            and self._state.now() < file.expires_at
        )

    def _find(self, job_id: JobId, tenant: TenantId | None) -> JobFile | None:
        """The job, unless it belongs to another tenant."""
        file = self._state.jobs.get(job_id)
        return file if file is None or tenant in {None, file.job.tenant} else None

    def _accept(self, result: Result, row_due: Instant, tenant: TenantId | None) -> Acceptance:
        file = self._find(result.job_id, tenant)
        if file is None:
            return ResultRefused(result.job_id, RejectedCode.UNKNOWN_JOB)
        job = file.job
        if file.state is JobState.FINISHED:
            if file.fence == result.fence:
                return Accepted(job.id, job.run_id, repeated=True)
            return ResultRefused(job.id, RejectedCode.ALREADY_FINISHED)
        # A result of an expired lease is accepted until the expiry is processed: no other worker
        # has the job yet, and finished work should not be repeated.
        if not is_held(file, result):
            return ResultRefused(job.id, RejectedCode.STALE_FENCE)
        end_job(self._state, file, result)
        run, event = self._state.runs[job.run_id], result_event(result, job.step_id, job.item)
        self._state.deliver(run, f"result:{job.id}#{result.fence}", event, row_due)
        return Accepted(job.id, job.run_id)

    def _expire(self, file: JobFile, max_deliveries: int) -> ExpiredJob:
        job = file.job
        file.worker_id = file.expires_at = file.progress = None
        is_over = self._attempt_is_over(file)
        is_last = is_last_delivery(file.deliveries, job.max_deliveries, max_deliveries)
        is_dead = is_last and not is_over
        if is_over:
            self._state.ready.remove(job)
            file.state = JobState.REVOKED
            run = self._state.runs[job.run_id]
            self._state.deliver(run, *timed_out_entry(job), self._state.now())
        elif is_dead:
            file.state = JobState.DEAD
            self._write_dead_letter(file)
        else:
            file.state = JobState.READY
            self._state.ready.add(job)
            if file.attempt_ends_at is not None:
                self._state.leases.put(job.id, file.attempt_ends_at)
        return ExpiredJob(
            job.id, job.run_id, job.tenant, job.topic, file.deliveries, is_dead, is_over
        )

    def _attempt_is_over(self, file: JobFile) -> bool:
        return file.attempt_ends_at is not None and file.attempt_ends_at <= self._state.now()

    def _write_dead_letter(self, file: JobFile) -> None:
        """Write the dead letter of a job and post the event to its run."""
        job, now = file.job, self._state.now()
        run = self._state.runs[job.run_id]
        self._state.add_letter(run, job_dead_letter(job, file.deliveries, now))
        self._state.deliver(run, *job_died_entry(job, file.deliveries), now)


def is_held(file: JobFile, result: Result) -> bool:
    """Whether the result is from the holder of the job."""
    return file.state is JobState.LEASED and file.fence == result.fence


def end_job(state: MemoryState, file: JobFile, result: Result) -> None:
    """End a job by the result of its holder."""
    if result.usage:
        state.charge_usage(file, result.usage)
    file.state = JobState.FINISHED
    file.worker_id = result.worker_id
    file.expires_at = file.progress = None
    state.leases.remove(file.job.id)


class MemoryTokens(MemoryPart):
    """See ``ports.store.Tokens``."""

    async def take_tokens(
        self, pool: TokenPool, tokens: Sequence[str], *, ttl_ms: int
    ) -> TokenGrant:
        now, file = self._state.now(), self._file(pool)
        asked = dict.fromkeys(tokens)
        known = [token for token in asked if token in file.tokens]
        new = [token for token in asked if token not in file.tokens]
        grant = grant_tokens(
            pool, len(new), running=len(file.tokens), used_until_ms=file.used_until_ms, now=now
        )
        file.used_until_ms = grant.used_until_ms
        granted = (*known, *new[: grant.count])
        file.tokens |= dict.fromkeys(granted, Instant(now + ttl_ms))
        return TokenGrant(granted, now, len(file.tokens), grant.is_rate_spent, grant.retry_after_ms)

    async def renew_tokens(
        self, pool: TokenPool, tokens: Mapping[str, str], *, ttl_ms: int
    ) -> TokenRenewal:
        now, file = self._state.now(), self._file(pool)
        renewed: set[str] = set()
        for held, name in tokens.items():
            present = held if held in file.tokens else name
            if file.may_extend(present, pool.max_running, is_renamed=present != name):
                file.extend(present, name, Instant(now + ttl_ms))
                renewed.add(name)
        return TokenRenewal(frozenset(renewed), now)

    async def release_tokens(
        self, pool: TokenPool, tokens: Collection[str], *, is_unused: bool = False
    ) -> int:
        file = self._file(pool)
        released = sum(file.tokens.pop(token, None) is not None for token in {*tokens})
        if is_unused and pool.rate_per_s is not None:
            file.used_until_ms -= released * 1000 / pool.rate_per_s
        return released

    async def pool_uses(self, pools: Sequence[TokenPool]) -> tuple[PoolUse, ...]:
        now = self._state.now()
        files = [self._file(pool) for pool in pools]
        return tuple(
            PoolUse(len(file.tokens), retry_after_ms(pool, file.used_until_ms, now), now)
            for pool, file in zip(pools, files, strict=True)
        )

    def _file(self, pool: TokenPool) -> PoolFile:
        """The pool without its expired tokens."""
        file, now = self._state.pools.setdefault(pool.name, PoolFile()), self._state.now()
        file.tokens = {name: at for name, at in file.tokens.items() if at > now}
        return file
