"""Routes: each endpoint declared once.

A ``Route`` is an endpoint: which roles may call it, what it takes and returns, and by which codes
it may refuse. ``RouteTable.add`` declares one above its handler, whose docstring is its summary and
whose annotation ``Call[Body, Query]`` says what it takes. The table ``routes.ROUTES`` drives the
dispatch, the check of keys and roles, the OpenAPI document, the reference page, and the test that
tries every route with every wrong key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_type_hints,
)

import msgspec

from stanchion.core.audit import AuditEntry
from stanchion.core.json_value import JsonValue
from stanchion.core.model import TenantId
from stanchion.gateway.problems import Headers, Refusal
from stanchion.wire.admin import Role
from stanchion.wire.identifiers import (
    BulkName,
    Cursor,
    JobName,
    KeyName,
    LetterName,
    Limit,
    LimitName,
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

_Body = TypeVar("_Body")
_Query = TypeVar("_Query")


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route without query parameters."""


class NoBody(msgspec.Struct, frozen=True):
    """A route without a body."""


class Paging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list: which page."""

    cursor: Cursor | None = None
    limit: Limit = 100


class Call(msgspec.Struct, Generic[_Body, _Query]):
    """One request, after its key, parameters and body were checked."""

    services: Services
    state: GatewayState
    route: Route
    tenant: TenantId
    """The tenant of the request. Routes for one or all tenants use ``only``."""
    only: TenantId | None
    """The one tenant that the caller may act for here; ``None`` for all tenants."""
    actor: str
    role: Role
    params: Mapping[str, str]
    query: _Query
    body: _Body
    headers: Mapping[bytes, bytes]
    body_bytes: int
    is_suspect: bool
    """Whether a value in the body could be too deep, or contain an integer over 64 bits."""
    idempotency_key: str | None
    request_id: str
    traceparent: str | None = None
    """The caller's trace context; ``None`` while traces are off."""
    key_id: str | None = None
    """The caller's key, for work that must end with it."""
    is_for_all: bool = False
    """Whether the caller's key is for all tenants, also if the request names one."""

    def audit(
        self,
        subject: str,
        *,
        tenant: TenantId | None,
        before: JsonValue = None,
        after: JsonValue = None,
    ) -> AuditEntry:
        """The audit entry of this request, for the store method that makes the change."""
        assert self.route.audits is not None, f"{self.route.id} declares no action"
        return AuditEntry(
            action=self.route.audits,
            actor=self.actor,
            subject=subject,
            tenant=tenant,
            before=before,
            after=after,
            request_id=self.request_id,
        )


class Reply(msgspec.Struct, frozen=True):
    """An answer: a wire value to be encoded as JSON, or bytes with a content type of their own."""

    value: object
    status: int = 200
    headers: Headers = ()
    content_type: bytes = b"application/json"


class Stream(msgspec.Struct, frozen=True):
    """An answer without a fixed end: parts are sent as they are produced."""

    parts: AsyncGenerator[bytes, None]
    content_type: bytes
    tenant: TenantId


HandlerAnswer: TypeAlias = Reply | Refusal | Stream
Handler: TypeAlias = Callable[[Call[Any, Any]], Awaitable[HandlerAnswer]]

ANYONE: Final[frozenset[Role]] = frozenset()
RUNNERS: Final = frozenset({Role.RUNNER, Role.OPERATOR, Role.ADMIN})
APPROVERS: Final = RUNNERS | {Role.APPROVER}
EVERY_ROLE: Final = frozenset(Role)
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
        "bulk_id": BulkName,
        "key_id": KeyName,
        "name": LockName,
        "letter_id": LetterName,
        "schedule_id": Name,
        "limit_id": LimitName,
    }
)
"""The types of path parameters, by their name in the template."""
PATHS: Final = frozenset({"name", "letter_id"})
"""Path parameters that may contain a slash."""
LIVEZ: Final = "/livez"
METRICS: Final = "/metrics"
PROBES: Final = frozenset({LIVEZ, "/readyz"})
"""Probes of supervisors and load balancers: answered also when all connection slots are used."""


class RouteScope(Enum):
    """Which tenants a route acts on."""

    OPEN = "open"
    """None: no key is required."""
    TENANT = "tenant"
    """One tenant: that of the key, or the one that a key for all tenants names."""
    TENANT_OR_ALL = "tenant_or_all"
    """One tenant, in the same way; all of them if the header says ``*``."""
    ONE_OR_ALL = "one_or_all"
    """The tenant of the key; with a key for all tenants, all of them."""
    DEPLOYMENT = "deployment"
    """The whole deployment: a key for one tenant is refused."""


