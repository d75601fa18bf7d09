"""N ranks on uneven batches take the step that one rank takes on the joined batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import split
from lockstep import World
from lockstep.allreduce import ALGORITHMS
from lockstep.batchnorm import synchronous_batchnorm
from lockstep.sgd import SynchronousSGD, divergence, synchronous
from training import (
    batch,
    by_backward,
    by_loss,
    by_pieces,
    distance,
    network,
    share_of,
)

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True},
]
WAYS = [by_backward, by_loss, by_pieces]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "shared", "hierarchical", "uneven nodes"])
def test_equals_one_process(
    world: World, algorithm: str, settings: dict, dtype: torch.dtype, limit: float
) -> None:
    """20 steps, in each way to step, from different weights on the ranks."""
    if algorithm == "uneven nodes":
        algorithm, world = "hierarchical", split(world, [world.size - 1, 1][world.size == 1 :])
    elif algorithm == "hierarchical":
        world = split(world, [1] * world.size)
    for way in WAYS:
        reference, model = network(dtype), network(dtype)
        optimizer = torch.optim.SGD(reference.parameters(), **settings)
        if world.rank:
            for parameter in model.parameters():
                parameter.data.normal_()
        sgd = SynchronousSGD(model, world, allreduce=algorithm, bucket_bytes=1000, **settings)
        for step in range(20):
            x, y = batch(step, dtype)
            optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            optimizer.step()
            sgd.zero_grad()
            way(model, sgd, *share_of(world, step, (x, y)))
        assert distance(model, reference) < limit
        assert divergence(model, world) == 0.0


def test_equals_ddp(world: World) -> None:
    """Even batches, over the same backend."""
    model, other = network(), DistributedDataParallel(network())
    sgd = SynchronousSGD(model, world, lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        x, y = batch(100 * step + world.rank)
        sgd.zero_grad()
        by_backward(model, sgd, x, y)
        optimizer.zero_grad()
        F.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert distance(model, other.module) < 1e-12


@pytest.mark.parametrize("algorithm", ["mpi", "shared"])
def test_any_optimizer(world: World, algorithm: str) -> None:
    """Adam on the ranks is Adam on the joined batch."""
    reference, model = network(), network()
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2)
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    together = synchronous(inner, world, model=model, max_norm=0.5, allreduce=algorithm)
    for step in range(20):
        x, y = batch(step)
        adam.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        adam.step()
        together.zero_grad()
        x, y = share_of(world, step, (x, y))
        if len(x):
            together.backward(F.cross_entropy(model(x), y), examples=len(x))
        together.step(examples=None if len(x) else 0)
    assert distance(model, reference) < 1e-9
    assert divergence(model, world) == 0.0
    together.close()


@pytest.mark.limit(120)
def test_no_divergence_after_many_steps(world: World) -> None:
    """500 steps in float32."""
    model = network(torch.float32)
    sgd = SynchronousSGD(model, world, lr=0.05, momentum=0.9, allreduce="ring")
    for step in range(500):
        sgd.zero_grad()
        by_backward(model, sgd, *share_of(world, step, batch(step, torch.float32)))
    assert divergence(model, world) == 0.0


def test_unused_parameters_count_as_zeros(world: World) -> None:
    """A layer that only rank 0 uses gets its gradient, divided by all examples."""
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "odd": nn.Linear(3, 1)}).double()
    sgd = SynchronousSGD(model, world, lr=1.0)
    before = model["odd"].bias.detach().clone()
    out = model["used"](torch.ones(2, 3).double()).mean()
    if world.rank == 0:
        out = out + model["odd"](torch.ones(2, 3).double()).mean()
    sgd.backward(out, examples=2)
    sgd.step()
    moved = (before - model["odd"].bias.detach()).item()
    assert abs(moved - 1.0 / world.size) < 1e-12
    assert divergence(model, world) == 0.0


def test_nan_on_one_rank_is_seen_by_all(world: World) -> None:
    """In the gradient and in the norm."""
    model = network()
    sgd = SynchronousSGD(model, world, lr=0.1, max_norm=1.0)
    x, y = batch(0)
    x = x * float("nan") if world.rank == world.size - 1 else x
    sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    sgd.step()
    assert all(p.isnan().all() for p in model.parameters())


def test_divergence_is_measured(world: World) -> None:
    """A difference in one number on one rank, and a NaN on one rank."""
    model = network()
    assert divergence(model, world) == 0.0
    last = world.rank == world.size - 1
    if last:
        with torch.no_grad():
            model[0].bias[2] += 0.25
    expected = 0.25 if world.size > 1 else 0.0
    assert abs(divergence(model, world) - expected) < 1e-12
    if last:
        with torch.no_grad():
            model[0].bias[2] = float("nan")
    assert divergence(model, world) == (float("inf") if world.size > 1 else 0.0)


def test_schedules_state_and_views(world: World) -> None:
    """A learning rate schedule works, a state goes through a dict, gradients stay views."""
    model, again = network(), network()
    sgd = SynchronousSGD(model, world, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    other = SynchronousSGD(again, world, lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            again.load_state_dict(model.state_dict())
            other.load_state_dict(sgd.state_dict())
        for net, optimizer in ((model, sgd), (again, other)):
            net.zero_grad(set_to_none=True)  # the caller's habit must not lose the views
            optimizer.zero_grad()
            by_backward(net, optimizer, *share_of(world, step, batch(step)))
        if step < 2:
            schedule.step()
    assert sgd.param_groups[0]["lr"] == 0.025
    assert distance(again, model) == 0.0
    buffers = {
        p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
    }
    assert len(buffers) == 1


def test_says_what_is_missing(world: World) -> None:
    """No examples, two steps without zero_grad, two backwards, wrong numbers."""
    model = network()
    sgd = SynchronousSGD(model, world, lr=0.1)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="how many examples"):
        sgd.step()
    sgd.step(examples=len(x))
    with pytest.raises(ValueError, match="zero_grad"):
        sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    sgd.zero_grad()
    sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    with pytest.raises(ValueError, match="accumulate"):
        sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    sgd.step()
    for wrong in ({"lr": -1.0}, {"lr": 0.1, "nesterov": True}, {"lr": float("nan")}):
        with pytest.raises(ValueError, match="needed"):
            SynchronousSGD(model, world, **wrong)


def test_buffers_come_from_the_root(world: World) -> None:
    """BatchNorm statistics after a step are those of rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    sgd = SynchronousSGD(model, world, lr=0.1)
    x, y = batch(world.rank)
    sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    mean = model[1].running_mean.clone()
    dist.broadcast(mean, 0)
    sgd.step()
    assert torch.equal(model[1].running_mean, mean)
    assert divergence(model, world) == 0.0


