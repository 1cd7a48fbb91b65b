"""A rerun passes the gate as a start does, and repeats what the old run was."""

from __future__ import annotations

from stanchion.core.model import RunId, RunStatus, StepId, TenantId
from stanchion.core.rerun import RerunOptions, RerunRefused
from stanchion.services.gate_answers import GateFull, KeyMismatch, RunStarted, UnknownRun
from tests.services.gatehouse import ACME, GLOBEX, Gatehouse, job, virtual, workflow


@virtual
async def test_a_rerun_passes_the_same_gate(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    old = await house.started(key="once")
    await gates.cancel(house, old)
    again = await house.gate.reruns.rerun(ACME, old, RerunOptions(), key="again", actor="reviewer")
    assert isinstance(again, RunStarted)
    run = await gates.run(again.run_id)
    assert (run.rerun_of, run.holds_slot, run.status) == (old, True, RunStatus.RUNNING)
    full = await house.gate.reruns.rerun(ACME, old, RerunOptions(), key=None, actor="reviewer")
    assert isinstance(full, GateFull)
    replay = await house.gate.reruns.rerun(ACME, old, RerunOptions(), key="again", actor="reviewer")
    assert replay == RunStarted(again.run_id, RunStatus.RUNNING, replayed=True)
    for key in ("once", "again"):
        other = await house.gate.reruns.rerun(
            ACME, old, RerunOptions(from_step=StepId("work")), key=key, actor="reviewer"
        )
        assert other == KeyMismatch()


@virtual
async def test_a_rerun_keeps_the_versions_it_began_with(gates: Gatehouse) -> None:
    await gates.define(1)
    house = gates.add()
    old = await house.started()
    await gates.cancel(house, old)
    await gates.store.put_workflow(ACME, workflow("plain", work=job("other")))
    again = await gates.add().gate.reruns.rerun(
        ACME, old, RerunOptions(), key=None, actor="reviewer"
    )
    assert isinstance(again, RunStarted)
    assert (await gates.run(again.run_id)).workflow_version == 1


@virtual
async def test_only_a_finished_run_of_ones_own_is_done_again(gates: Gatehouse) -> None:
    await gates.define(5)
    house = gates.add()
    running = await house.started()
    gone = RunId("00")

    async def rerun(run_id: RunId, tenant: TenantId = ACME) -> object:
        return await house.gate.reruns.rerun(
            tenant, run_id, RerunOptions(), key=None, actor="reviewer"
        )

    refused = await rerun(running)
    assert isinstance(refused, RerunRefused)
    assert refused.code == "run_unfinished"
    assert await rerun(gone) == UnknownRun(gone)
    await gates.cancel(house, running)
    assert await rerun(running, GLOBEX) == UnknownRun(running)
