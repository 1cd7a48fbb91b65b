"""The shards of the store: how to send a request to one of them, or to all.

Without a cluster one server has all 64 shards, and one script asks them all. A cluster allows no
script over several slots, so there every shard gets a script of its own, and those of one server go
out in one pipeline. All requests of one verb share one deadline.

``find_due`` finds due timers, outbox rows and expired leases, and changes nothing. A script for
each of them checks again whether it is due before it acts, because other replicas find the same
ones.

**Rounds.** Within a shard the ring in Redis defines the order of tenants. Across shards the order
is defined here: a round takes from each shard as many jobs as the shard has tenants with ready
jobs. So a tenant with one job waits for one job of each other tenant in any shard. Several topics
alternate job by job.

Counting the ready jobs of all shards costs a round trip. So a count is used for the rest of its
round; for a few milliseconds also for the next rounds, if it found enough jobs; and jobs that this
process itself adds to a shard are known without counting.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import cache
from typing import Final, NamedTuple, TypeAlias, TypeVar

from stanchion.adapters.redis.address import ServerLayout
from stanchion.adapters.redis.client import RedisClient, RedisRequest, Script
from stanchion.adapters.redis.connection import Reply
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis.encode import PLACE_CHARS, RUN_ID_CHARS, StoreKeys
from stanchion.core.model import SHARDS, Instant, RunId, TenantId, Topic, shard_of_run
from stanchion.core.transition import DispatchJob, Effect, SetTimer
from stanchion.ports.errors import BackendError

ALL_SHARDS: Final = range(SHARDS)
_OWNERS_MAX: Final = 50_000
_KEPT_MAX: Final = 100
_SKIPPED_WHEN_IDLE: Final = frozenset({"timers", "outbox"})
_WRITES: Final = frozenset(
    {
        *(
            "accept",
            "admit",
            "admit_alike",
            "commit",
            "defer",
            "expire",
            "fire",
            "post",
            "replay",
            "settle",
        ),
        *("take", "delete_tenant", "put_tenant"),  # these two may promote queued runs
    }
)
"""Scripts after which something may be due."""
_IDLE_LOOKS: Final = 25
"""Five seconds of polls: longer than the hold of an outbox row."""
_IDLE_LOOK_EVERY_S: Final = 1.0
_TIMERS_MAX: Final = 10_000
_TEMPLATES_MAX: Final = 2_048
"""Of keys, 1 to 2 KiB each."""
_ANY: Final = "\x01"
"""A letter of a tenant, in a template. No name has such a letter."""
_ANY_RUN: Final = "\x02" * RUN_ID_CHARS


def _has_usual_length(run_id: str) -> bool:
    """Whether an id, which a caller may have sent, has the length of a run id, or is empty."""
    return not run_id or (len(run_id) == RUN_ID_CHARS and run_id.isascii() and run_id.isalnum())


class Shards:
    """Sends requests to shards, and remembers what it learned from them."""

    def __init__(
        self,
        client: RedisClient,
        keys: StoreKeys,
        rounds: Rounds,
        key_ttl_ms: int,
        audit_ttl_ms: int,
        *,
        has_new_formats: bool,
    ) -> None:
        self.client = client
        self.keys = keys
        self.rounds = rounds
        self.key_ttl_ms = key_ttl_ms
        self.audit_ttl_ms = audit_ttl_ms
        self.has_new_formats = has_new_formats
        """Whether items may be written in blocks, and timelines begin in the hash of their run: no
        older process reads this store.
        """
        self._owners: dict[RunId, TenantId] = {}
        self._kept: dict[Hashable, list[RedisRequest]] = {}
        self._templates: dict[tuple[str, int, int, bool], bytes] = {}
        """By script, shard, the length of the tenant, and whether there is a run."""
        self._idle: dict[str, tuple[int, float]] = {}
        """By index: how many polls in a row found nothing, and when the next one is needed."""
        self._timers: list[Instant] = []
        """When the timers that this process set are due, as a heap."""

    def step(
        self,
        name: str,
        shard: int,
        *arguments: str | bytes | int,
        run_id: str = "",
        tenant: str = "",
        more_keys: Sequence[str] = (),
        is_repeatable: bool = True,
    ) -> RedisRequest:
        """A request that runs a script in one shard."""
        if name in _WRITES:
            self.expect_due()
        script = script_of(name)
        if more_keys or not _has_usual_length(run_id):
            keys = self.keys.all_of(script.key_names, shard, run_id=run_id, tenant=tenant)
            packed = script.call([*keys, *more_keys], arguments)
        else:
            packed = self._packed(script, shard, tenant, run_id, arguments)
        return RedisRequest(self.keys.slots[shard], packed, script, is_repeatable)

    def _packed(
        self,
        script: Script,
        shard: int,
        tenant: str,
        run_id: str,
        arguments: Sequence[str | bytes | int],
    ) -> bytes:
        """``Script.call``, with the keys from a template: to pack forty keys takes 10 µs.

        The keys of a script in a shard differ in the run and the tenant alone. Those of the same
        length have the same template.
        """
        whose = tenant.encode()
        name = (script.name, shard, len(whose), run_id != "")
        template = self._templates.get(name)
        if template is None:
            if len(self._templates) >= _TEMPLATES_MAX:
                self._templates.clear()
            run = _ANY_RUN if run_id else ""
            keys = self.keys.all_of(script.key_names, shard, run_id=run, tenant=_ANY * len(whose))
            template = self._templates[name] = script.packed_keys(keys)
        packed = template.replace(_ANY.encode() * len(whose), whose) if whose else template
        if run_id:
            packed = packed.replace(_ANY_RUN.encode(), run_id.encode())
        return script.call_packed(packed, arguments)

    def step_in_time(
        self,
        name: str,
        shard: int,
        arguments: Sequence[str | bytes | int],
        *,
        tenant: str,
        more_keys: Sequence[str],
    ) -> Callable[[Instant], RedisRequest]:
        """A request that writes, by the time limit that is its first argument.

        All else is packed at once.
        """
        script = script_of(name)
        assert name in _WRITES
        keys = self.keys.all_of(script.key_names, shard, tenant=tenant)
        packed = script.call_with([*keys, *more_keys], arguments)

        def make(not_after: Instant) -> RedisRequest:
            self.expect_due()
            return RedisRequest(self.keys.slots[shard], packed(b"%d" % not_after), script)

        return make

    def step_at(
        self,
        name: str,
        slot: int,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        is_repeatable: bool = True,
    ) -> RedisRequest:
        """A request that runs a script on the given keys."""
        script = script_of(name)
        return RedisRequest(slot, script.call(keys, arguments), script, is_repeatable)

    def command(self, shard: int, *words: str | bytes | int) -> RedisRequest:
        """A request for a plain command in one shard."""
        return RedisRequest(self.keys.slots[shard], pack(*words))

    async def ask(self, request: RedisRequest, deadline: float | None = None) -> Reply:
        """The reply to a request."""
        return await self.client.ask(request, deadline=deadline or self.client.deadline())

    async def ask_all(
        self, requests: Sequence[RedisRequest], deadline: float | None = None
    ) -> list[Reply]:
        """The replies to several concurrent requests."""
        return await self.client.ask_all(requests, deadline=deadline or self.client.deadline())

    async def ask_some(
        self, requests: Sequence[RedisRequest], deadline: float
    ) -> list[Reply | BackendError]:
        """Like ``ask_all``, but returns errors in place of replies.

        So one failed server does not affect the others. Raises the first error if none replied.
        """
        return await self.client.ask_some(requests, deadline=deadline)

    async def ask_each(
        self,
        make: Callable[[int], RedisRequest],
        deadline: float | None = None,
        *,
        shards: Iterable[int] = ALL_SHARDS,
    ) -> list[Reply]:
        """The replies of several shards to the same request, in the order of the shards."""
        return await self.ask_all([make(shard) for shard in shards], deadline)

    async def run_on_all(
        self, name: str, keys: Sequence[str], *arguments: str | int, deadline: float
    ) -> list[Reply | BackendError]:
        """Run a script on these keys of every shard; returns one value for each shard.

        The script takes any number of keys and returns one value for each shard. If a server does
        not reply, its error takes the place of the values of its shards. Raises the first error if
        no server replied.
        """
        requests = self._on_all(name, tuple(keys), arguments)
        replies = await self.ask_some(requests, deadline)
        answers: list[Reply | BackendError] = []
        for shards, reply in zip(self._shards_by_request(), replies, strict=True):
            answers += [reply] * len(shards) if isinstance(reply, BackendError) else reply
        return answers

    async def read_all(
        self, command: str, key: str, *arguments: str | int, deadline: float
    ) -> list[Reply]:
        """The reply of every shard to one read command on its key. Raises the first error."""
        answers = await self.run_on_all("each", [key], command, *arguments, deadline=deadline)
        for answer in answers:
            if isinstance(answer, BackendError):
                raise answer
        return answers

    def _on_all(
        self, name: str, keys: tuple[str, ...], arguments: tuple[str | int, ...]
    ) -> list[RedisRequest]:
        """The requests of ``run_on_all``, cached: they are sent several times a second."""
        known = self._kept.get((name, keys, arguments))
        if known is None:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            known = self._kept[name, keys, arguments] = self.steps_on_all(name, keys, *arguments)
        return known

    def steps_on_all(
        self, name: str, keys: Sequence[str], *arguments: str | bytes | int
    ) -> list[RedisRequest]:
        """Requests that run a script on these keys of every shard."""
        return [
            self.step_at(
                name,
                self.keys.slots[shards[0]],
                [self.keys.of_shard(shard, key) for shard in shards for key in keys],
                *arguments,
            )
            for shards in self._shards_by_request()
        ]

    def _shards_by_request(self) -> Sequence[Sequence[int]]:
        """The groups of shards that one script may read together."""
        is_cluster = self.client.topology.target.kind is ServerLayout.CLUSTER
        return [[shard] for shard in ALL_SHARDS] if is_cluster else [ALL_SHARDS]

    def remember(self, run_id: RunId, tenant: TenantId) -> None:
        """Cache the tenant of a run, which never changes."""
        if len(self._owners) >= _OWNERS_MAX:
            self._owners.clear()
        self._owners[run_id] = tenant

    def expect_jobs(self, shard: int, effects: Iterable[Effect]) -> None:
        """Note the ready jobs and timers that these effects have stored."""
        for effect in effects:
            if isinstance(effect, DispatchJob):
                self.rounds.hint(shard, effect.job.topic)
            elif isinstance(effect, SetTimer) and len(self._timers) < _TIMERS_MAX:
                heapq.heappush(self._timers, effect.due)

    def expect_due(self) -> None:
        """Poll again as usual: something may be due."""
        self._idle.clear()

    def can_skip_look(self, index: str) -> bool:
        """Whether a poll of the index can be skipped, because it was empty for long.

        After five seconds of empty polls and without a write by this process, one poll per second
        is enough: other replicas handle what they write. Timers of this process are polled when
        they are due.
        """
        if index not in _SKIPPED_WHEN_IDLE or len(self._timers) >= _TIMERS_MAX:
            return False
        now = asyncio.get_running_loop().time()
        if index == "timers" and self._has_timer_due(now):
            self._idle.clear()
        looks, next_at = self._idle.get(index, (0, 0.0))
        return looks >= _IDLE_LOOKS and now < next_at

    def looked(self, index: str, *, is_empty: bool) -> None:
        """Record the result of a poll of an index."""
        looks, _ = self._idle.get(index, (0, 0.0))
        next_at = asyncio.get_running_loop().time() + _IDLE_LOOK_EVERY_S
        self._idle[index] = (looks + 1 if is_empty else 0, next_at)

    def _has_timer_due(self, now: float) -> bool:
        if not self._timers:
            return False
        try:
            clock = self.client.node_of(self.keys.slots[0]).clock
        except BackendError:
            return True
        is_due = False
        while self._timers and clock.is_known and self._timers[0] <= clock.instant(now):
            heapq.heappop(self._timers)
            is_due = True
        return is_due or not clock.is_known

    async def read_places(
        self,
        index: str,
        prefix: str,
        after: str,
        limit: int,
        shards: Sequence[int],
        deadline: float,
    ) -> list[tuple[str, int]]:
        """Names of a sorted set after ``after``, in order, each without its prefix, and its shard.

        ``limit`` is for each shard.
        """
        low = f"({prefix}{after}" if after else f"[{prefix}"
        high = b"(" + prefix.encode() + b"\xff"
        replies = await self.ask_each(
            lambda shard: self.command(
                shard,
                *("ZRANGEBYLEX", self.keys.of_shard(shard, index), low, high, "LIMIT", 0, limit),
            ),
            deadline,
            shards=shards,
        )
        return sorted(
            (entry.decode().removeprefix(prefix), shard)
            for shard, reply in zip(shards, replies, strict=True)
            for entry in reply
        )

    async def owner_of(self, run_id: RunId, deadline: float | None = None) -> TenantId | None:
        """The tenant of a run; ``None`` if there is no such run."""
        known = self._owners.get(run_id)
        if known is not None:
            return known
        shard = shard_of_run(run_id)
        if shard is None:
            return None
        run = self.keys.of_run(run_id, "run")
        found = await self.ask(self.command(shard, "HGET", run, "whose"), deadline)
        if found is None:
            return None
        tenant = TenantId(found.decode()[PLACE_CHARS:])
        self.remember(run_id, tenant)
        return tenant


class Sharded:
    """A part of the store: methods on the same shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards


