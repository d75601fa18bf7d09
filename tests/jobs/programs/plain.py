"""A script that knows nothing of lockstep.run: the import only registers the backend."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import lockstep  # noqa: F401

how = sys.argv[1]
dist.init_process_group("mpi")
dist.barrier()
if how in ("unfinished", "destroyed"):
    size = dist.get_world_size()
    tensors = [torch.ones(1000) for _ in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    print(f"event {time.time()}", flush=True)
    if how == "destroyed":
        dist.destroy_process_group()
        # What was queued has been carried out, not dropped.
        assert all(tensor[-1].item() == size for tensor in tensors)
elif dist.get_rank() == dist.get_world_size() - 1:
    print(f"event {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("boom on purpose")
    os.kill(os.getpid(), signal.SIGKILL)
else:
    dist.all_reduce(torch.ones(1))
