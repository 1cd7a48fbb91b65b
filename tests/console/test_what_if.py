"""What another cap would have admitted."""

from __future__ import annotations

import pytest

from stanchion.console.pages.admission import would_admit

AT_ONCE = [(0, None)] * 5
CASES = [
    ("no refusals", [], 3, 1_000, 0),
    ("one slot for five at once", AT_ONCE, 1, 1_000, 1),
    ("enough slots for five at once", AT_ONCE, 5, 1_000, 5),
    ("a slot is free again when its run has ended", [(0, None), (1_000, None)], 1, 1_000, 2),
    ("a slot is not free before", [(0, None), (999, None)], 1, 1_000, 1),
    ("a caller that retries counts once", [(0, "a"), (10, "a"), (20, "a")], 3, 1_000, 1),
    ("a caller that retries gets a later slot", [(0, "a"), (1, "b"), (5_000, "b")], 1, 1_000, 2),
]


@pytest.mark.parametrize(
    ("refused", "extra", "held_ms", "admitted"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_more_slots_admit_as_many_callers_as_they_have_room_for(
    refused: list[tuple[int, str | None]], extra: int, held_ms: float, admitted: int
) -> None:
    assert would_admit(refused, extra=extra, held_ms=held_ms) == admitted
