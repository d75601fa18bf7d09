"""DistributedDataParallel over the backend: N ranks take the step that one takes alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import World

BATCH = 6


def model() -> nn.Module:
    """Return the same small network on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a rank at a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)


def train(network: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Take a step for each batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("as_view", [False, True], ids=["copied", "bucket-view"])
def test_equals_one_process_on_the_joined_batch(world: World, as_view: bool) -> None:
    """After five steps the parameters are those of one process, and equal bits on all ranks."""
    alone = model()
    joined = []
    for step in range(5):
        parts = [batch(rank, step) for rank in range(world.size)]
        joined.append((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
    train(alone, joined)
    shared = DistributedDataParallel(model(), gradient_as_bucket_view=as_view, bucket_cap_mb=0.0005)
    train(shared, [batch(world.rank, step) for step in range(5)])
    for found, expected in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        copies = [torch.empty_like(found) for _ in range(world.size)]
        dist.all_gather(copies, found.detach())
        assert all(torch.equal(copy, found) for copy in copies)


def test_starts_from_the_roots_parameters(world: World) -> None:
    """DDP broadcasts parameters and buffers when it is made."""
    torch.manual_seed(world.rank)
    shared = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for tensor in [*shared.parameters(), *shared.buffers()]:
        copy = tensor.detach().clone()
        dist.broadcast(copy, 0)
        assert torch.equal(copy, tensor)


def test_uneven_inputs(world: World) -> None:
    """join() lets ranks with fewer batches end earlier."""
    shared = DistributedDataParallel(model())
    with shared.join():
        train(shared, [batch(world.rank, step) for step in range(1 + world.rank)])
    sums = torch.stack([p.detach().sum() for p in shared.parameters()])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
