"""Verbs through the memory of a node: around the length of a block, in place, queued."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers import wait
from lockstep import World
from lockstep.kernel import SMALL
from lockstep.mpi_backend.team import BLOCK

LENGTHS = [0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7]
ADDED = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def numbers(length: int, rank: int) -> torch.Tensor:
    """Return bytes that are another row on every rank."""
    generator = torch.Generator().manual_seed(length + 1000 * rank)
    return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_all_reduce(world: World, dtype: torch.dtype) -> None:
    """Around a short piece, a block and the cuts between ranks; at an odd place; one after another.

    Whole numbers are exact, and what lies beside the tensor stays.
    """
    line, generator = 64 // dtype.itemsize, torch.Generator().manual_seed(3)
    short, block = SMALL // dtype.itemsize, BLOCK // dtype.itemsize
    lengths = [0, 1, line - 1, line, line + 1, world.size * line - 1, world.size * line + 1]
    lengths += [at + by for at in (short, block, 2 * block) for by in (-1, 0, 1)]
    for length in [*lengths, block + short, 3 * block + 7, 1]:
        everyone = torch.randint(-8, 9, (world.size, length + 2), generator=generator)
        mine = everyone[world.rank].to(dtype)
        dist.all_reduce(mine[1 : length + 1])
        expected = everyone[world.rank].clone()
        expected[1 : length + 1] = everyone[:, 1 : length + 1].sum(0)
        assert torch.equal(mine, expected.to(dtype)), length


@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_all_reduce_gives_the_same_bits_everywhere(world: World, dtype: torch.dtype) -> None:
    """Of numbers that every order of additions rounds in another way; from run to run, too."""
    for length in (SMALL // dtype.itemsize, BLOCK // dtype.itemsize + 5):
        generator = torch.Generator().manual_seed(world.rank)
        numbers = torch.randn(length, generator=generator, dtype=torch.float64)
        numbers *= 10.0 ** torch.randint(-8, 5, (length,), generator=generator)
        odd = [float("inf"), -float("inf"), float("nan"), -0.0, 1e-310, 1e-45, 6e-8, 65504.0, 3e38]
        numbers[torch.randint(0, length, (len(odd),), generator=generator)] = torch.tensor(
            odd, dtype=torch.float64
        )
        runs = []
        for _ in range(2):
            total = numbers.to(dtype)
            dist.all_reduce(total)
            runs.append(total.view(torch.uint8))
        rows = torch.empty(world.size, len(runs[0]), dtype=torch.uint8)
        dist.all_gather_into_tensor(rows, runs[0])
        assert torch.equal(runs[0], runs[1])
        assert bool((rows == runs[0]).all())


@pytest.mark.parametrize("length", LENGTHS)
def test_broadcast(world: World, length: int) -> None:
    """From every root, in turn and without a pause between."""
    for root in range(world.size):
        mine = numbers(length, world.rank)
        dist.broadcast(mine, root)
        assert torch.equal(mine, numbers(length, root))


@pytest.mark.parametrize("length", LENGTHS)
def test_all_gather(world: World, length: int) -> None:
    """Into one tensor, in place and not, and into a list whose tensors have gaps."""
    expected = torch.stack([numbers(length, rank) for rank in range(world.size)])
    whole = torch.zeros_like(expected)
    dist.all_gather_into_tensor(whole, numbers(length, world.rank))
    assert torch.equal(whole, expected)
    whole = torch.zeros_like(expected)
    whole[world.rank] = expected[world.rank]
    dist.all_gather_into_tensor(whole, whole[world.rank])
    assert torch.equal(whole, expected)
    rows = [torch.zeros(length, 2, dtype=torch.uint8)[:, 0] for _ in range(world.size)]
    dist.all_gather(rows, numbers(length, world.rank))
    assert torch.equal(torch.stack(rows), expected)


def test_all_gather_of_what_lies_in_the_output(world: World) -> None:
    """Not in this rank's own place, but in that of another: it is sent as it was before."""
    n, length = world.size, BLOCK + 3
    whole = torch.zeros(n, length, dtype=torch.uint8)
    there = whole[(world.rank + 1) % n]
    there.copy_(numbers(length, world.rank))
    dist.all_gather_into_tensor(whole, there)
    assert torch.equal(whole, torch.stack([numbers(length, rank) for rank in range(n)]))


@pytest.mark.parametrize("dtype", ADDED, ids=str)
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_reduce_scatter(world: World, dtype: torch.dtype, average: bool) -> None:
    """From one tensor, into the own part of it, and from a list; whole numbers are exact."""
    n = world.size
    operator = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    for length in (0, 1, 17, BLOCK // n // dtype.itemsize + 1, BLOCK):
        generator = torch.Generator().manual_seed(length)
        everyone = torch.randint(-4, 5, (n, n, length), generator=generator) * n
        expected = (everyone.sum(0) // (n if average else 1)).to(dtype)[world.rank]
        mine = everyone[world.rank].to(dtype)
        kept, output = mine.clone(), torch.zeros(length, dtype=dtype)
        dist.reduce_scatter_tensor(output, mine.view(-1), op=operator)
        assert torch.equal(output, expected)
        assert torch.equal(mine, kept)
        dist.reduce_scatter(output.zero_(), list(mine), op=operator)
        assert torch.equal(output, expected)
        dist.reduce_scatter_tensor(mine[world.rank], mine.view(-1), op=operator)
        assert torch.equal(mine[world.rank], expected)


@pytest.mark.parametrize("dtype", [*ADDED, torch.int32], ids=str)
def test_queued_verbs_see_what_the_ones_before_have_done(world: World, dtype: torch.dtype) -> None:
    """Also where a tensor has gaps, so that it is copied: not before its turn has come."""
    n = world.size
    mine = torch.ones(300, 2).to(dtype)[:, 0]
    gathered = torch.zeros(n, 300).to(dtype)
    works = [dist.all_reduce(mine, async_op=True) for _ in range(3)]
    works.append(dist.all_gather_into_tensor(gathered, mine, async_op=True))
    works.append(dist.broadcast(mine, 0, async_op=True))
    for work in works:
        wait(work)
    assert bool((mine == n**3).all())
    assert bool((gathered == n**3).all())


def test_verbs_in_turn(world: World) -> None:
    """They use the same memory, one call after the other, on ranks that are late in turn."""
    n, length = world.size, BLOCK // 4 + 5
    own = torch.Generator().manual_seed(world.rank)
    for call in range(60):
        if int(torch.randint(0, 4, (), generator=own)) == 0:
            torch.randn(200_000)
        total = torch.full((length,), float(world.rank + call))
        dist.all_reduce(total)
        assert bool((total == sum(range(n)) + n * call).all())
        copy = torch.full((length,), float(world.rank + call))
        dist.broadcast(copy, call % n)
        assert bool((copy == call % n + call).all())
        rows = torch.empty(n, length)
        dist.all_gather_into_tensor(rows, torch.full((length,), float(world.rank + call)))
        assert bool((rows == torch.arange(n)[:, None] + call).all())
        part = torch.empty(length)
        dist.reduce_scatter_tensor(part, rows.view(-1))
        assert bool((part == n * (world.rank + call)).all())
