"""Sessions of the console: as long as their key, never longer than twelve hours."""

from __future__ import annotations

import asyncio

import pytest

from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.system import ManualClock
from stanchion.core.json_value import JsonValue
from stanchion.ports.errors import BackendError
from stanchion.services.keys import Keys, TooManyLookups
from stanchion.services.sessions import SESSION_MS, Sessions
from stanchion.wire.admin import Role
from tests.services.faulty_locks import Fault
from tests.services.faulty_store import FaultyStore
from tests.services.seeded import SeededEntropy

WITHIN_MS = 2_000


class Replicas:
    """Two replicas over one store, each with its own line to it."""

    def __init__(self, admin_key: str | None = None) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.lines = [FaultyStore(self.store), FaultyStore(self.store)]
        self.here, self.there = (self._replica(number, admin_key) for number in range(2))

    def _replica(self, number: int, admin_key: str | None) -> tuple[Keys, Sessions]:
        documents, entropy = self.lines[number].port, SeededEntropy(number)
        keys = Keys(documents=documents, clock=self.clock, entropy=entropy, admin_key=admin_key)
        return keys, Sessions(keys, documents=documents, clock=self.clock, entropy=entropy)

    async def opened(self, **wanted: object) -> tuple[str, str]:
        """A key's id, and the token of its session."""
        given = {"role": Role.RUNNER, "tenant": "acme", "note": None, "actor": "me", **wanted}
        made = await self.here[0].create(**given)  # type: ignore[arg-type] # what a key is made of
        token = await self.here[1].open(made.key)
        assert token is not None
        return made.id, token


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


async def test_a_session_has_its_keys_role_on_every_replica(replicas: Replicas) -> None:
    key_id, token = await replicas.opened(name="ann")
    for _, sessions in (replicas.here, replicas.there):
        found = await sessions.find(token)
        assert found is not None
        assert (found.holder.role, found.holder.tenant) == (Role.RUNNER, "acme")
        assert found.holder.actor == "ann"
        assert len(found.form_token) == 64
    assert key_id not in token


async def test_only_a_valid_key_opens_a_session(replicas: Replicas) -> None:
    _, sessions = replicas.here
    assert await sessions.open("sk_unknown_secret") is None
    assert await sessions.open("") is None
    for token in ("", "a", "a_b", "_", "ü_b", "a_b_c" * 100):
        assert await sessions.find(token) is None


