"""Under load, every panel and recording rule has data in a real Prometheus."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.health import HealthServer
from gateway.records.limits import LimitName
from gateway.records.times import utc_now
from tests.gateway.conftest import asking
from tests.support.billing import billing_in_thread
from tests.support.certificates import self_signed
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port, wait_until
from tests.support.prometheus_server import (
    PROMETHEUS,
    PrometheusServer,
    Target,
    running_prometheus,
)
from tests.support.redis_server import SYSTEM, Encryption, RedisServer
from tests.support.stack import Stack, metric, running_stack
from tests.telemetry.background import start_background
from tests.telemetry.load import load, run_batch, sell
from tests.telemetry.panels import WITHOUT_VALUES, Board, boards, with_values
from tests.telemetry.promql import LABELS_OF_DCGM, OF_DCGM, RULES, rules_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or SYSTEM is None,
        reason="prometheus or redis-server (Debian) is not installed",
    ),
]

CLIENTS = 6
BATCH_LINES = 300
"""They run while Prometheus starts, and the rest beside the load."""
WORKERS = ("first", "second")
NAMESPACE = "live"

PANELS = [panel for board in boards() for panel in board.panels]


class Seen(NamedTuple):
    """A Prometheus, and the time since which it has scraped a deployment under load."""

    server: PrometheusServer
    since: float

    def without_data(
        self,
        expressions: Iterable[tuple[str, str]],
        is_shown: Callable[[list[float]], bool] = bool,
    ) -> list[tuple[str, str]]:
        """Return the expressions whose numbers never were what is shown, with their names.

        By default any number is. Wait for some more evaluations of rules first.
        """
        empty = list(expressions)
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = {
                expression: is_shown(self.server.numbers(expression, since=self.since))
                for expression in {expression for _, expression in empty}
            }
            empty = [each for each in empty if not found[each[1]]]
            if not empty or time.monotonic() > until:
                return empty
            time.sleep(0.5)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A deployment under load whose workers die, and a Prometheus that has scraped it."""
    assert PROMETHEUS is not None
    assert SYSTEM is not None
    folder = tmp_path_factory.mktemp("certificates")
    self_signed("localhost", folder, lifetime=timedelta(days=90))
    encryption = Encryption(free_port(), folder / "server.pem")
    redis = RedisServer(SYSTEM, options=encryption.options)
    # The receiver closes first: a request that ends halfway would be an error.
    with running_stack(redis=redis) as stack, billing_in_thread() as billing, _gpu() as gpu:
        targets = _start(stack, encryption.url, sink=billing.url)
        targets.append(gpu)
        keys = [stack.key(tenant) for tenant in ("acme", "other")]
        tomorrow = utc_now() + timedelta(hours=23)
        limited = stack.key(expires_at=tomorrow, limits={LimitName.REQUESTS_PER_MINUTE: 1})
        run_batch(stack.url, keys[1], lines=BATCH_LINES)
        with running_prometheus(PROMETHEUS, targets, RULES) as server:
            since = time.time()
            with (
                _long_stream(stack, keys[0]),
                load(stack.url, keys, clients=CLIENTS, limited=limited),
            ):
                _let_workers_die(stack)
                yield Seen(server, since)


@contextmanager
def _gpu() -> Iterator[Target]:
    """Serve what DCGM exporter serves of a GPU."""
    registry = CollectorRegistry()
    for name in OF_DCGM:
        Gauge(name, name, LABELS_OF_DCGM, registry=registry).labels(*LABELS_OF_DCGM).set(1)
    server = HealthServer("127.0.0.1", 0, {}, registry=registry)
    try:
        yield Target(f"http://127.0.0.1:{server.port}", "dcgm-exporter", {"namespace": NAMESPACE})
    finally:
        server.close()


