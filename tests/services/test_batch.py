"""A batch is started in steps: each row is judged after those before it."""

from __future__ import annotations

import asyncio
import sys
from collections import UserDict
from collections.abc import Iterator, KeysView, Sequence

import pytest

from stanchion.core.admission import fingerprint
from stanchion.core.events import Started
from stanchion.core.json_value import JsonObject
from stanchion.core.limits import BEGUN_BYTES_MAX
from stanchion.core.model import StepId, TenantId, Topic, WorkflowId
from stanchion.core.queue import QueueRequest
from stanchion.core.run import decide, evolve
from stanchion.core.workflow import ForEachSpec, JobSpec, StepSpec, Workflow
from stanchion.ports.records import Admission, AlikeStarts
from stanchion.services.batch import StartRow
from stanchion.services.gate_answers import RunStarted
from stanchion.services.work import input_bytes
from tests.services.gatehouse import ACME, Gatehouse, job, virtual, workflow


@virtual
@pytest.mark.parametrize(("entries", "steps"), [(1, 2), (100, 16), (5_000, 30)])
async def test_a_batch_with_large_inputs_takes_more_steps_of_the_store(
    gates: Gatehouse, entries: int, steps: int
) -> None:
    await gates.define(None)
    house = gates.add()
    rows = [StartRow({"l": [0] * entries}, {}, f"key-{number}") for number in range(30)]
    answers = await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    assert [type(answer) for answer in answers] == [RunStarted] * 30
    assert house.store.calls["admit_many"] == steps
    # Now it is known that the workflow has no for-each, and how many of its steps begin at once.
    more = [row._replace(key=f"more-{row.key}") for row in rows]
    await house.gate.batches.start_many(ACME, WorkflowId("plain"), more, actor="caller")
    assert house.store.calls["admit_many"] == steps + 1


@virtual
@pytest.mark.parametrize(
    ("first_steps", "chars", "rows_max"), [(1, 1, 400), (20, 1, 20), (200, 1, 2), (20, 6_000, 8)]
)
async def test_a_batch_of_wide_workflows_takes_more_steps_of_the_store(
    gates: Gatehouse, first_steps: int, chars: int, rows_max: int
) -> None:
    # 400 runs of 200 jobs were 80,000 in one step: it took 0.4 s, and rows got 503.
    await gates.define(None)
    steps: dict[StepId, StepSpec] = {
        StepId(f"s{n}"): JobSpec(topic=Topic("a"), input="${input.d}") for n in range(first_steps)
    }
    await gates.store.put_workflow(ACME, Workflow(id=WorkflowId("wide"), steps=steps))
    house = gates.add()
    sizes = list[int]()
    prepare = house.store.real.prepare_admissions

    def prepared(admissions: Sequence[Admission]) -> Sequence[Admission]:
        sizes.append(len(admissions))
        return prepare(admissions)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(house.store, "prepare_admissions", prepared)
        rows = [StartRow({"d": "y" * chars}, {}, f"key-{number}") for number in range(100)]
        answers = await house.gate.batches.start_many(
            ACME, WorkflowId("wide"), rows, actor="caller"
        )
    assert {type(answer) for answer in answers} == {RunStarted}
    assert max(sizes) <= rows_max


@virtual
async def test_rows_of_which_each_renders_much_are_admitted_a_megabyte_at_a_time(
    gates: Gatehouse,
) -> None:
    await gates.configure(None)
    copies = "${[" + ",".join(["input.d"] * 50) + "]}"
    for name, when in (("alike", None), ("apart", "input.d != ''")):
        step = JobSpec(topic=Topic("a"), input=copies, when=when)
        await gates.store.put_workflow(ACME, workflow(name, work=step))
    house = gates.add()
    sizes = list[int]()
    prepare = house.store.real.prepare_admissions

    def prepared(admissions: Sequence[Admission]) -> Sequence[Admission]:
        sizes.append(sum(input_bytes(each.transition) for each in admissions))
        return prepare(admissions)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(house.store, "prepare_admissions", prepared)
        for name in ("alike", "apart"):
            rows = [StartRow({"d": "y" * 2_000}, {}, f"{name}-{number}") for number in range(60)]
            answers = await house.gate.batches.start_many(
                ACME, WorkflowId(name), rows, actor="caller"
            )
            assert {type(answer) for answer in answers} == {RunStarted}
    assert sum(sizes) > 2 * 60 * 50 * 2_000
    assert max(sizes) <= BEGUN_BYTES_MAX


