"""Pictures for the report, written as SVG.

By hand, not by matplotlib: to load that may take longer than all checks, and the report has to be
written also in the second that a launcher leaves before it kills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Matrix:
    """A value for each pair.

    Attributes:
        title: with the unit.
        labels: of rows and columns.
        values: [row][column]; None where nothing was measured.
    """

    title: str
    labels: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Bars:
    """A value for each label; the title has the unit."""

    title: str
    labels: Sequence[str]
    values: Sequence[float]


@dataclass(frozen=True)
class Lines:
    """Values by size, both on logarithmic axes.

    Attributes:
        title: with the unit of the values.
        below: what the sizes are.
        sizes: common to all series.
        series: by name; a shorter one ends early.
    """

    title: str
    below: str
    sizes: Sequence[float]
    series: Mapping[str, Sequence[float]]


Picture = Matrix | Bars | Lines


# Pixels: of a cell, a bar, the plot of lines; width of a letter of the labels.
_CELL, _BAR, _PLOT, _LETTER = 46, 18, (430, 220), 6.6
_COLORS = ("#1f77b4", "#d1651b", "#2ca02c", "#9467bd")
# Labels that fit below each other; of more, every so manieth is written.
_LABELS = 40


def draw(picture: Picture) -> str:
    """Return the picture as an element of HTML. Local."""
    if isinstance(picture, Matrix):
        width, height, parts = _matrix(picture)
    elif isinstance(picture, Bars):
        width, height, parts = _bars(picture)
    else:
        width, height, parts = _lines(picture)
    title = f'<text x="4" y="16" font-weight="600">{escape(picture.title)}</text>'
    width = max(width, 12 + len(picture.title) * (_LETTER + 1))
    return (
        f'<svg role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-size="12" font-family="sans-serif"><title>{escape(picture.title)}</title>'
        f"{title}{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _left(labels: Sequence[str]) -> float:
    return 14 + _LETTER * max(map(len, labels), default=0)


def _every(count: int) -> range:
    return range(0, count, max(1, -(-count // _LABELS)))


def _matrix(picture: Matrix) -> tuple[float, float, list[str]]:
    """Cells, dark for the largest value; with numbers where there is room."""
    known = [value for row in picture.values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    count = len(picture.labels)
    cell = _CELL if count <= 16 else max(4, 736 // count)
    left, top, parts = _left(picture.labels), 28.0, []
    for i, row in enumerate(picture.values):
        for j, value in enumerate(row):
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            color = "#eef0f2" if value is None else f"hsl(211 60% {92 - 57 * share:.0f}%)"
            x, y = left + j * cell, top + i * cell
            size = cell - (1 if cell > 8 else 0)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{size}" height="{size}" fill="{color}"/>'
            )
            if value is not None and cell == _CELL:
                ink = 'fill="#fff"' if share > 0.5 else ""
                middle = x + cell / 2
                parts.append(_text(middle, y + cell / 2 + 4, _number(value), "middle", ink))
    bottom = top + count * cell
    for i in _every(count):
        middle = (i + 0.5) * cell
        parts.append(_text(left - 6, top + middle + 4, picture.labels[i], "end"))
        turn = f'transform="rotate(-40 {left + middle:.1f} {bottom + 12:.1f})"'
        parts.append(_text(left + middle, bottom + 12, picture.labels[i], "end", turn))
    return left + count * cell + 8, bottom + 20 + 0.7 * left, parts


def _bars(picture: Bars) -> tuple[float, float, list[str]]:
    left, top, parts = _left(picture.labels), 28.0, []
    most = max(picture.values, default=0.0) or 1.0
    bar = _BAR if len(picture.values) <= _LABELS else max(2, 720 // len(picture.values))
    for i, value in enumerate(picture.values):
        y, length = top + i * bar, 300 * value / most
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" height="{max(1, bar - 3)}" '
            f'fill="{_COLORS[0]}"/>'
        )
        if bar == _BAR:
            parts.append(_text(left + length + 5, y + 12, _number(value)))
    for i in _every(len(picture.labels)):
        parts.append(_text(left - 6, top + i * bar + 12, picture.labels[i], "end"))
    return left + 370, top + len(picture.values) * bar + 10, parts


def _lines(picture: Lines) -> tuple[float, float, list[str]]:
    """Logarithmic on both axes; values that are not above 0 are left out."""
    values = [value for one in picture.series.values() for value in one if value > 0] or [1.0]
    x_low, x_high = math.log10(min(picture.sizes)), math.log10(max(picture.sizes))
    y_low, y_high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    y_high = max(y_high, y_low + 1)
    left, top, (width, height) = 62.0, 30.0, _PLOT

    def place(size: float, value: float) -> tuple[float, float]:
        across = (math.log10(size) - x_low) / ((x_high - x_low) or 1.0)
        up = (math.log10(value) - y_low) / (y_high - y_low)
        return left + across * width, top + (1 - up) * height

    parts = []
    for power in range(y_low, y_high + 1):
        y = place(picture.sizes[0], 10.0**power)[1]
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#d8dee4"/>')
        parts.append(_text(left - 6, y + 4, _number(10.0**power), "end"))
    for size in picture.sizes:
        x = place(size, 10.0**y_low)[0]
        parts.append(_text(x, top + height + 16, _bytes(size), "middle"))
    parts.append(_text(left + width / 2, top + height + 34, picture.below, "middle"))
    for i, (name, one) in enumerate(picture.series.items()):
        color = _COLORS[i % len(_COLORS)]
        pairs = zip(picture.sizes, one, strict=False)
        points = [place(size, value) for size, value in pairs if value > 0]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = top + 14 + 16 * i
        parts.append(_text(left + 8, y, f"— {name}", more=f'fill="{color}"'))
    return left + width + 24, top + height + 44, parts


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(size: float) -> str:
    for unit, text in ((2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:.3g} {text}"
    return f"{size:g}"
