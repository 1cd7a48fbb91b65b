"""The verdict: a table of faults, the statements with their counts, and one word at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.chaos.fault import Seen
from tests.chaos.tally import Losses, Tally

__all__ = ["REPORT", "Verdict", "make_verdict", "show", "write_report"]

REPORT: Final = Path(__file__).parents[2] / "reports" / "chaos.json"
_SHOWN_MAX: Final = 20


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of chaos came to."""

    stack: str
    seed: int
    took_s: float
    runs: int
    starts: Mapping[str, int]
    """How often starts were answered, refused, left without an answer, and left out."""
    results: Mapping[str, int]
    """What workers were told about results."""
    faults: Sequence[Seen]
    checked: Mapping[str, int]
    broken: Mapping[str, Sequence[str]]
    lost: Mapping[str, int]
    """What the failover lost of what had been acknowledged just before it, by kind."""
    drained_s: float

    @property
    def is_good(self) -> bool:
        return not self.broken


def make_verdict(
    *,
    tally: Tally,
    losses: Losses,
    seen: Sequence[Seen],
    **members: object,
) -> Verdict:
    """The verdict on what was seen."""
    facts = {
        "faults": [msgspec.structs.asdict(each) for each in seen],
        "checked": dict(tally.checked),
        "broken": tally.broken,
        "lost": {what: count for what, count in losses.used.items() if count},
        **members,
    }
    return msgspec.convert(facts, Verdict)


def show(verdict: Verdict) -> Iterable[str]:
    """Lines for people."""
    faulty_s = sum(each.lasted_s for each in verdict.faults)
    starts = ", ".join(f"{count:,} {what}" for what, count in verdict.starts.items())
    yield (
        f"chaos on the {verdict.stack} stack, seed {verdict.seed}: {len(verdict.faults)} faults "
        f"of {faulty_s:.0f} s in {verdict.took_s:.0f} s"
    )
    yield f"starts: {starts}; {verdict.runs:,} runs, the last ended after {verdict.drained_s:.1f} s"
    results = ", ".join(f"{count:,} {what}" for what, count in sorted(verdict.results.items()))
    yield f"results: {results}"
    yield from _table(verdict.faults)
    for statement, count in verdict.checked.items():
        wrong = len(verdict.broken.get(statement, ()))
        yield f"  {'BROKEN' if wrong else 'holds':6}  {count:>7,} x  {statement}"
    for what, count in verdict.lost.items():
        yield f"  lost by the failover, as documented: {count} {what}"
    for statement, sentences in verdict.broken.items():
        for sentence in list(sentences)[:_SHOWN_MAX]:
            yield f"  ! {statement}: {sentence}"
    yield "verdict: everything holds" if verdict.is_good else "verdict: BROKEN"


def write_report(verdict: Verdict) -> None:
    """Beside those of the other stacks, in reports/chaos.json."""
    REPORT.parent.mkdir(exist_ok=True)
    others: dict[str, object] = {}
    if REPORT.exists():
        others = msgspec.json.decode(REPORT.read_bytes(), type=dict[str, object])
    text = msgspec.json.encode({**others, verdict.stack: verdict})
    REPORT.write_bytes(msgspec.json.format(text, indent=2) + b"\n")


def _table(seen: Iterable[Seen]) -> Iterable[str]:
    heads = ("fault", "lasted", "others work", "all work", "answered", "refused", "silent")
    rows = [
        (
            each.fault,
            f"{each.lasted_s:.1f} s",
            "-" if each.survived_s is None else f"{each.survived_s:.1f} s",
            f"{each.recovered_s:.1f} s",
            str(sum(each.answered.values())),
            str(each.refused),
            str(each.unanswered),
        )
        for each in seen
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        yield "  " + "  ".join(cells)
