"""Pages and actions: how the console's pages are declared.

A ``ConsolePage`` has a path, a template and a function that gets the data for it from the API. An
``Action`` is a form's target: it changes something through the API and sends the browser to a page;
if the API refuses, the form's page is shown again with the reason and what was typed. Both name the
API route that they need, and the route's roles decide who may use them. ``PageTable`` declares them
above their functions.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import quote, quote_plus

from stanchion.console.api import Api
from stanchion.console.live import AdmissionSample, Alarm
from stanchion.console.typed import WronglyTyped, typed_integer, typed_json, typed_number
from stanchion.core.json_value import JsonValue
from stanchion.core.model import Instant
from stanchion.gateway.problems import Refusal, RequestRefused, invalid_member
from stanchion.services.keys import KeyHolder
from stanchion.wire.identifiers import ALL_TENANTS
from stanchion.wire.problems import Code

_List = TypeVar("_List")
_Typed = TypeVar("_Typed")
Data: TypeAlias = dict[str, Any]
"""What a page's template gets, beside what every page has (``view``, ``layout``, …)."""


class Form:
    """The fields of a form or of a query, in their order. A field may be repeated."""

    def __init__(self, pairs: Sequence[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)

    def get(self, name: str, default: str = "") -> str:
        """The first value of a field."""
        return next((value for key, value in self.pairs if key == name), default)

    def all(self, name: str) -> list[str]:
        """All values of a field, without empty ones."""
        return [value for key, value in self.pairs if key == name and value]

    def mapping(self) -> dict[str, list[str]]:
        """All values by field."""
        found: dict[str, list[str]] = {}
        for key, value in self.pairs:
            found.setdefault(key, []).append(value)
        return found

    def with_(self, **changes: object) -> str:
        """The same query with these members changed (``None`` removes one), as ``?…`` or ````."""
        kept = [(key, value) for key, value in self.pairs if key not in changes and value]
        new = [(key, str(value)) for key, value in changes.items() if value is not None]
        return f"?{_encoded(kept + new)}" if kept or new else ""

    def json(self, name: str) -> JsonValue | None:
        """A field that holds JSON; ``None`` if it is empty. Raises ``RequestRefused``."""
        return self._typed(name, typed_json)

    def integer(self, name: str) -> int | None:
        """A field that holds a whole number; ``None`` if it is empty. Raises ``RequestRefused``."""
        return self._typed(name, typed_integer)

    def number(self, name: str) -> int | float | None:
        """A field that holds a number; ``None`` if it is empty. Raises ``RequestRefused``."""
        return self._typed(name, typed_number)

    def labels(self, name: str) -> dict[str, str]:
        """A field that holds labels, separated by spaces. Raises ``RequestRefused``."""
        found: dict[str, str] = {}
        for word in self.get(name).split():
            label, _, value = label_of(word).partition(":")
            if label in found:
                raise RequestRefused(invalid_member(name, f"{label} is given twice"))
            found[label] = value
        return found

    def _typed(self, name: str, read: Callable[[str], _Typed]) -> _Typed | None:
        text = self.get(name).strip()
        try:
            return read(text) if text else None
        except WronglyTyped as error:
            raise RequestRefused(invalid_member(name, str(error))) from None

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self.pairs)


def label_of(word: str) -> str:
    """A label as ``name:value``, also if ``name=value`` was typed. The value may have both."""
    return re.sub("[:=]", ":", word, count=1)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks at the console."""

    holder: KeyHolder
    form_token: str | None
    """Every form must carry it; ``None`` on a server without keys, where there is no session."""

    @property
    def sees_all(self) -> bool:
        """Whether the visitor may look at every tenant."""
        return self.holder.tenant == ALL_TENANTS


@dataclass(slots=True)
class View:
    """One request for a page or an action."""

    api: Api
    visitor: Visitor
    now: Instant
    path: str
    params: Mapping[str, str]
    query: Form
    form: Form
    """The fields of the form that was sent; of a page that is only looked at, empty."""
    tenant: str | None
    """The tenant that is looked at; ``None``: all of them."""
    samples: tuple[AdmissionSample, ...] = ()
    """Figures of all tenants over the last half hour, for a viewer who may see them."""
    alarms: tuple[Alarm, ...] = ()
    """What is wrong with the deployment now."""

    async def made(self, make: Callable[[], _Typed]) -> _Typed:
        """Make a part of the page that may take milliseconds; the viewer's tenant pays for it."""
        return await self.api.charged(make)

    problem: Refusal | None = None
    """Why the API refused what the form asked for."""
    status: int = 200

    async def filtered(self, path: str, nothing: _List, **query: object) -> _List:
        """A list by filters that a person typed.

        If the API refuses them the list is ``nothing``. The page says why, and its fields keep what
        was typed.
        """
        try:
            found: _List = await self.api.get(path, None, **query)
        except RequestRefused as refused:
            if refused.refusal.code is not Code.INVALID_REQUEST:
                raise
            self.problem, self.status = refused.refusal, refused.refusal.status
            return nothing
        return found

    def url(self, path: str, /, **query: object) -> str:
        """A link in the console that keeps the chosen tenant, without members that are ``None``.

        Slashes and other special characters in ``path`` must be quoted: see ``at``.
        """
        if self.visitor.sees_all and self.tenant is not None:
            query.setdefault("tenant", self.tenant)
        given = [(key, value) for key, value in query.items() if value not in {None, ""}]
        return f"{path}?{_encoded(given)}" if given else path

    def at(self, *segments: str, **query: object) -> str:
        """A link below ``/console``; each segment is quoted."""
        path = "/".join(["/console", *(_quoted(each) for each in segments)])
        return self.url(path, **query)


