"""A round of chaos: load, faults one after the other, and then every statement checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from stanchion.adapters.store.redis import RedisStore
from tests.acceptance.caller import calling
from tests.chaos.ending import check_overlap, check_runs, check_store, read_all, until_all_ended
from tests.chaos.fault import RECOVERED_S, Fault, play
from tests.chaos.history import check_answers, check_faults, check_keys, check_workers
from tests.chaos.load import Load, Start
from tests.chaos.stack import RUN_TTL_S, Stack
from tests.chaos.tally import Losses, Tally
from tests.chaos.verdict import Verdict, make_verdict
from tests.chaos.watch import Watch, watching
from tests.chaos.worker import Told

__all__ = ["play_round"]

_CALM_S: Final = 2.0
_ANSWERED_S_MAX: Final = 30.0
_AT_ONCE: Final = 20
_STORE_S_MAX: Final = 5.0
_OWN_FAULTS: Final = frozenset(
    {
        "advance_failed",
        "bus_call_unreadable",
        "bus_handler_failed",
        "inbox_entry_failed",
        "job_died",
        "lease_hook_failed",
        "loop_failed",
        "plan_failed",
        "request_failed",
        "slot_drift",
    }
)
"""Log events that tell of a defect of ours, whatever was done to the servers."""


async def play_round(
    stack: Stack, draw: Callable[[random.Random], Sequence[Fault]], seed: int
) -> Verdict:
    """Let everything happen that is drawn by the seed, and say what came of it."""
    began = time.monotonic()
    print(f"STANCHION_TEST_CHAOS_SEED={seed}")  # noqa: T201 - shown when it fails before the verdict
    # Apart: how callers pass their time must not change which faults there are.
    faults = draw(random.Random(seed))
    tally = Tally()
    async with calling(stack.urls) as caller:
        load = Load(caller, random.Random(seed + 1))
        await load.begin()
        try:
            async with watching(load, tally) as watch:
                await asyncio.sleep(_CALM_S)
                seen = await play(stack, load, faults)
                await asyncio.sleep(_CALM_S)
                left = await load.end(within_s=_ANSWERED_S_MAX)
                store = await RedisStore.open(
                    stack.store_url, namespace=stack.namespace, timeout_s=_STORE_S_MAX
                )
                drained_s = await until_all_ended(store, within_s=RECOVERED_S)
        finally:
            await load.stop()
        losses = Losses(seen)
        tally.look("every start is answered in the end", [f"{left} are not"] if left else [])
        late = [f"not after {drained_s:.1f} s"] if drained_s > RECOVERED_S else []
        tally.look("every run ends in time when all is well", late)
        check_answers(tally, load.heard)
        check_faults(tally, seen)
        check_keys(tally, load.started, await _again(load), losses)
        # Whoever woke up late would have written by then.
        await asyncio.sleep(RUN_TTL_S)
        await until_all_ended(store, within_s=RECOVERED_S)
        ended = await read_all(store)
        await check_runs(tally, store, ended, load.started, losses)
        check_overlap(tally, ended, load.started)
        lines = [line for worker in stack.workers for line in worker.lines()]
        check_workers(tally, lines, losses)
        await _check_ends(tally, watch, load, losses)
        await check_store(tally, store, ended)
        await store.close()
    _check_processes(tally, stack)
    statuses = Counter(each.status for each in load.heard)
    return make_verdict(
        tally=tally,
        losses=losses,
        seen=seen,
        stack=stack.name,
        seed=seed,
        took_s=time.monotonic() - began,
        runs=len(ended),
        starts={
            "answered": statuses[200],
            "429": statuses[429],
            "503": statuses[503],
            "without an answer": statuses[0],
            "left out": load.left_out,
        },
        results=Counter(line.verdict for line in lines if isinstance(line, Told)),
        drained_s=drained_s,
    )


async def _again(load: Load) -> list[Start]:
    """Every start once more, some at a time."""
    found: list[Start] = []
    for first in range(0, len(load.started), _AT_ONCE):
        some = load.started[first : first + _AT_ONCE]
        found += await asyncio.gather(*map(load.again, some))
    return found


async def _check_ends(tally: Tally, watch: Watch, load: Load, losses: Losses) -> None:
    """A run that was once seen to have ended has ended so, at that time."""
    now: dict[str, tuple[str, str]] = {}
    for tenant in {start.tenant for start in load.started}:
        for run in await load.caller(tenant).runs():
            now[run["run_id"]] = (run["status"], run["finished_at"])
    for run_id, (status, finished_at) in watch.ended.items():
        at = datetime.fromisoformat(finished_at).timestamp()
        if now.get(run_id) == (status, finished_at) or not losses.excuse("ends of runs", at):
            wrong = _changed(run_id, (status, finished_at), now.get(run_id))
            tally.look("a finished run never changes", wrong)


def _changed(run_id: str, before: tuple[str, str], after: tuple[str, str] | None) -> Iterator[str]:
    if before != after:
        yield f"{run_id} had ended as {before}, and has as {after}"


def _check_processes(tally: Tally, stack: Stack) -> None:
    """Nobody died by itself, and no server met an error of its own."""
    for worker in stack.workers:
        wrong = [] if worker.is_alive else [f"{worker.name} has ended"]
        tally.look("no process ends by itself", wrong)
    for replica in stack.replicas:
        wrong = [] if replica.process.poll() is None else [f"{replica.url} has ended"]
        tally.look("no process ends by itself", wrong)
        for line in replica.log.read_text(errors="replace").splitlines():
            wrong = [line[:500]] if _event(line) in _OWN_FAULTS else []
            tally.look("no server logs a fault of its own", wrong)


def _event(line: str) -> str:
    try:
        return msgspec.json.decode(line, type=_LogLine).event
    except msgspec.DecodeError:
        # Not one of its lines: something that was printed, such as a traceback.
        return "loop_failed"


class _LogLine(msgspec.Struct):
    event: str
