"""Definitions: every version of a workflow is kept, and equal ones are one version."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.lease import LeaseOverride, OnLockError
from stanchion.core.model import Risk, StepId, Topic, WorkflowId
from stanchion.core.retry import Fixed
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    RetrySpec,
    SubworkflowSpec,
    Workflow,
)
from stanchion.ports.records import BadCursor
from stanchion.ports.store import Store
from tests.contract.builders import ACME, GLOBEX, workflow

_ALL_KINDS = Workflow(
    id=WorkflowId("everything"),
    steps={
        StepId("plan"): JobSpec(
            topic=Topic("t"), retry=RetrySpec(3, Fixed(250)), input={"a": ["${input.q}", 1.5]}
        ),
        StepId("each"): ForEachSpec(
            topic=Topic("t"), for_each="${steps.plan.output}", needs=(StepId("plan"),)
        ),
        StepId("cool"): DelaySpec(delay_s=0.5, needs=(StepId("each"),)),
        StepId("ask"): ApprovalSpec(message="Größer?", when="input.review == true"),
        StepId("sub"): SubworkflowSpec(workflow=WorkflowId("other"), timeout_s=3.0),
    },
    risk=Risk.HIGH,
    lock_policy=LeaseOverride(on_lock_error=OnLockError.FAIL_OPEN),
    timeout_s=600.0,
    input_schema={"type": "object", "properties": {"q": {"type": "string"}}},
    output=None,
)


async def test_a_workflow_comes_back_as_it_was(store: Store) -> None:
    before = await store.now()
    assert await store.put_workflow(ACME, _ALL_KINDS) == 1
    stored = await store.workflow(ACME, _ALL_KINDS.id)
    assert stored is not None
    assert stored.workflow == _ALL_KINDS
    assert list(stored.workflow.steps) == list(_ALL_KINDS.steps)
    assert stored.version == 1
    assert before <= stored.created_at <= await store.now()


async def test_an_unset_output_is_not_a_null_output(store: Store) -> None:
    await store.put_workflow(ACME, workflow("plain"))
    stored = await store.workflow(ACME, WorkflowId("plain"))
    assert stored is not None
    assert stored.workflow == workflow("plain")
    assert await store.put_workflow(ACME, replace(workflow("plain"), output=None)) == 2


async def test_a_changed_workflow_is_the_next_version(store: Store) -> None:
    assert [await store.put_workflow(ACME, _version(n)) for n in (1, 2, 3)] == [1, 2, 3]
    newest = await store.workflow(ACME, WorkflowId("flow"))
    assert newest is not None
    assert (newest.version, newest.workflow) == (3, _version(3))


async def test_every_version_is_kept(store: Store) -> None:
    for number in (1, 2, 3):
        await store.put_workflow(ACME, _version(number))
    for number in (1, 2, 3):
        stored = await store.workflow(ACME, WorkflowId("flow"), version=number)
        assert stored is not None
        assert (stored.version, stored.workflow) == (number, _version(number))


async def test_the_same_workflow_as_the_newest_keeps_its_version(store: Store) -> None:
    assert [await store.put_workflow(ACME, _version(n)) for n in (1, 1, 2, 2)] == [1, 1, 2, 2]


async def test_the_order_of_steps_is_part_of_a_workflow(store: Store) -> None:
    one = _ALL_KINDS
    other = replace(one, steps=dict(reversed(one.steps.items())))
    assert await store.put_workflow(ACME, one) == 1
    assert await store.put_workflow(ACME, other) == 2
    stored = await store.workflow(ACME, one.id)
    assert stored is not None
    assert list(stored.workflow.steps) == list(other.steps)


async def test_going_back_to_an_older_workflow_is_a_new_version(store: Store) -> None:
    assert [await store.put_workflow(ACME, _version(n)) for n in (1, 2, 1)] == [1, 2, 3]


async def test_the_same_workflow_put_many_times_at_once_is_one_version(store: Store) -> None:
    answers = await asyncio.gather(*(store.put_workflow(ACME, _version(1)) for _ in range(20)))
    assert set(answers) == {1}


async def test_different_workflows_put_at_once_get_different_versions(store: Store) -> None:
    answers = await asyncio.gather(*(store.put_workflow(ACME, _version(n)) for n in range(1, 21)))
    assert sorted(answers) == list(range(1, 21))


async def test_a_workflow_that_is_not_there_is_not_found(store: Store) -> None:
    await store.put_workflow(ACME, _version(1))
    assert await store.workflow(ACME, WorkflowId("other")) is None
    for version in (-1, 0, 2):
        assert await store.workflow(ACME, WorkflowId("flow"), version=version) is None


async def test_workflows_are_their_tenants_own(store: Store) -> None:
    await store.put_workflow(ACME, _version(1))
    await store.put_workflow(ACME, _version(2))
    assert await store.workflow(GLOBEX, WorkflowId("flow")) is None
    assert await store.put_workflow(GLOBEX, _version(2)) == 1


async def test_the_newest_version_of_each_workflow_is_listed_by_id(store: Store) -> None:
    for name in ("b", "c", "a", "B"):
        await store.put_workflow(ACME, workflow(name))
    await store.put_workflow(ACME, replace(workflow("b"), timeout_s=5.0))
    await store.put_workflow(GLOBEX, workflow("z"))
    page = await store.list_workflows(ACME)
    listed = [(each.workflow.id, each.version) for each in page.items]
    assert listed == [("B", 1), ("a", 1), ("b", 2), ("c", 1)]
    assert page.cursor is None


async def test_workflows_are_listed_in_pages(store: Store) -> None:
    for number in range(5):
        await store.put_workflow(ACME, workflow(f"flow-{number}"))
    first = await store.list_workflows(ACME, limit=2)
    second = await store.list_workflows(ACME, limit=2, cursor=first.cursor)
    third = await store.list_workflows(ACME, limit=2, cursor=second.cursor)
    listed = [[each.workflow.id for each in page.items] for page in (first, second, third)]
    assert listed == [["flow-0", "flow-1"], ["flow-2", "flow-3"], ["flow-4"]]
    assert third.cursor is None


async def test_a_page_that_holds_all_workflows_is_the_last(store: Store) -> None:
    for name in ("a", "b"):
        await store.put_workflow(ACME, workflow(name))
    assert (await store.list_workflows(ACME, limit=2)).cursor is None


async def test_a_tenant_without_workflows_lists_none(store: Store) -> None:
    page = await store.list_workflows(ACME)
    assert (page.items, page.cursor) == ((), None)


async def test_a_bad_cursor_is_said_to_be_bad(store: Store) -> None:
    with pytest.raises(BadCursor):
        await store.list_workflows(ACME, cursor="nonsense")


def _version(number: int) -> Workflow:
    return replace(workflow("flow"), timeout_s=float(number))
