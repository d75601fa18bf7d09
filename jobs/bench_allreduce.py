"""Measure all-reduces by size: every algorithm, every backend, plain MPI, and memcpy as the limit.

    mpirun -np 2 python jobs/bench_allreduce.py --seconds 120
    mpirun -np 2 python jobs/bench_allreduce.py --mode p2p

Every sum is checked once before it is timed. The contenders take turns, so that a drift of the
machine meets all of them; a call counts with the time of the slowest rank. In the run's directory:
bench.json, bench.csv, bench.png. USR1, USR2, TERM or a file STOP there ends it early, with what has
been measured by then. Figures are worth something on a machine that does nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
from lockstep.bench import collective, point_to_point
from lockstep.bench.collective import Row
from lockstep.bench.contenders import contenders, open_groups
from lockstep.bench.measure import Told, surroundings
from lockstep.bench.output import show, write
from lockstep.interrupt import Interrupts
from lockstep.metrics import RunDirectory, done_already
from lockstep.settings import Checked, flag, parse
from lockstep.together import on_root
from lockstep.world import World

DTYPES = {str(t).removeprefix("torch."): t for t in collective.DTYPES}


@dataclass(frozen=True)
class Settings(Checked):
    mode: str = flag("allreduce", "sums, or messages between two ranks", ("allreduce", "p2p"))
    seconds: float = flag(180.0, "for all measurements; what there is no time for is left out")
    smallest: int = flag(4, "bytes")
    largest: int = flag(256 * 2**20, "bytes")
    factor: int = flag(4, "from one size to the next")
    dtype: str = flag("float32", "of the numbers that are summed", tuple(DTYPES))
    only: str | None = flag(None, "measure those alone whose name holds one of these, by commas")
    timeout: float = flag(300.0, "seconds until a wait for another rank is an error")
    run_dir: Path = flag(Path("runs"), "where the run's directory is made")  # noqa: RUF009
    run: Path | None = flag(None, "the run's directory itself")  # noqa: RUF009

    def __post_init__(self) -> None:
        self._need_above_0("seconds", "timeout")
        self._need("smallest", 4 <= self.smallest <= self.largest, "4 or more, up to --largest")
        self._need("largest", self.largest <= 2**32, "at most 4294967296")
        self._need("factor", 2 <= self.factor <= 1024, "from 2 to 1024")


def measure(world: World, settings: Settings, told: Told) -> tuple[list[Row], dict[str, str]]:
    """Return the figures, and what was left out, and why. Collective."""
    groups = open_groups(world)
    lengths = collective.sizes(settings.smallest, settings.largest, settings.factor)

    def say(text: str) -> None:
        if world.rank == 0:
            sys.stderr.write(f"bench: {text}\n")

    limits: dict[str, Any] = {"seconds": settings.seconds, "say": say, "told": told}
    if settings.mode == "p2p":
        return point_to_point.measure(world, groups, lengths, **limits)
    dtype = DTYPES[settings.dtype]
    those = contenders(world, groups, dtype, settings.only)
    return collective.measure(world, those, lengths, dtype, **limits)


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__)
    if lockstep.discover().size < 2:
        sys.stderr.write("found 1 rank; needed: 2 or more; to do: mpirun -np 2 python …\n")
        return 2
    with lockstep.session(backend="mpi", timeout=settings.timeout) as world:
        if done_already(world, settings.run):
            return 0
        root = world.rank == 0
        name, exact = f"bench_{settings.mode}", settings.run
        run = RunDirectory(world, settings.run_dir, name, settings, {}, exact=exact)
        about = {**surroundings(world), "dtype": settings.dtype}
        with Interrupts(world, run.path, settings.timeout) as interrupts:
            rows, left_out = measure(world, settings, lambda: interrupts.agree().stop)
        if root:
            show(rows)
            print("  ".join(f"{key}: {value}" for key, value in about.items()))
            for what, why in left_out.items():
                print(f"left out: {what}: {why}")
        on_root(world, lambda: write(run.path, rows, about, left_out), "write the figures")
        run.finish()
        if root:
            print(f"Written to {run.path}", flush=True)
    return 0


if __name__ == "__main__":
    lockstep.run(main)
