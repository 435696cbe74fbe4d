"""OpenTelemetry spans of a gateway process, with one tracer for the whole process.

While traces are off, and in requests that are not sampled, no span is current, and each function
here does nothing, within a microsecond. Spans contain ids, counts and names; they contain client
text only if `shows_content`.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context, get_current
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    SpanKind,
    StatusCode,
    format_span_id,
    format_trace_id,
    get_current_span,
    use_span,
)

from common import tracing
from gateway.platform.settings import Settings
from gateway.records.errors import ApiError

SERVICE: Final = "sluice-gateway"
MOST_CONTENT: Final = 16_384
"""Maximum characters of content in one attribute; longer content is truncated."""

Attributes = Mapping[str, str | bool | int | float]


@dataclass(slots=True)
class _Tracing(tracing.Tracing):
    shows_content: bool = False


_tracing = _Tracing()


def start(settings: Settings) -> None:
    """Start creating spans, if enabled. Raises ValueError for an invalid `OTEL_` variable."""
    if settings.traces:
        _tracing.start(SERVICE)
        _tracing.shows_content = settings.trace_content


def stop() -> None:
    """Stop creating spans, and export pending ones within seconds."""
    _tracing.shows_content = False
    _tracing.stop()


def shows_content() -> bool:
    """Whether spans may contain client text."""
    return _tracing.shows_content


# --- spans ---------------------------------------------------------------------------------------


def span(name: str) -> AbstractContextManager[Span]:
    """Return a context manager for a span of a stage, a child of the current span.

    The current span stays the same. If an error leaves the block, the span records its name without
    its message.
    """
    if not get_current_span().is_recording():
        return NO_SPAN
    return _ending(_tracing.tracer.start_span(name))


def span_in(context: Context | None, name: str) -> AbstractContextManager[Span]:
    """Return a context manager for a new current span, with the parent from `here` or `context_of`.

    There is no span without a context.
    """
    if not context:
        return NO_SPAN
    return _current(_tracing.tracer.start_span(name, context))


def request_span(method: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
    """Return the context manager for a whole HTTP request; it continues any trace of the client.

    Returns NO_SPAN for a request that is not sampled, which then creates no other spans either.
    """
    if _tracing.provider is None:
        return NO_SPAN
    context = tracing.PROPAGATOR.extract(headers, Context())
    span = _tracing.tracer.start_span(method, context, SpanKind.SERVER)
    return _current(span) if span.is_recording() else NO_SPAN


def attempt_span(traceparent: str, *, earlier: str, attributes: Attributes) -> Span:
    """Start the span of a job's attempt, in the trace of the job's request.

    Both are a `traceparent`; the span links to the previous attempt, if there was one.
    """
    return _tracing.tracer.start_span(
        tracing.ATTEMPT,
        tracing.context_of(traceparent),
        SpanKind.PRODUCER,
        attributes=attributes,
        links=[tracing.link_to(earlier)],
    )


def note(attributes: Attributes, context: Context | None = None) -> None:
    """Set attributes of a context's span, by default the current one, unless it has ended."""
    if (span := get_current_span(context)).is_recording():
        span.set_attributes(attributes)


def fail(span: Span, error_type: str) -> None:
    """Mark a span as failed, with the code or class of the error."""
    span.set_attribute(ERROR_TYPE, error_type)
    span.set_status(StatusCode.ERROR)


# --- context propagation -------------------------------------------------------------------------


def here() -> Context | None:
    """Return a context that makes the current span a later one's parent; None without a span."""
    return get_current() if get_current_span().is_recording() else None


def exemplar_of(span: Span) -> dict[str, str] | None:
    """Return the histogram exemplar of a span; None if the span is not sampled."""
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return None
    return {
        "trace_id": format_trace_id(context.trace_id),
        "span_id": format_span_id(context.span_id),
    }


@contextmanager
def _ending(span: Span) -> Iterator[Span]:
    """End a span with a block."""
    try:
        yield span
    except asyncio.CancelledError:
        span.set_attribute(ERROR_TYPE, "cancelled")
        raise
    except ApiError as error:
        if error.status < 500:
            # A rejection is normal operation of the gateway, not a failure.
            span.set_attribute(ERROR_TYPE, error.code)
        else:
            fail(span, error.code)
        raise
    except BaseException as error:
        fail(span, type(error).__name__)
        raise
    finally:
        span.end()


@contextmanager
def _current(span: Span) -> Iterator[Span]:
    """Make a span current within a block, and end it with the block."""
    with _ending(span), use_span(span, record_exception=False, set_status_on_exception=False):
        yield span


NO_SPAN: Final[AbstractContextManager[Span]] = nullcontext(INVALID_SPAN)
