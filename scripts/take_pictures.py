"""Takes a picture of every page of the console, in light and dark, into docs/pictures.

    make pictures
    python -m scripts.take_pictures [NAME …]

Two replicas and their servers are started on 127.0.0.1 and given something to show: a full tenant,
an agent that waits for a person, a job whose worker died, work without a lock. The reports of
drills are those of ``make drill``, if it was run. Pictures that are not taken again are removed.
"""

from __future__ import annotations

import base64
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from stanchion.console.pages import PAGES
from tests.console.browser import find, open_browser
from tests.console.scene import RESEARCH, Scene, running_scene, sign_in, wait_for

OUT: Final = Path(__file__).parent.parent / "docs" / "pictures"
REPORTS: Final = Path(__file__).parent.parent / "drill-reports"
"""What ``make drill`` wrote, if it was run."""
WIDTH, HEIGHT = 1280, 800
HEIGHT_MAX: Final = 1_100
LETTERS: Final = 2
_SKIPPED: Final = frozenset({"/console/search", "/console/leases/release", "/console/drift/try"})
"""Pages that show nothing without a question."""

PUBLISH: Final = {
    "steps": {
        "render": {"topic": "report.render"},
        "proof": {"topic": "report.proof", "needs": ["render"]},
    }
}
REPORT: Final = {
    **RESEARCH,
    "steps": {
        **RESEARCH["steps"],  # type: ignore[dict-item] # a JSON document
        "publish": {"workflow": "publish", "needs": ["check"]},
    },
}
INDEX: Final = {
    "risk": "low",
    "steps": {
        "split": {"topic": "index.split"},
        "embed": {
            "topic": "index.embed",
            "needs": ["split"],
            "for_each": "${steps.split.output}",
            "input": {"page": "${item}"},
        },
        "merge": {"topic": "index.merge", "needs": ["embed"]},
    },
}


def main() -> None:
    """Take the pictures: those that are named, or all."""
    only = set(sys.argv[1:])
    if find() is None:
        sys.exit("there is no browser: see tests/console/browser.py")
    OUT.mkdir(exist_ok=True)
    with (
        _reports() as reports,
        running_scene(job_lease_ttl_s=4.0, drill_reports=reports) as scene,
        open_browser() as browser,
    ):
        run = _play(scene)
        taken = set()
        blank = browser.new_page()
        for theme in ("light", "dark"):
            context = browser.new_context(
                base_url=scene.url,
                color_scheme=theme,
                viewport={"width": WIDTH, "height": HEIGHT},
                locale="en-GB",
                timezone_id="UTC",
            )
            sign_in(context, scene.url)
            tab = context.new_page()
            for name, path in _places(run).items():
                if only and name not in only:
                    continue
                answer = tab.goto(path)
                assert answer.ok, f"{path} is answered with {answer.status}"
                if name == "overview":  # its charts begin with the second sample
                    tab.locator(".plot svg").first.wait_for(timeout=20_000)
                    tab.wait_for_timeout(12_000 if theme == "light" else 0)
                taken.add(_take(tab, blank, f"{name}-{theme}"))
            context.clear_cookies()
            tab.goto("/console/login")
            taken.add(_take(tab, blank, f"login-{theme}"))
            context.close()
    for old in set() if only else set(OUT.glob("*.png")) - taken:
        old.unlink()
    size = sum(each.stat().st_size for each in taken)
    print(f"{len(taken)} pictures, {size / 1024:.0f} KiB, in {OUT}")


