"""``stanchion worker``: a worker process."""

from __future__ import annotations

import sys

import click

from stanchion.cli.logging import log_to, raise_open_files_limit
from stanchion.cli.session import where

__all__ = ["command"]


@click.command("worker")
@click.argument("target", metavar="MODULE:APP")
@where
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    metavar="N",
    help="Jobs at one time.",
)
@click.option("--worker-id", metavar="ID", help="Its name in logs and timelines.")
@click.option(
    "--drain-s",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long jobs under way may take after a signal to stop.",
)
@click.option("--reload", is_flag=True, help="Start anew when a file changes; for development.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, and above.",
)
def command(  # noqa: PLR0913 - one a flag
    target: str,
    *,
    url: str,
    api_key: str | None,
    concurrency: int,
    worker_id: str | None,
    drain_s: float,
    log_level: str,
    reload: bool,
) -> int:
    """Run a worker: the Worker called APP in MODULE.

    The first Ctrl-C finishes what is under way, the second stops at once.
    """
    from stanchion.worker.command import run_worker  # noqa: PLC0415 - others do not pay for it

    log_to(sys.stderr, level=log_level, format="auto")
    raise_open_files_limit()
    return run_worker(
        target,
        url=url,
        api_key=api_key,
        concurrency=concurrency,
        worker_id=worker_id,
        drain_s=drain_s,
        reload=reload,
        log_level=log_level,
    )
