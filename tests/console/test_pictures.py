"""The console's pictures: what they say, that nothing from outside gets out of its place."""

from __future__ import annotations

import random
import re
import time
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from stanchion.charts import Bars, Histogram, LineChart, Series, svg_of
from stanchion.console.gantt import (
    ITEMS_MAX,
    SpanKind,
    TimelineSpan,
    gantt,
    spans_of,
    with_ends,
    with_waits,
)
from stanchion.console.pictures import (
    CELLS_MAX,
    FenceMark,
    TakenSlot,
    chart,
    fence_strip,
    slot_board,
)
from stanchion.console.step_graph import EDGES_MAX, GraphStep, step_graph, zoomable_graph
from stanchion.console.text import duration, foreign, visible
from stanchion.core.model import Failure, StepStatus
from stanchion.wire.runs import StepView, TimelineLine

HOSTILE = "\"'><script>alert(1)</script>&\x00\u202e"
BEGIN = datetime(2026, 8, 1, 3, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def line(seconds: float, what: str, step: str | None = None, **more: object) -> TimelineLine:
    return TimelineLine(at=at(seconds), what=what, actor="x", step=step, **more)  # type: ignore[arg-type]


def parsed(text: str) -> ET.Element:
    """The markup as a tree; it must be well-formed, safe under a strict policy, and without NUL."""
    assert "\x00" not in text
    assert "\u202e" not in text
    root = ET.fromstring(f"<root>{text}</root>")  # noqa: S314 - our own text
    for element in root.iter():
        assert element.tag not in {"script", "style"}
        assert not {name for name in element.attrib if name == "style" or name.startswith("on")}
    return root


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x00b\x1b", "a␀b␛"),
        ("a\x7f\x85", "a␡⟨U+0085⟩"),
        ("pay \u202egnp.exe", "pay ⟨U+202E⟩gnp.exe"),
        ("zero\u200bwidth", "zero⟨U+200B⟩width"),
        ("家\u200d族 é", "家\u200d族 é"),
        ("two\nlines\t", "two␊lines␉"),
    ],
)
def test_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_lines_are_kept_where_there_is_room_for_them() -> None:
    assert visible("a\n\tb\r", has_lines=True) == "a\n\tb␍"
    assert foreign("<b>") == "<bdi>&lt;b&gt;</bdi>"


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (-5, "0 ms"),
        (45, "45 ms"),
        (1_940, "1.9 s"),
        (59_000, "59 s"),
        (185_000, "3 min 5 s"),
        (7_200_000, "2 h"),
        (100 * 3_600_000, "4 d 4 h"),
    ],
)
def test_durations_have_one_or_two_units(ms: float, words: str) -> None:
    assert duration(ms) == words


# ── Step graphs ──────────────────────────────────────────────────────────────────────────────────


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """The box of each step by the first word of its title."""
    found = {}
    for group in parsed(svg).iter("g"):
        rect = next((each for each in group if "box" in each.get("class", "").split()), None)
        if rect is not None:
            title = group.findtext("title") or ""
            names = ("x", "y", "width", "height")
            found[title.split(",")[0]] = tuple(float(rect.get(name, "0")) for name in names)
    return found  # type: ignore[return-value]


def test_no_two_steps_overlap_and_every_edge_goes_to_the_right() -> None:
    chance = random.Random(7)
    for size in (1, 2, 9, 60, 200):
        steps = [
            GraphStep(
                id=f"s{n}",
                needs=tuple({f"s{chance.randrange(max(0, n - 20), n)}" for _ in range(min(n, 3))}),
            )
            for n in range(size)
        ]
        drawn = boxes(step_graph(steps, "steps"))
        assert drawn.keys() == {step.id for step in steps}
        for step in steps:
            for needed in step.needs:
                assert drawn[needed][0] + drawn[needed][2] < drawn[step.id][0]
        places = sorted(drawn.values())
        for (x, y, width, height), (x2, y2, _, height2) in pairwise(places):
            assert x2 >= x + width or y2 >= y + height or y >= y2 + height2


def _edge_count(svg: str) -> int:
    return sum(each.get("class") == "edge" for each in parsed(svg).iter("path"))


