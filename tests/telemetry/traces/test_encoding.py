"""Spans are exported exactly as the SDK's encoder would export them."""

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import StatusCode
from opentelemetry.util.types import AnyValue
from typing_extensions import override

from contract.spans import LightSpan, encode_request, envelope_of
from contract.tracing import context_of, tracer_of

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
        self.spans: list[ReadableSpan] = []

    @override
    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def remote_parent() -> SpanContext:
    state = TraceState([("vendor", "a"), ("other", "b")])
    return SpanContext(2**127, 3, True, TraceFlags(1), state)


def test_encoding_equals_the_encoding_of_the_sdk() -> None:
    kept = Kept()
    provider = TracerProvider(resource=Resource({"service.name": "test"}), shutdown_on_exit=False)
    provider.add_span_processor(kept)
    tracer = tracer_of(provider)
    remote = remote_parent()
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
    tracer.start_span("root").end()
    spans = [each for each in kept.spans if isinstance(each, LightSpan)]
    assert [each.name for each in spans] == ["all", "root"]
    assert "too" not in spans[0].kept
    encoded = encode_request(spans, envelope_of(spans[0]))
    assert ExportTraceServiceRequest.FromString(encoded) == encode_spans(spans)
