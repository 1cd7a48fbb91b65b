"""A browser without a screen: cookies, forms and links of the console, through ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

from stanchion.console import Console, mount
from stanchion.gateway import GatewayOptions
from tests.gateway.asgi import Answer
from tests.gateway.house import ADMIN, House, opened_house

__all__ = ["HOST", "Browser", "ConsoleHouse", "Element", "opened_console", "parsed"]

HOST = "127.0.0.1:8420"
_VOID = frozenset({"br", "circle", "hr", "img", "input", "line", "link", "meta", "path", "rect"})


class Element:
    """An element of a parsed page."""

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        self.attributes = attributes
        self.text = ""
        """Its own text and that of all elements in it, without what can be typed or chosen."""


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while tag not in _VOID and self._open and self._open.pop().name != tag:
            pass

    def handle_data(self, data: str) -> None:
        innermost = self._open[-1:]
        is_field = bool(innermost) and innermost[0].name in {"option", "textarea"}
        for element in innermost if is_field else self._open:
            element.text += data


def parsed(page: bytes) -> list[Element]:
    """All elements of a page, in their order."""
    parser = _Parser()
    parser.feed(page.decode())
    return parser.elements


class ConsoleHouse:
    """A gateway with the console mounted."""

    def __init__(self, house: House, console: Console) -> None:
        self.house = house
        self.console = console

    async def browser(self, key: str | None = None) -> Browser:
        """A browser, logged in with this key if one is given."""
        browser = Browser(self.house)
        if key is not None:
            answer = await browser.post("/console/login", key=key)
            assert answer.status == 303, answer.body
        return browser


class Browser:
    """Keeps cookies and the form token, and sends what a browser would send."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.cookies: dict[str, str] = {}
        self.token = ""

    async def get(self, path: str, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        """Open a page."""
        answer = await self._ask("GET", path, b"", [("Sec-Fetch-Site", "none"), *headers])
        fields = [each for each in parsed(answer.body) if each.attributes.get("name") == _TOKEN]
        if fields:
            self.token = fields[0].attributes["value"]
        return answer

    async def post(self, path: str, **fields: str) -> Answer:
        """Send a form of a page of the console."""
        return await self.send(path, list(fields.items()))

    async def send(
        self,
        path: str,
        fields: Iterable[tuple[str, str]],
        headers: Iterable[tuple[str, str]] = (),
    ) -> Answer:
        """The same, with fields that may be repeated."""
        form = [(_TOKEN, self.token), *fields]
        return await self._ask("POST", path, urlencode(form).encode(), [*SAME_SITE, *headers])

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Iterable[tuple[str, str]]
    ) -> Answer:
        sent = [*headers]
        if self.cookies:
            sent.append(("Cookie", "; ".join(f"{n}={v}" for n, v in self.cookies.items())))
        answer = await self.house.ask(method, path, body, headers=sent)
        cookie = answer.headers.get("set-cookie")
        if cookie is not None:
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer


_TOKEN = "form_token"  # noqa: S105 - a field's name
SAME_SITE = (
    ("Origin", f"http://{HOST}"),
    ("Sec-Fetch-Site", "same-origin"),
    ("Content-Type", "application/x-www-form-urlencoded"),
)


@asynccontextmanager
async def opened_console(
    *, has_keys: bool = True, drill_reports: Path | None = None, body_timeout_s: float = 10
) -> AsyncIterator[ConsoleHouse]:
    """A running gateway with the console, with an admin key unless told otherwise."""
    options = GatewayOptions(
        admin_key=ADMIN if has_keys else None,
        drill_reports=None if drill_reports is None else str(drill_reports),
        body_timeout_s=body_timeout_s,
    )
    async with opened_house(options) as house:
        console = mount(house.app)
        try:
            yield ConsoleHouse(house, console)
        finally:
            console.close()
