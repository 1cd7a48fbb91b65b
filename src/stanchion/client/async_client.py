"""The client for coroutines.

    async with stanchion.AsyncClient("http://127.0.0.1:8420") as client:
        run = await client.start("research", {"question": "…"})
        print((await run.wait(timeout_s=60)).output)

What it can do is listed here and written in ``calls``, as for the blocking client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, assert_never

from stanchion.client import calls
from stanchion.client.base import BaseClient, BaseRunHandle, as_method, named
from stanchion.client.calls import StartedRun
from stanchion.client.engine import CallEngine, Command, Emit, Feed, Op, Read, Send, Sleep
from stanchion.client.events import events
from stanchion.transport.event_loop import LoopFailover, LoopTransport, loop_transport
from stanchion.transport.messages import (
    Address,
    AsyncByteStream,
    AsyncTransport,
    HttpReply,
    NoReply,
    Outcome,
)

P = ParamSpec("P")
T = TypeVar("T")


# ── From what is written once to a method of this client ─────────────────────────────────────────


def _method(
    call: Callable[Concatenate[CallEngine, P], Op[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._carry_out(call(self._engine, *args, **kwargs))

    return as_method(method, call)


def _starting(
    call: Callable[Concatenate[CallEngine, P], Op[StartedRun]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncRunHandle]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncRunHandle:
        return AsyncRunHandle(self, await self._carry_out(call(self._engine, *args, **kwargs)))

    return as_method(method, call, gives="AsyncRunHandle")


def _iterating(
    feed: Callable[Concatenate[CallEngine, P], Feed[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        return self._follow(feed(self._engine, *args, **kwargs))

    return as_method(method, feed, gives="AsyncGenerator[{}, None]")


def _of_run(
    method: Callable[Concatenate[AsyncClient, str, P], T],
) -> Callable[Concatenate[AsyncRunHandle, P], T]:
    def bound(self: AsyncRunHandle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._client, self.run_id, *args, **kwargs)

    return as_method(bound, method, known=2)


# ── The client ───────────────────────────────────────────────────────────────────────────────────


@named
class AsyncClient(BaseClient[AsyncTransport]):
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

    async def close(self) -> None:
        """Close idle connections."""
        if isinstance(self._transport, LoopTransport | LoopFailover):
            await self._transport.close()

    def _transport_to(self, servers: Sequence[Address]) -> AsyncTransport:
        return loop_transport(servers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _carry_out(self, op: Op[T]) -> T:
        with closing(_CommandRunner(self._transport)) as runner:
            answer: object = None
            while True:
                try:
                    command = op.send(answer)
                except StopIteration as done:
                    result: T = done.value
                    return result
                answer = await runner.do(command)

    async def _follow(self, feed: Feed[T]) -> AsyncGenerator[T, None]:
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
                    answer = await runner.do(command)


@named
class AsyncRunHandle(BaseRunHandle[AsyncClient]):
    """A run that was started: wait for it, look at it, end it."""

    wait = _of_run(AsyncClient.wait)
    get = _of_run(AsyncClient.get)
    cancel = _of_run(AsyncClient.cancel)
    rerun = _of_run(AsyncClient.rerun)
    plan_rerun = _of_run(AsyncClient.plan_rerun)
    items = _of_run(AsyncClient.items)
    approve = _of_run(AsyncClient.approve)
    reject = _of_run(AsyncClient.reject)
    timeline = _of_run(AsyncClient.timeline)
    why = _of_run(AsyncClient.why)
    events = _of_run(AsyncClient.events)


class _CommandRunner:
    """Executes the engine's commands."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._stream: AsyncByteStream | None = None

    async def do(self, command: Command) -> Outcome | bytes | None:
        match command:
            case Send():
                outcome = await self._transport.send(command.request)
                if isinstance(outcome, HttpReply | NoReply):
                    return outcome
                self.close()
                self._stream = outcome
                return outcome.opened
            case Sleep():
                await asyncio.sleep(command.delay_ms / 1000)
                return None
            case Read():
                assert self._stream is not None
                return await self._stream.read()
            case _:
                assert_never(command)

    def close(self) -> None:
        """Close the stream, if one was opened."""
        if self._stream is not None:
            self._stream.close()
