"""Topic limits: never more leases than the limit, no place lost for long, nobody else held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from stanchion.core.audit import AuditEntry
from stanchion.core.model import Instant, TenantId, Topic
from stanchion.core.topic_limits import LimitScope, TokenPool, TopicLimit, token_ttl_ms
from stanchion.core.workflow import ForEachSpec
from stanchion.ports.records import JobLease, LeasedJob, Renewals
from stanchion.services.engine import Terms
from stanchion.services.scheduler import JobBatch
from tests.services.faulty_locks import Fault
from tests.services.stage import ACME, GLOBEX, Replica, World, job, virtual, workflow

TTL_MS: Final = 6_000
TERMS: Final = Terms(job_lease_ttl_ms=TTL_MS)
ONE: Final = workflow("one", step=job("llm.chat"))
OTHER: Final = workflow("other", step=job("mail"))
FAN: Final = workflow(
    "fan", each=ForEachSpec(for_each="${input.items}", topic=Topic("llm.chat"), input="${item}")
)
LLM: Final = TopicLimit(id="llm", topics=("llm.*",), max_running=3)
TENANTS: Final = (ACME, GLOBEX, TenantId("hooli"))


async def _set(replica: Replica, *limits: TopicLimit) -> None:
    for limit in limits:
        entry = AuditEntry(at=Instant(0), actor="admin", action="limit.put", subject=limit.id)
        await replica.services.limits.put(limit, entry)
    await asyncio.sleep(0.1)


async def _fan(world: World, replica: Replica, count: int, tenant: TenantId = ACME) -> None:
    await world.define(FAN, ONE, OTHER, tenant=tenant)
    await world.start(replica, "fan", {"items": [*range(count)]}, tenant=tenant)
    await asyncio.sleep(0.1)


def _poll(
    replica: Replica,
    *topics: str,
    max_jobs: int = 1,
    wait_s: float = 60,
    tenant: TenantId | None = None,
) -> asyncio.Task[JobBatch]:
    return asyncio.create_task(
        replica.scheduler.lease(
            "worker",
            [Topic(topic) for topic in topics or ("llm.chat",)],
            max_jobs=max_jobs,
            wait_s=wait_s,
            tenant=tenant,
        )
    )


async def _lease(replica: Replica, *topics: str, max_jobs: int = 1) -> tuple[LeasedJob, ...]:
    return (await _poll(replica, *topics, max_jobs=max_jobs, wait_s=0)).jobs


async def _finish(world: World, replica: Replica, *jobs: LeasedJob) -> None:
    await world.report(replica, *jobs)
    await replica.scheduler.finished("worker", _held(jobs))


def _held(jobs: Sequence[LeasedJob]) -> list[JobLease]:
    return [JobLease(each.job.id, each.fence) for each in jobs]


async def _running(world: World, limit: TopicLimit = LLM, tenant: TenantId = ACME) -> int:
    (use,) = await world.store.pool_uses([limit.pool(tenant)])
    return use.running


def _shown(replica: Replica, metric: str) -> list[str]:
    """The limits for which the replica shows a metric."""
    return [
        each.labels["limit"]
        for family in replica.services.registry.collect()
        for each in family.samples
        if each.name == metric
    ]


@asynccontextmanager
async def _renewed(replica: Replica, jobs: Sequence[LeasedJob]) -> AsyncIterator[None]:
    """Renew leases at a third of the term during the body."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(TTL_MS / 3_000)
            answer = await replica.scheduler.renew("worker", _held(jobs))
            assert len(answer.renewed) == len(jobs)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()


# ── Never more than the limit ────────────────────────────────────────────────────────────────────


