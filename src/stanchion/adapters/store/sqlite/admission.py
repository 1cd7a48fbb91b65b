"""The gate: facts are gathered, judged, and an admitted run is made, all in one step."""

from __future__ import annotations

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import effects, history
from stanchion.adapters.store.sqlite.codec import (
    TENANT,
    Origin,
    encode,
    encode_some,
    encode_text,
)
from stanchion.adapters.store.sqlite.state import put_items
from stanchion.core.admission import Admitted, Facts, KeyRecord, Rate, Verdict, judge
from stanchion.core.model import Instant, TenantId
from stanchion.ports.records import Admission, Tenant

__all__ = ["admit"]

_SQL = read_statements(__package__, "sql", "admission.sql")
_DEFAULTS = Tenant()


def admit(db: Database, admission: Admission, not_after: Instant, key_ttl_ms: int) -> Verdict:
    """See ``ports.store.Runs.admit``."""
    facts, number = _facts(db, admission, not_after, key_ttl_ms)
    verdict = judge(facts)
    if isinstance(verdict, Admitted) and not facts.exists:
        _begin(db, admission, facts, number)
    return verdict


def _facts(
    db: Database, admission: Admission, not_after: Instant, key_ttl_ms: int
) -> tuple[Facts, int]:
    """What bears on it; and the number that the run would have in this file."""
    run, now = admission.run, db.now()
    found = db.first(
        _SQL["read_facts"],
        run_id=run.id,
        tenant=run.tenant,
        definitions=encode_text(admission.definitions),
    )
    assert found is not None
    exists, config, active, rate_used_until_ms, current, number = found
    if exists:
        facts = Facts(run_id=run.id, now=now, not_after=not_after, exists=True)
        return facts, number
    tenant = _DEFAULTS if config is None else TENANT.decode(config)
    rate = None
    if admission.is_rate_limited and tenant.job_rate_per_s is not None:
        rate = Rate(tenant.job_rate_per_s, rate_used_until_ms or 0.0)
    facts = Facts(
        run_id=run.id,
        now=now,
        not_after=not_after,
        key=_key(db, run.tenant, admission.key, Instant(now - key_ttl_ms)),
        fingerprint=admission.fingerprint,
        definition_is_current=current == len(admission.definitions),
        takes_slot=run.holds_slot,
        limit=tenant.max_concurrent_runs,
        active=active or 0,
        rate=rate,
    )
    return facts, number


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


def _begin(db: Database, admission: Admission, facts: Facts, number: int) -> None:
    run, transition = admission.run, admission.transition
    db.run(
        _SQL["begin_run"],
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
        entries=history.lines(transition.timeline),
    )
    put_items(db, number, run.items)
    effects.carry_out(db, number, transition.effects)
    if facts.rate is not None:
        used_until_ms = facts.rate.after_one(facts.now)
        db.run(_SQL["use_rate"], tenant=run.tenant, used_until_ms=used_until_ms)
