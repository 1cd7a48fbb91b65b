"""Topology: the server of each slot.

A single server has every slot. Sentinels know the address of the primary. In a cluster each of
16,384 slots belongs to one primary, and slots move. redis-py asks the Sentinels and reads the slot
map; ``client`` decides where a request goes and how to follow a redirect.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final, assert_never

from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError

from stanchion.adapters.redis.address import RedisTarget, ServerAddress, ServerLayout
from stanchion.adapters.redis.connection import forget
from stanchion.adapters.redis.node import Login, Node
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendRefused, BackendTimeout, BackendUnavailable

_NOT_LET_IN: Final = ("AuthenticationError", "NOAUTH", "WRONGPASS", "NOPERM", "NoPermission")
_FOUND_S: Final = 0.05
"""The pause between two lookups: when a server fails, all its callers request one."""


def slot_of(tag: str) -> int:
    """The slot of every key with this hash tag."""
    return key_slot(tag.encode())


class Topology:
    """The servers behind one URL, and the slots of each."""

    def __init__(self, target: RedisTarget, *, timeout_s: float, entropy: Entropy) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._entropy = entropy
        self.tls = target.tls_context()
        self.login = Login(target.username, target.password, target.database)
        self._nodes: dict[ServerAddress, Node] = {}
        self._primary: ServerAddress | None = None
        """The only server, unless this is a cluster."""
        self._owners: dict[int, ServerAddress] = {}
        """The server of each slot of a cluster."""
        self.node_by_slot: dict[int, Node] = {}
        self._finding: asyncio.Task[None] | None = None
        self._found_at = -math.inf

    def node_of(self, slot: int) -> Node:
        """The server of the slot, by the current slot map."""
        node = self.node_by_slot.get(slot)
        if node is None:
            node = self.node_by_slot[slot] = self.node_at(self._owner(slot))
        return node

    def node_at(self, address: ServerAddress) -> Node:
        """The server at an address."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(
                address,
                login=self.login,
                tls=self.tls,
                timeout_s=self._timeout_s,
                entropy=self._entropy,
            )
        return node

    def primaries(self) -> list[Node]:
        """All servers with slots, after ``find``."""
        return [self.node_at(address) for address in self._primaries()]

    def named(self, slot: int, where: str) -> ServerAddress:
        """The address in ``MOVED slot host:port``. Without a host, that of the replying server."""
        host, _, port = where.rpartition(":")
        return ServerAddress(host or self.node_of(slot).address.host, int(port))

    async def move(self, slot: int, address: ServerAddress, deadline: float) -> Node:
        """Record that a slot moved to this address, and start a lookup of the others."""
        await self.find(deadline)
        node = self.node_by_slot[slot] = self.node_at(address)
        return node

    async def has_moved(self, slot: int, deadline: float) -> bool:
        """Look up whether another server has the slot now."""
        if self.target.kind is ServerLayout.SINGLE:
            return False
        before = self.node_of(slot).address
        await self.find(deadline)
        return self.node_of(slot).address != before

    async def find(self, deadline: float) -> None:
        """Look up the servers of all slots. Concurrent callers share one lookup."""
        finding = self._begin_to_find(deadline)
        if finding is not None:
            await asyncio.shield(finding)

    def suspect(self) -> None:
        """Start a lookup in the background: a server does not reply and may have been replaced."""
        if self.target.kind is not ServerLayout.SINGLE:
            self._begin_to_find(asyncio.get_running_loop().time() + self._timeout_s)

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._finding is not None:
            self._finding.cancel()
        for node in list(self._nodes.values()):
            await node.close()

    def _begin_to_find(self, deadline: float) -> asyncio.Task[None] | None:
        """The running lookup, or a new one; ``None`` if the last one has just ended."""
        if asyncio.get_running_loop().time() < self._found_at + _FOUND_S:
            return None
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find(deadline))
            self._finding.add_done_callback(forget)
        return self._finding

    async def _find(self, deadline: float) -> None:
        match self.target.kind:
            case ServerLayout.SINGLE:
                self._primary = self.target.addresses[0]
            case ServerLayout.SENTINEL:
                self._primary = await self._ask_sentinels(deadline)
            case ServerLayout.CLUSTER:
                self._owners = await self._ask_cluster(deadline)
            case _:
                assert_never(self.target.kind)
        self._found_at = asyncio.get_running_loop().time()
        self.node_by_slot.clear()
        for address in set(self._nodes) - set(self._primaries()):
            await self._nodes.pop(address).close()

    def _primaries(self) -> list[ServerAddress]:
        if self._primary is not None:
            return [self._primary]
        return list(dict.fromkeys(self._owners.values()))

    async def _ask_cluster(self, deadline: float) -> dict[int, ServerAddress]:
        """The slot map, from the first server that has it."""
        known = list(dict.fromkeys([*self._nodes, *self.target.addresses]))
        options = self._lookup_options(deadline, len(known))
        if options.pop("ssl", False):
            options["connection_class"] = SSLConnection
        manager = NodesManager(
            [ClusterNode(*address, **options) for address in known],
            require_full_coverage=False,
            connection_kwargs=options,
        )
        try:
            async with asyncio.timeout_at(deadline):
                await manager.initialize()
        except TimeoutError:
            raise BackendTimeout("no server of the cluster answered in time") from None
        except (RedisError, RedisClusterException) as error:
            raise self._translated(error, known) from error
        finally:
            await manager.aclose("startup_nodes")
        return {
            slot: ServerAddress(nodes[0].host, int(nodes[0].port))
            for slot, nodes in manager.slots_cache.items()
        }

    async def _ask_sentinels(self, deadline: float) -> ServerAddress:
        """The primary, from the first Sentinel that knows it."""
        known = self.target.addresses
        options = self._lookup_options(deadline, len(known), for_sentinel=True)
        try:
            sentinels = Sentinel(known, 0, options)  # type: ignore[no-untyped-call]  # no types
            async with asyncio.timeout_at(deadline), sentinels:
                host, port = await sentinels.discover_master(self.target.service)
        except TimeoutError:
            raise BackendTimeout("no Sentinel answered in time") from None
        except RedisError as error:
            raise self._translated(error, known) from error
        return ServerAddress(host, int(port))

    def _lookup_options(
        self, deadline: float, servers: int, *, for_sentinel: bool = False
    ) -> dict[str, Any]:
        """Options of redis-py for a lookup at one of ``servers`` servers, which share the time."""
        share_s = max(0.001, (deadline - asyncio.get_running_loop().time()) / servers)
        return {
            **self.target.connection_options(for_sentinel=for_sentinel),
            "socket_timeout": share_s,
            "socket_connect_timeout": share_s,
            "retry": Retry(NoBackoff(), 0),
        }

    def _translated(self, error: Exception, known: Sequence[ServerAddress]) -> BackendError:
        """Translate an error of a lookup."""
        hosts = ", ".join(map(str, known))
        cause = error.__cause__
        # redis-py reports every error reply as "not enabled"; the reply itself is the context.
        context = None if cause is None else cause.__context__
        reason = f"{error!r} {error} {cause!r} {context!r}"
        if any(each in reason for each in _NOT_LET_IN):
            hint = (
                "; give ?sentinel_password=…" if self.target.kind is ServerLayout.SENTINEL else ""
            )
            return BackendRefused(f"{hosts}: user name or password missing or wrong{hint}")
        if "Cluster mode is not enabled" in reason:
            return BackendRefused(f"{known[0]} is not in a cluster: use redis://{known[0]}")
        if self.target.kind is ServerLayout.SENTINEL:
            return BackendUnavailable(f"{hosts} knows no primary for {self.target.service!r}")
        return BackendUnavailable(f"no server of the cluster can be reached ({hosts})")

    def _owner(self, slot: int) -> ServerAddress:
        address = self._primary or self._owners.get(slot)
        if address is None:
            raise BackendUnavailable(f"no server has slot {slot}")
        return address
