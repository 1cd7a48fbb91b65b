"""Links: the way from one process to one server, and back.

A call travels there, is executed, and its answer travels back. On each of the three it can go
wrong: the request is lost or refused, the answer is lost, either takes longer than anybody waits.
What was sent is executed when it arrives, whether or not anybody still waits for it: time-outs lie.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol, TypeVar

import msgspec

from stanchion.ports.errors import BackendTimeout, BackendUnavailable
from stanchion.sim.process import Process

__all__ = ["BAD_WEATHER", "CLEAR", "Link", "Server", "Weather"]

BOUND_S: Final = 2.0
"""What an adapter waits at most: the ports promise that every call ends within a bound."""

_Answer = TypeVar("_Answer")
_LOOKS: Final = frozenset(
    {
        *("fire_timers", "take_outbox", "expire_jobs", "outbox_size", "active_runs", "document"),
        *("ready_topics", "audit_slots", "purge", "pending", "now", "ping", "tenant"),
    }
)
"""Verbs that are asked again and again, with nothing to do most of the time."""


class Weather(msgspec.Struct, frozen=True):
    """What befalls single calls, each by its chance."""

    refused: float = 0.0
    """An error before anything was done."""
    lost_reply: float = 0.0
    late: float = 0.0
    """A slow way: up to ``late_s``, so often longer than anybody waits."""
    late_s: float = 8.0
    each_way_s: float = 0.004


CLEAR: Final = Weather()
BAD_WEATHER: Final = Weather(refused=0.01, lost_reply=0.015, late=0.025)


class Server(Protocol):
    """What is at the other end."""

    process: Process
    is_down: bool


class Link:
    """One way. Chance is its own, so that what happens on another link changes nothing here."""

    def __init__(
        self,
        caller: Process,
        server: Server,
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
        """Added each way."""
        self._waiting: dict[asyncio.Future[Any], float] = {}
        """Calls under way, and until when somebody waits for them."""
        self._chance = chance
        self._faults = faults

    async def ask(
        self, verb: str, execute: Callable[[], _Answer], *, bound_s: float = BOUND_S
    ) -> _Answer:
        """Have the server execute something, and bring the answer; raises ``BackendError``."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[_Answer] = loop.create_future()
        until_s = loop.time() + bound_s
        self._waiting[reply] = until_s
        chance = self._chance.random()
        weather = self.weather
        way_s = self._way_s()
        if self.cut_there:
            self._faults["request cut off"] += 1
            self._give_up_at(reply, until_s)
        elif chance < weather.refused:
            self._faults["refused"] += 1
            self._bring(reply, BackendUnavailable(f"{verb}: connection refused"), verb)
        else:
            is_lost = chance < weather.refused + weather.lost_reply
            self.server.process.later(way_s, self._arrive, reply, verb, execute, is_lost)
            if way_s > bound_s / 2 or self.server.process.is_paused:
                self._give_up_at(reply, until_s)
        try:
            return await reply
        finally:
            del self._waiting[reply]

    def server_stands_still(self) -> None:
        """Nobody answers what is under way. Only then callers need timers: most calls are quick."""
        for reply, until_s in self._waiting.items():
            self._give_up_at(reply, until_s)

    def _arrive(
        self,
        reply: asyncio.Future[_Answer],
        verb: str,
        execute: Callable[[], _Answer],
        is_lost: bool,  # noqa: FBT001 - passed by the loop
    ) -> None:
        if self.server.is_down:
            self._bring(reply, BackendUnavailable(f"{verb}: connection refused"), verb)
            return
        answer = execute()
        if is_lost or self.cut_back:
            self._faults["reply lost" if is_lost else "reply cut off"] += 1
            self._give_up_at(reply, self._waiting.get(reply, 0.0))
        else:
            self._bring(reply, answer, verb)

    def _bring(
        self, reply: asyncio.Future[_Answer], answer: _Answer | BackendUnavailable, verb: str
    ) -> None:
        if verb in _LOOKS:
            # Nothing hangs on when they are answered, and they are most of all calls.
            self._settle(reply, answer)
            return
        way_s = self._way_s()
        self.caller.later(way_s, self._settle, reply, answer)
        until_s = self._waiting.get(reply)
        if until_s is not None and asyncio.get_running_loop().time() + way_s > until_s:
            self._give_up_at(reply, until_s)

    def _settle(self, reply: asyncio.Future[_Answer], answer: _Answer | BackendUnavailable) -> None:
        if reply.done():
            return
        if isinstance(answer, BackendUnavailable):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    def _give_up_at(self, reply: asyncio.Future[_Answer], until_s: float) -> None:
        in_s = max(0.0, until_s - asyncio.get_running_loop().time())
        self.caller.later(in_s, self._time_out, reply)

    def _time_out(self, reply: asyncio.Future[_Answer]) -> None:
        if not reply.done():
            self._faults["timed out"] += 1
            reply.set_exception(BackendTimeout("no answer in time"))

    def _way_s(self) -> float:
        weather = self.weather
        chance = self._chance.random()
        if chance < weather.late:
            self._faults["late"] += 1
            return self.slow_s + weather.late_s * self._chance.random() ** 2
        return self.slow_s + weather.each_way_s * chance