def test_a_graph_of_thousands_of_dependencies_is_drawn_in_milliseconds() -> None:
    back = 50
    dense = [
        GraphStep(id=f"s{n}", needs=tuple(f"s{m}" for m in range(max(0, n - back), n)))
        for n in range(200)
    ]
    layers = [
        GraphStep(id=f"s{n}", needs=tuple(f"s{m}" for m in range(100)) if n >= 100 else ())
        for n in range(200)
    ]
    star = [GraphStep(id=f"s{n}", needs=(f"s{n - 1}", "s0") if n else ()) for n in range(200)]
    begun_s = time.process_time()
    chain, cut, direct = (step_graph(steps, "steps") for steps in (dense, layers, star))
    assert time.process_time() - begun_s < 1  # the first one alone took half a minute
    # Of the dense one what others imply is left out, so that nothing is missing.
    assert (_edge_count(chain), "are not drawn" in chain) == (199, False)
    assert _edge_count(cut) == EDGES_MAX
    assert "9,600 of their dependencies are not drawn" in cut
    assert _edge_count(direct) == 397
    for svg in (chain, cut, direct):
        assert len(boxes(svg)) == 200


def test_what_is_left_out_of_a_graph_follows_from_what_is_drawn() -> None:
    chance = random.Random(9)
    needs = {n: {chance.randrange(n) for _ in range(min(n, 12))} for n in range(60)}
    steps = [
        GraphStep(id=f"s{n}", needs=tuple(f"s{each}" for each in found))
        for n, found in needs.items()
    ]
    svg = step_graph(steps, "steps")
    places = {place[:2]: int(name[1:]) for name, place in boxes(svg).items()}
    rights = {(x + 184, y + 27): n for (x, y), n in places.items()}
    lefts = {(x, y + 27): n for (x, y), n in places.items()}
    drawn: dict[int, set[int]] = {n: set() for n in needs}
    for each in parsed(svg).iter("path"):
        if each.get("class") == "edge":
            numbers = [float(found) for found in re.findall(r"-?[0-9.]+", each.get("d", ""))]
            begin, end = rights[numbers[0], numbers[1]], lefts[numbers[-2], numbers[-1]]
            drawn[end].add(begin)
    assert 59 <= sum(map(len, drawn.values())) <= EDGES_MAX
    assert sum(map(len, drawn.values())) < sum(map(len, needs.values()))
    for n, found in needs.items():
        assert drawn[n] <= found
        above, todo = set[int](), [n]
        while todo:
            new = drawn[todo.pop()] - above
            above |= new
            todo += new
        assert found <= above


def test_the_steps_of_a_subworkflow_are_inside_its_box() -> None:
    steps = [
        GraphStep(id="publish", kind="subworkflow", status="running"),
        GraphStep(id="publish.write", parent="publish", status="succeeded"),
        GraphStep(id="publish.check", parent="publish", needs=("publish.write",)),
        GraphStep(id="after", needs=("publish",)),
    ]
    drawn = boxes(step_graph(steps, "steps"))
    left, top, width, height = drawn["publish"]
    for inner in ("publish.write", "publish.check"):
        x, y, inner_width, inner_height = drawn[inner]
        assert left < x
        assert x + inner_width < left + width
        assert top < y
        assert y + inner_height < top + height
    assert drawn["after"][0] > left + width


def test_a_status_is_a_sign_and_a_word_and_a_link() -> None:
    steps = [
        GraphStep(id="plan", status="timed_out", note="agent.plan", href="#step-plan"),
        GraphStep(id="each", kind="for_each", status="running", items=(40, 12, 2), needs=("plan",)),
    ]
    root = parsed(step_graph(steps, "steps of research"))
    link = next(root.iter("a"))
    assert link.get("href") == "#step-plan"
    assert link.get("aria-label") == "plan, job, timed out, agent.plan"
    assert [each.get("class") for each in link.iter("path")] == ["sign"]
    texts = [each.text for each in root.iter("text")]
    assert texts == ["plan", "timed out · agent.plan", "each", "running · 12/40, 2 failed"]


def test_a_cycle_or_an_unknown_need_is_drawn_all_the_same() -> None:
    steps = [GraphStep(id="a", needs=("b",)), GraphStep(id="b", needs=("a", "gone"), parent="b")]
    assert boxes(step_graph(steps, "broken")).keys() == {"a", "b"}
    assert boxes(step_graph([], "empty")) == {}


def test_a_wide_graph_begins_at_its_own_size() -> None:
    chain = [GraphStep(id=f"s{n}", needs=(f"s{n - 1}",) if n else ()) for n in range(30)]
    for steps, chosen in ((chain, "actual"), (chain[:3], "fit")):
        radios = [
            each for each in parsed_loose(zoomable_graph(steps, "steps")) if "checked" in each
        ]
        assert [re.findall(r'class="zoom-(\w+)"', each) for each in radios] == [[chosen]]


