"""``stanchion job``: single jobs, without a workflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from stanchion.cli.http import path_to
from stanchion.cli.session import Session, json_of, talks
from stanchion.cli.text import cell, lines_of, pairs, table

__all__ = ["command"]


@click.group("job")
def command() -> None:
    """Submit single jobs."""


@command.command("submit")
@click.argument("topic", metavar="TOPIC")
@click.option(
    "--input",
    "given",
    metavar="JSON|@FILE",
    default="{}",
    show_default=True,
    help="What the worker is given; @- reads standard input.",
)
@click.option(
    "--idempotency-key",
    "key",
    metavar="KEY",
    help="The same key and request give the same job, however often they are sent.",
)
@talks
def submit(session: Session, topic: str, given: str, key: str | None) -> None:
    """Submit one job for the workers of TOPIC."""
    body = {"topic": topic, "input": json_of(given, "--input")}
    answer = session.create(path_to("jobs"), body, key)
    session.show(answer.document, lambda job: [f"{cell(job['job_id'])}  {cell(job['status'])}"])


@command.command("show")
@click.argument("job_id", metavar="JOB")
@talks
def show(session: Session, job_id: str) -> None:
    """Show a job, of a workflow's step or submitted alone."""
    session.show(session.get(path_to("jobs", job_id)), _lines)


@command.command("topics")
@talks
def topics(session: Session) -> None:
    """List the topics whose jobs wait for a worker, of all tenants."""
    ready = session.get(path_to("worker", "topics"))
    session.show(ready, _topics)
    if not ready["ready"]:
        session.note("no job waits for a worker")


def _topics(answer: dict[str, Any]) -> Iterator[str]:
    if answer["ready"]:
        rows = ((cell(topic), cell(count)) for topic, count in answer["ready"].items())
        yield from table(("TOPIC", "READY"), rows)


def _lines(job: dict[str, Any]) -> Iterator[str]:
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
            ("error", "-" if error is None else f"{cell(error['message'])} ({error['code']})"),
        ]
    )
    if job["output"] is not None:
        yield ""
        yield "output"
        yield from (f"  {line}" for line in lines_of(job["output"]))
