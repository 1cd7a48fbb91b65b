"""Batches: many starts of one workflow, sent to the store in steps, in their order.

Each row is judged after those before it. While the store handles one step the next one is prepared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from stanchion.core.draft import size_of
from stanchion.core.faults import BATCH_FAULTS_MAX
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import TenantId, WorkflowId
from stanchion.core.queue import ANY_PLACE, QueueRequest
from stanchion.ports.records import Admission
from stanchion.services.admit import Admitter
from stanchion.services.context import ReplicaContext
from stanchion.services.gate_answers import GateFailed, NotStarted, StartAnswer
from stanchion.services.limiter import TenantTurns
from stanchion.services.plans import Linked, Plans
from stanchion.services.prepared import GateCall, PreparedRow, Preparer, StartParams
from stanchion.services.signals import AdmissionEndpoint
from stanchion.services.work import TenantWorkBudget

STEP_VALUES_MAX: Final = 250
"""Values in the inputs of the rows that one step of a batch admits, if they may begin a for-each:
it begins an item for each value of a list, and other callers wait while all are written."""
_UNKNOWN_FIRST_STEPS: Final = 100
"""Of a plan that is not in the cache, until the first rows have been prepared."""
STEP_ROWS_BESIDE_OTHERS: Final = 50
"""Rows that one step of a batch admits while other tenants start runs: they wait for each step."""
_PAUSE: Final = 2.0
"""After each step beside other tenants they have the replica for so many times as long as it took:
every turn of the event loop on which a part of a step is prepared delays each of their requests."""
_PAUSE_S_MAX: Final = 0.02
_FIRST_STEP_PART: Final = 4
"""The first step of a batch with several has this part of the rows that a step may have, and the
second one twice as many."""
_STEPS_AHEAD: Final = 3
"""Steps of a batch that wait, prepared, for those before them."""


class StartRow(NamedTuple):
    """One start of a batch."""

    input: JsonObject
    labels: Mapping[str, str]
    key: str
    queue: QueueRequest = ANY_PLACE


class Batches:
    """Starts the rows of batches."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        plans: Plans,
        admitter: Admitter,
        preparer: Preparer,
        work: TenantWorkBudget,
    ) -> None:
        self._context = context
        self._plans = plans
        self._admitter = admitter
        self._preparer = preparer
        self._work = work
        self.turns = TenantTurns()
        """Lets each tenant decode and start one batch at a time."""

    async def start_many(
        self,
        tenant: TenantId,
        workflow_id: WorkflowId,
        rows: Sequence[StartRow],
        *,
        actor: str,
        traceparent: str | None = None,
    ) -> list[StartAnswer]:
        """Start runs of a workflow, each judged by itself, in their order.

        If the gate fails for one, the rows behind it get the same answer: a caller repeats them
        with the same keys. Raises ``TenantOverloaded``.
        """
        self._work.check(tenant)
        begun: list[asyncio.Task[list[StartAnswer]]] = []
        turn: _Turn | None = None
        last: GateCall | None = None

        def of_rows(some: Sequence[StartRow]) -> tuple[GateCall, list[StartParams]]:
            nonlocal last
            last = call = GateCall(
                tenant=tenant,
                workflow_id=workflow_id,
                endpoint=AdmissionEndpoint.START,
                key=None,
                traceparent=traceparent,
                faults_left=BATCH_FAULTS_MAX if last is None else last.faults_left,
                rows=len(some),
            )
            return call, [
                StartParams(row.input, dict(row.labels), actor, queue=row.queue, key=row.key)
                for row in some
            ]

        refused: list[StartAnswer] = []
        if rows and self._admitter.is_full(tenant):
            call, given = of_rows(rows)
            refused = await self._refuse_rows(call, given)
        ahead: deque[_Turn] = deque()
        # To count values takes time, and only a for-each begins an item for each.
        values_max = STEP_VALUES_MAX if self._plans.may_begin_items(tenant, workflow_id) else None
        rows_max, clock = self._context.store.admissions_max, self._context.clock
        first_max = rows_max // _FIRST_STEP_PART
        if self._admitter.has_others(tenant):
            rows_max = first_max = min(rows_max, STEP_ROWS_BESIDE_OTHERS)
        # A thread of the store that writes rows needs the interpreter some ten times a step.
        with self._work.short_turns():
            async with asyncio.TaskGroup() as group:
                first_steps = partial(self._plans.first_steps, tenant, workflow_id)
                left = rows[len(refused) :]
                for some in _in_steps(left, rows_max, first_max, values_max, first_steps):
                    began = clock.moment()
                    call, given = of_rows(some)
                    turn = _Turn(turn)
                    begun.append(group.create_task(self._start_rows(call, given, turn)))
                    # The next rows are prepared while the store handles these and others wait.
                    await turn.is_prepared.wait()
                    ahead.append(turn)
                    if self._admitter.has_others(tenant):
                        await turn.is_sent.wait()
                        ahead.clear()  # all of them are sent
                        took_s = (clock.moment() - began) / 1_000
                        await clock.sleep(min(_PAUSE_S_MAX, _PAUSE * took_s))
                    elif len(ahead) > (_STEPS_AHEAD if values_max is None else 0):
                        await ahead.popleft().is_sent.wait()
        return refused + [answer for each in begun for answer in each.result()]

    async def _start_rows(
        self, call: GateCall, given: Sequence[StartParams], turn: _Turn
    ) -> list[StartAnswer]:
        """Start some rows of a batch, after the store has judged those before them."""
        is_first = turn.is_first

        async def prepared() -> tuple[
            Sequence[PreparedRow[NotStarted]], Sequence[Sequence[Admission]]
        ]:
            linked = await self._plans.newest(call.tenant, call.workflow_id)
            rows = await self._preparer.rows(call, linked, given)
            await asyncio.sleep(0)  # the rows before these may be sent
            return rows, await self._preparer.admissions(rows)

        def are_behind_the_last_slot() -> bool:
            return not is_first and self._admitter.is_full(call.tenant)

        async def in_turn() -> list[StartAnswer]:
            ready = None if are_behind_the_last_slot() else await prepared()
            turn.is_prepared.set()
            failed = await turn.wait()
            if failed is not None:
                return [failed] * len(given)
            if are_behind_the_last_slot():
                refused = await self._refused_at_once(call, given)
                if len(refused) == len(given):
                    return refused
            rows, admissions = ready or await prepared()
            return await self._admitter.admit_many(
                call,
                rows,
                admissions,
                lambda places: self._preparer.rows_again(call, given, places),
                turn.judged,
            )

        answers: list[StartAnswer] = []
        try:
            found = await self._admitter.in_time(call, in_turn())
            answers = [found] * len(given) if isinstance(found, GateFailed) else found
        finally:
            turn.finish(answers)
        return answers

    async def _refuse_rows(self, call: GateCall, given: Sequence[StartParams]) -> list[StartAnswer]:
        """The answers to the first rows of a batch of a full tenant: see ``_refused_at_once``."""
        found = await self._admitter.in_time(call, self._refused_at_once(call, given))
        return [found] * len(given) if isinstance(found, GateFailed) else found

    async def _refused_at_once(
        self, call: GateCall, given: Sequence[StartParams]
    ) -> list[StartAnswer]:
        """The answers to the first rows of a batch for which a full tenant has no slot.

        One step of the store finds the runs of their keys, and why the others are refused. The rows
        from the first one on that may be admitted, or whose input is faulty, have no answer.
        """
        linked = await self._plans.newest(call.tenant, call.workflow_id)
        if not isinstance(linked, Linked):
            return []
        call.exists, schema = True, linked.plan.body.schema
        if schema is not None:
            are_faulty = await self._work.done_each(
                call.tenant, lambda row: bool(schema.faults(row.input, first_only=True)), given
            )
            given = given[: are_faulty.index(True)] if True in are_faulty else given
        rows = [(row.key, row.queue.on_full) for row in given]

        async def fingerprint(place: int) -> str:
            return await self._preparer.fingerprint(call, given[place])

        return [*await self._admitter.refused_rows(call, linked.terms, rows, fingerprint)]


