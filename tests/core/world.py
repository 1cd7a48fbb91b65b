"""A world for one run: jobs that are out, timers that are set, and nothing else.

It does with a transition what a store does, without storing anything, and checks every invariant
after every change.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stanchion.core import invariants
from stanchion.core.events import (
    Approved,
    AttemptFailed,
    AttemptSucceeded,
    Event,
    JobDied,
    JobDiscarded,
    JobReplayed,
    Rejected,
    Started,
    Timer,
    TimerFired,
)
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Instant,
    Item,
    ItemKey,
    Job,
    JobId,
    OnDecision,
    PendingApproval,
    Run,
    RunId,
    StepId,
    TenantId,
    WorkflowId,
)
from stanchion.core.plan import Plan, link
from stanchion.core.run import decide_all, evolve, items_to_read
from stanchion.core.transition import (
    ClearTimer,
    CloseApproval,
    DispatchJob,
    OpenApproval,
    RevokeJob,
    SetTimer,
    StopRun,
    StopStep,
    TimelineEntry,
    Transition,
)
from stanchion.core.workflow import Workflow

START = Instant(1_700_000_000_000)


def planned(workflow: Workflow, others: Mapping[WorkflowId, Workflow] | None = None) -> Plan:
    """Link a workflow that is known to be good."""
    plan = link(workflow, others or {})
    assert isinstance(plan, Plan), plan
    return plan


def pending_run(plan: Plan, run_input: JsonObject | None = None) -> Run:
    """A run that nothing has happened to yet."""
    return Run(
        id=RunId("r1"),
        tenant=TenantId("acme"),
        workflow_id=plan.workflow_id,
        workflow_version=1,
        input={} if run_input is None else run_input,
        created_at=START,
    )


class World:
    """Everything outside the core that one run needs."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self.plan = plan
        self.run = run
        self.items: dict[ItemKey, Item] = {}
        self.jobs: dict[JobId, Job] = {}
        self.timers: dict[Timer, Instant] = {}
        self.approvals: dict[StepId, PendingApproval] = {}
        self.dead: dict[JobId, Job] = {}
        self.timeline: list[TimelineEntry] = []
        self.history: list[Event] = []
        self.now = START

    @classmethod
    def started(cls, plan: Plan, run_input: JsonObject | None = None) -> World:
        """A world whose run has just begun."""
        world = cls(plan, pending_run(plan, run_input))
        world.feed(Started(actor="caller"))
        return world

    def feed(self, *events: Event) -> Transition:
        """Let events happen, as one transition."""
        wanted = items_to_read(self.plan, self.run, events)
        view = msgspec.structs.replace(
            self.run,
            items=self.run.items  # of a rerun that has not started: those that it keeps
            | {
                key: self.items[key]
                for step_id, indexes in wanted.items()
                for key in (ItemKey(step_id, index) for index in indexes)
                if key in self.items
            },
        )
        transition = decide_all(self.plan, view, events, self.now)
        after = evolve(view, transition)
        self._check(view, transition, after)
        self.run = msgspec.structs.replace(after, items={})
        self.items.update(transition.items)
        self.timeline.extend(transition.timeline)
        self.history.extend(events)
        self._perform(transition)
        self._check_work()
        return transition

    # ── Shorthands for what people, workers and clocks do ────────────────────────────────────────

    def job(self, step: str, item: int | None = None) -> Job:
        """The open job of a step."""
        [job] = [
            job for job in self.jobs.values() if (job.step_id, job.item) == (StepId(step), item)
        ]
        return job

    def succeed(self, step: str, output: JsonValue = None, item: int | None = None) -> Transition:
        """A worker finishes the step's job."""
        return self.feed(succeeded(self.job(step, item), output))

    def fail(
        self, step: str, message: str = "boom", item: int | None = None, *, final: bool = False
    ) -> Transition:
        """A worker reports that the step's job failed."""
        return self.feed(failed(self.job(step, item), message, final=final))

    def die(self, step: str, item: int | None = None) -> Transition:
        """The step's job becomes a dead letter."""
        return self.feed(died(self.job(step, item)))

    def replay(self, step: str, item: int | None = None) -> Transition:
        """An operator replays the step's dead letter."""
        [job] = [
            job for job in self.dead.values() if (job.step_id, job.item) == (StepId(step), item)
        ]
        return self.feed(replayed(job))

    def discard(self, step: str, item: int | None = None) -> Transition:
        """An operator discards the step's dead letter."""
        [job] = [
            job for job in self.dead.values() if (job.step_id, job.item) == (StepId(step), item)
        ]
        return self.feed(discarded(job))

    def fire(self, timer: Timer) -> Transition:
        """Time passes until the timer is due."""
        self.now = max(self.now, self.timers[timer])
        return self.feed(TimerFired(timer=timer))

    def approve(self, step: str, comment: str | None = None, data: JsonValue = None) -> Transition:
        """A person approves."""
        event = Approved(step_id=StepId(step), actor="reviewer", comment=comment, data=data)
        return self.feed(event)

    def reject(self, step: str, comment: str | None = None, data: JsonValue = None) -> Transition:
        """A person rejects."""
        event = Rejected(step_id=StepId(step), actor="reviewer", comment=comment, data=data)
        return self.feed(event)

    def undecided(self) -> list[StepId]:
        """The approvals that somebody could decide now."""
        steps = self.run.steps.items()
        return [step_id for step_id, step in steps if isinstance(step.wait, OnDecision)]

    def statuses(self) -> dict[str, str]:
        """The statuses of all steps, in the plan's order."""
        return {step_id: str(self.run.step(step_id).status) for step_id in self.plan.steps}

    # ── What a store does ────────────────────────────────────────────────────────────────────────

    def _perform(self, transition: Transition) -> None:  # noqa: C901, PLR0912 - one case for each effect
        for event in self.history[-len(transition.ignored) :]:
            if isinstance(event, AttemptSucceeded | AttemptFailed):
                self.jobs.pop(event.job_id, None)
            elif isinstance(event, JobDied) and self._is_out(event):
                self.dead[event.job_id] = self.jobs.pop(event.job_id)
            elif isinstance(event, TimerFired):
                self.timers.pop(event.timer, None)
        for effect in transition.effects:
            match effect:
                case DispatchJob(job=job):
                    assert job.id not in self.jobs
                    self.jobs[job.id] = job
                    self.dead.pop(job.id, None)
                case SetTimer(timer=timer, due=due):
                    assert timer not in self.timers
                    self.timers[timer] = due
                case ClearTimer(timer=timer):
                    self.timers.pop(timer, None)
                case OpenApproval(approval=approval):
                    assert approval.step_id not in self.approvals
                    self.approvals[approval.step_id] = approval
                case CloseApproval(step_id=step_id):
                    del self.approvals[step_id]
                case StopStep(step_id=step_id, inside=inside):
                    gone = {
                        each
                        for each in (*self.plan.steps, *self.plan.item_steps)
                        if each == step_id or each.startswith(inside)
                    }
                    self.approvals = {s: a for s, a in self.approvals.items() if s not in gone}
                    self.jobs = {i: j for i, j in self.jobs.items() if j.step_id not in gone}
                    self.timers = {t: d for t, d in self.timers.items() if t.step_id not in gone}
                case RevokeJob(job_id=job_id):
                    self.jobs.pop(job_id, None)
                case StopRun():
                    self.approvals.clear()
                    self.jobs.clear()
                    self.timers.clear()

    def _is_out(self, event: JobDied) -> bool:
        job = self.jobs.get(event.job_id)
        return job is not None and job.dispatch == event.dispatch

    def _check(self, before: Run, transition: Transition, after: Run) -> None:
        broken = invariants.of_run(self.plan, after)
        broken += invariants.of_transition(before, transition, after)
        assert not broken, broken

    def _check_work(self) -> None:
        broken = invariants.of_work(
            self.plan, self.run, self.items.items(), open_jobs=self.jobs, timers=self.timers
        )
        assert not broken, broken
        assert sorted(self.approvals) == sorted(self.undecided())


