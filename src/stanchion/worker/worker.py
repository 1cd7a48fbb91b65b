"""A worker: functions by topic, and the loop that feeds them."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypedDict, TypeVar, Unpack

from stanchion import telemetry
from stanchion.core.ranges import check_ranges
from stanchion.worker import events
from stanchion.worker.events import Hook, WorkerEvent, log_event, show_lines
from stanchion.worker.job import Job
from stanchion.worker.loop import LoopOptions, WorkerLoop
from stanchion.worker.renewal import BootClock, WorkerClock
from stanchion.worker.server import HttpTransport, Transport, WorkerApi
from stanchion.worker.tasks import CHILD_NAME, Executor, ProcessTask, Task, make_task

DEFAULT_URL: Final = "http://127.0.0.1:8420"
SECRET_VARIABLES: Final = (
    "STANCHION_API_KEY",
    "STANCHION_ADMIN_KEY",
    "STANCHION_STORE",
    "STANCHION_LOCKS",
    "STANCHION_BUS",
)
_Handler = TypeVar("_Handler", bound=Callable[[Job], Any])


class RunOptions(TypedDict, total=False):
    """How a worker runs. All of it has defaults."""

    concurrency: int
    """Jobs handled at the same time: 10."""
    api_key: str | None
    worker_id: str | None
    """Shown by the server; by default made of host, process and a random part."""
    drain_s: float
    """How long handlers may go on after the first signal: 30."""
    wait_s: float
    """How long one lease request waits at the server: 20."""


class Worker:
    """Handlers by topic. ``on_event`` is called on the event loop with each event."""

    def __init__(self, *, on_event: Hook | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """How often each event happened, by the name of its type."""
        self._tasks: dict[str, Task] = {}
        self._on_event = on_event
        self._working: WorkerLoop | None = None

    def task(
        self, topic: str, *, executor: Executor | None = None
    ) -> Callable[[_Handler], _Handler]:
        """Handle the jobs of a topic with the function below.

        A coroutine function runs on the event loop. Any other runs in a thread, or with
        ``executor="process"`` in a process, where it must be importable by its name.
        """

        def register(handler: _Handler) -> _Handler:
            if topic in self._tasks:
                raise ValueError(f"{topic!r} has a handler already")
            self._tasks[topic] = make_task(topic, handler, executor)
            return handler

        return register

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def serve(self, url: str | Sequence[str] = DEFAULT_URL, **options: Unpack[RunOptions]) -> None:
        """Run until SIGTERM or Ctrl-C: the first drains, the second leaves at once."""
        show_lines()
        asyncio.run(self.run(url, **options))

    async def run(
        self, url: str | Sequence[str] = DEFAULT_URL, **options: Unpack[RunOptions]
    ) -> None:
        """Work for the server at ``url`` until stopped, by ``stop`` or a signal.

        Of several URLs, in a list or separated by commas, the first that answers is used for as
        long as it answers.

        Keys and store URLs are removed from ``os.environ`` first: handlers and the processes that
        they start do not see them.

        Raises ``WorkerRefused`` if the server refuses this worker.
        """
        api_key = options.get("api_key")
        transport = HttpTransport(url, api_key=api_key)
        with self._on_signals():
            await self.run_over(transport, **options)

    async def run_over(
        self,
        transport: Transport,
        *,
        clock: WorkerClock | None = None,
        chance: Callable[[], float] = random.random,
        **options: Unpack[RunOptions],
    ) -> None:
        """Work over the given transport, without signal handling. For tests and the simulator."""
        if self._working is not None:
            raise RuntimeError("this worker is running already")
        if _is_handler_process():
            raise RuntimeError(
                "a process for handlers imports this module, and must not start the worker again:"
                ' put it under if __name__ == "__main__":'
            )
        settings = self._checked(options)
        worker_id = options.get("worker_id") or _worker_id()
        missing = telemetry.configure("stanchion-worker", instance=worker_id, adopt=True)
        if missing is not None:
            log_event(logging.WARNING, "traces_unavailable", error=missing)
        _hide_secrets()
        server = WorkerApi(transport, worker_id)
        clock = clock or BootClock()
        self._working = WorkerLoop(self._tasks, server, clock, chance, self._tell, settings)
        try:
            await self._working.run()
        finally:
            self._working = None
            await transport.close()

    def stop(self) -> None:
        """Lease no more jobs, finish the running ones, and end. Called again: end at once.

        To be called on the worker's event loop.
        """
        if self._working is not None:
            self._working.stop()

    def _checked(self, options: RunOptions) -> LoopOptions:
        if not self._tasks:
            raise ValueError("this worker has no tasks: register one with @app.task(topic)")
        settings = LoopOptions(
            concurrency=options.get("concurrency", 10),
            wait_s=options.get("wait_s", 20.0),
            drain_s=options.get("drain_s", 30.0),
        )
        check_ranges(settings)
        if not settings.drain_s >= 0:
            raise ValueError("drain_s must not be negative")
        for topic, task in self._tasks.items():
            if isinstance(task, ProcessTask):
                _check_importable(topic, task)
        return settings

    def _tell(self, event: WorkerEvent) -> None:
        self.counts[type(event).__name__] += 1
        events.log(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001 - a failing hook must not stop renewals
            log_event(logging.ERROR, "worker_hook_failed", raised=error)

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        taken: list[signal.Signals] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self.stop)
            except (NotImplementedError, RuntimeError, ValueError):
                break  # Not in the main thread, which handles signals and calls stop.
            taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)


def _check_importable(topic: str, task: ProcessTask) -> None:
    try:
        pickle.dumps(task.handler)
    except Exception as error:
        raise ValueError(
            f"the handler of {topic!r} cannot run in a process: define it at the top of a module"
        ) from error


def _is_handler_process() -> bool:
    # If it is one, its module is imported already; other programs do not load it.
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.current_process().name == CHILD_NAME


def _hide_secrets() -> None:
    """Remove keys and URLs with passwords from the environment of handlers and children."""
    for variable in SECRET_VARIABLES:
        os.environ.pop(variable, None)
        os.environ.pop(f"{variable}_FILE", None)


def _worker_id() -> str:
    host = "".join(char if char.isalnum() or char in "-." else "-" for char in socket.gethostname())
    return f"{host[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
