"""Drive one workflow through the pure core: no server, no store, no waiting.

The program feeds the events of workers, a person and a clock to the core. The core returns a
transition for each; the program applies its effects and prints the timeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stanchion.core.events import (
    Approved,
    AttemptFailed,
    AttemptSucceeded,
    Event,
    Started,
    Timer,
    TimerFired,
    TimerKind,
)
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Failure, Instant, Item, ItemKey, Job, Run, RunId, StepId, TenantId
from stanchion.core.plan import Plan, link
from stanchion.core.run import decide, evolve, items_to_read
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
)
from stanchion.core.workflow import Workflow
from stanchion.core.workflow_file import parse_workflow

HERE = Path(__file__).parent
INPUT: JsonObject = {"question": "What holds a rope?", "review": True}
EPOCH = Instant(1_767_225_600_000)  # 2026-01-01 00:00 UTC; the core has no clock


def main() -> int:
    """Run the research agent to its end and show what happened."""
    research, report = read("research.yaml"), read("publish-report.yaml")
    plan = link(research, {report.id: report})
    if not isinstance(plan, Plan):
        sys.exit("\n".join(str(fault) for fault in plan.faults))
    assert plan.body.schema is not None
    faults = plan.body.schema.faults(INPUT)  # decide does not validate the input
    if faults:
        sys.exit("\n".join(str(fault) for fault in faults))
    print(f"workflow {research.id}: risk {plan.risk}, {len(plan.steps)} steps with", end=" ")
    print(f"{report.id} expanded: {', '.join(plan.steps)}\n")

    world = World(plan)
    for event in story(world):
        world.happen(event)
    world.print_timeline()

    print(f"\nrun {world.run.id}: {world.run.status}")
    print(f"output: {msgspec.json.encode(world.run.output).decode()}")
    return 0 if world.run.status == "succeeded" else 1


def read(name: str) -> Workflow:
    """Parse a workflow file in this directory."""
    parsed = parse_workflow((HERE / name).read_bytes(), format="yaml")
    if not isinstance(parsed, Workflow):
        sys.exit("\n".join(f"{name}: {fault}" for fault in parsed.faults))
    return parsed


def story(world: World) -> Iterator[Event]:
    """Play the events: workers finish jobs, one fails once, a person approves."""
    yield Started(actor="caller")
    yield world.done("plan", {"queries": ["stanchions", "bollards"]})
    yield world.done("search", {"hits": 3}, item=0)
    flaky = world.job("search", item=1)
    error = Failure("search_down", "the search engine did not answer")
    yield AttemptFailed(
        job_id=flaky.id, step_id=flaky.step_id, item=1, error=error, actor="worker-2"
    )
    yield world.due(TimerKind.RETRY)
    yield world.done("search", {"hits": 5}, item=1)
    yield world.due(TimerKind.DELAY)
    yield Approved(step_id=StepId("review"), actor="reviewer", comment="looks right")
    yield world.done("publish.write", {"text": "8 hits in 2 searches"})
    yield world.done("publish.check", {"ok": True})


class World:
    """The state around the core: open jobs, timers, a clock."""

    def __init__(self, plan: Plan) -> None:
        """Begin with an admitted run."""
        self.plan = plan
        self.now = EPOCH
        self.run = Run(
            id=RunId("demo"),
            tenant=TenantId("acme"),
            workflow_id=plan.workflow_id,
            workflow_version=1,
            input=INPUT,
            created_at=EPOCH,
            risk=plan.risk,
        )
        self.items: dict[ItemKey, Item] = {}
        self.jobs: dict[str, Job] = {}
        self.timers: dict[Timer, Instant] = {}
        self.timeline: list[TimelineEntry] = []

    def happen(self, event: Event) -> None:
        """Decide on an event and apply the effects."""
        self.now = Instant(self.now + 250)
        wanted = items_to_read(self.plan, self.run, [event])
        keys = [ItemKey(step_id, index) for step_id, many in wanted.items() for index in many]
        run = msgspec.structs.replace(self.run, items={key: self.items[key] for key in keys})
        transition = decide(self.plan, run, event, self.now)
        self.run = msgspec.structs.replace(evolve(run, transition), items={})
        self.items |= transition.items
        self.timeline += transition.timeline
        for effect in transition.effects:
            match effect:
                case DispatchJob(job=job):
                    self.jobs[job.id] = job
                case SetTimer(timer=timer, due=due):
                    self.timers[timer] = due
                case ClearTimer(timer=timer):
                    self.timers.pop(timer, None)
                case StopStep(step_id=step_id):
                    self.jobs = {i: job for i, job in self.jobs.items() if job.step_id != step_id}
                    self.timers = {t: d for t, d in self.timers.items() if t.step_id != step_id}
                case RevokeJob(job_id=job_id):
                    self.jobs.pop(job_id, None)
                case OpenApproval() | CloseApproval():
                    pass  # a store lists them for the people who decide
                case StopRun():
                    self.jobs.clear()
                    self.timers.clear()

    def job(self, step: str, item: int | None = None) -> Job:
        """Return the open job of a step or an item."""
        *_, job = (job for job in self.jobs.values() if (job.step_id, job.item) == (step, item))
        return job

    def done(self, step: str, output: JsonValue, item: int | None = None) -> AttemptSucceeded:
        """Finish a job, as a worker would."""
        job = self.jobs.pop(self.job(step, item).id)
        return AttemptSucceeded(
            job_id=job.id, step_id=job.step_id, item=item, output=output, actor="worker-1"
        )

    def due(self, kind: TimerKind) -> TimerFired:
        """Advance the clock until the next timer of a kind is due."""
        timers = [timer for timer in self.timers if timer.kind is kind]
        timer = min(timers, key=lambda timer: self.timers[timer])
        self.now = self.timers.pop(timer)
        return TimerFired(timer=timer)

    def print_timeline(self) -> None:
        """Print one line per entry: time, event, step, actor."""
        for entry in self.timeline:
            place = entry.step or ""
            if entry.item is not None:
                place += f"[{entry.item}]"
            if entry.attempt is not None:
                place += f" @{entry.attempt}"
            seconds = (entry.at - EPOCH) / 1000
            detail = "" if entry.detail is None else f"  {entry.detail}"
            print(f"{seconds:8.2f} s  {entry.what:20} {place:18} {entry.actor:9}{detail}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
