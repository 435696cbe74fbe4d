"""Each alert fires by its cause, and no other does; the commands of its runbook then succeed."""

import math
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from gateway.cli.main import main
from gateway.jobs import telemetry
from gateway.jobs.runner import running
from gateway.jobs.schedule import Track
from gateway.platform.settings import load_settings
from ops.dashboards.limits import alerts
from tests.gateway.conftest import asking
from tests.support.certificates import self_signed
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.redis_server import SYSTEM, Encryption, RedisServer
from tests.support.stack import running_stack
from tests.telemetry.causes import CASES, OTHER, TENANT, Place, Samples
from tests.telemetry.promql import PROMTOOL, RULES, RUNBOOKS, rules_of, selectors_of
from tests.telemetry.test_rules import blocks

pytestmark = pytest.mark.skipif(
    PROMTOOL is None or SYSTEM is None, reason="promtool or redis-server (Debian) is not installed"
)

MINUTES: Final = 90
"""How long the state lasts: longer than any alert waits."""
READ: Final = frozenset(
    name
    for path in RULES
    for rule in rules_of(path)
    for name, _ in selectors_of(rule["expr"]).series
)
LOCAL: Final = re.compile(r"sluice \S+ \S.*|(?:redis-cli|openssl|curl) .+")
"""Commands of this machine. Shorter ones are names, such as `sluice jobs`."""
ELSEWHERE: Final = {
    "sluice exports discard": "of a batch, which another line names",
    "redis-cli -p 26379 sentinel masters": "of sentinels",
    "redis-cli --cluster check HOST:6379": "of a cluster",
    "redis-cli config set tls-cert-file ...": "of another certificate",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    assert SYSTEM is not None
    self_signed("localhost", folder := tmp_path_factory.mktemp("authority"))
    encryption = Encryption(free_port(), folder / "server.pem")
    with ExitStack() as opened:
        server = RedisServer(SYSTEM, options=encryption.options)
        stack = opened.enter_context(running_stack(redis=server))
        stack.start_gateway()
        stack.start_worker(
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_STEP_SECONDS="0.005",
            SLUICE_SCRIPTED_DIES_ON_SIGNAL="true",
            SLUICE_MAX_SEQUENCES="2",
            SLUICE_ADAPTER_SLOTS="1",
            SLUICE_CANARY_SECONDS="1",
        )
        for tenant in (TENANT, OTHER):
            stack.key(tenant)
        patch = opened.enter_context(pytest.MonkeyPatch.context())
        for name, value in stack._variables().items():
            patch.setenv(name, value)
        runner = opened.enter_context(running(load_settings(), Track.LEDGER))
        yield Place(stack, encryption, runner, patch, {"TENANT": TENANT})
        telemetry.LAST_SUCCESS.clear()


def firing(before: Samples, after: Samples, folder: Path) -> set[str]:
    """Return the alerts that fire if what has happened between two scrapes happens each minute."""
    now, seconds = time.time(), 60 * MINUTES
    series = []
    for (name, labels), (is_counter, value) in after.items():
        if name not in READ or not math.isfinite(value):
            continue
        step = value - before.get((name, labels), (True, 0.0))[1] if is_counter else 0.0
        # The clock of promtool begins at 0.
        is_time = name.endswith("_timestamp_seconds") or name == "process_start_time_seconds"
        start = value - now + seconds if is_time else value
        text = ", ".join(f"{label}={_quoted(each)}" for label, each in labels)
        series.append(
            {"series": f"{name}{{{text}}}", "values": f"{start:.6f}+{step:.6f}x{MINUTES}"}
        )
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": '{alertname="none"}', "value": 1}],
            }
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.dump({"rule_files": [*map(str, RULES)], "tests": [test]}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", file], capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert "got:" in output, output
    return set(re.findall(r'alertname="(\w+)"', output.partition("got:")[2]))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def commands(runbook: Path) -> list[str]:
    """Return the commands of a runbook that this machine can execute."""
    inline = re.findall(r"`([^`\n]+)`", runbook.read_text())
    shown = dict.fromkeys(line.split(" #")[0].strip() for line in [*blocks(runbook, "sh"), *inline])
    return [line for line in shown if LOCAL.fullmatch(line) and line not in ELSEWHERE]


def test_every_alert_and_runbook_has_a_cause() -> None:
    assert CASES.keys() == alerts().keys() == {path.stem for path in RUNBOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_alert_fires_by_its_cause_and_its_runbook_can_be_followed(
    path: Path, place: Place, tmp_path: Path
) -> None:
    case = CASES[path.stem]
    place.words = {"TENANT": TENANT, **case.words}
    place.heal()
    before = place.observe()
    with case.cause(place) as after:
        assert firing(before, after, tmp_path) == {path.stem, *case.others}
        for line in commands(path):
            execute(place, line)


@pytest.mark.slow
def test_no_alert_fires_without_a_cause(place: Place, tmp_path: Path) -> None:
    place.heal()
    before = place.observe()
    assert place.post(asking()) == 200
    assert firing(before, place.scrape(), tmp_path) == set()


def execute(place: Place, line: str) -> None:
    """Execute a command of a runbook with the names of the deployment; it must succeed."""
    for word in sorted(place.words, key=len, reverse=True):
        line = line.replace(word, place.words[word])
    environment = place.stack._variables()
    if line.startswith("sluice "):
        done = CliRunner(env=environment).invoke(main, line.split()[1:])
        assert done.exit_code == 0, (line, done.output)
        return
    if "--tls" in line:
        environment["SLUICE_REDIS_URL"] = place.encryption.url
    elif line.startswith("redis-cli ") and " -u " not in line:
        line = line.replace("redis-cli", f"redis-cli -p {urlsplit(place.stack.redis.url).port}")
    shell = subprocess.run(
        ["bash", "-ceu", line],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=PROCESS_PATIENCE_SECONDS,
        check=False,
    )
    assert shell.returncode == 0, (line, shell.stdout, shell.stderr)
    assert "ERR" not in shell.stdout, (line, shell.stdout)
