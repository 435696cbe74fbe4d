"""Rules use existing series; each alert has a runbook, and tests that it fires and is quiet."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import gateway.platform.settings
import worker.settings
from gateway.cli.main import SluiceGroup
from gateway.platform import telemetry
from ops.dashboards.limits import (
    AVAILABILITY,
    FIRST_TOKEN,
    INTER_TOKEN,
    PAGING_BURN_RATES,
    Objective,
    alerts,
)
from ops.dashboards.limits import RUNBOOKS as ADDRESS
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY
from tests.telemetry.promql import (
    LEVELS,
    PROMTOOL,
    RULE_TESTS,
    RULES,
    RUNBOOKS,
    known_series,
    rules_of,
    selectors_of,
    unknown,
)

PAGE = REPOSITORY / "ops" / "README.md"
SEVERITIES = {"critical", "warning"}
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
ALL_RULES = [rule for path in RULES for rule in rules_of(path)]
each_rule = all_cases("rule", ALL_RULES, ids=lambda rule: rule.get("alert") or rule["record"])
each_alert = all_cases("alert", sorted(alerts()))
each_runbook = all_cases("path", RUNBOOKS, ids=lambda path: path.stem)
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed"
)


def promtool(*arguments: object) -> None:
    """Run promtool; it must succeed."""
    assert PROMTOOL is not None
    command = [PROMTOOL, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_parses_the_rules() -> None:
    promtool("check", "rules", *RULES)


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_exactly_as_expected(path: Path) -> None:
    promtool("test", "rules", path)


@each_rule
def test_rule_uses_only_existing_series(rule: dict[str, Any]) -> None:
    assert unknown(rule["expr"]) == []


@all_cases("path", RULE_TESTS, ids=lambda path: path.stem)
def test_series_of_rule_tests_exist(path: Path) -> None:
    for case in cases_of(path):
        for each in case["input_series"]:
            ((name, labels),) = selectors_of(each["series"]).series
            assert name in known_series(), name
            assert labels <= known_series()[name], each["series"]


@each_rule
def test_recorded_names_have_level_metric_and_operation(rule: dict[str, Any]) -> None:
    if "record" in rule:
        level, metric, operation = rule["record"].split(":")
        assert metric.startswith("sluice_")
        assert re.fullmatch(r"max|ratio|ratio_rate\d+[mhd]", operation)
        grouped = selectors_of(rule["expr"]).grouped_by
        assert grouped == LEVELS[level] or (not grouped and f"{level}:" in rule["expr"])


@each_rule
def test_alert_has_severity_and_annotations(rule: dict[str, Any]) -> None:
    if "alert" in rule:
        assert rule["labels"]["severity"] in SEVERITIES
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["summary"][-1] != "."
        assert rule["annotations"]["description"][-1] == "."
        assert rule["annotations"]["runbook_url"] == f"{ADDRESS}/{rule['alert']}.md"
        reported = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        there = selectors_of(rule["expr"])
        levels = [LEVELS.get(name.partition(":")[0], frozenset()) for name, _ in there.series]
        of_series = {"up": {"instance", "job"}}
        own = [of_series.get(name, set()) for name, _ in there.series]
        assert set(reported) <= there.grouped_by.union(*levels, *own)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS} == alerts().keys()


def test_the_page_lists_every_alert_with_its_severity() -> None:
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (\[Sluice[^|]+) \| (\w+) \|", PAGE.read_text(), re.MULTILINE):
        names, severity = row
        severities = SEVERITIES if severity == "both" else {severity}
        listed |= dict.fromkeys(re.findall(r"\[(\w+)\]", names), severities)
    assert listed == {
        name: {rule["labels"]["severity"] for rule in rules} for name, rules in alerts().items()
    }


@each_alert
def test_alert_has_tests_in_which_it_fires_and_is_quiet(alert: str) -> None:
    fired: set[str] = set()
    quiet = 0
    for case, expected in expectations(alert):
        severities = {each["exp_labels"]["severity"] for each in expected}
        fired |= severities
        quiet += not severities
        words = ("fires", "warns") if severities else ("stays quiet",)
        assert case.startswith(tuple(f"{alert} {word}" for word in words))
    assert fired == {rule["labels"]["severity"] for rule in alerts()[alert]}
    assert quiet >= 1


@cache
def cases_of(path: Path) -> list[dict[str, Any]]:
    """Return the tests of a file; cached, since parsing is slow."""
    cases: list[dict[str, Any]] = yaml.load(path.read_text(), yaml.CSafeLoader)["tests"]
    return cases


def expectations(alert: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each test of an alert, and the alerts that it expects."""
    for path in RULE_TESTS:
        for case in cases_of(path):
            for each in case["alert_rule_test"]:
                if each["alertname"] == alert:
                    yield case["name"], each["exp_alerts"]


