"""Trouble: an outage is told when it begins and when it is over, not at every try in between."""

from __future__ import annotations

import logging

from stanchion.ports.errors import sentence
from stanchion.services.log import log_event

__all__ = ["Trouble"]


class Trouble:
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
