"""What one request takes up while it is under way, given back however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from stanchion.core.model import TenantId
from stanchion.gateway.desk import GatewayState
from stanchion.gateway.load import Load, LoadKind

__all__ = ["RequestPlace", "stream_counted"]


class RequestPlace:
    """A place among the requests, later perhaps among the waits, and a body in memory."""

    __slots__ = ("_bodies", "_body", "_kind", "_load", "_tenant")

    def __init__(self, desk: GatewayState) -> None:
        self._load = desk.load
        self._bodies = desk.bodies
        self._tenant: TenantId | None = None
        self._body: bytes | None = None
        self._kind = LoadKind.REQUESTS

    def __enter__(self) -> Self:
        self._load.begin(self._kind)
        return self

    def take_for(self, tenant: TenantId) -> None:
        """Count it among its tenant's as well. Raises ``Refused``."""
        self._load.begin_for(self._kind, tenant)
        self._tenant = tenant

    def hold(self, body: bytes) -> None:
        """Remember the body that was read."""
        self._body = body

    def only_wait(self) -> None:
        """Count it among the waits from here on, and no longer among the requests."""
        _begin(self._load, LoadKind.WAITS, self._tenant)
        _end(self._load, self._kind, self._tenant)
        self._kind = LoadKind.WAITS

    def __exit__(self, *_error: object) -> None:
        if self._body is not None:
            self._bodies.done(self._body)
        _end(self._load, self._kind, self._tenant)


@contextmanager
def stream_counted(load: Load, tenant: TenantId) -> Iterator[None]:
    """Count a stream while inside. Raises ``Refused``."""
    _begin(load, LoadKind.STREAMS, tenant)
    try:
        yield
    finally:
        _end(load, LoadKind.STREAMS, tenant)


def _begin(load: Load, kind: LoadKind, tenant: TenantId | None) -> None:
    if tenant is not None:
        load.begin_for(kind, tenant)
    try:
        load.begin(kind)
    except BaseException:
        if tenant is not None:
            load.end_for(kind, tenant)
        raise


def _end(load: Load, kind: LoadKind, tenant: TenantId | None) -> None:
    load.end(kind)
    if tenant is not None:
        load.end_for(kind, tenant)