def parsed_loose(html: str) -> list[str]:
    return re.findall(r"<input[^>]*>", html)


# ── Gantt charts ─────────────────────────────────────────────────────────────────────────────────

TIMELINE = [
    line(0, "run_started"),
    line(0, "job_dispatched", "plan", attempt=1),
    line(1, "job_returned", "plan", attempt=1, detail="its lease expired"),
    line(2, "step_succeeded", "plan"),
    line(2, "items_started", "search", detail="2 items"),
    line(2, "job_dispatched", "search", item=0, attempt=1),
    line(2, "job_dispatched", "search", item=1, attempt=1),
    line(3, "item_succeeded", "search", item=0, attempt=1),
    line(4, "job_failed", "search", item=1, attempt=1, detail="RuntimeError: no"),
    line(6, "job_dispatched", "search", item=1, attempt=2),
    line(7, "job_failed", "search", item=1, attempt=2, detail="RuntimeError: no"),
    line(7, "step_failed", "search", detail="item 1 failed"),
    line(7, "approval_requested", "review"),
    line(9, "step_succeeded", "review"),
    line(9, "job_dispatched", "write", attempt=1),
    line(10, "job_died", "write", attempt=1, detail="5 deliveries"),
    line(12, "job_dispatched", "write", attempt=1),
]


def told(
    spans: list[TimelineSpan], step: str, item: int | None = None
) -> list[tuple[str, float, str]]:
    return [
        (span.kind.name, ((span.end or at(20)) - BEGIN).total_seconds(), span.outcome)
        for span in spans
        if (span.step, span.item) == (step, item)
    ]


def test_attempts_redeliveries_and_waits_are_told_apart() -> None:
    spans = spans_of(TIMELINE)
    assert told(spans, "plan") == [("LOST_DELIVERY", 1, "lost"), ("ATTEMPT", 2, "succeeded")]
    assert told(spans, "search") == [("ITEMS", 7, "failed")]
    assert told(spans, "search", 1) == [
        ("ATTEMPT", 4, "failed"),
        ("RETRY_WAIT", 6, ""),
        ("ATTEMPT", 7, "failed"),
    ]
    assert told(spans, "review") == [("DECISION", 9, "succeeded")]
    assert told(spans, "write") == [
        ("ATTEMPT", 10, "died"),
        ("DEAD_LETTER", 12, "replayed"),
        ("ATTEMPT", 20, "running"),
    ]


def test_the_end_of_a_run_ends_what_is_open() -> None:
    spans = spans_of([*TIMELINE, line(15, "run_cancelled")])
    assert told(spans, "write")[-1] == ("ATTEMPT", 15, "cancelled")
    assert all(span.end is not None for span in spans)


def test_an_item_that_failed_for_good_waits_for_no_retry() -> None:
    spans = spans_of(
        [
            line(0, "items_started", "search", detail="2 items"),
            line(0, "job_dispatched", "search", item=0, attempt=1),
            line(0, "job_dispatched", "search", item=1, attempt=1),
            line(1, "job_failed", "search", item=0, attempt=1, detail="RuntimeError: no"),
            line(1, "item_failed", "search", item=0, attempt=1, detail="RuntimeError: no"),
            line(9, "item_succeeded", "search", item=1, attempt=1),
            line(9, "step_succeeded", "search", detail="1 of 2 items failed"),
        ]
    )
    assert told(spans, "search", 0) == [("ATTEMPT", 1, "failed")]


def test_a_job_that_no_worker_has_is_a_wait_and_not_an_attempt() -> None:
    entries = [
        line(0, "job_dispatched", "plan", attempt=1),
        line(2, "step_succeeded", "plan"),
        line(2, "job_dispatched", "write", attempt=1),
        line(2, "job_dispatched", "check", attempt=1),
    ]
    spans = with_waits(spans_of(entries), {"plan", "write"})
    assert {span.step: span.kind for span in spans} == {
        "plan": SpanKind.ATTEMPT,  # it has ended
        "write": SpanKind.WORKER_WAIT,
        "check": SpanKind.ATTEMPT,
    }
    drawn = gantt(spans, ["plan", "write", "check"], begin=at(0), end=at(5), hrefs={})
    assert any("wait for a worker · 3" in text for text in parsed(drawn).itertext())


