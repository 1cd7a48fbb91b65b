"""The console's app: from a request under ``/console`` to a page.

The order is always the same: head and origin, load, session, form, role, page. Only the forms for
the login and the theme are read without a session, a few small ones at a time. A refusal becomes a
page that says why. Cookies and the checks of where a request comes from are in ``access``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, unquote

from stanchion.console import access
from stanchion.console.api import Api, route_named
from stanchion.console.live import Pulse, Shared
from stanchion.console.page import (
    DONE,
    Action,
    ConsolePage,
    Data,
    Elsewhere,
    Form,
    Redirect,
    View,
    Visitor,
)
from stanchion.console.render import Assets, Templates, time_tag
from stanchion.core.model import TenantId
from stanchion.gateway.app import Gateway, Paths
from stanchion.gateway.auth import ANONYMOUS, DEFAULT_TENANT
from stanchion.gateway.endpoint import send_large
from stanchion.gateway.exchange import PART_BYTES, ClientGone, EncodedAnswer, Exchange
from stanchion.gateway.load import RequestPlace, stream_counted
from stanchion.gateway.problems import (
    CLOSE,
    Headers,
    Refusal,
    RequestRefused,
    invalid_member,
    overdrawn,
    retry_after_s,
)
from stanchion.gateway.route import RouteScope, Stream
from stanchion.gateway.routes.events import EVENT_STREAM
from stanchion.ports.errors import BackendError
from stanchion.ports.records import BadCursor
from stanchion.services.keys import TooManyLookups
from stanchion.services.log import LOGGER
from stanchion.services.sessions import Sessions
from stanchion.services.work import Deadline, TenantOverloaded
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

_PREFIX: Final = "/console"
_HTML: Final = b"text/html; charset=utf-8"
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    b" form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Not no-referrer: then browsers send "Origin: null" with a form, and it could not be checked.
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
_FOREVER: Final = b"public, max-age=31536000, immutable"
_LOGIN: Final = f"{_PREFIX}/login"
_THEME: Final = f"{_PREFIX}/theme"
_TENANT_FIELD: Final = "tenant"
_SESSIONLESS_FORM_BYTES: Final = 32 * 1024
"""Room for a key, and for the address of the page that is shown after the login."""
_SESSIONLESS_FORMS_MAX: Final = 128
"""Forms of callers without a session that are read at a time."""


class Console:
    """The ASGI app of the console, beside the API in the same server."""

    def __init__(
        self, gateway: Gateway, pages: Sequence[ConsolePage], actions: Sequence[Action]
    ) -> None:
        self._services = services = gateway.services
        self._state = state = gateway.state
        self._gateway = gateway
        self.sessions = Sessions(
            state.keys, documents=services.store, clock=services.clock, entropy=services.entropy
        )
        self.pulse = Pulse(services, state)
        self._shared = Shared(services.clock.moment)
        self._assets = Assets()
        self._templates = Templates(self._assets)
        self._pages = tuple(pages)
        by_path: dict[str, dict[str, ConsolePage | Action]] = {}
        for page in self._pages:
            by_path.setdefault(page.path, {})["GET"] = page
        for action in actions:
            by_path.setdefault(action.path, {})["POST"] = action
        self._paths = Paths(by_path)
        self._sessionless = access.SessionlessForms(_SESSIONLESS_FORMS_MAX)
        self._placeholder = f"form-token-{secrets.token_hex(16)}"
        """Stands for the form token in pages that viewers share."""
        self._observe = {
            method: gateway.observer(method, _PREFIX) for method in ("GET", "POST", "OTHER")
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer one request."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        observe = self._observe.get(method, self._observe["OTHER"])
        exchange = Exchange(self._state.options, scope, receive, send, observe)
        path = scope["path"].rstrip("/")
        if not path.startswith(_PREFIX):
            await self._at_root(exchange)
            return
        found = exchange.flaw() or self._state.auth.foreign(exchange.headers)
        if found is not None:
            await exchange.refuse(found)
        elif path.startswith(f"{_PREFIX}/static/"):
            await self._send_asset(exchange, path, method)
        elif path == f"{_PREFIX}/live" and method == "GET":
            await self._stream(exchange)
        else:
            await self._answer(exchange, path, method)

    async def _at_root(self, exchange: Exchange) -> None:
        """Send a browser that opens the server's address to the console."""
        is_page = b"text/html" in exchange.headers.get(b"accept", b"")
        if exchange.scope["path"] == "/" and exchange.scope["method"] == "GET" and is_page:
            await exchange.answer(_redirect(Redirect(_PREFIX)))
        else:
            await self._gateway.nowhere(exchange.scope, exchange.receive, exchange.send)

    def close(self) -> None:
        """Stop listening to bells."""
        self.pulse.close()

    # ── Static files and the event stream ─────────────────────────────────────────────────────────

    async def _send_asset(self, exchange: Exchange, path: str, method: str) -> None:
        digest, _, name = path.removeprefix(f"{_PREFIX}/static/").partition("/")
        asset = self._assets.find(digest, name)
        if asset is None or method != "GET":
            refusal = Refusal(code=Code.NOT_FOUND, detail="there is nothing at this path")
            await exchange.refuse(refusal)
            return
        headers = [
            (b"content-type", asset.content_type),
            (b"cache-control", _FOREVER),
            (b"vary", b"accept-encoding"),
            *_HEADERS,
        ]
        body = asset.body
        if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            body = asset.packed
            headers.append((b"content-encoding", b"gzip"))
        await exchange.answer(EncodedAnswer(200, body, headers), is_private=False)

    async def _stream(self, exchange: Exchange) -> None:
        try:
            visitor = await self._visitor(exchange)
            if visitor is None:
                await exchange.refuse(Refusal(code=Code.UNAUTHENTICATED, detail="log in first"))
                return
            tenant = access.wanted_tenant(visitor, _query(exchange).get(_TENANT_FIELD))
            counted = TenantId(tenant or ALL_TENANTS)
            await self.pulse.alarms()
            with stream_counted(self._state.load, counted):
                stream = Stream(self.pulse.events(tenant), EVENT_STREAM, counted)
                await exchange.stream(stream, lambda: self._check(exchange))
        except ClientGone:
            return
        except RequestRefused as refused:
            if not exchange.is_begun:
                await exchange.refuse(refused.refusal)
        except BackendError:
            if not exchange.is_begun:
                detail = "the store does not answer"
                await exchange.refuse(self._state.unavailable(Code.STORE_UNAVAILABLE, detail))

    async def _check(self, exchange: Exchange) -> None:
        """End a stream whose session has ended. A store that fails does not end it."""
        try:
            visitor = await self._visitor(exchange)
        except BackendError:
            return
        if visitor is None:
            raise RequestRefused(Refusal(code=Code.UNAUTHENTICATED, detail="the session has ended"))

    # ── Pages and actions ─────────────────────────────────────────────────────────────────────────

    async def _answer(self, exchange: Exchange, path: str, method: str) -> None:
        answer: EncodedAnswer
        try:
            with RequestPlace(self._state) as place:
                deadline = self._state.deadlines.begin(self._state.options.request_deadline_s)
                try:
                    answer = await self._handle(exchange, path, method, place, deadline)
                except asyncio.CancelledError:
                    if not deadline.is_why():
                        raise
                    # A form that has not come: its connection would wait for the rest.
                    refusal = self._state.unavailable(
                        Code.OVERLOADED, "this took too long", (CLOSE,)
                    )
                    raise RequestRefused(refusal) from None
                finally:
                    deadline.end()
        except ClientGone:
            return
        except access.FormDisplaced:
            answer = _displaced(self._state.overloaded(""))
        except Elsewhere as elsewhere:
            answer = _redirect(Redirect(elsewhere.url))
        except RequestRefused as refused:
            answer = await self._problem(exchange, refused.refusal)
        except TooManyLookups as error:
            answer = await self._problem(exchange, self._state.overloaded(str(error)))
        except BackendError:
            detail = "the store does not answer"
            refusal = self._state.unavailable(Code.STORE_UNAVAILABLE, detail)
            answer = await self._problem(exchange, refusal)
        except Exception as error:  # noqa: BLE001 - answered with 500, and logged in full
            LOGGER.log(
                logging.ERROR,
                "request_failed",
                exc_info=error,
                extra={"fields": {"request_id": exchange.request_id, "route": path}},
            )
            refusal = Refusal(code=Code.INTERNAL, detail="internal error; the log has the details")
            answer = await self._problem(exchange, refusal)
        if len(answer.body) <= PART_BYTES:
            await exchange.answer(answer)
        else:
            await send_large(self._state, exchange, answer)

    async def _handle(
        self, exchange: Exchange, path: str, method: str, place: RequestPlace, deadline: Deadline
    ) -> EncodedAnswer:
        if method not in {"GET", "POST"}:
            raise RequestRefused(
                Refusal(
                    code=Code.METHOD_NOT_ALLOWED,
                    detail="this path allows GET and POST",
                    headers=((b"allow", b"GET, HEAD, POST"),),
                )
            )
        is_form = method == "POST"
        if is_form:
            access.refuse_other_site(exchange, is_login=path == _LOGIN)
        if is_form and path == _THEME:
            return self._set_theme(await self._sessionless_form(exchange, place, deadline))
        visitor = await self._visitor(exchange)
        if path == _LOGIN:
            form = await self._sessionless_form(exchange, place, deadline) if is_form else Form()
            return await self._login(exchange, form, visitor, is_sent=is_form)
        if visitor is None:
            return await self._to_login(exchange, path, method)
        if not visitor.sees_all:
            exchange.tenant = TenantId(visitor.holder.tenant)
            place.take_for(exchange.tenant)
        form = await self._form(exchange, place, deadline) if is_form else Form()
        if is_form:
            access.refuse_without_token(form, visitor)
            if path == f"{_PREFIX}/logout":
                return await self._logout(exchange)
        found = self._paths.find(path)
        target = None if found is None else found[0].get(method)
        if found is None or target is None:
            raise RequestRefused(
                Refusal(code=Code.NOT_FOUND, detail="there is no such page in this console")
            )
        view = self._view(exchange, visitor, path, found[1], form, target)
        if isinstance(target, Action):
            return await self._act(exchange, target, view)
        return await self._show(exchange, target, view)

    def _view(
        self,
        exchange: Exchange,
        visitor: Visitor,
        path: str,
        params: Mapping[str, str],
        form: Form,
        target: ConsolePage | Action,
    ) -> View:
        query = _query(exchange)
        tenant = access.wanted_tenant(visitor, form.get(_TENANT_FIELD) or query.get(_TENANT_FIELD))
        page = target.page if isinstance(target, Action) else target
        if tenant is None and page.is_of_tenant and isinstance(target, ConsolePage):
            tenant = DEFAULT_TENANT
        api = Api(
            self._services,
            self._state,
            visitor.holder,
            tenant=tenant,
            request_id=exchange.request_id,
        )
        if target.needs is not None and not api.allows(target.needs):
            raise RequestRefused(_forbidden(target.needs, visitor))
        return View(
            api=api,
            visitor=visitor,
            now=self._services.clock.now(),
            path=path,
            params=params,
            query=query,
            form=form,
            tenant=tenant,
            samples=self.pulse.samples if api.allows("GET /v1/admin/admission") else (),
        )

    async def _act(self, exchange: Exchange, action: Action, view: View) -> EncodedAnswer:
        try:
            done = await action.act(view)
        except RequestRefused as refused:
            view.problem = refused.refusal
        except TenantOverloaded as over:
            view.problem = overdrawn(over)
        except BackendError:
            detail = "the store does not answer, so it is not known whether this was done"
            view.problem = self._state.unavailable(Code.STORE_UNAVAILABLE, detail)
        else:
            if isinstance(done, Redirect):
                return _redirect(done)
            return await self._show(exchange, action.page, view, done.data)
        view.status = view.problem.status
        if view.problem.status == 404 or (  # noqa: PLR2004 - not found
            action.page.needs is not None and not view.api.allows(action.page.needs)
        ):
            raise RequestRefused(view.problem)
        return await self._show(exchange, action.page, view)

    async def _show(
        self, exchange: Exchange, page: ConsolePage, view: View, more: Data | None = None
    ) -> EncodedAnswer:
        is_refresh = exchange.headers.get(b"hx-request") == b"true" and not view.form.pairs
        if is_refresh:
            holder = view.visitor.holder
            key = (
                page.path,
                tuple(view.params.items()),
                exchange.scope["query_string"],
                view.tenant,
                holder.role,
                holder.tenant,
                holder is ANONYMOUS,
            )
            status, text = await self._shared.page(
                key, lambda: self._rendered(exchange, page, view, layout="fragment.html")
            )
        else:
            status, text = await self._rendered(
                exchange, page, view, layout="layout.html", more=more
            )
        text = text.replace(self._placeholder, view.visitor.form_token or "")
        return _html(status, text)

    async def _rendered(
        self,
        exchange: Exchange,
        page: ConsolePage,
        view: View,
        *,
        layout: str,
        more: Data | None = None,
    ) -> tuple[int, str]:
        tenant = None if view.visitor.sees_all else view.tenant
        # Before the data is read: a change while it is read makes the page out of date.
        seen = self.pulse.version(tenant)
        view.alarms = await self.pulse.alarms()
        try:
            data = await page.load(view) | (more or {})
        except BadCursor:
            refusal = invalid_member("cursor", "not a cursor of this list: go to the first page")
            raise RequestRefused(refusal) from None
        except TenantOverloaded as over:
            raise RequestRefused(overdrawn(over)) from None
        common = await self._common(exchange, view.visitor, view, layout)
        template = await self._templates.get(page.template)
        title = data.get("title", page.title)
        shown = {**common, "page": page, "seen": seen, **data, "title": title}
        # A tenant pays for the rendering of its pages, as for the rest of its work. The parts of a
        # large page are made in turn with the work of others.
        parts = template.generate(shown)
        whole = await self._state.work.done_each(
            None if tenant is None else TenantId(tenant), str, parts
        )
        return view.status, "".join(whole)

    async def _common(
        self, exchange: Exchange, visitor: Visitor | None, view: View | None, layout: str
    ) -> dict[str, Any]:
        now = self._services.clock.now()
        groups = ("Now", "Work", "Locks", "Repair", "System")
        nav: dict[str, list[ConsolePage]] = {group: [] for group in groups}
        if view is not None:
            for page in self._pages:
                if page.nav is not None and (page.needs is None or view.api.allows(page.needs)):
                    nav[page.nav.group].append(page)
        tenant = None if view is None else view.tenant
        return {
            "layout": layout,
            "view": view,
            "visitor": visitor,
            "tenant": tenant,
            "nav": {group: found for group, found in nav.items() if found},
            "alarms": () if visitor is None else await self.pulse.alarms(),
            "theme": access.theme_of(exchange),
            "form_token": self._placeholder,
            "did": None if view is None else _done(view.query),
            "now": now,
            "time": lambda at, none="–": time_tag(at, now, none),
            "is_keyless": visitor is not None and visitor.holder is ANONYMOUS,
        }

    async def _problem(self, exchange: Exchange, refusal: Refusal) -> EncodedAnswer:
        """A page that says why there is no other page."""
        try:
            visitor = await self._visitor(exchange)
        except BackendError:
            visitor = None
        view = None if visitor is None else self._bare_view(exchange, visitor)
        layout = (
            "fragment.html" if exchange.headers.get(b"hx-request") == b"true" else "layout.html"
        )
        common = await self._common(exchange, visitor, view, layout)
        template = await self._templates.get("problem.html")
        title = _TITLES.get(refusal.status, "Not possible")
        text = template.render({**common, "page": None, "title": title, "refusal": refusal})
        token = None if visitor is None else visitor.form_token
        more = [*refusal.headers]
        if refusal.retry_after_ms is not None:
            seconds = retry_after_s(refusal.retry_after_ms)
            more.append((b"retry-after", str(seconds).encode()))
        return _html(refusal.status, text.replace(self._placeholder, token or ""), more)

    def _bare_view(self, exchange: Exchange, visitor: Visitor) -> View:
        """The view of a page that says why there is no other page: its address may be wrong."""
        query, tenant = Form(), None if visitor.sees_all else visitor.holder.tenant
        with suppress(RequestRefused):
            query = _query(exchange)
            tenant = access.wanted_tenant(visitor, query.get(_TENANT_FIELD))
        services, state = self._services, self._state
        api = Api(services, state, visitor.holder, tenant=tenant, request_id=exchange.request_id)
        path = exchange.scope["path"]
        return View(api, visitor, services.clock.now(), path, {}, query, Form(), tenant)

    # ── Sessions ──────────────────────────────────────────────────────────────────────────────────

    async def _visitor(self, exchange: Exchange) -> Visitor | None:
        """Who sends the request; ``None`` without a session. Raises ``BackendError``."""
        if not await self._state.keys.configured():
            return Visitor(ANONYMOUS, None)
        token = access.session_token(exchange)
        session = None if token is None else await self.sessions.find(token)
        return None if session is None else Visitor(session.holder, session.form_token)

    async def _sessionless_form(
        self, exchange: Exchange, place: RequestPlace, deadline: Deadline
    ) -> Form:
        """A form that needs no session. Few are read at a time: the oldest gives way."""
        with self._sessionless.reading(deadline):
            return await self._form(exchange, place, deadline, bytes_max=_SESSIONLESS_FORM_BYTES)

    async def _form(
        self,
        exchange: Exchange,
        place: RequestPlace,
        deadline: Deadline,
        *,
        bytes_max: int | None = None,
    ) -> Form:
        kind = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/x-www-form-urlencoded":
            detail = "a form must be sent as application/x-www-form-urlencoded"
            raise RequestRefused(Refusal(code=Code.UNSUPPORTED_MEDIA_TYPE, detail=detail))
        options, deadlines = self._state.options, self._state.deadlines
        deadlines.extend(deadline, options.body_timeout_s)
        raw = await place.read_body(exchange, bytes_max=bytes_max)
        deadlines.extend(deadline, options.request_deadline_s)
        return access.fields(raw.decode("latin-1"))

    async def _login(
        self, exchange: Exchange, form: Form, visitor: Visitor | None, *, is_sent: bool
    ) -> EncodedAnswer:
        """The login form, or the start of a session with the key that was typed."""
        following = _own_path((form if is_sent else _query(exchange)).get("next"))
        if visitor is not None and not is_sent:
            return _redirect(Redirect(following))
        wrong: str | None = None
        if is_sent and visitor is None:
            token = await self.sessions.open(form.get("key").strip())
            if token is not None:
                return _redirect(Redirect(following), access.session_cookie(exchange, token))
            wrong = "This key is not known, or it has been revoked or has expired."
        common = await self._common(exchange, None, None, "layout.html")
        template = await self._templates.get("login.html")
        data = {**common, "page": None, "title": "Log in", "next": following, "wrong": wrong}
        return _html(200 if wrong is None else 403, template.render(data))

    async def _to_login(self, exchange: Exchange, path: str, method: str) -> EncodedAnswer:
        query = exchange.scope["query_string"].decode("latin-1")
        here = f"{path}?{query}" if query else path
        if method != "GET":
            here = self._page_of_form(exchange)
        if exchange.headers.get(b"hx-request") == b"true":
            # A page that is fetched again after its session has ended: the script loads it again.
            return _html(401, "")
        if exchange.headers.get(b"sec-fetch-site") == b"cross-site":
            # The browser keeps the cookie back when a link on another site was followed. Loading
            # the page once more, from here, shows it.
            template = await self._templates.get("again.html")
            return _html(200, template.render({"here": here, "title": "Stanchion"}))
        return _redirect(Redirect(f"{_LOGIN}?next={quote(here, safe='')}"))

    def _page_of_form(self, exchange: Exchange) -> str:
        """The page that a form was sent from; the overview, if it is no page of this console."""
        # The origin is known to be this host: forms of other origins are refused before.
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        referrer = exchange.headers.get(b"referer", b"").decode("latin-1")
        if not origin or not referrer.startswith(f"{origin}/"):
            return _PREFIX
        page = _own_path(referrer.removeprefix(origin))
        found = self._paths.find(unquote(page.partition("?")[0]))
        # A refused form is shown again under the path of its action, which cannot be opened.
        return page if found is not None and "GET" in found[0] else _PREFIX

    async def _logout(self, exchange: Exchange) -> EncodedAnswer:
        token = access.session_token(exchange)
        if token is not None:
            await self.sessions.close(token)
        return _redirect(Redirect(_LOGIN), access.ended_session())

    @staticmethod
    def _set_theme(form: Form) -> EncodedAnswer:
        following = Redirect(_own_path(form.get("next")))
        return _redirect(following, access.theme_cookie(form.get("theme")))


