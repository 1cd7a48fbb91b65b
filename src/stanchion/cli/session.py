"""Sessions: the options of every command that calls a server, and how its answers are shown."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Concatenate, Final, ParamSpec, TypeVar

import click

from stanchion.cli.api import ApiAnswer, ApiClient
from stanchion.cli.errors import CliError, Exit
from stanchion.cli.text import IDENT_CHARS, Column, rows_of, sentence, yaml_lines
from stanchion.core.ranges import range_of

_WATCH_S: Final = 2.0
_RUNS_SEARCHED: Final = 1000
"""The newest runs, among which a shortened id is looked up."""
URL: Final = "http://127.0.0.1:8420"
FILE_BYTES_MAX: Final = 1024 * 1024
"""The largest request body that a server accepts."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Session:
    """A server to call, and how to show its answers."""

    server: ApiClient
    is_json: bool
    is_yaml: bool = False

    def get(self, path: str, *, wait_s: float = 0, **query: object) -> Any:  # noqa: ANN401 - any JSON
        """GET a document."""
        return self.server.ask("GET", path, query=query, wait_s=wait_s).document

    def get_to_change(self, path: str) -> Any:  # noqa: ANN401 - any JSON
        """GET what a PUT is about to replace. A refusal names the role that the PUT needs."""
        return self.server.ask("GET", path, role="admin").document

    def get_if_stored(self, path: str, *, role: str | None = None) -> Any:  # noqa: ANN401 - any JSON
        """GET what a PUT, which needs ``role``, is about to replace; ``{}`` if there is none."""
        try:
            return self.server.ask("GET", path, role=role).document
        except CliError as error:
            if error.exit_code is not Exit.NOT_FOUND:
                raise
            return {}

    def whole_run_id(self, given: str) -> str:
        """The run id, also if only its end is given: that is what a narrow terminal shows."""
        end = given.removeprefix("…")
        if len(end) != IDENT_CHARS:
            return given
        page = self.get("/v1/runs", limit=_RUNS_SEARCHED)
        found = [row["run_id"] for row in page["runs"] if row["run_id"].endswith(end)]
        if len(found) > 1:
            detail = f"{len(found)} runs have an id that ends with {end}"
            raise CliError(detail, Exit.USAGE, fix="give the whole id: stanchion run list -o json")
        return found[0] if found else given

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        query: Mapping[str, object] | None = None,
    ) -> ApiAnswer:
        """Send a request that changes something."""
        return self.server.ask(method, path, body=body, key=key, query=query)

    def create(self, path: str, body: object, key: str | None, *, what: str = "run") -> ApiAnswer:
        """Create a run, job or bulk action, with a random idempotency key if none is given.

        After a lost response the error names that key: a retry with it creates no second run. So
        does a remark after an interrupt.
        """
        with self.naming_key(
            key, "it may have been started: to retry without starting another"
        ) as sent:
            answer = self.send("POST", path, body, key=sent)
        if answer.is_replay:
            self.note(f"this key was used for the same request before: this is the same {what}")
        return answer

    @contextmanager
    def naming_key(
        self, key: str | None, why: str, *, has_begun: Callable[[], bool] = lambda: False
    ) -> Iterator[str]:
        """The idempotency key to send: the given one, or a random one.

        A random one is named by an error after which something may have been created, and after an
        interrupt. ``has_begun``: whether an earlier request has created something.
        """
        sent = random_key() if key is None else key
        try:
            yield sent
        except CliError as error:
            if key is None and (has_begun() or error.may_have_happened):
                _name_key(error, sent, why)
            raise
        except KeyboardInterrupt:
            if key is None:
                self.note(_key_hint(sent, why))
            raise

    def show(self, document: object, lines: Callable[[Any], Iterable[str]]) -> None:
        """Print a document: as JSON or YAML for programs, as ``lines`` for people."""
        if self.is_json:
            click.echo(json.dumps(document, indent=2))
        else:
            for line in yaml_lines(document) if self.is_yaml else lines(document):
                click.echo(line)

    def note(self, text: str) -> None:
        """Print a remark on standard error, unless the output is for a program."""
        if not (self.is_json or self.is_yaml):
            click.echo(sentence(text), err=True)

    @property
    def whose(self) -> str:
        """The tenant of the request, as far as the command line knows it."""
        if self.server.tenant == "*":
            return "all tenants"
        if self.server.tenant:
            return f"tenant {self.server.tenant} (see --tenant)"
        if self.server.api_key:
            return "the key's tenant (a key for all tenants: default; see --tenant)"
        return "tenant default (see --tenant)"

    @property
    def is_live(self) -> bool:
        """Whether the output is text on a terminal, which can be redrawn."""
        return not (self.is_json or self.is_yaml) and sys.stdout.isatty()


def calls_server(function: Callable[Concatenate[Session, _P], _R]) -> Callable[_P, _R]:
    """Give a command the common options, and a session made of them."""
    return _calls_server(function, "text", "json")


