"""`sluice capacity` computes what docs/capacity.md describes, and values that the chart takes."""

import re
from collections.abc import Callable
from pathlib import Path

import yaml
from click.testing import Result

from gateway.records.capacity import COSTS
from tests.deploy.helm import CHART, named, render
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

Sluice = Callable[..., Result]

PAGE = (REPOSITORY / "docs" / "capacity.md").read_text()
LOAD = ("--requests", "40", "--prompt-tokens", "1200", "--completion-tokens", "400")


def test_page_has_the_costs_and_the_output_of_the_example(sluice: Sluice) -> None:
    costs = re.findall(r"^\| `(\w+)` \| ([\d,.]+) (\w+) \| (.+?) \| `", PAGE, re.MULTILINE)
    assert [(name, float(value.replace(",", "")), *rest) for name, value, *rest in costs] == [
        (name, cost.value, cost.unit, cost.what) for name, cost in COSTS.items()
    ]
    [(arguments, output)] = re.findall(r"^\$ sluice (.+)\n((?:.+\n)+)```", PAGE, re.MULTILINE)
    assert sluice(*arguments.split()).output == output


def test_chart_takes_the_values(sluice: Sluice, tmp_path: Path) -> None:
    load = ("--requests", "400", *LOAD[2:], "--output", "values")
    file = tmp_path / "values.yaml"
    file.write_text(sluice("capacity", *load).stdout)
    objects = render(CHART / "ci" / "bundled-values.yaml", file)
    # 400 * (336 us + 400 * 14.4 us + 0.1 * 200 us) / (0.6 - 0.117)
    assert named(objects, "Deployment", "sluice-gateway")["spec"]["replicas"] == 6
    # 4 * (4,200 * 35 KiB + 48,000 * 41 KiB + 10,000 * 13 KiB + 10,000 * 0.3 KiB)
    assert yaml.safe_load(file.read_text())["redis"] == {"bundled": {"maxMemoryMiB": 8782}}
    printed = sluice("capacity", *load, "--cost", "redis_request=3000").stdout
    assert printed.startswith("# Redis needs 3 masters: a cluster")
    assert "redis" not in yaml.safe_load(printed)


@all_cases(
    ("arguments", "message"),
    [
        (
            ("--cost", "tokens=1"),
            r"'cost' must be NAME=NUMBER with a name of token, .* Given: \"t",
        ),
        (("--cost", "token=nan"), "'cost' must be NAME=NUMBER, with us from 0"),
        (("--cost", "wake_ups=600000"), "'cost' must leave wake_ups below 600000 us"),
        (
            ("--kv-tokens", "1599"),
            "'kv_tokens' must be at least 1600, for one request",
        ),
    ],
)
def test_load_that_no_machine_serves_is_refused(
    sluice: Sluice, arguments: tuple[str, ...], message: str
) -> None:
    refused = sluice("capacity", *LOAD, *arguments)
    assert refused.exit_code == 1
    assert re.search(message, refused.output)
