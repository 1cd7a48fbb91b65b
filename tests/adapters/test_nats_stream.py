"""The stream is made once, so a cluster that lacks a server for a moment is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from nats.aio.client import ServerVersion
from nats.aio.msg import Msg
from nats.js import JetStreamManager

from stanchion.adapters.bus.nats.stream import Names, StreamState, set_up

NO_PEERS = {"error": {"code": 400, "err_code": 10005, "description": "no suitable peers"}}
NOT_THERE = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}


class Server:
    """Answers as it was told; what it made is what it was asked to make."""

    def __init__(self, refusals: int) -> None:
        self._refusals = iter(range(refusals))
        self.wanted: list[int] = []

    @property
    def connected_server_version(self) -> ServerVersion:
        return ServerVersion("2.11.0")

    async def request(self, subject: str, body: bytes, timeout: float) -> Msg:  # noqa: ASYNC109, ARG002 - nats-py's
        return Msg(_client=None, data=msgspec.json.encode(self._answer(subject, body)))  # type: ignore[arg-type]  # never used

    def _answer(self, subject: str, body: bytes) -> object:
        if ".INFO." in subject:
            return NOT_THERE
        config = msgspec.json.decode(body)
        made = {"created": "2026-01-01T00:00:00Z"}
        if ".STREAM." in subject:
            self.wanted.append(config["num_replicas"])
            if config["num_replicas"] == 3 and next(self._refusals, None) is not None:
                return NO_PEERS
            state = {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0, "consumer_count": 0}
            return {"config": config, "cluster": {"name": "all"}, "state": state, **made}
        return {"config": config["config"], "name": "replicas", "stream_name": "s", **made}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def at_once(_seconds: float) -> None:
        """No time passes."""

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", at_once)
        yield


async def made_by(server: Server) -> StreamState:
    manager = JetStreamManager(server)  # type: ignore[arg-type]  # as much of a client as it uses
    return await set_up(manager, Names("stanchion"), ack_wait_s=30)


async def test_a_server_that_was_away_for_a_moment_is_waited_for() -> None:
    server = Server(refusals=2)
    state = await made_by(server)
    assert server.wanted == [3, 3, 3]
    assert not state.has_one_replica


async def test_a_cluster_that_stays_too_small_keeps_it_on_one() -> None:
    server = Server(refusals=100)
    state = await made_by(server)
    assert server.wanted == [3] * 5 + [1]
    assert state.has_one_replica
