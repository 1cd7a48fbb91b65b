"""Callers: requests of a drill's tenant, each sent once, so that no retry hides an answer.

A burst is many callers at one instant. A paced load comes at a rate, whether or not the server
keeps up. Which replica a caller asks and how its arrival is jittered come from the drill's seed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, Final
from urllib.parse import quote

import msgspec

from stanchion.core.json_value import JsonObject
from stanchion.drills.processes import CouldNotRun
from stanchion.transport.event_loop import LoopTransport
from stanchion.transport.messages import AsyncByteStream, HttpReply, NoReply, Request, parse_address

ANSWER_S_MAX: Final = 30.0
_OK: Final = 200
_WORKER_JOBS_MAX: Final = 8
_CANCELS_MAX: Final = 20
_CANCEL_EVERY_S: Final = 0.25
_REMOVE_S_MAX: Final = 20.0
_ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request and what came back."""

    at: float
    """When it was sent, as the time of day in seconds."""
    took_s: float
    status: int
    """0 if there was no answer."""
    code: str | None = None
    retry_after_ms: int | None = None
    key: str | None = None
    run_id: str | None = None
    is_replay: bool = False
    replica: int = 0
    document: Any = None

    @property
    def answered_at(self) -> float:
        return self.at + self.took_s


class TenantsLeft(CouldNotRun):
    """Tenants of a drill could not be removed from the deployment that it ran on."""

    def __init__(self, names: tuple[str, ...], why: str) -> None:
        self.names = names
        commands = "; ".join(
            f"stanchion bulk start cancel --all --tenant {name}; stanchion tenant delete {name}"
            for name in names
        )
        super().__init__(f"tenants of the drill are left behind ({why}); remove them: {commands}")


