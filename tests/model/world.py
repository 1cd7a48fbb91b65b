"""The world of one example: what an operation looks at when it chooses whom and what to ask."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final, Protocol, TypeVar

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.memory.state import JobFile, MemoryState
from stanchion.core.model import Instant, RunId, TenantId, Topic, make_run_id, shard_of_tenant
from stanchion.ports.records import Commit, JobState, Loaded, OutboxRow
from tests.contract.harness import Harness
from tests.model.call import LONG_MS, Call
from tests.model.pair import Pair
from tests.model.plans import TOPICS
from tests.model.side import Grant

__all__ = ["Operation", "World", "tenants"]

_TENANTS: Final = 3
_Each = TypeVar("_Each")


def tenants(*, together: bool) -> tuple[TenantId, ...]:
    """Tenants of one shard, or each of another one."""
    chosen: list[TenantId] = []
    for number in count():
        name = TenantId(f"tenant-{number}")
        is_known = shard_of_tenant(name) in map(shard_of_tenant, chosen)
        if not chosen or is_known == together:
            chosen.append(name)
        if len(chosen) == _TENANTS:
            break
    return tuple(chosen)


class Operation(Protocol):
    """What somebody wants to do, in words that do not depend on what there is."""

    async def bind(self, world: World) -> Call:
        """Choose whom and what to ask, by the state of the model."""


class World:
    """A pair of stores, and all that was ever asked of them."""

    def __init__(
        self, harness: Harness, now: Instant, names: Sequence[TenantId], key_ttl_ms: int
    ) -> None:
        self.tenants = names
        self.has_steps = harness.name in {"memory", "sqlite"}
        """Whether every verb is one step. On a server, a sweep is one step per thing it finds."""
        self.is_spread = not self.has_steps and len(set(map(shard_of_tenant, names))) > 1
        """Whether tenants are in different shards, where it matters."""
        self.keys_are_short = key_ttl_ms < LONG_MS
        self.began_at = now
        self.pair = Pair(harness, now, key_ttl_ms)
        self.runs: list[RunId] = []
        self.commits: dict[RunId, Commit] = {}
        """The last one that was decided on, for each run: applied names are common names."""
        self.calls: list[Call] = []
        self._numbers = count(1)

    async def perform(self, *operations: Operation) -> None:
        """Decide on all of them by what is known now, then send them at once."""
        first = len(self.calls)
        for operation in operations:
            self.calls.append(await operation.bind(self))
        await self.pair.send(self.calls[first:])

    def number(self) -> int:
        """A number that was not used before."""
        return next(self._numbers)

    def instant(self, *, past: bool = False) -> Instant:
        """A time to decide at, no two the same; two hours ago if timers should be due."""
        return Instant(self.began_at - (7_200_000 if past else 0) + self.number())

    def new_run_id(self, tenant: TenantId) -> RunId:
        self.runs.append(make_run_id(tenant, self.began_at, self.number()))
        return self.runs[-1]

    # ── Choosing ─────────────────────────────────────────────────────────────────────────────────
    # A pick of 0 is the thing that most is likely to happen to, higher ones are less so, and one
    # that is too high means something that never was.

    def run_id(self, pick: int) -> RunId:
        """A run: with something in its inbox, unfinished, any, and at last one that never began."""
        files = self._state.runs
        nobody = make_run_id(self.tenants[0], self.began_at, 0)

        def interest(run_id: RunId) -> int:
            file = files.get(run_id)
            return 0 if file is None else 3 if file.inbox else 1 if file.is_closed else 2

        return _pick([nobody, *sorted(self.runs, key=interest)], pick)

    def grant(self, pick: int) -> Grant:
        """A grant: one that stands, then any that was ever given."""
        files = self._state.jobs

        def interest(grant: Grant) -> bool:
            file = files.get(grant.job_id)
            return file is not None and file.state is JobState.LEASED

        return _pick(sorted(self.pair.subject.grants, key=interest), pick)

    def queue(self, pick: int) -> tuple[TenantId, Topic]:
        """A tenant and a topic: with ready jobs, then any."""
        every = [(tenant, topic) for tenant in self.tenants for topic in TOPICS]
        ready = [file.job for file in self.jobs(JobState.READY)]
        return _pick([*every, *dict.fromkeys((job.tenant, job.topic) for job in ready)], pick)

    def row(self, pick: int) -> OutboxRow:
        """An outbox row that was taken at some time."""
        nobody = OutboxRow(self.run_id(len(self.runs)), self.tenants[0], 1)
        return _pick([nobody, *self.pair.subject.rows], pick)

    def together(self, parts: Sequence[_Each]) -> Sequence[_Each]:
        """As many parts of one call as are sure to be done in their order."""
        return parts[:1] if self.is_spread else parts

    # ── Looking, without asking the store ────────────────────────────────────────────────────────

    @property
    def model(self) -> MemoryStore:
        store = self.pair.model.store
        assert isinstance(store, MemoryStore)
        return store

    async def load(self, run_id: RunId) -> Loaded | None:
        """The run as the model has it, in common words."""
        return self.pair.model.loaded(await self.model.load(run_id))

    def jobs(self, state: JobState) -> list[JobFile]:
        """The jobs that are in this state."""
        return [file for file in self._state.jobs.values() if file.state is state]

    @property
    def unfinished(self) -> int:
        """How many runs have not ended."""
        return sum(not file.is_closed for file in self._state.runs.values())

    @property
    def with_mail(self) -> int:
        """How many runs have something in their inbox."""
        return sum(bool(file.inbox) for file in self._state.runs.values())

    @property
    def timers_due(self) -> int:
        """How many timers are due."""
        files, now = self._state.runs.values(), self.pair.now
        return sum(due <= now for file in files for due in file.timers.values())

    @property
    def letters(self) -> int:
        """How many dead letters there are."""
        return len(self._state.letters)

    @property
    def _state(self) -> MemoryState:
        return self.model._state  # noqa: SLF001 - the model's insides are known: that is its use


def _pick(known: Sequence[_Each], pick: int) -> _Each:
    """The last for 0, the one before it for 1, and so on down to the first."""
    return known[max(0, len(known) - 1 - pick)]
