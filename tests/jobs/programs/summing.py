"""A job that sums in shared memory over and over, until something happens to one of its ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch
from mpi4py import MPI

import lockstep
from lockstep.reducers import make
from lockstep.replicas import own_group

LIMIT = 2.0
# How many sums come before the planned end of some ways to end.
SUMS = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Sum until the end that was asked for, or for ever."""
    how = (argv or sys.argv[1:])[0]
    with lockstep.session(timeout=LIMIT, quiet=True) as world:
        # Buckets of many lengths, so that a rank is lost at many places of a sum.
        length, kind = 300_000, (torch.float32, torch.device("cpu"))
        reducer = make("shared", [(*kind, length)], world, own_group())
        buffer = reducer.buffers[0]
        world.comm.Barrier()
        print(f"summing: rank {world.rank} pid {os.getpid()}", flush=True)
        generator = torch.Generator().manual_seed(1)
        for number in range(SUMS if how in ("end", "raise", "abort") else sys.maxsize):
            piece = buffer[: int(torch.randint(1, length, (), generator=generator))]
            piece.fill_(1.0)
            reducer.sum(piece)
            assert bool((piece == world.size).all()), number
        print(f"event {time.time()}", flush=True)
        if how == "raise" and world.rank == 1:
            raise ValueError("boom on purpose")
        if how == "abort" and world.rank == 1:
            MPI.COMM_WORLD.Abort(5)
        if how != "end":
            reducer.sum(buffer)
        reducer.close()
    return 0


if __name__ == "__main__":
    lockstep.run(main)
