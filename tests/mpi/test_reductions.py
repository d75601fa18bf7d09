"""Every dtype and every operator, in every verb that reduces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lockstep import World
from reference import (
    ADDABLE,
    MOVABLE_ONLY,
    OPS,
    expect_equal,
    operator,
    reduced,
    supported,
    values,
)

COUNT = 7
Verb = Callable[[World, torch.dtype, ReduceOp.RedOpType, int], None]


def all_reduce(world: World, dtype: torch.dtype, op: ReduceOp.RedOpType, seed: int) -> None:
    """Check the sum, and that it is the same bits on all ranks."""
    inputs = [values(dtype, rank, COUNT, seed) for rank in range(world.size)]
    mine = inputs[world.rank].clone()
    dist.all_reduce(mine, operator(op))
    expect_equal(mine, reduced(inputs, op), op)
    copies = world.comm.allgather(mine.view(torch.uint8).tolist())
    assert copies.count(copies[0]) == world.size


def all_reduce_async(world: World, dtype: torch.dtype, op: ReduceOp.RedOpType, seed: int) -> None:
    """Check the asynchronous call."""
    inputs = [values(dtype, rank, COUNT, seed) for rank in range(world.size)]
    mine = inputs[world.rank].clone()
    dist.all_reduce(mine, operator(op), async_op=True).wait()
    expect_equal(mine, reduced(inputs, op), op)


def reduce(world: World, dtype: torch.dtype, op: ReduceOp.RedOpType, seed: int) -> None:
    """Check the root's tensor, and that the others keep theirs."""
    root = seed % world.size
    inputs = [values(dtype, rank, COUNT, seed) for rank in range(world.size)]
    mine = inputs[world.rank].clone()
    dist.reduce(mine, root, operator(op))
    if world.rank == root:
        expect_equal(mine, reduced(inputs, op), op)
    else:
        expect_equal(mine, inputs[world.rank])


def reduce_scatter(world: World, dtype: torch.dtype, op: ReduceOp.RedOpType, seed: int) -> None:
    """Check this rank's part, and that the inputs are kept."""
    inputs = [_rows(world.size, dtype, rank, seed) for rank in range(world.size)]
    mine = [row.clone() for row in inputs[world.rank]]
    output = torch.empty(COUNT, dtype=dtype)
    dist.reduce_scatter(output, mine, operator(op))
    expect_equal(output, reduced([row[world.rank] for row in inputs], op), op)
    for kept, given in zip(mine, inputs[world.rank], strict=True):
        expect_equal(kept, given)


def reduce_scatter_single(
    world: World, dtype: torch.dtype, op: ReduceOp.RedOpType, seed: int
) -> None:
    """Check this rank's part, and that the input is kept."""
    inputs = [torch.stack(_rows(world.size, dtype, rank, seed)) for rank in range(world.size)]
    mine = inputs[world.rank].clone()
    output = torch.empty(COUNT, dtype=dtype)
    dist.reduce_scatter_tensor(output, mine, operator(op))
    expect_equal(output, reduced([row[world.rank] for row in inputs], op), op)
    expect_equal(mine, inputs[world.rank])


VERBS = [all_reduce, all_reduce_async, reduce, reduce_scatter, reduce_scatter_single]


@pytest.mark.parametrize("dtype", ADDABLE, ids=str)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_operator(world: World, verb: Verb, dtype: torch.dtype) -> None:
    """An operator that the dtype has gives what a wide computation gives."""
    for seed, op in enumerate(supported(dtype)):
        if _refused_by_torch(verb, dtype, op):
            continue
        try:
            verb(world, dtype, op, seed)
        except Exception as error:
            error.add_note(f"operator {op.name}")
            raise


@pytest.mark.parametrize("dtype", [*ADDABLE, *MOVABLE_ONLY, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_what_is_not_supported_is_refused_by_name(
    world: World, verb: Verb, dtype: torch.dtype
) -> None:
    """Any other operator raises TypeError on every rank and leaves the tensor alone."""
    known = supported(dtype) if dtype in ADDABLE else []
    for op in (op for op in OPS if op not in known):
        if _refused_by_torch(verb, dtype, op):
            continue
        name = op.name if known else str(dtype)
        source = dtype if known else torch.float32
        tensor = values(source, world.rank, world.size).to(dtype)
        before = tensor.clone()
        with pytest.raises(TypeError, match=name):
            _call(verb, world, tensor, op)
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    dist.barrier()


def test_integers_wrap_around(world: World) -> None:
    """A sum that overflows wraps, as torch's own does."""
    mine = torch.full((3,), 100, dtype=torch.uint8)
    dist.all_reduce(mine)
    assert mine.tolist() == [(100 * world.size) % 256] * 3


def test_whole_averages_are_cut_towards_zero(world: World) -> None:
    """-7 / 2 is -3, for every integer dtype the same."""
    mine = torch.tensor([-7 if world.rank == 0 else 0, 7 if world.rank == 0 else 0])
    dist.all_reduce(mine, ReduceOp.AVG)
    assert mine.tolist() == [-(7 // world.size), 7 // world.size]


def test_halves_are_rounded_once(world: World) -> None:
    """256 + 1 + 1 + 1 in bfloat16 is 256 if every partial sum is rounded."""
    mine = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(mine)
    expected = torch.tensor([255.0 + world.size], dtype=torch.float32).bfloat16()
    assert torch.equal(mine, expected)


def test_premul_sum_by_a_tensor(world: World) -> None:
    """The factor may be a tensor."""
    mine = torch.full((3,), 2.0)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(torch.tensor([0.25])))
    assert mine.tolist() == [0.5 * world.size] * 3


def _refused_by_torch(verb: Verb, dtype: torch.dtype, op: ReduceOp.RedOpType) -> bool:
    """Say whether torch's own all_reduce refuses this before any backend is asked."""
    linear = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    return verb in (all_reduce, all_reduce_async) and dtype.is_complex and op not in linear


def _rows(size: int, dtype: torch.dtype, rank: int, seed: int) -> list[torch.Tensor]:
    return [values(dtype, rank, COUNT, 100 + seed * size + row) for row in range(size)]


def _call(verb: Verb, world: World, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> None:
    how = operator(op)
    parts = [tensor[i : i + 1] for i in range(world.size)]
    match verb.__name__:
        case "all_reduce":
            dist.all_reduce(tensor, how)
        case "all_reduce_async":
            work = dist.all_reduce(tensor, how, async_op=True)
            assert work is not None
            work.wait()
        case "reduce":
            dist.reduce(tensor, 0, how)
        case "reduce_scatter":
            dist.reduce_scatter(parts[0].clone(), parts, how)
        case _:
            dist.reduce_scatter_tensor(parts[0].clone(), tensor, how)
