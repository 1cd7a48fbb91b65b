"""Why: gathers the facts about a run, and has ``core.why`` explain them; the longest waits.

The run's shard is read in one step. Locks, workers and the bus are asked besides, each within a
bound; what does not answer becomes part of the explanation. So there is an answer also while the
store or the lock store is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final, Literal, TypeAlias

import msgspec

from stanchion.core.escalation import Level
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import (
    Instant,
    JobId,
    OnDecision,
    Run,
    RunId,
    RunStatus,
    StepId,
    TenantId,
    Topic,
    WorkflowId,
    place_of,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.steps import approval
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
    WhyCode,
    store_outage,
    why,
)
from stanchion.ports.errors import BackendError, BackendUnavailable, sentence
from stanchion.services.context import Backends, Rules
from stanchion.services.escalation import EscalationService
from stanchion.services.lease_signals import LeaseHistory
from stanchion.services.limiter import SingleFlight
from stanchion.services.plans import DefinitionMissing, Plans
from stanchion.services.replicas import ReplicaReporter, ReplicaView
from stanchion.services.topic_limits import TopicLimitService
from stanchion.services.work import TenantWorkBudget

_PATIENCE_S: Final = 1.0
"""How long locks and summaries may take to answer."""
_FACT_S: Final = 0.000_015
"""The processor time of the store and of this replica for each job, timer or event of a run."""
_VIEW_MS: Final = 1_000
"""How old the summaries of other replicas may be."""
_LOCK_WAITS: Final = "lock_waits"
"""The part of a replica's summary with its runs that wait longest for their locks."""
_LOCK_WAITS_MAX: Final = 20
_LOCKED_TRIED_MAX: Final = 3
"""How many of the runs that waited for a lock are asked whether they still do."""
_RUN_LOCK: Final = "run/"


class Explanation(msgspec.Struct, frozen=True):
    """The findings about a run, the most important first."""

    run_id: RunId
    status: RunStatus | None
    """``None`` while the store does not answer."""
    as_of: Instant
    findings: tuple[Finding, ...]


WaitKind: TypeAlias = Literal["slot", "lock", "worker", "limit"]


