"""One trace from the caller's span to the end of the run, across replicas and redeliveries."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest

from stanchion.core.steps.job import ITEMS_TRACED
from tests.acceptance.stack import Kind, Stack, running_stack
from tests.integration.collector import CollectedSpan, Collector, collecting

PROGRAM = """
import stanchion
from opentelemetry import trace

app = stanchion.Worker()
tries = []


@app.task("traced.plan")
async def plan(job):
    with trace.get_tracer("model").start_as_current_span("chat"):
        return {"items": list(range(30))}


@app.task("traced.item")
def item(job):
    with trace.get_tracer("tool").start_as_current_span("tool call"):
        return job.input


@app.task("traced.apart", executor="process")
def apart(job):
    with trace.get_tracer("tool").start_as_current_span("computation"):
        return job.input


@app.task("traced.flaky")
async def flaky(job):
    if job.attempt == 1:
        raise ValueError("not yet")
    return "done"
"""
WORKFLOW = {
    "steps": {
        "plan": {"topic": "traced.plan"},
        "items": {
            "topic": "traced.item",
            "needs": ["plan"],
            "for_each": "${steps.plan.output.items}",
            "input": "${item}",
        },
        "last": {"workflow": "inner", "needs": ["items"]},
    }
}
INNER = {
    "steps": {
        "flaky": {"topic": "traced.flaky", "retry": {"max_attempts": 2}},
        "apart": {"topic": "traced.apart", "needs": ["flaky"]},
    }
}
HOLD: dict[str, object] = {"steps": {"gate": {"approval": {}}}}
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": ""}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        for name, value in FAST.items():
            monkeypatch.setenv(name, value)
        yield collector


@contextlib.contextmanager
def _worker(directory: Path, url: str) -> Iterator[None]:
    (directory / "traced.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "stanchion", "worker", "traced:app", "--url", url]
    with (directory / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def _start(
    client: httpx2.Client, url: str, *, traceparent: str | None, workflow: str = "outer"
) -> str:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    answer = client.post(f"{url}/v1/workflows/{workflow}/runs", json={"input": {}}, headers=headers)
    assert answer.status_code in {200, 202}, answer.text
    return str(answer.json()["run_id"])


def _run_traced(stack: Stack, directory: Path, traceparent: str, queued: str) -> str:
    """Run it; its first job is delivered twice, by different replicas. Returns the run's id.

    Another run waits in the queue until this one has ended.
    """
    first, last = stack.urls[0], stack.urls[-1]
    with httpx2.Client(timeout=20) as client:
        for name, body in (("inner", INNER), ("outer", WORKFLOW), ("hold", HOLD)):
            assert client.put(f"{first}/v1/workflows/{name}", json=body).status_code == 200
        run_id = _start(client, first, traceparent=traceparent)
        config = {"max_concurrent_runs": 1, "on_full": "queue"}
        assert client.put(f"{first}/v1/admin/tenants/default", json=config).status_code == 200
        _start(client, first, traceparent=queued, workflow="hold")
        asked = {"worker_id": "killed", "topics": ["traced.plan"], "max_jobs": 1, "wait_s": 5}
        leased = client.post(f"{first}/v1/worker/lease", json=asked).json()["jobs"]
        assert [job["delivery"] for job in leased] == [1]
        assert leased[0]["traceparent"][3:35] == traceparent[3:35]
        with _worker(directory, last):
            status = ""
            for _ in range(20):
                status = client.get(f"{last}/v1/runs/{run_id}?wait=5").json()["status"]
                if status == "succeeded":
                    break
            assert status == "succeeded"
        config["max_concurrent_runs"] = 5
        assert client.put(f"{first}/v1/admin/tenants/default", json=config).status_code == 200
    return run_id


def _start_untraced(url: str) -> tuple[str, str]:
    """Start a run without a context; return its job's trace id, and the metrics."""
    accepted = {"Accept": "application/openmetrics-text"}
    with httpx2.Client(timeout=20) as client:
        _start(client, url, traceparent=None)
        asked = {"worker_id": "w", "topics": ["traced.plan"], "max_jobs": 1, "wait_s": 5}
        [job] = client.post(f"{url}/v1/worker/lease", json=asked).json()["jobs"]
        return job["traceparent"][3:35], client.get(f"{url}/metrics", headers=accepted).text


