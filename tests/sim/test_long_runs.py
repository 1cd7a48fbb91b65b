"""The long runs of the simulator fail if they found something, and if they compared nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import simulate
from tests.sim import valkey

COMPARED = "both stores answer the same"


def verdict(*broken: str, compared: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        simulated_s=3_600.0, broken=broken, checks=Counter({COMPARED: compared}), lines=()
    )


class Pool:
    """Plays days in this process; after the first batch somebody presses Ctrl-C."""

    def __init__(self, *broken: str) -> None:
        self._broken = broken
        self._batches = 0

    def map(self, _day: object, named: list[tuple[int, str]]) -> Iterator[SimpleNamespace]:
        self._batches += 1
        if self._batches > 1:
            raise KeyboardInterrupt
        return iter([verdict(*self._broken), *(verdict() for _ in named[1:])])


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("slots: differ",), 1)])
def test_a_night_that_is_stopped_fails_if_it_found_something(
    broken: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reports").mkdir()
    place = tmp_path / "reports" / "night.json"
    shrunk = SimpleNamespace(scenario=SimpleNamespace(faults=()), lines=("one",))
    monkeypatch.setattr(simulate, "_ROOT", tmp_path)
    monkeypatch.setattr(simulate, "ProcessPoolExecutor", lambda _: nullcontext(Pool(*broken)))
    monkeypatch.setattr(simulate, "play", lambda *_: verdict())
    monkeypatch.setattr(simulate, "shrunk", lambda *_: shrunk)
    monkeypatch.setattr("sys.argv", ["simulate", "night", "--place", str(place)])
    assert simulate.main() == code
    assert len(json.loads(place.read_text(encoding="utf-8"))["broken"]) == len(broken)


@pytest.mark.parametrize(("compared", "code"), [(7, 0), (0, 1)])
def test_days_on_valkey_fail_if_no_command_was_compared(
    compared: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def playing() -> Iterator[None]:
        yield

    monkeypatch.setattr(valkey, "playing_on_valkey", playing)
    monkeypatch.setattr(simulate, "play", lambda *_: verdict(compared=compared))
    monkeypatch.setattr("sys.argv", ["simulate", "valkey", "--days", "2"])
    assert simulate.main() == code
