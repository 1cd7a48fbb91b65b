"""Invariants of the simulation, each a function that yields its violations as sentences.

Their arguments are facts, most of them from the ledger, which records independently of the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stanchion.adapters.cursor import RunPage
from stanchion.adapters.store.memory.runs import summary_of
from stanchion.adapters.store.memory.state import JobFile, MemoryState, RunFile
from stanchion.client.signals import Retrying
from stanchion.core.events import TimerKind
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Instant,
    Job,
    JobId,
    OnDecision,
    OnDelay,
    OnItems,
    OnJob,
    OnReplay,
    OnRetry,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    StepStatus,
    TenantId,
    WorkflowSource,
    split_name,
)
from stanchion.core.plan import Plan
from stanchion.core.retry import (
    Backoff,
    BoundedJitter,
    Budget,
    Exponential,
    Fixed,
    RetryClass,
    RetryPolicy,
)
from stanchion.core.settings import Settings
from stanchion.core.topic_limits import TopicLimit
from stanchion.core.transition import SetTimer, Transition
from stanchion.core.why import Finding, RunFacts, WhyCode
from stanchion.core.workflow import DelaySpec, ForEachSpec, JobSpec, StepSpec
from stanchion.ports.records import (
    JobState,
    OldestWaits,
    RunFilter,
    RunIndex,
    index_for,
    label_texts,
)

_MS: int = 1_000


# ── Beliefs ──────────────────────────────────────────────────────────────────────────────────────

_ROUNDED_MS: Final = 2.0
"""Clocks count whole milliseconds."""


def belief_is_covered(name: str, *, believed_ms: float, kept_ms: float) -> Iterator[str]:
    """A holder trusts its lease at most as long as its server keeps it."""
    if believed_ms > max(0.0, kept_ms) + _ROUNDED_MS:
        yield f"{name} is trusted for {believed_ms:.0f} ms, and kept for {kept_ms:.0f} ms"


def term_is_as_asked(
    name: str, *, until: Instant | None, now: Instant, ttl_ms: int
) -> Iterator[str]:
    """A grant or renewal lasts no longer than its term."""
    if until is None or until > now + ttl_ms:
        yield f"{name} was given until {until}, a term of {ttl_ms} ms after {now}"


def renewal_extends_what_stands(
    name: str, *, fence: int, holder: int | None, until: Instant | None, now: Instant
) -> Iterator[str]:
    """A renewal is granted only to the holder of a lease that has not ended."""
    if holder != fence or until is None or until <= now:
        yield f"{name} was renewed with fence {fence}; it is held by {holder} until {until}"


def refusal_names_an_end(
    name: str, *, in_ms: int, ends: Sequence[Instant], now: Instant
) -> Iterator[str]:
    """Who does not get a lock is told when it ends: not after every lease and ticket of it."""
    if not 0 <= in_ms <= max(ends) - now:
        yield f"{name} is said to end in {in_ms} ms; its last end is in {max(ends) - now} ms"


def owner_can_write(name: str, fence: int, *, is_written: bool) -> Iterator[str]:
    """A register refuses no holder that owns its lease: its fence is above all earlier ones."""
    if not is_written:
        yield f"{name}: the write of its owner with fence {fence} was refused"


def one_writer_per_fence(name: str, fence: int, first: str, now: str) -> Iterator[str]:
    """All writes with a fence are of one hold."""
    if first != now:
        yield f"{name}: {first} and {now} have written with fence {fence}"


def all_seen_once(
    tenant: str, *, stored: Sequence[object], seen: Sequence[object]
) -> Iterator[str]:
    """A subscriber has seen every line of the feed, once, and in its order."""
    if list(stored) == list(seen):
        return
    missed, extra = Counter(stored) - Counter(seen), Counter(seen) - Counter(stored)
    if missed or extra:
        yield f"{tenant}: {sum(missed.values())} missed {[*missed][:2]}; too many {[*extra][:2]}"
    else:
        yield f"{tenant}: the order of the feed is not that of its subscriber"


def only_old_runs_removed(
    removed: Sequence[Run], counted: int, finished_before: Instant
) -> Iterator[str]:
    """A purge removes runs that ended before the time that they are kept for, and counts them."""
    if len(removed) != counted:
        yield f"{counted} runs were removed, and {len(removed)} are gone"
    for run in removed:
        if not run.status.is_finished or (run.finished_at or 0) > finished_before:
            yield f"{run.id}, {run.status} at {run.finished_at}, was removed too early"


def within_rate(tenant: str, times_ms: Sequence[int], per_s: float) -> Iterator[str]:
    """No more single jobs than the rate and its burst allow, between any two submissions."""
    burst = max(1.0, per_s)
    for count, at in enumerate(times_ms[:-1]):
        many, span_s = len(times_ms) - count, (times_ms[-1] - at) / _MS
        if many > burst + span_s * per_s + 1e-6:
            yield f"{tenant}: {many} jobs were submitted in {span_s:.3f} s, at {per_s} a second"


def throttled_with_reason(
    tenant: str, times_ms: Sequence[int], now: Instant, per_s: float
) -> Iterator[str]:
    """A job is refused only if one more would be above the rate."""
    if not any(within_rate(tenant, [*times_ms, now], per_s)):
        yield f"{tenant}: a job was refused, and {len(times_ms)} were submitted before"


def patch_is_applied(patch: JsonObject, settings: JsonValue, at: str = "") -> Iterator[str]:
    """Every member of a patch of the settings is in them afterwards."""
    for name, wanted in patch.items():
        found = settings.get(name) if isinstance(settings, dict) else None
        if isinstance(wanted, dict):
            yield from patch_is_applied(wanted, found, f"{at}{name}.")
        elif found != wanted:
            yield f"{at}{name} was set to {wanted}, and is {found}"


# ── Admission ────────────────────────────────────────────────────────────────────────────────────


def cap_holds(tenant: str, active: int, limit: int | None) -> Iterator[str]:
    """At each admission there are no more active runs than the cap."""
    if limit is not None and active > limit:
        yield f"{tenant} has {active} active runs, and a cap of {limit}"


def topic_limits_hold(limits: Iterable[TopicLimit], leased: Iterable[Job]) -> Iterator[str]:
    """No more jobs are leased than a topic limit allows."""
    standing = [*leased]
    for limit in limits:
        if limit.max_running is None or len(standing) <= limit.max_running:
            continue  # to count by pool costs more
        covered = [job for job in standing if limit.covers(job.topic)]
        if len(covered) <= limit.max_running:
            continue
        pools = Counter(limit.pool(job.tenant).name for job in covered)
        for name, count in pools.items():
            if count > limit.max_running:
                yield f"limit {name}: {count} jobs are leased, and {limit.max_running} may be"


def slots_are_unfinished_runs(tenant: str, counted: int, unfinished: int) -> Iterator[str]:
    """A slot is held exactly while its run is unfinished."""
    if counted != unfinished:
        yield f"{tenant} has {counted} slots in use, and {unfinished} unfinished runs"


def full_at_cap(tenant: str, active: int, limit: int | None) -> Iterator[str]:
    """A tenant is called full only while it has as many active runs as its cap allows."""
    if limit is None or active < limit:
        yield f"{tenant} was called full with {active} active runs, and a cap of {limit}"


def refused_since(tenant: str, *, asked_at_s: float, refused_at_s: float) -> Iterator[str]:
    """A caller is told that its tenant is full by an answer that is not older than its question."""
    if refused_at_s < asked_at_s:
        yield f"a caller of {tenant} got a refusal of {asked_at_s - refused_at_s:.3f} s before"


def known_keys_are_found(
    tenant: str, bound: Mapping[str, Collection[str]], found: Mapping[str, str]
) -> Iterator[str]:
    """A key that is bound to a run is found with this run, also while its tenant is full."""
    for key, runs in bound.items():
        if runs and found.get(key) not in runs:
            yield f"key {key} of {tenant} has the run {', '.join(runs)}, not {found.get(key)}"


def one_run_per_key(key: tuple[str, str], runs: Collection[str]) -> Iterator[str]:
    """A key creates one run, even if several callers send it several times."""
    if len(runs) > 1:
        yield f"key {key[1]} of {key[0]} made {len(runs)} runs"


def nothing_after_deadline(what: str, *, is_late: bool, has_changed: bool) -> Iterator[str]:
    """A command that is executed after its deadline changes nothing."""
    if is_late and has_changed:
        yield f"{what} came true after its caller's time was over"


def gate_answers_in_time(took_s: float, settings: Iterable[Settings]) -> Iterator[str]:
    """A start is answered within the wait budget and half a second, also during outages."""
    most_s = max(each.admission.lock_wait_s for each in settings) + 0.5
    if took_s > most_s:
        yield f"a caller waited {took_s:.3f} s for the gate, of {most_s:.1f}"


def reused_is_what_it_was(new: RunFile, old: RunFile, steps: Collection[StepId]) -> Iterator[str]:
    """The steps and items that a rerun keeps are those of the run that it repeats."""
    for step_id in steps:
        if new.run.step(step_id) != old.run.step(step_id):
            yield f"run {new.run.id}: '{step_id}' is kept, and not what it was"
    for key, item in new.items.items():
        was = old.items.get(key)
        if item.status.is_finished and not item.dispatch:
            kept = (item.status, item.attempt, item.output, item.error)
            if was is None or kept != (was.status, was.attempt, was.output, was.error):
                yield f"run {new.run.id}: item {key} is kept, and not what it was"
        elif was is not None and was.status is StepStatus.SUCCEEDED:
            counts = new.run.step(key.step_id).items
            if counts is not None and counts.reused:
                yield f"run {new.run.id}: item {key} had succeeded, and runs again"


def versions_in_force(state: MemoryState, run: Run) -> Iterator[str]:
    """A start takes the tenant's own workflow, or else the shared one: the pinned or newest."""
    account = state.peek(run.tenant)
    pins = {} if account.config is None else account.config.workflows
    has_own = bool(account.workflows.get(run.workflow_id))
    if has_own != (run.workflow_source is WorkflowSource.OWN):
        yield f"run {run.id} began with the {run.workflow_source} '{run.workflow_id}'"
    for name, version in run.definitions.items():
        source, workflow_id = split_name(name)
        if source is WorkflowSource.OWN:
            wanted = len(account.workflows.get(workflow_id, ()))
        else:
            wanted = pins.get(workflow_id, len(state.shared.get(workflow_id, ())))
        if version != wanted:
            yield f"run {run.id} began with version {version} of {name}, in force was {wanted}"


