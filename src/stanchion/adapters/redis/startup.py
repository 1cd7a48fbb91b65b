"""Start-up checks of Redis servers.

Refused: a server that may evict keys, one that is too old for the scripts, one that cannot be
written, and data of another format. Warned about: settings with which data does not survive a
restart, and settings that could not be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import hiredis

from stanchion.adapters.redis.address import ServerLayout
from stanchion.adapters.redis.client import RedisClient, RedisRequest
from stanchion.adapters.redis.connection import Reply, translate
from stanchion.adapters.redis.node import Node, pack
from stanchion.adapters.redis.topology import slot_of
from stanchion.ports.errors import BackendRefused

_OLDEST: Final = (6, 2)
_SETTINGS: Final = ("maxmemory-policy", "appendonly", "save")


async def examine(client: RedisClient) -> tuple[str, ...]:
    """Check every server; returns warnings. Raises ``BackendRefused``."""
    deadline = client.deadline()
    await client.topology.find(deadline)
    found = await asyncio.gather(
        *(
            _examine(node, client.topology.target.kind, deadline)
            for node in client.topology.primaries()
        )
    )
    return tuple(f"{address}: {warning}" for address, some in found for warning in some)


async def claim_format(client: RedisClient, key: str, tag: str, wanted: str, *older: str) -> str:
    """Store the format of the data at the first start; returns the format that it has.

    Data of one of the ``older`` formats is accepted and keeps its format. Raises ``BackendRefused``
    for any other.
    """
    deadline, slot = client.deadline(), slot_of(tag)
    await client.ask(RedisRequest(slot, pack("SET", key, wanted, "NX")), deadline=deadline)
    found = await client.ask(RedisRequest(slot, pack("GET", key)), deadline=deadline)
    if found not in {each.encode() for each in (wanted, *older)}:
        raise BackendRefused(
            f"the data under {key!r} has another format ({found!r}, expected {wanted!r}): "
            "use the version of Stanchion that wrote them, or another namespace"
        )
    text: bytes = found
    return text.decode()


async def _examine(node: Node, kind: ServerLayout, deadline: float) -> tuple[str, list[str]]:
    who = str(node.address)
    asked = [pack("INFO"), *(pack("CONFIG", "GET", name) for name in _SETTINGS)]
    said, *settings = await asyncio.gather(*(node.ask(each, deadline=deadline) for each in asked))
    info = _info(said, who)
    config = {
        name: None if isinstance(reply, hiredis.ReplyError) or not reply else reply[1].decode()
        for name, reply in zip(_SETTINGS, settings, strict=True)
    }
    _refuse_unfit(info, kind, who)
    warnings: list[str] = []
    policy = config["maxmemory-policy"] or info.get("maxmemory_policy")
    if policy is None:
        warnings.append("CONFIG and INFO are forbidden: make sure maxmemory-policy is noeviction")
    elif policy != "noeviction":
        raise BackendRefused(
            f"{who} evicts data when memory runs short (maxmemory-policy is {policy}): "
            "run CONFIG SET maxmemory-policy noeviction, and write it into the server's "
            "configuration"
        )
    warnings += _durability(info, config)
    return who, warnings


def _refuse_unfit(info: Mapping[str, str], kind: ServerLayout, who: str) -> None:
    version = info.get("redis_version", "")
    if version and tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise BackendRefused(f"{who} is Redis {version}: 6.2 or newer is needed")
    if info.get("role", "master") != "master":
        raise BackendRefused(f"{who} is a replica: give the address of its primary")
    if info.get("cluster_enabled") == "1" and kind is not ServerLayout.CLUSTER:
        raise BackendRefused(f"{who} is part of a cluster: use redis+cluster://{who}")


def _durability(info: Mapping[str, str], config: Mapping[str, str | None]) -> list[str]:
    appends = config["appendonly"] == "yes" or info.get("aof_enabled") == "1"
    if appends:
        return []
    if config["save"] is None:
        warning = (
            "CONFIG is forbidden and INFO shows no append-only file: whether anything survives a "
            "restart is the provider's word"
        )
    elif config["save"]:
        warning = "only snapshots are written: a crash loses everything since the last one"
    else:
        warning = "persistence is off: a restart loses everything"
    return [f"{warning} (see docs/how-to/redis-durability.md)"]


def _info(reply: Reply, who: str) -> dict[str, str]:
    if isinstance(reply, hiredis.ReplyError):
        if str(reply).startswith("NOPERM"):
            return {}
        raise translate(reply, who)
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}