@virtual
async def test_twenty_workers_at_two_replicas_have_three_jobs_at_once(world: World) -> None:
    replicas = [world.add(terms=TERMS), world.add(terms=TERMS)]
    await _set(replicas[0], LLM)
    await _fan(world, replicas[0], 40)
    running, highest, done = 0, 0, 0
    is_done = asyncio.Event()

    async def work(number: int) -> None:
        nonlocal running, highest, done
        while True:
            # Leased at one replica, and the result is sent to the other.
            handed = await _poll(replicas[number % 2])
            if not handed.jobs:
                return
            running += 1
            highest = max(highest, running)
            await asyncio.sleep(0.2)
            running -= 1
            done += 1
            await _finish(world, replicas[(number + done) % 2], *handed.jobs)
            if done == 40:
                is_done.set()

    began = world.clock.moment()
    workers = [asyncio.create_task(work(number)) for number in range(20)]
    await is_done.wait()
    assert highest == 3
    # 40 jobs, 3 at a time, 0.2 s each: no place idles for long.
    assert world.clock.moment() - began < 1.25 * 40 / 3 * 200
    await asyncio.sleep(0.1)
    assert await _running(world) == 0
    for worker in workers:
        worker.cancel()


@virtual
async def test_a_rate_is_kept_and_used(world: World) -> None:
    replicas = [world.add(terms=TERMS), world.add(terms=TERMS)]
    await _set(replicas[0], TopicLimit(id="quota", topics=("llm.chat",), rate_per_s=5.0))
    await _fan(world, replicas[0], 30)
    began, leased_at = world.clock.moment(), list[int]()

    async def work(number: int) -> None:
        while len(leased_at) < 30:
            handed = await _poll(replicas[number % 2], wait_s=5)
            leased_at.extend([world.clock.moment() - began] * len(handed.jobs))
            await _finish(world, replicas[number % 2], *handed.jobs)

    await asyncio.gather(*(work(number) for number in range(6)))
    for place, at in enumerate(leased_at):
        assert place + 1 <= 5 + 5 * at / 1000 + 0.01
    # 5 at once, then one every 0.2 s.
    assert leased_at[-1] <= 25 * 200 + 500


@virtual
async def test_a_limit_of_each_tenant_holds_back_nobody_else(world: World) -> None:
    replica = world.add(terms=TERMS)
    limit = TopicLimit(id="each", topics=("llm.*",), per=LimitScope.TENANT, max_running=2)
    await _set(replica, limit)
    for tenant in TENANTS:
        await _fan(world, replica, 5, tenant)
    jobs = await _lease(replica, max_jobs=20)
    whose = sorted(each.job.tenant for each in jobs)
    assert whose == sorted(TENANTS * 2)
    assert await _lease(replica, max_jobs=20) == ()
    freed = next(each for each in jobs if each.job.tenant == GLOBEX)
    poll = _poll(replica, max_jobs=20, tenant=GLOBEX)
    await _finish(world, replica, freed)
    assert [each.job.tenant for each in (await poll).jobs] == [GLOBEX]


@virtual
async def test_several_limits_are_all_kept(world: World) -> None:
    replica = world.add(terms=TERMS)
    own = TopicLimit(id="own", topics=("llm.*",), per=LimitScope.TENANT, max_running=3)
    await _set(replica, own, TopicLimit(id="all", topics=("llm.chat",), max_running=4))
    for tenant in TENANTS[:2]:
        await _fan(world, replica, 5, tenant)
    # The tenants ask at the same time: one may take what it cannot use, and gives it back.
    jobs = [*await _lease(replica, max_jobs=20), *await _lease(replica, max_jobs=20)]
    assert len(jobs) == 4
    shared = TopicLimit(id="all", topics=(), max_running=4)
    await asyncio.sleep(0.1)
    # What a limit did not need because of another one was given back.
    uses = [await _running(world, own, tenant) for tenant in TENANTS[:2]]
    assert (await _running(world, shared), sum(uses)) == (4, 4)


