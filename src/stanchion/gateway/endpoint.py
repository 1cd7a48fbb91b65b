"""Endpoints: handle a request from its head to its answer.

The order is always the same: origin (or 403, on a server without keys), load (or 503), key and role
(or 401, 403), parameters and body (or 400, 408, 413, 422), handler, answer. Every exception on the
way becomes a problem document here, and nowhere else. An unexpected one is answered with 500 and
logged with the request id.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from stanchion import telemetry
from stanchion.core.model import TenantId
from stanchion.core.receipts import Receipt
from stanchion.gateway.auth import DEFAULT_TENANT, Caller
from stanchion.gateway.body import decoded, is_suspect, read_query, refuse_costly
from stanchion.gateway.body_faults import as_ending
from stanchion.gateway.exchange import (
    PART_BYTES,
    ClientGone,
    EncodedAnswer,
    Exchange,
    Receive,
    Send,
    ready,
)
from stanchion.gateway.load import Observe, RequestPlace, stream_counted
from stanchion.gateway.problems import (
    CLOSE,
    GATE_UNAVAILABLE,
    STATUS,
    Refusal,
    RequestRefused,
    invalid_member,
    overdrawn,
)
from stanchion.gateway.route import (
    PARAMETERS,
    PROBES,
    Call,
    HandlerAnswer,
    NoBody,
    NoQuery,
    Reply,
    Route,
    RouteScope,
    Stream,
    Takes,
)
from stanchion.gateway.state import GatewayState
from stanchion.ports.errors import BackendError
from stanchion.ports.records import BadCursor
from stanchion.services.engine import Services
from stanchion.services.log import LOGGER
from stanchion.services.plans import DefinitionMissing
from stanchion.services.work import TenantOverloaded
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

_NOBODY: Final = Caller(DEFAULT_TENANT, None, "anonymous")
_NO_BODY: Final = NoBody()
_NO_QUERY: Final = NoQuery()
_KEY = re.compile(rb"[!-~]{1,255}")

_HEAVY_BODY_BYTES: Final = 16 * 1024
"""Of a tenant's requests with larger bodies, one is handled at a time."""
_HEAVY_LIST: Final = 200
"""The same for lists with a larger ``limit``."""
RECEIPTED: Final[Mapping[Code, str]] = {
    **{code: str(code) for code, status in STATUS.items() if status in {429, 503}},
    Code.MAX_CONCURRENT_RUNS_REACHED: "full",
    Code.JOB_THROTTLED: "throttled",
    Code.IDEMPOTENCY_MISMATCH: "mismatch",
}
"""The refusals of starts that get a receipt, with their outcomes: those of the metric."""
_ANSWER_S_PER_BYTE: Final = 12e-9
"""Processor time of a large answer (read, decode, encode), charged to its tenant."""


class Endpoint:
    """All methods of one path, as an ASGI app."""

    def __init__(
        self,
        services: Services,
        state: GatewayState,
        routes: Sequence[tuple[Route, Observe]],
        unrouted: Observe,
    ) -> None:
        self._state = state
        self._options = state.options
        self._unrouted = unrouted
        self._by_method = {
            route.method: (_RouteRunner(services, state, route), observe)
            for route, observe in routes
        }
        if "GET" in self._by_method:
            self._by_method["HEAD"] = self._by_method["GET"]
        self._allow = ", ".join(sorted(self._by_method)).encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        runner, observe = self._by_method.get(scope["method"], (None, self._unrouted))
        exchange = Exchange(self._options, scope, receive, send, observe)
        if runner is not None:
            await runner.run(exchange)
            return
        await exchange.refuse(
            self._state.auth.foreign(exchange.headers)
            or Refusal(
                code=Code.METHOD_NOT_ALLOWED,
                detail=f"this path allows {self._allow.decode()}",
                headers=((b"allow", self._allow),),
            )
        )


