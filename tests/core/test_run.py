"""The rules of a run, one sentence each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from stanchion.core import draft
from stanchion.core.draft import Draft
from stanchion.core.events import (
    Approved,
    AttemptSucceeded,
    CancelRequested,
    Event,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import (
    FOR_EACH_OUTPUT_BYTES_MAX,
    ITEM_FAILURES_MAX,
    RUN_OUTPUT_BYTES_MAX,
)
from stanchion.core.model import (
    Failure,
    Instant,
    ItemCounts,
    ItemKey,
    JobId,
    JobTrace,
    OnDecision,
    OnDelay,
    OnJob,
    OnReplay,
    OnRetry,
    PendingApproval,
    RunId,
    RunStatus,
    StepId,
    Topic,
    WorkflowId,
)
from stanchion.core.retry import Fixed
from stanchion.core.run import (
    decide,
    decide_all,
    evolve,
    items_to_read,
    start_like,
    starts_are_alike,
)
from stanchion.core.steps.approval import data_faults, rule_against
from stanchion.core.steps.job import ITEMS_TRACED
from stanchion.core.transition import (
    ClearTimer,
    DispatchJob,
    Ignored,
    SetTimer,
    StopRun,
    StopStep,
)
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    OnDecisionTimeout,
    OnFailure,
    RetrySpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from tests.core.world import START, World, died, discarded, failed, pending_run, planned, succeeded

A, B, C, D = (StepId(name) for name in "abcd")


def job(*needs: StepId, **options: object) -> JobSpec:
    return JobSpec(needs=needs, topic=Topic("work"), **options)  # type: ignore[arg-type]  # any field of JobSpec


def workflow(name: str = "w", /, **steps: StepSpec) -> Workflow:
    return Workflow(id=WorkflowId(name), steps={StepId(step): s for step, s in steps.items()})


def started(flow: Workflow, *inside: Workflow, **run_input: object) -> World:
    others = {each.id: each for each in inside}
    return World.started(planned(flow, others), run_input)  # type: ignore[arg-type]  # JSON values


# ── Beginning and ending ─────────────────────────────────────────────────────────────────────────


def test_starting_dispatches_every_step_that_needs_nothing() -> None:
    world = started(workflow(a=job(), b=job(), c=job(A)))
    assert world.statuses() == {"a": "running", "b": "running", "c": "pending"}
    assert list(world.jobs) == ["r1:a@1", "r1:b@1"]
    assert world.run.status is RunStatus.RUNNING


def test_a_start_is_made_from_that_of_a_run_of_the_same_time() -> None:
    flow = workflow(
        a=job(input={"n": "${input.n}"}, timeout_s=9.0), b=job(input={"x": 1}), c=job(A)
    )
    plan, began = planned(flow), Started(actor="caller")
    traced = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    first = replace(pending_run(plan, {"n": 1}), traceparent=traced)
    second = replace(first, id=RunId("r2"), input={"n": "two"})
    made = decide(plan, first, began, START)
    assert starts_are_alike(plan, made)
    like = start_like(plan, made, second)
    assert like is not None
    assert like == decide(plan, second, began, START)
    sent = [each.job for each in like.effects if isinstance(each, DispatchJob)]
    assert [(each.id, each.input) for each in sent] == [
        ("r2:a@1", {"n": "two"}),
        ("r2:b@1", {"x": 1}),
    ]


@pytest.mark.parametrize(
    "first",
    [
        job(when="input.n > 0"),
        ApprovalSpec(message="go?"),
        DelaySpec(delay_s=5),
        ForEachSpec(for_each="${input.list}", topic=Topic("work")),
        job(input="${input.nothing}"),  # it fails
    ],
)
def test_a_start_that_an_input_may_change_is_decided_by_itself(first: StepSpec) -> None:
    plan = planned(workflow(a=first, b=job()))
    run = pending_run(plan, {"n": 1, "list": [1]})
    assert not starts_are_alike(plan, decide(plan, run, Started(), START))


def test_a_start_whose_expressions_fail_or_cost_much_is_decided_by_itself() -> None:
    plan = planned(workflow(a=job(input="${input.list.map(x, x + 1)}")))
    run = pending_run(plan, {"list": [1]})
    made = decide(plan, run, Started(), START)
    assert starts_are_alike(plan, made)
    assert start_like(plan, made, replace(run, input={"list": ["one"]})) is None
    many = replace(run, input={"list": [1] * 1_000})
    assert start_like(plan, made, many) is not None
    assert start_like(plan, made, many, work_max=100) is None


def test_starting_twice_is_ignored() -> None:
    world = started(workflow(a=job()))
    assert world.feed(Started()).ignored == (Ignored.ALREADY_STARTED,)


def test_a_start_sets_the_run_timeout_which_is_a_day_unless_the_file_says_otherwise() -> None:
    world = started(workflow(a=job()))
    assert world.timers == {Timer(TimerKind.RUN_TIMEOUT): START + 24 * 60 * 60 * 1000}


def test_a_step_begins_when_all_it_needs_has_succeeded() -> None:
    world = started(workflow(a=job(), b=job(), c=job(A, B)))
    world.succeed("a")
    assert world.statuses()["c"] == "pending"
    world.succeed("b")
    assert world.statuses()["c"] == "running"


def test_the_run_succeeds_with_the_outputs_of_the_steps_nobody_needs() -> None:
    world = started(workflow(a=job(), b=job(A), c=job(A)))
    world.succeed("a", 1)
    world.succeed("b", 2)
    transition = world.succeed("c", 3)
    assert (world.run.status, world.run.output) == (RunStatus.SUCCEEDED, {"b": 2, "c": 3})
    assert world.run.finished_at == world.now
    assert transition.effects == (StopRun(),)


def test_an_output_template_replaces_the_default() -> None:
    flow = Workflow(
        id=WorkflowId("w"), steps={A: job()}, output={"answer": "${steps.a.output.text}"}
    )
    world = started(flow)
    world.succeed("a", {"text": "42"})
    assert world.run.output == {"answer": "42"}


def test_an_output_that_errs_fails_the_run() -> None:
    world = started(Workflow(id=WorkflowId("w"), steps={A: job()}, output="${steps.a.output.text}"))
    world.succeed("a", {})
    assert world.run.status is RunStatus.FAILED
    assert world.run.error is not None
    assert (world.run.error.code, world.run.error.step) == ("expression_error", None)
    assert world.run.error.message.startswith("output: ")


def test_an_explicit_null_output_is_null() -> None:
    world = started(Workflow(id=WorkflowId("w"), steps={A: job()}, output=None))
    world.succeed("a", 1)
    assert (world.run.status, world.run.output) == (RunStatus.SUCCEEDED, None)


# ── Failure and its effect on others ─────────────────────────────────────────────────────────────


def test_a_failed_step_cancels_what_needs_it_all_the_way_down() -> None:
    world = started(workflow(a=job(), b=job(A), c=job(B)))
    world.fail("a", "no luck")
    assert world.statuses() == {"a": "failed", "b": "cancelled", "c": "cancelled"}
    assert world.run.step(B).error == Failure("upstream_failed", "'a' has failed", B)
    assert world.run.step(C).error == Failure("upstream_failed", "'b' has been cancelled", C)


def test_steps_that_do_not_depend_on_a_failed_one_go_on() -> None:
    world = started(workflow(a=job(), b=job(), c=job(B)))
    world.fail("a")
    assert world.run.status == "running"
    world.succeed("b")
    world.succeed("c")
    assert world.statuses() == {"a": "failed", "b": "succeeded", "c": "succeeded"}
    assert world.run.status == "failed"


def test_a_failed_run_carries_the_error_of_the_first_failed_step_in_the_order_of_the_file() -> None:
    world = started(workflow(a=job(), b=job()))
    world.fail("b", "second")
    world.fail("a", "first")
    assert world.run.error is not None
    assert (world.run.error.step, world.run.error.message) == ("a", "first")


def test_a_step_waits_for_all_its_needs_before_it_is_cancelled() -> None:
    world = started(workflow(a=job(), b=job(), c=job(B, A)))
    world.fail("a")
    assert world.statuses()["c"] == "pending"
    world.fail("b")
    assert world.run.step(C).error.message == "'b' has failed"  # type: ignore[union-attr]  # it was cancelled


# ── Failures that the workflow accepts ───────────────────────────────────────────────────────────


def accepted(*needs: StepId, **options: object) -> JobSpec:
    return job(*needs, on_failure=OnFailure.CONTINUE, **options)


def test_steps_that_need_a_step_whose_failure_is_accepted_run_and_see_how_it_ended() -> None:
    told = {"status": "${steps.a.status}", "error": "${steps.a.error}", "o": "${steps.a.output}"}
    world = started(workflow(a=accepted(), b=job(A, input=told)))
    world.fail("a", "no luck")
    assert world.job("b").input == {
        "status": "failed",
        "error": {"code": "handler_error", "message": "no luck"},
        "o": None,
    }
    world.succeed("b", 7)
    assert (world.run.status, world.run.error, world.run.output) == ("succeeded", None, {"b": 7})


def test_a_step_that_ended_well_has_no_error() -> None:
    flaky = RetrySpec(max_attempts=2, backoff=Fixed(10))
    world = started(workflow(a=accepted(retry=flaky), b=job(A, input="${steps.a.error}")))
    world.fail("a")
    world.fire(Timer(TimerKind.RETRY, A, None, 1))
    world.succeed("a")
    assert world.job("b").input is None


def test_an_accepted_failure_is_not_accepted_before_the_last_attempt() -> None:
    flaky = RetrySpec(max_attempts=2, backoff=Fixed(10))
    world = started(workflow(a=accepted(retry=flaky), b=job(A)))
    world.fail("a")
    assert world.statuses() == {"a": "waiting", "b": "pending"}


def test_a_run_whose_only_failures_are_accepted_succeeds_with_null_for_them() -> None:
    world = started(workflow(a=accepted()))
    world.fail("a")
    assert (world.run.status, world.run.output) == ("succeeded", {"a": None})


def test_a_time_out_a_rejection_and_a_condition_that_errs_are_accepted_alike() -> None:
    world = started(
        workflow(
            a=accepted(timeout_s=5.0),
            b=ApprovalSpec(on_failure=OnFailure.CONTINUE),
            c=DelaySpec(delay_s=0, when="input.missing", on_failure=OnFailure.CONTINUE),
            d=job(A, B, C, input=["${steps.a.status}", "${steps.c.error.code}"]),
        )
    )
    world.reject("b")
    world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert world.job("d").input == ["timed_out", "expression_error"]


def test_another_failure_still_fails_the_run_with_its_own_error() -> None:
    world = started(workflow(a=accepted(), b=job(), c=job(A, B)))
    world.fail("a", "accepted")
    world.fail("b", "not accepted")
    assert world.statuses()["c"] == "cancelled"
    assert world.run.error is not None
    assert world.run.error.message == "not accepted"


def test_a_step_that_was_cancelled_by_a_failure_upstream_satisfies_nothing() -> None:
    world = started(workflow(a=job(), b=accepted(A), c=job(B)))
    world.fail("a")
    assert world.statuses() == {"a": "failed", "b": "cancelled", "c": "cancelled"}


def test_a_sub_workflow_that_fails_can_be_accepted() -> None:
    inner = workflow("inner", x=job(), y=job(StepId("x")))
    outer = workflow(
        a=SubworkflowSpec(workflow=WorkflowId("inner"), on_failure=OnFailure.CONTINUE), b=job(A)
    )
    world = started(outer, inner)
    world.fail("a.x")
    assert world.statuses() == {
        "a": "failed",
        "a.x": "failed",
        "a.y": "cancelled",
        "b": "running",
    }
    world.succeed("b")
    assert world.run.status == "succeeded"


# ── Conditions ───────────────────────────────────────────────────────────────────────────────────


def test_a_condition_that_does_not_hold_skips_the_step_and_satisfies_needs() -> None:
    world = started(workflow(a=job(when="input.go"), b=job(A)), go=False)
    assert world.statuses() == {"a": "skipped", "b": "running"}
    assert [entry.what for entry in world.timeline if entry.step == A] == ["step_skipped"]


def test_a_condition_that_holds_lets_the_step_begin() -> None:
    assert started(workflow(a=job(when="input.go")), go=True).statuses() == {"a": "running"}


def test_a_condition_that_errs_fails_the_step() -> None:
    world = started(workflow(a=job(when="input.missing")))
    error = world.run.step(A).error
    assert error is not None
    assert (error.code, error.step) == ("expression_error", A)
    assert error.message.startswith("when: ")
    assert world.run.status is RunStatus.FAILED


def test_a_run_whose_steps_are_all_skipped_succeeds_at_once() -> None:
    world = started(workflow(a=job(when="false"), b=job(A, when="false")))
    assert world.run.status is RunStatus.SUCCEEDED
    assert world.run.output == {"b": None}


def test_a_skipped_step_shows_as_such_to_conditions() -> None:
    world = started(workflow(a=job(when="false"), b=job(A, when="steps.a.status == 'skipped'")))
    assert world.statuses()["b"] == "running"


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_gets_its_rendered_input() -> None:
    flow = workflow(a=job(), b=job(A, input={"of": "${steps.a.output}", "as": "${input.way}"}))
    world = started(flow, way="fast")
    world.succeed("a", [1, 2])
    sent = world.job("b")
    assert (sent.input, sent.topic, sent.tenant, sent.run_id, sent.attempt, sent.dispatch) == (
        {"of": [1, 2], "as": "fast"},
        "work",
        "acme",
        "r1",
        1,
        1,
    )


def test_an_input_that_errs_fails_the_step_without_a_job() -> None:
    world = started(workflow(a=job(input="${input.missing}")))
    assert world.statuses() == {"a": "failed"}
    assert world.run.error is not None
    assert (world.run.error.code, world.run.error.step) == ("expression_error", A)
    assert world.run.error.message.startswith("input: ")
    assert not world.jobs


def test_a_failed_attempt_is_tried_again_after_its_backoff() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=2, backoff=Fixed(700)))))
    world.fail("a", "flaky")
    due = Instant(START + 700)
    timer = Timer(TimerKind.RETRY, A, None, 1)
    state = world.run.step(A)
    assert (state.status, state.wait, state.attempt) == ("waiting", OnRetry(due), 1)
    assert state.error is not None
    assert state.error.step == A
    assert world.timers[timer] == due
    assert world.run.status is RunStatus.WAITING
    world.fire(timer)
    assert (world.run.step(A).attempt, list(world.jobs)) == (2, ["r1:a@2"])
    world.succeed("a", "done")
    assert (world.run.step(A).error, world.run.output) == (None, {"a": "done"})


def test_the_last_allowed_attempt_fails_the_step() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=2, backoff=Fixed(1)))))
    world.fail("a", "one")
    world.fire(Timer(TimerKind.RETRY, A, None, 1))
    world.fail("a", "two")
    assert (world.run.status, world.run.step(A).attempt) == (RunStatus.FAILED, 2)
    assert world.run.error.message == "two"  # type: ignore[union-attr]  # it failed


def test_a_final_failure_is_not_tried_again() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=9))))
    world.fail("a", final=True)
    assert world.run.status is RunStatus.FAILED


def test_the_timer_of_an_earlier_attempt_changes_nothing() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=3, backoff=Fixed(5)))))
    world.fail("a")
    world.fire(Timer(TimerKind.RETRY, A, None, 1))
    world.fail("a")
    late = TimerFired(timer=Timer(TimerKind.RETRY, A, None, 1))
    assert world.feed(late).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_retry_timer_of_the_running_attempt_changes_nothing() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=3))))
    early = TimerFired(timer=Timer(TimerKind.RETRY, A, None, 1))
    assert world.feed(early).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_dead_job_leaves_the_run_waiting_until_it_is_replayed() -> None:
    world = started(workflow(a=job(input={"n": 7})))
    world.die("a")
    assert world.run.step(A).wait == OnReplay(JobId("r1:a@1"))
    assert world.run.status is RunStatus.WAITING
    world.replay("a")
    again = world.job("a")
    assert (again.id, again.attempt, again.dispatch, again.input) == ("r1:a@1", 1, 2, {"n": 7})
    world.succeed("a", "at last")
    assert world.run.output == {"a": "at last"}


@pytest.mark.parametrize(("deliveries", "often"), [(1, "once"), (5, "5 times")])
def test_the_timeline_counts_the_deliveries_of_a_dead_job(deliveries: int, often: str) -> None:
    world = started(workflow(a=job()))
    world.feed(msgspec.structs.replace(died(world.job("a")), deliveries=deliveries))
    [entry] = [each for each in world.timeline if each.what == "job_died"]
    assert entry.detail == f"delivered {often} without a result"


def test_an_earlier_death_or_replay_changes_nothing_about_a_job_that_was_replayed() -> None:
    world = started(workflow(a=job()))
    world.die("a")
    world.replay("a")
    death, replay = world.history[-2:]
    assert world.feed(death).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    world.die("a")
    assert world.feed(replay).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    world.replay("a")
    assert world.job("a").dispatch == 3


def test_a_discarded_dead_letter_fails_its_step_whatever_attempts_are_left() -> None:
    world = started(workflow(a=job(retry=RetrySpec(max_attempts=3))))
    world.die("a")
    world.discard("a")
    error = world.run.step(A).error
    assert error is not None
    assert (error.code, error.step) == ("dead_letter_discarded", A)
    assert world.run.status is RunStatus.FAILED
    assert [entry.what for entry in world.timeline][-3:] == [
        "job_discarded",
        "step_failed",
        "run_failed",
    ]


def test_only_the_dispatch_that_died_can_be_discarded() -> None:
    world = started(workflow(a=job()))
    world.die("a")
    world.replay("a")
    early = discarded(msgspec.structs.replace(world.job("a"), dispatch=1))
    assert world.feed(early).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    world.die("a")
    assert world.feed(early).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_result_for_a_dead_job_changes_nothing() -> None:
    world = started(workflow(a=job()))
    late = AttemptSucceeded(job_id=JobId("r1:a@1"), step_id=A)
    world.die("a")
    assert world.feed(late).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_job_carries_the_time_of_its_attempt() -> None:
    world = started(
        workflow(a=job(attempt_timeout_s=1.5), b=each(attempt_timeout_s=0.25), c=job()), list=[1]
    )
    assert world.job("a").attempt_timeout_ms == 1_500
    assert world.job("b", 0).attempt_timeout_ms == 250
    assert world.job("c").attempt_timeout_ms is None


def test_an_event_for_a_step_that_is_not_there_is_ignored() -> None:
    world = started(workflow(a=job()))
    stray = AttemptSucceeded(job_id=JobId("r1:x@1"), step_id=StepId("x"))
    assert world.feed(stray).ignored == (Ignored.UNKNOWN_STEP,)
    lost = TimerFired(timer=Timer(TimerKind.DELAY))
    assert world.feed(lost).ignored == (Ignored.UNKNOWN_STEP,)


# ── Approvals and delays ─────────────────────────────────────────────────────────────────────────


def test_an_approval_waits_for_a_person_and_says_who_it_was() -> None:
    world = started(workflow(a=ApprovalSpec(), b=job(A, input="${steps.a.output.by}")))
    assert (world.run.status, world.undecided()) == (RunStatus.WAITING, [A])
    world.approve("a", "go ahead", {"up_to": 5})
    assert world.run.step(A).output == {
        "approved": True,
        "by": "reviewer",
        "comment": "go ahead",
        "data": {"up_to": 5},
    }
    assert world.job("b").input == "reviewer"


@pytest.mark.parametrize(
    ("comment", "message"),
    [(None, "rejected by reviewer"), ("not yet", "rejected by reviewer: not yet")],
)
def test_a_rejection_fails_the_step(comment: str | None, message: str) -> None:
    world = started(workflow(a=ApprovalSpec(), b=job(A)))
    world.reject("a", comment, [1])
    assert world.statuses() == {"a": "failed", "b": "cancelled"}
    said = {"approved": False, "by": "reviewer", "comment": comment, "data": [1]}
    assert world.run.step(A).output == said
    error = world.run.error
    assert error is not None
    assert (error.code, error.message) == ("rejected", message)


@pytest.mark.parametrize(
    ("on_timeout", "status", "code"),
    [
        (None, "failed", "rejected"),
        (OnDecisionTimeout.REJECT, "failed", "rejected"),
        (OnDecisionTimeout.FAIL, "failed", "decision_timeout"),
        (OnDecisionTimeout.APPROVE, "succeeded", None),
    ],
)
def test_without_a_decision_in_time_the_workflow_decides(
    on_timeout: OnDecisionTimeout | None, status: str, code: str | None
) -> None:
    world = started(workflow(a=ApprovalSpec(decision_timeout_s=2.5, on_timeout=on_timeout)))
    assert world.run.step(A).wait == OnDecision(None, Instant(START + 2_500))
    world.fire(Timer(TimerKind.DECISION, A))
    step = world.run.step(A)
    assert (step.status, step.error and step.error.code) == (status, code)
    if code != "decision_timeout":
        said = {"by": "system", "comment": "no decision within 2.5 s", "data": None}
        assert step.output == {"approved": code is None, **said}
    assert not world.timers


@pytest.mark.parametrize("approve", [True, False])
def test_a_decision_in_time_stops_the_clock(approve: bool) -> None:
    flow = workflow(a=ApprovalSpec(decision_timeout_s=9), b=DelaySpec(delay_s=1))
    world = started(flow)
    timer = Timer(TimerKind.DECISION, A)
    assert timer in world.timers
    world.approve("a") if approve else world.reject("a")
    assert timer not in world.timers
    assert world.feed(TimerFired(timer=timer)).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_the_time_for_a_decision_ends_with_the_step() -> None:
    flow = workflow(a=ApprovalSpec(decision_timeout_s=9, timeout_s=3), b=DelaySpec(delay_s=99))
    world = started(flow)
    world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert world.statuses()["a"] == "timed_out"
    assert Timer(TimerKind.DECISION, A) not in world.timers


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        ("Pay ${input.sum} to ${input.to}?", "Pay 12 to kim?"),
        ("${input.sum}", "12"),
        ("${input.list}", '["a",1]'),
        ("$${input.sum}", "${input.sum}"),
        ("${input.odd}", "a\ufffdb\nc"),
        ("${input.long}", "x" * 1_999 + "…"),
    ],
)
def test_the_message_of_an_approval_is_rendered_when_it_begins(message: str, rendered: str) -> None:
    given: JsonObject = {
        "sum": 12,
        "to": "kim",
        "list": ["a", 1],
        "odd": "a\x1bb\nc",
        "long": "x" * 3_000,
    }
    world = started(workflow(a=ApprovalSpec(message=message)), **given)
    assert world.run.step(A).wait == OnDecision(rendered)
    asked = next(line for line in world.timeline if line.what == "approval_requested")
    assert asked.detail == rendered


def test_the_list_of_approvals_has_all_that_a_person_is_shown() -> None:
    schema: JsonObject = {"type": "object"}
    ask = ApprovalSpec(message="Pay?", decision_timeout_s=2, data_schema=schema)
    world = started(workflow("payout", a=ask))
    assert world.approvals[A] == PendingApproval(
        run_id=world.run.id,
        step_id=A,
        tenant=world.run.tenant,
        workflow_id=WorkflowId("payout"),
        since=START,
        expires_at=Instant(START + 2_000),
        message="Pay?",
        data_schema=schema,
    )


@pytest.mark.parametrize(
    ("decision_s", "step_s", "expires_s"), [(None, None, None), (None, 3, 3), (2, 3, 2), (5, 3, 3)]
)
def test_an_approval_expires_with_its_time_limit_or_that_of_its_step(
    decision_s: float | None, step_s: float | None, expires_s: int | None
) -> None:
    ask = ApprovalSpec(decision_timeout_s=decision_s, timeout_s=step_s)
    world = started(workflow("payout", a=ask))
    expires_at = None if expires_s is None else Instant(START + expires_s * 1_000)
    assert world.approvals[A].expires_at == expires_at


def test_a_message_that_cannot_be_rendered_fails_the_step() -> None:
    world = started(workflow(a=ApprovalSpec(message="${input.nothing}")))
    error = world.run.step(A).error
    assert error is not None
    assert error.code == "expression_error"
    assert error.message.startswith("message: ")


def test_the_starter_cannot_decide_what_is_not_theirs() -> None:
    plan = planned(workflow(a=ApprovalSpec(not_by_starter=True), b=ApprovalSpec()))
    run = msgspec.structs.replace(started(workflow(a=ApprovalSpec())).run, starter="kim")
    step, free = plan.steps[A], plan.steps[B]
    assert rule_against(free, run, "kim") is None
    assert rule_against(step, run, "lee") is None
    against = rule_against(step, run, "kim")
    assert against is not None
    assert "not_by_starter" in against
    assert rule_against(step, run, "Kim") is not None  # to people this is one name
    unknown = msgspec.structs.replace(run, starter=None)
    assert rule_against(step, unknown, "lee") is not None


def test_the_data_of_a_decision_is_held_against_the_schema() -> None:
    schema: JsonObject = {
        "type": "object",
        "required": ["sum"],
        "properties": {"sum": {"type": "integer"}},
    }
    plan = planned(workflow(a=ApprovalSpec(data_schema=schema), b=ApprovalSpec()))
    step, free = plan.steps[A], plan.steps[B]
    assert data_faults(step, {"sum": 1}, approve=True) == ()
    assert [each.path for each in data_faults(step, {"sum": "x"}, approve=True)] == ["data.sum"]
    assert [each.path for each in data_faults(step, {}, approve=False)] == ["data.sum"]
    assert list(map(str, data_faults(step, None, approve=True))) == ["data: missing"]
    nullable = planned(workflow(a=ApprovalSpec(data_schema={"type": ["object", "null"]})))
    assert data_faults(nullable.steps[A], None, approve=True) == ()
    assert data_faults(step, None, approve=False) == ()
    assert data_faults(free, "anything", approve=True) == ()


def test_the_second_decision_is_ignored() -> None:
    world = started(workflow(a=ApprovalSpec(), b=job(A)))
    world.approve("a")
    assert world.reject("a").ignored == (Ignored.NOT_WAITING_FOR_IT,)
    assert world.statuses()["b"] == "running"


def test_an_approval_takes_no_result() -> None:
    world = started(workflow(a=ApprovalSpec()))
    stray = AttemptSucceeded(job_id=JobId("r1:a@1"), step_id=A)
    assert world.feed(stray).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_job_takes_no_decision() -> None:
    world = started(workflow(a=job()))
    assert world.feed(Approved(step_id=A)).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_delay_ends_when_its_time_has_come() -> None:
    world = started(workflow(a=DelaySpec(delay_s=2.5), b=job(A)))
    due = Instant(START + 2_500)
    assert world.run.step(A).wait == OnDelay(due)
    assert world.timers[Timer(TimerKind.DELAY, A)] == due
    assert world.feed(Approved(step_id=A)).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    world.fire(Timer(TimerKind.DELAY, A))
    assert world.statuses() == {"a": "succeeded", "b": "running"}


# ── Time limits and cancelling ───────────────────────────────────────────────────────────────────


def test_a_step_that_runs_out_of_time_times_out_and_its_job_is_revoked() -> None:
    world = started(workflow(a=job(timeout_s=1.5), b=job(A)))
    transition = world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert world.now == START + 1_500
    assert StopStep(A) in transition.effects
    assert world.statuses() == {"a": "timed_out", "b": "cancelled"}
    assert world.run.error == Failure("step_timeout", "not finished within 1.5 s", A)
    assert world.run.step(B).error == Failure("upstream_failed", "'a' has timed out", B)
    assert world.run.status is RunStatus.FAILED


def test_a_step_that_ends_in_time_clears_its_timer() -> None:
    world = started(workflow(a=job(timeout_s=1.5), b=job(A)))
    transition = world.succeed("a")
    assert ClearTimer(Timer(TimerKind.STEP_TIMEOUT, A)) in transition.effects


def test_a_time_limit_covers_all_attempts() -> None:
    world = started(workflow(a=job(timeout_s=9, retry=RetrySpec(max_attempts=5))))
    world.fail("a")
    transition = world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert transition.effects == (StopStep(A), StopRun())
    assert world.statuses() == {"a": "timed_out"}


def test_a_time_limit_that_a_step_does_not_have_cannot_run_out() -> None:
    world = started(workflow(a=job()))
    stray = TimerFired(timer=Timer(TimerKind.STEP_TIMEOUT, A))
    assert world.feed(stray).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_an_approval_can_run_out_of_time() -> None:
    world = started(workflow(a=ApprovalSpec(timeout_s=60)))
    world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert world.statuses() == {"a": "timed_out"}


def test_a_run_that_runs_out_of_time_ends_everything() -> None:
    flow = Workflow(id=WorkflowId("w"), timeout_s=3, steps={A: job(), B: job(A), C: ApprovalSpec()})
    world = started(flow)
    transition = world.fire(Timer(TimerKind.RUN_TIMEOUT))
    assert world.statuses() == {"a": "timed_out", "b": "cancelled", "c": "timed_out"}
    assert (world.run.status, transition.effects) == (RunStatus.TIMED_OUT, (StopRun(),))
    assert world.run.error == Failure("run_timeout", "not finished within 3 s")
    assert world.now == START + 3_000


def test_a_cancelled_run_ends_everything_and_revokes_its_jobs() -> None:
    world = started(workflow(a=job(), b=job(A), c=DelaySpec(delay_s=9)))
    transition = world.feed(CancelRequested(actor="reviewer", reason="wrong input"))
    assert world.statuses() == dict.fromkeys("abc", "cancelled")
    assert (world.run.status, transition.effects) == (RunStatus.CANCELLED, (StopRun(),))
    assert world.run.error == Failure("cancelled", "wrong input")


def test_a_cancel_without_a_reason_says_who_it_was() -> None:
    world = started(workflow(a=job()))
    world.feed(CancelRequested(actor="reviewer"))
    assert world.run.error == Failure("cancelled", "cancelled by reviewer")


def test_a_finished_run_ignores_everything() -> None:
    world = started(workflow(a=job()))
    world.succeed("a")
    assert world.feed(CancelRequested(actor="reviewer")).ignored == (Ignored.RUN_FINISHED,)


# ── For-each ─────────────────────────────────────────────────────────────────────────────────────


def each(for_each: str = "${input.list}", **options: object) -> ForEachSpec:
    return ForEachSpec(
        for_each=for_each,
        topic=Topic("work"),
        input={"value": "${item}", "at": "${index}"},
        **options,  # type: ignore[arg-type]  # any field of ForEachSpec
    )


def fan_out(**options: object) -> Workflow:
    return workflow(a=each(**options), b=job(A, input="${steps.a.output}"))  # type: ignore[arg-type]  # any field


def test_a_for_each_dispatches_a_job_per_item_and_gathers_outputs_in_the_order_of_the_list() -> (
    None
):
    world = started(fan_out(), list=["x", "y", "z"])
    assert list(world.jobs) == ["r1:a[0]@1", "r1:a[1]@1", "r1:a[2]@1"]
    assert world.job("a", 1).input == {"value": "y", "at": 1}
    for index in (2, 0, 1):
        world.succeed("a", f"out {index}", item=index)
    assert world.job("b").input == ["out 0", "out 1", "out 2"]
    assert world.run.step(A).items == ItemCounts(total=3, succeeded=3, output_bytes=21)


def test_jobs_of_a_traced_run_have_its_context_and_of_many_items_the_first_are_sampled() -> None:
    traced = f"00-{'ab' * 16}-{'cd' * 8}-01"
    plan = planned(fan_out())
    pending = pending_run(plan, {"list": list(range(ITEMS_TRACED + 2))})
    world = World(plan, msgspec.structs.replace(pending, traceparent=traced))
    world.feed(Started(actor="caller"))
    parents = [each.trace.parent for each in world.jobs.values() if each.trace is not None]
    assert parents == [traced] * ITEMS_TRACED + [f"{traced[:-2]}00"] * 2
    assert world.job("a", 0).trace == JobTrace(traced, START)
    for index in range(ITEMS_TRACED + 2):
        world.succeed("a", index, item=index)
    assert world.job("b").trace == JobTrace(traced, world.now)
    assert all(each.trace is None for each in started(fan_out(), list=[1]).jobs.values())


def test_an_empty_for_each_succeeds_with_an_empty_list() -> None:
    world = started(fan_out(), list=[])
    assert (world.run.step(A).status, world.job("b").input) == ("succeeded", [])


def test_one_result_is_a_delta_of_one_item() -> None:
    world = started(fan_out(), list=list(range(250)))
    transition = world.succeed("a", "out", item=150)
    assert [key.item for key in transition.items] == [150]
    assert list(transition.steps) == [A]
    assert not transition.effects
    assert [entry.what for entry in transition.timeline] == ["item_succeeded"]


def test_each_item_has_attempts_of_its_own() -> None:
    world = started(fan_out(retry=RetrySpec(max_attempts=2, backoff=Fixed(5))), list=["x", "y"])
    world.fail("a", item=0)
    assert world.run.step(A).items == ItemCounts(total=2, waiting=1)
    assert world.run.step(A).status == "running"
    world.succeed("a", "out 1", item=1)
    assert world.run.step(A).status == "waiting"
    world.fire(Timer(TimerKind.RETRY, A, 0, 1))
    assert world.run.step(A).items == ItemCounts(total=2, succeeded=1, output_bytes=len('"out 1"'))
    assert world.job("a", 0).input == {"value": "x", "at": 0}
    world.succeed("a", "out 0", item=0)
    assert world.job("b").input == ["out 0", "out 1"]


def test_failed_items_fail_the_step_once_all_have_ended() -> None:
    world = started(fan_out(), list=["x", "y", "z"])
    world.fail("a", "late", item=2)
    world.fail("a", "early", item=1)
    assert world.run.step(A).status == "running"
    world.succeed("a", item=0)
    assert world.run.step(A).status == "failed"
    error = world.run.error
    assert error is not None
    assert (error.code, error.message) == ("items_failed", "2 of 3 items failed; item 1: early")


def test_failed_items_that_are_accepted_are_null_in_the_output_and_listed() -> None:
    spec = each(on_item_failure=OnFailure.CONTINUE)
    told = {"out": "${steps.a.output}", "failures": "${steps.a.failures}"}
    world = started(workflow(a=spec, b=job(A, input=told)), list=["x", "y", "z"])
    world.fail("a", "late", item=2)
    world.fail("a", "early", item=0)
    world.succeed("a", "Y", item=1)
    assert world.statuses() == {"a": "succeeded", "b": "running"}
    assert world.job("b").input == {
        "out": [None, "Y", None],
        "failures": [
            {"index": 0, "error": {"code": "handler_error", "message": "early"}},
            {"index": 2, "error": {"code": "handler_error", "message": "late"}},
        ],
    }
    assert "2 of 3 items failed" in [entry.detail for entry in world.timeline]
    world.succeed("b")
    assert world.run.status == "succeeded"


def test_a_step_that_failed_lists_its_failed_items_too() -> None:
    spec = each(on_failure=OnFailure.CONTINUE)
    world = started(workflow(a=spec, b=job(A, input="${steps.a.failures}")), list=["x", "y"])
    world.fail("a", "no", item=1)
    world.succeed("a", item=0)
    assert world.job("b").input == [
        {"index": 1, "error": {"code": "handler_error", "message": "no"}}
    ]


def test_only_the_first_hundred_failed_items_are_listed() -> None:
    count = ITEM_FAILURES_MAX + 5
    spec = each(on_item_failure=OnFailure.CONTINUE)
    world = started(workflow(a=spec), list=list(range(count)))
    world.feed(*(failed(world.job("a", index)) for index in reversed(range(count))))
    assert [one.index for one in world.run.step(A).failures] == list(range(ITEM_FAILURES_MAX))
    assert world.run.step(A).items == ItemCounts(total=count, failed=count)
    assert world.run.output == {"a": [None] * count}


def test_accepted_failures_count_towards_the_size_of_all_outputs() -> None:
    spec = each(on_item_failure=OnFailure.CONTINUE)
    world = started(workflow(a=spec), list=[1])
    world.fail("a", "x" * 500, item=0)
    state = world.run.step(A)
    assert state.output_bytes == len(msgspec.json.encode(state.output)) + len(
        msgspec.json.encode(state.failures)
    )


# ── Items at a time ──────────────────────────────────────────────────────────────────────────────


def test_as_many_items_go_out_as_may_and_each_end_sends_the_next() -> None:
    world = started(workflow(a=each(parallel=2)), list=["p", "q", "r", "s"])
    assert [item.item for item in world.jobs.values()] == [0, 1]
    assert world.run.step(A).items == ItemCounts(total=4, pending=2)
    world.fail("a", item=1)
    assert [item.item for item in world.jobs.values()] == [0, 2]
    world.feed(succeeded(world.job("a", 2), "R"), succeeded(world.job("a", 0), "P"))
    assert [item.item for item in world.jobs.values()] == [3]
    assert world.job("a", 3).input == {"value": "s", "at": 3}
    world.succeed("a", "S", item=3)
    assert world.run.step(A).error is not None
    assert world.run.step(A).items == ItemCounts(
        total=4, succeeded=3, failed=1, output_bytes=3 * len('"R"')
    )


def test_an_item_that_waits_for_its_next_attempt_keeps_its_place_and_its_input() -> None:
    flaky = RetrySpec(max_attempts=2, backoff=Fixed(10))
    world = started(workflow(a=each(parallel=1, retry=flaky)), list=["p", "q"])
    world.fail("a", item=0)
    assert not world.jobs
    assert world.run.step(A).status == "waiting"
    world.fire(Timer(TimerKind.RETRY, A, 0, 1))
    assert world.job("a", 0).input == {"value": "p", "at": 0}
    world.succeed("a", "P", item=0)
    assert [job.item for job in world.jobs.values()] == [1]


def test_inputs_are_kept_from_the_start_of_the_step_to_the_end_of_the_item() -> None:
    world = started(workflow(a=each(parallel=1)), list=["p", "q"])
    kept = [world.items[ItemKey(A, index)].input for index in (0, 1)]
    assert kept == [{"value": "p", "at": 0}, {"value": "q", "at": 1}]
    world.succeed("a", item=0)
    assert world.items[ItemKey(A, 0)].input is msgspec.UNSET
    # Items that all go out at once have their inputs in their jobs.
    at_once = started(workflow(a=each(parallel=2)), list=["p", "q"])
    assert at_once.items[ItemKey(A, 0)].input is msgspec.UNSET


def test_each_item_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = 0
    evaluate = Draft.evaluate_in

    def counting(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on as they are
        nonlocal evaluations
        evaluations += 1
        return evaluate(*args, **named)

    monkeypatch.setattr(Draft, "evaluate_in", counting)
    total, at_once = 10_000, 50
    # A list that is made by an expression: rendering one item's input again would make all of it.
    spec = each(for_each="${input.list.map(n, n + 1)}", parallel=at_once)
    plan = planned(workflow(a=spec))
    run = pending_run(plan, {"list": list(range(total))})
    first = decide(plan, run, Started(), START)
    assert len(first.effects) == 1 + at_once  # and the run's timeout
    assert evaluations == 1 + total
    run, items = evolve(run, first), dict(first.items)
    out = [effect.job for effect in first.effects if isinstance(effect, DispatchJob)]
    read = 0
    for done in range(total - 1):
        event = succeeded(out[done], 1)
        wanted = items_to_read(plan, run, [event])[A]
        read += len(wanted)
        view = replace(run, items={ItemKey(A, n): items[ItemKey(A, n)] for n in wanted})
        change = decide(plan, view, event, START)
        items |= change.items
        run = replace(evolve(view, change), items={})
        sent = [effect.job for effect in change.effects if isinstance(effect, DispatchJob)]
        assert len(change.effects) == len(sent) <= 1
        assert len(change.items) == 1 + len(sent)
        assert evaluations == 1 + total
        out += sent
    assert len(out) == total
    # Each reads itself and the one that it sends out.
    assert read == (total - 1) + (total - at_once)


def test_a_dead_item_leaves_the_step_waiting_until_it_is_replayed() -> None:
    world = started(fan_out(), list=["x"])
    world.die("a", item=0)
    assert (world.run.status, world.run.step(A).status) == (RunStatus.WAITING, "waiting")
    world.replay("a", item=0)
    assert (world.job("a", 0).dispatch, world.run.step(A).status) == (2, "running")


def test_a_discarded_item_fails_and_the_others_go_on() -> None:
    world = started(fan_out(), list=["x", "y"])
    world.die("a", item=0)
    world.discard("a", item=0)
    assert world.run.status is RunStatus.RUNNING
    world.succeed("a", item=1)
    error = world.run.error
    assert error is not None
    assert (error.code, world.run.status) == ("items_failed", RunStatus.FAILED)


def test_a_for_each_that_runs_out_of_time_revokes_all_its_items() -> None:
    world = started(fan_out(timeout_s=5), list=["x", "y"])
    world.succeed("a", item=0)
    transition = world.fire(Timer(TimerKind.STEP_TIMEOUT, A))
    assert StopStep(A) in transition.effects
    assert not world.jobs


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "for_each: a list is needed, this is a string"),
        ({"a": 1}, "for_each: a list is needed, this is an object"),
        (None, "for_each: a list is needed, this is null"),
        (True, "for_each: a list is needed, this is a boolean"),
        (7, "for_each: a list is needed, this is a number"),
        (0.5, "for_each: a list is needed, this is a number"),
    ],
)
def test_a_for_each_over_anything_but_a_list_fails(value: object, reason: str) -> None:
    world = started(fan_out(), list=value)
    assert world.run.error is not None
    assert (world.run.error.code, world.run.error.message) == ("expression_error", reason)
    assert not world.jobs


def test_more_than_ten_thousand_items_fail_the_step_with_a_code_of_its_own() -> None:
    error = started(fan_out(), list=list(range(10_001))).run.step(A).error
    message = "for_each: 10001 items; at most 10000 are allowed"
    assert error == Failure("too_many_items", message, A)


def test_ten_thousand_items_are_allowed() -> None:
    world = started(fan_out(), list=list(range(10_000)))
    assert len(world.items) == 10_000
    assert len(world.jobs) == 250  # one commit must not write ten thousand jobs


def test_a_wide_for_each_is_dispatched_in_pieces() -> None:
    world = started(fan_out(), list=list(range(1_200)))
    more = Timer(TimerKind.ITEMS, A)
    for out in (250, 500, 750):
        assert len(world.jobs) == out
        assert world.timers[more] == world.now
        world.fire(more)
    assert len(world.jobs) == 1_000
    assert more not in world.timers
    assert world.feed(TimerFired(timer=more)).ignored == (Ignored.NOT_WAITING_FOR_IT,)
    world.succeed("a", item=7)
    assert len(world.jobs) == 1_000
    assert [job.item for job in world.jobs.values()][-1] == 1_000


def test_results_dispatch_the_rest_of_a_wide_for_each_before_its_timer_does() -> None:
    world = started(workflow(a=each(parallel=252)), list=list(range(300)))
    more = Timer(TimerKind.ITEMS, A)
    assert (len(world.jobs), more in world.timers) == (250, True)
    world.succeed("a", item=0)
    assert (len(world.jobs), more in world.timers) == (251, True)
    world.succeed("a", item=1)
    assert (len(world.jobs), more in world.timers) == (252, False)
    world.succeed("a", item=2)
    assert (len(world.jobs), more in world.timers) == (252, False)
    # The last ones are dispatched while fewer than 252 are left.
    world = started(workflow(a=each()), list=list(range(252)))
    world.succeed("a", item=0)
    assert (len(world.jobs), more in world.timers) == (251, False)


def test_a_wide_for_each_goes_on_by_its_timer_if_the_next_items_were_not_read() -> None:
    plan = planned(fan_out())
    run = pending_run(plan, {"list": list(range(1_000))})
    first = decide(plan, run, Started(), START)
    run = evolve(run, first)
    out = [effect.job for effect in first.effects if isinstance(effect, DispatchJob)]
    fired = TimerFired(timer=Timer(TimerKind.ITEMS, A))
    view = replace(run, items={ItemKey(A, 0): first.items[ItemKey(A, 0)]})
    change = decide_all(plan, view, [fired, succeeded(out[0], 1)], START)
    assert change.ignored == (None, None)
    assert [effect for effect in change.effects if isinstance(effect, SetTimer)] == [
        SetTimer(fired.timer, START)
    ]
    # What it reads is enough for the timer and for all results.
    events: list[Event] = [fired, *(succeeded(job, 1) for job in out)]
    assert len(items_to_read(plan, run, events)[A]) == 1_000
    assert [*items_to_read(plan, run, events[:2])[A]] == [0, *range(250, 502)]


def test_an_item_whose_input_errs_fails_the_step_before_anything_is_sent() -> None:
    spec = ForEachSpec(for_each="${input.list}", topic=Topic("work"), input="${item.q}")
    world = started(workflow(a=spec), list=[{"q": 1}, {}])
    assert world.run.error is not None
    assert world.run.error.message.startswith("input of item 1: ")
    assert not world.jobs


def test_all_items_share_what_their_expressions_may_cost() -> None:
    spec = ForEachSpec(
        for_each="${input.list}",
        topic=Topic("work"),
        input="${input.list.map(x, input.list.map(y, x + y))[0]}",
    )
    few = started(workflow(a=spec), list=list(range(5)))
    assert few.statuses() == {"a": "running"}
    many = started(workflow(a=spec), list=list(range(400)))
    assert many.run.error is not None
    assert many.run.error.code == "expression_error"
    assert not many.jobs


def test_ten_thousand_ordinary_expressions_are_not_too_much() -> None:
    spec = ForEachSpec(
        for_each="${input.list}", topic=Topic("work"), input={"q": "find ${string(item + 1)}"}
    )
    world = started(workflow(a=spec), list=list(range(10_000)))
    assert world.items[ItemKey(StepId("a"), 9_999)].input == {"q": "find 10000"}


@pytest.mark.parametrize("index", [None, -1, 2])
def test_a_result_for_an_item_that_is_not_there_is_ignored(index: int | None) -> None:
    world = started(fan_out(), list=["x", "y"])
    stray = AttemptSucceeded(job_id=JobId("r1:a[9]@1"), step_id=A, item=index)
    assert world.feed(stray).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_for_each_takes_no_decision() -> None:
    world = started(fan_out(), list=["x"])
    assert world.feed(Approved(step_id=A)).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_outputs_that_are_too_large_together_fail_the_step_before_there_are_more() -> None:
    world = started(fan_out(), list=list(range(9)))
    for index in range(5):
        world.succeed("a", "x" * 900_000, item=index)
    assert not world.jobs
    assert world.run.error is not None
    assert world.run.error.code == "output_too_large"
    assert "at most 4194304 are allowed" in world.run.error.message


def test_outputs_of_exactly_the_allowed_size_pass() -> None:
    world = started(fan_out(), list=[0])
    world.succeed("a", "x" * (4 * 1024 * 1024 - 4), item=0)
    assert world.run.step(A).status == "succeeded"


def test_the_size_of_the_outputs_of_items_is_that_of_their_json_list_to_the_byte() -> None:
    first: JsonValue = {"n": [1, "ü"]}
    rest = FOR_EACH_OUTPUT_BYTES_MAX - len(msgspec.json.encode([first, "", None]))
    for spare, status in ((0, "succeeded"), (-1, "failed")):
        spec = each(on_item_failure=OnFailure.CONTINUE)
        world = started(workflow(a=spec), list=[0, 1, 2])
        world.fail("a", item=2)
        world.succeed("a", first, item=0)
        world.succeed("a", "x" * (rest - spare), item=1)
        assert str(world.run.step(A).status) == status
        if status == "failed":
            assert world.run.error is not None
            assert f"{FOR_EACH_OUTPUT_BYTES_MAX + 1} bytes" in world.run.error.message


def test_steps_whose_outputs_are_too_large_together_fail_the_one_that_is_too_much() -> None:
    world = started(workflow(**{f"s{n}": job() for n in range(5)}))
    for n in range(5):
        world.succeed(f"s{n}", "x" * (2 * 1024 * 1024 - 64))
    assert [str(world.run.step(StepId(f"s{n}")).status) for n in range(5)] == [
        *["succeeded"] * 4,
        "failed",
    ]
    assert world.run.error is not None
    assert world.run.error.code == "output_too_large"
    assert "at most 8388608 are allowed" in world.run.error.message


def test_the_size_of_all_outputs_is_that_of_their_json_list_to_the_byte() -> None:
    for spare, status in ((0, "succeeded"), (-1, "failed")):
        world = started(workflow(a=job(), b=job(), c=job()))
        first: JsonValue = {"n": [1, "ü"]}
        second = "x" * 1_000
        rest = RUN_OUTPUT_BYTES_MAX - len(msgspec.json.encode([first, second, ""])) - spare
        outputs: list[tuple[str, JsonValue]] = [("a", first), ("b", second), ("c", "x" * rest)]
        for name, output in outputs:
            world.succeed(name, output)
        assert str(world.run.step(StepId("c")).status) == status
        if status == "failed":
            assert world.run.error is not None
            assert f"would be {RUN_OUTPUT_BYTES_MAX + 1} bytes" in world.run.error.message


@pytest.mark.parametrize("is_old", [False, True])
def test_an_output_is_measured_once_however_many_steps_there_are(
    monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    measured: list[JsonValue] = []
    really = draft.size_of

    def counted(output: JsonValue) -> int:
        measured.append(output)
        return really(output)

    monkeypatch.setattr(draft, "size_of", counted)
    world = started(workflow(**{f"s{n}": job() for n in range(50)}))
    for n in range(49):
        world.succeed(f"s{n}", n)
    outputs = [each for each in measured if each != {}]  # those are the inputs of jobs
    assert outputs == list(range(49))
    if is_old:  # a run that was written before steps kept the size
        steps = {name: replace(step, output_bytes=0) for name, step in world.run.steps.items()}
        world.run = replace(world.run, steps=steps)
    measured.clear()
    world.succeed("s49", "last")
    assert len(measured) == (50 if is_old else 1)


def test_only_what_the_events_name_is_read_until_they_can_be_the_last() -> None:
    world = started(fan_out(), list=["x", "y", "z"])
    events = [AttemptSucceeded(job_id=JobId(f"r1:a[{i}]@1"), step_id=A, item=i) for i in range(3)]
    retry = TimerFired(timer=Timer(TimerKind.RETRY, A, 2, 1))
    assert items_to_read(world.plan, world.run, [events[1], events[1], Started()]) == {A: [1]}
    assert items_to_read(world.plan, world.run, [retry, events[0]]) == {A: [0, 2]}
    assert items_to_read(world.plan, world.run, events) == {A: range(3)}
    assert (
        items_to_read(world.plan, world.run, [TimerFired(timer=Timer(TimerKind.RETRY, A, None, 1))])
        == {}
    )
    assert (
        items_to_read(world.plan, world.run, [TimerFired(timer=Timer(TimerKind.RETRY, None, 1, 1))])
        == {}
    )
    assert items_to_read(world.plan, pending_run(world.plan), events) == {}


def test_several_events_make_one_transition() -> None:
    world = started(fan_out(), list=["x", "y"])
    jobs = [world.job("a", index) for index in range(2)]
    events = [
        AttemptSucceeded(job_id=each.id, step_id=A, item=each.item, output=1) for each in jobs
    ]
    transition = world.feed(events[0], events[0], events[1])
    assert transition.ignored == (None, Ignored.NOT_WAITING_FOR_IT, None)
    assert isinstance(transition.effects[0], DispatchJob)
    assert world.job("b").input == [1, 1]


# ── Sub-workflows ────────────────────────────────────────────────────────────────────────────────


def nested(**options: object) -> tuple[Workflow, Workflow]:
    inner = Workflow(
        id=WorkflowId("inner"),
        steps={
            StepId("x"): job(input="${input.n}"),
            StepId("y"): job(StepId("x"), input="${steps.x.output}"),
        },
        output={"of": "${input.n}", "got": "${steps.y.output}"},
    )
    spec = SubworkflowSpec(
        needs=(A,),
        workflow=inner.id,
        input={"n": "${steps.a.output}"},
        **options,  # type: ignore[arg-type]  # any field of SubworkflowSpec
    )
    return workflow(a=job(), b=spec, c=job(B, input="${steps.b.output}")), inner


def test_a_sub_workflow_runs_as_steps_of_the_same_run() -> None:
    world = started(*nested())
    world.succeed("a", 5)
    assert world.statuses() == {
        "a": "succeeded",
        "b": "running",
        "b.x": "running",
        "b.y": "pending",
        "c": "pending",
    }
    assert world.job("b.x").input == 5
    assert world.job("b.x").id == "r1:b.x@1"
    world.succeed("b.x", "from x")
    assert world.job("b.y").input == "from x"
    world.succeed("b.y", "from y")
    assert world.job("c").input == {"of": 5, "got": "from y"}


def test_a_failure_inside_fails_the_sub_workflow_step_and_cancels_what_needs_it() -> None:
    world = started(*nested())
    world.succeed("a", 5)
    world.fail("b.x", "inside")
    assert world.statuses() == {
        "a": "succeeded",
        "b": "failed",
        "b.x": "failed",
        "b.y": "cancelled",
        "c": "cancelled",
    }
    assert world.run.error is not None
    assert (world.run.error.step, world.run.error.message) == ("b.x", "inside")


def test_a_skipped_sub_workflow_skips_its_inside() -> None:
    world = started(*nested(when="false"))
    world.succeed("a", 5)
    assert world.statuses() == {
        "a": "succeeded",
        "b": "skipped",
        "b.x": "skipped",
        "b.y": "skipped",
        "c": "running",
    }


def test_a_cancelled_sub_workflow_cancels_its_inside() -> None:
    world = started(*nested())
    world.fail("a")
    assert world.statuses() == {"a": "failed"} | dict.fromkeys(
        ("b", "b.x", "b.y", "c"), "cancelled"
    )


def test_a_sub_workflow_that_runs_out_of_time_stops_its_inside() -> None:
    world = started(*nested(timeout_s=5))
    world.succeed("a", 5)
    transition = world.fire(Timer(TimerKind.STEP_TIMEOUT, B))
    assert transition.effects[:2] == (StopStep(B), StopStep(StepId("b.x")))
    assert world.statuses() == {
        "a": "succeeded",
        "b": "timed_out",
        "b.x": "timed_out",
        "b.y": "cancelled",
        "c": "cancelled",
    }


def test_an_event_for_a_sub_workflow_step_itself_is_ignored() -> None:
    world = started(*nested())
    world.succeed("a", 5)
    stray = AttemptSucceeded(job_id=JobId("r1:b@1"), step_id=B)
    assert world.feed(stray).ignored == (Ignored.NOT_WAITING_FOR_IT,)


def test_a_sub_workflow_waits_while_everything_inside_waits() -> None:
    inner = workflow("inner", x=ApprovalSpec())
    world = started(workflow(a=SubworkflowSpec(workflow=inner.id)), inner)
    assert (world.run.status, world.run.step(A).status) == (RunStatus.WAITING, "waiting")
    world.approve("a.x")
    assert world.run.status is RunStatus.SUCCEEDED


def test_a_sub_workflow_input_must_be_an_object() -> None:
    inner = workflow("inner", x=job())
    world = started(workflow(a=SubworkflowSpec(workflow=inner.id, input="${input.n}")), inner, n=3)
    assert world.run.error is not None
    assert (world.run.error.code, world.run.error.message) == (
        "invalid_input",
        "input: an object is needed",
    )
    assert world.statuses() == {"a": "failed", "a.x": "cancelled"}


def test_a_sub_workflow_input_that_errs_fails_the_step() -> None:
    inner = workflow("inner", x=job())
    world = started(workflow(a=SubworkflowSpec(workflow=inner.id, input="${input.n}")), inner)
    assert world.run.error is not None
    assert world.run.error.code == "expression_error"


def test_a_sub_workflow_input_is_checked_against_its_schema() -> None:
    inner = Workflow(
        id=WorkflowId("inner"),
        steps={StepId("x"): job()},
        input_schema={"type": "object", "required": ["n"]},
    )
    flow = workflow(a=SubworkflowSpec(workflow=inner.id, input={"m": 1}))
    world = started(flow, inner)
    assert world.run.error is not None
    assert world.run.error.code == "invalid_input"
    good = workflow(a=SubworkflowSpec(workflow=inner.id, input={"n": 1}))
    assert started(good, inner).statuses() == {"a": "running", "a.x": "running"}


def test_an_inner_output_that_errs_fails_the_sub_workflow_step() -> None:
    inner = Workflow(
        id=WorkflowId("inner"), steps={StepId("x"): job()}, output="${steps.x.output.missing}"
    )
    world = started(workflow(a=SubworkflowSpec(workflow=inner.id)), inner)
    world.succeed("a.x", {})
    assert world.run.error is not None
    assert (world.run.error.code, world.run.error.step) == ("expression_error", A)


# ── The timeline ─────────────────────────────────────────────────────────────────────────────────


def test_the_timeline_tells_the_story_with_its_actors() -> None:
    flow = workflow(
        a=job(retry=RetrySpec(max_attempts=2, backoff=Fixed(5))),
        b=ApprovalSpec(needs=(A,)),
        c=DelaySpec(needs=(B,), delay_s=1),
    )
    world = started(flow)
    world.fail("a", "flaky")
    world.fire(Timer(TimerKind.RETRY, A, None, 1))
    world.succeed("a")
    world.approve("b")
    world.fire(Timer(TimerKind.DELAY, C))
    assert [(entry.what, entry.step, entry.actor, entry.detail) for entry in world.timeline] == [
        ("run_started", None, "caller", None),
        ("job_dispatched", "a", "caller", None),
        ("job_failed", "a", "worker-1", "flaky"),
        ("job_dispatched", "a", "system", None),
        ("step_succeeded", "a", "worker-1", None),
        ("approval_requested", "b", "worker-1", None),
        ("step_succeeded", "b", "reviewer", None),
        ("delay_started", "c", "reviewer", "1 s"),
        ("step_succeeded", "c", "system", None),
        ("run_succeeded", None, "system", None),
    ]


def test_the_timeline_says_that_an_item_failed_for_good() -> None:
    spec = each(retry=RetrySpec(max_attempts=2, backoff=Fixed(5)))
    world = started(workflow(a=spec, b=job(A)), list=["x", "y"])
    world.fail("a", "flaky", item=0)
    world.fire(Timer(TimerKind.RETRY, A, 0, 1))
    world.fail("a", "broken", item=0)
    world.die("a", item=1)
    world.discard("a", item=1)
    about = [(entry.what, entry.item, entry.attempt) for entry in world.timeline if entry.step == A]
    assert about == [
        ("items_started", None, None),
        ("job_dispatched", 0, 1),
        ("job_dispatched", 1, 1),
        ("job_failed", 0, 1),
        ("job_dispatched", 0, 2),
        ("job_failed", 0, 2),
        ("item_failed", 0, 2),
        ("job_died", 1, 1),
        ("job_discarded", 1, 1),
        ("item_failed", 1, 1),
        ("step_failed", None, None),
    ]


def test_deciding_changes_nothing_about_the_run_that_was_read() -> None:
    plan = planned(workflow(a=job()))
    run = pending_run(plan)
    transition = decide(plan, run, Started(), START)
    assert run == pending_run(plan)
    assert transition.steps[A].wait == OnJob(JobId("r1:a@1"))
    assert isinstance(transition.effects[0], SetTimer)
