"""The model: runs, steps, items, jobs, and their ids.

A run is one execution of a workflow for one tenant. It has steps; a for-each step has items; a step
or an item that needs a worker has a job. All of them are frozen values, independent of the store.

Read ``workflow`` next (what should happen), then ``run`` (what happens).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, NewType, TypeAlias

import msgspec

from stanchion.core.json_value import JsonObject, JsonValue

# msgspec resolves annotations at run time, so these stay outside TYPE_CHECKING.


Instant = NewType("Instant", int)
"""Milliseconds since the Unix epoch, UTC."""

TenantId = NewType("TenantId", str)
WorkflowId = NewType("WorkflowId", str)
RunId = NewType("RunId", str)
StepId = NewType("StepId", str)
"""A step's name in its file. Below a sub-workflow step it is namespaced: ``publish.render``."""
Topic = NewType("Topic", str)
JobId = NewType("JobId", str)
"""``run:step@attempt``, for an item of a for-each ``run:step[item]@attempt``."""


class Risk(StrEnum):
    """How harmful a second writer would be, from the mildest to the strictest class."""

    LOW = "low"
    STANDARD = "standard"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """The position on the scale: of several classes, the one with the highest rank applies."""
        return _RISK_RANK[self]


_RISK_RANK = {risk: rank for rank, risk in enumerate(Risk)}


# The properties of a status are computed once: looking a member of an enum up in a set calls its
# ``__hash__`` in Python, and a decision asks several times for each event.


class RunStatus(StrEnum):
    """The status of a run. The last four are final: a finished run never changes again."""

    QUEUED = "queued"
    """It waits for a slot of its tenant and holds none."""
    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @functools.cached_property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self in _RUN_FINISHED

    @functools.cached_property
    def uses_slot(self) -> bool:
        """Whether the run is unfinished and not queued: exactly then it may hold a slot."""
        return self not in _RUN_WITHOUT_SLOT


_RUN_FINISHED = frozenset(
    {RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMED_OUT}
)


_RUN_WITHOUT_SLOT = _RUN_FINISHED | {RunStatus.QUEUED}


class StepStatus(StrEnum):
    """The status of a step or item. ``running``: a job is open; ``waiting``: for a named thing."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"

    @functools.cached_property
    def is_active(self) -> bool:
        """Whether the step has started and not ended."""
        return self in _STEP_ACTIVE

    @functools.cached_property
    def is_finished(self) -> bool:
        """Whether the step has ended, with any result."""
        return self in _STEP_FINISHED

    @functools.cached_property
    def is_failure(self) -> bool:
        """Whether the step failed or timed out."""
        return self in _STEP_FAILURES

    @functools.cached_property
    def satisfies_needs(self) -> bool:
        """Whether the step succeeded or was skipped, so that steps that need it may start."""
        return self in _STEP_SATISFIES


_STEP_ACTIVE = frozenset({StepStatus.RUNNING, StepStatus.WAITING})
_STEP_SATISFIES = frozenset({StepStatus.SUCCEEDED, StepStatus.SKIPPED})
_STEP_FAILURES = frozenset({StepStatus.FAILED, StepStatus.TIMED_OUT})
_STEP_FINISHED = _STEP_SATISFIES | _STEP_FAILURES | {StepStatus.CANCELLED}


class WorkflowSource(StrEnum):
    """Whose workflow it is."""

    OWN = "own"
    """One that its tenant stored."""
    SHARED = "shared"
    """One for every tenant without an own workflow of that id."""


_SHARED: Final = "shared/"
"""No id of a workflow contains a slash."""


def shared_name(workflow_id: WorkflowId) -> WorkflowId:
    """The name of a shared workflow where both sources are named: ``shared/<id>``."""
    return WorkflowId(_SHARED + workflow_id)


def split_name(name: WorkflowId) -> tuple[WorkflowSource, WorkflowId]:
    """Source and id of a workflow, from its id or from its ``shared_name``."""
    if name.startswith(_SHARED):
        return WorkflowSource.SHARED, WorkflowId(name.removeprefix(_SHARED))
    return WorkflowSource.OWN, name


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a run, step or item failed: a code for programs, a sentence for people."""

    code: str
    message: str
    step: StepId | None = None


