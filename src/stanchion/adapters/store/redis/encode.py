"""Encode what the scripts are given.

An admission or a commit is one MessagePack map, because MessagePack keeps integers exact and is
cheap for Lua to read. The payloads in it are JSON texts: MessagePack in Lua has no bytes. ``false``
stands for an absent value, because a Lua list cannot contain nil.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.adapters.outcomes import result_event
from stanchion.adapters.store.redis.decode import RunEnd, RunHeader, StoredTenant
from stanchion.adapters.store.redis.keys import sized
from stanchion.core.events import AttemptFailed, AttemptSucceeded, TimerFired
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Run,
    RunId,
    RunStatus,
    Stamp,
    Step,
    StepId,
    TenantId,
)
from stanchion.core.transition import (
    ClearTimer,
    DispatchJob,
    Effect,
    SetTimer,
    StopRun,
    StopStep,
    Transition,
)
from stanchion.ports.records import Admission, Commit, Result, Tenant

__all__ = [
    "created_place",
    "encode_admission",
    "encode_commit",
    "event_of",
    "item_field",
    "pack_tenant",
    "to_json",
]

_T = TypeVar("_T")
_Ask: TypeAlias = dict[str, object]

_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_UNSTAMPED: Final = Stamp(0, "")
_DEFAULTS: Final = Tenant()


def encode_admission(admission: Admission, *, not_after: Instant, key_ttl_ms: int) -> bytes:
    """What ``admit.lua`` is given."""
    run = admission.run
    place = created_place(run.created_at, run.id)
    key = None if admission.key is None else sized(run.tenant) + admission.key
    # The run is stored as the admission has it: its first transition says only what changed.
    ask = _ask(run.id, run.tenant, admission.transition, key_ttl_ms)
    ask["fields"] = [
        *("base", _base(run), "whose", place + run.tenant),
        *("about", to_json(RunHeader(run.workflow_id, run.workflow_version, run.created_at))),
        *(() if key is None else ("key", key)),
        *_changing(run),
        *_steps(run.steps),
    ]
    ask["version"], ask["fence"], ask["nonce"] = run.stamp.version, run.fence, run.stamp.nonce
    ask["items"] = _items(run.items)  # the transition has the same items
    ask["is_finished"] = run.status.is_finished
    ask["finished_at"] = _or_false(run.finished_at)
    ask["not_after"] = not_after
    ask["key"] = _or_false(key)
    ask["fingerprint"] = admission.fingerprint
    ask["definitions"] = [word for pair in admission.definitions.items() for word in pair]
    ask["takes_slot"] = run.holds_slot
    ask["is_limited"] = admission.is_rate_limited
    ask["limit"] = _or_false(_DEFAULTS.max_concurrent_runs)
    ask["rate"] = _or_false(_DEFAULTS.job_rate_per_s)
    ask["created"] = place
    return _pack(ask)


def encode_commit(commit: Commit, tenant: TenantId, *, key_ttl_ms: int) -> bytes:
    """What ``commit.lua`` is given."""
    transition = commit.transition
    ask = _ask(commit.run_id, tenant, transition, key_ttl_ms)
    ask["fields"] = [*_changing(transition), *_steps(transition.steps)]
    ask["dropped"] = _dropped(transition)
    ask["items"] = _items(transition.items)
    ask["is_finished"] = transition.status.is_finished
    ask["finished_at"] = _or_false(transition.finished_at)
    ask["read_version"] = commit.read.version
    ask["read_nonce"] = commit.read.nonce
    ask["nonce"] = commit.nonce
    ask["fence"] = _or_false(commit.fence)
    ask["applied"] = commit.applied
    return _pack(ask)


def event_of(result: Result) -> AttemptSucceeded | AttemptFailed:
    """The event that a result becomes. The job knows its step and item, the worker does not."""
    return result_event(result, StepId(""))


def pack_tenant(config: Tenant) -> bytes:
    """A tenant's configuration, for ``put_tenant.lua``."""
    limit, rate = _or_false(config.max_concurrent_runs), _or_false(config.job_rate_per_s)
    return _pack(StoredTenant(limit, rate, to_json(config)))


def to_json(value: object) -> str:
    """A value as JSON text."""
    return "null" if value is None else _encode(value).decode()


def item_field(step_id: StepId, index: int) -> str:
    """The field of an item."""
    return f"{index}:{step_id}"


def created_place(created_at: Instant, run_id: str) -> str:
    """A run's place among its tenant's runs: the order of texts is the order of creation."""
    return f"{created_at:016d}{run_id}"


def _base(run: Run) -> str:
    """The run as it will always be. What changes has fields of its own."""
    return to_json(
        replace(
            run,
            status=RunStatus.PENDING,
            output=None,
            error=None,
            finished_at=None,
            steps={},
            items={},
            stamp=_UNSTAMPED,
            fence=0,
        )
    )


def _ask(run_id: RunId, tenant: TenantId, transition: Transition, key_ttl_ms: int) -> _Ask:
    return {
        "run": run_id,
        "tenant": tenant,
        "effects": [_effect(effect) for effect in transition.effects],
        "timeline": [to_json(entry) for entry in transition.timeline],
        "key_ttl": key_ttl_ms,
        "dropped": (),
    }


def _changing(what: Run | Transition) -> Iterator[str]:
    """The fields that every commit writes. Most runs have no output and no end yet."""
    yield from ("status", what.status)
    if what.output is not None:
        yield from ("output", to_json(what.output))
    if what.finished_at is not None or what.error is not None:
        yield from ("end", to_json(RunEnd(what.finished_at, what.error)))


def _dropped(transition: Transition) -> list[str]:
    """The fields that a commit removes, if they are there."""
    written = {*_changing(transition)}
    return [name for name in ("output", "end") if name not in written]


def _steps(steps: Mapping[StepId, Step]) -> list[str]:
    return [word for step_id in steps for word in (f"s:{step_id}", to_json(steps[step_id]))]


def _items(items: Mapping[ItemKey, Item]) -> list[str]:
    return [word for key in items for word in (item_field(*key), to_json(items[key]))]


def _effect(effect: Effect) -> tuple[object, ...]:
    match effect:
        case DispatchJob(job):
            return ("dispatch", job.id, job.step_id, _or_false(job.item), job.topic, to_json(job))
        case SetTimer(timer, due):
            return ("set", timer.key, due, timer.step_id or "", to_json(TimerFired(timer=timer)))
        case ClearTimer(timer):
            return ("clear", timer.key)
        case StopStep(step_id):
            return ("stop_step", step_id)
        case StopRun():
            return ("stop_run",)
        case _:
            assert_never(effect)


def _or_false(value: _T | None) -> _T | bool:
    return False if value is None else value
