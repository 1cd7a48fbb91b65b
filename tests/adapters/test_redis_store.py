"""What only the Redis store can get wrong: numbers in Lua, large steps, keys and memory."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from importlib import resources
from typing import Any

import msgspec
import pytest
import redis
from msgspec.structs import replace

from stanchion.adapters.redis.address import read_url
from stanchion.adapters.redis.client import RedisClient, RedisRequest
from stanchion.adapters.store.redis import RedisStore, decode, definitions, shards
from stanchion.adapters.store.redis.encode import (
    OF_RUN,
    OF_SHARD,
    OF_TENANT,
    StoreKeys,
    encode_items,
)
from stanchion.adapters.system import SystemEntropy
from stanchion.core.admission import Admitted, TooLate, Verdict
from stanchion.core.budget import (
    BudgetLimit,
    BudgetWindow,
    OverBudget,
    window_end,
    window_start,
)
from stanchion.core.events import CancelRequested
from stanchion.core.json_value import JsonValue
from stanchion.core.model import (
    Instant,
    Item,
    ItemKey,
    Job,
    Risk,
    RunId,
    RunStatus,
    Stamp,
    StepId,
    StepStatus,
    TenantId,
    WorkflowSource,
    job_id,
    make_run_id,
    shard_of_tenant,
)
from stanchion.core.queue import QueueRequest
from stanchion.core.steps.foreach import BEGUN_AT_ONCE_MAX
from stanchion.core.topic_limits import TokenPool
from stanchion.core.transition import DispatchJob, StopRun
from stanchion.core.workflow import DelaySpec
from stanchion.ports.errors import BackendCorrupt, BackendTimeout, BackendUnavailable
from stanchion.ports.records import (
    Accepted,
    Admission,
    AlikeStart,
    AlikeStarts,
    Committed,
    JobLease,
    JobState,
    Loaded,
    RejectedCode,
    ResultRefused,
    RunFilter,
    StaleFence,
    Tenant,
)
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    ONE_JOB,
    TOPIC,
    WITHIN_MS,
    accept,
    admission,
    advance,
    cancel,
    commit_of,
    lease,
    lease_one,
    loaded,
    nothing,
    planned,
    result_of,
    start,
    workflow,
)
from tests.servers import Server, running_server

_NAMESPACE = "store"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    with server.client() as client:
        client.flushall()
    store = await RedisStore.open(server.url, namespace=_NAMESPACE, timeout_s=10.0)
    yield store
    await store.close()


def _keys(server: Server) -> list[str]:
    with server.client() as client:
        return sorted(client.keys("*"))


def _commands(server: Server, name: str) -> int:
    with server.client() as client:
        return int(client.info("commandstats")[f"cmdstat_{name}"]["calls"])


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_fence_is_the_servers_microseconds_to_the_last_digit(store: RedisStore) -> None:
    await start(store)
    before_us = await store.now() * 1000
    leased = await lease_one(store)
    after_us = (await store.now() + 1) * 1000
    assert before_us <= leased.fence <= after_us
    view = await store.job(leased.job.id)
    assert view is not None
    assert view.fence == leased.fence


@pytest.mark.parametrize("off_by", [-1, 1])
async def test_a_fence_that_is_off_by_one_microsecond_is_another_fence(
    store: RedisStore, off_by: int
) -> None:
    await start(store)
    leased = await lease_one(store)
    near = replace(leased, fence=leased.fence + off_by)
    renewals = await store.renew_jobs([JobLease(near.job.id, near.fence)], ttl_ms=60_000)
    assert renewals.lost == (leased.job.id,)
    (answer,) = await store.accept([result_of(near)])
    assert getattr(answer, "code", None) is RejectedCode.STALE_FENCE
    await accept(store, leased)


@pytest.mark.parametrize("fence", [1_786_000_000_000_001, 9_007_199_254_740_991])
async def test_a_runs_fence_is_kept_to_the_last_digit(store: RedisStore, fence: int) -> None:
    run_id = await start(store)
    found = await loaded(store, run_id)
    answer = await store.commit(commit_of(found, nothing(found), fence=fence))
    assert isinstance(answer, Committed)
    found = await loaded(store, run_id)
    assert found.run.fence == fence
    late = await store.commit(commit_of(found, nothing(found), fence=fence - 1))
    assert late == StaleFence(fence)


async def test_versions_count_on_where_lua_would_write_exponents(
    server: Server, store: RedisStore
) -> None:
    run_id = await start(store)
    version = 123_456_789_012_345_678 // 100
    (key,) = [key for key in _keys(server) if key.endswith(f":run:{run_id}")]
    with server.client() as client:
        client.hset(key, "stamp", f"{version} 0 nonce")
    found = await loaded(store, run_id)
    assert found.run.stamp.version == version
    commit = commit_of(found, nothing(found))
    assert await store.commit(commit) == Committed(Stamp(version + 1, commit.nonce))
    assert (await loaded(store, run_id)).run.stamp.version == version + 1


# ── Large steps ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [250, 10_000])
async def test_a_step_of_thousands_of_jobs_is_still_one_step(store: RedisStore, count: int) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": list(range(count))})
    assert await store.ready_topics() == {TOPIC: min(count, BEGUN_AT_ONCE_MAX)}
    first = await store.lease_jobs("worker", [TOPIC], max_jobs=1_000, ttl_ms=60_000)
    assert [leased.job.item for leased in first] == list(range(BEGUN_AT_ONCE_MAX))
    await store.accept([result_of(leased) for leased in first])
    assert isinstance(await advance(store, FOR_EACH, run_id), Committed)
    if count > BEGUN_AT_ONCE_MAX:
        await cancel(store, run_id, FOR_EACH)
    assert (await loaded(store, run_id)).run.status.is_finished
    assert await store.ready_topics() == {}
    view = await store.job(first[-1].job.id)
    assert view is not None
    assert view.state is JobState.FINISHED


@pytest.mark.parametrize("size", [10, 50_000])
async def test_a_large_run_is_decoded_beside_the_event_loop(
    store: RedisStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    (leased,) = await lease(store)
    output: JsonValue = [{"n": number} for number in range(size)]
    await store.accept([result_of(leased, output)])
    await advance(store, FOR_EACH, run_id)
    threads = set[threading.Thread]()
    read = decode.read_loaded

    def noted(fields: Sequence[bytes], entries: Sequence[bytes]) -> Loaded | None:
        threads.add(threading.current_thread())
        return read(fields, entries)

    monkeypatch.setattr(decode, "read_loaded", noted)
    run = (await loaded(store, run_id)).run
    assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"each": [output]})
    assert (threads == {threading.main_thread()}) is (size == 10)


@pytest.mark.parametrize("size", [10, 50_000])
async def test_large_inputs_of_leased_jobs_are_decoded_beside_the_event_loop(
    store: RedisStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: JsonValue = [{"n": number} for number in range(size)]
    await start(store, run_input={"say": given})
    threads = set[threading.Thread]()
    read = decode.read_job

    def noted(work: bytes) -> Job:
        threads.add(threading.current_thread())
        return read(work)

    monkeypatch.setattr(decode, "read_job", noted)
    leased = await lease_one(store)
    assert leased.job.input == {"said": given}
    assert (threads == {threading.main_thread()}) is (size == 10)


async def test_an_admission_writes_every_item_once(server: Server, store: RedisStore) -> None:
    with server.client() as client, client.monitor() as monitor:
        await start(store, FOR_EACH, run_input={"items": ["a", "b", "c"]})
        client.echo("done")
        seen = itertools.takewhile(lambda each: "done" not in each["command"], monitor.listen())
        commands = [each["command"].split() for each in seen]
    written = [words[2::2] for words in commands if words[0] == "HSET" and ":items:" in words[1]]
    assert written == [["0:each", "1:each", "2:each"]]


async def test_to_check_the_tenant_of_a_job_does_not_read_its_input(
    server: Server, store: RedisStore
) -> None:
    size = 200_000
    await start(store, FOR_EACH, run_input={"items": ["x" * size]})
    leased = await lease_one(store)
    held = [JobLease(leased.job.id, leased.fence)]
    other = TenantId("other")
    with server.client() as client:

        def sent_bytes() -> int:
            return int(client.info("stats")["total_net_output_bytes"])

        before = sent_bytes()
        assert (await store.renew_jobs(held, ttl_ms=60_000, tenant=other)).renewed == ()
        assert (await store.renew_jobs(held, ttl_ms=60_000, tenant=ACME)).lost == ()
        [refused] = await store.accept([result_of(leased)], tenant=other)
        [accepted] = await store.accept([result_of(leased)], tenant=ACME)
        assert sent_bytes() - before < size / 4
    assert isinstance(refused, ResultRefused)
    assert isinstance(accepted, Accepted)


async def test_items_that_wait_share_fields_unless_an_older_version_may_read_them(
    server: Server, store: RedisStore
) -> None:
    values: list[JsonValue] = list(range(1_000))
    with server.client() as client:
        run_id = await start(store, FOR_EACH, run_input={"items": values})
        [key] = client.keys(f"*:items:{run_id}")
        own = {f"{index}:each" for index in range(256)}  # six of them are too few for a block
        assert {*client.hkeys(key)} == own | {"b1:each", "b2:each", "b3:each"}

        client.set("aged:{common}:format", "2 with 64 shards")
        aged = await RedisStore.open(server.url, namespace="aged")
        run_id = await start(aged, FOR_EACH, run_input={"items": values})
        [key] = client.keys(f"aged:*:items:{run_id}")
        assert {*client.hkeys(key)} == {f"{index}:each" for index in range(1_000)}
        await aged.close()


async def test_timelines_of_a_batch_begin_in_their_runs_unless_an_older_version_may_read_them(
    server: Server, store: RedisStore
) -> None:
    with server.client() as client:
        client.set("elder:{common}:format", "2 with 64 shards")
        elder = await RedisStore.open(server.url, namespace="elder")
        for each, is_a_list in ((store, False), (elder, True)):
            now = await each.now()
            first, *others = [admission(now, queue=QueueRequest()) for _ in range(2)]
            starts = AlikeStarts(first, [*map(AlikeStart.of, (first, *others))])
            verdicts = await each.admit_many(starts, within_ms=WITHIN_MS)
            assert {*map(type, verdicts)} == {Admitted}
            run_id = starts[1].run.id
            assert bool(client.keys(f"*:timeline:{run_id}")) is is_a_list
            page = await each.timeline(run_id)
            assert page.items == starts[1].transition.timeline
        await elder.close()


async def test_starts_of_a_batch_that_differ_are_judged_by_some_scripts(
    store: RedisStore, server: Server
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    await start(store)
    before = _commands(server, "evalsha")
    now = await store.now()
    wanted = [
        admission(now, labels={"number": str(number)}) for number in range(store.admissions_max)
    ]
    prepared = store.prepare_admissions(wanted)
    assert [len(part) for part in prepared.parts] == [50] * 5
    verdicts = await store.admit_many(prepared, within_ms=WITHIN_MS)
    assert [*verdicts] == [Admitted(each.run.id) for each in wanted]
    assert _commands(server, "evalsha") - before == 5


def test_blocks_of_items_have_no_gaps_and_are_written_once() -> None:
    each, done = StepId("each"), Item(status=StepStatus.SUCCEEDED)
    items = {ItemKey(each, index): Item(input=index) for index in range(1_000)}
    items[ItemKey(each, 300)] = done  # block 1 has a gap
    del items[ItemKey(each, 600)]  # and so has block 2
    words = encode_items(items, in_blocks=True)
    fields = dict(zip(words[::2], words[1::2], strict=True))
    assert len(fields) == len(words) // 2
    own = {*range(300, 512), *range(512, 768)} - {600}
    assert fields.keys() == {f"{index}:each" for index in own} | {f"b{n}:each" for n in (0, 1, 3)}
    assert fields["b1:each"].splitlines() == [
        "256",
        *(f'{{"input":{index}}}' for index in range(256, 300)),
    ]
    assert fields["b3:each"].startswith('768\n{"input":768}\n')
    large = {ItemKey(each, index): Item(input="x" * 1_000) for index in range(256)}
    assert encode_items(large, in_blocks=True) == encode_items(large)


async def test_a_look_at_all_shards_of_a_server_is_one_command(
    server: Server, store: RedisStore
) -> None:
    looks: list[Callable[[], Awaitable[object]]] = [
        lambda: store.fire_timers(limit=500),
        lambda: store.take_outbox(limit=500, hold_ms=1_000),
        lambda: store.expire_jobs(limit=500, max_deliveries=5),
        store.outbox_size,
        store.ready_topics,
        lambda: store.lease_jobs("worker", [TOPIC], max_jobs=1, ttl_ms=60_000),
    ]
    with server.client() as client:
        for look in looks:
            await look()  # The first time, the server may have to be sent the script.
            client.config_resetstat()
            await look()
            stats = client.info("commandstats")
            assert stats["cmdstat_evalsha"]["calls"] == 1


async def test_an_idle_index_is_looked_at_rarely_and_when_a_timer_is_due(
    server: Server, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_IDLE_LOOK_EVERY_S", 3600.0)  # Not within this test.

    async def scripts() -> int:
        with server.client() as client:
            client.config_resetstat()
            for _ in range(25):
                await store.fire_timers(limit=500)
                await store.take_outbox(limit=500, hold_ms=1_000)
            return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

    await scripts()  # The server is sent the script once more, if it did not know it.
    assert await scripts() == 0
    run_id = await start(store, planned(workflow("delay", pause=DelaySpec(delay_s=1.5))))
    assert await scripts() == 50
    await store.audit_slots(limit=10)  # finds nothing to correct, as every few seconds
    assert await scripts() == 0
    # A timer that this process has set is found when it is due, however idle the store is.
    fired: tuple[RunId, ...] = ()
    async with asyncio.timeout(20):
        while not fired:
            await _pass_ms(store, 20)
            fired = await store.fire_timers(limit=500)
    assert fired == (run_id,)
    assert [row.run_id for row in await store.take_outbox(limit=500, hold_ms=1_000)] == [run_id]


async def test_thousands_of_jobs_dispatched_by_a_commit_are_one_step_too(
    store: RedisStore,
) -> None:
    run_id = await start(store)
    found = await loaded(store, run_id)
    wanted = replace(nothing(found), effects=_jobs(run_id, 3_000))
    answer = await store.commit(commit_of(found, wanted))
    assert isinstance(answer, Committed)
    assert await store.ready_topics() == {TOPIC: 3_001}
    # Asked for a second time they are known already: none of them is ready twice.
    found = await loaded(store, run_id)
    assert isinstance(await store.commit(commit_of(found, wanted)), Committed)
    assert await store.ready_topics() == {TOPIC: 3_001}
    found = await loaded(store, run_id)
    stop = replace(nothing(found), effects=(StopRun(),))
    assert isinstance(await store.commit(commit_of(found, stop)), Committed)
    assert await store.ready_topics() == {}
    assert await lease(store, TOPIC, max_jobs=10) == ()


async def test_tenants_of_different_shards_take_turns_at_what_is_due(store: RedisStore) -> None:
    other = TenantId("other")
    assert shard_of_tenant(other) != shard_of_tenant(ACME)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    wait = planned(workflow("delay", pause=DelaySpec(delay_s=0.001)))
    early = [await start(store, wait) for _ in range(6)]
    late = await start(store, wait, tenant=other)
    await _pass_ms(store, 20)
    fired = await store.fire_timers(limit=4)
    assert late in fired
    assert len(fired) == 4
    await store.fire_timers(limit=500)
    rows = await store.take_outbox(limit=4, hold_ms=60_000)
    assert late in [row.run_id for row in rows]
    rest = await store.take_outbox(limit=500, hold_ms=60_000)
    assert sorted(row.run_id for row in (*rows, *rest)) == sorted([*early, late])


# ── Starts that share a script ───────────────────────────────────────────────────────────────────


async def test_starts_of_a_tenant_that_come_together_share_a_script(
    store: RedisStore, server: Server
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    await start(store)  # the script is known to the server from now on
    before = _commands(server, "evalsha")
    wanted = [admission(await store.now()) for _ in range(32)]
    others = [admission(await store.now(), tenant=TenantId("other")) for _ in range(2)]
    verdicts = await asyncio.gather(*(_admit(store, each) for each in [*wanted, *others]))
    assert verdicts == [Admitted(each.run.id) for each in [*wanted, *others]]
    assert _commands(server, "evalsha") - before == 2


async def test_a_script_judges_only_so_many_starts(store: RedisStore, server: Server) -> None:
    await start(store)
    before = _commands(server, "evalsha")
    wanted = [admission(await store.now()) for _ in range(65)]
    await asyncio.gather(*(_admit(store, each) for each in wanted))
    assert _commands(server, "evalsha") - before == 3


async def test_starts_with_large_inputs_or_many_jobs_are_judged_by_themselves(
    store: RedisStore, server: Server
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None))
    await start(store)
    before = _commands(server, "evalsha")
    small, large, nested = [admission(await store.now()) for _ in range(3)]
    large = replace(large, run=replace(large.run, input={"text": "x" * 9_000}))
    nested = replace(nested, run=replace(nested.run, input={"rows": [[1, {"a": 2}]] * 300}))
    many = admission(await store.now())
    effects = (*many.transition.effects, *_jobs(many.run.id, 9))
    many = replace(many, transition=replace(many.transition, effects=effects))
    wanted = [small, large, nested, many, admission(await store.now())]
    verdicts = await asyncio.gather(*(_admit(store, each) for each in wanted))
    assert verdicts == [Admitted(each.run.id) for each in wanted]
    assert _commands(server, "evalsha") - before == 4


async def test_a_start_that_cannot_be_encoded_does_not_take_others_along(store: RedisStore) -> None:
    wanted = admission(await store.now())
    faulty = replace(wanted, run=replace(wanted.run, input={"say": object()}))
    others = [admission(await store.now()) for _ in range(3)]
    refused, *verdicts = await asyncio.gather(
        *(_admit(store, each) for each in [faulty, *others]), return_exceptions=True
    )
    assert isinstance(refused, TypeError)
    assert verdicts == [Admitted(each.run.id) for each in others]


async def test_a_start_whose_caller_left_is_not_sent_with_the_others(store: RedisStore) -> None:
    left, *others = [admission(await store.now()) for _ in range(3)]
    leaving = asyncio.ensure_future(_admit(store, left))
    staying = [asyncio.ensure_future(_admit(store, each)) for each in others]
    await asyncio.sleep(0)  # all of them wait for the end of this iteration
    leaving.cancel()
    assert await asyncio.gather(*staying) == [Admitted(each.run.id) for each in others]
    assert await store.load(left.run.id) is None


async def test_a_start_without_time_does_not_make_the_others_late(store: RedisStore) -> None:
    late, *others = [admission(await store.now()) for _ in range(3)]
    found = await asyncio.gather(
        store.admit(late, within_ms=-1_000), *(_admit(store, each) for each in others)
    )
    assert found == [TooLate(), *(Admitted(each.run.id) for each in others)]


async def test_each_of_the_starts_that_failed_together_gets_an_error_of_its_own(
    server: Server,
) -> None:
    store = await RedisStore.open(server.url, namespace=_NAMESPACE)
    wanted = [admission(await store.now()) for _ in range(3)]
    await store.close()
    errors = await asyncio.gather(*(_admit(store, each) for each in wanted), return_exceptions=True)
    assert all(isinstance(each, BackendUnavailable) for each in errors)
    assert len(set(map(id, errors))) == len(errors)


def _admit(store: RedisStore, wanted: Admission) -> Coroutine[Any, Any, Verdict]:
    return store.admit(wanted, within_ms=WITHIN_MS)


# ── Keys ─────────────────────────────────────────────────────────────────────────────────────────


async def test_every_key_has_a_shard_or_the_common_tag_and_a_name_from_the_list(
    server: Server, store: RedisStore
) -> None:
    await _use(store)
    names = OF_SHARD | OF_TENANT | OF_RUN
    shape = re.compile(rf"{_NAMESPACE}:\{{([0-3][0-9a-f]|common)\}}:(\w+)(:.+)?")
    for key in _keys(server):
        found = shape.fullmatch(key)
        assert found is not None, key
        tag, name, whose = found.groups()
        if tag == "common":
            assert name in {"format", "documents", "document_names"}
        else:
            assert name in names
            assert (whose is None) == (name in OF_SHARD), key


@pytest.mark.parametrize("name", ["admit", "load", "lease"])
@pytest.mark.parametrize("tenant", ["acme", "a-tenant", "x", "", "mieterin-ä"])
def test_a_request_has_the_keys_of_its_run_and_tenant_also_from_a_template(
    server: Server, tenant: str, name: str
) -> None:
    usual = make_run_id(ACME, Instant(1_700_000_000_000), 7)
    foreign = [usual[:-1], usual + "0", usual[:-1] + "ä", usual[:-4] + "\x01" * 4]
    client = RedisClient(read_url(server.url), timeout_s=1.0, entropy=SystemEntropy())
    requests = shards.Shards(
        client, StoreKeys(_NAMESPACE), shards.Rounds(0), 1, 1, has_new_formats=True
    )
    script = shards.script_of(name)
    # The usual length twice: the second request is made from the template of the first.
    for run_id in (usual, usual[:2] + "0" * (len(usual) - 2), *foreign, "", usual):
        keys = requests.keys.all_of(script.key_names, 5, run_id=run_id, tenant=tenant)
        for words in ((), ("words", b"\x01\x02", 7)):
            made = requests.step(name, 5, *words, run_id=run_id, tenant=tenant)
            assert made.packed == script.call(keys, words)


async def test_a_purged_run_leaves_nothing_behind(server: Server, store: RedisStore) -> None:
    run_id = await _use(store)
    assert any(run_id in key for key in _keys(server))
    await cancel(store, run_id)
    assert await store.purge(finished_before=Instant(await store.now() + 1), limit=100) >= 1
    with server.client() as client:
        for key in _keys(server):
            assert run_id not in key
            if client.type(key) == "hash":
                assert not [each for each in client.hkeys(key) if run_id in each], key
            elif client.type(key) == "zset":
                assert not [each for each in client.zrange(key, 0, -1) if run_id in each], key


async def test_finished_work_leaves_the_indexes_empty(server: Server, store: RedisStore) -> None:
    for _ in range(5):
        run_id = await start(store)
        await accept(store, await lease_one(store))
        await advance(store, ONE_JOB, run_id)
    assert await lease(store, TOPIC) == ()
    left = {key.rsplit(":", 1)[-1] for key in _keys(server)}
    assert not left & {"ready", "ring", "turns", "open", "deadlines", "timers", "outbox", "rows"}
    assert not any(":inbox:" in key or ":out:" in key for key in _keys(server))


async def test_a_key_that_nobody_may_know_any_more_is_forgotten(
    server: Server, store: RedisStore
) -> None:
    brief = await RedisStore.open(server.url, namespace=_NAMESPACE, key_ttl_ms=1, timeout_s=10.0)
    run_id = await start(brief, key="key")
    await cancel(brief, run_id)
    await _pass_ms(brief, 3)
    await brief.purge(finished_before=Instant(0), limit=1)
    assert not any(key.endswith((":keys", ":aging")) for key in _keys(server))
    await brief.close()
    assert await store.load(run_id) is not None


async def test_one_script_forgets_few_of_thousands_of_keys(
    server: Server, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks all shards of a server at once, and blocks the server for as long."""
    place = StoreKeys(_NAMESPACE).of_shard
    with server.client() as client:
        for shard in shards.ALL_SHARDS:
            names = {f"4:acmekey-{number}": 1 for number in range(250)}
            client.hset(place(shard, "keys"), mapping=names)
            client.zadd(place(shard, "aging"), names)
    forgotten: list[int] = []
    run_on_all = shards.Shards.run_on_all

    async def noted(
        self: shards.Shards, name: str, keys: Sequence[str], *words: int, deadline: float
    ) -> list[Any]:
        answers: list[Any] = await run_on_all(self, name, keys, *words, deadline=deadline)
        if name == "forget":
            forgotten.append(sum(answers))
        return answers

    monkeypatch.setattr(shards.Shards, "run_on_all", noted)
    await store.purge(finished_before=Instant(1), limit=10)
    assert max(forgotten) <= 6_400
    assert sum(forgotten) == 64 * 250
    assert not [key for key in _keys(server) if key.endswith((":keys", ":aging"))]


