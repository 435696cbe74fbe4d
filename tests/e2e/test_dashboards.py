"""Panels of vLLM's own metrics: Prometheus scrapes a worker with the real engine."""

import time

import pytest
from openai import OpenAI

from tests.support.prometheus_server import PROMETHEUS, Target, running_prometheus
from tests.support.stack import MODEL, Stack
from tests.telemetry.panels import NEED_THE_REAL_ENGINE, boards, with_values

NAMESPACE = "e2e"


@pytest.mark.e2e
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian) is not installed")
def test_panels_of_the_engine_have_data(stack: Stack, client: OpenAI) -> None:
    assert PROMETHEUS is not None
    target = Target(stack.worker_url(), "sluice-worker", {"namespace": NAMESPACE, "pool": "tiny"})
    panels = {panel.name: panel for board in boards() for panel in board.panels}
    empty = [query.expr for name in NEED_THE_REAL_ENGINE for query in panels[name].queries]
    with running_prometheus(PROMETHEUS, [target]) as server:
        since = time.time()
        # Rates need some scrapes, between which the engine has worked.
        while empty:
            client.completions.create(model=MODEL, prompt="Once upon a time " * 4, max_tokens=20)
            empty = [
                expr
                for expr in empty
                if not server.numbers(with_values(expr, NAMESPACE), since=since)
            ]
