"""Errors of the command line: a message, an exit code, and a hint that names the next command.

``error_from`` turns a server's problem document into one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Final, NamedTuple

import click

from stanchion.cli.text import clock, printable, sentence
from stanchion.core import install_command


class Exit(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    FULL = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


class CliError(Exception):
    """An error: a sentence, its faults, and a sentence that names the fix.

    ``problem`` is the same for programs: the problem document of the server, or one like it.
    """

    def __init__(
        self,
        message: str,
        exit_code: Exit,
        *,
        faults: Sequence[str] = (),
        fix: str | None = None,
        problem: dict[str, Any] | None = None,
        may_have_happened: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.faults = faults
        self.fix = fix
        self.problem = problem
        self.may_have_happened = may_have_happened
        """Whether the request may have been executed: only its response was lost."""
        self.is_json = False
        """Whether the output is JSON."""

    def text(self) -> str:
        """The error as text for a person."""
        # A server's text is untrusted: escape control characters before they reach the terminal.
        lines = [sentence(printable(f"error: {self.message}"), "  ")]
        lines += [sentence(printable(f"  {fault}"), "    ") for fault in self.faults]
        if self.fix:
            lines.append(sentence(printable(f"fix: {self.fix}"), "  "))
        return "\n".join(lines)

    def show(self) -> None:
        """Print it on standard error."""
        is_document = self.is_json and self.problem is not None
        click.echo(json.dumps(self.problem) if is_document else self.text(), err=True)


@contextmanager
def needs_server_packages(what: str) -> Iterator[None]:
    """Imports that the base install may lack: a missing package is an error that names the extra.

    ``what`` begins the message: ``a server needs``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stanchion":
            raise
        raise CliError(
            f"{what} the package {error.name!r}",
            Exit.FAILED,
            fix=install_command("server"),
        ) from error


_EXITS: Final = {404: Exit.NOT_FOUND, 429: Exit.FULL}
_SERVER_ERROR_MIN: Final = 500

_LISTS: Final = {
    "/v1/runs": "stanchion run list",
    "/v1/workflows": "stanchion workflow list",
    "/v1/admin/keys": "stanchion key list",
    "/v1/bulk": "stanchion bulk list",
    "/v1/schedules": "stanchion schedule list",
    "/v1/admin/limits": "stanchion limit list",
    "/v1/shared/workflows": "stanchion workflow list --shared",
    "/v1/admin/leases": "stanchion lease list",
    "/v1/admin/dead-letters": "stanchion dead-letter list",
    "/v1/admin/tenants": "stanchion tenant list",
}
"""The command that lists what was not found, by the request's path."""

_NOT_BEGUN: Final = frozenset({"gate_busy", "draining"})
"""5xx codes after which it is certain that nothing was begun."""

_SENTENCES: Final = {"gate_busy": "the tenant's admission lock is busy"}
"""Messages for people in place of the detail, which programs may compare and so must not change."""

_FIXES: Final = {
    "max_concurrent_runs_reached": "wait for a run to end, or let an admin raise the cap:"
    " stanchion tenant set {tenant} --max-concurrent-runs N",
    "queue_full": "wait for a run to end, or let an admin allow more runs to wait:"
    " stanchion tenant set {tenant} --queue-max N",
    "budget_exhausted": "see what is left: stanchion tenant limits{flags}; or let an admin raise"
    " the limit: stanchion tenant set {tenant} --budget {budget}=LIMIT/WINDOW",
    "job_throttled": "submit more slowly, or let an admin raise the rate:"
    " stanchion tenant set {tenant} --job-rate R",
    "tenant_overloaded": "this tenant has too much under way: send less at once, or slower",
    "idempotency_mismatch": "give a new --idempotency-key, or send what was sent with this one",
    "gate_busy": "another process holds the admission lock; an operator can see which:"
    " stanchion lease list",
    "gate_unavailable": "look at the server's /readyz and at its store and lock server",
    "limit_check_failed": "look at the server's /readyz and at its store",
    "store_unavailable": "look at the server's /readyz and at its store",
    "locks_unavailable": "look at the server's /readyz and at its lock server",
    "draining": "this server is stopping: retry, or use another replica",
    "internal": "look for the request id in the server's log",
}


