"""Scripts: their contract is what they do, and a server that forgot them is reminded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from importlib import resources

import msgspec
import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.redis.client import Script
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.redis.encode import OF_RUN, OF_SHARD, OF_TENANT
from stanchion.core.admission import Admitted
from stanchion.core.model import TenantId
from stanchion.ports.locks import Granted, Renewed
from stanchion.ports.records import Committed, Tenant
from tests.contract.builders import ACME, ONE_JOB, WITHIN_MS, accept, admission, advance, lease_one
from tests.servers import Server, running_server

_STORE = "stanchion.adapters.store.redis"
_LOCKS = "stanchion.adapters.locks.redis"
_COMMON = "stanchion.adapters.redis"


_GIVEN = {"at", "names", "newest", "records", "run", "unpack(runs", "out", "of_out", "timeline"}
"""The only variables that stand for a key: arguments of ``many`` and ``first``, loops, and those of
the runs of ``admit_alike``."""


def _names(package: str) -> list[str]:
    files = resources.files(package).iterdir()
    return sorted(file.name.removesuffix(".lua") for file in files if file.name.endswith(".lua"))


_SCRIPTS = [
    (package, name)
    for package in (_STORE, _LOCKS)
    for name in _names(package)
    if not name.startswith("part_")
]


def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath(f"{name}.lua").read_text("utf-8")


def _whole(script: Script) -> str:
    """What the server is sent, without comments."""
    command = script.load().decode()
    return re.sub(r"--.*", "", command[command.index("--") :])


@pytest.mark.parametrize(("package", "name"), _SCRIPTS)
def test_a_script_opens_with_its_contract(package: str, name: str) -> None:
    lines = _text(package, name).splitlines()
    assert lines[0].startswith(f"-- {name}: ")
    assert lines[1].startswith("-- KEYS")
    contract = "\n".join(line for line in lines if line.startswith("--"))
    assert "-- ANSWER" in contract
    assert ("-- ARGV" in contract) == ("ARGV" in _whole(Script.read(package, name)))


@pytest.mark.parametrize(("package", "name"), _SCRIPTS)
def test_a_script_touches_the_keys_that_it_declares_and_no_others(package: str, name: str) -> None:
    script = Script.read(package, name)
    used = {int(place) for place in re.findall(r"KEYS\[(\d+)\]", _whole(script))}
    assert used == set(range(1, len(script.key_names) + 1))
    # The only other way to a key would be to build one.
    for command, at in re.findall(r"redis\.p?call\(\s*'([A-Z]+)', ([^,)]+)", _whole(script)):
        is_key = re.fullmatch(r"KEYS\[(\d+|#KEYS|i|i \+ 1)\]", at) or at in _GIVEN
        assert is_key or command == "PUBLISH", (command, at)


@pytest.mark.parametrize("package", [_STORE, _LOCKS, _COMMON])
def test_every_part_is_used(package: str) -> None:
    parts = {name for name in _names(package) if name.startswith("part_")}
    uses = {
        f"part_{word}"
        for each, name in _SCRIPTS
        for line in re.findall(r"^-- USES +(.+)$", _text(each, name), re.MULTILINE)
        for word in line.split()
    }
    assert parts <= uses


@pytest.mark.parametrize(("package", "name"), _SCRIPTS)
def test_no_script_opens_json_or_writes_numbers_as_lua_does(package: str, name: str) -> None:
    whole = _whole(Script.read(package, name))
    assert "cjson" not in whole
    assert "tostring" not in whole


def test_the_names_of_keys_tell_whose_they_are() -> None:
    assert not OF_SHARD & OF_RUN
    assert not OF_SHARD & OF_TENANT
    assert not OF_RUN & OF_TENANT


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    with server.client() as client:
        client.flushall()
    store = await RedisStore.open(server.url, timeout_s=10.0)
    yield store
    await store.close()


def _forget(server: Server) -> None:
    with server.client() as client:
        client.script_flush()


async def test_a_server_that_forgot_every_script_goes_on(server: Server, store: RedisStore) -> None:
    _forget(server)
    wanted = admission(await store.now())
    assert await store.admit(wanted, within_ms=WITHIN_MS) == Admitted(wanted.run.id)
    _forget(server)
    leased = await lease_one(store)
    _forget(server)
    await accept(store, leased)
    _forget(server)
    assert isinstance(await advance(store, ONE_JOB, wanted.run.id), Committed)
    _forget(server)
    assert await store.active_runs(ACME) == 0


async def test_many_callers_at_once_may_find_it_forgetful(
    server: Server, store: RedisStore
) -> None:
    await store.put_tenant(ACME, Tenant(max_concurrent_runs=7))
    now = await store.now()
    _forget(server)
    verdicts = await asyncio.gather(
        *(store.admit(admission(now), within_ms=WITHIN_MS) for _ in range(300))
    )
    assert sum(isinstance(verdict, Admitted) for verdict in verdicts) == 7
    assert await store.active_runs(ACME) == 7


async def test_tenants_of_all_shards_are_served_after_it_forgot(
    server: Server, store: RedisStore
) -> None:
    now = await store.now()
    _forget(server)
    wanted = [admission(now, tenant=TenantId(f"tenant-{number}")) for number in range(200)]
    verdicts = await asyncio.gather(*(store.admit(each, within_ms=WITHIN_MS) for each in wanted))
    assert verdicts == [Admitted(each.run.id) for each in wanted]


async def test_locks_go_on_too(server: Server) -> None:
    locks = await RedisLocks.open(server.url, timeout_s=10.0)
    try:
        _forget(server)
        answer = await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=WITHIN_MS)
        assert isinstance(answer, Granted)
    finally:
        await locks.close()


async def test_a_lock_of_an_older_version_is_shown_and_renewed(server: Server) -> None:
    locks = await RedisLocks.open(server.url, namespace="older", timeout_s=10.0)
    try:
        await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=WITHIN_MS)
        with server.client() as client:
            (held,) = client.keys("older:locks:*:held")
            client.hset(held, "run/1", msgspec.msgpack.encode(["me", 7]))
        assert await locks.renew("run/1", "me", ttl_ms=60_000, within_ms=WITHIN_MS) == Renewed()
        assert await locks.acquire("run/1", "me", ttl_ms=60_000, within_ms=WITHIN_MS) == Granted(7)
        view = await locks.inspect("run/1")
        assert view is not None
        assert (view.fence, view.acquired_at, view.renewals) == (7, None, 1)
    finally:
        await locks.close()