@pytest.fixture
def usual_s() -> Iterator[float]:
    """How long a thread may usually keep the interpreter from others."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.002)
    yield 0.002
    sys.setswitchinterval(before_s)


@virtual
async def test_threads_take_short_turns_while_the_store_admits_a_batch(
    gates: Gatehouse, usual_s: float
) -> None:
    await gates.define(None)
    house = gates.add()
    turns: set[tuple[str, bool]] = set()

    def note(verb: str, _is_done: bool) -> None:
        turns.add((verb, sys.getswitchinterval() < usual_s / 2))

    house.store.on_call = note
    rows = [StartRow({}, {}, f"key-{number}") for number in range(500)]
    await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    await house.started()
    assert {each for each in turns if each[0].startswith("admit")} == {
        ("admit", False),
        ("admit_many", True),
    }


@virtual
async def test_a_batch_takes_more_steps_of_the_store_while_other_tenants_start_runs(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()

    async def steps(key: str) -> int:
        before = house.store.calls["admit_many"]
        rows = [StartRow({}, {}, f"{key}-{number}") for number in range(100)]
        answers = await house.gate.batches.start_many(
            ACME, WorkflowId("plain"), rows, actor="caller"
        )
        assert [type(answer) for answer in answers] == [RunStarted] * 100
        return house.store.calls["admit_many"] - before

    await house.started()
    assert await steps("alone") == 1
    await house.start(tenant=TenantId("globex"))
    assert await steps("beside") == 2
    await house.started()
    assert await steps("still-beside") == 2
    await asyncio.sleep(1.1)
    assert await steps("alone-again") == 1


@virtual
async def test_a_batch_pauses_between_its_steps_while_other_tenants_start_runs(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    house.store.each_way_s = 0.005
    times: list[float] = []

    def note(verb: str, _is_done: bool) -> None:
        if verb == "admit_many":
            times.append(asyncio.get_running_loop().time())

    house.store.on_call = note

    async def longest_pause_s(key: str, rows: int) -> float:
        times.clear()
        given = [StartRow({}, {}, f"{key}-{number}") for number in range(rows)]
        await house.gate.batches.start_many(ACME, WorkflowId("plain"), given, actor="caller")
        answered, sent = times[1:-1:2], times[2::2]
        assert sent
        return max(sent_s - answered_s for answered_s, sent_s in zip(answered, sent, strict=True))

    await house.started()
    assert await longest_pause_s("alone", 1_000) < 0.006
    await house.start(tenant=TenantId("globex"))
    assert await longest_pause_s("beside", 200) > 0.009


@virtual
async def test_a_batch_takes_its_next_rows_when_those_before_them_are_prepared(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.define(None)
    house = gates.add()
    taken: set[int] = set()

    class Labels(UserDict[str, str]):
        """Notes that its row is taken."""

        def keys(self) -> KeysView[str]:
            taken.add(int(self.data["row"]))
            return self.data.keys()

    prepared = 0

    def prepare(admissions: Sequence[Admission]) -> Sequence[Admission]:
        nonlocal prepared
        prepared += len(admissions)
        assert len(taken) == prepared
        return house.store.real.prepare_admissions(admissions)

    await house.started()  # it is known that the workflow has no for-each
    monkeypatch.setattr(house.store, "prepare_admissions", prepare)
    rows = [StartRow({}, Labels(row=str(each)), f"key-{each}") for each in range(1_000)]
    answers = await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    assert [type(answer) for answer in answers] == [RunStarted] * 1_000
    assert prepared == 1_000
    assert house.store.calls["admit_many"] > 2


@virtual
async def test_the_next_rows_of_a_batch_are_sent_before_those_before_them_are_told(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    told: list[int] = []

    def note(verb: str, is_done: bool) -> None:
        if verb == "admit_many" and not is_done:
            told.append(len(house.admitted))

    house.store.on_call = note
    rows = [
        StartRow({}, {"row": str(number)}, f"key-{number}")
        for number in range(2 * house.store.admissions_max)
    ]
    await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    assert told[:2] == [0, 0]
    assert len(house.admitted) == len(rows)


@virtual
async def test_a_batch_prepares_no_more_steps_ahead_after_other_tenants_have_gone(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gates.define(None)
    house = gates.add()
    house.store.each_way_s = 0.05
    prepared, ahead = 0, [0]

    def prepare(admissions: Sequence[Admission]) -> Sequence[Admission]:
        nonlocal prepared
        prepared += 1
        ahead.append(prepared - house.store.calls["admit_many"])
        return house.store.real.prepare_admissions(admissions)

    monkeypatch.setattr(house.store, "prepare_admissions", prepare)

    async def most_ahead(key: str, rows: int) -> int:
        ahead.clear()
        given = [StartRow({}, {}, f"{key}-{number}") for number in range(rows)]
        answers = await house.gate.batches.start_many(
            ACME, WorkflowId("plain"), given, actor="caller"
        )
        assert [type(answer) for answer in answers] == [RunStarted] * rows
        return max(ahead)

    await house.started()
    alone = await most_ahead("alone", 10 * house.store.admissions_max)
    await house.start(tenant=TenantId("globex"))
    # After a second, and eight steps that were sent one by one, the other tenant has gone.
    assert await most_ahead("beside", 30 * 50) == alone


@virtual
@pytest.mark.parametrize("broken", [None, 4])
async def test_the_rows_of_a_batch_begin_as_if_each_were_decided_by_itself(
    gates: Gatehouse, monkeypatch: pytest.MonkeyPatch, broken: int | None
) -> None:
    """Also beside a row that is not alike: its expression fails."""
    await gates.define(None)
    template: JsonObject = {"n": "${input.n + 1}", "same": "text"}
    two = workflow("two", a=JobSpec(topic=Topic("a"), input=template), b=job("b"))
    await gates.store.put_workflow(ACME, two)
    house = gates.add()
    asked: list[Sequence[Admission]] = []

    def prepare(admissions: Sequence[Admission]) -> Sequence[Admission]:
        asked.append(admissions)
        return house.store.real.prepare_admissions(admissions)

    monkeypatch.setattr(house.store, "prepare_admissions", prepare)
    given: list[JsonObject] = [{"n": "x" if n == broken else n} for n in range(7)]
    queue = QueueRequest(priority=7)
    rows = [StartRow(each, {}, f"key-{n}", queue) for n, each in enumerate(given)]
    before = [StartRow({"n": 1}, {}, "before")]
    await house.gate.batches.start_many(ACME, WorkflowId("two"), before, actor="caller")
    asked.clear()
    house.admitted.clear()
    answers = await house.gate.batches.start_many(ACME, WorkflowId("two"), rows, actor="caller")
    (admissions,) = asked
    assert isinstance(admissions, AlikeStarts) is (broken is None)
    plan = house.admitted[0][1]
    for row, each, answer in zip(rows, admissions, answers, strict=True):
        assert isinstance(answer, RunStarted)
        assert each.before is not None
        assert (each.key, each.run.input, each.queue) == (row.key, row.input, queue)
        assert each.fingerprint == fingerprint(
            WorkflowId("two"), {"input": row.input, "priority": 7}
        )
        event = Started(actor="caller")
        assert each.transition == decide(plan, each.before, event, each.before.created_at)
        assert each.run == evolve(each.before, each.transition)
        assert await gates.run(answer.run_id) == each.run
    assert len({each.run.id for each in admissions}) == len(rows)
    assert [run for run, _ in house.admitted] == [each.run for each in admissions]


@virtual
async def test_a_batch_whose_workflow_has_become_a_for_each_takes_more_steps_of_the_store(
    gates: Gatehouse,
) -> None:
    await gates.define(None)
    house = gates.add()
    rows = [StartRow({"l": [0] * 400}, {}, f"key-{number}") for number in range(30)]
    await house.started()
    each = ForEachSpec(for_each="${input.l}", topic=Topic("work"), input="${item}")
    await gates.store.put_workflow(ACME, workflow("plain", each=each))
    answers = await house.gate.batches.start_many(ACME, WorkflowId("plain"), rows, actor="caller")
    assert [type(answer) for answer in answers] == [RunStarted] * 30
    assert house.store.calls["admit_many"] == 1 + 15
