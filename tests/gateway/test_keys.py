"""Keys: known everywhere, revoked within two seconds, and safe without the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.core.model import Instant
from stanchion.gateway import GatewayOptions
from stanchion.ports.errors import BackendError, BackendUnavailable
from stanchion.services.keys import (
    BELIEVED_MS,
    BELIEVED_WITHOUT_STORE_MS,
    READ_AGAIN_MS,
    KeyHolder,
    Keys,
    TooManyLookups,
)
from stanchion.wire.admin import Role
from tests.gateway.house import ADMIN, opened_house
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import FaultyStore
from tests.services.seeded import SeededEntropy

KEYS = "/v1/admin/keys"


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
        key_id = key.split("_")[1]
        assert holder == KeyHolder(Role.OPERATOR, "acme", f"key:{key_id}", key_id)


async def test_a_named_key_acts_under_its_name(replicas: Replicas) -> None:
    key = await replicas.made(name="kim@example.com")
    for keys in (replicas.here, replicas.there):
        holder = await keys.holder(key)
        assert holder is not None
        assert holder.actor == "kim@example.com"


async def test_guessed_keys_do_not_displace_good_ones(replicas: Replicas) -> None:
    key = await replicas.made()
    assert await replicas.there.holder(key) is not None
    for number in range(5_000):
        assert await replicas.there.holder(f"sk_{number}_guess") is None
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(BELIEVED_WITHOUT_STORE_MS - 1)
    assert await replicas.there.holder(key) is not None


async def test_guesses_are_looked_up_a_few_at_a_time_and_delay_no_known_key(
    replicas: Replicas,
) -> None:
    key = await replicas.made()
    keys = replicas.there
    assert await keys.holder(key) is not None
    replicas.clock.advance(BELIEVED_MS)
    guesses = [asyncio.create_task(keys.holder(f"sk_{n}_guess")) for n in range(2_000)]
    await asyncio.sleep(0)
    assert await keys.holder(key) is not None
    answers = await asyncio.gather(*guesses, return_exceptions=True)
    assert 1_000 < sum(isinstance(each, TooManyLookups) for each in answers) < 2_000
    assert await keys.holder("sk_none_guess") is None
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        asked = [house.ask("GET", "/v1/runs", key=f"sk_{n}_guess") for n in range(700)]
        codes = {each.code for each in await asyncio.gather(*asked)}
        assert codes == {"unauthenticated", "overloaded"}


async def test_a_key_that_expires_works_until_then_also_without_the_store(
    replicas: Replicas,
) -> None:
    expires_at = Instant(replicas.clock.now() + 60_000)
    key = await replicas.made(expires_at=expires_at)
    assert await replicas.there.holder(key) is not None
    replicas.clock.advance(59_999)
    assert await replicas.there.holder(key) is not None
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(1)
    assert await replicas.there.holder(key) is None
    assert await replicas.here.holder(key) is None


async def written(replicas: Replicas) -> int:
    await settled()
    return sum(line.calls["put_document"] for line in replicas.lines) - 1  # one made the key


async def settled() -> None:
    """Wait for what nobody else waits for."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


async def test_the_last_use_of_a_key_is_written_once_a_minute(replicas: Replicas) -> None:
    key = await replicas.made()
    for expected in (1, 2, 3):
        for _ in range(60):
            await replicas.here.holder(key)
            await replicas.there.holder(key)
            replicas.clock.advance(1_000)
            await settled()
        record = await replicas.there.record(key.split("_")[1])
        assert record is not None
        assert record.last_used_at is not None
        assert 0 < replicas.clock.now() - record.last_used_at <= 62_000
        # Both replicas may try at the same moment; the store takes one.
        assert expected <= await written(replicas) <= 2 * expected
        document = await replicas.lines[0].real.document("key", key.split("_")[1])
        assert document is not None
        assert document.revision == 1 + expected


