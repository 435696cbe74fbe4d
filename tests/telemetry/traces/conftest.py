"""A deployment of real processes that export spans to the tests' collector, and log JSON."""

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, running_stack
from tests.telemetry.traces.client import start_scripted_worker
from tests.telemetry.traces.collector import Collector, running_collector

STEP_SECONDS = 0.01


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector that works, unless a test lets it hang."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector) -> Iterator[Stack]:
    """A gateway and a scripted worker, traced."""
    with running_stack() as stack:
        traced = {**collector.environment, "SLUICE_LOG_FORMAT": "json"}
        stack.start_gateway(**traced)
        start_scripted_worker(stack, SLUICE_SCRIPTED_STEP_SECONDS=str(STEP_SECONDS), **traced)
        yield stack
