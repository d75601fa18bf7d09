"""Leave while an asynchronous verb waits for a rank that never calls it."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep  # noqa: F401

dist.init_process_group("mpi", timeout=timedelta(seconds=2))
dist.barrier()
if dist.get_rank() != 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
print(f"event {time.time()}", flush=True)
