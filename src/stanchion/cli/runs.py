"""Runs as text: lists, one run, its timeline, and a live view until it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from stanchion.cli.api import path_to
from stanchion.cli.errors import CliError, Exit
from stanchion.cli.session import Session
from stanchion.cli.text import (
    COLORS,
    Column,
    FlexibleCell,
    SpareHeading,
    VersionedCell,
    cell,
    clock,
    clock_ms,
    excerpt,
    ident,
    lines_of,
    pairs,
    rows_of,
    sentence,
    table,
    whole_ident,
)

_ATTEMPT = FlexibleCell("ATTEMPT", "TRY")


def run_rows(page: dict[str, Any], *, is_of_all: bool = False) -> list[str]:
    """A list of runs; of all tenants, with the tenant of each."""
    labels: dict[str, Column] = {SpareHeading("LABELS"): lambda row: label_text(row.get("labels"))}
    has_labels = any(row.get("labels") for row in page["runs"])
    columns: dict[str, Column] = {
        "RUN": ("run_id", whole_ident),
        **({"TENANT": "tenant"} if is_of_all else {}),
        "WORKFLOW": lambda row: VersionedCell(
            f"{cell(row['workflow_id'])}@{row['workflow_version']}"
        ),
        "STATUS": "status",
        "CREATED": ("created_at", clock),
        SpareHeading("FINISHED", 2): ("finished_at", clock),
        **(labels if has_labels else {}),
        "ERROR": ("error", failure),
    }
    return rows_of(page["runs"], columns)


def _versioned(name: str, version: int, of: dict[str, Any]) -> str:
    is_shared = "shared" in (of.get("workflow_source"), of.get("source"))
    return f"{cell(name)}@{version}{' (shared)' if is_shared else ''}"


def _uses(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line with the versions of the sub-workflows, if there are any."""
    used = [_versioned(each["id"], each["version"], each) for each in run.get("uses", ())]
    if used:
        yield "uses", ", ".join(sorted(used))


def batch_lines(answer: dict[str, Any], lines: Iterable[int]) -> Iterator[str]:
    """What became of each run of a batch, with the number of its line in the file."""
    yield from table(
        ("LINE", "STATUS", "RUN", "DETAIL"),
        (
            (
                str(line),
                str(row["status"]),
                whole_ident(row.get("run_id")),
                _batch_detail(row),
            )
            for line, row in zip(lines, answer["results"], strict=False)
        ),
        wraps=True,
    )


def _batch_detail(row: dict[str, Any]) -> str:
    """Why a run was not started, or its place in the queue."""
    if row.get("position") is not None:
        return queue_text(row)
    return cell((row.get("problem") or {}).get("detail", "-"))


def label_text(labels: Mapping[str, str] | None) -> str:
    """The labels of a run, on one line."""
    return ", ".join(cell(f"{name}:{value}") for name, value in (labels or {}).items()) or "-"


def run_lines(run: dict[str, Any], waits: Mapping[str, str] | None = None) -> Iterator[str]:
    """One run with its steps and its output. ``waits``: what steps wait for, where it is known."""
    yield from pairs(
        [
            ("run", cell(run["run_id"])),
            ("workflow", _versioned(run["workflow_id"], run["workflow_version"], run)),
            *_uses(run),
            ("tenant", cell(run["tenant"])),
            ("status", cell(run["status"])),
            *_queue_pairs(run),
            ("risk", cell(run["risk"])),
            ("created", clock(run["created_at"])),
            ("finished", clock(run["finished_at"])),
            ("rerun of", cell(run.get("rerun_of"))),
            ("labels", label_text(run.get("labels"))),
            ("error", failure(run["error"])),
        ]
    )
    if run["steps"]:
        known = waits or {}
        yield ""
        yield from table(
            ("STEP", "STATUS", _ATTEMPT, "ITEMS", "WAITS FOR", "ERROR"),
            (step_cells(name, step, known.get(name)) for name, step in run["steps"].items()),
            wraps=True,
        )
    yield from _progress_lines(run["steps"])
    if run["output"] is not None:
        yield ""
        yield "output"
        yield from (f"  {line}" for line in lines_of(run["output"]))


