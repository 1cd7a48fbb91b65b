"""The console's way to the services: the routes of the HTTP API, called inside the process.

``Api`` runs a route exactly as a request with the viewer's key would: the same check of role and
tenant, the same decoding of query and body, the same handler, the same sealed cursors. What a page
shows or changes can therefore be seen or changed with ``curl`` by the same key, and nothing else
can. A page names a route by its method and template, as the reference does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from stanchion.core.model import RunId, TenantId
from stanchion.gateway.auth import ANONYMOUS, TENANT_HEADER, authorised
from stanchion.gateway.body import decoded, is_suspect, read_query
from stanchion.gateway.endpoint import (
    checked_key,
    listed,
    note_refusal,
    parameter_pattern,
    parameter_wanted,
)
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member
from stanchion.gateway.route import (
    PARAMETERS,
    Call,
    HandlerAnswer,
    NoBody,
    NoQuery,
    Route,
    RouteScope,
    Stream,
)
from stanchion.gateway.routes import ROUTES
from stanchion.gateway.state import GatewayState
from stanchion.gateway.views import decoded_run
from stanchion.services.engine import Services
from stanchion.services.keys import KeyHolder
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code
from stanchion.wire.runs import RunView

_Made = TypeVar("_Made")
_BY_NAME: Final = {f"{route.method} {route.path}": route for route in ROUTES}


def route_named(name: str) -> Route | None:
    """The route of a method and template, such as ``GET /v1/runs``; ``None`` if there is none."""
    return _BY_NAME.get(name)


class Api:
    """The routes of the HTTP API, for one viewer and the tenant that it looks at."""

    def __init__(
        self,
        services: Services,
        state: GatewayState,
        holder: KeyHolder,
        *,
        tenant: str | None,
        request_id: str,
    ) -> None:
        self._services = services
        self._state = state
        self._holder = holder
        self._tenant = tenant
        self._request_id = request_id

    def of(self, tenant: str) -> Api:
        """The same for one tenant, where the viewer may look at all of them."""
        return Api(
            self._services,
            self._state,
            self._holder,
            tenant=tenant if self._holder.tenant == ALL_TENANTS else self._tenant,
            request_id=self._request_id,
        )

    async def charged(self, make: Callable[[], _Made]) -> _Made:
        """Make something that takes milliseconds: the viewer's tenant pays, others get a turn."""
        tenant = self._holder.tenant
        whose = None if tenant == ALL_TENANTS else TenantId(tenant)
        return await self._state.work.done(whose, make)

    def allows(self, name: str) -> bool:
        """Whether the viewer may use this route, such as ``GET /v1/runs``, if there is one."""
        route = _BY_NAME.get(name)
        if route is None:
            return False
        if route.scope is RouteScope.DEPLOYMENT and self._holder.tenant != ALL_TENANTS:
            return False
        return not route.roles or self._holder.role in route.roles or self._holder is ANONYMOUS

    async def tenant_of_run(self, run_id: str) -> str | None:
        """The tenant of a run, for a viewer who may look at all of them.

        Locks and searches name a run without its tenant.
        """
        if self._holder.tenant != ALL_TENANTS:
            return None
        loaded = await self._services.store.load(RunId(run_id))
        return None if loaded is None else loaded.run.tenant

    async def get(self, path: str, params: Mapping[str, str] | None = None, **query: object) -> Any:  # noqa: ANN401 - the route's own type
        """The answer of a ``GET`` route as its wire type.

        Query members that are ``None`` or empty are left out; a list repeats its member. Raises
        ``RequestRefused`` and what a handler raises.
        """
        return await self._run(f"GET {path}", params or {}, _query_text(query), b"", None)

    async def send(
        self,
        name: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        *,
        key: str | None = None,
        **query: object,
    ) -> Any:  # noqa: ANN401 - the route's own type
        """The answer of a route that changes something, such as ``DELETE /v1/admin/keys/{key_id}``.

        A viewer with a key for all tenants must have chosen a tenant before it changes anything in
        one. Raises ``RequestRefused`` and what a handler raises.
        """
        route = _BY_NAME.get(name)
        is_of_tenant = route is not None and route.scope is RouteScope.TENANT
        if is_of_tenant and self._holder.tenant == ALL_TENANTS and self._tenant is None:
            raise RequestRefused(invalid_member("tenant", "choose the tenant first"))
        raw = b"" if body is None else msgspec.json.encode(body)
        return await self._run(name, params or {}, _query_text(query), raw, key)

    async def _run(
        self, name: str, params: Mapping[str, str], query: bytes, raw: bytes, key: str | None
    ) -> Any:  # noqa: ANN401 - the route's own type
        route = _BY_NAME.get(name)
        if route is None:
            detail = f"this version does not have {name}"
            raise RequestRefused(Refusal(code=Code.NOT_FOUND, detail=detail))
        named = self._named(route)
        caller = authorised(self._holder, named, route)
        if route.method == "GET" and caller.only is not None:
            self._state.work.check(caller.tenant)
        _check_params(route.path, params)
        call: Call[Any, Any] = Call(
            services=self._services,
            state=self._state,
            route=route,
            tenant=caller.tenant,
            only=caller.only,
            actor=caller.actor,
            role=caller.role,
            key_id=caller.key_id,
            is_for_all=caller.is_for_all,
            params=params,
            query=read_query(query, route.query or NoQuery),
            body=_body(route, raw),
            headers={} if named is None else {TENANT_HEADER: named},
            body_bytes=len(raw),
            is_suspect=is_suspect(raw),
            idempotency_key=checked_key(key.encode()) if key and route.takes_key else None,
            request_id=self._request_id,
        )
        is_list = "cursor" in (route.query or NoQuery).__struct_fields__
        if route.admits and self._state.draining.is_set():
            answer: HandlerAnswer = self._state.unavailable(
                Code.DRAINING, "the server is shutting down"
            )
        else:
            answer = await (listed(call) if is_list else route.handler(call))
        if isinstance(answer, Refusal):
            if route.admits:
                self._note(call, answer)
            raise RequestRefused(answer)
        assert not isinstance(answer, Stream), f"{name} is a stream"
        if isinstance(answer.value, bytes) and route.answer is RunView:
            return await decoded_run(answer.value)
        if isinstance(answer.value, bytes) and route.answer is not None:
            return msgspec.json.decode(answer.value, type=route.answer)
        return answer.value

    def _note(self, call: Call[Any, Any], refusal: Refusal) -> None:
        """Collect the receipt of a start that was refused, as of one over HTTP."""
        note_refusal(
            self._services,
            refusal,
            tenant=call.tenant,
            workflow_id=call.params.get("workflow_id"),
            key=call.idempotency_key,
            request_id=call.request_id,
            actor=call.actor,
        )

    def _named(self, route: Route) -> bytes | None:
        """The value of ``X-Stanchion-Tenant`` that a caller outside would send."""
        if route.scope is RouteScope.DEPLOYMENT or self._holder.tenant != ALL_TENANTS:
            return None
        if self._tenant is not None:
            return TenantId(self._tenant).encode()
        return ALL_TENANTS.encode() if route.takes_all else None


def _query_text(query: Mapping[str, object]) -> bytes:
    given = ((name, "true" if value is True else value) for name, value in query.items())
    pairs = [(name, value) for name, value in given if value or value == 0]
    return urlencode(pairs, doseq=True).encode() if pairs else b""


def _body(route: Route, raw: bytes) -> object:
    if route.reads is None:
        return raw or NoBody()
    return decoded(raw or b"{}", _decoder(route.reads))


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:  # noqa: ANN401 - a type
    return msgspec.json.Decoder(kind)


@cache
def _patterns(path: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    names = re.findall(r"\{(\w+)\}", path)
    return tuple((name, parameter_pattern(PARAMETERS[name])) for name in names)


def _check_params(path: str, params: Mapping[str, str]) -> None:
    for name, pattern in _patterns(path):
        if pattern.match(params[name]) is None:
            raise RequestRefused(invalid_member(name, parameter_wanted(PARAMETERS[name])))
