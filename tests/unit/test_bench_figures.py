"""What is called bandwidth, how the time is spent, what the files of a benchmark hold."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.bench import markdown
from lockstep.bench.bandwidth import algorithm_bandwidth, bus_bandwidth
from lockstep.bench.collective import Row, sizes
from lockstep.bench.output import read, show, write
from lockstep.bench.tune import Found, pick, unsteady

ROW = Row(
    what="all_reduce",
    nbytes=4096,
    name="mpi: ring",
    backend="mpi",
    algorithm="ring",
    median=2e-5,
    low=1e-5,
    high=4e-5,
    n=100,
    algbw=4096 / 2e-5,
    busbw=4096 / 2e-5,
)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """An all-reduce of 1 GB over 8 ranks in 0.1 s: 10 GB/s, and 2·7/8 of that on the bus."""
    assert algorithm_bandwidth(10**9, 0.1) == pytest.approx(1e10)
    assert bus_bandwidth(10**9, 0.1, 8) == pytest.approx(1.75e10)
    # With two ranks both are the same; a single one sends nothing.
    assert bus_bandwidth(10**9, 0.1, 2) == pytest.approx(1e10)
    assert bus_bandwidth(10**9, 0.1, 1) == 0.0


def test_sizes_have_both_ends() -> None:
    """The last step may be shorter."""
    assert sizes(4, 256, 4) == [4, 16, 64, 256]
    assert sizes(4, 100, 4) == [4, 16, 64, 100]
    assert sizes(8, 8, 2) == [8]


def test_files_hold_the_same(tmp_path: Path) -> None:
    """JSON gives the rows back; the CSV has the same numbers; there is a picture."""
    rows = [replace(ROW, name="memcpy", what="copy", busbw=None), ROW, replace(ROW, nbytes=8192)]
    write(tmp_path, rows, {"ranks": 2}, {"gloo": "no network"})
    assert read(tmp_path / "bench.json") == (rows, {"ranks": 2})
    assert json.loads((tmp_path / "bench.json").read_text())["left_out"] == {"gloo": "no network"}
    with (tmp_path / "bench.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == ["memcpy", "mpi: ring", "mpi: ring"]
    assert float(lines[1]["median"]) == ROW.median
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_all() -> None:
    """In µs and GB/s."""
    text = io.StringIO()
    show([replace(ROW, name="memcpy", what="copy", busbw=None), ROW], Console(file=text, width=110))
    line = next(line for line in text.getvalue().splitlines() if "mpi: ring" in line)
    for cell in ("4,096", "20.0", "10.0 to 40.0", "100", "0.205"):
        assert cell in line
    assert "memcpy" in text.getvalue()


def test_markdown_compares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """How many times faster than gloo, MPI and memcpy."""
    named = {"memcpy": 1e-5, "MPI_Allreduce": 4e-5, "gloo: all_reduce": 2e-4}
    named |= {"mpi: auto": 2e-5, "mpi: all_reduce": 2.5e-5}
    rows = [
        replace(ROW, name=name, median=median, what="copy" if name == "memcpy" else "all_reduce")
        for name, median in named.items()
    ]
    write(tmp_path, rows, {"ranks": 2}, {})
    assert markdown.main([str(tmp_path / "bench.json")]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("| 4,096"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:8] == ["10.0", "40.0", "200.0", "20.0", "10.00", "2.00", "0.50"]
    assert cells[8:] == ["25.0", "8.00", "1.60"]


def test_steps_as_markdown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What lockstep.bench.mnist writes."""
    sample = {"median": 0.012, "low": 0.011, "high": 0.013, "n": 168}
    record = {"ranks": 2, "samples": {"classic": sample, "ours": {**sample, "median": 0.004}}}
    file = tmp_path / "mnist.json"
    file.write_text(json.dumps(record))
    assert markdown.main([str(file)]) == 0
    assert "| ours | 4.00 (11.00 to 13.00) | 168 | 3.00 |" in capsys.readouterr().out


def test_tune_keeps_the_built_in_choice_unless_it_is_worth_it() -> None:
    """Five per cent, and more than chance."""

    def row(algorithm: str, median: float, high: float) -> Row:
        return replace(ROW, algorithm=algorithm, median=median, high=high)

    ours = row("shared", 1.0, 1.2)
    assert pick([ours, row("ring", 0.97, 0.98)], "shared", "float32").chosen == "shared"
    assert pick([ours, row("ring", 0.8, 1.1)], "shared", "float32").chosen == "shared"
    found = pick([ours, row("ring", 0.8, 0.9), row("mpi", 0.9, 0.9)], "shared", "float32")
    assert (found.chosen, found.before, found.after) == ("ring", 1.0, 0.8)
    # The built-in one cannot be had here.
    assert pick([row("ring", 2.0, 2.1)], "shared", "float32").chosen == "ring"


def test_tune_tells_that_times_vary() -> None:
    """Where the quartiles are far apart at more than a quarter of the lengths."""
    still = Found("float32", 4, "ring", "ring", 1.0, 1.0, 0.1)
    wild = replace(still, spread=0.9)
    assert unsteady([]) == unsteady([still] * 3 + [wild]) == ""
    assert unsteady([still, wild]).startswith("at 1 of 2 lengths and dtypes the quartiles are more")
    far = pick([replace(ROW, median=1.0, low=0.5, high=1.5)], ROW.algorithm, "float32")
    assert far.spread == 1.0
