"""The page about log lines names every event that the code can log, with its level."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from scripts.generate_reference import metric_names
from tests.docs.terminal import ROOT

SOURCE = ROOT / "src" / "stanchion"
PAGE = ROOT / "docs" / "reference" / "log-events.md"
NAME = re.compile(r"[a-z]+(?:_[a-z]+)+")
LEVELS = {
    "debug": "DEBUG",
    "info": "INFO",
    "warning": "WARN",
    "error": "ERROR",
    "exception": "ERROR",
}
LOGGERS = {"LOGGER", "_log"}


class Line(msgspec.Struct, frozen=True, order=True):
    """One event at one level."""

    name: str
    level: str


def logged(file: Path) -> Iterator[Line]:
    """What a module logs: ``log_event(logging.INFO, "name")`` and ``LOGGER.info("name: …")``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(
                args=[
                    ast.Attribute(value=ast.Name("logging"), attr=level),
                    ast.Constant(str(text)),
                    *_,
                ]
            ):
                yield from line(text, level.lower())
            case ast.Call(
                func=ast.Attribute(value=ast.Name(logger), attr=level),
                args=[ast.Constant(str(text)), *_],
            ) if logger in LOGGERS and level in LEVELS:
                yield from line(text, level)
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Attribute(attr="getLogger")), attr=level
                ),
                args=[ast.Constant(str(text)), *_],
            ):
                yield from line(text, level)
            case ast.Call(
                func=ast.Name("OutageLogger"),
                args=[ast.Constant(str(begun)), ast.Constant(str(over))],
                keywords=words,
            ):
                levels = [
                    each.value.attr for each in words if isinstance(each.value, ast.Attribute)
                ]
                yield from line(begun, (levels or ["WARNING"])[0].lower())
                yield from line(over, "info")
            case _:
                pass


def line(text: str, level: str) -> Iterator[Line]:
    found = NAME.match(text.partition(":")[0])
    if found and found[0] == text.partition(":")[0]:
        yield Line(found[0], LEVELS[level])


def rows() -> list[list[str]]:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in page if row[:3] == "| `"]


def test_every_event_is_on_the_page_with_its_level() -> None:
    files = [file for file in SOURCE.rglob("*.py") if "sim" not in file.parts]
    told = {found for file in files for found in logged(file)}
    written = {Line(name.strip("`"), level) for name, level, *_ in rows()}
    assert sorted(written ^ told) == []
    assert {
        Line("run_lock_fallback", "ERROR"),
        Line("run_lock_abandoned", "ERROR"),
        Line("run_lock_renew_failed", "WARN"),
        Line("lock_release_failed", "WARN"),
        Line("admission_lock_failed", "ERROR"),
        Line("escalation_changed", "WARN"),
    } <= written


def test_every_metric_beside_an_event_is_one() -> None:
    beside = {name for *_, metric in rows() for name in re.findall(r"`(stanchion_[a-z_]+)", metric)}
    assert beside
    assert beside - metric_names() == set()
