"""How values lie in BLOB columns: as JSON. One decoder for each type, made once."""

from __future__ import annotations

from typing import Final

import msgspec

from stanchion.core.events import Event, Timer
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Failure, Item, Risk, Run, RunId, Step, StepId, WorkflowId
from stanchion.core.transition import TimelineEntry
from stanchion.core.workflow import Workflow
from stanchion.ports.records import DeadLetter, Tenant

__all__ = [
    "DEAD_LETTER",
    "EVENT",
    "FAILURE",
    "HISTORY",
    "HISTORY_LINE",
    "HISTORY_LINES",
    "INBOX",
    "ITEM",
    "ORIGIN",
    "STEPS",
    "TENANT",
    "TIMER",
    "VALUE",
    "WORKFLOW",
    "Origin",
    "encode",
    "encode_some",
    "encode_text",
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
STEPS: Final = msgspec.json.Decoder(dict[StepId, Step])
TENANT: Final = msgspec.json.Decoder(Tenant)
TIMER: Final = msgspec.json.Decoder(Timer)
VALUE: Final[msgspec.json.Decoder[JsonValue]] = msgspec.json.Decoder()
WORKFLOW: Final = msgspec.json.Decoder(Workflow)
