"""Routes: each endpoint declared once.

A ``Route`` says everything about an endpoint: who may call it, what it takes, what it answers, and
by which codes it may refuse. From the table of them (``routes.ROUTES``) come the dispatch, the
check of keys and roles, the OpenAPI document, the reference page, and the test that tries every
route with every wrong key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from stanchion.core.model import TenantId
from stanchion.gateway.problems import Headers, Refusal
from stanchion.wire.admin import Role
from stanchion.wire.identifiers import (
    JobName,
    KeyName,
    LetterName,
    LockName,
    Name,
    RunName,
    StepName,
    TenantName,
)
from stanchion.wire.problems import Code

if TYPE_CHECKING:
    from stanchion.gateway.state import GatewayState
    from stanchion.services.engine import Services

__all__ = [
    "ADMINS",
    "ANYONE",
    "APPROVERS",
    "LIVEZ",
    "METRICS",
    "OPERATORS",
    "PARAMETERS",
    "PATHS",
    "PROBES",
    "RUNNERS",
    "WORKERS",
    "Call",
    "Handler",
    "HandlerAnswer",
    "NoBody",
    "NoQuery",
    "Reply",
    "Route",
    "RouteScope",
    "Stream",
    "Takes",
]

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
    state: GatewayState
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


HandlerAnswer: TypeAlias = Reply | Refusal | Stream
Handler: TypeAlias = Callable[[Call[Any, Any]], Awaitable[HandlerAnswer]]

ANYONE: Final[frozenset[Role]] = frozenset()
RUNNERS: Final = frozenset({Role.RUNNER, Role.OPERATOR, Role.ADMIN})
APPROVERS: Final = RUNNERS | {Role.APPROVER}
WORKERS: Final = frozenset({Role.WORKER, Role.ADMIN})
OPERATORS: Final = frozenset({Role.OPERATOR, Role.ADMIN})
ADMINS: Final = frozenset({Role.ADMIN})

PARAMETERS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "workflow_id": Name,
        "run_id": RunName,
        "step_id": StepName,
        "job_id": JobName,
        "tenant": TenantName,
        "key_id": KeyName,
        "name": LockName,
        "letter_id": LetterName,
    }
)
"""What may stand in a path, by the name it has in the template."""
PATHS: Final = frozenset({"name", "letter_id"})
"""Those that may hold a slash."""
LIVEZ: Final = "/livez"
METRICS: Final = "/metrics"
PROBES: Final = frozenset({LIVEZ, "/readyz"})
"""What a supervisor or load balancer asks: answered also when no connection is left for others."""


class RouteScope(Enum):
    """Whose things a route is about."""

    OPEN = "open"
    """Nobody's: no key is asked for."""
    TENANT = "tenant"
    """One tenant's: the key's, or the one that a key for all names."""
    ONE_OR_ALL = "one_or_all"
    """The key's tenant's; with a key for all tenants, everybody's."""
    DEPLOYMENT = "deployment"
    """The whole deployment's: a key for one tenant is not enough."""


class Takes(Enum):
    """What a route does with a body."""

    NOTHING = "nothing"
    JSON = "json"
    JSON_OR_NOTHING = "json_or_nothing"
    """An absent body is taken as ``{}``."""
    TEXT = "text"
    """The handler reads it: a workflow file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One endpoint."""

    method: str
    path: str
    handler: Handler
    summary: str
    """One sentence for the reference."""
    roles: frozenset[Role]
    scope: RouteScope
    answer: Any
    """The type of a 200; ``None`` for what is not JSON."""
    query: Any = None
    takes: Takes = Takes.NOTHING
    body: Any = None
    statuses: tuple[int, ...] = (200,)
    codes: tuple[Code, ...] = ()
    """Refusals of its own, beside those that every route of its kind has."""
    takes_key: bool = False
    """Whether ``Idempotency-Key`` means something."""
    waits: Callable[[Call[Any, Any]], float] | None = None
    """The seconds for which a call may hold its answer back. It then counts among the waits."""
    admits: bool = False
    """Whether it begins something: refused while draining."""
    is_vital: bool = False
    """Never shed: what tells whether the server lives."""

    @property
    def id(self) -> str:
        """The operation's name: the handler's."""
        return getattr(self.handler, "__name__", self.path)