_TITLES: Final = {
    401: "Log in",
    403: "Not allowed",
    404: "Not found",
    429: "Too many requests",
    503: "Not available now",
}


def _query(exchange: Exchange) -> Form:
    return access.fields(exchange.scope["query_string"].decode("latin-1"))


def _own_path(wanted: str) -> str:
    """The path to go to next; the overview, if the given one is no path of the console."""
    is_own = wanted == _PREFIX or wanted.startswith((f"{_PREFIX}/", f"{_PREFIX}?"))
    is_plain = wanted.isprintable() and wanted.isascii() and "\\" not in wanted
    is_short = len(wanted) <= _NEXT_CHARS_MAX
    # Browsers resolve dot segments, also encoded ones, and drop spaces at the end.
    path = wanted.partition("#")[0].partition("?")[0]
    segments = unquote(path.strip()).split("/")
    is_below = not {".", ".."}.intersection(segments)
    is_fit = is_own and is_plain and is_short and is_below and not wanted.startswith(_LOGIN)
    return wanted if is_fit else _PREFIX


_NEXT_CHARS_MAX: Final = 8 * 1024
"""A longer address is not gone back to: it would make a header line that clients refuse."""


def _redirect(to: Redirect, headers: Headers = ()) -> EncodedAnswer:
    url = to.url
    if to.did is not None:
        assert to.did in DONE, f"{to.did} has no sentence"
        url += f"{'&' if '?' in url else '?'}did={to.did}"
        if to.of:
            url += f"&count={to.count}&of={to.of}"
    return EncodedAnswer(303, b"", [(b"location", url.encode()), *_HEADERS, *headers])


