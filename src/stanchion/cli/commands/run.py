"""``stanchion run`` and ``stanchion job``: start runs, watch them, decide about them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, Final

import click

from stanchion.cli.api import ApiAnswer, path_to
from stanchion.cli.completion import (
    complete_for_each_steps,
    complete_runs,
    complete_steps,
    complete_undecided,
    complete_undecided_steps,
    complete_workflows,
)
from stanchion.cli.errors import CliError, Exit, exit_for
from stanchion.cli.runs import (
    FAILURES,
    batch_lines,
    change_lines,
    failure,
    follow,
    item_rows,
    job_wait,
    queue_text,
    rerun_lines,
    run_lines,
    run_rows,
    timeline_lines,
    wait_lines,
    why_lines,
)
from stanchion.cli.session import (
    Session,
    calls_server,
    input_option,
    json_of,
    key_option,
    limit_and_cursor,
    list_command,
    number_in,
    parsed_json,
    read_bounded,
    show_page,
    show_repeatedly,
    time_of,
    watch_option,
    with_options,
)
from stanchion.cli.text import (
    SpareHeading,
    cell,
    clock,
    excerpt,
    lines_of,
    pairs,
    table,
    whole_ident,
)
from stanchion.core.queue_terms import PRIORITY_DEFAULT, OnFull, Priority

_STATUSES = (
    *("queued", "pending", "running", "waiting"),
    *("succeeded", "failed", "cancelled", "timed_out"),
)
_ITEM_STATUSES = (*_STATUSES[1:], "skipped")
"""An item is never queued: it begins in a run that has a slot."""

_WAITS_MAX: Final = 10

_watch_option = click.option("--watch", is_flag=True, help="Stay until the run has ended.")


@click.group("run")
def run() -> None:
    """Start runs, watch them, decide about them."""


@run.command("start")
@click.argument("workflow_id", metavar="WORKFLOW", shell_complete=complete_workflows)
@input_option("What the run is given")
@click.option(
    "--label",
    "labels",
    metavar="NAME:VALUE",
    multiple=True,
    help="Mark the run, to find it with run list --label; may be repeated.",
)
@click.option(
    "--priority",
    type=number_in(Priority),
    metavar="0-9",
    help=f"If it must wait for a slot: higher ones are served first (default {PRIORITY_DEFAULT}).",
)
@click.option(
    "--fairness-key",
    metavar="KEY",
    help="If it must wait for a slot: runs of one priority take turns by this key.",
)
@click.option(
    "--on-full",
    type=click.Choice([each.value for each in OnFull]),
    help="What to do if no slot is free: as the tenant does, or reject.",
)
@key_option("run")
@_watch_option
@calls_server
def start_run(  # noqa: PLR0913 - one for each option
    session: Session,
    workflow_id: str,
    given: str,
    labels: tuple[str, ...],
    key: str | None,
    *,
    priority: int | None,
    fairness_key: str | None,
    on_full: str | None,
    watch: bool,
) -> int:
    """Start a run. If its tenant is full and queues, it waits for a slot."""
    body: dict[str, Any] = {"input": json_of(given, "--input")}
    if labels:
        body["labels"] = labels_of(labels)
    wishes = {"priority": priority, "fairness_key": fairness_key, "on_full": on_full}
    body |= {name: wish for name, wish in wishes.items() if wish is not None}
    answer = session.create(path_to("workflows", workflow_id, "runs"), body, key)
    return show_started(session, answer, watch=watch)


@run.command("batch")
@click.argument("workflow_id", metavar="WORKFLOW", shell_complete=complete_workflows)
@click.argument("file", metavar="FILE", type=click.File("rb"))
@key_option("run")
@calls_server
def start_batch(session: Session, workflow_id: str, file: BinaryIO, key: str | None) -> int:
    """Start many runs: FILE has one JSON object a line, which describes a run.

    Its members are input, labels, priority, fairness_key, on_full, and key, the run's own
    idempotency key; all are optional.

    Each run is judged by itself, in the order of the lines. Lines without a key get one from the
    key of the command and their place among the runs. FILE may be - for standard input.

    If runs were refused, the exit code is that of the refusal that a retry helps least: 1 before 3
    (not found), 3 before 5 (unavailable), 5 before 4 (full).
    """
    lines = _rows(read_bounded(file, "FILE"))
    rows = list(lines.values())
    path = path_to("workflows", workflow_id, "runs", "batch")
    results: list[dict[str, Any]] = []
    with session.naming_key(
        key,
        "runs may have been started: to retry without starting others",
        has_begun=lambda: bool(results),
    ) as shared:
        keyed = [row | _key_of(row, f"{shared}/{place}") for place, row in enumerate(rows)]
        while len(results) < len(keyed):
            some = _portion(keyed[len(results) : len(results) + _BATCH_MAX])
            results += session.create(path, {"runs": some}, shared).document["results"]
    session.show({"results": results}, lambda answer: batch_lines(answer, lines))
    refused = sum(each["status"] not in _OK for each in results)
    if refused:
        session.note(f"not started: {refused} of {len(results)} runs; to try again: add")
        session.note(f"  --idempotency-key {shared}")
    return _batch_exit({each["status"] for each in results})


def _batch_exit(statuses: set[int]) -> Exit:
    """The exit code of the refusal that a retry helps least."""
    codes = {exit_for(status) for status in statuses - _OK}
    order = (Exit.FAILED, Exit.NOT_FOUND, Exit.UNAVAILABLE, Exit.FULL)
    return next((code for code in order if code in codes), Exit.OK)


def _key_of(row: dict[str, Any], given: str) -> dict[str, Any]:
    """The key of a row without one. An empty one stays: the server refuses it."""
    return {"key": given} if row.get("key") is None else {}


def _portion(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows, as many as one request may carry."""
    size, some = 0, list[dict[str, Any]]()
    for row in rows:
        size += len(json.dumps(row)) + 2
        if some and size > _BATCH_BYTES_MAX:
            break
        some.append(row)
    return some


