"""The public API over real stores, and what it refuses."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import stanchion
from stanchion import leases as package
from stanchion.adapters.system import SystemClock
from stanchion.core.retry import BoundedJitter
from stanchion.leases import events
from stanchion.leases.backend import store_at
from stanchion.leases.leases import RiskName
from stanchion.leases.threads import HoldOptions, LeasesOptions
from tests.leases.lines import until_waiting
from tests.servers import Cluster, Server, running_server

NAME = "invoice:42"


async def test_a_name_is_held_by_one_at_a_time(url: str, namespace: str) -> None:
    async with (
        stanchion.Leases(url, namespace=namespace) as here,
        stanchion.Leases(url, namespace=namespace) as there,
    ):
        async with here.hold(NAME) as lease:
            with pytest.raises(stanchion.LeaseBusy):
                async with there.hold(NAME):
                    raise AssertionError("not both")
            lease.check()
        async with there.hold(NAME) as next_lease:
            assert lease.fence is not None
            assert next_lease.fence is not None
            assert next_lease.fence > lease.fence


async def test_a_lease_goes_from_hand_to_hand_in_order(url: str, namespace: str) -> None:
    entered: list[int] = []
    openers = [stanchion.Leases(url, namespace=namespace) for _ in range(4)]

    async def visit(number: int) -> None:
        async with openers[number].hold(NAME, wait_s=30):
            entered.append(number)

    async with openers[0].hold(NAME):
        visits = []
        for number in (2, 1, 3):
            visits.append(asyncio.create_task(visit(number)))
            await until_waiting(url, namespace, NAME, len(visits))
    await asyncio.gather(*visits)
    assert entered == [2, 1, 3]
    for opener in openers:
        await opener.close()


def test_a_contended_name_is_handed_over_under_uvloop(server: Server, namespace: str) -> None:
    # A process of its own: uvloop's close waits for a connection whose protocol raised.
    program = f"""
import asyncio, stanchion, uvloop
from tests.leases.lines import until_waiting

async def fence(leases):
    async with leases.hold({NAME!r}, wait_s=10) as lease:
        return lease.fence

async def contend():
    here, there = (stanchion.Leases({server.url!r}, namespace={namespace!r}) for _ in range(2))
    async with here, there:
        async with here.hold({NAME!r}):
            waiting = asyncio.create_task(fence(there))
            await until_waiting({server.url!r}, {namespace!r}, {NAME!r}, 1)
        assert await waiting is not None

