"""Leases for threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import stanchion
from stanchion.adapters.system import SystemClock
from stanchion.leases import events
from stanchion.leases.backend import store_at
from tests.leases.lines import until_waiting, waiting

NAME = "invoice:42"
_SOON_S = 20.0


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'leases.db'}"


@pytest.fixture
def leases(file: str) -> Iterator[stanchion.SyncLeases]:
    with stanchion.SyncLeases(file) as leases:
        yield leases


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_a_name_is_held_by_one_thread_at_a_time(url: str, namespace: str) -> None:
    with stanchion.SyncLeases(url, namespace=namespace) as leases:
        with leases.hold(NAME) as lease:
            assert lease.fence is not None
            lease.check()
            with pytest.raises(stanchion.LeaseBusy), leases.hold(NAME):
                raise AssertionError("not both")
        with leases.hold(NAME) as next_lease:
            assert next_lease.fence is not None
            assert next_lease.fence > lease.fence


def test_a_program_that_ends_without_closing_does_not_hang(file: str) -> None:
    program = (
        "import stanchion\n"
        f"leases = stanchion.SyncLeases({file!r})\n"
        f"leases.hold({NAME!r}).__enter__()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=_SOON_S, check=False)
    assert done.returncode == 0


def test_without_room_for_an_event_loop_a_hold_fails_and_a_later_one_does_not() -> None:
    program = (
        "import os, resource, stanchion\n"
        "leases = stanchion.SyncLeases('memory:')\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))\n"
        "files = []\n"
        "try:\n"
        "    while True:\n"
        "        files.append(os.dup(0))\n"
        "except OSError:\n"
        "    pass\n"
        "try:\n"
        "    leases.hold('a').__enter__()\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "for file in files:\n"
        "    os.close(file)\n"
        "with leases.hold('a') as lease:\n"
        "    print(lease.fence is not None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=_SOON_S,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert done.stdout.splitlines() == ["Too many open files", "True"]


def test_no_update_is_lost(url: str, namespace: str, threads: ThreadPoolExecutor) -> None:
    total = 0

    def add(leases: stanchion.SyncLeases) -> None:
        nonlocal total
        for _ in range(10):
            with leases.hold(NAME, wait_s=30):
                seen = total
                threading.Event().wait(0.0005)  # Lets the others run, if they may.
                total = seen + 1

    with stanchion.SyncLeases(url, namespace=namespace) as leases:
        for adding in [threads.submit(add, leases) for _ in range(4)]:
            adding.result(_SOON_S)
    assert total == 40


def test_whoever_waits_gets_the_name_when_it_is_free(
    leases: stanchion.SyncLeases, threads: ThreadPoolExecutor
) -> None:
    def visit() -> int | None:
        with leases.hold(NAME, wait_s=30) as lease:
            return lease.fence

    with leases.hold(NAME) as lease:
        waiting = threads.submit(visit)
    assert lease.fence is not None
    assert (waiting.result(_SOON_S) or 0) > lease.fence


def test_what_the_body_raises_passes_through_and_the_lease_is_given_back(
    leases: stanchion.SyncLeases,
) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, leases.hold(NAME):
        raise error
    assert caught.value is error
    with leases.hold(NAME):
        """Free again."""


def test_a_hold_is_entered_once(leases: stanchion.SyncLeases) -> None:
    hold = leases.hold(NAME)
    with hold:
        """Once."""
    with pytest.raises(RuntimeError, match="once"), hold:
        raise AssertionError("without a lease")


async def _take_away(file: str) -> None:
    store = store_at(file, namespace="leases", clock=SystemClock())
    assert await store.force_release(NAME)
    await store.close()


async def test_a_lost_lease_is_pushed_to_the_holder(file: str, threads: ThreadPoolExecutor) -> None:
    told: list[events.LeaseEvent] = []
    called: Future[stanchion.LeaseLost] = Future()
    with stanchion.SyncLeases(file, ttl_s=1.0, on_event=told.append) as leases:
        granted: Future[stanchion.Lease] = Future()

        def body() -> None:
            with leases.hold(NAME, on_lost=called.set_result) as lease:
                granted.set_result(lease)
                called.result(_SOON_S)

        running = threads.submit(body)
        lease = granted.result(_SOON_S)
        await _take_away(file)
        lost = called.result(_SOON_S)
        assert lost.cause is lease.lost is stanchion.FenceCause.TAKEN
        with pytest.raises(stanchion.LeaseLost, match=NAME):
            lease.check()
        # The body did not ask: it learns of it at its end.
        with pytest.raises(stanchion.LeaseLost):
            running.result(_SOON_S)
    assert [type(event) for event in told] == [events.Acquired, events.Abandoned]


async def test_a_callback_that_fails_takes_nothing_with_it(file: str) -> None:
    called = threading.Event()

    def fail(_: stanchion.LeaseLost) -> None:
        called.set()
        raise ZeroDivisionError

    with stanchion.SyncLeases(file, ttl_s=1.0) as leases:
        hold = leases.hold(NAME, on_lost=fail)
        hold.__enter__()
        await _take_away(file)
        assert called.wait(_SOON_S)
        with pytest.raises(stanchion.LeaseLost):
            hold.__exit__(None, None, None)
        with leases.hold(NAME, wait_s=5):
            """The loop lives."""


async def test_an_error_of_a_body_that_lost_its_lease_is_the_bodys_own(file: str) -> None:
    called = threading.Event()

    async def body(leases: stanchion.SyncLeases) -> None:
        with leases.hold(NAME, on_lost=lambda _: called.set()):
            await _take_away(file)
            assert called.wait(_SOON_S)
            raise ValueError("mine")

    with stanchion.SyncLeases(file, ttl_s=1.0) as leases, pytest.raises(ValueError, match="mine"):
        await body(leases)


def test_renewals_go_on_while_the_body_computes(file: str) -> None:
    told: list[events.LeaseEvent] = []
    with (
        stanchion.SyncLeases(file, ttl_s=1.0, on_event=told.append) as leases,
        leases.hold(NAME) as lease,
    ):
        clock = SystemClock()
        until = clock.moment() + 1_500
        while clock.moment() < until:
            """Never once gives the event loop a turn of its own."""
        lease.check()


async def test_whoever_is_interrupted_while_waiting_leaves_no_ticket(file: str) -> None:
    program = f"""
