"""Simulated days on a real Valkey server, with the memory store beside it.

The Redis store runs on an event loop in a thread, and each of its calls blocks the simulated day
until it is answered. Two clocks are replaced, so that a day takes its course whatever the speed of
the server: that event loop shows the time of the day, and the server's scripts read the time from a
key. Everything else is the real client, the real scripts and the real server.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self
from unittest import mock

from stanchion.adapters.redis import client as redis_client
from stanchion.adapters.redis import node as redis_node
from stanchion.adapters.redis.node import pack
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.redis.shards import script_of
from stanchion.ports.clock import Clock
from stanchion.sim.replica import Mutant, SeededEntropy
from stanchion.sim.twin import TwinStore
from tests.servers import Server, running_server

__all__ = ["playing_on_valkey"]

_NOW: Final = "sim:now_us"
_ANSWER_S_MAX: Final = 30.0
_TIME: Final = re.compile(re.escape("redis.call('TIME')"))
_READ_TIME: Final = (
    f"(function () local us = redis.call('GET', '{_NOW}')"
    " return {us:sub(1, -7), us:sub(-6)} end)()"
)
_SAMPLE: Final = pack("EVAL", f"return {_READ_TIME}", 0)


@contextmanager
def playing_on_valkey() -> Iterator[Mutant]:
    """A world whose store is the Redis store, on a server of its own."""
    with running_server() as server, _time_from_a_key(), _Bridge(server) as bridge:

        class ValkeyTwin(TwinStore):
            def __init__(self, clock: Clock) -> None:
                super().__init__(clock, bridge.lead)

        yield Mutant(name="valkey", store=ValkeyTwin)


@contextmanager
def _time_from_a_key() -> Iterator[None]:
    """Scripts and clock samples read the time of the day."""
    read = redis_client._text  # noqa: SLF001 - the scripts as they are, but for one call

    def text(package: str, name: str) -> str:
        return _TIME.sub(_READ_TIME, read(package, name))

    sample = redis_node._ClockSample  # noqa: SLF001 - likewise
    script_of.cache_clear()
    try:
        with (
            mock.patch.object(redis_client, "_text", text),
            mock.patch.object(sample, "packed", _SAMPLE),
        ):
            yield
    finally:
        script_of.cache_clear()


class _DayLoop(asyncio.SelectorEventLoop):
    """An event loop with real sockets that shows the time of a simulated day."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now_s


class _Bridge:
    """Calls of the Redis store as calls that never wait."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._plain = server.client()
        self._loop = _DayLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="valkey", daemon=True)
        self._store: RedisStore | None = None
        self._clock: Clock | None = None
        self._now_us = -1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_store()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S_MAX)
        self._loop.close()
        self._plain.close()

    def lead(self, clock: Clock) -> object:
        """A store without data, for one day."""
        self._close_store()
        self._plain.flushall()
        self._clock, self._now_us = clock, -1
        opening = RedisStore.open(self._server.url, entropy=SeededEntropy("valkey"))
        self._store = self.run(opening)
        return self

    def _close_store(self) -> None:
        if self._store is not None:
            self.run(self._store.close())
            self._store = None

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - any verb's
        """The result of a call, at the present time of the day."""
        assert self._clock is not None
        now_us = self._clock.now() * 1000
        if now_us != self._now_us:
            self._now_us = now_us
            self._plain.set(_NOW, now_us)
        self._loop.now_s = now_us / 1e6
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_ANSWER_S_MAX)

    def __getattr__(self, verb: str) -> Callable[..., Coroutine[Any, Any, object]]:
        method = getattr(self._store, verb)

        async def call(*arguments: Any, **named: Any) -> object:  # noqa: ANN401 - any verb's
            return self.run(method(*arguments, **named))

        return call
