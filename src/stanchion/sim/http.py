"""The way of callers and workers to replicas: requests that get lost, answers that do not come."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Final, Protocol

from stanchion.client.exchange import NoReply, Reply, Request, Silence
from stanchion.sim.front import Front
from stanchion.sim.link import Weather
from stanchion.sim.process import Process
from stanchion.worker.http1 import Answer
from stanchion.worker.transport import TransportFailed

__all__ = ["CallerTransport", "Desk", "Network", "WorkerTransport", "hang_up"]

_BROKEN: Final = NoReply(Silence.BROKEN, "the connection broke")
_TIMED_OUT: Final = NoReply(Silence.TIMED_OUT, "no answer in time")
NOTICED: Final = 0.7
"""Of those who hang up: the connection of the others is half open."""
_UNREACHED: Final = NoReply(Silence.UNREACHED, "connection refused")


class Desk(Protocol):
    """A replica, as callers see it."""

    process: Process
    front: Front
    inflight: dict[asyncio.Future[Reply | NoReply], None]
    """Requests whose answers break off when it dies."""


class Network:
    """Brings requests to one of the replicas, whichever the load balancer picks."""

    def __init__(
        self,
        caller: Process,
        desks: Callable[[], list[Desk]],
        chance: Random,
        faults: Counter[str],
        weather: Weather,
    ) -> None:
        self.caller = caller
        self.weather = weather
        self.is_cut = False
        self._desks = desks
        self._served: dict[asyncio.Future[Reply | NoReply], tuple[Desk, asyncio.Task[Reply]]] = {}
        self._chance = chance
        self._faults = faults

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply | NoReply:
        """Send it once; what came of it."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply | NoReply] = loop.create_future()
        timer = loop.call_later(timeout_s, _time_out, reply)
        desks = self._desks()
        chance = self._chance.random()
        weather = self.weather
        if self.is_cut:
            self._faults["request cut off"] += 1
        elif not desks or chance < weather.refused:
            self._faults["refused"] += 1
            self.caller.later(self._way_s(), _settle, reply, _UNREACHED)
        else:
            desk = self._chance.choice(desks)
            is_lost = chance < weather.refused + weather.lost_reply
            request = (method, path, headers, body)
            desk.process.later(self._way_s(), self._arrive, desk, request, reply, is_lost)
        try:
            outcome = await reply
        except asyncio.CancelledError:
            self._leave(reply)
            raise
        finally:
            timer.cancel()
        if outcome is _TIMED_OUT:
            self._leave(reply)
        return outcome

    def _leave(self, reply: asyncio.Future[Reply | NoReply]) -> None:
        """The caller has hung up: a replica that notices stops working for it."""
        served = self._served.get(reply)
        if served is not None and not self.is_cut and self._chance.random() < NOTICED:
            desk, task = served
            self._faults["caller left"] += 1
            desk.process.later(self._way_s(), task.cancel)

    def _arrive(
        self,
        desk: Desk,
        request: tuple[str, str, Mapping[str, str], bytes],
        reply: asyncio.Future[Reply | NoReply],
        is_lost: bool,  # noqa: FBT001 - passed by the loop
    ) -> None:
        desk.inflight[reply] = None
        task = desk.process.spawn(desk.front.answer(*request), name=f"{request[0]} {request[1]}")
        self._served[reply] = (desk, task)

        def done(task: asyncio.Task[Reply]) -> None:
            desk.inflight.pop(reply, None)
            self._served.pop(reply, None)
            if task.cancelled():
                return
            if is_lost or self.is_cut:
                self._faults["reply lost"] += 1
                return
            self.caller.later(self._way_s(), _settle, reply, task.result())

        task.add_done_callback(done)

    def _way_s(self) -> float:
        chance = self._chance.random()
        if chance < self.weather.late:
            self._faults["late"] += 1
            return self.weather.late_s * self._chance.random()
        return self.weather.each_way_s * chance


def hang_up(desk: Desk) -> None:
    """The replica is gone: whoever waits for its answers is told by the network."""
    for reply in desk.inflight:
        _settle(reply, _BROKEN)
    desk.inflight.clear()


def _settle(reply: asyncio.Future[Reply | NoReply], answer: Reply | NoReply) -> None:
    if not reply.done():
        reply.set_result(answer)


def _time_out(reply: asyncio.Future[Reply | NoReply]) -> None:
    _settle(reply, _TIMED_OUT)


class CallerTransport:
    """The client SDK's transport."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def send(self, request: Request) -> Reply | NoReply:
        return await self._network.send(
            request.method, request.path, dict(request.headers), request.body, request.timeout_s
        )


class WorkerTransport:
    """The worker SDK's transport."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def post(self, path: str, body: bytes) -> Answer:
        answer = await self._network.send("POST", path, {}, body, 60.0)
        if isinstance(answer, NoReply):
            raise TransportFailed(answer.message)
        return Answer(answer.status, answer.body)

    async def close(self) -> None:
        """There is nothing to let go of."""
