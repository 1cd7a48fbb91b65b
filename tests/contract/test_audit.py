"""The audit log: an entry is written with its change, or neither is."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stanchion.core.admission import Admitted, Full
from stanchion.core.audit import AuditEntry, AuditFilter
from stanchion.core.events import CancelRequested
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.records import BadCursor, PostAnswer, Tenant
from stanchion.ports.store import Store
from tests.contract.builders import (
    ACME,
    GLOBEX,
    ONE_JOB,
    WITHIN_MS,
    admission,
    cancel,
    lease_one,
    start,
    workflow,
)
from tests.contract.harness import Harness

_CANCEL = CancelRequested(actor="ann", reason=None)


def _entry(action: str = "run.cancel", tenant: TenantId | None = ACME) -> AuditEntry:
    return AuditEntry(
        action=action,
        actor="ann",
        subject="run/1",
        tenant=tenant,
        after={"reason": "late", "many": [1, 2.5, None, "é"]},
        request_id="req-1",
    )


async def _log(store: Store, only: AuditFilter | None = None) -> list[AuditEntry]:
    """All entries, newest first, as they were given: without their time."""
    found = await store.list_audit(only or AuditFilter(), limit=1_000)
    assert found.cursor is None
    return [replace(each, at=Instant(0)) for each in found.items]


async def _pages(store: Store, only: AuditFilter, limit: int) -> list[list[str]]:
    """The subjects of all pages."""
    pages: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = await store.list_audit(only, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        pages.append([each.subject for each in page.items])
        cursor = page.cursor
        if cursor is None:
            return pages
        assert len(pages) < 1_000


async def test_an_entry_comes_back_as_it_was_written_with_the_time_of_the_store(
    store: Store,
) -> None:
    run_id = await start(store)
    began = await store.now()
    assert await store.post(run_id, _CANCEL, entry_id="cancel", audit=_entry()) is PostAnswer.POSTED
    (written,) = (await store.list_audit()).items
    assert written == replace(_entry(), at=written.at)
    assert began <= written.at <= await store.now()


async def test_a_post_that_changes_nothing_writes_no_entry(store: Store) -> None:
    run_id = await start(store)
    for posted in (PostAnswer.POSTED, PostAnswer.REPEATED):
        answer = await store.post(run_id, _CANCEL, entry_id="cancel", audit=_entry())
        assert answer is posted
    ended = await start(store)
    await cancel(store, ended)
    answer = await store.post(ended, _CANCEL, entry_id="again", audit=_entry())
    assert answer is PostAnswer.FINISHED
    unknown = RunId("0" * len(run_id))
    assert await store.post(unknown, _CANCEL, entry_id="x", audit=_entry()) is PostAnswer.UNKNOWN
    assert await _log(store) == [_entry()]


async def test_an_admission_writes_its_entry_only_if_the_run_is_created(store: Store) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1))
    rerun = replace(admission(await store.now()), audit=_entry("run.rerun"))
    for _ in range(2):  # the repeat of an admission whose answer was lost
        assert isinstance(await store.admit(rerun, within_ms=WITHIN_MS), Admitted)
    refused = replace(admission(await store.now()), audit=_entry("run.rerun"))
    assert isinstance(await store.admit(refused, within_ms=WITHIN_MS), Full)
    assert await _log(store) == [_entry("run.rerun")]


async def test_configurations_have_the_values_before_and_after(store: Store) -> None:
    entry = _entry("tenant.put")
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1), audit=entry)
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=1), audit=entry)  # no change
    await store.put_tenant(ACME, Tenant(None, 0.5, {"strategy": "lock"}), audit=entry)
    assert await store.delete_tenant(ACME, audit=_entry("tenant.delete"))
    assert not await store.delete_tenant(ACME, audit=_entry("tenant.delete"))
    deleted, second, first = await _log(store)
    assert first.before is None
    assert isinstance(first.after, dict)
    assert first.after["max_concurrent_runs"] == 1
    assert second.before == first.after
    assert isinstance(second.after, dict)
    assert second.after["job_rate_per_s"] == 0.5
    assert second.after["admission"] == {"strategy": "lock"}
    assert (deleted.before, deleted.action) == (second.after, "tenant.delete")


async def test_a_workflow_has_an_entry_for_each_new_version(store: Store) -> None:
    entry = _entry("workflow.put")
    first, second = workflow("one"), replace(workflow("one"), timeout_s=5)
    for each in (first, first, second):
        await store.put_workflow(ACME, each, audit=entry)
    newer, older = await _log(store)
    assert (older.before, older.after) == (None, {"version": 1})
    assert (newer.before, newer.after) == ({"version": 1}, {"version": 2})
    shared = _entry("shared_workflow.put", None)
    for _ in range(2):
        await store.put_shared_workflow(first, audit=shared)
    assert await _log(store, AuditFilter(action=shared.action)) == [
        replace(shared, after={"version": 1})
    ]


@pytest.mark.parametrize("tenant", [ACME, None])
async def test_documents_write_entries_of_one_tenant_or_of_all(
    store: Store, tenant: TenantId | None
) -> None:
    entry = _entry("key.create", tenant)
    assert await store.put_document("key", "a", {}, read=0, audit=entry) is not None
    assert await store.put_document("key", "a", {}, read=0, audit=entry) is None
    assert await store.delete_document("key", "a", audit=_entry("key.delete", tenant))
    assert not await store.delete_document("key", "a", audit=_entry("key.delete", tenant))
    expected = [_entry("key.delete", tenant), entry]
    assert await _log(store) == expected
    assert await _log(store, AuditFilter(tenant=ACME)) == (expected if tenant else [])


async def test_letters_write_entries_of_their_tenant(store: Store, harness: Harness) -> None:
    for _ in range(2):
        await start(store)
        await lease_one(store, ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert len(await store.expire_jobs(limit=10, max_deliveries=1)) == 2
    one, other = (await store.list_dead_letters(None)).items
    replay, discard = _entry("dead_letter.replay", None), _entry("dead_letter.discard", None)
    for is_there in (True, False):
        replayed = await store.replay_dead_letter(one.id, actor="ann", audit=replay)
        discarded = await store.discard_dead_letter(other.id, actor="ann", audit=discard)
        assert (replayed is not None, discarded is not None) == (is_there, is_there)
    assert await _log(store, AuditFilter(tenant=ACME)) == [
        replace(discard, tenant=ACME),
        replace(replay, tenant=ACME),
    ]


async def test_corrected_slots_have_an_entry_for_each_tenant(
    store: Store, harness: Harness
) -> None:
    entry = AuditEntry(action="drift.repair", actor="ann", subject="")
    await start(store)
    await harness.tamper_slots(ACME, 2)
    await store.audit_slots(limit=1_000, audit=entry)
    await store.audit_slots(limit=1_000, audit=entry)
    repaired = replace(
        entry, subject="tenant/acme", tenant=ACME, before={"active": 3}, after={"active": 1}
    )
    assert await _log(store) == [repaired]


async def test_an_entry_from_elsewhere_is_written_once(store: Store) -> None:
    held = _entry("lease.hold")
    assert [await store.add_audit(held, once=name) for name in "aab"] == [True, False, True]
    assert await store.add_audit(_entry("lease.release", None))
    assert await _log(store) == [_entry("lease.release", None), held, held]
    assert await _log(store, AuditFilter(tenant=ACME)) == [held, held]


async def test_pages_neither_skip_nor_repeat_while_others_write(store: Store) -> None:
    tenants = [TenantId(f"t{number}") for number in range(12)]
    numbers = range(40)
    for number in numbers:
        tenant = None if number % 5 == 4 else tenants[number % 12]
        entry = replace(_entry(), subject=str(number), tenant=tenant)
        if number % 3 == 0 and tenant is not None:
            config = Tenant(max_concurrent_runs=number)
            await store.put_tenant(tenant, config, audit=entry)
        else:
            await store.put_document("kind", "name", number, read=None, audit=entry)
    newest_first = [str(number) for number in reversed(numbers)]
    for limit in (1, 7, 40, 100):
        pages = await _pages(store, AuditFilter(), limit)
        found = [subject for page in pages for subject in page]
        # Servers of a cluster have clocks of their own: the order across them is by their times.
        assert sorted(found, key=int, reverse=True) == newest_first
        assert len(found) == len(set(found))
    page = await store.list_audit(limit=10)
    await store.put_document("kind", "name", 0, read=None, audit=_entry())
    rest = await store.list_audit(cursor=page.cursor, limit=100)
    both = [each.subject for each in (*page.items, *rest.items)]
    assert sorted(both, key=int, reverse=True) == newest_first
    of_one = await _pages(store, AuditFilter(tenant=tenants[1]), 2)
    assert sorted((each for page in of_one for each in page), key=int) == ["1", "13", "25", "37"]


async def test_filters_select_by_actor_action_tenant_and_time(
    store: Store, harness: Harness
) -> None:
    ann, bob = _entry("a.b"), replace(_entry("c.d", GLOBEX), actor="bob")
    await store.add_audit(ann)
    await harness.pass_time(5)
    between = await store.now()
    await store.add_audit(bob)
    assert await _log(store, AuditFilter(actor="ann")) == [ann]
    assert await _log(store, AuditFilter(action="c.d")) == [bob]
    assert await _log(store, AuditFilter(tenant=GLOBEX)) == [bob]
    assert await _log(store, AuditFilter(tenant=GLOBEX, actor="ann")) == []
    assert await _log(store, AuditFilter(actor="ann", action="c.d")) == []
    assert await _log(store, AuditFilter(since=between)) == [bob]
    assert await _log(store, AuditFilter(until=between)) == [ann]
    assert await _log(store, AuditFilter(since=between, until=between)) == []


async def test_a_page_looks_at_ten_times_its_length_and_goes_on_after_it(store: Store) -> None:
    await store.add_audit(replace(_entry(), actor="bob", subject="rare"))
    for _ in range(25):
        await store.add_audit(_entry())
    pages = await _pages(store, AuditFilter(tenant=ACME, actor="bob"), 1)
    assert pages[-1] == ["rare"]
    assert pages[:-1] == [[], []]


async def test_entries_are_gone_after_their_time(harness: Harness) -> None:
    half_ms = 3 * harness.short_ms  # a busy machine may need one of them for the looks below
    store = await harness.open_store(audit_ttl_ms=2 * half_ms)
    await store.add_audit(_entry("old.entry"))
    await store.put_tenant(ACME, Tenant(), audit=_entry("old.tenant"))
    await harness.pass_time(half_ms + 1)
    await store.add_audit(_entry("new.entry", None))
    assert len(await _log(store)) == 3
    await harness.pass_time(half_ms + 1)
    assert [each.action for each in await _log(store)] == ["new.entry"]
    await store.purge(finished_before=Instant(0), limit=10)
    assert [each.action for each in await _log(store)] == ["new.entry"]
    assert await _log(store, AuditFilter(tenant=ACME)) == []


async def test_concurrent_changes_each_have_their_entry(store: Store) -> None:
    async def put(number: int) -> None:
        entry = replace(_entry("tenant.put"), subject=str(number))
        await store.put_tenant(ACME, Tenant(max_concurrent_runs=number), audit=entry)

    await asyncio.gather(*map(put, range(20)))
    log = await _log(store)
    assert len(log) == 20
    # Each begins where the one before it ended.
    assert [each.before for each in log[:-1]] == [each.after for each in log[1:]]


@pytest.mark.parametrize("cursor", ["", "x", "WyJydW5zIiwxLCIyIl0"])
async def test_another_lists_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(BadCursor):
        await store.list_audit(cursor=cursor)


async def test_entries_outlive_the_process(durable_store: Store, harness: Harness) -> None:
    run_id = await start(durable_store, ONE_JOB)
    await durable_store.post(run_id, _CANCEL, entry_id="cancel", audit=_entry())
    assert await _log(await harness.reopen()) == [_entry()]
