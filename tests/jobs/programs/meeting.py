"""Open a session at a meeting point, use it, and end in one of several ways."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep


def main(argv: Sequence[str] | None = None) -> None:
    """Take the meeting point and the way to end: well, raise, or hang."""
    del argv
    url, how = sys.argv[1:]
    limit = timedelta(seconds=30)
    with lockstep.session(backend="gloo", rendezvous=url, timeout=limit) as world:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world.size
        print(f"open {world.rank}", flush=True)
        if how == "hang":
            time.sleep(300)
        if how == "raise" and world.rank == 1:
            print(f"event {time.time()}", flush=True)
            raise KeyError("the cause")
        dist.barrier()
    print(f"done {world.rank}", flush=True)


lockstep.run(main)
