"""Shared parts of all dashboards: variables, links, annotations and rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from ops.dashboards.panels import DATASOURCE, Panel
from ops.dashboards.promql import NAMESPACE

TAG: Final = "sluice"
ALL: Final = ".*"
"""Also matches series without the label: one deployment needs no namespace, one pool no name."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A dashboard variable with a drop-down list."""

    name: str
    label: str
    values: str
    """Query that returns its values."""


VARIABLES: Final = (
    Variable("namespace", "Namespace", "label_values(sluice_build_info, namespace)"),
    Variable("model", "Model", f"label_values(sluice_queue_ready_workers{{{NAMESPACE}}}, model)"),
    Variable("pool", "Worker pool", f"label_values(sluice_worker_ready{{{NAMESPACE}}}, pool)"),
)
_BUILDS: Final = f"count by (component, version) (sluice_build_info{{{NAMESPACE}}}"
_FIRING: Final = f'ALERTS{{alertname=~"Sluice.+", alertstate="firing", {NAMESPACE}}}'
MARKS: Final = {
    "Deployments": ("blue", f"{_BUILDS}) unless {_BUILDS} offset 5m)"),
    "Alerts": (
        "red",
        f"max by (alertname, severity) ({_FIRING})",
    ),
}
"""Annotations of every graph: color and query by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


def row(title: str, *panels: Panel) -> Row:
    """Return a titled row of panels."""
    return Row(title, panels)


def dashboard(
    uid: str,
    title: str,
    description: str,
    *rows: Row,
    variables: Sequence[Variable] = (),
) -> Dashboard:
    """Return a dashboard; `variables` are added to the common ones."""
    frame = grafana.Dashboard(f"Sluice / {title}").uid(uid).description(description)
    frame.tags([TAG]).readonly().timezone("browser").time("now-3h", "now").refresh("30s")
    frame.tooltip(DashboardCursorSync.CROSSHAIR)
    frame.link(
        grafana.DashboardLink("Sluice")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    frame.with_variable(
        grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    )
    for variable in (*VARIABLES, *variables):
        frame.with_variable(_choice(variable))
    for name, (colour, expr) in MARKS.items():
        frame.annotation(
            grafana.AnnotationQuery()
            .name(name)
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color(colour)
            .expr(expr)
        )
    for each in rows:
        frame.with_row(grafana.Row(each.title))
        for panel in each.panels:
            frame.with_panel(panel)
    made = frame.build()
    for number, panel_or_row in enumerate(made.panels or (), start=1):
        panel_or_row.id_val = number
    return made


def to_json(made: Dashboard) -> str:
    """Return a dashboard as Grafana JSON; the output is deterministic."""
    return json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _choice(variable: Variable) -> grafana.QueryVariable:
    return (
        grafana.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(DATASOURCE)
        .query(variable.values)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(ALL)
    )
