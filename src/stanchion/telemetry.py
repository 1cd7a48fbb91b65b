"""Traces: spans of starts, runs, jobs and handlers, exported by OpenTelemetry.

Off unless one of the standard variables names an endpoint (``OTEL_EXPORTER_OTLP_ENDPOINT``). While
off, ``tracing`` is ``None``: callers compare it and do nothing else, and OpenTelemetry is not even
imported. The tree of one run, whichever replicas and workers take part in it:

    the caller's span
    └─ start report                      the gate's answer; its context is stored with the run
       ├─ gate wait                      for the limiter or the tenant's lock
       ├─ store admit
       └─ run report                     exported when the run ends
          ├─ queue wait                  in the queue of a full tenant, if it was full
          ├─ queue report.plan           from the dispatch to the lease
          ├─ deliver report.plan         a redelivery links to the delivery before it
          │  └─ handle report.plan       in the worker, with the handler's own spans below it
          │     └─ result                until the result is durable
          ├─ advance
          │  ├─ lock wait
          │  └─ store commit
          └─ lock wait                   that ended without the run's lease

The ids of ``run`` and ``deliver`` spans are hashes of the run's and the job's id. So any replica
can name them as parent or link, although they are written elsewhere and at another time.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from stanchion.core import install_command
from stanchion.core.model import Run

# ── Attribute names ──────────────────────────────────────────────────────────────────────────────

TENANT: Final = "stanchion.tenant"
WORKFLOW: Final = "stanchion.workflow"
RUN: Final = "stanchion.run"
STEP: Final = "stanchion.step"
ITEM: Final = "stanchion.item"
JOB: Final = "stanchion.job"
TOPIC: Final = "stanchion.topic"
ATTEMPT: Final = "stanchion.attempt"
DELIVERY: Final = "stanchion.delivery"
FENCE: Final = "stanchion.fence"
WORKER: Final = "stanchion.worker"
RISK: Final = "stanchion.risk"
OUTCOME: Final = "stanchion.outcome"

_GEN_AI_OPT_IN: Final = "gen_ai_latest_experimental"
"""The conventions for generative AI still change: they are written only if this is asked for."""

# ── Settings ─────────────────────────────────────────────────────────────────────────────────────

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION: Final = "ff"
_MS_NS: Final = 1_000_000

SpanKind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]
Attribute: TypeAlias = str | int | None

UNTRACED: Final = nullcontext()
"""In place of a span while traces are off."""


class Span:
    """A span that has begun."""

    __slots__ = ("_span", "is_sampled")

    def __init__(self, span: Any) -> None:  # noqa: ANN401 - OpenTelemetry may not be installed
        self._span = span
        self.is_sampled: bool = span.get_span_context().trace_flags.sampled
        """Whether it is exported."""

    @property
    def traceparent(self) -> str:
        """Its context, as W3C writes it."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What a histogram notes beside an observation; ``None`` if the span is not exported."""
        if not self.is_sampled:
            return None
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def rename(self, name: str) -> None:
        """Give it another name, if more is known now."""
        self._span.update_name(name)

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes; those that are ``None`` are left out."""
        self._span.set_attributes(_present(attributes))

    def end(self, *, error: str | None = None, at_ns: int | None = None) -> None:
        """End it, as failed if there is an error."""
        if error is not None:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - only if on

            self._span.set_status(Status(StatusCode.ERROR, error[:500]))
        self._span.end(end_time=at_ns)


CURRENT: ContextVar[Span | None] = ContextVar("stanchion_span", default=None)
"""The span of the work that the task does: parent of new spans, and in log lines."""


class LogIds(NamedTuple):
    """What the work of a task is about. Log lines carry it, as far as it is known."""

    request_id: str | None = None
    tenant: str | None = None
    run: str | None = None
    job_id: str | None = None
    trace_id: str | None = None


LOG_IDS: ContextVar[LogIds | None] = ContextVar("stanchion_log_ids", default=None)


def log_ids(taken: Container[str]) -> dict[str, str]:
    """The fields that a log line gets beside its own."""
    ids, span = LOG_IDS.get(), CURRENT.get()
    known = {} if ids is None else ids._asdict()
    if span is not None:
        known["trace_id"] = span.trace_id
    return {name: value for name, value in known.items() if value and name not in taken}


class Tracing:
    """Makes spans and gives them to the exporter."""

    def __init__(self, provider: Any, ids: _SpanIds | None) -> None:  # noqa: ANN401 - as above
        from opentelemetry.sdk.trace import sampling  # noqa: PLC0415 - only if traces are on

        self._provider = provider
        self._tracer = provider.get_tracer("stanchion")
        self._ids = ids
        from opentelemetry import trace  # noqa: PLC0415 - only if traces are on

        self._api: Any = trace
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        opted = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        self._has_gen_ai = _GEN_AI_OPT_IN in {each.strip() for each in opted}
        # A sampler of the program may decide by anything, so only ours is known beforehand.
        self._follows_parents = ids is not None and isinstance(
            provider.sampler, sampling.ParentBased
        )
        self._bound: int | None = None
        """New traces are exported if the low half of their id is below it; ``None``: not known."""
        if ids is not None and isinstance(provider.sampler, sampling.ParentBasedTraceIdRatio):
            with suppress(ValueError):  # then the sampler exports every trace
                rate = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG", ""))
                self._bound = sampling.TraceIdRatioBased.get_bound_for_rate(rate)

    def may_sample(self, parent: str | None) -> bool:
        """Whether the span that begins next, with this parent or without one, may be exported.

        ``False`` costs no span, no context and no attributes: nothing below it is made either.
        """
        if parent is not None:
            return not self._follows_parents or is_sampled(parent)
        if self._bound is None or self._ids is None:
            return True
        low = random.getrandbits(64)
        if low >= self._bound:
            return False
        self._ids.chosen_trace = random.getrandbits(64) << 64 | low
        return True

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Attribute],
        *,
        parent: str | None = None,
        kind: SpanKind = "internal",
        since_ns: int | None = None,
        span_id: int | None = None,
        link: str | None = None,
    ) -> Span:
        """Begin a span. Its parent is the current span, unless a W3C context is given."""
        trace, current = self._api, CURRENT.get()
        if parent is not None:
            above = _context(parent)
        else:
            above = None if current is None else trace.set_span_in_context(current._span)  # noqa: SLF001 - of this module
        linked = None if link is None else _span_context(link)
        if self._ids is not None:
            self._ids.chosen = span_id
        return Span(
            self._tracer.start_span(
                name,
                context=above if above is not None else _ROOT,
                kind=self._kinds[kind],
                attributes=_present(attributes),
                links=() if linked is None else (trace.Link(linked),),
                start_time=since_ns,
            )
        )

    def record(
        self,
        name: str,
        attributes: Mapping[str, Attribute],
        *,
        parent: str | None = None,
        kind: SpanKind = "internal",
        since_ns: int,
        until_ns: int | None = None,
    ) -> None:
        """Make the span of something that is over."""
        span = self.begin(name, attributes, parent=parent, kind=kind, since_ns=since_ns)
        span.end(at_ns=until_ns)

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, Attribute] = {},
        *,
        parent: str | None = None,
        kind: SpanKind = "internal",
        since_ns: int | None = None,
    ) -> Iterator[Span]:
        """A span around a block, in which it is the current one.

        Below a span that is not exported no other is made.
        """
        current = CURRENT.get()
        if parent is None and current is not None and not current.is_sampled:
            yield current
            return
        made = self.begin(name, attributes, parent=parent, kind=kind, since_ns=since_ns)
        token = CURRENT.set(made)
        try:
            yield made
        except BaseException as error:
            made.end(error=f"{type(error).__name__}: {error}")
            raise
        else:
            made.end()
        finally:
            CURRENT.reset(token)

    # ── Spans of runs and jobs ───────────────────────────────────────────────────────────────────

    def run_ended(self, run: Run, traceparent: str) -> None:
        """Make the span of a run that has ended."""
        if not is_sampled(traceparent):
            return
        attributes: dict[str, Attribute] = {
            TENANT: run.tenant,
            WORKFLOW: run.workflow_id,
            RUN: run.id,
            RISK: str(run.risk),
            OUTCOME: str(run.status),
        }
        span = self.begin(
            f"run {run.workflow_id}",
            attributes,
            parent=traceparent,
            since_ns=run.created_at * _MS_NS,
            span_id=_id_of("run", run.id),
        )
        span.end(error=None if run.error is None else run.error.message)

    def delivered(
        self,
        run_id: str,
        traceparent: str,
        attributes: Mapping[str, Attribute],
        *,
        dispatch: int,
        dispatched_ms: int,
    ) -> str:
        """Make the spans of a job's wait in its queue and of its delivery; return the latter's."""
        above = context_of_run(run_id, traceparent)
        job, delivery = attributes[JOB], attributes[DELIVERY]
        assert isinstance(delivery, int)
        before = None
        if delivery > 1:
            number = _id_of("deliver", job, dispatch, delivery - 1)
            before = f"{above[:36]}{number:016x}{above[52:]}"
        else:
            since_ns = dispatched_ms * _MS_NS
            self.record(f"queue {attributes[TOPIC]}", attributes, parent=above, since_ns=since_ns)
        span = self.begin(
            f"deliver {attributes[TOPIC]}",
            attributes,
            parent=above,
            kind="producer",
            span_id=_id_of("deliver", job, dispatch, delivery),
            link=before,
        )
        span.end()
        return span.traceparent

    @contextmanager
    def handling(self, traceparent: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
        """The span of a handler. It is also OpenTelemetry's own current span inside."""
        from opentelemetry import context, trace  # noqa: PLC0415 - only if traces are on

        if self._has_gen_ai:
            attributes = {
                **attributes,
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": attributes[TOPIC],
                "gen_ai.conversation.id": attributes[RUN],
            }
        name = f"handle {attributes[TOPIC]}"
        span = self.begin(name, attributes, parent=traceparent, kind="consumer")
        attached = context.attach(trace.set_span_in_context(span._span))  # noqa: SLF001 - of this module
        token = CURRENT.set(span)
        try:
            yield span
        finally:
            CURRENT.reset(token)
            context.detach(attached)

    @contextmanager
    def below(self, traceparent: str) -> Iterator[None]:
        """Make a span of another process OpenTelemetry's own current span inside."""
        from opentelemetry import context  # noqa: PLC0415 - only if traces are on

        attached = context.attach(_context(traceparent))
        try:
            yield
        finally:
            context.detach(attached)

    def flush(self) -> None:
        """Export what has ended. Blocks."""
        self._provider.force_flush()

    def shutdown(self) -> None:
        """Export what has ended, and stop. Blocks."""
        self._provider.shutdown()