def _start(stack: Stack, encrypted_redis: str, *, sink: str) -> list[Target]:
    labels = {"namespace": NAMESPACE}
    asyncio.run(sell(stack))
    stack.start_gateway(
        SLUICE_METRICS_TENANTS="acme,unknown",
        SLUICE_MAX_WAITING_JOBS="4",
        SLUICE_REDIS_URL=encrypted_redis,
    )
    targets = [Target(stack.operators, "sluice-gateway", labels)]
    for name in WORKERS:
        _start_worker(stack, name, port=free_port())
        worker = labels | {"pool": "scripted"}
        targets.append(Target(stack.worker_url(name), "sluice-worker", worker))
    sinks = json.dumps([{"name": "billing", "kind": "openmeter", "url": sink}])
    background = start_background(stack, SLUICE_EXPORT_SINKS=sinks)
    targets += [Target(url, f"sluice-{name}", labels) for name, url in background.items()]
    return targets


def _start_worker(stack: Stack, name: str, *, port: int) -> None:
    stack.start_worker(
        name,
        SLUICE_ENGINE="scripted",
        SLUICE_SCRIPTED_STEP_SECONDS="0.02",
        SLUICE_MAX_SEQUENCES="2",
        SLUICE_HEALTH_PORT=str(port),
    )


@contextmanager
def _long_stream(stack: Stack, key: str) -> Iterator[None]:
    """Receive the first token of a stream of 30 s."""
    body = asking(stream=True, max_tokens=1_500, ignore_eos=True)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS
    ) as response:
        # The variable keeps the stream open: a collected iterator closes its response.
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield


def _let_workers_die(stack: Stack) -> None:
    """Kill all workers, restart them, and wait until a stream has resumed."""
    for name in WORKERS:
        stack.kill(name)
    for name in WORKERS:
        port = stack.worker_url(name).rpartition(":")[2]
        _start_worker(stack, name, port=int(port))
    wait_until(
        lambda: metric(stack.operators, "sluice_gateway_resumption_pause_seconds_count") > 0,
        what="a stream resuming on another worker",
    )


# What a fast or a busy machine counts in the last ten seconds differs.
@pytest.mark.long
def test_every_query_of_a_panel_shows_more_than_zeros(seen: Seen) -> None:
    queries = [(panel.name, query) for panel in PANELS for query in panel.queries]
    names = {name for panel, query in queries for name in (panel, query.name)}
    assert names >= WITHOUT_VALUES
    assert (
        seen.without_data(
            (
                (query.name, with_values(query.expr, NAMESPACE))
                for panel, query in queries
                if WITHOUT_VALUES.isdisjoint((panel, query.name))
            ),
            is_shown=any,
        )
        == []
    )


def test_every_recording_rule_has_data(seen: Seen) -> None:
    records = [rule["record"] for path in RULES for rule in rules_of(path) if "record" in rule]
    assert records
    assert seen.without_data((each, f'{each}{{namespace="{NAMESPACE}"}}') for each in records) == []


def test_every_rule_is_evaluated_without_an_error(seen: Seen) -> None:
    rules = [rule for group in seen.server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(rules_of(path)) for path in RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_no_alert_fires_while_customers_are_served(seen: Seen) -> None:
    """Refusals of a full queue count as errors, so the availability objective is not checked."""
    firing = seen.server.query(
        'ALERTS{alertstate="firing", alertname!="SluiceAvailabilityBudgetBurn"}'
    )
    assert firing == []


def test_variables_and_annotations_have_values(seen: Seen) -> None:
    expressions = [(board.uid, expression) for board in boards() for expression in values_of(board)]
    assert expressions
    assert seen.without_data(expressions) == []


def values_of(board: Board) -> Iterator[str]:
    """Yield the queries of a dashboard's variables and annotations."""
    for variable in board.json["templating"]["list"]:
        if variable["name"] != "datasource":
            yield with_values(board.values_of(variable["name"]), NAMESPACE)
    (builds,) = [m for m in board.json["annotations"]["list"] if m["name"] == "Deployments"]
    yield with_values(builds["expr"], NAMESPACE)


def test_every_process_is_scraped(seen: Seen) -> None:
    # On a busy machine a scrape may exceed a second and fail; the next ones do not.
    numbers = {"gateway": 1, "worker": 2, "jobs": 1, "beat": 1}
    read = [(name, f'count(up{{job="sluice-{name}"}} == 1) == {n}') for name, n in numbers.items()]
    assert seen.without_data(read) == []
    known = {each["metric"]["job"] for each in seen.server.query("up")}
    assert known == {"dcgm-exporter", *(f"sluice-{name}" for name in numbers)}
