"""The JetStream stream of calls and its consumer: created at the first start, checked at every one.

Subjects and names, all built here:

    <namespace>.advance.<shard>.<run id>     calls, kept in the stream <NAMESPACE>_ADVANCE
    <namespace>.bell                         bells, not kept

Each setting that is checked is here because of what happens without it:

* one message per subject, new ones refused: at most one pending call per run, however often and by
  how many replicas it is published;
* no limit of deliveries: a delayed NAK counts as a delivery, so with any limit the call of a busy
  run would be dropped after that many retries;
* no limit of unacknowledged messages: a call that waits for its retry counts as one, so with any
  limit busy runs would delay the calls of all others.

What is not checked (replicas, placement, compression, how long the server waits for an answer) is
the operator's to choose. A stream that is created here has three replicas in a cluster, so that the
bus survives the loss of one server; a single server keeps it once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Final, TypeVar

import msgspec
from nats.errors import NoRespondersError
from nats.js import JetStreamManager
from nats.js.api import ConsumerConfig, ConsumerInfo, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from stanchion.core.model import RunId
from stanchion.ports.errors import BackendRefused, BackendUnavailable

_T = TypeVar("_T")

_TAKEN: Final = frozenset({10013, 10058, 10105, 10148})
"""A consumer or stream of this name exists already, or was created in the meantime."""
_NO_JETSTREAM: Final = frozenset({10039, 10076})
_NO_PEERS: Final = 10005
_PEERS_TRIES: Final = 4
_PEERS_PAUSE_S: Final = 0.25
"""A cluster with too few servers may have enough a moment later; the stream is created once."""
_REPLICAS: Final = (3, 1)
"""How many servers keep the stream, the preferred number first."""

_STREAM: Final[Mapping[str, object]] = {
    "retention": "workqueue",
    "storage": "file",
    "discard": "new",
    "discard_new_per_subject": True,
    "max_msgs_per_subject": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
}
_CONSUMER: Final[Mapping[str, object]] = {
    "deliver_policy": "all",
    "ack_policy": "explicit",
    "max_deliver": -1,
    "max_ack_pending": -1,
}
_MUST_BE_UNSET: Final = ("deliver_subject", "filter_subject", "filter_subjects", "backoff")

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHARD_DIGITS: Final = 2


class Names(msgspec.Struct, frozen=True):
    """The names of everything in one namespace."""

    namespace: str

    @property
    def stream(self) -> str:
        return f"{self.namespace}_advance".upper()

    @property
    def consumer(self) -> str:
        return "replicas"

    @property
    def calls(self) -> str:
        """The subject of all calls."""
        return f"{self.namespace}.advance.>"

    @property
    def bells(self) -> str:
        return f"{self.namespace}.bell"

    @property
    def next_call(self) -> str:
        """The subject on which calls are requested."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"

    def call(self, run_id: RunId) -> str:
        """The subject of one run's calls. The stream keeps at most one message of each subject."""
        return f"{self.namespace}.advance.{run_id[:_SHARD_DIGITS]}.{run_id}"


def names_in(namespace: str) -> Names:
    """The names in a namespace. Raises ``BackendRefused`` if NATS does not allow them."""
    if _NAMESPACE.fullmatch(namespace) is None:
        raise BackendRefused(
            f"{namespace!r} cannot be a namespace on NATS: use up to 64 letters, digits, "
            "hyphens and underscores"
        )
    return Names(namespace)


class StreamState(msgspec.Struct, frozen=True):
    """What is on the server."""

    ack_wait_s: float
    """How long the server waits for an answer before it delivers a call to another replica."""
    has_one_replica: bool = False
    """A cluster keeps the stream on one server only: the bus fails with that server."""


