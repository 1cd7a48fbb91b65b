"""Handling: one call, handed to its handler, and what came of it.

The handler runs in a task of its own. So whatever it does to its task (a lost lease cancels the
work it protects) ends that call, and never the one who hands out calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from stanchion.ports.bus import Disposition, Handler, Retry
from stanchion.ports.errors import sentence
from stanchion.ports.records import OutboxRow

__all__ = ["handled"]

_log: Final = logging.getLogger("stanchion")

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