def starter_is_actor(transition: Transition, run: Run) -> Iterator[str]:
    """The starter of a run is who asked for it; of a tick, the author of its schedule."""
    actor = next((line.actor for line in transition.timeline), None)
    is_tick = actor is not None and actor.startswith("schedule ")
    if run.starter is None or (run.starter != actor and not is_tick):
        yield f"run {run.id} was started by {actor}, and its starter is {run.starter}"


# ── Schedules and bulk actions ───────────────────────────────────────────────────────────────────


def one_run_per_tick(name: str, tick: int, runs: Collection[str]) -> Iterator[str]:
    """A tick of a schedule starts one run, however many replicas try."""
    if len(runs) > 1:
        yield f"schedule {name}: tick {tick} made {len(runs)} runs"


TICK_GRACE_MS: Final = 10_000
"""Replicas' clocks are set back by some seconds, and a start may take its whole budget."""


def tick_is_due(name: str, tick: int, *, since: int, every_ms: int, now: int) -> Iterator[str]:
    """A run is started for a tick that the schedule has, and not before its time."""
    if tick <= since or (tick - since) % every_ms:
        yield f"schedule {name}: {tick} is no tick of every {every_ms} ms since {since}"
    if tick > now:
        yield f"schedule {name}: tick {tick} was started {tick - now} ms early"