async def test_another_secret_does_not_open_a_session(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    _, other = await replicas.opened()
    session_id, secret = token.split("_")
    for wrong in ("", "0", secret[:-1], other.split("_")[1]):
        assert await replicas.here[1].find(f"{session_id}_{wrong}") is None
        await replicas.here[1].close(f"{session_id}_{wrong}")
    assert await replicas.here[1].find(token) is not None


async def test_the_store_holds_no_token(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    page = await replicas.store.list_documents("session")
    ((name, document),) = page.items
    assert token.startswith(name)
    assert token.partition("_")[2] not in repr(document.value)


async def test_a_session_ends_after_twelve_hours(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    replicas.clock.advance(SESSION_MS - 1)
    assert await replicas.here[1].find(token) is not None
    replicas.clock.advance(1)
    assert await replicas.here[1].find(token) is None


async def test_a_revoked_key_ends_its_sessions_within_two_seconds(replicas: Replicas) -> None:
    key_id, token = await replicas.opened()
    assert await replicas.there[1].find(token) is not None
    await replicas.here[0].revoke(key_id, actor="me")
    assert await replicas.here[1].find(token) is None
    replicas.clock.advance(WITHIN_MS)
    assert await replicas.there[1].find(token) is None


async def test_a_key_that_expires_ends_its_sessions(replicas: Replicas) -> None:
    _, token = await replicas.opened(expires_at=replicas.clock.now() + 60_000)
    replicas.clock.advance(60_000)
    assert await replicas.here[1].find(token) is None


async def test_a_closed_session_ends_everywhere_and_its_neighbour_goes_on(
    replicas: Replicas,
) -> None:
    _, token = await replicas.opened()
    _, other = await replicas.opened()
    assert await replicas.there[1].find(token) is not None
    await replicas.here[1].close(token)
    assert await replicas.here[1].find(token) is None
    replicas.clock.advance(WITHIN_MS)
    assert await replicas.there[1].find(token) is None
    assert await replicas.there[1].find(other) is not None


async def test_sessions_in_use_go_on_while_the_store_fails(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    replicas.lines[0].away(Fault.ERROR)
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(60_000)
    assert await replicas.here[1].find(token) is not None
    with pytest.raises(BackendError):
        await replicas.there[1].find(token)


async def test_guessed_sessions_do_not_displace_real_ones(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    _, sessions = replicas.there
    assert await sessions.find(token) is not None
    for number in range(1_100):
        assert await sessions.find(f"{number}_guess") is None
    replicas.lines[1].away(Fault.ERROR)
    replicas.clock.advance(60_000)
    assert await sessions.find(token) is not None


async def test_guesses_are_looked_up_a_few_at_a_time_and_refuse_no_known_session(
    replicas: Replicas,
) -> None:
    _, token = await replicas.opened()
    _, sessions = replicas.there
    assert await sessions.find(token) is not None
    replicas.clock.advance(WITHIN_MS)
    guesses = [asyncio.create_task(sessions.find(f"{n}_guess")) for n in range(500)]
    await asyncio.sleep(0)
    assert await sessions.find(token) is not None
    answers = await asyncio.gather(*guesses, return_exceptions=True)
    assert sum(isinstance(each, TooManyLookups) for each in answers) == 500 - 64
    assert await sessions.find("another_guess") is None


async def test_requests_of_one_session_share_a_look_at_the_store(replicas: Replicas) -> None:
    _, token = await replicas.opened()
    _, sessions = replicas.there
    before = replicas.lines[1].calls.total()
    found = await asyncio.gather(*[sessions.find(token) for _ in range(20)])
    assert None not in found
    assert replicas.lines[1].calls.total() - before <= 2  # its record, and that of its key


async def test_a_session_of_the_admin_key_goes_on_for_five_minutes_without_the_store() -> None:
    replicas = Replicas("sk_admin_0123456789abcdef")
    _, sessions = replicas.here
    token = await sessions.open("sk_admin_0123456789abcdef")
    assert token is not None
    replicas.lines[0].away(Fault.ERROR)
    replicas.clock.advance(5 * 60_000 - 1)
    assert await sessions.find(token) is not None
    replicas.clock.advance(1)
    with pytest.raises(BackendError):
        await sessions.find(token)


async def test_a_key_has_fifty_sessions_and_the_expired_ones_are_deleted(
    replicas: Replicas,
) -> None:
    _, first = await replicas.opened()
    key = await replicas.here[0].create(role=Role.RUNNER, tenant="acme", note=None, actor="me")
    tokens = []
    for _ in range(52):
        replicas.clock.advance(1)
        tokens.append(await replicas.here[1].open(key.key) or "")
    assert len((await replicas.store.list_documents("session", limit=1000)).items) == 51
    assert await replicas.there[1].find(tokens[0]) is None
    assert await replicas.there[1].find(tokens[-1]) is not None
    assert await replicas.there[1].find(first) is not None
    replicas.clock.advance(SESSION_MS)
    await replicas.here[1].open(key.key)
    assert len((await replicas.store.list_documents("session", limit=1000)).items) == 1


async def test_sessions_of_the_admin_key_end_when_another_is_given() -> None:
    replicas = Replicas("let me in")
    token = await replicas.here[1].open("let me in")
    assert token is not None
    found = await replicas.there[1].find(token)
    assert found is not None
    assert (found.holder.role, found.holder.tenant) == (Role.ADMIN, "*")
    documents, entropy = replicas.lines[0].port, SeededEntropy(9)
    for given in ("another", None):
        keys = Keys(documents=documents, clock=replicas.clock, entropy=entropy, admin_key=given)
        sessions = Sessions(keys, documents=documents, clock=replicas.clock, entropy=entropy)
        assert await sessions.find(token) is None


async def test_a_session_that_cannot_be_read_keeps_nobody_from_opening_another(
    replicas: Replicas,
) -> None:
    _, token = await replicas.opened()
    session_id = token.partition("_")[0]
    newer: JsonValue = {"secrets": ["of a later version"]}
    await replicas.store.put_document("session", session_id, newer, read=None)
    assert await replicas.there[1].find(token) is None
    _, another = await replicas.opened()
    assert await replicas.there[1].find(another) is not None
    assert await replicas.store.document("session", session_id) is not None