def calls_server_yaml(function: Callable[Concatenate[Session, _P], _R]) -> Callable[_P, _R]:
    """The same for a command that can also print YAML."""
    return _calls_server(function, "text", "json", "yaml")


def output_option(*formats: str) -> Callable[[_F], _F]:
    """The option ``-o``."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default="text",
        show_default=True,
        help="The format of the output.",
    )


def _calls_server(
    function: Callable[Concatenate[Session, _P], _R], *formats: str
) -> Callable[_P, _R]:
    @functools.wraps(function)
    def command(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: dict[str, Any] = kwargs
        flags = _given_flags()
        server = ApiClient(
            url=given.pop("url"),
            api_key=given.pop("api_key"),
            tenant=given.pop("tenant"),
            flags=flags,
        )
        chosen = given.pop("output")
        session = Session(server, is_json=chosen == "json", is_yaml=chosen == "yaml")
        try:
            if "run_id" in given:
                given["run_id"] = session.whole_run_id(given["run_id"])
            return _guarded(session, function, args, kwargs)
        except CliError as error:
            error.is_json = session.is_json
            raise

    tenant_option = click.option(
        "--tenant",
        metavar="NAME",
        envvar="STANCHION_TENANT",
        show_envvar=True,
        shell_complete=_complete_tenants,
        help="The tenant to act for, with a key for all tenants or none.",
    )
    return with_options(server_options, tenant_option, output_option(*formats))(command)


def _guarded(
    session: Session, function: Callable[..., _R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _R:
    """Run a command. If it cannot read an answer, some other server than ours has sent it."""
    try:
        return function(session, *args, **kwargs)
    except (AttributeError, LookupError, TypeError) as error:
        answer = session.server.last
        if answer is None:
            raise
        raise CliError(
            f"{session.server.url} answered with JSON that lacks what was asked for"
            f" ({type(error).__name__}: {error}): is it a Stanchion server of this version?",
            Exit.UNAVAILABLE,
            fix="check --url or STANCHION_URL, and any proxy in between; -o json shows the answer",
        ) from error


def _complete_tenants(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    from stanchion.cli.completion import complete_tenants  # noqa: PLC0415 - it imports this module

    found: list[str] = complete_tenants(context, parameter, typed)
    return found


def _given_flags() -> str:
    """The flags of this command that a following command needs too."""
    context = click.get_current_context()
    flags = ""
    for name in ("url", "tenant"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flags += f" --{name} {shlex.quote(context.params[name])}"
    return flags


def api_key_of(_context: click.Context, _option: click.Parameter, flag: str | None) -> str | None:
    """The key from the flag, the variable, or the file that STANCHION_API_KEY_FILE names."""
    if flag is not None or "STANCHION_API_KEY_FILE" not in os.environ:
        return flag if flag is not None else os.environ.get("STANCHION_API_KEY")
    from stanchion.config import secret_from  # noqa: PLC0415 - 15 ms, needed with a file only
    from stanchion.core.faults import Fault  # noqa: PLC0415 - as above

    found = secret_from(os.environ, "STANCHION_API_KEY")
    if isinstance(found, Fault):
        raise CliError(str(found), Exit.USAGE)
    return found


def with_options(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """A decorator that adds these options, in this order."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


server_options = with_options(
    click.option(
        "--url",
        metavar="URL",
        envvar="STANCHION_URL",
        show_envvar=True,
        default=URL,
        show_default=True,
        help="The server. Of several, separated by commas, the first that answers is used.",
    ),
    click.option(
        "--api-key",
        metavar="KEY",
        help="Other users of this machine can read a flag: prefer STANCHION_API_KEY, or"
        " STANCHION_API_KEY_FILE, which names a file with the key.",
        callback=api_key_of,
    ),
)
"""The options that name the server and the key."""
limit_and_cursor = with_options(
    click.option(
        "--limit",
        type=click.IntRange(1, 1000),
        default=50,
        show_default=True,
        help="How many at most.",
    ),
    click.option("--cursor", metavar="CURSOR", help="Continue where the last page ended."),
)
"""The options of a list."""
watch_option = click.option("--watch", is_flag=True, help="Show it again every two seconds.")


def number_in(kind: object) -> click.IntRange | click.FloatRange:
    """The type of an option whose range an annotated type states."""
    low, high, is_integer = range_of(kind)
    return click.IntRange(int(low), int(high)) if is_integer else click.FloatRange(low, high)


def random_key() -> str:
    """An idempotency key, for a command that was given none."""
    return os.urandom(16).hex()


def _key_hint(sent: str, why: str) -> str:
    """What to add to a command that is repeated."""
    return f"{why}, add --idempotency-key {sent}"


def _name_key(error: CliError, sent: str, why: str) -> None:
    """Add to an error the idempotency key that was generated: a retry needs it."""
    fix = _key_hint(sent, why)
    error.fix = f"{error.fix}; {fix}" if error.fix else fix
    error.problem = (error.problem or {}) | {"idempotency_key": sent}


