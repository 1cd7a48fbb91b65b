"""Work: processor time is charged to the tenant that causes it, and bounded for each tenant.

Whatever a tenant can make the server compute (check an input, evaluate expressions, parse a file,
render a page) is measured and charged to the tenant's ``WorkAllowance``. A tenant that is over its
allowance is refused with ``TenantOverloaded`` until it has recovered; other tenants do not notice.

``Deadlines`` cancels tasks that are over their time, by one timer for all of them instead of one
for each.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final, TypeVar
from weakref import ref

import msgspec
from prometheus_client import CollectorRegistry, Counter

from stanchion.core.events import Event, Started
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Instant, Run, TenantId
from stanchion.core.plan import Plan
from stanchion.core.retry import WorkAllowance
from stanchion.core.run import (
    DecisionTooLong,
    begins_with_jobs,
    decide_all,
    start_like,
    start_model,
    starts_are_alike,
    works_like,
)
from stanchion.core.transition import DispatchJob, Transition
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.services.signals import TenantLabels

__all__ = [
    "DEFAULT_ALLOWANCE",
    "LOOP_WORK_MAX",
    "TENANTS_MAX",
    "Deadline",
    "Deadlines",
    "Decider",
    "Stopwatch",
    "TenantExecutor",
    "TenantOverloaded",
    "TenantWorkBudget",
    "input_bytes",
    "is_large_write",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

DEFAULT_ALLOWANCE: Final = WorkAllowance(share=0.25, burst_s=1.0)
"""A quarter of one core for each tenant, with a burst of one second."""
TENANTS_MAX: Final = 10_000
"""Tenants whose use is tracked: those charged last."""
WAITING_MAX: Final = 16
"""Calls of one tenant that wait for the worker thread."""
LOOP_WORK_MAX: Final = 15_000
"""Work of one decision on the event loop, in units of ``cel.budget``: up to 15 ms."""
MODELS_MAX: Final = 1_000
"""Plans for which a first transition is kept, from which those of later starts are made."""
_EFFECT_S: Final = 15e-6
"""Processor time of the store for each effect of a decision, estimated."""
_INPUT_S_PER_BYTE: Final = 10e-9
"""The same for each byte of the inputs of jobs. A decision with a megabyte of them, or more, is
made in the worker thread; those of others cost less than they do to count."""
_LARGE_BYTES: Final = 128 * 1024
"""Inputs of jobs and items, in one step of the store, that take it a millisecond or two."""
_LARGE_CHANGES: Final = 250
"""Jobs, timers and items that do so."""
_FREE_EFFECTS: Final = 100
"""Effects of one decision that are not charged: an ordinary decision has a few."""
_FEW_EFFECTS: Final = 8
"""Runs that begin with more are admitted one by one."""
_SHORT_S: Final = 0.000_5
"""Pieces of work that took less than this are measured by the wall clock."""
_COUNTED_S: Final = 0.001
"""While a tenant is within its share, its work is added up and charged in such amounts."""
_READ_EVERY_S: Final = 0.005
"""The processor time of a busy event loop is read at least this often."""
_PIECE_S: Final = 0.005
"""After a piece of work that took longer, the event loop serves others first."""
_PART_S: Final = 0.001
"""The same for a part of many pieces: an answer of the store may wait for the next call."""
_SWITCH_S: Final = 0.000_1
"""How long a thread may keep the interpreter from others while turns are short."""
_SHORT_TURNS_MS: Final = 250
"""Turns are short for this long after long work of a tenant, or after a refusal."""
_OVER: Final = "the tenant uses more processor time than its share"
_SPREAD: Final = 0.25
"""Jitter: refused callers are told to wait up to this much longer."""
_RETRY_AFTER_MS_MAX: Final = 30_000
_RETRY_AFTER_MS_MIN: Final = 50


class TenantOverloaded(Exception):
    """The tenant has used more processor time than its share: 429, with a time to retry."""

    def __init__(self, detail: str, retry_after_ms: int) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_ms = retry_after_ms


class Stopwatch:
    """Measures the processor time of pieces of work on the thread of the event loop.

    The processor time of a thread takes a system call to read, and on some machines a start made
    ten of them for a third of its own time. A short piece is measured by the wall clock instead,
    which needs none. A long one may have been interrupted: it counts at most what the thread has
    used since its time was last read, which is never long ago while the thread is busy.
    """

    __slots__ = ("_read_at_s", "_used_s", "processor_s", "wall_s")

    def __init__(
        self,
        processor_s: Callable[[], float] = time.thread_time,
        wall_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``processor_s`` reads the processor time of the calling thread, in seconds."""
        self.processor_s = processor_s
        self.wall_s = wall_s
        self._read_at_s = 0.0
        # Read at once: from zero, the first piece would count all of its wall time, also that in
        # which the machine served other processes.
        self._used_s = processor_s()

    def since(self, begun_s: float) -> float:
        """How much processor time a piece has used that began at this time of ``wall_s``."""
        now_s = self.wall_s()
        took_s = now_s - begun_s
        if took_s < _SHORT_S and now_s - self._read_at_s < _READ_EVERY_S:
            return took_s
        used_s = self.processor_s()
        spent_s = min(took_s, used_s - self._used_s)
        self._read_at_s, self._used_s = now_s, used_s
        return max(0.0, spent_s)


