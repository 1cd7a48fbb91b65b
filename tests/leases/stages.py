"""Stages: adapters with turns, each with a clock that a case can move on."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from pathlib import Path

import redis.asyncio

from stanchion.adapters.locks.memory import MemoryTurns
from stanchion.adapters.locks.redis.locks import RedisTurns
from stanchion.adapters.locks.sqlite import SqliteTurns
from stanchion.adapters.system import ManualClock
from stanchion.ports.turns import Turns

__all__ = ["FileStage", "MemoryStage", "ServerStage", "Stage"]

_TIMEOUT_S = 10.0
"""Generous: what is tested here is what happens, not how fast, on a machine that may be busy."""


class Stage(ABC):
    """One store, fresh for one case, and as many openers of it as the case wants."""

    short_ms: int
    """A term that a case can wait for, and in which it can still do a few things."""

    def __init__(self) -> None:
        self._opened: list[Turns] = []

    async def open(self) -> Turns:
        self._opened.append(await self._open())
        return self._opened[-1]

    async def reopen_locks(self) -> Turns:
        await self._opened[-1].close()
        return await self.open()

    async def close(self) -> None:
        for turns in self._opened:
            await turns.close()

    @abstractmethod
    async def pass_time(self, by_ms: int) -> None:
        """Come back when the store's clock shows at least so much more."""

    @abstractmethod
    async def _open(self) -> Turns: ...


class MemoryStage(Stage):
    short_ms = 100

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()

    async def pass_time(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    async def _open(self) -> Turns:
        return MemoryTurns(self.clock)


class FileStage(Stage):
    short_ms = 100

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.clock = ManualClock()
        self._file = directory / "leases.db"

    async def pass_time(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    async def _open(self) -> Turns:
        return await SqliteTurns.open(self._file, clock=self.clock, timeout_s=_TIMEOUT_S)


class ServerStage(Stage):
    short_ms = 250

    def __init__(self, url: str, node_url: str) -> None:
        super().__init__()
        self._url = url
        self._namespace = f"case-{secrets.token_hex(6)}"
        self._client = redis.asyncio.Redis.from_url(node_url)

    async def pass_time(self, by_ms: int) -> None:
        began_us = await self._server_us()
        give_up = time.monotonic() + by_ms / 1000 + _TIMEOUT_S
        while (left_us := began_us + by_ms * 1000 + 1000 - await self._server_us()) > 0:
            assert time.monotonic() < give_up, "the server's clock stands still"
            await asyncio.sleep(left_us / 1_000_000)

    async def close(self) -> None:
        await super().close()
        await self._client.aclose()

    async def _server_us(self) -> int:
        seconds, micros = await self._client.time()
        return int(seconds) * 1_000_000 + int(micros)

    async def _open(self) -> Turns:
        return await RedisTurns.open(self._url, namespace=self._namespace, timeout_s=_TIMEOUT_S)
