"""Demonstrate a full tenant, a queue, a research agent and an approval in half a minute.

It starts a server and a worker process on this machine, calls the server over HTTP, prints the
responses, and stops both. It removes its files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import stanchion

HERE = Path(__file__).parent
TENANT = "demo"
CALLERS = 10
CAP = 2
PATIENCE_S = 30.0
QUESTION = "What holds a rope?"
BAR = 40


def main() -> int:
    """Run the demo."""
    with tempfile.TemporaryDirectory(prefix="stanchion-demo-") as folder:
        data = Path(folder)
        with server(data) as url, worker(data, url):
            api = Api(url)
            say(f"A server on SQLite at {url}, and a worker process beside it.")
            prepare(api)
            admitted = burst(api)
            for run_id in admitted:
                approve(api, run_id)
            chart(api, admitted[0])
            slots(api)
            queue(api)
    say("Where to look next:")
    print("  make serve                     the same server, kept running, with its console")
    print("  docs/tutorial.md               ten minutes: a workflow and worker of your own")
    print("  make drill                     cut, pause and overload servers; the verdict")
    print("  docs/how-to/lock-incidents.md  what happens when locks fail")
    return 0


def prepare(api: Api) -> None:
    """Configure a tenant with a cap of two, and apply its workflows."""
    api.call("PUT", f"/v1/admin/tenants/{TENANT}", {"max_concurrent_runs": CAP})
    for name in ("publish-report", "research"):
        text = (HERE / f"{name}.yaml").read_text().replace("delay_s: 5", "delay_s: 1")
        api.call("PUT", f"/v1/workflows/{name}", text)


def burst(api: Api) -> list[str]:
    """Send ten concurrent starts at a cap of two."""
    say(f"{CALLERS} callers start the research agent at once; the tenant's cap is {CAP}:")

    def start(_: int) -> tuple[int, dict[str, Any]]:
        body = {"input": {"question": QUESTION, "review": True}}
        return api.ask("POST", "/v1/workflows/research/runs", body)

    with ThreadPoolExecutor(CALLERS) as callers:
        answers = sorted(callers.map(start, range(CALLERS)), key=lambda each: each[0])
    for status, answer in answers:
        if status == HTTPStatus.OK:
            print(f"  {status}  run {answer['run_id']}")
        else:
            wait_s = answer["retry_after_ms"] / 1000
            print(f"  {status}  {answer['detail']}; retry in {wait_s:.1f} s")
    counts = Counter(status for status, _ in answers)
    print("  together: " + ", ".join(f"{number} × {status}" for status, number in counts.items()))
    if counts != {HTTPStatus.OK: CAP, HTTPStatus.TOO_MANY_REQUESTS: CALLERS - CAP}:
        sys.exit(f"expected {CAP} × 200 and {CALLERS - CAP} × 429")
    return [str(answer["run_id"]) for status, answer in answers if status == HTTPStatus.OK]


def approve(api: Api, run_id: str) -> None:
    """Wait for the approval step, approve it, and wait for the end."""
    ends = time.monotonic() + PATIENCE_S
    while api.call("GET", f"/v1/runs/{run_id}")["steps"]["review"]["status"] != "waiting":
        if time.monotonic() > ends:
            sys.exit(f"run {run_id} did not ask for its approval within {PATIENCE_S:.0f} s")
        time.sleep(0.1)
    api.call("POST", f"/v1/runs/{run_id}/steps/review/approve", {"comment": "looks right"})
    run = api.call("GET", f"/v1/runs/{run_id}?wait=20")
    if run["status"] != "succeeded":
        sys.exit(f"run {run_id} ended as {run['status']}: {run['error']}")


def chart(api: Api, run_id: str) -> None:
    """Print one run as a chart."""
    run = api.call("GET", f"/v1/runs/{run_id}")
    say(f"Run {run_id}, approved by a person, {run['status']}:")
    steps = [(name, step) for name, step in run["steps"].items() if step["started_at"]]
    begin = datetime.fromisoformat(run["created_at"])
    total_s = max(0.001, (datetime.fromisoformat(run["finished_at"]) - begin).total_seconds())
    for name, step in steps:
        from_s, to_s = (
            (datetime.fromisoformat(step[end]) - begin).total_seconds()
            for end in ("started_at", "finished_at")
        )
        left = min(BAR - 1, round(from_s / total_s * BAR))
        width = max(1, round((to_s - from_s) / total_s * BAR))
        items = "" if step["items_total"] is None else f" × {step['items_total']}"
        bar = (" " * left + "█" * width)[:BAR].ljust(BAR)
        print(f"  {name + items:<16} {bar} {to_s - from_s:5.2f} s  {step['status']}")
    report = run["output"]["report"].splitlines()
    print("\n".join(["", *(f"  | {line}" for line in report)]))
    lines = api.call("GET", f"/v1/runs/{run_id}/timeline")["entries"]
    retries = [line for line in lines if line["what"] == "job_failed"]
    print(
        f"\n  {len(lines)} lines in its timeline, {len(retries)} of them a search that failed and"
        " was tried again."
    )


def slots(api: Api) -> None:
    """Show that both slots are free after both runs have ended."""
    body = {"input": {"question": QUESTION, "review": False}}
    status, answer = api.ask("POST", "/v1/workflows/research/runs", body)
    say(f"Both slots are free again: the next start is answered {status}.")
    if status != HTTPStatus.OK:
        sys.exit(f"expected 200: {answer}")
    api.call("POST", f"/v1/runs/{answer['run_id']}/cancel", {"reason": "the demo is over"})


def queue(api: Api) -> None:
    """Let the starts of a full tenant wait for a slot, two callers in turn."""
    config = {"max_concurrent_runs": CAP, "on_full": "queue"}
    api.call("PUT", f"/v1/admin/tenants/{TENANT}", config)
    say("The same tenant with `on_full: queue`: a start without a slot waits for one.")
    print("  Callers with different fairness keys, red and blue, take turns:")
    body = {"input": {"question": QUESTION, "review": False}}
    started: dict[str, str] = {}
    for who in ("red", "red", "red", "red", "blue"):
        asked = {**body, "fairness_key": who}
        status, answer = api.ask("POST", "/v1/workflows/research/runs", asked)
        if status not in {HTTPStatus.OK, HTTPStatus.ACCEPTED}:
            sys.exit(f"expected 200 or 202: {answer}")
        place = f", position {answer['position']}" if status == HTTPStatus.ACCEPTED else ""
        print(f"  {status}  {who:<4} {answer['status']}{place}")
        started[answer["run_id"]] = who
    with stanchion.Client(api.url, tenant=TENANT) as client:
        run = client.start("research", body["input"], fairness_key="blue", wait=True)
    print("  blue's next start, by the SDK with wait=True, returned once it had a slot.")
    started[run.run_id] = "blue"
    ended = [api.call("GET", f"/v1/runs/{run_id}?wait=30") for run_id in started]
    if any(run["status"] != "succeeded" for run in ended):
        sys.exit(f"expected successful ends: {[run['status'] for run in ended]}")
    began = {run["run_id"]: min(_beginnings(run)) for run in ended}
    order = [started[run_id] for run_id in sorted(began, key=began.__getitem__)]
    print(f"  began in this order: {', '.join(order)}")


def _beginnings(run: dict[str, Any]) -> list[str]:
    return [step["started_at"] for step in run["steps"].values() if step["started_at"]]


class Api:
    """A plain HTTP client without the SDK, so that every status is visible."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Send a request that must succeed; return the body."""
        status, answer = self.ask(method, path, body)
        if status >= HTTPStatus.BAD_REQUEST:
            sys.exit(f"{method} {path}: {status} {answer}")
        return answer

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send a request; return status and body."""
        kind = "application/yaml" if isinstance(body, str) else "application/json"
        data = body.encode() if isinstance(body, str) else json.dumps(body or {}).encode()
        request = Request(  # noqa: S310 - a server of our own, on this machine
            self.url + path,
            data=None if method == "GET" else data,
            method=method,
            headers={"X-Stanchion-Tenant": TENANT, "Content-Type": kind},
        )
        try:
            with urlopen(request, timeout=30) as answer:  # noqa: S310 - see above
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def server(data: Path) -> Iterator[str]:
    """Run a server in one process, on a free port."""
    log, config = data / "server.log", data / "stanchion.toml"
    config.touch()  # in place of one of yours
    arguments = ["serve", "--port", "0", "--data-dir", str(data), "--config", str(config)]
    with process(arguments, log) as serving:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends and serving.poll() is None:
            for line in log.read_text().splitlines():
                if '"server_ready"' in line:
                    yield str(json.loads(line)["url"])
                    return
            time.sleep(0.05)
        sys.exit(f"the server did not start:\n{log.read_text()}")


@contextmanager
def worker(data: Path, url: str) -> Iterator[None]:
    """Run a worker process."""
    with process(["worker", "examples.agents:app", "--url", url], data / "worker.log"):
        yield


@contextmanager
def process(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command without your settings, and stop it at the end with a signal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STANCHION_")}
    with log.open("wb") as out:
        started = subprocess.Popen(  # noqa: S603 - our own command, with arguments of our own
            [sys.executable, "-m", "stanchion", *arguments],
            stdout=out,
            stderr=out,
            cwd=HERE.parent,
            env=kept,
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def say(text: str) -> None:
    """Print the heading of a section."""
    print(f"\n{text}")


if __name__ == "__main__":
    # As for Ctrl-C: leave the blocks above, which stop the processes and remove the files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