def _rows(text: bytes) -> dict[int, dict[str, Any]]:
    """The runs in the file, by the number of their line."""
    rows = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
        except ValueError as error:
            raise CliError(f"line {number} is not JSON: {error}", Exit.USAGE) from error
        if not isinstance(row, dict):
            raise CliError(f"line {number} is not a JSON object", Exit.USAGE)
        rows[number] = row
    if not rows:
        raise CliError("there are no runs in the file", Exit.USAGE)
    return rows


_BATCH_MAX: Final = 1_000
_BATCH_BYTES_MAX: Final = 1_000_000
_OK: Final = frozenset({200, 202})


class _RerunPart(click.Choice[str]):
    """A choice that also accepts the API's spelling, with ``_``."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value.replace("_", "-"), param, ctx)


@run.command("rerun")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@click.option(
    "--from-step",
    metavar="STEP",
    shell_complete=complete_steps,
    help="Keep the results of the steps before this one.",
)
@click.option(
    "--only",
    type=_RerunPart(("failed-items",)),
    help="Repeat only items that did not succeed, and what builds on them.",
)
@click.option(
    "--version",
    type=click.Choice(("same", "newest")),
    help="The workflow version to run; same, unless given.",
)
@click.option(
    "--input",
    "given",
    metavar="JSON|@FILE",
    help="Instead of the old run's input; @- reads standard input.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be reused and what would run.")
@key_option("run")
@_watch_option
@calls_server
def rerun_run(
    session: Session,
    /,
    run_id: str,
    key: str | None,
    *,
    dry_run: bool,
    watch: bool,
    **chosen: str | None,
) -> int:
    """Start a new run from a finished one.

    --from-step and --only keep results of the old run, so they cannot be used together, nor with
    --version newest or --input.
    """
    # Only what is given, so that a server without the newer members accepts the rest.
    body: dict[str, Any] = {"from_step": chosen["from_step"]}
    if chosen["only"] is not None:
        body["only"] = chosen["only"].replace("-", "_")
    if chosen["version"] is not None:
        body["version"] = chosen["version"]
    if chosen["given"] is not None:
        body["input"] = json_of(chosen["given"], "--input")
    path = path_to("runs", run_id, "rerun")
    if dry_run:
        session.show(session.send("POST", path, {**body, "dry_run": True}).document, rerun_lines)
        return Exit.OK
    return show_started(session, session.create(path, body, key), watch=watch)


selects_runs = with_options(
    click.option(
        "--status",
        "statuses",
        type=click.Choice(_STATUSES),
        multiple=True,
        help="Only runs in this state; of several, in one of them.",
    ),
    click.option(
        "--workflow",
        "workflow_id",
        metavar="ID",
        shell_complete=complete_workflows,
        help="Only runs of this workflow.",
    ),
    click.option(
        "--label",
        "labels",
        metavar="NAME:VALUE",
        multiple=True,
        help="Only runs with this label; of several, with all of them.",
    ),
    click.option("--since", metavar="TIME", help="Created then or later, written like --until."),
    click.option(
        "--until", metavar="TIME", help="Created before: 2026-11-30T12:00:00Z, or 1h ago as 1h."
    ),
    click.option("--rerun-of", metavar="RUN", help="Only reruns of this run."),
)
"""The options that say which runs: those that fit all of them."""


def selection(options: dict[str, Any]) -> dict[str, Any]:
    """The members of the query, or of the filter of a bulk action, that these options name."""
    since, until = options.pop("since"), options.pop("until")
    return {
        "status": options.pop("statuses"),
        "workflow_id": options.pop("workflow_id"),
        "label": tuple(":".join(label_of(each)) for each in options.pop("labels")),
        "since": None if since is None else time_of(since, "--since", ago=True),
        "until": None if until is None else time_of(until, "--until", ago=True),
        "rerun_of": options.pop("rerun_of"),
    }


@run.command("list")
@selects_runs
@watch_option
@limit_and_cursor
@calls_server
def list_runs(
    session: Session,
    /,
    limit: int,
    cursor: str | None,
    *,
    watch: bool,
    **options: Any,  # noqa: ANN401 - the options of selects_runs
) -> None:
    """List runs, newest first; with --tenant '*' of all tenants."""
    only, is_of_all = selection(options), session.server.tenant == "*"
    matching = " match these filters" if any(only.values()) else ""
    what = f"runs of {session.whose}{matching}"

    def show() -> None:
        page = session.get(path_to("runs"), **only, limit=limit, cursor=cursor)
        show_page(session, page, lambda it: run_rows(it, is_of_all=is_of_all), what)

    show_repeatedly(show, watch=watch)


@run.command("show")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@click.option("--timeline", is_flag=True, help="Show its history instead.")
@limit_and_cursor
@calls_server
def show_run(
    session: Session, run_id: str, limit: int, cursor: str | None, *, timeline: bool
) -> None:
    """Show a run and its steps. --limit and --cursor are for --timeline."""
    if timeline:
        path = path_to("runs", run_id, "timeline")
        show_page(session, session.get(path, limit=limit, cursor=cursor), timeline_lines, "entries")
    else:
        run = session.get(path_to("runs", run_id))
        waits = {} if session.is_json else _waits(session, run)
        session.show(run, lambda shown: run_lines(shown, waits))


@run.command("why")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@watch_option
@calls_server
def explain_run(session: Session, run_id: str, *, watch: bool) -> None:
    """Say why a run does not go on, and what to do."""
    path, tenant = path_to("runs", run_id, "why"), session.server.tenant
    show_repeatedly(
        lambda: session.show(session.get(path), lambda answer: why_lines(answer, tenant)),
        watch=watch,
    )


@run.command("waits")
@watch_option
@calls_server
def list_waits(session: Session, *, watch: bool) -> None:
    """Show the runs that have waited longest: for a slot, a lock, a worker.

    With --tenant '*' of all tenants.
    """

    def show() -> None:
        answer = session.get(path_to("waits"))
        session.show(answer, wait_lines)
        if not answer["waits"]:
            session.note(f"no run of {session.whose} waits for a slot, a lock or a worker")

    show_repeatedly(show, watch=watch)


@run.command("items")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@click.argument("step_id", metavar="STEP", shell_complete=complete_for_each_steps)
@click.option("--status", type=click.Choice(_ITEM_STATUSES), help="Only items in this state.")
@limit_and_cursor
@calls_server
def list_items(
    session: Session, run_id: str, step_id: str, status: str | None, limit: int, cursor: str | None
) -> None:
    """List the items of a for-each step, in the order of its list."""
    path = path_to("runs", run_id, "steps", step_id, "items")
    page = session.get(path, status=status, limit=limit, cursor=cursor)
    why = "" if page["items"] or session.is_json else _why_no_items(session, run_id, step_id)
    what = f"items of step {step_id}{why}"
    show_page(session, page, lambda page: item_rows(page, step_id), what)


def _why_no_items(session: Session, run_id: str, step_id: str) -> str:
    """Why a step has no items, as the end of a sentence; empty if it has a list, or is unknown."""
    try:
        step = session.get(path_to("runs", run_id))["steps"].get(step_id)
    except CliError:  # it is only a remark
        return ""
    if step is None or step.get("items_total") is not None:
        return ""
    if step["status"] in {"running", "waiting", "succeeded"}:
        return ": it is not a for-each"
    if step["status"] in {"pending", "skipped"}:
        return f": the step is {step['status']}"
    return ": it is not a for-each, or it ended before its list was known"


@run.command("watch")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@calls_server
def watch_run(session: Session, run_id: str) -> int:
    """Wait until a run has ended. Exits with 0 only if it succeeded."""
    return _watched(session, run_id)


@run.command("cancel")
@click.argument("run_id", metavar="RUN", shell_complete=complete_runs)
@click.option("--reason", metavar="TEXT", help="Why; it is kept in the timeline.")
@calls_server
def cancel_run(session: Session, run_id: str, reason: str | None) -> None:
    """Cancel a run now."""
    _change(session, path_to("runs", run_id, "cancel"), {"reason": reason})


_decision_options = with_options(
    click.option("--comment", metavar="TEXT", help="Kept in the timeline."),
    click.option(
        "--data", metavar="JSON|@FILE", help="Data of the decision, for the steps that follow."
    ),
)


@run.command("approve")
@click.argument("run_id", metavar="RUN", shell_complete=complete_undecided)
@click.argument("step_id", metavar="STEP", shell_complete=complete_undecided_steps)
@_decision_options
@calls_server
def approve_step(
    session: Session, run_id: str, step_id: str, comment: str | None, data: str | None
) -> None:
    """Approve a step that waits for it."""
    decide(session, "approve", run_id, step_id, comment=comment, data=data)


@run.command("reject")
@click.argument("run_id", metavar="RUN", shell_complete=complete_undecided)
@click.argument("step_id", metavar="STEP", shell_complete=complete_undecided_steps)
@_decision_options
@calls_server
def reject_step(
    session: Session, run_id: str, step_id: str, comment: str | None, data: str | None
) -> None:
    """Reject a step that waits for approval."""
    decide(session, "reject", run_id, step_id, comment=comment, data=data)


def decide(
    session: Session, verb: str, run_id: str, step_id: str, *, comment: str | None, data: str | None
) -> None:
    """Send a decision and show its result."""
    body: dict[str, Any] = {"comment": comment}
    if data is not None:
        body["data"] = json_of(data, "--data")
    _change(session, path_to("runs", run_id, "steps", step_id, verb), body)


@click.group("approval")
def approval() -> None:
    """See what waits for a decision, and decide."""


list_command(
    approval,
    "List approvals that wait for a decision, oldest first; with --tenant '*' of all tenants.",
    path_to("approvals"),
    "approvals",
    {
        "RUN": ("run_id", whole_ident),
        "STEP": ("step_id", whole_ident),
        "TENANT": "tenant",
        SpareHeading("WORKFLOW"): "workflow_id",
        SpareHeading("STARTER", 2): "starter",
        "SINCE": ("since", clock),
        SpareHeading("EXPIRES", 3): ("expires_at", clock),
        "MESSAGE": ("message", excerpt),
    },
    what="pending approvals",
    watch=True,
    is_of_tenant=True,
)


approval.add_command(approve_step)
approval.add_command(reject_step)


def label_of(text: str) -> tuple[str, str]:
    """The name and value of NAME:VALUE, as lists and filters write it, or of NAME=VALUE."""
    found = re.fullmatch("([^:=]+)[:=](.+)", text)
    if found is None:
        raise CliError(f"--label {text}: not NAME:VALUE", Exit.USAGE, fix="write --label team:red")
    return found[1], found[2]


def labels_of(texts: tuple[str, ...]) -> dict[str, str]:
    """The labels to mark a run with. Raises ``CliError`` if a name is given twice."""
    labels: dict[str, str] = {}
    for name, value in map(label_of, texts):
        if name in labels:
            raise CliError(
                f"--label {name} is given twice: {name}:{labels[name]} and {name}:{value}",
                Exit.USAGE,
                fix=f"give --label {name}:VALUE once",
            )
        labels[name] = value
    return labels


def _waits(session: Session, run: dict[str, Any]) -> dict[str, str]:
    """What the jobs of the first few steps wait for, by step."""
    waiting = [name for name, step in run["steps"].items() if step.get("waiting_for") == "job"]
    found, ready = {}, set()
    for name in waiting[:_WAITS_MAX]:
        job_id = f"{run['run_id']}:{name}@{run['steps'][name]['attempt']}"
        with suppress(CliError):  # the job may have ended since: the run is shown without it
            job = session.get(path_to("jobs", job_id))
            wait = job_wait(job)
            if wait is not None:
                found[name] = wait
            if job["status"] == "ready":
                ready.add(name)
    return found | _limited(session, run["run_id"], ready)


def _limited(session: Session, run_id: str, ready: set[str]) -> dict[str, str]:
    """The topic limits that hold back ready jobs, by step: no worker can get those."""
    if not ready:
        return {}
    with suppress(CliError):
        return {
            finding["step_id"]: f"topic limit {cell(finding['blocked_by']['id'])}"
            for finding in session.get(path_to("runs", run_id, "why"))["findings"]
            if finding["code"] == "topic_limited" and finding["step_id"] in ready
        }
    return {}


def show_started(session: Session, answer: ApiAnswer, *, watch: bool = False) -> int:
    """Show a run that was started, and why if it failed at once. Returns the exit code."""
    document: dict[str, Any] = answer.document
    if watch:
        session.note(f"run {document['run_id']}")
        return _watched(session, document["run_id"])
    session.show(document, lambda run: [f"{run['run_id']}  {run['status']}"])
    if document.get("position") is not None:
        session.note(f"no slot is free: {queue_text(document)}")
    if document["status"] not in FAILURES:
        return Exit.OK
    # It ended in the step that started it: no one has seen the reason yet.
    run = session.get(path_to("runs", document["run_id"]))
    session.note(f"the run has {document['status']} at once: {failure(run['error'])}")
    return Exit.FAILED


def _watched(session: Session, run_id: str) -> int:
    run = follow(session, run_id)
    session.show(run, run_lines)
    return Exit.OK if run["status"] == "succeeded" else Exit.FAILED


def _change(session: Session, path: str, body: dict[str, str | None]) -> None:
    session.show(session.send("POST", path, body).document, change_lines)


@click.group("job")
def job() -> None:
    """Submit single jobs."""


@job.command("submit")
@click.argument("topic", metavar="TOPIC")
@input_option("What the worker is given")
@key_option("job")
@calls_server
def submit_job(session: Session, topic: str, given: str, key: str | None) -> None:
    """Submit one job for the workers of TOPIC."""
    body = {"topic": topic, "input": json_of(given, "--input")}
    answer = session.create(path_to("jobs"), body, key)
    session.show(answer.document, lambda job: [f"{cell(job['job_id'])}  {cell(job['status'])}"])


@job.command("show")
@click.argument("job_id", metavar="JOB")
@calls_server
def show_job(session: Session, job_id: str) -> None:
    """Show a job, of a workflow's step or submitted alone."""
    session.show(session.get(path_to("jobs", job_id)), _job_lines)


