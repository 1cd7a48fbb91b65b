"""The stream is made once, so a cluster that lacks a server for a moment is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from nats.aio.msg import Msg

from stanchion.adapters.bus.nats.names import Names
from stanchion.adapters.bus.nats.stream import Standing, set_up

NO_PEERS = {"error": {"code": 400, "err_code": 10005, "description": "no suitable peers"}}
NOT_THERE = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}


class Server:
    """Answers as it was told; what it made is what it was asked to make."""

    def __init__(self, refusals: int) -> None:
        self._refusals = iter(range(refusals))
        self.wanted: list[int] = []

    async def ask(self, subject: str, body: bytes) -> Msg:
        return Msg(_client=None, data=msgspec.json.encode(self._answer(subject, body)))  # type: ignore[arg-type]  # never used

    def _answer(self, subject: str, body: bytes) -> object:
        if ".INFO." in subject:
            return NOT_THERE
        config = msgspec.json.decode(body)
        if ".STREAM." in subject:
            self.wanted.append(config["num_replicas"])
            if config["num_replicas"] == 3 and next(self._refusals, None) is not None:
                return NO_PEERS
            return {"config": config, "cluster": {"name": "all"}}
        return {"config": config["config"]}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def at_once(_seconds: float) -> None:
        """No time passes."""

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", at_once)
        yield


async def made_by(server: Server) -> Standing:
    return await set_up(server.ask, Names("stanchion"), ack_wait_s=30)


async def test_a_server_that_was_away_for_a_moment_is_waited_for() -> None:
    server = Server(refusals=2)
    standing = await made_by(server)
    assert server.wanted == [3, 3, 3]
    assert not standing.is_fragile


async def test_a_cluster_that_stays_too_small_keeps_it_on_one() -> None:
    server = Server(refusals=100)
    standing = await made_by(server)
    assert server.wanted == [3] * 5 + [1]
    assert standing.is_fragile
