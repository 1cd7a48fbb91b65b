"""The blocking client, for threads and scripts.

    client = stanchion.Client("http://127.0.0.1:8420")
    run = client.start("research", {"question": "…"})
    print(run.wait(timeout_s=60).output)

One client serves any number of threads. What it can do is listed here and written in ``calls``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Concatenate, ParamSpec, Self, TypeVar, assert_never

from stanchion.client import calls
from stanchion.client.base import BaseClient, BaseRunHandle, as_method, named
from stanchion.client.calls import StartedRun
from stanchion.client.engine import CallEngine, Command, Emit, Feed, Op, Read, Send, Sleep
from stanchion.client.events import events
from stanchion.transport.blocking import BlockingFailover, BlockingTransport, blocking_transport
from stanchion.transport.messages import (
    Address,
    ByteStream,
    HttpReply,
    NoReply,
    Outcome,
    SyncTransport,
)

P = ParamSpec("P")
T = TypeVar("T")


# ── From what is written once to a method of this client ─────────────────────────────────────────


def _method(
    call: Callable[Concatenate[CallEngine, P], Op[T]],
) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._carry_out(call(self._engine, *args, **kwargs))

    return as_method(method, call)


def _starting(
    call: Callable[Concatenate[CallEngine, P], Op[StartedRun]],
) -> Callable[Concatenate[Client, P], RunHandle]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> RunHandle:
        return RunHandle(self, self._carry_out(call(self._engine, *args, **kwargs)))

    return as_method(method, call, gives="RunHandle")


def _iterating(
    feed: Callable[Concatenate[CallEngine, P], Feed[T]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._follow(feed(self._engine, *args, **kwargs))

    return as_method(method, feed, gives="Generator[{}, None, None]")


def _of_run(
    method: Callable[Concatenate[Client, str, P], T],
) -> Callable[Concatenate[RunHandle, P], T]:
    def bound(self: RunHandle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._client, self.run_id, *args, **kwargs)

    return as_method(bound, method, known=2)


# ── The client ───────────────────────────────────────────────────────────────────────────────────


@named
class Client(BaseClient[SyncTransport]):
    """A client of one deployment, for one tenant."""

    start = _starting(calls.start)
    start_many = _method(calls.start_many)
    rerun = _starting(calls.rerun)
    plan_rerun = _method(calls.plan_rerun)
    get = _method(calls.get)
    wait = _method(calls.wait)
    list = _method(calls.list_runs)
    runs = _iterating(calls.runs)
    timeline = _method(calls.timeline)
    why = _method(calls.why)
    items = _iterating(calls.items)
    approvals = _iterating(calls.approvals)
    cancel = _method(calls.cancel)
    approve = _method(calls.approve)
    reject = _method(calls.reject)
    start_bulk = _method(calls.start_bulk)
    plan_bulk = _method(calls.plan_bulk)
    get_bulk = _method(calls.get_bulk)
    stop_bulk = _method(calls.stop_bulk)
    bulks = _iterating(calls.bulks)
    set_limit = _method(calls.set_limit)
    get_limit = _method(calls.get_limit)
    delete_limit = _method(calls.delete_limit)
    limits = _iterating(calls.limits)
    events = _iterating(events)
    submit_job = _method(calls.submit_job)
    job = _method(calls.get_job)
    apply_workflow = _method(calls.apply_workflow)
    workflow = _method(calls.get_workflow)
    workflows = _method(calls.list_workflows)
    workflow_usage = _method(calls.workflow_usage)
    request = _method(calls.request)

    def close(self) -> None:
        """Close idle connections."""
        if isinstance(self._transport, BlockingTransport | BlockingFailover):
            self._transport.close()

    def _transport_to(self, servers: Sequence[Address]) -> SyncTransport:
        return blocking_transport(servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _carry_out(self, op: Op[T]) -> T:
        with closing(_CommandRunner(self._transport)) as runner:
            answer: object = None
            while True:
                try:
                    command = op.send(answer)
                except StopIteration as done:
                    result: T = done.value
                    return result
                answer = runner.do(command)

    def _follow(self, feed: Feed[T]) -> Generator[T, None, None]:
        with closing(_CommandRunner(self._transport)) as runner:
            answer: object = None
            while True:
                try:
                    command = feed.send(answer)
                except StopIteration:
                    return
                if isinstance(command, Emit):
                    answer = None
                    yield command.value
                else:
                    answer = runner.do(command)


@named
class RunHandle(BaseRunHandle[Client]):
    """A run that was started: wait for it, look at it, end it."""

    wait = _of_run(Client.wait)
    get = _of_run(Client.get)
    cancel = _of_run(Client.cancel)
    rerun = _of_run(Client.rerun)
    plan_rerun = _of_run(Client.plan_rerun)
    items = _of_run(Client.items)
    approve = _of_run(Client.approve)
    reject = _of_run(Client.reject)
    timeline = _of_run(Client.timeline)
    why = _of_run(Client.why)
    events = _of_run(Client.events)


class _CommandRunner:
    """Executes the engine's commands."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport
        self._stream: ByteStream | None = None

    def do(self, command: Command) -> Outcome | bytes | None:
        match command:
            case Send():
                outcome = self._transport.send(command.request)
                if isinstance(outcome, HttpReply | NoReply):
                    return outcome
                self.close()
                self._stream = outcome
                return outcome.opened
            case Sleep():
                time.sleep(command.delay_ms / 1000)
                return None
            case Read():
                assert self._stream is not None
                return self._stream.read()
            case _:
                assert_never(command)

    def close(self) -> None:
        """Close the stream, if one was opened."""
        if self._stream is not None:
            self._stream.close()
