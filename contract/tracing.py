"""What gateway and worker agree on about traces: how spans are named, carried in jobs, and exported.

Spans go to an OpenTelemetry collector by OTLP over HTTP. Where it is, how much is sampled and how much waits to be
exported is up to the standard `OTEL_` variables, which OpenTelemetry's SDK reads by itself. Spans wait in a
bounded queue, and a thread exports them: a collector that is slow or away costs spans, and nothing else.
"""

import logging
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

INSTRUMENTATION: Final = "sluice"
PROVIDER: Final = "sluice"

# Spans, in the order in which a request meets them.
AUTHENTICATE: Final = "authenticate"
PLAN: Final = "plan"
RESERVE: Final = "reserve"
FETCH_IMAGES: Final = "fetch images"
ATTEMPT: Final = "attempt"
QUEUE: Final = "queue"
GENERATE: Final = "generate"
CLAIM: Final = "claim"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
TAKE_OVER: Final = "take over"
SETTLE: Final = "settle"

# Our own attributes.
ATTEMPT_NUMBER: Final = "sluice.attempt"
CODE: Final = "sluice.code"
GATEWAY_ID: Final = "sluice.gateway.id"
JOB_ID: Final = "sluice.job.id"
OUTCOME: Final = "sluice.outcome"
REQUEST_ID: Final = "sluice.request.id"
TENANT_ID: Final = "sluice.tenant.id"
WORKER_ID: Final = "sluice.worker.id"

# OpenTelemetry's, which its package of names marks as unstable or does not have any more.
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
URL_SCHEME: Final = "url.scheme"
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_INPUT: Final = "gen_ai.input.messages"
GEN_AI_REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

TEXT_COMPLETION: Final = "text_completion"
CHAT: Final = "chat"

FLUSH_SECONDS: Final = 3.0
"""How long spans may take to be exported when their process ends."""
COMPLAINT_SECONDS: Final = 60.0
"""How often a log says that spans cannot be exported."""

_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_propagator = TraceContextTextMapPropagator()


def open_provider(
    service: str, *, instance: str = "", sampler: "Sampler | None" = None
) -> "TracerProvider":
    """Return what makes spans and exports them; close it in the end with `close_provider`.

    `service` and `instance` name this process, unless OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES do. Without a
    `sampler` OTEL_TRACES_SAMPLER decides. Raises ValueError for variables that make no sense.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    names = {"service.name": service, "service.version": version("sluice")}
    if instance:
        names["service.instance.id"] = instance
    resource = Resource.create(names).merge(OTELResourceDetector().detect())
    # Ending it at exit could hold the exit up for half a minute.
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    logging.getLogger(_EXPORTER).addFilter(_Seldom())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def close_provider(provider: "TracerProvider") -> None:
    """Export what waits, within bounds: a collector that hangs is left behind."""
    closing = threading.Thread(target=provider.shutdown, name="close-traces", daemon=True)
    closing.start()
    closing.join(FLUSH_SECONDS)


def traceparent_of(span: SpanContext) -> str:
    """Return how a span is named in a job; empty if it is none."""
    if not span.is_valid:
        return ""
    ids = f"{format_trace_id(span.trace_id)}-{format_span_id(span.span_id)}"
    return f"00-{ids}-{span.trace_flags:02x}"


def span_of(traceparent: str) -> SpanContext | None:
    """Return the span that a `traceparent` names; None if it is empty or malformed."""
    context = _propagator.extract({"traceparent": traceparent}, Context())
    span = get_current_span(context).get_span_context()
    return span if span.is_valid else None


def context_of(span: SpanContext) -> Context:
    """Return the context in which a span of another process is the parent."""
    return set_span_in_context(NonRecordingSpan(span), Context())


class _Seldom(logging.Filter):
    """Lets one record through in `COMPLAINT_SECONDS`."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + COMPLAINT_SECONDS
        return True
