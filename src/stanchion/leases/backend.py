"""The lock store of a URL, opened at its first use.

    memory:                     within this object, for tests
    sqlite:PATH                 a file, for the processes of one machine
    redis://…  redis+cluster://…  redis+sentinel://…  (rediss… with TLS)

A wrong URL raises at once. A store that cannot be reached does not: the policy of each hold decides
what follows, and the store is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from stanchion.core import install_command
from stanchion.ports.clock import Clock
from stanchion.ports.errors import BackendError, BackendRefused
from stanchion.ports.locks import AcquireAnswer, LockReleased, LockView, NotOwned, Renewed
from stanchion.ports.turns import Place, Turns

_FORMS: Final = "memory:, sqlite:PATH, redis://host:port or redis+cluster://host:port,…"
_Open: TypeAlias = Callable[[], Awaitable[Turns]]


def store_at(url: str, *, namespace: str, clock: Clock) -> LazyLocks:
    """The store of the URL, not opened yet. Raises ``ValueError``, without the URL's password."""
    if not namespace or "/" in namespace:
        raise ValueError(f"not a namespace: {namespace!r} (not empty, no slash)")
    kind, _, path = url.partition(":")
    try:
        if url == "memory:":
            return LazyLocks(_memory(clock))
        if kind == "sqlite" and path and path != ":memory:":
            # A file has no namespaces: the namespace becomes a part of the names.
            return LazyLocks(_sqlite(path, clock), prefix=f"{namespace}/")
        if kind.partition("+")[0] in {"redis", "rediss"}:
            return LazyLocks(_redis(url, namespace))
    except BackendRefused as error:
        raise ValueError(str(error)) from None
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"leases on {kind} need the package '{error.name}': {install_command('leases')}",
            name=error.name,
        ) from error
    raise ValueError(f"not the URL of a lease store: it should look like {_FORMS}")


class LazyLocks:
    """A ``ports.turns.Turns`` that opens its store at first use, and again after a failure."""

    is_local = False

    def __init__(self, make: _Open, *, prefix: str = "") -> None:
        self._make = make
        self._prefix = prefix
        self._opening = asyncio.Lock()
        self._opened: Turns | None = None
        self._error: BackendError | None = None
        """The error of opening the store, until a call has raised it."""
        self.was_tried = False
        """Whether the store was opened, or the first try has failed."""

    async def open(self) -> None:
        """Open the store, once, with enough time to connect. Raises ``BackendRefused``.

        If the store is unavailable, the next call raises that error at once; later calls, such as
        the probes of ``LockHealth``, try to open it again.
        """
        async with self._opening:
            if self.was_tried:
                return
            try:
                self._opened = await self._make()
            except BackendRefused:
                raise
            except BackendError as error:
                self._error = error
            self.was_tried = True

    async def acquire(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int, floor: int = 0
    ) -> AcquireAnswer:
        store = self._opened or await self._store()
        return await store.acquire(
            self._prefix + name, token, ttl_ms=ttl_ms, within_ms=within_ms, floor=floor
        )

    async def renew(
        self, name: str, token: str, *, ttl_ms: int, within_ms: int
    ) -> Renewed | NotOwned:
        store = self._opened or await self._store()
        return await store.renew(self._prefix + name, token, ttl_ms=ttl_ms, within_ms=within_ms)

    async def release(self, name: str, token: str, *, within_ms: int) -> LockReleased | NotOwned:
        store = self._opened or await self._store()
        return await store.release(self._prefix + name, token, within_ms=within_ms)

    async def join(self, name: str, token: str, *, ticket_ms: int, within_ms: int) -> Place:
        store = self._opened or await self._store()
        return await store.join(
            self._prefix + name, token, ticket_ms=ticket_ms, within_ms=within_ms
        )

    async def bell(self, name: str, token: str, *, at_most_ms: int) -> bool:
        store = self._opened or await self._store()
        return await store.bell(self._prefix + name, token, at_most_ms=at_most_ms)

    async def leave(self, name: str, token: str, *, within_ms: int) -> None:
        store = self._opened or await self._store()
        await store.leave(self._prefix + name, token, within_ms=within_ms)

    async def inspect(self, name: str) -> LockView | None:
        store = self._opened or await self._store()
        view = await store.inspect(self._prefix + name)
        return None if view is None else self._shown(view)

    async def list(self, prefix: str = "", *, limit: int = 1000) -> Sequence[LockView]:
        store = self._opened or await self._store()
        views = await store.list(self._prefix + prefix, limit=limit)
        return [self._shown(view) for view in views]

    async def force_release(self, name: str) -> bool:
        store = self._opened or await self._store()
        return await store.force_release(self._prefix + name)

    async def ping(self) -> None:
        store = self._opened or await self._store()
        await store.ping()

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _store(self) -> Turns:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        async with self._opening:
            if self._opened is None:
                self._opened = await self._make()
        return self._opened

    def _shown(self, view: LockView) -> LockView:
        return msgspec.structs.replace(view, name=view.name.removeprefix(self._prefix))


# Each kind imports its packages only when it is used.


def _memory(clock: Clock) -> _Open:
    from stanchion.adapters.locks.memory import MemoryTurns  # noqa: PLC0415 - see above

    async def make() -> Turns:
        return MemoryTurns(clock)

    return make


def _sqlite(path: str, clock: Clock) -> _Open:
    from stanchion.adapters.locks.sqlite import SqliteTurns  # noqa: PLC0415 - see above

    return lambda: SqliteTurns.open(path, clock=clock)


def _redis(url: str, namespace: str) -> _Open:
    from stanchion.adapters.locks.redis.locks import RedisTurns  # noqa: PLC0415 - see above
    from stanchion.adapters.redis.address import checked_namespace, read_url  # noqa: PLC0415 - see above

    read_url(url)
    checked_namespace(namespace)
    return lambda: RedisTurns.open(url, namespace=namespace)
