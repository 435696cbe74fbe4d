"""docs/metrics.md lists exactly the metrics of running processes."""

import time

import httpx
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.metrics import MetricWrapperBase

import gateway.jobs.telemetry
import gateway.platform.store_telemetry
import gateway.platform.telemetry
import worker.hosting.host
import worker.telemetry
from common.health import HealthServer
from common.metrics import LightCounter, LightHistogram
from tests.gateway.conftest import asking
from tests.support.cases import all_cases
from tests.support.processes import wait_until
from tests.telemetry.conftest import Observed
from tests.telemetry.page import PREFIX, documented, fetch, scrape

GATEWAY, QUEUE, STORES = "Gateway", "Queue", "Redis and database"
TASKS, SCHEDULER = "Background jobs", "Scheduler"
WORKER, HOST, EVERY = "Worker", "Host", "Every process"
SECTIONS_OF = {
    "gateway": {GATEWAY, QUEUE, STORES, EVERY},
    "worker": {WORKER, EVERY},
    "jobs": {TASKS, SCHEDULER, STORES, EVERY},
    "beat": {SCHEDULER, EVERY},
}
"""Process -> sections of the page about it."""

NEED_A_MISHAP = {
    "sluice_gateway_shed_jobs_total",
    "sluice_gateway_resumed_jobs_total",
    "sluice_gateway_answers_taken_over_total",
    "sluice_gateway_image_fetches_total",
    "sluice_gateway_alias_requests_total",
    "sluice_redis_errors_total",
    "sluice_redis_redirections_total",
    "sluice_sql_errors_total",
    "sluice_certificate_expiry_timestamp_seconds",
    "sluice_export_events_total",
    "sluice_export_lag_rows",
    "sluice_export_lag_seconds",
    "sluice_export_batches",
    "sluice_export_held_micros",
}
"""Metrics without a series in a plain, healthy deployment, which exports nothing; other tests
cover them."""

ROWS = documented()


def test_every_table_of_the_page_is_parsed() -> None:
    assert {row.section for row in ROWS} == {
        *(GATEWAY, QUEUE, STORES, TASKS, SCHEDULER, WORKER, HOST, EVERY)
    }
    assert len(ROWS) > 60
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_labels_of_the_page_equal_the_declared_ones() -> None:
    modules = (
        gateway.platform.telemetry,
        gateway.platform.store_telemetry,
        gateway.jobs.telemetry,
        worker.telemetry,
        worker.hosting.host,
    )
    assert all(module.__doc__ for module in modules)
    declared = {}
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            # The states of an enum have a label named like the metric.
            states = {collector._name} if collector._type == "stateset" else set()
            declared[collector._name] = {*collector._labelnames, *states}
        elif isinstance(collector, LightCounter | LightHistogram):
            declared[collector._name.removesuffix("_total")] = {*collector.label_names}
    ours = {name: labels for name, labels in declared.items() if name.startswith(PREFIX)}
    assert ours == {row.family: set(row.labels) for row in ROWS}


@pytest.fixture(scope="module")
def used(observed: Observed) -> Observed:
    """The deployment, after everything that needs no failure has happened once."""
    headers = {"authorization": f"Bearer {observed.stack.key('acme')}"}
    with httpx.Client(base_url=observed.customers, headers=headers, timeout=30) as client:
        assert client.post("/v1/completions", json=asking()).status_code == 200
        assert client.post("/v1/completions", json=asking(stream=True)).status_code == 200
        assert client.post("/v1/completions", json=asking(max_tokens=0.5)).status_code == 400
    wait_until(
        lambda: (
            scrape(observed.jobs).value("sluice_jobs_last_success_timestamp_seconds", task="drain")
            > 0
        ),
        what="a drain",
    )
    wait_until(
        lambda: bool(scrape(observed.gateway).samples("sluice_queue_ready_workers")),
        what="the gateway reading the queue",
    )
    return observed


@all_cases("process", SECTIONS_OF)
def test_process_exports_exactly_the_documented_metrics(used: Observed, process: str) -> None:
    reported = scrape(getattr(used, process))
    expected = {row.family: row for row in ROWS if row.section in SECTIONS_OF[process]}
    assert {family.name for family in reported.ours()} == expected.keys()
    for family in reported.ours():
        row = expected[family.name]
        assert family.type == row.type, row.name
        assert family.documentation
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        of_others = process == "jobs" and row.section in {STORES, SCHEDULER}
        if row.name in NEED_A_MISHAP or of_others:
            assert labels <= {row.labels}, row.name
        else:
            assert labels == {row.labels}, row.name
    assert reported.value("sluice_build_info", component=process) == 1
    assert reported.value("process_resident_memory_bytes") > 0


@all_cases("process", SECTIONS_OF)
def test_gateways_serve_openmetrics_on_request(observed: Observed, process: str) -> None:
    url = getattr(observed, process)
    content_type, text = fetch(url, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    if process == "gateway":
        assert content_type.startswith("application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        content_type, text = fetch(url)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert "# EOF" not in text


@all_cases("accept", ["", "application/openmetrics-text;version=1.0.0"])
def test_a_colon_in_a_name_stays(accept: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "As vLLM calls it.", registry=registry).set(3)
    server = HealthServer("127.0.0.1", 0, {}, registry=registry)
    try:
        _, text = fetch(f"http://127.0.0.1:{server.port}", accept)
    finally:
        server.close()
    assert "\nvllm:num_requests_running 3.0\n" in text


def test_background_jobs_report_their_last_success(used: Observed) -> None:
    reported = scrape(used.jobs)
    assert reported.value("sluice_jobs_tasks_total", task="drain", outcome="succeeded") >= 1
    assert reported.value("sluice_jobs_tasks_total", outcome="failed") == 0
    assert reported.value("sluice_jobs_task_duration_seconds_count", task="drain") >= 1
    last = reported.value("sluice_jobs_last_success_timestamp_seconds", task="drain")
    assert 0 <= time.time() - last < 300
