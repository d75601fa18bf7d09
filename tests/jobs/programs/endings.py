"""A job that ends in a given way on its last rank while the others wait for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep


def end(how: str) -> int:
    """End this rank; an event line tells when."""
    print(f"event {time.time()}", flush=True)
    match how:
        case "raise":
            raise ValueError("boom on purpose")
        case "exit":
            sys.exit(3)
        case "exit-text":
            sys.exit("boom on purpose")
        case "code":
            return 4
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "absent":
            threading.Event().wait()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Open the group, then let the last rank go its own way."""
    how = (argv or sys.argv[1:])[0]
    world = lockstep.discover()
    # "absent" is found out by this limit; everything else must be seen at once.
    seconds = 1 if how == "absent" else 60
    dist.init_process_group("mpi", timeout=timedelta(seconds=seconds))
    dist.barrier()
    if how == "all":
        return 85
    if how == "wait":
        print("waiting", flush=True)
        threading.Event().wait()
    if world.rank == world.size - 1:
        return end(how)
    dist.all_reduce(torch.ones(1))
    return 0


if __name__ == "__main__":
    lockstep.run(main)