@cache
def script_of(name: str) -> Script:
    """A script of the store, read once."""
    return Script.read(__package__, name)


_TENANTS_LOOKED_AT: Final = 32
"""Of each shard, in one look for due timers of tenants in turn."""
_LOOKS_MAX: Final = 32
"""How often one call reads the index, if other replicas acted first."""

_Done = TypeVar("_Done")


class Due(NamedTuple):
    """A member of an index that is due."""

    at: int
    name: str
    shard: int
    tenant: str = ""
    """If it is known."""


async def find_due(shards: Shards, index: str, limit: int, deadline: float) -> list[Due]:
    """At most ``limit`` due members of an index, the earliest of each shard.

    If there are more, shards take turns, and with them the tenants of different shards: thousands
    of one tenant that were due before do not come first.
    """
    if shards.can_skip_look(index):
        return []
    replies = await shards.run_on_all("due", [index], limit, deadline=deadline)
    found = [
        (place, Due(int(at), name.decode(), shard))
        for shard, reply in enumerate(replies)
        if not isinstance(reply, BackendError)
        for place, (name, at) in enumerate(zip(reply[::2], reply[1::2], strict=True))
    ]
    shards.looked(index, is_empty=not found)
    if index == "timers" and len(found) >= limit:
        return await _timers_in_turn(shards, found, limit, deadline)
    if len(found) > limit:
        found = sorted(found)[:limit]
    return sorted(due for _, due in found)


