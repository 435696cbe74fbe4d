"""Spans are exported exactly as the SDK's encoder would export them."""

from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AnyValue
from typing_extensions import override

from common.spans import LightExporter, LightSpan
from common.tracing import context_of, tracer_of

VALUES: dict[str, AnyValue] = {
    "text": "a b",
    "umlauts": "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 200,
    "empty": "",
    "true": True,
    "false": False,
    "zero": 0,
    "int": 300,
    "large": 2**63 - 1,
    "negative": -5,
    "float": 0.25,
    "list": ["stop", "length"],
    "nothing": [],
}


class Kept(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    @override
    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def as_sdk_span(span: Span, resource: Resource) -> ReadableSpan:
    assert isinstance(span, LightSpan)
    return ReadableSpan(
        span.name,
        span.context,
        span.parent,
        resource,
        span.attributes,
        links=span.links,
        kind=span.kind,
        status=Status(StatusCode.ERROR if span.is_failed else StatusCode.UNSET),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=InstrumentationScope("sluice", ""),
    )


def test_encoding_equals_the_encoding_of_the_sdk() -> None:
    kept, resource = Kept(), Resource({"service.name": "test"}, "https://schema.example")
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(kept)
    tracer = tracer_of(provider)
    state = TraceState([("vendor", "a"), ("other", "b")])
    remote = SpanContext(2**127, 3, True, TraceFlags(1), state)
    with_all = tracer.start_span(
        "all",
        context_of(remote),
        SpanKind.CONSUMER,
        attributes=VALUES,
        links=[Link(remote), Link(SpanContext(1, 2, is_remote=False))],
        start_time=17,
    )
    with_all.set_status(StatusCode.ERROR)
    with_all.end(18)
    with_all.set_attributes({"too": "late"})
    root = tracer.start_span("root")
    child = tracer.start_span("child", set_span_in_context(root))
    child.end()
    root.end()
    spans = [as_sdk_span(span, resource) for span in (with_all, child, root)]
    assert {"too"}.isdisjoint(spans[0].attributes or ())
    encoded = LightExporter(resource, "sluice").request(kept.spans)
    assert ExportTraceServiceRequest.FromString(encoded) == encode_spans(spans)