async def set_up(manager: JetStreamManager, names: Names, *, ack_wait_s: float) -> StreamState:
    """Create the stream and the consumer if they are not there, and check their settings.

    Raises ``BackendRefused`` if they have other settings than ours.
    """
    with _translated():
        stream = await _stream(manager, names)
        _compare(
            stream.config,
            {"subjects": [names.calls], **_STREAM},
            f"the JetStream stream {names.stream}",
            f"nats stream rm {names.stream}",
        )
        consumer = await _consumer(manager, names, ack_wait_s)
        _compare(
            consumer.config,
            _CONSUMER,
            f"the consumer {names.consumer} of the JetStream stream {names.stream}",
            f"nats consumer rm {names.stream} {names.consumer}",
        )
    is_clustered = stream.cluster is not None and bool(stream.cluster.name)
    return StreamState(
        ack_wait_s=consumer.config.ack_wait or ack_wait_s,
        has_one_replica=is_clustered and (stream.config.num_replicas or 1) == 1,
    )


async def count_messages(manager: JetStreamManager, names: Names) -> int:
    """How many messages are in the stream."""
    with _translated():
        return (await manager.stream_info(names.stream)).state.messages


async def _stream(manager: JetStreamManager, names: Names) -> StreamInfo:
    async def create() -> StreamInfo:
        config = StreamConfig.from_response(
            {"name": names.stream, "subjects": [names.calls], **_STREAM}
        )
        for replicas in _REPLICAS[:-1]:
            for _ in range(1 + _PEERS_TRIES):
                try:
                    return await manager.add_stream(config, num_replicas=replicas)
                except ServiceUnavailableError:
                    # Unknown at present. Do not create a stream with one replica, which is final.
                    raise
                except APIError as error:
                    if error.err_code in _TAKEN:
                        raise
                    if error.err_code != _NO_PEERS:
                        break
                    await asyncio.sleep(_PEERS_PAUSE_S)
        return await manager.add_stream(config, num_replicas=_REPLICAS[-1])

    return await _have(lambda: manager.stream_info(names.stream), create)


async def _consumer(manager: JetStreamManager, names: Names, ack_wait_s: float) -> ConsumerInfo:
    async def create() -> ConsumerInfo:
        return await manager.add_consumer(
            names.stream,
            ConsumerConfig.from_response({**_CONSUMER}),
            durable_name=names.consumer,
            name=names.consumer,
            ack_wait=ack_wait_s,
        )

    return await _have(lambda: manager.consumer_info(names.stream, names.consumer), create)


async def _have(find: Callable[[], Awaitable[_T]], create: Callable[[], Awaitable[_T]]) -> _T:
    """The existing object, or a new one, created here or concurrently by another replica."""
    try:
        return await find()
    except NotFoundError:
        """It has to be created."""
    try:
        return await create()
    except APIError as error:
        if error.err_code not in _TAKEN:
            raise
    return await find()


def _compare(found: object, wanted: Mapping[str, object], what: str, remove: str) -> None:
    wrong = [
        f"{name} is {have!r} and must be {value!r}"
        for name, value in wanted.items()
        if (have := _plain(getattr(found, name), value)) != value
    ]
    wrong += [
        f"{name} is {getattr(found, name)!r} and must not be set"
        for name in _MUST_BE_UNSET
        if getattr(found, name, None)
    ]
    if wrong:
        raise BackendRefused(
            f"{what} has other settings than ours: {'; '.join(wrong)}. Change them, or remove it "
            f"({remove}): it is created again at the next start, and no run is lost, "
            "since the store has every call. Or use another namespace."
        )


def _plain(value: object, wanted: object) -> object:
    """A setting as in ``wanted``: text for an enumeration, zero for a number that is unset."""
    if isinstance(value, Enum):
        return value.value
    return 0 if value is None and wanted == 0 else value


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of the JetStream API into the errors of the ports."""
    try:
        yield
    except APIError as error:
        if error.code is None:
            # nats-py raises this if no server handles JetStream requests.
            raise NoRespondersError from error
        said = f"JetStream says: {error.description} ({error.err_code})"
        if error.err_code in _NO_JETSTREAM:
            raise BackendRefused(
                f"{said}. Start nats-server with JetStream (-js), for this account"
            ) from error
        if isinstance(error, NotFoundError | ServiceUnavailableError):
            raise BackendUnavailable(said) from error
        raise BackendRefused(said) from error
