"""What a notebook does: functions that no module holds, run on local ranks."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import lockstep


def total(start: float) -> tuple[int, float]:
    """Return this rank and a sum over all ranks."""
    with lockstep.session(backend="gloo", quiet=True) as world:
        tensor = torch.tensor([start + world.rank])
        dist.all_reduce(tensor)
        print(f"hello from {world.rank}", flush=True)
        return world.rank, tensor.item()


def fail(number: int) -> None:
    """Raise on one rank while the others wait for it."""
    with lockstep.session(backend="mpi", quiet=True) as world:
        if world.rank == number:
            raise KeyError("the cause")
        dist.barrier()


def sleep() -> None:
    """Never end."""
    time.sleep(300)


def kill() -> None:
    """End one rank without a word."""
    import os
    import signal

    if lockstep.discover().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def nested() -> None:
    """Spawn inside of a spawned rank."""
    lockstep.spawn(total, 2, 1.0)


WAYS = {
    "total": lambda: lockstep.spawn(total, 3, 1.0),
    "fail": lambda: lockstep.spawn(fail, 3, 1),
    "sleep": lambda: lockstep.spawn(sleep, 2, timeout=10.0),
    "kill": lambda: lockstep.spawn(kill, 2),
    "nested": lambda: lockstep.spawn(nested, 1),
    "mpirun": lambda: lockstep.spawn(total, 2, 1.0, mpirun="/no/such/mpirun"),
}

if __name__ == "__main__":
    print("result", WAYS[sys.argv[1]]())
