"""The topology: which server has a slot, at present.

A single server has every slot. Sentinels know who the primary is. In a cluster each of 16,384 slots
belongs to one primary, and slots move.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from binascii import crc_hqx
from typing import Any, Final, assert_never

import hiredis

from stanchion.adapters.redis.address import Address, Kind, Target
from stanchion.adapters.redis.errors import translate
from stanchion.adapters.redis.gather import Greeting, Node, pack
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["Topology", "forget", "slot_of"]

_SLOTS: Final = 16_384
_FOUND_S: Final = 0.05
"""For so long nobody asks again who has what: when a server dies, all its callers want to know."""


def slot_of(tag: str) -> int:
    """The slot of every key with this hash tag."""
    return crc_hqx(tag.encode(), 0) % _SLOTS


class Topology:
    """The servers behind one URL, and what is known about who has what."""

    def __init__(self, target: Target, *, timeout_s: float, entropy: Entropy) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._entropy = entropy
        self._tls = ssl.create_default_context() if target.has_tls else None
        self._greeting = Greeting(target.username, target.password, target.database)
        self._nodes: dict[Address, Node] = {}
        self._owners: dict[range, Address] = {}
        self._of_slot: dict[int, Node] = {}
        self._finding: asyncio.Task[None] | None = None
        self._found_at = -math.inf

    def node_of(self, slot: int) -> Node:
        """The server that has the slot, as far as is known."""
        node = self._of_slot.get(slot)
        if node is None:
            node = self._of_slot[slot] = self.node_at(self._owner(slot))
        return node

    def node_at(self, address: Address) -> Node:
        """The server at an address."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make(address, self._greeting)
        return node

    def primaries(self) -> list[Node]:
        """Every server that has slots, once ``find`` has found them."""
        return [self.node_at(address) for address in dict.fromkeys(self._owners.values())]

    def named(self, slot: int, where: str) -> Address:
        """The address in ``MOVED slot host:port``. No host means: the one that says so."""
        host, _, port = where.rpartition(":")
        return Address(host or self.node_of(slot).address.host, int(port))

    async def move(self, slot: int, address: Address, deadline: float) -> Node:
        """A slot has gone to this address, and others have probably moved too."""
        await self.find(deadline)
        node = self._of_slot[slot] = self.node_at(address)
        return node

    async def has_moved(self, slot: int, deadline: float) -> bool:
        """Ask whether another server has the slot by now."""
        if self.target.kind is Kind.SINGLE:
            return False
        before = self.node_of(slot).address
        await self.find(deadline)
        return self.node_of(slot).address != before

    async def find(self, deadline: float) -> None:
        """Learn anew who has what. Those who ask at the same time share one answer."""
        finding = self._begin_to_find(deadline)
        if finding is not None:
            await asyncio.shield(finding)

    def suspect(self) -> None:
        """A server is silent, and may have been replaced: find out, while nobody waits for it."""
        if self.target.kind is not Kind.SINGLE:
            self._begin_to_find(asyncio.get_running_loop().time() + self._timeout_s)

    async def close(self) -> None:
        """Let go of all connections. Safe to call twice."""
        if self._finding is not None:
            self._finding.cancel()
        for node in list(self._nodes.values()):
            await node.close()

    def _begin_to_find(self, deadline: float) -> asyncio.Task[None] | None:
        """Who is asking already, or begins to; nobody if it has just been answered."""
        if asyncio.get_running_loop().time() < self._found_at + _FOUND_S:
            return None
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find(deadline))
            self._finding.add_done_callback(forget)
        return self._finding

    async def _find(self, deadline: float) -> None:
        match self.target.kind:
            case Kind.SINGLE:
                self._owners = {range(_SLOTS): self.target.addresses[0]}
            case Kind.SENTINEL:
                self._owners = {range(_SLOTS): await self._ask_sentinels(deadline)}
            case Kind.CLUSTER:
                self._owners = await self._ask_cluster(deadline)
            case _:
                assert_never(self.target.kind)
        self._found_at = asyncio.get_running_loop().time()
        self._of_slot.clear()
        for address in set(self._nodes) - set(self._owners.values()):
            await self._nodes.pop(address).close()

    async def _ask_cluster(self, deadline: float) -> dict[range, Address]:
        error: BackendError = BackendUnavailable("no server of the cluster is known")
        addresses = list(dict.fromkeys([*self._nodes, *self.target.addresses]))
        for number, address in enumerate(addresses):
            share = _share(deadline, len(addresses) - number)
            try:
                reply = await self.node_at(address).ask(_CLUSTER_SLOTS, deadline=share)
            except BackendUnavailable as unavailable:
                error = unavailable
                continue
            if not isinstance(reply, hiredis.ReplyError):
                return {
                    range(first, last + 1): Address((host or b"").decode() or address.host, port)
                    for first, last, (host, port, *_), *_ in reply
                }
            if "cluster support disabled" in str(reply):
                raise BackendRefused(f"{address} is not in a cluster: use redis://{address}")
            error = translate(reply, str(address))
        raise error

    async def _ask_sentinels(self, deadline: float) -> Address:
        error: BackendError = BackendUnavailable("no sentinel is known")
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.target.service)
        for number, address in enumerate(self.target.addresses):
            share = _share(deadline, len(self.target.addresses) - number)
            sentinel = self._make(address, Greeting())
            try:
                reply = await sentinel.ask(question, deadline=share)
            except BackendUnavailable as unavailable:
                error = unavailable
                continue
            finally:
                await sentinel.close()
            if isinstance(reply, list):
                return Address(reply[0].decode(), int(reply[1]))
            error = BackendUnavailable(f"{address} knows no primary for {self.target.service!r}")
        raise error

    def _owner(self, slot: int) -> Address:
        for slots, address in self._owners.items():
            if slot in slots:
                return address
        raise BackendUnavailable(f"no server has slot {slot}")

    def _make(self, address: Address, greeting: Greeting) -> Node:
        return Node(
            address,
            greeting=greeting,
            tls=self._tls,
            timeout_s=self._timeout_s,
            entropy=self._entropy,
        )


_CLUSTER_SLOTS: Final = pack("CLUSTER", "SLOTS")


def _share(deadline: float, asked: int) -> float:
    """Until when the first of so many may take: one that hangs must not use up the others' time."""
    now = asyncio.get_running_loop().time()
    return now + (deadline - now) / asked


def forget(future: asyncio.Future[Any]) -> None:
    """Nobody will ask for the outcome: say so, or the event loop reports an error as lost."""
    if not future.cancel() and not future.cancelled():
        future.exception()
