"""The terms of the admission queue (``queue``): what a tenant and a start may say about it.

In a module of their own because the command line offers them as options. It would import all that
a run is made of with ``queue``, which takes 6 ms of its start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

PRIORITY_MAX: Final = 9
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
"""Higher ones are served first."""
PRIORITY_DEFAULT: Final = 5
FAIRNESS_KEY_CHARS_MAX: Final = 64
QueueMax: TypeAlias = Annotated[int, Meta(ge=1, le=10_000)]
"""How many runs of a tenant may wait."""
QueueWaitS: TypeAlias = Annotated[float, Meta(ge=0.1, le=604_800)]
"""How long a run may wait."""


class OnFull(StrEnum):
    """What a start gets if its tenant has no free slot."""

    REJECT = "reject"
    QUEUE = "queue"
