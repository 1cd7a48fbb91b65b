"""An outage makes two log lines, however often something is tried in it."""

from __future__ import annotations

import logging

import pytest

from stanchion.services.log import OutageLogger


def test_an_outage_is_told_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "stanchion")
    trouble = OutageLogger("it_failed", "it_recovered", level=logging.ERROR)
    trouble.worked()
    for _ in range(100):
        trouble.failed(OSError("nobody answers"))
    trouble.worked()
    trouble.worked()
    trouble.failed("again")
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [("ERROR", "it_failed"), ("INFO", "it_recovered"), ("ERROR", "it_failed")]
    assert caplog.records[0].__dict__["fields"] == {"error": "nobody answers"}
