"""Admission: reads the facts, judges them and creates the run, in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from stanchion.adapters.outcomes import queued_admission
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.store.sqlite.audit import add_audit
from stanchion.adapters.store.sqlite.batches import AlikeRows, PreparedAdmissions
from stanchion.adapters.store.sqlite.budgets import present_tallies, reserve_budgets, settle_budgets
from stanchion.adapters.store.sqlite.codec import (
    ANY_RUN,
    SQL,
    TENANT,
    Origin,
    encode,
    encode_some,
    encode_text,
    pending_key,
    pending_run,
    slot_taken,
    slots_pending,
)
from stanchion.adapters.store.sqlite.queue import enqueue, promote, queue_position
from stanchion.adapters.store.sqlite.runs import carry_out, put_items, timeline_lines
from stanchion.core.admission import (
    Admitted,
    Facts,
    KeyRecord,
    Queued,
    Rate,
    Refused,
    Verdict,
    judge,
    refusal,
)
from stanchion.core.budget import BudgetTally, over_budget
from stanchion.core.model import Instant, Risk, Run, RunId, TenantId, WorkflowId, WorkflowSource
from stanchion.core.queue import OnFull
from stanchion.core.schedule import TickMark
from stanchion.ports.records import Admission, StartsChecked, StartTerms, Tenant, label_texts

__all__ = ["admit", "admit_many", "check_starts"]

_DEFAULTS = Tenant()


class _Standing(NamedTuple):
    """The stored facts about a tenant and a workflow, without pending rows."""

    tenant: Tenant
    active: int
    queued: int
    rate_used_until_ms: float
    is_current: bool
    """Whether the definitions that were decided on are in force."""
    next_run: int
    """The number of the next run."""


class _Read(NamedTuple):
    """What was read at once for the admissions of one call."""

    keys: Mapping[str, KeyRecord]
    runs: Collection[str]
    """The runs that exist: the same call was executed before."""


_NOTHING_KNOWN: Final = _Read({}, ())


def admit(
    db: Database,
    admission: Admission,
    not_after: Instant,
    key_ttl_ms: int,
    read: _Read | None = None,
    *,
    promotes: bool = True,
) -> Verdict:
    """See ``ports.store.Runs.admit``. ``read``: what is known of its run and key, if it is."""
    run = admission.run
    if read is None:
        db.settle(pending_run(run.id), pending_key(run.tenant, admission.key))
    if admission.is_rate_limited or admission.tick is not None:
        db.pending.write()
    asked = (run.tenant, *admission.definitions.items())
    standing: _Standing | None = db.pending.known.get(asked)
    is_known, exists = standing is not None, read is not None and run.id in read.runs
    if standing is None:
        exists, standing = _read_standing(db, run.tenant, admission.definitions, run.id)
        db.pending.known[asked] = standing
    limits = standing.tenant.budgets
    tallies = present_tallies(db, run.tenant, limits) if limits else {}
    facts = _facts(db, admission, standing, tallies, not_after, key_ttl_ms, read)
    verdict = judge(replace(facts, exists=True) if exists else facts)
    if standing.queued or isinstance(verdict, Queued):
        return _admit_in_turn(db, admission, not_after, key_ttl_ms, promotes=promotes)
    if is_known and read is None and not isinstance(verdict, Admitted):
        # Only the first admission of a batch checks whether its run exists, and the others before
        # they are refused. Writing a run that exists fails: then the batch is repeated one by one.
        exists, _ = _read_standing(db, run.tenant, admission.definitions, run.id)
        verdict = judge(replace(facts, exists=exists))
    if isinstance(verdict, Admitted) and not exists:
        number = standing.next_run + db.pending.touched(ANY_RUN)
        _begin(db, admission, facts, number)
        if tallies:
            _reserve(db, admission, number, tallies)
    return verdict


def admit_many(
    db: Database, admissions: PreparedAdmissions, not_after: Instant, key_ttl_ms: int
) -> tuple[Verdict, ...]:
    """See ``ports.store.Runs.admit_many``."""
    if not admissions:
        return ()
    if admissions.alike is not None:
        verdicts_alike = _admit_alike(db, admissions.alike, not_after)
        if verdicts_alike is not None:
            return verdicts_alike
    tenant = admissions[0].run.tenant
    runs = [each.run.id for each in admissions]
    keys = [each.key for each in admissions if each.key is not None]
    db.settle(*map(pending_run, runs), *(pending_key(tenant, key) for key in keys))
    found = db.peek_every(SQL["read_known_runs"], runs=encode_text(runs))
    read = _Read(_records(db, tenant, keys, key_ttl_ms), {run_id for (run_id,) in found})
    verdicts: list[Verdict] = []
    seen_runs, seen_keys = set[RunId](), set[str | None]()
    for each in admissions:
        # What was read does not hold for a key or a run of an earlier one of them.
        is_first = each.run.id not in seen_runs and each.key not in seen_keys
        seen_runs.add(each.run.id)
        if each.key is not None:
            seen_keys.add(each.key)
        known = read if is_first else None
        if known is None:
            db.pending.write()  # so that it is read whether this run exists
        # Waiting runs are promoted once in a step.
        verdicts.append(admit(db, each, not_after, key_ttl_ms, known, promotes=not verdicts))
    return tuple(verdicts)


def _admit_alike(db: Database, rows: AlikeRows, not_after: Instant) -> tuple[Verdict, ...] | None:
    """Admit runs that begin alike together; ``None`` if each must be judged by itself."""
    first = rows.first
    run = first.run
    db.pending.write()
    found = db.peek(
        SQL["read_batch_facts"],
        runs=rows.runs,
        keys=rows.keys,
        tenant=run.tenant,
        definitions=encode_text(first.definitions),
    )
    assert found is not None
    is_known, *facts_read, next_job, position = found
    standing = _standing(facts_read, first.definitions)
    if is_known or standing.queued or standing.tenant.budgets:
        return None
    facts = _facts(db, first, standing, {}, not_after, 0, _NOTHING_KNOWN)
    # Each takes a slot: if the last one is admitted, so are those before it.
    last = replace(facts, active=facts.active + rows.number - 1)
    if not isinstance(judge(last), Admitted):
        return None
    db.insert(SQL["stage_row"], rows.staged)
    db.run(
        SQL["begin_batch"],
        run=standing.next_run,
        count=rows.number,
        first=run.id,
        tenant=run.tenant,
        workflow_id=run.workflow_id,
        workflow_version=run.workflow_version,
        created_at=run.created_at,
        status=run.status,
        version=run.stamp.version,
        nonce=run.stamp.nonce,
        fence=run.fence,
        entries=timeline_lines(first.transition.timeline),
        kinds=rows.kinds,
        timers=rows.timers,
        job=next_job,
        ticket=db.tickets(len(rows.staged)),
        position=position,
    )
    return rows.verdicts


def check_starts(
    db: Database,
    tenant: TenantId,
    terms: Sequence[StartTerms],
    keys: Collection[str],
    key_ttl_ms: int,
) -> StartsChecked:
    """See ``ports.store.Runs.check_starts``."""
    db.pending.write()
    return StartsChecked(
        tuple(_refusal(db, tenant, each) for each in terms),
        _records(db, tenant, keys, key_ttl_ms),
    )


def _records(
    db: Database, tenant: TenantId, keys: Collection[str], key_ttl_ms: int
) -> dict[str, KeyRecord]:
    """The records of those of the keys that are known. No pending row may concern them."""
    if not keys:
        return {}
    aged_before = Instant(db.now() - key_ttl_ms)
    rows = db.peek_every(SQL["read_keys"], tenant=tenant, keys=encode_text([*keys]))
    found = ((key, _record(row, aged_before)) for key, *row in rows)
    return {key: record for key, record in found if record is not None}


def _refusal(db: Database, tenant: TenantId, terms: StartTerms) -> Refused | None:
    _, standing = _read_standing(db, tenant, terms.definitions)
    config, now = standing.tenant, db.now()
    tallies = present_tallies(db, tenant, config.budgets) if config.budgets else {}
    return refusal(
        Facts(
            run_id=RunId(""),
            now=now,
            not_after=now,
            definition_is_current=standing.is_current,
            over_budget=over_budget(config.budgets, tallies, terms.budget) if tallies else None,
            limit=config.max_concurrent_runs,
            active=standing.active,
            on_full=config.on_full,
            asked_on_full=terms.on_full,
            queued=standing.queued,
            queue_max=config.queue_max,
        )
    )


def _reserve(
    db: Database, admission: Admission, number: int, tallies: Mapping[str, BudgetTally]
) -> None:
    run = admission.run
    reserve_budgets(db, run.tenant, number, tallies, admission.budget)
    if run.status.is_finished:
        settle_budgets(db, run.tenant, number)


def _admit_in_turn(
    db: Database, admission: Admission, not_after: Instant, key_ttl_ms: int, *, promotes: bool
) -> Verdict:
    """Admit a run of a tenant with a queue: after those that wait for longer."""
    run = admission.run
    db.pending.write()
    if promotes:
        promote(db, run.tenant)
    exists, standing = _read_standing(db, run.tenant, admission.definitions, run.id)
    number, limits = standing.next_run, standing.tenant.budgets
    tallies = present_tallies(db, run.tenant, limits) if limits else {}
    facts = _facts(db, admission, standing, tallies, not_after, key_ttl_ms)
    position = queue_position(db, run.id) if exists else None
    verdict = judge(replace(facts, exists=exists, position=position))
    if exists or not isinstance(verdict, Admitted | Queued):
        return verdict
    if isinstance(verdict, Queued):
        admission = queued_admission(admission, standing.tenant.queue_wait_ms)
    _begin(db, admission, facts, number)
    if tallies:
        _reserve(db, admission, number, tallies)
    if isinstance(verdict, Queued):
        enqueue(db, number, run.tenant, admission.queue)
        return Queued(run.id, queue_position(db, run.id) or 0)
    return verdict


def _read_standing(
    db: Database, tenant: TenantId, definitions: Mapping[WorkflowId, int], run_id: str = ""
) -> tuple[bool, _Standing]:
    found = db.peek(
        SQL["read_facts"],
        run_id=run_id,
        tenant=tenant,
        definitions=encode_text(definitions),
    )
    assert found is not None
    exists, *facts = found
    return bool(exists), _standing(facts, definitions)


def _standing(facts: Sequence[Any], definitions: Mapping[WorkflowId, int]) -> _Standing:
    config, active, queued, rate_used_until_ms, current, next_run = facts
    return _Standing(
        tenant=_DEFAULTS if config is None else TENANT.decode(config),
        active=active or 0,
        queued=queued or 0,
        rate_used_until_ms=rate_used_until_ms or 0.0,
        is_current=current == len(definitions),
        next_run=next_run,
    )


def _facts(
    db: Database,
    admission: Admission,
    standing: _Standing,
    tallies: Mapping[str, BudgetTally],
    not_after: Instant,
    key_ttl_ms: int,
    read: _Read | None = None,
) -> Facts:
    run, now, tenant = admission.run, db.now(), standing.tenant
    if read is None:
        key = _key(db, run.tenant, admission.key, Instant(now - key_ttl_ms))
    else:
        key = None if admission.key is None else read.keys.get(admission.key)
    rate = None
    if admission.is_rate_limited and tenant.job_rate_per_s is not None:
        rate = Rate(tenant.job_rate_per_s, standing.rate_used_until_ms)
    return Facts(
        run_id=run.id,
        now=now,
        not_after=not_after,
        key=key,
        fingerprint=admission.fingerprint,
        tick_taken=None if admission.tick is None else _taken(db, run.tenant, admission.tick),
        definition_is_current=standing.is_current,
        over_budget=over_budget(tenant.budgets, tallies, admission.budget) if tallies else None,
        takes_slot=run.holds_slot,
        limit=tenant.max_concurrent_runs,
        active=standing.active + slots_pending(db, run.tenant),
        on_full=OnFull.REJECT if admission.before is None else tenant.on_full,
        asked_on_full=admission.queue.on_full,
        queued=standing.queued,
        queue_max=tenant.queue_max,
        rate=rate,
    )


def _key(db: Database, tenant: TenantId, key: str | None, aged_before: Instant) -> KeyRecord | None:
    if key is None:
        return None
    found = db.peek(SQL["read_key"], tenant=tenant, key=key)
    return None if found is None else _record(found, aged_before)


def _record(row: Sequence[Any], aged_before: Instant) -> KeyRecord | None:
    """The record of a key; ``None`` if it is kept no longer."""
    fingerprint, run_id, ended_at = row
    return (
        None if ended_at is not None and ended_at <= aged_before else KeyRecord(fingerprint, run_id)
    )


def _taken(db: Database, tenant: TenantId, tick: TickMark) -> tuple[int, int] | None:
    found = db.peek(SQL["read_tick"], tenant=tenant, schedule=tick.schedule_id)
    return tick.taken_by(None if found is None else (found[0], found[1]))


def _begin(db: Database, admission: Admission, facts: Facts, number: int) -> None:
    run, transition = admission.run, admission.transition
    db.later(
        SQL["begin_run"],
        run=number,
        id=run.id,
        tenant=run.tenant,
        workflow_id=run.workflow_id,
        workflow_version=run.workflow_version,
        created_at=run.created_at,
        holds_slot=run.holds_slot,
        key=admission.key,
        fingerprint=admission.fingerprint,
        status=run.status,
        finished_at=run.finished_at,
        ended_at=facts.now if run.status.is_finished else None,
        version=run.stamp.version,
        nonce=run.stamp.nonce,
        fence=run.fence,
        error=encode_some(run.error),
        output=encode_some(run.output),
        origin=encode(Origin.of(run)),
        steps=encode_text(run.steps),
        entries=timeline_lines(transition.timeline),
    )
    db.pending.touch(ANY_RUN)
    db.pending.touch(pending_run(run.id))
    if admission.key is not None:
        db.pending.touch(pending_key(run.tenant, admission.key))
    if run.holds_slot and run.status.uses_slot:
        db.pending.touch(slot_taken(run.tenant))
    if run.workflow_source is WorkflowSource.SHARED and not run.status.is_finished:
        db.later(
            SQL["begin_shared_run"], run=number, workflow_id=run.workflow_id, tenant=run.tenant
        )
    if run.labels or run.rerun_of is not None or run.risk is not Risk.STANDARD:
        _mark(db, number, run)
    put_items(db, number, run.items, run.steps)
    carry_out(db, number, run.tenant, transition.effects)
    if admission.tick is not None:
        tick = admission.tick
        db.run(
            SQL["put_tick"],
            tenant=run.tenant,
            schedule=tick.schedule_id,
            generation=tick.generation,
            tick=tick.tick,
        )
    if facts.rate is not None:
        used_until_ms = facts.rate.after_one(facts.now)
        db.run(SQL["use_rate"], tenant=run.tenant, used_until_ms=used_until_ms)
    if admission.audit is not None:
        add_audit(db, admission.audit)


def _mark(db: Database, number: int, run: Run) -> None:
    db.later(
        SQL["mark_run"],
        run=number,
        tenant=run.tenant,
        created_at=run.created_at,
        id=run.id,
        risk=run.risk,
        labels=encode(run.labels) if run.labels else None,
        rerun_of=run.rerun_of,
        texts=encode_text(label_texts(run.labels)),
    )
