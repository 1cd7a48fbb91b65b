"""Checks after the faults have ended, and after all runs have ended."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, cast

from stanchion.adapters.store.memory.state import MemoryState
from stanchion.core.escalation import Level
from stanchion.core.model import Instant, Run, RunId, StepId, TenantId
from stanchion.services.replicas import MISSING_MS
from stanchion.sim import invariants as must
from stanchion.sim.meaning import check_told
from stanchion.sim.queue_ledger import gave_up_waiting
from stanchion.sim.shown import is_whole_ms, same_count
from stanchion.sim.workload import CAPS

if TYPE_CHECKING:
    from stanchion.sim.replica import Replica
    from stanchion.sim.world import World

_GRACE_MS: Final = 3_000
_DWELL_S_MAX: Final = 60
"""Replicas with a longer dwell time are not waited for."""
_ORDER_GRACE_MS: Final = 10_000
"""Replicas look every two seconds, by clocks that are set back by some seconds."""


def check_looked_after(world: World) -> None:
    """Check, soon after the last fault, that every run is owned, queued or finished."""
    state, now = world.store.real.state, world.store.clock.now()
    _check_lists(world)
    # A timer that a replica has just set is late by as much as its clock was set back.
    behind_ms = max(0, *(-each.clock.step_ms for each in world.replicas))
    for file in state.runs.values():
        said = must.owned_queued_or_finished(
            state, file, now=now, grace_ms=_GRACE_MS, behind_ms=behind_ms
        )
        world.history.check("owned, queued or finished", said)
    for name, document in state.documents.get("schedule", {}).items():
        schedule = cast("dict[str, Any]", document.value)
        said = must.ticks_are_looked_after(name, schedule, now=now)
        world.history.check("every tick has one outcome", said)


def _check_lists(world: World) -> None:
    world.history.check("lists equal scans", must.lists_are_scans(world.store.real.state))


def tell_unfinished(world: World) -> None:
    """Report the runs that have not ended in time."""
    state = world.store.real.state
    said = [
        f"run {run_id} is {file.run.status}: {sorted(file.inbox)} {_waits(file.run)}"
        for run_id, file in state.runs.items()
        if not file.run.status.is_finished
    ]
    if not world.operators.is_done():
        documents = state.documents
        said += [f"bulk {name} is running" for name in documents.get("bulk_running", {})]
        said += [f"schedule {each.value}" for each in documents.get("schedule", {}).values()]
    world.history.check("everything ends", said or ["a caller still waits"])


def check_end(world: World) -> None:
    """Check that no work is left, and that answers to callers and metrics are correct."""
    state, history = world.store.real.state, world.history
    left = [
        *(f"{len(state.outbox)} rows are left in the outbox" for _ in range(len(state.outbox))),
        *(f"jobs are ready: {topic}" for topic in state.ready.counts()),
        *(
            f"a lease of {job_id} is left"
            for job_id in world.ledger.jobs.leases
            if state.leases.due(job_id) is not None
        ),
        *(f"{name} is locked" for name in world.locks.real.names()),
    ]
    left += [f"an approval of {run_id} is listed" for run_id, _ in state.approvals]
    history.check("nothing is left", left)
    for tenant in CAPS:
        history.check(
            "slots equal unfinished runs",
            must.slots_are_unfinished_runs(tenant, state.peek(TenantId(tenant)).active, 0),
        )
        world.ledger.budgets.compare(TenantId(tenant))
    _check_summaries(world)
    _check_lists(world)
    _check_levels(world)
    _check_settings(world)
    if not world.scenario.profile.store_loses:
        _check_told(world)
        check_told(world)
        world.ledger.bulks.check_end(state, world.operators.told)
    _check_metrics(world)
    _check_shown(world)


def _check_summaries(world: World) -> None:
    """Check that every replica is known by its summary, and that none is missing."""
    stored = world.store.real.state.summaries.read(world.store.clock.now())
    seen_at = {each.replica: each.seen_at for each in stored.summaries}
    names = [replica.process.name for replica in world.replicas if replica.is_up]
    world.history.check(
        "every replica reports",
        [
            f"{name} reported last at {seen_at.get(name)}, and it is {stored.at}"
            for name in names
            if stored.at - seen_at.get(name, Instant(0)) > MISSING_MS
        ],
    )


def is_escalated(world: World) -> bool:
    """Whether a replica is escalated, and must recover within minutes."""
    return any(_must_recover(replica) for replica in world.replicas)


def _must_recover(replica: Replica) -> bool:
    service = replica.services.escalating
    is_level_open = service.level is not Level.ESCALATED or service.forced is not None
    dwell_s = replica.services.settings.current.escalation.dwell_s
    return not is_level_open and dwell_s < _DWELL_S_MAX


def _check_levels(world: World) -> None:
    """Check that no replica is escalated for ever: unless latched or ordered, it recovers."""
    world.history.check(
        "escalation ends",
        [
            f"{replica.process.name} is escalated long after the last fault"
            for replica in world.replicas
            if _must_recover(replica)
        ],
    )
    order = world.store.real.state.documents.get("escalation", {}).get("order")
    ends_at = None if order is None else cast("dict[str, Any]", order.value)["expires_at"]
    if ends_at is not None and world.store.clock.now() > ends_at + _ORDER_GRACE_MS:
        world.history.check(
            "escalation ends",
            [
                f"{replica.process.name} obeys an order that ended at {ends_at}"
                for replica in world.replicas
                if replica.is_up and replica.services.escalating.forced is not None
            ],
        )


def _check_settings(world: World) -> None:
    """Check that every replica acts by the stored settings, and that the ledger knows it."""
    stored = world.store.real.state.documents.get("settings", {}).get("current")
    if stored is None:
        return
    expected = world.ledger.settings_in(stored.value)
    for replica in world.replicas:
        if not replica.is_up:
            continue
        name = replica.process.name
        said = must.settings_in_force(
            name,
            stored=expected,
            acts_by=replica.services.settings.current,
            has_read=world.ledger.last_read_settings(name),
        )
        world.history.check("settings are in force everywhere", said)


def _check_told(world: World) -> None:
    state = world.store.real.state
    for callers in world.callers:
        world.history.check(
            "a run is found by its label",
            [
                f"{key}: run {run_id} is not listed"
                for key, run_id in callers.unlisted.items()
                if run_id not in world.ledger.purged
            ],
        )
        for key, run_ids in callers.started.items():
            kept = state.runs.keys() | world.ledger.purged
            missing = [run_id for run_id in run_ids if run_id not in kept]
            world.history.check(
                "every answered start exists",
                [f"{key}: run {run_id} is not there" for run_id in missing],
            )
            # A key is forgotten with its run: the ledger judges each start when it is made.
            begun = {
                each
                for each in run_ids
                if each not in world.ledger.purged and not gave_up_waiting(_run(state, each))
            }
            said = [f"{key}: callers were told of {sorted(begun)}"] if len(begun) > 1 else []
            world.history.check("one run per key", said)
        for run_id, status in callers.told.items():
            if run_id in world.ledger.purged:
                continue
            run = state.runs[RunId(run_id)].run
            world.history.check(
                "what a caller was told stays true", must.told_stays_true(run, status)
            )
    verbs: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for callers in world.callers:
        for place, said_yes in callers.decided.items():
            verbs[place] |= said_yes
    for (run_id, step_id), told in verbs.items():
        if run_id in world.ledger.purged:
            continue
        step = state.runs[RunId(run_id)].run.step(StepId(step_id))
        world.history.check(
            "the first decision counts", must.decision_stays_true(step_id, step, list(told))
        )


def _run(state: MemoryState, run_id: str) -> Run | None:
    file = state.runs.get(RunId(run_id))
    return None if file is None else file.run


def _check_metrics(world: World) -> None:
    for replica in world.replicas:
        tally = world.ledger.tallies[replica.process.name]
        for name in (
            "commit_conflicts",
            "runs_finished",
            "scheduler_job_lock_abandoned",
            "workflow_lock_fallback",
            "admission_decisions",
            "topic_limit_leases",
        ):
            counted, seen = replica.metric_sum(f"{name}_total"), tally[name]
            # A commit decided on a cached run may conflict with that of another replica. This is
            # not a duplicate writer, and is not counted.
            is_so = counted <= seen if name == "commit_conflicts" else counted == seen
            said = [f"{replica.process.name}: {name} is {counted}, and {seen} were seen"]
            world.history.check("metrics equal the history", [] if is_so else said)


def _check_shown(world: World) -> None:
    """Check what replicas and workers show of themselves."""
    up = {replica.process.name for replica in world.replicas if replica.is_up}
    up |= {each.process.name for each in world.workers if not each.process.is_dead}
    world.ledger.log.check_end(up)
    check = world.history.check
    for replica in world.replicas:
        name, shown = replica.process.name, replica.metric_sum
        duplicates = shown("commit_conflicts_total") + shown("duplicate_completions_total")
        fallbacks = shown("workflow_lock_fallback_total")
        counted = replica.escalation.counts
        for what, seen in (("duplicates", duplicates), ("fallbacks", fallbacks)):
            said = same_count(f"{name}: {what} for escalation", shown=counted[what], seen=seen)
            check("escalation counts each of its causes", said)
        for what in ("run_lock_held_seconds_sum", "run_lock_wait_seconds_sum"):
            check("durations are of whole milliseconds", is_whole_ms(what, shown(what)))


def _waits(run: Run) -> dict[str, str]:
    return {step_id: str(step.wait) for step_id, step in run.steps.items() if step.wait is not None}
