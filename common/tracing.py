"""Tracing: names of spans, their propagation in jobs, and their export.

Spans are exported to an OpenTelemetry collector by OTLP over HTTP. The standard `OTEL_` variables,
which OpenTelemetry's SDK reads, set its address, the sampling and the size of the export queue. A
thread exports spans from this bounded queue. If the collector is slow or unreachable, spans are
lost, but requests are not affected.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import Link, NoOpTracer, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

INSTRUMENTATION: Final = "sluice"
PROVIDER: Final = "sluice"

# Names of spans, in the order in which they occur in a request.
AUTHENTICATE: Final = "authenticate"
PLAN: Final = "plan"
RESERVE: Final = "reserve"
FETCH_IMAGES: Final = "fetch images"
ATTEMPT: Final = "attempt"
QUEUE: Final = "queue"
GENERATE: Final = "generate"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
TAKE_OVER: Final = "take over"
SETTLE: Final = "settle"

# Attributes of Sluice.
ATTEMPT_NUMBER: Final = "sluice.attempt"
CODE: Final = "sluice.code"
GATEWAY_ID: Final = "sluice.gateway.id"
JOB_ID: Final = "sluice.job.id"
OUTCOME: Final = "sluice.outcome"
PARENT_AGENT: Final = "sluice.agent.parent_id"
REQUEST_ID: Final = "sluice.request.id"
TENANT_ID: Final = "sluice.tenant.id"
WORKER_ID: Final = "sluice.worker.id"

# Attributes of OpenTelemetry's conventions for generative AI. They are not stable, and the package
# of semantic conventions deprecates its constants for them.
GEN_AI_AGENT: Final = "gen_ai.agent.id"
GEN_AI_CONVERSATION: Final = "gen_ai.conversation.id"
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

DEFAULT_RATIO: Final = 0.01
"""Share of the requests that are traced if neither an operator nor a client decides.

A traced request may cost a gateway more CPU than its other work (docs/traces.md).
"""
FLUSH_SECONDS: Final = 3.0
"""Longest time that the export of spans may take at shutdown."""
COMPLAINT_SECONDS: Final = 60.0
"""Shortest time between two log records about failed exports."""

_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(slots=True)
class Tracing:
    """The spans of this process, from `start` until `stop`."""

    tracer: Tracer = field(default_factory=NoOpTracer)
    """Creates spans, which record nothing while traces are off."""
    provider: "TracerProvider | None" = None
    """None while traces are off."""

    def start(self, service: str, *, instance: str = "", sampler: "Sampler | None" = None) -> None:
        """Create and export spans from now on.

        `service` and `instance` name this process, unless OTEL_SERVICE_NAME and
        OTEL_RESOURCE_ATTRIBUTES do. Without a `sampler`, OTEL_TRACES_SAMPLER applies; without this
        variable, `DEFAULT_RATIO`. Raises ValueError for invalid variables.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        if sampler is None and not os.environ.get(OTEL_TRACES_SAMPLER):  # noqa: TID251 - the SDK's
            sampler = ParentBasedTraceIdRatio(DEFAULT_RATIO)
        names = {"service.name": service, "service.version": version("sluice")}
        if instance:
            names["service.instance.id"] = instance
        resource = Resource.create(names).merge(OTELResourceDetector().detect())
        # A shutdown at exit could delay the exit by half a minute.
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        logging.getLogger(_EXPORTER).addFilter(_Seldom())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.provider, self.tracer = provider, provider.get_tracer(INSTRUMENTATION)

    def stop(self) -> None:
        """Export queued spans for at most `FLUSH_SECONDS`; drop the rest if the collector hangs."""
        provider, self.provider, self.tracer = self.provider, None, NoOpTracer()
        if provider is not None:
            closing = threading.Thread(target=provider.shutdown, name="close-traces", daemon=True)
            closing.start()
            closing.join(FLUSH_SECONDS)


def traceparent_of(context: Context | None = None) -> str:
    """Return the `traceparent` of a context's span, by default the current one, as jobs hold it.

    It is empty if there is no span.
    """
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent", "")


def context_of(traceparent: str) -> Context:
    """Return a context with the span that a `traceparent` names; empty if it is malformed."""
    return PROPAGATOR.extract({"traceparent": traceparent}, Context())


def link_to(traceparent: str) -> Link:
    """Return a link to a span; OpenTelemetry's SDK drops it if the `traceparent` is malformed."""
    return Link(get_current_span(context_of(traceparent)).get_span_context())


class _Seldom(logging.Filter):
    """Passes at most one record per `COMPLAINT_SECONDS`."""

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
