"""The workload: workers and callers. Their workflows are in ``workflows``."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from stanchion.client.async_client import AsyncClient
from stanchion.client.engine import Pace, RetryBudgets
from stanchion.client.errors import (
    BudgetExhausted,
    CallFailed,
    Conflict,
    ServerUnavailable,
    TenantFull,
    TryLater,
    WaitTimeout,
)
from stanchion.client.signals import CallSignal, Retrying
from stanchion.core.budget import BudgetLimit, BudgetWindow
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import Instant, JobId, RunId, RunStatus, WorkflowId
from stanchion.core.queue import OnFull
from stanchion.core.rerun import RerunOnly, RerunVersion
from stanchion.core.retry import RETRIES, Budget, RetryClass
from stanchion.core.topic_limits import LimitScope, TopicLimit
from stanchion.ports.records import Tenant
from stanchion.sim import invariants as must
from stanchion.sim.history import History
from stanchion.sim.ledger import Ledger
from stanchion.sim.loop import LoopClock, Process
from stanchion.sim.network import CallerTransport, Network, WorkerTransport
from stanchion.sim.renewals import WorkerLeases
from stanchion.sim.scenario import Ask, Then
from stanchion.sim.shown import WorkerRecord
from stanchion.sim.workflows import Fails, handled, share
from stanchion.transport.messages import HttpReply, NoReply, Request
from stanchion.wire.runs import RerunPlan, RunView, TimelineLine
from stanchion.wire.worker import ResultsAnswer, ResultsRequest
from stanchion.worker import FinalError, Job, JobFailed, Worker
from stanchion.worker.renewal import HeldJob

CAPS: Final = {"acme": 3, "globex": 2, "quiet": 50}
PINS: Final = {"globex": {WorkflowId("three"): 1, WorkflowId("nested"): 1}}
"""The shared workflows that tenants pin. At first, only acme has workflows of its own."""
_CANCELLED_S: Final = 0.2
"""A worker knows within this time that a deadline has passed."""
_FULL: Final = frozenset({"max_concurrent_runs_reached", "queue_full"})
_ERRORS: Final[dict[str, type[CallFailed]]] = {
    **dict.fromkeys(_FULL, TenantFull),
    "budget_exhausted": BudgetExhausted,
}
"""The errors that the SDK raises for these codes."""
JOB_RATES: Final = {"acme": 0.5}
"""Single jobs a second that tenants may submit."""
LIMITS: Final = (
    TopicLimit(id="all", topics=("search", "write"), max_running=4),
    TopicLimit(id="own", topics=("search",), per=LimitScope.TENANT, max_running=2, rate_per_s=20.0),
)
TOKENS: Final = {
    "acme": BudgetLimit(250, BudgetWindow.TOTAL),
    "globex": BudgetLimit(120, BudgetWindow.HOUR),
}
"""What tenants may use: enough for most days."""


def budgets_of(
    tenant: str, factor: int, window: BudgetWindow | None = None
) -> dict[str, BudgetLimit]:
    """The budgets of a tenant; ``factor`` is that of its cap."""
    limit = TOKENS.get(tenant)
    if limit is None:
        return {}
    return {"tokens": BudgetLimit(limit.limit * factor, window or limit.window)}


BUDGETS: Final = {
    RetryClass.QUOTA: Budget(tokens_max=4, refill_per_s=0.3),
    RetryClass.UNAVAILABLE: Budget(tokens_max=6, refill_per_s=0.5),
}
"""Smaller than those of the SDK, so that a few callers can exhaust them."""
CALL_TIMEOUT_S: Final = 6.0
WAIT_S: Final = 30
"""How long callers wait for the end of a run."""
BATCH_DAYS_PART: Final = 0.25
"""On so many of the days some starts are rows of a batch."""
BATCHES_PART: Final = 0.3
"""Then it is so many of the starts."""
QUEUE_WAIT_S: Final = 15.0
QUEUE_MAX: Final = 6


def configured(tenant: str, *, cap: int, budgets: dict[str, BudgetLimit]) -> Tenant:
    """The configuration of a tenant with a cap and budgets."""
    return Tenant(max_concurrent_runs=cap, budgets=budgets, job_rate_per_s=JOB_RATES.get(tenant))


def queueing(config: Tenant) -> Tenant:
    """The same configuration, of a tenant whose starts wait while it is full."""
    return msgspec.structs.replace(
        config, on_full=OnFull.QUEUE, queue_max=QUEUE_MAX, queue_wait_s=QUEUE_WAIT_S
    )


# ── Workers ──────────────────────────────────────────────────────────────────────────────────────


class Hands:
    """One worker process: the real worker loop, with handlers of random duration."""

    def __init__(self, name: str, seed: int, network: Network, ledger: Ledger) -> None:
        self.process = network.caller
        self.network = network
        self.slowness = 1.0
        self.is_quick = False
        """Whether no handler takes longer than a lease: the faults are over, and runs shall end."""
        self._seed = seed
        self._ledger = ledger
        chance = Random(f"{seed}/{name}/worker")  # noqa: S311 - to be foreseen is the point
        self.clock = LoopClock(drift=chance.uniform(-0.01, 0.01))
        self.record = WorkerRecord(ledger.history)
        self.leases = WorkerLeases(ledger.history, self.process, self.clock)
        worker = self._worker = Worker(on_event=self.record.told)
        for topic in ("plan", "search", "write", "flaky", "quick"):
            worker.task(topic)(self._handle)
        self.process.begin(self._work(worker, name, chance), name="worker")

    def drain(self) -> None:
        """Finish the jobs that it has, and end, as after SIGTERM."""
        self.process.later(0, self._worker.stop)

    async def _work(self, worker: Worker, name: str, chance: Random) -> None:
        await worker.run_over(
            _Told(self.network, self._ledger, self.record, self.leases),
            clock=self.clock,
            chance=chance.random,
            worker_id=name,
            concurrency=4,
            wait_s=10.0,
        )

    async def _handle(self, job: Job) -> JsonValue:
        self.leases.begins(job)
        try:
            return await self._do(job)
        finally:
            self.leases.ends(job)

    async def _do(self, job: Job) -> JsonValue:
        since_s = asyncio.get_running_loop().time()
        fate = share(self._seed, job.job_id, job.delivery)
        # Most are fast; some take longer than the term of a lease, so that it must be renewed.
        is_long = fate >= 0.85 and not self.is_quick  # noqa: PLR2004 - most are not
        takes_s = (12 * fate if is_long else 0.05 + fate) * self.slowness
        if job.topic == "quick":
            # All at the same time, so that their results collide.
            takes_s = 0.02 * self.slowness
        lost_at: tuple[float, int] | None = None
        for quarter in range(4):
            await asyncio.sleep(takes_s / 4)
            if job.lost is not None:
                lost_at = lost_at or (asyncio.get_running_loop().time(), self.process.pauses)
                self._goes_on(job, *lost_at)
            if quarter % 2:
                job.usage(tokens=1 + int(4 * fate))
            if job.lost is None:
                self._ledger.jobs.works(JobId(job.job_id), job.fence, since_s)
                self.leases.goes_on(job)
                self._believes(job, since_s)
        sent = handled(self._seed, job.job_id, job.topic, job.attempt, job.input)
        if isinstance(sent, Fails):
            raise FinalError(sent.message) if sent.is_final else JobFailed(sent.message)
        return sent

    def _goes_on(self, job: Job, lost_at_s: float, pauses: int) -> None:
        """Check that a handler is cancelled soon after its lease was lost."""
        late_s = asyncio.get_running_loop().time() - lost_at_s
        is_wrong = late_s > _CANCELLED_S and pauses == self.process.pauses
        said = f"the handler of {job.job_id} goes on {late_s:.1f} s after it lost its lease"
        self._ledger.history.check("handlers stop with their lease", [said] if is_wrong else [])

    def _believes(self, job: Job, since_s: float) -> None:
        hold = getattr(job, "_hold", None)
        if isinstance(hold, HeldJob) and since_s > self._ledger.failed_over_at_s:
            believed_ms = self.clock.for_servers_ms(hold.trusted_for_ms)
            self._ledger.jobs.believes(JobId(job.job_id), job.fence, believed_ms)


class _Told(WorkerTransport):
    """Reports the answers to workers to the ledger."""

    def __init__(
        self, network: Network, ledger: Ledger, record: WorkerRecord, leases: WorkerLeases
    ) -> None:
        super().__init__(network)
        self._ledger, self._record, self._leases = ledger, record, leases

    async def post(self, path: str, body: bytes) -> HttpReply:
        if path.endswith("/results"):
            for result in msgspec.json.decode(body, type=ResultsRequest).results:
                self._record.reports(result.job_id)
        call, answer = self._leases.sends(path, body), None
        try:
            answer = await super().post(path, body)
        finally:
            self._leases.ended(path, call, answer)
        said = must.valid_request_is_understood(path, answer.status, answer.body)
        self._ledger.history.check("no valid request is called invalid", said)
        if path.endswith("/results") and answer.status == HTTPStatus.OK:
            sent = msgspec.json.decode(body, type=ResultsRequest).results
            accepted = msgspec.json.decode(answer.body, type=ResultsAnswer).accepted
            for each in sent:
                if each.job_id in accepted:
                    self._ledger.jobs.told_accepted(each.job_id, each.fence)
                    self._ledger.budgets.told_accepted(each.job_id, each.fence, each.usage)
        return answer


# ── Callers ──────────────────────────────────────────────────────────────────────────────────────


class RerunTold(NamedTuple):
    """What a caller was told about a rerun from a step."""

    of: str
    from_step: str
    reused: frozenset[str]


@dataclass(slots=True)
class Callers:
    """One process of callers: clients of all tenants, with one retry budget."""

    network: Network
    seed: int
    ledger: Ledger
    history: History
    clock: LoopClock = field(default_factory=LoopClock)
    budgets: RetryBudgets = field(default_factory=lambda: RetryBudgets(BUDGETS))
    started: dict[str, dict[str, None]] = field(default_factory=dict)
    """For every key, the run ids that callers got."""
    unlisted: dict[str, str] = field(default_factory=dict)
    """Runs that were not found by their label, by key."""
    told: dict[str, RunStatus] = field(default_factory=dict)
    """The final status of runs that callers got."""
    decided: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)
    """Decisions that succeeded for callers: run and step, and the verbs."""
    reruns: dict[str, RerunTold] = field(default_factory=dict)
    """Reruns from a step, by the new run."""
    item_reruns: dict[str, str] = field(default_factory=dict)
    """The runs whose failed items were repeated, by the new run."""
    plans: list[tuple[str, RerunPlan]] = field(default_factory=list)
    """What reruns of a run would do, as callers were told."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """What was wrong when a key was used for another input."""
    read: dict[str, tuple[RunView, list[TimelineLine]]] = field(default_factory=dict)
    """Runs that have ended, as callers were shown them: the run and its timeline."""
    rows: dict[tuple[str, str], list[tuple[int, JsonValue]]] = field(default_factory=dict)
    """Items of for-each steps of such runs: index and output."""
    waits: dict[str, float] = field(default_factory=dict)
    """Until when callers wait for the ends of runs."""
    queues: bool = False
    """Whether starts say where they want to wait."""
    retries: Counter[RetryClass] = field(default_factory=Counter)
    first_retry_at: dict[RetryClass, Instant] = field(default_factory=dict)

    @property
    def process(self) -> Process:
        return self.network.caller

    def client(self, tenant: str, chance: Random) -> AsyncClient:
        """A client of the real SDK, over the simulated network."""
        clock = self.clock
        pace = Pace(
            budgets=self.budgets,
            now=lambda: Instant(clock.moment()),
            wall=clock.now,
            sample=chance.random,
        )
        return AsyncClient(
            "http://127.0.0.1:1",
            tenant=tenant,
            timeout_s=CALL_TIMEOUT_S,
            pace=pace,
            on_event=lambda signal: self._told(signal, Instant(clock.moment())),
            transport=_Heard(self.network, self.ledger, self.waits),
        )

    def begin(self, ask: Ask, asking: list[asyncio.Task[None]]) -> None:
        """Start all callers of a request."""
        asking.extend(
            self.process.spawn(self._ask(ask, copy), name=f"ask {ask.key}")
            for copy in range(ask.copies)
        )

    async def _ask(self, ask: Ask, copy: int) -> None:
        chance = Random(f"{self.seed}/{ask.key}/{copy}")  # noqa: S311 - to be foreseen is the point
        client = self.client(ask.tenant, chance)
        run_id = await self._insist(client, ask, f"caller {ask.key}/{copy}", chance)
        if run_id is None:
            return
        key = ask.key if ask.has_key else f"{ask.key}/{copy}"
        self.started.setdefault(key, {})[run_id] = None
        self.history.tell(f"caller {ask.key}/{copy}: has run {run_id}")
        if copy == 0:
            await self._then(client, ask, run_id)
            await self._find(client, ask, run_id)

    async def _insist(self, client: AsyncClient, ask: Ask, who: str, chance: Random) -> str | None:
        """Start a run; repeat with the same key if the run may have been created."""
        is_batch = self._is_batch(ask)
        for _ in range(3):
            known = self.ledger.run_of_key(ask.tenant, ask.key) if ask.has_key else None
            try:
                run_id = await (self._start_many if is_batch else self._start)(client, ask)
                if run_id is not None:
                    return run_id
            except CallFailed as error:
                self._refused(ask, error, known)
                self.history.tell(f"{who}: {error}")
                if not error.facts.may_have_run or not ask.has_key:
                    return None
            await asyncio.sleep(5 + 5 * chance.random())
        return None

    def _refused(self, ask: Ask, error: CallFailed, known: RunId | None) -> None:
        """Check the class of an error, and that the tenant is not called full for a known key."""
        expected = _ERRORS.get(error.facts.code or "")
        is_wrong = expected is not None and type(error) is not expected
        said = f"{ask.key}: {type(error).__name__} was raised for {error.facts.code}"
        self.history.check("errors have their class", [said] if is_wrong else [])
        if error.facts.code in _FULL:
            self.ledger.told_full_despite(ask.tenant, ask.key, known)

    def _is_batch(self, ask: Ask) -> bool:
        is_day = share("batches", self.seed) < BATCH_DAYS_PART
        may_be = ask.workflow != "job" and ask.has_key
        return is_day and may_be and share(self.seed, ask.key) < BATCHES_PART

    async def _start_many(self, client: AsyncClient, ask: Ask) -> str | None:
        """Start the run with a batch that names it twice, and has another one at its end."""
        row = {"input": {"n": ask.key}, "labels": {"key": ask.key}, "key": ask.key}
        row |= {name: wish for name, wish in self._wishes(ask).items() if wish is not None}
        more = row | {"key": f"{ask.key}-more"}
        keys = (ask.key, ask.key, f"{ask.key}-more")
        known = [self.ledger.run_of_key(ask.tenant, key) for key in keys]
        asked_at_s = asyncio.get_running_loop().time()
        first, again, last = await client.start_many(ask.workflow, [row, row, more])
        for key, run_id, each in zip(keys, known, (first, again, last), strict=True):
            if each.problem is not None and each.problem.code in _FULL:
                self.ledger.told_full_despite(ask.tenant, key, run_id)
        told = {each.run_id for each in (first, again)} - {None}
        said = [f"{ask.key}: the same row of a batch has the runs {sorted(map(str, told))}"]
        # Between two steps of a batch a failover can lose the run of the first.
        is_lost = self.ledger.failed_over_at_s >= asked_at_s
        self.history.check("one run per key", said if len(told) > 1 and not is_lost else [])
        if last.run_id is not None:
            self.started.setdefault(f"{ask.key}-more", {})[last.run_id] = None
        statuses = [each.status for each in (first, again, last)]
        self.history.tell(f"caller {ask.key}: a batch was answered {statuses}")
        return first.run_id or again.run_id

    async def _start(self, client: AsyncClient, ask: Ask) -> str:
        if not ask.has_key:
            return await self._start_without_key(client, ask)
        if ask.workflow == "job":
            answer = await client.submit_job("plan", {"n": ask.key}, idempotency_key=ask.key)
            return answer.run_id
        handle = await client.start(
            ask.workflow,
            {"n": ask.key},
            labels={"key": ask.key},
            idempotency_key=ask.key,
            **self._wishes(ask),
        )
        return handle.run_id

    async def _start_without_key(self, client: AsyncClient, ask: Ask) -> str:
        """Start a run by a request that is not repeated once it may have been done."""
        body: JsonObject = {"input": {"n": ask.key}, "labels": {"key": ask.key}}
        path = f"/v1/workflows/{ask.workflow}/runs"
        if ask.workflow == "job":
            path, body = "/v1/jobs", {"topic": "plan", "input": {"n": ask.key}}
        answer: Any = await client.request("POST", path, body)
        return str(answer["run_id"])

    def _wishes(self, ask: Ask) -> dict[str, Any]:
        """Where the run wants to wait, the same for all callers of a key."""
        if not self.queues:
            return {}
        fate = share("queue", self.seed, ask.key)
        return {
            "priority": 5 if fate < 0.7 else 8,  # noqa: PLR2004 - some are urgent
            "fairness_key": "abc"[int(fate * 1000) % 3],
            "on_full": "reject" if fate > 0.95 else None,  # noqa: PLR2004 - few do not wait
        }

    async def _find(self, client: AsyncClient, ask: Ask, run_id: str) -> None:
        """Look for the run by its label; the check at the end of the day reads the result."""
        with suppress(CallFailed):
            found = [row.run_id async for row in client.runs(labels={"key": ask.key})]
            if ask.workflow != "job" and run_id not in found:
                self.unlisted[ask.key] = run_id

    async def apply(self, tenant: str, text: str) -> None:
        """Store a workflow file."""
        chance = Random(f"{self.seed}/{tenant}/{text}")  # noqa: S311 - to be foreseen is the point
        with suppress(ServerUnavailable, TryLater, WaitTimeout):
            applied = await self.client(tenant, chance).apply_workflow(text)
            self.history.tell(f"person applies {applied.id} for {tenant}: {applied.version}")

    async def decide(self, tenant: str, run_id: str, step_id: str, verb: str) -> None:
        """Approve or reject."""
        chance = Random(f"{self.seed}/{run_id}/{step_id}/{verb}")  # noqa: S311 - to be foreseen
        client = self.client(tenant, chance)
        with suppress(CallFailed):
            said = f"{verb} {chance.random():.3f}"
            change = await getattr(client, verb)(run_id, step_id, comment=said, data={"of": said})
            self.history.tell(f"person {verb} {run_id}/{step_id}: {change.status}")
            if change.applied:
                self.decided.setdefault((run_id, step_id), {})[verb] = None

    async def _then(self, client: AsyncClient, ask: Ask, run_id: str) -> None:
        try:
            match ask.then:
                case Then.WAIT:
                    self.told[run_id] = (await self._wait(client, run_id)).status
                case Then.CANCEL:
                    await asyncio.sleep(ask.after_s)
                    change = await client.cancel(run_id)
                    if change.status.is_finished:
                        self.told[run_id] = change.status
                    elif change.applied:
                        self.told[run_id] = RunStatus.CANCELLED
                    self.history.tell(f"caller {ask.key}: cancel {run_id}, {change.status}")
                case Then.RERUN:
                    await self._wait(client, run_id)
                    await self._rerun(client, run_id, f"{ask.key}-again")
                case Then.RERUN_FROM:
                    await self._wait(client, run_id)
                    await self._rerun_from(client, run_id, f"{ask.key}-from")
                case Then.MISMATCH:
                    await self._mismatch(client, ask, run_id)
                case Then.READ:
                    await self._read(client, run_id)
                case Then.LEAVE:
                    pass
        except CallFailed as error:
            self.history.tell(f"caller {ask.key}: {error}")

    async def _wait(self, client: AsyncClient, run_id: str) -> RunView:
        self.waits[run_id] = asyncio.get_running_loop().time() + WAIT_S
        return await client.wait(run_id, timeout_s=WAIT_S)

    async def _rerun(self, client: AsyncClient, run_id: str, key: str) -> None:
        """Repeat the failed items if there are any, or else all of it, of either version."""
        fate = share("rerun", self.seed, key)
        if fate < 0.7:  # noqa: PLR2004 - most
            with suppress(Conflict):
                plan = await client.plan_rerun(run_id, only=RerunOnly.FAILED_ITEMS)
                self.plans.append((run_id, plan))
                self.history.tell(f"caller {key}: {len(plan.steps)} steps planned")
                again = await client.rerun(
                    run_id, only=RerunOnly.FAILED_ITEMS, idempotency_key=f"{key}-items"
                )
                self.started.setdefault(f"{key}-items", {})[again.run_id] = None
                self.item_reruns[again.run_id] = run_id
                return
        version = RerunVersion.NEWEST if fate < 0.9 else None  # noqa: PLR2004 - and of the rest
        again = await client.rerun(run_id, version=version, idempotency_key=key)
        self.started.setdefault(key, {})[again.run_id] = None

    async def _rerun_from(self, client: AsyncClient, run_id: str, key: str) -> None:
        """Rerun from a step that the old run has; what is planned must be what is done."""
        steps = [each for each in (await client.get(run_id)).steps if "." not in each]
        if not steps:
            return
        step_id = steps[int(share("from", self.seed, key) * len(steps))]
        plan = await client.plan_rerun(run_id, from_step=step_id)
        self.plans.append((run_id, plan))
        again = await client.rerun(run_id, from_step=step_id, idempotency_key=key)
        self.started.setdefault(key, {})[again.run_id] = None
        reused = {each for each, step in plan.steps.items() if step.action != "runs_again"}
        self.reruns[again.run_id] = RerunTold(run_id, step_id, frozenset(reused))

    async def _mismatch(self, client: AsyncClient, ask: Ask, run_id: str) -> None:
        """Send another input with the key of the run: it must be refused, whatever else holds."""
        if not ask.has_key or ask.workflow == "job":
            return
        self.mismatched[ask.key] = ""
        try:
            other = await client.start(ask.workflow, {"n": "another"}, idempotency_key=ask.key)
            self.mismatched[ask.key] = f"the key of {run_id} gave {other.run_id} for another input"
        except CallFailed as error:
            if error.facts.status is None or error.facts.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                return
            if error.facts.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                self.mismatched[ask.key] = f"the key of {run_id}, with another input: {error}"

    async def _read(self, client: AsyncClient, run_id: str) -> None:
        """Read all that is shown of a run that has ended; the end of the day compares it."""
        view = await self._wait(client, run_id)
        if not view.status.is_finished:
            return
        lines: list[TimelineLine] = []
        cursor: str | None = None
        while True:
            page = await client.timeline(run_id, limit=7, cursor=cursor)
            lines += page.entries
            cursor = page.cursor
            if cursor is None:
                break
        self.read[run_id] = (view, lines)
        for step_id, step in view.steps.items():
            if step.items_total is not None:
                rows = [row async for row in client.items(run_id, step_id)]
                self.rows[run_id, step_id] = [(row.index, row.output) for row in rows]

    def _told(self, signal: CallSignal, now: Instant) -> None:
        if not isinstance(signal, Retrying):
            return
        kind = signal.retry_class
        self.history.check("delays within policy", must.client_retries_in_bounds(signal, RETRIES))
        self.retries[kind] += 1
        elapsed_ms = now - self.first_retry_at.setdefault(kind, now)
        self.history.check(
            "retries within budget",
            must.retries_in_budget(
                kind, BUDGETS[kind], retries=self.retries[kind], elapsed_ms=elapsed_ms
            ),
        )


class _Heard(CallerTransport):
    """Checks the answers to callers, and that callers wait as long as they were asked to."""

    def __init__(self, network: Network, ledger: Ledger, waits: dict[str, float]) -> None:
        super().__init__(network)
        self._ledger, self._waits = ledger, waits
        self._history = ledger.history
        self._asked: dict[tuple[str, str, bytes], tuple[float, float]] = {}
        """For each request that was refused: when, and for how many seconds to wait."""
        self._sent: set[str] = set()
        """Requests to wait for the end of a run."""
        self._cursors: dict[str, float] = {}
        """When the pages were asked for that have given each cursor."""

    async def send(self, request: Request) -> HttpReply | NoReply:
        same = (request.method, request.path, request.body)
        now_s = asyncio.get_running_loop().time()
        refused_at_s, asked_s = self._asked.pop(same, (now_s, 0.0))
        self._history.check(
            "callers wait as asked", must.waited_as_asked(now_s - refused_at_s, asked_s)
        )
        if request.name == "wait" and request.path not in self._sent:
            # A request without an answer is repeated as it was.
            self._sent.add(request.path)
            path, _, wait_s = request.path.partition("?wait=")
            until_s = self._waits.get(path.rpartition("/")[2], now_s + WAIT_S)
            said = must.asks_no_longer_than_it_waits(path, float(wait_s), until_s - now_s)
            self._history.check("callers wait as asked", said)
        outcome = await super().send(request)
        if isinstance(outcome, HttpReply):
            said = must.valid_request_is_understood(
                request.name,
                outcome.status,
                outcome.body,
                may_be_lost=self._ledger.may_be_lost(asked_at_s=self._cursor_asked_at_s(request)),
            )
            self._history.check("no valid request is called invalid", said)
            if b'"cursor":"' in outcome.body:
                self._cursors[msgspec.json.decode(outcome.body)["cursor"]] = now_s
        if isinstance(outcome, HttpReply) and outcome.status in {429, 503}:
            asked_ms = _asked_ms(outcome)
            self._history.check(
                "Retry-After within its bounds",
                must.retry_after_in_bounds(outcome.status, asked_ms),
            )
            self._asked[same] = (asyncio.get_running_loop().time(), (asked_ms or 0) / 1_000)
        return outcome

    def _cursor_asked_at_s(self, request: Request) -> float:
        """When the cursor of a request was asked for; now if it has none."""
        now_s = asyncio.get_running_loop().time()
        if "cursor=" not in request.path:
            return now_s
        given = dict(parse_qsl(urlsplit(request.path).query)).get("cursor", "")
        return self._cursors.get(given, now_s)


def _asked_ms(refusal: HttpReply) -> int | None:
    """How long a refusal asks to wait: exactly in its body, in whole seconds in its header."""
    text = refusal.headers.get("retry-after", "")
    exact_ms = msgspec.json.decode(refusal.body).get("retry_after_ms")
    if not text.isdigit() or (exact_ms is not None and -(-exact_ms // 1_000) != int(text)):
        return None
    return int(text) * 1_000 if exact_ms is None else int(exact_ms)