class LongestWait(msgspec.Struct, frozen=True, kw_only=True):
    """The run that has waited longest for one kind of thing, and what ``why`` says about it."""

    waits_for: WaitKind
    run_id: RunId
    tenant: TenantId
    workflow_id: WorkflowId
    since: Instant
    finding: Finding


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
        lease_history: LeaseHistory,
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
        self._lease_history = lease_history
        self._work = work
        self._flights = SingleFlight()
        replicas.contribute(_LOCK_WAITS, self._lock_waits)

    async def explain(self, run_id: RunId, tenant: TenantId) -> Explanation | None:
        """Why the run does not go on; ``None`` if the tenant has no such run.

        Concurrent callers that ask about one run share the reads, which begin after their calls.
        The tenant is charged for them. Raises ``TenantOverloaded`` if it is over its share.
        """
        self._work.check(tenant)
        run, found = await self._flights.read(run_id, lambda: self._explain(run_id))
        return found if run is None or run.tenant == tenant else None

    async def longest_waits(self, tenant: TenantId | None) -> tuple[LongestWait, ...]:
        """The longest waits for a slot, a lock and a job, of one tenant or of all.

        A ready job waits for a worker, or for a topic limit that holds it back. The one that has
        waited longest comes first. Concurrent callers share the reads.
        """
        if tenant is not None:
            self._work.check(tenant)
        return await self._flights.read(("longest", tenant), lambda: self._longest(tenant))

    async def _longest(self, tenant: TenantId | None) -> tuple[LongestWait, ...]:
        oldest, view = await asyncio.gather(self._store.oldest_waits(tenant), self._view())
        found = await asyncio.gather(
            self._longest_queued(oldest.queued),
            self._longest_ready(oldest.ready),
            self._longest_locked(view, tenant),
        )
        return tuple(sorted(filter(None, found), key=lambda wait: wait.since))

    async def _longest_queued(self, run_id: RunId | None) -> LongestWait | None:
        return None if run_id is None else await self._wait(run_id, "slot", _FOR_SLOT)

    async def _longest_ready(self, jobs: Iterable[JobId]) -> LongestWait | None:
        """Of the first jobs of several shards, the one whose step began first."""
        places = {place.run_id: place.step_id for place in map(place_of, jobs)}
        found = await asyncio.gather(*map(self._store.load, places))
        began = {
            each.run.id: _began(each.run, places[each.run.id])
            for each in found
            if each is not None and not each.run.status.is_finished
        }
        if not began:
            return None
        first = min(began, key=lambda run_id: began[run_id])
        return await self._wait(first, "worker", _FOR_WORKER, since=began[first])

    async def _longest_locked(
        self, view: ReplicaView | None, tenant: TenantId | None
    ) -> LongestWait | None:
        waits: dict[RunId, Instant] = {}
        for replica in () if view is None else view.replicas:
            with suppress(msgspec.ValidationError):
                told = msgspec.convert(replica.summary.parts.get(_LOCK_WAITS, []), _LockWaits)
                for run_id, since in () if replica.is_missing else told:
                    waits[run_id] = min(since, waits.get(run_id, since))
        tried = 0
        for run_id in sorted(waits, key=lambda each: waits[each]):
            # The shard, with which an id begins, is that of the tenant.
            if tenant is not None and shard_of_run(run_id) != shard_of_tenant(tenant):
                continue
            wait = await self._wait(run_id, "lock", _FOR_LOCK, since=waits[run_id])
            if wait is not None and tenant in {None, wait.tenant}:
                return wait
            tried += 1
            if tried == _LOCKED_TRIED_MAX:
                break
        return None

    async def _wait(
        self,
        run_id: RunId,
        waits_for: WaitKind,
        codes: Collection[WhyCode],
        *,
        since: Instant | None = None,
    ) -> LongestWait | None:
        """The wait of a run; ``None`` if it waits for something else by now.

        A ready job that a topic limit holds back waits for the limit: more workers do not help it.
        """
        run, told = await self._flights.read(run_id, lambda: self._explain(run_id))
        if run is None or told is None:
            return None
        finding = next((each for each in told.findings if each.code in codes), None)
        if finding is None:
            return None
        is_limited = finding.code is WhyCode.TOPIC_LIMITED
        return LongestWait(
            waits_for="limit" if is_limited else waits_for,
            run_id=run_id,
            tenant=run.tenant,
            workflow_id=run.workflow_id,
            since=since or finding.since or run.created_at,
            finding=finding,
        )

    def _lock_waits(self) -> JsonValue:
        """The runs of this replica that wait longest for their locks, and since when."""
        waits = sorted(self._lease_history.waits, key=lambda wait: wait.since)
        return [
            [wait.name.removeprefix(_RUN_LOCK), wait.since]
            for wait in waits[:_LOCK_WAITS_MAX]
            if wait.name.startswith(_RUN_LOCK)
        ]

    async def _explain(self, run_id: RunId) -> tuple[Run | None, Explanation | None]:
        """The run, if it is known, and the explanation."""
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
        if facts.place is not None:
            around = Surroundings(cap=await self._cap(facts.run.tenant))
        elif not facts.run.status.is_finished:
            around = await self._around(facts)
        read = len(facts.jobs) + len(facts.timers) + len(facts.letters) + facts.inbox
        self._work.charge(facts.run.tenant, read * _FACT_S)
        told = Explanation(run_id, facts.run.status, facts.at, why(facts, around))
        return facts.run, told

    async def _cap(self, tenant: TenantId) -> int | None:
        """The tenant's cap; ``None`` if it has none, or the store does not answer now."""
        try:
            return (await self._store.tenant(tenant)).max_concurrent_runs
        except BackendError:
            return None

    async def _around(self, facts: RunFacts) -> Surroundings:
        ready = {job.topic for job in facts.jobs if job.state is OpenJobState.READY}
        found, view, limits = await asyncio.gather(
            self._lock(facts), self._view(), self._reached(ready, facts.run.tenant)
        )
        outages = [each for each in (found, self._bus(facts.at)) if isinstance(each, Outage)]
        needs_data, not_by_starter = await self._approval_rules(facts.run)
        return Surroundings(
            lock=found if isinstance(found, RunLock) else None,
            closed=await self._closed(facts.run, found) if isinstance(found, Outage) else None,
            outages=tuple(outages),
            topics={} if view is None else demand_for(ready, facts.run.tenant, view),
            limits=limits,
            needs_data=needs_data,
            not_by_starter=not_by_starter,
        )

    async def _approval_rules(self, run: Run) -> tuple[frozenset[StepId], frozenset[StepId]]:
        """The approvals that the run waits for and that need data, or another than its starter."""
        waiting = [each for each, step in run.steps.items() if isinstance(step.wait, OnDecision)]
        if not waiting:
            return frozenset(), frozenset()
        try:
            steps = (await self._plans.of_run(run)).steps
        except (DefinitionMissing, BackendError):
            return frozenset(), frozenset()
        with self._work.measured(run.tenant):
            return (
                frozenset(
                    each
                    for each in waiting
                    if approval.data_faults(steps[each], None, approve=True)
                ),
                frozenset(
                    each for each in waiting if approval.rule_against(steps[each], run, run.starter)
                )
                if run.starter is not None
                else frozenset(),
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
        """The rule by which the run waits for the lock store; ``None`` if it continues without."""
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
            who = "" if is_own else ", an admin can change the setting"
            return ClosedClass(
                rule=f"{rule} = fail_closed",
                since=outage.since,
                seen_at=outage.seen_at,
                remedy=f"{_RESTORE}; to go on without it{who}: {other}",
            )
        if self._rules.closes(run.risk):
            level = Level(self._escalating.level).name.lower()
            return ClosedClass(
                rule=f"escalation is {level} and closes {run.risk}",
                since=self._escalating.changed_at,
                seen_at=outage.seen_at,
                remedy=f"{_RESTORE}, then an operator can clear it: stanchion escalation clear;"
                " to go on without the lock store, an operator can open it:"
                " stanchion escalation set force_open",
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


_LockWaits: TypeAlias = list[tuple[RunId, Instant]]
_FOR_SLOT: Final = frozenset({WhyCode.QUEUED})
_FOR_WORKER: Final = frozenset({WhyCode.JOB_READY, WhyCode.NO_WORKER, WhyCode.TOPIC_LIMITED})
_FOR_LOCK: Final = frozenset({WhyCode.RUN_LOCKED, WhyCode.CLASS_CLOSED})


def _began(run: Run, step_id: StepId) -> Instant:
    """When a step began; the steps of an item began with the step of the for-each."""
    name: str = step_id
    while name:
        step = run.steps.get(StepId(name))
        if step is not None and step.started_at is not None:
            return step.started_at
        name = name.rpartition(".")[0]
    return run.created_at


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
