"""Rendering: templates, and how values from outside are shown.

Autoescaping is always on. Text from workflows, workers and callers goes through ``shown``: it is
put into a ``<bdi>``, so that it cannot reorder the text around it, and its control characters are
made visible. Markup is made here and in templates only, never from data.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final, NamedTuple

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from stanchion.console.text import duration, exact, visible

_JSON_CHARS_MAX: Final = 64 * 1024
_COUNTED_CHARS_MAX: Final = 128 * 1024
"""Of a longer value only the beginning is made: 7 MB of small objects took 130 ms."""
_TEXT_CHARS_MAX: Final = 16 * 1024
_LINE_CHARS_MAX: Final = 200
_TITLE_CHARS_MAX: Final = 1_000


def shown(value: object, chars_max: int = _TEXT_CHARS_MAX) -> Markup:
    """Text from outside, as one isolated piece with its control characters made visible."""
    # A page has hundreds of these, and Markup.format takes five times as long.
    return Markup(f"<bdi>{_cut(str(value), chars_max)}</bdi>")  # noqa: S704 - _cut escapes


def status_tag(word: str) -> Markup:
    """The status of a run, step or job."""
    name = escape(word)
    return Markup(f'<span class="status {name}">{name.replace("_", " ")}</span>')  # noqa: S704 - escaped


def json_text(value: object, chars_max: int = _JSON_CHARS_MAX) -> Markup:
    """A value as indented JSON, with control characters made visible, cut at 64 Ki characters."""
    begun, left = _beginning(value, _COUNTED_CHARS_MAX, _INDENT)
    text = msgspec.json.format(msgspec.json.encode(begun), indent=_INDENT).decode()
    return _cut(text, chars_max, is_whole=left > 0)


_INDENT: Final = 2


def _beginning(value: object, left: int, indent: int) -> tuple[object, int]:
    """So much of a value as has ``left`` characters of indented JSON, and how many are left."""
    if isinstance(value, str):
        return value[: max(0, left)], left - len(value)
    if isinstance(value, list):
        some = list[object]()
        for each in value:
            if left <= 0:
                break
            begun, left = _beginning(each, left - indent - _INDENT, indent + _INDENT)
            some.append(begun)
        return some, left
    if isinstance(value, dict):
        members = dict[object, object]()
        for name, each in value.items():
            if left <= 0:
                break
            left -= indent + _INDENT + len(str(name))
            members[name], left = _beginning(each, left, indent + _INDENT)
        return members, left
    return value, left - 1


def _cut(text: str, chars_max: int, *, is_whole: bool = True) -> Markup:
    begun = escape(visible(text[:chars_max], has_lines=True))
    more = len(text) - chars_max
    if more <= 0:
        return begun
    count = f"{more:,}" if is_whole else f"more than {more // 1_000:,},000"
    return begun + Markup('<i class="cut"> … {} more characters</i>').format(count)


def time_tag(at: datetime | int | None, now_ms: int, none: str = "–") -> Markup:
    """A time relative to now, the exact one on hover: in the browser's own zone."""
    if at is None:
        return Markup('<span class="none">{}</span>').format(none)
    moment = at if isinstance(at, datetime) else datetime.fromtimestamp(at / 1000, UTC)
    exact = moment.astimezone(UTC)
    past_ms = now_ms - exact.timestamp() * 1000
    text = f"{_largest(past_ms)} ago" if past_ms >= 0 else f"in {_largest(-past_ms)}"
    iso = exact.isoformat(timespec="milliseconds")[:-6]
    title = f"{iso[:10]} {iso[11:19]} UTC"
    return Markup(f'<time datetime="{iso}Z" title="{title}">{text}</time>')  # noqa: S704 - of numbers


_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def _largest(duration_ms: float) -> str:
    """A duration in its largest unit, as in "5 min ago"."""
    for unit_ms, name in _UNITS:
        if duration_ms >= unit_ms:
            return f"{int(duration_ms / unit_ms)} {name}"
    return "0 s"


def span(duration_ms: float | None) -> str:
    """A duration, or a dash if there is none."""
    return "–" if duration_ms is None else duration(duration_ms)


def _count(value: float) -> str:
    return f"{value:,}".replace(",", "\u202f")


class Asset(NamedTuple):
    """A static file, as it is served."""

    body: bytes
    packed: bytes
    """The same, compressed with gzip."""
    content_type: bytes


_TYPES: Final[Mapping[str, bytes]] = {
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}


class Assets:
    """The static files, each under a path that contains its hash."""

    def __init__(self) -> None:
        self._by_path: dict[str, Asset] = {}
        self._paths: dict[str, str] = {}
        for file in files("stanchion.console").joinpath("static").iterdir():
            kind = _TYPES.get(file.name.rpartition(".")[2])
            if kind is not None:
                body = file.read_bytes()
                path = f"{hashlib.sha256(body).hexdigest()[:16]}/{file.name}"
                self._by_path[path] = Asset(body, gzip.compress(body, mtime=0), kind)
                self._paths[file.name] = f"/console/static/{path}"

    def path(self, name: str) -> str:
        """The path of a file, for a template."""
        return self._paths[name]

    def find(self, digest: str, name: str) -> Asset | None:
        """The file of this name with this hash."""
        return self._by_path.get(f"{digest}/{name}")


class Templates:
    """The templates with their filters, each compiled in a thread when it is first used.

    Compiling takes tens of milliseconds, for which the event loop must not wait. One is compiled at
    a time, once for all requests that need it: threads that compile have the interpreter as well.
    """

    def __init__(self, assets: Assets) -> None:
        self._environment = made = Environment(
            loader=PackageLoader("stanchion.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            cache_size=-1,
        )
        made.filters.update(_FILTERS)
        made.globals["asset"] = assets.path
        self._compiled: dict[str, Template] = {}
        self._compiling = asyncio.Lock()

    async def get(self, name: str) -> Template:
        """The compiled template."""
        found = self._compiled.get(name)
        if found is None:
            async with self._compiling:
                found = self._compiled.get(name)
                if found is None:
                    loop = asyncio.get_running_loop()
                    found = await loop.run_in_executor(None, self._compile, name)
                    self._compiled[name] = found
        return found

    def _compile(self, name: str) -> Template:
        for each in _COMMON if not self._compiled else ():
            self._environment.get_template(each)
        return self._environment.get_template(name)


_COMMON: Final = (
    *("layout.html", "fragment.html", "macros.html"),
    *("decision.html", "schedule_parts.html"),
)
"""Templates that others extend or import."""
_FILTERS: Final[Mapping[str, Any]] = {
    "shown": shown,
    "json": json_text,
    "json_line": lambda value: visible(msgspec.json.encode(value).decode()[:_LINE_CHARS_MAX]),
    "line": lambda text: visible(str(text)[:_TITLE_CHARS_MAX]),
    "span": span,
    "status": status_tag,
    "count": _count,
    "exact": exact,
}
