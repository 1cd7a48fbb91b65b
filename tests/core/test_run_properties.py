"""Properties of ``decide``: for any valid workflow and any order of events."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.events import CancelRequested, Started
from stanchion.core.json_value import JsonObject
from stanchion.core.model import Instant, Run, RunId, StepId, TenantId, Topic, WorkflowId
from stanchion.core.run import decide, start_like, start_model, starts_are_alike
from stanchion.core.steps import foreach
from stanchion.core.workflow import ForEachSpec, JobSpec, RetrySpec, Workflow
from tests.core.strategies import INPUTS, RETRIES, drive, families, step_forward
from tests.core.world import START, World, pending_run, planned

Family = tuple[Workflow, dict[WorkflowId, Workflow]]
SEEDS = st.integers(0, 2**32)
WORK = Topic("work")


@given(families(), INPUTS, SEEDS, SEEDS)
def test_every_run_ends_or_waits_for_something_named(
    family: Family, run_input: JsonObject, order: int, seed: int
) -> None:
    # The world checks the invariants after each event; what is left to say is that it came to rest
    # only because the run had ended.
    world = World(planned(*family), pending_run(planned(*family), run_input))
    drive(world, order, seed, timeouts=True)
    assert world.run.status.is_finished
    assert not world.jobs
    assert not world.timers


@given(
    st.integers(1, 3), st.integers(0, 9), st.sampled_from([None, 1, 2, 4]), RETRIES, SEEDS, SEEDS
)
def test_a_for_each_that_begins_in_pieces_ends(
    piece: int, items: int, parallel: int | None, retry: RetrySpec, order: int, seed: int
) -> None:
    each = ForEachSpec(for_each="${input.list}", topic=WORK, parallel=parallel, retry=retry)
    plan = planned(Workflow(id=WorkflowId("wide"), steps={StepId("each"): each}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreach, "BEGUN_AT_ONCE_MAX", piece)
        world = World(plan, pending_run(plan, {"list": list(range(items))}))
        drive(world, order, seed, timeouts=True)
    assert world.run.status.is_finished
    assert not world.jobs
    assert not world.timers


@given(families(timeouts=False), INPUTS, SEEDS, SEEDS, SEEDS)
def test_results_do_not_depend_on_the_order_of_events(
    family: Family, run_input: JsonObject, one: int, other: int, seed: int
) -> None:
    plan = planned(*family)
    ends: list[object] = []
    for order in (one, other):
        world = World(plan, pending_run(plan, run_input))
        drive(world, order, seed)
        steps = {
            step_id: (step.status, step.attempt, step.output, step.error, step.items, step.failures)
            for step_id, step in sorted(world.run.steps.items())
        }
        ends.append((world.run.status, world.run.output, world.run.error, steps))
    assert ends[0] == ends[1]


@given(families(), INPUTS, INPUTS)
def test_a_start_that_is_made_from_another_is_as_decided(
    family: Family, one: JsonObject, other: JsonObject
) -> None:
    plan, began = planned(*family), Started(actor="caller")
    made = decide(plan, pending_run(plan, one), began, START)
    second = msgspec.structs.replace(pending_run(plan, other), id=RunId("r2"))
    if starts_are_alike(plan, made):
        assert start_like(plan, made, second) in (None, decide(plan, second, began, START))
    model = start_model(plan, made)
    later = Instant(START + 1_234)
    third = msgspec.structs.replace(second, tenant=TenantId("another"), created_at=later)
    if model is not None:
        like = start_like(plan, model, third, actor="other")
        assert like in (None, decide(plan, third, Started(actor="other"), later))


@given(families(), INPUTS, SEEDS, SEEDS)
def test_repeated_and_late_events_change_nothing(
    family: Family, run_input: JsonObject, order: int, seed: int
) -> None:
    world = World.started(planned(*family), run_input)
    chance = Random(order)
    for _ in range(200):
        before = world.run
        for event in chance.sample(world.history, min(3, len(world.history))):
            assert world.feed(event).changes_nothing
        assert world.run == before
        if not step_forward(world, chance, seed, timeouts=True):
            break
        # The same event once more, right behind itself.
        assert world.feed(world.history[-1]).changes_nothing


@given(families(), INPUTS, SEEDS, SEEDS, st.integers(0, 30))
def test_a_finished_run_is_absorbing(
    family: Family, run_input: JsonObject, order: int, seed: int, moves: int
) -> None:
    world = World.started(planned(*family), run_input)
    chance = Random(order)
    for _ in range(moves):
        step_forward(world, chance, seed, timeouts=True)
    world.feed(CancelRequested(actor="reviewer"))
    finished = world.run
    assert finished.status.is_finished
    for event in (*world.history, CancelRequested(actor="operator"), Started()):
        assert world.feed(event).changes_nothing
    assert world.run == finished


@given(families(), INPUTS, SEEDS, SEEDS)
def test_attempts_never_exceed_what_the_workflow_allows(
    family: Family, run_input: JsonObject, order: int, seed: int
) -> None:
    world = World(planned(*family), pending_run(planned(*family), run_input))
    drive(world, order, seed, timeouts=True)
    for entry in world.timeline:
        if entry.what == "job_dispatched":
            assert entry.step is not None
            around = world.plan.item_steps.get(entry.step)
            plan = world.plan if around is None else world.plan.steps[around].item_plan
            assert plan is not None
            spec = plan.steps[entry.step].spec
            assert isinstance(spec, JobSpec | ForEachSpec)
            assert entry.attempt is not None
            assert 1 <= entry.attempt <= spec.retry.max_attempts


@given(families(), INPUTS, SEEDS, SEEDS, st.integers(0, 20))
def test_deciding_twice_gives_the_same_transition_to_the_byte(
    family: Family, run_input: JsonObject, order: int, seed: int, moves: int
) -> None:
    world = World.started(planned(*family), run_input)
    chance = Random(order)
    for _ in range(moves):
        step_forward(world, chance, seed, timeouts=True)
    event = CancelRequested(actor="reviewer")
    # The second plan is linked anew: nothing hangs on which object is at hand.
    twice = [decide(plan, world.run, event, world.now) for plan in (world.plan, planned(*family))]
    assert msgspec.json.encode(twice[0]) == msgspec.json.encode(twice[1])


@given(families(), INPUTS, SEEDS, SEEDS)
@settings(max_examples=25)
def test_a_run_survives_storage(
    family: Family, run_input: JsonObject, order: int, seed: int
) -> None:
    world = World.started(planned(*family), run_input)
    chance = Random(order)
    while step_forward(world, chance, seed, timeouts=False):
        stored = msgspec.json.encode(world.run)
        assert msgspec.json.decode(stored, type=Run) == world.run


_TRANSCRIPT = """
import hashlib, sys
from random import Random
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tests.core.strategies import INPUTS, RETRIES, drive, families
from tests.core.world import START, World, pending_run, planned
digest = hashlib.sha256()
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(families(), INPUTS)
def play(family, run_input):
    plan = planned(*family)
    world = World(plan, pending_run(plan, run_input))
    drive(world, 7, 11, timeouts=True)
    digest.update(msgspec.json.encode([world.run, world.timeline]))
play()
print(digest.hexdigest())
"""


def test_histories_are_the_same_in_processes_with_other_hash_seeds() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _TRANSCRIPT],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
