"""What one event may set off is bounded: one run cannot hold up everybody else's."""

from __future__ import annotations

import msgspec
import pytest

from stanchion.core import limits
from stanchion.core.draft import size_of
from stanchion.core.events import (
    Approved,
    AttemptFailed,
    AttemptSucceeded,
    Event,
    JobReturned,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    ItemKey,
    Job,
    JobId,
    OnRetry,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    TenantId,
    Topic,
    WorkflowId,
    job_id,
    place_of,
)
from stanchion.core.plan import Plan, link
from stanchion.core.run import (
    DecisionTooLong,
    decide,
    decide_all,
    evolve,
    items_to_read,
    start_like,
    starts_are_alike,
)
from stanchion.core.transition import DispatchJob, SetTimer, Transition
from stanchion.core.workflow import (
    ApprovalSpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    RetrySpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)

NOW = Instant(1_000)
RUN = RunId("run")
TOPIC = Topic("work")
DEAR = "input.l.all(a, input.l.all(b, a + b >= 0))"


def planned(**steps: StepSpec) -> Plan:
    plan = link(Workflow(id=WorkflowId("w"), steps={StepId(n): s for n, s in steps.items()}), {})
    assert isinstance(plan, Plan)
    return plan


def pending(given: JsonObject) -> Run:
    return Run(
        id=RUN,
        tenant=TenantId("acme"),
        workflow_id=WorkflowId("w"),
        workflow_version=1,
        input=given,
        created_at=NOW,
    )


def began(plan: Plan, given: JsonObject) -> Run:
    run = pending(given)
    return evolve(run, decide(plan, run, Started(), NOW))


def succeeded(step: str, *, item: int | None = None, output: object = None) -> AttemptSucceeded:
    id_ = job_id(RUN, StepId(step), item, 1)
    return AttemptSucceeded(job_id=id_, step_id=StepId(step), item=item, output=output)  # type: ignore[arg-type]  # JSON by the caller's word


def failures(transition: Transition) -> int:
    return sum(step.status is StepStatus.FAILED for step in transition.steps.values())


BIG: JsonObject = {"big": "y" * 200_000, "l": list(range(1_000))}


def test_inputs_that_select_the_same_large_value_are_bounded_together() -> None:
    # Each job has its own copy: 200 of them were 40 MB in one transaction of the store.
    steps = {f"s{number}": JobSpec(topic=TOPIC, input="${input.big}") for number in range(200)}
    plan = planned(**steps)
    transition = decide(plan, pending(BIG), Started(), NOW)
    assert failures(transition) == 200 - limits.EVENT_INPUT_BYTES_MAX // 200_002
    error = transition.steps[StepId("s199")].error
    assert error is not None
    assert "inputs of the jobs that begin together are too large" in error.message
    # A start that is made from another one has the same bound, and is decided by itself then.
    small = decide(plan, pending({"big": "y"}), Started(), NOW)
    assert starts_are_alike(plan, small)
    assert start_like(plan, small, pending(BIG)) is None
    assert start_like(plan, small, pending({"big": "y" * 5_000})) is not None
    assert start_like(plan, small, pending({"big": "y" * 6_000})) is None
    assert start_like(plan, small, pending({"big": "y" * 5_000}), work_max=1_000) is None
    assert start_like(plan, small, pending({"big": "y" * 300}), work_max=1_000) is not None
    with pytest.raises(DecisionTooLong):
        decide_all(plan, pending({"big": "y" * 5_000}), (Started(),), NOW, work_max=1_000)


