"""Workflows: the content of one workflow file.

``workflow_file`` parses a file into these values and ``plan`` makes a plan from them. Expressions
are still text here: the plan compiles them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.lease import LeaseOverride
from stanchion.core.limits import FOR_EACH_PARALLEL_MAX
from stanchion.core.model import Risk, StepId, Topic, WorkflowId
from stanchion.core.retry import Backoff, Exponential

RUN_TIMEOUT_S_DEFAULT: Final = 24 * 60 * 60.0


class OnFailure(StrEnum):
    """What a failed step means for its run, or a failed item for its step."""

    FAIL = "fail"
    CONTINUE = "continue"


class RetrySpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often a job is attempted, and how long to wait in between."""

    max_attempts: int = 1
    backoff: Backoff = Exponential(base_ms=1_000, cap_ms=60_000)


class _Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    needs: tuple[StepId, ...] = ()
    when: str | None = None
    on_failure: OnFailure = OnFailure.FAIL
    """Whether steps that need this one are cancelled, or run, when it failed or timed out."""


class JobSpec(_Spec, frozen=True, kw_only=True, tag="job"):
    """Work for one worker."""

    topic: Topic
    input: JsonValue = {}
    retry: RetrySpec = RetrySpec()
    timeout_s: float | None = None
    """The time limit from the first dispatch to the end, with all attempts and waits."""
    attempt_timeout_s: float | None = None
    """From the first lease of an attempt to its end, all its deliveries included."""


class _ItemsSpec(_Spec, frozen=True, kw_only=True):
    for_each: str
    input: JsonValue = {}
    timeout_s: float | None = None
    """Of the step, with all its items."""
    on_item_failure: OnFailure = OnFailure.FAIL
    """Whether the step fails, or succeeds with null for the item, when an item failed."""
    parallel: int | None = None
    """How many items may have begun and not ended at a time; ``None``: as many as allowed."""

    @property
    def at_once(self) -> int:
        """How many items may have begun and not ended at a time."""
        return self.parallel or FOR_EACH_PARALLEL_MAX


class ForEachSpec(_ItemsSpec, frozen=True, kw_only=True, tag="for_each"):
    """A job for every item of a list. Each item has attempts of its own."""

    topic: Topic
    retry: RetrySpec = RetrySpec()
    attempt_timeout_s: float | None = None


class ForEachWorkflowSpec(_ItemsSpec, frozen=True, kw_only=True, tag="for_each_workflow"):
    """Another workflow for every item of a list. Its steps live with the item."""

    workflow: WorkflowId


class OnDecisionTimeout(StrEnum):
    """What happens to an approval without a decision in time."""

    REJECT = "reject"
    APPROVE = "approve"
    FAIL = "fail"


class ApprovalSpec(_Spec, frozen=True, kw_only=True, tag="approval"):
    """A person's decision."""

    message: str | None = None
    """A template: it is rendered when the step begins."""
    timeout_s: float | None = None
    """Of the step. Beyond it the step has timed out."""
    decision_timeout_s: float | None = None
    """Beyond it ``on_timeout`` decides. In a file it is ``approval.timeout_s``."""
    on_timeout: OnDecisionTimeout | None = None
    """``None``: reject."""
    not_by_starter: bool = False
    """Whether the actor who started the run is refused as the one who decides."""
    data_schema: JsonObject | None = None
    """What the data of a decision must look like."""


class DelaySpec(_Spec, frozen=True, kw_only=True, tag="delay"):
    """A pause."""

    delay_s: float


class SubworkflowSpec(_Spec, frozen=True, kw_only=True, tag="subworkflow"):
    """Another workflow of the same tenant, expanded into steps of this run."""

    workflow: WorkflowId
    input: JsonValue = {}
    timeout_s: float | None = None


StepSpec: TypeAlias = (
    JobSpec | ForEachSpec | ForEachWorkflowSpec | ApprovalSpec | DelaySpec | SubworkflowSpec
)


class Workflow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One workflow file, parsed and valid."""

    id: WorkflowId
    steps: dict[StepId, StepSpec]
    risk: Risk = Risk.STANDARD
    lock_policy: LeaseOverride | None = None
    timeout_s: float | None = None
    """The time limit of a run, 24 hours by default; as a sub-workflow, that of its step."""
    max_deliveries: int | None = None
    """Deliveries of one attempt before it is a dead letter; the server's setting unless given."""
    budget: dict[str, int] = {}
    """What a run reserves of its tenant's budgets; not counted in a sub-workflow."""
    input_schema: JsonObject | None = None
    output: JsonValue | msgspec.UnsetType = msgspec.UNSET
    """A template; if unset, the outputs of the steps that no other step needs, by id."""