def _progress_lines(steps: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What the workers of running steps last reported, one line per step."""
    reported = [
        (f"  {cell(name)}", excerpt(cell(step["progress"])))
        for name, step in steps.items()
        if step.get("progress") is not None
    ]
    if reported:
        yield ""
        yield "progress"
        yield from pairs(reported)


def queue_text(run: dict[str, Any]) -> str:
    """The place of a run that waits for a slot."""
    estimate = run.get("estimate_s")
    about = "" if estimate is None else f", about {estimate:g} s"
    return f"position {run['position']}{about}"


def _queue_pairs(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The place of a run that waits for a slot, and what decides it."""
    if run.get("position") is None:
        return
    yield "queue", queue_text(run)
    if run.get("priority") is not None:  # an older server does not say it
        yield "priority", str(run["priority"])
        yield "fairness key", cell(run.get("fairness_key") or None)


def job_wait(job: dict[str, Any]) -> str | None:
    """What the step of this job waits for; ``None`` once the job has ended."""
    if job["status"] == "ready":
        return f"a worker for {cell(job['topic'])}"
    if job["status"] == "leased":
        return f"worker {cell(job.get('worker_id'))}, {_lease_end(job)}"
    return None


def _lease_end(job: dict[str, Any]) -> str:
    ends_in_ms = job.get("lease_ends_in_ms")
    return "leased" if ends_in_ms is None else f"lease ends in {ends_in_ms / 1000:.0f} s"


def step_cells(name: str, step: dict[str, Any], waits_for: str | None = None) -> tuple[str, ...]:
    """One step: name, status, attempt, items, what it waits for, error."""
    return (
        cell(name),
        cell(step["status"]),
        cell(step["attempt"] or None),
        _items(step),
        waits_for or _waits_for(step),
        failure(step["error"], of_step=name),
    )


def _waits_for(step: dict[str, Any]) -> str:
    waiting_for, question = step.get("waiting_for"), step.get("question")
    if waiting_for == "decision" and question:
        return f"decision: {excerpt(question)}"
    return cell(waiting_for)


def timeline_lines(answer: dict[str, Any]) -> list[str]:
    """A run's history."""
    columns: dict[str, Column] = {
        "AT": ("at", clock_ms),
        "WHAT": "what",
        "STEP": _place,
        _ATTEMPT: lambda line: cell(line.get("attempt")),
        "ACTOR": ("actor", ident),
        "DETAIL": lambda line: cell(line.get("detail")),
    }
    return rows_of(answer["entries"], columns, wraps=True)


def why_lines(answer: dict[str, Any], tenant: str | None) -> Iterator[str]:
    """Why a run does not go on: a sentence, what to do, and a table of all causes.

    ``tenant``: the one that was asked for, which the commands to do it need too.
    """
    first, *_ = findings = answer["findings"]
    yield sentence(f"{cell(first['detail'])} ({cell(first['code'])})")
    yield sentence(f"to do: {_remedy(first, tenant)}", "  ")
    yield ""
    columns: dict[str, Column] = {
        "CAUSE": "code",
        "STEP": _whys_place,
        "SINCE": ("since", clock),
        "UNTIL": ("until", clock),
        "DETAIL": "detail",
    }
    yield from rows_of(findings, columns, wraps=True)


def wait_lines(answer: dict[str, Any]) -> Iterator[str]:
    """The runs that have waited longest, one for each kind of wait; then why, and what to do."""
    waits = answer["waits"]
    if waits:
        yield from table(
            ("WAITS FOR", "SINCE", "TENANT", "WORKFLOW", "RUN"),
            (
                (
                    cell(row["waits_for"]),
                    clock(row["since"]),
                    cell(row["tenant"]),
                    cell(row["workflow_id"]),
                    cell(row["run_id"]),
                )
                for row in waits
            ),
        )
        for row in waits:
            yield ""
            about = f"{cell(row['waits_for'])}: {cell(row['detail'])} ({cell(row['code'])})"
            yield sentence(about)
            yield sentence(f"to do: {_remedy(row, row['tenant'])}", "  ")


def _whys_place(found: dict[str, Any]) -> str:
    item = (found["blocked_by"] or {}).get("item")
    return cell(found["step_id"]) if item is None else f"{cell(found['step_id'])}[{item}]"


def item_rows(page: dict[str, Any], step_id: str) -> list[str]:
    """The items of a for-each step."""
    columns: dict[str, Column] = {
        "ITEM": "index",
        "STATUS": "status",
        _ATTEMPT: ("attempt", lambda attempt: cell(attempt or None)),
        SpareHeading("JOB"): "job_id",
        "ERROR": ("error", lambda error: failure(error, of_step=step_id)),
    }
    return rows_of(page["items"], columns, wraps=True)


_ACTIONS: Final = {"reused": "be reused", "runs_again": "run again", "skipped": "be skipped"}


def rerun_lines(plan: dict[str, Any]) -> Iterator[str]:
    """What a rerun would do with each step."""
    yield from pairs(
        [
            ("rerun of", cell(plan["rerun_of"])),
            ("workflow", _versioned(plan["workflow_id"], plan["workflow_version"], plan)),
            ("version", cell(plan["version"])),
        ]
    )
    yield ""
    yield from table(
        ("STEP", "WOULD", "ITEMS"),
        (
            (cell(name), _ACTIONS.get(step["action"], cell(step["action"])), _planned_items(step))
            for name, step in plan["steps"].items()
        ),
    )


def _planned_items(step: dict[str, Any]) -> str:
    reused, again = step.get("items_reused"), step.get("items_run_again")
    return "-" if reused is None else f"{reused} reused, {again or 0} run again"


def change_lines(change: dict[str, Any]) -> Iterator[str]:
    """The answer to a cancel or a decision."""
    how = "" if change["applied"] else "  (recorded: the run is busy; it is applied afterwards)"
    yield f"{cell(change['run_id'])}  {cell(change['status'])}{how}"


def _place(line: dict[str, Any]) -> str:
    step, item = line.get("step"), line.get("item")
    return cell(step) if item is None else f"{cell(step)}[{item}]"


def _items(step: dict[str, Any]) -> str:
    total = step.get("items_total")
    if total is None:
        return "-"
    failed = step.get("items_failed")
    return f"{step.get('items_succeeded') or 0}/{total}" + (f" ({failed} failed)" if failed else "")


def failure(error: dict[str, Any] | None, of_step: str | None = None) -> str:
    """Why something failed: its step, unless that is ``of_step``; the reason, the code."""
    if error is None:
        return "-"
    at = f"{cell(error['step'])}: " if error.get("step") not in {None, "", of_step} else ""
    return f"{at}{cell(error['message'])} ({cell(error['code'])})"


FAILURES: Final = frozenset({"failed", "cancelled", "timed_out"})
_FINISHED: Final = FAILURES | {"succeeded"}
_LOOK_S: Final = 1
"""How long one request waits for the run's end: then the steps are shown again."""


def follow(session: Session, run_id: str) -> dict[str, Any]:
    """Show a run until it has ended, and return it. An interrupt prints that the run goes on."""
    views = _views(session, run_id)
    again = f"the run goes on; to see it again: stanchion run watch {run_id}{session.server.flags}"
    try:
        return _live(views) if session.is_live else _plain(session, views)
    except KeyboardInterrupt:
        session.note(again)
        raise
    except CliError as error:
        if error.exit_code is Exit.UNAVAILABLE:
            error.fix = f"{error.fix}; {again}" if error.fix else again
        raise


class _View(NamedTuple):
    run: dict[str, Any]
    hint: str | None
    """Why the run does not go on, once it has waited for a while, and what to do."""


def _views(session: Session, run_id: str) -> Iterator[_View]:
    """Yield the run every second until it has ended."""
    path = path_to("runs", run_id)
    run: dict[str, Any] = session.get(path)
    hint, looks, still = None, 0, 0
    yield _View(run, hint)
    while run["status"] not in _FINISHED:
        asked_at = time.monotonic()
        before, run = run, session.get(path, wait=_LOOK_S, wait_s=_LOOK_S)
        still = still + 1 if _statuses(run) == _statuses(before) else 0
        looks = looks + 1 if still else 0
        if looks % _HINT_LOOKS == _HINT_LOOKS - 1:
            hint = _wait_hint(session, run_id)
        elif not still:
            hint = None
        yield _View(run, hint)
        if run["status"] not in _FINISHED:
            # A server that drains answers without waiting.
            time.sleep(max(0, asked_at + _APART_S - time.monotonic()))


_APART_S: Final = 0.2
"""How far apart requests for the same run are, at least."""
_HINT_LOOKS: Final = 3
"""After every this many polls without a change, ask the server why the run does not go on."""


def _statuses(run: dict[str, Any]) -> list[str]:
    return [step["status"] for step in run["steps"].values()]


def _remedy(finding: dict[str, Any], tenant: str | None) -> str:
    """What to do, with commands for the tenant. The server does not know how it was named."""
    from stanchion.core.why import remedy_for  # noqa: PLC0415 - few commands need it

    return remedy_for(cell(finding["remedy"]), tenant)


_GOES_ON: Final = frozenset({"job_leased", "retry_pending", "delay_pending", "finished"})
"""Findings after which there is nothing to do but to wait."""


def _wait_hint(session: Session, run_id: str) -> str | None:
    """The first cause for which a person can do something, and what."""
    with suppress(CliError):  # a server without this route
        for finding in session.get(path_to("runs", run_id, "why")).get("findings", ()):
            if finding["code"] not in _GOES_ON:
                todo = _remedy(finding, session.server.tenant)
                return f"{cell(finding['detail'])}; to do: {todo}"
    return None


def _plain(session: Session, views: Iterator[_View]) -> dict[str, Any]:
    """Print what has changed since the last view."""
    seen: dict[str, str] = {}
    run: dict[str, Any] = {}
    said: str | None = None
    for run, hint in views:
        if hint is not None and hint != said:
            session.note(hint)
        said = hint
        whole = {"run": run["status"]}
        steps = {f"step {name}": step["status"] for name, step in run["steps"].items()}
        # A run begins before its steps, and ends after them.
        now = steps | whole if run["status"] in _FINISHED else whole | steps
        for name, status in now.items():
            if seen.get(name) != status and status != "pending":
                session.note(f"{cell(name)}: {cell(status)}")
        seen = now
    return run


def _live(views: Iterator[_View]) -> dict[str, Any]:
    """Show a table that is redrawn in place, and removed when the run has ended."""
    from rich.live import Live  # noqa: PLC0415 - only when a person looks

    run: dict[str, Any] = {}
    with Live(auto_refresh=False, transient=True) as live:
        for run, hint in views:
            live.update(_picture(run, hint), refresh=True)
    return run


def _picture(run: dict[str, Any], hint: str | None) -> Any:  # noqa: ANN401 - rich is imported when it is needed
    from rich.console import Group  # noqa: PLC0415 - only when a person looks
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - only when a person looks
    from rich.table import Table  # noqa: PLC0415 - only when a person looks
    from rich.text import Text  # noqa: PLC0415 - only when a person looks

    title = f"{cell(run['workflow_id'])}  {cell(run['run_id'])}  {cell(run['status'])}"
    picture = Table(
        title=Text(title),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("STEP", "STATUS", "ATTEMPT", "ITEMS", "", "WAITS FOR", "ERROR"):
        picture.add_column(heading)
    for name, step in run["steps"].items():
        cells = step_cells(name, step)
        total = step.get("items_total")
        done = (step.get("items_succeeded") or 0) + (step.get("items_failed") or 0)
        bar = ProgressBar(total=total, completed=done, width=20) if total else Text("")
        status = Text(cells[1], style=COLORS.get(step["status"], "dim"))
        rest = [Text(each) for each in cells[2:]]
        picture.add_row(Text(cells[0]), status, rest[0], rest[1], bar, rest[2], rest[3])
    # Not the table's caption, which would be as narrow as the table.
    return picture if hint is None else Group(picture, Text(""), Text(sentence(hint)))
