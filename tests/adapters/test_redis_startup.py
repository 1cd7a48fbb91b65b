"""Start-up: which servers are refused, and what is warned about."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import hiredis
import pytest

from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.redis import RedisStore
from stanchion.core.audit import AuditEntry
from stanchion.core.upgrade import LEVEL
from stanchion.ports.errors import BackendRefused, BackendUnavailable
from tests.contract.builders import start
from tests.servers import Server, running_server

_PASSWORD = "hush"  # noqa: S105 - made up


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


async def _opened(url: str, *, namespace: str = "stanchion") -> tuple[str, ...]:
    """Open a store and locks; their warnings, which are the same."""
    store = await RedisStore.open(url, namespace=namespace, timeout_s=5.0)
    await store.close()
    locks = await RedisLocks.open(url, namespace=namespace, timeout_s=5.0)
    await locks.close()
    assert store.warnings == locks.warnings
    return store.warnings


async def _refused(url: str, *, namespace: str = "stanchion") -> str:
    """Why both are refused."""
    with pytest.raises(BackendRefused) as store:
        await RedisStore.open(url, namespace=namespace, timeout_s=5.0)
    with pytest.raises(BackendRefused):
        await RedisLocks.open(url, namespace=namespace, timeout_s=5.0)
    return str(store.value)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_may_throw_data_away_is_refused(policy: str) -> None:
    with running_server(None, "--maxmemory-policy", policy) as server:
        reason = await _refused(server.url)
        assert policy in reason
        assert "CONFIG SET maxmemory-policy noeviction" in reason


async def test_without_persistence_there_is_a_warning(server: Server) -> None:
    (warning,) = await _opened(server.url)
    assert "a restart loses everything" in warning
    assert server.address in warning


async def test_with_snapshots_alone_there_is_a_warning(tmp_path: Path) -> None:
    with running_server(None, "--save", "900 1", directory=tmp_path) as server:
        (warning,) = await _opened(server.url)
        assert "only snapshots" in warning


async def test_with_an_append_only_file_there_is_no_warning(tmp_path: Path) -> None:
    with running_server(None, "--appendonly", "yes", directory=tmp_path) as server:
        assert await _opened(server.url) == ()


async def test_where_config_is_forbidden_info_is_asked(server: Server) -> None:
    with server.client() as client:
        client.execute_command(
            *("ACL", "SETUSER", "managed", "on", f">{_PASSWORD}", "~*", "&*", "+@all", "-config")
        )
    url = f"redis://managed:{_PASSWORD}@{server.address}"
    (warning,) = await _opened(url)
    assert "CONFIG is forbidden" in warning


async def test_an_eviction_policy_is_seen_without_config_too() -> None:
    with running_server(None, "--maxmemory-policy", "allkeys-lfu") as server:
        with server.client() as client:
            client.execute_command(
                *("ACL", "SETUSER", "managed", "on", f">{_PASSWORD}", "~*", "&*"),
                *("+@all", "-config"),
            )
        assert "allkeys-lfu" in await _refused(f"redis://managed:{_PASSWORD}@{server.address}")


async def test_where_nothing_may_be_asked_that_is_a_warning(server: Server) -> None:
    with server.client() as client:
        client.execute_command(
            *("ACL", "SETUSER", "shut", "on", f">{_PASSWORD}", "~*", "&*"),
            *("+@all", "-config", "-info"),
        )
    warnings = await _opened(f"redis://shut:{_PASSWORD}@{server.address}")
    assert any("make sure maxmemory-policy is noeviction" in warning for warning in warnings)


async def test_a_wrong_password_is_refused(server: Server) -> None:
    assert "password" in await _refused(f"redis://nobody:{_PASSWORD}@{server.address}")


async def test_another_format_of_the_data_is_refused(server: Server) -> None:
    with server.client() as client:
        client.set("old:{common}:format", "1 with 32 shards")
        client.set("old:locks:{common}:format", "1 with 32 shards")
    assert "1 with 32 shards" in await _refused(server.url, namespace="old")


async def test_the_data_of_an_older_version_is_kept_until_it_is_raised(server: Server) -> None:
    with server.client() as client:
        client.set("aged:{common}:format", "1 with 64 shards")
        client.set("future:{common}:format", f"{LEVEL + 1} with 64 shards")
        with pytest.raises(BackendRefused, match=f"{LEVEL + 1} with 64 shards"):
            await RedisStore.open(server.url, namespace="future")
        store = await RedisStore.open(server.url, namespace="aged")
        assert (await store.level(), client.get("aged:{common}:format")) == (1, "1 with 64 shards")
        entry = AuditEntry(action="upgrade.finish", actor="kim", subject="upgrade")
        assert await store.raise_level(LEVEL, audit=entry) == LEVEL
        assert await store.raise_level(LEVEL, audit=entry) == LEVEL
        # What older versions compare when they start.
        assert client.get("aged:{common}:format") == f"{LEVEL} with 64 shards"
        assert [each.actor for each in (await store.list_audit()).items] == ["kim"]
        client.delete("aged:{common}:format")
        assert await store.level() == 1
        assert await store.raise_level(LEVEL) == LEVEL
        await store.close()


async def test_the_same_format_is_accepted_again(server: Server) -> None:
    await _opened(server.url, namespace="twice")
    await _opened(server.url, namespace="twice")


async def test_a_single_server_is_no_cluster(server: Server) -> None:
    reason = await _refused(f"redis+cluster://{server.address}")
    assert f"use redis://{server.address}" in reason


async def test_a_replica_is_refused(server: Server) -> None:
    with running_server(None, "--replicaof", f"127.0.0.1 {server.port}") as replica:
        assert "replica" in await _refused(replica.url)


class _Old(asyncio.Protocol):
    """A server that has nothing to say but that its version is 6.0."""

    _INFO = b"# Server\r\nredis_version:6.0.16\r\n"
    _ANSWERS: ClassVar = {
        b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n0\r\n",
        b"PING": b"+PONG\r\n",
        b"INFO": b"$%d\r\n%s\r\n" % (len(_INFO), _INFO),
        b"CONFIG": b"*0\r\n",
    }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._parser = hiredis.Reader()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (command := self._parser.gets()) is not False:
            self._transport.write(self._ANSWERS[command[0]])


async def test_a_server_that_is_too_old_is_refused() -> None:
    server = await asyncio.get_running_loop().create_server(_Old, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert "6.2 or newer is needed" in await _refused(f"redis://127.0.0.1:{port}")
    server.close()
    await asyncio.sleep(0.01)  # For the far ends of its connections to notice.


async def test_a_url_of_another_kind_is_refused() -> None:
    await _refused("http://127.0.0.1:1")


async def test_nobody_there_is_unavailable_and_leaves_nothing_behind() -> None:
    with running_server() as gone:
        pass
    for opening in (RedisStore.open(gone.url), RedisLocks.open(gone.url)):
        with pytest.raises(BackendUnavailable):
            await opening
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_namespaces_do_not_see_each_other(server: Server) -> None:
    ours = await RedisStore.open(server.url, namespace="ours", timeout_s=5.0)
    theirs = await RedisStore.open(server.url, namespace="theirs", timeout_s=5.0)
    run_id = await start(ours)
    assert await theirs.load(run_id) is None
    assert await ours.load(run_id) is not None
    await ours.close()
    await theirs.close()