uvloop.run(contend())
"""
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, timeout=20, capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


async def test_namespaces_are_apart(url: str, namespace: str) -> None:
    async with (
        stanchion.Leases(url, namespace=namespace) as ours,
        stanchion.Leases(url, namespace=f"{namespace}-2") as theirs,
        ours.hold(NAME) as one,
        theirs.hold(NAME) as other,
    ):
        assert (one.name, other.name) == (NAME, NAME)


async def test_the_servers_own_names_are_apart(server: Server) -> None:
    from stanchion.adapters.locks.redis import RedisLocks  # noqa: PLC0415 - only this case

    of_the_server = await RedisLocks.open(server.url)
    await of_the_server.acquire("run/1", "the server", ttl_ms=30_000, within_ms=2_000)
    async with stanchion.Leases(server.url) as leases, leases.hold("run/1"):
        assert [view.name for view in await of_the_server.list()] == ["run/1"]
    await of_the_server.close()


async def test_a_cluster_serves_names_of_every_shard(cluster: Cluster, namespace: str) -> None:
    async with (
        stanchion.Leases(cluster.url, namespace=namespace) as here,
        stanchion.Leases(cluster.url, namespace=namespace) as there,
    ):
        for number in range(20):
            name = f"invoice:{number}"
            async with here.hold(name):
                waiting = asyncio.create_task(_fence(there, name))
                await until_waiting(cluster.url, namespace, name, 1)
            assert await waiting


async def test_memory_is_for_one_object(namespace: str) -> None:
    async with (
        stanchion.Leases("memory:", namespace=namespace) as one,
        stanchion.Leases("memory:", namespace=namespace) as other,
        one.hold(NAME),
        other.hold(NAME),
    ):
        with pytest.raises(stanchion.LeaseBusy):
            async with one.hold(NAME):
                raise AssertionError("not twice")


async def test_a_lease_outlives_its_first_term(url: str, namespace: str) -> None:
    told: list[events.LeaseEvent] = []
    async with (
        stanchion.Leases(url, ttl_s=1.5, namespace=namespace, on_event=told.append) as leases,
        leases.hold(NAME) as lease,
    ):
        await asyncio.sleep(1.8)
        lease.check()
    assert [type(event) for event in told if not isinstance(event, events.RenewFailed)] == [
        events.Acquired,
        events.Released,
    ]


async def test_the_first_call_finds_the_store_away_and_a_later_one_finds_it_back() -> None:
    with running_server() as server:
        port = server.port
    async with stanchion.Leases(f"redis://127.0.0.1:{port}") as leases:
        with pytest.raises(stanchion.LeaseUnavailable, match="cannot be reached"):
            async with leases.hold(NAME):
                raise AssertionError("nobody there")
        async with leases.hold(NAME, risk="low") as degraded:
            assert (degraded.is_degraded, degraded.fence) == (True, None)
        with running_server(port=port):
            async with asyncio.timeout(30):
                while await _fence(leases, NAME, risk="low") is None:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.1)


async def test_a_store_that_hangs_from_the_start_costs_one_bounded_wait_and_then_nothing() -> None:
    loop = asyncio.get_running_loop()
    with running_server() as server:
        server.pause()
        async with stanchion.Leases(server.url) as leases:
            began = loop.time()
            fences = await asyncio.gather(
                *(_fence(leases, f"invoice:{number}", risk="low") for number in range(5))
            )
            assert fences == [None] * 5
            assert loop.time() - began < 3
            for number in range(5):
                began = loop.time()
                assert await _fence(leases, f"invoice:{number}", risk="low") is None
                assert loop.time() - began < 0.5
        server.resume()


async def test_an_operator_sees_names_as_their_owners_gave_them(url: str, namespace: str) -> None:
    store = store_at(url, namespace=namespace, clock=SystemClock())
    async with stanchion.Leases(url, namespace=namespace) as leases, leases.hold(NAME) as lease:
        seen = await store.inspect(NAME)
        assert seen is not None
        assert (seen.name, seen.fence) == (NAME, lease.fence)
        assert [view.name for view in await store.list("invoice")] == [NAME]
        assert await store.list("another") == []
    assert await store.inspect(NAME) is None
    await store.close()


async def test_a_store_that_must_not_be_used_is_unavailable_in_every_class() -> None:
    with running_server(None, "--maxmemory-policy", "allkeys-lru") as server:
        async with stanchion.Leases(server.url) as leases:
            for _ in range(2):
                with pytest.raises(stanchion.LeaseUnavailable, match="noeviction"):
                    async with leases.hold(NAME, risk="low"):
                        raise AssertionError("it would lose leases")


async def test_a_file_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    async with stanchion.Leases(f"sqlite:{tmp_path}") as leases:
        with pytest.raises(stanchion.LeaseUnavailable, match="directory"):
            async with leases.hold(NAME):
                raise AssertionError("no file")


# ── What is refused at once ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("", {}, "should look like"),
        ("memory", {}, "should look like"),
        ("memory:x", {}, "should look like"),
        ("sqlite:", {}, "should look like"),
        ("sqlite::memory:", {}, "should look like"),
        ("http://user:secret@host", {}, "should look like"),
        ("redis://user:secret@host/x", {}, "path of a Redis URL"),
        ("redis://host?db=1", {}, "option"),
        ("redis://host", {"namespace": "a b"}, "namespace"),
        ("memory:", {"namespace": ""}, "namespace"),
        ("memory:", {"namespace": "a/b"}, "namespace"),
        ("memory:", {"ttl_s": 0}, "ttl_s"),
        ("memory:", {"ttl_s": 0.05}, "ttl_s"),
        ("memory:", {"ttl_s": 100_000}, "ttl_s"),
        ("memory:", {"ttl_s": float("nan")}, "ttl_s"),
        ("memory:", {"retry": BoundedJitter(10, 20)}, "retry: jitter_ms"),
    ],
)
@pytest.mark.parametrize("kind", [stanchion.Leases, stanchion.SyncLeases])
def test_a_store_that_makes_no_sense_is_refused(
    kind: type[stanchion.Leases | stanchion.SyncLeases],
    url: str,
    options: Mapping[str, Any],
    says: str,
) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        kind(url, **options)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 513}, "name"),
        ({"risk": "reckless"}, "reckless"),
        ({"wait_s": -1}, "wait_s"),
        ({"wait_s": float("inf")}, "wait_s"),
        ({"wait_s": float("nan")}, "wait_s"),
        ({"order": "lifo"}, "order"),
        (
            {
                "policy": stanchion.LeasePolicy(
                    stanchion.OnLockError.FAIL_OPEN, stanchion.OnRenewalLost.FENCE, 0
                )
            },
            "policy: renewal_failures_max",
        ),
    ],
)
async def test_a_hold_that_makes_no_sense_is_refused(options: Mapping[str, Any], says: str) -> None:
    async with stanchion.Leases("memory:") as leases:
        with pytest.raises(ValueError, match=says):
            async with leases.hold(**{"name": NAME, **options}):
                raise AssertionError("it makes no sense")


async def test_a_policy_of_ones_own_is_followed(namespace: str) -> None:
    policy = stanchion.LeasePolicy(stanchion.OnLockError.FAIL_OPEN, stanchion.OnRenewalLost.FENCE)
    with running_server() as server:
        url = server.url
    async with (
        stanchion.Leases(url, namespace=namespace) as leases,
        leases.hold(NAME, policy=policy) as lease,
    ):
        assert lease.is_degraded


async def test_closed_leases_say_so(namespace: str) -> None:
    leases = stanchion.Leases("memory:", namespace=namespace)
    await leases.close()
    await leases.close()
    with pytest.raises(RuntimeError, match="closed"):
        async with leases.hold(NAME):
            raise AssertionError("closed")


def test_leases_of_another_loop_say_so() -> None:
    leases = stanchion.Leases("memory:")

    async def use() -> None:
        async with leases.hold(NAME):
            """Once."""

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use())


# ── Names and imports ────────────────────────────────────────────────────────────────────────────


def test_every_public_name_is_there() -> None:
    ours = set(stanchion.__all__) & set(package.__all__)
    assert {"Lease", "LeaseBusy", "LeaseLost", "LeaseUnavailable", "Leases", "SyncLeases"} <= ours
    for name in ours:
        assert getattr(stanchion, name) is getattr(package, name)
    assert set(stanchion.__all__) <= set(dir(stanchion))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = stanchion.nothing_of_the_kind  # type: ignore[attr-defined]  # that is the point


def test_threads_take_the_same_options_as_coroutines() -> None:
    assert set(LeasesOptions.__annotations__) == _options(stanchion.Leases)
    assert set(HoldOptions.__annotations__) == _options(stanchion.Leases.hold)


def _options(of: object) -> set[str]:
    assert callable(of)
    parameters = inspect.signature(of).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import stanchion", "apsw hiredis redis msgspec asyncio stanchion.leases"),
        ("import stanchion; stanchion.Leases('memory:')", "apsw hiredis redis"),
        ("import stanchion; stanchion.Leases('sqlite:x.db')", "hiredis redis"),
        ("import stanchion; stanchion.Leases('redis://x')", "apsw nats starlette"),
    ],
)
def test_nobody_pays_for_what_is_not_used(statement: str, unwanted: str) -> None:
    program = f"""
import sys
{statement}
found = [name for name in {unwanted.split()!r} if name in sys.modules]
sys.exit(", ".join(found) or 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(("url", "package"), [("sqlite:x.db", "apsw"), ("redis://x", "hiredis")])
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(url: str, package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
import stanchion
try:
    stanchion.Leases({url!r})
except ModuleNotFoundError as error:
    print(error)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert package in found.stdout
    assert "in a clone: pip install '.[leases]'" in found.stdout


async def _fence(
    leases: stanchion.Leases, name: str, risk: stanchion.Risk | RiskName = "high"
) -> int | None:
    async with leases.hold(name, risk=risk, wait_s=10) as lease:
        return lease.fence
