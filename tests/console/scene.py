"""A scene: two replicas with keys and locks of their own, and something to see on every page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx2

from tests.acceptance.stack import ADMIN_KEY, Kind, Stack, running_stack

__all__ = ["RESEARCH", "WAIT", "Scene", "running_scene", "sign_in", "wait_for"]

RESEARCH: Final = {
    "risk": "high",
    "input_schema": {
        "type": "object",
        "required": ["question", "depth", "review"],
        "properties": {
            "question": {
                "type": "string",
                "minLength": 1,
                "description": "What shall the agent find out?",
            },
            "depth": {"type": "integer", "minimum": 1, "maximum": 5, "default": 2},
            "review": {"type": "boolean", "description": "Ask a person before it goes out"},
            "tone": {"enum": ["plain", "formal"]},
            "sources": {"type": "array", "items": {"type": "string"}},
        },
    },
    "steps": {
        "plan": {"topic": "agent.plan", "input": {"question": "${input.question}"}},
        "search": {
            "topic": "agent.search",
            "needs": ["plan"],
            "for_each": "${steps.plan.output.queries}",
            "input": {"q": "${item}"},
            "retry": {
                "max_attempts": 3,
                "backoff": {"kind": "jitter", "delay_ms": 200, "jitter_ms": 50},
            },
        },
        "review": {
            "approval": {
                "message": "May the report on “${input.question}” go out?",
                "data_schema": {
                    "type": "object",
                    "properties": {"comment_for_reader": {"type": "string"}},
                },
            },
            "needs": ["search"],
            "when": "input.review == true",
        },
        "write": {"topic": "agent.write", "needs": ["review", "search"]},
        "check": {"topic": "agent.check", "needs": ["write"], "retry": {"max_attempts": 2}},
    },
}
WAIT: Final = {"steps": {"hold": {"delay_s": 3600}}}


def wait_for(what: str, is_so: Any, *, within_s: float = 10.0) -> Any:  # noqa: ANN401 - what it returns
    """What the function returns, once that is true; it is asked again until then."""
    until = time.monotonic() + within_s
    while not (found := is_so()):
        assert time.monotonic() < until, f"{what} did not happen within {within_s} s"
        time.sleep(0.02)
    return found


def sign_in(context: Any, url: str, key: str = ADMIN_KEY) -> None:  # noqa: ANN401 - Playwright's
    """Give a browser's context a session, as its login form would."""
    answer = context.request.post(
        f"{url}/console/login",
        form={"key": key},
        headers={"Origin": url, "Sec-Fetch-Site": "same-origin"},
        max_redirects=0,
    )
    assert answer.status == 303, answer.text()


class Scene:
    """The servers, and a way to call them beside the browser."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.full: list[str] = []
        """The runs of a tenant that is full."""
        self._client = httpx2.Client(timeout=10.0)

    @property
    def url(self) -> str:
        return self.stack.urls[0]

    @property
    def other_url(self) -> str:
        return self.stack.urls[1]

    def close(self) -> None:
        self._client.close()

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        tenant: str | None = None,
        status: int | None = 200,
        url: str | None = None,
    ) -> Any:  # noqa: ANN401 - a JSON document
        """The answer as JSON; of another status than the expected one, an error."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        if tenant is not None:
            headers["X-Stanchion-Tenant"] = tenant
        place = f"{url or self.url}{path}"
        answer = self._client.request(method, place, json=body, headers=headers)
        assert status is None or answer.status_code == status, answer.text
        return answer.json()

    def key(self, role: str, tenant: str) -> str:
        """A new key."""
        made = self.ask("POST", "/v1/admin/keys", {"role": role, "tenant": tenant})
        return str(made["key"])

    def tenant(self, name: str, cap: int) -> None:
        self.ask("PUT", f"/v1/admin/tenants/{name}", {"max_concurrent_runs": cap})

    def workflow(self, name: str, steps: object, tenant: str = "default") -> None:
        self.ask("PUT", f"/v1/workflows/{name}", steps, tenant=tenant)

    def start(
        self, workflow: str, tenant: str = "default", *, status: int | None = 200, **body: object
    ) -> str:
        """Start a run and return its id; of a refusal, the code."""
        path = f"/v1/workflows/{workflow}/runs"
        answer = self.ask("POST", path, body, tenant=tenant, status=status)
        return str(answer.get("run_id") or answer.get("code"))

    def run(self, run_id: str, tenant: str = "default") -> Any:  # noqa: ANN401 - a JSON document
        return self.ask("GET", f"/v1/runs/{run_id}", tenant=tenant)

    def lease(
        self, topic: str, worker: str = "worker-1", tenant: str = "default", wait_s: float = 5
    ) -> list[Any]:
        """Jobs of a topic."""
        body = {"worker_id": worker, "topics": [topic], "max_jobs": 10, "wait_s": wait_s}
        return list(self.ask("POST", "/v1/worker/lease", body, tenant=tenant)["jobs"])

    def finish(
        self,
        jobs: list[Any],
        output: object = None,
        *,
        error: str | None = None,
        worker: str = "worker-1",
        tenant: str = "default",
        url: str | None = None,
    ) -> None:
        """Report the results of jobs."""
        results = [
            {
                "job_id": job["job_id"],
                "fence": job["fence"],
                **(
                    {"status": "succeeded", "output": output}
                    if error is None
                    else {"status": "failed", "error": error}
                ),
            }
            for job in jobs
        ]
        body = {"worker_id": worker, "results": results}
        self.ask("POST", "/v1/worker/results", body, tenant=tenant, url=url)


@contextlib.contextmanager
def running_scene(job_lease_ttl_s: float = 30.0, **settings: str | float) -> Iterator[Scene]:
    """Two replicas for as long as the block lasts. Settings are those of ``running_stack``."""
    with running_stack(
        Kind.REPLICAS,
        has_own_locks=True,
        admin_key=ADMIN_KEY,
        job_lease_ttl_s=job_lease_ttl_s,
        **settings,
    ) as stack:
        scene = Scene(stack)
        try:
            yield scene
        finally:
            scene.close()
