"""What the watchdog's notes cost: a verb, and training steps, with and without them in one run.

    mpirun -np 2 python jobs/bench_watchdog.py

On a machine that does nothing else. Without means that the same calls note nothing; the thread that
looks on, four times a second, goes on beside both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from lockstep import notes
from lockstep.bench.measure import Sample, compare, surroundings
from lockstep.bench.mnist import ddp_step, sync_sgd_step
from lockstep.data import load
from lockstep.errors import SettingsError

Step = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the root prints. Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64, help="images a rank takes at a step")
    parser.add_argument("--steps", type=int, default=40, help="steps of each contender in a turn")
    parser.add_argument("--verbs", type=int, default=3000, help="verbs of each contender in a turn")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--json", type=Path, help="write the samples here too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with lockstep.session(backend="mpi") as world:
        if notes.current is None:
            raise SettingsError(
                "nobody watches this session", needed="2 ranks, watched", cure="mpirun -np 2 …"
            )
        images, _ = load(world, "sample", Path("data"))
        images = images.to(torch.device("cpu"), torch.channels_last)
        number = torch.ones(1)
        verb: dict[str, Step] = {"all_reduce of 4 B": lambda: dist.all_reduce(number)}
        steps: dict[str, Step] = {
            "MNIST step, DDP over mpi": ddp_step(images, options.batch_size, world, None, True),
            "MNIST step, SGD by hand": sync_sgd_step(images, options.batch_size, world, "auto")[0],
        }
        samples = compare(world, _both(verb), calls=options.verbs, rounds=options.rounds)
        samples |= compare(world, _both(steps), calls=options.steps, rounds=options.rounds)
        if world.rank == 0:
            print("  ".join(f"{key}: {value}" for key, value in surroundings(world).items()))
            _print(samples)
            if options.json:
                shown = {name: asdict(sample) for name, sample in samples.items()}
                record = {**surroundings(world), "samples": shown}
                options.json.write_text(json.dumps(record, indent=1))
    return 0


def _both(contenders: Mapping[str, Step]) -> dict[str, Step]:
    both: dict[str, Step] = {}
    for name, call in contenders.items():
        both[name] = _with(call, notes.current)
        both[f"{name}, not noted"] = _with(call, None)
    return both


def _with(call: Step, recorder: notes.Recorder | None) -> Step:
    def run() -> None:
        # in both cases, so that both take as long
        kept, notes.current = notes.current, recorder
        try:
            call()
        finally:
            notes.current = kept

    return run


def _print(samples: dict[str, Sample]) -> None:
    print(f"{'slowest rank':36} {'median µs':>10} {'quartiles':>20} {'n':>6} {'more':>9}")
    for name, s in samples.items():
        without = samples.get(f"{name}, not noted")
        more = "" if without is None else f"{(s.median - without.median) * 1e6:.2f} µs"
        if without is not None:
            more += f", {s.median / without.median - 1:.1%}"
        spread = f"{s.low * 1e6:.1f} to {s.high * 1e6:.1f}"
        print(f"{name:36} {s.median * 1e6:>10.2f} {spread:>20} {s.n:>6} {more:>9}")


if __name__ == "__main__":
    lockstep.run(main)
