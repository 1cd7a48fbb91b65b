r"""Identifiers and bounded values: what the members of a request must look like.

Each is a plain ``str``, ``int`` or ``float`` with its rule beside it: the decoder enforces the rule
and the OpenAPI document shows it. Patterns end in ``\Z``: a ``$`` would let a line break through.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from stanchion.core.limits import ERROR_MESSAGE_CHARS_MAX, ID_CHARS_MAX, TOPIC_CHARS_MAX

__all__ = [
    "ALL_TENANTS",
    "Comment",
    "Cursor",
    "ErrorCode",
    "Fence",
    "JobName",
    "KeyLabel",
    "KeyName",
    "LetterName",
    "Limit",
    "LockName",
    "Name",
    "RunName",
    "StepName",
    "TenantName",
    "TenantOrAll",
    "TopicName",
    "WaitS",
    "WorkerName",
]

ALL_TENANTS: Final = "*"

Name: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^[A-Za-z][A-Za-z0-9_-]{{0,{ID_CHARS_MAX - 1}}}\Z",
        description='A letter, then letters, digits, "_" or "-".',
        examples=["research"],
    ),
]
"""A workflow's id."""
TenantName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        description='A letter or digit, then letters, digits, "_", "." or "-".',
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
# Ids that stand in a path have no percent sign: some clients take what follows it for a code.
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
KeyName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]{1,64}\Z", description="A key's id, the middle part of it.")
]
KeyLabel: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9 _.@+-]{0,62}[A-Za-z0-9_.@+-])?\Z",
        description="A key's name, shown as the actor: letters, digits, spaces or any of `_.@+-`.",
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
    Meta(pattern=r"^[!-~]{1,128}\Z", description="Visible ASCII.", examples=["worker-1"]),
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
ErrorCode: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}\Z")]
Comment: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z",
        max_length=ERROR_MESSAGE_CHARS_MAX,
        description="Text without control characters.",
    ),
]
Cursor: TypeAlias = Annotated[
    str, Meta(pattern=r"^[!-~]{1,1024}\Z", description="As the page before gave it.")
]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
WaitS: TypeAlias = Annotated[float, Meta(ge=0, le=60)]
Fence: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