def _done(query: Form) -> str | None:
    """What an action did, from the address that it redirected to."""
    sentence = DONE.get(query.get("did"))
    count, of = query.get("count", "0"), query.get("of", "0")
    if sentence is None or not (count.isdecimal() and of.isdecimal()):
        return None
    return sentence.format(count=int(count[:_DIGITS_MAX]), of=int(of[:_DIGITS_MAX]))


_DIGITS_MAX: Final = 9


def _html(status: int, text: str, more: Sequence[tuple[bytes, bytes]] = ()) -> EncodedAnswer:
    body = text.encode("utf-8", "replace")
    return EncodedAnswer(status, body, [(b"content-type", _HTML), *_HEADERS, *more])


_DISPLACED: Final = (
    b'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Not available now</title>'
    b'<p>Too many forms at once. <a href="/console/login">Log in</a></p></html>\n'
)
"""Not from a template: callers without a key can cause hundreds of these a second."""


def _displaced(refusal: Refusal) -> EncodedAnswer:
    """The page for a form that has not come and has given way. Its connection is closed."""
    assert refusal.retry_after_ms is not None
    after_s = str(retry_after_s(refusal.retry_after_ms)).encode()
    headers = [(b"content-type", _HTML), *_HEADERS, CLOSE, (b"retry-after", after_s)]
    return EncodedAnswer(refusal.status, _DISPLACED, headers)


def _forbidden(needs: str, visitor: Visitor) -> Refusal:
    route = route_named(needs)
    assert route is not None
    roles = " or ".join(sorted(route.roles))
    whom = " for all tenants ('*')" if route.scope is RouteScope.DEPLOYMENT else ""
    holder = visitor.holder
    of = "all tenants" if holder.tenant == ALL_TENANTS else f"the tenant {holder.tenant}"
    detail = f"this page needs a key{whom} with the role {roles}; yours is {holder.role} for {of}"
    return Refusal(code=Code.FORBIDDEN, detail=detail)