class _RouteRunner:
    """Runs the requests of one route. What depends only on the route is computed once."""

    def __init__(self, services: Services, state: GatewayState, route: Route) -> None:
        self._services = services
        self._state = state
        self._route = route
        self._is_probe = route.path in PROBES
        self._is_worker = route.path.startswith("/v1/worker/")
        self._query = route.query or NoQuery
        self._is_list = "cursor" in self._query.__struct_fields__
        names = re.findall(r"\{(\w+)\}", route.path)
        self._params = tuple((name, parameter_pattern(PARAMETERS[name])) for name in names)
        self._decoder = None if route.reads is None else msgspec.json.Decoder(route.reads)
        takes_body = route.takes is not Takes.NOTHING
        options = state.options
        self._first_s = options.body_timeout_s if takes_body else options.request_deadline_s
        self._deadline_s = options.request_deadline_s

    async def run(self, exchange: Exchange) -> None:
        """Answer one request. Exceptions become problem documents."""
        answer: EncodedAnswer | Refusal
        try:
            found = (
                exchange.flaw()
                or self._state.auth.foreign(exchange.headers, is_probe=self._is_probe)
                or await self._answer(exchange)
            )
            if isinstance(found, Stream):
                with stream_counted(self._state.load, found.tenant):
                    await exchange.stream(found, lambda: self._check_key(exchange))
                return
            # Inside the try: an answer that cannot be encoded becomes a 500.
            answer = ready(found) if isinstance(found, Reply) else found
        except ClientGone:
            return
        except asyncio.CancelledError:
            if exchange.is_begun or not self._state.draining.is_set():
                raise
            # The server does not wait any longer, for example for the rest of a body.
            answer = self._state.unavailable(Code.DRAINING, "the server has shut down", (CLOSE,))
        except RequestRefused as refused:
            answer = refused.refusal
        except BadCursor:
            answer = invalid_member("cursor", "not a cursor of this list")
        except TenantOverloaded as over:
            answer = overdrawn(over)
        except BackendError:
            answer = self._no_store()
        except DefinitionMissing:
            detail = "the store does not have the workflow of this run any more"
            answer = self._state.unavailable(Code.STORE_UNAVAILABLE, detail)
        except Exception as error:  # noqa: BLE001 - answered with 500, and logged in full
            answer = self._broken(exchange, error)
        if not exchange.is_begun:  # else a stream failed midway: the server closes the connection
            await self._send(exchange, answer)

    def _send(self, exchange: Exchange, answer: EncodedAnswer | Refusal) -> Awaitable[None]:
        if not isinstance(answer, EncodedAnswer):
            if self._route.takes_key:  # it starts runs
                self._note(exchange, answer)
            return exchange.refuse(answer)
        if len(answer.body) <= PART_BYTES:
            return exchange.answer(answer)
        return send_large(self._state, exchange, answer)

    def _note(self, exchange: Exchange, refusal: Refusal) -> None:
        """Collect the receipt of a start that was refused, if its tenant is known."""
        if exchange.tenant is None:
            return
        key = exchange.headers.get(b"idempotency-key")
        is_key = key is not None and _KEY.fullmatch(key) is not None
        note_refusal(
            self._services,
            refusal,
            tenant=exchange.tenant,
            workflow_id=exchange.scope["path_params"].get("workflow_id"),
            key=key.decode("ascii") if is_key and key is not None else None,
            request_id=exchange.request_id,
            actor=exchange.actor,
        )

    async def _answer(self, exchange: Exchange) -> HandlerAnswer:
        route = self._route
        if route.is_vital:
            return await self._answer_vital(exchange)
        if route.admits and self._state.draining.is_set():
            if route.takes_key:  # its receipt names the tenant
                self._identify(exchange, await self._state.auth.caller(exchange.headers, route))
            return self._state.unavailable(Code.DRAINING, "the server is shutting down")
        with RequestPlace(self._state) as place:
            caller = await self._state.auth.caller(exchange.headers, route)
            self._identify(exchange, caller)
            if caller.only is not None:
                place.take_for(caller.tenant)
                if route.method == "GET":
                    self._state.work.check(caller.tenant)
            deadline = self._state.deadlines.begin(self._first_s)
            if route.admits:
                exchange.when_gone(deadline.abandon)
            call: Call[Any, Any] | None = None
            try:
                call = await self._read(exchange, caller, place)
                wait_s = 0 if route.waits is None else route.waits(call)
                self._state.deadlines.extend(deadline, wait_s + self._deadline_s)
                if wait_s:
                    place.only_wait()
                    return await exchange.unless_gone(
                        self._handle(call), check=lambda: self._check_key(exchange)
                    )
                if exchange.tenant is None or not self._is_heavy(call):
                    return await self._handle(call)
                async with self._state.heavy.alone(exchange.tenant, is_worker=self._is_worker):
                    return await self._handle(call)
            except asyncio.CancelledError:
                if not deadline.is_why():
                    raise
                if deadline.is_abandoned:
                    raise ClientGone from None
                return self._too_slow(is_reading=call is None and not place.has_body)
            finally:
                deadline.end()

    @staticmethod
    def _identify(exchange: Exchange, caller: Caller) -> None:
        if caller.only is not None:
            exchange.tenant, exchange.actor = caller.tenant, caller.actor

    async def _answer_vital(self, exchange: Exchange) -> HandlerAnswer:
        """Answer without a place or deadline, so that a full server answers as well."""
        if self._route.scope is not RouteScope.OPEN:
            await self._state.auth.caller(exchange.headers, self._route)
        # A supervisor must get its answer, whatever it adds to the address of a probe.
        if exchange.scope["query_string"] and not self._is_probe:
            read_query(exchange.scope["query_string"], self._query)
        return await self._route.handler(self._call(exchange, _NOBODY, _NO_QUERY, b"", _NO_BODY))

    def _is_heavy(self, call: Call[Any, Any]) -> bool:
        """Whether the call may occupy the store or the event loop for milliseconds."""
        is_heavy = self._route.is_heavy
        return (
            (is_heavy is not None and is_heavy(call))
            or call.body_bytes > _HEAVY_BODY_BYTES
            or (self._is_list and call.query.limit > _HEAVY_LIST)
        )

    def _handle(self, call: Call[Any, Any]) -> Awaitable[HandlerAnswer]:
        """Call the route's handler."""
        return listed(call) if self._is_list else self._route.handler(call)

    def _check_key(self, exchange: Exchange) -> Awaitable[None] | None:
        """Check the key again during a wait or stream; ``None`` if nothing is to be checked."""
        # Thousands of workers and streams may wait: without keys, none of them needs a task.
        return None if self._state.auth.is_still_open() else self._read_key(exchange)

    async def _read_key(self, exchange: Exchange) -> None:
        """Raises ``RequestRefused`` if the key does not suffice any more."""
        with suppress(BackendError):  # the key cannot be checked now: the last result counts
            await self._state.auth.caller(exchange.headers, self._route)

    async def _read(
        self, exchange: Exchange, caller: Caller, place: RequestPlace
    ) -> Call[Any, Any]:
        route, scope = self._route, exchange.scope
        for name, pattern in self._params:
            if pattern.match(scope["path_params"][name]) is None:
                raise RequestRefused(invalid_member(name, parameter_wanted(PARAMETERS[name])))
        text = scope["query_string"]
        query = read_query(text, self._query) if text or route.query else _NO_QUERY
        if route.takes is Takes.NOTHING:
            return self._call(exchange, caller, query, b"", _NO_BODY)
        headers = exchange.headers
        if headers.get(b"content-encoding", b"identity") != b"identity":
            detail = "the body must not be compressed"
            raise RequestRefused(Refusal(code=Code.UNSUPPORTED_MEDIA_TYPE, detail=detail))
        raw = await place.read_body(exchange)
        if self._decoder is None:
            return self._call(exchange, caller, query, raw, raw)
        if not raw and route.takes is Takes.JSON_OR_NOTHING:
            raw = b"{}"
        if len(raw) <= _HEAVY_BODY_BYTES or exchange.tenant is None:
            return self._call(exchange, caller, query, raw, decoded(raw, self._decoder))
        self._state.work.check(exchange.tenant)
        checking = refuse_costly(raw)
        is_checked = False
        until_s = self._state.heavy.patience_ends_s()
        while not is_checked:
            await self._state.heavy.take(exchange.tenant, until_s)
            self._state.work.check(exchange.tenant)
            with self._state.work.measured(exchange.tenant):
                is_checked = next(checking, True) is True
        await self._state.heavy.take(exchange.tenant, until_s)
        with self._state.work.measured(exchange.tenant):
            body = decoded(raw, self._decoder, is_checked=True)
            return self._call(exchange, caller, query, raw, body)

    def _call(
        self, exchange: Exchange, caller: Caller, query: object, raw: bytes, body: object
    ) -> Call[Any, Any]:
        given = exchange.headers.get(b"idempotency-key") if self._route.takes_key else None
        key = None if given is None else checked_key(given)
        above = (
            None
            if telemetry.tracing is None
            else telemetry.checked(exchange.headers.get(b"traceparent"))
        )
        trace_id = None if above is None else above[3:35]
        ids = telemetry.LogIds(exchange.request_id, caller.only, trace_id=trace_id)
        telemetry.LOG_IDS.set(ids)
        return Call(
            services=self._services,
            state=self._state,
            route=self._route,
            tenant=caller.tenant,
            only=caller.only,
            actor=caller.actor,
            role=caller.role,
            key_id=caller.key_id,
            is_for_all=caller.is_for_all,
            params=exchange.scope["path_params"],
            query=query,
            body=body,
            body_bytes=len(raw),
            is_suspect=is_suspect(raw),
            headers=exchange.headers,
            idempotency_key=key,
            request_id=exchange.request_id,
            traceparent=above,
        )

    def _no_store(self) -> Refusal:
        if Code.GATE_UNAVAILABLE in self._route.codes:
            # The key could not be checked, so the gate was not asked.
            return self._state.unavailable(Code.GATE_UNAVAILABLE, GATE_UNAVAILABLE)
        return self._state.unavailable(Code.STORE_UNAVAILABLE, "the store does not answer")

    def _too_slow(self, *, is_reading: bool) -> Refusal:
        if is_reading:
            detail = f"the body did not arrive within {self._first_s:g} s"
            return Refusal(code=Code.REQUEST_TIMEOUT, detail=detail, headers=(CLOSE,))
        return self._state.overloaded("the request took too long")

    def _broken(self, exchange: Exchange, error: Exception) -> Refusal:
        LOGGER.log(
            logging.ERROR,
            "request_failed",
            exc_info=error,
            extra={
                "fields": {
                    "request_id": exchange.request_id,
                    "method": self._route.method,
                    "route": self._route.path,
                    "error": type(error).__name__,
                }
            },
        )
        return Refusal(code=Code.INTERNAL, detail="internal error; the log has the details")


