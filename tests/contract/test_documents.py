"""Documents: small named values that are changed only by whoever read the present one."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.core.json_value import JsonValue
from stanchion.ports.records import BadCursor, Document
from stanchion.ports.store import Store
from tests.contract.builders import STRANGE_VALUES, assert_same


async def test_a_document_that_nobody_wrote_is_not_there(store: Store) -> None:
    assert await store.document("settings", "global") is None


@pytest.mark.parametrize("value", STRANGE_VALUES, ids=lambda value: repr(value)[:30])
async def test_a_document_comes_back_as_it_was(store: Store, value: JsonValue) -> None:
    assert await store.put_document("settings", "global", value, read=0) == Document(value, 1)
    found = await store.document("settings", "global")
    assert found is not None
    assert_same(found.value, value)


async def test_a_change_by_whoever_read_the_present_one_raises_the_revision(
    store: Store,
) -> None:
    await store.put_document("settings", "global", 1, read=0)
    assert await store.put_document("settings", "global", 2, read=1) == Document(2, 2)
    assert await store.document("settings", "global") == Document(2, 2)


async def test_a_change_by_whoever_read_an_older_one_is_refused(store: Store) -> None:
    await store.put_document("settings", "global", 1, read=0)
    await store.put_document("settings", "global", 2, read=1)
    for stale in (0, 1, 3):
        assert await store.put_document("settings", "global", 9, read=stale) is None
    assert await store.document("settings", "global") == Document(2, 2)


async def test_a_change_of_what_is_not_there_is_refused(store: Store) -> None:
    assert await store.put_document("settings", "global", 1, read=1) is None
    assert await store.document("settings", "global") is None


async def test_a_change_whatever_is_there_always_succeeds(store: Store) -> None:
    assert await store.put_document("keys", "k", 1, read=None) == Document(1, 1)
    assert await store.put_document("keys", "k", 2, read=None) == Document(2, 2)


async def test_of_many_who_read_the_same_one_changes_it(store: Store) -> None:
    await store.put_document("latch", "l", "open", read=0)
    answers = await asyncio.gather(
        *(store.put_document("latch", "l", number, read=1) for number in range(20))
    )
    (winner,) = (answer for answer in answers if answer is not None)
    assert winner.revision == 2
    assert await store.document("latch", "l") == winner


async def test_a_deleted_document_is_not_there(store: Store) -> None:
    await store.put_document("keys", "k", 1, read=None)
    assert await store.delete_document("keys", "k") is True
    assert await store.document("keys", "k") is None
    assert (await store.list_documents("keys")).items == ()
    assert await store.put_document("keys", "k", 2, read=0) == Document(2, 1)


async def test_deleting_what_is_not_there_says_so(store: Store) -> None:
    assert await store.delete_document("keys", "k") is False


async def test_kinds_are_told_apart(store: Store) -> None:
    await store.put_document("a", "x", 1, read=0)
    await store.put_document("b", "x", 2, read=0)
    assert await store.document("a", "x") == Document(1, 1)
    assert (await store.list_documents("b")).items == (("x", Document(2, 1)),)


async def test_kinds_and_names_do_not_run_into_each_other(store: Store) -> None:
    await store.put_document("a:b", "c", 1, read=0)
    await store.put_document("a", "b:c", 2, read=0)
    assert await store.document("a:b", "c") == Document(1, 1)
    assert await store.document("a", "b:c") == Document(2, 1)


async def test_documents_are_listed_by_name_in_pages(store: Store) -> None:
    for name in ("c", "a", "e", "b", "d"):
        await store.put_document("keys", name, name, read=0)
    first = await store.list_documents("keys", limit=2)
    second = await store.list_documents("keys", limit=2, cursor=first.cursor)
    third = await store.list_documents("keys", limit=2, cursor=second.cursor)
    listed = [entry for page in (first, second, third) for entry in page.items]
    assert listed == [(name, Document(name, 1)) for name in "abcde"]
    assert [page.cursor is None for page in (first, second, third)] == [False, False, True]


async def test_a_page_that_holds_all_documents_is_the_last(store: Store) -> None:
    for name in ("a", "b"):
        await store.put_document("keys", name, name, read=0)
    assert (await store.list_documents("keys", limit=2)).cursor is None


async def test_a_document_that_is_deleted_meanwhile_does_not_disturb_the_pages(
    store: Store,
) -> None:
    for name in "abcd":
        await store.put_document("keys", name, name, read=0)
    first = await store.list_documents("keys", limit=2)
    await store.delete_document("keys", "b")
    second = await store.list_documents("keys", limit=2, cursor=first.cursor)
    assert [name for name, _ in second.items] == ["c", "d"]


async def test_a_bad_cursor_is_said_to_be_bad(store: Store) -> None:
    with pytest.raises(BadCursor):
        await store.list_documents("keys", cursor="nonsense")
