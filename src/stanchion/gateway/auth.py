"""Auth: the caller of a request, and whether the route allows it.

A key has a role and a tenant. A key for one tenant acts for that tenant only, whatever the headers
say. A key for all tenants (``*``) names one with ``X-Stanchion-Tenant``.

Without any key in the deployment every caller may do everything. The server then listens on
loopback only. A page in a browser can send requests to loopback too, so a server without keys
checks where each request comes from before it does anything else, on every path:

* ``Host`` must be a loopback name or address. A page that rebinds its own DNS name to 127.0.0.1
  still sends that name. ``/livez`` and ``/readyz`` also accept any other IP address and an absent
  ``Host``: probes send those, and neither can be the result of DNS rebinding.
* ``Origin``, if given, must be this server's own.
* ``Sec-Fetch-Site``, if given, must be ``same-origin`` or ``none`` (typed into the address bar).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from stanchion.core.model import TenantId
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member
from stanchion.gateway.route import Route, RouteScope
from stanchion.services.keys import KeyHolder, Keys, TooManyLookups
from stanchion.wire.admin import Role
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

DEFAULT_TENANT: Final = TenantId("default")
TENANT_HEADER: Final = b"x-stanchion-tenant"
ANONYMOUS: Final = KeyHolder(Role.ADMIN, ALL_TENANTS, "anonymous")
_TENANT = re.compile(rb"\*|[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_BEARER = re.compile(rb"(?i:bearer) +([ -~\x80-\xff]{1,512})")
_HOSTS_KNOWN_MAX: Final = 64
_EVERY_TENANT: Final = ALL_TENANTS.encode()
_NOT_ALL: Final = MappingProxyType(
    {
        RouteScope.TENANT: "'*' is not possible here: this is about one tenant, so name it",
        RouteScope.ONE_OR_ALL: (
            "'*' is not possible here: name a tenant, or leave it out for all of them"
        ),
        RouteScope.DEPLOYMENT: (
            "'*' is not possible here: this is about the deployment, not its tenants"
        ),
    }
)
"""The answer to ``*`` on routes that do not take it."""


_ONE_UNLESS_NAMED: Final = frozenset({RouteScope.TENANT, RouteScope.TENANT_OR_ALL})
"""Without the header, these are about the key's tenant or the default one."""


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request: its tenant, and the actor's name."""

    tenant: TenantId
    only: TenantId | None
    actor: str
    role: Role = Role.ADMIN
    key_id: str | None = None
    is_for_all: bool = False
    """Whether the key is for all tenants, also if the request names one."""


