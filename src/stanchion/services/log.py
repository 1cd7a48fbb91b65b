"""The log: one line for each event, with fields; an outage is logged when it begins and ends."""

from __future__ import annotations

import logging

from stanchion.core.json_value import JsonValue
from stanchion.ports.errors import sentence

__all__ = ["LOGGER", "OutageLogger", "log_event"]

LOGGER = logging.getLogger("stanchion")


def log_event(level: int, name: str, **fields: JsonValue) -> None:
    """Write an event's line."""
    LOGGER.log(level, name, extra={"fields": fields})


class OutageLogger:
    """Whether something that is done again and again fails at the moment."""

    def __init__(self, begun: str, over: str, *, level: int = logging.WARNING) -> None:
        """Name the two log events."""
        self._begun = begun
        self._over = over
        self._level = level
        self._error: str | None = None

    def failed(self, error: BaseException | str) -> None:
        """It failed. Told if it had not before."""
        said = error if isinstance(error, str) else sentence(error)
        if self._error is None:
            log_event(self._level, self._begun, error=said)
        self._error = said

    def worked(self) -> None:
        """It went well. Told if it had failed before."""
        if self._error is not None:
            log_event(logging.INFO, self._over)
            self._error = None
