"""``stanchion workflow``: check, apply, list and show workflows. ``check`` needs no server."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from stanchion.cli.api import Content, path_to
from stanchion.cli.completion import complete_shared_workflows, complete_workflows
from stanchion.cli.errors import CliError, Exit, fault_line, needs_server_packages
from stanchion.cli.session import (
    Session,
    calls_server,
    calls_server_yaml,
    limit_and_cursor,
    output_option,
    read_bounded,
    show_page,
)
from stanchion.cli.text import (
    Column,
    cell,
    clock,
    lines_of,
    pairs,
    printable,
    rows_of,
    sentence,
)


@click.group("workflow")
def workflow() -> None:
    """Check, apply, list and show workflows."""


_shared_option = click.option(
    "--shared", is_flag=True, help="Workflows for all tenants; needs a key for all tenants."
)


def _path(*names: str, shared: bool) -> str:
    given = click.get_current_context().get_parameter_source("tenant")
    if shared and given is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("a shared workflow is for all tenants: leave --tenant out")
    return path_to(*(("shared",) if shared else ()), "workflows", *names)


@workflow.command("apply")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--id", "workflow_id", metavar="ID", help="The id, if the file has none.")
@_shared_option
@calls_server
def apply(
    session: Session, files: tuple[str, ...], workflow_id: str | None, *, shared: bool
) -> None:
    """Make each FILE the newest version of its workflow; - reads standard input.

    YAML, or JSON if the name ends in .json. Apply a workflow before those that contain it. With
    -o json there is one document a file. A shared workflow is for every tenant without an own
    workflow of its id, and the workflows that it contains are shared ones.
    """
    if workflow_id is not None and len(files) > 1:
        raise click.UsageError("--id goes with one file")
    for number, file in enumerate(files, start=1):
        try:
            _apply(session, file, workflow_id, shared=shared)
        except CliError as error:
            untried = files[number:]
            if untried:
                error.faults = [*error.faults, f"not tried: {', '.join(untried)}"]
            raise


def _apply(session: Session, file: str, workflow_id: str | None, *, shared: bool) -> None:
    text = _read(file)
    is_json = file.endswith(".json")
    name = workflow_id or _id_of(text, file, is_json=is_json)
    kind = "application/json" if is_json else "application/yaml"
    replaces_shared = not (shared or session.is_json) and _is_shared(session, name)
    try:
        answer = session.send("PUT", _path(name, shared=shared), Content(text, kind))
    except CliError as error:
        error.message = f"{file}: {error.message}"
        if "workflow_id: " in error.message:  # it did not read the file
            found = _faults_of(text, is_json=is_json, workflow_id=workflow_id)
            error.faults = found or error.faults
        raise
    what = "shared workflow" if shared else "workflow"
    session.show(
        answer.document,
        lambda applied: [f"{what} {cell(applied['id'])} is at version {applied['version']}"],
    )
    if replaces_shared:
        session.note(
            f"until now the tenant ran the shared workflow {cell(name)}; from now on it runs its"
            " own version: later versions of the shared workflow and a pin have no effect for it"
        )


def _is_shared(session: Session, workflow_id: str) -> bool:
    """Whether the tenant runs the shared workflow of this id; not if that cannot be found out."""
    try:
        found = session.get(path_to("workflows", workflow_id))
    except CliError:  # only for a remark; sending the file reports what is wrong
        return False
    return bool(found.get("source") == "shared")


def _faults_of(text: bytes, *, is_json: bool, workflow_id: str | None = None) -> list[str]:
    """The faults that ``check`` finds; none without the packages that it needs."""
    try:
        from stanchion.core.workflow_file import check_workflows  # noqa: PLC0415 - others do not pay
    except ModuleNotFoundError:
        return []
    checked = check_workflows(
        {"file": (text, "json" if is_json else "yaml")}, workflow_id=workflow_id
    )
    return [fault_line(msgspec.to_builtins(fault)) for fault in checked["file"].faults]


@workflow.command("check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--id", "workflow_id", metavar="ID", help="The id, if the file has none.")
@output_option("text", "json")
def check(files: tuple[str, ...], workflow_id: str | None, output: str) -> int:
    """Check each FILE, without a server; - reads standard input.

    The faults are those that apply would get. Sub-workflows are checked together with the workflows
    that contain them if they are among the files; others are listed as not checked. Exit code 1 if
    a file has a fault.
    """
    if workflow_id is not None and len(files) > 1:
        raise click.UsageError("--id goes with one file")
    with needs_server_packages("workflow files are checked with the server's parser, which needs"):
        from stanchion.core.workflow_file import check_workflows  # noqa: PLC0415 - others do not pay
    texts = {file: _read(file) for file in files}
    checked = check_workflows(
        {
            file: (text, "json" if file.endswith(".json") else "yaml")
            for file, text in texts.items()
        },
        workflow_id=workflow_id,
    )
    rows = [
        {
            "file": file,
            "id": found.workflow_id,
            "errors": [msgspec.to_builtins(fault) for fault in found.faults],
            "not_checked": sorted(found.unknown),
        }
        for file, found in checked.items()
    ]
    _show_checked(rows, is_json=output == "json")
    return Exit.FAILED if any(row["errors"] for row in rows) else Exit.OK


def _show_checked(rows: list[dict[str, Any]], *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps({"files": rows}, indent=2))
        return
    # A file that cannot be parsed does not say which workflow it has.
    has_faulty = any(row["id"] is None for row in rows)
    without = "in none of the files without faults" if has_faulty else "not among the files"
    for row in rows:
        count = len(row["errors"])
        verdict = f"{count} fault{'' if count == 1 else 's'}" if count else "ok"
        click.echo(printable(f"{row['file']}: {verdict}"))
        for error in row["errors"]:
            click.echo(sentence(printable(f"  {fault_line(error)}"), "    "))
        for unknown in row["not_checked"]:
            line = f"  not checked: workflow {unknown}, which is {without}"
            click.echo(sentence(printable(line), "    "))


@workflow.command("list")
@_shared_option
@limit_and_cursor
@calls_server
def list_workflows(session: Session, limit: int, cursor: str | None, *, shared: bool) -> None:
    """List the tenant's workflows, own and shared, in the versions in force."""
    page = session.get(_path(shared=shared), limit=limit, cursor=cursor)
    show_page(session, page, lambda page: rows_of(page["workflows"], _ROWS), "workflows")


