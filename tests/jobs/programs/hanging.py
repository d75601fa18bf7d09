"""A job on whose second rank something goes wrong while the others wait for it.

Arguments: what goes wrong, backend, timeout in seconds.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep


def go_wrong(how: str, tensor: torch.Tensor) -> None:
    """Do what the others do not expect."""
    print(f"event {time.time()}", flush=True)
    match how:
        case "loop":
            end = time.monotonic() + 120
            while time.monotonic() < end:
                pass  # looks for the next image
        case "no-interpreter":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "verb":
            dist.broadcast(tensor, 0)
        case "shape":
            dist.all_reduce(torch.ones(7))
        case "other-shape":  # of as many elements
            dist.all_reduce(tensor.view(10, 100))
        case "message":
            dist.recv(tensor, 0)


def main() -> None:
    """All ranks sum a few times; then the second one goes wrong."""
    how, backend, seconds = sys.argv[1:]
    with lockstep.session(backend=backend, timeout=float(seconds)) as world:
        tensor = torch.ones(1000)
        for _ in range(5):
            dist.all_reduce(tensor)
        if how == "cut":
            print("waiting", flush=True)
            for _ in range(10**6):  # until somebody pulls the cable
                dist.all_reduce(tensor)
                time.sleep(0.01)
        if how == "subgroup":
            pair = dist.new_group([0, 1], timeout=timedelta(seconds=float(seconds)))
            if world.rank == 0:
                dist.all_reduce(tensor, group=pair)
            how = "loop"
        if how == "quit":
            print("waiting", flush=True)
            if world.rank == 1:
                time.sleep(8)
        elif world.rank == 1:
            go_wrong(how, tensor)
            if how == "skip":
                return
        dist.all_reduce(tensor)
        dist.barrier()


if __name__ == "__main__":
    lockstep.run(main)
