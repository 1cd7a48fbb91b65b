"""Assemble: builds a server from its configuration and runs it.

``run_server`` opens the backends, starts the engine and the gateway, and serves until a signal. No
other module chooses adapters.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

from msgspec.structs import replace
from prometheus_client import disable_created_metrics

from stanchion import telemetry
from stanchion.adapters.bus.local import LocalBus
from stanchion.adapters.bus.nats import NatsBus
from stanchion.adapters.locks.memory import MemoryLocks
from stanchion.adapters.locks.redis import RedisLocks
from stanchion.adapters.store.memory import MemoryStore
from stanchion.adapters.store.redis import RedisStore
from stanchion.adapters.store.sqlite import SqliteStore
from stanchion.adapters.system import SystemClock, SystemEntropy
from stanchion.config import Config, is_loopback
from stanchion.console import mount
from stanchion.gateway import Gateway, GatewayOptions, make_app
from stanchion.gateway.server import serve, serving_metrics
from stanchion.ports.bus import Bus
from stanchion.ports.clock import Clock
from stanchion.ports.entropy import Entropy
from stanchion.ports.errors import BackendError, BackendRefused, sentence
from stanchion.ports.locks import OperatorLocks
from stanchion.ports.store import Store
from stanchion.services.context import Backends
from stanchion.services.engine import Engine, Terms
from stanchion.services.keys import Keys
from stanchion.services.log import log_event
from stanchion.services.watchdog import MemoryTrimmer, share_one_heap
from stanchion.services.work import DEFAULT_ALLOWANCE

OnReady: TypeAlias = Callable[[str, str | None], None]
"""Called with the server's URL, and with that of its metrics if they have a listener."""
START_S_MAX: Final = 20.0
GC_THRESHOLDS: Final = (20_000, 20, 50)
_SWITCH_S: Final = 0.001
"""How long one thread may keep the interpreter while another waits for it. Less costs throughput:
with a tenth of it, a tenth of the runs per second. While tenants do long work or are refused it is
shorter (``services.work.ThreadTurns``)."""


async def run_server(config: Config, *, on_ready: OnReady) -> int:
    """Open the backends, serve until a signal, close them; return the exit code."""
    share_one_heap()
    # Without the "…_created" series of every counter and histogram a scrape is half as long.
    disable_created_metrics()  # type: ignore[no-untyped-call] # theirs has no annotations
    try:
        async with AsyncExitStack() as opened:
            async with asyncio.timeout(START_S_MAX):
                backends = await _backends(config, opened)
                await _require_keys(config, backends)
            await _serve(config, backends, on_ready)
    except TimeoutError:
        return _refused(f"not connected within {START_S_MAX:g} s")
    except (BackendError, OSError) as error:
        return _refused(sentence(error))
    log_event(logging.INFO, "server_stopped")
    return 0


def _refused(error: str) -> int:
    log_event(logging.ERROR, "server_refused", error=error)
    return 1


async def _serve(config: Config, backends: Backends, on_ready: OnReady) -> None:
    replica = backends.entropy.token()[:12]
    missing = telemetry.configure("stanchion", instance=replica)
    if missing is not None:
        log_event(logging.WARNING, "traces_unavailable", error=missing)
    engine = Engine(replica, backends, terms=_terms(config), works_off_loop=True)
    app = make_app(
        engine.services,
        GatewayOptions(
            admin_key=config.admin_key,
            metrics_open=config.metrics_open,
            drill_reports=config.drill_reports,
        ),
    )
    mount(app)
    _tune_runtime()
    async with _running(engine), _metrics(config, app) as metrics_url:
        await serve(
            app,
            host=config.host,
            port=config.port,
            drain_s=config.drain_s,
            on_ready=lambda url: on_ready(url, metrics_url),
        )


@asynccontextmanager
async def _metrics(config: Config, app: Gateway) -> AsyncIterator[str | None]:
    """Run the listener for metrics during the body, if one is configured; yields its URL."""
    if config.metrics_port is None:
        yield None
        return
    scraping = app.scraping(is_private=is_loopback(config.metrics_host))
    host, port = config.metrics_host, config.metrics_port
    async with serving_metrics(scraping, host=host, port=port) as url:
        yield url


@asynccontextmanager
async def _running(engine: Engine) -> AsyncIterator[None]:
    """Run the engine's loops during the body; then drain and close it."""
    await engine.services.settings.look()
    loops = asyncio.create_task(engine.run(), name="engine")
    trimmer = MemoryTrimmer(engine.services.clock, release=engine.forget_idle)
    trimming = asyncio.create_task(trimmer.run(), name="memory")
    try:
        yield
    finally:
        engine.drain()
        for task in (trimming, loops):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await engine.close()