tracing: Tracing | None = None
"""``None`` while traces are off. Set by ``configure``, at the start of a process."""
_ROOT: Any = None
"""An empty context, so that a span without a parent begins a trace."""


def configure(service: str, *, instance: str | None = None, adopt: bool = False) -> str | None:
    """Switch traces on if the environment says so; return what is missing for it, if anything.

    ``instance`` names the replica or worker on its spans, unless the environment does.
    ``adopt``: export through the tracer provider of the program, if it has set one. Otherwise ours
    becomes the provider of the program, so that libraries in handlers export their spans as well.
    """
    global tracing, _ROOT  # noqa: PLW0603 - one per process, like OpenTelemetry's own provider
    if tracing is not None or not _is_on():
        return None
    try:
        from opentelemetry import trace  # noqa: PLC0415 - only if traces are on
        from opentelemetry.context import Context  # noqa: PLC0415 - likewise
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - likewise
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - likewise
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - likewise
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - likewise
    except ImportError as error:
        return f"{error}: {install_command('otel')}"
    _ROOT = Context()
    theirs = trace.get_tracer_provider()
    if adopt and isinstance(theirs, TracerProvider):
        tracing = Tracing(theirs, None)
        return None
    ids: Any = _SpanIds()  # not derived from their base class, which may not be installed
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    attributes: dict[str, str] = {}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name" not in given:
        attributes["service.name"] = service
    if instance is not None and "service.instance.id" not in given:
        attributes["service.instance.id"] = instance
    resource = Resource.create(dict(attributes))
    provider = TracerProvider(resource=resource, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if not isinstance(theirs, TracerProvider):
        trace.set_tracer_provider(provider)
    tracing = Tracing(provider, ids)
    return None


def shutdown() -> None:
    """Export what has ended and switch traces off. Blocks."""
    global tracing
    if tracing is not None:
        was, tracing = tracing, None
        was.shutdown()


def context_of_run(run_id: str, traceparent: str) -> str:
    """The context of a run's span, from the one that is stored with the run."""
    return f"{traceparent[:36]}{_id_of('run', run_id):016x}{traceparent[52:55]}"


def current_traceparent() -> str | None:
    """The context of the caller's current span; ``None`` if its program makes no traces."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def checked(traceparent: bytes | None) -> str | None:
    """A caller's ``traceparent`` header; ``None`` if there is none or it is not valid."""
    if traceparent is None:
        return None
    found = _TRACEPARENT.fullmatch(traceparent.decode("latin-1").strip())
    if found is None or found[1] == _INVALID_VERSION or (found[1] == "00" and found[5]):
        return None
    if not int(found[2], 16) or not int(found[3], 16):
        return None
    return f"00-{found[2]}-{found[3]}-{int(found[4], 16) & 1:02x}"


def is_sampled(traceparent: str) -> bool:
    """Whether the spans below this context are exported."""
    return int(traceparent[53:55], 16) % 2 == 1  # a higher bit says that the trace id is random


def now_ns() -> int:
    """The time of day, for a span that is made afterwards."""
    return time.time_ns()


class _SpanIds:
    """Random ids, except where an id was chosen before the span began. For one thread."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.chosen_trace: int | None = None

    def generate_span_id(self) -> int:
        chosen, self.chosen = self.chosen, None
        return chosen or random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        chosen, self.chosen_trace = self.chosen_trace, None
        return chosen or random.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


def _is_on() -> bool:
    has_endpoint = any(os.environ.get(name) for name in _ENDPOINTS)
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    return has_endpoint and not is_disabled and "otlp" in exporter


def _id_of(*parts: object) -> int:
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) or 1


def _present(attributes: Mapping[str, Attribute]) -> dict[str, str | int]:
    return {name: value for name, value in attributes.items() if value is not None}


def _span_context(traceparent: str) -> Any:  # noqa: ANN401 - OpenTelemetry may not be installed
    from opentelemetry.trace import SpanContext, TraceFlags  # noqa: PLC0415 - only if traces are on

    _, trace_id, span_id, flags = traceparent.split("-")[:4]
    return SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
    )


def _context(traceparent: str) -> Any:  # noqa: ANN401 - likewise
    from opentelemetry import trace  # noqa: PLC0415 - likewise

    return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(traceparent)), _ROOT)
