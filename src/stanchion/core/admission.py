"""Admission: whether a run may begin.

``judge`` is the decision that every store makes inside its one indivisible step. The memory and
SQLite stores call it; the Redis script states the same in Lua, and the contract suite holds all of
them to it. The order of the questions is part of the contract: a replay is answered even when the
tenant is full, and a key is bound to a run only in the step that creates the run, so a refusal
leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import msgspec

from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant, RunId, WorkflowId

__all__ = [
    "Admitted",
    "Facts",
    "Full",
    "KeyRecord",
    "Mismatch",
    "Rate",
    "RateExceeded",
    "Refused",
    "Replayed",
    "StaleDefinition",
    "TooLate",
    "Verdict",
    "fingerprint",
    "judge",
]


class KeyRecord(msgspec.Struct, frozen=True):
    """What a tenant's idempotency key stands for."""

    fingerprint: str
    run_id: RunId


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The run exists, holds its slot, and its first work is out."""

    run_id: RunId


class Replayed(msgspec.Struct, frozen=True, tag="replayed"):
    """The key has been used for the same request: this is the run it made."""

    run_id: RunId


class Full(msgspec.Struct, frozen=True, tag="full"):
    """The tenant has as many unfinished runs as it may."""

    limit: int
    active: int


class Mismatch(msgspec.Struct, frozen=True, tag="mismatch"):
    """The key has been used for another request."""


class StaleDefinition(msgspec.Struct, frozen=True, tag="stale_definition"):
    """A workflow changed after the caller read it: read again, decide again."""


class RateExceeded(msgspec.Struct, frozen=True, tag="throttled"):
    """The tenant submits jobs faster than it may."""


class TooLate(msgspec.Struct, frozen=True, tag="too_late"):
    """The request came to be executed after its own deadline. Its caller has gone."""


Refused: TypeAlias = Full | RateExceeded | Mismatch | StaleDefinition | TooLate
Verdict: TypeAlias = Admitted | Replayed | Refused


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What bears on admission, as the store finds it inside its step.

    ``now`` and ``not_after`` are both in the store's time: a command that timed out at its caller
    may still be executed much later, and must then do nothing.
    """

    run_id: RunId
    now: Instant
    not_after: Instant
    exists: bool = False
    """A run with this id is there: this very request has been executed before."""
    key: KeyRecord | None = None
    """What the tenant's idempotency key stands for; ``None`` without a key or for a fresh one."""
    fingerprint: str = ""
    definition_is_current: bool = True
    takes_slot: bool = True
    limit: int | None = None
    active: int = 0
    rate: Rate | None = None
    """For what is limited by rate instead of by slots: the tenant's allowance."""


def judge(facts: Facts) -> Verdict:
    """Decide. An ``Admitted`` is carried out in the same step; everything else changes nothing."""
    if facts.exists:
        return Admitted(facts.run_id)
    if facts.now > facts.not_after:
        return TooLate()
    if facts.key is not None:
        if facts.key.fingerprint != facts.fingerprint:
            return Mismatch()
        return Replayed(facts.key.run_id)
    if not facts.definition_is_current:
        return StaleDefinition()
    if facts.takes_slot and facts.limit is not None and facts.active >= facts.limit:
        return Full(facts.limit, facts.active)
    if facts.rate is not None and facts.rate.spent_until(facts.now) > facts.now:
        return RateExceeded()
    return Admitted(facts.run_id)


class Rate(msgspec.Struct, frozen=True):
    """A rate with a burst, as one number that moves: the time up to which it has been used.

    One admission uses ``1/per_s`` seconds of it. It never lies further back than the burst is long,
    so rest can be saved up, but no more than for ``max(1, per_s)`` admissions.
    """

    per_s: float
    used_until_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        """What one admission uses."""
        return 1000 / self.per_s

    @property
    def burst_ms(self) -> float:
        """How far it may run ahead."""
        return self.cost_ms * max(1.0, self.per_s)

    def spent_until(self, now: Instant) -> float:
        """Up to when one admission more would use the rate, less the burst it may run ahead.

        The admission is within the rate if that is not in the future.
        """
        return self.after_one(now) - self.burst_ms

    def after_one(self, now: Instant) -> float:
        """The new ``used_until_ms`` once one more is admitted.

        What was used never lies further ahead than the burst is long, unless the clock was set
        back. Then it is forgotten: a tenant must not wait until the clock has caught up.
        """
        is_of_another_time = self.used_until_ms > now + self.burst_ms + 1
        used_until_ms = float(now) if is_of_another_time else max(self.used_until_ms, float(now))
        return used_until_ms + self.cost_ms


def fingerprint(workflow_id: WorkflowId, body: JsonValue) -> str:
    """Tell requests apart by what they mean: the workflow, and the JSON value of the body.

    Order of members and white space do not matter, nor whether one is written ``1`` or ``1.0``.
    """
    canonical = msgspec.json.encode([workflow_id, _plain(body)], order="sorted")
    return hashlib.sha256(canonical).hexdigest()


_EXACT = 2**53
"""Up to this, every whole number is the same number as a float and as an integer."""


_SAME = frozenset({int, str, bool, type(None)})


def _plain(value: JsonValue) -> JsonValue:
    if isinstance(value, list):
        # Most values are none of the others: they are not worth a call.
        return [each if type(each) in _SAME else _plain(each) for each in value]
    if isinstance(value, dict):
        return {name: each if type(each) in _SAME else _plain(each) for name, each in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value
