"""Getting in: certificates, user names and passwords, for servers and for their Sentinels."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from stanchion.adapters.locks.redis.locks import RedisTurns
from stanchion.adapters.redis.address import read_url
from stanchion.adapters.redis.topology import Topology
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.system import SystemEntropy
from stanchion.ports.errors import BackendError, BackendRefused
from tests.adapters.sentinels import SERVICE, running_sentinel
from tests.contract.builders import start
from tests.servers import Server, running_server

_PASSWORD = "p/@ #?:s"  # noqa: S105 - made up
_QUOTED = quote(_PASSWORD, safe="")


class Certificates:
    """A CA, and a certificate that it signed for server and client alike."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.certificate, self.key = (
            directory / name for name in ("ca.pem", "cert.pem", "key.pem")
        )
        ca_key, request = directory / "ca.key", directory / "request.pem"
        extensions = directory / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        new = ("-newkey", "rsa:2048", "-nodes")
        days = ("-days", "2")
        ca, leaf = ("-subj", "/CN=test CA"), ("-subj", "/CN=test")
        _openssl("req", "-x509", *new, *days, *ca, "-keyout", ca_key, "-out", self.ca)
        _openssl("req", *new, *leaf, "-keyout", self.key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, *days, "-CA", self.ca, "-CAkey", ca_key),
            *("-CAcreateserial", "-extfile", extensions, "-out", self.certificate),
        )

    @property
    def as_client(self) -> str:
        """Options of a URL."""
        return f"ssl_ca_certs={self.ca}&ssl_certfile={self.certificate}&ssl_keyfile={self.key}"

    @asynccontextmanager
    async def in_front_of(self, server: Server) -> AsyncIterator[str]:
        """TLS in front of a server that has none; only clients with a certificate get through."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.load_cert_chain(self.certificate, self.key)
        context.verify_mode = ssl.CERT_REQUIRED

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await reader.read(65_536):
                    writer.write(data)
                    await writer.drain()
            writer.transport.abort()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs, ours = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(pipe(reader, ours), pipe(theirs, writer))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Noted before it connects, which takes long on a busy machine: all are waited for.
            carried = asyncio.create_task(carry(reader, writer))
            open_pipes.append(carried)
            await carried

        open_pipes: list[asyncio.Task[None]] = []
        proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        try:
            yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        finally:
            proxy.close()
            await asyncio.wait_for(asyncio.gather(*open_pipes), 10)
            await asyncio.sleep(0)  # An aborted transport is gone one turn later.


def _openssl(*words: str | Path) -> None:
    subprocess.run(
        ["/usr/bin/env", "openssl", *map(str, words)], check=True, capture_output=True, timeout=30
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server, server.client() as client:
        client.acl_setuser(
            "stanchion", enabled=True, passwords=[f"+{_PASSWORD}"], keys=["*"],
            channels=["*"], categories=["+@all"],
        )  # fmt: skip
        yield server


async def test_a_server_is_reached_over_tls_with_a_ca_and_a_client_certificate(
    server: Server, certificates: Certificates
) -> None:
    async with certificates.in_front_of(server) as address:
        url = f"rediss://stanchion:{_QUOTED}@{address}?{certificates.as_client}"
        store = await RedisStore.open(url, timeout_s=10.0)
        await start(store)
        await store.close()
        turns = await RedisTurns.open(url, timeout_s=10.0)
        await turns.join("name", "token", ticket_ms=1_000, within_ms=5_000)
        with server.client() as client:
            assert len(client.client_list(_type="pubsub")) == 1
        await turns.close()


async def test_a_server_with_another_ca_is_not_trusted(
    server: Server, certificates: Certificates
) -> None:
    async with certificates.in_front_of(server) as address:
        with pytest.raises(BackendError, match="certificate verify failed"):
            await RedisStore.open(f"rediss://{address}", timeout_s=10.0)


async def test_a_client_without_a_certificate_does_not_get_in(
    server: Server, certificates: Certificates
) -> None:
    async with certificates.in_front_of(server) as address:
        with pytest.raises(BackendError):
            await RedisStore.open(f"rediss://{address}?ssl_ca_certs={certificates.ca}")


async def test_a_user_of_the_access_list_gets_in_with_any_password(server: Server) -> None:
    store = await RedisStore.open(f"redis://stanchion:{_QUOTED}@{server.address}", timeout_s=10.0)
    await start(store)
    await store.close()
    with pytest.raises(BackendRefused, match="does not accept the password") as refused:
        await RedisStore.open(f"redis://stanchion:hush@{server.address}")
    assert "hush" not in str(refused.value)


async def test_sentinels_with_a_password_name_the_primary(tmp_path: Path) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(running_server())
        sentinel = stack.enter_context(
            running_sentinel(primary, tmp_path, replicas=0, password="watch/er")  # noqa: S106 - made up
        )
        url = f"redis+sentinel://{sentinel.address}/{SERVICE}"
        with pytest.raises(BackendRefused, match="sentinel_password"):
            await RedisStore.open(url)
        with pytest.raises(BackendRefused, match="password") as refused:
            await RedisStore.open(f"{url}?sentinel_password=hush")
        assert "hush" not in str(refused.value)
        store = await RedisStore.open(f"{url}?sentinel_password=watch%2Fer", timeout_s=10.0)
        await start(store)
        await store.close()


async def test_sentinels_are_reached_over_tls_as_the_servers_are(
    certificates: Certificates, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(running_server())
        sentinel = stack.enter_context(running_sentinel(primary, tmp_path, replicas=0))
        async with certificates.in_front_of(sentinel) as address:
            url = f"rediss+sentinel://{address}/{SERVICE}?{certificates.as_client}"
            topology = Topology(read_url(url), timeout_s=10.0, entropy=SystemEntropy())
            await topology.find(asyncio.get_running_loop().time() + 10)
            assert [node.address.port for node in topology.primaries()] == [primary.port]
            await topology.close()