import os, stanchion
leases = stanchion.SyncLeases({file!r})
try:
    with leases.hold({NAME!r}, wait_s=60):
        raise AssertionError("not ours")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)     # nothing is tidied up any more
"""
    async with stanchion.Leases(file) as here, here.hold(NAME):
        with _start(program) as process:
            try:
                await until_waiting(file, "leases", NAME, 1)
                process.send_signal(2)
                assert process.communicate(timeout=_SOON_S)[0] == "interrupted\n"
            finally:
                process.kill()
        assert await waiting(file, "leases", NAME) == 0


def _start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_a_forked_child_has_leases_of_its_own(file: str) -> None:
    program = f"""
import os, stanchion, sys, warnings
warnings.simplefilter("ignore")     # forking with threads is what is tried here
leases = stanchion.SyncLeases({file!r})
with leases.hold({NAME!r}) as lease:
    child = os.fork()
    if child == 0:
        try:
            with leases.hold({NAME!r}):
                os._exit(1)
        except stanchion.LeaseBusy:
            pass
        with leases.hold("another"):
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
with leases.hold({NAME!r}):
    print("free again")
"""
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert found.stdout == "free again\n"


def test_closed_leases_say_so(file: str) -> None:
    leases = stanchion.SyncLeases(file)
    with leases.hold(NAME):
        """Once."""
    leases.close()
    leases.close()
    with pytest.raises(RuntimeError, match="closed"), leases.hold(NAME):
        raise AssertionError("closed")
    assert not [each for each in threading.enumerate() if "leases" in each.name]


def test_a_program_that_does_not_close_ends_all_the_same(file: str) -> None:
    program = f"""
import stanchion
leases = stanchion.SyncLeases({file!r})
hold = leases.hold({NAME!r})
hold.__enter__()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
