"""The Restate service: three durable steps, one after the other. Served by hypercorn."""

from __future__ import annotations

from typing import Any

import restate  # type: ignore[import-not-found] # installed in the peers' environment only

__all__ = ["app"]

flow = restate.Service("Flow")


def step(number: int) -> int:
    return number + 1


async def run(context: Any, request: dict[str, int]) -> dict[str, int]:  # noqa: ANN401 - restate's
    """Each step is journalled before the next begins."""
    number = request["n"]
    for name in ("first", "second", "third"):
        number = await context.run_typed(name, step, number=number)
    return {"n": number}


flow.handler("run")(run)
app = restate.app([flow])
