"""Measure which all-reduce is the fastest on this cluster, and write a table for the sessions.

    mpirun -np 8 python -m lockstep tune --out allreduce.json
    LOCKSTEP_TUNING=allreduce.json mpirun -np 8 python job.py

It takes about a minute and wants a quiet machine. Tables of other numbers of ranks and nodes that
the file holds already stay in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

import lockstep
from lockstep import tuning
from lockstep.allreduce import NAMES
from lockstep.bench.collective import DTYPES, Row, measure, sizes
from lockstep.bench.contenders import contenders, open_groups
from lockstep.bench.measure import surroundings
from lockstep.choice import choose
from lockstep.errors import LockstepError
from lockstep.rendezvous.agree import gather
from lockstep.together import on_all, on_root
from lockstep.world import World

# What is faster by less than this is not worth another choice.
_WORTH = 0.05
# Quartiles further apart than this share of the median are not those of a quiet machine.
_STEADY = 0.5


@dataclass(frozen=True)
class Found:
    """The fastest at one length.

    Attributes:
        dtype: such as "float32".
        nbytes: the length.
        built_in, chosen: algorithms.
        before, after: seconds of each; before is None where the built-in one cannot be had.
        spread: the distance between the quartiles of the chosen one, over its median.
    """

    dtype: str
    nbytes: int
    built_in: str
    chosen: str
    before: float | None
    after: float
    spread: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Run the command; under mpirun, on all ranks. Collective. Does not return there."""
    parser = argparse.ArgumentParser(
        prog="lockstep tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place = tuning.default_place()
    parser.add_argument("--out", type=Path, default=place, help=f"the table (default {place})")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure in (default 60)")
    parser.add_argument("--backend", default="mpi", choices=("mpi", "gloo", "nccl"))
    parser.add_argument("--largest", type=int, default=64 * 2**20, help="bytes (default 64 MiB)")
    names = [_name(dtype) for dtype in DTYPES]
    parser.add_argument("--dtypes", nargs="+", default=names, choices=names)
    options = parser.parse_args(argv)
    if not options.seconds > 0 or not 4 <= options.largest <= 2**32:
        parser.error("needed: --seconds above 0, --largest from 4 to 4294967296")
    lockstep.run(lambda: _tune(options))


def _tune(options: argparse.Namespace) -> int:
    if lockstep.discover().size < 2:
        sys.stderr.write("found 1 rank; needed: 2 or more; to do: mpirun -np 2 python -m …\n")
        return 2
    with lockstep.session(backend="mpi", timeout=300) as world:
        root = world.rank == 0
        old = on_all(world, lambda: _old(options.out) if root else {}, "read the table")
        on_root(world, lambda: tuning.require_writable(options.out), "write the table")
        groups = open_groups(world)
        if options.backend not in groups:
            raise LockstepError(
                f"{options.backend} cannot be had here",
                needed=f"one of {', '.join(groups)}",
                cure="--backend mpi",
            )
        if (busy := _busy(world)) and root:
            sys.stderr.write(f"tune: warning: {busy}\n")
        found: list[Found] = []
        for dtype in (t for t in DTYPES if _name(t) in options.dtypes):
            found += _fastest(world, groups, dtype, options)
        table = {**old, **_entries(world, found, options.backend, options.largest)}

        def write() -> None:
            if root:
                tuning.write(options.out, table)

        on_all(world, write, "write the table")
        if root:
            show(found)
            print(f"Written to {options.out}", flush=True)
            if wide := unsteady(found):
                sys.stderr.write(f"tune: warning: {wide}\n")
    return 0


def _busy(world: World) -> str:
    """Say which nodes have other work, "" if none. Collective.

    Source: the load of the last minute, in which the ranks themselves have hardly begun.
    """
    cores = os.cpu_count() or 1
    free = max(world.local_size, cores - world.local_size)
    load = os.getloadavg()[0]
    nodes = dict(gather(world, (world.host, load if load > free else 0.0)))
    busy = [f"{host} has a load of {load:.1f}" for host, load in nodes.items() if load]
    if not busy:
        return ""
    return f"{', '.join(busy)}: the table will be by chance; on a quiet machine, again"


def unsteady(found: Sequence[Found]) -> str:
    """Say whether the times vary so much that the choice is by chance, "" if not. Local."""
    wide = [one for one in found if one.spread > _STEADY]
    if 4 * len(wide) <= len(found):
        return ""
    return (
        f"at {len(wide)} of {len(found)} lengths and dtypes the quartiles are more than "
        f"{_STEADY:.0%} of the median apart: something else ran; on a quiet machine, again"
    )


def _fastest(
    world: World, groups: dict[str, Any], dtype: torch.dtype, options: argparse.Namespace
) -> list[Found]:
    """Measure all lengths of a dtype. Collective."""
    backend = options.backend
    those = [c for c in contenders(world, groups, dtype) if c.backend == backend]
    those = [c for c in those if c.algorithm in NAMES]
    seconds = options.seconds / len(options.dtypes)
    lengths = sizes(max(4, dtype.itemsize), options.largest, 4)

    def say(text: str) -> None:
        if world.rank == 0:
            sys.stderr.write(f"tune: {_name(dtype)}, {text}\n")

    rows, left_out = measure(world, those, lengths, dtype, seconds=seconds, say=say)
    for what, why in left_out.items():
        say(f"left out: {what}: {why}")
    found = []
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        built_in = choose(nbytes, world.size, world.nodes, dtype, backend, tuned=False)
        found.append(pick([row for row in rows if row.nbytes == nbytes], built_in, _name(dtype)))
    return found


def pick(rows: Sequence[Row], built_in: str, dtype: str) -> Found:
    """Choose the fastest of some rows of one length; the built-in one unless it is worth it. Local.

    Args:
        rows: not empty.
        built_in: the algorithm that would be taken without a table.
        dtype: for the result.
    """
    known = {row.algorithm: row for row in rows}
    best, before = min(rows, key=lambda row: row.median), known.get(built_in)
    # It may be faster by chance, if three of four of its calls were not faster than the median.
    if before is not None and (
        best.median > (1 - _WORTH) * before.median or best.high > before.median
    ):
        best = before
    seconds = before.median if before is not None else None
    spread = (best.high - best.low) / best.median
    return Found(dtype, best.nbytes, built_in, best.algorithm, seconds, best.median, spread)


def _entries(world: World, found: Sequence[Found], backend: str, largest: int) -> tuning.Table:
    """Make the entries of a table from what was found. Local."""

    def built_in(nbytes: int, name: str) -> str:
        dtype = getattr(torch, name)
        return choose(nbytes, world.size, world.nodes, dtype, backend, tuned=False)

    about = {**surroundings(world), "when": time.strftime("%Y-%m-%d")}
    table: tuning.Table = {}
    for dtype in dict.fromkeys(one.dtype for one in found):
        those = [one for one in found if one.dtype == dtype]
        pairs = [(one.nbytes, one.chosen) for one in those]
        if (last := those[-1].nbytes) < largest:
            # What was left out is not guessed.
            pairs += [(n, built_in(n, dtype)) for n in sizes(4 * last, 4 * largest, 4)]
        key = tuning.Key(world.size, world.nodes, dtype, backend)
        table[key] = replace(tuning.steps(pairs), measured=about)
    return table


def show(found: Sequence[Found], console: Console | None = None) -> None:
    """Print what is other than the built-in choice, and by how much it is faster. Local."""
    console = console or Console(width=110, force_terminal=False, highlight=False)
    changed = [one for one in found if one.chosen != one.built_in]
    console.print(
        f"{len(found)} lengths and dtypes measured; at {len(found) - len(changed)} of them the "
        "built-in choice is the fastest" + (", here are the others:" if changed else "")
    )
    if not changed:
        return
    table = RichTable()
    for name in ("dtype", "bytes", "built in", "µs", "measured here", "µs", "times faster"):
        table.add_column(name, justify="left" if name in ("dtype", "built in") else "right")
    for one in changed:
        before = f"{one.before * 1e6:,.1f}" if one.before else "cannot be had"
        gain = f"{one.before / one.after:.2f}" if one.before else ""
        after = f"{one.after * 1e6:,.1f}"
        table.add_row(one.dtype, f"{one.nbytes:,}", one.built_in, before, one.chosen, after, gain)
    console.print(table)


def _old(path: Path) -> tuning.Table:
    """Return the table that is there already: what is not one is not overwritten."""
    return tuning.read(path, NAMES) if path.exists() else {}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