# ── What an active step waits for ────────────────────────────────────────────────────────────────
# Every active step names exactly one of these. An event that does not match it is late, repeated or
# misdirected, and changes nothing: that one comparison makes handling idempotent.


class OnJob(msgspec.Struct, frozen=True, tag="job"):
    """The result of a job that a worker has leased or will lease."""

    job_id: JobId


class OnRetry(msgspec.Struct, frozen=True, tag="retry"):
    """The last attempt failed; the next one starts at ``due``."""

    due: Instant


class OnReplay(msgspec.Struct, frozen=True, tag="replay"):
    """The job is a dead letter; an operator's replay dispatches it again."""

    job_id: JobId


class OnDecision(msgspec.Struct, frozen=True, omit_defaults=True, tag="decision"):
    """A person approves or rejects."""

    message: str | None = None
    """What the person is asked, as it was rendered when the step began."""
    due: Instant | None = None
    """When the time for a decision is over."""


class OnDelay(msgspec.Struct, frozen=True, tag="delay"):
    """The time ``due``."""

    due: Instant


class OnItems(msgspec.Struct, frozen=True, tag="items"):
    """The items of a for-each."""


class OnChildren(msgspec.Struct, frozen=True, tag="children"):
    """The steps of a sub-workflow."""


Wait: TypeAlias = OnJob | OnRetry | OnReplay | OnDecision | OnDelay | OnItems | OnChildren


class ItemCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of a for-each step, so that the result of one item need not read all others."""

    total: int
    succeeded: int = 0
    failed: int = 0
    waiting: int = 0
    output_bytes: int = 0
    """The size of the outputs of all succeeded items."""
    pending: int = 0
    """Items that were not dispatched yet: the last ones of ``to_run``, see ``parallel``."""
    reused: str = ""
    """The items that a rerun keeps, if others run again: a bit for each, as a hexadecimal number.

    10,000 items take 2.5 kB, which every change of the step writes again.
    """

    @property
    def unfinished(self) -> int:
        """Items that have not ended."""
        return self.total - self.succeeded - self.failed

    @property
    def running(self) -> int:
        """Items with an open job."""
        return self.unfinished - self.waiting - self.pending

    @property
    def to_run(self) -> Sequence[int]:
        """The items that this run dispatches, in order: all but those that a rerun keeps."""
        return range(self.total) if not self.reused else _not_in(self.reused, self.total)


def bits_of(indexes: Iterable[int]) -> str:
    """A set of indexes as a hexadecimal number; empty for none."""
    number = sum(1 << index for index in indexes)
    return f"{number:x}" if number else ""


@functools.lru_cache(maxsize=64)  # 10,000 items would otherwise be looked through for each result
def _not_in(bits: str, total: int) -> tuple[int, ...]:
    binary = f"{int(bits, 16):0{total}b}"[::-1]
    return tuple(index for index in range(total) if binary[index] == "0")


class ItemFailure(msgspec.Struct, frozen=True):
    """An item of a for-each step that failed."""

    index: int
    error: Failure


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a run. The initial state is ``Step()``, which is pending."""

    status: StepStatus = StepStatus.PENDING
    attempt: int = 0
    dispatch: int = 0
    """How often the current attempt was dispatched: 1, and one more per replay."""
    wait: Wait | None = None
    output: JsonValue = None
    error: Failure | None = None
    started_at: Instant | None = None
    finished_at: Instant | None = None
    items: ItemCounts | None = None
    failures: tuple[ItemFailure, ...] = ()
    """Of a for-each step that has ended: its failed items, the first ``ITEM_FAILURES_MAX``."""
    output_bytes: int = 0
    """The size of ``output`` and ``failures`` as JSON; 0 without, and in runs of older versions."""
    question: str | None = None
    """Of an approval that has ended: what the person was asked, as it was rendered."""


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a for-each step, stored separately from the run."""

    status: StepStatus = StepStatus.PENDING
    attempt: int = 0
    dispatch: int = 0
    wait: Wait | None = None
    output: JsonValue = None
    error: Failure | None = None
    input: JsonValue | msgspec.UnsetType = msgspec.UNSET
    """What its jobs get, from the start of a step with ``parallel`` to the end of the item.

    With a workflow, the input of that workflow.
    """
    steps: dict[StepId, Step] = {}
    """With a workflow: its steps. Once the item has ended they have no outputs any more."""


class ItemKey(NamedTuple):
    """Names one item of one for-each step."""

    step_id: StepId
    item: int


class JobTrace(msgspec.Struct, frozen=True, array_like=True):
    """What the spans of a job need."""

    parent: str
    """``traceparent`` of the run, not sampled if the job is not traced."""
    dispatched_at: Instant


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work for a worker: one attempt at one step or item."""

    id: JobId
    run_id: RunId
    tenant: TenantId
    step_id: StepId
    topic: Topic
    attempt: int
    input: JsonValue
    item: int | None = None
    dispatch: int = 1
    max_deliveries: int | None = None
    """Of its workflow; the server's setting if there is none."""
    attempt_timeout_ms: int | None = None
    """How long the attempt may take from its first lease on; ``None``: no limit."""
    trace: JobTrace | None = None
    """``None`` if its run is not traced."""


