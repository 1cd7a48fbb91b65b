"""Three NATS servers with JetStream that form a cluster, each of which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
import nats.errors

from tests.chaos.ports import free_ports
from tests.servers import NatsServer, running_nats

__all__ = ["NatsCluster", "running_nats_cluster"]

_NODES: Final = 3
_FORM_S_MAX: Final = 30.0
_LOOK_EVERY_S: Final = 0.1
_ASK_S_MAX: Final = 1.0


class NatsCluster:
    """The servers of a cluster, by number. Server 0 is called ``node-0``."""

    def __init__(self, nodes: Sequence[NatsServer]) -> None:
        self.nodes = tuple(nodes)

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    async def ask(self, verb: str, body: object = None) -> dict[str, Any]:
        """Ask JetStream something, through whichever server answers."""
        until = time.monotonic() + _FORM_S_MAX
        said: object = None
        while time.monotonic() < until:
            for node in self.nodes:
                if node.process.poll() is None:
                    said = await _ask(node, verb, body)
                    if isinstance(said, dict) and "error" not in said:
                        return said
            await asyncio.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"the cluster does not answer {verb}: {said}")

    async def leader_of(self, stream: str) -> int:
        """Which server leads a stream."""
        until = time.monotonic() + _FORM_S_MAX
        while time.monotonic() < until:
            leader = (await self.ask(f"STREAM.INFO.{stream}"))["cluster"].get("leader")
            if leader:
                return int(leader.removeprefix("node-"))
            await asyncio.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"nobody leads {stream}")


@asynccontextmanager
async def running_nats_cluster() -> AsyncIterator[NatsCluster]:
    """A cluster for as long as the block lasts, ready to make a stream on all of its servers."""
    with contextlib.ExitStack() as cleaning:
        made = tempfile.TemporaryDirectory(prefix="nats-cluster-", ignore_cleanup_errors=True)
        directory = Path(cleaning.enter_context(made))
        cluster = NatsCluster(await asyncio.to_thread(_start_all, cleaning, directory))
        # A stream that all three keep can be made once they have found each other.
        probe = {"name": "PROBE", "subjects": ["probe"], "num_replicas": _NODES}
        await cluster.ask("STREAM.CREATE.PROBE", probe)
        await cluster.ask("STREAM.DELETE.PROBE")
        yield cluster


def _start_all(cleaning: contextlib.ExitStack, directory: Path) -> list[NatsServer]:
    ports = free_ports(2 * _NODES)
    meeting, serving = ports[:_NODES], ports[_NODES:]
    routes = ",".join(f"nats://127.0.0.1:{port}" for port in meeting)

    def start(number: int) -> NatsServer:
        return cleaning.enter_context(
            running_nats(
                *("--name", f"node-{number}"),
                *("--cluster_name", "chaos"),
                *("--cluster", f"nats://127.0.0.1:{meeting[number]}"),
                *("--routes", routes),
                directory=directory / f"node-{number}",
                port=serving[number],
            )
        )

    with ThreadPoolExecutor(_NODES) as pool:
        return list(pool.map(start, range(_NODES)))


async def _ask(node: NatsServer, verb: str, body: object) -> dict[str, Any] | str:
    payload = b"" if body is None else msgspec.json.encode(body)
    try:
        client = await nats.connect(
            node.url, allow_reconnect=False, connect_timeout=1, error_cb=_unheard
        )
    except (nats.errors.Error, OSError, TimeoutError) as error:
        return repr(error)
    try:
        answer = await client.request(f"$JS.API.{verb}", payload, timeout=_ASK_S_MAX)
    except (nats.errors.Error, OSError, TimeoutError) as error:
        return repr(error)
    finally:
        await client.close()
    return msgspec.json.decode(answer.data, type=dict[str, Any])


async def _unheard(_error: Exception) -> None:
    """What it says is in what is raised as well."""
