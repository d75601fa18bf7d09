"""A script that never heard of Lockstep."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

assert "mpi4py.MPI" not in sys.modules, "MPI was imported with torch"
dist.init_process_group("mpi")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"sum {tensor.item()} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
