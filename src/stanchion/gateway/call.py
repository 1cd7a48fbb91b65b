"""Calls: what a handler gets and what it gives back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from stanchion.core.model import TenantId
from stanchion.gateway.problems import Headers

if TYPE_CHECKING:
    from stanchion.gateway.desk import GatewayState
    from stanchion.gateway.route import Route
    from stanchion.services.engine import Services

__all__ = ["Call", "NoBody", "NoQuery", "Reply", "Stream"]

_Body = TypeVar("_Body")
_Query = TypeVar("_Query")


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route without query parameters."""


class NoBody(msgspec.Struct, frozen=True):
    """A route without a body."""


@dataclass(slots=True)
class Call(Generic[_Body, _Query]):
    """One request, checked: its caller may make it, and every part of it is what it should be."""

    services: Services
    desk: GatewayState
    route: Route
    tenant: TenantId
    """For whom. On routes over one or all tenants see ``only``."""
    only: TenantId | None
    """The one tenant that the caller may act for here; ``None``: all of them."""
    actor: str
    params: Mapping[str, str]
    query: _Query
    body: _Body
    headers: Mapping[bytes, bytes]
    body_bytes: int
    is_suspect: bool
    """Whether a value in the body could be too deep, or hold an integer that is too large."""
    idempotency_key: str | None
    request_id: str


class Reply(msgspec.Struct, frozen=True):
    """An answer: a wire value, or bytes that have their own type."""

    value: object
    status: int = 200
    headers: Headers = ()
    content_type: bytes = b"application/json"


class Stream(msgspec.Struct, frozen=True):
    """An answer without an end: the parts are sent as they come."""

    parts: AsyncGenerator[bytes, None]
    content_type: bytes
    tenant: TenantId
