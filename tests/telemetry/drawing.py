"""Draws a dashboard like Grafana, from the same JSON and the same queries, with matplotlib."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.dates as mdates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tests.support.prometheus_server import PrometheusServer
from tests.telemetry.panels import Board, Panel, with_values

COLUMNS: Final = 24
INCHES: Final = (16.0, 0.36)
"""Width of a dashboard, and height of one of its rows."""
POINTS: Final = 180
"""Of each line."""
STYLE: Final[dict[Any, Any]] = {
    "figure.facecolor": "#111217",
    "axes.facecolor": "#181b1f",
    "axes.edgecolor": "#34373d",
    "axes.labelcolor": "#ccccdc",
    "axes.grid": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": "#ccccdc",
    "grid.color": "#2a2d33",
    "text.color": "#ccccdc",
    "xtick.color": "#8e8e99",
    "ytick.color": "#8e8e99",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "font.family": "sans-serif",
}
GOOD, BAD = "#73bf69", "#f2495c"
PALETTE: Final = (
    *("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#b877d9", "#5794f2", "#fade2a", "#ca95e5"),
    *("#96d98d", "#ffb357", "#c0d8ff", "#ff7383"),
)
SUFFIXES: Final = {
    "reqps": " req/s",
    "cps": " /s",
    "short": "",
    "bytes": "B",
    "currencyUSD": " $",
    "watt": "W",
    "celsius": " °C",
}


def draw(board: Board, server: PrometheusServer, *, start: float, end: float, path: Path) -> None:
    """Draw a dashboard from `start` to `end` in Unix time, as a PNG."""
    places = [panel["gridPos"] for panel in board.json["panels"]]
    rows = max(place["y"] + place["h"] for place in places) + 1
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(INCHES[0], INCHES[1] * rows))
        figure.text(0.012, 1 - 0.6 / rows, board.json["title"], fontsize=13, va="center")
        for row in board.json["panels"]:
            if row["type"] == "row":
                y = 1 - (row["gridPos"]["y"] + 1.5) / rows
                figure.text(0.012, y, row["title"], fontsize=10, va="center", color="#9fa7b3")
        for panel in board.panels:
            axes = _axes(figure, panel.json["gridPos"], rows)
            if panel.json["type"] == "stat":
                _number(axes, panel, server, start, end)
            elif panel.json["type"] == "heatmap":
                _heat(axes, panel, server, start, end)
            else:
                _graph(axes, panel, server, start, end)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90, metadata={"Software": None})


def _axes(figure: Figure, place: Mapping[str, int], rows: int) -> Axes:
    left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
    bottom = 1 - (place["y"] + 1 + place["h"]) / rows
    return figure.add_axes(
        (left + 0.04, bottom + 1.7 / rows, width - 0.055, (place["h"] - 2.9) / rows)
    )


def _number(axes: Axes, panel: Panel, server: PrometheusServer, start: float, end: float) -> None:
    axes.set_axis_off()
    axes.set_title(panel.json["title"])
    (query,) = panel.queries
    found = server.get("query", query=_filled(query.expr, start, end), time=end)["result"]
    value = float(found[0]["value"][1]) if found else math.nan
    text = _shown(value, panel.unit) if found else "No data"
    axes.text(0.0, 0.3, text, fontsize=20, color=_colour(panel, value), va="center")


def _colour(panel: Panel, value: float) -> str:
    colour = "#ccccdc"
    for step in panel.json["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = {"green": GOOD, "red": BAD}.get(step["color"], "#ccccdc")
    return colour


def _graph(axes: Axes, panel: Panel, server: PrometheusServer, start: float, end: float) -> None:
    lines = sorted(
        (_called(query.legend, each["metric"]), _points(each["values"]))
        for query in panel.queries
        for each in _range(server, query.expr, start, end)
    )
    custom = panel.json["fieldConfig"]["defaults"]["custom"]
    if custom.get("stacking", {}).get("mode") == "normal":
        _stack(axes, lines)
    else:
        for number, (name, (times, values)) in enumerate(lines):
            axes.plot(times, values, label=name, color=PALETTE[number % len(PALETTE)])
    for limit in panel.thresholds:
        # Far above all values, it would flatten the lines.
        if any(value > limit / 4 for _, (_, values) in lines for value in values):
            axes.axhline(limit, color=BAD, linestyle="--", linewidth=0.8)
    axes.set_title(panel.json["title"])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    _time_axis(axes, start, end)
    if any(name for name, _ in lines):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=4, borderaxespad=0.1)


def _stack(axes: Axes, lines: Sequence[tuple[str, tuple[list[float], list[float]]]]) -> None:
    times = sorted({at for _, (times, _) in lines for at in times})
    below = [0.0] * len(times)
    for number, (name, (own_times, own_values)) in enumerate(lines):
        values = dict(zip(own_times, own_values, strict=True))
        above = [under + values.get(at, 0.0) for at, under in zip(times, below, strict=True)]
        colour = PALETTE[number % len(PALETTE)]
        axes.plot(times, above, label=name, color=colour)
        axes.fill_between(times, below, above, color=colour, alpha=0.2, linewidth=0)
        below = above


def _heat(axes: Axes, panel: Panel, server: PrometheusServer, start: float, end: float) -> None:
    (query,) = panel.queries
    series = _range(server, query.expr, start, end)
    by_bound = sorted((float(each["metric"]["le"]), _points(each["values"])) for each in series)
    times = sorted({at for _, (times, _) in by_bound for at in times})
    below, counts = [0.0] * len(times), []
    for _, (own_times, own_values) in by_bound:
        found = dict(zip(own_times, own_values, strict=True))
        values = [found.get(at, under) for at, under in zip(times, below, strict=True)]
        counts.append([value - under for value, under in zip(values, below, strict=True)])
        below = values
    if counts:
        axes.pcolormesh(times, range(len(counts)), counts, cmap="inferno", shading="nearest")
    axes.grid(visible=False)
    axes.set_yticks(range(len(by_bound)), [_bound(bound) for bound, _ in by_bound])
    axes.set_title(panel.json["title"])
    _time_axis(axes, start, end)


def _bound(bound: float) -> str:
    return "more" if math.isinf(bound) else _shown(bound, "s")


def _time_axis(axes: Axes, start: float, end: float) -> None:
    axes.set_xlim(_time(start), _time(end))
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M"))


def _range(
    server: PrometheusServer, expression: str, start: float, end: float
) -> list[dict[str, Any]]:
    step = (end - start) / POINTS
    return server.query_range(
        _filled(expression, start, end), start=start, end=end, step_seconds=step
    )


def _filled(expression: str, start: float, end: float) -> str:
    return with_values(expression.replace("$__range", f"{round(end - start)}s"))


def _points(values: list[tuple[float, str]]) -> tuple[list[float], list[float]]:
    return [_time(at) for at, _ in values], [float(value) for _, value in values]


def _time(at: float) -> float:
    return float(mdates.date2num(datetime.fromtimestamp(at, UTC)))


def _called(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _shown(value: float, unit: str) -> str:
    """Format a value roughly as Grafana does."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.4g} %"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if unit == "s":
        return f"{value:.4g} s"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            value, unit_prefix = value / size, prefix
            break
    else:
        unit_prefix = ""
    suffix = SUFFIXES.get(unit, unit.removeprefix("suffix:"))
    return f"{value:.3g}{unit_prefix}{suffix}" if suffix else f"{value:.3g}{unit_prefix}"
