"""Admission: whether a run may start.

Every store makes the decision of ``judge`` inside its admission transaction. The memory and SQLite
stores call it; the Redis script repeats it in Lua, and the contract suite compares them. The order
of the checks is part of the contract: a replay is answered even if the tenant is full, and a key is
bound to a run only in the transaction that creates the run, so a refusal changes nothing.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from stanchion.core.budget import OverBudget
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, RunId, WorkflowId
from stanchion.core.queue import OnFull

ConcurrencyLimit: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""How many runs of a tenant, or leases of a topic, there may be at the same time."""
RatePerS: TypeAlias = Annotated[float, Meta(ge=0.000_001, le=1_000_000)]


class KeyRecord(msgspec.Struct, frozen=True):
    """The run and the request fingerprint that a tenant's idempotency key is bound to."""

    fingerprint: str
    run_id: RunId


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The run was created with its slot, and its first jobs are dispatched."""

    run_id: RunId


class Replayed(msgspec.Struct, frozen=True, tag="replayed"):
    """The key was used for the same request before: this is the run it created."""

    run_id: RunId


class Full(msgspec.Struct, frozen=True, tag="full"):
    """The tenant is at its limit of unfinished runs."""

    limit: int
    active: int


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """The run was created without a slot, and waits for one."""

    run_id: RunId
    position: int = 0
    """Its place in the queue, 1 for the next one. The store adds it."""


class QueueFull(msgspec.Struct, frozen=True, tag="queue_full"):
    """The tenant is at its limit, and as many runs wait as its configuration allows."""

    limit: int
    active: int
    queue_max: int


class NoQueue(msgspec.Struct, frozen=True, tag="no_queue"):
    """The start asks to be queued, and its tenant rejects starts while it is full."""


class Mismatch(msgspec.Struct, frozen=True, tag="mismatch"):
    """The key was used for a different request before."""


class StaleDefinition(msgspec.Struct, frozen=True, tag="stale_definition"):
    """A workflow changed after the caller read it: read it and decide again."""


class RateExceeded(msgspec.Struct, frozen=True, tag="throttled"):
    """The tenant exceeds its rate of single jobs."""


class TickTaken(msgspec.Struct, frozen=True, tag="tick_taken"):
    """The schedule's tick, or a later one, was admitted before: the schedule's mark is that one."""

    generation: int
    tick: int


class TooLate(msgspec.Struct, frozen=True, tag="too_late"):
    """The store executed the request after its deadline: the caller no longer waits."""


Refused: TypeAlias = (
    Full
    | QueueFull
    | NoQueue
    | OverBudget
    | RateExceeded
    | Mismatch
    | StaleDefinition
    | TickTaken
    | TooLate
)
Verdict: TypeAlias = Admitted | Queued | Replayed | Refused


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The input of ``judge``, as the store reads it inside the transaction.

    ``now`` and ``not_after`` are in the time of the store: a command that timed out at its caller
    may be executed much later, and must then do nothing.
    """

    run_id: RunId
    now: Instant
    not_after: Instant
    exists: bool = False
    """A run with this id exists: this request was executed before."""
    position: int | None = None
    """The place of that run in the queue, if it is queued."""
    key: KeyRecord | None = None
    """The record of the tenant's idempotency key; ``None`` without a key or for a new one."""
    fingerprint: str = ""
    tick_taken: tuple[int, int] | None = None
    """The mark of the run's schedule, generation and tick, if it is at or beyond the run's tick."""
    definition_is_current: bool = True
    over_budget: OverBudget | None = None
    """A budget of the tenant that has too little left for the run."""
    takes_slot: bool = True
    limit: int | None = None
    active: int = 0
    on_full: OnFull = OnFull.REJECT
    """Of the tenant's configuration."""
    asked_on_full: OnFull | None = None
    """Of the start itself."""
    queued: int = 0
    """How many runs of the tenant wait. Free slots are theirs, as far as they go."""
    queue_max: int = 0
    rate: Rate | None = None
    """The rate limit of the tenant, for runs that take no slot."""

    @property
    def taken(self) -> int:
        """The slots that are used, and those that waiting runs will get: no start overtakes them.

        A promotion does not change it.
        """
        if self.limit is None:
            return self.active
        return max(self.active, min(self.limit, self.active + self.queued))


