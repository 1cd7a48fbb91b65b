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
                                     with a star (``index*``): any number of such keys
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
from stanchion.adapters.redis.connection import ConnectionLost, ErrorCode, Reply, code_of, translate
from stanchion.adapters.redis.node import Node, pack
from stanchion.adapters.redis.topology import Topology, forget
from stanchion.core.model import Instant
from stanchion.core.retry import BoundedJitter, backoff_ms
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendTimeout, BackendUnavailable

__all__ = ["TOO_LATE", "RedisClient", "RedisRequest", "Script", "ask_in_time"]

_TRIES_MAX: Final = 6
_MARK_S: Final = 60
_PAUSE: Final = BoundedJitter(delay_ms=15, jitter_ms=10)
"""Between tries, when a server is moving keys."""


class RedisRequest(msgspec.Struct, frozen=True):
    """A command, and where it has to go."""

    slot: int
    packed: bytes
    script: Script | None = None
    is_repeatable: bool = True
    """Whether it may be sent again when nobody knows if it was executed."""


_Begun: TypeAlias = asyncio.Future[Reply] | BackendUnavailable


class RedisClient:
    """All servers behind one URL."""

    def __init__(self, target: RedisTarget, *, timeout_s: float, entropy: Entropy) -> None:
        self.topology = Topology(target, timeout_s=timeout_s, entropy=entropy)
        self.timeout_s = timeout_s
        self._entropy = entropy

    def deadline(self, within_s: float | None = None) -> float:
        """The moment, on the event loop's clock, by which a call that begins now has to end."""
        patience_s = self.timeout_s if within_s is None else min(within_s, self.timeout_s)
        return asyncio.get_running_loop().time() + patience_s

    async def ask(self, request: RedisRequest, *, deadline: float) -> Reply:
        """Send one request; its answer. Raises ``BackendError``."""
        return await self._finish(request, self._begin(request, deadline), deadline)

    async def ask_all(self, requests: Sequence[RedisRequest], *, deadline: float) -> list[Reply]:
        """Send requests side by side; their answers, in order. Raises the first error."""
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
        """The same with errors in place of answers: one silent server does not stop the others.

        Raises the first error if nobody answered.
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
        """What the clock of the server with this slot shows at a local moment, or a little less."""
        if not self.node_of(slot).clock.is_known:
            await self.read_clock(slot, deadline=deadline)
        return self.node_of(slot).clock.instant(at)

    async def read_clock(self, slot: int, *, deadline: float) -> Instant:
        """Look at the clock of the server with this slot."""
        try:
            return await self.node_of(slot).read_clock(deadline=deadline)
        except BackendUnavailable as error:
            is_lost = isinstance(error, ConnectionLost)
            if not is_lost and not await self.topology.has_moved(slot, deadline):
                raise
            return await self.topology.node_of(slot).read_clock(deadline=deadline)

    async def ping(self, marks: Mapping[int, str]) -> None:
        """Every server that has slots answers and can be written; raises for the first that cannot.

        ``marks`` are keys that may be written for it, by slot: one on each server is.
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
        """Let go of all connections. Safe to call twice."""
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
        """The server that has the slot, as far as is known."""
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
        """Try again as long as the reason allows it, a few times at most."""
        tries = 0
        while tries < _TRIES_MAX:
            # A server that is moving the keys will have moved them: only the deadline ends that.
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
        """Whom to ask next, and what to say ahead of the request; raises if there is no use."""
        topology, slot = self.topology, request.slot
        if isinstance(why, ConnectionLost) and request.is_repeatable:
            return topology.node_of(slot), []
        if isinstance(why, BackendTimeout):
            # Nobody knows whether a request that timed out was executed: that is for its caller.
            # But a server that hangs is replaced like one that died, and never says so itself.
            topology.suspect()
            raise why
        if isinstance(why, BackendError):
            if not await topology.has_moved(slot, deadline):
                raise why
            return topology.node_of(slot), []
        code, *rest = str(why).split()
        script = [] if request.script is None else [request.script.load()]
        match code:
            case ErrorCode.NO_SCRIPT if script:
                return topology.node_of(slot), script
            case ErrorCode.MOVED:
                return await topology.move(slot, topology.named(slot, rest[-1]), deadline), []
            case ErrorCode.ASK:
                # The script goes along: a server that is being given a slot may not know it yet.
                return topology.node_at(topology.named(slot, rest[-1])), [*script, pack("ASKING")]
            case ErrorCode.TRY_AGAIN:
                await self._pause(deadline)
                return topology.node_of(slot), []
            # A primary that was replaced is a replica now, or does not know yet and has none.
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
"""What every such script answers when its time is over."""


async def ask_in_time(
    client: RedisClient, slot: int, within_ms: int, make: Callable[[Instant], RedisRequest]
) -> Reply:
    """Ask for what has to be executed within ``within_ms``. ``make`` is given the time by which."""
    loop = asyncio.get_running_loop()
    latest = loop.time() + min(within_ms / 1000, client.timeout_s)
    # One that is late already is asked all the same: it may have been executed in time before.
    deadline = latest if within_ms > 0 else client.deadline()
    reply = await _ask(client, slot, make, latest, deadline)
    if reply == TOO_LATE and loop.time() < latest:
        # It was in time by our clock, so the server's has been set since we last looked.
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
    # Scripts compare whole milliseconds. The one in which the caller leaves is too late already.
    not_after = await client.server_time(slot, latest, deadline=deadline) - 1
    return await client.ask(make(Instant(not_after)), deadline=deadline)


class Script:
    """One script, ready to be called."""

    def __init__(self, name: str, source: str, key_names: tuple[str, ...]) -> None:
        self.name = name
        self.key_names = key_names
        """Empty for a script that takes any number of keys."""
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    @classmethod
    def read(cls, package: str, name: str) -> Script:
        """Read a script that lies beside the adapter, with the parts that it uses."""
        text = _text(package, name)
        key_names = tuple(word for word in _words(text, "KEYS") if not word.endswith("*"))
        parts = [_text(package, f"part_{part}") for part in _words(text, "USES")]
        source = "\n".join([*parts, text])
        # By name for whoever reads it, by number for the server: a table would be built every time.
        for place, key in enumerate(key_names, start=1):
            source = re.sub(rf"\bkey\.{key}\b", f"KEYS[{place}]", source)
        undeclared = re.search(r"\bkey\.\w+", source)
        assert undeclared is None, f"{name}.lua does not declare {undeclared}"
        return cls(name, source, key_names)

    def call(self, keys: Iterable[str], arguments: Iterable[str | bytes | int]) -> bytes:
        """The command that runs it."""
        known = [*keys]
        assert not self.key_names or len(known) == len(self.key_names), self.name
        return pack("EVALSHA", self.sha, len(known), *known, *arguments)

    def load(self) -> bytes:
        """The command that makes it known."""
        return pack("SCRIPT", "LOAD", self.source)


def _text(package: str, name: str) -> str:
    for place in (package, __package__):
        file = resources.files(place).joinpath(f"{name}.lua")
        if file.is_file():
            return file.read_text("utf-8")
    raise FileNotFoundError(f"{name}.lua")


def _words(text: str, label: str) -> list[str]:
    """The words behind a label of the contract; the label may stand on several lines."""
    lines = re.findall(rf"^-- {label}\s+(.+)$", text, re.MULTILINE)
    return [word for line in lines for word in line.split()]
