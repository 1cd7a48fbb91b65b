"""Access: cookies, and whether a request comes from the console itself.

A request with a session's cookie must come from the console's own pages: ``Sec-Fetch-Site``, which
browsers send over TLS and to loopback, must be ``same-origin`` (or ``none`` for an address that was
typed), and every change must come with an ``Origin`` that is this host and with the session's form
token.

The cookie is ``HttpOnly`` and ``SameSite=Strict``. Where the login form was sent over TLS, which
its ``Origin`` says, it is ``Secure`` and has the prefix ``__Host-``. Browsers send
``Sec-Fetch-Site`` in secure contexts only, so a request with that header for another host than
loopback must show the prefixed cookie: another site of the same domain cannot set that one.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qsl

from stanchion.console.page import Form, Visitor
from stanchion.core.model import TenantId
from stanchion.gateway.auth import is_loopback_host
from stanchion.gateway.endpoint import parameter_pattern, parameter_wanted
from stanchion.gateway.exchange import Exchange
from stanchion.gateway.problems import Headers, Refusal, RequestRefused, invalid_member
from stanchion.services.sessions import SESSION_MS
from stanchion.services.work import Deadline
from stanchion.wire.identifiers import ALL_TENANTS, TenantName
from stanchion.wire.problems import Code

TOKEN_FIELD: Final = "form_token"  # noqa: S105 - a field's name
THEMES: Final = ("auto", "light", "dark")
_SECURE_COOKIE: Final = "__Host-stanchion"
_COOKIE: Final = "stanchion-session"
_THEME_COOKIE: Final = "stanchion-theme"
_THEME_S: Final = 365 * 24 * 60 * 60
_FIELDS_MAX: Final = 2_000


def cookies(exchange: Exchange) -> dict[str, str]:
    """The cookies of a request.

    Split as browsers write them: cookies of other programs on this host may have any form, and must
    not hide those behind them, as a strict parser would let them.
    """
    text = exchange.headers.get(b"cookie", b"").decode("latin-1")
    pairs = (each.partition("=") for each in text.split(";"))
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def session_token(exchange: Exchange) -> str | None:
    """The session's token, if the request shows one and may use it."""
    site = exchange.headers.get(b"sec-fetch-site")
    if site is not None and site not in {b"same-origin", b"none"}:
        return None
    found = cookies(exchange)
    is_certainly_secure = site is not None and not is_loopback_host(_host(exchange))
    plain = None if is_certainly_secure else found.get(_COOKIE)
    return found.get(_SECURE_COOKIE, plain)


def session_cookie(exchange: Exchange, token: str) -> Headers:
    """The header that gives the browser its session, after a login form was sent."""
    age_s = SESSION_MS // 1000
    common = f"Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict"
    if exchange.headers.get(b"origin", b"").startswith(b"https://"):
        return ((b"set-cookie", f"{_SECURE_COOKIE}={token}; {common}; Secure".encode()),)
    return ((b"set-cookie", f"{_COOKIE}={token}; {common}".encode()),)


def ended_session() -> Headers:
    """The headers that remove the session's cookie."""
    gone = "=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"
    return (
        (b"set-cookie", f"{_SECURE_COOKIE}{gone}; Secure".encode()),
        (b"set-cookie", f"{_COOKIE}{gone}".encode()),
    )


def theme_of(exchange: Exchange) -> str:
    """The theme that the browser has chosen."""
    theme = cookies(exchange).get(_THEME_COOKIE, THEMES[0])
    return theme if theme in THEMES else THEMES[0]


def theme_cookie(theme: str) -> Headers:
    """The header that keeps the chosen theme for a year."""
    value = theme if theme in THEMES else THEMES[0]
    text = f"{_THEME_COOKIE}={value}; Path=/console; Max-Age={_THEME_S}; SameSite=Strict"
    return ((b"set-cookie", text.encode()),)


def refuse_other_site(exchange: Exchange, *, is_login: bool) -> None:
    """Raise ``RequestRefused`` unless a form was sent from a page of this host.

    The login form may come without the headers that browsers send: a program that has the key may
    open a session, and no other site can leave them out.
    """
    host, origin = _host(exchange), exchange.headers.get(b"origin")
    is_own = is_login if origin is None else origin.partition(b"://")[2] == host != b""
    # Browsers send it over TLS and to loopback only: there, a request without it is not theirs.
    is_sent = is_loopback_host(host) or (origin or b"").startswith(b"https://")
    unsent = b"same-origin" if is_login or not is_sent else b""
    if exchange.headers.get(b"sec-fetch-site", unsent) != b"same-origin" or not is_own:
        raise RequestRefused(
            Refusal(code=Code.FORBIDDEN, detail="a change must be sent by a page of this console")
        )


def refuse_without_token(form: Form, visitor: Visitor) -> None:
    """Raise ``RequestRefused`` unless the form carries the session's token."""
    if visitor.form_token is None:
        return
    if not hmac.compare_digest(form.get(TOKEN_FIELD).encode(), visitor.form_token.encode()):
        detail = "the form is not from this session: load the page again, then send it again"
        raise RequestRefused(Refusal(code=Code.FORBIDDEN, detail=detail))


class FormDisplaced(Exception):
    """A form that was being read has given way to a newer one."""


class SessionlessForms:
    """Bounds the forms of callers without a session that are being read.

    A caller without a session can send half a form and stop. So when there are too many, the one
    that has been read for longest gives way: a browser sends a login form in one piece.
    """

    def __init__(self, at_once_max: int) -> None:
        self._at_once_max = at_once_max
        self._reading: dict[Deadline, None] = {}

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """Count a form while it is read. Raises ``FormDisplaced`` if it gives way meanwhile."""
        if len(self._reading) >= self._at_once_max:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.expire()
        self._reading[deadline] = None
        try:
            yield
        except asyncio.CancelledError:
            if deadline not in self._reading and deadline.is_why():
                raise FormDisplaced from None
            raise
        finally:
            self._reading.pop(deadline, None)


def fields(text: str) -> Form:
    """The fields of a form or of a query. Raises ``RequestRefused``."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict")
    except ValueError:  # also not UTF-8
        refusal = invalid_member("", f"must be UTF-8 with {_FIELDS_MAX} fields at most")
        raise RequestRefused(refusal) from None
    return Form(pairs)


def wanted_tenant(visitor: Visitor, named: str) -> str | None:
    """The tenant that is looked at: the visitor's own, or the one that it names.

    Raises ``RequestRefused``.
    """
    if visitor.sees_all:
        if named in {"", ALL_TENANTS}:
            return None
        if _TENANT.match(named) is None:
            raise RequestRefused(invalid_member("tenant", parameter_wanted(TenantName)))
        return TenantId(named)
    if named not in {"", visitor.holder.tenant}:
        raise RequestRefused(Refusal(code=Code.FORBIDDEN, detail="this key is for another tenant"))
    return visitor.holder.tenant


_TENANT: Final = parameter_pattern(TenantName)


def _host(exchange: Exchange) -> bytes:
    return exchange.headers.get(b"host", b"")
