"""The gate: facts are gathered, judged, and an admitted run is made, all in one step."""

from __future__ import annotations

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import effects, history
from stanchion.adapters.store.sqlite.codec import TENANT, Origin, encode, encode_some
from stanchion.adapters.store.sqlite.state import put_items, put_steps
from stanchion.core.admission import Admitted, Facts, KeyRecord, Rate, Verdict, judge
from stanchion.core.model import Instant, TenantId, WorkflowId
from stanchion.ports.records import Admission, Tenant

__all__ = ["admit"]

_SQL = read_statements(__package__, "sql", "admission.sql")
_DEFAULTS = Tenant()


def admit(db: Database, admission: Admission, not_after: Instant, key_ttl_ms: int) -> Verdict:
    """See ``ports.store.Runs.admit``."""
    facts = _facts(db, admission, not_after, key_ttl_ms)
    verdict = judge(facts)
    if isinstance(verdict, Admitted) and not facts.exists:
        _begin(db, admission, facts)
    return verdict


def _facts(db: Database, admission: Admission, not_after: Instant, key_ttl_ms: int) -> Facts:
    run, now = admission.run, db.now()
    found = db.first(_SQL["read_facts"], run_id=run.id, tenant=run.tenant)
    assert found is not None
    exists, config, active, rate_used_until_ms = found
    if exists:
        return Facts(run_id=run.id, now=now, not_after=not_after, exists=True)
    tenant = _DEFAULTS if config is None else TENANT.decode(config)
    rate = None
    if admission.is_rate_limited and tenant.job_rate_per_s is not None:
        rate = Rate(tenant.job_rate_per_s, rate_used_until_ms or 0.0)
    return Facts(
        run_id=run.id,
        now=now,
        not_after=not_after,
        key=_key(db, run.tenant, admission.key, Instant(now - key_ttl_ms)),
        fingerprint=admission.fingerprint,
        definition_is_current=all(
            _is_newest(db, run.tenant, *definition) for definition in admission.definitions.items()
        ),
        takes_slot=run.holds_slot,
        limit=tenant.max_concurrent_runs,
        active=active or 0,
        rate=rate,
    )


def _key(db: Database, tenant: TenantId, key: str | None, aged_before: Instant) -> KeyRecord | None:
    if key is None:
        return None
    found = db.first(_SQL["read_key"], tenant=tenant, key=key)
    if found is None:
        return None
    fingerprint, run_id, ended_at = found
    if ended_at is not None and ended_at <= aged_before:
        return None
    return KeyRecord(fingerprint, run_id)


def _is_newest(db: Database, tenant: TenantId, workflow_id: WorkflowId, version: int) -> bool:
    newest = db.first(_SQL["newest_version"], tenant=tenant, workflow_id=workflow_id)
    return newest is not None and newest[0] == version


def _begin(db: Database, admission: Admission, facts: Facts) -> None:
    run = admission.run
    is_finished = run.status.is_finished
    made = db.first(
        _SQL["insert_run"],
        id=run.id,
        tenant=run.tenant,
        workflow_id=run.workflow_id,
        workflow_version=run.workflow_version,
        created_at=run.created_at,
        holds_slot=run.holds_slot,
        key=admission.key,
        status=run.status,
        finished_at=run.finished_at,
        ended_at=facts.now if is_finished else None,
        version=run.stamp.version,
        nonce=run.stamp.nonce,
        fence=run.fence,
        error=encode_some(run.error),
        output=encode_some(run.output),
    )
    assert made is not None
    number: int = made[0]
    db.run(_SQL["insert_origin"], run=number, origin=encode(Origin.of(run)))
    put_steps(db, number, run.steps)
    put_items(db, number, run.items)
    effects.carry_out(db, number, admission.transition.effects)
    history.write(db, run.tenant, number, admission.transition.timeline)
    if admission.key is not None:
        db.run(
            _SQL["bind_key"],
            tenant=run.tenant,
            key=admission.key,
            run=number,
            fingerprint=admission.fingerprint,
        )
    if run.holds_slot and not is_finished:
        db.run(_SQL["take_slot"], tenant=run.tenant)
    if facts.rate is not None:
        used_until_ms = facts.rate.after_one(facts.now)
        db.run(_SQL["use_rate"], tenant=run.tenant, used_until_ms=used_until_ms)
