"""Two versions side by side: ``python -m bench.versions CHECKOUT [starts] [runs] [cli]``.

``CHECKOUT`` has the other version, with its own ``.venv``. The servers and command lines of both
are loaded by this checkout's callers, in turns, on the same machine; who begins changes every
round. Each server has a worker of its own version, because a server does not know the requests of a
newer worker; with ``--their-worker`` both have the other version's. Prints medians, interquartile
ranges, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from bench.callers import Errand, run_through
from bench.http import start_load
from bench.loadgen import send
from bench.row import spread
from bench.serving import (
    OURS,
    ROOT,
    Backends,
    Site,
    backends,
    cpu_s,
    distributed,
    embedded,
    python_of,
    working,
)
from bench.workflows import ONE_JOB, THREE_STEPS
from stanchion.wire import runs
from tests.cli.scripted import Said, running_script
from tests.cli.terminal import plain_environment

__all__ = ["main"]

_INSTEAD: Final = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
"""Lets another interpreter take the place of a process, which keeps its id."""
_WARM_UP_S: Final = 1.0
_STARTS_OF_CLI: Final = 5
"""How often the command line is started in a round."""


class Figures(msgspec.Struct, frozen=True):
    """One measurement of one version, for each start or run."""

    per_s: float
    server_us: float
    """Processor time of the server."""
    behind_us: float
    """Processor time of Valkey and NATS."""


class Side(msgspec.Struct, frozen=True):
    """The server of one version, and what is behind it."""

    site: Site
    behind: Backends | None

    def measure(self, load: Callable[[Site, float], tuple[int, float]], seconds: float) -> Figures:
        """Load the server, and measure what that takes."""
        before = self.site.cpu_s, self._behind_s()
        number, per_s = load(self.site, seconds)
        after = self.site.cpu_s, self._behind_s()
        server_us, behind_us = ((b - a) / number * 1e6 for a, b in zip(before, after, strict=True))
        return Figures(per_s, server_us, behind_us)

    def _behind_s(self) -> float:
        return 0.0 if self.behind is None else sum(map(cpu_s, self.behind.pids))


def _starts(site: Site, seconds: float) -> tuple[int, float]:
    seen = send(start_load(site.url, seconds)).only("200")
    return seen.requests, seen.per_s


def _runs(site: Site, seconds: float) -> tuple[int, float]:
    ran = run_through(Errand(urls=site.urls, seconds=seconds))
    return ran.runs, ran.per_s


def _opened(stack: ExitStack, store: str, program: Sequence[str]) -> Side:
    if store == "sqlite":
        return Side(stack.enter_context(embedded(program=program)), None)
    behind = stack.enter_context(backends())
    return Side(stack.enter_context(distributed(behind=behind, program=program)), behind)


def _compare(what: str, store: str, asked: argparse.Namespace) -> None:
    """Measure two servers that run at the same time; each waits while the other is loaded."""
    load = _starts if what == "starts" else _runs
    found: tuple[list[Figures], list[Figures]] = ([], [])
    with ExitStack() as stack:
        programs = (("-c", _INSTEAD, python_of(asked.checkout), *OURS), OURS)
        sides = [_opened(stack, store, program) for program in programs]
        for side in sides:
            side.site.prepare({"one-job": ONE_JOB, "three-steps": THREE_STEPS})
            if load is _runs:
                is_theirs = asked.their_worker or side is sides[0]
                checkout = asked.checkout if is_theirs else ROOT
                stack.enter_context(working(side.site.url, checkout=checkout))
            side.measure(load, _WARM_UP_S)
        for number in range(asked.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].append(sides[which].measure(load, asked.seconds))
    name = f"{what} on {store}"
    print(_line(f"{name}, a second", *([each.per_s for each in side] for side in found)))
    print(_line(f"{name}, µs of server", *([each.server_us for each in side] for side in found)))
    if store != "sqlite":
        behind = ([each.behind_us for each in side] for side in found)
        print(_line(f"{name}, µs of Valkey and NATS", *behind))


def _command_lines(asked: argparse.Namespace) -> None:
    with running_script() as server:
        server.says(Said(runs.RunList(())))
        listing = ("run", "list", "--url", server.url, "-o", "json")
        for arguments in (("--help",), listing):
            found: tuple[list[float], list[float]] = ([], [])
            for number in range(asked.rounds * _STARTS_OF_CLI):
                for which in (0, 1) if number % 2 else (1, 0):
                    python = sys.executable if which else python_of(asked.checkout)
                    found[which].append(_took_ms([python, *OURS, *arguments]))
            print(_line(f"stanchion {' '.join(arguments[:2])}, ms of processor time", *found))


def _took_ms(command: Sequence[str]) -> float:
    """The processor time of a process: what else the machine does adds little to it."""
    environment = plain_environment()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return (used.ru_utime + used.ru_stime) * 1000


def _line(name: str, theirs: Sequence[float], ours: Sequence[float]) -> str:
    ratios = [mine / other for other, mine in zip(theirs, ours, strict=True)]
    then, now = median(theirs), median(ours)
    return (
        f"{name:44} {then:8,.1f} ({spread(theirs)})  {now:8,.1f} ({spread(ours)})"
        f"  {now / then:.2f}×, rounds {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and print a line for each figure: the other version, this one, the ratio."""
    parser = argparse.ArgumentParser(prog="python -m bench.versions")
    parser.add_argument("checkout", type=Path, help="a checkout of the other version")
    parser.add_argument("what", nargs="*", default=["starts", "runs", "cli"])
    parser.add_argument("--on", nargs="*", default=["sqlite", "valkey"])
    parser.add_argument("--their-worker", action="store_true", help="for both servers")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args(arguments)
    for what in ("starts", "runs"):
        for store in asked.on if what in asked.what else ():
            _compare(what, store, asked)
    if "cli" in asked.what:
        _command_lines(asked)


if __name__ == "__main__":
    main()
