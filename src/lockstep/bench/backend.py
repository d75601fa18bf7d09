"""Compare all_reduce over mpi with gloo and with plain mpi4py, by size, in one run.

Start it as ``mpirun -np 2 python -m lockstep.bench.backend`` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import lockstep
from lockstep.bench.measure import Sample, compare, surroundings
from lockstep.world import World

SIZES = (4, 1024, 64 * 1024, 2**20, 32 * 2**20)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the root prints. Collective."""
    parser = argparse.ArgumentParser(prog="lockstep.bench.backend", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of float32")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--json", type=Path, help="write the samples here too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    world = lockstep.discover()
    if world.size < 2:
        print("found 1 rank; needed: at least 2; to do: mpirun -np 2 python -m …")
        return 2
    gloo: Any = dist.new_group(backend="gloo")
    results = {size: _one_size(world, gloo, size, options.rounds) for size in options.sizes}
    if world.rank == 0:
        _print(world, results)
        if options.json:
            options.json.write_text(json.dumps(_record(world, results), indent=1))
    dist.destroy_process_group()
    return 0


def _one_size(world: World, gloo: dist.ProcessGroup, size: int, rounds: int) -> dict[str, Sample]:
    tensor = torch.zeros(max(1, size // 4))
    array = tensor.numpy()
    contenders: dict[str, Callable[[], object]] = {
        "plain mpi4py": lambda: world.comm.Allreduce(MPI.IN_PLACE, array),
        "mpi": lambda: dist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
    }
    calls = 400 if size <= 2**16 else 60 if size <= 2**20 else 6
    return compare(world, contenders, calls=calls, rounds=rounds)


def _print(world: World, results: dict[int, dict[str, Sample]]) -> None:
    record = _record(world, {})
    print(f"all_reduce of float32, {world.size} ranks on {world.nodes} node(s); median µs")
    print("  ".join(f"{key}: {value}" for key, value in record.items() if key != "samples"))
    print(
        f"{'bytes':>10} {'plain':>10} {'mpi':>10} {'gloo':>10}   mpi - plain  mpi/plain  gloo/mpi"
    )
    for size, samples in results.items():
        plain, mpi, gloo = (samples[k].median * 1e6 for k in ("plain mpi4py", "mpi", "gloo"))
        print(
            f"{size:>10} {plain:>10.1f} {mpi:>10.1f} {gloo:>10.1f}   {mpi - plain:>11.1f}"
            f"  {mpi / plain:>9.2f}  {gloo / mpi:>8.2f}"
        )
    print("quartiles (µs) and number of calls:")
    for size, samples in results.items():
        spread = ", ".join(
            f"{name} {s.low * 1e6:.1f} to {s.high * 1e6:.1f} (n={s.n})"
            for name, s in samples.items()
        )
        print(f"{size:>10} {spread}")


def _record(world: World, results: dict[int, dict[str, Sample]]) -> dict[str, object]:
    return {
        **surroundings(world),
        "samples": {
            size: {name: asdict(s) for name, s in samples.items()}
            for size, samples in results.items()
        },
    }


if __name__ == "__main__":
    lockstep.run(main)
