"""Sums over the metrics of several gateway processes."""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contract.metrics import exposition
from contract.tasks import end_task
from gateway.http.shared_metrics import MetricsLink, Sums, add_up, decode, snapshot
from gateway.supervision import metrics_hub
from gateway.supervision.metrics_hub import MetricsHub
from tests.support.patience import PATIENCE_SECONDS

HELD = "sluice_gateway_jobs_in_flight"
WAITING = "sluice_queue_waiting_jobs"
SECONDS = "sluice_gateway_request_duration_seconds"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class Process:
    """The metrics of one process, and its connection to the hub."""

    def __init__(self, hub: Path) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests_total", "R.", ["model"], registry=self.registry)
        self.held = Gauge(HELD, "H.", registry=self.registry)
        self.waiting = Gauge(WAITING, "W.", ["model"], registry=self.registry)
        self.seconds = Histogram(SECONDS, "S.", buckets=[1], registry=self.registry)
        self.link = MetricsLink(hub)
        self.delay_seconds = 0.0
        self.reporting = asyncio.create_task(self.link.report(self.take))

    async def take(self) -> bytes:
        """Return a snapshot after the delay."""
        await asyncio.sleep(self.delay_seconds)
        return snapshot(self.registry)

    async def value(self, name: str, **labels: str) -> float | None:
        """Return a value of the sums."""
        families = CollectorRegistry()
        families.register(await self.link.collect())
        return families.get_sample_value(name, labels)

    async def end(self) -> None:
        """Close the connection, as the kernel does when a process dies."""
        self.reporting.cancel()
        await asyncio.wait([self.reporting])


@pytest.fixture
def silent() -> list[int]:
    """Ids of processes that are stuck."""
    return []


@pytest.fixture
async def processes(tmp_path: Path, silent: list[int]) -> AsyncIterator[list[Process]]:
    """Two processes that have joined a hub."""
    joined = asyncio.Semaphore(0)
    hub = MetricsHub(on_join=joined.release, on_silence=silent.append)
    await hub.listen(tmp_path / "metrics")
    watching = asyncio.create_task(hub.watch())
    both = [Process(tmp_path / "metrics") for _ in range(2)]
    for _ in both:
        await joined.acquire()
    yield both
    for each in both:
        await each.end()
    await end_task(watching)
    hub.close()


async def test_counts_and_own_gauges_are_added_and_shared_gauges_are_not(
    processes: list[Process],
) -> None:
    one, other = processes
    one.requests.labels("a").inc(2)
    other.requests.labels("a").inc(3)
    other.requests.labels("b").inc()
    for each in processes:
        each.held.set(4)
        each.waiting.labels("a").set(7)
        each.seconds.observe(0.5)
    one.seconds.observe(2)
    one.waiting.labels("b").set(math.nan)
    other.waiting.labels("b").set(5)
    for scraped in processes:
        assert await scraped.value("requests_total", model="a") == 5
        assert await scraped.value("requests_total", model="b") == 1
        assert await scraped.value(HELD) == 8
        assert await scraped.value(WAITING, model="a") == 7
        assert await scraped.value(WAITING, model="b") == 5
        assert await scraped.value(f"{SECONDS}_bucket", le="1.0") == 2
        assert await scraped.value(f"{SECONDS}_bucket", le="+Inf") == 3
        assert await scraped.value(f"{SECONDS}_sum") == 3


async def test_counts_of_an_ended_process_stay_and_its_gauges_do_not(
    processes: list[Process],
) -> None:
    one, other = processes
    for each in processes:
        each.requests.labels("a").inc(2)
        each.held.set(4)
    assert await other.value(HELD) == 8
    await one.end()
    other.requests.labels("a").inc()
    # The hub may not have seen the end of the connection yet.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await other.value(HELD) != 4:
            await asyncio.sleep(0)
    assert await other.value("requests_total", model="a") == 5


async def test_process_that_does_not_respond_keeps_its_latest_counts(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_hub, "SNAPSHOT_SECONDS", 0.05)
    one, other = processes
    one.requests.labels("a").inc(2)
    assert await other.value("requests_total", model="a") == 2
    one.delay_seconds = 600
    other.requests.labels("a").inc()
    assert await other.value("requests_total", model="a") == 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that checks its processes all the time."""
    monkeypatch.setattr(metrics_hub, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(metrics_hub, "SNAPSHOT_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
async def test_process_without_a_snapshot_for_a_while_is_stuck(
    processes: list[Process], silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.sleep(0.1)
    assert silent == []
    processes[0].delay_seconds = 600
    monkeypatch.setattr(metrics_hub, "SILENT_SECONDS", 0.5)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not silent:
            await asyncio.sleep(0.01)
    assert silent[0] == os.getpid()


def test_sums_have_the_latest_exemplars() -> None:
    pages = []
    for trace in ("early", "late"):
        registry = CollectorRegistry()
        seconds = Histogram(SECONDS, "S.", buckets=[1], registry=registry)
        seconds.observe(0.5, exemplar={"trace_id": trace})
        pages.append(decode(snapshot(registry)))
    for order in (pages, pages[::-1]):
        text, _ = exposition(Sums(add_up(order)), OPENMETRICS)
        [line] = [line for line in text.decode().splitlines() if 'le="1.0"' in line]
        assert line.split(" # ")[0].endswith(" 2.0")
        assert 'trace_id="late"' in line
