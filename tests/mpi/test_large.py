"""Tensors of more than 2^31 bytes: counts and displacements overflow a C int."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from lockstep import World

pytestmark = [pytest.mark.large, pytest.mark.ranks(exactly=2), pytest.mark.limit(120)]
COUNT = 2**31 + 24
# Where values are looked at: both ends and around the places where an int or a piece ends.
PLACES = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, COUNT - 1]


@pytest.fixture(autouse=True)
def _one_at_a_time(comm: MPI.Intracomm) -> Iterator[None]:
    """Free the memory of one test before the next begins on any rank."""
    yield
    gc.collect()
    comm.Barrier()


def marked(rank: int, count: int = COUNT) -> torch.Tensor:
    """Return a tensor that differs between ranks at the places."""
    tensor = torch.zeros(count, dtype=torch.uint8)
    for i, place in enumerate(PLACES):
        tensor[place % count] = 10 * rank + i + 1
    return tensor


def at(tensor: torch.Tensor) -> list[int]:
    """Return the values at the places."""
    return [int(tensor[place % tensor.numel()]) for place in PLACES]


def test_all_reduce(world: World) -> None:
    """MAX of the marks; the rest stays zero."""
    mine = marked(world.rank)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    assert at(mine) == [10 + i + 1 for i in range(len(PLACES))]
    assert int(mine.count_nonzero()) == len(PLACES)


def test_broadcast(world: World) -> None:
    """The last rank's marks everywhere."""
    mine = marked(world.rank)
    dist.broadcast(mine, 1)
    assert at(mine) == [10 + i + 1 for i in range(len(PLACES))]
    assert int(mine.count_nonzero()) == len(PLACES)


def test_send_and_recv(world: World) -> None:
    """One message."""
    if world.rank == 0:
        dist.send(marked(3), 1)
    else:
        target = torch.zeros(COUNT, dtype=torch.uint8)
        dist.recv(target, 0)
        assert at(target) == [30 + i + 1 for i in range(len(PLACES))]
        assert int(target.count_nonzero()) == len(PLACES)
    dist.barrier()


def test_all_gather_single(world: World) -> None:
    """The output is larger than 2^31, each input half of it."""
    half = COUNT // 2
    mine = torch.full((half,), world.rank + 1, dtype=torch.uint8)
    whole = torch.zeros(COUNT, dtype=torch.uint8)
    dist.all_gather_single(whole, mine)
    for rank in range(2):
        part = whole[rank * half : (rank + 1) * half]
        assert part.min().item() == part.max().item() == rank + 1


def test_all_to_all_single(world: World) -> None:
    """Rank 0 gives nearly all to rank 1, which gives back little."""
    little, much = 8, COUNT - 8
    given = [little, much] if world.rank == 0 else [16, little]
    taken = [little, 16] if world.rank == 0 else [much, little]
    whole = torch.cat(
        [torch.full((n,), 10 * world.rank + to, dtype=torch.uint8) for to, n in enumerate(given)]
    )
    output = torch.zeros(sum(taken), dtype=torch.uint8)
    dist.all_to_all_single(output, whole, taken, given)
    for source, part in enumerate(output.split(taken)):
        assert part.min().item() == part.max().item() == 10 * source + world.rank