class ThreadTurns:
    """How long a thread may keep the interpreter while others wait for it, under load and else.

    The store's threads need the interpreter again after each of their statements. When the event
    loop or the worker thread is busy without a pause, each statement waits for up to a whole turn:
    a start took 150 ms beside a tenant that sent heavy files, and takes 13 ms with short turns.
    They cost a tenth of the throughput, so they are used only while a tenant does long work or is
    refused, and for a quarter of a second afterwards; and during a batch of starts, which prepares
    its next rows while a thread of the store writes the last ones.
    """

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._is_short = False
        self._short_until_ms = 0.0
        self.long_calls = 0
        """Calls under way that occupy another thread: until they end, turns stay short."""

    def shorten(self, now_ms: float) -> None:
        """Use short turns from now on, for a quarter of a second."""
        self._short_until_ms = now_ms + _SHORT_TURNS_MS
        self._shorten()

    def relax(self, now_ms: float) -> None:
        """Return to turns of the usual length if that time is over."""
        if self._is_short and not self.long_calls and now_ms > self._short_until_ms:
            self._is_short = False
            sys.setswitchinterval(self._usual_s)

    @contextmanager
    def shortened(self, now_ms: Callable[[], float]) -> Iterator[None]:
        """Use short turns during the body, and no longer for its sake."""
        self.long_calls += 1
        self._shorten()
        try:
            yield
        finally:
            self.long_calls -= 1
            self.relax(now_ms())

    def _shorten(self) -> None:
        if not self._is_short:
            self._is_short, self._usual_s = True, sys.getswitchinterval()
            sys.setswitchinterval(min(self._usual_s, _SWITCH_S))


