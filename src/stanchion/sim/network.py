"""Links between processes and servers.

A request is sent, executed, and answered. Each of the three can fail: the request is lost or
refused, the answer is lost, either takes longer than the caller waits. A request is executed when
it arrives, even if the caller has timed out: a timeout does not mean that nothing happened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final, Protocol, TypeVar

import msgspec

from stanchion.gateway import Gateway
from stanchion.gateway.exchange import GONE, Message
from stanchion.ports.errors import BackendTimeout, BackendUnavailable
from stanchion.sim.loop import Process
from stanchion.transport.messages import HttpReply, NoReply, Request, Silence
from stanchion.worker.server import TransportFailed

BOUND_S: Final = 2.0
"""The timeout of an adapter: the ports require that every call ends within a limit."""

_Answer = TypeVar("_Answer")
LOOKS: Final = frozenset(
    {
        *("fire_timers", "take_outbox", "expire_jobs", "outbox_size", "active_runs", "document"),
        *("ready_topics", "audit_slots", "purge", "pending", "now", "ping", "tenant"),
        *("budgets", "list_documents", "lost_leases", "pool_uses", "queued_runs", "ready_tenants"),
        *("list_standings", "standings"),
    }
)
"""Polling methods, which mostly find nothing to do."""
_LONG_WAY: Final = 0.2
"""The share of polls whose request and answer take their time. Faults hit these alone."""


class Weather(msgspec.Struct, frozen=True):
    """The probabilities of faults of single calls."""

    refused: float = 0.0
    """An error before the request is executed."""
    lost_reply: float = 0.0
    late: float = 0.0
    """A delay of up to ``late_s``, often longer than the timeout."""
    late_s: float = 8.0
    each_way_s: float = 0.004


CLEAR: Final = Weather()
BAD_WEATHER: Final = Weather(refused=0.01, lost_reply=0.015, late=0.025)


class SimServer(Protocol):
    """The server of a link."""

    process: Process
    is_down: bool


class SimLink:
    """A link with its own random generator, so that links do not influence each other."""

    def __init__(
        self,
        caller: Process,
        server: SimServer,
        chance: Random,
        faults: Counter[str],
        weather: Weather,
    ) -> None:
        self.caller = caller
        self.server = server
        self.weather = weather
        self.cut_there = False
        self.cut_back = False
        self.slow_s = 0.0
        """Added to each direction."""
        self.troubled_at_s: dict[str, float] = {}
        """When each verb last met a fault."""
        self._waiting: dict[asyncio.Future[Any], float] = {}
        """Open calls, with the time until which the caller waits."""
        self._chance = chance
        self._drawn: float | None = None
        """The chance of the next request, if it is drawn already."""
        self._faults = faults
        self._loop = caller.loop

    async def ask(
        self, verb: str, execute: Callable[[], _Answer], *, bound_s: float = BOUND_S
    ) -> _Answer:
        """Execute a request on the server; returns the answer. Raises ``BackendError``."""
        return await self.send(verb, execute, bound_s)

    def send(
        self, verb: str, execute: Callable[[], _Answer], bound_s: float
    ) -> asyncio.Future[_Answer]:
        """Send a request, which ``execute`` executes on the server; returns its future answer."""
        loop, server = self._loop, self.server.process
        reply: asyncio.Future[_Answer] = asyncio.Future(loop=loop)
        until_s = loop.now_s + bound_s
        self._waiting[reply] = until_s
        weather = self.weather
        chance, self._drawn = self._drawn, None
        if chance is None:
            chance, way_s = self._chance.random(), self._way_s(weather.late, verb)
        else:
            way_s = self._way_s(weather.late / _LONG_WAY, verb)
        if self.cut_there:
            self._fault("request cut off", verb)
            self._give_up_at(reply, until_s)
        elif chance < weather.refused:
            self._fault("refused", verb)
            self._bring(reply, BackendUnavailable(f"{verb}: connection refused"), verb)
        else:
            is_lost = chance < weather.refused + weather.lost_reply
            loop.after(way_s, server, self._arrive, reply, verb, execute, is_lost)
            if way_s > bound_s / 2 or server.is_paused:
                self._give_up_at(reply, until_s)
        return reply

    def is_quick(self, verb: str) -> bool:
        """Whether a request is a poll that the server executes and answers at once.

        Polls are the majority of all calls, and one in a single piece costs a third of one whose
        request and answer are events of the loop. Those that a fault hits take the long way, and
        some of the others: what was read may be old when it arrives.
        """
        if verb not in LOOKS or self.cut_there or self.cut_back or self.slow_s:
            return False
        server = self.server
        if server.is_down or server.process.is_still:
            return False
        chance = self._chance.random()
        if chance >= _LONG_WAY:
            return True
        # Kept for ``send``, so that polls meet as many faults as other calls.
        self._drawn = chance
        return False

    def server_stands_still(self) -> None:
        """Set timers for open calls: only when the server hangs do they need one."""
        for reply, until_s in self._waiting.items():
            if not reply.done():  # Of a caller that was cancelled.
                self._give_up_at(reply, until_s)

    def _arrive(
        self,
        reply: asyncio.Future[_Answer],
        verb: str,
        execute: Callable[[], _Answer],
        is_lost: bool,  # noqa: FBT001 - passed by the loop
    ) -> None:
        if self.server.is_down:
            self.troubled_at_s[verb] = self._loop.now_s
            self._bring(reply, BackendUnavailable(f"{verb}: connection refused"), verb)
            return
        answer = execute()
        if is_lost or self.cut_back:
            self._fault("reply lost" if is_lost else "reply cut off", verb)
            self._give_up_at(reply, self._waiting.get(reply, 0.0))
        else:
            self._bring(reply, answer, verb)

    def _bring(
        self, reply: asyncio.Future[_Answer], answer: _Answer | BackendUnavailable, verb: str
    ) -> None:
        if verb in LOOKS:
            # The time of their answer does not matter, and they are the majority of all calls.
            self._settle(reply, answer)
            return
        way_s = self._way_s(self.weather.late, verb)
        self._loop.after(way_s, self.caller, self._settle, reply, answer)
        until_s = self._waiting.get(reply)
        if until_s is not None and self._loop.now_s + way_s > until_s:
            self._give_up_at(reply, until_s)

    def _settle(self, reply: asyncio.Future[_Answer], answer: _Answer | BackendUnavailable) -> None:
        self._waiting.pop(reply, None)
        if reply.done():
            return
        if isinstance(answer, BackendUnavailable):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    def _give_up_at(self, reply: asyncio.Future[_Answer], until_s: float) -> None:
        in_s = max(0.0, until_s - self._loop.time())
        self._loop.after(in_s, self.caller, self._time_out, reply)

    def _time_out(self, reply: asyncio.Future[_Answer]) -> None:
        self._waiting.pop(reply, None)
        if not reply.done():
            self._faults["timed out"] += 1
            reply.set_exception(BackendTimeout("no answer in time"))

    def _fault(self, name: str, verb: str) -> None:
        self._faults[name] += 1
        self.troubled_at_s[verb] = self._loop.now_s

    def _way_s(self, late: float, verb: str) -> float:
        weather = self.weather
        chance = self._chance.random()
        if self.slow_s:
            self.troubled_at_s[verb] = self._loop.now_s
        if chance < late:
            self._fault("late", verb)
            return self.slow_s + weather.late_s * self._chance.random() ** 2
        return self.slow_s + weather.each_way_s * chance


_BROKEN: Final = NoReply(Silence.BROKEN, "the connection broke")
_TIMED_OUT: Final = NoReply(Silence.TIMED_OUT, "no answer in time")
NOTICED: Final = 0.7
"""The share of callers that close the connection; the others leave it half open."""
_UNREACHED: Final = NoReply(Silence.UNREACHED, "connection refused")


class HttpServer(Protocol):
    """A replica from the view of callers."""

    process: Process
    app: Gateway
    inflight: dict[asyncio.Future[HttpReply | NoReply], None]
    """Open requests, which fail when the replica dies."""


class _Exchange:
    """One request to a gateway, as the ASGI messages that a server would make of it."""

    def __init__(
        self, request_id: str, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        path, _, query = path.partition("?")
        lines = {**headers, "Host": "127.0.0.1", "X-Request-Id": request_id}
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), text.encode()) for name, text in lines.items()],
            "extensions": {GONE: self._when_gone},
        }
        self._body: bytes | None = body
        self._hung_up = asyncio.Event()
        self._then: Callable[[], object] | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._answer = b""

    async def run(self, app: Gateway) -> HttpReply | None:
        """The answer of the gateway; ``None`` if it stopped because the caller disconnected."""
        await app(self._scope, self._receive, self._send)
        return HttpReply(self._status, self._headers, self._answer) if self._status else None

    def hang_up(self) -> None:
        """Tell the gateway that the caller has closed the connection."""
        self._hung_up.set()
        if self._then is not None:
            self._then()

    def _when_gone(self, then: Callable[[], object]) -> None:
        self._then = then
        if self._hung_up.is_set():
            then()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): text.decode() for name, text in message["headers"]}
        else:
            self._answer += message["body"]


class Network:
    """Sends each request to a replica that the simulated load balancer picks."""

    def __init__(
        self,
        caller: Process,
        replicas: Callable[[], list[HttpServer]],
        chance: Random,
        faults: Counter[str],
        weather: Weather,
    ) -> None:
        self.caller = caller
        self.weather = weather
        self.is_cut = False
        self._replicas = replicas
        self._served: dict[asyncio.Future[HttpReply | NoReply], tuple[HttpServer, _Exchange]] = {}
        self._requests = 0
        self._chance = chance
        self._faults = faults

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply | NoReply:
        """Send a request once; returns the answer or why there is none."""
        loop = self.caller.loop
        reply: asyncio.Future[HttpReply | NoReply] = asyncio.Future(loop=loop)
        timer = loop.call_later(timeout_s, _time_out, reply)
        replicas = self._replicas()
        chance = self._chance.random()
        weather = self.weather
        if self.is_cut:
            self._faults["request cut off"] += 1
        elif not replicas or chance < weather.refused:
            self._faults["refused"] += 1
            loop.after(self._way_s(), self.caller, _settle, reply, _UNREACHED)
        else:
            replica = self._chance.choice(replicas)
            is_lost = chance < weather.refused + weather.lost_reply
            self._requests += 1
            request_id = f"{self.caller.name}-{self._requests}"
            exchange = _Exchange(request_id, method, path, headers, body)
            replica.process.later(self._way_s(), self._arrive, replica, exchange, reply, is_lost)
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

    def _leave(self, reply: asyncio.Future[HttpReply | NoReply]) -> None:
        """Handle a caller that stops waiting: a replica that notices stops the request."""
        served = self._served.get(reply)
        if served is not None and not self.is_cut and self._chance.random() < NOTICED:
            replica, exchange = served
            self._faults["caller left"] += 1
            replica.process.later(self._way_s(), exchange.hang_up)

    def _arrive(
        self,
        replica: HttpServer,
        exchange: _Exchange,
        reply: asyncio.Future[HttpReply | NoReply],
        is_lost: bool,  # noqa: FBT001 - passed by the loop
    ) -> None:
        replica.inflight[reply] = None
        task = replica.process.spawn(exchange.run(replica.app), name="request")
        self._served[reply] = (replica, exchange)

        def done(task: asyncio.Task[HttpReply | None]) -> None:
            replica.inflight.pop(reply, None)
            self._served.pop(reply, None)
            answer = None if task.cancelled() else task.result()
            if answer is None:
                return
            if is_lost or self.is_cut:
                self._faults["reply lost"] += 1
                return
            self.caller.loop.after(self._way_s(), self.caller, _settle, reply, answer)

        task.add_done_callback(done)

    def _way_s(self) -> float:
        chance = self._chance.random()
        if chance < self.weather.late:
            self._faults["late"] += 1
            return self.weather.late_s * self._chance.random()
        return self.weather.each_way_s * chance


def hang_up(replica: HttpServer) -> None:
    """Break the connections of a dead replica: its callers notice at once."""
    for reply in replica.inflight:
        _settle(reply, _BROKEN)
    replica.inflight.clear()


def _settle(reply: asyncio.Future[HttpReply | NoReply], answer: HttpReply | NoReply) -> None:
    if not reply.done():
        reply.set_result(answer)


def _time_out(reply: asyncio.Future[HttpReply | NoReply]) -> None:
    _settle(reply, _TIMED_OUT)


class CallerTransport:
    """The client SDK's transport."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def send(self, request: Request) -> HttpReply | NoReply:
        return await self._network.send(
            request.method, request.path, dict(request.headers), request.body, request.timeout_s
        )


class WorkerTransport:
    """The worker SDK's transport."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def post(self, path: str, body: bytes) -> HttpReply:
        answer = await self._network.send("POST", path, {}, body, 60.0)
        if isinstance(answer, NoReply):
            raise TransportFailed(answer.message)
        return answer

    async def close(self) -> None:
        """Do nothing: there is no connection."""
