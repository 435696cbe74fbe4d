"""Dashboards equal what their code generates, and use only series that exist."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.__main__ import FOLDER
from ops.dashboards.catalogue import DASHBOARDS
from ops.dashboards.frame import to_json
from ops.dashboards.limits import RUNBOOKS as ADDRESS
from ops.dashboards.limits import Limit, alert_limit, alerts
from tests.support.cases import all_cases
from tests.telemetry.page import documented
from tests.telemetry.panels import Board, Panel, boards, with_values
from tests.telemetry.promql import LEVELS, PROMTOOL, RUNBOOKS, selectors_of, unknown

UNITS = {
    "bytes",
    "celsius",
    "cps",
    "currencyUSD",
    "percentunit",
    "reqps",
    "s",
    "short",
    "suffix: $/h",
    "suffix: tok",
    "suffix: tok/J",
    "suffix: tok/s",
    "suffix:x",
    "watt",
}
COLUMNS = 24
WITHOUT_PANEL = {
    "sluice_gateway_gone_workers_total",
    "sluice_jobs_task_duration_seconds",
    "sluice_worker_heartbeat_gap_seconds",
    "sluice_worker_ready",
}
"""Metrics for alerts, runbooks and queries by hand."""
PANELS = [panel for board in boards() for panel in board.panels]
each_panel = all_cases("panel", PANELS, ids=lambda panel: panel.name)
each_board = all_cases("board", boards(), ids=lambda board: board.uid)


@all_cases("build", DASHBOARDS, ids=lambda build: build.__module__)
def test_committed_dashboards_equal_the_generated_ones(build: Callable[[], Dashboard]) -> None:
    made = build()
    committed = FOLDER / f"{made.uid}.json"
    assert committed.read_text() == to_json(made), "run: python -m ops.dashboards"


def test_there_are_no_other_dashboards() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {board.uid for board in boards()}
    assert len(boards()) == len(DASHBOARDS) == 6


@each_panel
def test_panel_has_title_description_unit_and_queries(panel: Panel) -> None:
    made = panel.json
    assert made["title"]
    assert made["description"].endswith((".", "?"))
    assert len(made["description"]) > 15
    assert panel.unit in UNITS
    assert made["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel.queries


@each_panel
def test_panel_uses_only_existing_series(panel: Panel) -> None:
    wrong = [each for query in panel.queries for each in unknown(with_values(query.expr))]
    assert wrong == []


def test_every_metric_has_a_panel() -> None:
    drawn = " ".join(query.expr for panel in PANELS for query in panel.queries)
    names = {row.name for row in documented() if row.family not in drawn}
    assert names - {"sluice_build_info"} == WITHOUT_PANEL


@each_panel
def test_panel_filters_by_namespace_and_uses_the_rate_interval(panel: Panel) -> None:
    for query in panel.queries:
        assert 'namespace=~"$namespace"' in query.expr
        windows = set(re.findall(r"\brate\(.*?\[(\$\w+|\d+[smhd])\]", query.expr))
        assert windows <= {"$__rate_interval"}


@each_panel
def test_legends_use_labels_of_their_series(panel: Panel) -> None:
    for query in panel.queries:
        about = selectors_of(with_values(query.expr))
        # Recorded series have the labels of their level.
        levels = [LEVELS.get(name.partition(":")[0], frozenset()) for name, _ in about.series]
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= about.grouped_by.union(*levels)


@each_panel
def test_threshold_lines_equal_those_of_alerts(panel: Panel) -> None:
    """Every threshold of a graph is a number of an alert whose runbook the panel links."""
    linked = [
        link["url"].rpartition("/")[2].removesuffix(".md")
        for link in panel.json.get("links", [])
        if link["url"].startswith(ADDRESS)
    ]
    assert set(linked) <= alerts().keys()
    if panel.json["type"] == "timeseries":
        numbers = {
            float(number)
            for name in linked
            for rule in alerts()[name]
            for number in re.findall(r"[<>] \(?(\d+(?:\.\d+)?)", rule["expr"])
        }
        assert panel.thresholds <= numbers


def test_limit_is_read_from_the_rule() -> None:
    assert alert_limit("SluiceQueueSlow") == Limit(30)
    assert alert_limit("SluiceRedisNearFull") == Limit(0.85)
    assert alert_limit("SluiceNoReadyWorker") == Limit(1, is_minimum=True)
    with pytest.raises(ValueError, match="SluiceAvailabilityBudgetBurn has 0 limits"):
        alert_limit("SluiceAvailabilityBudgetBurn")


@each_board
def test_dashboard_has_the_common_parts(board: Board) -> None:
    made = board.json
    assert made["uid"] == board.uid
    assert len(board.uid) <= 40
    assert made["editable"] is False
    assert made["graphTooltip"] == 1
    assert made["schemaVersion"] >= 41
    assert "sluice" in made["tags"]
    variables = {each["name"]: each for each in made["templating"]["list"]}
    assert [*variables][:4] == ["datasource", "namespace", "model", "pool"]
    for name, variable in variables.items():
        if name != "datasource":
            assert (variable["multi"], variable["includeAll"]) == (True, True)
            assert variable["allValue"] == ".*"
            assert unknown(with_values(board.values_of(name))) == []
    assert {mark["name"] for mark in made["annotations"]["list"]} == {"Deployments", "Alerts"}
    for mark in made["annotations"]["list"]:
        assert unknown(with_values(mark["expr"])) == []


@each_board
def test_panels_have_unique_ids_and_do_not_overlap(board: Board) -> None:
    panels = board.json["panels"]
    assert [panel["id"] for panel in panels] == [*range(1, len(panels) + 1)]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    covered = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len({*covered}), "panels lie over each other"


def test_links_lead_somewhere() -> None:
    boards_there = {board.uid for board in boards()}
    runbooks_there = {path.name for path in RUNBOOKS}
    for panel in PANELS:
        for link in panel.json.get("links", []):
            if link["url"].startswith(ADDRESS):
                assert link["url"].removeprefix(f"{ADDRESS}/") in runbooks_there
            else:
                uid = re.fullmatch(r"/d/([\w-]+)\?\$\{__url_time_range\}&.*", link["url"])
                assert uid is not None
                assert uid[1] in boards_there


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    queries = [with_values(query.expr) for panel in PANELS for query in panel.queries]
    queries += [with_values(mark["expr"]) for mark in boards()[0].json["annotations"]["list"]]
    rules = [{"record": f"query:{number}", "expr": q} for number, q in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