class _Turn:
    """When some rows of a batch are sent: after the store has judged those before them."""

    def __init__(self, before: _Turn | None) -> None:
        self._before = before
        self._failed: GateFailed | None = None
        self._is_judged = asyncio.Event()
        self.is_prepared = asyncio.Event()
        self.is_sent = asyncio.Event()

    @property
    def is_first(self) -> bool:
        """Whether no rows come before these."""
        return self._before is None

    async def wait(self) -> GateFailed | None:
        """Wait until the rows may be sent; the answer to a row before them if the gate failed."""
        if self._before is not None:
            await self._before._is_judged.wait()  # noqa: SLF001 - of the same class
            self._failed, self._before = self._before._failed, None  # noqa: SLF001
        self.is_sent.set()
        return self._failed

    def judged(self) -> None:
        """The store has answered. The rows behind these may be sent."""
        self._is_judged.set()

    def finish(self, answers: Sequence[StartAnswer]) -> None:
        """The rows are answered, or will never be."""
        if not self._is_judged.is_set():
            failed = (each for each in answers if isinstance(each, GateFailed))
            self._failed = next(failed, self._failed)
            self._is_judged.set()
        self.is_prepared.set()
        self.is_sent.set()


def _in_steps(
    rows: Sequence[StartRow],
    rows_max: int,
    first_max: int,
    values_max: int | None,
    first_steps: Callable[[], int | None],
) -> Iterator[list[StartRow]]:
    """The rows of a batch in parts of which each is small enough for one step of the store.

    A row with labels takes a store as long as two without, and one with several first steps as long
    as several; each of these may have a copy of its input. Of many rows the first part is short,
    and each has at most twice as many as the one before: the store is to have work while the next
    one is prepared.
    """
    step: list[StartRow] = []
    size = values = copied_bytes = 0
    most = rows_max if len(rows) <= rows_max else first_max
    jobs = first_steps() or _UNKNOWN_FIRST_STEPS
    for row in rows:
        count = 0 if values_max is None else _values_in(row.input, values_max)
        is_full = values_max is not None and values + count > values_max
        row_bytes = 0 if jobs == 1 else size_of(row.input)
        is_full = is_full or copied_bytes + row_bytes * jobs > BEGUN_BYTES_MAX
        labelled = 2 if row.labels else 1
        if step and (is_full or size + labelled * jobs > most):
            yield step
            step, size, values, copied_bytes = [], 0, 0, 0
            most = min(rows_max, 2 * most)
            jobs = first_steps() or _UNKNOWN_FIRST_STEPS
        step.append(row)
        size += labelled * jobs
        values += count
        copied_bytes += row_bytes * jobs
    if step:
        yield step


def _values_in(value: JsonValue, at_most: int) -> int:
    """How many values a JSON value has; those beyond ``at_most`` are not counted."""
    count = 1
    rest = [value] if type(value) in _HOLDERS else []
    while rest and count < at_most:
        holder = rest.pop()
        assert isinstance(holder, dict | list)
        inside = holder.values() if isinstance(holder, dict) else holder[:at_most]
        count += len(inside)
        rest += [each for each in inside if type(each) in _HOLDERS]
    return min(count, at_most)


_HOLDERS: Final = frozenset({dict, list})
