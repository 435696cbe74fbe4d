"""The spans of a completion, in the order of its stages."""

from tests.telemetry.traces.client import TracedResponse
from tests.telemetry.traces.collector import Span

REQUEST = "POST /v1/completions"
ROOM_SPANS = ("authenticate", "plan", "reserve", "attempt", "settle")
"""Children of the request's span."""
WORKER_SPANS = ("prefill", "decode")
"""Children of the worker's span."""
WHOLE = (REQUEST, *ROOM_SPANS, "queue", "generate", *WORKER_SPANS)


def by_name(trace: list[Span]) -> dict[str, Span]:
    """Return the spans of a trace by name; each name occurs once."""
    named = {span.name: span for span in trace}
    assert len(named) == len(trace), [span.name for span in trace]
    return named


def check_parents(trace: dict[str, Span], reply: TracedResponse) -> None:
    """Check that the spans are those of a completion, each in its process and below its parent."""
    assert sorted(trace) == sorted(WHOLE)
    request, attempt, generate = (trace[name] for name in (REQUEST, "attempt", "generate"))
    assert {name: span.parent_id for name, span in trace.items()} == {
        REQUEST: reply.client_span_id,
        **dict.fromkeys(ROOM_SPANS, request.span_id),
        "queue": attempt.span_id,
        "generate": attempt.span_id,
        **dict.fromkeys(WORKER_SPANS, generate.span_id),
    }
    worker = {"queue", "generate", *WORKER_SPANS}
    assert {name: span.service for name, span in trace.items()} == {
        **dict.fromkeys(trace, "sluice-gateway"),
        **dict.fromkeys(worker, "sluice-worker"),
    }


def check_order(trace: dict[str, Span]) -> None:
    """Check that the spans follow each other in order, without gaps in the worker."""
    for walk in (("authenticate", "plan", "reserve"), ("queue", "prefill", "decode")):
        starts = [trace[name].start for name in walk]
        assert starts == sorted(starts)
    # The worker computes the wait until Redis accepted its claim, which is within that span.
    prefill = trace["prefill"]
    assert trace["reserve"].start <= trace["queue"].start + prefill.end - prefill.start
    assert all(span.start <= span.end for span in trace.values())
    assert trace["queue"].end == prefill.start == trace["generate"].start
    assert trace["prefill"].end == trace["decode"].start
    assert trace["decode"].end == trace["generate"].end
    request = trace[REQUEST]
    assert all(request.start <= trace[name].start <= request.end for name in ROOM_SPANS)
    assert trace["settle"].end <= request.end