async def _timers_in_turn(
    shards: Shards, found: Sequence[tuple[int, Due]], limit: int, deadline: float
) -> list[Due]:
    """Due timers of tenants in turn: more are due than may be fired at once.

    A quarter are the earliest, ``found``, because processes of earlier versions set timers that
    are in no tenant's list.
    """
    wanted = limit - limit // 4
    replies = await shards.run_on_all(
        "due_turns", ["timer_turns", "timers_of"], wanted, _TENANTS_LOOKED_AT, deadline=deadline
    )
    rank = {shard: rank for rank, shard in enumerate(shards.rounds.turned(ALL_SHARDS))}
    in_turn = [
        (place, turn, rank[shard], Due(int(at), name.decode(), shard, tenant.decode()))
        for shard, reply in enumerate(replies)
        if not isinstance(reply, BackendError)
        for place, turn, at, tenant, name in zip(*[iter(reply)] * 5, strict=True)
    ]
    chosen = [due for *_, due in sorted(in_turn)[:wanted]]
    known = {(due.at, due.name) for due in chosen}
    for _, due in sorted(found):
        if len(chosen) < limit and (due.at, due.name) not in known:
            chosen.append(due)
    return sorted(chosen)


async def act_on_due(
    shards: Shards,
    index: str,
    act: Callable[[Sequence[Due]], Awaitable[list[_Done]]],
    limit: int,
    deadline: float,
    *,
    at_once: int | None = None,
) -> tuple[_Done, ...]:
    """Act on due members until ``limit`` are done or none is left. ``act`` returns its results.

    ``at_once``: how many it gets at a time. If time runs out or a server fails, the results so far
    are returned; the error is raised if there are none.
    """
    done: list[_Done] = []
    size = max(1, at_once or limit)
    with _unless(done):
        for _ in range(_LOOKS_MAX):
            due, before = await find_due(shards, index, limit - len(done), deadline), len(done)
            for first in range(0, len(due), size):
                done += await act(due[first : first + size])
            # Other replicas acted on some of them: then there may be more after these.
            if len(done) - before >= len(due):
                break
    return tuple(done)