def checked_key(given: bytes) -> str:
    """A caller's idempotency key. Raises ``RequestRefused``.

    Keys with other characters are those of schedules and bulk actions, which no caller can use.
    """
    if _KEY.fullmatch(given) is None:
        wrong = "must be 1 to 255 visible ASCII characters"
        raise RequestRefused(invalid_member("Idempotency-Key", wrong))
    return given.decode("ascii")


async def send_large(state: GatewayState, exchange: Exchange, answer: EncodedAnswer) -> None:
    """Send a large answer within the limits of memory and turns; its tenant pays for it."""
    body, tenant, answers = answer.body, exchange.tenant, state.answers
    if tenant is not None:
        state.work.charge(tenant, len(body) * _ANSWER_S_PER_BYTE)
    if tenant is not None and answers.is_tenant_full(body, tenant):
        after_ms = state.overloaded("").retry_after_ms
        detail = "too many large answers to the tenant are being read"
        code = Code.TENANT_OVERLOADED
        await exchange.refuse(Refusal(code=code, detail=detail, retry_after_ms=after_ms))
    elif answers.take(body, tenant):
        try:
            await answers.turn(len(body), tenant)
            await exchange.answer(answer)
        finally:
            answers.give(body, tenant)
    else:
        await exchange.refuse(state.overloaded("too many large answers are being read"))


