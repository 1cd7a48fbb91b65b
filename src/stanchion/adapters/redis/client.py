"""The Redis client: sends each request to the server of its slot, and retries where that is safe.

A server that no longer has a slot says where it went (MOVED, ASK), and one that does not know a
script says so (NOSCRIPT); neither has executed anything. So a request is retried a few times before
its deadline, but only if it cannot have been executed, or may be executed twice.

A server that was stopped executes what it was sent when it resumes, even if the caller has gone. So
requests that must not be executed late carry a time in the server's own clock (``ask_in_time``),
and their scripts check it first. In a cluster a redirected request meets another server's clock; it
may then be late by as much as the clocks differ.

A script is a Lua file that opens with its contract, which the loader reads:

    -- KEYS  run inbox outbox        the names of its keys, in order: ``key.inbox`` is ``KEYS[2]``;
                                     with a star (``index*``): any number of such keys, at the end
    -- USES  time inbox              parts (``part_time.lua`` …) that are put before its own text,
                                     from beside the script or from this package

The server knows a script by its SHA-1. After a restart or a failover it answers NOSCRIPT; the
script is then sent along with the repeated call.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Final, TypeAlias

import hiredis
import msgspec

from stanchion.adapters.redis.address import RedisTarget
from stanchion.adapters.redis.connection import (
    ConnectionLost,
    ErrorCode,
    Reply,
    code_of,
    forget,
    translate,
)
from stanchion.adapters.redis.node import Node, pack
from stanchion.adapters.redis.topology import Topology
from stanchion.core.model import Instant
from stanchion.core.retry import BoundedJitter, backoff_ms
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendTimeout, BackendUnavailable

_TRIES_MAX: Final = 6
_MARK_S: Final = 60
_PAUSE: Final = BoundedJitter(delay_ms=15, jitter_ms=10)
"""Between attempts while a server is moving keys."""


class RedisRequest(msgspec.Struct, frozen=True):
    """A command and the slot of its keys."""

    slot: int
    packed: bytes
    script: Script | None = None
    is_repeatable: bool = True
    """Whether it may be sent again if it is unknown whether it was executed."""


_Begun: TypeAlias = asyncio.Future[Reply] | BackendUnavailable


class RedisClient:
    """All servers behind one URL."""

    def __init__(self, target: RedisTarget, *, timeout_s: float, entropy: Entropy) -> None:
        self.topology = Topology(target, timeout_s=timeout_s, entropy=entropy)
        self.timeout_s = timeout_s
        self._entropy = entropy

    def deadline(self, within_s: float | None = None) -> float:
        """The deadline of a call that starts now, on the clock of the event loop."""
        patience_s = self.timeout_s if within_s is None else min(within_s, self.timeout_s)
        return asyncio.get_running_loop().time() + patience_s

    async def ask(self, request: RedisRequest, *, deadline: float) -> Reply:
        """Send one request; returns its reply. Raises ``BackendError``."""
        return await self._finish(request, self._begin(request, deadline), deadline)

    async def ask_all(self, requests: Sequence[RedisRequest], *, deadline: float) -> list[Reply]:
        """Send requests concurrently; returns their replies in order. Raises the first error."""
        begun = [self._begin(request, deadline) for request in requests]
        try:
            return [
                await self._finish(request, each, deadline)
                for request, each in zip(requests, begun, strict=True)
            ]
        finally:
            _forget_all(begun)

    async def ask_some(
        self, requests: Sequence[RedisRequest], *, deadline: float
    ) -> list[Reply | BackendError]:
        """Like ``ask_all``, but returns errors in place of replies.

        So one failed server does not affect the others. Raises the first error if none replied.
        """
        begun = [self._begin(request, deadline) for request in requests]
        outcomes: list[Reply | BackendError] = []
        try:
            for request, each in zip(requests, begun, strict=True):
                try:
                    outcomes.append(await self._finish(request, each, deadline))
                except BackendError as error:
                    outcomes.append(error)
        finally:
            _forget_all(begun)
        if outcomes and all(isinstance(outcome, BackendError) for outcome in outcomes):
            raise outcomes[0]
        return outcomes

    async def server_time(self, slot: int, at: float, *, deadline: float) -> Instant:
        """The time of the server with this slot at a local moment, or slightly less."""
        if not self.node_of(slot).clock.is_known:
            await self.read_clock(slot, deadline=deadline)
        return self.node_of(slot).clock.instant(at)

    async def read_clock(self, slot: int, *, deadline: float) -> Instant:
        """Read the clock of the server with this slot."""
        try:
            return await self.node_of(slot).read_clock(deadline=deadline)
        except BackendUnavailable as error:
            is_lost = isinstance(error, ConnectionLost)
            if not is_lost and not await self.topology.has_moved(slot, deadline):
                raise
            return await self.topology.node_of(slot).read_clock(deadline=deadline)

    async def ping(self, marks: Mapping[int, str]) -> None:
        """Check that every server with slots replies and can be written. Raises the first error.

        ``marks`` are keys that may be written for the check, by slot: one on each server is.
        """
        deadline = self.deadline()
        try:
            await self._ping(deadline)
        except BackendUnavailable:
            await self.topology.find(deadline)
            await self._ping(deadline)
        one_each = {str(self.topology.node_of(slot).address): slot for slot in marks}
        writes = [
            RedisRequest(slot, pack("SET", marks[slot], "1", "EX", _MARK_S))
            for slot in one_each.values()
        ]
        await self.ask_all(writes, deadline=deadline)

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        await self.topology.close()

    async def _ping(self, deadline: float) -> None:
        for node in self.topology.primaries():
            reply = await node.ask(pack("PING"), deadline=deadline)
            if isinstance(reply, hiredis.ReplyError):
                raise translate(reply, str(node.address))

    # ── One request ──────────────────────────────────────────────────────────────────────────────

    def _begin(self, request: RedisRequest, deadline: float) -> _Begun:
        try:
            return self.node_of(request.slot).ask(request.packed, deadline=deadline)
        except BackendUnavailable as error:
            return error

    def node_of(self, slot: int) -> Node:
        """The server of the slot, by the current slot map."""
        return self.topology.node_by_slot.get(slot) or self.topology.node_of(slot)

    async def _finish(self, request: RedisRequest, begun: _Begun, deadline: float) -> Reply:
        try:
            reply = begun if isinstance(begun, BackendUnavailable) else await begun
        except BackendUnavailable as error:
            reply = error
        if isinstance(reply, Exception):
            return await self._again(request, reply, deadline)
        return reply

    async def _again(self, request: RedisRequest, why: Exception, deadline: float) -> Reply:
        """Retry if the reason allows it, a few times at most."""
        tries = 0
        while tries < _TRIES_MAX:
            # Moving keys ends by itself, so only the deadline limits these retries.
            tries += code_of(why) != ErrorCode.TRY_AGAIN
            node, ahead = await self._way_out(request, why, deadline)
            packed = b"".join([*ahead, request.packed])
            try:
                reply = await node.ask(packed, deadline=deadline, replies=len(ahead) + 1)
            except BackendUnavailable as error:
                why = error
                continue
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            why = reply
        raise why if isinstance(why, BackendError) else self._translated(request, why)

    async def _way_out(
        self, request: RedisRequest, why: Exception, deadline: float
    ) -> tuple[Node, list[bytes]]:
        """The server for the retry, and commands to send first. Raises if no retry is useful."""
        topology, slot = self.topology, request.slot
        if isinstance(why, ConnectionLost) and request.is_repeatable:
            return topology.node_of(slot), []
        if isinstance(why, BackendTimeout):
            # It is unknown whether a request that timed out was executed, so the caller decides.
            # A server that hangs may have been replaced without a redirect: check that.
            topology.suspect()
            raise why
        if isinstance(why, BackendError):
            if not await topology.has_moved(slot, deadline):
                raise why
            return topology.node_of(slot), []
        rest = str(why).split()
        script = [] if request.script is None else [request.script.load()]
        match code_of(why):
            case ErrorCode.NO_SCRIPT if script:
                return topology.node_of(slot), script
            case ErrorCode.MOVED:
                return await topology.move(slot, topology.named(slot, rest[-1]), deadline), []
            case ErrorCode.ASK:
                # Send the script too: the server that receives the slot may not know it yet.
                return topology.node_at(topology.named(slot, rest[-1])), [*script, pack("ASKING")]
            case ErrorCode.TRY_AGAIN:
                await self._pause(deadline)
                return topology.node_of(slot), []
            # A primary that was replaced is a replica now, or has lost its replicas.
            case ErrorCode.READ_ONLY | ErrorCode.NO_REPLICAS if await topology.has_moved(
                slot, deadline
            ):
                return topology.node_of(slot), []
            case _:
                raise self._translated(request, why) from None

    async def _pause(self, deadline: float) -> None:
        pause_s = backoff_ms(_PAUSE, 1, self._entropy.unit()) / 1000
        if asyncio.get_running_loop().time() + pause_s >= deadline:
            raise BackendTimeout("no answer in time")
        await asyncio.sleep(pause_s)

    def _translated(self, request: RedisRequest, why: Exception) -> BackendError:
        return translate(why, str(self.topology.node_of(request.slot).address))


def _forget_all(begun: Sequence[_Begun]) -> None:
    for each in begun:
        if isinstance(each, asyncio.Future):
            forget(each)


TOO_LATE: Final = [b"too_late"]
"""The reply of such a script after its deadline; of one with several replies, one of them."""


async def ask_in_time(
    client: RedisClient, slot: int, within_ms: int, make: Callable[[Instant], RedisRequest]
) -> Reply:
    """Send a request that must be executed within ``within_ms``.

    ``make`` builds it from the deadline in the time of the server.
    """
    loop = asyncio.get_running_loop()
    latest = loop.time() + min(within_ms / 1000, client.timeout_s)
    # A late request is sent too: it may be the repeat of one that was executed in time.
    deadline = latest if within_ms > 0 else client.deadline()
    reply = await _ask(client, slot, make, latest, deadline)
    is_late = reply == TOO_LATE or (isinstance(reply, list) and TOO_LATE in reply)
    if is_late and loop.time() < latest:
        # It was in time by our clock, so the clock of the server was set since the last sample.
        await client.read_clock(slot, deadline=deadline)
        reply = await _ask(client, slot, make, latest, deadline)
    return reply


async def _ask(
    client: RedisClient,
    slot: int,
    make: Callable[[Instant], RedisRequest],
    latest: float,
    deadline: float,
) -> Reply:
    # Scripts compare milliseconds. The one in which the caller gives up is already too late.
    not_after = await client.server_time(slot, latest, deadline=deadline) - 1
    return await client.ask(make(Instant(not_after)), deadline=deadline)


async def ask_all_in_time(
    client: RedisClient,
    slot: int,
    within_ms: int,
    makes: Sequence[Callable[[Instant], RedisRequest]],
) -> list[Reply]:
    """Send requests to one server, all at once and in this order; returns their replies.

    Those that are executed after ``within_ms`` must change nothing.
    """
    latest = asyncio.get_running_loop().time() + min(within_ms / 1000, client.timeout_s)
    deadline = latest if within_ms > 0 else client.deadline()
    not_after = Instant(await client.server_time(slot, latest, deadline=deadline) - 1)
    return await client.ask_all([make(not_after) for make in makes], deadline=deadline)


_KEY: Final = re.compile(r"\bkey\.(\w+)")


class Script:
    """One script with its key names and SHA-1."""

    def __init__(
        self, name: str, source: str, key_names: tuple[str, ...], *, takes_more: bool = False
    ) -> None:
        self.name = name
        self.key_names = key_names
        self.takes_more = takes_more
        """Whether it takes any number of keys after those with names."""
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    @classmethod
    def read(cls, package: str, name: str) -> Script:
        """Read a script from a package, with the parts that it uses."""
        text = _text(package, name)
        words = _words(text, "KEYS")
        takes_more = words[-1:] != [] and words[-1].endswith("*")
        key_names = tuple(word for word in words if not word.endswith("*"))
        parts = [_text(package, f"part_{part}") for part in _words(text, "USES")]
        source = "\n".join([*parts, text])
        # Key names are replaced by indexes: a table of names would be built in every call. In one
        # pass, because a script is read when it is first used, on the event loop.
        places = {key: f"KEYS[{place}]" for place, key in enumerate(key_names, start=1)}
        undeclared = {*_KEY.findall(source)} - places.keys()
        assert not undeclared, f"{name}.lua does not declare {undeclared}"
        source = _KEY.sub(lambda found: places[found[1]], source)
        return cls(name, source, key_names, takes_more=takes_more)

    def call(self, keys: Iterable[str], arguments: Iterable[str | bytes | int]) -> bytes:
        """The command that runs the script."""
        known = [*keys]
        assert self.takes_more or len(known) == len(self.key_names), self.name
        return pack("EVALSHA", self.sha, len(known), *known, *arguments)

    def packed_keys(self, keys: Sequence[str]) -> bytes:
        """The first part of the command, for ``call_packed``."""
        assert len(keys) == len(self.key_names), self.name
        return _without_count(pack("EVALSHA", self.sha, len(keys), *keys))

    def call_packed(self, packed_keys: bytes, arguments: Sequence[str | bytes | int]) -> bytes:
        """The command that runs the script, after its first part."""
        count = b"*%d\r\n" % (3 + len(self.key_names) + len(arguments))
        rest = _without_count(pack(*arguments)) if arguments else b""
        return b"".join((count, packed_keys, rest))

    def call_with(
        self, keys: Sequence[str], arguments: Sequence[str | bytes | int]
    ) -> Callable[[bytes], bytes]:
        """The command as a function of its first argument. The others are packed once, here."""
        before = _without_count(pack("EVALSHA", self.sha, len(keys), *keys))
        after = _without_count(pack(*arguments))
        count = 4 + len(keys) + len(arguments)
        return lambda first: b"".join(
            (b"*%d\r\n" % count, before, b"$%d\r\n%b\r\n" % (len(first), first), after)
        )

    def load(self) -> bytes:
        """The command that loads the script."""
        return pack("SCRIPT", "LOAD", self.source)


def _without_count(packed: bytes) -> bytes:
    """A packed command without the number of its words."""
    return packed[packed.index(b"\n") + 1 :]


def _text(package: str, name: str) -> str:
    for place in (package, __package__):
        file = resources.files(place).joinpath(f"{name}.lua")
        if file.is_file():
            return file.read_text("utf-8")
    raise FileNotFoundError(f"{name}.lua")


def _words(text: str, label: str) -> list[str]:
    """The words after a label of the contract, which may occur on several lines."""
    lines = re.findall(rf"^-- {label}\s+(.+)$", text, re.MULTILINE)
    return [word for line in lines for word in line.split()]
