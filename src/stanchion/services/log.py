"""The log: one line for each event, with fields; an outage is logged when it begins and ends."""

from __future__ import annotations

import logging

from stanchion import telemetry
from stanchion.core.json_value import JsonValue
from stanchion.ports.errors import sentence

LOGGER = logging.getLogger("stanchion")


def log_event(level: int, name: str, **fields: JsonValue) -> None:
    """Write an event's line, with the ids of what the task works on."""
    LOGGER.log(level, name, extra={"fields": {**fields, **telemetry.log_ids(fields)}})


class OutageLogger:
    """Logs the beginning and the end of an outage of a call that is made repeatedly."""

    def __init__(self, begun: str, over: str, *, level: int = logging.WARNING) -> None:
        """Name the two log events."""
        self._begun = begun
        self._over = over
        self._level = level
        self.error: str | None = None
        """The last error of the present outage; ``None`` if there is none."""

    def failed(self, error: BaseException | str) -> None:
        """Note a failure. The first one of an outage is logged."""
        message = error if isinstance(error, str) else sentence(error)
        if self.error is None:
            log_event(self._level, self._begun, error=message)
        self.error = message

    def worked(self) -> None:
        """Note a success. It ends an outage, which is logged."""
        if self.error is not None:
            log_event(logging.INFO, self._over)
            self.error = None