def ticks_are_looked_after(name: str, schedule: dict[str, Any], *, now: int) -> Iterator[str]:
    """The ticks of a schedule that holds none back are started or listed soon after they are due.

    A tick that is refused may be tried until the next one, and is late by its jitter. If all are
    caught up, a tenant that is full may be behind for long.
    """
    spec = schedule["spec"]
    is_behind = spec.get("overlap") == "queue" or spec.get("catch_up") == "all"
    if spec.get("paused") or is_behind:
        return
    due_ms = 1_000 * (2 * spec["every_s"] + spec.get("jitter_s", 0)) + TICK_GRACE_MS
    late_ms = now - schedule["handled"]
    if late_ms > due_ms:
        yield f"schedule {name}: no tick was handled for {late_ms} ms, and one is due each {spec}"


def ticks_have_outcomes(
    name: str, ticks: Iterable[int], *, runs: Collection[int], missed: Collection[int]
) -> Iterator[str]:
    """Every tick that was handled has a run or is listed as missed, and not both."""
    for tick in ticks:
        if (tick in runs) == (tick in missed):
            outcome = (
                "a run and is listed as missed" if tick in runs else "no run and is not listed"
            )
            yield f"schedule {name}: tick {tick} has {outcome}"


def bulk_matches(bulk_id: str, listed: Sequence[str], matching: Iterable[str]) -> Iterator[str]:
    """A bulk action lists each run that matched when it was created, once."""
    if sorted(listed) != sorted(matching):
        odd = {*listed} ^ {*matching}
        yield f"bulk {bulk_id} lists {len(listed)} runs, and {sorted(odd)} should differ"