class CallContext(NamedTuple):
    """The caller's options that hints about the next command depend on."""

    has_key: bool = False
    tenant: str | None = None
    flags: str = ""
    """Flags of the command line that the next command needs too: `` --tenant acme``."""
    role: str | None = None
    """The role that the whole command needs, if that is more than this request does."""


def exit_for(status: int) -> Exit:
    """The exit code for a refusal with this HTTP status."""
    is_broken = status >= _SERVER_ERROR_MIN
    return Exit.UNAVAILABLE if is_broken else _EXITS.get(status, Exit.FAILED)


def error_from(document: object, *, status: int, path: str, caller: CallContext) -> CliError:
    """The error for a problem document, or for any other body."""
    problem: Mapping[str, Any] = document if isinstance(document, dict) else {}
    code = str(problem.get("code", ""))
    text, faults = _once(_text(problem, code), _faults(problem.get("errors")))
    text, faults = _flag(text), [_flag(each) for each in faults]
    if text == _NO_STEP and (step := _step(path)) is not None:
        text = f"there is no step '{step[1]}' of run '{step[0]}'"
    elif code == "not_found" and (named := _named(path)) and named not in text:
        text = f"{text}: {named}"
    if code == "forbidden" and caller.role is not None:
        text = re.sub(_ROLES, rf"\1 the role {caller.role}", text, count=1)
    return CliError(
        _message(problem, code, text),
        exit_for(status),
        faults=faults,
        fix=_fix(problem, code, path, caller),
        problem=dict(problem),
        may_have_happened=status >= _SERVER_ERROR_MIN and code not in _NOT_BEGUN,
    )


def _text(problem: Mapping[str, Any], code: str) -> str:
    said = problem.get("detail") or problem.get("title") or "the server refused"
    return _SENTENCES.get(code, str(said))


def _named(path: str) -> str | None:
    """What the path names: ``report`` in ``/v1/workflows/report/runs``; nothing in a list's."""
    named = (*_LISTS, "/v1/jobs")
    near = max((each for each in named if path.startswith(f"{each}/")), key=len, default=None)
    return None if near is None else _unquoted(path.removeprefix(f"{near}/").split("/")[0])


def _unquoted(part: str) -> str:
    from urllib.parse import unquote  # noqa: PLC0415 - only for an error: 2 ms of every command

    return unquote(part)


_NO_STEP: Final = "there is no such step"


def _step(path: str) -> tuple[str, str] | None:
    """The run and the step that the path names."""
    match path.split("/")[1:]:
        case ["v1", "runs", run_id, "steps", step_id, *_]:
            return _unquoted(run_id), _unquoted(step_id)
        case _:
            return None


def _flag(text: str) -> str:
    """The text with the flag in place of the header that the flag sets."""
    return text.replace("X-Stanchion-Tenant", "--tenant")


def _once(text: str, faults: list[str]) -> tuple[str, list[str]]:
    """Remove the first fault where the detail already ends with it, or consists of it."""
    if not faults:
        return text, []
    first, *others = faults
    if text in {first, f"query: {first}"}:
        return ("the request is not valid", faults) if others else (first, [])
    return text.removesuffix(f": {first}"), faults


def _message(problem: Mapping[str, Any], code: str, text: str) -> str:
    parts = [f"{text} ({code})" if code else text]
    limit, active = problem.get("limit"), problem.get("active")
    if limit is not None and active is not None:
        parts.append(f"{active} of {limit} runs are active")
    retry_after_ms = problem.get("retry_after_ms")
    if problem.get("budget") is not None and problem.get("retry_class") is None:
        # No retry so soon can succeed.
        resets_at = problem.get("resets_at")
        parts.append("it never resets" if resets_at is None else f"it resets at {clock(resets_at)}")
    elif isinstance(retry_after_ms, int | float):
        parts.append(f"retry in {retry_after_ms / 1000:.1f} s")
    if code == "internal":
        parts.append(f"request id {problem.get('request_id')}")
    return "; ".join(parts)


