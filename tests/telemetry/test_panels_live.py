"""A real Prometheus reads a running Sluice under load: every panel and every recording rule has data."""

import math
import time
from collections.abc import Iterator

import pytest

from tests.support.prometheus_server import (
    PROMETHEUS,
    PrometheusServer,
    Target,
    running_prometheus,
)
from tests.telemetry.conftest import TENANTS, Observed
from tests.telemetry.load import load
from tests.telemetry.panels import Board, Panel, boards, with_values
from tests.telemetry.promql import RULES, rules_of

pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian) is not installed"),
    pytest.mark.timeout(180),
]

WARM_UP_SECONDS = 15.0
"""Until rates over ten seconds are those of the load."""
CLIENTS = 6
NAMESPACE = "live"

NEED_THE_REAL_ENGINE = {
    "sluice-engine/vLLM/Requests in the engine",
    "sluice-engine/vLLM/Prefix cache hits",
    "sluice-engine/vLLM/Tokens of an iteration",
}
"""The scripted engine is not vLLM. tests/telemetry/test_vllm_metrics.py sees these metrics."""

NEED_A_MISHAP = {
    "sluice-queue/Leases/Jobs that lost their worker": "no worker dies here",
    "sluice-reliability/Streams that went on/Lost attempts by reason": "no worker dies here",
    "sluice-reliability/Streams that went on/Pauses of resumed jobs": "no worker dies here",
    "sluice-gateway/Streams/Images fetched by URL": "no host is listed to fetch images from",
    "sluice-reliability/Certificates and replies/Until certificates end": "Redis speaks no TLS here",
}
"""Panels that are rightly empty while nothing goes wrong, or where something is not in use."""

PANELS = [panel for board in boards() for panel in board.panels]


@pytest.fixture(scope="module")
def prometheus(observed: Observed) -> Iterator[PrometheusServer]:
    """Prometheus, after it has read a deployment under load for some time."""
    assert PROMETHEUS is not None
    labels = {"namespace": NAMESPACE}
    targets = [
        Target(observed.gateway, "sluice-gateway", labels),
        Target(observed.worker, "sluice-worker", labels | {"pool": "scripted"}),
        Target(observed.jobs, "sluice-jobs", labels),
        Target(observed.beat, "sluice-beat", labels),
    ]
    keys = [observed.stack.key(tenant) for tenant in TENANTS]
    with (
        running_prometheus(PROMETHEUS, targets, RULES) as server,
        load(observed.gateway, keys, clients=CLIENTS),
    ):
        time.sleep(WARM_UP_SECONDS)
        yield server


def has_data(server: PrometheusServer, expression: str, *, seconds: float = 10.0) -> bool:
    """Return whether an expression is a number; it may take some more evaluations of rules."""
    until = time.monotonic() + seconds
    while True:
        values = [float(each["value"][1]) for each in server.query(expression)]
        if any(not math.isnan(value) for value in values):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.5)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_a_panel_has_data(prometheus: PrometheusServer, panel: Panel) -> None:
    if panel.name in NEED_THE_REAL_ENGINE:
        pytest.skip("the scripted engine has no metrics of vLLM")
    if panel.name in NEED_A_MISHAP:
        pytest.skip(NEED_A_MISHAP[panel.name])
    empty = [
        query.expr
        for query in panel.queries
        if not has_data(prometheus, with_values(query.expr, NAMESPACE))
    ]
    assert empty == []


def test_what_is_left_out_is_there() -> None:
    assert {*NEED_A_MISHAP, *NEED_THE_REAL_ENGINE} <= {panel.name for panel in PANELS}


@pytest.mark.parametrize(
    "record",
    [rule["record"] for path in RULES for rule in rules_of(path) if "record" in rule],
)
def test_a_recording_rule_has_data(prometheus: PrometheusServer, record: str) -> None:
    assert has_data(prometheus, f'{record}{{namespace="{NAMESPACE}"}}')


def test_every_rule_is_evaluated_without_an_error(prometheus: PrometheusServer) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(rules_of(path)) for path in RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_nothing_fires_while_all_is_well(prometheus: PrometheusServer) -> None:
    """Refusals of a full queue are errors of ours, so the availability objective is not looked at."""
    firing = prometheus.query(
        'ALERTS{alertstate="firing", alertname!="SluiceAvailabilityBudgetBurn"}'
    )
    assert firing == []


@pytest.mark.parametrize("board", boards(), ids=lambda board: board.uid)
def test_variables_and_marks_have_values(prometheus: PrometheusServer, board: Board) -> None:
    for variable in board.json["templating"]["list"]:
        if variable["name"] != "datasource":
            assert has_data(prometheus, with_values(board.values_of(variable["name"]), NAMESPACE))
    (builds,) = [m for m in board.json["annotations"]["list"] if m["name"] == "Deployments"]
    assert has_data(prometheus, with_values(builds["expr"], NAMESPACE))


def test_every_process_is_read(prometheus: PrometheusServer) -> None:
    reached = {each["metric"]["job"]: each["value"][1] for each in prometheus.query("up")}
    assert reached == dict.fromkeys(
        ("sluice-gateway", "sluice-worker", "sluice-jobs", "sluice-beat"), "1"
    )
