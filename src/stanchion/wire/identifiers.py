r"""Identifiers and bounded values: the types of request members, with their patterns and ranges.

Each is a ``str``, ``int`` or ``float`` with a rule: the decoder enforces it and the OpenAPI
document shows it. Patterns end in ``\Z``, because ``$`` also matches before a line break.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

from stanchion.core.budget import BUDGET_NAME_PATTERN, BUDGETS_MAX, BudgetAmount
from stanchion.core.limits import (
    ERROR_MESSAGE_CHARS_MAX,
    ID_CHARS_MAX,
    LABEL_CHARS_MAX,
    LABELS_MAX,
    TOPIC_CHARS_MAX,
)

ALL_TENANTS: Final = "*"

Name: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^[A-Za-z][A-Za-z0-9_-]{{0,{ID_CHARS_MAX - 1}}}\Z",
        description=f'A letter, then letters, digits, "_" or "-"; {ID_CHARS_MAX} at most.',
        examples=["research"],
    ),
]
"""A workflow's id."""
TenantName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        description='A letter or digit, then letters, digits, "_", "." or "-"; 64 at most.',
        examples=["default"],
    ),
]
TenantOrAll: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?:\*|[A-Za-z0-9][A-Za-z0-9_.-]{0,63})\Z",
        description="A tenant, or `*` for all of them.",
        examples=["default"],
    ),
]
# Ids in a path have no percent sign: some clients would decode what follows it.
RunName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-$&-.0-~]{1,128}\Z", description="A run's id.")
]
StepName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,511}\Z",
        description="A step's id; below a sub-workflow with dots: `publish.render`.",
    ),
]
JobName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-$&-.0-~]{1,1024}\Z", description="A job's id: `run:step@attempt`.")
]
BulkName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[a-z0-9]{1,64}\Z", description="A bulk action's id.")
]
KeyName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]{1,64}\Z", description="A key's id, the middle part of it.")
]
KeyLabel: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9 _.@+-]{0,62}[A-Za-z0-9_.@+-])?\Z",
        description=(
            "A key's name, shown as the actor: letters, digits, spaces or any of `_.@+-`,"
            " 64 at most."
        ),
        examples=["kim@example.com"],
    ),
]
LetterName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-$&-~]{1,2048}\Z", description="A dead letter's id, from the list.")
]
LockName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?:admission|run)/[!-$&-.0-~]{1,128}\Z",
        description="`admission/<tenant>` or `run/<run_id>`.",
        examples=["admission/default"],
    ),
]
WorkerName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]{1,128}\Z",
        description="1 to 128 visible ASCII characters.",
        examples=["worker-1"],
    ),
]
TopicName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\Z",
        max_length=TOPIC_CHARS_MAX,
        description='Words of letters, digits, "_" or "-", with dots between them.',
        examples=["agent.plan"],
    ),
]
LimitName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        description='A letter or digit, then letters, digits, "_", "." or "-"; 64 at most.',
        examples=["llm"],
    ),
]
"""A topic limit's id."""
LimitedTopic: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*(?:\.\*)?\Z",
        max_length=TOPIC_CHARS_MAX,
        description="A topic, or a prefix of topics up to a dot: `llm.*`.",
        examples=["llm.*"],
    ),
]
ErrorCode: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.:-]{1,64}\Z",
        description="Letters, digits or any of `_.:-`, 64 at most.",
    ),
]
Comment: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z",
        max_length=ERROR_MESSAGE_CHARS_MAX,
        description="Text without control characters.",
    ),
]
VISIBLE_CHAR: Final = (
    r"[^\x00-\x20\x7f-\xa0\xad\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
    r"\ufff0-\uffff]"
)
"""One character that can be seen, and that does not change how others are shown."""
_VISIBLE: Final = rf"{VISIBLE_CHAR}{{1,{LABEL_CHARS_MAX}}}"
LABEL_PATTERN: Final = rf"^{_VISIBLE}\Z"
"""The value of a label: characters that can be seen."""
LABEL_NAME_PATTERN: Final = LABEL_PATTERN.replace("[^", "[^:", 1)
"""The name of a label has no colon, so that ``name:value`` means one label."""
_LABEL: Final[dict[str, Any]] = {"type": "string", "pattern": LABEL_PATTERN}
Labels: TypeAlias = Annotated[
    dict[str, Any],
    Meta(
        description=(
            "Names and values of 1 to 64 visible characters, names without `:`; 16 at most."
        ),
        examples=[{"team": "red"}],
        extra_json_schema={
            "maxProperties": LABELS_MAX,
            "propertyNames": {"type": "string", "pattern": LABEL_NAME_PATTERN},
            "additionalProperties": _LABEL,
        },
    ),
]
"""Labels of a run. Their members are checked by ``gateway.body.checked_labels``."""
LabelName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^{_VISIBLE}:{_VISIBLE}\Z",
        description="A label: write `name:value`.",
        examples=["team:red"],
    ),
]
BudgetName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^{BUDGET_NAME_PATTERN}\Z",
        description="1 to 64 visible characters.",
        examples=["tokens"],
    ),
]
Usage: TypeAlias = Annotated[
    dict[BudgetName, BudgetAmount],
    Meta(
        max_length=BUDGETS_MAX,
        description="What the job has used of budgets since it was leased, in all.",
        examples=[{"tokens": 1200}],
    ),
]
Cursor: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-~]{1,1024}\Z", description="The `cursor` of the page before.")
]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
WorkflowVersion: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
WaitS: TypeAlias = Annotated[float, Meta(ge=0, le=60)]
Time: TypeAlias = Annotated[
    datetime, Meta(tz=True, description="ISO 8601 with an offset, such as `2026-08-01T14:02:00Z`.")
]
Fence: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