def bulk_goes_forward(
    bulk_id: str, *, before: int, value: Mapping[str, Any], matched: int
) -> Iterator[str]:
    """The counts of a bulk action rise, and are complete when it has finished."""
    settled, taken = value.get("done", 0) + value.get("failed", 0), value.get("next", 0)
    if settled < before:
        yield f"bulk {bulk_id}: {settled} runs are settled, and {before} were"
    if not settled <= taken <= matched:
        yield f"bulk {bulk_id}: {settled} settled, {taken} taken of {matched}"
    if value.get("status") == "finished" and settled != matched:
        yield f"bulk {bulk_id} is finished with {settled} of {matched}"
    done, skipped = value.get("done", 0), value.get("skipped", 0)
    if skipped > done:
        yield f"bulk {bulk_id}: {skipped} of {done} runs that are done were skipped"


def bulk_keeps_rate(bulk_id: str, *, taken: int, most: float) -> Iterator[str]:
    """No more runs are taken than the rate allows."""
    if taken > most:
        yield f"bulk {bulk_id} has taken {taken} runs, of {most:.1f} that its rate allows"


def acted_once(act: tuple[str, str, str], times: int) -> Iterator[str]:
    """A bulk action changes a run once, also after the replica that carried it out died."""
    if times > 1:
        yield f"bulk {act[0]}: {act[1]} of {act[2]} was done {times} times"


def bulks_end(told: Mapping[str, Collection[str]], statuses: Mapping[str, str]) -> Iterator[str]:
    """A key began one bulk action, which has ended."""
    for key, bulk_ids in told.items():
        if len(bulk_ids) > 1:
            yield f"{key}: callers were told of {sorted(bulk_ids)}"
        for bulk_id in bulk_ids:
            if statuses.get(bulk_id) not in {"finished", "stopped"}:
                yield f"{key}: bulk {bulk_id} is {statuses.get(bulk_id, 'gone')}"


# ── Escalation ───────────────────────────────────────────────────────────────────────────────────


def escalation_follows(replica: str, *, is_up: bool, must_trip: bool) -> Iterator[str]:
    """A replica escalates when fallbacks are frequent for a window while duplicates rise."""
    if is_up != must_trip:
        level = "escalated" if is_up else "not escalated"
        yield f"{replica} is {level}, and its counts {'trip' if must_trip else 'do not trip'}"


def recovery_was_quiet(
    replica: str, *, quiet_ms: int, dwell_ms: int, probes: int, probes_min: int
) -> Iterator[str]:
    """A replica recovers after quiet time in which the lock store answered."""
    if quiet_ms < dwell_ms or probes < probes_min:
        yield (
            f"{replica} recovered after {quiet_ms} ms of {dwell_ms} without duplicates and failed"
            f" probes, with {probes} of {probes_min} probes"
        )


# ── Commits ──────────────────────────────────────────────────────────────────────────────────────


def chain_holds(run_id: str, *, read: Stamp, present: Stamp) -> Iterator[str]:
    """Accepted commits form one chain: each was decided on the result of the one before."""
    if read != present:
        yield f"run {run_id}: accepted a commit decided on {read}, where {present} was"


def fence_rises(what: str, *, before: int, now: int, strictly: bool = False) -> Iterator[str]:
    """Later fences are higher."""
    if now < before or (strictly and now == before):
        yield f"{what}: fence {now} after {before}"


def finished_is_absorbing(run_id: str, *, was_finished: bool) -> Iterator[str]:
    """A finished run never changes again."""
    if was_finished:
        yield f"run {run_id} changed after its end"


def unleased_only_by_policy(run_id: str, *, must_close: bool) -> Iterator[str]:
    """Classes that fail closed never work without a lease."""
    if must_close:
        yield f"run {run_id} was worked on without a lease, and its class fails closed"


def inbox_has_row(state: MemoryState, run_id: RunId) -> Iterator[str]:
    """A run with a non-empty inbox has an outbox row."""
    file = state.runs.get(run_id)
    if file is not None and file.inbox and state.outbox.due(run_id) is None:
        yield f"run {run_id} has {len(file.inbox)} events in its inbox and no row in the outbox"