def succeeded(job: Job, output: JsonValue = None) -> AttemptSucceeded:
    """The event of a worker's success."""
    return AttemptSucceeded(
        job_id=job.id, step_id=job.step_id, item=job.item, output=output, actor="worker-1"
    )


def failed(job: Job, message: str = "boom", *, final: bool = False) -> AttemptFailed:
    """The event of a worker's failure."""
    return AttemptFailed(
        job_id=job.id,
        step_id=job.step_id,
        item=job.item,
        error=Failure("handler_error", message),
        final=final,
        actor="worker-1",
    )


def died(job: Job) -> JobDied:
    """The event of a job that nobody finished."""
    return JobDied(
        job_id=job.id, step_id=job.step_id, item=job.item, dispatch=job.dispatch, deliveries=5
    )


def discarded(job: Job) -> JobDiscarded:
    """The event of an operator who gives a dead letter up."""
    return JobDiscarded(
        job_id=job.id,
        step_id=job.step_id,
        item=job.item,
        dispatch=job.dispatch,
        actor="operator",
    )


def replayed(job: Job) -> JobReplayed:
    """The event of an operator's replay."""
    return JobReplayed(
        job_id=job.id,
        step_id=job.step_id,
        item=job.item,
        dispatch=job.dispatch,
        actor="operator",
    )