async def test_expired_leases_of_large_jobs_are_ended_a_few_at_a_time(
    server: Server, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of hundreds take longer than the time limit, and need not be decoded."""
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=60))
    for _ in range(60):
        await start(store)
    leased = await lease(store, max_jobs=60, ttl_ms=0)
    with server.client() as client:
        # A number that only a decoder would read.
        number = "1" * 5_000
        (jobs,) = [key for key in _keys(server) if key.endswith(":open")]
        for each in leased:
            work = client.hget(jobs, f"w:{each.job.id}").replace('"hello"', number)
            assert number in work
            client.hset(jobs, f"w:{each.job.id}", work)
    sizes: list[int] = []
    ask_all = RedisClient.ask_all

    async def noted(
        self: RedisClient, requests: Sequence[RedisRequest], *, deadline: float
    ) -> list[Any]:
        sizes.append(len(requests))
        if len(sizes) > 3:
            raise BackendTimeout("the time is over")
        return await ask_all(self, requests, deadline=deadline)

    monkeypatch.setattr(RedisClient, "ask_all", noted)
    expired = await store.expire_jobs(limit=100, max_deliveries=1)
    # The first fifty were read and ended, the others read; what was done is not lost.
    assert sizes == [50, 50, 10, 10]
    assert len(expired) == 50
    assert all(each.is_dead for each in expired)
    monkeypatch.undo()
    assert len(await store.expire_jobs(limit=100, max_deliveries=1)) == 10


async def test_a_tenant_that_is_deleted_while_tenants_are_listed_is_left_out(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in (ACME, TenantId("globex")):
        await store.put_tenant(tenant, Tenant(max_concurrent_runs=2))
    read: Callable[..., Awaitable[tuple[list[str], str | None]]] = definitions.page_of_names

    async def and_then_one_is_deleted(*asked: object) -> tuple[list[str], str | None]:
        found = await read(*asked)
        await store.delete_tenant(ACME)
        return found

    monkeypatch.setattr(definitions, "page_of_names", and_then_one_is_deleted)
    page = await store.list_tenants()
    assert [tenant for tenant, _ in page.items] == ["globex"]


async def test_a_token_that_is_given_back_late_leaves_nothing_for_ever(
    server: Server, store: RedisStore
) -> None:
    """The limit got its rate after the token was taken, or the rate was not used for long."""
    await store.take_tokens(TokenPool("llm", None, 5, None), ["token"], ttl_ms=60_000)
    rated = TokenPool("llm", None, 5, 2.0)
    assert await store.release_tokens(rated, ["token"], is_unused=True) == 1
    with server.client() as client:
        assert [key for key in _keys(server) if ":token" in key and client.pttl(key) < 0] == []


async def test_what_cannot_be_read_is_corrupt_and_says_so(
    server: Server, store: RedisStore
) -> None:
    run_id = await start(store)
    (key,) = [key for key in _keys(server) if key.endswith(f":run:{run_id}")]
    with server.client() as client:
        client.hset(key, "status", "dancing")
        with pytest.raises(BackendCorrupt):
            await store.load(run_id)
        client.delete(key)
        client.set(key, "a string")
    with pytest.raises(BackendCorrupt):
        await store.load(run_id)


async def test_a_full_server_refuses_what_needs_memory_and_lets_finished_runs_be_removed(
    server: Server, store: RedisStore
) -> None:
    finished = await start(store)
    await cancel(store, finished)
    wanted = admission(await store.now())
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        try:
            with pytest.raises(BackendUnavailable, match="no memory left"):
                await store.admit(wanted, within_ms=WITHIN_MS)
            assert await store.load(wanted.run.id) is None
            assert await store.active_runs(ACME) == 0
            now = await store.now()
            assert await store.purge(finished_before=Instant(now + 1), limit=10) == 1
        finally:
            client.config_set("maxmemory", 0)
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)


# ── Fairness across shards ───────────────────────────────────────────────────────────────────────


async def test_tenants_of_all_shards_take_turns(store: RedisStore) -> None:
    tenants = [TenantId(f"tenant-{number}") for number in range(40)]
    for tenant in tenants:
        await start(store, FOR_EACH, tenant=tenant, run_input={"items": [1, 2, 3]})
    for _ in range(3):
        served = [(await lease_one(store)).job.tenant for _ in tenants]
        assert sorted(served) == sorted(tenants)


async def test_a_job_of_another_replica_waits_for_one_round(
    server: Server, store: RedisStore
) -> None:
    other = await RedisStore.open(server.url, namespace=_NAMESPACE, timeout_s=10.0)
    await start(store, FOR_EACH, run_input={"items": list(range(500))})
    assert len(await lease(store, TOPIC, max_jobs=10)) == 10
    late = TenantId("late")
    await start(other, tenant=late)
    await _pass_ms(store, 6)  # A look at the shards is good for five milliseconds.
    served = [leased.job.tenant for leased in await lease(store, TOPIC, max_jobs=2)]
    assert sorted(served) == [ACME, late]
    await other.close()


@pytest.mark.parametrize("by_commit", [False, True])
async def test_what_this_replica_sends_out_is_leased_without_a_look_at_the_shards(
    server: Server, store: RedisStore, by_commit: bool
) -> None:
    run_id = await start(store)
    await lease_one(store)
    assert await lease(store, TOPIC) == ()
    looks = _commands(server, "zcard")
    if by_commit:
        found = await loaded(store, run_id)
        await store.commit(commit_of(found, replace(nothing(found), effects=_jobs(run_id, 1))))
    else:
        await start(store, tenant=TenantId("another"))
    await lease_one(store)
    assert _commands(server, "zcard") == looks


async def test_several_workers_at_once_share_all_jobs_and_no_job_twice(store: RedisStore) -> None:
    for number in range(12):
        tenant = TenantId(f"tenant-{number}")
        await start(store, FOR_EACH, tenant=tenant, run_input={"items": list(range(25))})
    answers = await asyncio.gather(
        *(store.lease_jobs(f"w{n}", [TOPIC], max_jobs=30, ttl_ms=60_000) for n in range(20))
    )
    jobs = [leased.job.id for answer in answers for leased in answer]
    assert len(jobs) == len(set(jobs)) == 300


# ── Builders ─────────────────────────────────────────────────────────────────────────────────────


async def _use(store: RedisStore) -> RunId:
    """Leave a trace in as many keys as can be; a run with an inbox, a timer and a dead letter."""
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=None, job_rate_per_s=1000.0))
    await store.put_document("kind", "name", 1, read=None)
    await store.put_workflow(ACME, workflow("flow"))
    run_id = await start(store, key="key")
    await lease(store, TOPIC, ttl_ms=1)
    await _pass_ms(store, 3)
    await store.expire_jobs(limit=10, max_deliveries=1)
    await store.post(run_id, CancelRequested(), entry_id="a")
    await store.post(run_id, CancelRequested(), entry_id="b")
    assert await store.write_dead_letter(run_id, "a", cause="a test") is not None
    return run_id


async def _pass_ms(store: RedisStore, by_ms: int) -> None:
    """Come back when the server's clock shows at least so much more."""
    until = await store.now() + by_ms
    while (left_ms := until - await store.now()) > 0:  # noqa: ASYNC110 - a server has no events
        await asyncio.sleep(left_ms / 1000)


def _jobs(run_id: RunId, count: int) -> tuple[DispatchJob, ...]:
    step = StepId("many")
    return tuple(
        DispatchJob(Job(job_id(run_id, step, item, 1), run_id, ACME, step, TOPIC, 1, item, item))
        for item in range(count)
    )


# ── Jobs that an older version wrote ─────────────────────────────────────────────────────────────


async def test_a_job_without_tenant_and_progress_in_its_record_is_renewed_and_answered(
    store: RedisStore, server: Server
) -> None:
    await start(store)
    leased = await lease_one(store)
    with redis.Redis(port=server.port, socket_timeout=5.0) as client:
        (open_jobs,) = client.keys("*:open")
        field = f"s:{leased.job.id}".encode()
        record = msgspec.msgpack.decode(client.hget(open_jobs, field))
        assert record[9:11] == ["", ACME]
        client.hset(open_jobs, field, msgspec.msgpack.encode(record[:9]))
    view = await store.job(leased.job.id)
    assert view is not None
    assert (view.state, view.progress) == (JobState.LEASED, None)
    held_one = JobLease(leased.job.id, leased.fence, "half")
    other = TenantId("other")
    assert (await store.renew_jobs([held_one], ttl_ms=60_000, tenant=other)).renewed == ()
    assert (await store.renew_jobs([held_one], ttl_ms=60_000, tenant=ACME)).lost == ()
    assert await store.progress(leased.job.run_id, [leased.job.id]) == {leased.job.id: "half"}
    (answer,) = await store.accept([result_of(leased)], tenant=other)
    assert getattr(answer, "code", None) is RejectedCode.UNKNOWN_JOB
    (answer,) = await store.accept([result_of(leased)], tenant=ACME)
    assert isinstance(answer, Accepted)


async def test_runs_of_a_version_without_filtered_lists_are_found(
    server: Server, store: RedisStore
) -> None:
    first = await start(store)
    for tenant in ("acme", "globex", "initech"):
        wanted = admission(
            await store.now(), tenant=TenantId(tenant), risk=Risk.HIGH, rerun_of=first
        )
        await store.admit(wanted, within_ms=WITHIN_MS)
    await cancel(store, first)
    before = (await store.list_runs(None)).items
    with server.client() as client:
        # As the version before wrote it.
        for key in client.keys("*"):
            if key.endswith((":listed", ":seen")):
                client.delete(key)
            elif key.endswith(":counters"):
                client.hdel(key, "adopted")
            elif ":run:" in key:
                client.hdel(key, "listed")
                about = msgspec.json.decode(client.hget(key, "about"))
                client.hset(key, "about", msgspec.json.encode(about[:3]))
    assert (await store.list_runs(None)).items == ()
    assert len((await store.list_runs(ACME)).items) == 2
    for _ in range(2):
        other = await RedisStore.open(server.url, namespace=_NAMESPACE, timeout_s=10.0)
        assert (await other.list_runs(None)).items == before
        await other.close()
    ended = RunFilter(statuses=(RunStatus.CANCELLED,))
    assert [run.id for run in (await store.list_runs(None, only=ended)).items] == [first]
    assert len((await store.list_runs(None, only=RunFilter(rerun_of=first))).items) == 3
    await store.purge(finished_before=Instant(await store.now() + 1_000), limit=10)
    # Runs of one millisecond are listed in any order.
    left = tuple(run for run in before if run.id != first)
    assert (await store.list_runs(None)).items == left


async def test_a_store_that_opens_finishes_what_was_shared_by_halves(
    server: Server, store: RedisStore
) -> None:
    flow = workflow("flow")
    for number in (1, 2):
        await store.put_shared_workflow(replace(flow, timeout_s=float(number)))
    root = f"{_NAMESPACE}:{{{shard_of_tenant(ACME):02x}}}:"
    with server.client() as client:
        client.hset(f"{root}shared_versions", "flow", "1")
        client.hdel(f"{root}shared_workflows", "2:flow")
    behind = await store.workflow(ACME, flow.id)
    assert behind is not None
    assert behind.version == 1
    await (await RedisStore.open(server.url, namespace=_NAMESPACE)).close()
    found = await store.workflow(ACME, flow.id)
    assert found is not None
    assert (found.version, found.workflow.timeout_s) == (2, 2.0)


async def test_a_version_that_was_shared_by_halves_is_in_every_shard_after_the_next_one(
    server: Server, store: RedisStore
) -> None:
    flow = workflow("flow")
    root = f"{_NAMESPACE}:{{{shard_of_tenant(ACME):02x}}}:"
    for number in (1, 2):
        await store.put_shared_workflow(replace(flow, timeout_s=float(number)))
    with server.client() as client:
        # As after a call that failed before it came to this shard.
        client.hset(f"{root}shared_versions", "flow", "1")
        client.hdel(f"{root}shared_workflows", "2:flow")
    await store.put_shared_workflow(replace(flow, timeout_s=3.0))
    # A pin names it: it was given out, and is listed.
    for version in (1, 2, 3):
        found = await store.workflow(ACME, flow.id, version=version, source=WorkflowSource.SHARED)
        assert found is not None, version
        assert found.workflow.timeout_s == float(version)


# ── Budgets ──────────────────────────────────────────────────────────────────────────────────────


def test_windows_in_lua_are_those_of_the_core(server: Server) -> None:
    source = resources.files("stanchion.adapters.store.redis").joinpath("part_budgets.lua")
    part = re.sub(r"key\.\w+", "''", source.read_text("utf-8"))
    script = (
        "local now, sized = 0, tostring\n" + part + "local answer = {}\n"
        "for i = 2, #ARGV do\n"
        "  local start = window_start(ARGV[1], tonumber(ARGV[i]))\n"
        "  answer[#answer + 1] = start\n"
        "  answer[#answer + 1] = window_end(ARGV[1], start) or -1\n"
        "end return answer"
    )
    day_ms = 86_400_000
    # Every day of 140 years, at its first and last millisecond.
    instants = [
        Instant(at) for day in range(0, 51_000, 7) for at in (day * day_ms, (day + 1) * day_ms - 1)
    ]
    instants += [Instant(day * day_ms) for day in range(10_000, 12_000)]
    with server.client() as client:
        for window in BudgetWindow:
            told = client.eval(script, 0, window, *instants)
            expected = []
            for at in instants:
                start = window_start(window, at)
                ends = window_end(window, start)
                expected += [start, -1 if ends is None else ends]
            assert told == expected


async def test_a_window_that_has_ended_is_begun_anew(store: RedisStore, server: Server) -> None:
    limits = {"tokens": BudgetLimit(100, BudgetWindow.HOUR)}
    await store.put_tenant(ACME, Tenant(budgets=limits))
    wanted = replace(admission(await store.now()), budget={"tokens": 90})
    assert isinstance(await store.admit(wanted, within_ms=WITHIN_MS), Admitted)
    leased = await lease_one(store)
    key = f"{_NAMESPACE}:{{{shard_of_tenant(ACME):02x}}}:budgets"
    hour_ms = 3_600_000
    for moved_by_ms, is_kept in ((-hour_ms, False), (hour_ms, True), (2 * hour_ms, False)):
        with redis.Redis.from_url(server.url) as client:
            (field,) = client.hkeys(key)
            window, start, *rest = msgspec.msgpack.decode(client.hget(key, field))
            moved = [window, start + moved_by_ms, *rest]
            client.hset(key, field, msgspec.msgpack.encode(moved))
        again = replace(admission(await store.now()), budget={"tokens": 90})
        verdict = await store.admit(again, within_ms=WITHIN_MS)
        assert isinstance(verdict, OverBudget if is_kept else Admitted)
        with redis.Redis.from_url(server.url) as client:  # back, for the next case
            window, _, *rest = msgspec.msgpack.decode(client.hget(key, field))
            client.hset(key, field, msgspec.msgpack.encode([window, start, *rest]))
    # What the first run used is of a window that is over.
    usage = {"tokens": 50}
    await store.renew_jobs([JobLease(leased.job.id, leased.fence, usage=usage)], ttl_ms=60_000)
    assert (await store.budgets(ACME))["tokens"].used == 0


async def test_nothing_of_a_budget_is_left_of_a_run_that_ended(
    store: RedisStore, server: Server
) -> None:
    await store.put_tenant(ACME, Tenant(budgets={"tokens": BudgetLimit(1, BudgetWindow.DAY)}))
    await cancel(store, await start(store))
    assert not [key for key in _keys(server) if key.endswith(":reservations")]