def _lived_through(plan: Plan, given: JsonObject) -> tuple[Run, list[Job], int]:
    """The run after its timers have fired and its jobs have succeeded; these; and the decisions.

    Timers that are due together are decided on together, as they are by a replica.
    """
    run, events, jobs, out, decisions = pending(given), list[Event]([Started()]), [], list[Job](), 0
    while events:
        kept = msgspec.structs.replace(run, items={})
        reads = {
            ItemKey(step, index)
            for step, indexes in items_to_read(plan, kept, events).items()
            for index in indexes
        }
        read = {key: item for key, item in run.items.items() if key in reads}
        transition = decide_all(plan, msgspec.structs.replace(run, items=read), events, NOW)
        decisions += 1
        begun = [each.job for each in transition.effects if isinstance(each, DispatchJob)]
        stored = [
            item.input for item in transition.items.values() if item.input is not msgspec.UNSET
        ]
        written = sum(size_of(each) for each in (*(job.input for job in begun), *stored))
        assert written <= limits.BEGUN_BYTES_MAX, (written, decisions)
        assert set(transition.ignored) <= {None}
        run = evolve(run, transition)
        due = [each.timer for each in transition.effects if isinstance(each, SetTimer)]
        events = events[len(transition.ignored) :]
        events += [TimerFired(timer=each) for each in due if each.kind is not TimerKind.RUN_TIMEOUT]
        jobs += begun
        out += begun
        if not events and out:
            done = out.pop(0)
            events.append(succeeded(done.step_id, item=done.item))
    return run, jobs, decisions


def test_steps_with_large_inputs_begin_in_several_transitions() -> None:
    # One transaction with all of them kept the writes of others waiting for 0.2 s.
    steps: dict[str, StepSpec] = {
        f"s{number}": JobSpec(topic=TOPIC, input="${input.big}") for number in range(60)
    }
    run, jobs, decisions = _lived_through(planned(**steps), BIG)
    assert run.status is RunStatus.SUCCEEDED
    assert [(job.step_id, job.attempt) for job in jobs] == [(StepId(each), 1) for each in steps]
    assert all(job.input == BIG["big"] for job in jobs)
    # Five in the first one, then four at a time: a fifth could be larger.
    assert decisions == 1 + 14 + 60


def test_retries_of_large_jobs_that_are_due_together_are_divided() -> None:
    retry = RetrySpec(max_attempts=2)
    steps: dict[str, StepSpec] = {
        f"s{number}": JobSpec(topic=TOPIC, input="${input.big}", retry=retry)
        for number in range(20)
    }
    plan, fault = planned(**steps), Failure("busy", "busy")
    run = pending(BIG)
    run = msgspec.structs.replace(
        run,
        status=RunStatus.RUNNING,
        steps={
            StepId(name): Step(
                status=StepStatus.WAITING, attempt=1, dispatch=1, wait=OnRetry(NOW), error=fault
            )
            for name in steps
        },
    )
    events: list[Event] = [
        TimerFired(timer=Timer(TimerKind.RETRY, StepId(name), None, 1)) for name in steps
    ]
    transition = decide_all(plan, run, events, NOW)
    assert len(transition.ignored) == 4  # a fifth could have exceeded it


@pytest.mark.parametrize("parallel", [1, 3, 1_000])
def test_items_with_large_inputs_begin_and_are_stored_in_several_transitions(parallel: int) -> None:
    each = ForEachSpec(
        topic=TOPIC, for_each="${input.l}", input={"n": "${item}", "d": "${input.big}"},
        parallel=parallel,
    )  # fmt: skip
    given: JsonObject = {"big": "y" * 50_000, "l": list(range(100))}
    run, jobs, decisions = _lived_through(planned(each=each), given)
    assert run.status is RunStatus.SUCCEEDED
    assert [(job.item, job.attempt) for job in jobs] == [(index, 1) for index in range(100)]
    assert all(job.input == {"n": job.item, "d": given["big"]} for job in jobs)
    # 5 MB, written once or twice: the list is evaluated for each megabyte, not for each result.
    assert decisions <= 100 + 12


def test_an_item_that_begins_later_may_be_as_large_as_one_that_begins_with_the_step() -> None:
    # More than one expression may make by itself; all items together have a bound of their own.
    each = ForEachSpec(
        topic=TOPIC, for_each="${input.l}", input=["${input.big}"] * 25,
        retry=RetrySpec(max_attempts=2),
    )  # fmt: skip
    plan = planned(each=each)
    run = began(plan, {"big": "y" * 200_000, "l": [1, 2, 3]})
    assert run.steps[StepId("each")].status is StepStatus.RUNNING
    more = decide(plan, run, TimerFired(timer=Timer(TimerKind.ITEMS, StepId("each"))), NOW)
    (second,) = (one.job for one in more.effects if isinstance(one, DispatchJob))
    assert (second.item, second.input) == (1, ["y" * 200_000] * 25)
    lost = AttemptFailed(
        job_id=job_id(RUN, StepId("each"), 0, 1), step_id=StepId("each"), item=0,
        error=Failure("busy", "busy"),
    )  # fmt: skip
    waiting = evolve(run, decide(plan, run, lost, NOW))
    retry = TimerFired(timer=Timer(TimerKind.RETRY, StepId("each"), 0, 1))
    (again,) = (
        one.job for one in decide(plan, waiting, retry, NOW).effects if isinstance(one, DispatchJob)
    )
    assert (again.attempt, again.input) == (2, ["y" * 200_000] * 25)


