"""Transcripts of ``stanchion run why`` for the how-to page: one run for each code.

    make transcripts

writes them anew into ``docs/how-to/why-is-my-run-not-running.md``. Two replicas with a lock store
of their own are started on 127.0.0.1, and each run is brought to the point where it does not go on.
It takes a good minute, because a topic counts as unserved after one. ``test_why_page`` plays the
stories that need no outage and compares what is said with the page.

No worker can suspend a job yet. What servers will say about one is made from facts: ``foretold``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from click import unstyle
from click.testing import CliRunner

from stanchion.cli.app import app
from stanchion.cli.runs import why_lines
from stanchion.core.model import (
    Instant,
    JobId,
    OnJob,
    Run,
    RunId,
    RunStatus,
    Step,
    StepId,
    StepStatus,
    TenantId,
    Topic,
    WorkflowId,
)
from stanchion.core.why import OpenJob, OpenJobState, RunFacts, Surroundings, why
from stanchion.gateway.views import why_answer
from stanchion.services.why import Explanation
from tests.acceptance.stack import ADMIN_KEY
from tests.console.scene import Scene, running_scene, wait_for
from tests.docs.terminal import ROOT

__all__ = ["PAGE", "QUICK", "STORIES", "foretold", "on_page", "said", "shape"]

PAGE: Final = ROOT / "docs" / "how-to" / "why-is-my-run-not-running.md"
TENANT: Final = "acme"
_CODE_S_MAX: Final = 100.0
_BLOCK: Final = re.compile(r"(?<=^## `)(\w+)(`.*?^```\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)

Story: TypeAlias = Callable[[Scene], str]
"""Brings a run to a point where it does not go on, and returns its id."""


def said(url: str, run_id: str, code: str) -> str:
    """The command and what it prints, once the first cause is this one."""
    command = ["run", "why", run_id]
    given = {"STANCHION_URL": url, "STANCHION_API_KEY": ADMIN_KEY, "STANCHION_TENANT": TENANT}

    def answer() -> str | None:
        done = CliRunner().invoke(app, command, env=given)
        first = done.stdout.partition("\n")[0]
        return done.stdout if first.endswith(f"({code})") else None

    text = wait_for(f"the cause {code} of {run_id}", answer, within_s=_CODE_S_MAX)
    return f"$ stanchion {' '.join(command)}\n{text}"


def on_page() -> dict[str, str]:
    """The transcripts of the page, by code."""
    return {found[1]: found[3] for found in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}


def shape(text: str) -> str:
    """What is the same whenever a story is told: no ids, times, fences or widths of columns."""
    for pattern, word in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "TIME"),
        (r"\b[0-9a-z]{20,26}\b", "RUN"),
        (r"\b\d{6,}\b", "FENCE"),
        (r"[ \t]+", " "),
    ):
        text = re.sub(pattern, word, text)
    return text.strip()


def foretold() -> str:
    """What will be said about a run whose job asked a question and was suspended."""
    run_id, step_id, began = (
        RunId("051m7jnb18q3v5x7z9a1c2e"),
        StepId("book"),
        Instant(1794848949353),
    )
    job_id = JobId(f"{run_id}:{step_id}@1")
    step = Step(status=StepStatus.RUNNING, attempt=1, wait=OnJob(job_id), started_at=began)
    run = Run(
        id=run_id,
        tenant=TenantId(TENANT),
        workflow_id=WorkflowId("travel"),
        workflow_version=1,
        input={},
        created_at=began,
        status=RunStatus.WAITING,
        steps={step_id: step},
    )
    suspended = OpenJob(
        id=job_id,
        step_id=step_id,
        topic=Topic("agent.book"),
        state=OpenJobState.SUSPENDED,
        deliveries=1,
        fence=1794848949353917,
    )
    findings = why(RunFacts(at=began, run=run, jobs=(suspended,)), Surroundings())
    answer = why_answer(Explanation(run_id, run.status, began, findings))
    lines = why_lines(msgspec.json.decode(msgspec.json.encode(answer)), TENANT)
    return "\n".join([f"$ stanchion run why {run_id}", *map(unstyle, lines), ""])


# ── Stories ──────────────────────────────────────────────────────────────────────────────────────


def _started(scene: Scene, name: str, steps: Mapping[str, object], **more: object) -> str:
    scene.workflow(name, {"steps": steps, **more}, TENANT)
    return scene.start(name, TENANT)


def _finished(scene: Scene) -> str:
    run_id = _started(scene, "nightly", {"pause": {"delay_s": 3600}})
    scene.ask("POST", f"/v1/runs/{run_id}/cancel", {"reason": "not tonight"}, tenant=TENANT)
    return run_id


def _approval(scene: Scene) -> str:
    schema = {"type": "object", "required": ["channel"], "properties": {"channel": {}}}
    ask = {"message": "Publish the report?", "timeout_s": 86_400, "data_schema": schema}
    return _started(scene, "report", {"review": {"approval": ask}})


def _delay(scene: Scene) -> str:
    return _started(scene, "later", {"cool-down": {"delay_s": 1800}})


def _ready(scene: Scene) -> str:
    scene.lease("crawl.fetch", "crawler-1", TENANT, wait_s=0)
    _started(scene, "crawl", {"fetch": {"topic": "crawl.fetch"}})
    return scene.start("crawl", TENANT)


def _leased(scene: Scene) -> str:
    run_id = _started(scene, "search", {"search": {"topic": "agent.search"}})
    (_,) = scene.lease("agent.search", "searcher-1", TENANT)
    return run_id


def _retry(scene: Scene) -> str:
    backoff = {"kind": "fixed", "delay_ms": 300_000}
    step = {"topic": "agent.write", "retry": {"max_attempts": 3, "backoff": backoff}}
    run_id = _started(scene, "write", {"write": step})
    jobs = scene.lease("agent.write", "writer-1", TENANT)
    error = "RateLimitError: the model answered 429"
    scene.finish(jobs, error=error, worker="writer-1", tenant=TENANT)
    return run_id


def _limited(scene: Scene) -> str:
    limit = {"topics": ["llm.*"], "max_running": 1}
    scene.ask("PUT", "/v1/admin/limits/model-quota", limit)
    _started(scene, "chat", {"ask": {"topic": "llm.chat"}})
    scene.lease("llm.chat", "chatter-1", TENANT)
    run_id = scene.start("chat", TENANT)
    scene.lease("llm.chat", "chatter-1", TENANT, wait_s=0)  # nothing: the limit is used up
    return run_id


def _queued(scene: Scene) -> str:
    """The tenant's cap is 1 from here on; ``main`` and the test tell this story last."""
    scene.workflow("batch", {"steps": {"load": {"topic": "batch.load"}}}, TENANT)
    full = {"max_concurrent_runs": 1, "on_full": "queue"}
    scene.ask("PUT", f"/v1/admin/tenants/{TENANT}", full)
    runs = [scene.start("batch", TENANT, status=202) for _ in range(2)]
    return runs[-1]