def judge(facts: Facts) -> Verdict:
    """Decide on a start.

    The store creates the run only if this returns ``Admitted``, or ``Queued``: then without a slot.
    """
    if facts.exists:
        return (
            Admitted(facts.run_id)
            if facts.position is None
            else Queued(facts.run_id, facts.position)
        )
    if facts.now > facts.not_after:
        return TooLate()
    if facts.key is not None:
        return judge_key(facts.key, facts.fingerprint)
    if facts.tick_taken is not None:
        return TickTaken(*facts.tick_taken)
    if not facts.definition_is_current:
        return StaleDefinition()
    if facts.over_budget is not None:
        return facts.over_budget
    if facts.asked_on_full is OnFull.QUEUE and facts.on_full is not OnFull.QUEUE:
        return NoQueue()
    if facts.takes_slot and facts.limit is not None and facts.taken >= facts.limit:
        return _without_slot(facts, facts.limit)
    if facts.rate is not None and facts.rate.spent_until(facts.now) > facts.now:
        return RateExceeded()
    return Admitted(facts.run_id)


def refusal(facts: Facts) -> Refused | None:
    """The refusal of a start with a new key; ``None`` if it would be admitted or queued."""
    verdict = judge(facts)
    assert not isinstance(verdict, Replayed), "its key is new"
    return None if isinstance(verdict, Admitted | Queued) else verdict


def judge_key(known: KeyRecord, fingerprint: str) -> Replayed | Mismatch:
    """Decide on a start whose idempotency key is bound to a run."""
    return Replayed(known.run_id) if known.fingerprint == fingerprint else Mismatch()


def _without_slot(facts: Facts, limit: int) -> Queued | QueueFull | Full:
    """What a full tenant answers."""
    if OnFull.REJECT in {facts.on_full, facts.asked_on_full}:
        return Full(limit, facts.taken)
    if facts.active + facts.queued - facts.taken >= facts.queue_max:
        return QueueFull(limit, facts.taken, facts.queue_max)
    return Queued(facts.run_id)


class Rate(msgspec.Struct, frozen=True):
    """A rate limit with a burst (GCRA). Its state is the time up to which the rate is used.

    One admission uses ``1/per_s`` seconds. The burst allows ``max(1, per_s)`` admissions at once.
    """

    per_s: float
    used_until_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        """The time that one admission uses."""
        return 1000 / self.per_s

    @property
    def burst_ms(self) -> float:
        """How far ahead of now the used time may be."""
        return self.cost_ms * max(1.0, self.per_s)

    def spent_until(self, now: Instant) -> float:
        """The used time after one more admission, less the burst.

        The admission is within the rate if the result is not in the future.
        """
        return self.after_one(now) - self.burst_ms

    def after_one(self, now: Instant) -> float:
        """The new ``used_until_ms`` after one more admission.

        The used time is at most one burst ahead, unless the clock was set back. Then it is reset,
        so that the tenant need not wait until the clock has caught up.
        """
        is_of_another_time = self.used_until_ms > now + self.burst_ms + 1
        used_until_ms = float(now) if is_of_another_time else max(self.used_until_ms, float(now))
        return used_until_ms + self.cost_ms


def fingerprint(workflow_id: WorkflowId, body: JsonValue) -> str:
    """A hash of the workflow and the JSON value of the body.

    The order of members, white space, and ``1`` or ``1.0`` make no difference.
    """
    canonical = msgspec.json.encode([workflow_id, body], order="sorted")
    if b".0" in canonical:  # as in every float that is equal to an integer of this size
        canonical = msgspec.json.encode([workflow_id, _plain(body)], order="sorted")
    return hashlib.sha256(canonical).hexdigest()


_EXACT = 2**53
"""Up to this, every integer has an exact float."""


_SAME = frozenset({int, str, bool, type(None)})


def _plain(value: JsonValue) -> JsonValue:
    if isinstance(value, list):
        # Most values are of these types: skipping the call saves time.
        return [each if type(each) in _SAME else _plain(each) for each in value]
    if isinstance(value, dict):
        return {name: each if type(each) in _SAME else _plain(each) for name, each in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value
