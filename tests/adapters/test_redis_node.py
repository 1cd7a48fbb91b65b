"""Gathering: one pipeline a turn, answers to whom they belong, and quick bad news.

The server here is a puppet that answers when it is told to, so that every moment can be chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import hiredis
import pytest

from stanchion.adapters.redis.address import ServerAddress
from stanchion.adapters.redis.connection import ConnectionLost, Reply
from stanchion.adapters.redis.node import Login, Node, pack
from stanchion.adapters.system import SystemEntropy
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendRefused, BackendTimeout, BackendUnavailable

_SOON_S = 5.0
"""Longer than anything here takes; only a hang comes to its end."""


class _Puppet:
    """A server whose answers wait until ``may_answer`` is set."""

    def __init__(self) -> None:
        self.address = ServerAddress("127.0.0.1", 0)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.heard: asyncio.Queue[list[list[bytes]]] = asyncio.Queue()
        """What came in, by the read: a pipeline is one read, as long as it is short."""
        self.connections: list[asyncio.StreamWriter] = []
        self.login: Callable[[bytes], bytes | None] = _polite
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections.append(writer)
        parser = hiredis.Reader()
        try:
            while data := await reader.read(1 << 20):
                parser.feed(data)
                await self._answer(parser, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, parser: hiredis.Reader, writer: asyncio.StreamWriter) -> None:
        heard: list[list[bytes]] = []
        while (command := parser.gets()) is not False:
            heard.append(command)
        asked = [command for command in heard if self.login(command[0]) is None]
        if asked:
            self.heard.put_nowait(asked)
            await self.may_answer.wait()
        for command in heard:
            polite = self.login(command[0])
            writer.write(_bulk(command[1]) if polite is None else polite)
        await writer.drain()

    async def hears(self) -> list[bytes]:
        """The next pipeline, as the words that were to be echoed."""
        async with asyncio.timeout(_SOON_S):
            return [command[1] for command in await self.heard.get()]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            await asyncio.wait([task], timeout=_SOON_S)


def _polite(command: bytes) -> bytes | None:
    return {b"PING": b"+PONG\r\n", b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n0\r\n"}.get(command)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


@pytest.fixture
async def puppet() -> AsyncIterator[_Puppet]:
    puppet = _Puppet()
    server = await asyncio.start_server(puppet.serve, "127.0.0.1", 0)
    puppet.address = ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    yield puppet
    server.close()
    await puppet.close()


class _NeverPauses(SystemEntropy):
    """The chance that lets the next attempt to connect come at once."""

    def unit(self) -> float:
        return 0.0


@asynccontextmanager
async def _node(
    address: ServerAddress,
    *,
    timeout_s: float = _SOON_S,
    login: Login | None = None,
    entropy: Entropy | None = None,
) -> AsyncIterator[Node]:
    node = Node(
        address,
        login=login or Login(),
        tls=None,
        timeout_s=timeout_s,
        entropy=entropy or SystemEntropy(),
    )
    yield node
    await node.close()


def _echo(node: Node, word: str, *, within_s: float = _SOON_S) -> asyncio.Future[Reply]:
    deadline = asyncio.get_running_loop().time() + within_s
    return node.ask(pack("ECHO", word), deadline=deadline)


async def test_calls_of_one_turn_go_out_as_one_pipeline(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        await _echo(node, "warm")
        await puppet.hears()
        replies = await asyncio.gather(*(_echo(node, str(number)) for number in range(100)))
        assert replies == [b"%d" % number for number in range(100)]
        assert len(await puppet.hears()) == 100


async def test_a_pipeline_has_at_most_256_calls(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        await _echo(node, "warm")
        await puppet.hears()
        await asyncio.gather(*(_echo(node, str(number)) for number in range(600)))
        lengths: list[int] = []
        while sum(lengths) < 600:
            lengths.append(len(await puppet.hears()))
        assert max(lengths) <= 256


async def test_while_all_connections_are_busy_the_next_pipeline_grows(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        puppet.may_answer.clear()
        busy = []
        for number in range(4):
            busy.append(_echo(node, f"busy-{number}"))
            await puppet.hears()
        late = []
        for number in range(50):
            late.append(_echo(node, f"late-{number}"))
            await asyncio.sleep(0)
        puppet.may_answer.set()
        await asyncio.gather(*busy, *late)
        assert len(await puppet.hears()) == 50
        assert len(puppet.connections) == 4


async def test_a_caller_that_leaves_does_not_shift_the_answers(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        puppet.may_answer.clear()
        calls = [_echo(node, str(number)) for number in range(10)]
        await puppet.hears()
        for call in calls[::2]:
            call.cancel()
        puppet.may_answer.set()
        assert await asyncio.gather(*calls[1::2]) == [b"1", b"3", b"5", b"7", b"9"]
        assert await _echo(node, "after") == b"after"
        assert len(puppet.connections) == 1


async def test_a_caller_that_left_before_its_turn_is_never_sent(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        calls = [_echo(node, str(number)) for number in range(3)]
        calls[1].cancel()
        assert await calls[0] == b"0"
        assert await calls[2] == b"2"
        assert await puppet.hears() == [b"0", b"2"]


async def test_an_impatient_caller_gets_a_timeout_and_the_patient_ones_their_answers(
    puppet: _Puppet,
) -> None:
    async with _node(puppet.address) as node:
        puppet.may_answer.clear()
        hasty, patient = _echo(node, "hasty", within_s=0.02), _echo(node, "patient")
        with pytest.raises(BackendTimeout):
            await hasty
        puppet.may_answer.set()
        assert await patient == b"patient"
        assert len(puppet.connections) == 1


async def test_a_connection_that_did_not_answer_in_time_is_never_used_again(
    puppet: _Puppet,
) -> None:
    async with _node(puppet.address, timeout_s=0.05) as node:
        puppet.may_answer.clear()
        with pytest.raises(BackendTimeout):
            await _echo(node, "lost")
        puppet.may_answer.set()  # The answer to "lost" is on its way now.
        assert await _echo(node, "fresh") == b"fresh"
        assert len(puppet.connections) == 2


async def test_a_broken_pipeline_fails_its_own_calls_only(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        puppet.may_answer.clear()
        first = _echo(node, "first")
        await puppet.hears()
        second = _echo(node, "second")
        await puppet.hears()
        puppet.connections[0].transport.abort()
        with pytest.raises(ConnectionLost):
            await first
        puppet.may_answer.set()
        assert await second == b"second"
        assert await _echo(node, "third") == b"third"


@pytest.mark.parametrize("entropy", [SystemEntropy(), _NeverPauses()])
async def test_a_refused_connection_is_known_at_once(entropy: Entropy) -> None:
    nobody = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = ServerAddress("127.0.0.1", nobody.sockets[0].getsockname()[1])
    nobody.close()
    async with _node(address, timeout_s=60.0, entropy=entropy) as node:
        async with asyncio.timeout(_SOON_S):
            for _ in range(5):
                with pytest.raises(BackendUnavailable) as failed:
                    await _echo(node, "anybody?")
                assert not isinstance(failed.value, BackendTimeout)


async def test_a_server_that_does_not_greet_is_a_timeout(puppet: _Puppet) -> None:
    puppet.login = lambda _: b""
    async with _node(puppet.address, timeout_s=0.05) as node:
        with pytest.raises(BackendTimeout):
            await _echo(node, "hello?")


async def test_a_server_that_hangs_up_is_found_again(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        assert await _echo(node, "one") == b"one"
        puppet.connections[0].transport.abort()
        assert await _again(lambda: _echo(node, "two")) == b"two"


async def test_a_wrong_password_is_refused(puppet: _Puppet) -> None:
    def strict(command: bytes) -> bytes | None:
        return b"-WRONGPASS no\r\n" if command == b"AUTH" else _polite(command)

    puppet.login = strict
    login = Login(username="me", password="wrong")  # noqa: S106 - made up
    async with _node(puppet.address, login=login) as node:
        with pytest.raises(BackendRefused, match="password"):
            await _echo(node, "in?")


async def test_what_is_not_redis_is_an_error_and_not_a_hang(puppet: _Puppet) -> None:
    puppet.login = lambda _: b"HTTP/1.1 400 Bad Request\r\n"
    async with _node(puppet.address) as node:
        with pytest.raises(BackendUnavailable, match="does not speak Redis"):
            await _echo(node, "redis?")


async def test_a_closed_node_answers_nobody(puppet: _Puppet) -> None:
    async with _node(puppet.address) as node:
        puppet.may_answer.clear()
        waiting = _echo(node, "waiting")
        await puppet.hears()
        await node.close()
        with pytest.raises(BackendUnavailable):
            await waiting
        with pytest.raises(BackendUnavailable):
            await _echo(node, "too late")
        puppet.may_answer.set()


async def _again(call: Callable[[], asyncio.Future[Reply]]) -> Reply:
    """The answer, once the connection is up again: bad news is allowed until then."""
    async with asyncio.timeout(_SOON_S):
        while True:
            try:
                return await call()
            except BackendUnavailable:
                await asyncio.sleep(0.001)
