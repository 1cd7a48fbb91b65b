"""Why: gathers the facts about a run, and has ``core.why`` explain them.

The run's shard is read in one step. Locks, workers and the bus are asked besides, each within a
bound; what does not answer becomes part of the explanation. So there is an answer also while the
store or the lock store is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stanchion.core.escalation import Level
from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import Instant, Run, RunId, RunStatus, TenantId, Topic
from stanchion.core.why import (
    NO_WORKER_MS,
    ClosedClass,
    Finding,
    OpenJobState,
    Outage,
    ReachedLimit,
    RunFacts,
    RunLock,
    Surroundings,
    TopicDemand,
    store_outage,
    why,
)
from stanchion.ports.errors import BackendError, BackendUnavailable, sentence
from stanchion.services.context import Backends, Rules
from stanchion.services.escalation import EscalationService
from stanchion.services.limiter import SingleFlight
from stanchion.services.plans import DefinitionMissing, Plans
from stanchion.services.replicas import ReplicaReporter, ReplicaView
from stanchion.services.topic_limits import TopicLimitService
from stanchion.services.work import TenantWorkBudget

__all__ = ["Explanation", "RunExplainer", "demand_for"]

_PATIENCE_S: Final = 1.0
"""How long locks and summaries may take to answer."""
_FACT_S: Final = 0.000_015
"""The processor time of the store and of this replica for each job, timer or event of a run."""
_VIEW_MS: Final = 1_000
"""How old the summaries of other replicas may be."""


class Explanation(msgspec.Struct, frozen=True):
    """The findings about a run, the most important first."""

    run_id: RunId
    status: RunStatus | None
    """``None`` while the store does not answer."""
    as_of: Instant
    findings: tuple[Finding, ...]


class RunExplainer:
    """Explains why runs do not go on."""

    def __init__(  # noqa: PLR0913 - each of them knows one kind of cause
        self,
        backends: Backends,
        *,
        plans: Plans,
        rules: Rules,
        escalating: EscalationService,
        replicas: ReplicaReporter,
        limits: TopicLimitService,
        lock_error: Callable[[], str | None],
        work: TenantWorkBudget,
    ) -> None:
        """``lock_error``: why this replica does not call the lock store now, if it does not."""
        self._store = backends.store
        self._locks = backends.locks
        self._clock = backends.clock
        self._plans = plans
        self._rules = rules
        self._escalating = escalating
        self._replicas = replicas
        self._limits = limits
        self._lock_error = lock_error
        self._work = work
        self._flights = SingleFlight()

    async def explain(self, run_id: RunId, tenant: TenantId) -> Explanation | None:
        """Why the run does not go on; ``None`` if the tenant has no such run.

        Concurrent callers that ask about one run share the reads, which begin after their calls.
        The tenant is charged for them. Raises ``TenantOverloaded`` if it is over its share.
        """
        self._work.check(tenant)
        owner, found = await self._flights.read(run_id, lambda: self._explain(run_id))
        return found if owner in {None, tenant} else None

    async def _explain(self, run_id: RunId) -> tuple[TenantId | None, Explanation | None]:
        """The tenant of the run, if it is known, and the explanation."""
        try:
            facts = await self._store.run_facts(run_id)
        except BackendUnavailable as error:
            now = self._clock.now()
            since = self._replicas.down_since("store")
            outage = Outage("store", sentence(error), since or now, now)
            return None, Explanation(run_id, None, now, (store_outage(outage),))
        if facts is None:
            return None, None
        around = Surroundings()
        if not facts.run.status.is_finished:
            around = await self._around(facts)
        read = len(facts.jobs) + len(facts.timers) + len(facts.letters) + facts.inbox
        self._work.charge(facts.run.tenant, read * _FACT_S)
        told = Explanation(run_id, facts.run.status, facts.at, why(facts, around))
        return facts.run.tenant, told

    async def _around(self, facts: RunFacts) -> Surroundings:
        ready = {job.topic for job in facts.jobs if job.state is OpenJobState.READY}
        found, view, limits = await asyncio.gather(
            self._lock(facts), self._view(), self._reached(ready, facts.run.tenant)
        )
        outages = [each for each in (found, self._bus(facts.at)) if isinstance(each, Outage)]
        return Surroundings(
            lock=found if isinstance(found, RunLock) else None,
            closed=await self._closed(facts.run, found) if isinstance(found, Outage) else None,
            outages=tuple(outages),
            topics={} if view is None else demand_for(ready, facts.run.tenant, view),
            limits=limits,
        )

    async def _lock(self, facts: RunFacts) -> RunLock | Outage | None:
        """The lease of the run, if it is held; or that the lock store does not answer."""
        if self._locks is None:
            return None
        error = self._lock_error()
        if error is None:
            name = f"run/{facts.run.id}"
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    held = await self._locks.inspect(name)
            except TimeoutError:
                error = f"no answer within {_PATIENCE_S:g} s"
            except BackendError as failed:
                error = sentence(failed)
            else:
                if held is None:
                    return None
                expires_at = Instant(facts.at + held.expires_in_ms)
                return RunLock(
                    name,
                    held.fence,
                    expires_at,
                    facts.at,
                    holder=held.holder.name,
                    is_by_hand=held.holder.is_operator,
                )
        return Outage("locks", error, self._replicas.down_since("locks") or facts.at, facts.at)

    def _bus(self, now: Instant) -> Outage | None:
        since = self._replicas.down_since("bus")
        return None if since is None else Outage("bus", "", since, now)

    async def _closed(self, run: Run, outage: Outage) -> ClosedClass | None:
        """The rule by which the run waits for the lock store; ``None`` if it goes on without."""
        override = await self._override(run)
        policy = self._rules.lease_policy(run.risk, override)
        if policy.on_lock_error is OnLockError.FAIL_CLOSED:
            is_own = override is not None and override.on_lock_error is not None
            setting = f"policies.{run.risk}.on_lock_error"
            rule = "lock_policy.on_lock_error of the workflow" if is_own else f"setting {setting}"
            other = (
                "a workflow with another lock_policy"
                if is_own
                else f"stanchion settings set {setting}=fail_open"
            )
            return ClosedClass(
                rule=f"{rule} = fail_closed",
                since=outage.since,
                seen_at=outage.seen_at,
                remedy=f"{_RESTORE}; to go on without it: {other}",
            )
        if self._rules.closes(run.risk):
            level = Level(self._escalating.level).name.lower()
            return ClosedClass(
                rule=f"escalation is {level} and closes {run.risk}",
                since=self._escalating.changed_at,
                seen_at=outage.seen_at,
                remedy=f"{_RESTORE}, then stanchion escalation clear;"
                " to go on without it: stanchion escalation set force_open",
            )
        return None

    async def _override(self, run: Run) -> LeaseOverride | None:
        try:
            return (await self._plans.of_run(run)).lock_policy
        except (DefinitionMissing, BackendError):
            return None

    async def _reached(self, topics: set[Topic], tenant: TenantId) -> Mapping[Topic, ReachedLimit]:
        """The topic limits that keep these topics from being leased now."""
        if not self._limits.limits or not topics:
            return {}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._limits.reached(topics, tenant)
        except (BackendError, TimeoutError):
            return {}

    async def _view(self) -> ReplicaView | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._replicas.read(max_age_ms=_VIEW_MS)
        except (BackendError, TimeoutError):
            return None


_RESTORE: Final = "restore the lock store (docs/how-to/lock-incidents.md)"


def demand_for(
    topics: set[Topic], tenant: TenantId, view: ReplicaView
) -> Mapping[Topic, TopicDemand]:
    """When workers that may take the tenant's jobs last asked for each topic, on any replica.

    That no worker asked is known only if every replica has run for as long as that takes: a worker
    may have asked the process that was there before.
    """
    asked: dict[Topic, Instant] = {}
    for replica in view.replicas:
        for each in replica.summary.topics:
            if each.topic in topics and each.tenant in {None, tenant}:
                asked[each.topic] = max(each.asked_at, asked.get(each.topic, each.asked_at))
    is_known = all(
        view.at - each.summary.started_at >= NO_WORKER_MS and not each.summary.left_out
        for each in view.replicas
        if not each.is_missing
    )
    return {
        topic: TopicDemand(asked.get(topic), is_known=is_known, seen_at=view.at) for topic in topics
    }
