"""Statements, encoding, and names of pending rows: shared by all modules of the SQLite store.

Values are JSON in BLOB columns, with one decoder for each type. The functions at the end name what
a pending row concerns, so that a method can check whether pending rows affect it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stanchion.adapters.sqlite.database import Database, read_statements
from stanchion.core.events import Event, Timer
from stanchion.core.json_value import LARGE_BYTES, JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Item,
    JobId,
    JobTrace,
    PendingApproval,
    Risk,
    Run,
    RunId,
    Step,
    StepId,
    TenantId,
    WorkflowId,
    WorkflowSource,
)
from stanchion.core.transition import TimelineEntry
from stanchion.core.workflow import Workflow
from stanchion.ports.records import DeadLetter, Tenant

__all__ = [
    "ANY_RUN",
    "APPROVAL",
    "DEAD_LETTER",
    "EVENT",
    "FAILURE",
    "HISTORY",
    "HISTORY_LINE",
    "HISTORY_LINES",
    "INBOX",
    "ITEM",
    "ITEM_STATES",
    "LABELS",
    "ORIGIN",
    "SQL",
    "TENANT",
    "TIMER",
    "VALUE",
    "WORKFLOW",
    "Origin",
    "decode_steps",
    "encode",
    "encode_some",
    "encode_text",
    "pending_inbox",
    "pending_job",
    "pending_key",
    "pending_run",
    "slot_freed",
    "slot_taken",
    "slots_pending",
]


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The constant data of a run that is not in its row."""

    input: JsonObject
    uses: dict[WorkflowId, int] = {}
    risk: Risk = Risk.STANDARD
    rerun_of: RunId | None = None
    starter: str | None = None
    labels: dict[str, str] = {}
    traceparent: str | None = None
    workflow_source: WorkflowSource = WorkflowSource.OWN

    @classmethod
    def of(cls, run: Run) -> Origin:
        return cls(
            input=run.input,
            uses=run.uses,
            risk=run.risk,
            rerun_of=run.rerun_of,
            starter=run.starter,
            labels=run.labels,
            traceparent=run.traceparent,
            workflow_source=run.workflow_source,
        )


SQL: Final = read_statements(__package__, "sql")
"""Every statement of the store, by name."""
encode: Final = msgspec.json.Encoder().encode


def encode_some(value: object) -> bytes | None:
    """Like ``encode``, but ``None`` stays ``None``."""
    return None if value is None else encode(value)


def encode_text(value: object) -> str:
    """Like ``encode``, as text for the JSON functions of SQLite, which read a BLOB as JSONB."""
    return encode(value).decode()


# ``float`` reads ``1e300`` in 0.3 µs, the decoder itself in 15: a value may hold 40,000 of them.
APPROVAL: Final = msgspec.json.Decoder(PendingApproval, float_hook=float)
DEAD_LETTER: Final = msgspec.json.Decoder(DeadLetter, float_hook=float)
EVENT: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event, float_hook=float)
FAILURE: Final = msgspec.json.Decoder(Failure)
HISTORY: Final = msgspec.json.Decoder(tuple[TimelineEntry, ...])
HISTORY_LINE: Final = msgspec.json.Decoder(TimelineEntry)
HISTORY_LINES: Final = msgspec.json.Decoder(list[msgspec.Raw])
"""Finds the entries without decoding them: a page may need three of ten thousand."""
INBOX: Final[msgspec.json.Decoder[list[tuple[int, str, Event]]]] = msgspec.json.Decoder(
    list[tuple[int, str, Event]], float_hook=float
)
ITEM: Final = msgspec.json.Decoder(Item, float_hook=float)
ITEM_STATES: Final = msgspec.json.Decoder(list[msgspec.Raw])
LABELS: Final = msgspec.json.Decoder(dict[str, str])
JOB_TRACE: Final = msgspec.json.Decoder(JobTrace)
ORIGIN: Final = msgspec.json.Decoder(Origin)
_STEPS: Final = msgspec.json.Decoder(dict[StepId, Step], float_hook=float)
_STEP: Final = msgspec.json.Decoder(Step, float_hook=float)
_RAW_STEPS: Final = msgspec.json.Decoder(dict[StepId, msgspec.Raw])


def decode_steps(text: bytes) -> dict[StepId, Step]:
    """The steps of a run. Large ones are decoded one by one.

    A decoder holds the GIL, for tens of milliseconds per many megabytes: between two steps the
    event loop can run.
    """
    if len(text) < LARGE_BYTES:
        return _STEPS.decode(text)
    return {step_id: _STEP.decode(step) for step_id, step in _RAW_STEPS.decode(text).items()}


TENANT: Final = msgspec.json.Decoder(Tenant)
TIMER: Final = msgspec.json.Decoder(Timer)
VALUE: Final[msgspec.json.Decoder[JsonValue]] = msgspec.json.Decoder(float_hook=float)
WORKFLOW: Final = msgspec.json.Decoder(Workflow)


ANY_RUN: Final = "begun"
"""All new runs: the number of the next one depends on how many are pending."""


def pending_run(run_id: RunId) -> tuple[str, str]:
    """The row of a run."""
    return "run", run_id


def pending_inbox(run_id: RunId) -> tuple[str, str]:
    """The inbox of a run."""
    return "inbox", run_id


def pending_job(job_id: JobId) -> tuple[str, str]:
    """The row of a job."""
    return "job", job_id


def pending_key(tenant: TenantId, text: str | None) -> tuple[str, str, str | None]:
    """The record of an idempotency key. Without a key nothing is ever pending."""
    return "key", tenant, text


def slot_taken(tenant: TenantId) -> tuple[str, str]:
    """A slot that a pending row takes."""
    return "taken", tenant


def slot_freed(tenant: TenantId) -> tuple[str, str]:
    """A slot that a pending row frees."""
    return "freed", tenant


def slots_pending(db: Database, tenant: TenantId) -> int:
    """The difference that pending rows make to the tenant's count of slots."""
    return db.pending.touched(slot_taken(tenant)) - db.pending.touched(slot_freed(tenant))
