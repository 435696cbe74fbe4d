"""What all dashboards have: variables, links to each other, marks where something changed, rows."""

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
"""Also finds what has no such label: one deployment needs no namespace, one pool no name."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Something to choose from, above a dashboard."""

    name: str
    label: str
    values: str
    """Query of its values."""


VARIABLES: Final = (
    Variable("namespace", "Namespace", "label_values(sluice_build_info, namespace)"),
    Variable("model", "Model", f"label_values(sluice_queue_ready_workers{{{NAMESPACE}}}, model)"),
    Variable("pool", "Worker pool", f"label_values(sluice_worker_ready{{{NAMESPACE}}}, pool)"),
)
_BUILDS: Final = f"count by (component, version) (sluice_build_info{{{NAMESPACE}}}"
MARKS: Final = {
    "Deployments": ("blue", f"{_BUILDS}) unless {_BUILDS} offset 5m)"),
    "Alerts": (
        "red",
        f'max by (alertname, severity) (ALERTS{{alertname=~"Sluice.+", alertstate="firing", {NAMESPACE}}})',
    ),
}
"""Name to colour and query of what is marked in every graph."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


def row(title: str, *panels: Panel) -> Row:
    """Return panels under a heading."""
    return Row(title, panels)


def dashboard(
    uid: str,
    title: str,
    description: str,
    *rows: Row,
    variables: Sequence[Variable] = (),
) -> Dashboard:
    """Return a dashboard; `variables` are those that it has besides everybody's."""
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
    """Return a dashboard as Grafana reads it, the same text each time."""
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