_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~-]*").fullmatch
"""Matches what needs no quoting: almost all ids. A page has hundreds of links."""


def _quoted(segment: str) -> str:
    return segment if _PLAIN(segment) else quote(segment, safe="")


def _encoded(pairs: Iterable[tuple[str, object]]) -> str:
    """A query, as ``urlencode`` would make it."""
    return "&".join(f"{_plus_quoted(name)}={_plus_quoted(str(value))}" for name, value in pairs)


def _plus_quoted(text: str) -> str:
    return text if _PLAIN(text) else quote_plus(text)


@dataclass(frozen=True, slots=True)
class Redirect:
    """The answer of an action: go to this page, which then shows what was done."""

    url: str
    did: str | None = None
    """A key of ``DONE``."""
    count: int = 0
    """How many it was done to: ``{count}`` in the sentence."""
    of: int = 0
    """How many it was meant for: ``{of}`` in the sentence."""


class Elsewhere(Exception):
    """Raised by a page's ``load``: what is looked for is on another page."""

    def __init__(self, url: str) -> None:
        """Carry the other page's address."""
        super().__init__(url)
        self.url = url


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer of an action that is shown once and not kept: the form's page with more data."""

    data: Data


@dataclass(frozen=True, slots=True)
class Nav:
    """A page's entry in the navigation."""

    group: Literal["Now", "Work", "Locks", "Repair", "System"]
    label: str
    letter: str
    """``g`` and this letter go to the page."""


Load: TypeAlias = Callable[[View], Awaitable[Data]]
Act: TypeAlias = Callable[[View], Awaitable[Redirect | Shown]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolePage:
    """A page: ``load`` gets the data, ``template`` shows it."""

    path: str
    title: str
    template: str
    load: Load
    needs: str | None = None
    """The API route that a viewer must be allowed to use, such as ``GET /v1/runs``."""
    nav: Nav | None = None
    is_of_tenant: bool = False
    """Whether it is about one tenant: a key for all of them looks at ``default`` at first."""
    is_live: bool = True
    """Whether the page is fetched again when something has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A form's target. It changes something and redirects."""

    path: str
    act: Act
    needs: str
    page: ConsolePage
    """Shown again with the problem, if the API refuses."""
    method: str = field(default="POST", init=False)


DONE: Final[dict[str, str]] = {}
"""What an action did, by its code: shown once on the page after it. Pages add their sentences."""
_LoadT = TypeVar("_LoadT", bound=Load)
_ActT = TypeVar("_ActT", bound=Act)


class PageTable:
    """The pages and actions of a module, each declared above its function."""

    def __init__(self) -> None:
        self.pages: list[ConsolePage] = []
        self.actions: list[Action] = []

    def page(
        self,
        path: str,
        title: str,
        template: str,
        needs: str | None = None,
        nav: Nav | None = None,
        *,
        is_of_tenant: bool = False,
        is_live: bool = True,
    ) -> Callable[[_LoadT], _LoadT]:
        """Declare the page whose data the function that follows gets."""

        def declare(load: _LoadT) -> _LoadT:
            page = ConsolePage(
                path=f"/console{path}",
                title=title,
                template=template,
                load=load,
                needs=needs,
                nav=nav,
                is_of_tenant=is_of_tenant,
                is_live=is_live,
            )
            self.pages.append(page)
            return load

        return declare

    def action(self, path: str, needs: str, form: Load) -> Callable[[_ActT], _ActT]:
        """Declare the target of a form on the page of ``form``."""
        page = next(each for each in self.pages if each.load is form)

        def declare(act: _ActT) -> _ActT:
            self.actions.append(Action(path=f"/console{path}", act=act, needs=needs, page=page))
            return act

        return declare
