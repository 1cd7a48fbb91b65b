"""Keys: known everywhere, revoked within two seconds, and safe without the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.services.keys import (
    BELIEVED_MS,
    BELIEVED_WITHOUT_STORE_MS,
    READ_AGAIN_MS,
    KeyHolder,
    Keys,
)
from stanchion.wire.admin import Role
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import FaultyStore
from tests.services.seeded import SeededEntropy


class Replicas:
    """Two replicas over one store, each with its own line to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        shared = MemoryStore(self.clock)
        self.lines = [FaultyStore(shared), FaultyStore(shared)]
        self.here, self.there = (
            Keys(
                documents=line.port,
                clock=self.clock,
                entropy=SeededEntropy(number),
                admin_key=None,
            )
            for number, line in enumerate(self.lines)
        )

    async def made(self, **wanted: Any) -> str:  # noqa: ANN401 - what a key is made of
        given = {"role": Role.RUNNER, "tenant": "acme", "note": None, "actor": "me", **wanted}
        return (await self.here.create(**given)).key


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


async def test_a_key_is_known_everywhere_by_its_role_and_tenant(replicas: Replicas) -> None:
    key = await replicas.made(role=Role.OPERATOR)
    for keys in (replicas.here, replicas.there):
        holder = await keys.holder(key)
        assert holder == KeyHolder(Role.OPERATOR, "acme", f"key:{key.split('_')[1]}")


async def test_only_a_hash_is_stored(replicas: Replicas) -> None:
    key = await replicas.made()
    _, key_id, secret = key.split("_")
    document = await replicas.lines[0].real.document("key", key_id)
    assert document is not None
    assert secret not in repr(document)


@pytest.mark.parametrize("spoil", [lambda key: key[:-1], lambda key: key + "0", str.upper])
async def test_almost_the_key_is_not_the_key(replicas: Replicas, spoil: Any) -> None:  # noqa: ANN401 - three ways
    key = await replicas.made()
    assert await replicas.here.holder(spoil(key)) is None


@pytest.mark.parametrize("key", ["", "sk", "sk_", "sk__", "sk_a", "sk_a_", "sk_a b_c", "sk_é_x"])
async def test_what_is_no_key_is_not_looked_up(replicas: Replicas, key: str) -> None:
    assert await replicas.here.holder(key) is None
    assert replicas.lines[0].calls["document"] == 0


async def test_a_revoked_key_stops_at_once_here_and_within_two_seconds_there(
    replicas: Replicas,
) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    await replicas.here.revoke(key.split("_")[1], actor="me")
    assert await replicas.here.holder(key) is None
    assert await replicas.there.holder(key) is not None
    replicas.clock.advance(BELIEVED_MS)
    assert await replicas.there.holder(key) is None
    assert BELIEVED_MS < 2_000


async def test_a_good_key_costs_one_question_in_a_while(replicas: Replicas) -> None:
    key = await replicas.made()
    for _ in range(100):
        await replicas.there.holder(key)
        replicas.clock.advance(10)
    assert replicas.lines[1].calls["document"] == 1


async def test_a_key_in_use_is_read_again_before_it_is_believed_no_more(replicas: Replicas) -> None:
    key = await replicas.made()
    await replicas.there.holder(key)
    replicas.clock.advance(READ_AGAIN_MS)
    assert await replicas.there.holder(key) is not None
    await asyncio.sleep(0)  # what nobody waited for
    assert replicas.lines[1].calls["document"] == 2
    replicas.clock.advance(READ_AGAIN_MS - 1)
    assert await replicas.there.holder(key) is not None
    assert replicas.lines[1].calls["document"] == 2


