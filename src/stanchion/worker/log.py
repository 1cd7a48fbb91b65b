"""A worker's log lines: an event's name is its message, and its fields travel beside it.

Whoever formats a record decides how ``record.fields`` look. A program that has said nothing about
logging gets one readable line an event.
"""

from __future__ import annotations

import logging
from typing import Final

from stanchion.core.json_value import JsonValue

__all__ = ["LOGGER", "log_event", "show_lines"]

LOGGER: Final = logging.getLogger("stanchion.worker")


def log_event(
    level: int, name: str, *, raised: BaseException | None = None, **fields: JsonValue
) -> None:
    """Write an event's line; with what was raised, its traceback too."""
    LOGGER.log(level, name, exc_info=raised, extra={"fields": fields})


def show_lines(level: str = "INFO") -> None:
    """Show lines on standard error, unless the program has its own idea of logging."""
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        LOGGER.setLevel(level)


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as in the base class
        fields: dict[str, JsonValue] = getattr(record, "fields", {})
        shown = "".join(f" {key}={value}" for key, value in fields.items())
        return super().formatMessage(record) + shown
