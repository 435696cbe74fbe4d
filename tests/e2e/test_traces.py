"""The trace of a request on the real engine."""

from collections.abc import Iterator

import pytest

from tests.support.deployment import COLLECTOR_PORT
from tests.support.stack import Stack
from tests.telemetry.traces.client import ask
from tests.telemetry.traces.collector import Collector, running_collector
from tests.telemetry.traces.spans import REQUEST, WHOLE, by_name, check_order, check_parents

pytestmark = pytest.mark.e2e

TOKENS = 24


@pytest.fixture
def collector(stack: Stack) -> Iterator[Collector]:
    """The collector for traces of clients that sample them."""
    with running_collector(int(stack.environment[COLLECTOR_PORT])) as collector:
        yield collector


def test_streamed_request_is_one_trace_from_the_client_to_the_engine(
    stack: Stack, collector: Collector
) -> None:
    asked = ask(
        stack,
        stream=True,
        max_tokens=TOKENS,
        ignore_eos=True,
        stream_options={"include_usage": True},
    )
    assert asked.chunks[-1]["usage"]["completion_tokens"] == TOKENS
    trace = by_name(collector.wait_for(asked.trace_id, *WHOLE))
    check_parents(trace, asked)
    check_order(trace)
    # The time in the queue is known in whole milliseconds.
    instants = {name for name, span in trace.items() if span.end == span.start}
    assert instants <= {"queue"}, "the others take time"
    for name in (REQUEST, "generate"):
        assert trace[name].attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert trace["generate"].attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert not any(span.is_error or span.links for span in trace.values())
