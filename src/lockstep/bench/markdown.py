"""Print the tables of bench/README.md from what benchmarks have written.

    python -m lockstep.bench.markdown runs/bench_allreduce-…/bench.json mnist.json

It tells the kind of a file by what is in it. Times are medians of the slowest rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.bench.collective import Row
from lockstep.bench.contenders import CHOSEN, LIMIT, PLAIN

GLOO, TORCH = "gloo: all_reduce", "mpi: all_reduce"


def main(argv: Sequence[str]) -> int:
    """Print the tables of all files that are named. Local; starts no MPI."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    for name in argv:
        record = json.loads(Path(name).read_text())
        print("\n".join(["", *_tables(record)]))
    return 0


def _tables(record: dict[str, Any]) -> list[str]:
    if "rows" not in record:
        return steps(record)
    rows = [Row(**row) for row in record["rows"]]
    head = [_facts(record["surroundings"]), ""]
    if any(row.what == "all_reduce" for row in rows):
        return [*head, *summary(rows), "", *details(rows)]
    return [*head, *messages(rows)]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the table of what the hand-written SGD and torch's call cost beside others. Local."""
    lines = [
        "| bytes | memcpy µs | plain MPI µs | gloo µs | SGD µs | gloo / SGD | MPI / SGD "
        "| memcpy / SGD | torch over mpi µs | gloo / torch | MPI / torch |",
        "| ---: " * 11 + "|",
    ]
    for nbytes, by_name in _by_length(rows).items():
        known = {name: row.median for name, row in by_name.items()}
        sgd, torch_ = known.get(CHOSEN), known.get(TORCH)
        cells = [f"{nbytes:,}", *(_us(known.get(name)) for name in (LIMIT, PLAIN, GLOO))]
        cells += [_us(sgd), *(_times(known.get(name), sgd) for name in (GLOO, PLAIN, LIMIT))]
        cells += [_us(torch_), *(_times(known.get(name), torch_) for name in (GLOO, PLAIN))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def details(rows: Sequence[Row]) -> list[str]:
    """Return the table of all ways: median (quartiles), n. Local."""
    names = list(dict.fromkeys(row.name for row in rows))
    lines = [f"| bytes | {' | '.join(names)} |", "| ---: " * (len(names) + 1) + "|"]
    for nbytes, by_name in _by_length(rows).items():
        cells = [_spread(by_name.get(name)) for name in names]
        lines.append(f"| {nbytes:,} | {' | '.join(cells)} |")
    return lines


def messages(rows: Sequence[Row]) -> list[str]:
    """Return the table of messages between two ranks. Local."""
    lines = [
        "| what | bytes | way | µs a message (quartiles) | n | MB/s |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        spread = f"{_us(row.median)} ({_us(row.low)} to {_us(row.high)})"
        cells = [row.what, f"{row.nbytes:,}", row.name, spread, f"{row.n:,}"]
        lines.append(f"| {' | '.join(cells)} | {row.algbw / 1e6:,.1f} |")
    return lines


def steps(record: dict[str, Any]) -> list[str]:
    """Return the table of training steps that `lockstep.bench.mnist` or `.resnet` wrote. Local."""
    samples: dict[str, dict[str, float]] = record["samples"]
    slowest = next(iter(samples.values()))["median"]
    facts = {key: value for key, value in record.items() if not isinstance(value, dict)}
    lines = [_facts(facts), "", "| a step | ms (quartiles) | n | times faster |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, sample in samples.items():
        median, low, high = (sample[key] * 1e3 for key in ("median", "low", "high"))
        spread = f"{median:.2f} ({low:.2f} to {high:.2f})"
        times = _times(slowest, sample["median"])
        lines.append(f"| {name} | {spread} | {sample['n']:,} | {times} |")
    return lines


def _by_length(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.nbytes, {})[row.name] = row
    return found


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _us(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def _times(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.2f}" if slow and fast else ""


def _spread(row: Row | None) -> str:
    return f"{_us(row.median)} ({_us(row.low)} to {_us(row.high)}), {row.n:,}" if row else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
