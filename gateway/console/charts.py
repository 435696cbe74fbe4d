"""Charts as SVG, drawn on the server: a column for each period, stacked by series."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from gateway.billing.usage.series import Periods
from gateway.console.formats import cents, scale_count, scale_money
from gateway.records.money import show_dollars

WIDTH: Final = 720
HEIGHT: Final = 190
_LEFT: Final = 88
"""Least room for the numbers of the scale."""
_LETTER: Final = 14
"""Width of a digit in the large letters of a phone."""
_BOTTOM: Final = 34
_TOP: Final = 14
_LABELS: Final = 5
"""Labels below the columns, at most."""
_LINES: Final = 5
"""Lines of the scale above zero, at most."""


class Measure(NamedTuple):
    """What a chart shows."""

    show: Callable[[int], str]
    """Returns a value exactly."""
    scale: Callable[[int], str]
    """Returns a value of the scale in few characters."""
    shorten: Callable[[int], str]
    """Returns a sum as lists have it."""


class Part(NamedTuple):
    """One part of a column, in pixels of the chart."""

    y: float
    height: float
    color: str
    """The last letter of its class in the stylesheet: the number of its series, or x."""


class Column(NamedTuple):
    """One column, in pixels of the chart."""

    x: float
    width: float
    parts: list[Part]
    text: str
    """What the column shows, exactly."""


class Chart(NamedTuple):
    """Columns, axes and legend."""

    title: str
    total: str
    """The sum of all columns, exactly."""
    shown_total: str
    columns: list[Column]
    lines: list[tuple[float, str]]
    """Position and text of each horizontal line."""
    labels: list[tuple[float, str]]
    """Position and text of each label below the columns."""
    legend: list[tuple[str, str, str, str]]
    """Color, name, exact and shown total of each series; empty for a single one."""
    left: int
    """Where the columns begin, after the numbers of the scale."""
    width: int = WIDTH
    height: int = HEIGHT
    baseline: int = HEIGHT - _BOTTOM


def period_chart(
    title: str,
    measure: Measure,
    periods: Periods,
    name: str,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Chart:
    """Return a chart of the sums with this name; what the largest values leave is one more series.

    `names` are texts for the values of the dimension.
    """
    per = "hour" if len(periods.names[0]) > len("2026-11-01") else "day"
    rest = [getattr(each, name) for each in periods.sums]
    series = []
    for value, sums in periods.parts.items():
        values = [getattr(each, name) for each in sums]
        rest = [whole - part for whole, part in zip(rest, values, strict=True)]
        series.append((names.get(value, value) or "none", values))
    if not series:
        series, rest = [("all", rest)], []
    shown = rest if any(rest) else ()
    return stacked(f"{title} per {per} (UTC)", measure, periods.names, series, shown)


def stacked(
    title: str,
    measure: Measure,
    periods: Sequence[str],
    series: Sequence[tuple[str, Sequence[int]]],
    rest: Sequence[int] = (),
) -> Chart:
    """Return a chart of a measure.

    `periods` are ISO 8601 dates or times; each series has a name and a value for each of them. The
    `rest` is one more series, of what the others leave.
    """
    colors = [str(number) for number in range(len(series))]
    if rest:
        series, colors = [*series, ("others", rest)], [*colors, "x"]
    totals = [sum(values) for values in zip(*(values for _, values in series), strict=True)]
    step_value, steps = _scale(max(totals, default=0))
    room = HEIGHT - _BOTTOM - _TOP
    unit = room / (step_value * steps)
    lines = [
        (round(HEIGHT - _BOTTOM - step_value * part * unit, 2), measure.scale(step_value * part))
        for part in range(steps + 1)
    ]
    left = max(_LEFT, *(_LETTER * len(text) for _, text in lines))
    step = (WIDTH - left) / max(len(periods), 1)
    columns = []
    for number, (period, total) in enumerate(zip(periods, totals, strict=True)):
        parts, bottom = [], float(HEIGHT - _BOTTOM)
        shown = [(name, values[number]) for name, values in series]
        for color, (_, value) in zip(colors, shown, strict=True):
            if value > 0:
                height = max(value * unit, 1.0)
                bottom -= height
                parts.append(Part(round(bottom, 2), round(height, 2), color))
        texts = [f"{name} {measure.show(value)}" for name, value in shown if value]
        text = f"{period}: {measure.show(total)}"
        if len(series) > 1 and texts:
            text = f"{text} ({', '.join(texts)})"
        x = round(left + number * step + step * 0.12, 2)
        columns.append(Column(x, round(step * 0.76, 2), parts, text))
    every = -(-len(periods) // _LABELS) if periods else 1
    labels = [
        (round(left + (number + 0.5) * step, 2), period[5:] if len(period) == 10 else period[11:])
        for number, period in enumerate(periods)
        if number % every == 0
    ]
    legend = [
        (color, name, measure.show(sum(values)), measure.shorten(sum(values)))
        for color, (name, values) in zip(colors, series, strict=True)
    ]
    total, short = measure.show(sum(totals)), measure.shorten(sum(totals))
    return Chart(
        title, total, short, columns, lines, labels, legend if len(series) > 1 else [], left
    )


def _scale(most: int) -> tuple[int, int]:
    """Return the step of a scale, of the form 1, 2, 2.5 or 5, and the number of steps."""
    magnitude = 1
    while True:
        # No step is 2.5 itself: all values are whole.
        for step in (magnitude, 2 * magnitude, 5 * magnitude // 2, 5 * magnitude):
            if step * _LINES >= most and (magnitude > 1 or step != 5 * magnitude // 2):
                return step, max(1, -(-most // step))
        magnitude *= 10


def _count(unit: str) -> Callable[[int], str]:
    return lambda value: f"{value:,} {unit}"


COST: Final = Measure(show_dollars, scale_money, cents)
TOKENS: Final = Measure(_count("tokens"), scale_count, _count("tokens"))
REQUESTS: Final = Measure(_count("requests"), scale_count, _count("requests"))
