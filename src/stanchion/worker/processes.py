"""Processes for handlers that compute: they do not share our interpreter, and they can be killed.

A child handles one job at a time and is kept for the next one. A job whose lease is lost is killed
with its child. A child that dies (out of memory, a crash in C) fails its own job only.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import msgspec

from stanchion import telemetry
from stanchion.core.json_value import JsonValue
from stanchion.core.lease import FenceCause, Holding
from stanchion.wire.worker import JobResult, LeasedJob
from stanchion.worker import results
from stanchion.worker.errors import JobFailed
from stanchion.worker.events import log_event, show_lines
from stanchion.worker.job import Job, job_of
from stanchion.worker.renewal import BootClock, HeldJob, SharedDeadline
from stanchion.worker.tasks import CHILD_NAME

# Forking a process that has threads copies locks in any state. Starting afresh is slower, once.
_START: Final = multiprocessing.get_context("spawn")
_RESULT: Final = msgspec.json.Decoder(JobResult)
_USAGE: Final = msgspec.json.Decoder(dict[str, int])
_LEASED: Final = msgspec.json.Decoder(LeasedJob)


class ProcessExecutor:
    """Children, each with one job or idle. Called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    def call(self, function: Callable[[Job], Any], held: HeldJob) -> JobResult:
        """Run the handler in a child, and wait for its result."""
        child = self._take()
        held.deadline = child.deadline
        held.on_lost = lambda _: child.kill()
        # Read after the two lines above: from here on the loop keeps both up to date.
        trust = held.trust
        if isinstance(trust, Holding):
            child.deadline.value = trust.trusted_until
        else:
            child.kill()
        try:
            result = child.handle(function, held)
        except (EOFError, OSError) as error:
            self._forget(child)
            raise JobFailed(f"its process ended: {child.how()}", code="process_died") from error
        except BaseException:
            self._forget(child)
            raise
        finally:
            held.on_lost = None
            held.deadline = None
        with self._lock:
            self._idle.append(child)
        return result

    def close(self) -> None:
        """Kill them all."""
        with self._lock:
            children = tuple(self._all)
            self._all.clear()
            self._idle.clear()
        for child in children:
            child.kill()
        for child in children:
            child.how()

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive():
                    return child
                self._all.discard(child)
        child = _Child()
        with self._lock:
            self._all.add(child)
        return child

    def _forget(self, child: _Child) -> None:
        child.kill()
        with self._lock:
            self._all.discard(child)


class _Child:
    def __init__(self) -> None:
        self._pipe, theirs = _START.Pipe()
        self.deadline: SharedDeadline = _START.RawValue("q", 0)
        self._process: BaseProcess = _START.Process(
            target=_live, args=(theirs, self.deadline), name=CHILD_NAME, daemon=True
        )
        self._process.start()
        theirs.close()

    def handle(self, function: Callable[[Job], Any], held: HeldJob) -> JobResult:
        span = telemetry.CURRENT.get()
        above = None if span is None else span.traceparent
        self._pipe.send((function, msgspec.json.encode(held.leased), above))
        while True:
            kind, text = self._pipe.recv()
            if kind == "result":
                return _RESULT.decode(text)
            if kind == "use":
                held.use(_USAGE.decode(text))
            else:
                held.note(msgspec.json.decode(text))

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def how(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


# ── In the child ─────────────────────────────────────────────────────────────────────────────────


def _live(pipe: Connection, deadline: SharedDeadline) -> None:
    # Ctrl-C reaches the whole group of processes: the worker decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_lines()
    while True:
        try:
            function, text, above = pipe.recv()
        except EOFError:
            return
        leased = _LEASED.decode(text)
        hold = _ChildHold(pipe, deadline)
        try:
            with _traced(above):
                output = function(job_of(leased, hold))
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            log_event(logging.WARNING, "job_failed", raised=error, job_id=leased.job_id)
            result = results.failed(leased.job_id, leased.fence, error)
        else:
            result = results.succeeded(leased.job_id, leased.fence, output)
        hold.end(result)
        if above is not None and telemetry.tracing is not None and not pipe.poll():
            telemetry.tracing.flush()  # an idle child may be killed


def _traced(above: str | None) -> AbstractContextManager[None]:
    """Make the handler's span, which the worker has begun, the parent of spans made inside.

    The handler's module has been imported by now, so a tracer provider of its own is in use.
    """
    if above is None:
        return telemetry.UNTRACED
    telemetry.configure("stanchion-worker", adopt=True)
    return telemetry.UNTRACED if telemetry.tracing is None else telemetry.tracing.below(above)


class _ChildHold:
    """The lease as a child knows it: until when it is trusted, in memory that both see.

    Used by the handler and by threads that it has started: the pipe takes one message at a time,
    and none of a job whose result it has, since the next one would be taken for its job's.
    """

    def __init__(self, pipe: Connection, deadline: SharedDeadline) -> None:
        self._pipe = pipe
        self._deadline = deadline
        self._clock = BootClock()
        self._sending = threading.Lock()
        self._has_ended = False

    @property
    def lost(self) -> FenceCause | None:
        return FenceCause.DEADLINE if self._clock.moment() >= self._deadline.value else None

    def note(self, progress: JsonValue) -> None:
        self._send("note", msgspec.json.encode(progress))

    def use(self, usage: dict[str, int]) -> None:
        self._send("use", msgspec.json.encode(usage))

    def end(self, result: JobResult) -> None:
        """Send the result, and nothing after it."""
        encoded = msgspec.json.encode(result)
        with self._sending:
            self._has_ended = True
            self._pipe.send(("result", encoded))

    def _send(self, kind: str, text: bytes) -> None:
        with self._sending:
            if not self._has_ended:
                self._pipe.send((kind, text))
