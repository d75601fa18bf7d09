"""The curves of a run: loss, accuracy, throughput. Everything here is Local."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

Rows = Sequence[dict[str, Any]]


def draw(epochs: Rows, path: Path | BinaryIO, steps: Rows = ()) -> None:
    """Draw losses, accuracy and images a second.

    Args:
        epochs: rows with epoch and, as far as there are any, train_loss or loss, test_loss,
            accuracy or acc (percent), images_per_second.
        path: of the picture, or the open file; PNG.
        steps: rows with global_step, loss and images_per_second; drawn where no epoch is done.
    """
    # Without pyplot, which keeps figures and asks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    rows, key, unit = (epochs, "epoch", "epoch") if epochs else (steps, "global_step", "step")
    left, middle, right = figure.subplots(1, 3)
    for names, label in ((("train_loss", "loss"), "training"), (("test_loss",), "test")):
        _line(left, rows, key, names, label=label)
    _line(middle, rows, key, ("accuracy", "acc"), color="C2")
    _line(right, rows, key, ("images_per_second",), color="C3")
    left.set(ylabel="loss")
    middle.set(ylabel="correct of the test images, %")
    right.set(ylabel="images a second, all ranks", ylim=(0, None))
    if left.lines:
        left.legend()
    for axes in (left, middle, right):
        axes.set(xlabel=unit)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120, format="png")


def _line(axes: Any, rows: Rows, key: str, names: Sequence[str], **style: Any) -> None:
    """Draw the first of the names that the rows have, where they have it."""
    for name in names:
        points = [(row[key], row[name]) for row in rows if row.get(name) is not None and key in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", **style)
            return