def test_an_item_may_take_as_much_work_when_it_is_tried_again() -> None:
    dear = f"${{index == 0 ? {DEAR} : true}}"
    retry = RetrySpec(max_attempts=2)
    # The inputs are too large together to be stored, so that they are rendered again.
    wanted: JsonValue = {"first": dear, "big": "${input.big}"}
    each = ForEachSpec(topic=TOPIC, for_each="${input.items}", input=wanted, retry=retry)
    plan = planned(each=each)
    run = began(plan, {"items": [1] * 6_000, "l": list(range(240)), "big": "y" * 200})
    assert run.steps[StepId("each")].status is StepStatus.RUNNING
    lost = AttemptFailed(
        job_id=job_id(RUN, StepId("each"), 0, 1), step_id=StepId("each"), item=0,
        error=Failure("busy", "busy"),
    )  # fmt: skip
    waiting = evolve(run, decide(plan, run, lost, NOW))
    timer = TimerFired(timer=Timer(TimerKind.RETRY, StepId("each"), 0, 1))
    transition = decide(plan, waiting, timer, NOW)
    assert [one.job.item for one in transition.effects if isinstance(one, DispatchJob)] == [0]


@pytest.mark.parametrize("given", ["${input.big}", {"doc": "${input.big}"}])
def test_items_that_select_the_same_large_value_are_bounded_together(given: JsonValue) -> None:
    each = ForEachSpec(topic=TOPIC, for_each="${input.l}", input=given)
    transition = decide(planned(each=each), pending(BIG), Started(), NOW)
    error = transition.steps[StepId("each")].error
    assert error is not None
    assert "too large" in error.message
    assert not transition.items
    assert not any(isinstance(each, DispatchJob) for each in transition.effects)


def test_items_of_many_steps_begin_a_few_at_a_time() -> None:
    inner = Workflow(
        id=WorkflowId("inner"),
        steps={StepId(f"s{number}"): JobSpec(topic=TOPIC, input={}) for number in range(100)},
    )
    each = ForEachWorkflowSpec(workflow=inner.id, for_each="${input.l}", input={})
    outer = Workflow(id=WorkflowId("w"), steps={StepId("each"): each})
    plan = link(outer, {inner.id: inner})
    assert isinstance(plan, Plan)
    run = pending({"l": list(range(100))})
    events: list[Event] = [Started(), *[fired_items()] * 40]
    for event in events:
        transition = decide(plan, run, event, NOW)
        jobs = sum(isinstance(each, DispatchJob) for each in transition.effects)
        assert jobs <= 300  # all 10,000 began at once
        run = evolve(run, transition)
    counts = run.steps[StepId("each")].items
    assert counts is not None
    assert counts.pending == 0


def fired_items() -> TimerFired:
    return TimerFired(timer=Timer(TimerKind.ITEMS, StepId("each")))


def test_large_inputs_of_steps_in_items_begin_a_few_at_a_time() -> None:
    steps: dict[StepId, StepSpec] = {StepId("a"): JobSpec(topic=TOPIC, input="${input}")}
    inner = Workflow(id=WorkflowId("inner"), steps=steps)
    each = ForEachWorkflowSpec(
        workflow=inner.id, for_each="${input.l}", input={"n": "${item}", "d": "${input.big}"}
    )
    outer = Workflow(id=WorkflowId("w"), steps={StepId("each"): each})
    plan = link(outer, {inner.id: inner})
    assert isinstance(plan, Plan)
    run = pending({"big": "y" * 200_000, "l": list(range(70))})
    events: list[Event] = [Started(), *[fired_items()] * 10]
    for event in events:
        transition = decide(plan, run, event, NOW)
        jobs = [each.job for each in transition.effects if isinstance(each, DispatchJob)]
        assert len(jobs) * 200_000 < limits.EVENT_INPUT_BYTES_MAX
        run = evolve(run, transition)
    counts = run.steps[StepId("each")].items
    assert counts is not None
    assert (counts.pending, counts.failed) == (0, 0)


