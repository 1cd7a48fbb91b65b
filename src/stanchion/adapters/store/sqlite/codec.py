"""Statements, values and names: what every module of the SQLite store uses.

Values lie in BLOB columns as JSON, with one decoder for each type. The functions at the end name
what a pending row is about, so that a verb can tell whether rows that wait to be written concern
it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stanchion.adapters.sqlite.database import Database, read_statements
from stanchion.core.events import Event, Timer
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Failure,
    Item,
    JobId,
    Risk,
    Run,
    RunId,
    Step,
    StepId,
    TenantId,
    WorkflowId,
)
from stanchion.core.transition import TimelineEntry
from stanchion.core.workflow import Workflow
from stanchion.ports.records import DeadLetter, Tenant

__all__ = [
    "ANY_RUN",
    "DEAD_LETTER",
    "EVENT",
    "FAILURE",
    "HISTORY",
    "HISTORY_LINE",
    "HISTORY_LINES",
    "INBOX",
    "ITEM",
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
    "pending_job",
    "pending_key",
    "pending_run",
    "slot_freed",
    "slot_taken",
    "slots_pending",
]


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """What never changes about a run and is not in its row."""

    input: JsonObject
    uses: dict[WorkflowId, int] = {}
    risk: Risk = Risk.STANDARD
    rerun_of: RunId | None = None

    @classmethod
    def of(cls, run: Run) -> Origin:
        return cls(run.input, run.uses, run.risk, run.rerun_of)


SQL: Final = read_statements(__package__, "sql")
"""Every statement of the store, by name."""
encode: Final = msgspec.json.Encoder().encode


def encode_some(value: object) -> bytes | None:
    """As ``encode``, but nothing stays nothing: it needs no bytes."""
    return None if value is None else encode(value)


def encode_text(value: object) -> str:
    """As ``encode``, for SQLite's own functions: they take a BLOB for their own form of JSON."""
    return encode(value).decode()


DEAD_LETTER: Final = msgspec.json.Decoder(DeadLetter)
EVENT: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)
FAILURE: Final = msgspec.json.Decoder(Failure)
HISTORY: Final = msgspec.json.Decoder(tuple[TimelineEntry, ...])
HISTORY_LINE: Final = msgspec.json.Decoder(TimelineEntry)
HISTORY_LINES: Final = msgspec.json.Decoder(list[msgspec.Raw])
"""Finds where each line is, without reading it: a page may need three of ten thousand."""
INBOX: Final[msgspec.json.Decoder[list[tuple[int, str, Event]]]] = msgspec.json.Decoder(
    list[tuple[int, str, Event]]
)
ITEM: Final = msgspec.json.Decoder(Item)
ORIGIN: Final = msgspec.json.Decoder(Origin)
_STEPS: Final = msgspec.json.Decoder(dict[StepId, Step])
_STEP: Final = msgspec.json.Decoder(Step)
_RAW_STEPS: Final = msgspec.json.Decoder(dict[StepId, msgspec.Raw])
_LARGE_BYTES: Final = 256 * 1024


def decode_steps(text: bytes) -> dict[StepId, Step]:
    """A run's steps. Large ones are decoded one by one.

    A decoder does not let other threads run, and many megabytes take it tens of milliseconds:
    between two steps the event loop gets its turn.
    """
    if len(text) < _LARGE_BYTES:
        return _STEPS.decode(text)
    return {step_id: _STEP.decode(step) for step_id, step in _RAW_STEPS.decode(text).items()}


TENANT: Final = msgspec.json.Decoder(Tenant)
TIMER: Final = msgspec.json.Decoder(Timer)
VALUE: Final[msgspec.json.Decoder[JsonValue]] = msgspec.json.Decoder()
WORKFLOW: Final = msgspec.json.Decoder(Workflow)


ANY_RUN: Final = "begun"
"""Every run that begins: the number of the next one depends on how many do."""


def pending_run(run_id: RunId) -> tuple[str, str]:
    """A run's own row."""
    return "run", run_id


def pending_job(job_id: JobId) -> tuple[str, str]:
    """A job's row."""
    return "job", job_id


def pending_key(tenant: TenantId, text: str | None) -> tuple[str, str, str | None]:
    """What an idempotency key stands for. Without one, nothing is ever pending."""
    return "key", tenant, text


def slot_taken(tenant: TenantId) -> tuple[str, str]:
    """One slot more in use."""
    return "taken", tenant


def slot_freed(tenant: TenantId) -> tuple[str, str]:
    """One slot fewer."""
    return "freed", tenant


def slots_pending(db: Database, tenant: TenantId) -> int:
    """How many more slots are in use than the tenant's account says."""
    return db.pending.touched(slot_taken(tenant)) - db.pending.touched(slot_freed(tenant))