@all_cases(
    "objective", [AVAILABILITY, FIRST_TOKEN, INTER_TOKEN], ids=lambda objective: objective.alert
)
def test_objectives_of_dashboards_are_those_of_the_alerts(objective: Objective) -> None:
    rules = {rule["labels"]["severity"]: rule["expr"] for rule in alerts()[objective.alert]}
    burns = re.findall(r"(\S+) > \(([\d.]+) \* ([\d.]+)\)", rules["critical"] + rules["warning"])
    assert {float(budget) for _, _, budget in burns} == {objective.budget}
    for window, burn_rate in PAGING_BURN_RATES.items():
        assert (f"{objective.bad}{window}", f"{burn_rate:g}", f"{objective.budget:g}") in burns


@all_cases(
    ("metric", "bounds"),
    [
        ("sluice_gateway_time_to_first_token_seconds", telemetry.TIME_TO_FIRST_TOKEN._bounds),
        ("sluice_gateway_inter_token_latency_seconds", telemetry.INTER_TOKEN_LATENCY._bounds),
    ],
)
def test_objectives_are_bounds_of_buckets(metric: str, bounds: list[float]) -> None:
    asked_for = {
        float(bound)
        for rule in ALL_RULES
        for bound in re.findall(rf'{metric}_bucket{{le="([\d.]+)"}}', rule["expr"])
    }
    assert len(asked_for) == 1
    assert asked_for <= set(bounds)


def blocks(path: Path, language: str) -> list[str]:
    """Return the lines of a document's code blocks of a language."""
    found = re.findall(
        rf"^ *```{language}\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL
    )
    return [line.strip() for block in found for line in block.splitlines() if line.strip()]


@each_runbook
def test_runbook_has_all_sections(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {path.stem}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert blocks(path, "promql")


@each_runbook
def test_queries_of_a_runbook_use_only_existing_series(path: Path) -> None:
    assert [each for query in blocks(path, "promql") for each in unknown(query)] == []


@needs_promtool
def test_prometheus_parses_the_queries_of_runbooks(tmp_path: Path) -> None:
    queries = [query for path in RUNBOOKS for query in blocks(path, "promql")]
    rules = [{"record": f"query:{number}", "expr": q} for number, q in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)


@each_runbook
def test_commands_of_a_runbook_exist(path: Path) -> None:
    """Every `sluice ...`, in a block or a sentence, with its options."""
    named = re.findall(r"`(sluice [^`]+)`", path.read_text())
    for line in [*named, *(line for line in blocks(path, "sh") if line.startswith("sluice "))]:
        command: click.Command = SluiceGroup("sluice")
        context = click.Context(command)
        words = line.split()[1:]
        while isinstance(command, click.Group) and words:
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command, context = found, click.Context(found, parent=context)
        there = {option for each in command.params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= there, line


@each_runbook
def test_settings_of_a_runbook_exist(path: Path) -> None:
    known = {
        *gateway.platform.settings.Settings.model_fields,
        *worker.settings.WorkerSettings.model_fields,
    }
    named = set(re.findall(r"\bSLUICE_([A-Z_]+)\b", path.read_text()))
    assert named <= {name.upper() for name in known}


@each_runbook
def test_links_of_a_runbook_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
