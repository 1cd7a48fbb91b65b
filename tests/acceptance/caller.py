"""Callers: HTTP as any program would speak it, without our own SDK."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx2
import msgspec

__all__ = ["UNFINISHED", "Answer", "Caller", "calling", "fresh_name"]

UNFINISHED: Final = ("pending", "running", "waiting")
_CALL_S_MAX: Final = 30.0
_CONNECTIONS_MAX: Final = 300


def fresh_name(begin: str = "acme") -> str:
    """A name that nobody has used: tests share a stack and never a tenant."""
    return f"{begin}-{secrets.token_hex(5)}"


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    text: str
    took_s: float

    @property
    def body(self) -> dict[str, Any]:
        """The object that the answer is."""
        body = msgspec.json.decode(self.text)
        assert isinstance(body, dict), self.text
        return body

    @property
    def code(self) -> str | None:
        """Of a problem, which one."""
        return str(self.body["code"]) if self.status >= 400 else None

    @property
    def verdict(self) -> tuple[int, str | None]:
        """Status and code: what a program branches on."""
        return self.status, self.code

    @property
    def run_id(self) -> str:
        assert self.status in {200, 202}, (self.status, self.text)
        return str(self.body["run_id"])

    @property
    def is_replayed(self) -> bool:
        return self.headers.get("idempotency-replayed") == "true"


class Caller:
    """Somebody of one tenant, who calls the replicas in turn."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        urls: Sequence[str],
        tenant: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.client = client
        self.urls = tuple(urls)
        self.tenant = tenant
        self.headers = {"X-Stanchion-Tenant": tenant} if headers is None else dict(headers)
        self._turn = itertools.cycle(self.urls)

    def other(self, tenant: str | None = None) -> Caller:
        """Somebody of another tenant."""
        return Caller(self.client, self.urls, tenant or fresh_name("second"))

    def bearing(self, key: str, tenant: str = "") -> Caller:
        """Somebody with an API key, which says whose it is."""
        return Caller(self.client, self.urls, tenant, {"Authorization": f"Bearer {key}"})

    def at(self, replica: int) -> Caller:
        """The same one, calling one replica only."""
        return Caller(self.client, [self.urls[replica]], self.tenant, self.headers)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _CALL_S_MAX,
    ) -> Answer:
        """One request, one answer. Raises ``httpx2.TransportError`` when there is none."""
        content = None if body is None else msgspec.json.encode(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        began = time.monotonic()
        response = await self.client.request(
            method,
            next(self._turn) + path,
            content=content,
            headers={**self.headers, **kind, **(headers or {})},
            timeout=timeout_s,
        )
        answer = Answer(
            response.status_code, response.headers, response.text, time.monotonic() - began
        )
        assert answer.status != 500, answer.text
        return answer

    async def get(self, path: str) -> dict[str, Any]:
        """Read what must be there."""
        answer = await self.call("GET", path)
        assert answer.status == 200, (path, answer.status, answer.text)
        return answer.body

    # ── Workflows and runs ───────────────────────────────────────────────────────────────────────

    async def apply(self, workflow_id: str, definition: Mapping[str, object]) -> None:
        answer = await self.call("PUT", f"/v1/workflows/{workflow_id}", definition)
        assert answer.status == 200, answer.text

    async def start(
        self, workflow_id: str, run_input: object = None, *, key: str | None = None
    ) -> Answer:
        return await self.call(
            "POST",
            f"/v1/workflows/{workflow_id}/runs",
            {"input": {} if run_input is None else run_input},
            headers={} if key is None else {"Idempotency-Key": key},
        )

    async def starts(self, workflow_id: str, count: int) -> list[Answer]:
        """So many at once."""
        return await asyncio.gather(*(self.start(workflow_id) for _ in range(count)))

    async def run(self, run_id: str, *, wait_s: float | None = None) -> dict[str, Any]:
        query = "" if wait_s is None else f"?wait={wait_s:g}"
        return await self.get(f"/v1/runs/{run_id}{query}")

    async def finished(self, run_id: str, *, within_s: float = 20.0) -> dict[str, Any]:
        """The run at its end, which must come in time."""
        run = await self.run(run_id, wait_s=within_s)
        assert run["finished_at"] is not None, run
        return run

    async def runs(self, status: str | None = None) -> list[dict[str, Any]]:
        """All its runs, newest first."""
        found: list[dict[str, Any]] = []
        query = "?limit=1000" if status is None else f"?limit=1000&status={status}"
        path = f"/v1/runs{query}"
        while True:
            page = await self.get(path)
            found += page["runs"]
            if page.get("cursor") is None:
                return found
            path = f"/v1/runs{query}&cursor={page['cursor']}"

    async def unfinished(self) -> list[dict[str, Any]]:
        # Not by status: a run that goes from one to another meanwhile would be in neither list.
        return [run for run in await self.runs() if run["status"] in UNFINISHED]

    async def timeline(self, run_id: str) -> list[dict[str, Any]]:
        """All lines of its history, oldest first."""
        found: list[dict[str, Any]] = []
        path = f"/v1/runs/{run_id}/timeline"
        while True:
            page = await self.get(path)
            found += page["entries"]
            if page.get("cursor") is None:
                return found
            path = f"/v1/runs/{run_id}/timeline?cursor={page['cursor']}"

    async def cancel(self, run_id: str) -> Answer:
        return await self.call("POST", f"/v1/runs/{run_id}/cancel", {})

    async def approve(self, run_id: str, step: str) -> Answer:
        return await self.call("POST", f"/v1/runs/{run_id}/steps/{step}/approve", {})

    async def reject(self, run_id: str, step: str) -> Answer:
        return await self.call("POST", f"/v1/runs/{run_id}/steps/{step}/reject", {})

    # ── Operating ────────────────────────────────────────────────────────────────────────────────

    async def configure(self, **members: object) -> None:
        """Say what this tenant may do; what is not said has its default."""
        answer = await self.call("PUT", f"/v1/admin/tenants/{self.tenant}", members)
        assert answer.status == 200, answer.text

    async def is_ready(self) -> bool:
        return (await self.call("GET", "/readyz")).status == 200

    async def settings(self) -> dict[str, Any]:
        return await self.get("/v1/admin/settings")

    async def patch_settings(self, patch: object) -> Answer:
        return await self.call("PATCH", "/v1/admin/settings", patch)

    async def hold(self, name: str, *, ttl_s: float = 30.0) -> Answer:
        """Hold a lock as an operator."""
        answer = await self.call("POST", "/v1/admin/leases", {"name": name, "ttl_s": ttl_s})
        assert answer.status in {200, 201}, answer.text
        return answer

    async def let_go(self, name: str) -> Answer:
        """Force-release a lock as an operator."""
        answer = await self.call("DELETE", f"/v1/admin/leases/{name}")
        assert answer.status in {200, 204}, answer.text
        return answer

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Those of this tenant."""
        page = await self.get("/v1/admin/dead-letters?limit=1000")
        return [row for row in page["dead_letters"] if row["tenant"] == self.tenant]

    async def replay(self, letter_id: str) -> Answer:
        """Put a dead letter back to work."""
        path = f"/v1/admin/dead-letters/{quote(letter_id, safe='')}/replay"
        return await self.call("POST", path)


@asynccontextmanager
async def calling(urls: Sequence[str], tenant: str | None = None) -> AsyncIterator[Caller]:
    """A caller for as long as the block lasts."""
    limits = httpx2.Limits(
        max_connections=_CONNECTIONS_MAX, max_keepalive_connections=_CONNECTIONS_MAX
    )
    async with httpx2.AsyncClient(limits=limits, trust_env=False) as client:
        yield Caller(client, urls, tenant or fresh_name())