def settle_overtakes_nothing(run_id: RunId, inbox: Sequence[str]) -> Iterator[str]:
    """Results are settled only if no other event waits in the inbox, and leave none there."""
    if inbox:
        yield f"run {run_id}: results were settled before {', '.join(inbox)}"


def audited_with_the_change(change: str, *, expected: int, grown: int) -> Iterator[str]:
    """A change by a person has an audit entry, and nothing else has one."""
    if grown != expected:
        yield f"{change[:200]}: {grown} audit entries instead of {expected}"


def receipts_are_kept(tenant: str, *, is_kept: bool) -> Iterator[str]:
    """Receipts of refusals that were written can be read."""
    if not is_kept:
        yield f"receipts of {tenant} were written and cannot be read"


# ── Leases ───────────────────────────────────────────────────────────────────────────────────────


def grant_is_disjoint(name: str, *, until: Instant | None, now: Instant) -> Iterator[str]:
    """A lock is granted to another holder only after the last term, which ends at ``until``."""
    if until is not None and now < until:
        yield f"{name} was granted {until - now} ms before the term of its holder ended"


def holder_owns(name: str, *, fence: int | None, owner: int | None) -> Iterator[str]:
    """A holder that trusts its lease owns it."""
    if fence != owner:
        yield f"{name}: a holder trusts fence {fence}, and the lock server has {owner}"


def job_holder_owns(job_id: str, fence: int, file: JobFile | None, now: Instant) -> Iterator[str]:
    """A worker that trusts its job lease owns it, unless the run no longer needs the job."""
    if file is None:
        yield f"{job_id}: a worker trusts its lease, and there is no such job"
    elif file.state is JobState.LEASED:
        if file.fence != fence:
            yield f"{job_id}: a worker trusts fence {fence}, and {file.fence} has it"
        elif file.expires_at is not None and now >= file.expires_at:
            yield f"{job_id}: a worker trusts a lease that ran out {now - file.expires_at} ms ago"
    elif file.state in {JobState.READY, JobState.DEAD} or file.fence != fence:
        yield f"{job_id}: a worker trusts fence {fence}, and the job is {file.state}"


def accepted_once(job_id: str, *, fence: int, holder: int | None, before: int) -> Iterator[str]:
    """A result is accepted once, and only from the current holder."""
    if before:
        yield f"{job_id}: a second result was taken"
    if holder != fence:
        yield f"{job_id}: a result of fence {fence} was taken while {holder} had the lease"


def told_stays_true(run: Run, status: RunStatus) -> Iterator[str]:
    """A run has the final status that a caller was told."""
    if run.status is not status:
        yield f"a caller was told that run {run.id} is {status}, and it is {run.status}"


def decision_stays_true(step_id: str, step: Step, verbs: Collection[str]) -> Iterator[str]:
    """A decision that a caller was told is applied is applied, and only that one."""
    is_approved = step.status is StepStatus.SUCCEEDED
    for verb in verbs:
        if (verb == "approve") is not is_approved:
            yield f"{step_id} is {step.status}, but a caller was told that {verb} succeeded"


# ── Delays ───────────────────────────────────────────────────────────────────────────────────────


def call_retries_in_bounds(delay_ms: int, settings: Iterable[Settings]) -> Iterator[str]:
    """The delay of a retried call is that for a busy run or for an unavailable backend."""
    windows: list[tuple[int, int]] = []
    for each in settings:
        busy = each.lock_busy
        error_ms = busy.backend_error_delay_ms
        jitter_ms = busy.retry.jitter_ms if isinstance(busy.retry, BoundedJitter) else 0
        windows.append(_window(busy.retry))
        windows.append((error_ms - min(jitter_ms, error_ms), error_ms + min(jitter_ms, error_ms)))
    if not any(low <= delay_ms <= high for low, high in windows):
        yield f"a call is retried after {delay_ms} ms, but policy allows {windows}"


def version_counts(run_id: str, *, before: Stamp, now: Stamp) -> Iterator[str]:
    """Every change of a run raises its version by one."""
    if now.version != before.version + 1:
        yield f"run {run_id} had version {before.version}, and has {now.version}"


def settings_in_force(
    replica: str, *, stored: Settings | None, acts_by: Settings, has_read: Settings
) -> Iterator[str]:
    """A replica acts by the settings that are stored, and has read them from the store."""
    if acts_by != stored:
        yield f"{replica} does not act by the stored settings"
    if has_read != stored:
        yield f"{replica} is not known to have read the stored settings"


