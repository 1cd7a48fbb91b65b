"""A job as its handler sees it: its input, and whether its lease is still held."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from stanchion.core.budget import BUDGET_AMOUNT_MAX, BUDGET_NAME_PATTERN, BUDGETS_MAX
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import FenceCause
from stanchion.core.limits import PROGRESS_BYTES_MAX
from stanchion.wire.worker import LeasedJob
from stanchion.worker.errors import stop_error
from stanchion.worker.results import why_not_json


class JobHold(Protocol):
    """The lease behind a job, as far as its handler may see it. Read from any thread."""

    @property
    def lost(self) -> FenceCause | None: ...

    def note(self, progress: JsonValue) -> None: ...

    def use(self, usage: dict[str, int]) -> None: ...


class Job:
    """One attempt at one step or item. To test a handler, make one: ``Job("topic", {"q": 1})``."""

    __slots__ = (
        "_hold",
        "_lock",
        "_used",
        "attempt",
        "delivery",
        "fence",
        "input",
        "item",
        "job_id",
        "run_id",
        "step_id",
        "tenant",
        "topic",
    )

    def __init__(  # noqa: PLR0913 - one argument a member, all but two with defaults
        self,
        topic: str,
        input: Any = None,  # noqa: A002, ANN401 - called so in the workflow file; JSON of any shape
        *,
        job_id: str = "run:step@1",
        run_id: str = "run",
        step_id: str = "step",
        item: int | None = None,
        tenant: str = "default",
        attempt: int = 1,
        delivery: int = 1,
        fence: int = 1,
        hold: JobHold | None = None,
    ) -> None:
        self.topic = topic
        self.input = input
        self.job_id = job_id
        """The same for every delivery of this attempt: an idempotency key for effects outside."""
        self.run_id = run_id
        self.step_id = step_id
        self.item = item
        """Which item of a for-each; ``None`` if the step has none."""
        self.tenant = tenant
        self.attempt = attempt
        self.delivery = delivery
        """How often this attempt has been delivered: above 1, a worker died or lost its lease."""
        self.fence = fence
        """To be compared by whatever you write to: higher with every delivery."""
        self._hold = hold
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Job {self.job_id} on {self.topic}, delivery {self.delivery}>"

    @property
    def lost(self) -> FenceCause | None:
        """Why the lease is not held any more; ``None`` while it is."""
        return None if self._hold is None else self._hold.lost

    def check(self) -> None:
        """Raise ``Cancelled`` if the run was cancelled, ``LeaseLost`` if the lease is lost."""
        cause = self.lost
        if cause is not None:
            raise stop_error(self.job_id, cause)

    def heartbeat(self, progress: JsonValue = None) -> None:
        """Check the lease, and report how far the work is: any JSON value of at most 4 KiB.

        It is sent at once with a renewal, at most once a second; of several the last one counts.
        The lease is renewed with or without it. Raises what ``check`` raises, and ``ValueError`` if
        the progress is too large or not JSON.
        """
        self.check()
        if progress is None:
            return
        try:
            encoded = msgspec.json.encode(progress)
            why_not = why_not_json(progress)
        except Exception as error:
            raise ValueError(f"progress is not JSON: {error}") from error
        if why_not is not None:
            raise ValueError(f"progress is not JSON: {why_not}")
        size = len(encoded)
        if size > PROGRESS_BYTES_MAX:
            raise ValueError(f"progress of {size} bytes; at most {PROGRESS_BYTES_MAX} are sent")
        if self._hold is not None:
            # A copy: the handler may change its value, and report it again, before it is sent.
            self._hold.note(msgspec.json.decode(encoded))

    @property
    def used(self) -> Mapping[str, int]:
        """What this delivery has used so far, by budget."""
        return dict(self._used)

    def usage(self, **amounts: int) -> None:
        """Add to what this job has used of budgets: ``job.usage(tokens=1200)``.

        The sums are sent with the next renewal, within about a second, and with the result, also if
        the handler fails. A name that is no identifier: ``job.usage(**{"eu-tokens": 5})``. May be
        called from any thread. Raises ``ValueError`` for a name or an amount that the server would
        refuse, and then adds nothing.
        """
        with self._lock:
            used = dict(self._used)
            for name, amount in amounts.items():
                used[name] = used.get(name, 0) + _checked_amount(name, amount)
                if used[name] > BUDGET_AMOUNT_MAX:
                    raise ValueError(f"{name}: a job may use {BUDGET_AMOUNT_MAX} at most")
            if len(used) > BUDGETS_MAX:
                raise ValueError(f"{len(used)} names; a job may use {BUDGETS_MAX} budgets at most")
            self._used = used
            if self._hold is not None and amounts:
                self._hold.use(used)


def _checked_amount(name: str, amount: int) -> int:
    if not re.fullmatch(BUDGET_NAME_PATTERN, name):
        raise ValueError(f"{name[:100]!r} is not the name of a budget: 1 to 64 visible characters")
    if type(amount) is not int or amount < 0:
        raise ValueError(f"{name}: an amount is an integer of at least 0; {amount!r} is not")
    return amount


def job_of(leased: LeasedJob, hold: JobHold) -> Job:
    """The job as its handler sees it."""
    return Job(
        leased.topic,
        leased.input,
        job_id=leased.job_id,
        run_id=leased.run_id,
        step_id=leased.step_id,
        item=leased.item,
        tenant=leased.tenant,
        attempt=leased.attempt,
        delivery=leased.delivery,
        fence=leased.fence,
        hold=hold,
    )
