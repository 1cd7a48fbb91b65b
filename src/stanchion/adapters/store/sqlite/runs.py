"""Runs: loaded whole, changed by commits that take only what is current."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import about, effects, history
from stanchion.adapters.store.sqlite.codec import (
    FAILURE,
    INBOX,
    ORIGIN,
    STEPS,
    VALUE,
    encode_some,
    encode_text,
)
from stanchion.adapters.store.sqlite.state import put_items, read_items
from stanchion.core.model import Item, ItemKey, Run, RunId, RunStatus, Stamp, StepId, TenantId
from stanchion.ports.records import (
    Commit,
    CommitAnswer,
    Committed,
    Conflict,
    Gone,
    InboxEntry,
    Loaded,
    StaleFence,
)

__all__ = ["active_runs", "commit", "items_at", "load"]

_SQL = read_statements(__package__, "sql", "runs.sql")


def load(db: Database, run_id: RunId) -> Loaded | None:
    """See ``ports.store.Runs.load``."""
    found = db.first(_SQL["load_run"], run_id=run_id)
    if found is None:
        return None
    id_, tenant, workflow_id, workflow_version, created_at, *rest = found
    holds_slot, status, finished_at, version, nonce, fence, error, output, body, *others = rest
    steps, inbox = others
    origin = ORIGIN.decode(body)
    run = Run(
        id=id_,
        tenant=tenant,
        workflow_id=workflow_id,
        workflow_version=workflow_version,
        input=origin.input,
        created_at=created_at,
        uses=origin.uses,
        risk=origin.risk,
        holds_slot=bool(holds_slot),
        rerun_of=origin.rerun_of,
        status=RunStatus(status),
        output=None if output is None else VALUE.decode(output),
        error=None if error is None else FAILURE.decode(error),
        finished_at=finished_at,
        steps=STEPS.decode(steps),
        stamp=Stamp(version, nonce),
        fence=fence,
    )
    entries = sorted(INBOX.decode(inbox), key=itemgetter(0))
    return Loaded(run, tuple(InboxEntry(entry_id, event) for _, entry_id, event in entries))


def items_at(
    db: Database, run_id: RunId, stamp: Stamp, wanted: Mapping[StepId, Sequence[int]]
) -> dict[ItemKey, Item] | None:
    """See ``ports.store.Runs.items_at``."""
    found = db.first(_SQL["read_stamp"], run_id=run_id)
    if found is None:
        return None
    *_, version, nonce, _ = found
    return read_items(db, run_id, wanted) if Stamp(version, nonce) == stamp else None


def commit(db: Database, wanted: Commit) -> CommitAnswer:
    """See ``ports.store.Runs.commit``."""
    db.settle(about.run(wanted.run_id))
    found = db.peek(_SQL["read_stamp"], run_id=wanted.run_id)
    if found is None:
        return Gone()
    run, tenant, holds_slot, ended_at, version, nonce, fence = found
    if nonce == wanted.nonce:
        return Committed(Stamp(version, nonce))
    if wanted.fence is not None and wanted.fence < fence:
        return StaleFence(fence)
    if Stamp(version, nonce) != wanted.read:
        return Conflict()
    transition, now = wanted.transition, db.now()
    stamp = Stamp(version + 1, wanted.nonce)
    ends = transition.status.is_finished and ended_at is None
    db.later(
        _SQL["commit_run"],
        run=run,
        tenant=tenant,
        holds_slot=holds_slot,
        status=transition.status,
        finished_at=transition.finished_at,
        ended_at=now if ends else ended_at,
        version=stamp.version,
        nonce=stamp.nonce,
        fence=fence if wanted.fence is None else wanted.fence,
        error=encode_some(transition.error),
        output=encode_some(transition.output),
        steps=encode_text(transition.steps),
        entries=history.lines(transition.timeline),
        applied=encode_text(wanted.applied),
        ends=ends,
    )
    db.pending.touch(about.run(wanted.run_id))
    if ends and holds_slot:
        db.pending.touch(about.slot_freed(tenant))
    put_items(db, run, transition.items)
    effects.carry_out(db, run, transition.effects)
    return Committed(stamp)


def active_runs(db: Database, tenant: TenantId) -> int:
    """See ``ports.store.Runs.active_runs``."""
    found = db.first(_SQL["active_runs"], tenant=tenant)
    return 0 if found is None else int(found[0])