def _faults(errors: object) -> list[str]:
    if not isinstance(errors, list):
        return []
    return [fault_line(error) for error in errors if isinstance(error, dict)]


def fault_line(error: Mapping[str, Any]) -> str:
    """One fault of a file or a request, with its place."""
    line, path, message = error.get("line"), error.get("path"), error.get("message", "")
    place = ": ".join(part for part in (f"line {line}" if line else "", str(path or "")) if part)
    return f"{place}: {message}" if place else str(message)


def _fix(problem: Mapping[str, Any], code: str, path: str, caller: CallContext) -> str | None:
    detail = str(problem.get("detail", ""))
    match code:
        case "unauthenticated":
            return _authenticated(caller)
        case "forbidden":
            return _allowed(detail, caller)
        case "not_found":
            return _found(detail, path, caller)
        case "conflict":
            return _settled(detail, path, caller)
        case "invalid_input":
            return _fitting(path, caller)
        case "invalid_workflow" | "invalid_request":
            return _mended(problem, path, caller)
        case "upgrade_unfinished":
            remedy = problem.get("remedy")
            return remedy if isinstance(remedy, str) else None
        case _:
            if code not in _FIXES:
                return None
            return _FIXES[code].format(
                tenant=caller.tenant or "TENANT",
                flags=caller.flags,
                budget=problem.get("budget", "NAME"),
            )


def _authenticated(caller: CallContext) -> str:
    if caller.has_key:
        cause = "the key is unknown or revoked, or has expired"
        wrong = f"{cause}: check --api-key or STANCHION_API_KEY"
    else:
        wrong = "give a key with --api-key or STANCHION_API_KEY"
    return f"{wrong}; if no admin key is left, restart the server with STANCHION_ADMIN_KEY set"


def _mended(problem: Mapping[str, Any], path: str, caller: CallContext) -> str | None:
    """A hint for a workflow or step that does not exist, or a key's role that is for one tenant."""
    # The words decide, as below.
    said = " ".join([str(problem.get("detail", "")), *_faults(problem.get("errors"))])
    if path.endswith("/rerun") and "has no step" in said:
        return f"see the run's steps: stanchion run show {path.split('/')[3]}{caller.flags}"
    one = re.search(_OF_ONE_TENANT, said)
    if one is not None and path == "/v1/admin/keys":
        return (
            "name its tenant:"
            f" stanchion key create --role {one[1]} --for TENANT{caller.flags};"
            " for all tenants, use the role operator:"
            f" stanchion key create --role operator --for '*'{caller.flags}"
        )
    missing = re.search(_MISSING_WORKFLOW, said)
    if problem.get("code") == "invalid_workflow" and missing is not None:
        flag = " --shared" if missing[1] else ""
        return f"apply that workflow first: stanchion workflow apply{flag} FILE{caller.flags}"
    if "there is no such workflow" in said:
        return f"see what there is: stanchion workflow list{caller.flags}"
    return None


# Patterns are compiled when an error is shown: every command loads this module.
_MISSING_WORKFLOW: Final = "there is no (shared )?workflow"
_OF_ONE_TENANT: Final = r"a key with the role (\w+) is for one tenant"


