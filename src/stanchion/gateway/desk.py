"""Desk: what the handlers of one gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from stanchion.gateway.answers import Answers
from stanchion.gateway.auth import Auth
from stanchion.gateway.body import Bodies
from stanchion.gateway.cursors import Cursors
from stanchion.gateway.load import LargeBodyTurns, Load
from stanchion.gateway.metrics import MetricsPage
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, Refused, unavailable_after_ms
from stanchion.gateway.readiness import Readiness
from stanchion.services.deadlines import Deadlines
from stanchion.services.keys import Keys
from stanchion.services.services import Services
from stanchion.wire.problems import Code

__all__ = ["Desk"]

_Result = TypeVar("_Result")

_SWEEP_S: Final = 0.5
"""How exactly a request's deadline is kept: it is for those who would never end."""


class Desk:
    """Keys, readiness, load, and the one thread that reads workflow files."""

    def __init__(self, services: Services, options: GatewayOptions) -> None:
        self.options = options
        self.keys = Keys(
            documents=services.store,
            clock=services.clock,
            entropy=services.entropy,
            admin_key=options.admin_key,
        )
        self.auth = Auth(self.keys)
        self.cursors = Cursors(services.store, services.entropy)
        self.bodies = Bodies(options)
        self.answers = Answers(options.answers_bytes_max)
        self.load = Load(options, services.registry, services.entropy.unit)
        self.large_bodies = LargeBodyTurns(self.load)
        self.deadlines = Deadlines(sweep_s=_SWEEP_S)
        self.readiness = Readiness(services)
        self.metrics = MetricsPage(services.registry, services.clock)
        self.work = services.work
        self.draining = asyncio.Event()
        self.openapi = b""
        """The document, encoded. Set by the app, which knows all routes."""
        self._entropy = services.entropy
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workflow-file")
        self._parsing = 0

    async def parse(self, work: Callable[[], _Result]) -> _Result:
        """Do expensive reading away from the event loop, one at a time, a few in line."""
        if self._parsing > self.options.parses_waiting_max:
            raise Refused(self.overloaded("too many workflow files at once"))
        self._parsing += 1
        future = asyncio.get_running_loop().run_in_executor(self._parser, work)
        # Counted out when the thread is done, not when the caller has left.
        future.add_done_callback(self._parsed)
        return await asyncio.shield(future)

    def overloaded(self, detail: str) -> Refusal:
        """Too much of something; come again in a moment."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=after_ms)

    def unavailable(self, code: Code, detail: str) -> Refusal:
        """Something behind us does not answer."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=code, detail=detail, retry_after_ms=after_ms)

    def close(self) -> None:
        """Let the threads and the timer go."""
        self.deadlines.close()
        self.metrics.close()
        self._parser.shutdown(wait=False, cancel_futures=True)

    def _parsed(self, future: asyncio.Future[_Result]) -> None:
        self._parsing -= 1
        if not future.cancelled():
            future.exception()  # looked at, so that a caller who left is no warning