def note_refusal(
    services: Services,
    refusal: Refusal,
    *,
    tenant: TenantId,
    workflow_id: str | None,
    key: str | None,
    request_id: str,
    actor: str,
) -> None:
    """Collect the receipt of a start that was refused, if the refusal gets one."""
    outcome = RECEIPTED.get(refusal.code)
    if outcome is not None:
        services.receipts.note(
            Receipt(
                services.clock.now(),
                tenant,
                workflow_id or refusal.workflow_id,
                outcome,
                refusal.limit,
                refusal.active,
                refusal.retry_after_ms,
                key,
                request_id,
                actor,
                services.replicas.replica,
                budget=None if refusal.budget is None else refusal.budget.budget,
            )
        )


async def listed(call: Call[Any, Any]) -> HandlerAnswer:
    """Call the handler of a list. Its cursors are opened and sealed here."""
    cursors, context = call.state.cursors, _list_of(call)
    if call.query.cursor is not None:
        cursor = await cursors.open(call.query.cursor, *context)
        call.query = msgspec.structs.replace(call.query, cursor=cursor)
    answer = await call.route.handler(call)
    page: Any = answer.value if isinstance(answer, Reply) else None
    if page is None or page.cursor is None:
        return answer
    sealed = (await cursors.of(*context)).seal(page.cursor)
    return Reply(msgspec.structs.replace(page, cursor=sealed))


def _list_of(call: Call[Any, Any]) -> tuple[str, ...]:
    """What a cursor is bound to: the route, its path parameters, and the tenant."""
    route = call.route
    is_common = route.scope is RouteScope.DEPLOYMENT
    whose = ALL_TENANTS if is_common else call.only or ALL_TENANTS
    return (route.id, *call.params.values(), whose)


def parameter_pattern(annotated: Any) -> re.Pattern[str]:  # noqa: ANN401 - an annotated type, which has no type
    """The pattern of a path parameter, from its type in ``PARAMETERS``."""
    (meta,) = annotated.__metadata__
    return re.compile(meta.pattern)


def parameter_wanted(annotated: Any) -> str:  # noqa: ANN401 - an annotated type, which has no type
    """What a path parameter must be, in words, from its type in ``PARAMETERS``."""
    (meta,) = annotated.__metadata__
    return f"expected {as_ending(meta.description)}"