class Takes(Enum):
    """Which body a route accepts."""

    NOTHING = "nothing"
    JSON = "json"
    JSON_OR_NOTHING = "json_or_nothing"
    """An absent body is read as ``{}``."""
    TEXT = "text"
    """The handler parses the body: a workflow file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One endpoint."""

    method: str
    path: str
    handler: Handler
    summary: str
    """One sentence for the reference page and the OpenAPI document."""
    roles: frozenset[Role]
    scope: RouteScope
    answer: Any
    """The type of a successful answer; ``None`` if it is not JSON."""
    dry_answer: Any = None
    """The type of the answer to a dry run, if it is another one."""
    queued_answer: Any = None
    """The type of the answer 202, if the run may have to wait for a slot."""
    query: Any = None
    takes: Takes = Takes.NOTHING
    body: Any = None
    """The type of the body, for the reference and for the handler."""
    reads: Any = None
    """What the body is decoded to for the handler: another type, if it decodes parts itself."""
    statuses: tuple[int, ...] = (200,)
    codes: tuple[Code, ...] = ()
    """Codes of refusals, beside those that every such route has."""
    takes_key: bool = False
    """Whether the route reads ``Idempotency-Key``."""
    waits: Callable[[Call[Any, Any]], float] | None = None
    """Returns how many seconds a call may wait. Such a call is counted as a wait."""
    admits: bool = False
    """Whether it begins new work: refused while draining."""
    audits: str | None = None
    """The action of its audit entries, as ``noun.verb``; ``None`` for a route that reads, for
    starts and for the worker protocol."""
    names_all: bool = True
    """Whether ``X-Stanchion-Tenant`` may be ``*`` on a route that is for one tenant or all."""
    is_vital: bool = False
    """Whether it is answered under any load: liveness, readiness and metrics."""
    is_heavy: Callable[[Call[Any, Any]], bool] | None = None
    """Whether a call is handled like one with a large body: one of a tenant at a time."""

    @property
    def takes_all(self) -> bool:
        """Whether ``X-Stanchion-Tenant: *`` means all tenants here; elsewhere it is refused."""
        is_for_all = self.scope in {RouteScope.TENANT_OR_ALL, RouteScope.ONE_OR_ALL}
        return is_for_all and self.names_all

    @property
    def id(self) -> str:
        """The operation's name: that of the handler."""
        return getattr(self.handler, "__name__", self.path)


class _Declared(TypedDict, total=False):
    """What a route may declare beside its name, roles, scope and answer. See ``Route``."""

    dry_answer: Any
    queued_answer: Any
    takes: Takes
    body: Any
    statuses: tuple[int, ...]
    codes: tuple[Code, ...]
    takes_key: bool
    waits: Callable[[Call[Any, Any]], float]
    admits: bool
    audits: str
    names_all: bool
    is_vital: bool
    is_heavy: Callable[[Call[Any, Any]], bool]


_HandlerT = TypeVar("_HandlerT", bound=Handler)


class RouteTable(list[Route]):
    """Routes, each declared above its handler."""

    def add(
        self,
        name: str,
        roles: frozenset[Role],
        scope: RouteScope,
        answer: Any,  # noqa: ANN401 - a type
        **declared: Unpack[_Declared],
    ) -> Callable[[_HandlerT], _HandlerT]:
        """Declare the route ``name``, its method and path, for the handler that follows.

        Only a route that decodes its body itself names the ``body`` of the reference. ``takes`` is
        needed for a body that may be absent.
        """
        method, _, path = name.partition(" ")

        def declare(handler: _HandlerT) -> _HandlerT:
            reads, query = get_args(next(iter(get_type_hints(handler).values())))
            is_json = reads not in {NoBody, bytes}
            declared.setdefault(
                "takes", Takes.JSON if is_json else Takes.TEXT if reads is bytes else Takes.NOTHING
            )
            declared.setdefault("body", reads if is_json else None)
            self.append(
                Route(
                    method=method,
                    path=path,
                    handler=handler,
                    summary=(handler.__doc__ or "").partition("\n")[0],
                    roles=roles,
                    scope=scope,
                    answer=answer,
                    query=None if query is NoQuery else query,
                    reads=reads if is_json else None,
                    **declared,
                )
            )
            return handler

        return declare
