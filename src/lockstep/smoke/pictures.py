"""Pictures for the report, drawn by matplotlib, as PNG inside of the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def draw(picture: Picture) -> str:
    """Return the picture as the address of an image that holds its own data. Local."""
    # Without pyplot, which keeps figures and asks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_size(picture), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(picture.title, fontsize=10)
    if isinstance(picture, Matrix):
        _matrix(figure, axes, picture)
    elif isinstance(picture, Bars):
        _bars(axes, picture)
    else:
        _lines(axes, picture)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _size(picture: Picture) -> tuple[float, float]:
    if isinstance(picture, Matrix):
        side = min(10.0, 2.6 + 0.5 * len(picture.labels))
        return side + 0.8, side
    if isinstance(picture, Bars):
        return 6.0, min(12.0, 1.2 + 0.28 * len(picture.labels))
    return 6.0, 3.6


def _matrix(figure: Any, axes: Any, picture: Matrix) -> None:
    import numpy as np

    values = np.array(
        [[np.nan if it is None else it for it in row] for row in picture.values], dtype=float
    )
    image = axes.imshow(values, cmap="viridis")
    figure.colorbar(image, ax=axes, shrink=0.8)
    ticks = range(len(picture.labels))
    axes.set_xticks(ticks, picture.labels, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(ticks, picture.labels, fontsize=8)
    if len(picture.labels) > 12 or np.isnan(values).all():
        return
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "white" if value <= middle else "black"
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=7, c=color)


def _bars(axes: Any, picture: Bars) -> None:
    axes.barh(range(len(picture.values)), picture.values, color="tab:blue")
    step = max(1, len(picture.labels) // 40)
    ticks = range(0, len(picture.labels), step)
    axes.set_yticks(ticks, [picture.labels[i] for i in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _lines(axes: Any, picture: Lines) -> None:
    for name, values in picture.series.items():
        axes.loglog(picture.sizes[: len(values)], values, marker=".", label=name)
    axes.set_xlabel(picture.below)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