def _dead_letter(scene: Scene) -> str:
    steps = {"parse": {"topic": "agent.parse"}}
    run_id = _started(scene, "parse", steps, max_deliveries=1)
    scene.lease("agent.parse", "parser-1", TENANT)  # and never heard of again
    return run_id


def _locked(scene: Scene) -> str:
    run_id = _started(scene, "pay", {"pay": {"topic": "agent.pay"}})
    jobs = scene.lease("agent.pay", "payer-1", TENANT)
    scene.ask("POST", "/v1/admin/leases", {"name": f"run/{run_id}", "ttl_s": 600})
    scene.finish(jobs, {"paid": 5}, worker="payer-1", tenant=TENANT)
    return run_id


def _unserved(scene: Scene) -> str:
    return _started(scene, "translate", {"translate": {"topic": "agent.translate"}})


def _closed(scene: Scene) -> str:
    run_id = _started(scene, "transfer", {"transfer": {"topic": "bank.transfer"}}, risk="high")
    scene.stack.locks.pause()
    return run_id


def _without_store(scene: Scene) -> str:
    run_id = _delay(scene)
    scene.stack.valkey.pause()
    return run_id


QUICK: Final[Mapping[str, Story]] = {
    "finished": _finished,
    "run_locked": _locked,
    "approval_pending": _approval,
    "job_ready": _ready,
    "retry_pending": _retry,
    "delay_pending": _delay,
    "job_leased": _leased,
    "topic_limited": _limited,
    "queued": _queued,
}
"""Stories that need neither an outage nor patience."""
STORIES: Final[Mapping[str, Story]] = {
    **QUICK,
    "dead_letter": _dead_letter,
    "no_worker": _unserved,
    "class_closed": _closed,
    "backend_unavailable": _without_store,
}


def main() -> None:
    """Take the transcripts and write them into the page."""
    taken: dict[str, str] = {"suspended": foretold()}
    with running_scene(job_lease_ttl_s=20.0) as scene:
        scene.tenant(TENANT, 100)
        runs = {code: STORIES[code](scene) for code in ("no_worker", "dead_letter", *QUICK)}
        for code in (*QUICK, "dead_letter", "no_worker"):
            taken[code] = said(scene.url, runs[code], code)
        scene.tenant(TENANT, 100)
        for code, server in (
            ("class_closed", scene.stack.locks),
            ("backend_unavailable", scene.stack.valkey),
        ):
            run_id = STORIES[code](scene)
            try:
                taken[code] = said(scene.url, run_id, code)
            finally:
                server.resume()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: _anew(found, taken), text), encoding="utf-8")
    print(f"{len(taken)} transcripts written to {Path(PAGE).relative_to(ROOT)}")  # noqa: T201 - a command


def _anew(found: re.Match[str], taken: Mapping[str, str]) -> str:
    lines = taken.get(found[1], found[3]).splitlines()
    return f"{found[1]}{found[2]}" + "".join(f"{line.rstrip()}\n" for line in lines)


if __name__ == "__main__":
    main()