def client_retries_in_bounds(
    told: Retrying, policies: Mapping[RetryClass, RetryPolicy]
) -> Iterator[str]:
    """A caller respects ``Retry-After``, and waits no longer than its policy allows."""
    policy = policies[told.retry_class]
    _, high_ms = _window(policy.backoff)
    latest_ms = max(high_ms, round(told.retry_after_ms * (1 + policy.spread)) + 1)
    if not told.retry_after_ms <= told.delay_ms <= latest_ms:
        yield f"told to wait {told.retry_after_ms} ms, a caller waits {told.delay_ms}"


def retries_in_budget(
    retry_class: RetryClass, budget: Budget, *, retries: int, elapsed_ms: int
) -> Iterator[str]:
    """The callers of one process retry no more than their budget allows."""
    most = budget.tokens_max + budget.refill_per_s * elapsed_ms / _MS
    if retries > most:
        yield f"{retries} retries of class {retry_class} within {elapsed_ms} ms, of {most:.1f}"


def retry_after_in_bounds(status: int, retry_after_ms: int | None) -> Iterator[str]:
    """429 asks for 1 to 30 s, 503 for 1 to 10 s."""
    most_ms = {429: 30_000, 503: 10_000}.get(status)
    if most_ms is not None and not (
        retry_after_ms is not None and _MS <= retry_after_ms <= most_ms
    ):
        yield f"a {status} has Retry-After of {retry_after_ms} ms"


_NOT_UNDERSTOOD: Final = frozenset({400, 401, 403, 405, 406, 413, 414, 415, 422, 500, 501})


def valid_request_is_understood(
    call: str, status: int, body: bytes, *, may_be_lost: bool = False
) -> Iterator[str]:
    """Callers send valid requests, but for a key with another input: none is called invalid.

    ``may_be_lost``: a failover may have lost the key that a cursor was sealed with.
    """
    is_other_input = b"idempotency_mismatch" in body
    is_lost_cursor = may_be_lost and b"not a cursor of this list" in body
    if status in _NOT_UNDERSTOOD and not is_other_input and not is_lost_cursor:
        yield f"{call}: {status} {body.decode()[:200]}"


def waited_as_asked(waited_s: float, asked_s: float) -> Iterator[str]:
    """A caller repeats a request not earlier than the answer has asked for."""
    if waited_s + 0.001 < asked_s:
        yield f"a caller was asked to wait for {asked_s:g} s, and waited for {waited_s:.3f} s"


def asks_no_longer_than_it_waits(what: str, asked_s: float, left_s: float) -> Iterator[str]:
    """A caller asks a server to wait no longer than the caller itself has time left."""
    if asked_s > max(0.0, left_s) + 0.003:
        yield f"{what}: {asked_s:.3f} s are asked for, and {left_s:.3f} s are left"


def tenants_take_turns(
    served: Mapping[TenantId, int], waiting: Collection[TenantId]
) -> Iterator[str]:
    """No tenant gets a second turn while another waits for its first."""
    passed_over = sorted(set(waiting) - set(served))
    if passed_over and max(served.values(), default=0) > 1:
        yield f"{', '.join(passed_over)} wait, and {dict(served)} were served"


def timers_in_bounds(plan: Plan, transition: Transition) -> Iterator[str]:
    """A retry is due within the range of its policy, a delay at its exact time."""
    at = transition.timeline[0].at if transition.timeline else None
    for effect in transition.effects:
        if not isinstance(effect, SetTimer) or effect.timer.step_id is None or at is None:
            continue
        spec, wait_ms = _spec_of(plan, effect.timer.step_id), effect.due - at
        if effect.timer.kind is TimerKind.DELAY and isinstance(spec, DelaySpec):
            if wait_ms != round(spec.delay_s * _MS):
                yield f"a delay of {spec.delay_s} s is {wait_ms} ms long"
        elif effect.timer.kind is TimerKind.RETRY and effect.timer.attempt == 0:
            if wait_ms:
                yield f"a first attempt is due in {wait_ms} ms"
        elif effect.timer.kind is TimerKind.RETRY and isinstance(spec, JobSpec | ForEachSpec):
            low_ms, high_ms = _window(spec.retry.backoff)
            if not low_ms <= wait_ms <= high_ms:
                yield f"a retry is due in {wait_ms} ms, and policy says {low_ms} to {high_ms}"


