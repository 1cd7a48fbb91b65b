"""Operations on jobs: hand out, hold, answer, let expire."""

from __future__ import annotations

import dataclasses
from typing import Literal, assert_never

import msgspec
from msgspec.structs import replace

from stanchion.core.model import Failure, JobId
from stanchion.ports.records import JobLease, LeasedJob, Renewals, Result
from tests.model.call import LONG_MS, SHORT_MS, Call, Domain
from tests.model.side import BOGUS, Grant, Side
from tests.model.world import World

__all__ = ["Accept", "Answer", "Expire", "Lease", "Renew", "ViewJob"]

_WORKER = "worker"


class Lease(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Lease jobs of one tenant and topic: their order is first in, first out."""

    queue: int
    max_jobs: int = 1
    is_short: bool = False

    async def bind(self, world: World) -> Call:
        tenant, topic = world.queue(self.queue)
        # Two terms that end at the same instant could end in either order.
        max_jobs, ttl_ms = (1, SHORT_MS) if self.is_short else (self.max_jobs, LONG_MS)
        return Call(
            f"{self} [{tenant} {topic}]",
            lambda side: side.store.lease_jobs(
                _WORKER, [topic], max_jobs=max_jobs, ttl_ms=ttl_ms, tenant=tenant
            ),
            _leased,
            sets=Domain.LEASES if self.is_short else None,
            teaches=True,
        )


class Renew(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Renew leases, old ones too."""

    grants: tuple[int, ...]
    is_short: bool = False

    async def bind(self, world: World) -> Call:
        picked = [world.grant(pick) for pick in world.together(self.grants)]
        # The same job twice in one question: whether the second renewal counts is left open.
        grants = list({grant.job_id: grant for grant in picked}.values())
        if self.is_short:
            return _renew(str(self), grants[:1], SHORT_MS)
        parts = [_renew(f"{self}[{n}]", [grant], LONG_MS) for n, grant in enumerate(grants)]
        return dataclasses.replace(_renew(str(self), grants, LONG_MS), parts=parts)


class Answer(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """One result: for a grant, or for a fence or a job that never was."""

    grant: int
    how: Literal["succeeded", "failed", "final"] = "succeeded"
    whose: Literal["holder", "nobody", "unknown job"] = "holder"

    def result(self, world: World) -> tuple[Grant, Result]:
        grant = world.grant(self.grant)
        job_id = JobId(f"{grant.job_id}0") if self.whose == "unknown job" else grant.job_id
        result = Result(job_id=job_id, fence=0, worker_id=_WORKER)
        chosen = grant if self.whose == "holder" else BOGUS
        match self.how:
            case "succeeded":
                return chosen, replace(result, output={"n": [1, 2.5, None]})
            case "failed" | "final":
                failure = Failure("broken", "it broke")
                return chosen, replace(result, error=failure, final=self.how == "final")
            case _:
                assert_never(self.how)


class Accept(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Hand in results: the store takes each on its own."""

    answers: tuple[Answer, ...]
    is_later: bool = False

    async def bind(self, world: World) -> Call:
        results = [answer.result(world) for answer in world.together(self.answers)]
        due_in_ms = LONG_MS if self.is_later else 0
        text = f"{self} [{', '.join(f'{grant.job_id} {grant}' for grant, _ in results)}]"
        parts = [
            _accept(f"{text}[{number}]", [result], due_in_ms)
            for number, result in enumerate(results)
        ]
        return dataclasses.replace(_accept(text, results, due_in_ms), parts=parts)


class Expire(msgspec.Struct, frozen=True, kw_only=True):
    """End the leases that have run out."""

    max_deliveries: int

    async def bind(self, world: World) -> Call:
        return dataclasses.replace(
            self._call(str(self), 1_000),
            part=None if world.has_steps else self._call(f"{self} once", 1),
            is_alone=world.is_spread,
        )

    def _call(self, text: str, limit: int) -> Call:
        return Call(
            text,
            lambda side: side.store.expire_jobs(limit=limit, max_deliveries=self.max_deliveries),
            sees=Domain.LEASES,
        )


class ViewJob(msgspec.Struct, frozen=True, kw_only=True):
    """Look at a job."""

    grant: int

    async def bind(self, world: World) -> Call:
        job_id = world.grant(self.grant).job_id
        return Call(f"{self} [{job_id}]", lambda side: side.store.job(job_id), Side.job)


def _leased(side: Side, leased: tuple[LeasedJob, ...]) -> object:
    return tuple(map(side.leased, leased))


def _renew(text: str, grants: list[Grant], ttl_ms: int) -> Call:
    def one_each(_: Side, renewals: Renewals) -> object:
        assert len(renewals.renewed) + len(renewals.lost) == len(grants)
        return tuple((grant.job_id, grant.job_id in renewals.renewed) for grant in grants)

    return Call(
        text,
        lambda side: side.store.renew_jobs(
            [JobLease(grant.job_id, side.fence(grant)) for grant in grants], ttl_ms=ttl_ms
        ),
        one_each,
        sets=Domain.LEASES if ttl_ms == SHORT_MS else None,
        sees=Domain.LEASES,
    )


def _accept(text: str, results: list[tuple[Grant, Result]], due_in_ms: int) -> Call:
    return Call(
        text,
        lambda side: side.store.accept(
            [replace(result, fence=side.fence(grant)) for grant, result in results],
            row_due_in_ms=due_in_ms,
        ),
    )
