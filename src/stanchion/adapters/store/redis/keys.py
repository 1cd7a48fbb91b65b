"""StoreKeys: every key of the Redis store, in one place.

All that must change together lies in one shard, and the shard is the hash tag of the key, so that
a cluster keeps it on one server: ``stanchion:{3f}:run:<run id>``. A shard has things of its own,
things of its tenants and things of its runs. What belongs to no tenant has a tag of its own.

    of a shard
    ready       sorted set   jobs that wait for a worker: topic, tenant, number, job id
    ring        sorted set   whose turn it is: topic, turn, tenant
    turns       hash         the turn that a topic and tenant have in the ring
    counters    hash         numbers for jobs, turns and dead letters
    open        hash         jobs that are ready or leased: ``s:<job>`` its state, deliveries, fence
                             and so on; ``w:<job>`` what the worker gets
    deadlines   sorted set   leased jobs, by the end of their lease
    timers      sorted set   timers, by the time at which they are due
    outbox      sorted set   runs to be advanced, by the time at which they are due
    rows        hash         the numbers of these rows
    active      hash         how many slots each tenant uses
    unfinished  sorted set   tenant and run id of each run that holds a slot
    known       sorted set   tenants that ever had a run
    finished    sorted set   run id and tenant, by the time at which the run ended
    keys        hash         idempotency keys, by tenant
    aging       sorted set   those whose run has ended, by the time at which they are forgotten
    configs     hash         what each tenant may do
    configured  sorted set   the tenants in ``configs``, by name
    rates       hash         up to when a tenant has used its job rate
    letters     hash         dead letters
    dead        sorted set   their ids, in the order of death
    dead_of     sorted set   the same by tenant

    of a tenant
    runs        sorted set   time of creation and run id
    feed        stream       the newest lines of all its runs' timelines
    versions    hash         the newest version of each workflow
    workflows   hash         every version of every workflow
    names       sorted set   the workflows' ids

    of a run
    run         hash         the run, and a field ``s:<step>`` for each step that was touched
    items       hash         items of for-each steps
    out         hash         what it has out: ``j:<job>`` its open jobs, ``t:<timer>`` its timers
    jobs        hash         its jobs that are not open any more, whole
    inbox       hash         events that were accepted and not applied yet
    timeline    list         its history
    buried      set          its dead letters
"""

from __future__ import annotations

from typing import Final

from stanchion.adapters.redis.address import checked_namespace
from stanchion.adapters.redis.topology import slot_of
from stanchion.core.model import (
    SHARDS,
    Instant,
    JobId,
    RunId,
    TenantId,
    make_run_id,
    shard_of_run,
    shard_of_tenant,
)

__all__ = [
    "COMMON_TAG",
    "OF_RUN",
    "OF_SHARD",
    "OF_TENANT",
    "PLACE_CHARS",
    "RUN_ID_CHARS",
    "StoreKeys",
    "run_of_job",
    "sized",
]

OF_SHARD: Final = frozenset(
    (
        *("ready", "ring", "turns", "counters", "open", "deadlines", "timers"),
        *("outbox", "rows", "active", "unfinished", "known", "finished", "keys", "aging"),
        *("configs", "configured", "rates", "letters", "dead", "dead_of", "mark"),
    )
)
OF_TENANT: Final = frozenset(("runs", "feed", "versions", "workflows", "names"))
OF_RUN: Final = frozenset(("run", "items", "out", "jobs", "inbox", "timeline", "buried"))

RUN_ID_CHARS: Final = len(make_run_id(TenantId(""), Instant(0), 0))
"""All run ids are equally long, so a name may begin with one."""
PLACE_CHARS: Final = 16 + RUN_ID_CHARS
"""A run's place among its tenant's runs: the time of its creation, and its id."""
COMMON_TAG: Final = "common"
"""The tag of what belongs to no tenant."""

_WHOLE, _RUN, _TENANT = range(3)
"""What is still missing from a key: nothing, a run's id, a tenant."""


class StoreKeys:
    """Builds keys below one namespace."""

    def __init__(self, namespace: str) -> None:
        checked_namespace(namespace)
        self._roots = tuple(f"{namespace}:{{{shard:02x}}}:" for shard in range(SHARDS))
        self._common = f"{namespace}:{{{COMMON_TAG}}}:"
        self._patterns: dict[tuple[tuple[str, ...], int], list[tuple[str, int]]] = {}
        self.slots = tuple(slot_of(f"{shard:02x}") for shard in range(SHARDS))
        self.common_slot = slot_of(COMMON_TAG)
        self.format = f"{self._common}format"

    def of_shard(self, shard: int, name: str) -> str:
        assert name in OF_SHARD, name
        return self._roots[shard] + name

    def of_tenant(self, tenant: TenantId, name: str) -> str:
        assert name in OF_TENANT, name
        return f"{self._roots[shard_of_tenant(tenant)]}{name}:{tenant}"

    def of_run(self, run_id: RunId, name: str) -> str:
        assert name in OF_RUN, name
        return f"{self._roots[_shard(run_id)]}{name}:{run_id}"

    def documents(self, kind: str) -> tuple[str, str]:
        """The documents of a kind by name, and their names in order."""
        return f"{self._common}documents:{kind}", f"{self._common}document_names:{kind}"

    def all_of(
        self, names: tuple[str, ...], shard: int, *, run_id: str = "", tenant: str = ""
    ) -> list[str]:
        """The keys of a script, by its own names for them."""
        return [
            begin if kind is _WHOLE else begin + (run_id if kind is _RUN else tenant)
            for begin, kind in self._pattern(names, shard)
        ]

    def _pattern(self, names: tuple[str, ...], shard: int) -> list[tuple[str, int]]:
        """The keys of a script in one shard, as far as they are always the same."""
        known = self._patterns.get((names, shard))
        if known is None:
            root = self._roots[shard]
            known = self._patterns[names, shard] = [
                (root + name, _WHOLE)
                if name in OF_SHARD
                else (f"{root}{name}:", _RUN if name in OF_RUN else _TENANT)
                for name in names
            ]
            assert set(names) <= OF_SHARD | OF_RUN | OF_TENANT, names
        return known


def run_of_job(job_id: JobId) -> RunId | None:
    """The run that a job id names; ``None`` if it cannot be the id of a job."""
    run_id = RunId(job_id.partition(":")[0])
    return None if shard_of_run(run_id) is None else run_id


def sized(text: str) -> str:
    """Length, colon, text: no such name is the beginning of another. As in ``part_text.lua``."""
    return f"{len(text.encode())}:{text}"


def _shard(run_id: RunId) -> int:
    shard = shard_of_run(run_id)
    assert shard is not None, "asked before"
    return shard
