"""The OpenAPI document and the reference page, generated from the table of routes.

Paths, parameters, bodies, answers and refusals all come from the routes and the wire types. The
copy in ``schema/openapi.json`` is written by ``python -m stanchion.gateway``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec.structs import FieldInfo, fields

from stanchion.core.json_value import JsonObject, JsonValue
from stanchion.core.workflow_file import workflow_json_schema
from stanchion.gateway.problems import STATUS
from stanchion.gateway.route import PARAMETERS, Route, RouteScope, Takes
from stanchion.wire.admin import Role
from stanchion.wire.identifiers import TenantName, TenantOrAll
from stanchion.wire.problems import PROBLEM_TYPE, Code, Problem
from stanchion.wire.runs import FeedLine

_REF: Final = "#/components/schemas/{name}"
_HTTP_CODES: Final = (Code.MALFORMED_REQUEST, Code.URI_TOO_LONG, Code.HEADERS_TOO_LARGE)
_GUARDED_CODES: Final = (
    Code.UNAUTHENTICATED,
    Code.FORBIDDEN,
    Code.INVALID_REQUEST,
    Code.TENANT_OVERLOADED,
    Code.OVERLOADED,
    Code.STORE_UNAVAILABLE,
)
_BODY_CODES: Final = (
    Code.BODY_TOO_LARGE,
    Code.REQUEST_TIMEOUT,
    Code.UNSUPPORTED_MEDIA_TYPE,
    Code.NOT_IMPLEMENTED,
)
_YAML: Final = ("application/yaml", "text/yaml", "application/x-yaml")


def document(routes: Sequence[Route]) -> JsonObject:
    """The whole interface."""
    routes = _sorted(routes)
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = {id(each): schema for each, schema in zip(types, schemas, strict=True)}
    paths: dict[str, JsonValue] = {}
    for route in routes:
        methods = paths.setdefault(route.path, {})
        assert isinstance(methods, dict)
        methods[route.method.lower()] = _operation(route, schema_of)
    whole: JsonObject = {
        "openapi": "3.1.0",
        "info": {
            "title": "Stanchion",
            "version": "v1",
            "description": "A multi-tenant control plane for AI-agent workflow runs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Workflow": _workflow()},
            "responses": {
                _refusal_name(status, codes): _refusal(status, codes)
                for route in routes
                for status, codes in _by_status(route).items()
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. Not asked for while the deployment has none.",
                }
            },
        },
    }
    portable: JsonObject = _portable(whole)
    return portable


def _sorted(routes: Iterable[Route]) -> list[Route]:
    return sorted(routes, key=lambda route: (route.path, route.method))


def text(routes: Sequence[Route]) -> str:
    """The document as the file that is committed."""
    return msgspec.json.format(msgspec.json.encode(document(routes)), indent=2).decode() + "\n"


def refusals(route: Route) -> tuple[Code, ...]:
    """Every code by which the route may refuse, by status."""
    codes = {*route.codes, *_HTTP_CODES}
    if route.scope is not RouteScope.OPEN:
        codes.update(_GUARDED_CODES)
    if route.takes is not Takes.NOTHING:
        codes.update(_BODY_CODES)
    if route.takes in {Takes.JSON, Takes.JSON_OR_NOTHING}:
        codes.add(Code.MALFORMED_JSON)
    return tuple(sorted(codes, key=lambda code: (STATUS[code], code)))


def _types(routes: Iterable[Route]) -> list[Any]:
    # By identity: annotated types do not hash equal, and each is declared once.
    found = {id(each): each for each in (Problem, FeedLine, TenantOrAll, TenantName)}
    for route in routes:
        answers = (route.answer, route.dry_answer, route.queued_answer)
        for each in (route.body, *answers, *_parameter_types(route)):
            if each is not None:
                found[id(each)] = each
    return list(found.values())


def _parameter_types(route: Route) -> Iterable[Any]:
    yield from (PARAMETERS[name] for name in _names(route))
    if route.query is not None:
        yield from (field.type for field in _fields(route.query))


def _names(route: Route) -> list[str]:
    return re.findall(r"\{(\w+)\}", route.path)


@cache  # types are compared by identity, so they must be the same objects at each call
def _fields(struct: Any) -> tuple[FieldInfo, ...]:  # noqa: ANN401 - any struct type
    return fields(struct)


def _operation(route: Route, schema_of: dict[int, dict[str, Any]]) -> JsonObject:
    shown: JsonObject = {
        "operationId": route.id,
        "summary": route.summary,
        "tags": [_tag(route)],
        "parameters": _parameters(route, schema_of),
        "responses": _responses(route, schema_of),
    }
    if route.scope is not RouteScope.OPEN:
        shown["security"] = [{}, {"key": []}]
        roles: list[JsonValue] = [str(role) for role in sorted(route.roles)]
        shown["x-roles"] = roles
        shown["x-reach"] = route.scope.value
    body = _body(route, schema_of)
    return {**shown, "requestBody": body} if body is not None else shown


def _tag(route: Route) -> str:
    parts = [part for part in route.path.split("/") if part and part not in {"v1", "admin"}]
    return "runs" if route.path.endswith("/runs") else parts[0].removesuffix(".json")


def _parameters(route: Route, schema_of: dict[int, dict[str, Any]]) -> list[JsonValue]:
    shown: list[JsonValue] = [
        {"name": name, "in": "path", "required": True, "schema": schema_of[id(PARAMETERS[name])]}
        for name in _names(route)
    ]
    if route.query is not None:
        shown.extend(
            {
                "name": field.encode_name,
                "in": "query",
                "required": field.required,
                "schema": _without_null(schema_of[id(field.type)]),
            }
            for field in _fields(route.query)
        )
    if route.scope is not RouteScope.OPEN:
        is_any = route.takes_all
        shown.append(
            {
                "name": "X-Stanchion-Tenant",
                "in": "header",
                "description": "For whom, without keys or with a key for all tenants.",
                "schema": schema_of[id(TenantOrAll if is_any else TenantName)],
            }
        )
    if route.takes_key:
        shown.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The same key and request give the same run, job or bulk action.",
                "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
            }
        )
    if route.path == "/v1/events":
        shown.append(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "Resume after this event.",
                "schema": {"type": "string"},
            }
        )
    return shown


def _without_null(schema: dict[str, Any]) -> JsonValue:
    """A query parameter is absent or has a value: there is no way to write null."""
    choices = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return choices[0] if len(choices) == 1 else schema


def _body(route: Route, schema_of: dict[int, dict[str, Any]]) -> JsonObject | None:
    match route.takes:
        case Takes.NOTHING:
            return None
        case Takes.TEXT:
            schema: JsonObject = {"$ref": _REF.format(name="Workflow")}
            kinds = ("application/json", *_YAML)
            return {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}
        case Takes.JSON | Takes.JSON_OR_NOTHING:
            content: JsonObject = {"application/json": {"schema": schema_of[id(route.body)]}}
            return {"required": route.takes is Takes.JSON, "content": content}


def _responses(route: Route, schema_of: dict[int, dict[str, Any]]) -> JsonObject:
    shown: dict[int, JsonObject] = {}
    contents = {status: _content(route, schema_of) for status in route.statuses}
    if route.queued_answer is not None:
        queued: JsonObject = {"schema": schema_of[id(route.queued_answer)]}
        contents[HTTPStatus.ACCEPTED] = {"application/json": queued}
    for status, content in contents.items():
        shown[status] = {"description": HTTPStatus(status).phrase, "content": content}
        if route.takes_key:
            shown[status]["headers"] = {
                "Idempotency-Replayed": {
                    "description": "`true`: an earlier request with the same key created it.",
                    "schema": {"type": "string", "enum": ["true"]},
                }
            }
    for status, codes in _by_status(route).items():
        shown[status] = {"$ref": f"#/components/responses/{_refusal_name(status, codes)}"}
    return {str(status): shown[status] for status in sorted(shown)}


def _by_status(route: Route) -> dict[int, list[Code]]:
    found: dict[int, list[Code]] = {}
    for code in refusals(route):
        found.setdefault(STATUS[code], []).append(code)
    return found


def _refusal_name(status: int, codes: Sequence[Code]) -> str:
    return ".".join((str(status), *codes))


def _content(route: Route, schema_of: dict[int, dict[str, Any]]) -> JsonObject:
    if route.answer is not None:
        answers = [each for each in (route.answer, route.dry_answer) if each is not None]
        schemas: list[JsonValue] = [schema_of[id(each)] for each in answers]
        schema: JsonValue = schemas[0]
        if len(schemas) > 1:
            schema = {"anyOf": schemas}
        return {"application/json": {"schema": schema}}
    kind = "text/event-stream" if route.path == "/v1/events" else "text/plain"
    return {kind: {"schema": {"type": "string"}}}


def _refusal(status: int, codes: Sequence[Code]) -> JsonObject:
    schema: JsonObject = {
        "allOf": [
            {"$ref": _REF.format(name="Problem")},
            {"properties": {"code": {"enum": [str(code) for code in codes]}}},
        ]
    }
    shown: JsonObject = {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": {PROBLEM_TYPE: {"schema": schema}},
    }
    if status in {STATUS[Code.JOB_THROTTLED], STATUS[Code.OVERLOADED]}:
        seconds: JsonObject = {"type": "integer", "minimum": 1, "maximum": 30}
        shown["headers"] = {"Retry-After": {"schema": seconds}}
    return shown


def _workflow() -> JsonObject:
    schema = workflow_json_schema()
    del schema["$schema"]
    # The path names the workflow, so the file need not.
    schema["required"] = [name for name in _list(schema["required"]) if name != "id"]
    return schema


def _list(value: JsonValue) -> list[JsonValue]:
    assert isinstance(value, list)
    return value


def _portable(value: Any) -> Any:  # noqa: ANN401 - any part of the document
    r"""The same with ``\Z``, which only Python knows, as ``$``."""
    if isinstance(value, dict):
        return {
            key: each.replace(r"\Z", "$")
            if key == "pattern" and isinstance(each, str)
            else _portable(each)
            for key, each in value.items()
        }
    return [_portable(each) for each in value] if isinstance(value, list) else value


_SCOPE: Final[Mapping[RouteScope, str]] = MappingProxyType(
    {
        RouteScope.OPEN: "no tenant",
        RouteScope.TENANT: "one tenant",
        RouteScope.TENANT_OR_ALL: "one tenant, or all with `*`",
        RouteScope.ONE_OR_ALL: "one tenant or all",
        RouteScope.DEPLOYMENT: "the deployment",
    }
)
_MEANS: Final[Mapping[Code, str]] = MappingProxyType(
    {
        Code.MALFORMED_JSON: "The body is not JSON, or not UTF-8.",
        Code.MALFORMED_REQUEST: "Not HTTP, or a header that must be given once is repeated.",
        Code.UNAUTHENTICATED: "No key, or an unknown, expired or revoked one.",
        Code.FORBIDDEN: "The role or tenant of the key does not allow it.",
        Code.NOT_FOUND: "It does not exist, or belongs to another tenant.",
        Code.METHOD_NOT_ALLOWED: "The path does not have this method; `Allow` lists those it has.",
        Code.REQUEST_TIMEOUT: "The request did not arrive in time.",
        Code.CONFLICT: "An earlier decision conflicts, or it cannot be done now.",
        Code.UPGRADE_UNFINISHED: "An older replica would break it: see `remedy`.",
        Code.BODY_TOO_LARGE: "More than 1 MiB.",
        Code.URI_TOO_LONG: "A path over 4 KiB, or a query over 8 KiB.",
        Code.UNSUPPORTED_MEDIA_TYPE: "A compressed body.",
        Code.NOT_IMPLEMENTED: "A transfer coding other than chunked.",
        Code.IDEMPOTENCY_MISMATCH: "The key was used for another request.",
        Code.INVALID_INPUT: "The workflow's schema does not accept the input.",
        Code.INVALID_REQUEST: "A member, parameter or header is invalid.",
        Code.INVALID_WORKFLOW: "The workflow file has faults, or does not fit its sub-workflows.",
        Code.MAX_CONCURRENT_RUNS_REACHED: "The tenant has as many unfinished runs as its cap.",
        Code.BUDGET_EXHAUSTED: "The run would reserve more than is left of a budget.",
        Code.QUEUE_FULL: "The tenant is full, and as many runs wait as its `queue_max` allows.",
        Code.JOB_THROTTLED: "The tenant submits jobs faster than its rate limit.",
        Code.TENANT_OVERLOADED: "The tenant uses more of the server than its share.",
        Code.HEADERS_TOO_LARGE: "More than 100 headers, or more than 32 KiB of them.",
        Code.INTERNAL: "An internal error. The log has it, under the request id.",
        Code.DRAINING: "The server is shutting down. Another replica may accept the request.",
        Code.GATE_BUSY: "Other callers held the tenant's admission lock for the whole wait budget.",
        Code.GATE_UNAVAILABLE: "The store or the lock store did not answer.",
        Code.LIMIT_CHECK_FAILED: "The caller held the admission lock, and the store failed.",
        Code.LOCKS_UNAVAILABLE: "The lock backend does not answer, or there is none.",
        Code.OVERLOADED: "Too much is under way.",
        Code.STORE_UNAVAILABLE: "The store does not answer.",
    }
)


def route_table(routes: Sequence[Route]) -> str:
    """The table of routes: summary, scope and roles of each."""
    rows = ["| request | does | about | roles |", "|---|---|---|---|"]
    for route in _sorted(routes):
        request = f"`{route.method} {route.path}`"
        rows.append(f"| {request} | {route.summary} | {_SCOPE[route.scope]} | {_roles(route)} |")
    return "\n".join(rows)


def code_table() -> str:
    """The table of codes, by status."""
    rows = ["| status | code | means |", "|---|---|---|"]
    rows += [
        f"| {STATUS[code]} | `{code}` | {_MEANS[code]} |"
        for code in sorted(Code, key=lambda code: (STATUS[code], code))
    ]
    return "\n".join(rows)


def _roles(route: Route) -> str:
    return ", ".join(role for role in Role if role in route.roles) or "no key needed"