@workflow.command("usage")
@click.argument("workflow_id", metavar="ID", shell_complete=complete_shared_workflows)
@limit_and_cursor
@calls_server
def usage(session: Session, workflow_id: str, limit: int, cursor: str | None) -> None:
    """List what each tenant runs under the ID of a shared workflow."""
    path = _path(workflow_id, "usage", shared=True)
    page = session.get(path, limit=limit, cursor=cursor)
    show_page(session, page, lambda page: rows_of(page["tenants"], _USES), "tenants")


@workflow.command("show")
@click.argument("workflow_id", metavar="ID", shell_complete=complete_workflows)
@click.option("--version", type=int, metavar="N", help="An earlier version.")
@_shared_option
@calls_server_yaml
def show(session: Session, workflow_id: str, version: int | None, *, shared: bool) -> None:
    """Show a workflow, the tenant's own one or else the shared one.

    With -o yaml it is a file that can be applied again: every member as it was sent, without the
    comments and with defaults left out.
    """
    found = session.get(_path(workflow_id, shared=shared), version=version)
    session.show(found["definition"] if session.is_yaml else found, _whole)


def _read(file: str) -> bytes:
    try:
        if file == "-":
            return read_bounded(sys.stdin.buffer, "standard input")
        with Path(file).open("rb") as opened:
            return read_bounded(opened, file)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", Exit.USAGE) from error


# A top-level key of a YAML block mapping is at the start of a line, and nothing else can be there.
# So the id is found without a YAML parser, which the command line does not depend on.
_YAML_ID = re.compile(rb"""^id:[ \t]+(["']?)([^"'#\r\n]+?)\1[ \t]*(?:#.*)?\r?$""", re.MULTILINE)


def _id_of(text: bytes, file: str, *, is_json: bool) -> str:
    """The workflow's id in the file. The server checks the rest."""
    name = _json_id(text, file) if is_json else _YAML_ID.search(text)
    if isinstance(name, re.Match):
        name = name[2].decode(errors="replace")
    if isinstance(name, str) and name:
        return name
    raise CliError(
        f"{file} has no id",
        Exit.USAGE,
        faults=_faults_of(text, is_json=is_json),
        fix="add 'id: NAME' to it, or give --id NAME",
    )


def _json_id(text: bytes, file: str) -> object:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{file} is not JSON: {error}", Exit.FAILED) from error
    return document.get("id") if isinstance(document, dict) else None


def _source(workflow: dict[str, Any]) -> str:
    return "shared, pinned" if workflow["pinned"] else cell(workflow["source"])


_ROWS: Final[Mapping[str, Column]] = {
    "ID": "id",
    "VERSION": "version",
    "SOURCE": _source,
    "RISK": "risk",
    "CREATED": ("created_at", clock),
}
_USES: Final[Mapping[str, Column]] = {
    "TENANT": "tenant",
    "SOURCE": "source",
    "VERSION": "version",
    "PIN": "pin",
    "ACTIVE": "active",
}


def _whole(workflow: dict[str, Any]) -> Iterator[str]:
    yield from pairs(
        [
            ("workflow", cell(workflow["id"])),
            ("version", cell(workflow["version"])),
            ("source", _source(workflow)),
            ("risk", cell(workflow["risk"])),
            ("created", clock(workflow["created_at"])),
        ]
    )
    yield ""
    yield from lines_of(workflow["definition"])
