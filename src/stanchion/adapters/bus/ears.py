"""Ears: who wants to hear which bell.

Whoever rings is never held up by whoever listens: hearing happens in the next turn of the loop, and
a listener that fails is logged and otherwise ignored. Behind every bell is a poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from stanchion.ports.bus import Bell
from stanchion.ports.errors import sentence

__all__ = ["Ears"]

_log: Final = logging.getLogger("stanchion")

_Hear: TypeAlias = Callable[[str], None]


class Ears:
    """Everybody who listens in this process."""

    def __init__(self) -> None:
        # By number, not by function: the same function may listen twice, and stop once.
        self._hooks: dict[Bell, dict[int, _Hear]] = {}
        self._listened = 0

    def listen(self, bell: Bell, hear: _Hear) -> Callable[[], None]:
        """Call ``hear`` with the note of every such bell, until the answer is called."""
        self._listened += 1
        number, hooks = self._listened, self._hooks.setdefault(bell, {})
        hooks[number] = hear

        def stop() -> None:
            hooks.pop(number, None)

        return stop

    def hear(self, bell: Bell, note: str) -> None:
        """Tell everybody who listens now, in the next turn of the loop."""
        hooks = self._hooks.get(bell)
        if not hooks:
            return
        loop = asyncio.get_running_loop()
        for number in hooks:
            loop.call_soon(self._tell, bell, number, note)

    def _tell(self, bell: Bell, number: int, note: str) -> None:
        hear = self._hooks[bell].get(number)
        if hear is None:
            return
        try:
            hear(note)
        except Exception as error:  # noqa: BLE001 - a listener's fault must not reach whoever rang
            fields = {"bell": bell.value, "error": sentence(error)}
            _log.error("bell_unheard", extra={"fields": fields}, exc_info=error)
