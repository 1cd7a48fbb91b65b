"""Sessions: what every command that talks to a server is given."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, Concatenate, Final, ParamSpec, TypeVar

import click

from stanchion.cli.endings import Ending, Exit
from stanchion.cli.http import Answer, Server

__all__ = ["URL", "Session", "all_of", "json_of", "limit_and_cursor", "list_of", "talks", "where"]

URL: Final = "http://127.0.0.1:8420"
FILE_BYTES_MAX: Final = 1024 * 1024
"""More than that no server takes in one request."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Session:
    """A server to ask, and how to show what it says."""

    server: Server
    is_json: bool

    def get(self, path: str, *, wait_s: float = 0, **query: object) -> Any:  # noqa: ANN401 - any JSON
        """Ask for a document."""
        return self.server.ask("GET", path, query=query, wait_s=wait_s).document

    def send(
        self, method: str, path: str, body: object = None, *, key: str | None = None
    ) -> Answer:
        """Change something."""
        return self.server.ask(method, path, body=body, key=key)

    def create(self, path: str, body: object, key: str | None) -> Answer:
        """Begin something, under a key of ours if there is none.

        Then a lost answer need not mean a second run: who asks again names the key.
        """
        sent = key or os.urandom(16).hex()
        try:
            answer = self.send("POST", path, body, key=sent)
        except Ending as ending:
            if ending.may_have_happened and key is None:
                again = "it may have begun all the same: to ask again without a second one, add"
                fix = f"{again} --idempotency-key {sent}"
                ending.fix = f"{ending.fix}; {fix}" if ending.fix else fix
                ending.problem = (ending.problem or {}) | {"idempotency_key": sent}
            raise
        if answer.is_replay:
            self.note("this key was used for the same request before: here is the same run")
        return answer

    def show(self, document: object, lines: Callable[[Any], Iterable[str]]) -> None:
        """Print a document: as it is to a program, in ``lines`` to a person."""
        if self.is_json:
            click.echo(json.dumps(document, indent=2))
        else:
            for line in lines(document):
                click.echo(line)

    def note(self, text: str) -> None:
        """A remark that is not the answer. A program does not need it."""
        if not self.is_json:
            click.echo(text, err=True)

    @property
    def whose(self) -> str:
        """The tenant that is asked about, as well as it is known here."""
        if self.server.tenant:
            return f"tenant {self.server.tenant} (see --tenant)"
        return "the key's tenant" if self.server.api_key else "tenant default (see --tenant)"

    @property
    def is_live(self) -> bool:
        """Whether a person looks at a terminal that can be redrawn."""
        return not self.is_json and sys.stdout.isatty()


def talks(function: Callable[Concatenate[Session, _P], _R]) -> Callable[_P, _R]:
    """Give a command the options that every one has, and a session made of them."""

    @functools.wraps(function)
    def command(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: dict[str, Any] = kwargs
        flags = _given_flags()
        server = Server(
            url=given.pop("url"),
            api_key=given.pop("api_key"),
            tenant=given.pop("tenant"),
            flags=flags,
        )
        session = Session(server, is_json=given.pop("output") == "json")
        try:
            return function(session, *args, **kwargs)
        except Ending as ending:
            ending.is_json = session.is_json
            raise

    for decorate in (
        click.option(
            "-o",
            "--output",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="For a person or for a program.",
        ),
        click.option(
            "--tenant",
            metavar="NAME",
            envvar="STANCHION_TENANT",
            show_envvar=True,
            help="Act for this tenant, where the key does not say which.",
        ),
        where,
    ):
        command = decorate(command)
    return command


def _given_flags() -> str:
    """The flags of this command that a next command about the same thing needs too."""
    context = click.get_current_context()
    flags = ""
    for name in ("url", "tenant"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flags += f" --{name} {shlex.quote(context.params[name])}"
    return flags


def _api_key(_context: click.Context, _option: click.Parameter, flag: str | None) -> str | None:
    """The flag, else the variable, else the contents of the file that the other variable names."""
    if flag is not None or "STANCHION_API_KEY_FILE" not in os.environ:
        return flag if flag is not None else os.environ.get("STANCHION_API_KEY")
    from stanchion.config import secret_from  # noqa: PLC0415 - 15 ms, for those who use a file
    from stanchion.core.faults import Fault  # noqa: PLC0415 - as above

    found = secret_from(os.environ, "STANCHION_API_KEY")
    if isinstance(found, Fault):
        raise Ending(str(found), Exit.USAGE)
    return found


def where(function: _F) -> _F:
    """The options that say which server, and as whom."""
    for decorate in (
        click.option(
            "--api-key",
            metavar="KEY",
            help="Other users of this machine can read a flag: prefer STANCHION_API_KEY, or"
            " STANCHION_API_KEY_FILE, which names a file that holds the key.",
            callback=_api_key,
        ),
        click.option(
            "--url",
            metavar="URL",
            envvar="STANCHION_URL",
            show_envvar=True,
            default=URL,
            show_default=True,
            help="The server.",
        ),
    ):
        function = decorate(function)
    return function


def limit_and_cursor(function: _F) -> _F:
    """The options of a list."""
    for decorate in (
        click.option("--cursor", metavar="CURSOR", help="Go on where the last page ended."),
        click.option(
            "--limit",
            type=click.IntRange(1, 1000),
            default=50,
            show_default=True,
            help="How many at most.",
        ),
    ):
        function = decorate(function)
    return function


def list_of(
    session: Session, page: dict[str, Any], lines: Callable[[Any], Iterable[str]], what: str
) -> None:
    """Show a page, and say that it is empty or not the last."""
    session.show(page, lines)
    if not any(isinstance(value, list) and value for value in page.values()):
        session.note(f"no {what}")
    if page.get("cursor"):
        session.note(f"there are more: add --cursor {page['cursor']}")


def all_of(file: BinaryIO, name: str) -> bytes:
    """What a file holds, if a server would take as much."""
    read = file.read(FILE_BYTES_MAX + 1)
    if len(read) > FILE_BYTES_MAX:
        raise Ending(f"{name}: more than {FILE_BYTES_MAX // 1024} KiB", Exit.USAGE)
    return read


def json_of(text: str, flag: str) -> Any:  # noqa: ANN401 - any JSON value
    """A JSON value given as text, as ``@file``, or as ``@-`` for standard input."""
    try:
        if text == "@-":
            return json.loads(all_of(sys.stdin.buffer, flag))
        if text.startswith("@"):
            with open(text[1:], "rb") as file:  # noqa: PTH123 - pathlib is slow to import
                return json.loads(all_of(file, f"{flag} {text}"))
        return json.loads(text)
    except OSError as error:
        raise Ending(f"{flag}: {text[1:]}: {error.strerror}", Exit.USAGE) from error
    except ValueError as error:
        raise Ending(
            f"{flag} is not JSON: {error}",
            Exit.USAGE,
            fix=f"""write {flag} '{{"name": "value"}}', or {flag} @file.json""",
        ) from error
