"""What to do instead of an operation that would find nothing to work on.

Chance alone seldom leads to a result for a job that is leased, let alone to a dead letter that is
replayed. So an operation that would be idle gives way to one that leads towards it. One in several
stays as it is: asking for what is not there is a question too.
"""

from __future__ import annotations

from stanchion.ports.records import JobState
from tests.model import jobs, keeping, runs
from tests.model.world import Operation, World

__all__ = ["busy"]

_PICKS_MEANT = 3
"""Picks below this mean something that is there, higher ones may mean anything."""


def busy(operation: Operation, world: World) -> Operation:
    """The operation, or one that leads towards it."""
    leased = world.jobs(JobState.LEASED)
    match operation:
        case jobs.Lease(queue=pick) if pick < _PICKS_MEANT and not world.jobs(JobState.READY):
            return _forward(world)
        case jobs.Accept() | jobs.Renew() | jobs.ViewJob() if not leased:
            return busy(jobs.Lease(queue=0, max_jobs=2), world)
        case jobs.Expire() if all((file.expires_at or 0) > world.pair.now for file in leased):
            return busy(jobs.Lease(queue=0, is_short=True), world)
        case keeping.Replay() if not world.letters:
            return busy(jobs.Expire(max_deliveries=1), world)
        case keeping.FireTimers() if not world.timers_due:
            return runs.Admit(tenant=1, workflow="mixed", past=True)
        case keeping.Bury() | keeping.CountFailure() | keeping.Take() if not world.with_mail:
            return busy(runs.Post(run=0, event="approve", entry=0), world)
        case keeping.Confirm() | keeping.Defer() if not world.pair.subject.rows:
            return busy(keeping.Take(), world)
        case keeping.Purge() if world.unfinished == len(world.runs):
            return busy(runs.Advance(run=0, also="cancel"), world)
        case runs.Advance(run=pick) | runs.Post(run=pick) | runs.Look(run=pick) if (
            pick < _PICKS_MEANT and not world.unfinished
        ):
            return runs.Admit(tenant=0, workflow="chain")
        case _:
            return operation


def _forward(world: World) -> Operation:
    """What brings a run nearer to its end, or begins one."""
    if world.with_mail:
        return runs.Advance(run=0)
    if world.jobs(JobState.LEASED):
        return jobs.Accept(answers=(jobs.Answer(0),))
    return runs.Admit(tenant=0, workflow="each")