async def test_requests_at_the_same_time_ask_once_and_one_that_leaves_disturbs_nobody(
    replicas: Replicas,
) -> None:
    key = await replicas.made()
    first = asyncio.ensure_future(replicas.there.holder(key))
    others = [asyncio.ensure_future(replicas.there.holder(key)) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()
    assert all(await asyncio.gather(*others))
    assert replicas.lines[1].calls["document"] == 1
    assert await asyncio.gather(*(replicas.there.configured() for _ in range(20))) == [True] * 20
    assert replicas.lines[1].calls["list_documents"] == 1


async def test_known_keys_go_on_without_the_store_for_a_while_and_unknown_ones_are_not_judged(
    replicas: Replicas,
) -> None:
    known, unknown = await replicas.made(), await replicas.made()
    assert await replicas.there.holder(known) is not None
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(BELIEVED_WITHOUT_STORE_MS - 1)
    assert await replicas.there.holder(known) is not None
    with pytest.raises(BackendError):
        await replicas.there.holder(unknown)
    replicas.clock.advance(1)
    with pytest.raises(BackendError):
        await replicas.there.holder(known)
    replicas.lines[1].back()
    replicas.clock.advance(1_000)
    assert await replicas.there.holder(known) is not None


async def test_a_store_that_is_away_is_not_asked_by_every_request(replicas: Replicas) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(BELIEVED_MS)
    for _ in range(100):
        assert await replicas.there.holder(key) is not None
    assert replicas.lines[1].calls["document"] == 2


async def test_a_silent_store_holds_nobody_up_who_was_known(replicas: Replicas) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    replicas.lines[1].away(Fault.HANG)
    replicas.clock.advance(BELIEVED_MS)
    async with asyncio.timeout(1):
        assert await replicas.there.holder(key) is not None
        assert await replicas.there.holder(key) is not None


async def test_a_store_that_is_slow_once_lets_no_revoked_key_in(replicas: Replicas) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    await replicas.here.revoke(key.split("_")[1], actor="me")
    replicas.clock.advance(6_000)
    replicas.lines[1].script("document", Fault.SLOW)
    with pytest.raises(BackendUnavailable):
        await replicas.there.holder(key, is_patient=False)
    assert await replicas.there.holder(key) is None


async def test_a_store_that_is_slow_once_does_not_leave_the_door_open(replicas: Replicas) -> None:
    assert not await replicas.there.configured()
    await replicas.made()
    replicas.clock.advance(6_000)
    replicas.lines[1].script("list_documents", Fault.SLOW)
    with pytest.raises(BackendUnavailable):
        await replicas.there.configured(is_patient=False)
    assert await replicas.there.configured()


async def test_without_the_store_whoever_is_patient_goes_on_with_what_was_known(
    replicas: Replicas,
) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    replicas.lines[1].away(Fault.HANG)
    replicas.clock.advance(6_000)
    assert await replicas.there.holder(key) is not None


async def test_a_loop_that_is_late_is_not_a_silent_store(replicas: Replicas) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    replicas.clock.advance(6_000)
    asking = asyncio.ensure_future(replicas.there.holder(key, is_patient=False))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - that is what a late loop is
    assert await asking is not None


async def test_a_slow_answer_does_not_stretch_an_old_truth(replicas: Replicas) -> None:
    key = await replicas.made()

    async def revoked_meanwhile() -> None:
        replicas.clock.advance(BELIEVED_MS)

    replicas.lines[1].script("document", revoked_meanwhile)
    assert await replicas.there.holder(key) is not None
    await replicas.here.revoke(key.split("_")[1], actor="me")
    assert await replicas.there.holder(key) is None


async def test_whether_there_are_keys_is_noticed_within_two_seconds_and_for_good(
    replicas: Replicas,
) -> None:
    assert not await replicas.there.configured()
    key = await replicas.made()
    assert await replicas.here.configured()
    replicas.clock.advance(BELIEVED_MS)
    assert await replicas.there.configured()
    await replicas.here.revoke(key.split("_")[1], actor="me")
    replicas.clock.advance(BELIEVED_MS)
    assert await replicas.there.configured(), "revoking the last key must not open the door"


async def test_without_the_store_nobody_is_let_in_on_a_guess(replicas: Replicas) -> None:
    replicas.lines[0].away(Fault.ERROR)
    with pytest.raises(BackendError):
        await replicas.here.configured()
    replicas.lines[0].back()
    assert not await replicas.here.configured()
    replicas.lines[0].away(Fault.ERROR)
    replicas.clock.advance(BELIEVED_WITHOUT_STORE_MS - 1)
    assert not await replicas.here.configured()
    replicas.clock.advance(1)
    with pytest.raises(BackendError):
        await replicas.here.configured()


async def test_the_admin_key_is_for_everything_and_is_not_stored(replicas: Replicas) -> None:
    store = replicas.lines[0]
    keys = Keys(
        documents=store.port,
        clock=replicas.clock,
        entropy=SeededEntropy(9),
        admin_key="let me in",
    )
    assert await keys.configured()
    assert await keys.holder("let me in") == KeyHolder(Role.ADMIN, "*", "admin")
    assert await keys.holder("let me i") is None
    assert not store.calls


async def test_revoking_what_is_not_there_or_was_revoked_changes_nothing(
    replicas: Replicas,
) -> None:
    assert await replicas.here.revoke("nobody", actor="me") is None
    key_id = (await replicas.made()).split("_")[1]
    first = await replicas.here.revoke(key_id, actor="me")
    replicas.clock.advance(1_000)
    assert await replicas.here.revoke(key_id, actor="another") == first
