"""A job whose second rank is stopped when its session is over and the end of MPI is to come.

Arguments: backend, timeout in seconds.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import lockstep


def main() -> None:
    """All ranks sum and close the session; then the second one is stopped."""
    backend, seconds = sys.argv[1:]
    with lockstep.session(backend=backend, timeout=float(seconds)) as world:
        dist.all_reduce(torch.ones(3))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    lockstep.run(main)
