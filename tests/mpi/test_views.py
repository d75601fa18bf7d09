"""Tensors that are not one plain block of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lockstep import World
from lockstep.mpi_backend import collectives
from lockstep.mpi_backend.buffers import check

# Each makes a view of 6 numbers in the shape (2, 3) out of fresh memory.
LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: torch.zeros(2, 3, dtype=dtype),
    "transposed": lambda dtype: torch.zeros(3, 2, dtype=dtype).t(),
    "strided": lambda dtype: torch.zeros(4, 9, dtype=dtype)[::2, 1::3],
    "offset": lambda dtype: torch.zeros(17, dtype=dtype)[5:11].view(2, 3),
    "permuted": lambda dtype: torch.zeros(3, 1, 2, dtype=dtype).permute(1, 2, 0)[0],
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
NUMBERS = torch.arange(6).view(2, 3)


def filled(layout: str, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a view in a layout with the numbers of a rank."""
    view = LAYOUTS[layout](dtype)
    view.copy_(NUMBERS + 10 * rank)
    return view


def expected_sum(size: int) -> torch.Tensor:
    """Return the sum of the numbers of all ranks."""
    return NUMBERS * size + 10 * sum(range(size))


@LAYOUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reductions(world: World, layout: str, dtype: torch.dtype) -> None:
    """The result lands in the view itself, at the root and everywhere."""
    mine = filled(layout, world.rank, dtype)
    dist.all_reduce(mine)
    assert torch.equal(mine, expected_sum(world.size).to(dtype))
    mine = filled(layout, world.rank, dtype)
    dist.reduce(mine, 0)
    expected = expected_sum(world.size) if world.rank == 0 else NUMBERS + 10 * world.rank
    assert torch.equal(mine, expected.to(dtype))


@LAYOUT
def test_memory_between_a_views_numbers_is_left_alone(world: World, layout: str) -> None:
    """What lies between the elements of a strided view keeps its value."""
    whole = torch.full((4, 9), -1.0)
    view = whole[::2, 1::3]
    view.copy_(filled(layout, world.rank))
    dist.all_reduce(view)
    assert torch.equal(view, expected_sum(world.size).float())
    assert int((whole == -1.0).sum()) == 36 - 6


