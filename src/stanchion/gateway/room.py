"""Room: what one request takes up while it is under way, given back whatever becomes of it."""

from __future__ import annotations

from typing import Self

from stanchion.core.model import TenantId
from stanchion.gateway.desk import Desk

__all__ = ["Room"]


class Room:
    """A place among the requests, later perhaps among the waits, and a body in memory."""

    __slots__ = ("_bodies", "_body", "_is_waiting", "_load", "_tenant")

    def __init__(self, desk: Desk) -> None:
        self._load = desk.load
        self._bodies = desk.bodies
        self._tenant: TenantId | None = None
        self._body: bytes | None = None
        self._is_waiting = False

    def __enter__(self) -> Self:
        self._load.begin_request()
        return self

    def take_for(self, tenant: TenantId) -> None:
        """Count it among its tenant's as well."""
        self._load.begin_for(tenant)
        self._tenant = tenant

    def hold(self, body: bytes) -> None:
        """Remember the body that was read."""
        self._body = body

    def only_wait(self) -> None:
        """From here on it costs next to nothing: leave the place to others."""
        self._load.begin_wait()
        self._is_waiting = True
        self._leave()

    def __exit__(self, *_error: object) -> None:
        if self._body is not None:
            self._bodies.done(self._body)
        if self._is_waiting:
            self._load.end_wait()
        else:
            self._leave()

    def _leave(self) -> None:
        self._load.end_request()
        if self._tenant is not None:
            self._load.end_for(self._tenant)
