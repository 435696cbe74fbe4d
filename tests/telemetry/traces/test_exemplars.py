"""Histograms of a gateway have exemplars with the traces of their samples."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest

from contract.messages import Delta
from gateway.completions.queue.generation import Reply
from gateway.completions.sending.measuring import RequestMeasure
from gateway.http.exchange import Exchange
from gateway.platform import tracing
from gateway.platform.settings import Settings
from tests.telemetry.traces.collector import Collector


@pytest.fixture(autouse=True)
def _traced(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracing.start(Settings(traces=True))
    yield
    tracing.stop()


def measure(model: str, traceparent: str) -> list[str]:
    """Measure a request; return the exemplars of its model's histograms as a scraper reads them."""
    with tracing.request_span("POST", {"traceparent": traceparent}):
        measured = RequestMeasure("completions", Exchange())
        measured.accepted(model)
        measured.replied([Reply(0, Delta(1, 1, 0, 0, "a", [1]))])
        measured.close()
    page = generate_latest(REGISTRY)
    lines = page.decode().splitlines()
    return [line for line in lines if f'model="{model}"' in line and " # {" in line]


def test_latency_of_a_sampled_request_has_its_trace() -> None:
    lines = measure("exemplary", f"00-{'c' * 32}-{'d' * 16}-01")
    names = {line.partition("{")[0] for line in lines}
    assert names == {
        "sluice_gateway_time_to_first_token_seconds_bucket",
        "sluice_gateway_request_duration_seconds_bucket",
    }
    assert all(f'trace_id="{"c" * 32}"' in line for line in lines)


def test_latency_of_another_request_has_none() -> None:
    assert measure("unsampled", f"00-{'e' * 32}-{'d' * 16}-00") == []