@virtual
async def test_a_tenant_that_one_limit_holds_back_has_the_jobs_of_another(world: World) -> None:
    replica = world.add(terms=TERMS)
    chat = TopicLimit(id="chat", topics=("llm.*",), per=LimitScope.TENANT, max_running=1)
    mail = TopicLimit(id="mail", topics=("mail",), per=LimitScope.TENANT, max_running=2)
    await _set(replica, chat, mail)
    for tenant in TENANTS[:2]:
        await _fan(world, replica, 2, tenant)
        await world.start(replica, "other", tenant=tenant)
    assert len(await _lease(replica, max_jobs=20)) == 2
    assert await _lease(replica, max_jobs=20) == ()
    asked = replica.store.calls["pool_uses"]
    found = await _lease(replica, "mail", max_jobs=20)
    assert sorted(each.job.tenant for each in found) == sorted(TENANTS[:2])
    # Those that a limit is known to hold back are not looked at.
    assert await _lease(replica, max_jobs=20) == ()
    assert replica.store.calls["pool_uses"] - asked <= 2


# ── Others are not held up ───────────────────────────────────────────────────────────────────────


@virtual
async def test_a_worker_of_two_topics_gets_the_other_one(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    assert len(await _lease(replica, max_jobs=5)) == 3
    await world.start(replica, "other")
    for topics in (("llm.chat", "mail"), ("mail", "llm.chat")):
        (found,) = await _lease(replica, *topics, max_jobs=5)
        assert found.job.topic == "mail"
        await _finish(world, replica, found)
        await world.start(replica, "other")


@virtual
async def test_a_lease_of_another_topic_is_the_same_one_step_as_ever(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 1_000)
    assert len(await _lease(replica, max_jobs=5)) == 3
    polls = [_poll(replica) for _ in range(20)]
    for _ in range(10):
        await world.start(replica, "other")
    await asyncio.sleep(0.5)
    before = replica.store.calls.copy()
    for _ in range(10):
        assert len(await _lease(replica, "mail")) == 1
    asked = replica.store.calls - before
    assert asked["lease_jobs"] == 10
    assert {"take_tokens", "ready_tenants", "pool_uses"}.isdisjoint(asked)
    assert asked["list_documents"] <= 1, "limits are read once a second, not for each lease"
    for poll in polls:
        poll.cancel()


@virtual
async def test_workers_that_wait_for_room_do_not_ask_the_store(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 100)
    jobs = await _lease(replica, max_jobs=5)
    polls = [_poll(replica) for _ in range(50)]
    await asyncio.sleep(0.5)
    async with _renewed(replica, jobs):
        before = replica.store.calls.copy()
        await asyncio.sleep(10)
        asked = replica.store.calls - before
        assert asked["take_tokens"] <= 25
        assert asked["ready_tenants"] <= 25
        assert asked["lease_jobs"] == 0
    for poll in polls:
        poll.cancel()


@virtual
async def test_a_worker_at_another_replica_is_woken_by_a_result(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await _set(one, LLM)
    await _fan(world, one, 10)
    jobs = await _lease(one, max_jobs=3)
    poll = _poll(two)
    await asyncio.sleep(3.3)
    began = world.clock.moment()
    await _finish(world, one, jobs[0])
    assert len((await poll).jobs) == 1
    assert world.clock.moment() - began < 50


@virtual
async def test_topics_without_a_limit_go_on_while_limits_cannot_be_read_or_asked(
    world: World,
) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 5)
    for _ in range(4):
        await world.start(replica, "other")
    verbs = ("list_documents", "ready_tenants", "take_tokens")
    replica.store.always(Fault.ERROR, *verbs)
    await asyncio.sleep(5)
    for topics in (("llm.chat", "mail"), ("mail", "llm.chat")) * 2:
        (found,) = await _lease(replica, *topics)
        assert found.job.topic == "mail"
    replica.store.always(Fault.NONE, *verbs)
    assert len(await _lease(replica, max_jobs=5)) == 3


@virtual
async def test_limits_that_cannot_be_read_are_not_read_again_for_a_second(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 5)
    replica.store.always(Fault.ERROR, "list_documents")
    await asyncio.sleep(5.3)

    async def reads() -> int:
        before = replica.store.calls["list_documents"]
        await _lease(replica, "mail")
        return replica.store.calls["list_documents"] - before

    sent_at = world.clock.moment()
    assert await reads() == 1
    failed_at = sent_at + 1  # a millisecond each way, and an error comes from half way
    assert await reads() == 0
    await asyncio.sleep((failed_at + 1_000.2 - world.clock.moment()) / 1_000)
    assert await reads() == 0
    assert await reads() == 1


@virtual
async def test_the_jobs_of_other_tenants_are_handed_out_if_one_tenant_fails(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(
        replica, TopicLimit(id="each", topics=("llm.*",), per=LimitScope.TENANT, max_running=2)
    )
    for tenant in TENANTS:
        await _fan(world, replica, 5, tenant)
    replica.store.script("take_tokens", Fault.ERROR)
    jobs = await _lease(replica, max_jobs=20)
    assert len(jobs) == 4
    assert len({each.job.tenant for each in jobs}) == 2


@virtual
async def test_a_limit_of_nothing_says_what_makes_room(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, TopicLimit(id="stop", topics=("llm.*",), max_running=0, rate_per_s=5))
    (reached,) = (await replica.services.limits.reached([Topic("llm.chat")], ACME)).values()
    assert (reached.rule, reached.frees) == ("max_running is 0", "a higher max_running")


# ── No place is lost ─────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_dead_worker_gives_its_place_back_within_the_term(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    dead, *alive = await _lease(replica, max_jobs=3)
    began = world.clock.moment()
    async with _renewed(replica, alive):
        (found,) = (await _poll(replica)).jobs
        waited_ms = world.clock.moment() - began
    assert found.job.id != alive[0].job.id
    assert TTL_MS < waited_ms <= token_ttl_ms(TTL_MS) + 2_000
    assert dead.expires_at <= world.clock.now()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_REPLY])
