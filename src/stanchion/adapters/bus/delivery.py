"""What every bus does with bells and calls: listeners by bell, and a handler with a heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from stanchion.ports.bus import Bell, Disposition, Handler, Retry
from stanchion.ports.errors import sentence
from stanchion.ports.records import OutboxRow

__all__ = ["BellListeners", "handled"]

_log: Final = logging.getLogger("stanchion")

_Hear: TypeAlias = Callable[[str], None]


class BellListeners:
    """The listeners of one process, by bell."""

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


_AFTER_A_FAULT: Final = Retry(1_000)
_GRACE_S: Final = 5.0
"""How long a handler may take to end when it is cancelled."""


async def handled(
    handle: Handler,
    call: OutboxRow,
    *,
    still: Callable[[], Awaitable[None]] | None = None,
    every_s: float | None = None,
) -> Disposition:
    """What the handler answers; ``still`` is called now and then while it works.

    A handler that raises has not answered. That is no fault of the call's: it comes again.
    """
    work = asyncio.ensure_future(handle(call))
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=every_s)
            if still is not None and not work.done():
                await still()
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work}, timeout=_GRACE_S)
        raise
    if work.cancelled():
        return _failed(call, asyncio.CancelledError("the handler was cancelled"))
    error = work.exception()
    return work.result() if error is None else _failed(call, error)


def _failed(call: OutboxRow, error: BaseException) -> Disposition:
    fields = {"run_id": call.run_id, "tenant": call.tenant, "error": sentence(error)}
    _log.error("bus_handler_failed", extra={"fields": fields}, exc_info=error)
    return _AFTER_A_FAULT