class PendingApproval(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision that a step waits for, with all that the person who decides is shown."""

    run_id: RunId
    step_id: StepId
    tenant: TenantId
    workflow_id: WorkflowId
    since: Instant
    expires_at: Instant | None = None
    item: int | None = None
    ask: str | None = None
    """The key of a job's own question; ``None`` for an approval step."""
    message: str | None = None
    data: JsonValue = None
    data_schema: JsonObject | None = None
    not_by_starter: bool = False
    """Whether another person than the one who started the run must decide."""
    starter: str | None = None
    labels: dict[str, str] | None = None


class Stamp(msgspec.Struct, frozen=True):
    """The version of a run. The nonce distinguishes two histories that reached one version."""

    version: int
    nonce: str

    @property
    def is_held_by_hand(self) -> bool:
        """Whether the run was last written to by an operator's hold, which may be over."""
        return BY_HAND in self.nonce


BY_HAND: Final = "hand-"
"""In the nonce of a commit that writes the fence of an operator's hold. Other nonces have none."""


class Run(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One execution of one version of a workflow.

    ``items`` holds only the items that were loaded: ``run.items_to_read`` returns those that a
    decision reads.
    """

    id: RunId
    tenant: TenantId
    workflow_id: WorkflowId
    workflow_version: int
    input: JsonObject
    created_at: Instant
    workflow_source: WorkflowSource = WorkflowSource.OWN
    uses: dict[WorkflowId, int] = {}
    """The versions of its sub-workflows, fixed when the run starts; of shared ones by
    ``shared_name``."""
    risk: Risk = Risk.STANDARD
    holds_slot: bool = True
    """Whether the run counts against its tenant's cap while it is unfinished and not queued."""
    rerun_of: RunId | None = None
    starter: str | None = None
    """The actor who started it; ``None`` for a run that an older version started."""
    labels: dict[str, str] = {}
    """What the caller marked it with, to find it by."""
    traceparent: str | None = None
    """The W3C context of the span that started it; ``None`` if it is not traced."""
    status: RunStatus = RunStatus.PENDING
    output: JsonValue = None
    error: Failure | None = None
    finished_at: Instant | None = None
    steps: dict[StepId, Step] = {}
    items: dict[ItemKey, Item] = {}
    stamp: Stamp = Stamp(0, "")
    fence: int = 0
    """The highest fence that has written to this run."""

    @property
    def workflow_name(self) -> WorkflowId:
        """The id of its workflow, or the ``shared_name`` of a shared one."""
        is_shared = self.workflow_source is WorkflowSource.SHARED
        return shared_name(self.workflow_id) if is_shared else self.workflow_id

    @property
    def definitions(self) -> dict[WorkflowId, int]:
        """The versions of its workflow and of its sub-workflows, by name."""
        return {**self.uses, self.workflow_name: self.workflow_version}

    def step(self, step_id: StepId) -> Step:
        """The state of the step; the initial one if it has never changed."""
        return self.steps.get(step_id, _UNTOUCHED)


_UNTOUCHED = Step()


def job_id(run_id: RunId, step_id: StepId, item: int | None, attempt: int) -> JobId:
    """Build the id of an attempt."""
    place = step_id if item is None else f"{step_id}[{item}]"
    return JobId(f"{run_id}:{place}@{attempt}")


def for_each_of(run: Run, step_id: StepId) -> StepId:
    """The for-each step whose items have this step; the step itself if there is none around it."""
    around, dot, _ = step_id.rpartition(".")
    while dot:
        if run.step(StepId(around)).items is not None:
            return StepId(around)
        around, dot, _ = around.rpartition(".")
    return step_id


class JobPlace(NamedTuple):
    """The parts of a job id."""

    run_id: RunId
    step_id: StepId
    item: int | None
    attempt: int


def place_of(job: JobId) -> JobPlace:
    """Parse an id that ``job_id`` built. Raises ``ValueError`` for any other text."""
    run_id, colon, rest = job.partition(":")
    place, at, attempt = rest.rpartition("@")
    if not colon or not at or not place:
        raise ValueError(f"not the id of a job: {job[:100]!r}")
    if place.endswith("]"):
        step_id, _, item = place[:-1].rpartition("[")
        return JobPlace(RunId(run_id), StepId(step_id), int(item), int(attempt))
    return JobPlace(RunId(run_id), StepId(place), None, int(attempt))


# ── Run ids ───────────────────────────────────────────────────────────────────────────────────────
# An id begins with the shard of its run, so that a caller with an id finds the run without knowing
# its tenant. The shard is a stable hash of the tenant: a run and its tenant's count of active runs
# change in one transaction, so they are stored in one place. The time follows, so that the ids of a
# shard sort by age, and then sixty random bits.

SHARDS: Final = 64
"""Never changes: the shard is part of every run id and of every store key."""

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Digits in ascending order, so that ids sort by age; without i, l, o and u, which are misread."""
_PAIRS: Final = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_TIME_DIGITS: Final = 9
_CHANCE_DIGITS: Final = 12
_DIGITS: Final = _TIME_DIGITS + _CHANCE_DIGITS


def make_run_id(tenant: TenantId, at: Instant, chance: int) -> RunId:
    """Build an id. ``chance`` is a random integer of at least sixty bits."""
    # Unrolled because every start builds one: a loop over the digits takes three times as long.
    return RunId(
        f"{_prefix(tenant)}"
        f"{_ALPHABET[at >> 40 & 31]}{_PAIRS[at >> 30 & 1023]}{_PAIRS[at >> 20 & 1023]}"
        f"{_PAIRS[at >> 10 & 1023]}{_PAIRS[at & 1023]}"
        f"{_PAIRS[chance >> 50 & 1023]}{_PAIRS[chance >> 40 & 1023]}{_PAIRS[chance >> 30 & 1023]}"
        f"{_PAIRS[chance >> 20 & 1023]}{_PAIRS[chance >> 10 & 1023]}{_PAIRS[chance & 1023]}"
    )


def make_run_ids(tenant: TenantId, at: Instant, chances: Sequence[int]) -> list[RunId]:
    """``make_run_id`` for several runs that are created at one time."""
    if not chances:
        return []
    begin, pairs = make_run_id(tenant, at, 0)[:-_CHANCE_DIGITS], _PAIRS
    return [
        RunId(
            f"{begin}{pairs[chance >> 50 & 1023]}{pairs[chance >> 40 & 1023]}"
            f"{pairs[chance >> 30 & 1023]}{pairs[chance >> 20 & 1023]}"
            f"{pairs[chance >> 10 & 1023]}{pairs[chance & 1023]}"
        )
        for chance in chances
    ]


@functools.lru_cache(maxsize=16_384)
def _prefix(tenant: TenantId) -> str:
    return f"{shard_of_tenant(tenant):02x}"


@functools.lru_cache(maxsize=16_384)
def shard_of_tenant(tenant: TenantId) -> int:
    """The shard that stores all data of the tenant."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % SHARDS


def shard_of_run(run_id: RunId) -> int | None:
    """The shard of the run; ``None`` if the text is not a run id."""
    try:
        shard = int(run_id[:2], 16)
    except ValueError:
        return None
    return shard if shard < SHARDS and len(run_id) == 2 + _DIGITS else None