def test_two_hundred_dear_conditions_share_what_one_event_may_work() -> None:
    steps = {f"s{number}": JobSpec(topic=TOPIC, when=DEAR) for number in range(200)}
    transition = decide(planned(**steps), pending({"l": list(range(200))}), Started(), NOW)
    # The first ones are worked out; for the rest nothing is left, and they say so.
    assert 150 <= failures(transition) < 200
    error = transition.steps[StepId("s199")].error
    assert error is not None
    assert error.code == "expression_error"
    assert "too much work" in error.message


def test_what_an_event_may_work_does_not_depend_on_those_before_it() -> None:
    plan = planned(
        a=JobSpec(topic=TOPIC),
        b=JobSpec(topic=TOPIC),
        **{
            f"{side}{number}": JobSpec(topic=TOPIC, needs=(StepId(side),), when=DEAR)
            for side in ("a", "b")
            for number in range(4)
        },
    )
    run = began(plan, {"l": list(range(200))})
    events: list[Event] = [succeeded("a"), succeeded("b")]
    together = decide_all(plan, run, events, NOW)
    assert failures(together) == 0
    assert len(together.ignored) in {1, 2}


def test_events_that_ask_for_very_much_are_decided_on_in_portions() -> None:
    fans = {
        f"fan{number}": ForEachSpec(
            for_each=f"${{steps.{step}.output}}",
            topic=TOPIC,
            needs=(StepId(step),),
        )
        for number, step in enumerate(("a", "b"))
    }
    plan = planned(a=JobSpec(topic=TOPIC), b=JobSpec(topic=TOPIC), **fans)
    run = began(plan, {})
    many = list(range(limits.FOR_EACH_ITEMS_MAX))
    events: list[Event] = [succeeded("a", output=many), succeeded("b", output=many)]
    both = decide_all(plan, run, events, NOW)
    assert len(both.items) == limits.RUN_ITEMS_MAX
    more: list[Event] = [*events, JobReturned(job_id=JobId("x"), step_id=StepId("a"), deliveries=1)]
    assert decide_all(plan, run, more, NOW).ignored == (None, None)


def test_a_run_has_so_many_items_and_no_more() -> None:
    fans = {f"fan{number}": ForEachSpec(for_each="${input.l}", topic=TOPIC) for number in range(3)}
    given: JsonObject = {"l": list(range(limits.FOR_EACH_ITEMS_MAX))}
    transition = decide(planned(**fans), pending(given), Started(), NOW)
    assert len(transition.items) == limits.RUN_ITEMS_MAX
    error = transition.steps[StepId("fan2")].error
    assert error is not None
    assert f"at most {limits.RUN_ITEMS_MAX} are allowed" in error.message


def test_an_item_that_is_tried_again_is_no_new_item() -> None:
    plan = planned(
        fan=ForEachSpec(for_each="${input.l}", topic=TOPIC),
        two=ForEachSpec(for_each="${input.l}", topic=TOPIC),
    )
    given: JsonObject = {"l": list(range(limits.FOR_EACH_ITEMS_MAX))}
    first = decide(plan, pending(given), Started(), NOW)
    assert failures(first) == 0
    run = evolve(pending(given), first)
    event = succeeded("fan", item=7)
    # And those that go out instead of it, while fewer are out than allowed.
    assert items_to_read(plan, run, [event]) == {StepId("fan"): [7, 250, 251]}
    assert decide(plan, run, event, NOW).ignored == (None,)


def test_a_job_that_came_back_is_a_line_in_the_timeline_and_nothing_else() -> None:
    plan = planned(a=JobSpec(topic=TOPIC))
    run = began(plan, {})
    back = JobReturned(job_id=job_id(RUN, StepId("a"), None, 1), step_id=StepId("a"), deliveries=2)
    transition = decide(plan, run, back, NOW)
    (line,) = transition.timeline
    assert (line.what, line.step, line.actor) == ("job_returned", "a", "system")
    assert "delivery 2" in (line.detail or "")
    assert not transition.steps
    assert not transition.effects


