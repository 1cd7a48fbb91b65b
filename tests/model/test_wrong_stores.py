"""The model finds wrong stores: each of these breaks one promise, and is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import pytest
from hypothesis import Phase, given, settings
from msgspec.structs import replace

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.memory.state import JobFile
from stanchion.core.admission import Facts, Verdict
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.ports.records import (
    Acceptance,
    Admission,
    Commit,
    CommitAnswer,
    ExpiredJob,
    LeasedJob,
    OutboxRow,
    Result,
)
from stanchion.ports.store import Store
from tests.contract.harness import MemoryHarness
from tests.model.strategies import Story, stories
from tests.model.telling import tell

EXAMPLES: Final = 300
EXAMPLES_OF_A_GOOD_ONE: Final = 50


class AdmitsOneTooMany(MemoryStore):
    def _facts(self, admission: Admission, within_ms: int) -> Facts:
        facts = super()._facts(admission, within_ms)
        return replace(facts, limit=None if facts.limit is None else facts.limit + 1)


class ForgetsTheKey(MemoryStore):
    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        return await super().admit(replace(admission, key=None), within_ms=within_ms)


class CountsThenAdmits(MemoryStore):
    """Two callers at once see the same count: only several at once can find it out."""

    async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
        facts = self._facts(admission, within_ms)
        await asyncio.sleep(0)
        self._facts_seen = facts
        verdict = await super().admit(admission, within_ms=within_ms)
        del self._facts_seen
        return verdict

    def _facts(self, admission: Admission, within_ms: int) -> Facts:
        seen: Facts | None = getattr(self, "_facts_seen", None)
        return seen or super()._facts(admission, within_ms)


class ReadsThenCommits(MemoryStore):
    """Of two writers with the same read, both commit: only several at once can find it out."""

    async def commit(self, commit: Commit) -> CommitAnswer:
        found = await self.load(commit.run_id)
        await asyncio.sleep(0)
        now = await self.load(commit.run_id)
        if found is not None and now is not None and found.run.stamp == commit.read:
            commit = replace(commit, read=now.run.stamp)
        return await super().commit(commit)


class KnowsNoStaleFence(MemoryStore):
    async def commit(self, commit: Commit) -> CommitAnswer:
        found = await self.load(commit.run_id)
        if found is not None and commit.fence is not None:
            commit = replace(commit, fence=max(commit.fence, found.run.fence))
        return await super().commit(commit)


class LeaksTheSlotOfARunThatWasCancelled(MemoryStore):
    async def commit(self, commit: Commit) -> CommitAnswer:
        answer = await super().commit(commit)
        found = await self.load(commit.run_id)
        if found is not None and found.run.status == "cancelled" and found.run.holds_slot:
            self._state.account(found.run.tenant).active = 1
        return answer


class TakesResultsUnderAnyFence(MemoryStore):
    def _accept(self, result: Result, row_due: Instant, tenant: TenantId | None) -> Acceptance:
        file = self._state.jobs.get(result.job_id)
        return super()._accept(
            result if file is None else replace(result, fence=file.fence), row_due, tenant
        )


class AcceptsWithoutAnOutboxRow(MemoryStore):
    async def accept(
        self,
        results: Sequence[Result],
        *,
        row_due_in_ms: int = 0,
        tenant: TenantId | None = None,
    ) -> tuple[Acceptance, ...]:
        answers = await super().accept(results, row_due_in_ms=row_due_in_ms, tenant=tenant)
        for result in results:
            if (file := self._state.jobs.get(result.job_id)) is not None:
                self._state.outbox.remove(file.job.run_id)
        return answers


class ServesTheNewestJobFirst(MemoryStore):
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
        ready = [file.job for file in self._state.jobs.values() if file.state == "ready"]
        for job in reversed(ready):
            self._state.ready.remove(job)
            self._state.ready.add(job)
        return await super().lease_jobs(
            worker_id,
            topics,
            max_jobs=max_jobs,
            ttl_ms=ttl_ms,
            tenant=tenant,
            not_after=not_after,
        )


class LetsDeadJobsLive(MemoryStore):
    def _expire(self, file: JobFile, max_deliveries: int) -> ExpiredJob:
        return super()._expire(file, max_deliveries + 1)


class DefersRowsThatHaveRisen(MemoryStore):
    async def defer_outbox(self, row: OutboxRow, *, delay_ms: int) -> None:
        if self._state.outbox.due(row.run_id) is not None:
            row = self._row(row.run_id)
        await super().defer_outbox(row, delay_ms=delay_ms)


class WrongHarness(MemoryHarness):
    def __init__(self, store: type[MemoryStore]) -> None:
        super().__init__()
        self._class = store

    async def _open_store(self, key_ttl_ms: int, audit_ttl_ms: int) -> Store:
        return self._class(self.clock, key_ttl_ms=key_ttl_ms, audit_ttl_ms=audit_ttl_ms)


# Those of this page: others that somebody derives from the memory store keep its promises.
WRONG = [each for each in MemoryStore.__subclasses__() if each.__module__ == __name__]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: each.__name__)
def test_a_store_that_breaks_a_promise_is_found_out(wrong: type[MemoryStore]) -> None:
    with pytest.raises(AssertionError):
        _search(wrong, EXAMPLES)


def test_a_store_that_breaks_none_is_not() -> None:
    _search(MemoryStore, EXAMPLES_OF_A_GOOD_ONE)


def _search(kind: type[MemoryStore], examples: int) -> None:
    # Without shrinking: that it is found is enough.
    @settings(max_examples=examples, phases=[Phase.generate], database=None, derandomize=True)
    @given(stories())
    def search(story: Story) -> None:
        asyncio.run(tell(WrongHarness(kind), story))

    search()
