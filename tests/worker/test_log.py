"""Every event has its line: a name to search for, and its fields beside it."""

from __future__ import annotations

import logging

import msgspec
import pytest

from stanchion.core.lease import FenceCause
from stanchion.worker import events
from stanchion.worker.events import LOGGER, log_event, show_lines

LINES = {
    events.JobEnded(job_id="j", topic="t", status="failed", took_ms=1): "job_ended",
    events.JobAbandoned(job_id="j", topic="t", cause=FenceCause.TAKEN): "job_lock_abandoned",
    events.JobCancelled(job_id="j", topic="t"): "job_cancelled",
    events.RenewalFailed(leases=2, error="why", left_ms=0): "job_lock_renew_failed",
    events.ResultRejected(job_id="j", code="stale_fence"): "job_result_rejected",
    events.ResultDropped(job_id="j", reason="why"): "job_result_dropped",
    events.ServerAway(error="why"): "server_away",
    events.ServerBack(): "server_back",
    events.LoopStalled(stalled_ms=1): "worker_loop_stalled",
}


@pytest.mark.parametrize("event", LINES, ids=lambda event: type(event).__name__)
def test_every_event_has_a_line_with_all_its_fields(
    event: events.WorkerEvent, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        events.log(event)
    [record] = caplog.records
    assert record.getMessage() == LINES[event]
    assert record.__dict__["fields"] == msgspec.structs.asdict(event)
    assert record.exc_info is None


def test_a_failed_renewal_says_how_long_the_worker_can_hold_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        events.log(events.RenewalFailed(leases=2, error="no answer within 2 s", left_ms=37_900))
    [record] = caplog.records
    assert record.__dict__["fields"] == {
        "leases": 2,
        "error": "no answer within 2 s, can hold on for 37 s",
        "left_ms": 37_900,
    }


def test_a_program_that_said_nothing_about_logging_gets_readable_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(LOGGER, "level", logging.NOTSET)
    show_lines()
    show_lines()
    log_event(logging.WARNING, "server_away", error="nobody listens")
    log_event(logging.DEBUG, "job_ended")
    assert len(root.handlers) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING server_away error=nobody listens")
    LOGGER.setLevel(logging.NOTSET)  # Also forgets what it remembered of levels.