async def test_writing_the_last_use_never_undoes_a_revocation(replicas: Replicas) -> None:
    key = await replicas.made()
    key_id = key.split("_")[1]
    await replicas.there.holder(key)  # its write of the use comes after the revocation
    revoking = replicas.here.revoke(key_id, actor="me")
    replicas.lines[1].script("put_document", lambda: revoking)
    await settled()
    record = await replicas.there.record(key_id)
    assert record is not None
    assert record.revoked_at is not None


async def test_no_request_waits_for_the_write_of_a_use(replicas: Replicas) -> None:
    key = await replicas.made()
    replicas.lines[1].script("put_document", Fault.HANG)
    async with asyncio.timeout(1):
        assert await replicas.there.holder(key) is not None
        await asyncio.sleep(0)  # it begins
        assert replicas.lines[1].calls["put_document"] == 1
        assert await replicas.there.holder(key) is not None


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
    replicas.clock.advance(5 * 60 * 1_000 - 1)
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


async def test_a_key_is_made_with_name_and_expiry_and_shows_them() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        asked = {"role": "approver", "tenant": "acme", "name": "kim", "note": "night shift"}
        until = "2999-01-31T12:00:00Z"
        made = await house.ask("POST", KEYS, {**asked, "expires_at": until}, key=ADMIN)
        assert made.status == 200
        assert {name: made.json[name] for name in asked} == asked
        assert made.json["expires_at"] == until
        await house.ask("GET", "/v1/runs", key=made.json["key"])
        async with asyncio.timeout(5):
            row = None
            while row is None or row["last_used_at"] is None:
                (row,) = (await house.ask("GET", KEYS, key=ADMIN)).json["keys"]
        assert {name: row[name] for name in asked} == asked
        assert row["expires_at"] == until


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("name", "Admin"),
        ("name", "anonymous"),
        ("name", "key:abc"),
        ("name", " kim"),
        ("name", ""),
        ("name", "k" * 65),
        ("expires_at", "2001-01-01T00:00:00Z"),
        ("expires_at", "2999-01-01T00:00:00"),
        ("expires_at", "soon"),
        ("expires_at", "9999-12-31T23:59:59-00:01"),
        ("tenant", "*"),
    ],
)
async def test_a_key_that_cannot_be_made_is_422_at_its_member(member: str, value: str) -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        asked = {"role": "approver", "tenant": "acme", member: value}
        answer = await house.ask("POST", KEYS, asked, key=ADMIN)
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert [fault["path"] for fault in answer.json["errors"]] == [member]


async def test_the_first_key_must_not_expire() -> None:
    async with opened_house(GatewayOptions()) as house:
        asked = {"role": "admin", "tenant": "*", "expires_at": "2999-01-01T00:00:00Z"}
        answer = await house.ask("POST", KEYS, asked)
        assert (answer.status, answer.code) == (409, "conflict")


async def test_a_key_that_has_ended_is_not_only_called_unknown() -> None:
    async with opened_house(GatewayOptions(admin_key=ADMIN)) as house:
        asked = {"role": "runner", "tenant": "acme"}
        made = await house.ask("POST", KEYS, asked, key=ADMIN)
        await house.ask("DELETE", f"{KEYS}/{made.json['id']}", key=ADMIN)
        refused = await house.ask("GET", "/v1/runs", key=made.json["key"])
        assert (refused.status, refused.code) == (401, "unauthenticated")
        assert refused.json["detail"] == "this key is unknown, has expired or was revoked"


@pytest.mark.parametrize("tenant", [None, "acme"])
@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_a_key_that_cannot_be_read_is_left_out_of_the_list(
    replicas: Replicas, tenant: str | None, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = sorted([(await replicas.made()).split("_")[1] for _ in range(4)])
    store = replicas.lines[0].port
    found = await store.document("key", ids[1])
    assert found is not None
    newer: Any = {**found.value, "role": "auditor"}  # type: ignore[dict-item] # an object
    await store.put_document("key", ids[1], newer, read=None)
    listed, cursor = list[str](), None
    while True:
        page = await replicas.there.list(tenant, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        listed += [key_id for key_id, _ in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert listed == [ids[0], *ids[2:]]
    assert "key_unreadable" in {line.getMessage() for line in caplog.records}