class TenantWorkBudget:
    """Counts each tenant's processor time on this replica, and refuses a tenant over its share."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        clock: Clock,
        entropy: Entropy,
        labels: TenantLabels,
        allowance: WorkAllowance = DEFAULT_ALLOWANCE,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.allowance = allowance
        self.stopwatch = stopwatch or Stopwatch()
        self._turns = ThreadTurns()
        self._clock = clock
        self._entropy = entropy
        self._labels = labels
        self._accounts: OrderedDict[TenantId, _Account] = OrderedDict()
        self._seconds = Counter(
            "stanchion_tenant_work_seconds",
            "Processor time spent on checks, expressions, files and pages of a tenant.",
            ["tenant"],
            registry=registry,
        )
        self._refusals = Counter(
            "stanchion_tenant_work_refusals",
            "Requests refused because their tenant had used more processor time than its share.",
            ["tenant"],
            registry=registry,
        )

    def check(self, tenant: TenantId) -> None:
        """Raise ``TenantOverloaded`` if the tenant is over its share. To be called before work."""
        wait_ms = self.wait_ms(tenant)
        if wait_ms > 0:
            raise self.refusal(tenant, _OVER, wait_ms)

    def wait_ms(self, tenant: TenantId) -> float:
        """How long the tenant is over its share; zero if its work may begin now."""
        account = self._accounts.get(tenant)
        if account is None or account.is_within:
            return 0.0  # without a look at the clock: every request asks, most of them twice
        return self.allowance.wait_ms(account.full_at_ms, now_ms=self._clock.moment())

    def _charge(self, tenant: TenantId | None, seconds: float) -> None:
        if tenant is not None:
            self.charge(tenant, seconds)

    def charge(self, tenant: TenantId, seconds: float) -> None:
        """Charge processor time, measured or estimated, to a tenant.

        Short pieces are added up first: every start has two.
        """
        account = self._accounts.get(tenant)
        if account is not None and account.is_within:
            account.uncounted_s = seconds = account.uncounted_s + seconds
            if seconds < _COUNTED_S:
                return
            account.uncounted_s = 0.0
        if account is None:
            label = self._labels.tenant(tenant)
            account = _Account(self._seconds.labels(tenant=label).inc)
            self._accounts[tenant] = account
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(tenant)
        now_ms = self._clock.moment()
        full_at_ms = self.allowance.after(account.full_at_ms, seconds, now_ms=now_ms)
        account.full_at_ms = full_at_ms
        account.is_within = not self.allowance.wait_ms(full_at_ms, now_ms=now_ms)
        account.count(seconds)
        self._turns.relax(now_ms)

    def begin_long(self) -> None:
        """Long work begins in another thread: let threads take short turns until it ends."""
        self._turns.long_calls += 1
        self._turns.shorten(self._clock.moment())

    def end_long(self) -> None:
        """Long work in another thread has ended."""
        self._turns.long_calls -= 1

    def short_turns(self) -> AbstractContextManager[None]:
        """Let threads take short turns during the body: they work beside the event loop."""
        return self._turns.shortened(self._clock.moment)

    def measured(self, tenant: TenantId) -> _Measured:
        """Charge the processor time of the body. The body must not await."""
        return _Measured(self, tenant)

    async def done(self, tenant: TenantId | None, work: Callable[[], _Result]) -> _Result:
        """Do a piece of work here and charge it; after a long one, yield to the event loop.

        Work for the operator of all tenants is charged to none.
        """
        begun_s = self.stopwatch.wall_s()
        try:
            return work()
        finally:
            spent_s = self.stopwatch.since(begun_s)
            self._charge(tenant, spent_s)
            if spent_s > _PIECE_S:
                await asyncio.sleep(0)

    async def done_each(
        self, tenant: TenantId | None, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> list[_Result]:
        """Like ``done`` for each of the items, in pieces: the event loop is not held for long."""
        results: list[_Result] = []
        wall_s = self.stopwatch.wall_s
        begun_s = wall_s()
        for item in items:
            results.append(work(item))
            if wall_s() - begun_s > _PART_S:
                self._charge(tenant, self.stopwatch.since(begun_s))
                await asyncio.sleep(0)
                begun_s = wall_s()
        self._charge(tenant, self.stopwatch.since(begun_s))
        return results

    def refusal(self, tenant: TenantId, detail: str, wait_ms: float) -> TenantOverloaded:
        """Count a refusal and return its exception, with a jittered time to retry."""
        self._refusals.labels(tenant=self._labels.tenant(tenant)).inc()
        self._turns.shorten(self._clock.moment())
        spread_ms = max(wait_ms, _RETRY_AFTER_MS_MIN) * (1 + _SPREAD * self._entropy.unit())
        return TenantOverloaded(detail, min(_RETRY_AFTER_MS_MAX, round(spread_ms)))


class _Measured:
    """A class, because a generator takes three times as long: every decision has one."""

    __slots__ = ("_begun_s", "_budget", "_tenant")

    def __init__(self, budget: TenantWorkBudget, tenant: TenantId) -> None:
        self._budget = budget
        self._tenant = tenant

    def __enter__(self) -> None:
        self._begun_s = self._budget.stopwatch.wall_s()

    def __exit__(self, *_raised: object) -> None:
        self._budget.charge(self._tenant, self._budget.stopwatch.since(self._begun_s))


class _Account:
    __slots__ = ("count", "full_at_ms", "is_within", "uncounted_s")

    def __init__(self, count: Callable[[float], None]) -> None:
        self.count = count
        self.full_at_ms = 0.0
        self.uncounted_s = 0.0
        self.is_within = True
        """Whether the tenant was within its share when it was last charged: then it still is."""


class TenantExecutor:
    """One worker thread for long work. Tenants take turns, call by call.

    Each tenant has a queue of its own, so a tenant with many calls delays only itself: a call
    waits for at most one call of each other tenant.
    """

    def __init__(self, budget: TenantWorkBudget, *, waiting_max: int = WAITING_MAX) -> None:
        self._budget = budget
        self._waiting_max = waiting_max
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenant-work")
        self._queues: OrderedDict[TenantId, deque[_Call]] = OrderedDict()
        self._is_busy = False

    async def run(
        self, tenant: TenantId, work: Callable[[], _Result], *, may_refuse: bool = True
    ) -> _Result:
        """Do the work in the thread and charge its processor time to the tenant.

        Raises ``TenantOverloaded`` if the tenant is over its share or has too many calls waiting;
        not with ``may_refuse=False``, for work that must be done in any case.
        """
        queue = self._queues.get(tenant)
        if may_refuse:
            self._budget.check(tenant)
            if queue is not None and len(queue) >= self._waiting_max:
                detail = f"{len(queue)} calls of this tenant wait for the worker thread already"
                raise self._budget.refusal(tenant, detail, 1_000)
        if queue is None:
            queue = self._queues[tenant] = deque()
        call = _Call(work, asyncio.get_running_loop().create_future())
        queue.append(call)
        self._next()
        result: _Result = await call.future
        return result

    def close(self) -> None:
        """Shut the thread down. Waiting calls are cancelled."""
        for queue in self._queues.values():
            for call in queue:
                call.future.cancel()
        self._queues.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._queues and not self._is_busy:
            tenant, queue = self._queues.popitem(last=False)
            call = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind all other tenants
            if call.future.done():
                continue  # its caller was cancelled
            self._is_busy = True
            self._budget.begin_long()
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._timed, call.work)
            done.add_done_callback(partial(self._end, tenant, call))

    def _timed(self, work: Callable[[], object]) -> tuple[object, BaseException | None, float]:
        before_s = self._budget.stopwatch.processor_s()
        result: object = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - raised again for the caller
            error = raised
        return result, error, max(0.0, self._budget.stopwatch.processor_s() - before_s)

    def _end(
        self,
        tenant: TenantId,
        call: _Call,
        done: asyncio.Future[tuple[object, BaseException | None, float]],
    ) -> None:
        self._is_busy = False
        self._budget.end_long()
        if done.cancelled():
            call.future.cancel()
            return
        result, error, seconds = done.result()
        self._budget.charge(tenant, seconds)
        if not call.future.done():
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)
        self._next()


class _Call:
    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], object], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future


class Decider:
    """Decides what events change in a run, and charges the work to the run's tenant.

    A short decision is made on the event loop. One that exceeds ``LOOP_WORK_MAX`` is made again by
    the executor, and so is every decision of a tenant that is over its share: it must be made, but
    other tenants come first. Without an executor all decisions are made on the event loop.
    """

    def __init__(self, budget: TenantWorkBudget, executor: TenantExecutor | None) -> None:
        self.budget = budget
        self._executor = executor
        self._models: OrderedDict[int, tuple[ref[Plan], Transition | None]] = OrderedDict()
        """First transitions by the identity of their plan, for other runs that begin alike."""

    async def decide_start(self, plan: Plan, run: Run, began: Started) -> Transition:
        """``decide`` for a new run, at the time of its creation.

        What does not depend on the run is decided once for a plan.
        """
        if run.rerun_of is not None or run.traceparent is not None:
            return await self.decide(plan, run, (began,), run.created_at)
        known, model = self._model(plan)
        transition = self._at_once(plan, run, (began,), run.created_at, model)
        if transition is None:
            return await self._in_thread(plan, run, (began,), run.created_at)
        if known is None:
            self._models[id(plan)] = ref(plan), start_model(plan, transition)
            if len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)
        return transition

    def begin_alike(self, plan: Plan) -> bool:
        """Whether runs of the plan begin with jobs, a few, which differ in their inputs only."""
        _, model = self._model(plan)
        return model is not None and len(model.effects) <= _FEW_EFFECTS

    def _model(self, plan: Plan) -> tuple[ref[Plan] | None, Transition | None]:
        known, model = self._models.get(id(plan), (None, None))
        if known is not None and known() is not plan:
            return None, None  # another plan had this identity before
        return known, model

    async def decide(
        self, plan: Plan, run: Run, events: Sequence[Event], now: Instant
    ) -> Transition:
        """The transition that ``decide_all`` returns for these events."""
        transition = self.decide_at_once(plan, run, events, now)
        return transition or await self._in_thread(plan, run, events, now)

    async def _in_thread(
        self, plan: Plan, run: Run, events: Sequence[Event], now: Instant
    ) -> Transition:
        assert self._executor is not None, "without one, no decision takes too long"

        def decided() -> tuple[Transition, int]:
            transition = decide_all(plan, run, events, now)
            return transition, input_bytes(transition)

        transition, size = await self._executor.run(run.tenant, decided, may_refuse=False)
        self._charge(run, transition)
        self.budget.charge(run.tenant, size * _INPUT_S_PER_BYTE)
        return transition

    async def decide_each(
        self, plan: Plan, runs: Sequence[Run], events: Sequence[Event]
    ) -> list[Transition]:
        """``decide`` for new runs of one tenant, at the time of their creation.

        ``events`` is their start. What the inputs do not change is decided once for runs that were
        created at the same time.
        """
        work_max = None if self._executor is None else LOOP_WORK_MAX
        before: tuple[Run, Transition] | None = None

        def decided(run: Run) -> Transition | None:
            nonlocal before
            if before is not None and before[0].created_at == run.created_at:
                transition = start_like(plan, before[1], run, work_max=work_max)
                if transition is not None:
                    return transition
            try:
                transition = decide_all(plan, run, events, run.created_at, work_max=work_max)
            except DecisionTooLong:
                return None
            before = (run, transition) if starts_are_alike(plan, transition) else None
            return transition

        made: list[Transition | None] = []
        if runs and not (self._executor is not None and self.budget.wait_ms(runs[0].tenant)):
            made = await self.budget.done_each(runs[0].tenant, decided, runs)
        transitions: list[Transition] = []
        for run, transition in zip_longest(runs, made):
            if transition is None:
                transitions.append(await self.decide(plan, run, events, run.created_at))
            else:
                self._charge(run, transition)
                transitions.append(transition)
        return transitions

    async def start_alike(
        self, plan: Plan, run: Run, events: Sequence[Event], others: Sequence[JsonObject]
    ) -> tuple[Transition, list[tuple[JsonValue, ...]]] | None:
        """The first transition of a run, and what other runs with these inputs have of their own.

        These are the inputs of their jobs; all else is the same in the transitions that ``decide``
        returns for them. ``None`` if that is not so, or must be decided one by one.
        """
        work_max = None if self._executor is None else LOOP_WORK_MAX
        if not begins_with_jobs(plan):
            return None
        _, model = self._model(plan)
        made = self._at_once(plan, run, events, run.created_at, model)
        if made is None or not starts_are_alike(plan, made) or len(made.effects) > _FREE_EFFECTS:
            return None

        def works(given: JsonObject) -> tuple[JsonValue, ...] | None:
            return works_like(plan, made, given, work_max=work_max)

        found = await self.budget.done_each(run.tenant, works, others)
        all_works = [each for each in found if each is not None]
        return (made, all_works) if len(all_works) == len(others) else None

    def decide_at_once(
        self, plan: Plan, run: Run, events: Sequence[Event], now: Instant
    ) -> Transition | None:
        """Like ``decide``, on the event loop; ``None`` if it would take too long for that."""
        return self._at_once(plan, run, events, now, None)

    def _at_once(
        self,
        plan: Plan,
        run: Run,
        events: Sequence[Event],
        now: Instant,
        model: Transition | None,
    ) -> Transition | None:
        work_max = None if self._executor is None else LOOP_WORK_MAX
        budget = self.budget
        if work_max is not None and budget.wait_ms(run.tenant):
            return None
        begun_s = budget.stopwatch.wall_s()
        transition: Transition | None = None
        try:
            if model is not None:
                actor = events[0].actor
                transition = start_like(plan, model, run, actor=actor, work_max=work_max)
            if transition is None:
                transition = decide_all(plan, run, events, now, work_max=work_max)
        except DecisionTooLong:
            return None
        finally:
            budget.charge(run.tenant, budget.stopwatch.since(begun_s))
        self._charge(run, transition)
        return transition

    def _charge(self, run: Run, transition: Transition) -> None:
        effects = len(transition.effects)
        if effects > _FREE_EFFECTS:
            self.budget.charge(run.tenant, effects * _EFFECT_S)


def input_bytes(transition: Transition) -> int:
    """The size of what the store writes for the inputs of jobs and items."""
    jobs = (each.job.input for each in transition.effects if isinstance(each, DispatchJob))
    items = (each.input for each in transition.items.values() if each.input is not msgspec.UNSET)
    return sum(len(msgspec.json.encode(each)) for each in chain(jobs, items))


def is_large_write(transition: Transition) -> bool:
    """Whether other writes should not wait for several such transitions of one tenant."""
    if len(transition.effects) + len(transition.items) > _LARGE_CHANGES:
        return True
    left = _LARGE_BYTES
    for each in transition.effects:
        if isinstance(each, DispatchJob):
            left -= len(msgspec.json.encode(each.job.input))
            if left < 0:
                return True
    for item in transition.items.values():
        if item.input is not msgspec.UNSET:
            left -= len(msgspec.json.encode(item.input))
    return left < 0


class TaskCancellation:
    """Cancels the task that created it, and distinguishes this cancellation from others.

    It works as ``asyncio.timeout`` does. Leases have their own (``services.renewal``), because the
    public leases must not import the engine.
    """

    __slots__ = ("_cancelling", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()

    def cancel_task(self) -> None:
        self._task.cancel()

    def take_back(self) -> bool:
        """Whether the task was cancelled by this alone. To be called once, after the fact."""
        return self._task.uncancel() <= self._cancelling


class Deadline(TaskCancellation):
    """A time limit of one task. The task is cancelled when the time is over."""

    __slots__ = ("_all", "began_s", "due_s", "is_abandoned", "is_over")

    def __init__(
        self, everyone: dict[Deadline, None], task: asyncio.Task[Any], began_s: float, due_s: float
    ) -> None:
        # As in the class above, without a call: every start has two.
        self._task = task
        self._cancelling = task.cancelling()
        self._all = everyone
        self.began_s = began_s
        self.due_s = due_s
        self.is_over = False
        self.is_abandoned = False
        everyone[self] = None

    def end(self) -> None:
        """Remove the deadline: the work has ended."""
        self._all.pop(self, None)

    def expire(self) -> None:
        """Cancel the task."""
        if self in self._all:
            self.is_over = True
            self._all.pop(self, None)
            self.cancel_task()

    def abandon(self) -> None:
        """Cancel the task because its caller has disconnected."""
        self.is_abandoned = True
        self.expire()

    def is_why(self) -> bool:
        """Whether this deadline, and nothing else, cancelled the task."""
        return self.is_over and self.take_back()


class Deadlines:
    """A group of deadlines, checked every ``sweep_s`` seconds."""

    def __init__(self, *, sweep_s: float) -> None:
        self._sweep_s = sweep_s
        self._all: dict[Deadline, None] = {}
        """In the order of their creation, so that a seed replays."""
        self._sweep: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        """That of the deadlines. Not asked for each time: asyncio makes a system call for it."""

    def begin(self, within_s: float) -> Deadline:
        """Create a deadline for the current task."""
        if self._sweep is None:
            self._loop = asyncio.get_running_loop()
            self._sweep = self._loop.call_later(self._sweep_s, self._look)
        task = asyncio.current_task(self._loop)
        assert task is not None
        now_s = self._loop.time()
        return Deadline(self._all, task, now_s, now_s + within_s)

    def extend(self, deadline: Deadline, within_s: float) -> None:
        """Let the deadline end this long from now."""
        deadline.due_s = self._loop.time() + within_s

    def lasted_s(self, deadline: Deadline) -> float:
        """How long ago the deadline was created."""
        return self._loop.time() - deadline.began_s

    def close(self) -> None:
        """Stop checking deadlines, once those that were begun have ended."""
        if self._sweep is not None and not self._all:
            self._sweep.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        for deadline in [each for each in self._all if each.due_s <= now_s]:
            deadline.expire()
        self._sweep = self._loop.call_later(self._sweep_s, self._look) if self._all else None
