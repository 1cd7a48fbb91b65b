"""Watching a run until it has ended: a live table for a person, a line a change otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from stanchion.cli.endings import Ending, Exit
from stanchion.cli.http import path_to
from stanchion.cli.runs import step_cells
from stanchion.cli.session import Session
from stanchion.cli.text import cell

__all__ = ["watch"]

_FINISHED: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})
_LOOK_S: Final = 1
"""How long the server holds an answer back while nothing has ended: steps move meanwhile."""


def watch(session: Session, run_id: str) -> dict[str, Any]:
    """The run, when it has ended. Whoever stops watching early is told that the run goes on."""
    views = _views(session, run_id)
    again = f"the run goes on; to see it again: stanchion run watch {run_id}{session.server.flags}"
    try:
        return _live(views) if session.is_live else _plain(session, views)
    except KeyboardInterrupt:
        session.note(again)
        raise
    except Ending as ending:
        if ending.exit_code is Exit.UNAVAILABLE:
            ending.fix = f"{ending.fix}; {again}" if ending.fix else again
        raise


def _views(session: Session, run_id: str) -> Iterator[dict[str, Any]]:
    """The run as it is now, again and again; the last one has ended."""
    path = path_to("runs", run_id)
    run: dict[str, Any] = session.get(path)
    yield run
    while run["status"] not in _FINISHED:
        run = session.get(path, wait=_LOOK_S, wait_s=_LOOK_S)
        yield run


def _plain(session: Session, views: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Remarks about what has changed since the last look."""
    seen: dict[str, str] = {}
    run: dict[str, Any] = {}
    for run in views:
        whole = {"run": run["status"]}
        steps = {f"step {name}": step["status"] for name, step in run["steps"].items()}
        # A run begins before its steps, and ends after them.
        now = steps | whole if run["status"] in _FINISHED else whole | steps
        for name, status in now.items():
            if seen.get(name) != status and status != "pending":
                session.note(f"{cell(name)}: {cell(status)}")
        seen = now
    return run


def _live(views: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """A table that is redrawn in its place, and gone when the run has ended."""
    from rich.live import Live  # noqa: PLC0415 - only where a person looks

    run: dict[str, Any] = {}
    with Live(auto_refresh=False, transient=True) as live:
        for run in views:
            live.update(_picture(run), refresh=True)
    return run


_STYLES: Final = {
    "succeeded": "green",
    "running": "cyan",
    "waiting": "yellow",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "magenta",
}


def _picture(run: dict[str, Any]) -> Any:  # noqa: ANN401 - rich is imported when it is needed
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - only where a person looks
    from rich.table import Table  # noqa: PLC0415 - only where a person looks
    from rich.text import Text  # noqa: PLC0415 - only where a person looks

    title = f"{cell(run['workflow_id'])}  {cell(run['run_id'])}  {cell(run['status'])}"
    picture = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for heading in ("STEP", "STATUS", "ATTEMPT", "ITEMS", "", "WAITS FOR", "ERROR"):
        picture.add_column(heading)
    for name, step in run["steps"].items():
        cells = step_cells(name, step)
        total = step.get("items_total")
        done = (step.get("items_succeeded") or 0) + (step.get("items_failed") or 0)
        bar = ProgressBar(total=total, completed=done, width=20) if total else Text("")
        status = Text(cells[1], style=_STYLES.get(step["status"], "dim"))
        rest = [Text(each) for each in cells[2:]]
        picture.add_row(Text(cells[0]), status, rest[0], rest[1], bar, rest[2], rest[3])
    return picture
