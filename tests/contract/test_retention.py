"""Retention: finished runs go, with everything that belongs to them. Unfinished ones never do."""

from __future__ import annotations

from stanchion.core.admission import Admitted
from stanchion.core.events import CancelRequested
from stanchion.core.model import Instant, JobId, RunId, StepId
from stanchion.ports.records import (
    Gone,
    Page,
    PostAnswer,
    RejectedCode,
    ResultRefused,
)
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    FOR_EACH,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    accept,
    admission,
    advance,
    cancel,
    commit_of,
    finish,
    lease_one,
    loaded,
    nothing,
    start,
)
from tests.contract.harness import Harness

_AGES = 100_000_000


async def test_there_may_be_nothing_to_purge(store: Store) -> None:
    assert await store.purge(finished_before=Instant(await store.now() + _AGES), limit=10) == 0


async def test_a_purged_run_is_not_there_any_more(store: Store) -> None:
    run_id = await start(store, FOR_EACH, run_input={"items": ["a"]})
    leased = await lease_one(store)
    await accept(store, leased)
    await advance(store, FOR_EACH, run_id)
    last = await loaded(store, run_id)
    assert await _purge(store) == 1
    assert await store.load(run_id) is None
    assert await store.load_items(run_id, {StepId("each"): [0]}) == {}
    assert await store.timeline(run_id) == Page(())
    assert await store.job(leased.job.id) is None
    assert await store.list_runs(ACME) == Page(())
    assert await store.post(run_id, CancelRequested(), entry_id="e") is PostAnswer.UNKNOWN
    assert await store.commit(commit_of(last, nothing(last))) == Gone()
    assert await accept(store, leased) == ResultRefused(leased.job.id, RejectedCode.UNKNOWN_JOB)
    assert await _purge(store) == 0


async def test_an_unfinished_run_is_never_purged(store: Store) -> None:
    run_id = await start(store)
    assert await _purge(store) == 0
    assert (await loaded(store, run_id)).run.id == run_id
    assert await store.active_runs(ACME) == 1


async def test_a_run_that_finished_later_is_kept(store: Store, harness: Harness) -> None:
    early, late = await start(store), await start(store)
    await cancel(store, early)
    await harness.pass_time(20)
    between = await store.now()
    await harness.pass_time(20)
    await cancel(store, late)
    assert await store.purge(finished_before=between, limit=10) == 1
    assert await store.load(early) is None
    assert (await loaded(store, late)).run.id == late


async def test_the_oldest_are_purged_first_and_no_more_than_asked_for(
    store: Store, harness: Harness
) -> None:
    runs = [await start(store) for _ in range(5)]
    order = [runs[place] for place in (3, 0, 4, 1, 2)]
    for run_id in order:
        await cancel(store, run_id)
        await harness.pass_time(2)
    assert await _purge(store, limit=2) == 2
    assert await _there(store, order) == order[2:]
    assert await _purge(store, limit=2) == 2
    assert await _there(store, order) == order[4:]
    assert await _purge(store, limit=2) == 1
    assert await _there(store, order) == []


async def test_runs_of_all_tenants_are_purged(store: Store) -> None:
    for tenant in (ACME, GLOBEX):
        await cancel(store, await start(store, tenant=tenant))
    assert await _purge(store) == 2


async def test_a_run_without_a_slot_is_purged_too(store: Store) -> None:
    slotless = admission(await store.now(), holds_slot=False)
    await store.admit(slotless, within_ms=WITHIN_MS)
    await cancel(store, slotless.run.id)
    assert await _purge(store) == 1
    assert await store.load(slotless.run.id) is None


async def test_the_key_of_a_purged_run_is_free(store: Store) -> None:
    await cancel(store, await start(store, key="k"))
    await _purge(store)
    anew = admission(await store.now(), key="k", run_input={"say": "something else"})
    assert await store.admit(anew, within_ms=WITHIN_MS) == Admitted(anew.run.id)


async def test_a_key_taken_anew_survives_the_purge_of_its_first_run(harness: Harness) -> None:
    store = await harness.open_store(key_ttl_ms=harness.short_ms)
    await cancel(store, await start(store, key="k"))
    await harness.pass_time(harness.short_ms)
    await start(store, key="k")
    assert await _purge(store) == 1
    again = admission(await store.now(), key="k")
    assert await store.admit(again, within_ms=WITHIN_MS) != Admitted(again.run.id)


async def test_the_dead_letters_of_a_purged_run_go_with_it(store: Store) -> None:
    gone, stays = await start(store), await start(store)
    for run_id in (gone, stays):
        await store.post(run_id, CancelRequested(), entry_id="e")
        await store.write_dead_letter(run_id, "e", cause="poison")
    await cancel(store, gone)
    assert await _purge(store) == 1
    assert [each.run_id for each in (await store.list_dead_letters(ACME)).items] == [stays]
    assert [each.run_id for each in (await store.list_dead_letters(None)).items] == [stays]
    assert await store.replay_dead_letter(f"event:{gone}:e", actor="operator") is None


async def test_a_run_whose_letter_was_replayed_is_purged_like_any_other(store: Store) -> None:
    run_id = await start(store)
    await store.post(run_id, CancelRequested(), entry_id="e")
    await store.write_dead_letter(run_id, "e", cause="poison")
    await store.replay_dead_letter(f"event:{run_id}:e", actor="operator")
    await cancel(store, run_id)
    assert await _purge(store) == 1
    assert (await store.list_dead_letters(None)).items == ()


async def test_a_purge_leaves_counts_and_other_runs_alone(store: Store) -> None:
    kept = await start(store)
    await finish(store, ONE_JOB, await start(store, tenant=GLOBEX), tenant=GLOBEX)
    assert await _purge(store) == 1
    assert await store.active_runs(ACME) == 1
    assert (await store.audit_slots(limit=1_000)).drifts == ()
    assert (await lease_one(store)).job.id == JobId(f"{kept}:step@1")


async def _purge(store: Store, limit: int = 100) -> int:
    return await store.purge(finished_before=Instant(await store.now() + _AGES), limit=limit)


async def _there(store: Store, runs: list[RunId]) -> list[RunId]:
    return [run_id for run_id in runs if await store.load(run_id) is not None]