class DrillTenant:
    """One tenant of a deployment, and raw requests in its name."""

    def __init__(self, urls: Sequence[str], name: str, *, api_key: str | None = None) -> None:
        self.name = name
        self.urls = tuple(urls)
        self._ways = [LoopTransport(parse_address(url)) for url in urls]
        headers = [("X-Stanchion-Tenant", name), ("Content-Type", "application/json")]
        if api_key is not None:
            headers.append(("Authorization", f"Bearer {api_key}"))
        self._headers = tuple(headers)
        self._next = 0
        self.has_changed = False
        """Whether something of it is stored: without that there is nothing to remove."""

    async def close(self) -> None:
        for way in self._ways:
            await way.close()

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        replica: int | None = None,
        timeout_s: float = ANSWER_S_MAX,
    ) -> Sample:
        """Send one request once, to the given replica or to the next one."""
        if replica is None:
            replica = self._next = (self._next + 1) % len(self._ways)
        headers = self._headers if key is None else (*self._headers, ("Idempotency-Key", key))
        request = Request(
            name="drill",
            method=method,
            path=path,
            headers=headers,
            body=b"" if body is None else msgspec.json.encode(body),
            timeout_s=timeout_s,
            is_repeatable=method in {"GET", "PUT", "DELETE"} or key is not None,
        )
        at = time.time()
        since = time.monotonic()
        outcome = await self._ways[replica].send(request)
        took_s = time.monotonic() - since
        return _sample(outcome, at=at, took_s=took_s, key=key, replica=replica)

    async def expect(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """Send a request that must succeed; its document. Tried again for a few seconds."""
        sample = await self.call(method, path, body)
        for _ in range(20):
            if sample.status not in {0, 429, 503}:
                break
            await asyncio.sleep(0.25)
            sample = await self.call(method, path, body)
        if not _OK <= sample.status < 300:  # noqa: PLR2004 - HTTP's success
            if not sample.status:
                where = ", ".join(self.urls)
                raise CouldNotRun(f"no server answers at {where}: check the URL and the server")
            raise CouldNotRun(f"{method} {path} was answered {sample.status}: {sample.document}")
        self.has_changed = self.has_changed or method != "GET"
        return sample.document

    # ── What drills ask for ─────────────────────────────────────────────────────────────────────

    async def configure(self, **config: object) -> None:
        """Replace the tenant's configuration."""
        await self.expect("PUT", f"/v1/admin/tenants/{self.name}", config)

    async def apply(self, workflow_id: str, definition: JsonObject) -> None:
        await self.expect("PUT", f"/v1/workflows/{workflow_id}", definition)

    async def settings(self, patch: JsonObject) -> JsonObject:
        """Change the deployment's settings; the whole document."""
        document: JsonObject = await self.expect("PATCH", "/v1/admin/settings", patch)
        return document

    async def start(
        self,
        workflow_id: str,
        given: JsonObject | None = None,
        *,
        key: str | None = None,
        replica: int | None = None,
    ) -> Sample:
        path = f"/v1/workflows/{workflow_id}/runs"
        return await self.call("POST", path, {"input": given or {}}, key=key, replica=replica)

    async def burst(self, workflow_id: str, callers: int, chance: Random) -> list[Sample]:
        """So many starts at once, each with a key of its own, over all replicas."""
        batch = secrets.token_hex(4)
        order = [number % len(self._ways) for number in range(callers)]
        chance.shuffle(order)
        return await asyncio.gather(
            *(
                self.start(workflow_id, key=f"{batch}-{number}", replica=replica)
                for number, replica in enumerate(order)
            )
        )

    async def paced(
        self, send: Callable[[], Any], *, per_s: float, seconds: float, chance: Random
    ) -> list[Sample]:
        """Send at a rate, jittered by half an interval, whether or not answers come."""
        began = asyncio.get_running_loop().time()
        tasks: list[asyncio.Task[Sample]] = []
        for number in range(int(per_s * seconds)):
            due = began + (number + chance.uniform(-0.5, 0.5)) / per_s
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            tasks.append(asyncio.create_task(send()))
        return await asyncio.gather(*tasks)

    async def runs(self, *, status: str | None = None) -> list[JsonObject]:
        """All runs of the tenant."""
        rows: list[JsonObject] = []
        cursor = ""
        while True:
            query = "?limit=1000" + (f"&status={status}" if status else "")
            query += f"&cursor={quote(cursor, safe='')}" if cursor else ""
            page = await self.expect("GET", f"/v1/runs{query}")
            rows += page["runs"]
            cursor = page.get("cursor") or ""
            if not cursor:
                return rows

    async def unfinished(self) -> list[str]:
        rows = await self.runs()
        return [str(row["run_id"]) for row in rows if row["status"] not in _ENDED]

    async def wait_idle(self, within_s: float) -> None:
        """Wait until every run has ended, or the time is over."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if not await self.unfinished():
                return
            await asyncio.sleep(0.3)

    async def is_changed_twice(self, run_id: str) -> bool:
        """Whether the run, or a step of it, ended more than once by its timeline."""
        page = await self.expect("GET", f"/v1/runs/{run_id}/timeline?limit=1000")
        ended = Counter(
            (line["what"], line["step"])
            for line in page["entries"]
            if line["what"].endswith(("_succeeded", "_failed"))
        )
        return any(count > 1 for count in ended.values())

    async def waits_for(self, run_id: str) -> str:
        """Why a run has not ended, in one sentence."""
        found = await self.expect("GET", f"/v1/runs/{run_id}/why")
        return "; ".join(each["detail"] for each in found["findings"]) or "nothing"

    async def cancel_all(self) -> None:
        """End every unfinished run, so that the tenant's slots are free."""
        for number in range(_CANCELS_MAX):
            left = await self.unfinished()
            if not left:
                return
            if number:
                # A busy run is cancelled when its lease is free, a refused request later.
                await asyncio.sleep(_CANCEL_EVERY_S)
            for begin in range(0, len(left), 50):
                batch = left[begin : begin + 50]
                await asyncio.gather(
                    *(self.call("POST", f"/v1/runs/{run_id}/cancel", {}) for run_id in batch)
                )
        raise CouldNotRun(f"runs of tenant {self.name} cannot be cancelled")


@asynccontextmanager
async def drill_tenant(
    urls: Sequence[str], purpose: str, *, api_key: str | None = None, is_removed: bool = False
) -> AsyncIterator[DrillTenant]:
    """A tenant ``drill-…`` of the drill's own, for as long as the block lasts.

    On a deployment that outlives the drill it is removed: its runs are cancelled, then it is
    deleted.
    """
    tenant = DrillTenant(urls, f"drill-{purpose}-{secrets.token_hex(3)}", api_key=api_key)
    others: tuple[str, ...] = ()
    try:
        yield tenant
    except TenantsLeft as error:
        others = error.names
        raise
    finally:
        try:
            if is_removed and tenant.has_changed:
                await _remove(tenant, others)
        finally:
            await tenant.close()


async def _remove(tenant: DrillTenant, others: tuple[str, ...]) -> None:
    """Raises ``TenantsLeft`` if the deployment does not allow it, or not in time."""
    why = ""
    try:
        async with asyncio.timeout(_REMOVE_S_MAX):
            await tenant.cancel_all()
            await tenant.expect("DELETE", f"/v1/admin/tenants/{tenant.name}")
    except TimeoutError:
        why = f"not within {_REMOVE_S_MAX:g} s"
    except CouldNotRun as error:
        why = str(error)
    if why:
        raise TenantsLeft((*others, tenant.name), why)


class JobFinish(msgspec.Struct, frozen=True, kw_only=True):
    """What a server said to one result."""

    at: float
    job_id: str
    fence: int
    verdict: str
    """``accepted``, or the code of the rejection."""
    is_repeat: bool = False


class RawWorker:
    """A worker without the SDK that finishes jobs at once, and can send its results twice."""

    def __init__(self, tenant: DrillTenant, topic: str) -> None:
        self._tenant = tenant
        self._topic = topic
        self.is_duplicating = False
        self.finishes: list[JobFinish] = []

    async def run(self, worker_id: str) -> None:
        """Work until cancelled."""
        body = {
            "worker_id": worker_id,
            "topics": [self._topic],
            "max_jobs": _WORKER_JOBS_MAX,
            "wait_s": 1.0,
        }
        while True:
            leased = await self._tenant.call("POST", "/v1/worker/lease", body)
            if leased.status != _OK:
                await asyncio.sleep(0.1)
                continue
            jobs = leased.document["jobs"]
            if jobs:
                await self._finish(worker_id, jobs)
                if self.is_duplicating:
                    await self._finish(worker_id, jobs, is_repeat=True)

    async def _finish(
        self, worker_id: str, jobs: Sequence[JsonObject], *, is_repeat: bool = False
    ) -> None:
        results = [
            {"job_id": job["job_id"], "fence": job["fence"], "status": "succeeded", "output": {}}
            for job in jobs
        ]
        body = {"worker_id": worker_id, "results": results}
        for _ in range(50):
            answer = await self._tenant.call("POST", "/v1/worker/results", body)
            if answer.status == _OK:
                break
            await asyncio.sleep(0.2)
        else:
            return
        codes = {each["job_id"]: each["code"] for each in answer.document["rejected"]}
        for job in jobs:
            job_id = str(job["job_id"])
            self.finishes.append(
                JobFinish(
                    at=answer.answered_at,
                    job_id=job_id,
                    fence=msgspec.convert(job["fence"], int),
                    verdict=codes.get(job_id, "accepted"),
                    is_repeat=is_repeat,
                )
            )


async def until(
    condition: Callable[[], Any], *, within_s: float, what: str, every_s: float = 0.05
) -> None:
    """Wait for a coroutine function to say yes. Raises ``CouldNotRun``."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            raise CouldNotRun(f"{what}: not within {within_s:g} s")
        await asyncio.sleep(every_s)


# ── Workflows ────────────────────────────────────────────────────────────────────────────────────


def waiting_run() -> JsonObject:
    """A run that keeps its slot until it is cancelled."""
    return {"steps": {"gate": {"approval": {}}}}


def delayed(seconds: float) -> JsonObject:
    """A run that ends by itself after this time, without a worker."""
    return {"steps": {"wait": {"delay_s": seconds}}}


def one_job(topic: str, *, risk: str = "standard", steps: int = 1) -> JsonObject:
    """A chain of steps for a worker."""
    chain: JsonObject = {}
    for number in range(steps):
        step: JsonObject = {"topic": topic, "input": "${input}"}
        if number:
            step["needs"] = [f"step{number}"]
        chain[f"step{number + 1}"] = step
    return {"risk": risk, "steps": chain}


def _sample(
    outcome: HttpReply | NoReply | AsyncByteStream,
    *,
    at: float,
    took_s: float,
    key: str | None,
    replica: int,
) -> Sample:
    if not isinstance(outcome, HttpReply):
        return Sample(at=at, took_s=took_s, status=0, key=key, replica=replica)
    document: Any = None
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        document = msgspec.json.decode(outcome.body)
    told = document if isinstance(document, dict) else {}
    return Sample(
        at=at,
        took_s=took_s,
        status=outcome.status,
        code=told.get("code"),
        retry_after_ms=told.get("retry_after_ms"),
        key=key,
        run_id=told.get("run_id"),
        is_replay=outcome.headers.get("idempotency-replayed") == "true",
        replica=replica,
        document=document if document is not None else outcome.body.decode(errors="replace"),
    )