def _below(spans: Sequence[CollectedSpan], parent: CollectedSpan) -> list[str]:
    return sorted({span.name for span in spans if span.parent_id == parent.span_id})


def _named(spans: Sequence[CollectedSpan], name: str) -> list[CollectedSpan]:
    return [span for span in spans if span.name == name]


def test_a_trace_shows_where_the_time_of_a_run_went(collector: Collector, tmp_path: Path) -> None:
    caller, trace_id, other = secrets.token_hex(8), secrets.token_hex(16), secrets.token_hex(16)
    with running_stack(Kind.REPLICAS, job_lease_ttl_s=1) as stack:
        queued = f"00-{other}-{caller}-01"
        run_id = _run_traced(stack, tmp_path, f"00-{trace_id}-{caller}-01", queued)
        waited = collector.trace(other, until=lambda seen: bool(_named(seen, "queue wait")))
        spans = collector.trace(
            trace_id,
            until=lambda seen: (
                bool(_named(seen, "run outer"))
                and bool(_named(seen, "computation"))
                and len(_named(seen, "result")) > 23
            ),
        )
        own, scraped = _start_untraced(stack.urls[-1])
        collector.trace(own, until=lambda seen: bool(_named(seen, "start outer")))

    # Without a caller's span a run has a trace of its own. A metric leads to it.
    assert own != trace_id
    assert '# {span_id="' in scraped
    assert f'trace_id="{own}"' in scraped

    # The tree: every span hangs below the caller's.
    ids = {span.span_id for span in spans} | {caller}
    assert [span.name for span in spans if span.parent_id not in ids] == []
    [start] = _named(spans, "start outer")
    [run] = _named(spans, "run outer")
    assert start.parent_id == caller
    assert (start.attributes["stanchion.run"], start.attributes["stanchion.outcome"]) == (
        run_id,
        "admitted",
    )
    assert _below(spans, start) == ["gate wait", "run outer", "store admit"]
    assert {"advance", "deliver traced.plan", "queue traced.plan"} <= set(_below(spans, run))
    advances = _named(spans, "advance")
    below = {name for each in advances for name in _below(spans, each)}
    assert {"lock wait", "store commit"} <= below <= {"lock wait", "store commit", "store settle"}

    # The redelivery links to the delivery that was lost, and has the handler.
    lost, again = _named(spans, "deliver traced.plan")
    assert (lost.attributes["stanchion.delivery"], lost.links) == (1, ())
    assert (again.attributes["stanchion.delivery"], again.links) == (2, (lost.span_id,))
    assert _below(spans, lost) == []
    [handler] = _named(spans, "handle traced.plan")
    assert handler.parent_id == again.span_id
    assert handler.service == "stanchion-worker"
    assert _below(spans, handler) == ["chat", "result"]
    # The deliveries were made by different replicas, and each span says by which.
    [result] = [each for each in _named(spans, "result") if each.parent_id == handler.span_id]
    assert "" != lost.instance == start.instance != again.instance == result.instance != ""
    assert handler.instance == result.attributes["stanchion.worker"]
    assert all(span.end_ns >= span.begin_ns for span in spans)

    # Another run was queued until this one had ended.
    [wait] = _named(waited, "queue wait")
    assert wait.begin_ns < handler.begin_ns < wait.end_ns

    # Of many items some have spans; a handler in a thread has the context as well.
    handled = _named(spans, "handle traced.item")
    assert {each.attributes["stanchion.item"] for each in handled} == set(range(ITEMS_TRACED))
    assert _below(spans, handled[0]) == ["result", "tool call"]

    # So has one in a process.
    [apart] = _named(spans, "handle traced.apart")
    assert _below(spans, apart) == ["computation", "result"]

    # A log line leads to the trace.
    lines = [json.loads(line) for line in (tmp_path / "worker.log").read_text().splitlines()]
    [failed] = [line for line in lines if line["event"] == "job_failed"]
    assert (failed["trace_id"], failed["run"], failed["tenant"]) == (trace_id, run_id, "default")

    # A sub-workflow is in the same trace, and so is a second attempt.
    flaky = _named(spans, "handle traced.flaky")
    assert [each.attributes["stanchion.attempt"] for each in flaky] == [1, 2]
    assert [each.is_error for each in flaky] == [True, False]
