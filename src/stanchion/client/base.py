"""What both clients share: their arguments, checked once, their handles, and their signatures.

A call is written once, for the engine, as a generator on its commands. As a method of a client it
has no engine parameter and returns the result: ``as_method`` gives it the name, the docstring and
the signature that ``help()`` and editors show.
"""

from __future__ import annotations

import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Final, Generic, TypeVar

from stanchion.client.calls import StartedRun
from stanchion.client.engine import CallEngine, Pace
from stanchion.client.signals import CallHook, guarded
from stanchion.transport.failover import parse_addresses
from stanchion.transport.messages import Address

TransportT = TypeVar("TransportT")
CallerT = TypeVar("CallerT")
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_URL: Final = "http://127.0.0.1:8420"
_TIMEOUT_S_MAX: Final = 86_400.0
"""Sockets take no infinite time-out."""


class BaseClient(ABC, Generic[TransportT]):
    """A client of one deployment, for one tenant."""

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        timeout_s: float = 30.0,
        pace: Pace | None = None,
        on_event: CallHook | None = None,
        transport: TransportT | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: the server's, as in ``http://127.0.0.1:8420``. Of several, in a list or separated
                by commas, the first that answers is used for as long as it answers. By default
                STANCHION_URL from the environment, or else ``http://127.0.0.1:8420``.
            api_key: says who calls, and for which tenant. By default STANCHION_API_KEY from the
                environment.
            tenant: for a server without keys. ``default``, if not given.
            timeout_s: how long one request may take, a day at most. Retries have their own times.
            pace: retry policies and budgets.
            on_event: called with every attempt, retry and failure (``stanchion.client.signals``).
            transport: instead of the client's own.
        """
        if not timeout_s > 0:
            raise ValueError("timeout_s must be above 0")
        if url is None:
            url = os.environ.get("STANCHION_URL") or _URL
        if api_key is None:
            api_key = os.environ.get("STANCHION_API_KEY") or None
        headers: list[tuple[str, str]] = []
        if api_key is not None:
            headers.append(("Authorization", f"Bearer {_token('api_key', api_key)}"))
        if tenant is not None:
            headers.append(("X-Stanchion-Tenant", _token("tenant", tenant)))
        self._engine = CallEngine(
            pace=Pace() if pace is None else pace,
            tell=guarded(on_event),
            headers=tuple(headers),
            timeout_s=min(timeout_s, _TIMEOUT_S_MAX),
        )
        servers = parse_addresses(url)
        self._transport = self._transport_to(servers) if transport is None else transport

    @abstractmethod
    def _transport_to(self, servers: Sequence[Address]) -> TransportT:
        """The client's default transport."""


class BaseRunHandle(Generic[CallerT]):
    """A run that was started: wait for it, look at it, end it."""

    def __init__(self, client: CallerT, started: StartedRun) -> None:
        self._client = client
        self.run_id = started.run_id
        self.status = started.status
        """The status when it was started. ``get()`` returns the present one."""
        self.is_replay = started.is_replay
        """Whether an earlier call with the same idempotency key started this run."""
        self.position = started.position
        """Its place in the queue when it was started, if it had to wait; 1 is the next one."""
        self.estimate_s = started.estimate_s

    def __repr__(self) -> str:
        return f"<run {self.run_id}, {self.status} when it was started>"


def _token(name: str, text: str) -> str:
    # The text itself may be a secret: it is not shown.
    if not _TOKEN.fullmatch(text):
        raise ValueError(f"{name} must be visible ASCII characters, without spaces")
    return text


_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_SELF: Final = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


def as_method(
    method: _Method, written: Callable[..., Any], *, gives: str = "{}", known: int = 1
) -> _Method:
    """Show a method as it is called: with ``self`` in the place of what the object knows already.

    ``known`` is how many of the first parameters these are. ``gives`` is the type of what comes
    back, with the inner type of the engine's generator in the place of the braces.
    """
    update_wrapper(method, written)
    del method.__dict__["__wrapped__"]  # or help() shows the engine's signature
    signature = inspect.signature(written)
    parameters = list(signature.parameters.values())[known:]
    inner = str(signature.return_annotation)
    for outer in ("Op[", "Feed["):
        if inner.startswith(outer):
            inner = inner[len(outer) : -1]
    returns = gives.format(inner)
    method.__dict__["__signature__"] = inspect.Signature(
        [_SELF, *parameters], return_annotation=returns
    )
    method.__annotations__ = {each.name: each.annotation for each in parameters} | {
        "return": returns
    }
    return method


def named(cls: _Class) -> _Class:
    """Name the public functions of a class as its attributes are named."""
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            member.__name__, member.__qualname__ = name, f"{cls.__name__}.{name}"
            member.__module__ = cls.__module__
    return cls
