"""A small OpenTelemetry collector: receives spans by OTLP over HTTP, and keeps the raw bytes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from typing_extensions import override

from tests.support.processes import wait_until


@dataclass(frozen=True, slots=True)
class Span:
    """An exported span."""

    service: str
    name: str
    kind: str
    """For example `SERVER`."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    start: int
    """Unix time in nanoseconds, like `end`."""
    end: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    """Ids of traces and spans."""
    is_error: bool
    status_message: str
    events: list[str]

    @property
    def traceparent(self) -> str:
        """Its position in the trace, in W3C's format."""
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass
class Collector:
    """The exports so far, and the collector's behaviour."""

    url: str
    """For OTEL_EXPORTER_OTLP_ENDPOINT."""
    bodies: list[bytes] = field(default_factory=list)
    hangs: threading.Event = field(default_factory=threading.Event)
    """While set, exports get no response."""
    hung: int = 0
    """Exports without a response."""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that exports its spans here, soon."""
        return {
            "SLUICE_TRACES": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        }

    @property
    def spans(self) -> list[Span]:
        """Everything that has been exported."""
        return [span for body in list(self.bodies) for span in _read(body)]

    def trace(self, trace_id: str) -> list[Span]:
        """Return the spans of one trace in order of start time."""
        found = (span for span in self.spans if span.trace_id == trace_id)
        return sorted(found, key=lambda span: span.start)

    def wait_for(self, trace_id: str, *names: str) -> list[Span]:
        """Wait until a trace has spans of all these names, each as often as given."""

        def is_complete() -> bool:
            found = [span.name for span in self.trace(trace_id)]
            return all(found.count(name) >= names.count(name) for name in names)

        try:
            wait_until(is_complete, what="the export")
        except TimeoutError:
            found = [f"{span.service}: {span.name}" for span in self.trace(trace_id)]
            raise AssertionError(f"of {names} only {found} arrived") from None
        return self.trace(trace_id)


@contextmanager
def running_collector(port: int = 0, *, hangs: bool = False) -> Iterator[Collector]:
    """Run a collector on loopback for the length of a block, on any port unless one is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.hangs.is_set():
                collector.hung += 1
                collector.ended.wait()
                return
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.bodies.append(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        @override
        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    if hangs:
        collector.hangs.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _read(body: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, about["service.name"])


def _span(span: WireSpan, service: str) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={each.key: _value(each.value) for each in span.attributes},
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        status_message=span.status.message,
        events=[event.name for event in span.events],
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")
