"""Gantt charts: the timeline of a run as a table, one row for each step, with bars of time.

``spans_of`` reads the lines of a run's timeline (``GET /v1/runs/{id}/timeline``) into spans: an
attempt, from its dispatch to its result; a delivery that was lost, from its dispatch to the return
of its job; a wait, for a retry, a delay, a decision or an operator. ``gantt`` draws them. Positions
are percentages, so that the bars follow the width of the page while the words keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec
from markupsafe import Markup, escape

from stanchion.console.text import duration, foreign, visible
from stanchion.wire.runs import StepView, TimelineLine

ITEMS_MAX: Final = 20
"""Items of one for-each that get a row of their own: the failed and the slowest ones first."""
ROWS_MAX: Final = 400
_TICKS: Final = 5
_STEPS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200)
_NARROWEST: Final = 0.4
"""Percent of the width that even the shortest bar has."""


class SpanKind(StrEnum):
    """What a stretch of time was spent on."""

    ATTEMPT = "attempt"
    LOST_DELIVERY = "lost delivery"
    """An attempt whose worker went away: the job was delivered again."""
    WORKER_WAIT = "wait for a worker"
    """An attempt whose job no worker has leased yet. The timeline alone does not tell."""
    RETRY_WAIT = "wait for the retry"
    DELAY = "delay"
    DECISION = "wait for a decision"
    DEAD_LETTER = "wait for an operator"
    SLOT = "wait for a slot"
    """Of the run as a whole, while its tenant was full."""
    ITEMS = "items"
    CHILDREN = "sub-workflow"
    ENDED = "end without an attempt"
    """Of a step of which the timeline has no attempt and no wait."""


_CONTAINERS: Final = frozenset({SpanKind.ITEMS, SpanKind.CHILDREN})
_WAITS: Final = frozenset(
    {
        SpanKind.WORKER_WAIT,
        SpanKind.RETRY_WAIT,
        SpanKind.DELAY,
        SpanKind.DECISION,
        SpanKind.DEAD_LETTER,
        SpanKind.SLOT,
    }
)
QUEUE: Final = "in the queue"
"""The row of a run's wait for a slot, above those of its steps."""


class TimelineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a step's or item's time. ``end`` is ``None`` while it lasts."""

    step: str
    item: int | None
    kind: SpanKind
    begin: datetime
    end: datetime | None = None
    attempt: int | None = None
    delivery: int = 1
    outcome: str = "running"
    """``succeeded``, ``failed``, ``timed_out``, ``cancelled``, … or ``running``."""
    detail: str | None = None


_BEGINS: Final[Mapping[str, SpanKind]] = {
    "job_dispatched": SpanKind.ATTEMPT,
    "delay_started": SpanKind.DELAY,
    "approval_requested": SpanKind.DECISION,
    "items_started": SpanKind.ITEMS,
    "subworkflow_started": SpanKind.CHILDREN,
}


def spans_of(entries: Iterable[TimelineLine]) -> list[TimelineSpan]:
    """The spans of a timeline, oldest first. Those without an end last still."""
    reading = _Reading()
    for entry in entries:
        reading.read(entry)
    return sorted((*reading.ended, *reading.open.values()), key=lambda span: span.begin)


def with_waits(spans: Iterable[TimelineSpan], unleased: Container[str]) -> list[TimelineSpan]:
    """The spans, with open attempts of these steps as waits: no worker has their jobs."""
    return [
        msgspec.structs.replace(span, kind=SpanKind.WORKER_WAIT, attempt=None)
        if span.end is None and span.kind is SpanKind.ATTEMPT and span.step in unleased
        else span
        for span in spans
    ]


def with_ends(
    spans: Sequence[TimelineSpan], steps: Mapping[str, StepView], *, begin: datetime
) -> list[TimelineSpan]:
    """The spans, and one for each step that has ended without any.

    It failed or was skipped before it began, or its lines are beyond those that were read. A step
    that ended before ``begin`` was taken from the run that this one repeats.
    """
    known = {span.step for span in spans}
    found = list(spans)
    for step_id, step in steps.items():
        if step.finished_at is None or step_id in known:
            continue
        is_reused = step.finished_at < begin
        since = step.finished_at if step.started_at is None else step.started_at
        has_worked = since < step.finished_at and not is_reused
        span = TimelineSpan(
            step=step_id,
            item=None,
            kind=SpanKind.ATTEMPT if has_worked else SpanKind.ENDED,
            begin=since,
            end=step.finished_at,
            outcome="reused" if is_reused else step.status,
            detail=None if step.error is None else step.error.message,
        )
        found.append(span)
    return found


class _Reading:
    """Spans that have ended, and the open one of each place."""

    def __init__(self) -> None:
        self.ended: list[TimelineSpan] = []
        self.open: dict[tuple[str, int | None], TimelineSpan] = {}

    def read(self, entry: TimelineLine) -> None:
        if entry.step is None:
            self._read_run(entry)
            return
        noun, _, outcome = entry.what.partition("_")
        if entry.what in _BEGINS:
            self._close(entry, "replayed")
            self._begin(entry, _BEGINS[entry.what], attempt=entry.attempt)
        elif entry.what == "job_returned":
            self._returned(entry)
        elif entry.what == "job_failed":
            self._close(entry, "failed", detail=entry.detail)
            self._begin(entry, SpanKind.RETRY_WAIT)
        elif entry.what == "job_died":
            self._close(entry, "died", detail=entry.detail)
            self._begin(entry, SpanKind.DEAD_LETTER)
        elif entry.what == "job_discarded":
            self._close(entry, "discarded")
        elif noun == "item":
            self._close(entry, outcome)
        elif noun == "step":
            self._close_step(entry, outcome)

    def _read_run(self, entry: TimelineLine) -> None:
        queued = msgspec.structs.replace(entry, step=QUEUE)
        if entry.what == "run_queued":
            self._begin(queued, SpanKind.SLOT)
        elif entry.what == "run_started":
            self._close(queued, "")
        elif entry.what.startswith("run_"):
            self._close_all(entry, entry.what.removeprefix("run_"))

    def _begin(self, entry: TimelineLine, kind: SpanKind, *, attempt: int | None = None) -> None:
        assert entry.step is not None
        self.open[entry.step, entry.item] = TimelineSpan(
            step=entry.step,
            item=entry.item,
            kind=kind,
            begin=entry.at,
            attempt=attempt,
            detail=entry.detail,
        )

    def _close(self, entry: TimelineLine, outcome: str, *, detail: str | None = None) -> None:
        assert entry.step is not None
        span = self.open.pop((entry.step, entry.item), None)
        if span is None:
            return
        # The last attempt has no retry to wait for.
        if span.kind is SpanKind.RETRY_WAIT and span.begin == entry.at:
            return
        word = "" if span.kind is SpanKind.RETRY_WAIT else outcome
        ended = msgspec.structs.replace(
            span, end=entry.at, outcome=word, detail=detail or span.detail
        )
        self.ended.append(ended)

    def _returned(self, entry: TimelineLine) -> None:
        """A worker lost the job: this delivery ends, and the attempt goes on with the next."""
        assert entry.step is not None
        span = self.open.pop((entry.step, entry.item), None)
        if span is None:
            return
        lost = msgspec.structs.replace(
            span, kind=SpanKind.LOST_DELIVERY, end=entry.at, outcome="lost", detail=entry.detail
        )
        self.ended.append(lost)
        self.open[entry.step, entry.item] = msgspec.structs.replace(
            span, begin=entry.at, delivery=span.delivery + 1
        )

    def _close_step(self, entry: TimelineLine, outcome: str) -> None:
        """A step has ended, and with it everything that was open inside of it."""
        for step, item in list(self.open):
            if step == entry.step or step.startswith(f"{entry.step}."):
                inner = msgspec.structs.replace(entry, step=step, item=item)
                self._close(inner, outcome, detail=entry.detail)

    def _close_all(self, entry: TimelineLine, outcome: str) -> None:
        for step, item in list(self.open):
            self._close(msgspec.structs.replace(entry, step=step, item=item), outcome)


# ── Drawing ──────────────────────────────────────────────────────────────────────────────────────


class _Scale(msgspec.Struct, frozen=True):
    """Where times are, in percent of the width."""

    begin: datetime
    length_ms: float

    def at(self, time: datetime) -> float:
        past_ms = (time - self.begin).total_seconds() * 1_000
        return max(0.0, min(100.0, past_ms / self.length_ms * 100))


def gantt(
    spans: Sequence[TimelineSpan],
    order: Sequence[str],
    *,
    begin: datetime,
    end: datetime,
    hrefs: Mapping[str, str],
) -> Markup:
    """The chart from ``begin`` to ``end``: when the run ended, or now.

    ``order`` has the steps in the order of their rows; steps that have not begun have no bars.
    ``hrefs`` says where a step's name leads to.
    """
    length_ms = max(1.0, (end - begin).total_seconds() * 1_000)
    scale = _Scale(begin, length_ms)
    by_place: dict[tuple[str, int | None], list[TimelineSpan]] = {}
    for span in spans:
        by_place.setdefault((span.step, span.item), []).append(span)
    ticks = _ticks(length_ms)
    rows: list[str] = []
    for step in (QUEUE, *order) if (QUEUE, None) in by_place else order:
        own = by_place.pop((step, None), [])
        rows.append(_row(step, None, own, scale, ticks, end, hrefs.get(step)))
        items = {item: found for (name, item), found in by_place.items() if name == step}
        shown = _worth_a_row(items, end)
        rows += [_row(step, item, items[item], scale, ticks, end, None) for item in shown]
        left_out = len(items) - len(shown)
        if left_out > 0:
            rows.append(
                f'<tr class="more"><th scope="row"></th><td colspan="2">{left_out:,} more items:'
                " the slowest and the failed ones are shown</td></tr>"
            )
        if len(rows) >= ROWS_MAX:
            break
    return Markup(  # noqa: S704 - made of numbers, class names and escaped text
        '<table class="gantt"><thead><tr><th scope="col">step</th>'
        f'<th scope="col"><span class="axis-title">since the start</span>{_axis(ticks)}</th>'
        '<th scope="col">what happened</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{_key(spans)}"
    )


def _key(spans: Sequence[TimelineSpan]) -> str:
    """What the bars mean: one sample of each kind that there is."""
    kinds = {
        (span.kind, _outcome(span) if span.kind is SpanKind.ATTEMPT else "")
        for span in spans
        if _is_drawn(span)
    }
    samples = []
    for kind, outcome in sorted(kinds, key=lambda each: (list(SpanKind).index(each[0]), each[1])):
        y, height = _place(kind)
        name = f"{kind}, {outcome.replace('_', ' ')}" if outcome else str(kind)
        samples.append(
            f'<li><svg aria-hidden="true"><rect class="span {_class(kind)} o-{outcome or "done"}"'
            f' x="1" y="{y}" width="26" height="{height}" rx="2"/></svg>{escape(name)}</li>'
        )
    return f'<ul class="gantt-key">{"".join(samples)}</ul>' if len(samples) > 1 else ""


def _class(kind: SpanKind) -> str:
    return kind.name.lower().replace("_", "-")


_TROUBLES: Final = frozenset({"failed", "timed_out", "died", "lost"})


def _is_drawn(span: TimelineSpan) -> bool:
    """A step that was skipped or reused has words and no bar."""
    return span.kind is not SpanKind.ENDED or span.outcome in _TROUBLES


def _outcome(span: TimelineSpan) -> str:
    return span.outcome if span.outcome.isidentifier() else "done"


def _place(kind: SpanKind) -> tuple[int, int]:
    """Top and height of a bar in its row: waits are lower than work, containers are lines."""
    if kind in _CONTAINERS:
        return 9, 4
    return (7, 8) if kind in _WAITS else (3, 16)


def _worth_a_row(
    items: Mapping[int | None, Sequence[TimelineSpan]], end: datetime
) -> list[int | None]:
    """The items to show, in their order: those that failed or were retried, then the slowest."""

    def weight(item: int | None) -> tuple[int, float]:
        spans = items[item]
        troubles = sum(span.outcome in _TROUBLES for span in spans)
        last = max(span.end or end for span in spans)
        return troubles, (last - spans[0].begin).total_seconds()

    chosen = sorted(items, key=weight, reverse=True)[:ITEMS_MAX]
    return sorted(chosen, key=lambda item: item or 0)


def _row(
    step: str,
    item: int | None,
    spans: Sequence[TimelineSpan],
    scale: _Scale,
    ticks: Sequence[tuple[float, str]],
    end: datetime,
    href: str | None,
) -> str:
    depth = min(4, step.count(".")) + (0 if item is None else 1)
    name = foreign(step if item is None else f"item {item}")
    linked = Markup('<a href="{}">{}</a>').format(href, name) if href is not None else name
    lines = "".join(
        f'<line class="rule" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>' for at, _ in ticks
    )
    bars = "".join(_bar(span, scale, end) for span in spans)
    words = _words(spans, end)
    kind = "item" if item is not None else "step"
    return (
        f'<tr class="{kind} depth-{depth}"><th scope="row">{linked}</th>'
        f'<td class="bars"><svg role="img" aria-label="{escape(words)}">{lines}{bars}</svg></td>'
        f'<td class="words">{escape(words)}</td></tr>'
    )


def _bar(span: TimelineSpan, scale: _Scale, end: datetime) -> str:
    if not _is_drawn(span):
        return ""
    left = scale.at(span.begin)
    width = max(_NARROWEST, scale.at(span.end or end) - left)
    left = min(left, 100 - width)
    title = escape(_sentence(span, end))
    y, height = _place(span.kind)
    drawn = (
        f'<rect class="span {_class(span.kind)} o-{_outcome(span)}" x="{left:.2f}%" y="{y}"'
        f' width="{width:.2f}%" height="{height}" rx="2"><title>{title}</title></rect>'
    )
    if span.kind is SpanKind.LOST_DELIVERY:
        right = left + width
        drawn += f'<line class="cut" x1="{right:.2f}%" x2="{right:.2f}%" y1="0" y2="22"/>'
    return drawn


def _sentence(span: TimelineSpan, end: datetime) -> str:
    took = duration(((span.end or end) - span.begin).total_seconds() * 1_000)
    words = [str(span.kind)]
    if span.attempt is not None:
        words[0] = f"attempt {span.attempt}"
        if span.kind is SpanKind.LOST_DELIVERY or span.delivery > 1:
            words[0] += f", delivery {span.delivery}"
    if span.outcome:
        words.append(span.outcome.replace("_", " "))
    words.append(took)
    if span.detail:
        words.append(span.detail)
    return visible(" · ".join(words))


def _words(spans: Sequence[TimelineSpan], end: datetime) -> str:
    """One row in words, for the last column and for readers who cannot see the bars."""
    if not spans:
        return "not begun"
    if spans[0].kind is SpanKind.ENDED:
        word = spans[0].outcome.replace("_", " ")
        return f"{word} before it began" if spans[0].outcome in _TROUBLES else word
    attempts = sum(span.kind is SpanKind.ATTEMPT for span in spans)
    lost = sum(span.kind is SpanKind.LOST_DELIVERY for span in spans)
    waits = [span for span in spans if span.kind in _WAITS]
    # Of several that ended in the same millisecond, the last one says how it went.
    last = max(reversed(spans), key=lambda span: span.end or end)
    # A wait has no outcome of its own: its row tells that of the attempt.
    words = [last.outcome.replace("_", " ") or str(last.kind)]
    if last.end is None:
        words = [f"{last.kind} {last.attempt}" if last.attempt else str(last.kind)]
    took_ms = ((last.end or end) - spans[0].begin).total_seconds() * 1_000
    words.append(duration(took_ms))
    if attempts > 1:
        words.append(f"{attempts} attempts")
    if lost:
        words.append(f"{lost} lost {'delivery' if lost == 1 else 'deliveries'}")
    waited_ms = sum(((span.end or end) - span.begin).total_seconds() * 1_000 for span in waits)
    if attempts and waits:
        words.append(f"{duration(waited_ms)} waited")
    return visible(" · ".join(words))


def _axis(ticks: Sequence[tuple[float, str]]) -> str:
    marks = "".join(
        f'<text x="{at:.2f}%" y="12" class="{"first" if at == 0 else "mid"}">{escape(word)}</text>'
        for at, word in ticks
    )
    return f'<svg class="gantt-axis" aria-hidden="true">{marks}</svg>'


def _ticks(length_ms: float) -> list[tuple[float, str]]:
    """Round times and their places in percent, about five of them."""
    rough = length_ms / _TICKS
    steps = [*_STEPS_MS, *(each * 1_000 for each in _STEPS_S)]
    day_ms = 86_400_000
    step = next((each for each in steps if each >= rough), math.ceil(rough / day_ms) * day_ms)
    found = []
    for number in range(int(length_ms // step) + 1):
        at = number * step / length_ms * 100
        if at < 96:  # noqa: PLR2004 - a label further right would be cut off
            found.append((at, "0" if number == 0 else _tick_word(number * step)))
    return found


def _tick_word(ms: float) -> str:
    if ms < 60_000 and ms >= 1_000:  # noqa: PLR2004 - whole seconds without a fraction
        return f"{ms / 1_000:g} s"
    return duration(ms)
