"""Locks: one holder at a time, for a while, under a fence that only ever rises."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import pytest
from msgspec.structs import replace

from stanchion.ports.errors import BackendTimeout
from stanchion.ports.locks import (
    AcquireTooLate,
    Granted,
    Held,
    LockHolder,
    LockNote,
    LockReleased,
    Locks,
    LockView,
    NotOwned,
    OperatorLocks,
    Renewed,
    operator_token,
    replica_token,
)
from tests.contract.harness import LONG_MS, Harness

_WITHIN_MS = 30_000


async def test_a_free_name_is_granted(locks: Locks) -> None:
    answer = await _acquire(locks, "run/1", "me")
    assert isinstance(answer, Granted)
    assert answer.fence > 0


async def test_a_held_name_is_not_granted_to_another(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    answer = await _acquire(locks, "run/1", "you")
    assert isinstance(answer, Held)
    assert 0 < answer.expires_in_ms <= LONG_MS


async def test_names_are_held_independently(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    assert isinstance(await _acquire(locks, "run/2", "you"), Granted)
    assert isinstance(await _acquire(locks, "run/2", "me"), Held)


async def test_a_token_may_hold_several_names(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    await _acquire(locks, "run/2", "me")
    assert await locks.release("run/1", "me", within_ms=_WITHIN_MS) == LockReleased()
    assert isinstance(await _acquire(locks, "run/2", "you"), Held)


async def test_of_many_callers_at_once_one_gets_the_name(locks: Locks) -> None:
    answers = await asyncio.gather(*(_acquire(locks, "run/1", f"t{n}") for n in range(100)))
    assert Counter(map(type, answers)) == {Granted: 1, Held: 99}


# ── A lost answer ────────────────────────────────────────────────────────────────────────────────


async def test_the_holder_who_asks_again_gets_the_same_fence(locks: Locks) -> None:
    first = await _acquire(locks, "run/1", "me")
    assert await _acquire(locks, "run/1", "me") == first


async def test_the_holder_who_asks_again_begins_its_term_anew(
    locks: Locks, harness: Harness
) -> None:
    first = await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    assert await _acquire(locks, "run/1", "me", ttl_ms=LONG_MS) == first
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(locks, "run/1", "you"), Held)


async def test_a_holder_whose_term_ran_out_is_a_holder_no_more(
    locks: Locks, harness: Harness
) -> None:
    first = await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    again = await _acquire(locks, "run/1", "me")
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert again.fence > first.fence


# ── Fences ───────────────────────────────────────────────────────────────────────────────────────


async def test_every_grant_has_a_higher_fence_than_the_one_before(locks: Locks) -> None:
    fences = []
    for turn in range(5):
        answer = await _acquire(locks, "run/1", f"t{turn}")
        assert isinstance(answer, Granted)
        fences.append(answer.fence)
        await locks.release("run/1", f"t{turn}", within_ms=_WITHIN_MS)
    assert fences == sorted(set(fences))


async def test_the_same_token_gets_a_higher_fence_after_it_let_go(locks: Locks) -> None:
    first = await _acquire(locks, "run/1", "me")
    await locks.release("run/1", "me", within_ms=_WITHIN_MS)
    second = await _acquire(locks, "run/1", "me")
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.fence > first.fence


async def test_a_grant_after_an_expiry_has_a_higher_fence(locks: Locks, harness: Harness) -> None:
    first = await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    second = await _acquire(locks, "run/1", "you")
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.fence > first.fence


async def test_a_fence_is_above_the_floor(locks: Locks) -> None:
    far = 9_000_000_000_000_000  # centuries of microseconds ahead, and exact in a double
    answer = await _acquire(locks, "run/1", "me", floor=far)
    assert answer == Granted(far + 1)


async def test_a_low_floor_changes_nothing(locks: Locks) -> None:
    answer = await _acquire(locks, "run/1", "me", floor=1)
    assert isinstance(answer, Granted)
    assert answer.fence > 1_000_000_000_000_000  # the clock's, in microseconds


async def test_the_fence_stays_above_a_floor_that_once_was(locks: Locks) -> None:
    far = 9_000_000_000_000_000
    await _acquire(locks, "run/1", "me", floor=far)
    await locks.release("run/1", "me", within_ms=_WITHIN_MS)
    assert await _acquire(locks, "run/1", "you") == Granted(far + 2)


async def test_the_holder_who_asks_again_with_a_higher_floor_gets_above_it(locks: Locks) -> None:
    far = 9_000_000_000_000_000
    await _acquire(locks, "run/1", "me")
    assert await _acquire(locks, "run/1", "me", floor=far) == Granted(far + 1)
    assert await _acquire(locks, "run/1", "me", floor=far) == Granted(far + 1)
    assert await _acquire(locks, "run/1", "me", floor=far + 1) == Granted(far + 2)


async def test_a_floor_gives_nobody_anothers_name(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    assert isinstance(await _acquire(locks, "run/1", "you", floor=9_000_000_000_000_000), Held)


# ── Too late ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_executed_after_its_time_changes_nothing(locks: Locks) -> None:
    try:
        answer = await locks.acquire("run/1", "me", ttl_ms=LONG_MS, within_ms=-1_000)
        assert answer == AcquireTooLate()
    except BackendTimeout:
        pass  # an adapter may say at once that there is no time left
    assert await locks.inspect("run/1") is None
    assert isinstance(await _acquire(locks, "run/1", "you"), Granted)


# ── Renewal ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_renewed_lock_outlives_its_first_term(locks: Locks, harness: Harness) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    assert await _renew(locks, "run/1", "me") == Renewed()
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(locks, "run/1", "you"), Held)


async def test_a_renewal_may_shorten_the_term(locks: Locks, harness: Harness) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=LONG_MS)
    assert await _renew(locks, "run/1", "me", ttl_ms=harness.short_ms) == Renewed()
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(locks, "run/1", "you"), Granted)


async def test_a_renewal_keeps_the_fence(locks: Locks) -> None:
    granted = await _acquire(locks, "run/1", "me")
    await _renew(locks, "run/1", "me")
    assert await _acquire(locks, "run/1", "me") == granted


async def test_a_stranger_does_not_renew(locks: Locks, harness: Harness) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    assert await _renew(locks, "run/1", "you") == NotOwned()
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(locks, "run/1", "you"), Granted)


async def test_a_lock_that_ran_out_is_not_renewed(locks: Locks, harness: Harness) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await _renew(locks, "run/1", "me") == NotOwned()
    assert await locks.inspect("run/1") is None


async def test_a_name_that_nobody_has_is_not_renewed(locks: Locks) -> None:
    assert await _renew(locks, "run/1", "me") == NotOwned()
    assert await locks.inspect("run/1") is None


# ── Release ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_released_name_is_free(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    assert await locks.release("run/1", "me", within_ms=_WITHIN_MS) == LockReleased()
    assert await locks.inspect("run/1") is None
    assert isinstance(await _acquire(locks, "run/1", "you"), Granted)


async def test_a_stranger_does_not_release(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    assert await locks.release("run/1", "you", within_ms=_WITHIN_MS) == NotOwned()
    assert isinstance(await _acquire(locks, "run/1", "you"), Held)


async def test_a_late_release_does_not_free_the_next_holders_name(
    locks: Locks, harness: Harness
) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    await _acquire(locks, "run/1", "you")
    assert await locks.release("run/1", "me", within_ms=_WITHIN_MS) == NotOwned()
    assert await _renew(locks, "run/1", "you") == Renewed()


async def test_a_name_is_released_once(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    await locks.release("run/1", "me", within_ms=_WITHIN_MS)
    assert await locks.release("run/1", "me", within_ms=_WITHIN_MS) == NotOwned()


# ── An operator's view ───────────────────────────────────────────────────────────────────────────


async def test_a_held_name_is_shown(locks: Locks) -> None:
    granted = await _acquire(locks, "run/1", "me")
    view = await locks.inspect("run/1")
    assert isinstance(granted, Granted)
    assert view is not None
    since = view.acquired_at
    assert view == LockView("run/1", granted.fence, view.expires_in_ms, acquired_at=since)
    assert since is not None
    assert 0 < view.expires_in_ms <= LONG_MS


async def test_who_holds_a_name_is_shown_with_its_renewals(locks: Locks, harness: Harness) -> None:
    token = replica_token("r-1", "secret")
    await _acquire(locks, "run/1", token)
    await _acquire(locks, "run/2", operator_token("key:kim@x", "secret"))
    begun = await locks.inspect("run/1")
    assert begun is not None
    assert begun.acquired_at is not None
    await harness.pass_time(20)
    await _renew(locks, "run/1", token)
    await _renew(locks, "run/1", token)
    await _acquire(locks, "run/1", token)  # a repeat, which keeps the begin and the count
    first, second = await locks.list()
    assert (first.holder, first.renewals) == (LockHolder("r-1"), 2)
    assert (second.holder, second.renewals) == (LockHolder("key:kim@x", is_operator=True), 0)
    assert first.acquired_at == begun.acquired_at
    assert "secret" not in repr([first, second])
    await locks.release("run/1", token, within_ms=_WITHIN_MS)
    await _acquire(locks, "run/1", "me")
    again = await locks.inspect("run/1")
    assert again is not None
    assert (again.holder, again.renewals) == (LockHolder(), 0)
    assert again.acquired_at is not None
    assert begun.acquired_at + 20 <= again.acquired_at < begun.acquired_at + LONG_MS


async def test_a_free_name_is_not_shown(locks: Locks, harness: Harness) -> None:
    assert await locks.inspect("run/1") is None
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await locks.inspect("run/1") is None


async def test_looking_does_not_lengthen_the_term(locks: Locks, harness: Harness) -> None:
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await locks.inspect("run/1")
    await locks.list()
    await harness.pass_time(harness.short_ms)
    assert isinstance(await _acquire(locks, "run/1", "you"), Granted)


async def test_held_names_are_listed_in_order(locks: Locks, harness: Harness) -> None:
    for name in ("run/3", "run/1", "admission/acme", "run/2", "run/0"):
        ttl_ms = harness.short_ms if name == "run/0" else LONG_MS
        await _acquire(locks, name, "me", ttl_ms=ttl_ms)
    await locks.release("run/2", "me", within_ms=_WITHIN_MS)
    await harness.pass_time(harness.short_ms)
    listed = await locks.list()
    assert [view.name for view in listed] == ["admission/acme", "run/1", "run/3"]
    assert all(view.fence > 0 and view.expires_in_ms > 0 for view in listed)


async def test_names_are_listed_by_prefix_and_no_more_than_asked_for(locks: Locks) -> None:
    for name in ("run/2", "run/1", "running", "admission/run/3", "run/3"):
        await _acquire(locks, name, "me")
    assert [view.name for view in await locks.list("run/")] == ["run/1", "run/2", "run/3"]
    assert [view.name for view in await locks.list("run/", limit=2)] == ["run/1", "run/2"]
    assert list(await locks.list("nothing")) == []


async def test_many_names_are_listed_in_order(locks: Locks) -> None:
    names = [f"run/{number:02}" for number in range(40)]
    for number in range(40):
        await _acquire(locks, names[(7 * number) % 40], "me")
    assert [view.name for view in await locks.list("run/")] == names
    assert [view.name for view in await locks.list("run/", limit=5)] == names[:5]


async def test_a_prefix_is_no_pattern(locks: Locks) -> None:
    await _acquire(locks, "run/1", "me")
    await _acquire(locks, "run*[x]%_", "me")
    assert list(await locks.list("run?")) == []
    assert list(await locks.list("%")) == []
    assert [view.name for view in await locks.list("run*")] == ["run*[x]%_"]


async def test_an_operator_takes_a_name_from_its_holder(locks: Locks) -> None:
    first = await _acquire(locks, "run/1", "me")
    assert await locks.force_release("run/1") is True
    assert await _renew(locks, "run/1", "me") == NotOwned()
    second = await _acquire(locks, "run/1", "you")
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.fence > first.fence


async def test_there_is_nothing_to_take_from_a_free_name(locks: Locks, harness: Harness) -> None:
    assert await locks.force_release("run/1") is False
    await _acquire(locks, "run/1", "me", ttl_ms=harness.short_ms)
    await harness.pass_time(harness.short_ms)
    assert await locks.force_release("run/1") is False


@pytest.mark.parametrize("name", ["a{b}c", "ü/€", "with space", "line\nbreak", "x" * 300, "{}"])
async def test_a_name_with_odd_characters_is_a_name_like_any_other(locks: Locks, name: str) -> None:
    granted = await _acquire(locks, name, "me")
    assert isinstance(granted, Granted)
    assert [view.name for view in await locks.list()] == [name]
    assert await locks.release(name, "me", within_ms=_WITHIN_MS) == LockReleased()


async def test_locks_answer_a_ping(locks: Locks) -> None:
    await locks.ping()


async def test_locks_may_be_closed_twice(locks: Locks) -> None:
    await locks.close()
    await locks.close()


# ── After a restart ──────────────────────────────────────────────────────────────────────────────


async def test_a_lock_survives_its_servers_client(durable_locks: Locks, harness: Harness) -> None:
    granted = await _acquire(durable_locks, "run/1", "me")
    again = await harness.reopen_locks()
    assert isinstance(await _acquire(again, "run/1", "you"), Held)
    assert await _acquire(again, "run/1", "me") == granted


async def test_the_last_fence_survives_its_servers_client(
    durable_locks: Locks, harness: Harness
) -> None:
    far = 9_000_000_000_000_000
    await _acquire(durable_locks, "run/1", "me", floor=far)
    await durable_locks.release("run/1", "me", within_ms=_WITHIN_MS)
    again = await harness.reopen_locks()
    assert await _acquire(again, "run/1", "you") == Granted(far + 2)


async def _acquire(
    locks: Locks, name: str, token: str, *, ttl_ms: int = LONG_MS, floor: int = 0
) -> Granted | Held | AcquireTooLate:
    return await locks.acquire(name, token, ttl_ms=ttl_ms, within_ms=_WITHIN_MS, floor=floor)


async def _renew(
    locks: Locks, name: str, token: str, *, ttl_ms: int = LONG_MS
) -> Renewed | NotOwned:
    return await locks.renew(name, token, ttl_ms=ttl_ms, within_ms=_WITHIN_MS)


async def test_a_note_is_written_with_the_change_by_hand_and_kept_until_it_is_dropped(
    locks: OperatorLocks,
) -> None:
    held, refused = LockNote("a", "run/1", "é"), LockNote("b", "run/1", "no")
    took = await locks.hold("run/1", "one", ttl_ms=60_000, within_ms=2_000, note=held)
    assert isinstance(took, Granted)
    again = await locks.hold("run/1", "one", ttl_ms=60_000, within_ms=2_000, note=held)
    assert again == took
    other = await locks.hold("run/1", "two", ttl_ms=60_000, within_ms=2_000, note=refused)
    assert isinstance(other, Held)
    assert not await locks.release_by_hand("run/2", note=LockNote("c", "run/2", "no"))
    assert await locks.notes() == [replace(held, fence=took.fence)]
    released = LockNote("d", "run/1", "let go")
    assert await locks.release_by_hand("run/1", note=released)
    assert not await locks.release_by_hand("run/1", note=LockNote("e", "run/1", "no"))
    assert await locks.inspect("run/1") is None
    found = {note.id: note for note in await locks.notes()}
    assert found == {
        "a": replace(held, fence=took.fence),
        "d": replace(released, fence=took.fence),
    }
    await locks.drop_notes([found["a"]])
    await locks.drop_notes([found["a"]])
    assert await locks.notes() == [found["d"]]


async def test_notes_outlive_the_process(durable_locks: OperatorLocks, harness: Harness) -> None:
    note = LockNote("a", "run/1", "held")
    await durable_locks.hold("run/1", "one", ttl_ms=60_000, within_ms=2_000, note=note)
    again = await harness.reopen_locks()
    assert [each.id for each in await cast("OperatorLocks", again).notes()] == ["a"]
