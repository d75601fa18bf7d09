"""The verbs under TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch wraps each group."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep

name, file = sys.argv[1:]
world = lockstep.discover()
limit = timedelta(seconds=20)
if name == "mpi":
    dist.init_process_group("mpi", timeout=limit)
else:
    dist.init_process_group(
        name, init_method=f"file://{file}", rank=world.rank, world_size=world.size, timeout=limit
    )
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
n = world.size
second = dist.new_group()
assert isinstance(second, dist.ProcessGroup)
for group in (None, second):
    tensor = torch.full((3,), world.rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [n * (n + 1) / 2] * 3
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    parts = [torch.zeros(1) for _ in range(n)]
    dist.all_gather(parts, torch.tensor([float(world.rank)]), group=group)
    assert [part.item() for part in parts] == list(range(n))
    everyone: list = [None] * n
    dist.all_gather_object(everyone, world.rank, group=group)
    assert everyone == list(range(n))
    dist.barrier(group=group)
if n > 1:
    if world.rank == 0:
        dist.send(torch.tensor([5.0]), 1)
    elif world.rank == 1:
        got = torch.zeros(1)
        dist.recv(got, 0)
        assert got.item() == 5.0
    try:
        dist.all_reduce(torch.zeros(2 if world.rank else 3))
    except RuntimeError as error:
        print(f"found: {error}".splitlines()[0])
    else:
        raise AssertionError("a mismatch was not found")
dist.destroy_process_group()
print("good", flush=True)
