"""The rendered chart works: real processes with exactly the arguments and environment of its pods.

Only ports and addresses differ from a cluster.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import SERVICE_UNAVAILABLE
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from contract import keys
from gateway.cli.main import main
from tests.deploy.chart_redis import ChartRedis, running_chart_redis
from tests.deploy.helm import CHART, Manifest, PodTemplate, environment, pod_of, render
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.postgres_server import running_postgres
from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.redis_server import BUNDLED, SYSTEM
from tests.support.stack import CHECKPOINT, MODEL, REPOSITORY, http_status, metric

pytestmark = pytest.mark.slow

ENTRYPOINT = (sys.executable, "-m", "gateway.cli.main")
"""The `sluice` command, the entry point of the images."""

OF_INTERPRETER = ("LD_", "PYTHON", "COVERAGE_")
"""Prefixes of variables with which this interpreter was started, and so its forks."""
MACHINE = {
    name: value
    for name, value in os.environ.items()
    if name == "PATH" or name.startswith(OF_INTERPRETER)
}
"""Variables besides those of the pod."""


@dataclass
class Cluster:
    """A release whose pods run as processes on loopback."""

    manifests: Sequence[Manifest]
    folder: Path
    ports: Mapping[str, int]
    """Port on this machine by the variable that sets it."""
    redis: ChartRedis
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://127.0.0.1:{self.ports['SLUICE_PORT']}"

    @property
    def operators_url(self) -> str:
        """Base URL of the gateway for operators."""
        return f"http://127.0.0.1:{self.ports['SLUICE_OPERATOR_PORT']}"

    @property
    def worker_url(self) -> str:
        """Base URL of the worker's probes."""
        return f"http://127.0.0.1:{self.ports['SLUICE_HEALTH_PORT']}"

    def pod(self, component: str) -> PodTemplate:
        """Return the pod of a component."""
        return pod_of(self.manifests, component, pool="demo" if component == "worker" else None)

    def variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment of a container's process."""
        variables = environment(container, self.manifests)
        if "SLUICE_REDIS_URL" in variables:
            variables["SLUICE_REDIS_URL"] = self.redis.on_this_machine(
                variables["SLUICE_REDIS_URL"]
            )
        ports = {name: str(port) for name, port in self.ports.items() if name in variables}
        return MACHINE | variables | ports

    def start(self, component: str, **ports: str) -> None:
        """Start the process of a component's container; `ports` override those of this machine."""
        (container,) = self.pod(component).spec["containers"]
        with (self.folder / f"{component}.log").open("wb") as log:
            self.processes[component] = spawn(
                *ENTRYPOINT,
                *container["args"],
                cwd=REPOSITORY,
                env=self.variables(container) | ports,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, container: Mapping[str, Any], *arguments: str) -> Result:
        """Run a command in a container to its end: its own, or `sluice` with other arguments.

        It runs in this process, with the environment of a separate process.
        """
        nothing = dict.fromkeys(name for name in os.environ if name.startswith("SLUICE_"))
        runner = CliRunner(env={**nothing, **self.variables(container)})
        return runner.invoke(main, arguments or container["args"])

    def wait_for(self, component: str, url: str) -> None:
        """Wait until a probe succeeds; fail with the log if the process ends instead."""

        def is_over() -> bool:
            return http_status(url) == 200 or self.processes[component].poll() is not None

        wait_until(is_over, what=f"{component} being ready")
        has_ended = self.processes[component].poll() is not None
        assert not has_ended, (self.folder / f"{component}.log").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A release of ci/bundled-values.yaml, of which only Redis, with TLS, is started."""
    if SYSTEM is None:
        pytest.skip("redis-server of the system (Debian's redis-server) is not installed")
    settings = {
        "listenAddress": "127.0.0.1",
        "redis.bundled.tls.existingSecret": "redis-tls",
        "database.bundled.enabled": "false",
        "worker.pools[0].model.path": str(CHECKPOINT),
        "worker.pools[0].model.aliases[0]": "tiny",
        "gateway.drain.delaySeconds": "0",
        "config.maxPrompts": "3",
    }
    variables = ("SLUICE_PORT", "SLUICE_OPERATOR_PORT", "SLUICE_HEALTH_PORT")
    ports = {name: free_port() for name in variables}
    with ExitStack() as servers:
        postgres = servers.enter_context(running_postgres())
        settings["database.url"] = postgres.create_database()
        manifests = render(CHART / "ci" / "bundled-values.yaml", settings=settings)
        folder = tmp_path_factory.mktemp("redis")
        redis = servers.enter_context(running_chart_redis(manifests, folder, SYSTEM))
        running = Cluster(manifests, tmp_path_factory.mktemp("cluster"), ports, redis)
        try:
            yield running
        finally:
            for process in running.processes.values():
                stop(process)


def test_release_serves_completions(cluster: Cluster) -> None:
    gateway = cluster.pod("gateway")
    (waits_for_schema,) = gateway.spec["initContainers"]
    assert cluster.run(waits_for_schema).exit_code == 1
    (migration,) = cluster.pod("migration").containers
    migrated = cluster.run(migration)
    assert migrated.exit_code == 0, migrated.output
    assert cluster.run(waits_for_schema).exit_code == 0

    cluster.start("gateway")
    cluster.start("worker")
    probes = gateway.spec["containers"][0]
    cluster.wait_for("gateway", cluster.url + probes["startupProbe"]["httpGet"]["path"])
    cluster.wait_for("gateway", cluster.url + probes["readinessProbe"]["httpGet"]["path"])
    cluster.wait_for("gateway", cluster.url + probes["livenessProbe"]["httpGet"]["path"])
    probes = cluster.pod("worker").spec["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        cluster.wait_for("worker", cluster.worker_url + probes[probe]["httpGet"]["path"])
    assert metric(cluster.worker_url, "sluice_worker_ready") == 1
    assert metric(cluster.operators_url, "sluice_queue_ready_workers") == 1
    with cluster.redis.client("default") as operator:
        wait_until(
            lambda: operator.exists(keys.watched_workers(MODEL)), what="the worker being watched"
        )
    assert http_status(f"{cluster.url}/metrics") == 404

    # `helm test`, as its pod runs it.
    test, check = cluster.pod("test").containers
    script, _ = test["args"]
    completed = subprocess.run(
        [sys.executable, *test["command"][1:], script, cluster.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_PATIENCE_SECONDS,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "The gateway is ready, and asks for a key.\n"
    checked = cluster.run(check)
    assert checked.exit_code == 0, checked.output
    assert "OK       secrets: of 1 gateways\n" in checked.stdout
    assert "OK       Redis TLS: verified\n" in checked.stdout

    # The commands of NOTES, in the gateway's container.
    (container,) = gateway.spec["containers"]
    made = cluster.run(container, *shlex.split('tenants create "Acme" --id acme'))
    assert made.exit_code == 0, made.output
    made = cluster.run(container, *shlex.split("keys create --tenant acme --name first --json"))
    assert made.exit_code == 0, made.output
    key = next(word for word in made.stdout.replace('"', " ").split() if word.startswith("sk-"))
    for name in ("tiny", MODEL):
        answer = ask(cluster.url, key, {"model": name, "prompt": "Once", "max_tokens": 4})
        assert answer["model"] == name
        assert answer["usage"]["completion_tokens"] == 4


def ask(url: str, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to a completion; retry while the gateway returns Retry-After."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PROCESS_PATIENCE_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as refusal:
            with refusal:
                if refusal.code != SERVICE_UNAVAILABLE:
                    raise
                time.sleep(float(refusal.headers["retry-after"]))


def test_background_jobs_are_scheduled_and_run(cluster: Cluster) -> None:
    (migration,) = cluster.pod("migration").containers
    assert cluster.run(migration).exit_code == 0
    ports = {component: free_port() for component in ("beat", "jobs")}
    urls = {component: f"http://127.0.0.1:{port}" for component, port in ports.items()}
    for component, port in ports.items():
        cluster.start(component, SLUICE_METRICS_PORT=str(port))
    for component, url in urls.items():
        (container,) = cluster.pod(component).spec["containers"]
        cluster.wait_for(component, url + container["livenessProbe"]["httpGet"]["path"])
    wait_until(
        lambda: metric(urls["jobs"], "sluice_jobs_task_duration_seconds_count") > 0,
        what="a job running",
    )
    for component in urls:
        assert stop(cluster.processes.pop(component)) == 0


def test_gateway_and_worker_exit_cleanly(cluster: Cluster) -> None:
    for component in ("worker", "gateway"):
        if component in cluster.processes:
            assert stop(cluster.processes.pop(component)) == 0
    # Redis allowed all their commands.
    with cluster.redis.client("default") as operator:
        assert [entry for entry in operator.acl_log() if entry["reason"] != "auth"] == []


# --- servers of the chart ----------------------------------------------------------------------


TENANT = "acme"
OF_A_MODEL = (keys.job("m", "1"), keys.leases("m"), keys.doorbell("m"), keys.MODELS)
OF_A_REPLY = (keys.replies("gw-1"), keys.background_responses("gw-1"))
OF_A_RESPONSE = (keys.content("req_1"), keys.journal("req_1"), keys.BACKGROUND_OWNERS)
OF_MONEY = (
    keys.account(keys.bucket_of(TENANT), "tenant:acme"),
    keys.usage(keys.bucket_of(TENANT)),
    keys.idempotency(keys.bucket_of(TENANT), TENANT, "digest"),
)
OF_CREDENTIALS = (keys.KEY_EVENTS,)
OF_FILES = (keys.tokenizer("digest"), keys.chat_template("digest"))
OF_CELERY = ("sluice", "_kombu.binding.sluice", "unacked")
EVERY_KEY = {
    *OF_A_MODEL,
    *OF_A_REPLY,
    *OF_A_RESPONSE,
    *OF_MONEY,
    *OF_CREDENTIALS,
    *OF_FILES,
    *OF_CELERY,
}
ADMINISTRATION = (
    ("CONFIG", "GET", "requirepass"),
    ("ACL", "LIST"),
    ("KEYS", "*"),
    ("FLUSHALL",),
    ("MONITOR",),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "attacker.example", "6379"),
)


def test_redis_users_reach_only_their_own_keys_and_no_admin_commands(tmp_path: Path) -> None:
    manifests = render(CHART / "ci" / "bundled-values.yaml")
    own = {
        "gateway": EVERY_KEY - {*OF_CELERY},
        "worker": {*OF_A_MODEL, *OF_A_REPLY, *OF_FILES},
        "jobs": {*OF_A_MODEL, *OF_MONEY, *OF_CREDENTIALS, *OF_CELERY},
    }
    with running_chart_redis(manifests, tmp_path, BUNDLED) as server:
        for role, reachable in own.items():
            with server.client(role) as client:
                allowed = {key for key in EVERY_KEY if is_allowed(client, "EXISTS", key)}
                assert allowed == reachable, role
                # Scripts do not bypass the rules.
                script = "return redis.pcall('EXISTS', ARGV[1])"
                assert {
                    key for key in EVERY_KEY if is_allowed(client, "EVAL", script, "0", key)
                } == reachable, role
                for command in ADMINISTRATION:
                    assert not is_allowed(client, *command), (role, command)
        with server.client("worker") as worker:
            # It writes replies to gateways, and cannot read them.
            replies = keys.replies("gw-1")
            assert is_allowed(worker, "XADD", replies, "*", "f", "x")
            assert not is_allowed(worker, "XRANGE", replies, "-", "+")
            assert not is_allowed(worker, "XREAD", "STREAMS", replies, "0")
            assert not is_allowed(worker, "SCAN", "0")
            # It subscribes to channels of workers, and to no others.
            assert not is_allowed(worker, "SUBSCRIBE", "celery")
            assert not is_allowed(worker, "PUBLISH", keys.worker_channel("m", "w"), "x")
            with worker.pubsub() as subscription:
                subscription.subscribe(keys.worker_channel("m", "w"))
                assert subscription.get_message(timeout=PROCESS_PATIENCE_SECONDS)


def is_allowed(client: Redis, *command: str) -> bool:
    """Return whether the user may run a command."""
    try:
        client.execute_command(*command)
    except NoPermissionError:
        return False
    except ResponseError as error:
        return "can't access" not in str(error)
    return True


def test_bundled_redis_starts_with_its_passwords_and_keeps_its_data(tmp_path: Path) -> None:
    manifests = render(CHART / "ci" / "bundled-values.yaml")
    with running_chart_redis(manifests, tmp_path, BUNDLED) as server:
        for password in server.passwords.values():
            assert not any(password.encode() in line for line in command_lines())
        for file in tmp_path.glob("tmp.*"):
            assert file.stat().st_mode & 0o077 == 0
        with server.client("default") as operator:
            wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes"}
            wanted["maxmemory"] = str(256 * 1024 * 1024)
            assert {name: operator.config_get(name)[name] for name in wanted} == wanted
        with Redis(port=server.port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()


def command_lines() -> Iterator[bytes]:
    """Return the command line of every process."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()