def _tune_runtime() -> None:
    """Tune the garbage collector and the thread switch interval for a server.

    Loaded modules stay for good, and a request leaves almost no reference cycles. With the default
    thresholds the collector takes a quarter of a busy server's time: freeze what is loaded, and
    collect less often.

    A thread that computes yields to the event loop after 1 ms instead of 5: a start wakes the loop
    four times, and took 25 ms beside such a thread (7 ms now).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)


def _terms(config: Config) -> Terms:
    return Terms(
        run_lease_ttl_ms=round(config.run_lease_ttl_s * 1000),
        job_lease_ttl_ms=round(config.job_lease_ttl_s * 1000),
        max_deliveries=config.max_deliveries,
        poison_failures_max=config.poison_failures_max,
        retention_ms=round(config.retention_s * 1000),
        tenant_work=replace(DEFAULT_ALLOWANCE, share=config.tenant_work_percent / 100),
    )


async def _backends(config: Config, opened: AsyncExitStack) -> Backends:
    clock, entropy = SystemClock(), SystemEntropy()
    store = await _store(config, clock)
    opened.push_async_callback(store.close)
    locks = await _locks(config, clock, entropy)
    opened.push_async_callback(locks.close)
    bus = await _bus(config, store, clock, entropy)
    opened.push_async_callback(bus.close)
    return Backends(store=store, locks=locks, bus=bus, clock=clock, entropy=entropy)


async def _store(config: Config, clock: Clock) -> Store:
    url = config.store_url
    key_ttl_ms = round(config.idempotency_ttl_s * 1000)
    audit_ttl_ms = round(config.audit_retention_s * 1000)
    if url == "memory:":
        log_event(logging.WARNING, "store_in_memory", note="everything is lost when it stops")
        return MemoryStore(clock, key_ttl_ms, audit_ttl_ms=audit_ttl_ms)
    if url.startswith("sqlite:"):
        path = Path(url.removeprefix("sqlite:"))
        # For the files that this process creates: the database, its log and its lock.
        os.umask(0o077)
        _make_private(path, Path(config.data_dir))
        return await SqliteStore.open(
            path, clock=clock, key_ttl_ms=key_ttl_ms, audit_ttl_ms=audit_ttl_ms
        )
    return await RedisStore.open(
        url, namespace=config.namespace, key_ttl_ms=key_ttl_ms, audit_ttl_ms=audit_ttl_ms
    )


def _make_private(database: Path, data_dir: Path) -> None:
    """Make the directory 0700 and existing files of the database 0600.

    A directory other than the data directory, or one that also contains other files, keeps its
    mode: it may be a home directory or /tmp. There, a file whose name begins with that of the
    database may be anything; in the data directory it is a copy.
    """
    directory = database.parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = list(directory.iterdir())
        is_own = directory == data_dir
        ours = [
            file
            for file in found
            if file.name.startswith(database.name)
            and (is_own or file.name.removeprefix(database.name) in _SUFFIXES)
        ]
        for file in ours:
            if file.is_file():  # 0600 would close a directory
                _restrict(file, 0o600)
        if is_own and len(ours) == len(found):
            _restrict(directory, 0o700)
    except OSError as error:
        raise BackendRefused(
            f"{directory}: cannot be created or read ({error.strerror}). Give --data-dir a"
            " directory that this process may write to"
        ) from error
    if is_own and directory.stat().st_mode & 0o077:
        log_event(logging.WARNING, "data_dir_not_private", directory=str(directory))


_SUFFIXES: Final = frozenset({"", "-wal", "-shm", "-journal", ".lock"})
"""Of the files that SQLite and the store make beside the database, and of itself."""


def _restrict(path: Path, mode: int) -> None:
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(mode)


async def _locks(config: Config, clock: Clock, entropy: Entropy) -> OperatorLocks:
    url = config.locks_url
    if url == "memory:":
        return MemoryLocks(clock)
    return await RedisLocks.open(url, namespace=config.namespace, entropy=entropy)


async def _bus(config: Config, store: Store, clock: Clock, entropy: Entropy) -> Bus:
    url = config.bus_url
    if url == "local:":
        return LocalBus(store, clock)
    return await NatsBus.open(url, namespace=config.namespace, clock=clock, entropy=entropy)


async def _require_keys(config: Config, backends: Backends) -> None:
    """Raise ``BackendRefused`` if other machines could reach a server without keys."""
    keys = Keys(
        documents=backends.store,
        clock=backends.clock,
        entropy=backends.entropy,
        admin_key=config.admin_key,
    )
    hosts = [config.host, *([] if config.metrics_port is None else [config.metrics_host])]
    reachable = next((host for host in hosts if not is_loopback(host)), None)
    if reachable is not None and not await keys.configured():
        raise BackendRefused(
            f"host '{reachable}' can be reached by others, and there are no API keys:"
            " set STANCHION_ADMIN_KEY, or listen on 127.0.0.1"
        )
