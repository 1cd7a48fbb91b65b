"""Errors from inside a script, as Redis before version 7 words them.

It puts its own words before the error of the command: the code that says what to do is not the
first word. The servers here are puppets, because such a server is not at hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import hiredis
import pytest

from stanchion.adapters.redis.address import ServerAddress, read_url
from stanchion.adapters.redis.client import RedisClient, RedisRequest, Script
from stanchion.adapters.redis.connection import code_of, translate
from stanchion.adapters.redis.topology import Topology
from stanchion.adapters.system import SystemEntropy
from stanchion.ports.errors import BackendError, BackendUnavailable

_SOON_S = 5.0
_BEFORE = "ERR Error running script (call to f_1f2c): @user_script:7: @user_script: 7: -"
_READ_ONLY = f"{_BEFORE}READONLY You can't write against a read only replica. "


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (_READ_ONLY, "READONLY"),
        (f"{_BEFORE}OOM command not allowed when used memory > 'maxmemory'. ", "OOM"),
        (f"{_BEFORE}MISCONF Redis is configured to save RDB snapshots, but it is", "MISCONF"),
        (f"{_BEFORE}NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
    ],
)
def test_the_code_of_an_error_in_a_script_is_found(error: str, code: str) -> None:
    assert code_of(hiredis.ReplyError(error)) == code
    assert isinstance(translate(hiredis.ReplyError(error), "a server"), BackendUnavailable)


@pytest.mark.parametrize(
    "error",
    [
        "ERR unknown command 'OOM'",
        "ERR Error running script (call to f_1f2c): @user_script:7: attempt to index a nil value",
        "ERR Error running script (call to f_1f2c): @user_script:7: @user_script: 7: -ERR syntax",
    ],
)
def test_other_errors_are_faults(error: str) -> None:
    assert code_of(hiredis.ReplyError(error)) == "ERR"
    assert type(translate(hiredis.ReplyError(error), "a server")) is BackendError


async def test_a_script_follows_the_primary_of_an_old_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _puppet(f"-{_READ_ONLY}\r\n") as former, _puppet("$4\r\ndone\r\n") as present:
        primaries = [former, present]

        async def ask_sentinels(self: Topology, deadline: float) -> ServerAddress:  # noqa: ARG001
            return primaries.pop(0)

        monkeypatch.setattr(Topology, "_ask_sentinels", ask_sentinels)
        target = read_url("redis+sentinel://127.0.0.1:1/main")
        client = RedisClient(target, timeout_s=_SOON_S, entropy=SystemEntropy())
        await client.topology.find(client.deadline())
        monkeypatch.setattr("stanchion.adapters.redis.topology._FOUND_S", 0.0)
        script = Script("script", "return 'done'", ())
        request = RedisRequest(0, script.call([], []), script)
        try:
            assert await client.ask(request, deadline=client.deadline()) == b"done"
        finally:
            await client.close()


@asynccontextmanager
async def _puppet(answer: str) -> AsyncIterator[ServerAddress]:
    """A server that gives every script the same answer."""
    polite = {b"PING": b"+PONG\r\n", b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n0\r\n"}

    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        parser = hiredis.Reader()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    writer.write(polite.get(command[0], answer.encode()))
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
    # Each ends when the client has closed its connection.
    await asyncio.wait(serving, timeout=_SOON_S)
