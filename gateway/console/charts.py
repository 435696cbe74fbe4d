"""Charts as SVG, drawn on the server: a stacked bar for each period."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 180
_LEFT: Final = 64
_BOTTOM: Final = 22
_TOP: Final = 8
_LABELS: Final = 6
"""Labels below the bars, at most."""
_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, in pixels of the chart."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars and axes."""

    bars: list[Bar]
    lines: list[tuple[float, float]]
    """Position and value of each horizontal line."""
    labels: list[tuple[float, str]]
    """Position and text of each label below the bars."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    baseline: int = HEIGHT - _BOTTOM


def bars(points: Sequence[tuple[str, int, str]]) -> Chart:
    """Return a chart of points: the label, the value and the text of each."""
    most = max((value for _, value, _ in points), default=0)
    top = _round_up(most)
    room = HEIGHT - _BOTTOM - _TOP
    step = (WIDTH - _LEFT) / max(len(points), 1)
    drawn = []
    for number, (_, value, title) in enumerate(points):
        height = room * value / top
        if value:
            drawn.append(
                Bar(
                    x=round(_LEFT + number * step + step * 0.12, 2),
                    y=round(HEIGHT - _BOTTOM - height, 2),
                    width=round(step * 0.76, 2),
                    height=round(max(height, 1.0), 2),
                    title=title,
                )
            )
    every = -(-len(points) // _LABELS) if points else 1
    labels = [
        (round(_LEFT + (number + 0.5) * step, 2), label)
        for number, (label, _, _) in enumerate(points)
        if number % every == 0
    ]
    lines = [
        (round(HEIGHT - _BOTTOM - room * part / _LINES, 2), top * part / _LINES)
        for part in range(_LINES + 1)
    ]
    return Chart(drawn, lines, labels)


def _round_up(value: int) -> int:
    """Return the next number of the form 4, 8, 20, 40, 80, 200 ..., which four lines divide."""
    scale = 1
    while True:
        for factor in (4, 8, 20):
            if value <= factor * scale:
                return factor * scale
        scale *= 10
