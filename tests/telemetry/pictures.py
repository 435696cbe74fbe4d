"""`python -m tests.telemetry.pictures`: the dashboards' panels of a running Sluice, for
docs/images.

Starts a deployment with the scripted engine and a Prometheus, and lets some tenants use it for some
minutes. A worker is killed in the middle. Then the overview is drawn from the queries of its
panels.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Final

from tests.support.processes import free_port
from tests.support.prometheus_server import PROMETHEUS, Target, running_prometheus
from tests.support.stack import REPOSITORY, Stack, running_stack
from tests.telemetry.background import start_background
from tests.telemetry.drawing import draw
from tests.telemetry.load import load, sell
from tests.telemetry.panels import boards
from tests.telemetry.promql import RULES

FOLDER: Final = REPOSITORY / "docs" / "images"
TENANTS: Final = ("acme", "globex", "initech")
CLIENTS: Final = (2, 8, 14, 6)
"""Concurrent clients in each quarter of the time."""


def main() -> int:
    """Run everything; return 1 if Prometheus is not installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if PROMETHEUS is None:
        sys.stdout.write("Prometheus is not installed (Debian: apt-get install prometheus).\n")
        return 1
    with running_stack() as stack:
        targets = _start(stack)
        with running_prometheus(PROMETHEUS, targets, RULES) as server:
            start = time.time()
            _use(stack, minutes=options.minutes)
            for board in boards():
                path = options.folder / f"{board.uid}.png"
                draw(board, server, start=start + 5, end=time.time(), path=path)
                sys.stdout.write(f"{path}\n")
    return 0


def _start(stack: Stack) -> list[Target]:
    """Set a price; start two gateways, two workers, background jobs and beat."""
    labels = {"namespace": "sluice"}
    targets = []
    asyncio.run(sell(stack))
    for name in ("gateway-0", "gateway-1"):
        url = stack.start_gateway(name, SLUICE_METRICS_TENANTS=",".join(TENANTS))
        targets.append(Target(stack.operators_of(url), "sluice-gateway", labels))
    for name in ("worker-0", "worker-1"):
        _start_worker(stack, name, port=str(free_port()))
        targets.append(Target(stack.worker_url(name), "sluice-worker", labels | {"pool": "demo"}))
    background = start_background(stack)
    targets += [Target(url, f"sluice-{name}", labels) for name, url in background.items()]
    return targets


def _start_worker(stack: Stack, name: str, *, port: str) -> None:
    stack.start_worker(
        name,
        SLUICE_ENGINE="scripted",
        SLUICE_SCRIPTED_STEP_SECONDS="0.03",
        SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN="0.004",
        SLUICE_MAX_SEQUENCES="4",
        SLUICE_HEALTH_PORT=port,
    )


def _use(stack: Stack, *, minutes: float) -> None:
    """Let more and then fewer clients use it; kill a worker at the peak."""
    keys = [stack.key(tenant) for tenant in TENANTS]
    for number, clients in enumerate(CLIENTS):
        quarter = minutes * 60 / len(CLIENTS)
        with load(stack.gateways[number % 2], keys, clients=clients):
            if clients == max(CLIENTS):
                time.sleep(quarter / 3)
                stack.kill("worker-1")
                time.sleep(quarter / 3)
                port = stack.worker_url("worker-1").rpartition(":")[2]
                _start_worker(stack, "worker-1", port=port)
                time.sleep(quarter / 3)
            else:
                time.sleep(quarter)


if __name__ == "__main__":
    sys.exit(main())
