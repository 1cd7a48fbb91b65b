"""The Temporal workflow: three activities, one after the other."""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow  # type: ignore[import-not-found] # in the peers' environment

__all__ = ["QUEUE", "ThreeSteps", "step"]

QUEUE = "bench"


@activity.defn  # type: ignore[untyped-decorator] # temporalio is not installed where types are checked
async def step(number: int) -> int:
    return number + 1


@workflow.defn
class ThreeSteps:
    """One run."""

    @workflow.run  # type: ignore[untyped-decorator] # as above
    async def run(self, number: int) -> int:
        """Each activity is recorded before the next begins."""
        for _ in range(3):
            number = await workflow.execute_activity(
                step, number, start_to_close_timeout=timedelta(seconds=30)
            )
        return number
