"""Spans that cost a sixth of the SDK's.

The SDK's own spans check, copy and lock each attribute, and its encoder creates two protobuf
messages for each: 40 us of CPU for each of a request's spans. The spans of this module keep a
dictionary, and are encoded directly when they end. The thread that exports them therefore hardly
holds the interpreter lock, and spans that wait for it are no work for the garbage collector.
Everything else is the SDK's: sampler, ids, resource, queue, and export over HTTP.

A span whose parent is a span of this process has that span's sampling decision. Spans have no
events, and the SDK's limits on attributes do not apply to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from struct import Struct
from time import time_ns
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
)
from typing_extensions import override

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import Attributes, AttributeValue


class EncodedSpan(bytes):
    """A span that has ended, as the SDK's queue holds it."""

    __slots__ = ()
    context: ClassVar = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(0x01))
    """For `BatchSpanProcessor`, which exports only sampled spans."""


@dataclass(eq=False, slots=True)
class LightSpan(Span):
    """A span with attributes, links and a status. Nothing changes it after its end."""

    tracer: "LightTracer"
    name: str
    context: SpanContext
    parent: SpanContext | None
    kind: SpanKind
    attributes: dict[str, Any]
    links: Sequence[Link]
    start_time: int
    end_time: int | None = None
    is_failed: bool = False

    @override
    def get_span_context(self) -> SpanContext:
        """Return the ids that propagate to its children."""
        return self.context

    @override
    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self.end_time is None

    @override
    def set_attribute(self, key: str, value: "AttributeValue") -> None:
        if self.end_time is None:
            self.attributes[key] = value

    @override
    def set_attributes(self, attributes: "Mapping[str, AttributeValue]") -> None:
        if self.end_time is None:
            self.attributes.update(attributes)

    @override
    def update_name(self, name: str) -> None:
        if self.end_time is None:
            self.name = name

    @override
    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status, without its description."""
        if self.end_time is None:
            code = status.status_code if isinstance(status, Status) else status
            self.is_failed = code is StatusCode.ERROR

    @override
    def end(self, end_time: int | None = None) -> None:
        """End the span, and queue it for export; later calls do nothing."""
        if self.end_time is None:
            self.end_time = time_ns() if end_time is None else end_time
            # The queue and `LightExporter` take these instead of the SDK's spans.
            self.tracer.processor.on_end(EncodedSpan(encode(self)))

    @override
    def add_event(self, *_: object, **_named: object) -> NoReturn:
        raise NotImplementedError

    @override
    def record_exception(self, *_: object, **_named: object) -> NoReturn:
        """Raise NotImplementedError: errors are attributes, without their messages."""
        raise NotImplementedError


class LightTracer(Tracer):
    """Creates `LightSpan`s with the sampler, ids and processors of an SDK's tracer."""

    def __init__(self, tracer: SdkTracer) -> None:
        self.processor: Any = tracer.span_processor
        self._sampler = tracer.sampler
        self._ids = tracer.id_generator

    @override
    def start_span(
        self,
        name: str,
        context: "Context | None" = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: "Attributes" = None,
        links: Sequence[Link] | None = (),
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """Start a span; its parent is the current span of `context`."""
        parent = get_current_span(context)
        above = parent.get_span_context()
        if isinstance(parent, LightSpan):
            ids = SpanContext(
                above.trace_id,
                self._ids.generate_span_id(),
                is_remote=False,
                trace_flags=above.trace_flags,
                trace_state=above.trace_state,
            )
            kept = {} if attributes is None else dict(attributes)
        else:
            trace_id = above.trace_id if above.is_valid else self._ids.generate_trace_id()
            result = self._sampler.should_sample(context, trace_id, name, kind, attributes, links)
            is_kept = result.decision is Decision.RECORD_AND_SAMPLE
            flags = TraceFlags.SAMPLED if is_kept else TraceFlags.DEFAULT
            is_random = (
                above.trace_flags.random_trace_id
                if above.is_valid
                else self._ids.is_trace_id_random()
            )
            ids = SpanContext(
                trace_id,
                self._ids.generate_span_id(),
                is_remote=False,
                trace_flags=TraceFlags(flags | TraceFlags.RANDOM_TRACE_ID if is_random else flags),
                trace_state=result.trace_state,
            )
            if result.decision is Decision.DROP:
                return NonRecordingSpan(ids)
            kept = dict(result.attributes or {})
        return LightSpan(
            self,
            name,
            ids,
            above if above.is_valid else None,
            kind=kind,
            attributes=kept,
            links=links or (),
            start_time=time_ns() if start_time is None else start_time,
        )

    @override
    def start_as_current_span(self, *_: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError


# --- export --------------------------------------------------------------------------------------


class LightExporter(OTLPSpanExporter):
    """Exports `EncodedSpan`s."""

    def __init__(self, resource: Resource, scope: str) -> None:
        super().__init__()
        named = InstrumentationScope(scope, "")
        empty = ReadableSpan(
            "", EncodedSpan.context, resource=resource, instrumentation_scope=named
        )
        (outer,) = encode_spans([empty]).resource_spans
        (inner,) = outer.scope_spans
        inner.ClearField("spans")
        self._scope = inner.SerializeToString()
        outer.ClearField("scope_spans")
        self._resource = outer.SerializeToString()

    @override
    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send spans to the collector; retries and logs failures as its base class does."""
        if self._shutdown:
            return SpanExportResult.FAILURE
        sent = self._client.export(self.request(spans))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE

    def request(self, spans: Sequence[EncodedSpan]) -> bytes:
        """Return an encoded ExportTraceServiceRequest."""
        each = chain.from_iterable((b"\x12", _varint(len(span)), span) for span in spans)
        within = b"".join((self._scope, *each))
        content = b"".join((self._resource, b"\x12", _varint(len(within)), within))
        return b"".join((b"\x0a", _varint(len(content)), content))


# Tags of the fields in opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
_TIMES: Final = Struct("<cQcQ")
_FLAGS: Final = Struct("<2sI")
_DOUBLE: Final = Struct("<cd")
_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200
_UNSET: Final = b"\x7a\x00"
_ERROR: Final = b"\x7a\x02\x18\x02"
_SHORT: Final = tuple(bytes([number]) for number in range(0x80))


def encode(span: LightSpan) -> bytes:
    """Return a span that has ended as an encoded `opentelemetry.proto.trace.v1.Span`."""
    context, parent = span.context, span.parent
    parts = [
        b"\x0a\x10",
        context.trace_id.to_bytes(16),
        b"\x12\x08",
        context.span_id.to_bytes(8),
    ]
    if state := context.trace_state:
        parts += (b"\x1a", _text(",".join(f"{name}={value}" for name, value in state.items())))
    flags = _HAS_IS_REMOTE
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8))
        flags |= _IS_REMOTE * parent.is_remote
    parts += (b"\x2a", _text(span.name), b"\x30", _SHORT[span.kind.value + 1])
    parts.append(_TIMES.pack(b"\x39", span.start_time, b"\x41", span.end_time))
    for name, value in span.attributes.items():
        parts += (b"\x4a", _sized(_key(name) + b"\x12" + _sized(_value(value))))
    for link in span.links:
        parts += (b"\x6a", _sized(_link(link)))
    parts += (_ERROR if span.is_failed else _UNSET, _FLAGS.pack(b"\x85\x01", flags))
    return b"".join(parts)


def _link(link: Link) -> bytes:
    context = link.context
    flags = _HAS_IS_REMOTE | _IS_REMOTE * context.is_remote
    ids = b"\x0a\x10" + context.trace_id.to_bytes(16) + b"\x12\x08" + context.span_id.to_bytes(8)
    return ids + b"\x35" + flags.to_bytes(4, "little")


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return b"\x0a" + _text(value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value)
    if isinstance(value, float):
        return _DOUBLE.pack(b"\x21", value)
    return b"\x2a" + _sized(b"".join(b"\x0a" + _sized(_value(each)) for each in value))


@cache
def _key(name: str) -> bytes:
    """Return an attribute's name; there are few."""
    return b"\x0a" + _text(name)


def _text(text: str) -> bytes:
    return _sized(text.encode(errors="replace"))


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if 0 <= number < len(_SHORT):
        return _SHORT[number]
    number &= 0xFFFF_FFFF_FFFF_FFFF
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