def _spec_of(plan: Plan, step_id: StepId) -> StepSpec:
    around = plan.item_steps.get(step_id)
    items = None if around is None else plan.steps[around].item_plan
    return (items or plan).steps[step_id].spec


def _window(policy: Backoff) -> tuple[int, int]:
    match policy:
        case Fixed(delay_ms):
            return delay_ms, delay_ms
        case BoundedJitter(delay_ms, jitter_ms):
            return delay_ms - jitter_ms, delay_ms + jitter_ms
        case Exponential():
            return 0, policy.cap_ms


# ── After healing ────────────────────────────────────────────────────────────────────────────────


def approvals_listed(state: MemoryState, file: RunFile) -> Iterator[str]:
    """The list of approvals has exactly the steps that wait for a decision."""
    run = file.run
    for step_id, step in run.steps.items():
        is_listed = (run.id, step_id) in state.approvals
        if is_listed is not isinstance(step.wait, OnDecision):
            yield f"run {run.id}: '{step_id}' is {step.status}, and is listed: {is_listed}"


def lists_are_scans(state: MemoryState) -> Iterator[str]:
    """What a filter lists is what a scan of all runs finds."""
    runs = sorted(
        (summary_of(file.run) for file in state.runs.values()),
        key=lambda run: (run.created_at, run.id),
        reverse=True,
    )
    filters = {RunFilter(): None, RunFilter(statuses=tuple(_FINISHED)): None}
    for run in runs:
        filters |= {
            RunFilter(statuses=(run.status,)): None,
            RunFilter(workflow_id=run.workflow_id): None,
            RunFilter(labels=tuple(label_texts(run.labels))): None,
            RunFilter(rerun_of=run.rerun_of): None,
        }
    tenants = {None: None} | {run.tenant: None for run in runs}
    for only in filters:
        fit = [run for run in runs if only.fits(run)]
        page = RunPage(only, None, max(1, len(runs)))
        for tenant in tenants:
            found = state.places.read(tenant, only, page, len(runs) + 1)
            listed = {run_id: None for _, run_id in found}
            fitting = {run.id: None for run in fit if tenant in {None, run.tenant}}
            lost = [run_id for run_id in fitting if run_id not in listed]
            gone = [run_id for run_id in listed if RunId(run_id) not in state.runs]
            # The index of a status has no others; a list by another index is filtered by it.
            wrong = [
                run_id
                for run_id in listed
                if run_id not in fitting and index_for(only, tenant) is RunIndex.STATUS
            ]
            if lost or gone or wrong or len(listed) < len(found):
                yield f"{tenant}, {only}: lost {lost}, gone {gone}, wrong {wrong}"


_FINISHED: Final = [status for status in RunStatus if status.is_finished]


def owned_queued_or_finished(
    state: MemoryState, file: RunFile, *, now: Instant, grace_ms: int, behind_ms: int = 0
) -> Iterator[str]:
    """Every part of an unfinished run has an owner or a timer, and none is overdue.

    Timers are set by clocks that may be ``behind_ms`` behind that of the store.
    """
    run = file.run
    if run.status.is_finished:
        return
    if run.status is RunStatus.QUEUED and run.id not in state.peek(run.tenant).queue:
        yield f"run {run.id} waits for a slot outside of the queue"
    due = state.outbox.due(run.id)
    if file.inbox and (due is None or due < now - grace_ms):
        yield f"run {run.id} has events that are not applied"
    for timer, at in sorted(file.timers.items(), key=lambda each: each[0].key):
        if at < now - grace_ms - behind_ms:
            yield f"run {run.id}: timer {timer.key} is overdue by {now - at} ms"
    for job in file.jobs:
        yield from _job_is_looked_after(state, job, now, grace_ms)


def _job_is_looked_after(
    state: MemoryState, job: JobId, now: Instant, grace_ms: int
) -> Iterator[str]:
    file = state.jobs[job]
    if file.state is JobState.LEASED:
        expires_at = file.expires_at
        if expires_at is None or expires_at < now - grace_ms:
            yield f"{job} has an expired lease that was not ended"
        return
    run = state.runs[file.job.run_id]
    if file.state is JobState.FINISHED and file.job.item is None and not run.inbox:
        wait = run.run.step(file.job.step_id).wait
        if isinstance(wait, OnJob) and wait.job_id == job:
            yield f"{job}: its result was accepted and is lost"