def key_option(what: str) -> Callable[[_F], _F]:
    """The option for the idempotency key of a run, a job or a bulk action."""
    text = f"A key that makes retries safe: the same key and request give the same {what}."
    return click.option("--idempotency-key", "key", metavar="KEY", help=text)


def input_option(text: str) -> Callable[[_F], _F]:
    """The option for the input of a run or a job."""
    return click.option(
        "--input",
        "given",
        metavar="JSON|@FILE",
        default="{}",
        show_default=True,
        help=f"{text}; @- reads standard input.",
    )


def show_repeatedly(show: Callable[[], None], *, watch: bool) -> None:
    """Show something once, or every two seconds until interrupted."""
    show()
    while watch:
        time.sleep(_WATCH_S)
        if sys.stdout.isatty():
            click.clear()
        show()


def show_page(
    session: Session, page: dict[str, Any], lines: Callable[[Any], Iterable[str]], what: str
) -> None:
    """Show a page, with a remark if it is empty or not the last."""
    session.show(page, lines)
    if not any(isinstance(value, list) and value for value in page.values()):
        where = " on this page" if page.get("cursor") else ""
        session.note(f"no {what}{where}")
    if page.get("cursor"):
        session.note(f"there are more: add --cursor {page['cursor']}")


def list_command(  # noqa: PLR0913 - what differs between lists
    group: click.Group,
    help: str,  # noqa: A002 - click's own name for it
    path: str,
    rows: str,
    columns: Mapping[str, Column] | Callable[[Session], Mapping[str, Column]],
    *options: Callable[[Any], Any],
    name: str = "list",
    what: str | None = None,
    watch: bool = False,
    is_of_tenant: bool = False,
    wraps: bool = False,
    note: Callable[[dict[str, Any]], str | None] = lambda _page: None,
) -> None:
    """Add a command that shows a list, a page at a time.

    ``rows`` is the member of the answer with the rows, ``columns`` may depend on the session (whose
    rows were asked for), ``what`` says what an empty page is without (with ``is_of_tenant``, and of
    which tenant), and ``note`` returns a remark about a page. With ``wraps`` the last column goes
    on in the next line instead of being cut. The values of ``options`` are sent as the query.
    """

    def show_list(session: Session, /, *, watch: bool = False, **query: Any) -> None:  # noqa: ANN401 - the options
        shown = columns(session) if callable(columns) else columns

        def show() -> None:
            page = session.get(path, **query)
            whose = f" of {session.whose}" if is_of_tenant else ""
            show_page(
                session,
                page,
                lambda page: rows_of(page[rows], shown, wraps=wraps),
                f"{what or rows}{whose}",
            )
            remark = note(page)
            if remark:
                session.note(remark)

        show_repeatedly(show, watch=watch)

    watched = (watch_option,) if watch else ()
    command = with_options(*options, *watched, limit_and_cursor)(calls_server(show_list))
    group.command(name, help=help)(command)


def read_bounded(file: BinaryIO, name: str) -> bytes:
    """The contents of a file. Raises ``CliError`` if a server would refuse that much."""
    read = file.read(FILE_BYTES_MAX + 1)
    if len(read) > FILE_BYTES_MAX:
        raise CliError(f"{name}: more than {FILE_BYTES_MAX // 1024} KiB", Exit.USAGE)
    return read


def json_of(text: str, flag: str) -> Any:  # noqa: ANN401 - any JSON value
    """A JSON value given as text, as ``@file``, or as ``@-`` for standard input."""
    try:
        if text == "@-":
            return parsed_json(read_bounded(sys.stdin.buffer, flag))
        if text.startswith("@"):
            with open(text[1:], "rb") as file:  # noqa: PTH123 - pathlib is slow to import
                return parsed_json(read_bounded(file, f"{flag} {text}"))
        return parsed_json(text)
    except OSError as error:
        raise CliError(f"{flag}: {text[1:]}: {error.strerror}", Exit.USAGE) from error
    except ValueError as error:
        raise CliError(
            f"{flag} is not JSON: {error}",
            Exit.USAGE,
            fix=f"""write {flag} '{{"name": "value"}}', or {flag} @file.json""",
        ) from error


def parsed_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """``json.loads``, with a ``ValueError`` also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def time_of(text: str, flag: str, *, ago: bool = False) -> str:
    """A time in ISO 8601, from such a time or from a duration like ``90d`` from now, or ago."""
    from datetime import UTC, datetime, timedelta  # noqa: PLC0415 - few commands need it

    duration = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    try:
        if duration is not None:
            units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
            span = timedelta(**{units[duration[2]]: int(duration[1])})
            now = datetime.now(UTC)
            return (now - span if ago else now + span).isoformat(timespec="seconds")
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except ValueError:
        wrong = f"{flag}: {text!r} is neither a time like 2027-01-31T12:00:00Z nor one like 90d"
        raise click.UsageError(wrong) from None
    except OverflowError:
        wrong = f"{flag}: {text!r} is before the year 1 or after the year 9999"
        raise click.UsageError(wrong) from None
