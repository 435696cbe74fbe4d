"""Panel builders. Each takes a title, a unit and a description, in this order, then its queries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from ops.dashboards.limits import Limit, alert_limit, runbook

DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAPH_HEIGHT: Final = 8
NUMBER_HEIGHT: Final = 4
THIRD: Final = 8
"""One third of a dashboard's width of 24 columns."""

Panel: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel
_Panel = TypeVar("_Panel", timeseries.Panel, stat.Panel, heatmap.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the legend of its lines in Grafana's format, such as `{{model}}`."""

    expr: str
    legend: str = ""
    has_exemplars: bool = False
    """Whether dots mark single requests and link to their traces."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link from a panel."""

    title: str
    url: str


def drill_down(title: str, uid: str) -> Link:
    """Return a link to another dashboard that keeps the time range and the variables."""
    return Link(title, f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}")


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    alert: str | None = None,
    runbooks: Sequence[str] = (),
    limit: Limit | None = None,
    link: Link | None = None,
    width: int = THIRD,
    is_stacked: bool = False,
) -> Panel:
    """Return a time series panel.

    Args:
        title: Panel title.
        unit: Grafana's name of the unit.
        description: What the panel means and how to read it.
        queries: Queries to draw.
        alert: Alert whose limit is drawn and whose runbook is linked.
        runbooks: Further alerts whose runbooks are linked.
        limit: A limit that belongs to no alert.
        link: Link of the title in addition to the runbooks.
        width: Width in columns, of 24.
        is_stacked: Whether lines are stacked. Lines of zeros are left out.
    """
    panel = _panel(timeseries.Panel(), title, unit, description, _links(alert, runbooks, link))
    panel.height(GRAPH_HEIGHT).span(width)
    if is_stacked:
        queries = tuple(replace(query, expr=f"{query.expr} > 0") for query in queries)
    for number_of_query, query in enumerate(queries):
        panel.with_target(_target(query, "ABCDEFGH"[number_of_query]))
    panel.line_width(1).fill_opacity(20 if is_stacked else 5)
    panel.show_points(looks.VisibilityMode.NEVER).axis_soft_min(0)
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(looks.TooltipDisplayMode.MULTI)
        .sort(looks.SortOrder.DESCENDING)
    )
    panel.legend(
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.LIST)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    limit = limit or (alert_limit(alert) if alert else None)
    if limit:
        panel.thresholds(_thresholds(limit))
        panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED)
        )
    return panel


def number(
    title: str,
    unit: str,
    description: str,
    query: Query,
    *,
    alert: str | None = None,
    runbooks: Sequence[str] = (),
    limit: Limit | None = None,
    link: Link | None = None,
    decimals: int | None = None,
    width: int = 4,
) -> Panel:
    """Return a panel with the latest value, red if it is bad; same arguments as `graph`."""
    panel = _panel(stat.Panel(), title, unit, description, _links(alert, runbooks, link))
    panel.height(NUMBER_HEIGHT).span(width).with_target(_target(query, "A"))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.graph_mode(looks.BigValueGraphMode.AREA).color_mode(looks.BigValueColorMode.VALUE)
    if decimals is not None:
        panel.decimals(decimals)
    limit = limit or (alert_limit(alert) if alert else None)
    panel.thresholds(_thresholds(limit))
    return panel


def heat(
    title: str,
    unit: str,
    description: str,
    query: Query,
    *,
    link: Link | None = None,
    width: int = THIRD,
) -> Panel:
    """Return a heat map of a histogram over time; `query` is grouped by `le`."""
    panel = _panel(heatmap.Panel(), title, unit, description, _links(None, (), link))
    panel.height(GRAPH_HEIGHT).span(width)
    panel.with_target(_target(query, "A").format(PromQueryFormat.HEATMAP))
    panel.y_axis(heatmap.YAxisConfig().unit(unit))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .exponent(0.5)
        .fill("dark-orange")
        .steps(64)
    )
    return panel


def _panel(panel: _Panel, title: str, unit: str, description: str, links: Sequence[Link]) -> _Panel:
    panel.title(title).unit(unit).description(description).datasource(DATASOURCE)
    panel.links(
        [
            grafana.DashboardLink(link.title).type(DashboardLinkType.LINK).url(link.url)
            for link in links
        ]
    )
    return panel


def _links(alert: str | None, runbooks: Sequence[str], link: Link | None) -> list[Link]:
    names = [alert, *runbooks] if alert else [*runbooks]
    found = [Link(f"Runbook: {name}", runbook(name)) for name in names]
    return [link, *found] if link else found


def _target(query: Query, name: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(name).datasource(DATASOURCE).range()
    if query.legend:
        target.legend_format(query.legend)
    if query.has_exemplars:
        target.exemplar(True)
    return target


def _thresholds(limit: Limit | None) -> grafana.ThresholdsConfig:
    if limit is None:
        steps = [Threshold(None, "text")]
    elif limit.is_minimum:
        steps = [Threshold(None, "red"), Threshold(limit.value, "green")]
    else:
        # Grafana colors values from the threshold on, an alert fires only above it.
        # So a count that should be 0 turns red at 1.
        steps = [Threshold(None, "green"), Threshold(limit.value, "red")]
    return grafana.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
