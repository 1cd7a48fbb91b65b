"""Running drills: one after the other, with progress, verdict lines, reports and an exit code."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from tempfile import TemporaryFile
from types import FrameType
from typing import Final, Self, TextIO, TypeAlias

import msgspec

from stanchion.core import install_command
from stanchion.drills.admission import admission_drill
from stanchion.drills.fallback import fallback_drill
from stanchion.drills.lock_busy import lock_busy_drill
from stanchion.drills.options import DrillOptions, Progress
from stanchion.drills.page import write_index, write_report
from stanchion.drills.processes import CouldNotRun, kill_spawned, nats_binary, valkey_binary
from stanchion.drills.renewal import renewal_drill
from stanchion.drills.retry import retry_drill
from stanchion.drills.verdict import DrillResult, ProcessorUse, Report, environment_of, report_of
from stanchion.transport.messages import parse_address

_Drill: TypeAlias = Callable[[DrillOptions, Progress], Awaitable[DrillResult]]

DRILLS: Final[Mapping[str, _Drill]] = {
    "admission": admission_drill,
    "retry": retry_drill,
    "fallback": fallback_drill,
    "renewal": renewal_drill,
    "lock-busy": lock_busy_drill,
}
AGAINST: Final = ("admission", "retry")
"""Drills that may run on a deployment in use: they break nothing there."""
QUICK_S_MAX, WHOLE_S_MAX = 60.0, 300.0
_COLUMNS: Final = 80
_INTERRUPTED: Final = 130
_SERVER_PACKAGES: Final = ("apsw", "nats", "prometheus_client", "redis", "starlette", "uvicorn")


def run_drills(names: Sequence[str], options: DrillOptions, *, is_json: bool) -> int:
    """Run the drills; 0 if every promise holds, 1 if one is broken. Raises ``CouldNotRun``."""
    if options.against is None:
        _check_servers()
    else:
        _check_addresses(options.against)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out).close()
    except OSError as error:
        why = error.strerror or error
        raise CouldNotRun(f"--out: {options.out} cannot be written: {why}") from error
    # A program that reads the report wants nothing else on standard output.
    shown = sys.stderr if is_json else sys.stdout
    with _Interrupts() as interrupts:
        try:
            reports = asyncio.run(_run_all(names, options, shown, interrupts))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # SIGTERM ends it as Ctrl-C does
    if is_json:
        documents = [msgspec.to_builtins(report) for report in reports]
        whole = documents[0] if len(documents) == 1 else documents
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n")
    if len(names) > 1:
        passed = sum(report.verdict == "pass" for report in reports)
        shown.write(f"{passed} of {len(reports)} drills pass; {options.out / 'index.html'}\n")
    return 0 if all(report.verdict == "pass" for report in reports) else 1


def announcement(names: Sequence[str], options: DrillOptions) -> list[str]:
    """What a drill will do to a deployment in use, printed before it begins."""
    does = {
        "admission": "bursts of up to 100 starts at once, at least a second apart, on a tenant"
        " with two slots, under each admission strategy (set for that tenant alone)",
        "retry": "three fleets of up to 100 callers, each on a tenant with ten slots, for about a"
        " minute; the fleets wait between their requests as their retry policies say",
    }
    said = [
        f"on {options.against}, in tenants drill-… of its own that are removed afterwards:",
        *(f"  {name}: {does[name]}" for name in names if name in does),
        "no other tenant's configuration and no setting of the deployment is changed",
    ]
    width = _width()
    return [
        line
        for each in said
        for line in textwrap.wrap(
            each, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
    ]


class _Interrupts:
    """Ctrl-C and SIGTERM: the first stops all that was started, the second kills it at once."""

    def __init__(self) -> None:
        self._count = 0
        self._cancel: Callable[[], object] = _interrupt

    def cancels(self, task: asyncio.Task[object]) -> None:
        """Let the first interrupt cancel the task."""
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_error: object) -> None:
        if self._count:
            # The command ends now. The usual handler would print the traceback of one more Ctrl-C.
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # A plain handler, because the loop may be blocked by the wait for a process.
        self._count += 1
        if self._count == 1:
            self._cancel()
            return
        kill_spawned()
        os._exit(_INTERRUPTED)


def _interrupt() -> None:
    raise KeyboardInterrupt


async def _run_all(
    names: Sequence[str], options: DrillOptions, shown: TextIO, interrupts: _Interrupts
) -> list[Report]:
    task = asyncio.current_task()
    assert task is not None
    interrupts.cancels(task)
    reports = []
    for name in names:
        progress = Progress(name, stream=shown)
        environment = environment_of(quick=options.quick, against=options.against)
        began, since, use = time.time(), time.monotonic(), ProcessorUse()
        try:
            async with asyncio.timeout(QUICK_S_MAX if options.quick else WHOLE_S_MAX):
                result = await DRILLS[name](options, progress)
        except TimeoutError as error:
            raise CouldNotRun(f"{name} did not end in time") from error
        finally:
            progress.end()
        # A deployment in use is another program, also if it runs on this machine.
        others = None if options.against else use.others_cores()
        environment["others_cores"] = None if others is None else round(others, 2)
        report = report_of(
            name,
            result,
            seed=options.seed,
            started_at=began,
            duration_s=time.monotonic() - since,
            environment=environment,
        )
        page = write_report(report, result.charts, options.out)
        # After each, so that it is there if a later one cannot run.
        write_index(options.out)
        shown.writelines(line + "\n" for line in verdict_lines(report))
        shown.write(f"  report: {page}\n")
        shown.flush()
        reports.append(report)
    return reports


def verdict_lines(report: Report, *, columns: int | None = None) -> list[str]:
    """The verdict as text: a line for the drill, and one or more for each promise."""
    width = columns or _width()
    held = len(report.promises) - len(report.broken)
    count = f"{held} of {len(report.promises)} promises hold"
    took = f"{report.duration_s:.0f} s, seed {report.seed}"
    lines = [f"{report.drill}: {report.verdict}, {count} ({took})"]
    for promise in report.promises:
        mark = "holds " if promise.holds else "BROKEN"
        head = f"  {mark}  {promise.id}: "
        lines += textwrap.wrap(
            promise.measured, width, initial_indent=head, subsequent_indent=" " * 10
        )
        if not promise.holds:
            lines += textwrap.wrap(
                promise.says,
                width,
                initial_indent=" " * 10 + "promised: ",
                subsequent_indent=" " * 10,
            )
    if report.busy_note is not None:
        head = "  note    "
        lines += textwrap.wrap(
            report.busy_note, width, initial_indent=head, subsequent_indent=" " * len(head)
        )
    return lines


def _width() -> int:
    return min(100, max(60, shutil.get_terminal_size((_COLUMNS, 24)).columns))


def _check_addresses(against: str) -> None:
    try:
        for url in against.split(","):
            parse_address(url)
    except ValueError as error:
        raise CouldNotRun(f"--against: {error}") from error


def _check_servers() -> None:
    missing = [name for name in _SERVER_PACKAGES if find_spec(name) is None]
    if missing:
        raise CouldNotRun(
            f"a server needs the package {missing[0]!r}: {install_command('server,drill')}"
        )
    valkey_binary()
    nats_binary()
