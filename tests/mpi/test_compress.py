"""Compressed sums: nothing is lost, all ranks get the same bits, and why the memory is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep import World
from lockstep.compress import NAMES, Compression, ddp_hook, make
from lockstep.sgd import divergence

SHAPES = [torch.Size([17, 23]), torch.Size([17]), torch.Size([6, 5, 3, 3]), torch.Size([])]
COUNT = sum(shape.numel() for shape in SHAPES)
WAYS = ("bf16", "fp16", "powersgd", "powersgd:1", "topk", "topk:0.2")


@pytest.fixture(scope="module", params=["mpi", "gloo"])
def group(request: pytest.FixtureRequest) -> Any:
    """Return a group of all ranks over one backend."""
    if not dist.is_initialized():
        dist.init_process_group("mpi")
    return dist.new_group(backend=request.param)


def gradients(world: World, steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return gradients of a rank, of very different size, another one in each step."""
    generator = torch.Generator().manual_seed(100 + world.rank)
    scale = 10.0 ** torch.linspace(-4, 2, COUNT)
    for _ in range(steps):
        yield (torch.randn(COUNT, generator=generator) * scale).to(dtype)


def total_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks in float64."""
    total = tensor.to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total


def same_everywhere(tensor: torch.Tensor) -> bool:
    """Compare the bits of all ranks."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(e.view(torch.uint8), tensor.view(torch.uint8)) for e in everyone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost(world: World, group: Any, way: str, dtype: torch.dtype) -> None:
    """What all steps have given and what all ranks keep add up to the sum of the gradients."""
    piece = torch.empty(COUNT, dtype=dtype)
    compressor = make(way, [(piece, SHAPES)], group)
    given = torch.zeros(COUNT, dtype=torch.float64)
    wanted = torch.zeros(COUNT, dtype=torch.float64)
    for gradient in gradients(world, 5, dtype):
        wanted += total_of(gradient)
        piece.copy_(gradient)
        assert compressor.begin(8) == 8 * world.size
        compressor.reduce(0)
        assert same_everywhere(piece)
        given += piece.to(torch.float64)
    kept = total_of(compressor.kept(0)) * 8 * world.size
    if way in ("bf16", "fp16"):
        # The rank that sums a part keeps what was rounded on its way back, too.
        back = compressor.state_dict()["tensors"][1]
        parts = [torch.empty_like(back) for _ in range(world.size)]
        dist.all_gather(parts, back)
        kept += torch.cat(parts)[:COUNT].to(torch.float64) * 8 * world.size
    assert kept.abs().max() > 0, "nothing was left out: the test proves nothing"
    tolerance = 1e-5 if dtype is torch.float32 else 1e-13
    torch.testing.assert_close(given + kept, wanted, rtol=tolerance, atol=tolerance * 100)


@pytest.mark.parametrize("way", WAYS)
def test_fewer_bytes(world: World, way: str) -> None:
    """Than a ring sends in float32."""
    piece = torch.ones(64 * 96)
    compressor = make(way, [(piece, [torch.Size([64, 96])])], None)
    compressor.begin(1)
    compressor.reduce(0)
    plain = 2 * piece.nbytes * (world.size - 1) / world.size
    most = {"bf16": 0.51, "fp16": 0.51, "topk": 0.03, "topk:0.2": 0.7}.get(way, 0.15)
    # What a rank of top-k sends grows with their number.
    most *= world.size / 2 if way.startswith("topk") else 1
    assert compressor.sent <= most * plain
    assert compressor.sent > 0 or world.size == 1


def test_the_length_of_a_step_does_not_count(world: World) -> None:
    """What a long batch left out is a share of its mean, not of its sum."""
    piece = torch.tensor([100.0, 1.0]) * 50
    compressor = make("topk:0.5", [(piece, [torch.Size([2])])], None)
    compressor.begin(50)
    compressor.reduce(0)
    assert piece.tolist() == [5000.0 * world.size, 0.0]
    piece.copy_(torch.tensor([0.0, 1.0]))
    compressor.begin(1)
    compressor.reduce(0)
    # Of the mean: 1 of this batch, and 1 of the one before.
    torch.testing.assert_close(piece / world.size, torch.tensor([0.0, 2.0]))


