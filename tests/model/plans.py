"""The workflows of the model's runs: every kind of effect, and timers that are due or are not.

All waits are about an hour. Decided on two hours ago they have ended, decided on now they have not.
No two are the same: timers that are due at the same instant may fire in either order.
"""

from __future__ import annotations

from typing import Final

from stanchion.core.model import StepId, Topic, WorkflowId
from stanchion.core.plan import Plan
from stanchion.core.retry import BoundedJitter
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    JobSpec,
    RetrySpec,
    StepSpec,
    Workflow,
)
from tests.contract.builders import planned

__all__ = ["PLANS", "REVIEW", "TOPICS", "WORKFLOWS"]

TOPICS: Final = (Topic("work"), Topic("more"))
REVIEW: Final = StepId("review")
_HOUR_S: Final = 3_600.0
_TWICE: Final = RetrySpec(max_attempts=2, backoff=BoundedJitter(3_600_000, 600_000))


def _workflow(name: str, timeout_s: float | None = None, **steps: StepSpec) -> Workflow:
    made = {StepId(each): steps[each] for each in steps}
    return Workflow(id=WorkflowId(name), steps=made, timeout_s=timeout_s)


WORKFLOWS: Final = {
    workflow.id: workflow
    for workflow in (
        _workflow("one", step=JobSpec(topic=TOPICS[0], input={"said": "${input.say}"})),
        _workflow(
            "chain",
            first=JobSpec(topic=TOPICS[0], retry=_TWICE),
            second=JobSpec(topic=TOPICS[1], needs=(StepId("first"),)),
        ),
        _workflow(
            "each",
            each=ForEachSpec(
                for_each="${input.items}", topic=TOPICS[0], input="${item}", retry=_TWICE
            ),
        ),
        _workflow(
            "mixed",
            job=JobSpec(topic=TOPICS[1], timeout_s=_HOUR_S),
            pause=DelaySpec(delay_s=_HOUR_S + 1),
            review=ApprovalSpec(needs=(StepId("pause"),), timeout_s=_HOUR_S + 2),
        ),
        _workflow("brief", timeout_s=_HOUR_S, review=ApprovalSpec(), job=JobSpec(topic=TOPICS[0])),
    )
}
PLANS: Final[dict[WorkflowId, Plan]] = {name: planned(WORKFLOWS[name]) for name in WORKFLOWS}
