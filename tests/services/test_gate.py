"""Everything that makes a run passes the gate, and every answer of the gate means one thing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stanchion import telemetry
from stanchion.adapters.store.memory import MemoryStore
from stanchion.core.admission import TooLate, Verdict
from stanchion.core.faults import Fault as InputFault
from stanchion.core.faults import WorkflowFaults
from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.model import (
    Risk,
    RunId,
    RunStatus,
    TenantId,
    Topic,
    WorkflowId,
    shard_of_run,
    shard_of_tenant,
)
from stanchion.core.rerun import RerunOptions
from stanchion.core.schema import InputSchema
from stanchion.ports.bus import Bell
from stanchion.ports.errors import BackendTimeout
from stanchion.ports.records import Admission, Tenant
from stanchion.services.batch import StartRow
from stanchion.services.gate_answers import (
    GateCode,
    GateFailed,
    GateFull,
    InvalidInput,
    JobThrottled,
    KeyMismatch,
    RunStarted,
    StartAnswer,
)
from stanchion.services.limiter import ENOUGH
from stanchion.services.log import LOGGER
from stanchion.services.plans import UnknownWorkflow
from stanchion.services.work import TenantOverloaded
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import Meanwhile
from tests.services.gatehouse import (
    ACME,
    GLOBEX,
    PLAIN,
    Gatehouse,
    House,
    below,
    job,
    never,
    tally,
    virtual,
    workflow,
)

ASKED: JsonObject = {"question": "why?"}
DEMANDING: JsonObject = {"type": "object", "required": ["question"]}
STRICTER: JsonObject = {"type": "object", "required": ["question", "reason"]}


# ── Starts ───────────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_start_makes_a_run_of_the_newest_versions(gates: Gatehouse) -> None:
    await gates.define()
    await gates.store.put_workflow(
        ACME, workflow("outer", risk=Risk.HIGH, first=job("plan"), inner=below("plain"))
    )
    house = gates.add()
    answer = await house.start(WorkflowId("outer"), ASKED)
    assert isinstance(answer, RunStarted)
    assert (answer.status, answer.replayed) == (RunStatus.RUNNING, False)
    run = await gates.run(answer.run_id)
    assert (run.tenant, run.workflow_id, run.workflow_version) == (ACME, "outer", 1)
    assert (run.uses, run.risk, run.input) == ({"plain": 1}, Risk.HIGH, ASKED)
    assert shard_of_run(run.id) == shard_of_tenant(ACME)
    assert run.holds_slot
    assert [line.actor for line in (await gates.store.timeline(run.id)).items] == ["caller"] * 4
    assert [admitted.id for admitted, _ in house.admitted] == [run.id]


@virtual
async def test_the_starter_of_a_run_is_its_caller_whichever_way_it_begins(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    gate, plain = house.gate, WorkflowId("plain")
    old = await house.started()
    await gates.cancel(house, old)
    rows = [StartRow({}, {}, "row"), StartRow({}, {"a": "b"}, "other row")]
    answers = [
        await gate.start(ACME, plain, {}, key=None, actor="s"),
        await gate.start(ACME, plain, {}, key=None, actor="schedule s", starter="s"),
        *await gate.batches.start_many(ACME, plain, rows, actor="s"),
        await gate.submit(ACME, Topic("mail"), [1], key=None, actor="s"),
        await gate.reruns.rerun(ACME, old, RerunOptions(), key=None, actor="s"),
    ]
    for answer in answers:
        assert isinstance(answer, RunStarted)
        assert (await gates.run(answer.run_id)).starter == "s"


@virtual
async def test_a_start_wakes_workers_and_watchers(gates: Gatehouse) -> None:
    await gates.define()
    await gates.store.put_workflow(ACME, workflow("pair", left=job("left"), right=job("right")))
    house = gates.add()
    await house.start(WorkflowId("pair"))
    assert sorted(house.bells.rung) == [
        (Bell.CHANGED, "acme"),
        (Bell.READY, "left"),
        (Bell.READY, "right"),
    ]


@virtual
async def test_a_run_that_ends_as_it_begins_frees_its_slot_and_says_so(gates: Gatehouse) -> None:
    await gates.define()
    skipped = msgspec.structs.replace(job("work"), when="false")
    await gates.store.put_workflow(ACME, workflow("idle", only=skipped))
    house = gates.add()
    answer = await house.start(WorkflowId("idle"))
    assert isinstance(answer, RunStarted)
    assert answer.status is RunStatus.SUCCEEDED
    assert (Bell.FINISHED, answer.run_id) in house.bells.rung
    ended = house.registry.get_sample_value(
        "stanchion_runs_finished_total", {"status": "succeeded"}
    )
    assert ended == 1
    assert await gates.store.active_runs(ACME) == 0


@virtual
async def test_the_span_of_a_run_that_ends_as_it_begins_is_ended(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.define()
    skipped = msgspec.structs.replace(job("work"), when="false")
    await gates.store.put_workflow(ACME, workflow("idle", only=skipped))
    house = gates.add()

    async def start() -> object:
        caller = f"00-{'a' * 32}-{'b' * 16}-01"
        idle = WorkflowId("idle")
        return await house.gate.start(ACME, idle, {}, key=None, actor="me", traceparent=caller)

    assert isinstance(await start(), RunStarted), "without an exporter, the context is only stored"
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracing", telemetry.Tracing(provider, None))
    assert isinstance(await start(), RunStarted)
    assert "run idle" in [each.name for each in exporter.get_finished_spans()]


@virtual
async def test_the_store_is_given_no_more_time_than_is_left_for_the_answer(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.define()
    given: list[int] = []

    async def admit(_admission: object, *, within_ms: int) -> NoReturn:
        given.append(within_ms)
        raise BackendTimeout("no answer")

    monkeypatch.setattr(gates.store, "admit", admit)
    for left_ms in (100, 1):
        house = gates.add()
        house.patch({"admission": {"lock_wait_s": 1}})
        house.store.each_way_s = 0
        house.store.script("workflow", partial(asyncio.sleep, 1.25 - left_ms / 1_000))
        assert isinstance(await house.start(), GateFailed)
    assert given == [100, 1]


@virtual
async def test_a_workflow_that_is_not_there_is_unknown_to_its_tenant_only(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add()
    assert await house.start(WorkflowId("other")) == UnknownWorkflow(WorkflowId("other"))
    assert await house.start(tenant=GLOBEX) == UnknownWorkflow(PLAIN)


@virtual
async def test_workflows_that_do_not_fit_together_are_refused_with_the_reason(
    gates: Gatehouse,
) -> None:
    await gates.define()
    await gates.store.put_workflow(ACME, workflow("outer", inner=below("missing")))
    answer = await gates.add().start(WorkflowId("outer"))
    assert isinstance(answer, WorkflowFaults)
    assert [fault.path for fault in answer.faults] == ["steps.inner.workflow"]


async def demand(gates: Gatehouse, schema: JsonObject) -> None:
    await gates.store.put_workflow(
        ACME,
        msgspec.structs.replace(workflow("plain", work=job("work")), input_schema=schema),
    )


@virtual
async def test_an_input_is_held_against_the_schema(gates: Gatehouse) -> None:
    await gates.configure()
    await demand(gates, DEMANDING)
    house = gates.add()
    assert await house.start() == InvalidInput((InputFault("input.question", "missing"),))
    assert isinstance(await house.start(given=ASKED), RunStarted)


@virtual
async def test_an_input_that_the_newest_schema_refuses_is_checked_once(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.configure()
    await demand(gates, DEMANDING)
    house = gates.add()
    assert isinstance(await house.start(given=ASKED), RunStarted)
    checked: list[object] = []
    check = InputSchema.faults

    def counting(schema: InputSchema, value: JsonValue) -> tuple[InputFault, ...]:
        checked.append(value)
        return check(schema, value)

    monkeypatch.setattr(InputSchema, "faults", counting)
    assert isinstance(await house.start(), InvalidInput)
    assert len(checked) == 1


@virtual
async def test_the_time_of_a_check_is_charged_to_the_tenant(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.configure()
    await demand(gates, DEMANDING)
    await gates.define(tenant=GLOBEX)
    house = gates.add()

    def slow(_schema: InputSchema, _value: JsonValue) -> tuple[InputFault, ...]:
        house.processor_s += 3
        return (InputFault("input", "no"),)

    monkeypatch.setattr(InputSchema, "faults", slow)
    assert isinstance(await house.start(), InvalidInput)
    with pytest.raises(TenantOverloaded):
        await house.start()
    assert isinstance(await house.start(tenant=GLOBEX), RunStarted)
    await asyncio.sleep(8.5)
    assert isinstance(await house.start(), InvalidInput)


@virtual
async def test_only_the_newest_schema_refuses_and_accepts(gates: Gatehouse) -> None:
    await gates.configure()
    await demand(gates, DEMANDING)
    house = gates.add()
    assert isinstance(await house.start(given=ASKED), RunStarted)
    await demand(gates, STRICTER)  # by another replica: this one remembers the old version
    assert await house.start(given=ASKED) == InvalidInput((InputFault("input.reason", "missing"),))
    await demand(gates, {"type": "object"})
    assert isinstance(await house.start(), RunStarted)


@virtual
async def test_a_full_tenant_is_told_its_limit_and_when_to_come_again(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    await house.started()
    first = await house.started()
    answer = await house.start()
    assert isinstance(answer, GateFull)
    assert (answer.limit, answer.active) == (2, 2)
    assert 1_000 <= answer.retry_after_ms <= 30_000
    await gates.cancel(house, first)
    assert isinstance(await house.start(), RunStarted)


@pytest.mark.parametrize("callers", [10, 50, 100])
@virtual
async def test_however_many_race_on_two_replicas_the_cap_holds(
    gates: Gatehouse, callers: int
) -> None:
    await gates.define(2)
    await gates.define(3, tenant=GLOBEX)
    houses = [gates.add(), gates.add()]
    acme, globex = await asyncio.gather(
        asyncio.gather(*(houses[n % 2].start() for n in range(callers))),
        asyncio.gather(*(houses[n % 2].start(tenant=GLOBEX) for n in range(callers))),
    )
    assert tally(acme) == {"admitted": 2, "full": callers - 2}
    assert tally(globex) == {"admitted": 3, "full": callers - 3}


@virtual
async def test_a_workflow_that_changed_elsewhere_is_read_again(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add()
    await house.started()
    await gates.store.put_workflow(ACME, workflow("plain", work=job("other")))
    answer = await house.start()
    assert isinstance(answer, RunStarted)
    assert (await gates.run(answer.run_id)).workflow_version == 2


@virtual
async def test_a_workflow_that_never_stands_still_is_given_up(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add()
    changes = iter(range(100))

    async def change() -> None:
        topic = f"topic-{next(changes)}"
        await gates.store.put_workflow(ACME, workflow("plain", work=job(topic)))

    house.store.script("admit", *[change] * 20)
    answer = await house.start()
    assert isinstance(answer, GateFailed)
    assert answer.code is GateCode.GATE_UNAVAILABLE
    assert house.store.calls["admit"] == 5


# ── Starts that come together ────────────────────────────────────────────────────────────────────


async def crowd(
    house: House, inputs: Sequence[JsonObject], *, keys: Sequence[str] | None = None
) -> list[StartAnswer]:
    """Start runs at once, of a plan that the replica has begun before."""
    await house.started()
    house.store.calls.clear()
    keyed: Sequence[str | None] = keys or [None] * len(inputs)
    starts = zip(inputs, keyed, strict=True)
    return await asyncio.gather(*(house.start(given=given, key=key) for given, key in starts))


@virtual
async def test_starts_that_come_while_one_is_under_way_are_one_step_of_the_store(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house, other = gates.add(), gates.add()
    answers = await crowd(house, [{"n": n} for n in range(20)])
    assert tally(answers) == {"admitted": 20}
    assert house.store.calls == {"admit": 1, "admit_many": 1}
    assert len(house.admitted) == 21
    alone = await other.start(given={"n": 7})
    assert isinstance(alone, RunStarted)
    like = await gates.run(alone.run_id)
    for number, answer in enumerate(answers):
        assert isinstance(answer, RunStarted)
        run = await gates.run(answer.run_id)
        assert (run.id, run.input) == (answer.run_id, {"n": number})
        assert (run.starter, run.status, run.labels) == ("caller", like.status, {})
        assert (run.workflow_version, run.risk) == (like.workflow_version, like.risk)
        assert [*run.steps] == [*like.steps]
    jobs = await gates.store.lease_jobs("worker", [Topic("work")], max_jobs=30, ttl_ms=1_000)
    given = Counter(str(each.job.input) for each in jobs)
    assert given == Counter(map(str, [{}, {"n": 7}, *({"n": n} for n in range(20))]))


@virtual
async def test_starts_that_come_together_keep_the_cap_and_their_keys(gates: Gatehouse) -> None:
    await gates.define(5)
    house = gates.add()
    keys = [f"key-{number % 8}" for number in range(16)]
    answers = await crowd(house, [{"n": n % 8} for n in range(16)], keys=keys)
    # The first run of the plan has one of the five slots.
    assert tally(answers) == {"admitted": 4, "replayed": 4, "full": 8}
    assert await gates.store.active_runs(ACME) == 5
    admitted = [answer for answer in answers if isinstance(answer, RunStarted)]
    assert len({answer.run_id for answer in admitted}) == 4
    assert house.store.calls["admit_many"] == 1


@virtual
async def test_a_caller_who_leaves_before_its_start_is_sent_starts_no_run(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()
    await house.started()
    starts = [asyncio.create_task(house.start()) for _ in range(4)]
    await asyncio.sleep(0)
    starts[2].cancel()
    answers = await asyncio.gather(*starts, return_exceptions=True)
    assert isinstance(answers[2], asyncio.CancelledError)
    assert await gates.store.active_runs(ACME) == 4


@virtual
async def test_a_caller_who_leaves_while_its_start_is_under_way_takes_no_other_along(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    await house.started()
    starts = [asyncio.create_task(house.start()) for _ in range(4)]
    left = asyncio.create_task(asyncio.sleep(house.store.each_way_s * 2.5))
    left.add_done_callback(lambda _: starts[2].cancel())
    answers = await asyncio.gather(*starts, return_exceptions=True)
    assert isinstance(answers[2], asyncio.CancelledError)
    assert [type(answer) for answer in answers].count(RunStarted) == 3
    # Its run was admitted with the others, and is kept.
    assert (await gates.store.active_runs(ACME), len(house.admitted)) == (5, 5)
    assert isinstance(await house.start(), RunStarted)  # its place is free


@virtual
async def test_a_step_that_fails_is_an_answer_to_each_of_its_callers(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()
    house.store.script("admit_many", Fault.ERROR)
    answers = await crowd(house, [{}] * 4)
    assert tally(answers) == {"admitted": 1, "gate_unavailable": 3}
    assert await gates.store.active_runs(ACME) == 2
    assert isinstance(await house.start(), RunStarted)


@virtual
async def test_starts_that_cannot_be_prepared_together_go_by_themselves(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()

    def choke(admissions: Sequence[Admission]) -> Sequence[Admission]:
        raise ValueError(f"{len(admissions)} cannot be encoded")

    house.store.prepare_admissions = choke  # type: ignore[method-assign] # a bug of the adapter
    answers = await crowd(house, [{}] * 4)
    assert tally(answers) == {"admitted": 4}
    assert house.store.calls == {"admit": 4}


@virtual
async def test_starts_that_come_together_read_a_changed_workflow_again(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()

    async def change() -> None:
        await gates.store.put_workflow(ACME, workflow("plain", work=job("other")))

    house.store.script("admit_many", change)
    answers = await crowd(house, [{}] * 4)
    assert tally(answers) == {"admitted": 4}
    versions = [
        (await gates.run(answer.run_id)).workflow_version
        for answer in answers
        if isinstance(answer, RunStarted)
    ]
    assert versions == [1, 2, 2, 2]


@virtual
async def test_starts_with_time_limits_far_apart_are_sent_apart(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()
    await house.started()
    house.store.each_way_s = 0.1
    starts = []
    for _ in range(3):
        starts.append(asyncio.create_task(house.start()))
        await asyncio.sleep(0.08)
    assert tally(await asyncio.gather(*starts)) == {"admitted": 3}
    assert house.store.calls["admit_many"] == 2


@virtual
async def test_a_step_takes_no_longer_than_the_first_of_its_starts_waits(gates: Gatehouse) -> None:
    asked: list[int] = []

    class Overheard(MemoryStore):
        async def admit_many(
            self, admissions: Sequence[Admission], *, within_ms: int
        ) -> tuple[Verdict, ...]:
            asked.append(within_ms)
            return await super().admit_many(admissions, within_ms=within_ms)

    gates.store = Overheard(gates.clock)
    await gates.define(None)
    house = gates.add()
    house.patch({"admission": {"lock_wait_s": 0.5}})
    await house.started()
    house.store.each_way_s = 0.1
    starts = [asyncio.create_task(house.start()) for _ in range(2)]
    await asyncio.sleep(0.04)
    answers = await asyncio.gather(*starts, house.start())
    assert tally(answers) == {"admitted": 3}
    # Of 750 ms, 200 were spent while the first start was under way.
    assert [540 <= within_ms <= 550 for within_ms in asked] == [True]


@virtual
async def test_many_starts_do_not_wait_for_the_end_of_the_step_before(gates: Gatehouse) -> None:
    await gates.define(None)
    house = gates.add()
    await house.started()
    house.store.calls.clear()
    house.store.each_way_s = 0.1
    starts = [asyncio.create_task(house.start()) for _ in range(1 + ENOUGH)]
    await asyncio.sleep(0.05)
    assert house.store.calls == {"admit": 1, "admit_many": 1}
    few = [asyncio.create_task(house.start()) for _ in range(ENOUGH - 1)]
    await asyncio.sleep(0.05)
    assert house.store.calls == {"admit": 1, "admit_many": 1}
    assert tally(await asyncio.gather(*starts, *few)) == {"admitted": 2 * ENOUGH}
    assert house.store.calls == {"admit": 1, "admit_many": 2}


@virtual
async def test_a_start_does_not_wait_for_those_of_another_tenant(gates: Gatehouse) -> None:
    await gates.define(None)
    await gates.define(None, tenant=GLOBEX)
    house = gates.add()
    await house.started()
    await house.started(tenant=GLOBEX)
    house.store.calls.clear()
    house.store.script("admit", never)
    stuck = asyncio.create_task(house.start())
    await asyncio.sleep(house.store.each_way_s * 1.5)
    assert isinstance(await house.start(tenant=GLOBEX), RunStarted)
    assert not stuck.done()
    assert isinstance(await stuck, GateFailed)


# ── Idempotency ──────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_of_fifty_equals_at_once_one_makes_the_run(gates: Gatehouse) -> None:
    await gates.define(2)
    houses = [gates.add(), gates.add()]
    answers = await asyncio.gather(*(houses[n % 2].start(key="once") for n in range(50)))
    assert tally(answers) == {"admitted": 1, "replayed": 49}
    assert len({answer.run_id for answer in answers if isinstance(answer, RunStarted)}) == 1
    assert await gates.store.active_runs(ACME) == 1


@virtual
async def test_a_replay_shows_the_run_as_it_is_also_when_the_tenant_is_full(
    gates: Gatehouse,
) -> None:
    await gates.define(1)
    house = gates.add()
    run_id = await house.started(key="once")
    assert await house.start(key="once") == RunStarted(run_id, RunStatus.RUNNING, replayed=True)
    await gates.cancel(house, run_id)
    await house.started()
    assert await house.start(key="once") == RunStarted(run_id, RunStatus.CANCELLED, replayed=True)


@pytest.mark.parametrize("fault", [Fault.ERROR, never], ids=["error", "silence"])
@virtual
async def test_a_replay_whose_run_cannot_be_read_repeats_what_was_said(
    gates: Gatehouse,
    fault: Fault | Meanwhile,
) -> None:
    await gates.define(1)
    house = gates.add()
    run_id = await house.started(key="once")
    await gates.cancel(house, run_id)
    house.store.script("load", fault)
    assert await house.start(key="once") == RunStarted(run_id, RunStatus.RUNNING, replayed=True)


@virtual
async def test_a_key_belongs_to_its_tenant_and_its_request(gates: Gatehouse) -> None:
    await gates.define()
    await gates.define(tenant=GLOBEX)
    house = gates.add()
    run_id = await house.started(key="once")
    assert await house.start(given={"a": 1}, key="once") == KeyMismatch()
    elsewhere = await house.start(tenant=GLOBEX, key="once")
    assert isinstance(elsewhere, RunStarted)
    assert (elsewhere.replayed, elsewhere.run_id != run_id) == (False, True)


@virtual
async def test_a_mismatch_is_told_before_the_tenant_is_found_full(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    await house.started(key="once")
    assert await house.start(given={"a": 1}, key="once") == KeyMismatch()


@virtual
async def test_a_refusal_does_not_bind_the_key(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    first = await house.started()
    assert isinstance(await house.start(key="once"), GateFull)
    house.store.script("admit", Fault.ERROR)
    assert isinstance(await house.start(key="once"), GateFailed)
    await gates.cancel(house, first)
    answer = await house.start(key="once")
    assert isinstance(answer, RunStarted)
    assert not answer.replayed


@virtual
async def test_a_lost_answer_makes_no_second_run(gates: Gatehouse) -> None:
    await gates.define(2)
    house = gates.add()
    house.store.script("admit", Fault.LOST_REPLY)
    assert isinstance(await house.start(key="once"), GateFailed)
    answer = await house.start(key="once")
    assert isinstance(answer, RunStarted)
    assert answer.replayed
    assert await gates.store.active_runs(ACME) == 1


@virtual
async def test_a_replay_does_not_depend_on_what_the_workflow_says_today(gates: Gatehouse) -> None:
    await gates.configure(5)
    await demand(gates, DEMANDING)
    house = gates.add()
    made = await house.start(given=ASKED, key="once")
    assert isinstance(made, RunStarted)
    await demand(gates, STRICTER)
    other = gates.add()  # has never seen the old one
    replayed = RunStarted(made.run_id, RunStatus.RUNNING, replayed=True)
    assert await other.start(given=ASKED, key="once") == replayed
    assert await other.start(given={"question": "how?"}, key="once") == KeyMismatch()
    assert isinstance(await other.start(given=ASKED, key="fresh"), InvalidInput)
    assert isinstance(await other.start(given=ASKED), InvalidInput)
    await gates.store.put_workflow(ACME, workflow("plain", inner=below("missing")))
    third = gates.add()
    assert await third.start(given=ASKED, key="once") == replayed
    assert isinstance(await third.start(given=ASKED, key="fresh"), WorkflowFaults)
    assert await gates.store.active_runs(ACME) == 1


# ── Single jobs ──────────────────────────────────────────────────────────────────────────────────


@virtual
async def test_a_single_job_takes_no_slot_and_is_limited_by_rate(gates: Gatehouse) -> None:
    await gates.store.put_tenant(ACME, Tenant(max_concurrent_runs=0, job_rate_per_s=2))
    house = gates.add(strategy="lock")

    async def submit(key: str | None = None) -> object:
        return await house.gate.submit(ACME, Topic("mail"), [1], key=key, actor="caller")

    first = await submit("once")
    assert isinstance(first, RunStarted)
    run = await gates.run(first.run_id)
    assert (run.workflow_id, run.input, run.holds_slot) == ("job/mail", {"input": [1]}, False)
    assert isinstance(await submit(), RunStarted)
    assert await submit() == JobThrottled(30_000)
    assert await submit("once") == RunStarted(first.run_id, RunStatus.RUNNING, replayed=True)
    other = await house.gate.submit(ACME, Topic("mail"), [2], key="once", actor="caller")
    assert other == KeyMismatch()
    assert house.locks.calls["acquire"] == 0
    leased = await gates.store.lease_jobs("w", [Topic("mail")], max_jobs=5, ttl_ms=1000)
    assert [each.job.input for each in leased] == [[1], [1]]
    await gates.cancel(house, first.run_id)
    again = await house.gate.reruns.rerun(
        ACME, first.run_id, RerunOptions(), key=None, actor="caller"
    )
    assert again == JobThrottled(30_000)


# ── Silence ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fault", [Fault.ERROR, Fault.HANG, never], ids=["error", "hang", "silence"]
)
@pytest.mark.parametrize("verb", ["workflow", "list_documents", "admit"])
@pytest.mark.parametrize("wait_s", [0, 2, 60])
@virtual
async def test_a_store_that_is_away_is_an_answer_within_the_budget(
    gates: Gatehouse,
    fault: Fault | Meanwhile,
    verb: str,
    wait_s: float,
) -> None:
    await gates.define()
    house = gates.add()
    house.patch({"admission": {"lock_wait_s": wait_s}})
    house.store.script(verb, fault)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answer = await house.start()
    assert isinstance(answer, GateFailed)
    assert answer.code is GateCode.GATE_UNAVAILABLE
    assert 1_000 <= answer.retry_after_ms <= 10_000
    assert loop.time() - began_s < wait_s + 0.5
    assert isinstance(await house.start(), RunStarted)  # recovery takes no restart
    assert await gates.store.active_runs(ACME) == 1


@virtual
async def test_the_store_is_asked_for_no_longer_than_its_caller_waits(gates: Gatehouse) -> None:
    asked: list[int] = []

    class Overheard(MemoryStore):
        async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
            asked.append(within_ms)
            return await super().admit(admission, within_ms=within_ms)

    gates.store = Overheard(gates.clock)
    await gates.define(None)
    house = gates.add()
    house.store.script("list_documents", Fault.SLOW)
    for wait_s in (2, 0.2, 60):
        house.patch({"admission": {"lock_wait_s": wait_s}})
        await house.start()
    slow_ms, short_ms, long_ms = asked
    assert 1_200 <= slow_ms <= 1_250  # a second was spent before
    assert 400 <= short_ms <= 450
    assert long_ms == 2_000


@pytest.mark.parametrize(
    ("strategy", "code"),
    [("atomic", GateCode.GATE_UNAVAILABLE), ("lock", GateCode.LIMIT_CHECK_FAILED)],
)
@virtual
async def test_a_store_that_comes_to_it_too_late_counts_as_silent(
    gates: Gatehouse, strategy: str, code: GateCode
) -> None:
    class Late(MemoryStore):
        async def admit(self, admission: Admission, *, within_ms: int) -> Verdict:
            del admission, within_ms
            return TooLate()

    gates.store = Late(gates.clock)
    await gates.define()
    answer = await gates.add(strategy=strategy).start()
    assert isinstance(answer, GateFailed)
    assert answer.code is code


@virtual
async def test_a_rerun_and_a_single_job_meet_the_same_silence(gates: Gatehouse) -> None:
    await gates.define()
    house = gates.add()
    house.store.away()
    rerun = await house.gate.reruns.rerun(
        ACME, RunId("00"), RerunOptions(), key=None, actor="caller"
    )
    submit = await house.gate.submit(ACME, Topic("mail"), {}, key=None, actor="caller")
    for answer in (rerun, submit):
        assert isinstance(answer, GateFailed)
        assert answer.code is GateCode.GATE_UNAVAILABLE


@virtual
async def test_an_outage_is_answered_with_growing_patience_until_it_is_over(
    gates: Gatehouse,
) -> None:
    await gates.define()
    house = gates.add()
    house.store.away()
    told: list[int] = []
    for _ in range(20):
        answer = await house.start()
        assert isinstance(answer, GateFailed)
        told.append(answer.retry_after_ms)
        await asyncio.sleep(1)
    assert max(told[:3]) < 4_000
    assert min(told[-3:]) >= 5_000
    house.store.back()
    await house.started()
    house.store.away()
    answer = await house.start()
    assert isinstance(answer, GateFailed)
    assert answer.retry_after_ms <= 2_000


@virtual
async def test_an_outage_of_the_store_is_logged_once_and_so_is_its_end(
    gates: Gatehouse, caplog: pytest.LogCaptureFixture
) -> None:
    await gates.define()
    house = gates.add()
    with caplog.at_level(logging.INFO, LOGGER.name):
        for _ in range(2):
            house.store.away()
            for _ in range(3):
                assert isinstance(await house.start(), GateFailed)
            house.store.back()
            for _ in range(3):
                await house.start()
    logged = [line.getMessage() for line in caplog.records]
    outage = ["admission_failed", "admission_recovered"]
    assert [each for each in logged if each in outage] == outage * 2


# ── What is counted ──────────────────────────────────────────────────────────────────────────────


@virtual
async def test_every_answer_is_counted_by_tenant_workflow_and_outcome(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    old = await house.started(key="once")
    await house.start(key="once")
    await house.start(given={"a": 1}, key="once")
    await house.start()
    house.store.script("admit", Fault.ERROR)
    await house.start()
    await house.start(WorkflowId("unknown"))
    house.store.script("workflow", Fault.ERROR)
    await house.start(WorkflowId("made-up"))
    await house.gate.reruns.rerun(ACME, old, RerunOptions(), key=None, actor="caller")

    def decisions(workflow_id: str, outcome: str) -> float | None:
        return house.metric(
            "admission_decisions_total", tenant="acme", workflow=workflow_id, outcome=outcome
        )

    for outcome in ("admitted", "replayed", "full", "mismatch", "gate_unavailable"):
        assert decisions("plain", outcome) == 1, outcome
    # Nobody knows whether there is such a workflow: it gets no label of its own.
    assert decisions("other", "gate_unavailable") == 1
    assert decisions("unknown", "admitted") is None
    assert house.metric("admission_wait_seconds_count", tenant="acme", endpoint="start") == 7
    assert house.metric("admission_wait_seconds_count", tenant="acme", endpoint="rerun") == 1


@virtual
async def test_labels_are_capped(gates: Gatehouse) -> None:
    house = gates.add()
    for tenant in map(TenantId, ("first", "second", "third", "fourth")):
        await gates.define(tenant=tenant)
        await house.started(tenant=tenant)

    def admitted(tenant: str, workflow_id: str) -> float | None:
        return house.metric(
            "admission_decisions_total", tenant=tenant, workflow=workflow_id, outcome="admitted"
        )

    assert admitted("first", "plain") == admitted("second", "plain") == 1
    assert admitted("other", "other") == 2
    assert admitted("third", "plain") is None