class Auth:
    """Checks the key and the origin of requests."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._local_hosts: set[bytes] = set()

    async def caller(self, headers: Mapping[bytes, bytes], route: Route) -> Caller:
        """The caller of a request.

        Raises ``RequestRefused``: 401 without a valid key, 403 if the key does not suffice. Raises
        ``BackendError`` if the key cannot be checked.
        """
        # A start must be answered within the gate's budget, so it must not wait for the store here.
        holder = (
            ANONYMOUS
            if self._keys.is_none_known  # as ``configured`` would answer, without a coroutine
            else await self._holder(headers, is_patient=not route.takes_key)
        )
        return authorised(holder, headers.get(TENANT_HEADER), route)

    def is_still_open(self) -> bool:
        """Whether a caller that needed no key needs none now either, as known without a read."""
        return self._keys.is_none_known

    def foreign(self, headers: Mapping[bytes, bytes], *, is_probe: bool = False) -> Refusal | None:
        """On a server without keys, the refusal of a request that another site sent."""
        if self._keys.is_any_known:
            return None
        refusal = self.from_elsewhere(headers, is_probe=is_probe)
        if refusal is not None:
            # Another replica may have created the first key: the next request then finds it.
            self._keys.look_for_any()
        return refusal

    async def _holder(self, headers: Mapping[bytes, bytes], *, is_patient: bool) -> KeyHolder:
        if not await self._keys.configured(is_patient=is_patient):
            return ANONYMOUS
        shown = headers.get(b"authorization")
        if shown is None:
            raise RequestRefused(
                _unauthenticated("this needs a key: Authorization: Bearer <key>", "")
            )
        found = _BEARER.fullmatch(shown)
        try:
            holder = (
                None
                if found is None
                else await self._keys.holder(_text(found[1]), is_patient=is_patient)
            )
        except TooManyLookups as error:
            refusal = Refusal(code=Code.OVERLOADED, detail=str(error), retry_after_ms=1_000)
            raise RequestRefused(refusal) from None
        if holder is None:
            raise RequestRefused(
                _unauthenticated(
                    "this key is unknown, has expired or was revoked", ', error="invalid_token"'
                )
            )
        return holder

    def from_elsewhere(
        self, headers: Mapping[bytes, bytes], *, is_probe: bool = False
    ) -> Refusal | None:
        """The refusal of a request for another host than loopback, or that another site sent."""
        host = headers.get(b"host", b"")
        if host not in self._local_hosts:
            if is_loopback_host(host):
                if len(self._local_hosts) < _HOSTS_KNOWN_MAX:
                    self._local_hosts.add(host)
            elif not is_probe or (host and _address(host) is None):
                return _forbidden(_FOREIGN_HOST)
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != host:
            return _forbidden("without keys, requests from other origins are refused")
        if headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            return _forbidden("without keys, requests that another site makes are refused")
        return None


def authorised(holder: KeyHolder, named: bytes | None, route: Route) -> Caller:
    """The caller that a key's holder is on this route, for the tenant that it names.

    Raises ``RequestRefused``: 403 if the key does not suffice, 422 for an impossible tenant.
    """
    if route.roles and holder.role not in route.roles and holder is not ANONYMOUS:
        raise RequestRefused(_forbidden(f"{_needed(route)}; this key has the role {holder.role}"))
    if route.scope is RouteScope.DEPLOYMENT and holder.tenant != ALL_TENANTS:
        raise RequestRefused(_forbidden(f"{_needed(route)}; this key is for one tenant"))
    if named == _EVERY_TENANT and not route.takes_all:
        raise RequestRefused(invalid_member("X-Stanchion-Tenant", _NOT_ALL[route.scope]))
    only = _only(holder, named)
    if named is None and route.scope in _ONE_UNLESS_NAMED:
        only = only or DEFAULT_TENANT
    is_for_all = holder.tenant == ALL_TENANTS
    tenant = only or DEFAULT_TENANT
    return Caller(tenant, only, holder.actor, holder.role, holder.key_id, is_for_all)


_OWN_SITE: Final = frozenset({b"same-origin", b"none"})
"""Without ``same-site``: that includes other ports of the same host, which may be any program."""
_FOREIGN_HOST: Final = "without keys, only requests for a loopback host are answered"


def _needed(route: Route) -> str:
    """All that a route asks of a key: its roles, the least first, and whether for all tenants."""
    roles = " or ".join(role for role in Role if role in route.roles)
    if route.scope is RouteScope.DEPLOYMENT:
        return f"this needs a key for all tenants ('*') with the role {roles}"
    return f"this needs the role {roles}"


def _text(key: bytes) -> str:
    return key.strip().decode("utf-8", "surrogateescape")


def _only(holder: KeyHolder, named: bytes | None) -> TenantId | None:
    if named is None:
        return None if holder.tenant == ALL_TENANTS else TenantId(holder.tenant)
    if _TENANT.fullmatch(named) is None:
        raise RequestRefused(
            invalid_member(
                "X-Stanchion-Tenant",
                'must be a letter or digit, then letters, digits, "_", "." or "-", 64 at most',
            )
        )
    tenant = named.decode("ascii")
    if holder.tenant == ALL_TENANTS:
        return None if tenant == ALL_TENANTS else TenantId(tenant)
    if tenant != holder.tenant:
        raise RequestRefused(_forbidden("the key is for another tenant than X-Stanchion-Tenant"))
    return TenantId(tenant)


def is_loopback_host(host: bytes) -> bool:
    """Whether a ``Host`` header names this machine itself."""
    name = _host_name(host)
    address = _address(host)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _address(host: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_host_name(host))
    except ValueError:
        return None


def _host_name(host: bytes) -> str:
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] if name.count(":") <= 1 else name


def _forbidden(detail: str) -> Refusal:
    return Refusal(code=Code.FORBIDDEN, detail=detail)


def _unauthenticated(detail: str, extra: str) -> Refusal:
    challenge = f'Bearer realm="stanchion"{extra}'
    return Refusal(
        code=Code.UNAUTHENTICATED,
        detail=detail,
        headers=((b"www-authenticate", challenge.encode()),),
    )
