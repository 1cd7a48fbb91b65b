"""The shape of a workflow file: every member, its range, and the value it becomes.

Read from the bottom: ``WORKFLOW`` is the file, ``_STEP`` the kinds of step. References between
parts of the file (``needs``, expressions) are checked in ``rules``.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, TypeVar

from stanchion.core import retry
from stanchion.core.budget import (
    BUDGET_NAME_CHARS_MAX,
    BUDGET_NAME_PATTERN,
    BUDGETS_MAX,
    BudgetAmount,
)
from stanchion.core.expression import SOURCE_CHARS_MAX
from stanchion.core.faults import Path
from stanchion.core.lease import LeaseOverride, OnLockError, OnRenewalLost
from stanchion.core.limits import (
    APPROVAL_MESSAGE_CHARS_MAX,
    ATTEMPTS_MAX,
    DELAY_S_MAX,
    DELIVERIES_MAX,
    FOR_EACH_PARALLEL_MAX,
    ID_CHARS_MAX,
    NEEDS_MAX,
    TIMEOUT_S_MAX,
    TOPIC_CHARS_MAX,
    WORKFLOW_STEPS_MAX,
)
from stanchion.core.model import Risk
from stanchion.core.ranges import range_of
from stanchion.core.retry import Backoff, BoundedJitter, Exponential, Fixed
from stanchion.core.workflow import (
    ApprovalSpec,
    DelaySpec,
    ForEachSpec,
    ForEachWorkflowSpec,
    JobSpec,
    OnDecisionTimeout,
    OnFailure,
    RetrySpec,
    StepSpec,
    SubworkflowSpec,
    Workflow,
)
from stanchion.core.workflow_file.record import ByMember, Member, ObjectOr, Record, Tagged
from stanchion.core.workflow_file.shape import (
    AnyObject,
    Anything,
    Boolean,
    Entries,
    Items,
    Real,
    Text,
    Whole,
    Word,
    number_in,
    number_of,
)

TIMEOUT_S_MIN: Final = 0.001
"""One millisecond, the unit of all clocks here."""

_Enum = TypeVar("_Enum", bound=StrEnum)


def _word(words: type[_Enum]) -> Word[_Enum]:
    return Word({word.value: word for word in words})


# ── Single values ────────────────────────────────────────────────────────────────────────────────

_ID: Final = Text(
    ID_CHARS_MAX,
    f"[A-Za-z][A-Za-z0-9_-]{{0,{ID_CHARS_MAX - 1}}}",
    'an id: a letter, then letters, digits, "_" or "-"',
)
_BUDGET: Final = Text(BUDGET_NAME_CHARS_MAX, BUDGET_NAME_PATTERN, "visible characters")
_TOPIC: Final = Text(
    TOPIC_CHARS_MAX,
    r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*",
    'a topic: words of letters, digits, "_" or "-", with dots between them',
)
_MESSAGE: Final = Text(
    APPROVAL_MESSAGE_CHARS_MAX,
    r"[^\x00-\x08\x0b-\x1f\x7f-\x9f]+",
    "text without control characters",
)
_HOLE_CHARS_MAX: Final = SOURCE_CHARS_MAX + len("${}")
_HOLE: Final = r"\$\{[\s\S]+\}"
_ITEMS: Final = Text(_HOLE_CHARS_MAX, _HOLE, "exactly one expression: ${…}")
_WORKFLOW_INPUT: Final = ObjectOr(
    Text(_HOLE_CHARS_MAX, _HOLE, "an object or exactly one expression: ${…}")
)

# ── Retries ──────────────────────────────────────────────────────────────────────────────────────


def _together(policy: Backoff) -> Iterator[tuple[str, str]]:
    # The shapes check the ranges. These are the rules between two members.
    return ((fault.path, fault.message) for fault in retry.faults(policy))


_BACKOFF: Final[Tagged[Backoff]] = Tagged(
    "kind",
    {
        "fixed": Record(
            "a fixed backoff",
            {
                "delay_ms": Member(
                    number_of(Fixed, "delay_ms"),
                    "The wait before every further attempt.",
                    required=True,
                )
            },
            Fixed,
            _together,
        ),
        "jitter": Record(
            "a jitter backoff",
            {
                "delay_ms": Member(
                    number_of(BoundedJitter, "delay_ms"),
                    "The middle of the range of the wait.",
                    required=True,
                ),
                "jitter_ms": Member(
                    number_of(BoundedJitter, "jitter_ms"),
                    "How far the wait may vary, up or down.",
                    required=True,
                ),
            },
            BoundedJitter,
            _together,
        ),
        "exponential": Record(
            "an exponential backoff",
            {
                "base_ms": Member(
                    number_of(Exponential, "base_ms"), "The longest first wait.", required=True
                ),
                "cap_ms": Member(
                    number_of(Exponential, "cap_ms"), "The longest wait of all.", required=True
                ),
                "factor": Member(
                    number_of(Exponential, "factor"), "How fast waits grow; 2 if not given."
                ),
                "jitter": Member(
                    Word({"full": "full", "none": "none"}),
                    "full, the default: a wait is anything up to the longest; none: the longest.",
                ),
            },
            Exponential,
            _together,
        ),
    },
)
_RETRY: Final = Record(
    "retry",
    {
        "max_attempts": Member(
            Whole(1, ATTEMPTS_MAX), "Attempts in all, the first included; 1 if not given."
        ),
        "backoff": Member(
            _BACKOFF,
            "How long to wait between attempts; exponential from 1 s to 60 s if not given.",
        ),
    },
    RetrySpec,
)

# ── Steps ────────────────────────────────────────────────────────────────────────────────────────

_COMMON: Final = {
    "needs": Member(
        Items(_ID, NEEDS_MAX), "The steps that must have succeeded or been skipped before."
    ),
    "when": Member(
        Text(SOURCE_CHARS_MAX),
        "A condition in CEL, without ${…}. If it is false, the step is skipped.",
    ),
    "on_failure": Member(
        _word(OnFailure),
        "fail, the default: a failure cancels the steps that need this one and fails the run;"
        " continue: those steps run, and the run can succeed.",
    ),
}
_TIMEOUT: Final = Member(
    Real(TIMEOUT_S_MIN, TIMEOUT_S_MAX), "Seconds from the step's start to its end, all included."
)
_ATTEMPT_TIMEOUT: Final = Member(
    Real(TIMEOUT_S_MIN, TIMEOUT_S_MAX),
    "Seconds from an attempt's first lease to its end; then it has failed, and is retried.",
)
_INPUT: Final = Member(Anything(), "What the worker gets; text in it may contain ${…}.")


OF_ITEMS: Final = {
    "on_item_failure": Member(
        _word(OnFailure),
        "fail, the default: a failed item fails the step; continue: the output has null for it.",
    ),
    "parallel": Member(
        Whole(1, FOR_EACH_PARALLEL_MAX),
        f"How many items may be out at a time; {FOR_EACH_PARALLEL_MAX:,} if not given.",
    ),
}


def _job(**members: Any) -> StepSpec:  # noqa: ANN401 - each was read by its shape
    if "for_each" in members:
        return ForEachSpec(**members)
    # The rules note a member of items without for_each.
    return JobSpec(**{name: read for name, read in members.items() if name not in OF_ITEMS})


def _subworkflow(**members: Any) -> StepSpec:  # noqa: ANN401 - each was read by its shape
    if "for_each" in members:
        return ForEachWorkflowSpec(**members)
    return SubworkflowSpec(**{name: read for name, read in members.items() if name not in OF_ITEMS})


def _approval(approval: dict[str, Any], **members: Any) -> StepSpec:  # noqa: ANN401 - each was read by its shape
    given = dict(approval)
    if "timeout_s" in given:
        given["decision_timeout_s"] = given.pop("timeout_s")
    elif "on_timeout" in given and "timeout_s" in members:
        # With ``on_timeout`` the time limit of the step is that of the decision.
        given["decision_timeout_s"] = members.pop("timeout_s")
    return ApprovalSpec(**given, **members)


def _check_approval(spec: StepSpec) -> Iterator[tuple[Path, str]]:
    assert isinstance(spec, ApprovalSpec)
    if spec.on_timeout is not None and spec.decision_timeout_s is None:
        yield ("approval", "on_timeout"), "needs timeout_s beside it"


_APPROVAL: Final = Record(
    "approval",
    {
        "message": Member(_MESSAGE, "What the person is asked; may contain ${…}."),
        "timeout_s": Member(
            Real(TIMEOUT_S_MIN, TIMEOUT_S_MAX), "Seconds for a decision; then on_timeout decides."
        ),
        "on_timeout": Member(
            _word(OnDecisionTimeout), "What no decision in time means; reject if not given."
        ),
        "not_by_starter": Member(
            Boolean(), "Whether the actor who started the run is refused; false if not given."
        ),
        "data_schema": Member(
            AnyObject(), "What the data of a decision must look like: JSON Schema 2020-12."
        ),
    },
    dict[str, Any],
)


_STEP: Final[ByMember[StepSpec]] = ByMember(
    "a step",
    {
        "topic": Record(
            "a job step",
            {
                "topic": Member(_TOPIC, "A job for the workers of this topic.", required=True),
                "for_each": Member(_ITEMS, "A list, as one ${…}: one job for each of its items."),
                **OF_ITEMS,
                "input": _INPUT,
                "retry": Member(_RETRY, "What to do when an attempt fails."),
                "timeout_s": _TIMEOUT,
                "attempt_timeout_s": _ATTEMPT_TIMEOUT,
                **_COMMON,
            },
            _job,
        ),
        "approval": Record(
            "an approval step",
            {
                "approval": Member(_APPROVAL, "A person approves or rejects.", required=True),
                "timeout_s": _TIMEOUT,
                **_COMMON,
            },
            _approval,
            _check_approval,
        ),
        "delay_s": Record(
            "a delay step",
            {"delay_s": Member(Real(0, DELAY_S_MAX), "Seconds to wait.", required=True), **_COMMON},
            DelaySpec,
        ),
        "workflow": Record(
            "a sub-workflow step",
            {
                "workflow": Member(
                    _ID, "Another workflow, run as steps of this run.", required=True
                ),
                "for_each": Member(_ITEMS, "A list, as one ${…}: that workflow for each item."),
                **OF_ITEMS,
                "input": Member(_WORKFLOW_INPUT, "The input of that workflow; may contain ${…}."),
                "timeout_s": _TIMEOUT,
                **_COMMON,
            },
            _subworkflow,
        ),
    },
)

# ── The file ─────────────────────────────────────────────────────────────────────────────────────

_LOCK_POLICY: Final = Record(
    "lock_policy",
    {
        "on_lock_error": Member(_word(OnLockError), "When the lock store does not answer."),
        "on_renewal_lost": Member(_word(OnRenewalLost), "When a lease is no longer trusted."),
        "renewal_failures_max": Member(
            number_of(LeaseOverride, "renewal_failures_max"),
            "Failed renewals in a row that count as lost.",
        ),
    },
    LeaseOverride,
)

WORKFLOW: Final = Record(
    "a workflow",
    {
        "id": Member(_ID, "The workflow's name.", required=True),
        "risk": Member(_word(Risk), "How harmful a second writer would be; standard if absent."),
        "lock_policy": Member(
            _LOCK_POLICY, "What this workflow overrides of the policy of its class."
        ),
        "timeout_s": Member(
            Real(TIMEOUT_S_MIN, TIMEOUT_S_MAX), "Seconds a run may take; 24 hours if absent."
        ),
        "max_deliveries": Member(
            Whole(1, DELIVERIES_MAX),
            "Deliveries of one attempt before it is a dead letter; the server's if absent.",
        ),
        "budget": Member(
            Entries(
                _BUDGET, number_in(range_of(BudgetAmount)), "budgets", BUDGETS_MAX, entries_min=0
            ),
            "What a run reserves of its tenant's budgets, by name; not of a sub-workflow.",
        ),
        "input_schema": Member(AnyObject(), "What the input must look like: JSON Schema 2020-12."),
        "steps": Member(
            Entries(_ID, _STEP, "steps", WORKFLOW_STEPS_MAX),
            "The steps by their id.",
            required=True,
        ),
        "output": Member(
            Anything(), "What the run gives, with ${…}; if absent, what the last steps give."
        ),
    },
    Workflow,
)
