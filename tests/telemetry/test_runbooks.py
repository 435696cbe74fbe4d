"""Commands of runbooks, executed by a shell while the alert's condition holds."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from contract import keys
from gateway.cli.main import main
from gateway.records.usage_record import encode_usage
from tests.support.certificates import self_signed
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import free_port, wait_until
from tests.support.prometheus_server import (
    PROMETHEUS,
    PrometheusServer,
    Target,
    running_prometheus,
)
from tests.support.redis_server import SYSTEM, Encryption, RedisServer
from tests.support.stack import REPOSITORY, Stack, running_stack
from tests.support.usage import usage_record
from tests.telemetry.background import start_background
from tests.telemetry.promql import RULES, RUNBOOKS, rules_of
from tests.telemetry.test_rules import blocks

READING = re.compile(r"sluice \S+ (?:list|show|status|requests|balance|reconcile)\b")
"""Commands that any deployment with the tenant `acme` can run."""


@dataclass(frozen=True)
class Operated:
    """Background jobs on a Redis whose certificate has a private authority."""

    stack: Stack
    authority: Path
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
        with redis.Redis.from_url(self.stack.environment["SLUICE_REDIS_URL"]) as client:
            return sum(int(client.xlen(keys.usage(bucket))) for bucket in range(keys.BUCKETS))

    def append(self) -> None:
        """Append a usage record, as the settlement of a request does."""
        record = usage_record(1)
        with redis.Redis.from_url(self.stack.environment["SLUICE_REDIS_URL"]) as client:
            stream = keys.usage(keys.bucket_of(record.tenant_id))
            client.xadd(stream, {"u": encode_usage(record)})


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    if SYSTEM is None or PROMETHEUS is None:
        pytest.skip("Debian's redis-server or prometheus is not installed")
    folder = tmp_path_factory.mktemp("authority")
    self_signed("localhost", folder)
    encryption = Encryption(free_port(), folder / "server.pem")
    with ExitStack() as opened:
        server = RedisServer(SYSTEM, options=encryption.options)
        stack = opened.enter_context(running_stack(redis=server))
        stack.environment["SLUICE_REDIS_URL"] = encryption.url
        stack.key("acme")
        urls = start_background(stack)
        targets = [Target(url, f"sluice-{name}", {}) for name, url in urls.items()]
        prometheus = opened.enter_context(running_prometheus(PROMETHEUS, targets))
        yield Operated(stack, encryption.file, urls, prometheus)


@pytest.mark.slow
def test_runbook_of_redis_reaches_a_server_with_a_private_authority(operated: Operated) -> None:
    (runbook,) = [path for path in RUNBOOKS if path.stem == "SluiceRedisErrors"]
    plain, encrypted = blocks(runbook, "sh")
    line = encrypted.replace("CA_FILE", str(operated.authority))
    assert operated.execute(line) == "PONG\n"
    url = operated.stack.redis.url + "?socket_timeout=2"
    assert operated.execute(f"SLUICE_REDIS_URL='{url}'; {plain}") == "PONG\n"


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


@pytest.mark.slow
def test_reading_commands_of_all_runbooks_succeed(operated: Operated) -> None:
    named = {
        line.split(" #")[0].strip().replace("TENANT", "acme")
        for path in RUNBOOKS
        for line in [*blocks(path, "sh"), *re.findall(r"`(sluice [^`]+)`", path.read_text())]
    }
    # Others need the id of a batch or of a sink.
    placeholder = re.compile("[A-Z]{4}")
    reading = [line for line in named if READING.match(line) and not placeholder.search(line)]
    assert len(reading) > 8
    operated.stack.start_gateway()
    # Without TLS, whose connections would outlive the event loop of a command in this process.
    plain = {"SLUICE_REDIS_URL": operated.stack.redis.url}
    runner = CliRunner(env=operated.stack._variables() | plain)
    for line in sorted(reading):
        done = runner.invoke(main, line.split()[1:])
        assert done.exit_code == 0, (line, done.output)
