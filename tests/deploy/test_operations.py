"""docs/operations.md names only commands, metrics, services and files that exist."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import worker.__main__
from gateway.cli.launch import launch_plan
from gateway.cli.main import main
from gateway.process.supervision import processes
from tests.deploy.compose_file import services
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY
from worker.settings import WorkerSettings

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
PAGES = {
    "operations.md": PAGE,
    "cookbook.md": (REPOSITORY / "docs" / "cookbook.md").read_text(),
    "README.md": (REPOSITORY / "README.md").read_text(),
    "start-as-an-operator.md": (REPOSITORY / "docs" / "start-as-an-operator.md").read_text(),
}
_CODE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_PREFIX = re.compile(r"^docker compose exec \S+ ")
HELM = Path(sys.executable).with_name("helm")
PLACEHOLDER = "sluice ..."


def commands(page: str) -> Iterator[str]:
    """Yield every `sluice` command of a page, in blocks and within sentences."""
    for block in _CODE.findall(page):
        joined = block.replace("\\\n", " ")
        yield from (line for line in joined.splitlines() if line.startswith("sluice "))
    # Within sentences a command may continue on the next line.
    for code in _INLINE.findall(re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        command = _PREFIX.sub("", " ".join(code.split()))
        if command.startswith("sluice ") and command != PLACEHOLDER:
            yield command


def shown() -> list[str]:
    return sorted({command for page in PAGES.values() for command in commands(page)})


def check(line: str) -> None:
    """Parse a command without running it. Raises click's errors."""
    command: click.Command = main
    words = shlex.split(line, comments=True)[1:]
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    if command.name == "worker":
        command = worker.__main__.command
    # Without arguments a command is only named.
    if words:
        command.make_context(command.name, words)


def test_many_commands_are_shown() -> None:
    assert len(shown()) > 30


@all_cases("line", shown())
def test_shown_command_is_valid(line: str) -> None:
    check(line)


@all_cases("line", ["sluice tenants freeze acme", "sluice keys revoke --tennant acme KEY"])
def test_unknown_command_would_be_detected(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        check(line)


def test_metrics_are_documented_in_the_page_of_metrics() -> None:
    known = set(
        re.findall(r"^\| `(\w+)`", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    named = set(
        re.findall(r"\bsluice_(?:gateway|worker|queue|redis|sql|ledger|jobs|quota)_\w+", PAGE)
    )
    assert len(named) > 20
    assert named <= known


def test_services_exist_in_compose() -> None:
    named = re.findall(
        r"docker compose (?:--profile \w+ )?(?:exec|run)(?: -T| --rm| --no-deps)* ([a-z-]+)", PAGE
    )
    assert {"gateway", "redis", "postgres", "seed", "migrate", "grafana"} == set(named)
    assert set(named) <= services().keys()


@pytest.mark.skipif(not HELM.exists(), reason="helm is not installed")
def test_shown_values_are_accepted_by_the_chart(tmp_path: Path) -> None:
    shown = PAGE + PAGES["cookbook.md"]
    blocks = re.findall(r"^```yaml\n(.*?)^```", shown, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    command: list[str | Path] = [
        HELM,
        "template",
        "sluice",
        REPOSITORY / "deploy" / "helm" / "sluice",
    ]
    for number, block in enumerate(blocks):
        values = tmp_path / f"values-{number}.yaml"
        values.write_text(block)
        command += ["--values", values]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "name: sluice-gateway\n" in done.stdout


def test_documented_stop_times_equal_the_configured_ones() -> None:
    # As in `sluice up`; test_compose.py compares the services with the same.
    worker_margin = (
        launch_plan.WORKER_STOP_SECONDS - WorkerSettings.model_fields["drain_seconds"].default
    )
    section = PAGE.partition("## Upgrade without downtime")[2].partition("\n## ")[0]
    reported = re.findall(r"^\| (.+?) \|.*\| ([^|]+) \|$", section, re.MULTILINE)
    assert dict(reported[1:]) == {
        "gateway": f"both settings plus {processes.DRAIN_MARGIN_SECONDS:.0f} s",
        "worker": f"the setting plus {worker_margin:.0f} s",
        "`sluice jobs`": f"{launch_plan.JOBS_STOP_SECONDS:.0f} s",
        "`sluice beat`": f"{launch_plan.BEAT_STOP_SECONDS:.0f} s",
    }
