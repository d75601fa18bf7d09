"""The hand-written all-reduces: right sums, the same bits on all ranks, over mpi and gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import World
from lockstep.allreduce import ALGORITHMS, allreduce

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 3, 5, 7, 64, 1001]


@pytest.fixture(scope="module", params=["mpi", "gloo"])
def group(request: pytest.FixtureRequest) -> Any:
    """Return a group of all ranks over one backend."""
    if not dist.is_initialized():
        dist.init_process_group("mpi")
    return dist.new_group(backend=request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_exact(group: Any, world: World, algorithm: str, dtype: torch.dtype) -> None:
    """Small whole numbers, whose sum no dtype rounds, of lengths around the number of ranks."""
    generator = torch.Generator().manual_seed(7)
    for length in LENGTHS:
        all_ = torch.randint(-8, 9, (world.size, length), generator=generator).to(dtype)
        mine = all_[world.rank].clone()
        allreduce(mine, algorithm, group)
        assert torch.equal(mine, all_.to(torch.float64).sum(0).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_everywhere(group: Any, world: World, algorithm: str, dtype: torch.dtype) -> None:
    """Numbers that every order of addition rounds in another way."""
    generator = torch.Generator().manual_seed(world.rank)
    mine = (torch.randn(10_007, generator=generator) * 100).to(dtype)
    expected = mine.to(torch.float64)
    dist.all_reduce(expected)
    allreduce(mine, algorithm, group)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine.view(torch.uint8), e.view(torch.uint8)) for e in everyone)
    tolerance = 1e-12 if dtype is torch.float64 else torch.finfo(dtype).eps * world.size
    largest = 100 * 5 * world.size
    assert (mine.to(torch.float64) - expected).abs().max() <= tolerance * largest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_not_finite_is_seen_by_all(world: World, algorithm: str) -> None:
    """A NaN or an infinity on one rank."""
    mine = torch.zeros(9)
    if world.rank == world.size - 1:
        mine[3], mine[4] = float("nan"), float("inf")
    allreduce(mine, algorithm)
    assert mine[3].isnan()
    assert mine[4].isinf()
    assert mine[0] == 0


def test_a_subgroup(world: World) -> None:
    """Ranks in the group are not ranks in the world."""
    members = list(range(world.size))[::-2]
    group = dist.new_group(members)
    if world.rank in members:
        for algorithm in ALGORITHMS:
            mine = torch.full((5,), float(world.rank))
            allreduce(mine, algorithm, group)
            assert mine.tolist() == [float(sum(members))] * 5


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(2, dtype=torch.int64)]
)
def test_refuses_a_buffer_by_name(wrong: torch.Tensor) -> None:
    """Two dimensions, gaps, whole numbers."""
    with pytest.raises(ValueError, match="needed: a contiguous tensor of one dimension"):
        allreduce(wrong, "ring")


def test_refuses_an_unknown_name() -> None:
    """The message lists the known ones."""
    with pytest.raises(ValueError, match="recursive_doubling"):
        allreduce(torch.zeros(1), "butterfly")
