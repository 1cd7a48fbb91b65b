"""Trace contexts and the ids in log lines, without any exporter."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

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
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)]
)
def test_the_lowest_bit_of_a_context_says_whether_it_is_exported(
    flags: str, *, is_sampled: bool
) -> None:
    assert telemetry.is_sampled(f"00-{TRACE}-{SPAN}-{flags}") == is_sampled


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


@pytest.mark.parametrize("opted_in", ["", "http, gen_ai_latest_experimental"])
def test_a_handlers_span_is_current_and_has_gen_ai_attributes_only_if_asked_for(
    opted_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", opted_in)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = telemetry.Tracing(provider, None)
    about = {telemetry.TOPIC: "report.plan", telemetry.RUN: "run-7", telemetry.ITEM: None}
    with tracing.handling(f"00-{TRACE}-{SPAN}-01", about) as span:
        assert telemetry.current_traceparent() == span.traceparent
        assert telemetry.log_ids(()) == {"trace_id": TRACE}
        assert span.exemplar == {"trace_id": TRACE, "span_id": span.traceparent[36:52]}
    span.end(error="no")
    assert telemetry.current_traceparent() is None
    [exported] = exporter.get_finished_spans()
    assert exported.name == "handle report.plan"
    assert exported.parent is not None
    assert f"{exported.parent.span_id:016x}" == SPAN
    names = set(exported.attributes or ())
    assert {name for name in names if name.startswith("gen_ai.")} == (
        {"gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.conversation.id"}
        if opted_in
        else set()
    )
    assert telemetry.ITEM not in names


def test_a_span_of_an_unsampled_run_is_not_exported() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.Tracing(provider, None).span("x", parent=f"00-{TRACE}-{SPAN}-00") as span:
        assert span.exemplar is None
        assert span.trace_id == TRACE
    assert exporter.get_finished_spans() == ()


def test_a_missing_package_is_named_and_traces_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    missing = telemetry.configure("test")
    assert missing is not None
    assert "in a clone: pip install '.[otel]'" in missing
    assert telemetry.tracing is None


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_sampling_is_decided_before_a_span_is_made(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(rate))
    ids = telemetry._SpanIds()  # noqa: SLF001 - as configure makes it
    tracing = telemetry.Tracing(TracerProvider(id_generator=cast("Any", ids)), ids)
    decided = [tracing.may_sample(None) for _ in range(400)]
    assert abs(sum(decided) / 400 - rate) < 0.15
    for _ in range(20):
        # What is let through is what OpenTelemetry's own sampler takes.
        if tracing.may_sample(None):
            assert tracing.begin("x", {}).is_sampled
    # A caller's decision always holds.
    assert tracing.may_sample(f"00-{TRACE}-{SPAN}-01")
    assert not tracing.may_sample(f"00-{TRACE}-{SPAN}-00")


def test_a_sampler_of_the_program_is_asked_each_time() -> None:
    tracing = telemetry.Tracing(TracerProvider(sampler=ALWAYS_OFF), None)
    assert tracing.may_sample(None)
    assert tracing.may_sample(f"00-{TRACE}-{SPAN}-00")
    assert not tracing.begin("x", {}).is_sampled
