"""A collector that is dead, hangs or refuses costs spans and nothing else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.platform import tracing
from gateway.platform.settings import Settings
from tests.support.cases import all_cases
from tests.support.processes import free_port, wait_until
from tests.support.stack import Stack, running_stack
from tests.telemetry.traces.client import ask, client_trace, start_scripted_worker
from tests.telemetry.traces.collector import Collector, running_collector

REQUESTS = 8
EXPORT_TIMEOUT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "300"}
"""A process that waited for a hanging collector would exceed any test's timeout."""


@pytest.fixture
def hanging() -> Iterator[Collector]:
    with running_collector(hangs=True) as collector:
        yield collector


@contextmanager
def traced_stack(url: str) -> Iterator[Stack]:
    traced = {
        "SLUICE_TRACES": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        **EXPORT_TIMEOUT,
        # Every request fills the queue, so that spans are dropped from the second one on.
        "OTEL_BSP_MAX_QUEUE_SIZE": "4",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with running_stack() as stack:
        stack.start_gateway(**traced)
        start_scripted_worker(stack, **traced)
        yield stack


def assert_requests_are_served(stack: Stack) -> None:
    stack.key()
    for number in range(REQUESTS):
        reply = ask(stack, stream=number % 2 == 0)
        assert reply.response.status_code == 200
        if number % 2 == 0:
            assert reply.chunks[-1]["choices"][0]["finish_reason"] == "length"


def assert_processes_end_in_time(stack: Stack) -> None:
    for name in ("worker", "gateway"):
        assert stack.stop(name) == 0


@pytest.mark.slow
def test_dead_or_hanging_collector_does_not_affect_requests() -> None:
    port, began = free_port(), time.monotonic()
    with traced_stack(f"http://127.0.0.1:{port}") as stack:
        assert_requests_are_served(stack)
        wait_until(lambda: "spans batch" in stack.log("gateway"), what="a word in the log")
        # It is logged once a minute.
        minutes = (time.monotonic() - began) / 60
        assert stack.log("gateway").count("spans batch") <= 2 + minutes
        with running_collector(port, hangs=True) as hanging:
            assert_requests_are_served(stack)
            wait_until(lambda: hanging.hung > 0, what="an export")
            assert_processes_end_in_time(stack)


def test_unexported_spans_are_bounded_and_cost_no_time(
    hanging: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", hanging.url)
    for name, value in EXPORT_TIMEOUT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    tracing.start(Settings(traces=True))
    try:
        for _ in range(1_000):
            with tracing.request_span("POST", client_trace()[2]):
                pass
        provider = tracing._tracing.provider
        assert provider is not None
        [processor] = provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= 100  # type: ignore[attr-defined]
    finally:
        tracing.stop()
    assert tracing.request_span("POST", client_trace()[2]) is tracing.NO_SPAN


def test_last_spans_are_exported_when_the_process_stops(collector: Collector) -> None:
    with running_stack() as stack:
        slow = {**collector.environment, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        stack.start_gateway(**slow)
        start_scripted_worker(stack, **slow)
        reply = ask(stack)
        assert collector.trace(reply.trace_id) == []
        stack.stop("worker")
        stack.stop("gateway")
        trace = collector.wait_for(reply.trace_id, "POST /v1/completions", "attempt", "generate")
        assert {span.service for span in trace} == {"sluice-gateway", "sluice-worker"}


def test_otel_service_name_overrides_the_default(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing.start(Settings(traces=True))
    trace_id, _, sampled = client_trace()
    with tracing.request_span("POST", sampled):
        pass
    tracing.stop()
    [exported] = collector.wait_for(trace_id, "POST")
    assert exported.service == "mine"


@all_cases("sampler, least, most", [("", 1, 200), ("parentbased_always_on", 2_000, 2_000)])
def test_few_requests_are_traced_unless_an_operator_sets_a_sampler(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str, least: int, most: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracing.start(Settings(traces=True))
    spans = [tracing.request_span("POST", {}) for _ in range(2_000)]
    tracing.stop()
    assert least <= sum(span is not tracing.NO_SPAN for span in spans) <= most
