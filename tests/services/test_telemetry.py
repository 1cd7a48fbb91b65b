"""Trace contexts and the ids in log lines, without any exporter."""

from __future__ import annotations

import logging

import pytest

from stanchion import telemetry
from stanchion.services.log import log_event
from stanchion.telemetry import LOG_IDS, LogIds

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f" 00-{TRACE}-{SPAN}-00 ", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-03", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("\xff", None),
        ("", None),
    ],
)
def test_a_callers_context_is_taken_only_if_it_is_valid(given: str, taken: str | None) -> None:
    assert telemetry.checked(given.encode("latin-1")) == taken
    assert telemetry.checked(None) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "TRUE"},
        {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_TRACES_EXPORTER": "none",
        },
        {"OTEL_SERVICE_NAME": "mine"},
    ],
)
def test_traces_are_off_unless_the_environment_names_an_endpoint(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert telemetry.configure("test") is None
    assert telemetry.tracing is None


def test_log_lines_carry_the_ids_of_what_the_task_works_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = LOG_IDS.set(LogIds(request_id="r-1", tenant="acme", run="run-7", trace_id=TRACE))
    try:
        with caplog.at_level(logging.INFO, "stanchion"):
            log_event(logging.INFO, "advance_failed", run="own", error="x")
    finally:
        LOG_IDS.reset(token)
    [record] = caplog.records
    assert record.__dict__["fields"] == {
        "run": "own",
        "error": "x",
        "request_id": "r-1",
        "tenant": "acme",
        "trace_id": TRACE,
    }