# ── Why ──────────────────────────────────────────────────────────────────────────────────────────

_JOB_CODES: Final = frozenset({WhyCode.JOB_READY, WhyCode.JOB_LEASED})
_NAMED_BY: Final[Mapping[type[object], frozenset[WhyCode]]] = {
    OnDecision: frozenset({WhyCode.APPROVAL_PENDING}),
    OnDelay: frozenset({WhyCode.DELAY_PENDING}),
    OnRetry: frozenset({WhyCode.RETRY_PENDING}),
    OnReplay: frozenset({WhyCode.DEAD_LETTER}),
    OnJob: _JOB_CODES,
    OnItems: _JOB_CODES | {WhyCode.RETRY_PENDING, WhyCode.DELAY_PENDING, WhyCode.DEAD_LETTER},
}
_STOPPED: Final = frozenset({StepStatus.CANCELLED, StepStatus.TIMED_OUT})


def why_is_true(run: Run, found: Sequence[Finding], fences: Mapping[JobId, int]) -> Iterator[str]:
    """An unfinished run has a finding, and what findings say of leases is what was granted."""
    if [each.code for each in found].count(WhyCode.FINISHED) != run.status.is_finished or not found:
        yield f"run {run.id} is {run.status}, and the findings are {found}"
    for each in found:
        blocker = each.blocked_by
        if each.code is WhyCode.JOB_LEASED and blocker is not None and blocker.id is not None:
            granted = fences.get(JobId(blocker.id))
            if granted != blocker.fence:
                yield f"{blocker.id} is said to have fence {blocker.fence}, and has {granted}"


_FAULTS_OF_INPUT: Final = frozenset({"expression_error", "invalid_input"})


def why_names_facts(facts: RunFacts, found: Sequence[Finding]) -> Iterator[str]:
    """Findings name accepted events exactly if there are some, items by number, and what helps."""
    run = facts.run
    named = [each for each in found if each.blocked_by and each.blocked_by.kind == "inbox"]
    is_looked_at = not run.status.is_finished and run.status is not RunStatus.QUEUED
    if is_looked_at and bool(facts.inbox) != bool(named):
        yield f"run {run.id} has {facts.inbox} events to be applied, and the findings are {found}"
    for each in found:
        if "item None" in each.detail:
            yield f"run {run.id}: {each.detail}"
        if each.code is WhyCode.FINISHED and run.error is not None:
            is_of_input = run.error.code in _FAULTS_OF_INPUT
            if run.error.message not in each.detail:
                yield f"run {run.id} ended with {run.error}, and why says {each.detail}"
            if ("--input" in (each.remedy or "")) != is_of_input:
                yield f"run {run.id} ended with {run.error.code}, and the remedy is {each.remedy}"


def waits_are_the_oldest(state: MemoryState, named: OldestWaits) -> Iterator[str]:
    """The run that is named waits for a slot longest, and the job that is named is ready."""
    runs = [file.run for file in state.runs.values()]
    queued = [(run.created_at, run.id) for run in runs if run.status is RunStatus.QUEUED]
    oldest = min(queued)[1] if queued else None
    if named.queued != oldest:
        yield f"{oldest} waits longest for a slot, and {named.queued} is named"
    ready = {job_id for job_id, job in state.jobs.items() if job.state is JobState.READY}
    if bool(named.ready) != bool(ready) or not ready.issuperset(named.ready):
        yield f"{named.ready} are named as ready"


def change_was_named(before: Run, after: Run, found: Sequence[Finding]) -> Iterator[str]:
    """The first change after an explanation is of something that the explanation named.

    Cancels and time-outs may come at any time. Events that were accepted before are named without
    their steps.
    """
    if after.status in {RunStatus.CANCELLED, RunStatus.TIMED_OUT}:
        return
    if any(each.step_id is None and each.code is WhyCode.RETRY_PENDING for each in found):
        return
    for step_id, was in before.steps.items():
        now, codes = after.step(step_id), _NAMED_BY.get(type(was.wait))
        if codes is None or now == was or now.status in _STOPPED:
            continue
        # Steps of items are named by their own ids.
        about = [each for each in found if f"{each.step_id}.".startswith(f"{step_id}.")]
        if not any(each.code in codes for each in about):
            said = [f"{each.code} {each.step_id}" for each in found]
            yield f"run {after.id}: '{step_id}' left {was.wait}, and why said {said}"
