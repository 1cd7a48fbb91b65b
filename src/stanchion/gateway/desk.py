"""GatewayState: what the handlers of one gateway share."""

from __future__ import annotations

import asyncio
from typing import Final

from stanchion.gateway.answers import Answers
from stanchion.gateway.auth import Auth
from stanchion.gateway.body import Bodies
from stanchion.gateway.cursors import Cursors
from stanchion.gateway.load import HeavyRequests, Load
from stanchion.gateway.metrics import MetricsPage
from stanchion.gateway.options import GatewayOptions
from stanchion.gateway.problems import Refusal, unavailable_after_ms
from stanchion.gateway.readiness import Readiness
from stanchion.services.engine import Services
from stanchion.services.keys import Keys
from stanchion.services.limiter import Deadlines
from stanchion.wire.problems import Code

__all__ = ["GatewayState"]

_SWEEP_S: Final = 0.5
"""How exactly a request's deadline is kept: it is for those who would never end."""


class GatewayState:
    """Keys, readiness, load and limits."""

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
        self.heavy = HeavyRequests(self.load)
        self.deadlines = Deadlines(sweep_s=_SWEEP_S)
        self.readiness = Readiness(services)
        self.metrics = MetricsPage(services.registry, services.clock)
        self.work = services.work
        self.draining = asyncio.Event()
        self.openapi = b""
        """The document, encoded. Set by the app, which knows all routes."""
        self._entropy = services.entropy

    def overloaded(self, detail: str) -> Refusal:
        """Too much of something; come again in a moment."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=Code.OVERLOADED, detail=detail, retry_after_ms=after_ms)

    def unavailable(self, code: Code, detail: str) -> Refusal:
        """Something behind us does not answer."""
        after_ms = unavailable_after_ms(self._entropy.unit())
        return Refusal(code=code, detail=detail, retry_after_ms=after_ms)

    def close(self) -> None:
        """Let the thread and the timer go."""
        self.deadlines.close()
        self.metrics.close()