def _found(detail: str, path: str, caller: CallContext) -> str | None:
    """A hint where to find what was not found."""
    parts = path.split("/")
    if path.startswith("/v1/runs/") and ("no step" in detail or detail == _NO_STEP):
        return f"see the run's steps: stanchion run show {parts[3]}{caller.flags}"
    if "there is no version" in detail:
        flag = " --shared" if parts[2] == "shared" else ""
        return f"see the one in force: stanchion workflow show {parts[-1]}{flag}{caller.flags}"
    if path.startswith("/v1/jobs/"):
        run_id, colon, _ = _unquoted(parts[3]).partition(":")
        run = run_id if colon else "RUN"
        return (
            "a step's job is called RUN:STEP@ATTEMPT; see the jobs that a run waits for:"
            f" stanchion run why {run}{caller.flags}"
        )
    near = max((each for each in _LISTS if path.startswith(each)), key=len, default=None)
    if near is None:
        return None
    is_named = caller.tenant not in {None, "default"} or near.startswith(
        ("/v1/admin", "/v1/shared")
    )
    if near in _OF_ALL_TENANTS and caller.tenant != "*":
        url, _, _ = caller.flags.partition(" --tenant ")
        elsewhere = f"; of all tenants: {_LISTS[near]}{url} --tenant '*'"
    else:
        elsewhere = "" if is_named else _OR_ANOTHER_TENANTS
    return f"see what there is: {_LISTS[near]}{caller.flags}{elsewhere}"


_OF_ALL_TENANTS: Final = frozenset({"/v1/runs", "/v1/bulk", "/v1/schedules"})
"""What can be listed of all tenants at once."""


_OR_ANOTHER_TENANTS: Final = "; of another tenant: add --tenant NAME"
"""The command line does not know whether the key is for one tenant or for all."""


def _fitting(path: str, caller: CallContext) -> str | None:
    """A hint where the schema is that an input or the data of a decision must match."""
    match path.split("/")[1:]:
        case ["v1", "runs", _, "steps", _, _]:
            return (
                "give --data JSON or --data @FILE; its data_schema:"
                f" stanchion approval list -o json{caller.flags}"
            )
        case ["v1", "workflows", workflow_id, "runs", *_]:
            return f"see its input_schema: stanchion workflow show {workflow_id}{caller.flags}"
        case _:
            return None


def _settled(detail: str, path: str, caller: CallContext) -> str | None:
    # The detail's words decide, because all conflicts have the same code; it is only a hint.
    if "the first key" in detail:
        command = f"stanchion key create --role admin --for '*'{caller.flags}"
        return f"create an admin key first: {command}"
    if path.endswith("/rerun") and "still" in detail:
        run_id = path.split("/")[3]
        return (
            f"wait until it ends: stanchion run watch {run_id}{caller.flags};"
            f" or end it: stanchion run cancel {run_id}{caller.flags}"
        )
    return None


_ROLES: Final = r"(needs|with) the role (\w+)(?: or \w+)*"
"""The roles that are needed, the least first, in the detail of a refusal."""


def _allowed(detail: str, caller: CallContext) -> str:
    # The detail's words decide, as above.
    if detail.startswith("without keys"):
        return "call from this machine, with --url http://127.0.0.1:PORT; or give the server keys"
    if detail.startswith("not_by_starter:"):
        # Another key is no remedy: the rule asks for the judgement of a second person.
        if "is unknown" in detail:
            return "cancel the run and start it again: then it is known who started it"
        return "another person must decide, with their own key"
    if "role" not in detail and "tenant" in detail:
        if caller.tenant in {None, "*"}:
            other = "all tenants: stanchion key create --role operator --for '*'"
        else:
            other = f"that tenant: stanchion key create --role ROLE --for {caller.tenant}"
        return (
            "leave --tenant and STANCHION_TENANT out or name the key's own tenant, or use a key for"
            f" {other}"
        )
    needed = re.search(_ROLES, detail)
    role = caller.role or (needed[2] if needed else "ROLE")
    tenant = "'*'" if "for all tenants" in detail else "TENANT"
    if tenant == "'*'" and role in {"approver", "runner"}:
        role = "operator"  # the least role that includes theirs and can be for all tenants
    return (
        "use a key that may do this; an admin creates one with:"
        f" stanchion key create --role {role} --for {tenant}"
    )
