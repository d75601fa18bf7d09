"""What a benchmark leaves: a table, CSV, JSON and a picture. Everything here is Local."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.table import Table

from lockstep.bench.collective import Row
from lockstep.bench.contenders import LIMIT
from lockstep.files import fresh, write_text

JSON = "bench.json"


def write(
    directory: Path,
    rows: Sequence[Row],
    surroundings: Mapping[str, object],
    left_out: Mapping[str, str],
) -> None:
    """Write bench.json, bench.csv and bench.png into a directory that is there. Local.

    Args:
        directory: where to.
        rows: what was measured.
        surroundings: what it was measured with.
        left_out: what was not measured, and why.

    Raises:
        StorageError: one of them cannot be written.
    """
    record = {
        "surroundings": dict(surroundings),
        "left_out": dict(left_out),
        "rows": [asdict(row) for row in rows],
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(directory / "bench.csv", text.getvalue())
    if rows:
        with fresh(directory / "bench.png", 0o666) as file:
            draw(rows, file)
    write_text(directory / JSON, json.dumps(record, indent=1) + "\n")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read a bench.json.

    Returns:
        the rows and the surroundings.
    """
    record = json.loads(path.read_text())
    return [Row(**row) for row in record["rows"]], record["surroundings"]


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print a table for each operation: times in µs, bandwidths in GB/s (10^9 bytes)."""
    # What mpirun gives a rank may look like a terminal, with a width that is none.
    console = console or Console(width=110, force_terminal=False, highlight=False)
    for what in dict.fromkeys(row.what for row in rows if row.name != LIMIT):
        table = Table(title=what, title_justify="left")
        table.add_column("bytes", justify="right")
        table.add_column("way")
        for name in ("median µs", "quartiles µs", "n", "algbw GB/s", "busbw GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        last = None
        for row in rows:
            if row.what != what and not (row.name == LIMIT and what == "all_reduce"):
                continue
            if last not in (None, row.nbytes):
                table.add_section()
            last = row.nbytes
            table.add_row(f"{row.nbytes:,}", row.name, *_cells(row))
        console.print(table)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.median * 1e6:,.1f}",
        f"{row.low * 1e6:,.1f} to {row.high * 1e6:,.1f}",
        f"{row.n:,}",
        f"{row.algbw / 1e9:.3f}",
        "" if row.busbw is None else f"{row.busbw / 1e9:.3f}",
    ]


def draw(rows: Sequence[Row], file: BinaryIO) -> None:
    """Draw times and bandwidths over the length, log-log, with the limit.

    Args:
        rows: of one run.
        file: where the picture goes, PNG.
    """
    # Without pyplot, which keeps figures and asks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = row.name if row.what in ("all_reduce", "copy") else f"{row.name} {row.what}"
        lines.setdefault(name, []).append(row)
    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, (name, points) in enumerate(lines.items()):
        lengths = [point.nbytes for point in points]
        limit = name == LIMIT
        style: dict[str, Any] = {"color": f"C{number}", "marker": ".", "linewidth": 1.2}
        style["linestyle"] = ("-", "--", ":")[number // 10 % 3]
        if limit:
            style = {"color": "black", "linestyle": "--", "linewidth": 2.5}
        label = f"the limit: {LIMIT} by all ranks" if limit else name
        left.plot(lengths, [point.median * 1e6 for point in points], label=label, **style)
        right.plot(lengths, [point.algbw / 1e9 for point in points], label=label, **style)
    left.set(ylabel="time, µs (median of the slowest rank)")
    right.set(ylabel="algorithm bandwidth, GB/s")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="bytes")
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize="small")
    figure.savefig(file, dpi=120, format="png")
