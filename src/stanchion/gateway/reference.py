"""The tables of the HTTP reference, from the same declarations that serve the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from stanchion.gateway.problems import STATUS
from stanchion.gateway.route import Reach, Route
from stanchion.wire.admin import Role
from stanchion.wire.problems import Code

__all__ = ["code_table", "route_table"]

_REACH: Final[Mapping[Reach, str]] = MappingProxyType(
    {
        Reach.OPEN: "nobody",
        Reach.TENANT: "one tenant",
        Reach.ONE_OR_ALL: "one tenant or all",
        Reach.DEPLOYMENT: "the deployment",
    }
)
_MEANS: Final[Mapping[Code, str]] = MappingProxyType(
    {
        Code.MALFORMED_JSON: "The body is not JSON, or not UTF-8.",
        Code.MALFORMED_REQUEST: "Not HTTP, or a header that must be given once is repeated.",
        Code.UNAUTHENTICATED: "No key, or none that is known (any more).",
        Code.FORBIDDEN: "The key's role or tenant is not enough.",
        Code.NOT_FOUND: "There is no such thing, or it is another tenant's.",
        Code.METHOD_NOT_ALLOWED: "`Allow` says which methods the path has.",
        Code.REQUEST_TIMEOUT: "The request did not arrive in time.",
        Code.CONFLICT: "It was decided otherwise before, or cannot be done now.",
        Code.BODY_TOO_LARGE: "More than 1 MiB.",
        Code.URI_TOO_LONG: "A path over 4 KiB, or a query over 8 KiB.",
        Code.UNSUPPORTED_MEDIA_TYPE: "A compressed body.",
        Code.IDEMPOTENCY_MISMATCH: "The key was used for another request.",
        Code.INVALID_INPUT: "The workflow's schema does not accept the input.",
        Code.INVALID_REQUEST: "A member, parameter or header cannot be what it is.",
        Code.INVALID_WORKFLOW: "The workflow file has faults, or does not fit its sub-workflows.",
        Code.MAX_CONCURRENT_RUNS_REACHED: "The tenant has as many unfinished runs as it may.",
        Code.JOB_THROTTLED: "The tenant submits jobs faster than it may.",
        Code.TENANT_OVERLOADED: "The tenant uses more of the server than its share.",
        Code.HEADERS_TOO_LARGE: "More than 100 headers, or more than 32 KiB of them.",
        Code.INTERNAL: "A fault of our own. The log has it, under the request id.",
        Code.DRAINING: "The server is shutting down. Another replica may take it.",
        Code.GATE_BUSY: "Others had the tenant's admission lock for the whole wait budget.",
        Code.GATE_UNAVAILABLE: "The store or the lock store is silent.",
        Code.LIMIT_CHECK_FAILED: "The admission lock was held, and the store failed behind it.",
        Code.LOCKS_UNAVAILABLE: "The lock backend does not answer, or there is none.",
        Code.OVERLOADED: "Too much is under way.",
        Code.STORE_UNAVAILABLE: "The store does not answer.",
    }
)


def route_table(routes: Sequence[Route]) -> str:
    """Every route: what it does, for whom, and who may."""
    rows = ["| request | does | about | roles |", "|---|---|---|---|"]
    for route in sorted(routes, key=lambda route: (route.path, route.method)):
        request = f"`{route.method} {route.path}`"
        rows.append(f"| {request} | {route.says} | {_REACH[route.reach]} | {_roles(route)} |")
    return "\n".join(rows)


def code_table() -> str:
    """Every code, by status."""
    rows = ["| status | code | means |", "|---|---|---|"]
    rows += [
        f"| {STATUS[code]} | `{code}` | {_MEANS[code]} |"
        for code in sorted(Code, key=lambda code: (STATUS[code], code))
    ]
    return "\n".join(rows)


def _roles(route: Route) -> str:
    return ", ".join(role for role in Role if role in route.roles) or "no key needed"