@LAYOUT
def test_moves(world: World, layout: str) -> None:
    """Broadcast, gathers and scatter read and write views."""
    mine = filled(layout, world.rank)
    dist.broadcast(mine, world.size - 1)
    assert torch.equal(mine, (NUMBERS + 10.0 * (world.size - 1)))
    mine = filled(layout, world.rank)
    parts = [filled(layout, 99) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    for rank, part in enumerate(parts):
        assert torch.equal(part, NUMBERS + 10.0 * rank)
    back = filled(layout, 99)
    dist.scatter(back, parts if world.rank == 0 else None, src=0)
    assert torch.equal(back, mine)
    outputs = [filled(layout, 99) for _ in range(world.size)]
    dist.all_to_all(outputs, [filled(layout, world.rank) for _ in range(world.size)])
    for rank, output in enumerate(outputs):
        assert torch.equal(output, NUMBERS + 10.0 * rank)
    output = filled(layout, 99)
    dist.reduce_scatter(output, [filled(layout, world.rank) for _ in range(world.size)])
    assert torch.equal(output, expected_sum(world.size).float())


def test_single_tensors(world: World) -> None:
    """all_gather_single and its kin read and write transposed tensors in their logical order."""
    n = world.size
    mine = filled("transposed", world.rank)
    whole = torch.zeros(3, 2 * n).t()
    dist.all_gather_single(whole, mine)
    expected = torch.cat([NUMBERS + 10.0 * rank for rank in range(n)])
    assert torch.equal(whole, expected)
    part = torch.zeros(3, 2).t()
    dist.reduce_scatter_single(part, whole)
    assert torch.equal(part, (NUMBERS + 10.0 * world.rank) * n)
    out = torch.zeros(3, 2 * n).t()
    dist.all_to_all_single(out, whole)
    assert torch.equal(out, (NUMBERS + 10.0 * world.rank).repeat(n, 1))


def test_gather_into_the_own_part(world: World) -> None:
    """The input of all_gather_single may be this rank's part of the output."""
    whole = torch.zeros(world.size, 4)
    whole[world.rank] = world.rank + 1.0
    dist.all_gather_single(whole, whole[world.rank])
    assert whole[:, 0].tolist() == [r + 1.0 for r in range(world.size)]


def test_overlapping_input_and_output(world: World) -> None:
    """The input may overlap the output elsewhere too: it is read first."""
    whole = torch.zeros(world.size * 4)
    part = whole[:4]
    part.fill_(world.rank + 1.0)
    dist.all_gather_single(whole, part)
    assert whole.view(world.size, 4)[:, 0].tolist() == [r + 1.0 for r in range(world.size)]


def test_no_dimensions_and_no_elements(world: World) -> None:
    """0-d tensors hold one number; empty tensors are fine in every verb."""
    scalar = torch.tensor(world.rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(1, world.size + 1))
    dist.broadcast(scalar, 0)
    parts = [torch.tensor(0.0) for _ in range(world.size)]
    dist.all_gather(parts, torch.tensor(float(world.rank)))
    assert [p.item() for p in parts] == list(range(world.size))
    empty = torch.empty(0, 3)
    none = [torch.empty(0, 3) for _ in range(world.size)]
    dist.all_reduce(empty)
    dist.reduce(empty, 0)
    dist.broadcast(empty, 0)
    dist.all_gather(none, empty)
    dist.all_gather_single(torch.empty(0), torch.empty(0))
    dist.gather(empty, none if world.rank == 0 else None, dst=0)
    dist.scatter(empty, none if world.rank == 0 else None, src=0)
    dist.reduce_scatter(empty, none)
    dist.all_to_all(none, [torch.empty(0, 3) for _ in range(world.size)])
    assert empty.shape == (0, 3)


def test_expanded_input(world: World) -> None:
    """An expanded tensor is one number many times."""
    mine = torch.tensor([float(world.rank)]).expand(4)
    parts = [torch.empty(4) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    assert [p.tolist() for p in parts] == [[float(r)] * 4 for r in range(world.size)]


def test_requires_grad(world: World) -> None:
    """Leaf tensors that require grad, as parameters do, are written in place."""
    parameter = torch.nn.Parameter(torch.full((3,), float(world.rank)))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [float(sum(range(world.size)))] * 3
    dist.broadcast(parameter.data, 0)
    parts = [torch.empty(3) for _ in range(world.size)]
    dist.all_gather(parts, parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_conjugate_and_negative_views(world: World) -> None:
    """A conjugate view travels as its numbers, not as its memory; so does a negative one.

    The plans are called directly: of most of these torch gives a backend a resolved copy only.
    """
    base = torch.tensor([1 + 2j, 3 - 1j]) * (world.rank + 1)
    factor = sum(range(1, world.size + 1))
    add = dist.ReduceOp(dist.ReduceOp.SUM)
    conjugate = base.clone().conj()
    assert conjugate.is_conj()
    collectives.all_reduce(world.comm, [conjugate], add).move()
    assert torch.equal(conjugate.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * factor)
    parts = [torch.empty(2, dtype=torch.complex64).conj() for _ in range(world.size)]
    collectives.all_gather(world.comm, parts, base.conj()).move()
    expected = torch.tensor([1 - 2j, 3 + 1j]) * world.size
    assert torch.equal(parts[-1].resolve_conj(), expected)
    negative = base.conj().imag
    assert negative.is_neg()
    collectives.all_reduce(world.comm, [negative], add).move()
    assert torch.equal(negative.resolve_neg(), torch.tensor([-2.0, 1.0]) * factor)


def test_negative_view_as_an_input(world: World) -> None:
    """Through torch as well."""
    mine = torch.tensor([1j * (world.rank + 1)]).conj().imag
    assert mine.is_neg()
    parts = [torch.zeros(1) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    assert [part.item() for part in parts] == [-1.0 - rank for rank in range(world.size)]


def test_sparse_sum(world: World) -> None:
    """Each rank has other entries; one is shared by all."""
    indices = torch.tensor([[0, world.rank + 1], [0, 0]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 5.0]), (world.size + 1, 2))
    dist.all_reduce(mine)
    dense = torch.zeros(world.size + 1, 2)
    dense[0, 0] = world.size
    dense[1:, 0] = 5.0
    assert torch.equal(mine.to_dense(), dense)


def test_sparse_sum_of_different_lengths(world: World) -> None:
    """Rank r has r entries; rank 0 none."""
    rank = world.rank
    mine = torch.sparse_coo_tensor(
        torch.arange(rank).view(1, rank), torch.ones(rank, 2, dtype=torch.float64), (4, 2)
    )
    dist.all_reduce(mine)
    counts = [sum(1 for r in range(world.size) if r > row) for row in range(4)]
    assert mine.to_dense()[:, 1].tolist() == [float(c) for c in counts]


def test_wrong_devices_and_layouts_are_refused(world: World) -> None:
    """Tensors that MPI cannot reach are refused by name, on all ranks.

    torch itself stops most of these on the way to a backend, so the checks are called directly.
    """
    with pytest.raises(TypeError, match=r"device meta\n.*needed.*CPU"):
        check([torch.empty(2, device="meta")])
    with pytest.raises(TypeError, match="sparse_csr"):
        check([torch.eye(2).to_sparse_csr()])
    with pytest.raises(TypeError, match=r"MAX.* sparse"):
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="sparse_coo"):
        collectives.broadcast(world.comm, [torch.eye(2).to_sparse()], 0)
    dist.barrier()