def test_a_step_without_data_changes_nothing(world: World) -> None:
    """Nobody has examples."""
    piece = torch.tensor([3.0, 1.0])
    compressor = make("topk:0.5", [(piece, [torch.Size([2])])], None)
    compressor.begin(1)
    compressor.reduce(0)
    before = [tensor.clone() for tensor in compressor.state_dict()["tensors"]]
    assert any(tensor.any() for tensor in before)
    piece.zero_()
    assert compressor.begin(0) == 0
    compressor.reduce(0)
    assert not piece.any()
    assert all(map(torch.equal, before, compressor.state_dict()["tensors"]))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_is_seen_and_not_kept(world: World, way: str) -> None:
    """A NaN on one rank reaches all, and is gone in the next step."""
    piece = torch.ones(COUNT)
    compressor = make(way, [(piece, SHAPES)], None)
    if world.rank == world.size - 1:
        piece[7] = float("nan")
    compressor.begin(1)
    compressor.reduce(0)
    assert piece[:391].isnan().any()
    assert same_everywhere(piece)
    for _ in range(2):
        piece.fill_(1.0)
        compressor.begin(1)
        compressor.reduce(0)
        assert piece.isfinite().all()


@pytest.mark.parametrize("way", ["fp16", "bf16"])
def test_what_is_too_large_comes_later(world: World, way: str) -> None:
    """float16 ends at 65504: the rest of a larger number follows, no infinity."""
    large = 1e5
    piece = torch.tensor([large])
    compressor = make(way, [(piece, [torch.Size([1])])], None)
    arrived = torch.zeros(())
    for step in range(2 * world.size + 2):
        piece.fill_(large if step == 0 else 0.0)
        compressor.begin(1)
        compressor.reduce(0)
        assert piece.isfinite()
        arrived += piece[0] / world.size
    torch.testing.assert_close(arrived, torch.tensor(large), rtol=1e-6, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feedback", [True, False])
def test_why_the_memory_is_needed(world: World, feedback: bool) -> None:
    """A convex problem whose largest gradients cancel: without memory top-k never gets past them.

    Rank r pulls the first weight to its own side, and all others to 1. The optimum has ones there.
    """
    goal = torch.ones(8)
    goal[0] = 10.0 * (-1) ** world.rank
    weights, piece = torch.zeros(8), torch.zeros(8)
    compression = Compression("topk", 1 / 8, feedback)
    compressor = make(compression, [(piece, [torch.Size([8])])], None)
    for _ in range(3000):
        piece.copy_(weights - goal)
        compressor.begin(1)
        compressor.reduce(0)
        weights -= 0.01 / world.size * piece
    distance = (weights[1:] - 1).abs().max().item()
    if feedback:
        assert distance < 0.1
    else:
        assert distance == 1.0
    assert same_everywhere(weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_state_goes_on_to_the_bit(world: World, way: str) -> None:
    """Two steps, a state taken and given to another one, two steps."""
    pieces = [torch.empty(COUNT), torch.empty(COUNT)]
    one, other = (make(way, [(piece, SHAPES)], None) for piece in pieces)
    for step, gradient in enumerate(gradients(world, 4, torch.float32)):
        if step == 2:
            state = one.state_dict()
            other.load_state_dict({**state, "tensors": [t.clone() for t in state["tensors"]]})
        for piece, compressor in zip(pieces, (one, other), strict=True):
            piece.copy_(gradient)
            compressor.begin(1)
            compressor.reduce(0)
        if step >= 2:
            assert torch.equal(*pieces)


@pytest.mark.ranks(2)
def test_refuses_the_state_of_another_rank(world: World) -> None:
    """Each rank keeps what is its own."""
    compressor = make("topk", [(torch.zeros(COUNT), SHAPES)], None)
    state = compressor.state_dict()
    state["rank"] = (world.rank + 1) % world.size
    with pytest.raises(ValueError, match="save the state of each rank"):
        compressor.load_state_dict(state)
    with pytest.raises(ValueError, match="save the state of each rank"):
        make("bf16", [(torch.zeros(COUNT), SHAPES)], None).load_state_dict(compressor.state_dict())


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize("way", NAMES)
def test_hooks_of_ddp(world: World, way: str, backend: str) -> None:
    """A model learns over each hook, and all ranks hold the same."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    group = dist.new_group(backend=backend)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    ddp.register_comm_hook(*ddp_hook(f"{way}:0.1" if way == "topk" else way, group))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(64, 12, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    losses = []
    for _ in range(60):
        sgd.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    assert divergence(model, world) == 0.0
    assert losses[-1] < 0.7 * losses[0]