def test_a_job_that_came_back_too_late_changes_nothing() -> None:
    plan = planned(a=JobSpec(topic=TOPIC), b=JobSpec(topic=TOPIC))
    run = began(plan, {})
    run = evolve(run, decide(plan, run, succeeded("a"), NOW))
    back = JobReturned(job_id=job_id(RUN, StepId("a"), None, 1), step_id=StepId("a"), deliveries=2)
    assert decide(plan, run, back, NOW).changes_nothing


def test_the_question_and_the_remark_of_an_approval_are_in_the_timeline() -> None:
    plan = planned(review=ApprovalSpec(message="May this go out?"))
    first = decide(plan, pending({}), Started(), NOW)
    asked = next(line for line in first.timeline if line.what == "approval_requested")
    assert asked.detail == "May this go out?"
    yes = Approved(step_id=StepId("review"), comment="looks right", actor="reviewer")
    told = decide(plan, evolve(pending({}), first), yes, NOW).timeline[0]
    assert (told.what, told.actor, told.detail) == ("step_succeeded", "reviewer", "looks right")


@pytest.mark.parametrize("item", [None, 0, 41])
@pytest.mark.parametrize("step", ["plan", "publish.render", "my-step_2"])
def test_a_job_id_says_where_it_belongs(step: str, item: int | None) -> None:
    place = place_of(job_id(RUN, StepId(step), item, 3))
    assert place == (RUN, step, item, 3)


@pytest.mark.parametrize(
    "text", ["", "run", "run:", "run:step", "run:@1", "run:step@x", "run:s[x]@1"]
)
def test_what_is_no_job_id_is_not_read_as_one(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int's own words are as good as ours
        place_of(JobId(text))


# ── Where only little work is allowed ────────────────────────────────────────────────────────────


def test_a_decision_that_takes_more_work_than_allowed_here_is_not_made_here() -> None:
    plan = planned(only=JobSpec(topic=TOPIC, when=DEAR))
    run = pending({"l": [1] * 50})
    freely = decide_all(plan, run, [Started()], NOW)
    assert decide_all(plan, run, [Started()], NOW, work_max=1_000_000) == freely
    with pytest.raises(DecisionTooLong):
        decide_all(plan, run, [Started()], NOW, work_max=1_000)


def test_items_count_as_work_that_may_be_too_much_here() -> None:
    plan = planned(each=ForEachSpec(topic=TOPIC, for_each="${input.l}", input="${item}"))
    run = pending({"l": [1] * 500})
    freely = decide_all(plan, run, [Started()], NOW)
    assert decide_all(plan, run, [Started()], NOW, work_max=100_000) == freely
    with pytest.raises(DecisionTooLong):
        decide_all(plan, run, [Started()], NOW, work_max=10_000)


def test_the_checks_of_sub_workflows_inputs_are_bounded_together() -> None:
    schema: JsonObject = {"properties": {"l": {"items": {"anyOf": [{"const": 1}] * 400}}}}
    inner = Workflow(
        id=WorkflowId("inner"), steps={StepId("x"): JobSpec(topic=TOPIC)}, input_schema=schema
    )
    spec = SubworkflowSpec(workflow=inner.id, input="${input}")
    steps: dict[StepId, StepSpec] = {StepId(f"s{each}"): spec for each in range(60)}
    plan = link(Workflow(id=WorkflowId("w"), steps=steps), {inner.id: inner})
    assert isinstance(plan, Plan)
    run = pending({"l": [1] * 100})
    changed = decide(plan, run, Started(), NOW)
    errors = [step.error for step in changed.steps.values() if step.error is not None]
    assert {error.code for error in errors} == {"expression_error"}
    assert {error.message for error in errors} == {
        "input: too much work: one event sets off too many checks of large inputs"
    }
    assert 10 < len(errors) < 60


def test_items_that_share_a_budget_do_not_fail_because_little_is_allowed_here() -> None:
    plan = planned(
        each=ForEachSpec(topic=TOPIC, for_each="${input.l}", input="${item + item + item}")
    )
    run = pending({"l": [1] * 500})
    with pytest.raises(DecisionTooLong):
        decide_all(plan, run, [Started()], NOW, work_max=1_000)