@job.command("topics")
@watch_option
@calls_server
def list_topics(session: Session, *, watch: bool) -> None:
    """List the topics whose jobs wait for a worker, of all tenants."""

    def show() -> None:
        ready = session.get(path_to("worker", "topics"))
        session.show(ready, _topic_rows)
        if not ready["ready"]:
            session.note("no job waits for a worker")

    show_repeatedly(show, watch=watch)


def _topic_rows(answer: dict[str, Any]) -> Iterator[str]:
    if answer["ready"]:
        rows = ((cell(topic), cell(count)) for topic, count in answer["ready"].items())
        yield from table(("TOPIC", "READY"), rows)


def _job_lines(job: dict[str, Any]) -> Iterator[str]:
    error, ends_in_ms = job["error"], job.get("lease_ends_in_ms")
    yield from pairs(
        [
            ("job", cell(job["job_id"])),
            ("run", cell(job["run_id"])),
            ("step", cell(job["step_id"])),
            ("topic", cell(job["topic"])),
            ("status", cell(job["status"])),
            ("run status", cell(job["run_status"])),
            ("attempt", cell(job["attempt"])),
            ("deliveries", cell(job["deliveries"])),
            ("worker", cell(job.get("worker_id"))),
            ("lease ends in", "-" if ends_in_ms is None else f"{ends_in_ms / 1000:.1f} s"),
            ("progress", excerpt(cell(job.get("progress")))),
            ("error", "-" if error is None else f"{cell(error['message'])} ({error['code']})"),
        ]
    )
    if job["output"] is not None:
        yield ""
        yield "output"
        yield from (f"  {line}" for line in lines_of(job["output"]))