def test_a_gantt_chart_says_in_words_what_its_bars_show() -> None:
    order = ["plan", "search", "review", "write", "never"]
    hrefs = {"plan": "#step-plan"}
    drawn = gantt(spans_of(TIMELINE), order, begin=BEGIN, end=at(20), hrefs=hrefs)
    rows = [
        (
            "".join(row.find("th").itertext()),  # type: ignore[union-attr]
            row.findtext("td[@class='words']"),
        )
        for row in parsed(drawn).iter("tr")
        if row.find("td") is not None
    ]
    assert rows == [
        ("plan", "succeeded · 2.0 s · 1 lost delivery"),
        ("search", "failed · 5.0 s"),
        ("item 0", "succeeded · 1.0 s"),
        ("item 1", "failed · 5.0 s · 2 attempts · 2.0 s waited"),
        ("review", "succeeded · 2.0 s"),
        ("write", "attempt 1 · 11 s · 2 attempts · 2.0 s waited"),
        ("never", "not begun"),
    ]
    key = ["".join(each.itertext()) for each in parsed(drawn).iter("li")]
    assert key == [
        "attempt, died",
        "attempt, failed",
        "attempt, running",
        "attempt, succeeded",
        "lost delivery",
        "wait for the retry",
        "wait for a decision",
        "wait for an operator",
        "items",
    ]


def ended(status: StepStatus, seconds: float, error: str | None = None) -> StepView:
    failure = None if error is None else Failure("expression_failed", error)
    moment = at(seconds)
    return StepView(status=status, attempt=0, output=None, error=failure, finished_at=moment)


def words_of(drawn: str) -> dict[str, str | None]:
    """What each row of a Gantt chart says, by its step."""
    return {
        "".join(row.find("th").itertext()): row.findtext("td[@class='words']")  # type: ignore[union-attr]
        for row in parsed(drawn).iter("tr")
        if row.find("td") is not None
    }


def test_a_step_that_ended_without_an_attempt_says_how() -> None:
    steps = {
        "failed": ended(StepStatus.FAILED, 3, HOSTILE),
        "late": ended(StepStatus.TIMED_OUT, 3),
        "skipped": ended(StepStatus.SKIPPED, 3),
        "kept": ended(StepStatus.SUCCEEDED, -60),
        "waits": StepView(status=StepStatus.PENDING, attempt=0, output=None, error=None),
    }
    drawn = gantt(with_ends([], steps, begin=BEGIN), list(steps), begin=BEGIN, end=at(5), hrefs={})
    assert words_of(drawn) == {
        "failed": "failed before it began",
        "late": "timed out before it began",
        "skipped": "skipped",
        "kept": "reused",
        "waits": "not begun",
    }
    bars = [each.get("class") for each in parsed(drawn).iter("rect")]
    assert bars == ["span ended o-failed", "span ended o-timed_out"]


def test_a_step_of_a_timeline_that_was_cut_has_its_own_times() -> None:
    whole = StepView(
        status=StepStatus.SUCCEEDED,
        attempt=1,
        output=1,
        error=None,
        started_at=at(1),
        finished_at=at(3),
    )
    known = spans_of([line(0, "job_dispatched", "plan"), line(1, "step_succeeded", "plan")])
    spans = with_ends(known, {"plan": whole, "late": whole}, begin=BEGIN)
    drawn = gantt(spans, ["plan", "late"], begin=BEGIN, end=at(5), hrefs={})
    assert words_of(drawn) == {"plan": "succeeded · 1.0 s", "late": "succeeded · 2.0 s"}


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ([line(4, "run_started"), line(4, "job_dispatched", "plan")], "wait for a slot · 4.0 s"),
        ([line(3, "run_timed_out")], "timed out · 3.0 s"),
        ([], "wait for a slot · 9.0 s"),
    ],
)
def test_the_wait_for_a_slot_is_a_row_of_its_own(then: list[TimelineLine], words: str) -> None:
    spans = spans_of([line(0, "run_queued"), *then])
    rows = words_of(gantt(spans, ["plan"], begin=BEGIN, end=at(9), hrefs={}))
    assert list(rows) == ["in the queue", "plan"]
    assert rows["in the queue"] == words


def test_a_redelivery_that_succeeds_in_the_same_millisecond_has_succeeded() -> None:
    lines = [
        line(0, "job_dispatched", "plan", attempt=1),
        line(4, "job_returned", "plan", attempt=1),
        line(4, "step_succeeded", "plan"),
    ]
    text = gantt(spans_of(lines), ["plan"], begin=BEGIN, end=at(5), hrefs={})
    assert "succeeded · 4.0 s · 1 lost delivery" in text