@pytest.mark.parametrize("verb", ["take_tokens", "lease_jobs", "renew_tokens"])
@virtual
async def test_a_step_that_fails_costs_no_place_for_longer_than_a_term(
    world: World, verb: str, fault: Fault
) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    replica.store.script(verb, fault)
    try:
        first = await _lease(replica, max_jobs=3)
    except Exception:  # noqa: BLE001 - the worker asks again
        first = ()
    assert len(first) == (3 if verb == "renew_tokens" else 0)
    await asyncio.sleep(0.1)
    await _finish(world, replica, *first)
    if verb == "lease_jobs":
        assert await _running(world) == 3  # perhaps they were leased
        await asyncio.sleep(token_ttl_ms(TTL_MS) / 1000)
    assert await _running(world) == 0
    assert len(await _lease(replica, max_jobs=5)) == 3


@virtual
async def test_a_token_that_was_not_renamed_is_renewed_with_its_lease(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    replica.store.script("renew_tokens", Fault.ERROR)
    jobs = await _lease(replica, max_jobs=3)
    async with _renewed(replica, jobs):
        await asyncio.sleep(3 * TTL_MS / 1000)
        assert await _running(world) == 3
        assert await _lease(replica, max_jobs=3) == ()


@pytest.mark.parametrize("after_s", [0.0005, 0.0015, 0.0025])
@virtual
async def test_a_worker_that_hangs_up_while_it_asks_takes_no_token(
    world: World, after_s: float
) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    poll = _poll(replica, max_jobs=3)
    await asyncio.sleep(after_s)
    poll.cancel()
    await asyncio.sleep(0.1)
    assert await _running(world) == 0


@virtual
async def test_a_cancelled_run_gives_its_place_back_when_the_worker_is_told(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await _set(one, LLM)
    await world.define(ONE)
    run_id = await world.start(one, "one")
    jobs = await _lease(one)
    await one.inbox.cancel(run_id, reason=None, actor="caller")
    assert await _running(world) == 1
    lost = await two.scheduler.renew("worker", _held(jobs))
    assert lost.lost == (jobs[0].job.id,)
    assert await _running(world) == 0


@virtual
async def test_another_tenants_worker_can_neither_renew_nor_release(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await _set(one, LLM)
    await _fan(world, one, 10)
    jobs = await _lease(one, max_jobs=3)
    for replica in (one, two):
        answer = await replica.scheduler.renew("other", _held(jobs), tenant=GLOBEX)
        assert answer.renewed == ()
        await replica.scheduler.finished("other", _held(jobs), tenant=GLOBEX)
    assert await _running(world) == 3


# ── Limits that change ───────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_limit_is_in_force_everywhere_at_once_and_gone_at_once(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await asyncio.sleep(1)
    await _fan(world, one, 20)
    await _set(one, LLM)
    assert len(await _lease(two, max_jobs=5)) == 3
    poll = _poll(two, max_jobs=5)
    await asyncio.sleep(0.2)
    entry = AuditEntry(at=Instant(0), actor="admin", action="limit.delete", subject="llm")
    assert await one.services.limits.delete("llm", entry) == LLM
    assert await one.services.limits.delete("llm", entry) is None
    assert len((await poll).jobs) == 5


@virtual
async def test_without_bells_a_limit_is_in_force_within_a_second(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await asyncio.sleep(1)
    two.bus.is_away = True
    await _fan(world, one, 20)
    await _set(one, LLM)
    await asyncio.sleep(1.1)
    assert len(await _lease(two, max_jobs=5)) == 3


@virtual
async def test_a_term_after_a_limit_is_made_or_lowered_it_is_kept(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _fan(world, replica, 20)
    old = await _lease(replica, max_jobs=5)
    await _set(replica, LLM)
    renewed: set[str] = set()

    async def renew(limit: int) -> None:
        nonlocal renewed
        for _ in range(4):
            await asyncio.sleep(TTL_MS / 3_000)
            answer = await replica.scheduler.renew("worker", _held(old))
            renewed = {*answer.renewed}
            assert len(renewed) <= limit

    await renew(3)
    assert len(renewed) == await _running(world) == 3
    await _set(replica, TopicLimit(id="llm", topics=("llm.*",), max_running=1))
    await renew(1)
    assert len(renewed) == await _running(world) == 1
    pool = TokenPool("llm", None, 1, None)
    assert (await world.store.pool_uses([pool]))[0].running == 1


@virtual
async def test_a_lease_that_is_named_twice_is_not_renewed_without_its_token(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 5)
    jobs = await _lease(replica, max_jobs=3)
    await _set(replica, TopicLimit(id="llm", topics=("llm.*",), max_running=1))
    answer = await replica.scheduler.renew("worker", [*_held(jobs), *_held(jobs)])
    assert len({*answer.renewed}) == 1
    assert answer.lost == ()


@virtual
async def test_a_renewal_of_two_deliveries_of_a_job_releases_the_token_of_the_lost_one_alone(
    world: World,
) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, TopicLimit(id="llm", topics=("llm.*",), max_running=1))
    await _fan(world, replica, 2)
    (first,) = await _lease(replica)
    while True:  # the other job may come first, and then takes as long
        await asyncio.sleep(TTL_MS * 1.02 / 1_000 + 3)
        (second,) = await _lease(replica)
        if second.job.id == first.job.id:
            break
    for both in ((first, second), (second, first)):
        answer = await replica.scheduler.renew("worker", _held(both))
        assert answer == Renewals((second.job.id,), (first.job.id,))
        assert await _running(world) == 1
        assert await _lease(replica) == ()


@virtual
async def test_a_worker_is_told_of_the_end_of_a_lease_that_a_lowered_limit_does_not_renew(
    world: World,
) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await world.define(ONE)
    runs = [await world.start(replica, "one") for _ in range(3)]
    jobs = await _lease(replica, max_jobs=3)
    await _set(replica, TopicLimit(id="llm", topics=("llm.*",), max_running=0))
    assert await replica.scheduler.renew("worker", _held(jobs)) == Renewals((), ())
    (cancelled,) = [each for each in jobs if each.job.run_id == runs[0]]
    await replica.inbox.cancel(runs[0], reason=None, actor="caller")
    answer = await replica.scheduler.renew("worker", _held(jobs))
    assert answer == Renewals((), (cancelled.job.id,))
    await asyncio.sleep(TTL_MS / 1_000 + 2)
    answer = await replica.scheduler.renew("worker", _held(jobs))
    assert (answer.renewed, {*answer.lost}) == ((), {each.job.id for each in jobs})


@virtual
async def test_metrics_show_the_use_of_a_limit(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    await _fan(world, replica, 10)
    await _lease(replica, max_jobs=5)
    await asyncio.sleep(3.5)
    assert replica.metric("topic_limit_running", limit="llm") == 3
    assert replica.metric("topic_limit_max", limit="llm") == 3
    assert replica.metric("topic_limit_leases_total", limit="llm") == 3
    assert replica.metric("topic_limit_refused_total", limit="llm", reason="running") >= 1


@virtual
async def test_metrics_do_not_show_a_max_running_that_a_limit_has_no_more(world: World) -> None:
    replica = world.add(terms=TERMS)
    await _set(replica, LLM)
    assert _shown(replica, "stanchion_topic_limit_max") == ["llm"]
    await _set(replica, TopicLimit(id="llm", topics=("llm.*",), rate_per_s=5))
    assert _shown(replica, "stanchion_topic_limit_max") == []


@virtual
async def test_metrics_do_not_show_a_limit_of_each_tenant_that_is_gone(world: World) -> None:
    replica = world.add(terms=TERMS)
    own = TopicLimit(id="own", topics=("llm.*",), per=LimitScope.TENANT, max_running=2)
    await _set(replica, own, LLM)
    await _fan(world, replica, 10)
    await _lease(replica, max_jobs=5)
    await asyncio.sleep(3.5)
    assert replica.metric("topic_limit_running", limit="own") == 2
    entry = AuditEntry(at=Instant(0), actor="admin", action="limit.delete", subject="own")
    assert await replica.services.limits.delete("own", entry)
    await asyncio.sleep(3.5)
    assert _shown(replica, "stanchion_topic_limit_running") == ["llm"]


@virtual
async def test_a_replica_that_was_paused_leases_nothing_by_an_old_limit(world: World) -> None:
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await _set(one, LLM)
    await _fan(world, one, 10)
    old = await _lease(two)
    lowered = TopicLimit(id="llm", topics=("llm.*",), max_running=0)

    async def pause() -> None:
        """Its next call takes so long; meanwhile it neither hears nor reads anything."""
        two.bus.is_away = True
        two.store.script("list_documents", *[Fault.ERROR] * 5)
        await _set(one, lowered)
        await asyncio.sleep(5)

    two.store.script("take_tokens", pause)
    assert await _lease(two) == ()
    await asyncio.sleep(0.1)
    assert await _running(world) == 1
    await _set(one, LLM)
    await asyncio.sleep(1.1)
    two.store.script("renew_tokens", pause)
    assert (await two.scheduler.renew("worker", _held(old))).renewed == ()


@virtual
@pytest.mark.parametrize("scope", LimitScope)
async def test_a_lease_that_takes_long_is_not_made_by_the_limit_it_began_with(
    world: World, scope: LimitScope
) -> None:
    """Found by the simulator: mixed, day 50346."""
    one, two = world.add(terms=TERMS), world.add(terms=TERMS)
    await _set(one, TopicLimit(id="llm", topics=("llm.*",), max_running=3, per=scope))
    await _fan(world, one, 10)

    async def lower() -> None:
        """The replica hears of the change while its call is under way."""
        await _set(one, TopicLimit(id="llm", topics=("llm.*",), max_running=1, per=scope))

    two.store.script("ready_tenants", lower)
    assert await _lease(two, max_jobs=2) == ()
    assert len(await _lease(two, max_jobs=2)) == 1