@contextmanager
def _unless(done: Sequence[object]) -> Iterator[None]:
    """Let an error pass if something is done already."""
    try:
        yield
    except BackendError:
        if not done:
            raise


Shares: TypeAlias = Mapping[int, Mapping[Topic, int]]
"""By shard, the number of jobs to take of each topic."""

_FRESH_S: Final = 0.005
_TOPICS_MAX: Final = 10_000


class ReadyCount(NamedTuple):
    """The ready jobs of one shard for one topic."""

    tenants: int
    jobs: int


class Rounds:
    """The order of shards, and the number of jobs of each. Shared by all callers of a store."""

    def __init__(self, first_shard: int) -> None:
        """Start with ``first_shard``, which is random so that replicas differ."""
        self._first_shard = first_shard
        self._topics: dict[Topic, _Round] = {}
        self._served: dict[Topic, int] = {}
        self._turn = 0
        self._turned = first_shard

    def knows(self, topics: Collection[Topic], wanted: int, at: float) -> bool:
        """Whether ``wanted`` jobs are known at the moment ``at``, without another count."""
        rounds = [self._topics[topic] for topic in topics if topic in self._topics]
        if wanted <= sum(each.turns_left for each in rounds):
            return True
        fresh = [each for each in rounds if at - each.looked_at < _FRESH_S]
        return len(fresh) == len(topics) and wanted <= sum(each.jobs for each in fresh)

    def learn(self, topic: Topic, waiting: Mapping[int, ReadyCount], at: float) -> None:
        """Take over a new count, by shard."""
        if topic not in self._topics:
            if len(self._topics) >= _TOPICS_MAX:
                self._topics.clear()
                self._served.clear()
            self._topics[topic] = _Round(self._first_shard)
        self._topics[topic].learn(waiting, at)

    def hint(self, shard: int, topic: Topic) -> None:
        """Record that this process has added a job to the shard."""
        if topic in self._topics:
            self._topics[topic].hint(shard)

    def take(self, topics: Collection[Topic], wanted: int) -> Shares:
        """The shards and topics from which to take ``wanted`` jobs, with the number of each."""
        taken: dict[int, dict[Topic, int]] = {}
        for _ in range(wanted):
            some = [topic for topic in topics if topic in self._topics and self._topics[topic].jobs]
            if not some:
                break
            topic = self.in_turn(some)[0]
            self.served(topic)
            of_shard = taken.setdefault(self._topics[topic].take(), {})
            of_shard[topic] = of_shard.get(topic, 0) + 1
        return taken

    def turned(self, shards: Sequence[int]) -> list[int]:
        """The shards, each time from another one on."""
        self._turned += 1
        first = self._turned % max(1, len(shards))
        return [*shards[first:], *shards[:first]]

    def in_turn(self, topics: Collection[Topic]) -> list[Topic]:
        """The topics, with the one served longest ago first."""
        return sorted(topics, key=lambda topic: (self._served.get(topic, 0), topic))

    def served(self, topic: Topic) -> None:
        """Record that a job of this topic is taken."""
        self._turn += 1
        self._served[topic] = self._turn