def test_of_many_items_the_troubled_and_slowest_are_shown() -> None:
    lines = [line(0, "items_started", "each")]
    lines += [line(0, "job_dispatched", "each", item=n, attempt=1) for n in range(100)]
    lines += [
        line(1 + n / 100, "job_failed" if n == 3 else "item_succeeded", "each", item=n)
        for n in range(100)
    ]
    text = gantt(spans_of(lines), ["each"], begin=BEGIN, end=at(5), hrefs={})
    shown = re.findall(r"item (\d+)</bdi>", text)
    assert len(shown) == ITEMS_MAX
    assert {"3", "99"} <= set(shown)
    assert "80 more items" in text


# ── Slots, fences, charts ────────────────────────────────────────────────────────────────────────


def test_slots_are_cells_that_lead_to_their_runs() -> None:
    taken = [TakenSlot(run_id="r1", status="waiting", href="/console/runs/r1")]
    root = parsed(slot_board(taken, active=2, limit=3, href="/console/runs"))
    board = next(root.iter("ol"))
    assert board.get("aria-label") == "2 of 3 slots in use"
    assert [each.get("class") for each in board] == [
        "slot st-waiting",
        "slot st-running",
        "slot free",
    ]
    assert [each.get("href") for each in board.iter("a")] == ["/console/runs/r1", "/console/runs"]
    full = next(parsed(slot_board(taken, active=1, limit=1)).iter("ol"))
    assert full.get("class") == "slots full"
    assert "share full" in slot_board([], active=CELLS_MAX + 1, limit=CELLS_MAX + 1)
    assert "unlimited" in slot_board([], active=1, limit=None)


def test_a_fence_has_a_block_until_the_next_and_refused_writes_are_crossed() -> None:
    marks = [
        FenceMark(at=at(0), what="acquired", fence=10, holder="a"),
        FenceMark(at=at(20), what="acquired", fence=11, holder="b"),
        FenceMark(at=at(30), what="refused", fence=10),
        FenceMark(at=at(40), what="forced", fence=11),
    ]
    root = parsed(fence_strip(marks, begin=BEGIN, end=at(60)))
    titles = [each.findtext("title") for each in root.iter("g")]
    assert titles == [
        "fence 10, a, 20 s",
        "fence 11, b, 20 s",
        "refused: a write with the older fence 10",
        "released by force: fence 11",
    ]
    assert next(root.iter("svg")).get("aria-label") == "2 terms in 1 min, 1 refused write"


def test_a_histogram_has_a_bar_a_bucket_and_a_line_for_what_is_expected() -> None:
    drawn = Histogram(
        title="Retries",
        unit="per 500 ms",
        bucket_s=0.5,
        series=(Bars("seen", (4.0, 0.0, 2.0)), Bars("policy", (2.0, 2.0, 2.0))),
    )
    root = ET.fromstring(svg_of(drawn))  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{space}rect") if each.get("class") == "bar f0"]
    assert len(bars) == 3  # the legend's, and two that are not empty
    assert float(bars[1].get("height", "0")) == pytest.approx(
        2 * float(bars[2].get("height", "0")), abs=0.2
    )
    lines = [each for each in root.iter(f"{space}path") if each.get("class") == "line s1"]
    assert len(lines) == 2  # the legend's, and the stepped one
    assert "<style>" not in chart(drawn)
    assert "<style>" in svg_of(drawn)


def test_hostile_text_stays_text_in_every_picture() -> None:
    step = GraphStep(id=HOSTILE, status=HOSTILE, note=HOSTILE, href="#x")
    entry = [
        line(0, "job_dispatched", HOSTILE, attempt=1),
        line(1, "job_failed", HOSTILE, detail=HOSTILE),
        line(2, f"step_{HOSTILE}", HOSTILE),
    ]
    mark = FenceMark(at=at(0), what="acquired", fence=1, holder=HOSTILE)
    slot = TakenSlot(run_id=HOSTILE, status=HOSTILE, href="/x", title=HOSTILE)
    lines = LineChart(title=HOSTILE, unit="x", series=(Series(HOSTILE, ((0, 1),)),))
    spans = spans_of(entry)
    assert spans[0].kind is SpanKind.ATTEMPT
    for drawn in (
        step_graph([step], HOSTILE),
        gantt(spans, [HOSTILE], begin=BEGIN, end=at(5), hrefs={HOSTILE: "#x"}),
        fence_strip([mark], begin=BEGIN, end=at(5)),
        slot_board([slot], active=1, limit=1),
        chart(lines),
    ):
        parsed(drawn)
