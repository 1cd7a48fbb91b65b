"""``stanchion settings``: what servers go by while they run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, json_of, talks
from stanchion.cli.text import cell, pairs

__all__ = ["command"]


@click.group("settings")
def command() -> None:
    """See and change what servers go by while they run."""


@command.command("show")
@talks
def show(session: Session) -> None:
    """Show all settings."""
    session.show(session.get(path_to("admin", "settings")), _lines)


@command.command("set")
@click.argument("changes", metavar="[PATH=VALUE]...", nargs=-1)
@click.option("--patch", metavar="JSON|@FILE", help="A JSON merge patch, instead of PATH=VALUE.")
@talks
def set_settings(session: Session, changes: tuple[str, ...], patch: str | None) -> None:
    """Change settings on every server, within 2 s.

    For example: stanchion settings set admission.strategy=lock lock_busy.jitter_ms=0

    A VALUE is JSON; what is not JSON is taken as text.
    """
    if (patch is None) == (not changes):
        raise click.UsageError("give PATH=VALUE, or --patch with a JSON merge patch")
    merge = _merge_patch(changes) if patch is None else json_of(patch, "--patch")
    session.show(session.send("PATCH", path_to("admin", "settings"), merge).document, _lines)


def _merge_patch(changes: tuple[str, ...]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise click.UsageError(f"{change!r} is not PATH=VALUE, such as admission.strategy=lock")
        place = patch
        for name in names[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise click.UsageError(f"{change!r} goes into a value that was given before it")
        place[names[-1]] = _value(text)
    return patch


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(settings: dict[str, Any]) -> list[str]:
    return pairs(
        (path, "null" if value is None else cell(value)) for path, value in _flat(settings)
    )


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, member in value.items():
        path = cell(prefix + name)
        if isinstance(member, dict) and member:
            yield from _flat(member, path + ".")
        else:
            yield path, member