class _Round:
    """The current round of one topic."""

    def __init__(self, first_shard: int) -> None:
        self.looked_at = 0.0
        self.jobs = 0
        """The number of known ready jobs, by shard."""
        self.turns_left = 0
        """The number of jobs in a round, by shard."""
        self._next_shard = first_shard
        self._waiting: dict[int, ReadyCount] = {}
        self._turns: deque[tuple[int, int]] = deque()
        """Shards that are still to be served in this round, with their number of jobs."""
        self._seen: set[int] = set()
        """All shards of this round, served or not."""

    def learn(self, waiting: Mapping[int, ReadyCount], at: float) -> None:
        self.looked_at = at
        self._waiting = {shard: each for shard, each in waiting.items() if each.jobs > 0}
        self.jobs = sum(each.jobs for each in self._waiting.values())
        self._turns = deque(
            (shard, min(turns, self._waiting[shard].jobs))
            for shard, turns in self._turns
            if shard in self._waiting
        )
        self.turns_left = sum(turns for _, turns in self._turns)
        if not self._waiting:
            self._seen.clear()  # no ready jobs: the next one begins a new round
        self._join([shard for shard in self._in_order() if shard not in self._seen])

    def hint(self, shard: int) -> None:
        known = self._waiting.get(shard)
        self._waiting[shard] = (
            ReadyCount(1, 1) if known is None else ReadyCount(known[0], known[1] + 1)
        )
        self.jobs += 1
        if shard not in self._seen:
            self._join([shard])

    def take(self) -> int:
        """The next shard. Requires a known ready job."""
        if not self._turns:
            self._seen.clear()
            self._join(self._in_order())
        shard, turns = self._turns.popleft()
        self.turns_left -= 1
        self.jobs -= 1
        self._next_shard = shard + 1
        tenants, jobs = self._waiting.pop(shard)
        if jobs > 1:
            self._waiting[shard] = ReadyCount(tenants, jobs - 1)
        if turns > 1:
            self._turns.appendleft((shard, turns - 1))
        return shard

    def _join(self, shards: Collection[int]) -> None:
        for shard in shards:
            each = self._waiting[shard]
            turns = max(1, min(each.tenants, each.jobs))
            self._turns.append((shard, turns))
            self._seen.add(shard)
            self.turns_left += turns

    def _in_order(self) -> list[int]:
        """The shards with ready jobs, starting after the one that was served last."""
        shards = sorted(self._waiting)
        ahead = [shard for shard in shards if shard >= self._next_shard]
        return ahead + [shard for shard in shards if shard < self._next_shard]
