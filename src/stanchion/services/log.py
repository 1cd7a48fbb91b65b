"""Log events: one name, one line, and the fields that go with it.

An event's name is its message, so that people and programs search for the same word. The fields
travel beside it in ``record.fields``: whoever formats the record decides how they look.
"""

from __future__ import annotations

import logging

from stanchion.core.json_value import JsonValue

__all__ = ["LOGGER", "log_event"]

LOGGER = logging.getLogger("stanchion")


def log_event(level: int, name: str, **fields: JsonValue) -> None:
    """Write an event's line."""
    LOGGER.log(level, name, extra={"fields": fields})
