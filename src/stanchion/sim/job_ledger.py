"""The record of jobs: their leases and results, and the topic limits that leases keep.

A worker may trust its lease only while the store has it, a result counts once, and leases never
exceed a limit that their replica knew.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from stanchion.adapters.store.memory.state import MemoryState
from stanchion.core.model import Instant, JobId, RunId
from stanchion.core.topic_limits import TopicLimit, token_ttl_ms
from stanchion.ports.records import Accepted, JobState
from stanchion.sim import invariants as must
from stanchion.sim.history import History
from stanchion.sim.lock_ledger import NEVER_S
from stanchion.sim.servers import StoreServer

if TYPE_CHECKING:
    from stanchion.sim.ledger import SeenCommand

OPEN_JOBS: Final = frozenset({JobState.READY, JobState.LEASED})
_READS_KEPT: Final = 50
_FORGOTTEN_S: Final = 30.0
"""A call that is held since before a failover has ended so long after it."""
ON_ITS_WAY_S: Final = 12.0
"""A lease granted before a failover may reach its worker so long after it."""


class JobLedger:
    """The record of all jobs of the store."""

    def __init__(
        self,
        history: History,
        store: StoreServer,
        *,
        ttl_ms: int,
        limits: tuple[TopicLimit, ...],
        check_rows: Callable[[Iterable[RunId]], None],
    ) -> None:
        """``check_rows`` checks that runs with events have their outbox rows."""
        self._history = history
        self._store = store
        self._ttl_ms = ttl_ms
        self._limits = limits
        self._check_rows = check_rows
        self.leases: dict[JobId, tuple[int, Instant]] = {}
        """Current job leases: fence and end."""
        self.orphans: set[JobId] = set()
        """Jobs that were open at a failover. Their results may be lost, but still be applied."""
        self._fences: dict[JobId, int] = {}
        self._results: Counter[JobId] = Counter()
        self._taken: set[tuple[str, int]] = set()
        """All results that the store has accepted: job and fence."""
        self._leased_by: dict[JobId, float] = {}
        """Of the limits that each job was leased by: when the store had them."""
        self._limits_sent_at_s: dict[str, float] = {}
        """By process: when the store last answered a read of the topic limits."""
        self._limits_read: defaultdict[str, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=_READS_KEPT)
        )
        """By process: when its last answers have arrived, and when the store gave them."""
        self._limits_changed_at_s = NEVER_S
        self._failed_over_at_s = NEVER_S

    def works(self, job_id: JobId, fence: int, since_s: float) -> None:
        """A worker acts on a job and trusts its lease."""
        if since_s <= self._failed_over_at_s + ON_ITS_WAY_S:
            return  # The failover may have lost the lease, and the worker cannot know.
        file = self._store.real.state.jobs.get(job_id)
        now = self._store.clock.now()
        self._history.check(
            "a trusted lease is owned", must.job_holder_owns(job_id, fence, file, now)
        )

    def believes(self, job_id: JobId, fence: int, believed_ms: float) -> None:
        """A worker trusts its lease of a job for so long."""
        file = self._store.real.state.jobs.get(job_id)
        if self._is_after_failover() or file is None or file.state not in OPEN_JOBS:
            return  # Lost in a failover; or revoked, which ends a lease at any time.
        holder, until = self.leases.get(job_id, (None, None))
        kept_ms = until - self._store.clock.now() if until is not None and holder == fence else 0
        said = must.belief_is_covered(job_id, believed_ms=believed_ms, kept_ms=kept_ms)
        self._history.check("no deadline is after the server's", said)

    def is_leased(self, job_id: JobId, fence: int) -> bool:
        """Whether a worker has the job with this fence, as its replica must know."""
        if asyncio.get_running_loop().time() <= self._failed_over_at_s + _FORGOTTEN_S:
            return False  # The replica may have learned before that the job had ended.
        return self.leases.get(job_id, (None, None))[0] == fence

    def told_accepted(self, job_id: str, fence: int) -> None:
        """A worker was told that its result is durable."""
        is_taken = (job_id, fence) in self._taken
        said = [] if is_taken else [f"{job_id}: a worker was told 'accepted', and it is not"]
        self._history.check("no accepted result is lost", said)

    def limits_arrived(self, name: str) -> None:
        """A replica has read the topic limits."""
        now_s = asyncio.get_running_loop().time()
        self._limits_read[name].append((now_s, self._limits_sent_at_s[name]))

    def _limits_known_since_s(self, name: str) -> float:
        """When the store had the limits by which a replica leases now.

        Its tokens may have been taken a second ago.
        """
        until_s = asyncio.get_running_loop().time() - 1.0
        read = [sent_s for arrived_s, sent_s in self._limits_read[name] if arrived_s <= until_s]
        return read[-1] if read else NEVER_S

    def accepted(self, seen: SeenCommand) -> None:
        """Check accepted results."""
        for result, answer in zip(seen.arguments[0], seen.answer, strict=True):
            word = "rejected"
            if isinstance(answer, Accepted):
                word = "accepted again" if answer.repeated else "accepted"
            self._history.tell(f"store  {seen.who.name} {result.job_id}: {word}")
            if not isinstance(answer, Accepted) or answer.repeated:
                continue
            holder, _ = self.leases.pop(result.job_id, (None, None))
            before = self._results[result.job_id]
            self._history.check(
                "each effect is accepted once",
                must.accepted_once(result.job_id, fence=result.fence, holder=holder, before=before),
            )
            self._results[result.job_id] += 1
            self._taken.add((result.job_id, result.fence))
            self._check_rows([answer.run_id])

    def leased(self, seen: SeenCommand) -> None:
        """Check leases of jobs."""
        now, check = self._store.clock.now(), self._history.check
        for each in seen.answer:
            job_id = each.job.id
            _, until = self.leases.get(job_id, (0, None))
            check("grants are disjoint", must.grant_is_disjoint(job_id, until=until, now=now))
            before = self._fences.get(job_id, 0)
            check(
                "fences rise",
                must.fence_rises(job_id, before=before, now=each.fence, strictly=True),
            )
            self._fences[job_id] = each.fence
            self.leases[job_id] = (each.fence, each.expires_at)
            self._leased_by[job_id] = self._limits_known_since_s(seen.who.name)
            self._term(job_id)
            self._history.tell(f"store  {seen.who.name} {job_id}: leased, {each.deliveries}.")
        if seen.answer:
            self._limited()

    def renewed(self, seen: SeenCommand) -> None:
        """Record renewed and lost leases of jobs."""
        state, now, check = self._store.real.state, self._store.clock.now(), self._history.check
        for lease in seen.arguments[0]:
            job_id = lease.job_id
            known, file = self.leases.get(job_id), state.jobs.get(job_id)
            if job_id in seen.answer.renewed:
                holder, until = (None, None) if known is None else known
                check(
                    "a renewal extends what stands",
                    must.renewal_extends_what_stands(
                        job_id, fence=lease.fence, holder=holder, until=until, now=now
                    ),
                )
                self._term(job_id)
            if known is not None and file is not None and file.expires_at is not None:
                self.leases[job_id] = (known[0], file.expires_at)
        if seen.answer.renewed:
            self._limited()

    def expired(self, seen: SeenCommand) -> None:
        """Check expired leases of jobs."""
        now = self._store.clock.now()
        for each in seen.answer:
            _, until = self.leases.pop(each.job_id, (0, None))
            if not each.is_timed_out:
                self._history.check(
                    "grants are disjoint", must.grant_is_disjoint(each.job_id, until=until, now=now)
                )
            self._check_rows([each.run_id])
            end = "dead" if each.is_dead else "timed out" if each.is_timed_out else "ready again"
            self._history.tell(f"store  {seen.who.name} {each.job_id}: {end}")

    def _term(self, job_id: JobId) -> None:
        file, now = self._store.real.state.jobs[job_id], self._store.clock.now()
        said = must.term_is_as_asked(job_id, until=file.expires_at, now=now, ttl_ms=self._ttl_ms)
        self._history.check("a lease lasts its term", said)

    def _limited(self) -> None:
        """Leases are within the topic limits.

        Except for a term after writes were lost, and after a limit was lowered. A replica may know
        the old limit for two seconds, and its last lease by it may be a second on its way. One that
        was paused or could not read the limits goes on by those that it knows.
        """
        now_s = asyncio.get_running_loop().time()
        lost_for_s = token_ttl_ms(self._ttl_ms) / 1000 + ON_ITS_WAY_S
        lowered_for_s = self._ttl_ms / 1000 + 3.5
        if (
            now_s <= self._failed_over_at_s + lost_for_s
            or now_s <= self._limits_changed_at_s + lowered_for_s
        ):
            return
        jobs, now = self._store.real.state.jobs, self._store.clock.now()
        standing = [
            jobs[job_id].job
            for job_id, (_, until) in self.leases.items()
            if until > now and jobs[job_id].state is JobState.LEASED
        ]
        if any(self._leased_by.get(job.id, 0.0) < self._limits_changed_at_s for job in standing):
            return
        said = must.topic_limits_hold(self._limits, standing)
        self._history.check("never above a topic limit", said)

    def limits_sent(self, name: str) -> None:
        """The store has answered a replica that reads the topic limits."""
        self._limits_sent_at_s[name] = self._store.process.loop.now_s

    def limit_changed(self, limit: TopicLimit) -> None:
        """A topic limit was written."""
        self._limits = (*(each for each in self._limits if each.id != limit.id), limit)
        self._limits_changed_at_s = asyncio.get_running_loop().time()

    def forget(self, run_id: RunId) -> None:
        """A run was removed."""
        # A cancelled run's jobs are gone with it, though a lease has not ended.
        for job_id in [each for each in self.leases if each.startswith(f"{run_id}:")]:
            del self.leases[job_id]

    def failed_over(self, state: MemoryState) -> None:
        """The store has lost its last writes: take over its state."""
        self._failed_over_at_s = asyncio.get_running_loop().time()
        stored = state.documents.get("limit", {}).values()
        self._limits = tuple(msgspec.convert(each.value, TopicLimit) for each in stored)
        self._results.clear()
        self.leases.clear()
        self.orphans |= {id_ for id_, each in state.jobs.items() if each.state in OPEN_JOBS}
        for job_id, each in state.jobs.items():
            if each.expires_at is not None:
                self.leases[job_id] = (each.fence, each.expires_at)

    def _is_after_failover(self) -> bool:
        return asyncio.get_running_loop().time() <= self._failed_over_at_s + ON_ITS_WAY_S
