"""Approvals that wait for a decision: listed from the step that asks to the step that ends it."""

from __future__ import annotations

import pytest

from stanchion.core.events import (
    Approved,
    CancelRequested,
    Event,
    Rejected,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.model import Instant, PendingApproval, RunId, StepId, TenantId
from stanchion.core.workflow import ApprovalSpec, DelaySpec
from stanchion.ports.records import BadCursor
from stanchion.ports.store import Store
from tests.contract.builders import ACME, GLOBEX, advance, loaded, planned, start, workflow

_REVIEW, _SECOND = StepId("review"), StepId("second")
_PLAN = planned(
    workflow(
        "approvals",
        review=ApprovalSpec(
            message="Größer ${input.say}?", decision_timeout_s=60, data_schema={"type": "object"}
        ),
        second=ApprovalSpec(needs=(_REVIEW,), timeout_s=60),
        beside=DelaySpec(delay_s=3600),  # so that a run goes on when its approvals have ended
    )
)


async def listed(store: Store, tenant: TenantId | None = ACME) -> list[tuple[RunId, StepId]]:
    """The approvals of a tenant or of all, read with a page size of two."""
    found: list[tuple[RunId, StepId]] = []
    cursor = None
    while True:
        page = await store.list_approvals(tenant, cursor=cursor, limit=2)
        found += [(each.run_id, each.step_id) for each in page.items]
        cursor = page.cursor
        if cursor is None:
            return found
        assert len(page.items) == 2


async def decide(store: Store, run_id: RunId, event: Event) -> None:
    await store.post(run_id, event, entry_id="event")
    await advance(store, _PLAN, run_id)


async def test_an_approval_is_listed_with_what_a_person_is_shown(store: Store) -> None:
    run_id = await start(store, _PLAN)
    (found,) = (await store.list_approvals(ACME)).items
    state = (await loaded(store, run_id)).run.step(_REVIEW)
    assert state.started_at is not None
    assert found == PendingApproval(
        run_id=run_id,
        step_id=_REVIEW,
        tenant=ACME,
        workflow_id=_PLAN.workflow_id,
        since=state.started_at,
        expires_at=Instant(state.started_at + 60_000),
        message="Größer hello?",
        data_schema={"type": "object"},
        starter="caller",
    )


async def test_an_approval_leaves_the_list_when_it_is_decided(store: Store) -> None:
    run_id = await start(store, _PLAN)
    await decide(store, run_id, Approved(step_id=_REVIEW))
    assert await listed(store) == await listed(store, None) == [(run_id, _SECOND)]
    await decide(store, run_id, Rejected(step_id=_SECOND))
    assert await listed(store) == await listed(store, None) == []


async def test_the_end_of_a_run_ends_its_approvals(store: Store) -> None:
    run_id, other = await start(store, _PLAN), await start(store, _PLAN)
    await decide(store, run_id, CancelRequested())
    for tenant in (ACME, None):
        page = await store.list_approvals(tenant, limit=1)
        assert ([each.run_id for each in page.items], page.cursor) == ([other], None)


async def test_the_end_of_a_step_ends_its_approval(store: Store) -> None:
    run_id = await start(store, _PLAN)
    await decide(store, run_id, Approved(step_id=_REVIEW))
    timer = Timer(TimerKind.STEP_TIMEOUT, _SECOND)
    await decide(store, run_id, TimerFired(timer=timer))
    assert await listed(store) == await listed(store, None) == []


async def test_approvals_are_listed_oldest_first_by_tenant_and_of_all(store: Store) -> None:
    own, all_ = [], []
    for number in range(5):
        tenant = GLOBEX if number % 2 else ACME
        run_id = await start(store, _PLAN, tenant=tenant)
        since = (await loaded(store, run_id)).run.step(_REVIEW).started_at
        assert since is not None
        all_.append((since, run_id, _REVIEW))
        if tenant == ACME:
            own.append((since, run_id, _REVIEW))
    assert await listed(store) == [each[1:] for each in sorted(own)]
    assert await listed(store, None) == [each[1:] for each in sorted(all_)]
    assert await listed(store, TenantId("nobody")) == []


async def test_a_page_begins_after_the_last_even_if_that_was_decided(store: Store) -> None:
    run_ids = [await start(store, _PLAN) for _ in range(3)]
    first = await store.list_approvals(ACME, limit=1)
    (seen,) = first.items
    await decide(store, seen.run_id, CancelRequested())
    rest = await store.list_approvals(ACME, cursor=first.cursor)
    assert {each.run_id for each in rest.items} == {*run_ids} - {seen.run_id}
    assert rest.cursor is None


async def test_a_cursor_of_another_list_is_refused(store: Store) -> None:
    for _ in range(2):
        await start(store, _PLAN)
    cursor = (await store.list_runs(ACME, limit=1)).cursor
    with pytest.raises(BadCursor):
        await store.list_approvals(ACME, cursor=cursor)
