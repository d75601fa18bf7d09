"""The verbs that move data unchanged: every dtype, every root, lists and single tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers import wait
from lockstep import World
from reference import ADDABLE, MOVABLE_ONLY, values

DTYPES = [*ADDABLE, *MOVABLE_ONLY]
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def of(rank: int, dtype: torch.dtype = torch.float32, count: int = 5) -> torch.Tensor:
    """Return the tensor of a rank."""
    source = torch.float32 if dtype in MOVABLE_ONLY else dtype
    return values(source, rank, count, seed=7).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the bytes are equal, for dtypes that torch cannot compare as well."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(world: World, dtype: torch.dtype, asynchronous: bool) -> None:
    """Every rank as the root."""
    for root in range(world.size):
        tensor = of(world.rank, dtype)
        wait(dist.broadcast(tensor, root, async_op=asynchronous))
        same(tensor, of(root, dtype))


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather(world: World, dtype: torch.dtype, asynchronous: bool) -> None:
    """Into a list, and into one tensor, both flat and stacked."""
    mine = of(world.rank, dtype)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    wait(dist.all_gather(parts, mine, async_op=asynchronous))
    for rank, part in enumerate(parts):
        same(part, of(rank, dtype))
    for shape in ((world.size * 5,), (world.size, 5)):
        whole = torch.empty(shape, dtype=dtype)
        wait(dist.all_gather_into_tensor(whole, mine, async_op=asynchronous))
        for rank, row in enumerate(whole.view(world.size, 5)):
            same(row, of(rank, dtype))


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_scatter(world: World, dtype: torch.dtype, asynchronous: bool) -> None:
    """Every rank as the root; what it gathered it scatters again."""
    for root in range(world.size):
        at_root = world.rank == root
        mine = of(world.rank, dtype)
        parts = [torch.empty_like(mine) for _ in range(world.size)] if at_root else None
        wait(dist.gather(mine, parts, dst=root, async_op=asynchronous))
        for rank, part in enumerate(parts or []):
            same(part, of(rank, dtype))
        back = torch.empty_like(mine)
        wait(dist.scatter(back, parts, src=root, async_op=asynchronous))
        same(back, mine)


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all(world: World, dtype: torch.dtype, asynchronous: bool) -> None:
    """Lists of tensors, one for each pair, and one tensor in equal parts."""
    n = world.size
    inputs = [of(world.rank * n + to, dtype) for to in range(n)]
    outputs = [torch.empty_like(inputs[0]) for _ in range(n)]
    wait(dist.all_to_all(outputs, inputs, async_op=asynchronous))
    for source, output in enumerate(outputs):
        same(output, of(source * n + world.rank, dtype))
    whole = torch.empty(n, 5, dtype=dtype)
    packed = torch.empty(n, 5, dtype=dtype)
    for row, given in zip(packed, inputs, strict=True):
        row.copy_(given)
    wait(dist.all_to_all_single(whole, packed, async_op=asynchronous))
    for row, output in zip(whole, outputs, strict=True):
        same(row, output)


@MODES
def test_all_to_all_of_uneven_parts(world: World, asynchronous: bool) -> None:
    """Rank r sends (r + s) % 3 rows of width 2 to rank s: some pairs exchange nothing."""
    n, me = world.size, world.rank
    given = [(me + to) % 3 for to in range(n)]
    taken = [(source + me) % 3 for source in range(n)]
    rows = [torch.full((given[to], 2), 10.0 * me + to) for to in range(n)]
    expected = [torch.full((taken[source], 2), 10.0 * source + me) for source in range(n)]
    output = torch.full((sum(taken), 2), -1.0)
    wait(dist.all_to_all_single(output, torch.cat(rows), taken, given, async_op=asynchronous))
    assert torch.equal(output, torch.cat(expected))
    outputs = [torch.empty_like(part) for part in expected]
    wait(dist.all_to_all(outputs, rows, async_op=asynchronous))
    for found, part in zip(outputs, expected, strict=True):
        assert torch.equal(found, part)


def test_all_to_all_of_nothing(world: World) -> None:
    """All splits zero; and all rows to one rank."""
    zeros = [0] * world.size
    dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3), zeros, zeros)
    given = [4 if to == 0 else 0 for to in range(world.size)]
    taken = [4 if world.rank == 0 else 0] * world.size
    output = torch.zeros(sum(taken))
    dist.all_to_all_single(output, torch.full((4,), float(world.rank)), taken, given)
    if world.rank == 0:
        assert output.tolist() == [float(r) for r in range(world.size) for _ in range(4)]


def test_coalesced_gathers_and_reductions(world: World) -> None:
    """Several tensors at once, through the coalescing manager of torch."""
    with dist._coalescing_manager(async_ops=True) as manager:
        sums = [torch.full((3,), float(world.rank + i)) for i in range(4)]
        for tensor in sums:
            dist.all_reduce(tensor)
    manager.wait()
    total = sum(range(world.size))
    assert [t[0].item() for t in sums] == [total + i * world.size for i in range(4)]
    outputs = [torch.empty(world.size * 2, dtype=torch.int64) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.tensor([world.rank, i]))
    manager.wait()
    for i, output in enumerate(outputs):
        assert output.tolist() == [x for rank in range(world.size) for x in (rank, i)]
    parts = [torch.empty(2) for _ in range(3)]
    with dist._coalescing_manager():
        for i, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, torch.full((2 * world.size,), float(i)))
    assert [p.tolist() for p in parts] == [[float(i * world.size)] * 2 for i in range(3)]


def test_coalesced_lists(world: World) -> None:
    """all_reduce_coalesced, and all_gather_coalesced with tensors of different shapes."""
    mine = [torch.full((2,), float(world.rank)), torch.full((2, 3), world.rank + 1.0)]
    outputs = [[torch.empty_like(tensor) for tensor in mine] for _ in range(world.size)]
    dist.all_gather_coalesced(outputs, mine)
    for rank, row in enumerate(outputs):
        assert torch.equal(row[0], torch.full((2,), float(rank)))
        assert torch.equal(row[1], torch.full((2, 3), rank + 1.0))
    dist.all_reduce_coalesced(mine)
    assert mine[0][0].item() == sum(range(world.size))
    assert mine[1][0, 0].item() == sum(range(world.size)) + world.size


def test_objects(world: World) -> None:
    """Objects of different lengths, gathered, broadcast and scattered."""
    mine = {"rank": world.rank, "text": "x" * (100 * world.rank)}
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, mine)
    assert [one["rank"] for one in everyone] == list(range(world.size))
    assert [len(one["text"]) for one in everyone] == [100 * r for r in range(world.size)]
    last = world.size - 1
    at_last: list | None = [None] * world.size if world.rank == last else None
    dist.gather_object(mine, at_last, dst=last)
    assert at_last is None or at_last == everyone
    box = [mine if world.rank == last else None]
    dist.broadcast_object_list(box, src=last)
    assert box[0] == everyone[last]
    dist.scatter_object_list(box, everyone if world.rank == last else None, src=last)
    assert box[0] == mine


@pytest.mark.ranks(2)
def test_objects_point_to_point(world: World) -> None:
    """Objects along the ring."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    box: list = [None]
    if world.rank == 0:
        dist.send_object_list([("token", 0)], dst=after)
        dist.recv_object_list(box, src=before)
    else:
        dist.recv_object_list(box, src=before)
        dist.send_object_list([("token", world.rank)], dst=after)
    assert box[0] == ("token", before)


@MODES
def test_barrier(world: World, asynchronous: bool) -> None:
    """Nobody leaves before the last has come: each rank in turn is last, told by a message."""
    for last in range(world.size):
        if world.rank == last:
            notes = [world.comm.isend(last, other) for other in range(world.size) if other != last]
            wait(dist.barrier(async_op=asynchronous))
            for note in notes:
                note.wait()
        else:
            wait(dist.barrier(async_op=asynchronous))
            # The note was sent before the last rank came, so it must be here already.
            assert world.comm.recv(source=last) == last
