"""In which order the shards hand out jobs, so that tenants in all shards take turns.

Within a shard the ring in Redis says whose turn it is. Across shards the turns are taken here: a
round takes from each shard as many jobs as the shard has tenants with ready jobs. So a tenant with
one job waits for one job of each other tenant, whatever their shards. Several topics take turns
job by job.

Counting the ready jobs of all shards costs a round trip. So a count is used for the rest of its
round; for a few milliseconds also for the next rounds, if it found enough jobs; and jobs that this
process itself adds to a shard are known without counting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from stanchion.core.model import Topic

__all__ = ["ReadyCount", "Rounds", "Shares"]

Shares: TypeAlias = Mapping[int, Mapping[Topic, int]]
"""By shard, how many jobs of which topic to take from it."""

_FRESH_S: Final = 0.005
_TOPICS_MAX: Final = 10_000


class ReadyCount(NamedTuple):
    """What waits in one shard for one topic."""

    tenants: int
    jobs: int


class Rounds:
    """Who is to give how many jobs next. Shared by all callers of one store."""

    def __init__(self, first_shard: int) -> None:
        """Begin anywhere, so that replicas do not move in step."""
        self._first_shard = first_shard
        self._topics: dict[Topic, _Round] = {}
        self._served: dict[Topic, int] = {}
        self._turn = 0

    def knows(self, topics: Collection[Topic], wanted: int, at: float) -> bool:
        """Whether so many jobs can be had, at the moment ``at``, without looking again."""
        rounds = [self._topics[topic] for topic in topics if topic in self._topics]
        if wanted <= sum(each.turns_left for each in rounds):
            return True
        fresh = [each for each in rounds if at - each.looked_at < _FRESH_S]
        return len(fresh) == len(topics) and wanted <= sum(each.jobs for each in fresh)

    def learn(self, topic: Topic, waiting: Mapping[int, ReadyCount], at: float) -> None:
        """This is what waits now, by shard."""
        if topic not in self._topics:
            if len(self._topics) >= _TOPICS_MAX:
                self._topics.clear()
                self._served.clear()
            self._topics[topic] = _Round(self._first_shard)
        self._topics[topic].learn(waiting, at)

    def hint(self, shard: int, topic: Topic) -> None:
        """A job has just been put into this shard."""
        if topic in self._topics:
            self._topics[topic].hint(shard)

    def take(self, topics: Collection[Topic], wanted: int) -> Shares:
        """From which shard to take how many jobs of which topic; in all, as many as are wanted."""
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

    def in_turn(self, topics: Collection[Topic]) -> list[Topic]:
        """The one that was served longest ago comes first."""
        return sorted(topics, key=lambda topic: (self._served.get(topic, 0), topic))

    def served(self, topic: Topic) -> None:
        """A job of this topic has its turn."""
        self._turn += 1
        self._served[topic] = self._turn


class _Round:
    """One topic's present round."""

    def __init__(self, first_shard: int) -> None:
        self.looked_at = 0.0
        self.jobs = 0
        """How many are known to wait."""
        self.turns_left = 0
        """How many of them have their turn in this round."""
        self._next_shard = first_shard
        self._waiting: dict[int, ReadyCount] = {}
        self._turns: deque[tuple[int, int]] = deque()
        """Shards that have not had their turn in this round, and how many jobs they give in it."""
        self._seen: set[int] = set()
        """Those that are in this round or were."""

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
            self._seen.clear()  # nobody waits: whoever comes next begins a new round
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
        """The shard whose turn it is. Something must be known to wait."""
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
        """The shards where something waits, beginning behind the one that was served last."""
        shards = sorted(self._waiting)
        ahead = [shard for shard in shards if shard >= self._next_shard]
        return ahead + [shard for shard in shards if shard < self._next_shard]
