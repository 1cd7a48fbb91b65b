"""The ready index: jobs that wait for a worker, and whose turn it is.

Every topic has a ring of tenants. The tenant at its head gives its oldest job and goes to the tail,
so whoever has one job waits for one job of each other tenant, however many those have. Among topics
the one that was served longest ago comes first.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from stanchion.core.model import Job, JobId, TenantId, Topic

__all__ = ["ReadyIndex"]


class ReadyIndex:
    """Dictionaries keep the order in which keys were added: as queues, they allow removal too."""

    def __init__(self) -> None:
        self._rings: dict[Topic, dict[TenantId, dict[JobId, None]]] = {}
        self._served: dict[Topic, int] = {}
        self._turns = count(1)

    def add(self, job: Job) -> None:
        """Put the job at the tail of its tenant's queue."""
        self._rings.setdefault(job.topic, {}).setdefault(job.tenant, {})[job.id] = None

    def remove(self, job: Job) -> None:
        """Take the job out, wherever it stands; nothing, if it is not there."""
        queue = self._rings.get(job.topic, {}).get(job.tenant)
        if queue is not None and job.id in queue:
            del queue[job.id]
            self._tidy(job.topic, job.tenant)

    def take(self, topics: Collection[Topic], tenant: TenantId | None = None) -> JobId | None:
        """The job whose turn it is, taken out; ``None`` if nothing is ready."""
        for topic in sorted(set(topics), key=lambda topic: (self._served.get(topic, 0), topic)):
            ring = self._rings.get(topic, {})
            whose = next(iter(ring), None) if tenant is None else tenant
            if whose is None or whose not in ring:
                continue
            queue = ring.pop(whose)
            job_id = next(iter(queue))
            del queue[job_id]
            ring[whose] = queue
            self._served[topic] = next(self._turns)
            self._tidy(topic, whose)
            return job_id
        return None

    def counts(self) -> dict[Topic, int]:
        """How many jobs are ready, by topic."""
        return {topic: sum(map(len, ring.values())) for topic, ring in self._rings.items()}

    def _tidy(self, topic: Topic, tenant: TenantId) -> None:
        ring = self._rings[topic]
        if not ring[tenant]:
            del ring[tenant]
        if not ring:
            del self._rings[topic]