def test_synchronous_batchnorm(world: World) -> None:
    """Uneven batches, normalised as the joined one: output, statistics, the step."""

    def model() -> nn.Sequential:
        torch.manual_seed(5)
        layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)]
        return nn.Sequential(*layers).double()

    reference, mine = model(), synchronous_batchnorm(model())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    sgd = SynchronousSGD(mine, world, lr=0.1)
    sizes = [3 + rank for rank in range(world.size)]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(sizes), 2, 6, 6, generator=generator, dtype=torch.float64) * 3 + 1
        y = torch.randint(0, 4, (sum(sizes),), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        sgd.zero_grad()
        part, labels = x.split(sizes)[world.rank], y.split(sizes)[world.rank]
        sgd.backward(F.cross_entropy(mine(part), labels), examples=len(part))
        sgd.step()
    assert distance(mine, reference) < 1e-10
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(mine[1], name), getattr(reference[1], name), rtol=1e-10)
    mine.eval(), reference.eval()
    assert torch.allclose(mine(x), reference(x), rtol=1e-9)


def test_a_batch_may_be_thrown_away(world: World) -> None:
    """zero_grad() between backward() and step() waits for sums that have begun."""
    reference, model = network(), network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    sgd = SynchronousSGD(model, world, lr=0.1, bucket_bytes=1)
    for step in range(10):
        for number in (2 * step, 2 * step + 1):  # the first of the two is thrown away
            x, y = batch(number)
            optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            sgd.zero_grad()
            sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
        optimizer.step()
        sgd.step()
    assert distance(model, reference) < 1e-12
    sgd.close()


def test_gradients_lie_in_shared_memory(world: World) -> None:
    """Where all ranks of a node share it, the other ranks see what one writes; views stay views."""
    model = network()
    sgd = SynchronousSGD(model, split(world, [world.size]), lr=0.1, allreduce="shared")
    assert sgd.gradients.reducer.name == "shared"
    buffer = sgd.gradients.flats[0].buffer
    windows = sgd.gradients.reducer.memory.windows(buffer)  # type: ignore[attr-defined]
    assert windows[world.rank].data_ptr() == buffer.data_ptr()
    buffer.fill_(world.rank + 1.0)
    world.comm.Barrier()
    assert [float(window[-1]) for window in windows] == [r + 1.0 for r in range(world.size)]
    world.comm.Barrier()
    last = next(model.parameters())
    assert last.grad is not None
    assert float(last.grad.reshape(-1)[0]) == world.rank + 1.0
    sgd.close()


@pytest.mark.parametrize("how", ["bf16", "powersgd:2", "topk:0.1"])
def test_compressed_sums_go_on_after_a_state(world: World, how: str) -> None:
    """The residuals are part of the state: a run that is broken off equals one that is not."""
    model, again = network(torch.float32), network(torch.float32)
    sgd = SynchronousSGD(model, world, lr=0.1, momentum=0.9, compress=how, bucket_bytes=1000)
    other = SynchronousSGD(again, world, lr=0.1, momentum=0.9, compress=how, bucket_bytes=1000)
    for step in range(10):
        if step == 5:
            again.load_state_dict(model.state_dict())
            other.load_state_dict(sgd.state_dict())
        for net, optimizer in ((model, sgd), (again, other)):
            if net is model or step >= 5:
                optimizer.zero_grad()
                by_backward(net, optimizer, *share_of(world, step, batch(step, torch.float32)))
    assert distance(again, model) == 0.0
    assert divergence(model, world) == 0.0
    sgd.close()
    other.close()
