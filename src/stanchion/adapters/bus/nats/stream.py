"""The stream of calls and its consumer: made at the first start, checked at every other.

Each setting that is checked is here because of what happens without it:

* one message a subject, new ones refused: at most one pending call a run, however often and by how
  many replicas it is published;
* no limit of deliveries: a delayed NAK counts as a delivery, so with any limit a busy run's call
  would be dropped after so many retries;
* no limit of unacknowledged messages: a call that waits for its retry counts as one, so with any
  limit busy runs would hold up everybody else's.

What is not checked (replicas, placement, compression, how long the server waits for an answer) is
the operator's to choose. Where nobody has chosen yet, a cluster keeps the stream on three of its
servers, so that the bus goes on when one of them dies; a server on its own keeps it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

import msgspec
from nats.aio.msg import Msg

from stanchion.adapters.bus.nats.names import Names
from stanchion.ports.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["Ask", "Standing", "look", "set_up"]

Ask: TypeAlias = Callable[[str, bytes], Awaitable[Msg]]
"""Send something to a subject, and wait for the answer."""

_NS_PER_S: Final = 1_000_000_000
_NOT_THERE: Final = 404
_UNAVAILABLE: Final = 503
_TAKEN: Final = frozenset({10013, 10058, 10105, 10148})
"""A consumer or stream of this name exists already, or has come into being meanwhile."""
_NO_JETSTREAM: Final = frozenset({10039, 10076})
_REPLICAS: Final = (3, 1)
"""How many servers keep the stream, the best first."""
_NO_PEERS: Final = 10005
_PEERS_TRIES: Final = 4
_PEERS_PAUSE_S: Final = 0.25
"""A cluster that has too few servers now may have enough in a moment; the stream is made once."""

_STREAM: Final = {
    "retention": "workqueue",
    "storage": "file",
    "discard": "new",
    "discard_new_per_subject": True,
    "max_msgs_per_subject": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
}
_CONSUMER: Final = {
    "deliver_policy": "all",
    "ack_policy": "explicit",
    "max_deliver": -1,
    "max_ack_pending": -1,
}
_NOT_OURS: Final = ("deliver_subject", "filter_subject", "filter_subjects", "backoff")
_UNSET: Final = {"max_age": 0, "discard_new_per_subject": False}
"""What the server means when it does not mention a setting."""


class Standing(msgspec.Struct, frozen=True):
    """What is on the server."""

    ack_wait_s: float
    """How long it waits for an answer before it delivers a call to somebody else."""
    is_fragile: bool = False
    """A cluster keeps the stream on one of its servers only: without that one, the bus is away."""


class _Problem(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct):
    messages: int = 0


class _Cluster(msgspec.Struct):
    name: str = ""


class _Info(msgspec.Struct):
    config: dict[str, object] = {}
    cluster: _Cluster | None = None
    state: _State = msgspec.field(default_factory=_State)
    error: _Problem | None = None


async def set_up(ask: Ask, names: Names, *, ack_wait_s: float) -> Standing:
    """Have the stream and the consumer there. Raises ``BackendRefused`` if they are other ones."""
    ours = {"name": names.stream, "subjects": [names.calls], **_STREAM}
    stream = await _have(
        ask,
        f"STREAM.INFO.{names.stream}",
        f"STREAM.CREATE.{names.stream}",
        *({**ours, "num_replicas": replicas} for replicas in _REPLICAS),
    )
    _compare(
        stream.config,
        {"subjects": [names.calls], **_STREAM},
        f"the JetStream stream {names.stream}",
        f"nats stream rm {names.stream}",
    )
    place = f"{names.stream}.{names.consumer}"
    config = {
        "durable_name": names.consumer,
        "name": names.consumer,
        "ack_wait": int(ack_wait_s * _NS_PER_S),
        **_CONSUMER,
    }
    consumer = await _have(
        ask,
        f"CONSUMER.INFO.{place}",
        f"CONSUMER.CREATE.{place}",
        {"stream_name": names.stream, "action": "create", "config": config},
    )
    _compare(
        consumer.config,
        _CONSUMER,
        f"the consumer {names.consumer} of the JetStream stream {names.stream}",
        f"nats consumer rm {names.stream} {names.consumer}",
    )
    ack_wait_ns = msgspec.convert(consumer.config["ack_wait"], int)
    is_clustered = stream.cluster is not None and stream.cluster.name != ""
    return Standing(
        ack_wait_s=ack_wait_ns / _NS_PER_S,
        is_fragile=is_clustered and stream.config.get("num_replicas", 1) == 1,
    )


async def look(ask: Ask, names: Names) -> int:
    """How many messages are in the stream."""
    info = await _info(ask, f"STREAM.INFO.{names.stream}")
    _raise_for(info.error)
    return info.state.messages


async def _have(ask: Ask, info: str, create: str, *configs: Mapping[str, object]) -> _Info:
    """What is there, or what is made by the first of these that the server wants."""
    found = await _info(ask, info)
    if found.error is not None and found.error.code == _NOT_THERE:
        for config in configs:
            found = await _info(ask, create, msgspec.json.encode(config))
            for _ in range(_PEERS_TRIES):
                if found.error is None or found.error.err_code != _NO_PEERS:
                    break
                await asyncio.sleep(_PEERS_PAUSE_S)
                found = await _info(ask, create, msgspec.json.encode(config))
            if found.error is None or found.error.code == _UNAVAILABLE:
                # One that cannot say now is not asked for less: it would have to keep that.
                break
            if found.error.err_code in _TAKEN:
                # Another replica was quicker. What it made is compared like anything else.
                found = await _info(ask, info)
                break
    _raise_for(found.error)
    return found


async def _info(ask: Ask, verb: str, body: bytes = b"") -> _Info:
    answer = await ask(f"$JS.API.{verb}", body)
    try:
        return msgspec.json.decode(answer.data, type=_Info)
    except msgspec.DecodeError as error:
        raise BackendError(f"JetStream answered {verb} with something unreadable") from error


def _compare(
    found: Mapping[str, object], wanted: Mapping[str, object], what: str, remove: str
) -> None:
    wrong = [
        f"{name} is {have!r} and must be {value!r}"
        for name, value in wanted.items()
        if (have := found.get(name, _UNSET.get(name))) != value
    ]
    wrong += [
        f"{name} is {found[name]!r} and must not be set" for name in _NOT_OURS if found.get(name)
    ]
    if wrong:
        raise BackendRefused(
            f"{what} has other settings than ours: {'; '.join(wrong)}. Change them, or remove it "
            f"({remove}): it is made anew at the next start, and no run is lost, "
            "since the store has every call. Or use another namespace."
        )


def _raise_for(problem: _Problem | None) -> None:
    if problem is None:
        return
    said = f"JetStream says: {problem.description} ({problem.err_code})"
    if problem.err_code in _NO_JETSTREAM:
        raise BackendRefused(f"{said}. Start nats-server with JetStream (-js), for this account")
    if problem.code in {_NOT_THERE, _UNAVAILABLE}:
        raise BackendUnavailable(said)
    raise BackendRefused(said)
