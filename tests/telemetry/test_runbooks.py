"""The runbook of stalled jobs, followed in a deployment that a real Prometheus watches."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from contract import keys
from gateway.records.usage_record import encode_usage
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.prometheus_server import (
    PROMETHEUS,
    PrometheusServer,
    Target,
    running_prometheus,
)
from tests.support.stack import REPOSITORY, Stack, running_stack
from tests.support.usage import usage_record
from tests.telemetry.background import start_background
from tests.telemetry.promql import RULES, RUNBOOKS, rules_of
from tests.telemetry.test_rules import blocks


@dataclass(frozen=True)
class Operated:
    """Background jobs, and a Prometheus that scrapes them."""

    stack: Stack
    urls: dict[str, str]
    prometheus: PrometheusServer

    def is_true(self, alert: str) -> bool:
        """Whether the condition of an alert holds, with 3 runs in place of 100."""
        (rule,) = [each for path in RULES for each in rules_of(path) if each.get("alert") == alert]
        return bool(self.prometheus.query(rule["expr"].replace("> 100", "> 3")))

    def execute(self, line: str) -> str:
        """Run a command in a shell with the environment of the processes; return its output."""
        program = self.stack.directory / "sluice"
        if not program.exists():
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway.cli.main "$@"\n')
            program.chmod(0o700)
        done = subprocess.run(
            ["bash", "-ceu", line],
            env={
                **os.environ,
                **self.stack._variables(),
                "PATH": f"{program.parent}:{os.environ['PATH']}",
            },
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=PROCESS_PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def records(self) -> int:
        """Return the number of usage records in Redis."""
        with redis.Redis.from_url(self.stack.redis.url) as client:
            return sum(int(client.xlen(keys.usage(bucket))) for bucket in range(keys.BUCKETS))

    def append(self) -> None:
        """Append a usage record, as the settlement of a request does."""
        record = usage_record(1)
        with redis.Redis.from_url(self.stack.redis.url) as client:
            stream = keys.usage(keys.bucket_of(record.tenant_id))
            client.xadd(stream, {"u": encode_usage(record)})


@pytest.fixture(scope="module")
def operated() -> Iterator[Operated]:
    if PROMETHEUS is None:
        pytest.skip("Debian's prometheus is not installed")
    with running_stack() as stack:
        stack.key("acme")
        urls = start_background(stack)
        targets = [Target(url, f"sluice-{name}", {}) for name, url in urls.items()]
        with running_prometheus(PROMETHEUS, targets) as prometheus:
            yield Operated(stack, urls, prometheus)


@pytest.mark.slow
def test_runbooks_of_stalled_jobs_bring_the_usage_into_the_ledger(operated: Operated) -> None:
    wait_until(lambda: not operated.is_true("SluiceJobsNotRunning"), what="the first jobs")
    assert not operated.is_true("SluiceJobsStalled")
    jobs = operated.stack.processes["jobs"]
    jobs.send_signal(signal.SIGSTOP)
    operated.append()
    for alert in ("SluiceJobsStalled", "SluiceJobsNotRunning"):
        wait_until(lambda alert=alert: operated.is_true(alert), what=alert)  # type: ignore[misc]
    (runbook,) = [path for path in RUNBOOKS if path.stem == "SluiceJobsStalled"]
    health, reconcile = blocks(runbook, "sh")
    assert operated.records() == 1
    operated.execute(reconcile)
    assert operated.records() == 0
    jobs.send_signal(signal.SIGCONT)
    wait_until(lambda: not operated.is_true("SluiceJobsStalled"), what="the end of the alert")
    address = operated.urls["jobs"].removeprefix("http://")
    assert "200 OK" in operated.execute(health.replace("127.0.0.1:9464", address))