@contextmanager
def _reports() -> Iterator[str]:
    """A copy of the reports of drills, if there are any, in a place whose name says nothing."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "drill-reports"
        if REPORTS.exists():
            shutil.copytree(REPORTS, copy)
        yield str(copy)


def _places(run: str) -> dict[str, str]:
    """The pages by the names of their pictures."""
    places = {
        (page.path.removeprefix("/console").strip("/") or "overview"): page.path
        for page in PAGES
        if "{" not in page.path and page.path not in _SKIPPED
    }
    places["run"] = f"/console/runs/{run}?tenant=acme"
    places["workflow"] = "/console/workflows/report?tenant=acme"
    places["workflows"] += "?tenant=acme"
    places["schedule"] = "/console/schedules/morning?tenant=acme"
    places["retries"] += "?tenant=initech"
    if (REPORTS / "admission" / "report.json").exists():
        places["drill"] = "/console/drills?drill=admission"
    places["tenant"] = "/console/admission?tenant=initech"
    places["leases"] += f"?name=run/{run}"
    return places


def _take(tab: Any, blank: Any, name: str) -> Path:  # noqa: ANN401 - Playwright's page
    """Take a picture of the whole page, up to a height that still reads well."""
    height = min(HEIGHT_MAX, tab.evaluate("document.documentElement.scrollHeight"))
    tab.set_viewport_size({"width": WIDTH, "height": max(HEIGHT, height)})
    path = OUT / f"{name}.png"
    path.write_bytes(_smaller(blank, tab.screenshot()))
    tab.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    return path


_INDEXED: Final = """async (text) => {
  const answer = await fetch("data:image/png;base64," + text);
  const image = await createImageBitmap(await answer.blob());
  const canvas = new OffscreenCanvas(image.width, image.height), pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const palette = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 256).map(([colour]) => colour);
  const parts = (colour) => [colour & 255, colour >> 8 & 255, colour >> 16 & 255];
  const known = new Map(palette.map((colour, place) => [colour, place]));
  const named = palette.map(parts);
  const nearest = (colour) => {
    const [red, green, blue] = parts(colour);
    let best = 0, least = Infinity;
    named.forEach(([r, g, b], place) => {
      const far = (r - red) ** 2 + (g - green) ** 2 + (b - blue) ** 2;
      if (far < least) { least = far; best = place; }
    });
    known.set(colour, best);
    return best;
  };
  const indexed = new Uint8Array(pixels.length);
  pixels.forEach((pixel, place) => { indexed[place] = known.get(pixel) ?? nearest(pixel); });
  let bytes = "";
  for (let at = 0; at < indexed.length; at += 8192) {
    bytes += String.fromCharCode(...indexed.subarray(at, at + 8192));
  }
  return [image.width, named.flat(), btoa(bytes)];
}"""
"""Maps each pixel to one of the 256 colours that the picture has most of."""


def _smaller(blank: Any, png: bytes) -> bytes:  # noqa: ANN401 - Playwright's page
    """The picture with a palette: a page of text needs no more, and a third of the bytes."""
    width, palette, indexed = blank.evaluate(_INDEXED, base64.b64encode(png).decode())
    pixels = base64.b64decode(indexed)
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    header = struct.pack(">IIBBBBB", width, len(pixels) // width, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", bytes(palette)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


# ── Something to see ─────────────────────────────────────────────────────────────────────────────


def _play(scene: Scene) -> str:
    """Give every page something to show; return the run that is worth a picture."""
    for tenant, cap in (("acme", 6), ("globex", 20), ("initech", 2), ("umbrella", 200)):
        scene.tenant(tenant, cap)
        scene.workflow("publish", PUBLISH, tenant)
        scene.workflow("report", REPORT, tenant)
        scene.workflow("index", INDEX, tenant)
        scene.workflow(
            "doomed", {"max_deliveries": 1, "steps": {"call": {"topic": "doom"}}}, tenant
        )
    budgets = {
        "tokens": {"limit": 2_000_000, "window": "day"},
        "searches": {"limit": 500, "window": "hour"},
    }
    scene.ask("PUT", "/v1/admin/tenants/initech", {"max_concurrent_runs": 2, "budgets": budgets})
    spends = {**REPORT, "budget": {"tokens": 600_000, "searches": 40}}
    scene.workflow("report", spends, "initech")
    run = _report(scene)
    _index(scene)
    _without_locks(scene)
    for tenant, count in (("initech", 2), ("globex", 4), ("umbrella", 30)):
        for number in range(count):
            question = {"question": f"Question {number + 1}", "depth": 1, "review": True}
            scene.start("report", tenant, input=question, labels={"team": "blue"})
    for tenant in ("acme", "globex"):
        scene.start("doomed", tenant)
    scene.lease("doom", "crawler-7", "acme")
    scene.lease("doom", "crawler-9", "globex")
    scene.start("report", "acme", input={"question": "Why?", "depth": 3, "review": False})
    _refused(scene)
    wait_for("the dead letters", lambda: len(_letters(scene)) == LETTERS, within_s=20)
    _lined_up(scene)
    _held_up(scene)
    _scheduled(scene)
    scene.ask("POST", "/v1/admin/leases", {"name": f"run/{run}", "ttl_s": 900})
    scene.ask("PATCH", "/v1/admin/settings", {"admission": {"lock_wait_s": 3}})
    time.sleep(1)
    return run


def _lined_up(scene: Scene) -> None:
    """A tenant whose starts wait for a slot, and limits of topics."""
    queued = {"max_concurrent_runs": 3, "on_full": "queue", "queue_max": 20}
    scene.ask("PUT", "/v1/admin/tenants/hooli", queued)
    scene.workflow("index", INDEX, "hooli")
    for _ in range(5):
        scene.start("index", "hooli", status=None)
    limits: dict[str, object] = {
        "model-quota": {"topics": ["agent.*", "index.embed"], "max_running": 8},
        "crawl-politely": {"topics": ["crawl.*"], "per": "tenant", "rate_per_s": 0.5},
    }
    for name, limit in limits.items():
        scene.ask("PUT", f"/v1/admin/limits/{name}", limit)
    scene.lease("agent.plan", "planner-3", "umbrella")


def _scheduled(scene: Scene) -> None:
    """Schedules: one with runs of its own, one that is paused."""
    question = {"question": "What changed since yesterday?", "depth": 2, "review": False}
    morning = {
        "workflow_id": "report",
        "cron": "0 9 * * MON-FRI",
        "timezone": "Europe/Berlin",
        "input": question,
        "labels": {"team": "red"},
        "overlap": "queue",
        "jitter_s": 60,
    }
    scene.ask("PUT", "/v1/schedules/morning", morning, tenant="acme")
    first = scene.ask("POST", "/v1/schedules/morning/trigger", {}, tenant="acme")["run_id"]
    scene.ask("POST", f"/v1/runs/{first}/cancel", {}, tenant="acme")
    scene.ask("POST", "/v1/schedules/morning/trigger", {}, tenant="acme")
    often = {"workflow_id": "index", "every_s": 3_600, "paused": True}
    scene.ask("PUT", "/v1/schedules/hourly", often, tenant="globex")


def _held_up(scene: Scene) -> None:
    """A result that waits, because an operator holds the lock of its run."""
    run = scene.start("index", "globex")
    jobs = scene.lease("index.split", "splitter-1", "globex")
    scene.ask("POST", "/v1/admin/leases", {"name": f"run/{run}", "ttl_s": 600})
    mine = [job for job in jobs if job["run_id"] == run]
    scene.finish(mine, [1], worker="splitter-1", tenant="globex")


def _letters(scene: Scene) -> list[Any]:
    return list(scene.ask("GET", "/v1/admin/dead-letters")["dead_letters"])


def _report(scene: Scene) -> str:
    """A run with a lost delivery, a retry, and a question that waits."""
    question = {"question": "What holds a rope?", "depth": 2, "review": True}
    labels = {"team": "red", "stage": "live"}
    run = scene.start("report", "acme", input=question, labels=labels)
    scene.lease("agent.plan", "planner-1", "acme")  # and never heard of again
    plan = scene.lease("agent.plan", "planner-2", "acme", wait_s=15)
    queries = ["materials", "history", "failures", "splices", "loads"]
    scene.finish(plan, {"queries": queries}, worker="planner-2", tenant="acme")
    jobs = scene.lease("agent.search", "searcher-1", "acme")
    scene.finish(jobs[:3], {"found": 3}, worker="searcher-1", tenant="acme")
    time.sleep(0.6)
    error = "TimeoutError: the search engine did not answer within 5 s"
    scene.finish(jobs[3:], error=error, worker="searcher-1", tenant="acme")
    done = 0
    while done < len(jobs[3:]):  # the two retries are not due at the same moment
        again = scene.lease("agent.search", "searcher-2", "acme")
        time.sleep(0.4)
        scene.finish(again, {"found": 9}, worker="searcher-2", tenant="acme")
        done += len(again)
    wait_for("the question", lambda: scene.run(run, "acme")["status"] == "waiting")
    return run


def _index(scene: Scene) -> None:
    """Runs whose results come to both replicas at once, so that locks are found busy."""
    for _ in range(2):
        scene.start("index", "acme")
        scene.finish(scene.lease("index.split", tenant="acme"), list(range(60)), tenant="acme")
    urls = (scene.url, scene.other_url)
    with ThreadPoolExecutor(8) as pool:
        while jobs := scene.lease("index.embed", "embedder-1", "acme", wait_s=0.5):
            list(
                pool.map(
                    lambda pair: scene.finish(
                        [pair[1]], 1, worker="embedder-1", tenant="acme", url=urls[pair[0] % 2]
                    ),
                    enumerate(jobs),
                )
            )


def _without_locks(scene: Scene) -> None:
    """Work of a class that fails open, while the lock store is cut."""
    for _ in range(3):
        scene.start("index", "globex")
    jobs = scene.lease("index.split", tenant="globex")
    scene.stack.locks.pause()
    try:
        for job in jobs:
            scene.finish([job], [], tenant="globex")
        time.sleep(3)
    finally:
        scene.stack.locks.resume()


def _refused(scene: Scene) -> None:
    """Callers of a full tenant that come back too soon."""
    question = {"question": "Once more?", "depth": 1, "review": True}
    for _ in range(4):
        for _ in range(6):
            scene.start("report", "initech", status=429, input=question)
        time.sleep(0.8)


if __name__ == "__main__":
    main()
